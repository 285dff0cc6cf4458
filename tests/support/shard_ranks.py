"""The optimizer on shards of FSDP1 and FSDP2 of two ranks: the bits of one process, and gradients as they were reduced.

For test_cases_on_ranks.py.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from errors import refuses
from states import differences, same_bits
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

import halfstep
from halfstep.integrations.fsdp import keep_reduced_gradients, send_gradients_in_16_bits

WORLD = 2
STEPS = 4
IN_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def model_of(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(0)
    # 7 rows over 2 ranks are uneven; of the last bias rank 1 has nothing; in a flat parameter nothing is aligned.
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)).to(dtype)


def batch(step: int, part: int = 0) -> torch.Tensor:
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(10 * step + part))


def loss(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(inputs.to(dtype)).float().square().mean()


def whole(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def masters(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The unsharded masters by the names of the parameters. Collective."""
    state = optimizer.canonical_state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    return {name: whole(state[number]["master"]) for number, name in enumerate(names)}


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, part: int) -> None:
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch(step, part)).backward()
        optimizer.step()


# -------------------------------------------------------------------------------------------- FSDP2 from end to end


def trained(keep: bool, offload: bool = False, send: bool = False) -> dict[str, torch.Tensor]:
    """The masters after training under FSDP2 with split masters, with another batch on each rank."""
    policy: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    model = fully_shard(model_of(torch.bfloat16), mp_policy=IN_FP32, **policy)
    if keep:
        keep_reduced_gradients(model)
    if send:
        send_gradients_in_16_bits(model)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, dist.get_rank())
    return masters(model, optimizer)


def alone(keep: bool, order: list[int], in_one: bool = False) -> dict[str, torch.Tensor]:
    """The same in one process, with the gradients of all parts added in fp32 in a given order, or in one batch."""
    model = model_of(torch.bfloat16)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for parameter, grad in zip(model.parameters(), gradients(model, step, order, in_one), strict=True):
            parameter.grad_dtype = None  # any
            parameter.grad = grad if keep else grad.bfloat16()
        optimizer.step()
    return masters(model, optimizer)


def gradients(model: torch.nn.Module, step: int, order: list[int], in_one: bool) -> list[torch.Tensor]:
    """The mean of the gradients of all parts, in fp32."""
    if in_one:
        inputs = torch.cat([batch(step, part) for part in order])
        return [grad.float() for grad in torch.autograd.grad(loss(model, inputs), list(model.parameters()))]
    total = [torch.zeros(p.shape) for p in model.parameters()]
    for part in order:
        found = torch.autograd.grad(loss(model, batch(step, part)), list(model.parameters()))
        total = [one + grad.float() for one, grad in zip(total, found, strict=True)]
    return [one / len(order) for one in total]


# --------------------------------------------------------------------------------------------------- reduced gradients


def reduced(kept: bool, backwards: int, offload: bool = False, hybrid: bool = False) -> dict[str, Any]:
    """Unsharded gradients after some backwards, and their dtype. `hybrid`: two replicas instead of two shards."""
    policy: Any = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if offload else {}
    if hybrid:
        policy["mesh"] = DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard"))
    model = model_of(torch.bfloat16)
    fully_shard(model[0], mp_policy=IN_FP32, **policy)  # type: ignore[index]
    fully_shard(model, mp_policy=IN_FP32, **policy)
    if kept:
        keep_reduced_gradients(model)
    for step in range(backwards):
        loss(model, batch(step, dist.get_rank())).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    storages = [grad._local_tensor.untyped_storage() for grad in grads.values()]  # type: ignore[attr-defined]
    return {
        "values": {name: whole(grad).float() for name, grad in grads.items()},
        "dtypes": sorted({str(grad.dtype) for grad in grads.values()}),
        "bytes": sum({one.data_ptr(): one.nbytes() for one in storages}.values()),
    }


def scaled_overflow() -> dict[str, Any]:
    """Three steps, the second with an Inf only in the kept gradient of rank 1."""
    model = fully_shard(model_of(torch.bfloat16), mp_policy=IN_FP32)
    keep_reduced_gradients(model)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2, max_grad_norm=1e-3)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    scales, norms = [], []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss(model, batch(step))).backward()
        if step == 1 and dist.get_rank() == 1:
            next(model.parameters()).grad._local_tensor.view(-1)[0] = float("inf")  # type: ignore[union-attr]
        expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        scaler.step(optimizer)
        norms.append((float(whole(expected)) / scaler.get_scale(), float(optimizer.grad_norm)))  # type: ignore[arg-type]
        scaler.update()
        scales.append(scaler.get_scale())
    return {"scales": scales, "norms": [norms[0], norms[2]]}


# ---------------------------------------------------------------------------------------------------------------- FSDP1


def flat(dtype: torch.dtype, use_orig_params: bool) -> dict[str, Any]:
    """Train FSDP1's flat parameters. Every rank has the same batch, so that the mean is the gradient of one process."""
    model = FullyShardedDataParallel(model_of(dtype), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, batch(step)).backward()
        optimizer.step()
    stepped = [p for p in model.parameters() if p.grad is not None]
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        weights = {name: whole(p) for name, p in model.module.named_parameters()}
    return {
        "misaligned": sum(bool(p.numel()) and p.data_ptr() % 16 != 0 for p in stepped),
        "empty": sum(p.numel() == 0 for p in model.parameters()),
        "weights": weights,
    }


def plain(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    model = model_of(dtype)
    steps(model, halfstep.AdamW(model.parameters(), lr=1e-2), 0)
    return {name: whole(p) for name, p in model.named_parameters()}


# ---------------------------------------------------------------------------------------------------------------- cases


def fsdp2_has_the_bits_of_one_process_that_sums_in_the_same_order(keep: bool) -> None:
    """So all that separates it from one large batch is the order of summation, rounding between the parts included."""
    found = trained(keep)
    assert differences(alone(keep, [0, 1]), found) == []
    in_one = alone(keep, [0, 1], in_one=True)
    # One process in which the parts change places, or whose batch is not divided, is as far away.
    assert all(0 < (value - in_one[name]).abs().max() < STEPS * 1e-2 * 2**-6 for name, value in found.items())


def keeping_changes_the_masters_and_cpu_offload_does_not() -> None:
    expected = trained(True)
    assert len(differences(expected, trained(False))) == 4
    assert differences(expected, trained(True, offload=True)) == []


def kept_gradients_have_only_the_error_of_an_fp32_sum(backwards: int) -> None:
    """Against the exact sum, in fp64, of what each rank found; without keeping, 2^-9 of it is lost."""
    kept, rounded = reduced(True, backwards), reduced(False, backwards)
    model = model_of(torch.bfloat16)
    parts = [
        torch.autograd.grad(loss(model, batch(step, part)), list(model.parameters()))
        for step in range(backwards)
        for part in range(WORLD)
    ]
    lost = 0.0
    assert kept["dtypes"] == ["torch.float32"] and rounded["dtypes"] == ["torch.bfloat16"]
    assert kept["bytes"] == 2 * rounded["bytes"]
    for index, (name, value) in enumerate(kept["values"].items()):
        exact = torch.stack([part[index].double() for part in parts]).sum(0) / WORLD
        size = torch.stack([part[index].double().abs() for part in parts]).sum(0) / WORLD
        assert ((value.double() - exact).abs() <= backwards * 2**-23 * size).all()
        error = (rounded["values"][name].double() - exact).abs()
        assert (error <= backwards * 2**-8 * size).all()
        lost = max(lost, float((error / exact.abs()).max()))
    assert lost > 2**-10, "rounding to bf16 loses something here, so keeping is seen"


def kept_gradients_are_the_same_with_cpu_offload_and_under_hsdp() -> None:
    expected = reduced(True, 1)
    for options in ({"offload": True}, {"hybrid": True}):
        found = reduced(True, 1, **options)
        assert found["dtypes"] == ["torch.float32"] and differences(expected["values"], found["values"]) == []


def accumulated(send: Callable[[torch.nn.Module], None], together: int) -> dict[str, torch.Tensor]:
    """Unsharded gradients of two micro-batches, of which `together` are communicated at once."""
    model = fully_shard(model_of(torch.float32), mp_policy=IN_FP32)
    send(model)
    for step in range(2):
        model.set_requires_gradient_sync(step % together == together - 1)
        loss(model, batch(step, dist.get_rank())).backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def sixteen_bits_are_sent_with_the_bits_of_an_fp32_reduction() -> None:
    """Of two numbers, the order does not matter. Accumulated gradients are sent in fp32, or lose bits if asked to."""
    sent: list[int] = []
    all_to_all = dist.all_to_all_single

    def counted(received: torch.Tensor, tensor: torch.Tensor, **options: Any) -> Any:
        sent.append(tensor.nbytes)
        return all_to_all(received, tensor, **options)

    dist.all_to_all_single = counted
    elements = 4 * 5 * 2 + 4 * 2 + 1 * 7 * 2 + 2  # padded to two ranks
    try:
        for together, length in ((1, 2), (2, 4)):
            expected = accumulated(lambda model: None, together)
            assert sent == []
            assert differences(expected, accumulated(send_gradients_in_16_bits, together)) == []
            assert sum(sent) == (2 // together) * length * elements
            sent.clear()

        def by_eight(model: Any) -> None:
            send_gradients_in_16_bits(model)
            model.set_gradient_divide_factor(8.0)

        eighths = {name: value / 4 for name, value in accumulated(send_gradients_in_16_bits, 1).items()}
        assert differences(eighths, accumulated(by_eight, 1)) == []
        sent.clear()
        rounded = accumulated(partial(send_gradients_in_16_bits, round_accumulated=True), 2)
        assert sum(sent) == 2 * elements and len(differences(expected, rounded)) == 4
        model = model_of(torch.bfloat16)
        parts = [[gradients(model, step, [part], False) for step in range(2)] for part in range(WORLD)]
        for index, value in enumerate(rounded.values()):
            first, second = ((part[0][index] + part[1][index]).bfloat16().float() for part in parts)
            assert same_bits((first + second) / WORLD, value)
    finally:
        dist.all_to_all_single = all_to_all


def sent_gradients_can_be_kept() -> None:
    assert differences(trained(True), trained(True, send=True)) == []
    assert differences(trained(True), trained(True, offload=True, send=True)) == []


def scaler_norm_and_step_see_the_kept_gradients() -> None:
    found = scaled_overflow()
    assert found["scales"] == [8.0, 4.0, 4.0]
    for expected, norm in found["norms"]:
        assert abs(norm - expected) <= 2**-20 * expected  # fp32 summation order


def what_cannot_be_kept_is_refused() -> None:
    in_bf16 = fully_shard(model_of(torch.bfloat16), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    plain = model_of(torch.bfloat16)
    refuses(ValueError, "a module sharded by FSDP2, but got none: ", lambda: keep_reduced_gradients(plain))
    text = "reduce_dtype of module '' to be torch.float32, but got None: shard it with mp_policy=MixedPrecisionPolicy("
    refuses(ValueError, text, lambda: keep_reduced_gradients(in_bf16))

    class Other(FSDPModule):
        def _get_fsdp_state(self) -> Any:
            return type("State", (), {"_fsdp_param_groups": [object()]})()

    model = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    model.named_modules = lambda: [("", object.__new__(Other))]  # type: ignore[assignment]
    text = "whose FSDP2 has no _init_mp_dtypes: do not call keep_reduced_gradients"
    refuses(RuntimeError, text, lambda: keep_reduced_gradients(model))


def an_optimizer_made_before_the_model_was_sharded_says_so_once() -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = halfstep.AdamW(model.parameters(), lr=0.1)
    fully_shard(model, mesh=dist.init_device_mesh("cpu", (WORLD,)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    (said,) = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    assert said.startswith("none of the 2 parameters of this optimizer has a gradient, while DTensors of the same")
    assert said.endswith("it trains nothing; make the optimizer after fully_shard")
    other = halfstep.AdamW(model.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        other.step()
        other.zero_grad()
        other.step()


def fsdp1s_flat_parameters_have_the_bits_of_one_process(dtype: torch.dtype, use_orig_params: bool) -> None:
    found = flat(dtype, use_orig_params)
    assert differences(plain(dtype), found["weights"]) == []
    counts = torch.tensor([found["misaligned"], found["empty"]])
    dist.all_reduce(counts)
    if use_orig_params:  # views into one buffer, wherever it was cut
        assert (counts >= 3).all()


CASES: dict[str, Callable[[], None]] = {
    **{
        f"{function.__name__}, {value}": partial(function, value)
        for function, values in (
            (fsdp2_has_the_bits_of_one_process_that_sums_in_the_same_order, (True, False)),
            (kept_gradients_have_only_the_error_of_an_fp32_sum, (1, 2)),
        )
        for value in values
    },
    **{
        function.__name__: function
        for function in (
            keeping_changes_the_masters_and_cpu_offload_does_not,
            kept_gradients_are_the_same_with_cpu_offload_and_under_hsdp,
            scaler_norm_and_step_see_the_kept_gradients,
            sixteen_bits_are_sent_with_the_bits_of_an_fp32_reduction,
            sent_gradients_can_be_kept,
            what_cannot_be_kept_is_refused,
            an_optimizer_made_before_the_model_was_sharded_says_so_once,
        )
    },
    **{
        f"FSDP1, {dtype}, {'views' if views else 'flat'}": partial(
            fsdp1s_flat_parameters_have_the_bits_of_one_process, dtype, views
        )
        for dtype in (torch.bfloat16, torch.float32)
        for views in (True, False)
    },
}
