"""Count the exponents of gradients during training, at a small cost once every few steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from halfstep.kernels.cells import width
from halfstep.kernels.streams import HostCopy, capturing, to_device
from halfstep.numerics.formats.table import formats
from halfstep.numerics.scaling.scaler import GradScaler, unwrapped
from halfstep.numerics.scaling.stand_ins import gradient_of
from halfstep.numerics.statistics.advice import ScaleAdvice, advise_scale
from halfstep.numerics.statistics.counts import Statistics, grid_of
from halfstep.numerics.statistics.named_tensors import count_, countable, named_tensors


@dataclass(frozen=True)
class AmpReport:
    """The report of an `AmpMonitor`.

    Attributes:
        steps, collected: number of steps so far, and number of steps whose gradients were counted.
        scale: the current loss scale; 1 without a scaler.
        statistics: statistics of the gradients of all counted steps together, at that scale.
        advice: advice on the loss scale; None if all gradients were 0.
    """

    steps: int
    collected: int
    scale: float
    statistics: Statistics
    advice: ScaleAdvice | None

    def as_dict(self) -> dict[str, Any]:
        """The report as plain values for JSON."""
        head = {name: getattr(self, name) for name in ("steps", "collected", "scale")}
        return {**head, "statistics": self.statistics.as_dict(), "advice": self.advice and self.advice.as_dict()}

    def __str__(self) -> str:
        head = f"gradients of {self.collected} of {self.steps} steps"
        return "\n".join([head, str(self.statistics), *([] if self.advice is None else [str(self.advice)])])


class AmpMonitor:
    """Count gradients every `every` steps, on their device and without synchronization.

    `scalars` returns metrics to log at each step, and `report` summarizes the counts of all steps. Call `step`
    after ``backward()`` and before ``optimizer.step()``, or call ``monitor.attach(optimizer)`` once. The current loss
    scale is divided out of scaled gradients. Memory is constant: 13.6 KB per parameter tensor.

    Args:
        model_or_named_parameters: a module, whose parameters are read at the first step, or (name, parameter) pairs.
            Parameters that do not require a gradient are ignored.
        scaler: a `halfstep.GradScaler` or `torch.amp.GradScaler`; None without one, or if `attach` gets it.
        every: count every `every`-th step, starting with the first.
        format: the format of the gradients.

    Raises:
        TypeError: an element is not a tensor.
        ValueError: `every` is not an integer of at least 1, a name occurs twice, or the format cannot be counted.

    Note:
        Gradients in fp16 are already rounded: values flushed in the backward count as zero. Each rank counts its local
        shards of sharded parameters; statistics of ranks can be added. Nothing is counted while a CUDA graph is being
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
        self.format = formats.element(format)
        self.every = every
        self._grid = grid_of(self.format)
        self._parameters = _trained(model_or_named_parameters)
        module = isinstance(model_or_named_parameters, torch.nn.Module)
        self._model = model_or_named_parameters if module else None  # until the first step
        self._scaler = scaler
        self._handles: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Reset all counts."""
        self._steps = self._collected = 0
        self._counts: dict[torch.device, torch.Tensor] = {}
        self._latest: dict[torch.device, tuple[torch.Tensor, HostCopy]] = {}  # the counts of the last counted step
        self._underflowing: set[str] = set()  # parameters whose underflow `scalars` reports
        self._squares: torch.Tensor | None = None  # the sum of squares of the last step's gradients
        self._squares_copy = HostCopy()

    # -------------------------------------------------------------------------------------------------------- counting

    def attach(self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None) -> AmpMonitor:
        """Call `step` before each step of an optimizer, or of the optimizer inside a wrapper, until `detach`.

        Attaching to another optimizer detaches from the first. Steps that the scaler skips without calling the
        optimizer are not counted. Returns the monitor.

        Args:
            optimizer: the optimizer. If it is a halfstep optimizer, `scalars` includes the norm of its gradients.
            scaler: the scaler, if the monitor was created without one.
        """
        self.detach()
        self._scaler = scaler or self._scaler
        inner = unwrapped(optimizer)
        self._handles = [
            inner.register_step_pre_hook(lambda of, args, kwargs: self.step(of)),
            inner.register_step_post_hook(lambda of, args, kwargs: self._take_norm(of)),
        ]
        return self

    def detach(self) -> None:
        """Stop counting the steps of the optimizer that `attach` was called with."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def step(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Count the current gradients, if this step is to be counted.

        Args:
            optimizer: the optimizer that is about to step. If passed, gradients that ``scaler.unscale_(optimizer)`` has
                already unscaled are recognized; otherwise gradients are assumed to be scaled if there is a scaler.
        """
        if self._model is not None:  # it may have been sharded since the monitor was created
            self._parameters, self._model = _trained(self._model), None
        self._steps += 1
        if (self._steps - 1) % self.every == 0:
            self._collect(self._scale_of(optimizer))

    def _take_norm(self, optimizer: Any) -> None:
        """Keep the sum of squares with which a halfstep optimizer has just clipped, or its scaler has decided."""
        verdict = getattr(optimizer, "last_verdict", None)
        self._squares = None if verdict is None else verdict.sum_of_squares
        if self._squares is not None:
            self._squares_copy.take(self._squares)

    def _scale_of(self, optimizer: torch.optim.Optimizer | None) -> torch.Tensor | None:
        """The loss scale of the current gradients, on the device; None if they are not scaled."""
        scaler = self._scaler
        if scaler is None or not scaler.is_enabled():
            return None
        # torch's scaler keys its states by the optimizer passed to it, halfstep's by the innermost optimizer.
        for key in () if optimizer is None else (id(optimizer), id(unwrapped(optimizer))):
            if scaler._per_optimizer_states.get(key, {}).get("stage") is OptState.UNSCALED:
                return None
        scale = scaler._get_scale_async()  # get_scale() would wait for the device
        return None if scale is None else scale.detach()

    @torch.no_grad()
    def _collect(self, scale: torch.Tensor | None) -> None:
        groups: dict[torch.device, dict[int, torch.Tensor]] = {}
        for row, (name, parameter) in enumerate(self._parameters.items()):
            grad = gradient_of(parameter)
            if grad is not None:
                values = countable(f"the gradient of {name}", grad, self.format)
                groups.setdefault(values.device, {})[row] = values
        if any(map(capturing, groups)):
            return
        for device in groups.keys() - self._latest.keys():
            self._latest[device] = self._zeros(device), HostCopy()
        for device, (latest, copy) in self._latest.items():
            divisor = None if scale is None else to_device(scale, device)
            count_(latest.zero_(), groups.get(device, {}), self._grid, divisor, inverted=True)
            self._counts.setdefault(device, self._zeros(device)).add_(latest)
            copy.take(latest)
        self._collected += 1

    def _zeros(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(len(self._parameters), width(False), dtype=torch.int64, device=device)

    def _total(self, device: torch.device) -> torch.Tensor:
        """The sum of the counts of all devices."""
        return sum((to_device(counts, device) for counts in self._counts.values()), self._zeros(device))

    # ---------------------------------------------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The counts, on the CPU, for a checkpoint. Waits for the device."""
        counts = self._total(torch.device("cpu"))
        head = {"format": self.format.name, "names": list(self._parameters)}
        return {**head, "steps": self._steps, "collected": self._collected, "counts": counts}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the counts that `state_dict` returned.

        Raises:
            ValueError: the counts belong to another format or other parameters.
        """
        for key, expected in (("format", self.format.name), ("names", list(self._parameters))):
            if state_dict.get(key) != expected:
                raise ValueError(
                    f"Expected {key} in state_dict to be that of this monitor, {expected!r}, but got "
                    f"{state_dict.get(key)!r}"
                )
        self.reset()
        self._steps, self._collected = state_dict["steps"], state_dict["collected"]
        device = next((parameter.device for parameter in self._parameters.values()), torch.device("cpu"))
        self._counts[device] = state_dict["counts"].to(device, copy=True)

    # ------------------------------------------------------------------------------------------------------- reporting

    def statistics(self) -> Statistics:
        """Statistics of the unscaled gradients of all counted steps. Reading them waits for the device."""
        return self._statistics(self._total(next(iter(self._counts), torch.device("cpu"))))  # usually one device

    def _statistics(self, counts: torch.Tensor) -> Statistics:
        names = list(self._parameters)
        dtypes = [str(parameter.dtype).removeprefix("torch.") for parameter in self._parameters.values()]
        return Statistics(names, dtypes, self.format, 1.0, [(counts, range(len(names)))])

    def scalars(self) -> dict[str, float]:
        """Metrics to log at a step, for TensorBoard or Weights & Biases.

        * ``halfstep/scale``: the loss scale. ``halfstep/skipped``: the number of skipped steps since the process
          started, with a `halfstep.GradScaler`.
        * ``halfstep/grad_norm``: the norm of the unscaled gradients before clipping, over all ranks, if the monitor is
          attached to a halfstep optimizer that clips, or that a `halfstep.GradScaler` steps.
        * ``halfstep/underflow``: the fraction of all elements that the format flushes to zero, in the last counted step
          and at the current scale. ``halfstep/underflow/<parameter>``: the same for one parameter, from its first
          underflow on. Both count the elements of this rank: local shards if parameters are sharded.

        On a GPU only the first call waits for the device; later calls return what has arrived, usually from one or two
        steps earlier. With torch's scaler each call waits.
        """
        scaler, squares = self._scaler, self._squares
        scalars: dict[str, float] = {}
        if isinstance(scaler, GradScaler):
            scalars = scaler.scalars()
        elif scaler is not None and scaler.is_enabled():
            scalars["halfstep/scale"] = float(scaler.get_scale())
        total = None if squares is None else self._squares_copy.newest(squares, wait=True)
        if total is not None:
            scalars["halfstep/grad_norm"] = math.sqrt(total.item())
        arrived = [copy.newest(latest, wait=True) for latest, copy in self._latest.values()]
        if counts := [numbers for numbers in arrived if numbers is not None]:
            statistics = self._statistics(torch.stack(counts).sum(0)).at(_power(scalars.get("halfstep/scale", 1.0)))
            self._underflowing.update(row.name for row in statistics if row.flushed)
            rows = {f"/{name}": statistics[name] for name in statistics.names if name in self._underflowing}
            rows[""] = statistics.total
            scalars.update({f"halfstep/underflow{name}": row.share("flushed") for name, row in rows.items()})
        return scalars

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
        return AmpReport(self._steps, self._collected, scale, statistics.at(_power(scale)), advice)


def _trained(model_or_named_parameters: Any) -> dict[str, torch.Tensor]:
    named = named_tensors(model_or_named_parameters, "model_or_named_parameters")
    return {name: parameter for name, parameter in named.items() if parameter.requires_grad}


def _power(scale: float) -> float:
    """The largest power of two up to `scale`, which differs from it only with growth factors other than 2."""
    return 2.0 ** (math.frexp(scale)[1] - 1)
