"""Every tolerance of the test suite, with its reason. Everything else is compared bit for bit."""

import torch

# Unit roundoff: half an ulp relative to the value.
ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}

# Our Adam against torch's after tens of steps: both round each weight every step (2^-24 of it), torch once more for
# decoupled decay, and both form the update from rounded moments (a few 2^-24 of the step each time).
ADAM_AGAINST_TORCH = {"rtol": 2.0**-18, "atol": 2.0**-20}

# Root-mean-square error of 100 steps against float64, ours over torch's. With decoupled decay torch rounds the weight
# twice a step and so errs 3 to 10 times more. With L2 decay both round it once, at the same place; what is left differs
# in the last bits of the update only, and either is ahead by a hair (0.998 to 1.0001 seen over four seeds).
ADAM_ERROR_AGAINST_TORCH = {"AdamW": 1.0, "Adam": 1.001}

# Softmax, in units of 2^-24, see softmax_oracle.py. fp32 roundings counted on the way: the
# exponential of each implementation (at most 2 ulp = 4 units; ex2.approx on NVIDIA likewise), the sum over at most 64
# terms per lane and then a tree (8), reciprocal (2), products (2).
SOFTMAX_UNITS = 16.0
# What an exponential adds for each 1 that its argument z lies below 0: z is rounded (1), GPUs take exp2(z * log2(e)),
# where the product is rounded (1) and log2(e) as fp32 is off by 0.224 of 2^-24 of itself.
SOFTMAX_DEPTH = 2.25
# The kernels take results and exponentials below the smallest normal fp32 number for 0, as GPUs do.
SOFTMAX_FLUSHED = 2.0**-126

# The same with precision="exact", whose bits are compared with the reference's: the exponentials of an element, of its
# group and of the sum (up to 4 units each, the last ones on average), 11 levels of sums, of whose errors few meet (6),
# quotient and product (2). z - m is rounded (1), and log2(e) off by 0.224 ulp, or 0.448, for each 1 below.
SOFTMAX_EXACT_UNITS = 12.0
SOFTMAX_EXACT_DEPTH = 1.45

# kernels/exponential.py, in ulps of the exact result: the largest errors of all inputs, by whether exp is `precise`.
EXP_ULPS = {False: 2.0, True: 1.01}
# What exp adds for each 1 that its argument lies below 0, if not `precise`: log2(e) as fp32 is off by 1.93e-8.
EXP_DEPTH = 0.224
LOG_ULPS = 0.86

# The sum of squares against the exact sum, relative: all terms are positive, each is rounded once when squared, at most
# 12 times on its way through the tree of a chunk, and after that in fp64, which adds nothing visible: 13 roundings of
# 2^-24. Squares that underflow are below 2^-126 of a chunk's largest, so 4096 of them are below 2^-114 of its sum.
SUM_OF_SQUARES = 13.01 * 2.0**-24

# A run of Adam against float64, in roundings of 2^-24 of each update, added up over the steps: about 12 operations for
# the update itself, and the errors that m and v carry from earlier steps, which decay as they do.
ADAM_RUN_UNITS = 48.0

# Weights after three steps of Muon on a GPU and on a CPU, relative to their update: sums of bf16 products have another
# order, so that products differ by a roundoff of 2^-8 in some elements, which an iteration makes 3.4 times as large
# where singular values are small. A missing step would be 0.3.
MUON_ACROSS_DEVICES = 0.02

# A mean over random bits may be this many standard deviations off. The bits follow from fixed seeds, so a test that
# passes always passes; 5 sigma is one in 1.7 million, so a test that fails found a bias.
STOCHASTIC_SIGMAS = 5.0

# Log-probabilities, in units of 2^-24, see log_probabilities_oracle.py. Roundings of a sum of exponentials: each
# exponential and its chunk's weight (at most 2 ulp = 4 units each), their product (1), ten halvings of a chunk and ten
# of chunks (20), and the logarithm (2).
LOG_PROBABILITIES_UNITS = 32.0
