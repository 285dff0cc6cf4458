"""A training set-up of any library: its parameters, what each optimizer holds for them, and how it rounds."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from halfstep.integrations.offload import OffloadedAdam, OffloadedAdamW
from halfstep.integrations.optim.options import is_stochastic, master_of
from halfstep.integrations.optim.state import OptimizerState
from halfstep.numerics.scaling.scaler import unwrapped
from halfstep.numerics.scaling.topology import local

HALF = (torch.bfloat16, torch.float16)
# Wrappers of modules, whose names in front of a parameter's name say nothing.
_WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
# Libraries whose optimizers hold copies of the parameters, made by themselves.
_OWN_COPIES = {"deepspeed", "megatron", "apex", "fairscale", "transformer_engine", "colossalai"}
# Entries of an optimizer's state that keep what a 16-bit weight cannot, by how libraries name them.
_MASTER = re.compile(r"master|remainder|kahan|compensation|residual|ecc|error|shift|fp32_param", re.IGNORECASE)
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
        step: its step count; None if there is none.
    """

    name: str
    parameter: torch.Tensor
    owner: Any
    optimizer: Any
    group: dict[str, Any]
    state: dict[str, torch.Tensor]
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
        given = [optimizer] if hasattr(optimizer, "param_groups") else list(optimizer or ())
        for one in given:
            if not hasattr(one, "param_groups"):
                raise TypeError(
                    "Expected optimizer to be an optimizer with param_groups, or a sequence of them, but got a "
                    f"{type(one).__name__}"
                )
        self.optimizers = [unwrapped(one) for one in given]
        enabled = scaler is not None and getattr(scaler, "is_enabled", lambda: True)()
        self.scaler = scaler if enabled else None
        self.held = list(self._held())
        trained = self.trainable()
        self.own_copies = bool(self.held) and not any(id(one.parameter) in self.names for one in self.held)
        self.own_copies = self.own_copies and (
            any(type(one).__module__.split(".")[0] in _OWN_COPIES for one in self.optimizers)
            or (
                all(one.parameter.dtype == torch.float32 for one in self.held)
                and any(parameter.dtype in HALF for _, parameter in trained)
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
                    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
                    yield Held(
                        self.names.get(id(given), f"group {number}, parameter {place}"),
                        given,
                        owner,
                        optimizer,
                        group,
                        {
                            key: value
                            for key, value in tensors.items()
                            if key != "step" and not value.is_sparse and local(value).numel() == size
                        },
                        state.get("step"),
                    )

    def trainable(self) -> list[tuple[str, torch.Tensor]]:
        """Names and parameters of the model that require a gradient."""
        return [(self.names[id(one)], one) for one in self.model.parameters() if one.requires_grad]

    def counted(self) -> str:
        """What was examined, in words."""
        kinds = sorted({type(one).__name__ for one in self.optimizers})
        kinds += [type(self.scaler).__name__] if self.scaler is not None else []
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


def sample(values: torch.Tensor, most: int = 1 << 16) -> torch.Tensor:
    """At most `most` elements of this rank's shard, evenly spaced, in a tensor of one dimension."""
    flat: torch.Tensor = local(values).detach().flatten()
    return flat if flat.numel() <= most else flat[:: -(-flat.numel() // most)]


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
