"""The logarithm of the probability of a target under a softmax, its logsumexp and its entropy, and cross-entropy.

Bytes per logit: the forward reads it once, the backward reads it and writes its gradient, over it on request. No copy
in fp32 is made. What the forward leaves beside its six numbers per row is 8 to 16 bytes per 1,024 columns.

The bits of a row depend on nothing but the row: neither on the number of rows, nor on strides, padding or the launch.

Files: ``rule.py`` is the specification in plain torch, ``kernels.py`` has Triton's kernels, their launches and those of
``kernels/softmax.cpp`` on a CPU, ``dispatch.py`` the operators and their derivative, ``public.py`` the functions.
"""

from halfstep.kernels.log_probabilities.public import LogProbabilities, cross_entropy, log_probabilities

__all__ = ["LogProbabilities", "cross_entropy", "log_probabilities"]
