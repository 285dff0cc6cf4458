"""Codes of fp32 and fp64 arrays, computed by numpy in blocks that fit the processor's cache.

A source format with M mantissa bits is rounded to m bits, so s = M - m bits are dropped. Let `least` be the bit pattern
of the target format's least normal number in the source format. The code is computed in two parts:

    above   max(pattern, least) minus the difference of the biases, plus the increment of the rounding, shifted right by
            s. A carry out of the mantissa correctly increases the exponent.
    below   min(pattern, least) as a float, in units of the least subnormal number, rounded to an integer.

For numbers on the other side of `least`, each part is `code(least)`. The code is therefore the sum of both parts minus
`code(least)`, without masks or branches per element. A format with the subnormal range of its source needs only the
first part, and an integer format only the second.

Numbers that overflow or are not finite are rare. Their codes are written afterwards, by index.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from halfstep.kernels import native
from halfstep.numerics.formats import philox_words
from halfstep.numerics.formats.exact import beyond_code, no_nan_here, subnormal_steps
from halfstep.numerics.formats.table import Format

WORTH_COMPILING = 2**16  # elements of an array that is rounded stochastically
BLOCK_ELEMENTS = 32768  # four fp32 arrays of this size take 512 KiB and fit the L2 cache

Array = np.ndarray[Any, Any]


class Source:
    """fp32 or fp64, the format of the values to be encoded, as bit patterns."""

    def __init__(self, dtype: type, unsigned: type, signed: type, mantissa: int, bias: int) -> None:
        self.float, self.unsigned, self.signed = dtype, unsigned, signed
        self.mantissa, self.bias = mantissa, bias
        self.bits = np.dtype(dtype).itemsize * 8
        self.infinity = (2 * bias + 1) << mantissa
        self.magnitude = (1 << (self.bits - 1)) - 1

    def pattern(self, power: int) -> int:
        """The bit pattern of 2^power, which may be subnormal."""
        exponent = power + self.bias
        return exponent << self.mantissa if exponent > 0 else 1 << (self.mantissa + exponent - 1)

    def holds(self, format: Format) -> bool:
        """Whether normal numbers of the source can represent the format's range, and decide every rounding."""
        if format.kind == "integer":
            return self.mantissa > format.bits
        if format.kind == "scale" and format.emin == -self.bias:
            return True  # half a binade below the source's least normal number: see `_above`
        low, high = 1 - self.bias, self.bias
        same = format.emin == low and format.has_subnormals
        # No rounding depends on less than 2^-34 of a unit, so all subnormals of the source give the same result.
        inside = format.emin > low and (format.kind == "scale" or format.emin - format.mantissa >= low + 34)
        return (same or inside) and format.emax <= high and format.mantissa <= self.mantissa


FP32 = Source(np.float32, np.uint32, np.int32, 23, 127)
FP64 = Source(np.float64, np.uint64, np.int64, 52, 1023)


def code_dtype(format: Format) -> type:
    """The smallest unsigned integer type that holds a code."""
    return next(
        t for t, bits in ((np.uint8, 8), (np.uint16, 16), (np.uint32, 32), (np.uint64, 64)) if format.bits <= bits
    )


class _Buffers:
    """Buffers for one block, allocated once per call."""

    def __init__(self, source: Source, count: int) -> None:
        self.magnitude: Array = np.empty(count, source.unsigned)
        self.code: Array = np.empty(count, source.unsigned)
        self.extra: Array = np.empty(count, source.unsigned)
        self.units: Array = np.empty(count, source.float)


class Encoder:
    """Encodes arrays of one source format in one format. The options are those of `codec.encode`, which checks them."""

    def __init__(
        self, source: Source, format: Format, rounding: str, overflow: str, nan: str, subnormals: bool
    ) -> None:
        self._source, self._format, self._rounding = source, format, rounding
        self._nan = nan
        integer = format.kind == "integer"
        self._dropped = source.mantissa - format.mantissa
        least = source.pattern(format.bits + 2 if integer else format.emin)
        # With a single significant bit, which is odd, nearest rounds ties away, and to odd rounds toward zero.
        one_bit = format.mantissa == 0
        self._above_rounding = {"nearest": "nearest_away", "odd": "toward_zero"}.get(rounding, rounding)
        self._above_rounding = self._above_rounding if one_bit else rounding
        self._has_above = not integer
        self._ends_among_subnormals = format.kind == "scale" and format.emin == -source.bias
        self._has_below = integer or (format.kind != "scale" and format.emin > 1 - source.bias)
        self._steps = subnormal_steps(format)
        self._flush = not subnormals and format.has_subnormals
        self._scale = 1.0 if integer else 2.0 ** (format.mantissa - format.emin) if self._has_below else 0.0
        # Of a sum with it, the unit in the last place is the format's least subnormal, or 2^-steps of that.
        finer = self._steps or 0 if rounding == "stochastic" else 0
        magic = source.mantissa + (0 if integer else format.emin - format.mantissa - finer)
        U = source.unsigned
        self._magic, self._magic_pattern = source.float(2.0**magic), U(source.pattern(magic))
        self._least, self._rebias = U(least), U(((source.bias - format.bias) << source.mantissa) & (2**source.bits - 1))
        self._least_code = U(1 << format.mantissa)
        # The codes of positive and negative numbers that overflow, and of the two infinities.
        ends = [(overflow, False), (overflow, True)]
        for negative in (False, True):
            stops = rounding in ("toward_zero", "odd") or rounding == ("up" if negative else "down")
            if stops and not (negative and format.kind == "scale"):
                ends[negative] = ("saturate", negative)
        ends += [(overflow, False), (overflow, True)]
        self._outside: Array = np.array([beyond_code(sign, format, how) for how, sign in ends], code_dtype(format))
        self._sign_shift = U(source.bits - format.bits) if not integer else U(0)

    # ------------------------------------------------------------------------------------------------------- all

    def __call__(self, values: Array, seed: int = 0, offset: int = 0) -> Array:
        """The codes of a flat, contiguous array. `seed` and `offset` are for stochastic rounding."""
        flat: Array = values.view(self._source.unsigned)
        result: Array = np.empty(flat.shape, code_dtype(self._format))
        scratch = _Buffers(self._source, min(BLOCK_ELEMENTS, flat.size))
        draw = _words_for(flat.size) if self._rounding == "stochastic" and self._dropped else None
        for start in range(0, flat.size, BLOCK_ELEMENTS):
            block = flat[start : start + BLOCK_ELEMENTS]
            words = draw(offset + start, block.size, seed) if draw else None
            self._encode(block, result[start : start + BLOCK_ELEMENTS], scratch, words)
        return result

    def _encode(self, block: Array, out: Array, scratch: _Buffers, words: Array | None) -> None:
        count, form, source, U = block.size, self._format, self._source, self._source.unsigned
        magnitude, code, extra = scratch.magnitude[:count], scratch.code[:count], scratch.extra[:count]
        np.bitwise_and(block, U(source.magnitude), out=magnitude)
        if self._has_above:
            self._above(block, magnitude, code, extra, words)
        if self._has_below:
            below = self._below(block, magnitude, scratch, words)
            if self._has_above:
                code += below
                code -= self._least_code
            else:
                np.copyto(code, below)
        if self._flush:
            np.greater_equal(code, self._least_code, out=extra, casting="unsafe")
            code *= extra
        rare = self._rare(block, magnitude, code)
        if form.signed:
            self._signed(block, code, extra)
        np.copyto(out, code, casting="unsafe")
        if rare is not None:
            out[rare] = self._beyond(block[rare])

    # ------------------------------------------------------------------------------------------------- two pieces

    def _above(self, block: Array, magnitude: Array, code: Array, extra: Array, words: Array | None) -> None:
        """The part `above` of the module's docstring."""
        U, dropped, how = self._source.unsigned, self._dropped, self._above_rounding
        value = magnitude
        if self._has_below or self._format.kind == "scale":
            np.maximum(magnitude, self._least, out=code)
            value = code
            if self._ends_among_subnormals:
                # Subnormals of the source from `least` on are doubled, so that they continue the normal numbers.
                first_normal = U(1 << self._source.mantissa)
                np.minimum(code, first_normal, out=extra)
                code += extra
                code -= first_normal
        if dropped == 0:
            np.subtract(value, self._rebias, out=code)
            return
        ones = U((1 << dropped) - 1)
        if how == "nearest":
            np.right_shift(value, U(dropped), out=extra)
            np.bitwise_and(extra, U(1), out=extra)
            np.add(value, extra, out=code)
            code += U(((1 << (dropped - 1)) - 1 - int(self._rebias)) & (2**self._source.bits - 1))
        elif how == "nearest_away":
            np.add(value, U(((1 << (dropped - 1)) - int(self._rebias)) & (2**self._source.bits - 1)), out=code)
        elif how == "stochastic":
            assert words is not None
            np.copyto(extra, words)
            shift = np.left_shift if dropped > 32 else np.right_shift
            shift(extra, U(abs(32 - dropped)), out=extra)
            np.add(value, extra, out=code)
            code -= self._rebias
        elif how == "odd":
            np.bitwise_and(value, ones, out=extra)
            extra += ones
            extra >>= U(dropped)  # one if anything is dropped
            np.subtract(value, self._rebias, out=code)
            code >>= U(dropped)
            code |= extra
            return
        elif how in ("up", "down"):
            self._outward(block, extra)
            extra *= ones
            np.add(value, extra, out=code)
            code -= self._rebias
        else:
            np.subtract(value, self._rebias, out=code)
        code >>= U(dropped)

    def _outward(self, block: Array, out: Array) -> None:
        """1 for elements that "up" or "down" rounds away from zero, otherwise 0."""
        U = self._source.unsigned
        np.right_shift(block, U(self._source.bits - 1), out=out)
        if self._rounding == "up":
            out ^= U(1)

    def _below(self, block: Array, magnitude: Array, scratch: _Buffers, words: Array | None) -> Array:
        """The part `below` of the module's docstring."""
        count, U, how = block.size, self._source.unsigned, self._rounding
        extra, units = scratch.extra[:count], scratch.units[:count]
        np.minimum(magnitude, self._least, out=extra)
        if flushing():  # the CPU reads subnormals as zero; the least normal number rounds to the same code
            least_normal = U(1 << self._source.mantissa)
            extra[(extra != 0) & (extra < least_normal)] = least_normal
        small: Array = extra.view(self._source.float)
        if how == "nearest" or (how == "stochastic" and self._steps is not None):
            np.add(small, self._magic, out=units)  # the addition rounds to nearest even
            code = np.subtract(units.view(U), self._magic_pattern, out=extra)
            if how == "stochastic" and self._steps is not None:
                assert words is not None
                code += words >> np.uint32(32 - self._steps)
                code >>= U(self._steps)
            return code
        np.multiply(small, self._source.float(self._scale), out=units)
        whole: Array = np.empty(count, self._source.signed)
        np.copyto(whole, units, casting="unsafe")
        np.copyto(small, whole)
        units -= small  # the fraction of a unit, which is exact
        if how == "nearest_away":
            whole += units >= 0.5
        elif how == "odd":
            whole |= units > 0
        elif how == "stochastic":
            assert words is not None
            units *= self._source.float(2.0**32)
            whole += (words + units.astype(np.uint64)) >> np.uint64(32) > 0
        elif how in ("up", "down"):
            outward = scratch.extra[:count]
            self._outward(block, outward)
            outward &= units > 0
            whole += outward.view(self._source.signed)
        return whole.view(U)

    # ------------------------------------------------------------------------------------------- sign and the rest

    def _signed(self, block: Array, code: Array, extra: Array) -> None:
        """Add the sign to the codes of magnitudes."""
        form, U = self._format, self._source.unsigned
        if form.kind == "integer":
            np.right_shift(block, U(self._source.bits - 1), out=extra)
            np.subtract(U(0), extra, out=extra)
            code ^= extra
            code -= extra  # two's complement; storing the code removes the upper bits
            return
        np.right_shift(block, self._sign_shift, out=extra)
        extra &= U(form.sign_bit)
        if not form.has_negative_zero:
            extra *= code != 0
        code |= extra

    def _rare(self, block: Array, magnitude: Array, code: Array) -> Array | None:
        """Indices of elements that overflow or are not finite, and of negative ones in a format without sign."""
        form, U = self._format, self._source.unsigned
        least_rare = form.largest_code + 1
        # The codes of infinities and NaNs are larger than all finite ones, since no format exceeds its source's range.
        if form.signed and int(code.max()) < least_rare:
            return None
        rare = code >= U(least_rare)
        if not form.signed:
            rare |= (block > U(self._source.magnitude)) & (magnitude != 0)
        return np.flatnonzero(rare)

    def _beyond(self, patterns: Array) -> Array:
        """The codes of the elements that `_rare` has found."""
        source, U = self._source, self._source.unsigned
        magnitude, which = patterns & U(source.magnitude), patterns >> U(source.bits - 1)
        which += (magnitude >= U(source.infinity)).astype(U) << U(1)
        codes = self._outside[which]
        nan = magnitude > U(source.infinity)
        if nan.any():
            codes[nan] = self._nan_codes(patterns[nan])
        return codes

    def _nan_codes(self, patterns: Array) -> Array:
        form, source = self._format, self._source
        if self._nan == "zero":
            return np.zeros(patterns.shape, code_dtype(form))
        if self._nan == "raise" or form.nan_code is None:
            raise no_nan_here(form, self._nan)
        codes = np.full(patterns.shape, form.nan_code, np.uint64)
        if self._nan == "payload" and form.kind in ("ieee", "fn"):
            wide = patterns.astype(np.uint64)
            if form.kind == "ieee":
                codes |= (wide & np.uint64((1 << source.mantissa) - 1)) >> np.uint64(self._dropped)
            codes |= (wide >> np.uint64(source.bits - 1)) * np.uint64(form.sign_bit)
        return codes


@lru_cache(maxsize=256)
def encoder(double: bool, format: Format, rounding: str, overflow: str, nan: str, subnormals: bool) -> Encoder | None:
    """The encoder of fp32 or, with `double`, fp64 values. None if `Source.holds` is false for the format."""
    source = FP64 if double else FP32
    return Encoder(source, format, rounding, overflow, nan, subnormals) if source.holds(format) else None


def random_words(first: int, count: int, seed: int) -> Array:
    """The random words of elements `first` to ``first + count - 1``, as uint32."""
    groups = np.arange(first // 8, (first + count + 7) // 8, dtype=np.uint64)
    draws = np.empty((groups.size, 8), np.uint32)
    for pair, both in enumerate(philox_words.four_words(groups, seed)):
        draws[:, 2 * pair], draws[:, 2 * pair + 1] = both & 0xFFFF, both >> np.uint64(16)
    words = draws.reshape(-1)[first % 8 : first % 8 + count]
    words <<= np.uint32(16)
    words |= np.uint32(0x8000)
    return words


def compiled_words(first: int, count: int, seed: int) -> Array:
    """`random_words` computed by kernels/philox.cpp."""
    words: Array = np.empty(count, np.uint32)
    native.functions("philox").halfstep_words(seed, first, count, words.ctypes.data)
    return words


def _words_for(size: int) -> Callable[[int, int, int], Array]:
    """The function that computes the random words of `size` elements. C++ is compiled for large arrays only."""
    return compiled_words if size >= WORTH_COMPILING and native.library("philox") is not None else random_words


def flushing() -> bool:
    """Whether this thread's arithmetic treats subnormals as zero, as after `torch.set_flush_denormal(True)`."""
    return bool(np.float64(5e-324) * np.float64(2.0) == 0)
