"""The operators ``halfstep::softmax`` and ``halfstep::softmax_backward``: derivatives, `vmap`, eager calls.

Arguments of both are two tensors, then ``dim`` (from the end), ``scale``, ``causal``, ``log``, ``dtype`` of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from halfstep.kernels.softmax.dispatch import backward, forward
from halfstep.kernels.softmax.reference import math_dtype, reference_double_backward

# Library.define and impl cost about 3 us per call; torch.library.custom_op about 13.
_library = torch.library.Library("halfstep", "FRAGMENT")


def _save_forward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, mask, *ctx.options, _ = inputs  # dim, scale, causal, log
    ctx.x_dtype = x.dtype
    ctx.mask_dtype, ctx.mask_shape = (None, None) if mask is None else (mask.dtype, mask.shape)
    ctx.save_for_backward(output)


def _differentiate_forward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (y,) = ctx.saved_tensors
    dx = dmask = None
    if ctx.needs_input_grad[0]:
        dx = differentiable_backward(grad, y, *ctx.options, ctx.x_dtype)
    if ctx.needs_input_grad[1]:
        dim, _, causal, log = ctx.options
        dz = differentiable_backward(grad, y, dim, 1.0, causal, log, math_dtype(grad.dtype, y.dtype))
        dmask = dz.sum_to_size(ctx.mask_shape).to(ctx.mask_dtype)
    return dx, dmask, None, None, None, None, None


def _save_backward(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    grad, y, *ctx.options, _ = inputs
    ctx.save_for_backward(grad, y)


def _differentiate_backward(ctx: Any, gg: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grad, y = ctx.saved_tensors
    return *reference_double_backward(gg, grad, y, *ctx.options), None, None, None, None, None


def _batch_first(tensor: torch.Tensor, batch_dim: int | None, size: int) -> torch.Tensor:
    """With the dimension that vmap runs over in front; `dim` counts from the end, so nothing else changes."""
    return tensor.expand(size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)


def _vmap_forward(info: Any, in_dims: Any, x: Any, mask: Any, *rest: Any) -> tuple[torch.Tensor, int]:
    x = _batch_first(x, in_dims[0], info.batch_size)
    if mask is not None and in_dims[1] is not None:
        mask = mask.movedim(in_dims[1], 0)
        mask = mask.reshape(mask.shape[0], *[1] * (x.ndim - mask.ndim), *mask.shape[1:])
    return differentiable_forward(x, mask, *rest), 0


def _vmap_backward(info: Any, in_dims: Any, grad: Any, y: Any, *rest: Any) -> tuple[torch.Tensor, int]:
    grad, y = (_batch_first(t, d, info.batch_size) for t, d in zip((grad, y), in_dims[:2], strict=True))
    return differentiable_backward(grad, y, *rest), 0


def _no_forward_mode(ctx: Any, *tangents: Any) -> Any:
    raise NotImplementedError(
        "halfstep.softmax and log_softmax have no forward-mode derivative (jvp, jacfwd, hessian): use reverse mode "
        "(torch.func.vjp, jacrev or jacrev(jacrev(...))), or torch.softmax"
    )


def _register(
    name: str,
    tensors: str,
    implementation: Callable[..., torch.Tensor],
    save: Callable[..., None],
    differentiate: Callable[..., tuple[torch.Tensor | None, ...]],
    batch: Callable[..., tuple[torch.Tensor, int]],
) -> tuple[Any, type[torch.autograd.Function]]:
    """The operator, and the same for the transforms of `torch.func`, which refuse operators whose autograd was
    registered from Python, but take an `autograd.Function`."""
    schema = f"{name}({tensors}, int dim, float scale, bool causal, bool log, ScalarType dtype) -> Tensor"
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    operator = getattr(torch.ops.halfstep, name).default
    name = f"halfstep::{name}"

    def fake(like: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.empty(like.shape, dtype=rest[-1], device=like.device)

    torch.library.register_fake(name, fake, lib=_library)
    torch.library.register_autograd(name, differentiate, setup_context=save, lib=_library)
    torch.library.register_vmap(name, batch, lib=_library)

    class InTransforms(torch.autograd.Function):
        @staticmethod
        def forward(*args: Any) -> torch.Tensor:
            result: torch.Tensor = operator(*args)
            return result

        setup_context = staticmethod(save)
        backward = staticmethod(differentiate)
        vmap = staticmethod(batch)
        jvp = staticmethod(_no_forward_mode)

    return operator, InTransforms


_softmax, _ForwardInTransforms = _register(
    "softmax", "Tensor x, Tensor? mask", forward, _save_forward, _differentiate_forward, _vmap_forward
)
_softmax_backward, _BackwardInTransforms = _register(
    "softmax_backward", "Tensor grad, Tensor y", backward, _save_backward, _differentiate_backward, _vmap_backward
)


class _Eager(torch.autograd.Function):
    """Without the dispatcher, which costs more host time than the launch."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        y = forward(*args)
        _save_forward(ctx, args, y)
        return y

    backward = staticmethod(_differentiate_forward)


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def _is_eager(tensor: torch.Tensor) -> bool:
    """Whether nobody is watching: no compiler, tracer, dispatch mode, tensor subclass or transform."""
    return (
        not torch.compiler.is_compiling()
        and type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and (tensor.is_cpu or tensor.is_cuda)
        and not torch.jit.is_tracing()
    )


def differentiable_forward(x: torch.Tensor, mask: torch.Tensor | None, *rest: Any) -> torch.Tensor:
    if _transformed():
        return _ForwardInTransforms.apply(x, mask, *rest)
    if _is_eager(x) and (mask is None or type(mask) is torch.Tensor):
        if torch.is_grad_enabled() and (x.requires_grad or (mask is not None and mask.requires_grad)):
            return _Eager.apply(x, mask, *rest)
        return forward(x, mask, *rest)
    return _softmax(x, mask, *rest)


def differentiable_backward(grad: torch.Tensor, y: torch.Tensor, *rest: Any) -> torch.Tensor:
    if _transformed():
        return _BackwardInTransforms.apply(grad, y, *rest)
    if not torch.is_grad_enabled() and type(y) is torch.Tensor and _is_eager(grad):
        return backward(grad, y, *rest)
    return _softmax_backward(grad, y, *rest)
