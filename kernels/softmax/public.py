"""`softmax` and `log_softmax`: what their arguments may be."""

from __future__ import annotations

from typing import Any

import torch

from halfstep.kernels.multi_tensor import check_tensor
from halfstep.kernels.softmax.dispatch import softmax as operator

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PRECISIONS = (None, "exact", "fast")
_LARGEST_SCALE = torch.finfo(torch.float32).max


def _check_mask(x: torch.Tensor, mask: Any) -> None:
    check_tensor(mask, "mask", (torch.bool, *FLOATS))
    if mask.device != x.device:
        raise ValueError(
            f"Expected mask to be on the device of x, {x.device}, but got {mask.device}: use mask.to(x.device)"
        )
    # torch 2.8 compiles no zip over unlike lengths.
    fits = mask.ndim <= x.ndim and all(
        size in (1, wide) for size, wide in zip(mask.shape, x.shape[x.ndim - mask.ndim :], strict=True)
    )
    if not fits:
        raise ValueError(
            f"Expected the shape of mask to broadcast to that of x, {tuple(x.shape)}, but got {tuple(mask.shape)}: "
            "insert dimensions of size 1 with .unsqueeze()"
        )


def _checked(
    x: Any, dim: Any, scale: float, mask: Any, causal: bool, dtype: torch.dtype | None, precision: Any, log: bool
) -> torch.Tensor:
    check_tensor(x, "x", FLOATS)
    if dtype is None:
        dtype = x.dtype
    elif dtype not in FLOATS:
        raise TypeError(f"Expected dtype to be None, float32, float16, bfloat16 or float64, but got {dtype}")
    if precision not in PRECISIONS:
        raise ValueError(f"Expected precision to be None, 'exact' or 'fast', but got {precision!r}")
    exact = precision != "fast"
    if torch.float64 in (x.dtype, dtype):
        if precision == "exact":
            raise TypeError(
                "Expected x and dtype to be float32, float16 or bfloat16 with precision='exact', but got "
                f"{x.dtype} and {dtype}: leave precision out, or use x.float()"
            )
        exact = False
    if isinstance(scale, torch.Tensor) or not isinstance(scale, (int, float, torch.SymFloat, torch.SymInt)):
        raise TypeError(
            f"Expected scale to be a finite number, but got a {type(scale).__name__}: multiply x by a tensor yourself"
        )
    if not abs(scale) <= _LARGEST_SCALE:  # written so that a NaN fails; math.isfinite cannot be traced
        raise ValueError(
            f"Expected scale to be a number that is finite in fp32, but got {scale}: to mask elements, use mask="
        )
    if isinstance(dim, (float, str)) or not hasattr(dim, "__index__"):
        raise TypeError(f"Expected dim to be an integer, but got a {type(dim).__name__}")
    ndim, dims = x.ndim, max(x.ndim, 1)
    if not -dims <= dim < dims:
        raise IndexError(f"Expected dim to be from {-dims} to {dims - 1}, as x has {ndim} dimensions, but got {dim}")
    dim -= dims if dim >= 0 else 0
    if causal:
        if ndim < 2:
            raise ValueError(
                "Expected x to have 2 or more dimensions (..., queries, keys) with causal=True, but got shape "
                f"{tuple(x.shape)}: use x.unsqueeze(0) or causal=False"
            )
        if dim != -1:
            raise ValueError(
                f"Expected dim to be the last of {ndim} with causal=True, but got {dim + ndim}: transpose x first"
            )
    if mask is not None:
        _check_mask(x, mask)
    if ndim == 0:
        return operator(x.reshape(1), mask, -1, scale, False, log, exact, dtype).reshape(())
    return operator(x, mask, dim, scale, bool(causal), log, exact, dtype)


def softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """``softmax(scale * x + mask)`` over one dimension, computed in fp32; on a GPU in one pass over memory.

    A fully masked row is 0 with gradient 0, where torch gives NaN. A NaN in the input stays NaN. The result is
    contiguous. Differentiable any number of times; works with ``torch.compile``, ``torch.func.grad`` and ``vmap``.
    Unlike torch's softmax, it keeps the dtype of the input under autocast: pass ``dtype=torch.float32`` for fp32
    results.

    Args:
        x: fp32, fp16 or bf16, any shape and strides. fp64, and on a GPU rows of over 2^23 columns, are computed by the
            plain torch reference.
        dim: the dimension along which the result sums to 1.
        scale: a finite number; `x` is multiplied by it in fp32.
        mask: a tensor that broadcasts to ``x.shape``. A boolean mask keeps elements that are True. A floating-point
            mask is added to ``scale * x`` and may require a gradient.
        causal: keep element ``[..., i, j]`` only for ``j <= i``, counted from the upper left corner as in
            ``scaled_dot_product_attention(is_causal=True)``. A GPU does not read masked elements. Requires that `dim`
            is the last dimension.
        dtype: dtype of the result. Default: that of `x`.
        precision: ``"exact"``, the default but for fp64, computes the bits of the reference on every device, forward
            and backward, and those of a row do not depend on the rest of the batch. Over other dimensions than the last
            it copies `x` and the result, which takes three times the memory traffic. On a CPU it needs a C++ compiler
            or a wheel; otherwise it takes hundreds of times as long. ``"fast"`` takes the exponential of the device, or
            torch's softmax on a CPU, and sums in the order that suits it: implementations agree to a few ulps. fp64 has
            no exact form.

    Returns:
        A tensor of the shape of `x`.

    Raises:
        TypeError: an argument has an unsupported type or dtype.
        IndexError: `dim` is out of range.
        ValueError: `scale` is not finite, `precision` is another string, `mask` has another device or does not
            broadcast, or `causal` is True and `dim` is not the last dimension.

    Examples:
        >>> halfstep.softmax(torch.zeros(2, 3), causal=True)
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000]])
        >>> mask = torch.tensor([[True, True, False], [False, False, False]])
        >>> halfstep.softmax(torch.zeros(2, 3), mask=mask)
        tensor([[0.5000, 0.5000, 0.0000],
                [0.0000, 0.0000, 0.0000]])
    """
    return _checked(x, dim, scale, mask, causal, dtype, precision, False)


def log_softmax(
    x: torch.Tensor,
    dim: int = -1,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """The logarithm of `softmax`, with the same arguments, accurate where softmax itself underflows.

    Masked elements and fully masked rows are -inf. A result of -inf is a constant: its gradient is ignored, so masked
    elements and rows have gradient 0.

    Examples:
        >>> halfstep.log_softmax(torch.tensor([0.0, -200.0]))
        tensor([   0., -200.])
    """
    return _checked(x, dim, scale, mask, causal, dtype, precision, True)
