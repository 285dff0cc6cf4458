"""Operators of torch, described once: for eager calls, compilers, subclasses, autograd, `vmap` and `torch.func`.

torch has three ways to call what a kernel computes, and each wants to be told of the derivative on its own:

* the dispatcher, which `torch.compile`, `torch.export`, dispatch modes and tensor subclasses watch. It costs an eager
  call 10 to 20 us, more than the launch;
* the transforms of `torch.func`, which refuse operators whose autograd was registered from Python, but take an
  `autograd.Function`;
* an eager call that nobody watches, which needs neither.

`Op` takes the description of one operator and goes the right way at each call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.kernels.multi_tensor import PLAIN_TYPES

# Library.define and impl cost about 3 us per call; torch.library.custom_op about 13.
_library = torch.library.Library("halfstep", "FRAGMENT")


def batch_first(tensor: torch.Tensor, batch_dim: int | None, size: int) -> torch.Tensor:
    """With the dimension that vmap runs over in front."""
    return tensor.expand(size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)


def _in_transform() -> bool:
    """Whether a transform of `torch.func`, or forward mode, gives the arguments a meaning of its own.

    A compiler knows `vmap` of an operator, and cannot trace the `autograd.Function`. But for forward mode it must not
    be given the operator, whose tangents would be 0 without a word.
    """
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    return torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling()


def _is_watched() -> bool:
    """Whether a compiler, a tracer or a dispatch mode sees what is called."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() != 0:
        return True
    return torch.jit.is_tracing()


class Op:
    """The operator ``halfstep::name``, which returns one tensor. Calling it runs it.

    Args:
        schema: as `torch.library.Library.define` takes it, ``"name(Tensor x, Tensor? mask, int dim) -> Tensor"``.
        operands: how many of the first arguments are tensors, or None, that may be of a subclass, on any device and
            require grad. Other tensors must be plain ones on the CPU.
        compute: the result of all arguments, without a derivative.
        fake: the same without elements, for compilers and fake tensors.
        save: ``save(ctx, inputs, output)`` keeps in `ctx` what `differentiate` needs.
        differentiate: ``differentiate(ctx, grad)`` gives a gradient, or None, for each argument, by operations that
            have derivatives themselves.
        batch: ``batch(info, in_dims, *args)`` gives the result under `vmap` and the dimension of it that `vmap` runs
            over.
        tangent: ``tangent(ctx, *tangents)`` gives the tangent of the result from those of all arguments, for forward
            mode; after `save`.
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
        name = schema.partition("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, compute, "CompositeExplicitAutograd")
        operator = getattr(torch.ops.halfstep, name).default
        torch.library.register_fake(f"halfstep::{name}", fake, lib=_library)
        torch.library.register_autograd(f"halfstep::{name}", differentiate, setup_context=save, lib=_library)
        torch.library.register_vmap(f"halfstep::{name}", batch, lib=_library)

        class InTransforms(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> torch.Tensor:
                result: torch.Tensor = operator(*args)
                return result

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

        self._operands = operands
        self._compute = compute
        self._operator = operator
        self._in_transforms, self._eager = InTransforms, Eager

    def __call__(self, *args: Any) -> torch.Tensor:
        if _in_transform():
            result: torch.Tensor = self._in_transforms.apply(*args)
            return result
        if _is_watched():
            result = self._operator(*args)
            return result
        differentiated = False
        for operand in args[: self._operands]:
            if operand is None:
                continue
            if type(operand) not in PLAIN_TYPES or not (operand.is_cpu or operand.is_cuda):
                result = self._operator(*args)
                return result
            differentiated = differentiated or operand.requires_grad
        if differentiated and torch.is_grad_enabled():
            result = self._eager.apply(*args)
        else:
            result = self._compute(*args)
        return result
