"""Captured steps, eager steps and streams in any order, on a model of a GPU that runs late (stream_model.py)."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import stream_training
import torch
from stream_model import Model
from stream_training import BF16, FP16, FP32

import halfstep
from halfstep.integrations.release import step_in_backward
from halfstep.kernels.streams import HostCopy
from halfstep.numerics.scaling.stand_ins import gradient_of

pytestmark = pytest.mark.sample(3)

KERNELS = ["native", "triton"]
LR = 0.1


def made(device: torch.device, *values: float, **options: Any) -> tuple[list[torch.nn.Parameter], halfstep.Adam]:
    """Parameters of 5 elements each; Adam moves them by the learning rate in a step, against the gradient's sign."""
    parameters = [torch.nn.Parameter(torch.full((5,), value, device=device)) for value in values]
    optimizer = halfstep.Adam(parameters, lr=LR, betas=(0.0, 0.0), eps=0.0, **options)
    give(parameters, 1.0)
    optimizer.step()
    torch.cuda.synchronize()
    return parameters, optimizer


def give(parameters: list[torch.nn.Parameter], value: float) -> list[torch.Tensor]:
    """New gradients in new memory."""
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, value)
    return [parameter.grad for parameter in parameters]  # type: ignore[misc]


def captured(step: Callable[[], object]) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def moved(parameters: list[torch.nn.Parameter]) -> list[float]:
    """By how many learning rates, from 0."""
    return [round(float(parameter.detach()[0]) / LR, 3) for parameter in parameters]


# ----------------------------------------------------------------------------------------------- graphs and eager steps


def test_a_graph_continues_from_a_loaded_state() -> None:
    with Model("late") as model:
        for kind in (FP32, BF16, FP16):
            parameter = torch.nn.Parameter(torch.zeros(5, dtype=kind, device=model.device))
            optimizer = halfstep.AdamW([parameter], lr=LR)
            give([parameter], 1.0)
            optimizer.step()
            saved = {key: value.clone() for key, value in optimizer.canonical_state_dict()["state"][0].items()}
            groups = optimizer.state_dict()["param_groups"]
            before = optimizer.state[parameter]["exp_avg"]
            graph = captured(optimizer.step)
            for _ in range(3):
                graph.replay()
            optimizer.load_state_dict({"state": {0: saved}, "param_groups": groups})
            assert optimizer.state[parameter]["exp_avg"] is before, "the graph writes there"
            graph.replay()
            assert optimizer.state[parameter]["step"].item() == 2.0
        uncaptured = halfstep.AdamW([parameter], lr=LR)
        optimizer.step()
        uncaptured.load_state_dict({"state": {0: saved}, "param_groups": groups})
        first = uncaptured.state[parameter]["exp_avg"]
        uncaptured.load_state_dict({"state": {0: saved}, "param_groups": groups})
        assert uncaptured.state[parameter]["exp_avg"] is not first


@pytest.mark.parametrize("kernels", KERNELS)
def test_each_replay_reads_a_rate_that_is_a_tensor(kernels: str) -> None:
    with Model("late", kernels=kernels) as model:
        parameters, optimizer = made(model.device, 0.0)
        rate = optimizer.param_groups[0]["lr"] = torch.tensor(5 * LR, device=model.device)
        graph = captured(optimizer.step)
        graph.replay()
        rate.fill_(2 * LR)
        graph.replay()
        assert moved(parameters) == [-1.0 - 5 - 2]


def test_two_captures_of_one_step_do_not_need_each_other() -> None:
    with Model("late") as model:
        parameters, optimizer = made(model.device, 0.0)
        first, second = captured(optimizer.step), captured(optimizer.step)
        second.replay()
        del first
        gc.collect()
        second.replay()
        assert moved(parameters) == [-3.0]


def test_a_first_step_is_not_captured() -> None:
    with Model() as model:
        parameter = torch.nn.Parameter(torch.zeros(5, device=model.device))
        optimizer = halfstep.AdamW([parameter], lr=LR)
        give([parameter], 1.0)
        with pytest.raises(RuntimeError) as raised:
            captured(optimizer.step)
        assert str(raised.value) == (
            "Expected parameter 0 with a gradient (group 0) to have its state before a step is captured in a CUDA "
            "graph, but got none, which each replay would create again: take a step with the same parameters and "
            "options before the capture"
        )
        assert parameter not in optimizer.state
        optimizer.step()
        captured(optimizer.step).replay()
        assert optimizer.state[parameter]["step"].item() == 2.0


def test_full_masters_follow_a_weight_written_before_a_capture() -> None:
    with Model("late") as model:
        parameter = torch.nn.Parameter(torch.zeros(5, dtype=BF16, device=model.device))
        optimizer = halfstep.Adam([parameter], lr=0.25, betas=(0.0, 0.0), eps=0.0, master_weights="full")
        give([parameter], 1.0)
        optimizer.step()
        with torch.no_grad():
            parameter.fill_(8.0)
        graph = captured(optimizer.step)
        graph.replay()
        assert parameter[0].item() == 7.75
        graph.replay()
        optimizer.step()
        assert parameter[0].item() == 7.25


# ------------------------------------------------------------------------------------------------------- nothing waits


def amp_step(scaler: halfstep.GradScaler, optimizer: halfstep.AdamW) -> None:
    scaler.step(optimizer)
    scaler.update()


def settled(model: Model, **options: Any) -> tuple[list[torch.nn.Parameter], halfstep.AdamW, halfstep.GradScaler]:
    """Parameters of several dtypes after a few AMP steps."""
    parameters = [
        torch.nn.Parameter(torch.ones(40 + 7 * index, dtype=dtype, device=model.device))
        for index, dtype in enumerate((FP32, BF16, FP16, BF16))
    ]
    optimizer = halfstep.AdamW(parameters, lr=LR, **options)
    scaler = halfstep.GradScaler("cuda", init_scale=4.0)
    scaler.scale(torch.zeros((), device=model.device))
    for _ in range(2):
        give(parameters, 1.0)
        scaler.unscale_(optimizer)
        amp_step(scaler, optimizer)
        scaler.last_step_skipped()
    torch.cuda.synchronize()
    model.blocking.clear()
    model.pageable.clear()
    return parameters, optimizer, scaler


WAYS: dict[str, tuple[dict[str, Any], Callable[[halfstep.GradScaler, halfstep.AdamW], object]]] = {
    "step": ({}, lambda scaler, optimizer: None),
    "clip in the step": ({"max_grad_norm": 1.0}, lambda scaler, optimizer: None),
    "unscale_": ({}, lambda scaler, optimizer: scaler.unscale_(optimizer)),
    "unscale_ and clip": ({"max_grad_norm": 1.0}, lambda scaler, optimizer: scaler.unscale_(optimizer)),
    "clip_grad_norm_": ({}, lambda scaler, optimizer: scaler.clip_grad_norm_(optimizer, 1.0)),
    "write_back": ({}, lambda scaler, optimizer: setattr(scaler, "_write_back", True)),
    "torch's clip": (
        {},
        lambda scaler, optimizer: (
            scaler.unscale_(optimizer),
            torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0),
        ),
    ),
}


@pytest.mark.parametrize("case", ["same", "moved", "options", "absent"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kernels", KERNELS)
def test_an_amp_step_waits_for_nothing(kernels: str, way: str, case: str) -> None:
    """Nor where gradients come and go: a table that is missing is made without a wait, too."""
    options, call = WAYS[way]
    if kernels == "triton" and (case != "moved" or way not in ("step", "unscale_ and clip")):
        pytest.skip("slow under the interpreter")
    with Model("late", kernels=kernels) as model:
        parameters, optimizer, scaler = settled(model, **options)
        torch.cuda.set_sync_debug_mode("error")
        for step in range(4):
            if case != "same":
                give(parameters, 2.0)
            if case == "options":
                optimizer.param_groups[0]["lr"] *= 0.5
            if case == "absent":
                parameters[step % 4].grad = None
            if step == 2:
                parameters[3].grad.fill_(torch.inf)  # type: ignore[union-attr]
            call(scaler, optimizer)
            amp_step(scaler, optimizer)
            scaler.last_step_skipped()
        torch.cuda.set_sync_debug_mode("default")
        assert (model.blocking, model.pageable) == ([], [])
        assert scaler.get_scale() == (1.0 if case == "same" else 2.0)


def test_only_the_first_scalars_wait() -> None:
    with Model("late") as model:
        parameters, optimizer, scaler = settled(model)
        monitor = halfstep.AmpMonitor(list(zip("abcd", parameters, strict=True)), scaler, every=1).attach(optimizer)
        give(parameters, 4.0)
        amp_step(scaler, optimizer)
        norm = pytest.approx(sum(parameter.numel() for parameter in parameters) ** 0.5)
        first = {"halfstep/scale": 4.0, "halfstep/skipped": 0.0, "halfstep/grad_norm": norm, "halfstep/underflow": 0.0}
        assert monitor.scalars() == first
        model.blocking.clear()
        model.pageable.clear()
        torch.cuda.set_sync_debug_mode("error")
        for value in (4.0, torch.inf, 2.0):
            give(parameters, value)
            amp_step(scaler, optimizer)
            assert monitor.scalars() == first, "nothing has arrived"
        torch.cuda.set_sync_debug_mode("default")
        assert (model.blocking, model.pageable) == ([], [])
        torch.cuda.synchronize()
        assert monitor.scalars() == {**first, "halfstep/scale": 2.0, "halfstep/skipped": 1.0}


def test_copies_under_way_are_few_and_what_has_arrived_stays() -> None:
    with Model("late") as model:
        numbers, copies = torch.ones(3, device=model.device), HostCopy()
        copies.newest(numbers)
        copies.take(numbers)
        torch.cuda.synchronize()
        first = copies.newest(numbers)
        numbers.fill_(2.0)
        for _ in range(9):
            copies.take(numbers)
        assert len(copies._under_way) == HostCopy.SLOTS
        torch.cuda.synchronize()
        last = copies.newest(numbers)
        assert first is not None and last is not None and first.tolist() == [1.0] * 3 and last.tolist() == [2.0] * 3


def test_checks_of_other_optimizers_wait_for_their_flag_only() -> None:
    with Model("late") as model:
        parameters = [torch.nn.Parameter(torch.ones(9, dtype=dtype, device=model.device)) for dtype in (FP32, FP16)]
        parameters.append(torch.nn.Parameter(torch.ones(9, dtype=torch.float64, device=model.device)))
        optimizer = torch.optim.SGD(parameters, lr=LR)
        scaler = halfstep.GradScaler("cuda", init_scale=4.0)
        scaler.scale(torch.zeros((), device=model.device))
        for step in range(4):
            give(parameters, 1.0)
            scaler.step(optimizer)
            scaler.update()
            if step == 1:
                model.blocking.clear()
                model.pageable.clear()
        assert (model.blocking, model.pageable) == (["aten._local_scalar_dense"] * 2, [])


def test_the_host_copy_is_not_read_during_a_capture() -> None:
    with Model("late") as model:
        parameters, optimizer, scaler = settled(model)
        give(parameters, 1.0)
        assert scaler.last_step_skipped() is False

        def step() -> None:
            amp_step(scaler, optimizer)
            assert scaler.last_step_skipped() is False and scaler.skips_known() == 0

        amp_step(scaler, optimizer)  # whose numbers are on their way
        graph = captured(step)
        for parameter in parameters:
            parameter.grad.fill_(torch.inf)  # type: ignore[union-attr]
        graph.replay()
        amp_step(scaler, optimizer)
        torch.cuda.synchronize()
        assert scaler.last_step_skipped() is True and scaler.skips_known() == 2


def test_a_graph_records_overflows_where_eager_checks_do() -> None:
    with Model("late") as model:
        parameters, optimizer, scaler = settled(model)

        graph = captured(partial(amp_step, scaler, optimizer))
        parameters[2].grad.fill_(torch.nan)  # type: ignore[union-attr]
        graph.replay()
        graph.replay()
        (found,) = scaler.overflow_report().parameters
        assert (found.nan_steps, found.first_step, found.last_step) == (2, 3, 4)


def test_a_graph_has_its_own_memory_for_results() -> None:
    """A group that is added has eager checks make longer answers; the graph's must not become others' memory."""
    with Model("late") as model:
        _, optimizer, scaler = settled(model)

        graph = captured(partial(amp_step, scaler, optimizer))
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3, device=model.device))]})
        amp_step(scaler, optimizer)
        others = [torch.full((count,), 7, dtype=torch.int32, device=model.device) for count in (1, 4, 5, 16, 20)] * 3
        graph.replay()
        assert all(bool((one == 7).all()) for one in others)


# ------------------------------------------------------------------------------------------------ random interleavings


def test_any_order_of_captures_replays_steps_and_changes_has_the_bits_of_eager_steps() -> None:
    """`make soak` runs 10,000."""
    for seed in range(12):
        stream_training.run(seed, order="late" if seed % 10 == 9 else "random")


def test_the_interpreter_has_the_same_bits_in_any_order() -> None:
    for seed in range(2):
        stream_training.run(seed, length=7, kernels="triton")


# --------------------------------------------------------------------------------------------- steps in the backward


@pytest.mark.parametrize("first", ["step", "other stream"])
def test_the_step_of_a_bucket_waits_for_gradients_of_two_streams(first: str) -> None:
    """The step waits for both gradients, and the memory of each is reused only after the step."""
    with Model("late") as model:
        parameters, optimizer = made(model.device, 0.0, 0.0)
        handle = step_in_backward(torch.nn.ParameterList(parameters), optimizer, bucket_bytes=21)
        side = torch.cuda.Stream()
        for value, expected in ((1.0, -2.0), (-1.0, -1.0)):
            with torch.cuda.stream(side):
                parameters[0].grad = torch.full((5,), value, device=model.device)
                handle._take(parameters[0])
            parameters[1].grad = torch.full((5,), value, device=model.device)
            handle._take(parameters[1])
            assert all(gradient_of(parameter) is None for parameter in parameters)
            with torch.cuda.stream(side):
                others = [torch.full((5,), 7.0, device=model.device) for _ in range(3)]
                if first == "other stream":
                    assert all(float(other[0]) == 7.0 for other in others)
            assert moved(parameters) == [expected] * 2
            optimizer.step()
        assert handle.buckets == [40]


@pytest.mark.parametrize("first", ["end of the check", "other stream"])
def test_a_check_waits_for_gradients_of_two_streams(first: str) -> None:
    """The sums of a part are added after they were computed, and their memory is reused only afterwards."""
    with Model("late") as model:
        parameters, optimizer = made(model.device, 0.0, 0.0)
        optimizer.max_grad_norm = 1e9
        optimizer.zero_grad()
        handle = step_in_backward(torch.nn.ParameterList(parameters), optimizer, bucket_bytes=1, clipping="exact")
        side = torch.cuda.Stream()
        for value in (2.0, 3.0):
            with handle.check():
                with torch.cuda.stream(side):
                    parameters[0].grad = torch.full((5,), value, device=model.device)
                    handle._take(parameters[0])
                parameters[1].grad = torch.full((5,), 1.0, device=model.device)
                handle._take(parameters[1])
            with torch.cuda.stream(side):
                others = [torch.full((1,), 7.0, dtype=torch.float64, device=model.device) for _ in range(3)]
                if first == "other stream":
                    assert all(float(other[0]) == 7.0 for other in others)
            assert handle._verdict is not None
            assert handle._verdict.sum_of_squares.item() == 5 * (value**2 + 1.0)
