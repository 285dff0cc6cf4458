"""transformers: a `Trainer`, and a mixin for classes derived from it, such as TRL's.

``optim=`` is a closed list of names, the trainer creates its accelerator itself, and ``max_grad_norm`` writes every
gradient, even if it is 0 and only the norm is logged. `TrainerMixin` overrides the methods concerned.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from halfstep.integrations.monitor import AmpMonitor
from halfstep.integrations.optim import AdamW
from halfstep.integrations.trainers.accelerate import Accelerator
from halfstep.integrations.trainers.folding import scaler_metrics
from halfstep.numerics.scaling.scaler import GradScaler

REPLACED = ("adamw_torch", "adamw_torch_fused")  # the latter is the default of TrainingArguments
OPTIONS = ("master_weights", "state_dtype", "rounding", "seed", "amsgrad")  # of halfstep.AdamW, in `optim_args`
WORDS = {"None": None, "True": True, "False": False, "float32": torch.float32, "bfloat16": torch.bfloat16}


def options_in(text: str | None) -> dict[str, Any]:
    """Parse ``optim_args``, such as ``"state_dtype=bfloat16,rounding=stochastic"``, into options of our AdamW."""
    options: dict[str, Any] = {}
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        if name not in OPTIONS or not value:
            raise ValueError(
                f"Expected optim_args to be name=value, separated by commas, with the names {', '.join(OPTIONS)}, but "
                f"got {part!r}: set learning rate, betas, eps and weight decay in TrainingArguments"
            )
        options[name] = WORDS.get(value.removeprefix("torch."), int(value) if value.isdecimal() else value)
    return options


class TrainerMixin:
    """Makes a class derived from `transformers.Trainer` use halfstep: name the mixin first among the bases.

    * The optimizer is `halfstep.AdamW` if `TrainingArguments` selects torch's AdamW, as it does by default. Its
      options are passed in ``optim_args``, for example ``"state_dtype=bfloat16,rounding=stochastic"``.
    * The accelerator is `halfstep.integrations.trainers.accelerate.Accelerator`: ``max_grad_norm`` clips inside the
      step, and schedules do not advance on skipped steps.
    * Logs include ``halfstep/scale`` and ``halfstep/skipped`` if there is a scaler, or all `scalars` of `monitor`.

    Args:
        scaler: the scaler for fp16 weights. Default: one only with ``fp16=True``, which trains fp32 weights.
        monitor: a `halfstep.AmpMonitor` of the model, which is attached to the optimizer.

    Examples:
        class SFTTrainer(TrainerMixin, trl.SFTTrainer): ...
    """

    accelerator: Accelerator

    def __init__(
        self, *args: Any, scaler: GradScaler | None = None, monitor: AmpMonitor | None = None, **kwargs: Any
    ) -> None:
        self._scaler, self._monitor = scaler, monitor
        super().__init__(*args, **kwargs)

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[Any, Any]:
        """The class of the optimizer and its options; see `transformers.Trainer.get_optimizer_cls_and_kwargs`."""
        if args.optim not in REPLACED:
            return transformers.Trainer.get_optimizer_cls_and_kwargs(args, model)
        betas = args.adam_beta1, args.adam_beta2
        options = {"lr": args.learning_rate, "betas": betas, "eps": args.adam_epsilon}
        return AdamW, {**options, **options_in(args.optim_args)}

    def create_accelerator_and_postprocess(self) -> None:
        """Create halfstep's accelerator."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        Accelerator.adopt(self.accelerator, self._scaler)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the schedule, and attach the monitor: the trainer calls this once the optimizer exists."""
        if self._monitor is not None:
            self._monitor.attach(self.optimizer, self.accelerator.scaler)  # type: ignore[attr-defined]
        return super().create_scheduler(*args, **kwargs)  # type: ignore[misc]

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Log, adding the metrics of the monitor or the scaler to training logs."""
        if "loss" in logs:
            logs.update(scaler_metrics(self.accelerator.scaler, self._monitor))
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with halfstep: the same arguments, and `scaler`. See `TrainerMixin`."""
