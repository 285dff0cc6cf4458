"""The table of counts that statistics.py fills: where numbers fall in a format. Needs neither torch nor Triton.

    |y| = (1 + fraction / 2^23) * 2^e     also for subnormal fp32 numbers, with e down to -149
    cell[e, class] += 1                   class 0: fraction = 0; 1: fraction > 0; 2: fraction >= overflow of the format

Zeros, infinities and NaNs have rows of their own. How rounding to a format with m mantissa bits and exponents from emin
to emax treats an element follows from its cell, so that one table serves every power of two as scale:

    flushed      0 < |y| <= 2^(emin - m - 1)      a tie rounds to the even code, zero: class 0 of one row
    subnormal    above that, and |y| < 2^emin
    overflow     |y| from half a step above the largest number: class 2 of row emax, and all rows above

Row -151 also has smaller numbers, row 128 larger ones. The cells may be followed by a histogram of the relative
rounding errors r = |y - round(y)| / |y| of all elements that are not 0 and do not overflow: one bin for r = 0, 8 per
octave from 2^-24 to 1, and one for r = 1, flushed elements. Last come the fp32 bits of the largest r.
"""

from __future__ import annotations

from typing import NamedTuple

LOWEST, HIGHEST = -151, 128  # exponents of the first and the last row of numbers
CLASSES = 3
ZERO = HIGHEST - LOWEST + 1  # rows
INFINITE, NOT_A_NUMBER = ZERO + 1, ZERO + 2
ROWS = NOT_A_NUMBER + 1
CELLS = ROWS * CLASSES
PER_OCTAVE = 8
ERROR_BINS = 24 * PER_OCTAVE + 2  # r = 0, the octaves below 1, and r = 1


class Grid(NamedTuple):
    """The parameters of a format for counting. It must have a mantissa bit and lie within fp32's range."""

    dropped: int  # bits by which its mantissa is shorter than that of fp32, 0 to 22
    emin: int  # the exponents of its smallest normal number and of its largest number
    emax: int
    overflow: int  # the fraction, in units of 2^-23, from which a number of exponent emax overflows; 2^23 if none does


def width(errors: bool) -> int:
    """The number of counts per tensor: cells; with `errors`, also the bins and the bits of the largest error."""
    return CELLS + ERROR_BINS + 1 if errors else CELLS
