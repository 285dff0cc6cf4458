"""Casts to formats of blocks: the rule against the codec of numerics, which is tested against other libraries, and the
kernels and the C++ against the rule."""

import math
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from block_values import midpoints_of_nvfp4, some_blocks
from devices import assert_same_bits
from errors import refuses
from implementations import using
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep
from halfstep.kernels.block_cast import dispatch, tiled_scales
from halfstep.kernels.formats import BLOCKS, SCALE_RULES, Blocks

NAMES = [row.name for row in BLOCKS] + [f"{row.name}_{rule}" for row in BLOCKS[:-1] for rule in SCALE_RULES[1:]]
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
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


FAST = pytest.mark.parametrize("name", ["native", "triton"])


def assert_same_blocks(actual: Blocks, expected: Blocks, what: object = "") -> None:
    for ours, theirs in zip(actual[:2], expected[:2], strict=True):
        assert_same_bits(ours.view(torch.uint8), theirs.view(torch.uint8), what)
        assert ours.dtype == theirs.dtype
    if expected.global_scale is not None:
        assert_same_bits(actual.global_scale, expected.global_scale, what)


def assert_bits_of_the_rule(x: torch.Tensor, device: torch.device, form: str, **options: Any) -> None:
    ours = halfstep.cast(x.to(device), form, **options)
    with halfstep.backend("reference"):
        assert_same_blocks(ours, halfstep.cast(x, form, **options), (form, options, tuple(x.shape)))


def numbers(form: str, *shape: int) -> torch.Tensor:
    """With what is not finite, in blocks that lie beside others in every dimension; blocks of zeros, and small ones."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * (2.0**-20 if form == "nvfp4" else 8.0)
    flat = x.view(-1)
    flat[5], flat[-7], flat[x.numel() // 2], flat[x.numel() // 3 :][:64] = math.nan, math.inf, -math.inf, 1e-39
    x[-1, : shape[1] // 2] = -0.0
    return x


@FAST
@pytest.mark.parametrize("form", ["mxfp8", "mxfp8_e5m2_even", "mxfp6_e2m3_ceil", "mxfp6_e3m2", "mxfp4_rceil", "nvfp4"])
def test_the_bits_of_the_rule(name: str, form: str) -> None:
    """Numbers of every exponent, and ties; all roundings, dtypes and ends of the range."""
    x = torch.from_numpy(some_blocks(130, halfstep.formats[form].size)) * (2.0**-20 if form == "nvfp4" else 1.0)
    x[::50, 3], x[1::50, 5], x[2::50], x[3::50, 7] = math.nan, -math.inf, 0.0, 1e-42
    x[51, 6:], x[4::50] = 3e38, torch.arange(1, x.shape[1] + 1) * 1e-41
    modes = [("nearest", False), ("nearest", True), ("toward_zero", True), ("stochastic", False)]
    with using(name, "block_cast") as device:
        for dtype, (rounding, saturate) in zip((FP32, FP32, BF16, FP32, FP16), [*modes, modes[0]], strict=True):
            options = {"rounding": rounding, "saturate": saturate}
            assert_bits_of_the_rule(
                x.to(dtype), device, form, **options, **({"seed": 2**40 + 3} if rounding == "stochastic" else {})
            )


@FAST
@pytest.mark.parametrize("axis", [-1, 0, 1, (0, 1), (2, 0), (1, 2), (2, 1)], ids=str)
def test_dimensions_and_strides(name: str, axis: int | tuple[int, int]) -> None:
    """Vectors and single elements, short blocks, odd and empty sizes, words by position."""
    views = {"whole": (2, 32, 64), "short": (34, 6, 14), "empty": (0, 4, 6)}
    with using(name, "block_cast") as device:
        for form, (kind, shape) in product(("mxfp8", "mxfp4", "nvfp4"), views.items()):
            x = numbers(form, *shape) if kind != "empty" else torch.ones(shape)
            assert_bits_of_the_rule(x.to(BF16 if kind == "whole" else FP32), device, form, axis=axis)
            for offset in (8, 123) if kind == "whole" else (123,):
                random = {"rounding": "stochastic", "seed": 5, "offset": offset}
                assert_bits_of_the_rule(x, device, form, axis=axis, **random)
        off_boundary = numbers("mxfp8", 2, 33, 32).flatten()[1:2049].view(2, 32, 32)
        negated = torch._neg_view(torch.ones(2, 3, 32))
        for x in (numbers("mxfp8", 5, 7, 9).transpose(0, 2), off_boundary, negated):
            assert_bits_of_the_rule(x, device, "mxfp8", axis=axis)


@pytest.mark.parametrize("name", ["reference", "native", "triton"])
def test_lists(name: str) -> None:
    """Each tensor as alone, with words by its position; one launch for each dtype."""
    x = numbers("mxfp8", 3, 32, 64)
    listed = [x, x[0].to(BF16), x[1, :30, :34], x[2, 0], torch.ones(0, 4), x[2].to(BF16)]
    with using(name, "block_cast") as device:
        given = [each.to(device) for each in listed]
        for form, axis in (("mxfp8", -1), ("mxfp8", 0), ("nvfp4", -1)):
            for each, ours in zip(listed, halfstep.foreach_cast(given, form, axis=axis), strict=True):
                with halfstep.backend("reference"):
                    assert_same_blocks(ours, halfstep.cast(each, form, axis=axis))
            random = {"rounding": "stochastic", "seed": 9, "axis": axis}
            coded = halfstep.foreach_cast(given, form, offsets=[0, 8, 3, 0, 0, 1], **random)
            assert_same_blocks(coded[0], halfstep.cast(given[0], form, **random))
            with halfstep.backend("reference"):
                again = halfstep.foreach_cast(listed, form, offsets=[0, 8, 3, 0, 0, 1], **random)
            for ours, theirs in zip(coded, again, strict=True):
                assert_same_blocks(ours, theirs)
    assert halfstep.foreach_cast([], "mxfp8") == []


@FAST
def test_the_largest_number_is_found_wherever_it_is(name: str) -> None:
    """Of tensors that end within a vector, or begin off 16-byte boundaries, alone and in a list."""
    with using(name, "block_cast") as device:
        for at in (0, 17, 2100, 4097, -1):
            x = torch.ones(5001)[1:].view(2, 2500)
            x.view(-1)[at] = 100.0
            alone, (listed, _) = halfstep.cast(x.to(device), "nvfp4"), halfstep.foreach_cast([x, x.T], "nvfp4", axis=-1)
            assert alone.global_scale == listed.global_scale == torch.tensor(100.0) / 2688.0


def test_launches_of_a_list() -> None:
    x = [torch.ones(4, 64), torch.ones(2, 3, 32), torch.ones(7)]
    with using("triton", "block_cast") as device, mock.patch.object(dispatch, "launch_kernel") as launch:
        for form, kernels in (("mxfp8", 1), ("nvfp4", 2)):
            halfstep.foreach_cast([each.to(device) for each in x[: 3 if form == "mxfp8" else 2]], form)
            halfstep.cast(x[0].to(device), form)
            assert launch.call_count == 2 * kernels
            launch.reset_mock()


def test_tracing_takes_the_rule() -> None:
    """What looks at operations sees those of torch: fake tensors, vmap."""
    x = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0))
    if TORCH >= (2, 12):  # torch 2.11 has no batching rule of view(dtype)
        mapped = torch.vmap(lambda each: halfstep.cast(each, "mxfp8").codes.view(torch.uint8))(x)
        assert torch.equal(mapped, halfstep.cast(x, "mxfp8").codes.view(torch.uint8))
    with FakeTensorMode():
        fake = halfstep.cast(torch.empty(4, 64), "mxfp4", axis=0)
    assert fake.codes.shape == (2, 64) and fake.scales.shape == (1, 64)


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


@pytest.mark.filterwarnings("ignore")  # those of torchao
@pytest.mark.parametrize("rule", SCALE_RULES)
def test_torchao_agrees(rule: str) -> None:
    """Codes and scales of its casts of normal numbers, and the order of scales, where torchao is installed."""
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.utils import to_blocked

    x = torch.from_numpy(some_blocks(4096, 32, 3))
    x = x[x.isfinite().all(1) & (x.abs().amax(1) > 2.0**-100)].view(-1, 32)
    for name, dtype in (("mxfp8_e4m3", torch.float8_e4m3fn), ("mxfp8_e5m2", torch.float8_e5m2)):
        scales, codes = to_mx(x.contiguous(), dtype, 32, ScaleCalculationMode[rule.upper()])
        ours = halfstep.cast(x.contiguous(), f"{name}_{rule}")
        assert torch.equal(ours.scales.view(torch.uint8), scales.view(torch.uint8).view(ours.scales.shape))
        assert torch.equal(ours.codes.view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(
            tiled_scales(ours.scales).view(torch.uint8).flatten(), to_blocked(ours.scales.view(torch.uint8)).flatten()
        )


def test_refusals() -> None:
    x = torch.ones(4, 6)
    for call, error, message in (
        (lambda: halfstep.cast(x, "mxfp"), ValueError, "Expected dtype to be a dtype or a format of blocks, such as"),
        (
            lambda: halfstep.cast(x.double(), "mxfp8"),
            TypeError,
            "Expected x to have dtype float32, float16 or bfloat16",
        ),
        (lambda: halfstep.cast(x, "mxfp8", out=x), ValueError, "Expected out to be None for a format of blocks"),
        (lambda: halfstep.cast(x, BF16, axis=0), ValueError, "Expected axis and global_scale to be None for torch.bfl"),
        (lambda: halfstep.cast(x, "mxfp8", axis=2), ValueError, "Expected axis to be a dimension, or a pair of them"),
        (lambda: halfstep.cast(x, "mxfp8", axis=(1, -1)), ValueError, "of the 2 of the numbers, but got (1, -1)"),
        (lambda: halfstep.cast(x[:, :5], "mxfp4"), ValueError, "Expected an even number of elements along axis -1"),
        (lambda: halfstep.cast(x, "mxfp8", global_scale=x[0, 0]), ValueError, "Expected global_scale to be None for"),
        (lambda: halfstep.cast(x, "nvfp4", global_scale=x[0]), ValueError, "Expected global_scale to be one number"),
        (lambda: halfstep.foreach_cast([x], "mxfp8", out=[x]), ValueError, "Expected out to be None for a format of"),
        (lambda: halfstep.foreach_cast([x], BF16, axis=0), ValueError, "Expected axis and global_scale to be None for"),
        (lambda: halfstep.cast(x, "mxfp8", seed=1), ValueError, "Expected seed to be None with rounding='nearest'"),
        (
            lambda: tiled_scales(x),
            ValueError,
            "Expected scales to have two dimensions and a dtype of one byte, but got",
        ),
    ):
        refuses(error, message, call)
