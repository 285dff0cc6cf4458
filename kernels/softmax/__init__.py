"""Softmax and log-softmax with scale, mask and causal mask, forward and backward.

Bytes per element: forward reads `x` and writes `y`; backward reads `dy` and `y` and writes `dx`. Rows longer than the
GPU kernels hold in registers (32,768 elements forward, 16,384 backward) are read twice, in bf16 6 instead of 4 bytes
forward and 10 instead of 6 backward. `causal` reads the lower triangle only. Masks are read through their strides.
Copied are other dimensions than the last in the exact form, tensors whose strides leave no two neighbours together, a
transposed `x` with `causal`, and a gradient that is not contiguous.

Files: ``rule.py`` is the specification in plain torch. ``rows.py`` has the kernels for the last dimension, exact and
fast, and ``strided.py`` those for others, which are fast, both with the arithmetic of ``arithmetic.py`` on tensors seen
as ``layout.py`` says. ``dispatch.py`` chooses between these, the rule, on a CPU the C++ of exact rows, and torch's
kernels for fast softmax there; ``public.py`` checks arguments.
"""

from halfstep.kernels.softmax.public import log_softmax, softmax

__all__ = ["log_softmax", "softmax"]
