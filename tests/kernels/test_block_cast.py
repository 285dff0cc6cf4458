"""Casts to formats of blocks against the codec of numerics, which is tested against other libraries."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from block_values import midpoints_of_nvfp4, some_blocks

import halfstep
from halfstep.kernels.block_cast import tiled_scales
from halfstep.kernels.formats import BLOCKS, SCALE_RULES

NAMES = [row.name for row in BLOCKS] + [f"{row.name}_{rule}" for row in BLOCKS[:-1] for rule in SCALE_RULES[1:]]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16


def unpacked(codes: torch.Tensor, axis: int = -1) -> torch.Tensor:
    if codes.dtype != torch.float4_e2m1fn_x2:
        return codes.view(torch.uint8)
    pairs = codes.view(torch.uint8).movedim(axis, -1)
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2).movedim(-1, axis)


def assert_same(
    x: torch.Tensor, name: str, axis: int | tuple[int, int] = -1, rounding: str = "nearest", **options
) -> None:
    saturate, offset = options.pop("saturate", False), options.get("offset", 0)
    seed = {"seed": 11} if rounding == "stochastic" else {}
    ours = halfstep.cast(x, name, axis=axis, rounding=rounding, saturate=saturate, offset=offset, **seed)
    overflow = "saturate" if saturate else "inf"
    expected = halfstep.encode(x, name, rounding, axis=axis, overflow=overflow, offset=offset, **seed)
    last = axis[-1] if isinstance(axis, tuple) else axis
    assert torch.equal(ours.scales.view(torch.uint8), expected.scales)
    assert torch.equal(unpacked(ours.codes, last), expected.codes)
    assert ours.global_scale == expected.global_scale
    form = halfstep.formats[name]
    assert ours.codes.dtype == getattr(torch, form.element.torch or "uint8")
    assert ours.scales.dtype == getattr(torch, form.scale.torch)
    decoded, again = (halfstep.decode(coded, name, axis=axis) for coded in (ours, expected))
    assert torch.equal(decoded.nan_to_num(nan=1e99), again.nan_to_num(nan=1e99))


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_of_the_codec(name: str) -> None:
    form = halfstep.formats[name]
    x = torch.from_numpy(some_blocks(2_000, form.size)) * (2.0**-20 if name == "nvfp4" else 1.0)
    x[::50, 3], x[1::50, 5], x[2::50] = math.nan, -math.inf, 0.0
    for rounding, saturate in product(("nearest", "toward_zero", "stochastic"), (False, True)):
        assert_same(x, name, rounding=rounding, saturate=saturate)
    for dtype in (FP16, BF16):
        assert_same((x.clamp(-60000, 60000) if dtype == FP16 else x).to(dtype), name)


@pytest.mark.parametrize("axis", [0, 1, -1, (0, 1), (2, 0)])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp6_e3m2", "mxfp4_even", "nvfp4"])
def test_dimensions(name: str, axis: int | tuple[int, int]) -> None:
    """Short last blocks, strides and random bits by the position in row-major order."""
    x = torch.randn((72, 6, 38), generator=torch.Generator().manual_seed(1))
    for view in (x, x.transpose(0, 2), x[::2, :, 4:36], x[:0], x[:, :0]):
        for rounding in ("nearest", "stochastic"):
            assert_same(view, name, axis, rounding, offset=123)


def test_stochastic_rounding_is_unbiased_and_drawn_anew() -> None:
    x = torch.full((20_000, 32), 1.1)
    x[:, 0] = 6.0
    stored = halfstep.decode(halfstep.cast(x, "mxfp4", rounding="stochastic", seed=3), "mxfp4")[:, 1:]
    assert sorted(set(stored.flatten().tolist())) == [1.0, 1.5]
    share = (stored == 1.5).double().mean().item()
    assert abs(share - 0.2) < 5 * (0.2 * 0.8 / stored.numel()) ** 0.5
    torch.manual_seed(0)
    drawn = [halfstep.cast(x[:8], "mxfp4", rounding="stochastic").codes.view(torch.uint8) for _ in range(2)]
    torch.manual_seed(0)
    assert not torch.equal(*drawn) and torch.equal(
        drawn[0], halfstep.cast(x[:8], "mxfp4", rounding="stochastic").codes.view(torch.uint8)
    )


def test_a_global_scale_of_another_tensor() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    g = torch.tensor(0.0037)
    ours, expected = halfstep.cast(x, "nvfp4", global_scale=g), halfstep.encode(x, "nvfp4", global_scale=0.0037)
    assert torch.equal(unpacked(ours.codes), expected.codes) and ours.global_scale == g
    rows = torch.from_numpy(midpoints_of_nvfp4(300, np.float32(0.7))[0])
    expected = halfstep.encode(rows, "nvfp4", global_scale=0.7)
    assert torch.equal(unpacked(halfstep.cast(rows, "nvfp4", global_scale=0.7).codes), expected.codes)
    small = torch.tensor(1e-6)
    assert halfstep.decode(halfstep.cast(x, "nvfp4", global_scale=1e-6), "nvfp4").isnan().all()
    saturated = halfstep.cast(x, "nvfp4", global_scale=small, saturate=True)
    assert set(saturated.scales.view(torch.uint8).flatten().tolist()) == {0x7E}


def test_subnormal_numbers_where_they_are_flushed() -> None:
    x = torch.from_numpy(np.arange(1, 65, dtype=np.uint32).view(np.float32).reshape(2, 32).copy() * np.float32(2.0**10))
    expected = [halfstep.cast(x, name).codes.view(torch.uint8) for name in ("mxfp8", "mxfp4")]
    assert expected[0].any() and torch.set_flush_denormal(True)
    try:
        for name, codes in zip(("mxfp8", "mxfp4"), expected, strict=True):
            assert torch.equal(halfstep.cast(x, name).codes.view(torch.uint8), codes)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize(("rows", "columns"), [(128, 4), (1, 1), (130, 5), (300, 64), (64, 8), (0, 3)])
def test_tiled_scales(rows: int, columns: int) -> None:
    """The offsets in NVIDIA's documentation of cuBLAS, one scale at a time."""
    scales = torch.randint(1, 255, (rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    tiles = math.ceil(columns / 4)
    expected = torch.zeros(math.ceil(rows / 128) * tiles * 512, dtype=torch.uint8)
    for row, column in product(range(rows), range(columns)):
        tile = row // 128 * tiles + column // 4
        expected[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    tiled = tiled_scales(scales.view(torch.float8_e8m0fnu))
    assert tiled.dtype == torch.float8_e8m0fnu and torch.equal(tiled.view(torch.uint8), expected)


def test_refusals() -> None:
    x = torch.ones(4, 6)
    for call, error, message in (
        (
            lambda: halfstep.cast(x, "mxfp"),
            ValueError,
            "Expected dtype to be a dtype or a format of blocks, such as",
        ),
        (
            lambda: halfstep.cast(x.double(), "mxfp8"),
            TypeError,
            "Expected x to have dtype float32, float16 or bfloat16",
        ),
        (lambda: halfstep.cast(x, "mxfp8", out=x), ValueError, "Expected out to be None for a format of blocks"),
        (lambda: halfstep.cast(x, BF16, axis=0), ValueError, "Expected axis and global_scale to be None for torch.bfl"),
        (
            lambda: halfstep.cast(x, "mxfp8", axis=2),
            ValueError,
            "Expected axis to be a dimension, or a pair of them",
        ),
        (lambda: halfstep.cast(x, "mxfp8", axis=(1, -1)), ValueError, "of the 2 of the numbers, but got (1, -1)"),
        (
            lambda: halfstep.cast(x[:, :5], "mxfp4"),
            ValueError,
            "Expected an even number of elements along axis -1",
        ),
        (
            lambda: halfstep.cast(x, "mxfp8", global_scale=x[0, 0]),
            ValueError,
            "Expected global_scale to be None for",
        ),
        (
            lambda: halfstep.cast(x, "nvfp4", global_scale=x[0]),
            ValueError,
            "Expected global_scale to be one number",
        ),
        (lambda: halfstep.cast(x, "mxfp8", seed=1), ValueError, "Expected seed to be None with rounding='nearest'"),
        (
            lambda: tiled_scales(x),
            ValueError,
            "Expected scales to have two dimensions and a dtype of one byte, but got",
        ),
    ):
        with pytest.raises(error) as raised:
            call()
        assert message in str(raised.value)
