"""Softmax and log-softmax with scale, mask and causal mask, forward and backward.

Bytes per element: forward reads `x` and writes `y`; backward reads `dy` and `y` and writes `dx`. Of rows longer than
the GPU kernels hold in registers (32,768 elements forward, 16,384 backward), what is beyond is read twice. `causal`
reads the lower triangle only. Masks are read through their strides. Copied are only tensors whose strides leave no two
neighbours together, a transposed `x` with `causal`, and a gradient that is not contiguous.

Online rescaling for long rows: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.

Files: ``rule.py`` is the specification in plain torch. ``dispatch.py`` chooses between it, torch's kernels on a CPU and
Triton's: ``rows.py`` for the last dimension and ``strided.py`` for others, both with the arithmetic of
``arithmetic.py`` on tensors seen as ``layout.py`` says. ``exact.py`` is for ``precision="exact"``: rows off 16-byte
boundaries are read one element at a time there, other dimensions copied, and rows beyond 32,768 columns (16,384
backward) read twice. ``cpu.py`` launches ``kernels/softmax.cpp`` in its place. ``public.py`` checks arguments.
"""

from halfstep.kernels.softmax.public import log_softmax, softmax

__all__ = ["log_softmax", "softmax"]
