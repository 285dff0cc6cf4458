"""Stand-ins for libraries' wrappers of optimizers and loss scalers, with the attributes that training loops use."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_


class NativeScaler:
    """As timm's: called with the loss, it does the backward, the clipping and the step."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def __call__(self, loss: torch.Tensor, optimizer: Any, clip_grad: float, parameters: Any) -> None:
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()


class OptimWrapper:
    """As mmengine's: with several groups, it shows one more, whose parameters are no list."""

    def __init__(self, optimizer: torch.optim.Optimizer, clip: float = 1.0) -> None:
        self.optimizer, self.clip = optimizer, clip
        several = len(optimizer.param_groups) > 1
        self.base_param_settings = {"params": torch.zeros(1), **optimizer.defaults} if several else None

    @property
    def param_groups(self) -> Any:
        groups = self.optimizer.param_groups
        return groups if self.base_param_settings is None else [*groups, self.base_param_settings]

    def update_params(self, loss: torch.Tensor) -> None:
        self.backward(loss)
        self.step()
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        for group in self.optimizer.param_groups:
            clip_grad_norm_(group["params"], self.clip)
        self.optimizer.step()


class AmpOptimWrapper(OptimWrapper):
    """As mmengine's: it has the loss scaler."""

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        super().__init__(optimizer)
        self.loss_scaler = scaler

    def backward(self, loss: torch.Tensor) -> None:
        self.loss_scaler.scale(loss).backward()

    def step(self) -> None:
        self.loss_scaler.unscale_(self.optimizer)
        for group in self.optimizer.param_groups:
            clip_grad_norm_(group["params"], self.clip)
        self.loss_scaler.step(self.optimizer)
        self.loss_scaler.update()


class OptimWrapperDict:
    """As mmengine's: wrappers by name, whose groups are by name too."""

    def __init__(self, **wrappers: OptimWrapper) -> None:
        self.optim_wrappers = wrappers

    @property
    def param_groups(self) -> dict[str, Any]:
        return {name: wrapper.param_groups for name, wrapper in self.optim_wrappers.items()}


class Precision:
    """As Lightning's plugin MixedPrecision and as an Accelerator: the scaler is None where there is none."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler


class OptimizersContainer(torch.optim.Optimizer):
    """As torchtitan's: an optimizer of all parameters, whose steps are those of the optimizers in it."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = list(optimizers)
        super().__init__([p for one in optimizers for group in one.param_groups for p in group["params"]], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizers:
            one.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none)


class Stash:
    """As apex's ``optimizer._amp_stash``: it knows the model's parameters; the optimizer itself has only the copies."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.all_fp16_params = list(parameters)
