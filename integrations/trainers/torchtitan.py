"""torchtitan: `Trainer` and `OptimizersContainer` with halfstep's loss scaling, clipping and skipped steps.

torchtitan builds its optimizers from a list of names, has no loss scaling, and clips by writing gradients inside the
training step. `OptimizersContainer` builds halfstep optimizers for the names of torch's. `Trainer` uses it, scales the
loss if a scaler is configured, clips inside the optimizer step, and does not advance schedules on skipped steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from typing import Any

import torch
from torchtitan import trainer as theirs
from torchtitan.components.loss import BaseLoss, ChunkedLossWrapper
from torchtitan.components.optimizer import OptimizersContainer as _OptimizersContainer
from torchtitan.components.optimizer.utils import init_optim_state, load_flat_optim_state_dict

from halfstep.integrations.optim import Adam, AdamW
from halfstep.integrations.optim.classes import attribute
from halfstep.integrations.scheduler import SkipAwareScheduler
from halfstep.integrations.trainers.folding import clip_in_next_step, folds, folds_all, scaler_metrics
from halfstep.numerics.scaling.scaler import GradScaler

REPLACED: dict[str, Callable[..., torch.optim.Optimizer]] = {"Adam": Adam, "AdamW": AdamW}
_clip_grad_norm_ = theirs.dist_utils.clip_grad_norm_


class OptimizersContainer(_OptimizersContainer):
    """torchtitan's container, whose ``"Adam"`` and ``"AdamW"`` are halfstep's.

    ``optimizer_kwargs`` may contain their options, such as ``"state_dtype"``. With
    ``implementation="fused_opt_states_bf16"`` moments are in bf16; other implementations have no effect.

    Attributes:
        scaler: the scaler that steps the optimizers, or None. `Trainer` sets it.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(_OptimizersContainer.Config):
        pass

    scaler: GradScaler | None = None

    @staticmethod
    def _resolve_optimizer_factory(name: str) -> Callable[..., torch.optim.Optimizer]:
        return REPLACED.get(name) or _OptimizersContainer._resolve_optimizer_factory(name)

    @staticmethod
    def _build_param_groups(model: Any, param_group_configs: Any, impl_kwargs: dict[str, Any]) -> Any:
        groups, patterns = _OptimizersContainer._build_param_groups(model, param_group_configs, impl_kwargs)
        for name in REPLACED.keys() & groups.keys():
            for group in groups[name]:  # torch's options, which have no effect here
                group.update(fused=None, foreach=None)
        return groups, patterns

    def _register_bf16_optimizer_state_hook(self) -> None:
        """Called for ``"fused_opt_states_bf16"``, before any state exists."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups if folds(optimizer) else ():
                group["state_dtype"] = torch.bfloat16

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a flat state dict, including all state of halfstep optimizers.

        torchtitan's method looks up the names in memory, which for codes and remainders differ from the saved ones.
        """
        for optimizer in self.optimizers:
            init_optim_state(optimizer)
            if folds(optimizer):
                optimizer.load_state_dict(_nested(optimizer, state_dict))
            else:
                load_flat_optim_state_dict(optimizer, state_dict)

    def step(self, closure: None = None) -> None:
        """Step all optimizers. With a scaler, either all of them step or none, and the scale is updated."""
        if closure is not None:
            raise ValueError("Expected closure to be None, but got one: torchtitan's containers take no closures")
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def clip_grad_norm_(self, parameters: list[torch.Tensor], max_norm: float, **options: Any) -> torch.Tensor:
        """Clip as `torchtitan.distributed.utils.clip_grad_norm_` does, in the next step if possible.

        This requires a single halfstep optimizer of all `parameters`, without pipeline and expert parallelism.
        Otherwise gradients are unscaled and clipped in place.

        Returns:
            The norm of the unscaled gradients before clipping, over all ranks.
        """
        if len(self.optimizers) == 1 and not options.get("ep_enabled") and options.get("pp_mesh") is None:
            (optimizer,) = self.optimizers
            if folds_all(optimizer, parameters):
                return clip_in_next_step(optimizer, max_norm, self.scaler)
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        return _clip_grad_norm_(parameters, max_norm, **options)


def _nested(optimizer: torch.optim.Optimizer, flat: dict[str, Any]) -> dict[str, Any]:
    """One optimizer's state dict from torchtitan's flat state, which stores every option for every parameter."""
    entries: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        if key.startswith("state."):
            name, _, entry = key.removeprefix("state.").rpartition(".")
            entries[name][entry] = value
    nested: dict[str, Any] = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
    for group in nested["param_groups"]:
        names = group.pop("param_names")
        pairs = zip(group["params"], names, strict=True)
        nested["state"] |= {index: entries[name] for index, name in pairs if name in entries}
        group.update({key: flat[f"param_groups.{names[0]}.{key}"] for key in group.keys() - {"params"}})
    return nested


class ScaledLoss(BaseLoss):
    """A torchtitan loss whose gradient is scaled. The returned value, which is logged, is not."""

    def __init__(self, inner: BaseLoss, scaler: GradScaler) -> None:
        self.inner, self.scaler = inner, scaler

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The unscaled loss and its metrics."""
        loss, metrics = self.inner(*args, **kwargs)
        if loss.requires_grad:
            loss.register_hook(self.scaler.scale)
        return loss, metrics


@dataclass(kw_only=True, slots=True)
class ScalerConfig:
    """Options for the `halfstep.GradScaler` of a `Trainer`, with the same names and defaults."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1


class Trainer(theirs.Trainer):
    """torchtitan's `Trainer` with halfstep: the same configuration, and `scaler`.

    * Optimizers named ``"Adam"`` and ``"AdamW"`` are halfstep's.
    * ``training.max_norm`` clips inside the step if `OptimizersContainer.clip_grad_norm_` can.
    * With `scaler`, for fp16 weights, the loss is scaled, overflows skip the step and hold the schedules on all ranks,
      logs include ``halfstep/scale`` and ``halfstep/skipped``, and checkpoints include the scale.

    Raises:
        ValueError: `scaler` was passed with pipeline parallelism, whose schedules compute the loss.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(theirs.Trainer.Config):
        scaler: ScalerConfig | None = field(default=None)
        """The loss scaler, for training in fp16. If None, the loss is not scaled."""

    optimizers: OptimizersContainer
    loss_fn: Any
    scaler: GradScaler | None = None

    def __init__(self, config: Trainer.Config) -> None:
        if config.scaler is not None and config.parallelism.pipeline_parallel_degree > 1:
            raise ValueError(
                "Expected pipeline_parallel_degree to be 1 with a scaler, but got "
                f"{config.parallelism.pipeline_parallel_degree}: train in bf16, which needs no scaler"
            )
        if type(config.optimizer) is _OptimizersContainer.Config:
            options = {field.name: getattr(config.optimizer, field.name) for field in fields(config.optimizer)}
            config.optimizer = OptimizersContainer.Config(**options)
        super().__init__(config)
        if config.scaler is None:
            return
        self.scaler = self.optimizers.scaler = GradScaler(self.device.type, **asdict(config.scaler))
        schedules = self.lr_schedulers.schedulers
        schedules[:] = [SkipAwareScheduler(schedule, self.scaler) for schedule in schedules]
        if isinstance(self.loss_fn, ChunkedLossWrapper):  # it runs a backward for each chunk
            self.loss_fn.loss_fn = ScaledLoss(self.loss_fn.loss_fn, self.scaler)
        else:
            self.loss_fn = ScaledLoss(self.loss_fn, self.scaler)
        self.metrics_processor.log = partial(self._log, self.metrics_processor.log)

    def _log(self, log: Callable[..., None], *args: Any, extra_metrics: Any = None, **kwargs: Any) -> None:
        log(*args, extra_metrics={**(extra_metrics or {}), **scaler_metrics(self.scaler)}, **kwargs)

    def train_step(self, data_iterator: Any) -> None:
        """Train one step; see `torchtitan.trainer.Trainer.train_step`."""
        # torchtitan calls clip_grad_norm_ through its module, and offers no hook.
        with attribute(theirs.dist_utils, "clip_grad_norm_", self.optimizers.clip_grad_norm_):
            super().train_step(data_iterator)

    def state_dict(self) -> dict[str, Any]:
        """The state of the trainer, including that of the scaler."""
        state = super().state_dict()
        return state if self.scaler is None else {**state, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this class, or of torchtitan's `Trainer` if there is no scaler."""
        super().load_state_dict(state_dict)
        if self.scaler is not None:
            self.scaler.load_state_dict(state_dict["scaler"])
