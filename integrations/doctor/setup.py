"""A training set-up built with any library: its parameters, their optimizer state, and how updates are rounded."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from halfstep.integrations.doctor.findings import count
from halfstep.integrations.optim.classes import LayoutOptimizer
from halfstep.kernels.multi_tensor import has_memory
from halfstep.numerics.scaling.scaler import stepping, unwrapped
from halfstep.numerics.scaling.sharding import local
from halfstep.numerics.scaling.stand_ins import gradient_of
from halfstep.numerics.state_layout import rounds_stochastically

HALF = torch.bfloat16, torch.float16
# Attribute names of module wrappers, which are dropped from parameter names.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Names that libraries give to optimizer state that keeps what rounding a 16-bit weight loses.
_MASTER = re.compile(r"master|remainder|kahan|compensation|residual|ecc|error|shift|fp32_param", re.IGNORECASE)
# Group options or optimizer attributes which say that updates below half an ulp of a weight are not lost.
_STOCHASTIC = ("bf16_stochastic_round", "stochastic_rounding")
_KEEPS = (*_STOCHASTIC, "master_weights", "kahan_sum", "use_kahan_summation")
# Attributes that hold the scaler of timm's NativeScaler, mmengine's AmpOptimWrapper, Accelerator, Lightning's plugins.
_SCALERS = ("_scaler", "loss_scaler", "scaler")


@dataclass(frozen=True, eq=False)
class Entry:
    """A parameter in an optimizer."""

    name: str  # in the model; "group 0, parameter 3" if the model does not have it
    parameter: torch.Tensor  # for optimizers that step on the host, the one on the device
    owner: Any  # the optimizer that the user steps
    optimizer: Any  # the same, or the local optimizer of a ZeroRedundancyOptimizer
    group: dict[str, Any]
    state: dict[str, torch.Tensor]  # tensors with as many elements as the local shard
    scales: dict[str, torch.Tensor]  # all other tensors, such as scales of 8-bit moments
    step: Any  # the step count; None if there is none

    grad = property(lambda self: gradient_of(self.parameter))
    lr = property(lambda self: float(self.group.get("lr") or 0.0))
    eps = property(lambda self: float(self.group.get("eps", 1.0)))
    steps_taken = property(lambda self: 0.0 if self.step is None else float(self.step))
    half = property(lambda self: self.parameter.dtype in HALF)
    frozen = property(lambda self: isinstance(self.parameter, torch.nn.Parameter) and not self.parameter.requires_grad)
    loses_updates = property(lambda self: self.parameter.requires_grad and self.lr > 0 and not self.keeps_updates)

    @property
    def decay(self) -> float:
        """The fraction by which decoupled weight decay shrinks a weight per step."""
        decoupled = self.group.get("decoupled_weight_decay", "AdamW" in type(self.optimizer).__name__)
        return self.lr * float(self.group.get("weight_decay") or 0.0) if decoupled else 0.0

    @property
    def stochastic(self) -> bool:
        """Whether the optimizer rounds stochastically."""
        if isinstance(self.optimizer, LayoutOptimizer):
            return rounds_stochastically(self.group["rounding"], self.group["state_dtype"])
        return any(map(self._option, _STOCHASTIC))

    @property
    def keeps_updates(self) -> bool:
        """Whether updates below half an ulp of a weight accumulate instead of being lost."""
        if not self.half or self.stochastic:
            return True
        if isinstance(self.optimizer, LayoutOptimizer):
            return self.optimizer._layout(self.parameter, self.group).master is not None
        library = type(self.optimizer).__module__.split(".")[0]
        if library == "optimi":  # by default for 16-bit parameters
            return self.group.get("kahan_sum") is not False
        if library == "flashoptim":
            return self._option("master_weight_bits") is not None
        return any(map(self._option, _KEEPS)) or any(map(_MASTER.search, self.state))

    def _option(self, name: str) -> Any:
        return self.group.get(name, getattr(self.optimizer, name, None))


class Setup:
    """The model, the innermost optimizers, the loss scaler (None if there is none, or disabled), and what follows."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, scaler: Any = None) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"Expected model to be a torch.nn.Module, but got a {type(model).__name__}")
        self.model = model
        # Tied parameters occur once.
        self.parameters = [(_WRAPPERS.sub("", name), parameter) for name, parameter in model.named_parameters()]
        self.names = {id(parameter): name for name, parameter in self.parameters}
        self.trainable = [(name, parameter) for name, parameter in self.parameters if parameter.requires_grad]
        self.optimizers = list(innermost(optimizer))
        self.scaler = _scaler_of(scaler, optimizer)
        if not getattr(self.scaler, "is_enabled", lambda: True)():
            self.scaler = None
        self.entries = [entry for owner in self.optimizers for entry in self._entries_of(owner)]
        self.steps_copies = self._steps_copies(optimizer)  # made by the optimizers or by the training loop

    def _entries_of(self, owner: Any) -> Iterator[Entry]:
        optimizer = stepping(owner)
        for number, group in enumerate(owner.param_groups):
            for index, parameter in enumerate(group["params"]):
                name = self.names.get(id(parameter), f"group {number}, parameter {index}")
                state = dict(optimizer.state[parameter]) if parameter in optimizer.state else {}
                step, size = state.pop("step", None), local(parameter).numel()
                tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and not v.is_sparse}
                whole = {key: value for key, value in tensors.items() if local(value).numel() == size}
                scales = {key: value for key, value in tensors.items() if key not in whole}
                yield Entry(name, parameter, owner, optimizer, group, whole, scales, step)

    def _steps_copies(self, optimizer: Any) -> bool:
        copies, weights = [entry.parameter for entry in self.entries], [weight for _, weight in self.trainable]
        if not copies or any(id(copy) in self.names for copy in copies):
            return False
        # Optimizers that make copies refer to the weights, directly or in an object such as apex's stash.
        attributes = [value for owner in (*tree_leaves(optimizer), *self.optimizers) for value in _inside(owner)]
        attributes += [inner for value in attributes for inner in _inside(value)]
        if any(id(value) in self.names for value in attributes):
            return True
        if {copy.dtype for copy in copies} != {torch.float32} or not any(weight.dtype in HALF for weight in weights):
            return False
        # Copies made by the training loop are plain tensors, or flat. fp32 Parameters may belong to another model
        # instead: then the optimizer never gets a gradient, and the weights diverge.
        if not all(isinstance(copy, torch.nn.Parameter) for copy in copies) or all(copy.dim() == 1 for copy in copies):
            return True
        stepped = any(entry.steps_taken >= 1 for entry in self.entries)
        return (
            stepped
            and [copy.shape for copy in copies] == [weight.shape for weight in weights]
            and all(torch.equal(sample(c).to(w), sample(w)) for c, w in zip(copies, weights, strict=True))
        )

    def in_words(self) -> str:
        """A description of what is examined."""
        types = [type(part) for part in (*self.optimizers, self.scaler) if part is not None]
        names = dict.fromkeys(f"{cls.__name__} of {cls.__module__.split('.')[0]}" for cls in types)
        return ", ".join([f"{type(self.model).__name__} of {count(len(self.names), 'parameter')}", *names])

    def computes_in_fp16(self) -> str:
        """The evidence that the model computes in fp16; empty if there is none."""
        for name, parameter in self.trainable:
            if parameter.dtype == torch.float16:
                return f"fp16 weights ({name})"
        for module in self.model.modules():
            state = getattr(module, "_get_fsdp_state", lambda: None)()  # FSDP2
            policy = getattr(module, "mixed_precision", getattr(state, "_mp_policy", None))  # FSDP1 has the former
            if getattr(policy, "param_dtype", None) == torch.float16:
                return f"the mixed precision of {type(module).__name__}"
        return ""

    def is_flat(self) -> bool:
        """Whether FSDP1 shards the model over several ranks."""
        names = {type(module).__name__ for module in self.model.modules()}
        return "FullyShardedDataParallel" in names and dist.is_initialized() and dist.get_world_size() > 1


def innermost(optimizer: Any, outer: tuple[Any, ...] = ()) -> Iterator[Any]:
    """The innermost optimizers of an optimizer, of any library's wrapper of one or several, or of a collection."""
    optimizer = () if optimizer is None else optimizer
    if hasattr(optimizer, "param_groups"):
        inner = unwrapped(optimizer)
        outer = (*outer, inner)
        # torchtitan's containers are optimizers themselves; other wrappers have optimizers as attributes.
        contents = [getattr(inner, "optimizers", None)]
        contents += [] if isinstance(inner, torch.optim.Optimizer) else _inside(inner)
        parts = [part for part in tree_leaves(contents) if hasattr(part, "param_groups")]
        parts = [part for part in parts if not any(part is container for container in outer)]
        if not parts:
            yield inner
    elif isinstance(optimizer, (str, torch.nn.Module, torch.Tensor)) or not isinstance(optimizer, Iterable):
        raise TypeError(
            "Expected optimizer to be an optimizer with param_groups, or a sequence of them, but got a "
            f"{type(optimizer).__name__}"
        )
    else:
        parts = list(optimizer.values() if isinstance(optimizer, Mapping) else optimizer)
    for part in parts:
        yield from innermost(part, outer)


def _inside(value: Any) -> list[Any]:
    """The attributes of an object, including the contents of containers, and the parameters of a module."""
    inside: list[Any] = tree_leaves(getattr(value, "__dict__", {}))
    return [*inside, *(value.parameters() if isinstance(value, torch.nn.Module) else ())]


def _scaler_of(scaler: Any, optimizer: Any) -> Any:
    """The loss scaler inside `scaler`, or inside the optimizer's wrapper; None if there is none."""
    if scaler is None:  # the optimizer may be wrapped with one, as in mmengine's AmpOptimWrapper
        return next(filter(_is_scaler, (getattr(optimizer, name, None) for name in _SCALERS)), None)
    inner = scaler
    while inner is not None and not _is_scaler(inner):
        if not any(hasattr(inner, name) for name in _SCALERS):
            raise TypeError(
                "Expected scaler to be a loss scaler with scale, step, update and get_scale, or an object with one as "
                f"{', '.join(_SCALERS)}, but got a {type(scaler).__name__}: pass the torch.amp.GradScaler or "
                "halfstep.GradScaler, or None if there is none"
            )
        inner = next(getattr(inner, name) for name in _SCALERS if hasattr(inner, name))
    return inner


def _is_scaler(value: Any) -> bool:
    return all(callable(getattr(value, name, None)) for name in ("scale", "step", "update", "get_scale"))


# ------------------------------------------------------------------------------------------------------------- tensors


def distinct(tensor: torch.Tensor) -> torch.Tensor:
    """The local shard without its expanded dimensions, so that each element in memory occurs once."""
    shard = local(tensor).detach()
    return shard[tuple(slice(1) if stride == 0 else slice(None) for stride in shard.stride())]


def size_of(*tensors: torch.Tensor | None) -> int:
    """The total bytes of the local shards."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def nonfinite(tensor: torch.Tensor) -> str:
    """``"NaN"``, ``"Inf"`` or ``""``; also ``""`` for sparse, non-floating-point and 8-bit tensors, or without memory.

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


def sample(tensor: torch.Tensor, limit: int = 1 << 16) -> torch.Tensor:
    """A 1-D copy of at most `limit` evenly spaced elements of the local shard."""
    shard: torch.Tensor = torch.atleast_1d(local(tensor).detach())
    step = -(-shard.numel() // limit) or 1
    indices = torch.arange(0, shard.numel(), step, dtype=torch.int64, device=shard.device)
    return shard[torch.unravel_index(indices, shard.shape)]


def holds_bf16_only(tensor: torch.Tensor) -> bool:
    """Whether an fp32 tensor has many distinct values, all of them bf16 values, whose lower 16 bits are 0."""
    if tensor.dtype != torch.float32 or tensor.is_meta:
        return False
    codes = sample(tensor).view(torch.int32)
    return codes.numel() >= 256 and bool(((codes & 0xFFFF) == 0).all()) and codes.unique().numel() >= 64
