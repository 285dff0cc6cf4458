"""Softmax and log-softmax with scale, mask and causal mask, forward and backward.

Over one dimension, with ``z = scale * x + mask``; a boolean mask (True = keep) and ``causal`` put -inf where they drop:

    m = max(z)    e = exp(z - m)    s = sum(e)
    softmax:      y = e / s                     dx = scale * y * (dy - sum(dy * y))
    log-softmax:  y = (z - m) - log(s)          dx = scale * (dy - exp(y) * sum(dy))

All of it in fp32 (fp64 when input or output is fp64); `scale` is never rounded to 16 bits.

Rules for the values that are not numbers, the same in every implementation:

* A row with nothing to keep (all -inf, masked or not) is 0, its logarithm -inf, its gradient 0.
* -inf elsewhere gives 0 (log: -inf), never NaN. An output of -inf is a constant: gradients that reach it are ignored.
* NaN or +inf that is kept makes the whole row NaN, as in torch. What a boolean mask or `causal` drops is not looked at.

Bytes per element: forward reads `x` once and writes `y` once; backward reads `dy` and `y` and writes `dx`. Of rows
longer than the GPU kernels hold in registers (32,768 elements forward, 16,384 backward), what is beyond is read twice.
Neither `x` nor a mask is kept for the backward. `causal` reads the lower triangle only, about half. Masks are read
through their strides, so a broadcast mask costs its own size, not that of `x`. No copy is made for a dimension that is
not the last one, nor for a transposed `x`; one is for strides that leave no two neighbours together, for `causal` on a
transposed `x`, and for a gradient that is not contiguous.

Online rescaling for long rows: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018. Starting `m`
from the lowest finite number instead of -inf is what keeps blocks of -inf from making NaN.

Files: ``reference.py`` is the specification in plain torch. ``dispatch.py`` chooses between it, torch's kernels on a
CPU (``cpu.py``) and Triton: ``row_kernels.py`` for the last dimension, launched by ``row_launches.py``, and
``strided.py`` for other dimensions. Both compute with ``blocks.py`` and see tensors and masks as ``layout.py`` says.
``operators.py`` registers operators and derivatives with torch, ``public.py`` checks arguments.
"""

from halfstep.kernels.softmax.public import log_softmax, softmax

__all__ = ["log_softmax", "softmax"]
