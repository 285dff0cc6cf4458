"""Count the exponents of gradients during training, at a small cost every few steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from halfstep.kernels.statistics import Grid, foreach_count_, width
from halfstep.kernels.streams import capturing, to_device
from halfstep.numerics.formats.table import formats
from halfstep.numerics.scaling.scaler import unwrapped
from halfstep.numerics.scaling.stand_ins import gradient_of
from halfstep.numerics.statistics.advice import ScaleAdvice, advise_scale
from halfstep.numerics.statistics.counts import Statistics, grid_of
from halfstep.numerics.statistics.named_tensors import countable, named_tensors, scaled_to_odd


@dataclass(frozen=True)
class AmpReport:
    """The result of an `AmpMonitor`.

    Attributes:
        steps: number of steps so far.
        collected: number of steps in which gradients were counted.
        scale: the present loss scale; 1 without a scaler.
        statistics: statistics of the gradients of all these steps together, at that scale.
        advice: advice on the loss scale; None if all gradients were 0.
    """

    steps: int
    collected: int
    scale: float
    statistics: Statistics
    advice: ScaleAdvice | None

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON."""
        return {
            "steps": self.steps,
            "collected": self.collected,
            "scale": self.scale,
            "statistics": self.statistics.as_dict(),
            "advice": self.advice and self.advice.as_dict(),
        }

    def __str__(self) -> str:
        head = f"gradients of {self.collected} of {self.steps} steps"
        return "\n".join([head, str(self.statistics), *([] if self.advice is None else [str(self.advice)])])


class AmpMonitor:
    """Count gradients every `every` steps, on their device and without synchronization; `report` summarizes the counts.

    Call `step` after ``backward()`` and before ``optimizer.step()``, or call ``monitor.attach(optimizer)`` once. The
    current loss scale is divided out of scaled gradients. The counts of all steps are added, so the memory does not
    grow: 6.8 KB per parameter.

    Args:
        model_or_named_parameters: a module, or (name, parameter) pairs. Parameters that do not require a gradient are
            ignored.
        scaler: `halfstep.GradScaler` or `torch.amp.GradScaler`; None if the loss is not scaled.
        every: number of steps from one count to the next; the first step is counted.
        format: the format of the gradients.

    Raises:
        TypeError: an element is not a tensor.
        ValueError: `every` is not an integer of at least 1, a name occurs twice, or the format cannot be counted.

    Note:
        Gradients in fp16 are already rounded: values flushed in the backward pass count as zero. Each rank counts its
        own shards of sharded parameters; statistics of ranks can be added. Nothing is counted while a CUDA graph is
        captured.

    Examples:
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = halfstep.AdamW(model.parameters())
        >>> monitor = halfstep.AmpMonitor(model, every=1).attach(optimizer)
        >>> model(torch.ones(8, 4)).sum().backward()
        >>> optimizer.step()
        >>> monitor.statistics().total.normal
        5
    """

    def __init__(
        self,
        model_or_named_parameters: torch.nn.Module | Iterable[tuple[str, torch.Tensor]],
        scaler: torch.amp.GradScaler | None = None,
        every: int = 100,
        format: Any = "fp16",
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ValueError(f"Expected every to be an integer of at least 1, but got {every!r}")
        self.format = formats[format]
        self.every = every
        self._grid = Grid(*grid_of(self.format))
        named = named_tensors(model_or_named_parameters, "model_or_named_parameters")
        self._parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._scaler = scaler
        self._handles: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Reset all counts."""
        self._steps = self._collected = 0
        self._counts: dict[torch.device, torch.Tensor] = {}

    # -------------------------------------------------------------------------------------------------------- counting

    def attach(self, optimizer: torch.optim.Optimizer) -> AmpMonitor:
        """Call `step` before each step of an optimizer, until `detach`. Returns the monitor.

        If there are several optimizers, attach one. Steps that the scaler skips without calling the optimizer are not
        counted.
        """
        self._handles.append(optimizer.register_step_pre_hook(lambda of, args, kwargs: self.step(of)))
        return self

    def detach(self) -> None:
        """Undo every `attach`."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Count the current gradients, if this step is to be counted.

        Args:
            optimizer: the optimizer that is about to step. If given, gradients that ``scaler.unscale_(optimizer)`` has
                already unscaled are recognized; otherwise gradients are assumed to be scaled if there is a scaler.
        """
        self._steps += 1
        if (self._steps - 1) % self.every == 0:
            self._collect(self._scale_of(optimizer))

    def _scale_of(self, optimizer: torch.optim.Optimizer | None) -> torch.Tensor | None:
        """The loss scale of the current gradients, on the device; None if they are not scaled."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return None
        # torch's scaler keys its states by the optimizer that it was given, ours by the one inside wrappers.
        for key in () if optimizer is None else (id(optimizer), id(unwrapped(optimizer))):
            if scaler._per_optimizer_states.get(key, {}).get("stage") is OptState.UNSCALED:
                return None
        scale = scaler._get_scale_async()  # get_scale() would wait for the device
        return None if scale is None else scale.detach()

    @torch.no_grad()
    def _collect(self, scale: torch.Tensor | None) -> None:
        groups: dict[tuple[torch.device, bool], dict[int, torch.Tensor]] = {}  # by device and whether in fp64
        for row, (name, parameter) in enumerate(self._parameters.items()):
            grad = gradient_of(parameter)
            if grad is not None:
                values = countable(f"the gradient of {name}", grad, self.format)
                groups.setdefault((values.device, values.dtype == torch.float64), {})[row] = values
        if any(capturing(device) for device, _ in groups):
            return
        for (device, wide), rows in groups.items():
            divisor, tensors = None if scale is None else to_device(scale, device), list(rows.values())
            if wide:  # unscaled before it becomes fp32
                factor = 1.0 if divisor is None else divisor.double().reciprocal()
                divisor, tensors = None, [scaled_to_odd(values, factor) for values in tensors]
            if device not in self._counts:
                self._counts[device] = self._zeros(device)
            foreach_count_(tensors, self._counts[device], self._grid, scale=divisor, inverted=True, rows=list(rows))
        self._collected += 1

    def _zeros(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(len(self._parameters), width(False), dtype=torch.int64, device=device)

    def _total(self, device: torch.device) -> torch.Tensor:
        """A copy of the counts of all devices."""
        total = self._zeros(device)
        for counts in self._counts.values():
            total += to_device(counts, device)
        return total

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The counts, on the CPU, for a checkpoint. Waits for the device."""
        return {
            "format": self.format.name,
            "names": list(self._parameters),
            "steps": self._steps,
            "collected": self._collected,
            "counts": self._total(torch.device("cpu")),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the counts that `state_dict` returned.

        Raises:
            ValueError: the counts are of another format or of other parameters.
        """
        for key, expected in (("format", self.format.name), ("names", list(self._parameters))):
            if state_dict[key] != expected:
                raise ValueError(
                    f"Expected {key} in state_dict to be that of this monitor, {expected!r}, but got "
                    f"{state_dict[key]!r}"
                )
        self.reset()
        self._steps, self._collected = state_dict["steps"], state_dict["collected"]
        device = next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))
        self._counts[device] = state_dict["counts"].to(device, copy=True)

    # ------------------------------------------------------------------------------------------------------- reporting

    def statistics(self) -> Statistics:
        """The statistics of the unscaled gradients of all counted steps. Reading them waits for the device."""
        names = list(self._parameters)
        dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in self._parameters.values()]
        device = next(iter(self._counts), torch.device("cpu"))  # usually one
        return Statistics(names, dtypes, self.format, 1.0, [(self._total(device), range(len(names)))])

    def report(self, share: float = 1e-3, headroom: int = 2) -> AmpReport:
        """Summarize the gradients counted so far. Waits for the device.

        Args:
            share, headroom: as in `halfstep.advise_scale`.
        """
        statistics, scaler = self.statistics(), self._scaler
        scale = float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0
        advice = None
        if any(statistics.total.exponents.values()):
            advice = advise_scale(statistics, self.format, share=share, headroom=headroom)
        # The largest power of two that is not above the scale; only growth factors other than 2 make a difference.
        power = 2.0 ** (math.frexp(scale)[1] - 1)
        return AmpReport(self._steps, self._collected, scale, statistics.at(power), advice)
