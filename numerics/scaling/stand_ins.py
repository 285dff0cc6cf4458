"""Stand-ins: what ``.grad`` of a parameter is while its gradient is elsewhere, or was used and freed in the backward.

With None, ``torch.nn.utils.clip_grad_norm_`` would return 0 and clip nothing, and nobody could tell whether
``model.zero_grad()`` was called. A stand-in has the metadata of a gradient and no memory, and decides about each
operation on it. Optimizers, scalers and monitors of ours read gradients with the functions below, for which a stand-in
is no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from halfstep.numerics.scaling.sharding import Sharding, is_sharded, local, shard_of

aten = torch.ops.aten


class StandIn(torch.Tensor):
    """A tensor without memory, with the shape, strides and dtype of `like`. Derived classes define the dispatch."""

    def __new__(cls, like: torch.Tensor, device: torch.device | None = None, **_: Any) -> StandIn:
        return torch.Tensor._make_wrapper_subclass(
            cls, like.size(), strides=like.stride(), dtype=like.dtype, device=device or like.device, storage_size=0
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def _numbers(self, reader: str) -> torch.Tensor:
        """The gradient, for methods that torch does not dispatch."""
        raise NotImplementedError

    def gradient(self) -> torch.Tensor | None:
        """The gradient where it is; None if it was freed."""
        return None

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, values: torch.Tensor) -> None:
        """Write the gradient. torch would give memory to the stand-in, which nothing reads."""
        if isinstance(values, FreedGradient):  # a module that is moved or converted assigns what is in `data`
            torch._C.TensorBase.data.__set__(self, values)  # type: ignore[attr-defined]
            return
        gradient = self._numbers("an assignment to .data")
        if (values.shape, values.dtype) != (gradient.shape, gradient.dtype):
            raise RuntimeError(
                f"Expected a tensor of shape {tuple(gradient.shape)} and dtype {gradient.dtype} as .data of a gradient "
                f"on the host, but got {tuple(values.shape)} and {values.dtype}: call zero_grad() first"
            )
        with torch.no_grad():
            gradient.copy_(values)

    def numpy(self, *, force: bool = False) -> Any:
        return self._numbers("numpy").numpy(force=force)

    def tolist(self) -> Any:
        return self._numbers("tolist").tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={str(self.device)!r})"


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


class FreedGradient(StandIn):
    """Stands in for a gradient that a step in the backward has used and freed, or for a view or copy of it.

    It may be set to zero, moved, viewed and copied. Operations that need its numbers raise an error with the `remedy`.
    If it was `zeroed`, the next step takes zeros, unless a backward computes a gradient.
    """

    zeroed = False

    def __init__(self, like: torch.Tensor, device: torch.device | None = None, *, remedy: str) -> None:
        self.remedy = remedy
        self._alias_of: FreedGradient | None = self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        options = dict(kwargs or {})
        freed = next(leaf for leaf in tree_leaves((args, options)) if isinstance(leaf, FreedGradient))
        if func in (aten.zero_.default, aten._foreach_zero_.default):
            for tensor in tree_leaves(args):
                if not isinstance(tensor, FreedGradient):
                    tensor.zero_()
                elif tensor._alias_of is None:
                    tensor._numbers("zero_ of a view or copy")
                else:
                    tensor._alias_of.zeroed = True
            return freed if func is aten.zero_.default else None
        if func is aten.detach_.default:
            return freed
        if func.is_view or func in (aten.clone.default, aten._to_copy.default):
            device = options.pop("device", None) or freed.device
            args, options = tree_map_only(FreedGradient, _on_meta, (args, options))

            def returned(result: torch.Tensor) -> FreedGradient:
                copy = type(freed)(result, device, remedy=freed.remedy)
                copy._alias_of = freed._alias_of if func in (aten.detach.default, aten.alias.default) else None
                return copy

            return tree_map_only(torch.Tensor, returned, func(*args, **options))
        return freed._numbers(func.name())

    def _numbers(self, reader: str) -> torch.Tensor:
        raise RuntimeError(
            f"Expected no code after the backward to need the gradient of a parameter of shape {tuple(self.shape)}, "
            f"which the backward has used and freed, but got {reader}: {self.remedy}"
        )

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(None), ()


class _FreedShard(FreedGradient):
    """The local part of a DTensor that stands in for a gradient: FSDP2 adds the next gradient to it by ``+=``."""

    def __iadd__(self, grad: Any) -> Any:  # type: ignore[misc]
        return grad


def freed_gradient(parameter: torch.Tensor, remedy: str) -> torch.Tensor:
    """What ``.grad`` of a parameter is after its gradient was used and freed: for DTensors a DTensor."""
    grad = parameter.detach() if parameter.grad is None else parameter.grad
    shard = local(parameter.detach())
    like = torch.empty_strided(shard.shape, shard.stride(), dtype=grad.dtype, device="meta")
    if not is_sharded(parameter):
        return FreedGradient(like, shard.device, remedy=remedy)
    return Sharding(parameter).like(_FreedShard(like, shard.device, remedy=remedy))


def is_stand_in(grad: torch.Tensor | None) -> bool:
    """Whether a gradient is a stand-in, or a DTensor of one."""
    return isinstance(shard_of(grad), StandIn)


def is_freed(grad: torch.Tensor | None) -> bool:
    """Whether the backward has used and freed a gradient."""
    return isinstance(shard_of(grad), FreedGradient)


def refuse_freed(parameters: list[torch.Tensor], reader: str) -> None:
    """Raise a RuntimeError that names the remedy if the backward has used and freed a gradient."""
    for parameter in parameters:
        if is_freed(parameter.grad):
            shard_of(parameter.grad)._numbers(reader)


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter; None if it has none, or a stand-in."""
    grad = parameter.grad
    return None if is_stand_in(grad) else grad


def is_zeroed(grad: torch.Tensor | None) -> bool:
    """Whether a gradient was used and freed, and then set to zero."""
    return bool(getattr(shard_of(grad), "zeroed", False))


def remove_stand_in(parameter: torch.Tensor) -> None:
    """Set ``.grad`` of a parameter to None if it is a stand-in."""
    if is_stand_in(parameter.grad):
        parameter.grad = None


def gradients_of(parameters: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients of some parameters; None for those that have none, or a stand-in.

    A stand-in that was set to zero becomes zeros.
    """
    for parameter in parameters:
        if is_zeroed(parameter.grad):
            parameter.grad = torch.zeros_like(parameter.detach(), dtype=parameter.grad.dtype)  # type: ignore[union-attr]
    return list(map(gradient_of, parameters))
