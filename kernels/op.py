"""Operators of torch, each described once for eager calls, compilers, subclasses, autograd, `vmap` and `torch.func`.

The derivative must be registered with the dispatcher, for compilers, dispatch modes and subclasses; in an
`autograd.Function`, for the transforms of `torch.func`; and for direct eager calls, which save the 10 to 20 us of the
dispatcher. `Op` takes one description of an operator and chooses among the three in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.kernels.multi_tensor import PLAIN_TYPES

# An operator registered with Library.define and impl takes about 3 us per call; torch.library.custom_op takes 13.
_library = torch.library.Library("halfstep", "FRAGMENT")


_unwrapped = torch._C._functorch.unwrap_if_dead


def batch_first(tensor: torch.Tensor, batch_dim: int | None, size: int) -> torch.Tensor:
    """The tensor with the dimension that `vmap` maps over in front; expanded if it has none."""
    return tensor.expand(size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)


def _in_transform() -> bool:
    """Whether the call is inside a transform of `torch.func`, which do not count while a compiler traces, or inside
    forward-mode differentiation, which always counts: the tangents of the operator would silently be 0.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def is_watched() -> bool:
    """Whether a compiler, a tracer or a dispatch mode must see the operator."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() != 0 or torch._C._is_tracing()


def define(schema: str, *, compute: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]) -> Any:
    """The operator ``halfstep::name``, without a derivative; arguments as for `Op`."""
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, compute, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfstep::{name}", fake, lib=_library)
    return getattr(torch.ops.halfstep, name).default


def no_forward_mode(functions: str, other: str) -> Callable[..., torch.Tensor]:
    """The `tangent` of an `Op` that has none, which names the `functions` that call it, and an `other` one."""

    def tangent(ctx: Any, *tangents: Any) -> torch.Tensor:
        raise NotImplementedError(
            f"{functions} have no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode (torch.func.vjp, "
            f"jacrev or jacrev(jacrev(...))), or {other}"
        )

    return tangent


class Op:
    """The operator ``halfstep::name``, which returns one tensor. Calling the object runs the operator.

    Args:
        schema: a schema for `torch.library.Library.define`, such as
            ``"name(Tensor x, Tensor? mask, int dim) -> Tensor"``.
        operands: how many of the first arguments are tensors (or None) that may be of a subclass, be on any device and
            require a gradient. Other tensor arguments must be plain tensors on the CPU.
        compute: computes the result from all arguments, without a derivative.
        fake: returns a tensor with the shape and dtype of the result, for compilers and fake tensors.
        save: ``save(ctx, inputs, output)`` stores in `ctx` what `differentiate` needs.
        differentiate: ``differentiate(ctx, grad)`` returns a gradient or None for each argument, computed by operations
            that can be differentiated themselves.
        batch: ``batch(info, in_dims, *args)`` returns the result under `vmap`, and its mapped dimension.
        tangent: ``tangent(ctx, *tangents)`` returns the tangent of the result from those of all arguments, for forward
            mode. It is called after `save`.
    """

    def __init__(
        self,
        schema: str,
        operands: int,
        *,
        compute: Callable[..., torch.Tensor],
        fake: Callable[..., torch.Tensor],
        save: Callable[..., Any],
        differentiate: Callable[..., tuple[torch.Tensor | None, ...]],
        batch: Callable[..., tuple[torch.Tensor, int]],
        tangent: Callable[..., torch.Tensor],
    ) -> None:
        name, operator = schema.partition("(")[0], define(schema, compute=compute, fake=fake)
        torch.library.register_autograd(f"halfstep::{name}", differentiate, setup_context=save, lib=_library)
        torch.library.register_vmap(f"halfstep::{name}", batch, lib=_library)

        class InTransforms(torch.autograd.Function):
            forward = staticmethod(operator)
            setup_context = staticmethod(save)
            backward = staticmethod(differentiate)
            vmap = staticmethod(batch)
            jvp = staticmethod(tangent)

        class Eager(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Any) -> torch.Tensor:
                result = compute(*args)
                save(ctx, args, result)
                return result

            backward = staticmethod(differentiate)

        self._operands, self._compute = operands, compute
        self._operator: Callable[..., torch.Tensor] = operator
        self._in_transforms: Any = InTransforms
        # Around this, `Eager.apply` asks again for transforms, and looks at all arguments in Python for wrappers that
        # have left one, which takes longer than the launch.
        self._eager: Callable[..., torch.Tensor] = super(torch.autograd.Function, Eager).apply

    def __call__(self, *args: Any) -> torch.Tensor:
        if _in_transform():
            return self._in_transforms.apply(*args)
        if is_watched():
            return self._operator(*args)
        differentiated = False
        for operand in args[: self._operands]:
            if operand is None:
                continue
            if type(operand) not in PLAIN_TYPES or not (operand.is_cpu or operand.is_cuda):
                return self._operator(*args)
            differentiated = differentiated or operand.requires_grad
        if not (differentiated and torch.is_grad_enabled()):
            return self._compute(*args)
        operands = [operand if operand is None else _unwrapped(operand) for operand in args[: self._operands]]
        return self._eager(*operands, *args[self._operands :])
