"""Transfers between CPU and GPU, on a model of a GPU that may run late (stream_model.py).

Each case runs with the work of the GPU executed at once, as late as possible and in random order, and on the CPU alone,
and must have the same bits.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import device_programs
import pytest
import torch
from device_programs import BF16, CPU, OPTIMIZERS, STEPS, WITHOUT_SEED, in_every_order, integers
from stream_model import Model

import halfstep
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.numerics.scaling.decision import Combination

LR = 0.125


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [one.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors]


def number(value: float, device: torch.device) -> torch.Tensor:
    """A number that a GPU computes."""
    return torch.full((), value / 2, device=device) * 2


def pair(gpu: torch.device, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    """Two parameters on each device, with gradients."""
    parameters = []
    for index, device in enumerate((CPU, gpu, CPU, gpu)):
        parameters.append(torch.nn.Parameter(integers((40 + index,), dtype, index, device)))
        parameters[-1].grad = integers((40 + index,), dtype, 10 + index, device)
    return parameters


# ------------------------------------------------------------------------------------------------------------ functions


def flags_of_torchs_scalers(gpu: torch.device, limit: float | None, found_inf: float) -> list[bytes]:
    """A scale and a flag on either device, as torch sets them on optimizers that unscale in their step."""
    results = []
    for device in (CPU, gpu):
        optimizer = halfstep.AdamW(pair(gpu), lr=LR, max_grad_norm=limit)
        optimizer.grad_scale = number(4.0, device)  # type: ignore[attr-defined]
        optimizer.found_inf = number(found_inf, gpu if device == CPU else CPU)  # type: ignore[attr-defined]
        optimizer.step()
        results += optimizer.param_groups[0]["params"]
    return bits(results)


def two_optimizers(gpu: torch.device, on_gpu: bool) -> list[bytes]:
    """One for each device, of which one overflows; torch's own for the CPU."""
    home = gpu if on_gpu else CPU
    scaler = halfstep.GradScaler(home.type, 4.0, growth_interval=1)
    results = list(scaler.scale([number(1.0, home), number(2.0, CPU), (number(3.0, gpu),)])[:2])
    parameters = pair(gpu)
    optimizers = [halfstep.AdamW(parameters[1::2], lr=LR), torch.optim.SGD(parameters[::2], lr=LR)]
    for step in range(3):
        if step == 1:
            parameters[1].grad[3] = torch.inf  # type: ignore[index]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        if step == 1:
            parameters[1].grad[3] = 1.0  # type: ignore[index]
    return bits([*results, *parameters, scaler._scale, scaler.step_skipped])  # type: ignore[list-item]


def monitored(gpu: torch.device) -> list[str]:
    """Counts on both devices, reported, saved and loaded."""
    scaler = halfstep.GradScaler(gpu.type, 8.0)
    scaler.scale(number(0.0, gpu))
    named = [(str(index), parameter) for index, parameter in enumerate(pair(gpu))]
    monitor = halfstep.AmpMonitor(named, scaler, every=1)
    monitor.step()
    other = halfstep.AmpMonitor(named, scaler, every=1)
    other.load_state_dict(monitor.state_dict())
    other.step()
    return [str(one.report().as_dict()) for one in (monitor, other)] + [str(monitor.statistics().as_dict())]


def written_weights(gpu: torch.device) -> list[bytes]:
    parameters = pair(gpu, BF16)
    optimizer = halfstep.AdamW(parameters, lr=LR, master_weights="full")
    optimizer.step()
    for source, target in zip(parameters[1:], parameters, strict=False):
        target.data[:40].copy_(source.data[:40])
    optimizer.refresh_master()
    optimizer.step()
    return bits([*parameters, *optimizer.masters().values()])


def combined_over_ranks(gpu: torch.device, on_gpu: bool) -> list[bytes]:
    """The verdict on parameters of one device, whose ranks communicate through tensors of the other one: NCCL with
    FSDP2's `CPUOffloadPolicy`, and gloo with parameters on a GPU. With a group of this rank alone."""
    home, other = (gpu, CPU) if on_gpu else (CPU, gpu)
    topology = mock.Mock(
        parameters=[torch.zeros(3, device=home)], groups=[None], device_for=lambda own: other, sum_over_ranks=torch.abs_
    )
    combination = Combination()
    results: list[torch.Tensor] = []
    for flag in (0.0, 1.0, 0.0):
        found = [number(flag, home), number(0.0, other)]
        verdict = combination.combine(topology, found, [number(4.0, home).double(), number(5.0, other).double()])
        assert verdict.found_inf.device == home
        results += [verdict.found_inf * 2, verdict.sum_of_squares + 1]
    return bits(results)


def test_ranks_with_and_without_gradients_on_the_host_reduce_on_one_device() -> None:
    """A group may have a backend for each device. `OffloadedAdamW` has its gradients on the host."""
    devices: list[str] = []
    with Model("late") as model:
        topology = mock.Mock(parameters=[torch.zeros(3, device=model.device)])
        topology.device_for.side_effect = lambda device: devices.append(device.type) or device
        for flags in ([], [torch.zeros(())]):
            verdict = Combination().combine(topology, flags, flags)
            assert verdict.found_inf.device.type == ("cpu" if flags else "cuda")
    assert devices == ["cuda", "cuda"]


FUNCTIONS: dict[str, Callable[[torch.device], list[Any]]] = {
    "grad_scale and found_inf": partial(flags_of_torchs_scalers, limit=None, found_inf=0.0),
    "grad_scale and found_inf, clipped": partial(flags_of_torchs_scalers, limit=1.0, found_inf=0.0),
    "found_inf set": partial(flags_of_torchs_scalers, limit=1.0, found_inf=1.0),
    "two optimizers, scale on the GPU": partial(two_optimizers, on_gpu=True),
    "two optimizers, scale on the CPU": partial(two_optimizers, on_gpu=False),
    "monitor": monitored,
    "weights of the other device": written_weights,
    "ranks, parameters on the CPU": partial(combined_over_ranks, on_gpu=False),
    "ranks, parameters on the GPU": partial(combined_over_ranks, on_gpu=True),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_tensors_on_two_devices(name: str) -> None:
    assert in_every_order(FUNCTIONS[name]) == []


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        # `make test` runs the scale that is not where the first parameter is.
        pytest.param(
            name, scale, marks=[pytest.mark.exhaustive] * (on_gpu(0) == (scale == "GPU") or name.endswith("None"))
        )
        for name, (on_gpu, _) in OPTIMIZERS.items()
        for scale in ("GPU", "CPU")
    ],
)
def test_every_operation_of_a_training_with_a_scaler(name: str, scale: str) -> None:
    """Steps, accumulation, clipping, unscaling, rates, checkpoints, with two overflows."""
    # Functions of lists and counts do not depend on the optimizer.
    every = [what for what in dict.fromkeys(STEPS) if what not in ("check", "count") or name == "AdamW on both"]
    operations = [
        (what, () if what in WITHOUT_SEED else (3 + 4 * place,))  # 3 overflows, as 31 and 59 do
        for place, what in enumerate(("step", "step", *every, "step"))
    ]
    device_programs.compare(operations, (name, {"max_grad_norm": 4.0}, scale == "GPU"), seed=3)


def test_random_programs_do_not_depend_on_the_order_of_copies() -> None:
    """`make soak` runs 1,000."""
    device_programs.run(0)


# ------------------------------------------------------------------------------------------------------------- waiting


def awaited(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], clip: bool, model: Model) -> int:
    """How often the host waits in a step with a scale on the GPU."""
    scaler = halfstep.GradScaler("cuda", 4.0)
    scaler.scale(torch.zeros((), device=model.device))
    for _ in range(3):
        torch.cuda.synchronize()
        model.blocking.clear()
        model.pageable.clear()
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        if clip:
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert set(model.blocking) <= {"Stream.synchronize"} and "a copy from the device" not in model.pageable
    return len(model.blocking)


@pytest.mark.parametrize("clip", [False, True])
def test_the_host_waits_once_for_all_numbers_that_it_needs_at_a_time(clip: bool) -> None:
    """The scale and the count of steps for the check, then the scale, and what the GPU found, for the step."""
    with Model("late") as model:
        parameters = pair(model.device)
        # Of two dtypes, and so in two launches.
        on_cpu = [parameters[0], torch.nn.Parameter(integers((9,), BF16, 0, CPU))]
        assert awaited(halfstep.AdamW(on_cpu), on_cpu, clip, model) == 2
        assert awaited(halfstep.AdamW(parameters), parameters, clip, model) <= 3
        assert awaited(halfstep.AdamW(parameters[1::2]), parameters[1::2], clip, model) == 0


# ------------------------------------------------------------------------------------------------------ torch's scalers


@pytest.mark.parametrize("mode", ["copy", None])
def test_a_scaler_of_torch_on_the_gpu_steps_on_the_host(mode: Any) -> None:
    """`.grad` is on the GPU, as its scale is, and waits for what is copied to the host."""

    def train(gpu: torch.device) -> list[bytes]:
        parameter = torch.nn.Parameter(integers((5, 3), torch.float32, 1, gpu))
        optimizer = OffloadedAdamW([parameter], lr=0.1, in_backward=mode)
        scaler = torch.amp.GradScaler(gpu.type, 4.0, growth_interval=2)
        for step in range(4):
            optimizer.zero_grad()
            factor = torch.inf if step == 1 else 1.0
            scaler.scale((parameter * integers((5, 3), torch.float32, step, gpu)).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        return bits([parameter, *optimizer.masters().values()])

    assert in_every_order(train) == []
