"""Checks of `halfstep bench gpu`: kernels against torch, and whole AMP steps against the reference, bit for bit."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# How gradients are unscaled and clipped before a step.
WAYS = ("step", "unscale_", "clip_grad_norm_", "write_back")
STEP_SIZES = (1, 15, 1000, 4097, 0, 65_536, 300, 1_000_003)


def _checks(checks: dict[str, Callable[[], object]]) -> dict[str, Any]:
    """Run all checks, even if some fail. Returns the outcome of each by name, and the failed names as ``"failed"``."""
    done: dict[str, Any] = {}
    failures = []
    for name, check in checks.items():
        start = time.monotonic()
        try:
            check()
            done[name] = {"status": "passed"}
        except Exception:
            done[name] = {"status": "failed", "error": traceback.format_exc()}
            failures.append(name)
            print(f"{name} failed\n{traceback.format_exc()}", flush=True)
        done[name]["seconds"] = round(time.monotonic() - start, 2)
    done["failed"] = failures
    return done


def _expect(equal: bool, what: str) -> None:
    if not equal:
        raise AssertionError(what)


def smoke(device: torch.device) -> dict[str, Any]:
    """One kernel of each family, against torch."""
    import halfstep

    x = torch.linspace(-3.0, 3.0, 1001, dtype=torch.float32, device=device)

    def cast() -> None:
        with halfstep.backend("triton"):  # the default is torch's cast
            _expect(torch.equal(halfstep.cast(x, torch.bfloat16), x.bfloat16()), "cast to bf16 is not torch's")

    def check() -> None:
        found = halfstep.foreach_check([x, x.half()])
        _expect(found.found_inf.item() == 0 and found.flags.tolist() == [0, 0], "found an Inf in finite tensors")
        squares = x.double().square().sum() + x.half().double().square().sum()
        _expect(abs(found.sum_of_squares.item() / squares.item() - 1) < 1e-6, "sum of squares")

    def softmax() -> None:
        y = halfstep.softmax(x.view(7, 143))
        torch.testing.assert_close(y, x.view(7, 143).softmax(-1), rtol=1e-5, atol=1e-7)

    def adam() -> None:
        def stepped(where: torch.device, backend: str) -> torch.Tensor:
            with halfstep.backend(backend):
                parameter = torch.nn.Parameter(x.to(where).bfloat16())
                parameter.grad = x.to(where).bfloat16().neg()
                halfstep.AdamW([parameter]).step()
            return parameter.detach().cpu()

        mine = stepped(device, "triton")
        _expect(torch.equal(mine, stepped(torch.device("cpu"), "reference")), "AdamW is not the reference's")

    return _checks({"cast": cast, "check": check, "softmax": softmax, "adam": adam})


class _Training:
    """Mixed parameters under AMP with clipping, and gradients for several steps with overflows among them."""

    def __init__(self, device: torch.device, steps: int = 6, way: str = "step") -> None:
        """`way` is one of `WAYS`."""
        import halfstep

        self.way = way
        generator = torch.Generator().manual_seed(0)

        def normal(size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(
                device=device, dtype=dtype
            )

        kinds = [(size, dtype) for size in STEP_SIZES for dtype in (torch.bfloat16, torch.float16, torch.float32)]
        self.parameters = [torch.nn.Parameter(normal(size, dtype)) for size, dtype in kinds]
        self.gradients = [[normal(size, dtype) for size, dtype in kinds] for _ in range(steps)]
        self.gradients[1][0][0] = torch.inf
        self.gradients[3][6][-1] = torch.nan
        self.optimizer = halfstep.AdamW(self.parameters, lr=1e-2, max_grad_norm=1.0)
        self.scaler = halfstep.GradScaler(
            device.type, init_scale=1024.0, growth_interval=2, write_back=way == "write_back"
        )
        self.scaler.scale(torch.zeros((), dtype=torch.float32, device=device))
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        for _ in range(3):
            self.step()

    def step(self) -> None:
        if self.way == "unscale_":
            self.scaler.unscale_(self.optimizer)
        elif self.way == "clip_grad_norm_":
            self.scaler.clip_grad_norm_(self.optimizer, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def give(self, index: int) -> None:
        """Assign the gradients of a step, in new memory, as after ``zero_grad(set_to_none=True)``."""
        for parameter, gradient in zip(self.parameters, self.gradients[index], strict=True):
            parameter.grad = gradient.clone()

    def captured(self) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
        """A step as a CUDA graph, and the gradients that it reads."""
        static = [torch.zeros_like(parameter) for parameter in self.parameters]
        for parameter, gradient in zip(self.parameters, static, strict=True):
            parameter.grad = gradient
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), _refusing_waits(self.parameters[0].device):
            self.step()
        return graph, static

    def replay(self, graph: torch.cuda.CUDAGraph, static: list[torch.Tensor], index: int) -> None:
        """Copy the gradients of a step to the tensors that a graph reads, and replay the graph."""
        for place, gradient in zip(static, self.gradients[index], strict=True):
            place.copy_(gradient)
        graph.replay()

    @torch.no_grad()
    def load(self, index: int) -> None:
        """Copy the gradients of a step into the current gradients."""
        for parameter, gradient in zip(self.parameters, self.gradients[index], strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

    def differences(self, other: _Training) -> list[str]:
        """The names of all tensors in which two trainings differ."""
        found = []
        for index, (mine, theirs) in enumerate(zip(self.parameters, other.parameters, strict=True)):
            if not _same_bits(mine.detach(), theirs.detach()):
                found.append(f"parameter {index} ({mine.dtype}, {mine.numel()} elements)")
        left, right = self.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
        for index, state in left.items():
            found += [
                f"{key} of parameter {index}"
                for key, value in state.items()
                if not _same_bits(value, right[index][key])
            ]
        if self.scaler.get_scale() != other.scaler.get_scale():
            found.append(f"scale {self.scaler.get_scale()} and {other.scaler.get_scale()}")
        return found


@contextmanager
def _refusing_waits(device: torch.device) -> Iterator[None]:
    """Make every synchronization with the GPU an error."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return torch.equal(left.cpu().reshape(-1).view(integers), right.cpu().reshape(-1).view(integers))


def steps(device: torch.device) -> dict[str, Any]:
    """Whole AMP steps: none waits for the GPU, and eager and captured steps give the bits of the reference."""
    import halfstep

    kept: dict[str, _Training] = {}

    def eager() -> None:
        kept["eager"] = training = _Training(device)
        for index in range(len(training.gradients)):
            training.load(index)
            training.step()

    def against_the_reference() -> None:
        with halfstep.backend("reference"):
            training = _Training(torch.device("cpu"))
            for index in range(len(training.gradients)):
                training.load(index)
                training.step()
        different = kept["eager"].differences(training)
        _expect(not different, f"the GPU's bits are not the reference's: {different}")

    def expect_eager_bits(training: _Training, what: str) -> None:
        different = kept["eager"].differences(training)
        _expect(not different, f"{what} differ from eager steps: {different}")

    def no_waiting() -> None:
        training = _Training(device)
        torch.cuda.synchronize()
        with _refusing_waits(device):
            for index in range(len(training.gradients)):
                (training.load if index % 2 else training.give)(index)
                training.step()
        expect_eager_bits(training, "steps with moving gradients")

    def no_way_waits() -> None:
        for way in WAYS:
            training = _Training(device, way=way)
            torch.cuda.synchronize()
            with _refusing_waits(device):
                for index in range(len(training.gradients)):
                    training.give(index)
                    training.step()
            with halfstep.backend("reference"):
                other = _Training(torch.device("cpu"), way=way)
                for index in range(len(other.gradients)):
                    other.give(index)
                    other.step()
            different = training.differences(other)
            _expect(not different, f"{way}: the GPU's bits are not the reference's: {different}")

    def graph() -> None:
        training = _Training(device)
        torch.cuda.synchronize()
        captured = training.captured()
        with _refusing_waits(device):
            for index in range(len(training.gradients)):
                training.replay(*captured, index)
        torch.cuda.synchronize()
        expect_eager_bits(training, "replayed steps")

    def graphs_between() -> None:
        """Eager steps before, between and after captures and replays, with another lr at the second capture."""
        training = _Training(device)
        torch.cuda.synchronize()
        group = training.optimizer.param_groups[0]
        first = training.captured()
        with _refusing_waits(device):
            training.give(0)
            training.step()
            training.replay(*first, 1)
            training.give(2)
            training.step()
        usual, group["lr"] = group["lr"], 1.0
        second = training.captured()  # never replayed
        group["lr"] = usual
        with _refusing_waits(device):
            training.give(3)
            training.step()
            training.replay(*first, 4)
            training.give(5)
            training.step()
        torch.cuda.synchronize()
        expect_eager_bits(training, "eager and replayed steps in turn")
        del second

    def two_streams() -> None:
        """Steps alternately on two streams, and concurrent checks of tensors of the same sizes on a third stream."""
        training = _Training(device)
        others = [torch.ones_like(parameter) for parameter in training.parameters]
        expected = float(sum(one.numel() for one in others))
        streams, aside = [torch.cuda.Stream(device), torch.cuda.Stream(device)], torch.cuda.Stream(device)
        torch.cuda.synchronize()
        found = []
        try:
            with _refusing_waits(device):
                for index in range(len(training.gradients)):
                    here, before = streams[index % 2], streams[1 - index % 2]
                    here.wait_stream(before)
                    with torch.cuda.stream(here):
                        training.give(index)
                        training.step()
                    with torch.cuda.stream(aside):
                        found.append(halfstep.foreach_check(others).sum_of_squares)
        finally:
            torch.cuda.synchronize()  # before memory that other streams use is freed
        _expect([one.item() for one in found] == [expected] * len(found), "checks on another stream")
        expect_eager_bits(training, "steps on two streams")

    checks: dict[str, Callable[[], object]] = {
        "eager steps": eager,
        "same bits as the reference": against_the_reference,
    }
    if device.type == "cuda":
        checks |= {
            "no step waits for the device": no_waiting,
            "no way of unscaling and clipping waits": no_way_waits,
            "CUDA graph replays the same bits": graph,
            "CUDA graphs between eager steps": graphs_between,
            "steps on two streams": two_streams,
        }
    return _checks(checks)
