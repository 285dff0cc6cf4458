"""Cast to formats of blocks, whose elements share a scale: MXFP8, MXFP6, MXFP4 and NVFP4.

Bytes per element: the source is read once, codes and scales are written once: from bf16 to MXFP8 2 + 1 + 1/32, in one
launch. NVFP4 without a given global scale reads the source twice, in two launches: the first finds the largest number.

Files: ``rule.py`` is the specification in plain torch, ``kernels.py`` has Triton's kernels, ``dispatch.py`` chooses.
"""

from halfstep.kernels.block_cast.dispatch import cast_blocks
from halfstep.kernels.block_cast.rule import tiled_scales

__all__ = ["cast_blocks", "tiled_scales"]
