"""Casts between fp32, fp16, bf16 and FP8: every rounding against fractions, every kind of tensor, noise, autograd."""

import itertools
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import cpp
import numpy as np
import oracles
import pytest
import roundings
import torch
import walks
from errors import error_of
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, devices, twin, twins, using
from oracles import BF16, DTYPES, E4M3, E5M2, FP8, FP16, FP32, assert_same_bits
from strategies import kinds, laid_out

import halfstep
from halfstep.kernels import native
from halfstep.kernels.multi_tensor import is_flat
from halfstep.kernels.philox import reference_words
from halfstep.kernels.rounding import ROUNDINGS

pytestmark = [pytest.mark.sample(3), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy, on overflow and NaN

device = devices("cast")
FORMATS = (*DTYPES, *FP8)
PAIRS = list(itertools.product(FORMATS, FORMATS))
WIDE_PAIRS = list(itertools.product(DTYPES, DTYPES))
MODES = pytest.mark.parametrize("rounding", ROUNDINGS)


def names(value: object) -> str:
    return str(value).removeprefix("torch.")


def every_code(dtype: torch.dtype) -> torch.Tensor:
    """All codes of a 16-bit or 8-bit format; of fp32, the neighbours of each number where a rounding changes."""
    if dtype == FP32:
        return oracles.to_torch(np.concatenate([oracles.thresholds(FP16), oracles.thresholds(BF16)]))
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def codes(tensor: torch.Tensor) -> torch.Tensor:
    """What torch can concatenate and compare in every version."""
    return tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize])


def probes(source: torch.dtype, target: torch.dtype, count: int = 800) -> torch.Tensor:
    """Values of `source`, out of order, where casting them to `target` may go wrong."""
    rng = np.random.default_rng(FORMATS.index(source) * 5 + FORMATS.index(target))
    if source != FP32:
        every = every_code(source)
        return every[torch.from_numpy(rng.permutation(len(every))[:count])]
    values = oracles.thresholds(FP16) if target == FP32 else roundings.points(target)
    chosen = rng.choice(values, min(count, len(values)), replace=False)
    return oracles.to_torch(rng.permutation(np.concatenate([oracles.specials(), chosen])))


def nearest(values: np.ndarray, target: torch.dtype) -> np.ndarray:
    """What a cast to nearest must give: through fp32, which holds every source exactly, rounded once."""
    wide = values.astype(np.float32)
    return wide if target == FP32 else oracles.round_to(wide, target)


def expected(x: torch.Tensor, target: torch.dtype, rounding: str, saturate: bool, words: torch.Tensor) -> np.ndarray:
    """What a cast of a 1-D tensor must give, one number at a time, in fractions."""
    wide = oracles.to_numpy(x).astype(np.float32)
    if target == FP32:
        return np.clip(wide, -np.finfo(np.float32).max, np.finfo(np.float32).max) if saturate else wide
    found = [
        roundings.code(value, target, rounding, saturate, word)
        for value, word in zip(wide.tolist(), words.tolist(), strict=True)
    ]
    nan = {FP16: 0x7E00, BF16: 0x7FC0, E4M3: 0x7F, E5M2: 0x7F}[target]
    unsigned = np.uint8 if target.itemsize == 1 else np.uint16
    return np.array([nan if code is None else code for code in found], unsigned).view(oracles.NUMPY[target])


@cache
def probed(source: torch.dtype, target: torch.dtype, rounding: str, saturate: bool, seed: int) -> np.ndarray:
    """What a cast of `probes` must give."""
    x = probes(source, target)
    return expected(x, target, rounding, saturate, reference_words(torch.arange(x.numel()), seed))


def seed_of(rounding: str) -> int | None:
    return 99 if rounding == "stochastic" else None


# ------------------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize(("source", "target"), WIDE_PAIRS, ids=names)
def test_every_code_to_nearest(device: torch.device, source: torch.dtype, target: torch.dtype) -> None:
    values = oracles.to_numpy(every_code(source))
    x = oracles.to_torch(values).to(device)
    for result in (halfstep.cast(x, target), *halfstep.foreach_cast([x], target)):
        assert_same_bits(result, nearest(values, target))


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=names)
def test_every_pair_rounding_and_saturation(device: torch.device, source: torch.dtype, target: torch.dtype) -> None:
    x = probes(source, target)
    there = x.to(device)
    for rounding, saturate in itertools.product(ROUNDINGS, (False, True)):
        options = {"rounding": rounding, "saturate": saturate, "seed": seed_of(rounding)}
        want = probed(source, target, rounding, saturate, 99)
        one = halfstep.cast(there, target, **options)  # type: ignore[arg-type]
        (many,) = halfstep.foreach_cast([there], target, **options)  # type: ignore[arg-type]
        assert_same_bits(one, want, (rounding, saturate))
        assert_same_bits(many, want, (rounding, saturate, "list"))
        if source in FP8 and target in FP8:  # a NaN keeps its sign
            nan = x.float().isnan()
            assert torch.equal(codes(one).cpu()[nan] & 0x80, codes(x)[nan] & 0x80)


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cast.cpp for the oldest machine of this kind, where native.h has the bit arithmetic."""
    return cpp.compiled(tmp_path_factory, cpp.KERNELS / "cast.cpp", cpp.PORTABLE)


@MODES
@pytest.mark.parametrize("saturate", [False, True], ids=["", "saturating"])
def test_the_portable_cpp_has_the_bits_of_the_reference(
    portable: Path, monkeypatch: pytest.MonkeyPatch, rounding: str, saturate: bool
) -> None:
    options = {"rounding": rounding, "saturate": saturate, "seed": seed_of(rounding)}
    for source, target in PAIRS:
        x = probes(source, target, 2**16 if rounding == "nearest" else 4000)
        with halfstep.backend("reference"):
            want = halfstep.cast(x, target, **options)  # type: ignore[arg-type]
        with monkeypatch.context() as patch, halfstep.backend("auto"):
            patch.setattr(native, "library", lambda family: walks.load_casts(str(portable)))
            (result,) = halfstep.foreach_cast([x], target, **options)  # type: ignore[arg-type]
        assert_same_bits(result, want, (source, target))


@pytest.mark.parametrize("dtype", FORMATS, ids=names)
def test_the_same_dtype_is_a_copy(device: torch.device, dtype: torch.dtype) -> None:
    x = every_code(dtype)[:: 7 if dtype == FP32 else 1]
    there = x.to(device)
    for rounding in ROUNDINGS:
        y = halfstep.cast(there, dtype, rounding=rounding, seed=seed_of(rounding))
        assert torch.equal(codes(y).cpu(), codes(x)), "payloads of NaN included"
        assert y.data_ptr() != there.data_ptr()
    saturated = halfstep.cast(there, dtype, saturate=True).float()
    assert not saturated.isinf().any() and torch.equal(saturated.isnan(), there.float().isnan())


# ---------------------------------------------------------------------------------------------------- kinds of tensors


@pytest.mark.parametrize(("source", "target"), WIDE_PAIRS, ids=names)
def test_every_kind_of_tensor(device: torch.device, source: torch.dtype, target: torch.dtype) -> None:
    tensors = kinds(source)
    placed = twins(list(tensors.values()), device)
    before = [oracles.bits(tensor).copy() for tensor in placed]
    many = halfstep.foreach_cast(placed, target)
    for kind, original, tensor, listed, kept in zip(tensors, tensors.values(), placed, many, before, strict=True):
        want = nearest(oracles.to_numpy(original), target)
        for result in (halfstep.cast(tensor, target), listed):
            assert_same_bits(result, want, kind)
            assert result.device == tensor.device and result.dtype == target
            assert result.stride() == tensor.stride() if is_flat(tensor) else result.is_contiguous(), kind
            assert not result.numel() or result.data_ptr() != tensor.data_ptr(), "a copy, whatever the dtype"
        assert (oracles.bits(tensor) == kept).all(), f"{kind}: the source was written"


def test_nothing_beyond_the_target_is_written(device: torch.device) -> None:
    """Targets in the middle of a buffer, at every alignment, ending within, at and beyond a chunk."""
    for target in DTYPES:
        for offset, size in ((1, 1), (1, 17), (3, 4095), (8, 4096), (2, 4097), (1, 0)):
            source = torch.linspace(-3, 3, size, device=device)
            buffer = torch.full((offset + size + 9,), 42.0, dtype=target, device=device)
            halfstep.foreach_cast([source], target, out=[buffer[offset : offset + size]])
            assert_same_bits(buffer[offset : offset + size], nearest(oracles.to_numpy(source), target))
            assert (buffer[:offset] == 42).all() and (buffer[offset + size :] == 42).all(), (target, offset, size)


@pytest.mark.parametrize(("source", "target"), [(FP32, FP16), (FP16, BF16), (BF16, FP32), (FP32, FP32)], ids=names)
def test_results_are_written_into_out_of_any_layout(
    device: torch.device, source: torch.dtype, target: torch.dtype
) -> None:
    """The same strides, others, gaps; the result is `out` itself."""
    values = torch.randn(6, 10).to(source)
    want = nearest(oracles.to_numpy(values), target)
    for x in (twin(values, device), twin(values.t().contiguous().t(), device)):
        outs = {
            "the same strides": torch.empty_strided(x.shape, x.stride(), dtype=target, device=device),
            "row by row": torch.empty(6, 10, dtype=target, device=device),
            "column by column": torch.empty(10, 6, dtype=target, device=device).t(),
            "gaps": torch.empty(6, 25, dtype=target, device=device)[:, 2:22:2],
            "misaligned": torch.empty(61, dtype=target, device=device)[1:].view(6, 10),
        }
        for kind, out in outs.items():
            version = out._version
            assert halfstep.cast(x, target, out=out) is out
            assert_same_bits(out, want, kind)
            assert out._version > version, f"{kind}: autograd cannot see the write"
            out.fill_(7)
            version = out._version
            results = halfstep.foreach_cast([x], target, out=[out])
            assert len(results) == 1 and results[0] is out
            assert_same_bits(out, want, f"{kind}, list")
            assert out._version > version, f"{kind}, list: autograd cannot see the write"


def test_a_lazy_negation_is_written_with_its_sign(device: torch.device) -> None:
    values = torch.arange(1.0, 9.0)
    z = torch.complex(torch.zeros(8), values).to(device)
    assert halfstep.cast(z.conj().imag, FP16).tolist() == (-values).tolist()
    out = torch._neg_view(torch.zeros(8, dtype=BF16, device=device))
    halfstep.cast(values.to(device), BF16, out=out)
    assert out.tolist() == values.tolist()


@settings(deadline=None, max_examples=60)
@given(
    st.lists(laid_out(FORMATS), max_size=4),
    st.sampled_from(FORMATS),
    st.sampled_from(ROUNDINGS),
    st.booleans(),
    st.integers(0, 2**63 - 1),
    st.integers(0, 2**40),
)
def test_any_list_has_the_same_bits_everywhere(
    tensors: list[torch.Tensor], target: torch.dtype, rounding: str, saturate: bool, number: int, offset: int
) -> None:
    seed = number if rounding == "stochastic" else None
    offsets = [offset + 3 * index for index in range(len(tensors))]
    wants = []
    for place, tensor in enumerate(tensors):
        words = reference_words(torch.arange(tensor.numel()) + offsets[place], number, 0, place)
        plain = tensor.resolve_neg().contiguous().view(-1)
        wants.append(expected(plain, target, rounding, saturate, words).reshape(tensor.shape))
    for name in ALL:
        with using(name, "cast") as device:
            placed = [tensor.to(device) for tensor in tensors]
            options = {"rounding": rounding, "saturate": saturate, "seed": seed}
            results = halfstep.foreach_cast(placed, target, offsets=offsets, **options)  # type: ignore[arg-type]
            for result, want in zip(results, wants, strict=True):
                assert_same_bits(result, want, name)
            if placed:
                one = halfstep.cast(placed[0], target, offset=offset, **options)  # type: ignore[arg-type]
                assert_same_bits(one, wants[0], name)


# --------------------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("target", FORMATS[1:], ids=names)
def test_a_shard_gets_the_bits_of_the_full_tensor(device: torch.device, target: torch.dtype) -> None:
    """Cut at multiples of 16 elements, of 4, and anywhere; at any alignment in memory."""
    whole = torch.randn(9001, generator=torch.Generator().manual_seed(0))
    options = {"rounding": "stochastic", "seed": 2**63 - 1}
    there = whole.to(device)
    want = halfstep.cast(there, target, **options)  # type: ignore[arg-type]
    cuts = [0, 1, 4, 16, 17, 528, 531, 4096, 4099, 8196, 9001]
    parts = [there[a:b] for a, b in itertools.pairwise(cuts)]
    for pieces in (parts, [part.clone() for part in parts]):
        got = [
            codes(halfstep.cast(piece, target, offset=at, **options))  # type: ignore[arg-type]
            for piece, at in zip(pieces, cuts, strict=False)
        ]
        assert torch.equal(torch.cat(got), codes(want))
    out = torch.empty_like(want)
    halfstep.cast(there[531:], target, offset=531, out=out[531:], **options)  # type: ignore[arg-type]
    assert_same_bits(out[531:], want[531:])


def test_noise_of_a_list(device: torch.device) -> None:
    """It depends on the place in the list, not on neighbours or dtypes."""
    x = torch.full((5000,), 1 / 3)
    there = x.to(device)
    mixed = [there, there.half(), torch.empty(0, device=device), there[1:], there]
    results = halfstep.foreach_cast(mixed, E4M3, rounding="stochastic", seed=11)
    for place, (source, result) in enumerate(zip(mixed, results, strict=True)):
        words = reference_words(torch.arange(source.numel()), 11, 0, place)
        assert_same_bits(result, expected(source.cpu(), E4M3, "stochastic", False, words), place)
    # The table of the last list is refreshed, not reused, when only the places changed.
    both = halfstep.foreach_cast([there, there], BF16, rounding="stochastic", seed=1)
    moved = halfstep.foreach_cast([there, there], BF16, rounding="stochastic", seed=1, offsets=[4, 0])
    assert_same_bits(moved[0][:-4], both[0][4:])
    assert_same_bits(moved[1], both[1])


def test_the_noise_goes_by_rows_whatever_the_strides(device: torch.device) -> None:
    tensors = kinds(FP32)
    options = {"rounding": "stochastic", "seed": 6}
    placed = twins(list(tensors.values()), device)
    rows = [tensor.contiguous().clone() for tensor in placed]
    listed = halfstep.foreach_cast(rows, BF16, **options)  # type: ignore[arg-type]
    for result, want in zip(halfstep.foreach_cast(placed, BF16, **options), listed, strict=True):  # type: ignore[arg-type]
        assert_same_bits(result, want)
    for kind, tensor, row_major in zip(tensors, placed, rows, strict=True):
        want = halfstep.cast(row_major, BF16, **options)  # type: ignore[arg-type]
        assert_same_bits(halfstep.cast(tensor, BF16, **options), want, kind)  # type: ignore[arg-type]
        out = torch.empty_like(want)
        out = out.t().contiguous().t() if out.dim() == 2 else out
        assert_same_bits(halfstep.cast(tensor, BF16, out=out, **options), want, kind)  # type: ignore[arg-type]


def test_a_seed_is_drawn_from_torchs_generator() -> None:
    x = torch.full((999,), 1 / 3)

    def cast() -> tuple[torch.Tensor, torch.Tensor]:
        (listed,) = halfstep.foreach_cast([x], BF16, rounding="stochastic")
        return halfstep.cast(x, BF16, rounding="stochastic"), listed

    torch.manual_seed(3)
    first, second = cast(), cast()
    torch.manual_seed(3)
    assert all(map(torch.equal, first, cast()))
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[0], first[1])
    state = torch.get_rng_state()
    halfstep.cast(x, BF16, rounding="toward_zero")
    halfstep.cast(x, BF16, rounding="stochastic", seed=1)
    assert torch.equal(torch.get_rng_state(), state), "nothing was to be drawn"
    with torch.device("meta"):
        assert halfstep.cast(x, BF16, rounding="stochastic").device.type == "cpu"


# ------------------------------------------------------------------------------------------- autograd and registration


@pytest.mark.parametrize(("source", "target"), WIDE_PAIRS, ids=names)
def test_the_gradient_is_cast_back_to_nearest(device: torch.device, source: torch.dtype, target: torch.dtype) -> None:
    x = torch.randn(7, 5, device=device).to(source).t().requires_grad_()
    incoming = (torch.randn(5, 7, device=device) * 1e3).to(target)
    for rounding in ROUNDINGS:
        x.grad = None
        halfstep.cast(x, target, rounding=rounding, saturate=True, seed=seed_of(rounding)).backward(incoming)
        assert x.grad is not None and x.grad.dtype == source
        assert_same_bits(x.grad, nearest(oracles.to_numpy(incoming), source))
    x.grad = None
    halfstep.cast(x, target).sum().backward()  # a gradient with stride 0
    assert (x.grad == 1).all()
    # Twice differentiable: linear, so the second derivative is through the cast's own cast.
    (first,) = torch.autograd.grad((halfstep.cast(x, target).float() ** 2).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.float().sum(), x)
    assert second.dtype == source and (second == 2).all()


def test_gradients_through_fp8_are_fp8() -> None:
    """As with torch's own .to(): autograd gives a tensor a gradient of its dtype."""
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    halfstep.cast(x, E5M2).backward(torch.tensor([0.3, 100.0]).to(E5M2))
    assert x.grad is not None and x.grad.dtype == FP32
    assert x.grad.tolist() == torch.tensor([0.3, 100.0]).to(E5M2).float().tolist()
    z = torch.tensor([1.0, -2.0]).to(E4M3).requires_grad_()
    halfstep.cast(z, FP32).backward(torch.tensor([0.3, 1e9]))
    assert z.grad is not None and z.grad.dtype == E4M3
    assert z.grad.float()[0].item() == 0.3125 and z.grad.float()[1].isnan(), "no saturation: an overflow is not hidden"


def test_lists_and_out_are_not_differentiable() -> None:
    x = torch.ones(3, requires_grad=True)
    (result,) = halfstep.foreach_cast([x], FP16)
    assert not result.requires_grad
    out = torch.empty(3, dtype=FP16)
    with torch.no_grad():
        assert halfstep.cast(x, FP16, out=out) is out
    assert error_of(ValueError, lambda: halfstep.cast(x, FP16, out=out)) == (
        "Expected no gradient to be required with out=, but one is: leave out= out, or cast under torch.no_grad()"
    )
    with torch.inference_mode():
        x = torch.ones(3)
        assert halfstep.cast(x, FP16).dtype == FP16
        assert halfstep.foreach_cast([x], FP16, out=[torch.zeros(3, dtype=FP16)])[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("target", [FP16, E4M3], ids=names)
@MODES
def test_the_operator_is_registered_properly(target: torch.dtype, rounding: str) -> None:
    seed = torch.tensor(5) if rounding == "stochastic" else None
    only: dict[str, Any] = {"test_utils": ("test_schema", "test_faketensor")} if target in FP8 else {}
    for kind in ("0-dim", "transposed gaps", "channels last"):
        x = kinds(FP32)[kind].nan_to_num(0, 0, 0).requires_grad_(target not in FP8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            arguments = (x, target, rounding, True, seed, 3)
            torch.library.opcheck(torch.ops.halfstep.cast.default, arguments, **only)


def test_it_compiles_in_one_graph() -> None:
    """Traced and differentiated as one graph; Inductor's own C++ would cost half a minute more and is not ours."""

    def function(x: torch.Tensor, seed: int | None, offset: int) -> torch.Tensor:
        y = halfstep.cast(x * 3, E4M3, rounding="stochastic", saturate=True, seed=seed, offset=offset)
        return halfstep.cast(y, FP32) + halfstep.cast(halfstep.cast(x, BF16, rounding="toward_zero") + 1, FP32)

    torch._dynamo.reset()
    x = torch.randn(50, 7).t().requires_grad_()
    with torch._dynamo.config.patch(error_on_recompile=False):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for seed, offset in ((1, 0), (2, 8), (3, 9), (2**63 - 1, 10), (2**62, 2**40)):
            results = [call(x, seed, offset) for call in (compiled, function)]
            assert_same_bits(*results, seed)
        assert_same_bits(*(torch.autograd.grad(result.sum(), x)[0] for result in results))


def test_seeds_drawn_in_a_compiled_graph_are_not_merged() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return halfstep.cast(x, BF16, rounding="stochastic"), halfstep.cast(x, BF16, rounding="stochastic")

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.full((999,), 1 / 3)
    torch.manual_seed(1)
    one, other = compiled(x)
    assert not torch.equal(one, other)
    torch.manual_seed(1)
    assert all(map(torch.equal, function(x), (one, other)))


# ----------------------------------------------------------------------------------------------------------- refusals

LISTED = "torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2"
ONES = torch.ones(3)
UNUSED = "which uses no random numbers, but got {}: leave it out, or pass rounding='stochastic'"
PLACE = "to be the index of an element in its tensor, from 0 to 2^60 - 1, but got"
REFUSED: list[tuple[type[Exception], str, dict[str, object]]] = [
    (TypeError, f"Expected dtype to be one of {LISTED}, but got torch.float64", {"dtype": torch.float64}),
    (
        TypeError,
        "Expected x to have dtype float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, but got torch.float64: "
        "convert it with .to() or leave it out",
        {"x": ONES.double()},
    ),
    (
        ValueError,
        "Expected rounding to be one of 'nearest', 'toward_zero', 'stochastic', but got 'up'",
        {"rounding": "up"},
    ),
    (ValueError, "Expected out to be (3,) torch.float16 on cpu, but got (3,) torch.float32 on cpu", {"out": ONES}),
    (ValueError, f"Expected offset {PLACE} -4", {"offset": -4}),
    (TypeError, "Expected offset to be an integer, a number of elements, but got 2.0, a float", {"offset": 2.0}),
    (ValueError, "Expected seed to be None with rounding='nearest', " + UNUSED.format(3), {"seed": 3}),
    (
        ValueError,
        "Expected seed to be from 0 to 2^63 - 1, but got -1: reduce it with seed % 2**63",
        {"rounding": "stochastic", "seed": -1},
    ),
]
REFUSED_LISTS: list[tuple[type[Exception], str, dict[str, object]]] = [
    (ValueError, "Expected out to have one tensor per input, 1, but got 0", {"out": []}),
    (
        ValueError,
        "Expected out[1] to be (3,) torch.float16 on cpu, but got (2,) torch.float16 on cpu",
        {"tensors": [ONES, ONES], "out": [ONES.half(), torch.ones(2).half()]},
    ),
    (ValueError, f"Expected offsets[0] {PLACE} {2**60}", {"offsets": [2**60]}),
    (ValueError, "Expected offsets to have one number per tensor, 1, but got 2", {"offsets": [0, 1]}),
]


@pytest.mark.parametrize(("error", "message", "arguments"), REFUSED)
def test_bad_arguments_are_refused(error: type[Exception], message: str, arguments: dict[str, object]) -> None:
    assert error_of(error, lambda: halfstep.cast(**{"x": ONES, "dtype": FP16, **arguments})) == message  # type: ignore[arg-type]


@pytest.mark.parametrize(("error", "message", "arguments"), REFUSED_LISTS)
def test_bad_lists_are_refused(error: type[Exception], message: str, arguments: dict[str, object]) -> None:
    assert error_of(error, lambda: halfstep.foreach_cast(**{"tensors": [ONES], "dtype": FP16, **arguments})) == message  # type: ignore[arg-type]


def test_refusals_outside_the_functions_and_before_anything_is_written() -> None:
    with pytest.raises(ValueError, match="Expected seed to be a tensor on the CPU for stochastic rounding, but got no"):
        torch.ops.halfstep.cast(ONES, FP16, "stochastic")
    first = torch.zeros(2, dtype=FP16)
    with pytest.raises(ValueError):
        halfstep.foreach_cast([torch.ones(2), torch.ones(2)], FP16, out=[first, torch.zeros(3, dtype=FP16)])
    assert first.tolist() == [0, 0]


# --------------------------------------------------------------------------------------------------- all 2^32 patterns


@pytest.mark.exhaustive
@pytest.mark.parametrize("rounding", ["nearest", "toward_zero"])
@pytest.mark.parametrize("target", FORMATS[1:], ids=names)
def test_all_fp32_patterns(target: torch.dtype, rounding: str) -> None:
    """The C++ list kernel against `halfstep.encode`, which shares no code with it; NaN by its sign."""
    size, result = 2**20, torch.empty(2**20, dtype=target)
    integers = torch.int16 if target.itemsize == 2 else torch.uint8
    with using("native", "cast"):
        for first in range(-(2**31), 2**31, size):
            values = torch.arange(first, first + size, dtype=torch.int32).view(FP32)
            # Two tensors: the cast of one is torch's own, which gives every NaN one sign on CPUs with AVX-512.
            halfstep.foreach_cast([values, values[:0]], target, rounding=rounding, out=[result, result[:0]])
            expected = halfstep.encode(values, target, rounding)
            nan = result.float().isnan()
            assert torch.equal(nan, expected.view(target).float().isnan()), hex(first)
            assert torch.equal(result.view(integers)[~nan], expected.view(integers)[~nan]), hex(first)
            assert torch.equal(result.view(integers)[nan] >> (8 * target.itemsize - 1) != 0, values.signbit()[nan])
