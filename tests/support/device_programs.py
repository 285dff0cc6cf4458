"""Random programs over two devices, whose result must not depend on when copies between the devices are executed.

Parameters, gradients, loss scale, learning rates and factors are on the CPU or on the model of a GPU (stream_model.py).
A program runs with the work of the GPU executed at once, as late as possible and in random order, and on the CPU alone.
All bits must be equal: gradients are integers, so that sums of squares are exact in any grouping.

As a program it is the campaign: ``python tests/support/device_programs.py --tries 1000 --seed 0``.
"""

import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import campaign
import torch
from stream_model import Model

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.offload import OffloadedAdamW, OffloadedMuon
from halfstep.integrations.release import step_in_backward

CPU = torch.device("cpu")
ORDERS = ("at once", "late", "random")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
SHAPES: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
    ((5,), FP32),
    ((300,), BF16),
    ((7,), FP32),
    ((35, 120), BF16),  # moments of 8 bits
    ((17,), BF16),
)
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"max_grad_norm": 4.0},
    {"amsgrad": True},
    {"master_weights": "full", "state_dtype": BF16, "rounding": "stochastic", "seed": 5},
    {"state_dtype": "8bit", "seed": 5},
)


def muon(parameters: Any, amsgrad: bool = False, **options: Any) -> OffloadedMuon:
    """The options of AdamW, of which Muon has no `amsgrad`."""
    groups: list[list[torch.Tensor]] = [[], []]
    for parameter in parameters:
        groups[parameter.dim() == 1].append(parameter)
    named = [{"params": groups[0]}, {"params": groups[1], "algorithm": "adamw"}]
    return OffloadedMuon(named, bucket_bytes=700, **options)


# By the name of an optimizer: whether a parameter is on the GPU, by its index; and the class.
OPTIMIZERS: dict[str, tuple[Callable[[int], bool], Callable[..., Any]]] = {
    "AdamW on both": (lambda index: index % 2 == 0, halfstep.AdamW),
    "AdamW on the CPU": (lambda index: False, halfstep.AdamW),
    "AdamW on the GPU": (lambda index: True, halfstep.AdamW),
    "AdamW in the backward": (lambda index: False, halfstep.AdamW),
    "OffloadedAdamW, copy": (lambda index: True, partial(OffloadedAdamW, bucket_bytes=700)),
    "OffloadedAdamW, step": (lambda index: True, partial(OffloadedAdamW, bucket_bytes=700, in_backward="step")),
    "OffloadedAdamW, None": (lambda index: True, partial(OffloadedAdamW, bucket_bytes=700, in_backward=None)),
    "OffloadedMuon, copy": (lambda index: True, muon),
    "OffloadedMuon, None": (lambda index: True, partial(muon, in_backward=None)),
    "torch's AdamW on both": (lambda index: index % 2 == 0, torch.optim.AdamW),
    "torch's fused AdamW on the GPU": (lambda index: True, partial(torch.optim.AdamW, fused=True)),
}
STEPS = (
    *(*["step"] * 4, "accumulate", "clip", "unscale", "clip_by_torch", "rate", "check", "count"),
    *("save", "load", "file"),
)
WITHOUT_SEED = ("save", "load", "file")
Operations = Sequence[tuple[str, tuple[Any, ...]]]  # names of methods of `Program` and their arguments


def integers(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """The same integers from -4 to 4 on every device."""
    values = torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values if device.type == "cpu" else values.to(device)


class Program:
    """A training by one of `OPTIMIZERS` with parameters on two devices, and the operations of programs.

    `gpu` is the GPU, or the CPU in its place.
    """

    def __init__(self, gpu: torch.device, name: str, options: dict[str, Any], scale_on_gpu: bool) -> None:
        on_gpu, cls = OPTIMIZERS[name]
        is_torchs, self.in_backward = name.startswith("torch's"), "backward" in name
        self.gpu, self.scaled = gpu, not name.endswith("step")
        if is_torchs or (not self.scaled and "max_grad_norm" in options):
            options = {}
        self.devices = [gpu if on_gpu(index) else CPU for index in range(len(SHAPES))]
        self.model = torch.nn.Module()
        for index, ((shape, dtype), device) in enumerate(zip(SHAPES, self.devices, strict=True)):
            values = integers(shape, FP32 if is_torchs else dtype, index, device) * 0.25
            self.model.register_parameter(f"weight_{index}", torch.nn.Parameter(values))
        self.optimizer = cls(self.model.parameters(), lr=0.01, **options)
        self.scale_device = gpu if scale_on_gpu else CPU
        self.scaler = halfstep.GradScaler(self.scale_device.type, 256.0, growth_interval=3, enabled=self.scaled)
        self.scaler.scale(torch.zeros((), device=self.scale_device))
        self.monitor = halfstep.AmpMonitor(self.model, self.scaler, every=1).attach(self.optimizer)
        self.is_torchs = is_torchs
        if self.in_backward:
            clipping = "exact" if "max_grad_norm" in options else None
            self.handle = step_in_backward(
                self.model, self.optimizer, bucket_bytes=700, clipping=clipping, scaler=self.scaler
            )
        self.saved = self.saved_scale = None
        self.answers: list[Any] = []

    def _losses(self, seed: int) -> list[torch.Tensor]:
        """The loss of the parameters of each device. Every seventh seed has an overflow."""
        losses = []
        for device in dict.fromkeys(self.devices):
            terms = []
            for index, parameter in enumerate(self.model.parameters()):
                if self.devices[index] == device:
                    values = integers(parameter.shape, FP32, seed + index, device)
                    if seed % 7 == 3 and index == seed % len(SHAPES):
                        values.view(-1)[0] = torch.inf
                    terms.append((parameter.float() * values).sum())
            losses.append(sum(terms[1:], start=terms[0]))
        return losses

    def backward(self, seed: int) -> None:
        losses = self._losses(seed)
        scaled = self.scaler.scale(losses if len(losses) > 1 else losses[0])
        for loss in scaled if isinstance(scaled, list) else [scaled]:
            loss.backward()

    def _finish(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def step(self, seed: int) -> None:
        if self.in_backward:
            return self.clip(seed, None)
        self.backward(seed)
        self._finish()

    def accumulate(self, seed: int) -> None:
        if not self.in_backward and self.scaled:
            self.backward(seed)
        self.step(seed + 1)

    def clip(self, seed: int, max_norm: float | None = 8.0) -> None:
        if self.in_backward:
            scaled = self.scaler.scale(self._losses(seed)[0])
            with self.handle.check():
                scaled.backward(retain_graph=True)
            if max_norm is not None:
                self.answers.append(self.scaler.clip_grad_norm_(self.optimizer, max_norm))
            scaled.backward()
            return self._finish()
        self.backward(seed)
        if max_norm is not None and self.scaled:
            norm = self.scaler.clip_grad_norm_(self.optimizer, max_norm)
            self.answers += [] if self.is_torchs else [norm]
        self._finish()

    def unscale(self, seed: int) -> None:
        if self.in_backward or not self.scaled:
            return self.step(seed)
        self.backward(seed)
        self.scaler.unscale_(self.optimizer)
        grads = [one.grad for group in self.optimizer.param_groups for one in group["params"] if one.grad is not None]
        self.answers += [grad.clone() for grad in grads]
        self._finish()

    def clip_by_torch(self, seed: int) -> None:
        """By value: the norm of torch depends on the grouping of the gradients."""
        if self.in_backward or not self.scaled:
            return self.step(seed)
        self.backward(seed)
        self.scaler.unscale_(self.optimizer)
        hosts = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(hosts, 1e-3 if seed % 2 else 2.0, norm_type=float("inf"))
        self._finish()

    def rate(self, seed: int) -> None:
        """A learning rate on one of the devices; torch's optimizers take numbers here."""
        rate = (1 + seed % 10) / 512
        if not self.is_torchs:
            rate = torch.full((), rate, device=self.gpu if seed % 3 else CPU)
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def check(self, seed: int) -> None:
        """Functions of lists, with a factor on the other device."""
        for device, other in ((CPU, self.gpu), (self.gpu, CPU)):
            factor = torch.full((), 0.5, device=other) * (1 + seed % 3)
            grads = [integers(shape, dtype, seed + n, device) for n, (shape, dtype) in enumerate(SHAPES)]
            self.answers += halfstep.foreach_check(grads, factor.double().reshape(1))
            self.answers += halfstep.foreach_unscale_(grads, factor)
            self.answers += [*grads, *halfstep.foreach_cast(grads, FP16)]

    def count(self, seed: int) -> None:
        """Counts of tensors on both devices, scaled by a tensor on one of them."""
        tensors = [integers((99,), dtype, seed, on) for on in (CPU, self.gpu) for dtype in (FP32, torch.float64)]
        scale = torch.full((), 2.0, device=self.gpu if seed % 2 else CPU) ** -(seed % 20)
        found = halfstep.statistics(tensors, "fp16", scale=scale)
        self.answers.append(lambda: str(found.as_dict()))

    def save(self) -> None:
        """Keep the states, on the CPU."""
        self.saved, self.saved_scale = self._on_cpu(self.optimizer.state_dict()), self.scaler.state_dict()

    def load(self) -> None:
        if self.saved is not None and self.saved_scale is not None:
            self.optimizer.load_state_dict(self._on_cpu(self.saved))  # torch writes to what it loads
            self.scaler.load_state_dict(self.saved_scale)

    def file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            state = {"optimizer": self.optimizer.state_dict(), "model": self.model.state_dict()}
            found = checkpoint.load(checkpoint.save(folder, 1, state))
        self.optimizer.load_state_dict(found["optimizer"])
        self.model.load_state_dict(found["model"])

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cpu().clone()
        if isinstance(value, dict):
            return {key: self._on_cpu(one) for key, one in value.items()}
        return [self._on_cpu(one) for one in value] if isinstance(value, list) else value

    def result(self) -> list[Any]:
        """Everything that was computed, as bits and texts."""
        state = self.optimizer.state_dict()["state"]
        tensors = [parameter.detach() for parameter in self.model.parameters()]
        tensors += [state[index][key] for index in sorted(state) for key in sorted(state[index])]
        tensors += [self.scaler._scale, self.scaler._counts] if self.scaled else []  # type: ignore[list-item]
        tensors += [one for one in self.answers if isinstance(one, torch.Tensor)]
        texts = [one() for one in self.answers if callable(one) and not isinstance(one, torch.Tensor)]
        texts.append(str(self.monitor.statistics().as_dict()))
        texts += [str(self.scaler.overflow_report([*self.model.named_parameters()]))] if self.scaled else []
        return [one.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in tensors] + texts


def program(seed: int, length: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The operations of a program: names of methods and their arguments."""
    choose = random.Random(seed)
    for number in range(length):
        what = choose.choice(STEPS) if number else "step"
        yield what, () if what in WITHOUT_SEED else (seed + 97 * number,)


def in_every_order(compute: Callable[[torch.device], list[Any]], seed: int = 0, on_cpu: bool = True) -> list[str]:
    """The orders on the model of a GPU, or "on the CPU" with `on_cpu`, that have another result than the first one."""
    results = {}
    for order in ORDERS:
        with Model(order, seed) as model:
            results[order] = compute(model.device)
    if on_cpu:
        results["on the CPU"] = compute(CPU)
    return [order for order, found in results.items() if found != results[ORDERS[0]]]


def executed(operations: Operations, setting: tuple[str, dict[str, Any], bool], gpu: torch.device) -> list[Any]:
    """The result of a program: see `Program`, whose arguments `setting` holds, and `Program.result`."""
    training = Program(gpu, *setting)
    for what, arguments in operations:
        getattr(training, what)(*arguments)
    return training.result()


def compare(operations: Operations, setting: tuple[str, dict[str, Any], bool], seed: int) -> None:
    """Run a program in every order, and compare all bits."""
    # With a scale on the other device, torch's fused optimizers are not called for a skipped step.
    # torch's clipping, which our scaler calls for its optimizers, adds the norms of one device after the other's.
    reordered = setting[0] == "torch's AdamW on both" and "clip" in dict(operations)
    on_cpu = not setting[0].startswith("torch's fused") and not reordered
    different = in_every_order(partial(executed, operations, setting), seed, on_cpu)
    assert not different, f"seed {seed}: {setting} has another result {', '.join(different)}"


def run(seed: int, length: int = 8) -> Counter[str]:
    """Run and compare a random program in every order. Counts executions of each operation, and of the optimizer."""
    choose = random.Random(-seed)
    setting = choose.choice(list(OPTIMIZERS)), choose.choice(OPTIONS), choose.random() < 0.7
    operations = list(program(seed, length))
    compare(operations, setting, seed)
    return Counter([setting[0], *(what for what, _ in operations)])


if __name__ == "__main__":
    sys.exit(campaign.main(__doc__, run, 1000))
