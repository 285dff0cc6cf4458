"""Clipping and loss scaling inside the backward: the bits of a step after it, with the gradients of one bucket."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from errors import error_of, refuses
from layouts import Layouts, some
from release_models import BF16, Net, gradient_bytes, loss_of, made, same

import halfstep
from halfstep.integrations.release import StepInBackward, step_in_backward
from halfstep.integrations.trainers.folding import clip_in_next_step

FP16 = torch.float16
LIMIT = 3.4  # between the norms of the first four steps
LAYOUTS: Layouts = {**some("split", "split24, 8 bits"), "fp32": (torch.float32, {"amsgrad": True})}
Run = tuple[Net, halfstep.AdamW]


def _run(layout: str = "split", limit: float | None = LIMIT) -> Run:
    dtype, options = LAYOUTS[layout]
    net = made(dtype)
    return net, halfstep.AdamW(net.parameters(), lr=0.01, max_grad_norm=limit, **options)


def _clipped_after(layout: str, steps: int) -> tuple[Run, list[float]]:
    net, optimizer = _run(layout)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, step).backward()
        optimizer.step()
        norms.append(_norm(optimizer))
    return (net, optimizer), norms


def _norm(optimizer: halfstep.AdamW) -> float:
    """`grad_norm`, in fp64."""
    assert optimizer.last_verdict is not None
    return optimizer.last_verdict.sum_of_squares.sqrt().item()


def _check_and_step(handle: StepInBackward, run: Run, step: int) -> None:
    with handle.check():
        loss_of(run[0], step).backward()
    loss_of(run[0], step).backward()


def _unclipped_norm(net: Net) -> float:
    return torch.nn.utils.get_total_norm([p.grad.float() for p in net.parameters() if p.grad is not None]).item()


# --------------------------------------------------------------------------------------------------------------- exact


@pytest.mark.parametrize("again", ["kept graph", "computed again"])
@pytest.mark.parametrize("bucket_bytes", [1, 400, 2**20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_exact_clipping_has_the_bits_of_clipping_after_the_backward(layout: str, bucket_bytes: int, again: str) -> None:
    expected, norms = _clipped_after(layout, 4)
    assert min(norms) < LIMIT < max(norms)
    net, optimizer = _run(layout)
    handle = step_in_backward(net, optimizer, bucket_bytes=bucket_bytes, clipping="exact")
    found = []
    for step in range(4):
        weights = [parameter.detach().clone() for parameter in net.parameters()]
        with handle.check():
            loss = loss_of(net, step)
            loss.backward(retain_graph=again == "kept graph")
        assert gradient_bytes(net) == 0 and all(map(torch.equal, weights, net.parameters()))
        (loss if again == "kept graph" else loss_of(net, step)).backward()
        assert gradient_bytes(net) == 0
        found.append(_norm(optimizer))
        optimizer.step()
        assert _norm(optimizer) == found[-1]
    assert found == norms and same((net, optimizer), expected)


@pytest.mark.parametrize("bucket_bytes", [1, 400])
def test_a_check_frees_the_gradients_of_each_bucket(bucket_bytes: int) -> None:
    net, optimizer = _run()
    seen = [0]
    for parameter in net.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _: seen.append(gradient_bytes(net)))
    handle = step_in_backward(net, optimizer, bucket_bytes=bucket_bytes, clipping="exact")
    with handle.check():
        loss_of(net, 1).backward()
    assert max(seen) == max(handle.buckets) and len(handle.buckets) > 2


def test_a_gradient_that_is_not_finite_is_stepped_as_after_the_backward() -> None:
    """Without a scaler nothing is skipped."""
    runs = [_run() for _ in range(2)]
    handle = step_in_backward(*runs[1], clipping="exact")
    for net, _ in runs:
        net.norm.weight.data[3] = float("inf")
    loss_of(runs[0][0], 0).backward()
    runs[0][1].step()
    _check_and_step(handle, runs[1], 0)
    runs[1][1].step()
    assert same(runs[1], runs[0]) and bool(runs[1][0].first.weight.isnan().all())


def test_gradients_that_no_backward_computed_are_clipped_to_their_own_norm() -> None:
    net, optimizer = _run()
    handle = step_in_backward(net, optimizer, clipping="exact")
    _check_and_step(handle, (net, optimizer), 0)
    optimizer.step()
    net.unused.bias.grad = torch.full((3,), 8.0, dtype=BF16)
    optimizer.step()
    assert _norm(optimizer) == (3 * 8.0**2) ** 0.5
    torch.testing.assert_close(optimizer.state[net.unused.bias]["exp_avg"], torch.full((3,), 0.1 * LIMIT / 3**0.5))


def test_a_check_or_a_backward_that_failed_is_repeated() -> None:
    expected, _ = _clipped_after("split", 1)
    net, optimizer = _run()
    handle = step_in_backward(net, optimizer, bucket_bytes=400, clipping="exact")
    with pytest.raises(KeyboardInterrupt), handle.check():
        loss_of(net, 3).backward()
        raise KeyboardInterrupt
    assert "Expected check() before a backward" in error_of(RuntimeError, lambda: loss_of(net, 0).backward())
    optimizer.zero_grad()
    with handle.check():
        loss_of(net, 0).backward()
    fails = net.second.weight.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(net, 0).backward()
    fails.remove()
    optimizer.zero_grad()
    loss_of(net, 0).backward()
    assert same((net, optimizer), expected)


def test_exact_clipping_refuses_misuse() -> None:
    net, optimizer = _run()
    handle = step_in_backward(net, optimizer, clipping="exact")
    before = copy.deepcopy(net.state_dict())

    def empty_check() -> None:
        with handle.check():
            pass

    def refuse_a_backward() -> None:
        text = "with clipping='exact' or a scaler, but got none since the last step: run the backward inside"
        refuses(RuntimeError, text, loss_of(net, 0).backward)

    refuse_a_backward()
    assert all(map(torch.equal, before.values(), net.state_dict().values()))
    refuses(RuntimeError, "but got some of an earlier backward: call zero_grad(), or to accumulate,", empty_check)
    optimizer.zero_grad()
    refuses(RuntimeError, "no parameter of the optimizer got a gradient: call backward() in the context", empty_check)
    refuses(RuntimeError, "call remove() and step after the backward", lambda: handle.accumulate().__enter__())
    _check_and_step(handle, (net, optimizer), 0)
    refuse_a_backward()
    optimizer.zero_grad()
    refuses(RuntimeError, "got None as .grad", optimizer.step)
    refuse_a_backward()
    handle.remove()
    assert optimizer._optimizer_step_pre_hooks == {} and optimizer._optimizer_step_post_hooks == {}


# ------------------------------------------------------------------------------------------------------------ previous


def _steps_by_previous(handle: StepInBackward, run: Run, steps: range) -> list[float]:
    norms = []
    for step in steps:
        loss_of(run[0], step).backward()
        assert gradient_bytes(run[0]) == 0
        run[1].step()
        norms.append(_norm(run[1]))
    return norms


@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_previous_norm_of_equal_gradients_is_the_exact_one(layout: str, bucket_bytes: int) -> None:
    runs = [_run(layout) for _ in range(2)]
    for _, optimizer in runs:
        optimizer.param_groups[0]["lr"] = 0.0  # the same weights, and so the same gradients
    norms = []
    for _ in range(3):
        runs[0][1].zero_grad()
        loss_of(runs[0][0], 1).backward()
        runs[0][1].step()
        norms.append(_norm(runs[0][1]))
    assert norms[0] > LIMIT
    handle = step_in_backward(*runs[1], bucket_bytes=bucket_bytes, clipping="previous")
    assert runs[0][1].last_verdict is not None
    handle.load_state_dict({"sum_of_squares": runs[0][1].last_verdict.sum_of_squares.item()})
    for _ in range(3):
        assert _steps_by_previous(handle, runs[1], range(1, 2)) == norms[:1]
    assert same(runs[1], runs[0])


def test_the_first_step_does_not_clip_and_the_next_takes_its_norm() -> None:
    plain, run = _run(limit=None), _run()
    handle = step_in_backward(*run, bucket_bytes=400, clipping="previous")
    assert handle.state_dict() == {"sum_of_squares": None}
    loss_of(plain[0], 0).backward()
    norm = _unclipped_norm(plain[0])
    plain[1].step()
    found = _steps_by_previous(handle, run, range(1))
    assert same(run, plain) and found == [pytest.approx(norm, rel=1e-6)]
    squares = handle.state_dict()["sum_of_squares"]
    assert squares is not None and squares**0.5 == pytest.approx(found[0], rel=1e-6)
    # The second step clips by the norm of the first.
    net = copy.deepcopy(run[0])
    clips = net, halfstep.AdamW(net.parameters(), lr=0.01)
    clips[1].load_state_dict(copy.deepcopy(run[1].state_dict()))
    loss_of(clips[0], 1).backward()
    for parameter in clips[0].parameters():
        if parameter.grad is not None:
            parameter.grad = (parameter.grad.float() * min(1.0, LIMIT / found[0])).to(BF16)
    clips[1].step()
    _steps_by_previous(handle, run, range(1, 2))
    torch.testing.assert_close(list(run[0].parameters()), list(clips[0].parameters()))


def test_previous_norms_resume_with_the_same_bits() -> None:
    expected = _run()
    handle = step_in_backward(*expected, clipping="previous")
    _steps_by_previous(handle, expected, range(5))
    first = _run()
    handle = step_in_backward(*first, clipping="previous")
    _steps_by_previous(handle, first, range(2))
    fresh = _run()
    fresh[0].load_state_dict(first[0].state_dict())
    fresh[1].load_state_dict(copy.deepcopy(first[1].state_dict()))
    resumed = step_in_backward(*fresh, clipping="previous")
    resumed.load_state_dict(handle.state_dict())
    _steps_by_previous(resumed, fresh, range(2, 5))
    assert same(fresh, expected)
    for state in ({}, {"sum_of_squares": "1"}):
        assert error_of(ValueError, lambda state=state: resumed.load_state_dict(state)) == (
            f"Expected a state with 'sum_of_squares', a float or None, but got {state!r}"
        )
    resumed.load_state_dict({"sum_of_squares": None})
    assert resumed.state_dict() == {"sum_of_squares": None}


def test_the_norm_counts_gradients_that_step_finds() -> None:
    """`sometimes` has a gradient of the first micro-batch only, which no backward steps."""
    run = _run()
    handle = step_in_backward(*run, clipping="previous")
    with handle.accumulate():
        with handle.accumulate():
            pass
        loss_of(run[0], 1).backward()
    loss_of(run[0], 2).backward()
    left = gradient_bytes(run[0])
    run[1].step()
    after = _run()
    loss_of(after[0], 1).backward()
    loss_of(after[0], 2).backward()
    after[1].step()
    assert left > 0 and _norm(run[1]) == _norm(after[1])


# ------------------------------------------------------------------------------------------------------------- scalers


def _scaled(dtype: torch.dtype, limit: float | None) -> tuple[Run, halfstep.GradScaler]:
    net = made(dtype)
    optimizer = halfstep.AdamW(net.parameters(), lr=0.01, max_grad_norm=limit)
    return (net, optimizer), halfstep.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)


@pytest.mark.parametrize("clip", ["no clipping", "by the optimizer", "by the scaler"])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_a_scaler_has_the_bits_of_a_step_after_the_backward(dtype: torch.dtype, clip: str) -> None:
    """Overflows are found before a parameter changes: fp16 gradients overflow until the scale is small enough."""
    limit = LIMIT if clip == "by the optimizer" else None
    (net, optimizer), scaler = _scaled(dtype, limit)
    norms = []
    for step in range(9):
        optimizer.zero_grad()
        scaler.scale(loss_of(net, step)).backward()
        if clip == "by the scaler":
            norms.append(scaler.clip_grad_norm_(optimizer, LIMIT).item())
        scaler.step(optimizer)
        scaler.update()
    report = scaler.overflow_report()
    assert report.steps == 9 and (3 <= report.skipped <= 7 if dtype == FP16 else report.skipped == 0)
    run, other = _scaled(dtype, limit)
    handle = step_in_backward(
        *run, bucket_bytes=400, scaler=other, clipping="exact" if clip == "by the optimizer" else None
    )
    found = []
    for step in range(9):
        with handle.check():
            loss = other.scale(loss_of(run[0], step))
            loss.backward(retain_graph=True)
        if clip == "by the scaler":
            found.append(other.clip_grad_norm_(run[1], LIMIT).item())
        loss.backward()
        assert gradient_bytes(run[0]) == 0
        other.step(run[1])
        other.update()
    assert same(run, (net, optimizer)) and other.state_dict() == scaler.state_dict()
    assert str(found) == str(norms)  # NaN among them
    assert str(other.overflow_report()) == str(report)


def test_a_scaler_that_was_updated_or_has_unscaled_does_not_step() -> None:
    run, scaler = _scaled(FP16, None)
    handle = step_in_backward(*run, scaler=scaler)
    for unscales in (False, True):
        with handle.check():
            scaler.scale(loss_of(run[0], 0)).backward()
        if unscales:
            message = error_of(RuntimeError, lambda: scaler.unscale_(run[1]))
            assert "clip by scaler.clip_grad_norm_" in message
        scaler.update()
        loss = scaler.scale(loss_of(run[0], 0))
        assert "Expected check() before a backward" in error_of(RuntimeError, loss.backward)
        run[1].zero_grad()


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("added", [False, True])
def test_a_parameter_without_a_hook_is_refused_before_anything_changes(scaled: bool, added: bool) -> None:
    """Unfrozen or added after `step_in_backward`, its gradient would be checked by nothing."""
    run: Any
    if scaled:
        run, scaler = _scaled(FP16, None)
        handle = step_in_backward(*run, scaler=scaler)
    else:
        run, scaler = _run(), halfstep.GradScaler("cpu", enabled=False)
        handle = step_in_backward(*run, clipping="exact")
    net, optimizer = run

    def backward() -> None:
        scaler.scale(loss_of(net, 0)).backward()

    def check() -> None:
        with handle.check():
            backward()

    def change() -> None:
        if added:
            net.register_parameter("added", torch.nn.Parameter(torch.ones(3, dtype=net.first.weight.dtype)))
            optimizer.add_param_group({"params": [net.added]})
        else:
            net.frozen.requires_grad_(True)

    check()
    change()  # between the check and the backward that steps
    before = copy.deepcopy(net.state_dict())
    for call in (backward, check, lambda: scaler.step(optimizer)):
        assert "call remove() and step_in_backward again" in error_of(RuntimeError, call)
        optimizer.zero_grad()
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    handle.remove()
    handle = step_in_backward(net, optimizer, **({"scaler": scaler} if scaled else {"clipping": "exact"}))
    if scaled:
        scaler.update()
    check()
    backward()
    scaler.step(optimizer)
    assert scaled or any(not torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_what_a_trainer_clips_and_logs() -> None:
    plain, run = _run(), _run()
    handle = step_in_backward(*run, clipping="previous")
    loss_of(plain[0], 0).backward()
    expected = _unclipped_norm(plain[0])
    loss_of(run[0], 0).backward()
    for max_norm in (LIMIT, LIMIT, float("inf")):
        assert clip_in_next_step(run[1], max_norm).item() == pytest.approx(expected, rel=1e-6)
    assert "disable clipping in the trainer" in error_of(RuntimeError, lambda: clip_in_next_step(run[1], LIMIT / 2))
    run[1].step()
    squares = handle.state_dict()["sum_of_squares"]
    assert squares is not None and squares**0.5 == pytest.approx(expected, rel=1e-6)
    handle.remove()
    run[1].max_grad_norm = None
    step_in_backward(*run)
    loss_of(run[0], 0).backward()
    assert clip_in_next_step(run[1], float("inf")).isnan()
    assert "with max_grad_norm=None" in error_of(RuntimeError, lambda: clip_in_next_step(run[1], 1.0))


# ----------------------------------------------------------------------------------------------------------- the rest


def test_errors_name_the_argument_and_the_remedy() -> None:
    clips, plain = _run(), _run(limit=None)
    scaler, writes = halfstep.GradScaler("cpu"), halfstep.GradScaler("cpu", write_back=True)
    wrapped: Any = SimpleNamespace(optimizer=plain[1], param_groups=plain[1].param_groups)  # as Accelerate's

    def started(run: Any, **options: Any) -> partial[Any]:
        return partial(step_in_backward, *run, **options)

    refuses(ValueError, "to be None, but got 3.4: pass clipping='exact' or 'previous'", started(clips))
    refuses(ValueError, "None, 'exact' or 'previous', but got 'last'", started(clips, clipping="last"))
    refuses(ValueError, "with clipping='previous', but got None", started(plain, clipping="previous"))
    both = started(clips, clipping="previous", scaler=scaler)
    refuses(ValueError, "'exact' with a scaler, but got 'previous': a step that has begun could not be undone", both)
    torchs, disabled = torch.amp.GradScaler("cpu"), halfstep.GradScaler("cpu", enabled=False)
    refuses(TypeError, "an enabled halfstep.GradScaler, but got a GradScaler", started(plain, scaler=torchs))
    refuses(TypeError, "but got a GradScaler that is disabled", started(plain, scaler=disabled))
    refuses(ValueError, "but got True: gradients are freed in the backward", started(plain, scaler=writes))
    refuses(TypeError, "a SimpleNamespace around one", started((plain[0], wrapped), scaler=scaler))
    handle = step_in_backward(*plain)
    refuses(RuntimeError, "but got neither: its steps need no check()", lambda: handle.check().__enter__())
    plain[1].max_grad_norm = 0.5
    before = copy.deepcopy(plain[0].state_dict())
    refuses(RuntimeError, "but got 0.5: call step_in_backward with clipping=", loss_of(plain[0], 0).backward)
    assert all(map(torch.equal, before.values(), plain[0].state_dict().values()))
