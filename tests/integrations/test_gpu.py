"""Optimizers and scaler on a real GPU: the reference's bits, no synchronization, few launches, streams, CUDA graphs.

Imports nothing but pytest and torch, so that they run on a machine that has only these.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import devices
import layouts
import pytest
import torch
from devices import WHERE, assert_same_bits, interpreted, kernels_on, normal, patterns, placed
from layouts import BF16, FP16, FP32
from tolerances import MUON_ACROSS_DEVICES

import halfstep
from halfstep.integrations.offload import OffloadedMuon

pytestmark = [pytest.mark.sample(6), pytest.mark.filterwarnings("ignore:group 0 rounds moments of 8 bits to nearest")]

SIZES = (1, 15, 16, 17, 0, 1000, 2048, 4097)
OFFSETS = (0, 1, 0, 3, 0, 1, 0, 8)
# Some have moments of 8 bits: rows of whole and of short blocks, several chunks per row, several rows per chunk.
MATRICES = ((40, 128), (17,), (32, 144), (63, 65), (5, 0), (3, 2500), (4096, 1), (9, 2048))
LAYOUTS: layouts.Layouts = {
    **layouts.LAYOUTS,
    "fp32 amsgrad": (FP32, {"amsgrad": True}),
    "split amsgrad maximize": (BF16, {"amsgrad": True, "maximize": True}),
    "split, bf16, nearest": (BF16, {"state_dtype": BF16}),
    "split, 8 bits, nearest": (BF16, {"state_dtype": "8bit", "rounding": "nearest"}),
    "none, nearest": (BF16, {"master_weights": None}),
    "none, large seed": (BF16, {"master_weights": None, "rounding": "stochastic", "seed": 2**40 + 7}),
    "fp32 amsgrad, 8 bits, nearest": (FP32, {"state_dtype": "8bit", "rounding": "nearest", "amsgrad": True}),
    "fp16 amsgrad, 8 bits": (FP16, {"state_dtype": "8bit", "amsgrad": True, "seed": 2**40 + 7}),
}

gpu = pytest.mark.gpu
kinds = pytest.mark.parametrize("kind", ["AdamW", "Muon"])


def model(
    dtype: torch.dtype, device: torch.device, shapes: Any = SIZES, offsets: tuple[int, ...] = OFFSETS
) -> list[torch.nn.Parameter]:
    """Parameters of odd sizes, some at misaligned addresses; the same values on every device."""
    shapes = [(shape,) if isinstance(shape, int) else shape for shape in shapes]
    return [
        torch.nn.Parameter(placed((normal(math.prod(shape), dtype, seed) * 0.1).view(shape), device, offset))
        for seed, (shape, offset) in enumerate(zip(shapes, offsets, strict=True))
    ]


def shapes_of(options: dict[str, Any]) -> Any:
    return MATRICES if options.get("state_dtype") == "8bit" else SIZES


def give(parameters: list[torch.nn.Parameter], step: int, scale: float = 1.0, special: bool = False) -> None:
    """Gradients of one step, the same on every device, at a misaligned address every other step."""
    for index, parameter in enumerate(parameters):
        make = patterns if special else normal
        values = make(parameter.numel(), parameter.dtype, 1000 * step + index)
        values = values if special else values * scale
        parameter.grad = placed(values.view(parameter.shape), parameter.device, step % 2)


def assert_same_training(mine: Any, theirs: Any) -> None:
    """The same parameters and optimizer state, bit for bit."""
    for index, (a, b) in enumerate(zip(mine.param_groups[0]["params"], theirs.param_groups[0]["params"], strict=True)):
        assert_same_bits(a, b, f"parameter {index}")
    left, right = mine.state_dict()["state"], theirs.state_dict()["state"]
    for index in right:
        for key in right[index]:
            assert_same_bits(left[index][key], right[index][key], f"state {key!r} of parameter {index}")


def amp_step(optimizer: Any, scaler: Any) -> None:
    scaler.step(optimizer)
    scaler.update()


def amp(
    parameters: list[torch.nn.Parameter], name: str = "cuda", kind: str = "AdamW", **options: Any
) -> tuple[Any, Any]:
    """An optimizer that clips and a scaler that has been used."""
    optimizer = getattr(halfstep, kind)(parameters, lr=1e-2, max_grad_norm=1.0, **options)
    scaler = halfstep.GradScaler(name, init_scale=1024.0, growth_interval=2)
    scaler.scale(torch.zeros((), device=name))
    return optimizer, scaler


# ------------------------------------------------------------------------------------------------------ the same bits


@pytest.mark.parametrize("special", [False, True], ids=["normal", "all patterns"])
@pytest.mark.parametrize("kind", ["AdamW", "Adam"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("where", WHERE)
def test_steps_have_the_bits_of_the_reference(where: str, layout: str, kind: str, special: bool) -> None:
    if (devices.MODELED or interpreted(where)) and layout not in ("split", "split, 8 bits"):
        pytest.skip("two layouts are enough for the test itself; test_golden.py has every one")
    if interpreted(where) and (layout != "split" or special or kind == "Adam"):
        pytest.skip("slow under the interpreter")
    dtype, options = LAYOUTS[layout]
    make = getattr(halfstep, kind)
    with kernels_on(where) as device:
        mine = make(model(dtype, device, shapes_of(options)), lr=1e-2, weight_decay=0.1, **options)
        for step in range(3):
            give(mine.param_groups[0]["params"], step, special=special and step == 1)
            mine.step()
    with halfstep.backend("reference"):
        theirs = make(model(dtype, torch.device("cpu"), shapes_of(options)), lr=1e-2, weight_decay=0.1, **options)
        for step in range(3):
            give(theirs.param_groups[0]["params"], step, special=special and step == 1)
            theirs.step()
    assert_same_training(mine, theirs)


@pytest.mark.parametrize("layout", ["fp32", "split", "fp16"])
@pytest.mark.parametrize("where", WHERE)
def test_amp_steps_with_overflows_and_clipping_have_the_bits_of_the_reference(where: str, layout: str) -> None:
    if (devices.MODELED or interpreted(where)) and layout != "fp16":
        pytest.skip("one layout is enough for the test itself")
    dtype, options = LAYOUTS[layout]

    def run(device: torch.device) -> tuple[Any, Any]:
        optimizer, scaler = amp(model(dtype, device), device.type, **options)
        for step in range(6):
            parameters = optimizer.param_groups[0]["params"]
            give(parameters, step, scale=64.0)
            if step in (1, 4):
                parameters[5].grad[7] = torch.inf if step == 1 else torch.nan
            amp_step(optimizer, scaler)
        return optimizer, scaler

    with kernels_on(where) as device:
        mine, my_scaler = run(device)
    with halfstep.backend("reference"):
        theirs, their_scaler = run(torch.device("cpu"))
    assert_same_training(mine, theirs)
    assert my_scaler.state_dict() == their_scaler.state_dict()
    assert int(theirs.state_dict()["state"][0]["step"]) == 4
    assert_same_bits(mine.grad_norm, theirs.grad_norm)


@gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_large_tensor_has_the_bits_of_the_reference(layout: str) -> None:
    dtype, options = LAYOUTS[layout]

    columns = 70 if devices.MODELED else 4099

    def run(device: torch.device) -> Any:
        optimizer = halfstep.AdamW(model(dtype, device, ((1025, columns),), (0,)), lr=1e-2, **options)
        for step in range(2):
            give(optimizer.param_groups[0]["params"], 2 * step)
            optimizer.step()
        return optimizer

    mine = run(torch.device("cuda"))
    with halfstep.backend("reference"):
        assert_same_training(mine, run(torch.device("cpu")))


@pytest.mark.gpu(only="the model has no room for 2^31 elements")
def test_more_elements_than_an_int32_counts() -> None:
    """The last elements of a tensor of 2^31 and some must step as they do alone."""
    if torch.cuda.mem_get_info()[0] < 60 * 2**30:
        pytest.skip("needs 60 GiB of free GPU memory")
    size, kept = 2**31 + 17, 100
    values, grads = normal(kept, BF16), normal(kept, BF16, 1)
    large = torch.nn.Parameter(torch.zeros(size, dtype=BF16, device="cuda"))
    large.grad = torch.zeros_like(large)
    with torch.no_grad():
        large[-kept:], large.grad[-kept:] = values.cuda(), grads.cuda()
    small = torch.nn.Parameter(values.cuda())
    small.grad = grads.cuda()
    for parameter in (large, small):
        halfstep.AdamW([parameter], lr=1e-2).step()
    assert_same_bits(large[-kept:], small)
    assert not large[:-kept:1_000_003].any()


@gpu
@pytest.mark.parametrize("state", [FP32, BF16, "8bit"])
def test_momentum_of_muon_has_the_bits_of_the_reference(state: Any) -> None:
    """Products have other bits on a GPU, but the momentum does not depend on them, and weights hardly differ."""
    shapes = [(300, 500), (17, 33), (64, 64), (500, 96)]

    def train(device: torch.device) -> tuple[Any, list[torch.nn.Parameter]]:
        parameters = model(BF16, device, shapes, (0, 1, 0, 3))
        optimizer, scaler = amp(parameters, device.type, "Muon", state_dtype=state)
        for step in range(4):
            give(parameters, step, 1024.0)
            if step == 2:
                parameters[1].grad[0, 0] = torch.inf  # type: ignore[index]
            amp_step(optimizer, scaler)
        return optimizer, parameters

    (mine, parameters), (again, _) = (train(torch.device("cuda")) for _ in range(2))
    assert_same_training(mine, again)
    with halfstep.backend("reference"):
        theirs, expected = train(torch.device("cpu"))
    left, right = mine.state_dict()["state"], theirs.state_dict()["state"]
    for index, (parameter, other) in enumerate(zip(parameters, expected, strict=True)):
        for key in right[index]:
            if "momentum" in key or key == "step":
                assert_same_bits(left[index][key], right[index][key], f"{key} of parameter {index}")
        update = 3 * 1e-2 * min(parameter.shape) ** 0.5
        assert (mine.masters()[parameter].cpu() - theirs.masters()[other]).norm() < MUON_ACROSS_DEVICES * update


@gpu
@pytest.mark.parametrize("state", [FP32, "8bit"])
def test_offloaded_muon_has_the_bits_of_muon_on_the_gpu(state: Any) -> None:
    """Products are on the GPU, and those of a bucket run while the host steps another."""
    trained = []
    for cls, options in ((halfstep.Muon, {}), (OffloadedMuon, {"bucket_bytes": 2**16})):
        parameters = model(BF16, torch.device("cuda"), [(300, 500), (17, 33), (64, 64), (500, 96)], (0, 1, 0, 3))
        optimizer = cls(parameters, lr=1e-2, state_dtype=state, max_grad_norm=100.0, **options)
        for step in range(4):
            give(parameters, step)
            optimizer.step()
            optimizer.zero_grad()
        trained.append(optimizer)
    assert_same_training(*trained)


# ----------------------------------------------------------------------------------------------------------- the host


def _settled(kind: str = "AdamW", count: int = 8) -> tuple[Any, Any, list[torch.nn.Parameter]]:
    """An AMP pair after a few steps, its kernels compiled; gradients stay where they are."""
    parameters = model(BF16, torch.device("cuda"), ((20, 50),) * count, (0,) * count)
    optimizer, scaler = amp(parameters, kind=kind)
    give(parameters, 0)
    for _ in range(3):
        amp_step(optimizer, scaler)
    torch.cuda.synchronize()
    return optimizer, scaler, parameters


@gpu
@kinds
@pytest.mark.parametrize("moved", [False, True])
def test_an_amp_step_waits_for_nothing(moved: bool, kind: str) -> None:
    optimizer, scaler, parameters = _settled(kind)
    fresh = [torch.randn_like(parameter) for parameter in parameters]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(4):
            if step == 2:
                parameters[1].grad.fill_(torch.inf)  # type: ignore[union-attr]
            if moved:
                for parameter, grad in zip(parameters, fresh, strict=True):
                    parameter.grad = grad.clone()
            amp_step(optimizer, scaler)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _launches(call: Callable[[], object]) -> list[str]:
    """Names of the kernels and copies that a call launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.gpu(only="the profiler does not see the model")
def test_launches_do_not_grow_with_the_tensors() -> None:
    names = {}
    for count in (2, 300):
        optimizer, scaler, _ = _settled(count=count)
        names[count] = _launches(partial(amp_step, optimizer, scaler))
    assert names[2] == names[300]
    ours = [name for name in names[2] if any(kernel in name for kernel in ("adam", "prepare", "check", "finish"))]
    assert 1 <= len(ours) <= 5, names[2]


@pytest.mark.gpu(only="the model does not have the statistics of torch's allocator")
@kinds
def test_steps_ask_for_no_more_memory(kind: str) -> None:
    optimizer, scaler, _ = _settled(kind)
    before = torch.cuda.memory_stats()
    for _ in range(5):
        amp_step(optimizer, scaler)
    after = torch.cuda.memory_stats()
    for key in ("segment.all.allocated", "allocated_bytes.all.current"):
        assert after[key] == before[key], key
    # What a step takes for a moment is scalars and one sum per chunk, whatever the size of the tensors.
    torch.cuda.reset_peak_memory_stats()
    amp_step(optimizer, scaler)
    assert torch.cuda.max_memory_allocated() - after["allocated_bytes.all.current"] < 2**16


@gpu
@kinds
def test_a_step_on_a_side_stream_sees_gradients_made_there(kind: str) -> None:
    results = []
    for stream in (None, torch.cuda.Stream()):
        optimizer, scaler, parameters = _settled(kind)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for parameter in parameters:
                parameter.grad.mul_(-3.0)  # type: ignore[union-attr]
            amp_step(optimizer, scaler)
        torch.cuda.synchronize()
        results.append(optimizer)
    assert_same_training(*results)


@gpu
@kinds
def test_gradients_that_move_while_the_device_is_behind(kind: str) -> None:
    """Addresses go through pinned memory: each step must use its own, however far ahead the host is."""

    def run(behind: bool) -> Any:
        optimizer, scaler, parameters = _settled(kind)
        sets = [
            [normal(1000, BF16, 50 * step + at).view(20, 50).cuda() for at in range(len(parameters))]
            for step in range(10)
        ]
        torch.cuda.synchronize()
        if behind:
            torch.cuda._sleep(200_000_000)
        for grads in sets:
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            amp_step(optimizer, scaler)
            if not behind:
                torch.cuda.synchronize()
        return optimizer

    assert_same_training(run(behind=True), run(behind=False))


@gpu
@kinds
def test_a_captured_amp_step_replays_the_bits_of_eager_ones(kind: str) -> None:
    """One graph holds check, norm, clip, update and scale; it is replayed over gradients with overflows among them."""
    shapes = [(size,) for size in SIZES] if kind == "AdamW" else [shape for shape in MATRICES if len(shape) == 2]
    offsets = OFFSETS[: len(shapes)]
    sources = [
        [normal(math.prod(shape), BF16, 100 * step + at).view(shape).cuda() for at, shape in enumerate(shapes)]
        for step in range(6)
    ]
    sources[2][5].view(-1)[7], sources[4][0].view(-1)[0] = torch.inf, torch.nan

    def prepared() -> tuple[Any, Any, list[torch.nn.Parameter]]:
        parameters = model(BF16, torch.device("cuda"), shapes, offsets)
        optimizer, scaler = amp(parameters, kind=kind)
        give(parameters, 0)
        for _ in range(3):
            amp_step(optimizer, scaler)
        return optimizer, scaler, parameters

    eager, eager_scaler, parameters = prepared()
    for grads in sources:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad.copy_(grad)  # type: ignore[union-attr]
        amp_step(eager, eager_scaler)

    graphed, scaler, parameters = prepared()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        amp_step(graphed, scaler)
    for grads in sources:
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad.copy_(grad)  # type: ignore[union-attr]
        graph.replay()
    torch.cuda.synchronize()
    assert_same_training(graphed, eager)
    assert scaler.get_scale() == eager_scaler.get_scale()
    assert int(eager.state_dict()["state"][0]["step"]) == 7


@pytest.mark.gpu(only="the model is one device")
def test_every_device_steps_its_own_parameters() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    parameters = [
        *model(BF16, torch.device("cuda:0"), (1000,), (0,)),
        *model(BF16, torch.device("cuda:1"), (1000,), (0,)),
    ]
    optimizer, scaler = amp(parameters)
    for step in range(3):
        give(parameters, step)
        parameters[1].grad.copy_(parameters[0].grad)  # type: ignore[union-attr,arg-type]
        amp_step(optimizer, scaler)
    assert_same_bits(parameters[0], parameters[1])


# --------------------------------------------------------------------------------------------------- a model learning


@pytest.mark.gpu(only="fp16 products are slow on a CPU")
def test_autocast_training_follows_torchs() -> None:
    """fp16 autocast over fp32 parameters: halfstep's optimizer and scaler against torch's, same model, same data."""
    losses = {}
    for name, optimizer_of, scaler_of in (
        ("halfstep", halfstep.AdamW, halfstep.GradScaler),
        ("torch", torch.optim.AdamW, torch.amp.GradScaler),
    ):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1)).cuda()
        x = torch.randn(512, 64, device="cuda")
        y = x[:, :1] * x[:, 1:2]
        optimizer, scaler = optimizer_of(net.parameters(), lr=3e-3), scaler_of("cuda")
        history = []
        for _ in range(60):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = torch.nn.functional.mse_loss(net(x).float(), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            history.append(loss.detach())
        losses[name] = torch.stack(history).tolist()
    assert losses["halfstep"][-1] < 0.5 * losses["halfstep"][0]
    # fp16 products of weights that differ in their last bits: 2^-11 of the loss, some steps long.
    torch.testing.assert_close(losses["halfstep"], losses["torch"], rtol=0.02, atol=0.0)


@pytest.mark.gpu(only="needs NCCL")
def test_fsdp2_sends_16_bits_over_nccl_with_the_bits_of_its_own_reduction() -> None:
    """One rank, whose sum is its own gradient: the exchange, its buffers and their streams, steps after each other."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from halfstep.integrations.fsdp import keep_reduced_gradients, send_gradients_in_16_bits

    torch.distributed.init_process_group("nccl", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
        results = []
        for ours in (False, True):
            torch.manual_seed(0)
            net = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(6))).cuda()
            for layer in (*net, net):
                fully_shard(layer, mp_policy=policy)
            keep_reduced_gradients(net)
            if ours:
                send_gradients_in_16_bits(net)
            optimizer = halfstep.AdamW(net.parameters(), lr=1e-2)
            x = torch.randn(64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
            for step in range(6):
                net.set_requires_gradient_sync(step % 3 != 0)  # type: ignore[operator]
                net(x + step).square().mean().backward()
                if step % 3:
                    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    net.zero_grad()
            results.append([parameter.to_local().cpu() for parameter in net.parameters()])  # type: ignore[attr-defined]
        for pair in zip(*results, strict=True):
            assert_same_bits(*pair)
    finally:
        torch.distributed.destroy_process_group()
