"""Softmax and log-softmax with scale, mask and causal mask, forward and backward.

Bytes per element: forward reads `x` once and writes `y` once; backward reads `dy` and `y` and writes `dx`. Of rows
longer than the GPU kernels hold in registers (32,768 elements forward, 16,384 backward), what is beyond is read twice.
Neither `x` nor a mask is kept for the backward. `causal` reads the lower triangle only, about half. Masks are read
through their strides, so a broadcast mask costs its own size, not that of `x`. No copy is made for a dimension that is
not the last one, nor for a transposed `x`; one is for strides that leave no two neighbours together, for `causal` on a
transposed `x`, and for a gradient that is not contiguous.

Online rescaling for long rows: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018. Starting the
maximum from the lowest finite number instead of -inf is what keeps blocks of -inf from making NaN.

Files: ``rule.py`` is the specification in plain torch. ``dispatch.py`` chooses between it, torch's kernels on a CPU and
Triton's: ``rows.py`` for the last dimension and ``strided.py`` for others, both with the arithmetic of
``arithmetic.py`` on tensors seen as ``layout.py`` says. ``public.py`` checks arguments.
"""

from halfstep.kernels.softmax.public import log_softmax, softmax

__all__ = ["log_softmax", "softmax"]
