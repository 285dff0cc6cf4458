"""The rule: codes and scales of a tensor, in plain torch on any device.

numerics/formats/blocks.py has the rules for one block in rational arithmetic, and the sources. In fp32 a scale of MX is
the exponent of the largest pattern of the block, after an addition that carries to the exponent where the rule says one
more; dividing by it is exact but for results that are rounded to zero. NVFP4 divides by tensors, as by a number torch
may multiply with the reciprocal.
"""

from __future__ import annotations

import torch

from halfstep.kernels.formats import ELEMENTS, BlockRow, Blocks
from halfstep.kernels.rounding import NEAREST, reference_codes

LEAST_GLOBAL = 2.0**-117  # as in numerics/formats/blocks.py
_INFINITY, _NAN_SCALE, _LARGEST_SCALE = 0x7F800000, 255, 254


def _in_blocks(x: torch.Tensor, axes: tuple[int, ...], size: int) -> torch.Tensor:
    """The tensor with blocked dimensions last, and then one for the elements of a block; zeros fill the last blocks."""
    moved = x.movedim(axes, tuple(range(-len(axes), 0)))
    counts = moved.shape[-len(axes) :]
    padded = torch.nn.functional.pad(moved, [n for count in reversed(counts) for n in (0, -count % size)])
    split = padded.unflatten(-1, (-1, size))
    return split if len(axes) == 1 else split.unflatten(-3, (-1, size)).transpose(-3, -2).flatten(-2)


def _in_order(split: torch.Tensor, axes: tuple[int, ...], size: int, shape: torch.Size) -> torch.Tensor:
    """The reverse of `_in_blocks`."""
    if len(axes) == 2:
        split = split.unflatten(-1, (size, size)).transpose(-3, -2).flatten(-4, -3)
    moved = split.flatten(-2).movedim(tuple(range(-len(axes), 0)), axes)
    return moved[tuple(map(slice, shape))].contiguous()


def carry_and_emax(row: BlockRow, rule: str) -> tuple[int, int]:
    """What is added to the largest pattern of a block, and what its exponent byte then exceeds that of the scale by."""
    form, below = ELEMENTS[row.element], (1 << 23) - 1
    mantissa = form.largest << (23 - form.mantissa) & below
    carry = {"floor": 0, "ceil": below, "even": 1 << (22 - form.mantissa), "rceil": below - mantissa}[rule]
    return carry, (form.largest >> form.mantissa) - form.bias


def _power_scales(largest: torch.Tensor, row: BlockRow, rule: str, saturate: bool) -> torch.Tensor:
    """Codes of E8M0, int64, of blocks with these largest patterns."""
    carry, emax = carry_and_emax(row, rule)
    codes = ((largest + carry >> 23) - emax).clamp(min=0)
    codes = codes.masked_fill(largest == _INFINITY, _LARGEST_SCALE if saturate else _NAN_SCALE)
    return codes.masked_fill(largest > _INFINITY, _NAN_SCALE)


def _over_power(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Blocks of fp32 over 2^(code - 127), by products of normal numbers: CPUs may be told to flush others to zero."""
    pattern = blocks.view(torch.int32)
    tiny = (pattern & 0x7FFFFFFF) < 1 << 23
    units = torch.where(tiny, (pattern & 0x7FFFFF).float().copysign(blocks), blocks)
    power = torch.where(tiny, 254 - 149 - codes, 254 - codes).clamp(min=1)
    scaled = units * (power << 23).to(torch.int32).view(torch.float32)
    return torch.where(~tiny & (codes == _LARGEST_SCALE), scaled * 0.5, scaled)  # of which `power` is one too large


def default_global_scale(x: torch.Tensor, row: BlockRow) -> torch.Tensor:
    """The largest finite magnitude over that of a format with a global scale."""
    element, scale = ELEMENTS[row.element], ELEMENTS[row.scale]
    finite = x.float().abs().nan_to_num(nan=0.0, posinf=0.0).flatten()
    amax = torch.cat([finite, finite.new_zeros(1)]).amax()
    whole = torch.full_like(amax, element.most * scale.most)
    return (amax / whole).clamp(min=LEAST_GLOBAL)


def reference(
    x: torch.Tensor,
    row: BlockRow,
    rule: str,
    axes: tuple[int, ...],
    rounding: int = NEAREST,
    saturate: bool = False,
    words: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> Blocks:
    """Cast a tensor to a format of blocks.

    Args:
        x: any shape of at least one dimension; fp32, fp16 or bf16.
        row, rule: of `formats.block_row`.
        axes: one dimension or two.
        rounding: of the elements: `NEAREST`, `TOWARD_ZERO` or `STOCHASTIC`.
        saturate: an infinity, and a scale that overflows, give the largest scale instead of NaN.
        words: int64, shape of `x`, for `STOCHASTIC`: `philox.reference_words` of the elements.
        global_scale: fp32, without dimensions, of NVFP4. Default: the largest finite magnitude over 2688.

    Returns:
        Codes in the shape of `x` and scales, both uint8, contiguous; and the global scale, or None.
    """
    form, blocks = ELEMENTS[row.element], _in_blocks(x.float(), axes, row.size)
    largest = (blocks.contiguous().view(torch.int32) & 0x7FFFFFFF).amax(-1, keepdim=True).long()
    if row.has_global_scale:
        top, scale_form = form.most, ELEMENTS[row.scale]
        global_scale = default_global_scale(x, row) if global_scale is None else global_scale
        magnitude = largest.to(torch.int32).view(torch.float32)
        quotient = magnitude / torch.full_like(magnitude, top) / global_scale
        codes = reference_codes(quotient, scale_form, NEAREST, saturate)
        scale = codes.to(torch.uint8).view(scale_form.dtype).float()
        zeros = torch.zeros_like(blocks).copysign(blocks)
        scaled = torch.where(scale > 0, blocks * (torch.ones_like(global_scale) / global_scale / scale), zeros)
        is_nan = scale.isnan()
    else:
        codes = _power_scales(largest, row, rule, saturate)
        scaled, is_nan = _over_power(blocks.contiguous(), codes), codes == _NAN_SCALE
    noise = None if words is None else _in_blocks(words, axes, row.size)
    elements = reference_codes(scaled.masked_fill(is_nan, 0.0).contiguous(), form, rounding, True, noise)
    elements = elements.masked_fill(is_nan, 0).to(torch.uint8)
    scales = codes.squeeze(-1).to(torch.uint8).movedim(tuple(range(-len(axes), 0)), axes).contiguous()
    return Blocks(_in_order(elements, axes, row.size, x.shape), scales, global_scale if row.has_global_scale else None)


def tiled_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales of a matrix in the order in which cuBLAS and `torch.nn.functional.scaled_mm` read them.

    Tiles of 128 rows and 4 columns, row by row of tiles, follow one another; in a tile the scale of row r and column c
    stands at 16 (r % 32) + 4 (r // 32) + c. Incomplete tiles are filled with code 0. Source: NVIDIA's documentation of
    cuBLAS, "1D Block Scaling Factors Layout".

    Args:
        scales: of any dtype of a byte, shape ``(rows, columns)``: `Blocks.scales` of blocks along the last dimension.

    Returns:
        The same dtype, one dimension, 512 ceil(rows / 128) ceil(columns / 4) elements.

    Examples:
        >>> from halfstep.kernels.block_cast import tiled_scales
        >>> weight = halfstep.cast(torch.randn(256, 128), "mxfp8")
        >>> weight.scales.shape, tiled_scales(weight.scales).shape
        (torch.Size([256, 4]), torch.Size([1024]))
    """
    if scales.ndim != 2 or scales.element_size() != 1:
        raise ValueError(
            f"Expected scales to have two dimensions and a dtype of one byte, but got shape {tuple(scales.shape)} and "
            f"{scales.dtype}: flatten the rows of a batch"
        )
    rows, columns = scales.shape
    padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))  # tile row, r // 32, r % 32, tile column, c
    return tiles.permute(0, 3, 2, 1, 4).flatten().view(scales.dtype)
