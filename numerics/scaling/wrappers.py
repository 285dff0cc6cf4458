"""What torch wraps around parameters and optimizers, which these do not refer to: DDP, FSDP1, FSDP2 and ZeRO-1.

A parameter does not know its module, nor the local optimizer of a `ZeroRedundancyOptimizer` the outer one. torch calls
global hooks when a module becomes part of another one, and before each optimizer steps: what is needed of the wrappers
is noted there, without keeping them alive. Since `import halfstep` does not import this module, modules may have been
wrapped before: these are looked for once, when it is imported.
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

_ATTRIBUTES = ("module", "_fsdp_wrapped_module")  # under which DDP and FSDP1 hold what they wrap
_wrappers: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
_zero_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by the local optimizer
_watches: list[Any] = []


def _is_named(value: Any, *names: str) -> bool:
    return any(cls.__name__ in names for cls in type(value).__mro__)


def _note_module(outer: torch.nn.Module, name: str, inner: Any) -> None:
    if name in _ATTRIBUTES and _is_named(outer, "DistributedDataParallel", "FullyShardedDataParallel"):
        _wrappers.add(outer)


register_module_module_registration_hook(_note_module)
if torch.distributed.is_available() and torch.distributed.is_initialized():
    for wrapper in gc.get_objects():
        if issubclass(type(wrapper), torch.nn.Module):
            _note_module(wrapper, _ATTRIBUTES[0], None)


def wrapped_by(name: str) -> list[Any]:
    """The living modules of ``"DistributedDataParallel"`` or ``"FullyShardedDataParallel"`` (FSDP1)."""
    return [module for module in _wrappers if _is_named(module, name)]


def modules_of_fsdp2() -> list[torch.nn.Module]:
    """The living modules to which ``fully_shard`` was applied."""
    states = sys.modules.get("torch.distributed._composable_state")
    return [module for module in getattr(states, "_module_state_mapping", ()) if _is_named(module, "FSDPModule")]


def is_zero(optimizer: Any) -> bool:
    """Whether it is a `ZeroRedundancyOptimizer`. Does not import torch.distributed."""
    return type(optimizer).__name__ == "ZeroRedundancyOptimizer"


def watch_zero() -> None:
    """Note the group of each `ZeroRedundancyOptimizer` that steps. Its local optimizer calls this when it is made."""
    if "torch.distributed.optim.zero_redundancy_optimizer" in sys.modules and not _watches:
        _watches.append(register_optimizer_step_pre_hook(_note_zero))


def _note_zero(optimizer: Any, args: Any, kwargs: Any) -> None:
    if is_zero(optimizer):
        _zero_groups[optimizer.optim] = optimizer.process_group


def zero_group_of(optimizer: torch.optim.Optimizer) -> Any:
    """The group over which a `ZeroRedundancyOptimizer` distributes its state, if `optimizer` is its local part."""
    return _zero_groups.get(optimizer)
