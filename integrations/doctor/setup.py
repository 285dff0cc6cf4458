"""A training set-up of any library: its parameters, what each optimizer holds for them, and how it rounds."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from halfstep.integrations.doctor.findings import count
from halfstep.integrations.offload import OffloadedAdam, OffloadedAdamW
from halfstep.integrations.optim.options import is_stochastic, master_of
from halfstep.integrations.optim.state import OptimizerState
from halfstep.kernels.multi_tensor import has_memory
from halfstep.numerics.scaling.scaler import unwrapped
from halfstep.numerics.scaling.stand_ins import gradient_of
from halfstep.numerics.scaling.topology import local

HALF = (torch.bfloat16, torch.float16)
# Wrappers of modules, whose names in front of a parameter's name say nothing.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Libraries whose optimizers step copies of the parameters that they make themselves.
_COPYING = {"deepspeed", "megatron", "apex", "fairscale", "transformer_engine", "colossalai"}
# Entries of an optimizer's state that keep what a 16-bit weight cannot, by how libraries name them.
_MASTER = re.compile(r"master|remainder|kahan|compensation|residual|ecc|error|shift|fp32_param", re.IGNORECASE)
# Options of groups or attributes of optimizers that say that updates below the spacing of a weight are not lost.
_STOCHASTIC = ("bf16_stochastic_round", "stochastic_rounding")
_KEEPS = (*_STOCHASTIC, "master_weights", "kahan_sum", "use_kahan_summation")
# Attributes under which libraries keep a loss scaler: timm's NativeScaler, mmengine's AmpOptimWrapper, Accelerate's
# Accelerator and Lightning's plugins.
_SCALERS = ("_scaler", "loss_scaler", "scaler")


class Entry(NamedTuple):
    """A parameter in an optimizer."""

    name: str  # in the model; "group 0, parameter 3" if the model does not have it
    parameter: torch.Tensor  # for optimizers on the host, what it is on the device
    owner: Any  # the optimizer that is stepped
    optimizer: Any  # the same, or what a ZeroRedundancyOptimizer has for this rank's part
    group: dict[str, Any]
    state: dict[str, torch.Tensor]  # those that have as many elements as this rank's shard
    scales: dict[str, torch.Tensor]  # the others, such as scales of moments in 8 bits
    step: Any  # the step count; None if there is none

    @property
    def grad(self) -> torch.Tensor | None:
        return gradient_of(self.parameter)

    @property
    def lr(self) -> float:
        return float(self.group.get("lr") or 0.0)

    @property
    def steps_taken(self) -> float:
        """The number of steps that it has taken, as far as the state says."""
        return float(self.step) if self.step is not None else 0.0

    @property
    def half(self) -> bool:
        """Whether it is in bf16 or fp16."""
        return self.parameter.dtype in HALF

    @property
    def is_adam(self) -> bool:
        """Whether the optimizer has two moments."""
        return "betas" in self.group or "exp_avg_sq" in self.state

    @property
    def library(self) -> str:
        return type(self.optimizer).__module__.split(".")[0]

    @property
    def stochastic(self) -> bool:
        """Whether the optimizer rounds stochastically."""
        if isinstance(self.optimizer, OptimizerState):
            return is_stochastic(self.group)
        return any(map(self._option, _STOCHASTIC))

    @property
    def keeps_updates(self) -> bool:
        """Whether updates below half of the spacing of a weight add up instead of being lost."""
        if not self.half or self.stochastic:
            return True
        if isinstance(self.optimizer, OptimizerState):
            return master_of(self.parameter, self.group["master_weights"]) is not None
        if self.library == "optimi":  # by default for 16-bit parameters
            return self.group.get("kahan_sum") is not False
        if self.library == "flashoptim":
            return self._option("master_weight_bits") is not None
        return any(map(self._option, _KEEPS)) or any(map(_MASTER.search, self.state))

    def _option(self, name: str) -> Any:
        return self.group.get(name, getattr(self.optimizer, name, None))


class Setup:
    """What there is of a training set-up."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, scaler: Any = None) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"Expected model to be a torch.nn.Module, but got a {type(model).__name__}")
        self.model = model
        # Names by the id of the parameter; tied parameters have one.
        self.names = {id(parameter): _WRAPPERS.sub("", name) for name, parameter in model.named_parameters()}
        self.optimizers = list(innermost(optimizer))
        self.scaler = _scaler_of(scaler, optimizer)
        if not getattr(self.scaler, "is_enabled", lambda: True)():
            self.scaler = None  # a disabled one does nothing
        self.entries = [entry for owner in self.optimizers for entry in self._entries_of(owner)]
        # Whether the optimizers step copies of the parameters, made by them or by the training loop.
        self.steps_copies = self._steps_copies(optimizer)

    def _entries_of(self, owner: Any) -> Iterator[Entry]:
        on_device: dict[int, torch.Tensor] = {}
        if isinstance(owner, (OffloadedAdam, OffloadedAdamW)):
            on_device = {id(mirror.host): mirror.parameter for mirror in owner._mirrors.values()}
        zero = any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(owner).__mro__)
        optimizer = owner.optim if zero else owner
        for number, group in enumerate(owner.param_groups):
            for index, stepped in enumerate(group["params"]):
                parameter = on_device.get(id(stepped), stepped)
                name = self.names.get(id(parameter), f"group {number}, parameter {index}")
                state = dict(optimizer.state[stepped]) if stepped in optimizer.state else {}
                step, size = state.pop("step", None), local(stepped).numel()
                tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and not v.is_sparse}
                whole = {key: value for key, value in tensors.items() if local(value).numel() == size}
                rest = {key: value for key, value in tensors.items() if key not in whole}
                yield Entry(name, parameter, owner, optimizer, group, whole, rest, step)

    def _steps_copies(self, optimizer: Any) -> bool:
        if not self.entries or any(id(entry.parameter) in self.names for entry in self.entries):
            return False
        if {entry.library for entry in self.entries} & _COPYING or _reaches((optimizer, self.optimizers), self.names):
            return True
        copies, originals = [entry.parameter for entry in self.entries], [weight for _, weight in self.trainable()]
        if {copy.dtype for copy in copies} != {torch.float32} or not any(weight.dtype in HALF for weight in originals):
            return False
        # Copies that the training loop makes are tensors of no module, or in one piece. fp32 Parameters may be those of
        # another model instead: then the optimizer never gets a gradient, and the weights part.
        if not all(isinstance(copy, torch.nn.Parameter) for copy in copies) or all(copy.dim() == 1 for copy in copies):
            return True
        return (
            any(entry.steps_taken >= 1 for entry in self.entries)
            and [copy.shape for copy in copies] == [weight.shape for weight in originals]
            and all(
                torch.equal(sample(copy).to(weight.device, weight.dtype), sample(weight))
                for copy, weight in zip(copies, originals, strict=True)
            )
        )

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Names and parameters of the model."""
        return [(self.names[id(parameter)], parameter) for parameter in self.model.parameters()]

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        """Names and parameters of the model that require a gradient."""
        return [(name, parameter) for name, parameter in self.parameters() if parameter.requires_grad]

    def in_words(self) -> str:
        """What is examined."""
        names = sorted({public_name(type(optimizer)) for optimizer in self.optimizers})
        names += [public_name(type(self.scaler))] if self.scaler is not None else []
        return ", ".join([f"{type(self.model).__name__} of {count(len(self.names), 'parameter')}", *names])

    def computes_in_fp16(self) -> str:
        """Where the set-up says that it computes in fp16; empty if it does not say so."""
        for name, parameter in self.trainable():
            if parameter.dtype == torch.float16:
                return f"fp16 weights ({name})"
        for module in self.model.modules():
            policy = getattr(module, "mixed_precision", None)  # FSDP1
            state_of: Any = getattr(module, "_get_fsdp_state", None)  # FSDP2
            if policy is None and state_of is not None:
                policy = getattr(state_of(), "_mp_policy", None)
            if getattr(policy, "param_dtype", None) == torch.float16:
                return f"the mixed precision of {type(module).__name__}"
        return ""

    def is_flat(self) -> bool:
        """Whether FSDP1 shards the model over several ranks."""
        names = {type(module).__name__ for module in self.model.modules()}
        return "FullyShardedDataParallel" in names and dist.is_initialized() and dist.get_world_size() > 1


def public_name(cls: type) -> str:
    """The name of a class with the shortest module that exports it: ``"torch.optim.AdamW"``, ``"halfstep.AdamW"``."""
    modules = accumulate(cls.__module__.split("."), "{}.{}".format)
    exported = (name for name in modules if getattr(sys.modules.get(name), cls.__name__, None) is cls)
    return f"{next(exported, cls.__module__)}.{cls.__qualname__}"


def innermost(optimizer: Any, outer: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The optimizers that are in an optimizer, in a wrapper of one or several by any library, or in a collection.

    Raises:
        TypeError: there is something else.
    """
    if hasattr(optimizer, "param_groups"):
        inner = unwrapped(optimizer)
        # Those of torchtitan's containers, which are optimizers themselves, and what any other wrapper holds.
        values = [getattr(inner, "optimizers", None)]
        values += [] if isinstance(inner, torch.optim.Optimizer) else getattr(inner, "__dict__", {}).values()
        parts = [part for value in values for part in _parts(value) if hasattr(part, "param_groups")]
        parts = [part for part in parts if all(part is not other for other in (inner, *outer))]
        if not parts:
            yield inner
        outer = (*outer, inner)
    else:
        collection = isinstance(optimizer, Iterable) and not isinstance(optimizer, (str, torch.nn.Module, torch.Tensor))
        if optimizer is not None and not collection:
            raise TypeError(
                "Expected optimizer to be an optimizer with param_groups, or a sequence of them, but got a "
                f"{type(optimizer).__name__}"
            )
        parts = _parts(optimizer if optimizer is None or isinstance(optimizer, Mapping) else list(optimizer))
    for part in parts:
        yield from innermost(part, outer)


def _parts(value: Any) -> list[Any]:
    """The elements of a list or tuple, or the values of a mapping; another object alone; nothing for None."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None else [value]


def _scaler_of(scaler: Any, optimizer: Any) -> Any:
    """The loss scaler in an object of a library that has one; None if it has none.

    Raises:
        TypeError: the object is of another kind.
    """
    if scaler is None:  # that of a wrapper of the optimizer, such as mmengine's AmpOptimWrapper
        return next(filter(_is_scaler, (getattr(optimizer, name, None) for name in _SCALERS)), None)
    outer = scaler
    while scaler is not None and not _is_scaler(scaler):
        name = next((name for name in _SCALERS if getattr(scaler, name, scaler) is not scaler), None)
        if name is None:
            raise TypeError(
                "Expected scaler to be a loss scaler with scale, step, update and get_scale, or an object with one as "
                f"{', '.join(_SCALERS)}, but got a {type(outer).__name__}: pass the torch.amp.GradScaler or "
                "halfstep.GradScaler, or None without one"
            )
        scaler = getattr(scaler, name)
    return scaler


def _is_scaler(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("scale", "step", "update", "get_scale"))


def _reaches(start: Any, parameters: Collection[int], depth: int = 5) -> bool:
    """Whether attributes and containers lead from an object to a parameter with one of some ids."""
    level, seen = [start], set()
    for _ in range(depth):
        below: list[Any] = []
        for value in level:
            if id(value) in parameters:
                return True
            if id(value) in seen or isinstance(value, (torch.Tensor, type, ModuleType)):
                continue
            seen.add(id(value))
            if isinstance(value, Mapping):
                below += [*value.keys(), *value.values()]
            elif isinstance(value, (list, tuple, set)):
                below += value
            elif isinstance(value, torch.nn.Module):
                below += value.parameters()
            else:
                below += getattr(value, "__dict__", {}).values()
        level = below
    return False


# ------------------------------------------------------------------------------------------------------------- tensors


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's shard, in which each element occurs once, however large the shard is expanded."""
    shard = local(tensor).detach()
    sizes = [1 if stride == 0 else size for size, stride in zip(shard.shape, shard.stride(), strict=True)]
    shard = shard.as_strided(sizes, shard.stride())
    span = 1 + sum((size - 1) * stride for size, stride in zip(shard.shape, shard.stride(), strict=True))
    return shard.as_strided((span,), (1,)) if shard.numel() > span else shard


def size_of(*tensors: torch.Tensor | None) -> int:
    """The bytes of this rank's shards."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def nonfinite(tensor: torch.Tensor) -> str:
    """``"NaN"``, ``"Inf"`` or ``""``; ``""`` too for what holds no numbers of 16 bits or more in memory of its own.

    Reads the memory once, without a copy, and waits for the device.
    """
    shard = local(tensor)
    if not has_memory(shard) or shard.layout != torch.strided or not shard.numel():
        return ""
    if shard.is_complex():
        shard = torch.view_as_real(shard.resolve_conj())
    if not shard.is_floating_point() or shard.element_size() == 1:
        return ""
    extremes = torch.stack(torch.aminmax(distinct(shard)))
    return "NaN" if bool(extremes.isnan().any()) else "Inf" if bool(extremes.isinf().any()) else ""


def sample(tensor: torch.Tensor, most: int = 1 << 16) -> torch.Tensor:
    """At most `most` elements of this rank's shard, evenly spaced, in a tensor of one dimension."""
    shard: torch.Tensor = local(tensor).detach()
    step = -(-shard.numel() // most) or 1
    if shard.is_contiguous() or step == 1:
        return shard.flatten()[::step]
    # flatten would copy all, of an expanded tensor more than there is.
    indices = torch.arange(-(-shard.numel() // step), dtype=torch.int64, device=shard.device) * step
    return shard[torch.unravel_index(indices, shard.shape)]


def holds_bf16_only(tensor: torch.Tensor) -> bool:
    """Whether an fp32 tensor has many different elements, and all are numbers of bf16: their last 16 bits are 0."""
    if tensor.dtype != torch.float32 or tensor.is_meta:
        return False
    codes = sample(tensor).contiguous().view(torch.int32)
    return codes.numel() >= 256 and bool(((codes & 0xFFFF) == 0).all()) and codes.unique().numel() >= 64
