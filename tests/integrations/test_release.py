"""Steps inside the backward: the bits of a step after it, and one bucket of gradients at any time."""

import copy
import gc
import pickle
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import interrupts
import pytest
import torch
from errors import error_of, refuses
from layouts import Layouts, some
from release_models import BF16, Net, gradient_bytes, loss_of, made, same
from torch._dynamo.utils import counters
from torch.nn import Embedding, Linear, Module

import halfstep
from halfstep.integrations.buckets import BUCKET_BYTES
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import StepInBackward, step_in_backward
from halfstep.numerics.planning import plan, unit
from halfstep.numerics.scaling.stand_ins import gradient_of

LAYOUTS: Layouts = {
    **some("split", "split24, bf16"),
    "full, amsgrad": (BF16, {"master_weights": "full", "amsgrad": True}),
    "fp32": (torch.float32, {"maximize": True}),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)


def _started(offloads: bool, bucket_bytes: int = BUCKET_BYTES) -> tuple[Net, Any]:
    """A model whose steps are in its backward, on the device or on the host."""
    net = made()
    if offloads:
        return net, OffloadedAdamW(net.parameters(), in_backward="step", bucket_bytes=bucket_bytes)
    optimizer = halfstep.AdamW(net.parameters())
    step_in_backward(net, optimizer, bucket_bytes=bucket_bytes)
    return net, optimizer


both = pytest.mark.parametrize("offloads", [False, True])


def _train(
    layout: str,
    bucket_bytes: int | None,
    steps: int = 5,
    net: Net | None = None,
    optimizer: halfstep.AdamW | None = None,
    first: int = 0,
) -> tuple[Net, halfstep.AdamW]:
    dtype, options = LAYOUTS[layout]
    net = made(dtype) if net is None else net
    optimizer = halfstep.AdamW(net.parameters(), lr=0.01, **options) if optimizer is None else optimizer
    handle = None if bucket_bytes is None else step_in_backward(net, optimizer, bucket_bytes=bucket_bytes)
    for step in range(first, first + steps):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + step)
        optimizer.zero_grad()
        loss_of(net, step).backward()
        if handle is not None:
            assert gradient_bytes(net) == 0
        optimizer.step()
    if handle is not None:
        handle.remove()
    return net, optimizer


@layouts
@pytest.mark.parametrize("bucket_bytes", [1, 400, 2**20])
def test_the_bits_are_those_of_steps_after_the_backward(layout: str, bucket_bytes: int) -> None:
    expected = _train(layout, None)
    assert same(_train(layout, bucket_bytes), expected)
    assert not same(_train(layout, bucket_bytes, steps=4), expected)


def _watch(net: Module, seen: list[int]) -> None:
    """Note the bytes of all gradients whenever one is complete. Must run before the hooks of the step."""
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: seen.append(gradient_bytes(net)))


@pytest.mark.parametrize("bucket_bytes", [1, 400, 2**20])
def test_only_the_gradients_of_one_bucket_exist(bucket_bytes: int) -> None:
    net, seen = made(), [0]
    _watch(net, seen)
    optimizer = halfstep.AdamW(net.parameters())
    handle = step_in_backward(net, optimizer, bucket_bytes=bucket_bytes)
    assert handle.buckets == []
    loss_of(net, 1).backward()
    optimizer.step()
    loss_of(net, 3).backward()
    assert max(seen) == max(handle.buckets)
    shapes = [parameter.shape for parameter in net.parameters() if parameter.requires_grad]
    planned = plan(units=[unit("all", shapes)], step_in_backward=bucket_bytes).part("gradients").bytes
    assert max(seen) <= planned
    if bucket_bytes == 1:
        assert max(seen) == planned
    trained = sum(p.numel() for name, p in net.named_parameters() if "unused" not in name and "frozen" not in name)
    assert sum(handle.buckets) == 2 * trained
    assert (len(handle.buckets) > 2) == (bucket_bytes < 1000)
    # Steps after the backward hold all of them.
    handle.remove()
    loss_of(net, 3).backward()
    assert max(seen) == 2 * trained


def test_a_full_bucket_takes_no_more() -> None:
    net = torch.nn.ParameterList([torch.ones(5) for _ in range(3)])
    handle = step_in_backward(net, halfstep.AdamW(net.parameters()), bucket_bytes=20)
    torch.cat(list(net)).sum().backward()
    assert handle.buckets == [20] * 3


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the machine is on fire")


@pytest.mark.parametrize(
    ("offloads", "bucket_bytes", "cleared"),
    [*((False, size, cleared) for size in (400, 2**20) for cleared in (True, False)), (True, 2**20, True)],
)
def test_after_a_backward_that_failed(offloads: bool, bucket_bytes: int, cleared: bool) -> None:
    net, optimizer = _started(offloads, bucket_bytes)
    loss_of(net, 1).backward()
    optimizer.step()
    # The next batch does not use `sometimes`, whose gradient is complete by then.
    handle = net.second.register_forward_hook(lambda module, given, output: _Fails.apply(output))
    with pytest.raises(RuntimeError, match="on fire"):
        loss_of(net, 3).backward()
    handle.remove()
    assert offloads or gradient_bytes(net) > 0  # of a bucket that was not complete
    if cleared:
        net.zero_grad()
    reference = made()
    reference.load_state_dict(net.state_dict())
    after = halfstep.AdamW(reference.parameters())
    after.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for parameter, copied in zip(net.parameters(), reference.parameters(), strict=True):
        grad = gradient_of(parameter)
        copied.grad = None if grad is None else grad.clone()
    loss_of(net, 4).backward()
    optimizer.step()
    loss_of(reference, 4).backward()
    after.step()
    assert same((net, optimizer), (reference, after))


@both
def test_a_backward_whose_step_was_refused_can_be_repeated(offloads: bool) -> None:
    """Nothing was stepped, so there is no second gradient."""
    weights = []
    for refused in (False, True):
        net, optimizer = _started(offloads)
        loss_of(net, 0).backward()
        optimizer.step()
        if refused:
            optimizer.param_groups[0]["lr"] = "high"
            with pytest.raises((RuntimeError, ValueError), match="high"):
                loss_of(net, 1).backward()
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 1e-3
            optimizer.zero_grad()
        loss_of(net, 1).backward()
        optimizer.step()
        weights.append([parameter.detach().clone() for parameter in net.parameters()])
    assert all(map(torch.equal, *weights))


def test_an_interrupted_step_of_a_bucket_is_done_with_its_gradients_freed_or_not_begun() -> None:
    def given() -> tuple[list[torch.nn.Parameter], halfstep.AdamW]:
        parameters = [torch.nn.Parameter(torch.ones(3, dtype=dtype)) for dtype in (BF16, torch.float32)]
        optimizer = halfstep.AdamW(parameters, lr=0.1)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        return parameters, optimizer

    _, optimizer = given()
    length = interrupts.at_bytecode(0, lambda: optimizer.step_part(0, optimizer.param_groups[0]["params"]))
    ends = []
    for number in (*range(1, length, length // 24), *range(length - 12, length)):
        parameters, optimizer = given()
        interrupts.at_bytecode(number, lambda o=optimizer, p=parameters: o.step_part(0, p))
        stepped = [bool((parameter != 1).all()) for parameter in parameters]
        assert stepped == [parameter.grad is None for parameter in parameters]
        assert len(set(stepped)) == 1
        ends.append(stepped[0])
    assert True in ends and False in ends


def test_what_needs_a_gradient_after_the_backward_raises_an_error() -> None:
    net = made()
    optimizer = halfstep.AdamW(net.parameters(), lr=0.01)
    step_in_backward(net, optimizer)
    others, weight = torch.optim.AdamW(net.parameters()), net.first.weight
    for _ in range(2):  # gradients are not cleared in between
        loss_of(net, 1).backward()
        torch.autograd.grad(loss_of(net, 1), [weight])  # stores nothing
        assert weight.grad is not None
        for call in (  # others are in test_user_loops.py
            lambda: torch.nn.utils.clip_grad_norm_([weight], 1.0),
            lambda: weight.grad.t()[0].zero_(),  # type: ignore[union-attr]
            lambda: weight.grad.tolist(),  # type: ignore[union-attr]
            lambda: torch.zeros(24, 12).copy_(weight.grad),  # type: ignore[arg-type]
            others.step,
        ):
            text = error_of(RuntimeError, call)  # type: ignore[arg-type]
            assert "used and freed" in text and "call step_in_backward with clipping='exact' or 'previous'" in text
        optimizer.step()


@both
def test_a_second_gradient_or_step_raises_with_a_remedy(offloads: bool) -> None:
    """That these are refused is in test_user_loops.py."""
    net, optimizer = _started(offloads, bucket_bytes=1)
    remedy = "use in_backward='copy'" if offloads else "in `with handle.accumulate():`"

    def backward() -> None:
        loss_of(net, 1).backward()

    optimizer.step()  # before the first backward
    backward()
    optimizer.step()
    text = error_of(RuntimeError, optimizer.step)
    assert "before each step(), but got none since the last step()" in text and "call zero_grad()" in text
    net.zero_grad()
    backward()
    assert remedy in error_of(RuntimeError, backward)
    net.zero_grad()
    net.first.weight.grad = torch.ones_like(net.first.weight)
    assert remedy in error_of(RuntimeError, optimizer.step)
    net.zero_grad()
    assert "got None as .grad" in error_of(RuntimeError, optimizer.step).replace("\n", " ")
    optimizer.step()  # nothing is left of that step
    backward()
    optimizer.param_groups[0]["lr"] *= 0.5
    assert "but got other ones: set lr and others before the backward" in error_of(RuntimeError, optimizer.step)
    net.zero_grad()
    backward()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    backward()  # goes on from another step
    net.zero_grad(set_to_none=False)
    assert "got zeros as .grad" in error_of(RuntimeError, optimizer.step)


@both
def test_after_a_backward_that_failed_when_it_had_stepped_a_state_must_be_loaded(offloads: bool) -> None:
    net, optimizer = _started(offloads, bucket_bytes=1)
    expected = made()
    after = halfstep.AdamW(expected.parameters())
    loss_of(expected, 1).backward()
    after.step()
    loss_of(net, 1).backward()
    optimizer.step()
    saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    handle = net.second.register_forward_hook(lambda module, given, output: _Fails.apply(output))
    for again in (False, True):
        net.zero_grad()
        with pytest.raises(RuntimeError, match="got one that failed" if again else "on fire"):
            loss_of(net, 2).backward()
    handle.remove()
    for call in (optimizer.step, lambda: loss_of(net, 3).backward()):
        net.zero_grad()
        text = error_of(RuntimeError, call)
        assert "load model and optimizer from a checkpoint" in text and ("in_backward" in text) is offloads
    torch.autograd.grad(loss_of(net, 3), net.norm.bias)  # stores nothing
    net.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    net.zero_grad()
    assert same((net, optimizer), (expected, after))
    for one, of_one in ((net, optimizer), (expected, after)):
        of_one.zero_grad()
        loss_of(one, 3).backward()
        of_one.step()
    assert same((net, optimizer), (expected, after))


def test_operations_that_read_no_gradient_values_work_after_the_backward() -> None:
    net = made()
    optimizer = halfstep.AdamW(net.parameters(), lr=0.01)
    accelerated: Any = SimpleNamespace(optimizer=optimizer, param_groups=optimizer.param_groups)
    step_in_backward(net, accelerated)
    loss_of(net, 1).backward()
    grad = net.first.weight.grad
    assert grad is not None and grad.detach().dtype == grad.data.dtype == BF16 and grad.t().shape == (12, 24)
    assert repr(grad) == "FreedGradient(shape=(24, 12), dtype=torch.bfloat16, device='cpu')"
    copied = pickle.loads(pickle.dumps(net))
    assert copied.first.weight.grad is None and copy.deepcopy(net).first.weight.grad is None
    net.float()
    net.bfloat16()
    net.zero_grad(set_to_none=False)
    net.requires_grad_(True)
    expected = made()
    others = halfstep.AdamW(expected.parameters(), lr=0.01)
    loss_of(expected, 1).backward()
    others.step()
    assert same((net, optimizer), (expected, others))
    assert net.first.weight.grad is not None
    del optimizer, accelerated
    gc.collect()
    loss_of(net, 1).backward()
    assert gradient_bytes(net) > 0


@both
def test_hooks_are_not_compiled(offloads: bool) -> None:
    """If a compiled function calls the backward."""
    net = made()
    optimizer: Any = halfstep.AdamW(net.parameters())
    if offloads:
        optimizer = OffloadedAdamW(net.parameters())
    else:
        step_in_backward(net, optimizer, bucket_bytes=1)
    torch._dynamo.reset()
    counters.clear()
    torch.compile(torch.Tensor.backward, backend="eager")(loss_of(net, 1))
    # The hooks alone were more than 20 frames per parameter. torch 2.11 compiles some of its own.
    assert counters["frames"]["total"] <= 2 * len(list(net.parameters()))
    assert gradient_bytes(net) == 0 and bool((net.first.weight != made().first.weight).any()) is not offloads


def test_the_handle_and_the_optimizer_die_with_the_model() -> None:
    def dead() -> list[weakref.ref[Any]]:
        net = made()
        optimizer = halfstep.AdamW(net.parameters())
        handle = step_in_backward(net, optimizer)
        loss_of(net, 1).backward()
        return [weakref.ref(one) for one in (net, optimizer, handle)]

    references = dead()
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_on_meta_tensors_and_under_a_default_device() -> None:
    with torch.device("meta"):
        net = Net().to(BF16)
        optimizer = halfstep.AdamW(net.parameters())
        handle = step_in_backward(net, optimizer, bucket_bytes=400)
        net(torch.zeros(4, 6, dtype=torch.int64), True).sum().backward()
    assert gradient_bytes(net) == 0 and len(handle.buckets) > 2
    state = optimizer.state[net.first.weight]
    assert state["exp_avg"].device.type == "meta"


def test_a_sparse_gradient_is_refused() -> None:
    net = Embedding(9, 4, sparse=True)
    step_in_backward(net, halfstep.AdamW(net.parameters()))
    with pytest.raises(RuntimeError, match="to have a dense gradient"):
        net(torch.tensor([1])).sum().backward()


def test_errors_name_the_argument_and_the_remedy() -> None:
    net, half = made(), Linear(2, 2).half()
    optimizer, offloaded = halfstep.AdamW(net.parameters()), OffloadedAdamW(net.parameters())
    torchs: Any = torch.optim.AdamW(net.parameters())
    started = partial(step_in_backward, net, optimizer)
    refuses(TypeError, "OffloadedAdamW: create it with in_backward='step'", lambda: step_in_backward(net, offloaded))
    refuses(TypeError, "a halfstep optimizer, but got a AdamW", lambda: step_in_backward(net, torchs))
    for size in (0, 1.5, True):
        refuses(ValueError, f"an integer of at least 1, but got {size!r}", partial(started, bucket_bytes=size))
    refuses(ValueError, "to be one of model, but it is not", lambda: step_in_backward(net.first, optimizer))
    unscaled = partial(step_in_backward, half, halfstep.AdamW(half.parameters()))
    refuses(TypeError, "but got torch.float16, whose loss must be scaled: pass scaler=, or train in bf16", unscaled)
    handle = started()
    assert isinstance(handle, StepInBackward) and handle.bucket_bytes == BUCKET_BYTES
    refuses(ValueError, "not to step in the backward already: call remove() on the first handle", started)
    handle.remove()
    handle.remove()
    started()
