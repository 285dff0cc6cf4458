"""A training set-up of any library: its parameters, what each optimizer holds for them, and how it rounds."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import ModuleType
from typing import Any, NamedTuple

import torch

from halfstep.integrations.offload import OffloadedAdam, OffloadedAdamW
from halfstep.integrations.optim.options import is_stochastic, master_of
from halfstep.integrations.optim.state import OptimizerState
from halfstep.kernels.multi_tensor import has_memory
from halfstep.numerics.scaling.scaler import unwrapped
from halfstep.numerics.scaling.topology import local

HALF = (torch.bfloat16, torch.float16)
# Wrappers of modules, whose names in front of a parameter's name say nothing.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Libraries whose optimizers hold copies of the parameters, made by themselves.
_OWN_COPIES = {"deepspeed", "megatron", "apex", "fairscale", "transformer_engine", "colossalai"}
# Entries of an optimizer's state that keep what a 16-bit weight cannot, by how libraries name them.
_MASTER = re.compile(r"master|remainder|kahan|compensation|residual|ecc|error|shift|fp32_param", re.IGNORECASE)
# Attributes under which libraries keep a loss scaler: timm's NativeScaler, mmengine's AmpOptimWrapper, Accelerate's
# Accelerator and Lightning's plugins.
_SCALERS = ("_scaler", "loss_scaler", "scaler")
# Options of groups or attributes of optimizers, that say that updates below the spacing of a weight are not lost.
_KEEPS = ("master_weights", "bf16_stochastic_round", "stochastic_rounding", "kahan_sum", "use_kahan_summation")


class Held(NamedTuple):
    """A parameter in an optimizer.

    Attributes:
        name: its name in the model; ``"group 0, parameter 3"`` if the model does not have it.
        parameter: it, or for optimizers on the host, what it is on the device.
        owner: the optimizer that is stepped.
        optimizer: it, or what a `ZeroRedundancyOptimizer` has for this rank's part.
        group: its parameter group.
        state: the tensors of its state that have as many elements as this rank's shard.
        scales: the other tensors of its state, such as scales of moments in 8 bits.
        step: its step count; None if there is none.
    """

    name: str
    parameter: torch.Tensor
    owner: Any
    optimizer: Any
    group: dict[str, Any]
    state: dict[str, torch.Tensor]
    scales: dict[str, torch.Tensor]
    step: Any

    @property
    def taken(self) -> float:
        """The number of steps that it has taken, as far as the state says; 0 if it has none."""
        return float(self.step) if self.step is not None else 0.0

    @property
    def half(self) -> bool:
        """Whether it is in bf16 or fp16."""
        return self.parameter.dtype in HALF

    @property
    def family(self) -> str:
        """``"adam"`` for optimizers with two moments, ``"sgd"`` for torch's SGD, and ``""`` for others."""
        if "betas" in self.group or "exp_avg_sq" in self.state:
            return "adam"
        return "sgd" if isinstance(self.optimizer, torch.optim.SGD) else ""

    @property
    def stochastic(self) -> bool:
        """Whether the optimizer rounds stochastically."""
        if isinstance(self.optimizer, OptimizerState):
            return is_stochastic(self.group)
        return any(bool(self._option(name)) for name in _KEEPS[1:3])

    @property
    def keeps_updates(self) -> bool:
        """Whether updates below half of the spacing of a weight add up instead of being lost."""
        if not self.half or self.stochastic:
            return True
        if isinstance(self.optimizer, OptimizerState):
            return master_of(self.parameter, self.group["master_weights"]) is not None
        module = type(self.optimizer).__module__.split(".")[0]
        if module == "optimi":  # by default for 16-bit parameters
            return self.group.get("kahan_sum") is not False
        if module == "flashoptim":
            return self._option("master_weight_bits") is not None
        return any(bool(self._option(name)) for name in _KEEPS) or any(map(_MASTER.search, self.state))

    def _option(self, name: str) -> Any:
        return self.group.get(name, getattr(self.optimizer, name, None))


class Setup:
    """What there is of a training set-up.

    Attributes:
        model: the model.
        names: names of its parameters by id; tied parameters have one.
        optimizers: the innermost optimizers.
        scaler: an enabled loss scaler, or None.
        held: the parameters of the optimizers.
        own_copies: whether the optimizers hold copies of the parameters that they made themselves.
    """

    def __init__(self, model: torch.nn.Module, optimizer: Any, scaler: Any = None) -> None:
        self.model = model
        self.names = {id(parameter): _short(name) for name, parameter in model.named_parameters()}
        self.optimizers = list(innermost(optimizer))
        scaler = _scaler_of(scaler, optimizer)
        enabled = scaler is not None and getattr(scaler, "is_enabled", lambda: True)()
        self.scaler = scaler if enabled else None
        self.held = list(self._held())
        self.own_copies = self._has_own_copies(optimizer)

    def _has_own_copies(self, optimizer: Any) -> bool:
        if not self.held or any(id(one.parameter) in self.names for one in self.held):
            return False
        libraries = {type(one).__module__.partition(".")[0] for one in self.optimizers}
        if libraries & _OWN_COPIES or _reaches((optimizer, self.optimizers), self.names.keys()):
            return True
        copies, originals = [one.parameter for one in self.held], [parameter for _, parameter in self.trainable()]
        if {one.dtype for one in copies} != {torch.float32} or not any(one.dtype in HALF for one in originals):
            return False
        # Copies that the training loop makes are tensors of no module, or in one piece. fp32 Parameters may be those of
        # another model instead: then the optimizer never gets a gradient, and the weights part.
        if not all(isinstance(one, torch.nn.Parameter) for one in copies) or all(one.dim() == 1 for one in copies):
            return True
        return (
            any(one.taken >= 1 for one in self.held)
            and [one.shape for one in copies] == [one.shape for one in originals]
            and all(
                torch.equal(sample(one).to(other.device, other.dtype), sample(other))
                for one, other in zip(copies, originals, strict=True)
            )
        )

    def _held(self) -> Iterator[Held]:
        for owner in self.optimizers:
            on_device: dict[int, torch.Tensor] = {}
            if isinstance(owner, (OffloadedAdam, OffloadedAdamW)):
                on_device = {id(mirror.host): mirror.parameter for mirror in owner._mirrors.values()}
            zero = any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(owner).__mro__)
            optimizer = owner.optim if zero else owner
            for number, group in enumerate(owner.param_groups):
                for place, parameter in enumerate(group["params"]):
                    given = on_device.get(id(parameter), parameter)
                    state: dict[str, Any] = optimizer.state[parameter] if parameter in optimizer.state else {}
                    size = local(parameter).numel()
                    tensors = {
                        key: value
                        for key, value in state.items()
                        if key != "step" and isinstance(value, torch.Tensor) and not value.is_sparse
                    }
                    whole = {key: value for key, value in tensors.items() if local(value).numel() == size}
                    yield Held(
                        self.names.get(id(given), f"group {number}, parameter {place}"),
                        given,
                        owner,
                        optimizer,
                        group,
                        whole,
                        {key: value for key, value in tensors.items() if key not in whole},
                        state.get("step"),
                    )

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Names and parameters of the model."""
        return [(self.names[id(one)], one) for one in self.model.parameters()]

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        """Names and parameters of the model that require a gradient."""
        return [(name, one) for name, one in self.parameters() if one.requires_grad]

    def counted(self) -> str:
        """What was examined, in words."""
        kinds = sorted({public_name(type(one)) for one in self.optimizers})
        kinds += [public_name(type(self.scaler))] if self.scaler is not None else []
        parameters = f"{len(self.names):,} parameter{'s' * (len(self.names) != 1)}"
        return f"{type(self.model).__name__} of {parameters}" + (f", {', '.join(kinds)}" if kinds else "")

    def computes_in_fp16(self) -> str:
        """Where the set-up says that it computes in fp16; empty if it does not say so."""
        half = [name for name, parameter in self.trainable() if parameter.dtype == torch.float16]
        if half:
            return f"fp16 weights ({half[0]})"
        for module in self.model.modules():
            policy = getattr(module, "mixed_precision", None)  # FSDP1
            state_of: Any = getattr(module, "_get_fsdp_state", None)  # FSDP2
            if policy is None and state_of is not None:
                policy = getattr(state_of(), "_mp_policy", None)
            if getattr(policy, "param_dtype", None) == torch.float16:
                return f"the mixed precision of {type(module).__name__}"
        return ""

    def wraps(self, *names: str) -> bool:
        """Whether the model or a part of it is of a class with one of these names."""
        return any(type(module).__name__ in names for module in self.model.modules())


def _short(name: str) -> str:
    return _WRAPPERS.sub("", name)


def public_name(of: type) -> str:
    """The name of a class with the shortest module that exports it: ``"torch.optim.AdamW"``, ``"halfstep.AdamW"``."""
    modules = accumulate(of.__module__.split("."), "{}.{}".format)
    exported = (name for name in modules if getattr(sys.modules.get(name), of.__name__, None) is of)
    return f"{next(exported, of.__module__)}.{of.__qualname__}"


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
        parts = [one for value in values for one in _parts(value) if hasattr(one, "param_groups")]
        parts = [one for one in parts if all(one is not other for other in (inner, *outer))]
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
        owned = (getattr(optimizer, name, None) for name in _SCALERS)
        return next(filter(_is_scaler, owned), None)
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


def distinct(values: torch.Tensor) -> torch.Tensor:
    """The memory of this rank's shard, in which each element occurs once, however large the shard is expanded."""
    mine = local(values).detach()
    sizes = [1 if stride == 0 else size for size, stride in zip(mine.shape, mine.stride(), strict=True)]
    mine = mine.as_strided(sizes, mine.stride())
    span = 1 + sum((size - 1) * stride for size, stride in zip(mine.shape, mine.stride(), strict=True))
    return mine.as_strided((span,), (1,)) if mine.numel() > span else mine


def nonfinite(tensors: Sequence[torch.Tensor]) -> list[str]:
    """``"NaN"``, ``"Inf"`` or ``""`` for each tensor. Reads each once, without a copy, and waits once per device.

    ``""`` is also returned for tensors that hold no numbers of 16 bits or more in memory of their own.
    """
    found = [""] * len(tensors)
    extremes: dict[Any, dict[int, Any]] = defaultdict(dict)  # least and largest value, by device and dtype
    for index, value in enumerate(tensors):
        mine = local(value)
        if not has_memory(mine) or mine.layout != torch.strided or not mine.numel():
            continue
        if mine.is_complex():
            mine = torch.view_as_real(mine.resolve_conj())
        if mine.is_floating_point() and mine.element_size() > 1:
            extremes[mine.device, mine.dtype][index] = torch.aminmax(distinct(mine))
    flags = []
    for pairs in extremes.values():
        least, largest = map(torch.stack, zip(*pairs.values(), strict=True))
        flags.append(torch.stack([least.isnan(), least.isinf() | largest.isinf()]))
    for pairs, flag in zip(extremes.values(), flags, strict=True):
        for index, nan, inf in zip(pairs, *flag.tolist(), strict=True):
            found[index] = "NaN" if nan else "Inf" if inf else ""
    return found


def sample(values: torch.Tensor, most: int = 1 << 16) -> torch.Tensor:
    """At most `most` elements of this rank's shard, evenly spaced, in a tensor of one dimension."""
    mine: torch.Tensor = local(values).detach()
    step = -(-mine.numel() // most) or 1
    if mine.is_contiguous() or step == 1:
        return mine.flatten()[::step]
    # flatten would copy all, of an expanded tensor more than there is.
    indices = torch.arange(-(-mine.numel() // step), dtype=torch.int64, device=mine.device) * step
    return mine[torch.unravel_index(indices, mine.shape)]


def names_of(held: Iterable[Held]) -> list[str]:
    """Their names, each once."""
    return list(dict.fromkeys(one.name for one in held))


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    import torch.distributed as dist

    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def dtype_name(dtype: torch.dtype) -> str:
    """``"bf16"`` for `torch.bfloat16`."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}.get(
        dtype, str(dtype).removeprefix("torch.")
    )


def dtypes_of(values: Sequence[torch.Tensor]) -> str:
    """The dtypes of tensors in words."""
    return " and ".join(sorted({dtype_name(value.dtype) for value in values}))
