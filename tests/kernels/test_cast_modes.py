"""FP8, toward zero, stochastic and saturating casts through the public functions: values, noise, bias, refusals."""

from __future__ import annotations

import itertools
import subprocess
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import oracles
import pytest
import roundings
import torch
import walks
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, twins, using
from oracles import BF16, E4M3, E5M2, FP8, FP16, FP32, assert_same_bits

import halfstep
from halfstep.kernels import cast as module
from halfstep.kernels import native
from halfstep.kernels.multi_tensor import is_flat
from halfstep.kernels.philox import reference_words
from halfstep.kernels.rounding import ROUNDINGS

pytestmark = [pytest.mark.sample(3), pytest.mark.filterwarnings("ignore::RuntimeWarning")]  # numpy, on overflow and NaN

FORMATS = (FP32, FP16, BF16, E4M3, E5M2)
NARROW = FORMATS[1:]
PAIRS = [(source, target) for source in FORMATS for target in FORMATS]
SATURATE = pytest.mark.parametrize("saturate", [False, True], ids=["", "saturating"])
MODES = pytest.mark.parametrize("rounding", ROUNDINGS)


def names(value: object) -> str:
    return str(value).removeprefix("torch.")


def every_code(dtype: torch.dtype) -> torch.Tensor:
    """All codes of an 8-bit or 16-bit format, as a tensor of it."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(dtype)
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def probes(source: torch.dtype, target: torch.dtype, count: int = 1500) -> torch.Tensor:
    """Values of `source`, out of order, where casting them to `target` may go wrong."""
    rng = np.random.default_rng(FORMATS.index(source) * 5 + FORMATS.index(target))
    if source != FP32:
        codes = every_code(source)
        return codes[torch.from_numpy(rng.permutation(len(codes))[:count])]
    values = oracles.thresholds(FP16) if target == FP32 else roundings.points(target)
    chosen = rng.choice(values, min(count, len(values)), replace=False)
    return oracles.to_torch(rng.permutation(np.concatenate([oracles.specials(), chosen])))


def expected(x: torch.Tensor, target: torch.dtype, rounding: str, saturate: bool, words: torch.Tensor) -> np.ndarray:
    """What a cast of a 1-D tensor must give, one number at a time, in fractions."""
    wide = oracles.to_numpy(x).astype(np.float32)
    if target == FP32:
        return np.clip(wide, -np.finfo(np.float32).max, np.finfo(np.float32).max) if saturate else wide
    codes = [
        roundings.code(value, target, rounding, saturate, word)
        for value, word in zip(wide.tolist(), words.tolist(), strict=True)
    ]
    nan = {FP16: 0x7E00, BF16: 0x7FC0, E4M3: 0x7F, E5M2: 0x7F}[target]
    unsigned = np.uint8 if target.itemsize == 1 else np.uint16
    return np.array([nan if code is None else code for code in codes], unsigned).view(oracles.NUMPY[target])


@cache
def probed(source: torch.dtype, target: torch.dtype, rounding: str, saturate: bool, seed: int) -> np.ndarray:
    """What a cast of `probes` must give."""
    x = probes(source, target)
    return expected(x, target, rounding, saturate, reference_words(torch.arange(x.numel()), seed))


# ------------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("source", FP8, ids=names)
def test_every_fp8_code_widens_to_its_value(name: str, source: torch.dtype) -> None:
    x = every_code(source)
    with using(name, "cast") as device:
        for target in (FP32, FP16, BF16):
            want = oracles.to_numpy(x).astype(np.float32).astype(oracles.NUMPY[target])
            assert_same_bits(halfstep.cast(x.to(device), target), want, target)
            assert_same_bits(halfstep.foreach_cast([x.to(device)[3:]], target)[0], want[3:], target)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=names)
def test_every_pair_rounding_and_saturation(name: str, source: torch.dtype, target: torch.dtype) -> None:
    x = probes(source, target)
    with using(name, "cast") as device:
        for rounding in ROUNDINGS:
            seed = 99 if rounding == "stochastic" else None
            for saturate in (False, True):
                want = probed(source, target, rounding, saturate, 99)
                there = x.to(device)
                one = halfstep.cast(there, target, rounding=rounding, saturate=saturate, seed=seed)
                (many,) = halfstep.foreach_cast([there], target, rounding=rounding, saturate=saturate, seed=seed)
                assert one.dtype == many.dtype == target
                assert_same_bits(one, want, (rounding, saturate))
                assert_same_bits(many, want, (rounding, saturate, "list"))


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """cast.cpp for the oldest machine of this kind."""
    command = native.compiler()
    if command is None:
        pytest.skip("needs a C++ compiler")
    target = tmp_path_factory.mktemp("portable") / "cast.so"
    source = Path(native.__file__).resolve().parent / "cast.cpp"
    subprocess.run([*command, *native._SHARED, str(source), "-o", str(target)], check=True)
    yield target


@MODES
@SATURATE
def test_the_portable_cpp_has_the_bits_of_the_reference(
    portable: Path, monkeypatch: pytest.MonkeyPatch, rounding: str, saturate: bool
) -> None:
    seed = 7 if rounding == "stochastic" else None
    for source, target in PAIRS:
        x = probes(source, target, 4_000)
        with halfstep.backend("reference"):
            want = halfstep.cast(x, target, rounding=rounding, saturate=saturate, seed=seed)
        with monkeypatch.context() as patch, halfstep.backend("auto"):
            patch.setattr(native, "library", lambda family: walks.load_casts(str(portable)))
            (result,) = halfstep.foreach_cast([x], target, rounding=rounding, saturate=saturate, seed=seed)
        assert_same_bits(result, want, (source, target))


@pytest.mark.parametrize("name", ALL)
@MODES
@SATURATE
def test_nan_stays_nan(name: str, rounding: str, saturate: bool) -> None:
    """Every NaN of a format, in every place of the vector and of the tail."""
    seed = 1 if rounding == "stochastic" else None
    with using(name, "cast") as device:
        for source in FORMATS:
            patterns = [0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0x7F80FFFF, 0x7FBFFFFF]
            nans = oracles.to_torch(oracles.from_bits32(patterns)) if source == FP32 else every_code(source)
            nans = nans[nans.float().isnan()][:9]
            x = torch.cat([nans, -nans if source not in FP8 else nans] * 3).to(device)
            for target in FORMATS:
                for tensor in (x, x[1:]):
                    y = halfstep.cast(tensor, target, rounding=rounding, saturate=saturate, seed=seed)
                    assert y.float().isnan().all(), (source, target)
                if source in FP8 and target in FP8:
                    assert (oracles_view(y) & 0x80).tolist() == (oracles_view(x[1:]) & 0x80).tolist(), "its sign"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("target", NARROW, ids=names)
def test_overflow_and_infinity(name: str, target: torch.dtype) -> None:
    largest = float(roundings.grid(target)[-2])
    beyond = float("nan") if target == E4M3 else float("inf")
    values = torch.tensor([largest, 3.4028234663852886e38, float("inf")])
    x = torch.cat([values, -values])
    with using(name, "cast") as device:

        def cast(**options: object) -> list[float]:
            return halfstep.cast(x.to(device), target, **options).float().abs().tolist()  # type: ignore[arg-type]

        for options in ({}, {"rounding": "stochastic", "seed": 3}):
            np.testing.assert_equal(cast(**options), [largest, beyond, beyond] * 2)
        np.testing.assert_equal(cast(rounding="toward_zero"), [largest, largest, beyond] * 2)
        for rounding in ROUNDINGS:
            seed = 3 if rounding == "stochastic" else None
            assert cast(rounding=rounding, saturate=True, seed=seed) == [largest] * 6


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", FORMATS, ids=names)
def test_the_same_dtype_is_a_copy(name: str, dtype: torch.dtype) -> None:
    x = oracles.to_torch(oracles.thresholds(FP16)) if dtype == FP32 else every_code(dtype)
    with using(name, "cast") as device:
        there = x.to(device)
        for rounding in ROUNDINGS:
            seed = 1 if rounding == "stochastic" else None
            y = halfstep.cast(there, dtype, rounding=rounding, seed=seed)
            assert (oracles.bits(y) == oracles.bits(x)).all(), "payloads of NaN included"
            assert y.data_ptr() != there.data_ptr()
        saturated = halfstep.cast(there, dtype, saturate=True).float()
        assert not saturated.isinf().any()
        assert torch.equal(saturated.isnan(), there.float().isnan())


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("target", NARROW, ids=names)
def test_values_of_the_target_never_move(name: str, target: torch.dtype) -> None:
    x = every_code(target).float()
    x = x[x.isfinite()]
    with using(name, "cast") as device:
        for seed in range(3):
            y = halfstep.cast(x.to(device), target, rounding="stochastic", seed=seed)
            assert_same_bits(y.float(), x)
        assert_same_bits(halfstep.cast(x.to(device), target, rounding="toward_zero").float(), x)


# --------------------------------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("source", "target"), [(FP32, FP16), (FP32, BF16), (BF16, E4M3), (FP16, E5M2)], ids=names)
def test_stochastic_is_unbiased(name: str, source: torch.dtype, target: torch.dtype) -> None:
    """The mean of many casts of one number is the number, within five standard errors; fp16's subnormals included."""
    n = 40_000
    smallest = float(roundings.grid(target)[1])
    scaled = [1.2345, -0.7771, 100.7] + ([0.3 * smallest, 5.7 * smallest, -1.01 * smallest] if target != BF16 else [])
    with using(name, "cast") as device:
        for seed, value in enumerate(scaled):
            x = torch.full((n,), value, device=device).to(source)
            y = halfstep.cast(x, target, rounding="stochastic", seed=seed).double().cpu()
            low, high = sorted(y.unique().tolist())
            exact = x[0].double().item()
            assert low < exact < high
            share = (exact - low) / (high - low)
            error = abs((y == high).double().mean().item() - share)
            assert error <= 5 * (share * (1 - share) / n) ** 0.5, (value, share)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("target", NARROW, ids=names)
def test_a_shard_gets_the_bits_of_the_whole(name: str, target: torch.dtype) -> None:
    """Cut at multiples of 16 elements, of 4, and anywhere; at any alignment in memory."""
    whole = torch.randn(9001, generator=torch.Generator().manual_seed(0))
    with using(name, "cast") as device:
        there = whole.to(device)
        want = halfstep.cast(there, target, rounding="stochastic", seed=2**63 - 1)
        cuts = [0, 1, 4, 16, 17, 528, 531, 4096, 4099, 8196, 9001]
        parts = [there[a:b] for a, b in itertools.pairwise(cuts)]
        copies = [part.clone() for part in parts]
        for pieces in (parts, copies):
            got = [
                halfstep.cast(piece, target, rounding="stochastic", seed=2**63 - 1, offset=at)
                for piece, at in zip(pieces, cuts, strict=False)
            ]
            assert_same_bits(torch.cat([oracles_view(one) for one in got]), oracles_view(want))
        out = torch.empty_like(want)
        halfstep.cast(there[531:], target, rounding="stochastic", seed=2**63 - 1, offset=531, out=out[531:])
        assert_same_bits(out[531:], want[531:])


def oracles_view(tensor: torch.Tensor) -> torch.Tensor:
    """The codes, which torch can concatenate in every version."""
    return tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int16)


@pytest.mark.parametrize("name", ALL)
def test_far_into_a_tensor(name: str) -> None:
    """Indices beyond 2^32 and 2^34, where the counter takes its second word, up to the last one allowed."""
    x = torch.full((4100,), 1 / 3)
    with using(name, "cast") as device:
        for offset in (2**32 - 5, 2**34 - 2050, 2**34 + 4, 2**60 - 1):
            words = reference_words(torch.arange(offset, offset + 4100), 5)
            want = expected(x, BF16, "stochastic", False, words)
            assert_same_bits(halfstep.cast(x.to(device), BF16, rounding="stochastic", seed=5, offset=offset), want)


@pytest.mark.parametrize("name", ALL)
def test_noise_of_a_list(name: str) -> None:
    """It depends on the place in the list, not on neighbours or dtypes; the first has that of `cast`."""
    x = torch.full((5000,), 1 / 3)
    with using(name, "cast") as device:
        there = x.to(device)
        mixed = [there, there.half(), torch.empty(0, device=device), there[1:], there]
        results = halfstep.foreach_cast(mixed, E4M3, rounding="stochastic", seed=11)
        for place, (source, result) in enumerate(zip(mixed, results, strict=True)):
            words = reference_words(torch.arange(source.numel()), 11, 0, place)
            assert_same_bits(result, expected(source.cpu(), E4M3, "stochastic", False, words), place)
        assert_same_bits(results[0], halfstep.cast(there, E4M3, rounding="stochastic", seed=11))
        assert not torch.equal(oracles_view(results[0]), oracles_view(results[4])), "two tensors share their noise"
        parts = [there[:4096], there[4096:]]
        pairs = [
            halfstep.foreach_cast([p, p], BF16, rounding="stochastic", seed=1, offsets=[0, at])
            for p, at in zip(parts, (0, 4096), strict=True)
        ]
        both = halfstep.foreach_cast([there, there], BF16, rounding="stochastic", seed=1)
        assert_same_bits(pairs[0][1], halfstep.foreach_cast([there, parts[0]], BF16, rounding="stochastic", seed=1)[1])
        assert_same_bits(pairs[1][1], both[1][4096:])
        # The table of the last list is refreshed, not reused, when only the places changed.
        moved = halfstep.foreach_cast([there, there], BF16, rounding="stochastic", seed=1, offsets=[4, 0])
        assert_same_bits(moved[0][:-4], both[0][4:])
        assert_same_bits(moved[1], both[1])


@pytest.mark.parametrize("name", ALL)
def test_the_noise_goes_by_rows_whatever_the_strides(name: str) -> None:
    base = torch.randn(24, 30, generator=torch.Generator().manual_seed(1))
    tensors = {
        "transposed": base.t(),
        "permuted": base.reshape(2, 12, 30).permute(2, 0, 1),
        "channels last": base.reshape(2, 3, 4, 30).to(memory_format=torch.channels_last),
        "gaps": base[:, 3:20],
        "expanded": base[:1].expand(5, 30),
        "0-dim": base[0, 0],
        "misaligned": base.view(-1)[1:],
    }
    with using(name, "cast") as device:
        placed = twins(list(tensors.values()), device)
        many = halfstep.foreach_cast(placed, BF16, rounding="stochastic", seed=6)
        for place, (kind, tensor) in enumerate(zip(tensors, placed, strict=True)):
            row_major = tensor.contiguous().clone()
            want = halfstep.cast(row_major, BF16, rounding="stochastic", seed=6)
            one = halfstep.cast(tensor, BF16, rounding="stochastic", seed=6)
            assert_same_bits(one, want, kind)
            assert one.stride() == tensor.stride() if is_flat(tensor) else one.is_contiguous(), kind
            out = torch.empty_like(tensor.contiguous(), dtype=BF16).t() if tensor.dim() == 2 else torch.empty_like(want)
            out = out.t() if tensor.dim() == 2 else out
            assert_same_bits(halfstep.cast(tensor, BF16, rounding="stochastic", seed=6, out=out), want, kind)
            listed = halfstep.foreach_cast([row_major] * (place + 1), BF16, rounding="stochastic", seed=6)[place]
            assert_same_bits(many[place], listed, kind)
            assert many[place].stride() == one.stride(), kind


def test_a_seed_is_drawn_from_torchs_generator() -> None:
    x = torch.full((999,), 1 / 3)

    def cast() -> tuple[torch.Tensor, torch.Tensor]:
        return (
            halfstep.cast(x, BF16, rounding="stochastic"),
            halfstep.foreach_cast([x], BF16, rounding="stochastic")[0],
        )

    torch.manual_seed(3)
    first = cast()
    second = cast()
    torch.manual_seed(3)
    again = cast()
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first[0], second[0]) and not torch.equal(first[0], first[1])
    state = torch.get_rng_state()
    halfstep.cast(x, BF16, rounding="toward_zero")
    halfstep.cast(x, BF16, rounding="stochastic", seed=1)
    assert torch.equal(torch.get_rng_state(), state), "nothing was to be drawn"
    with torch.device("meta"):
        assert halfstep.cast(x, BF16, rounding="stochastic").device.type == "cpu"


def test_seeds_tell_apart() -> None:
    x = torch.full((999,), 1 / 3)
    results = {
        seed: halfstep.cast(x, BF16, rounding="stochastic", seed=seed)
        for seed in (0, 1, 2**31, 2**32, 2**62, 2**63 - 1)
    }
    for seed, result in results.items():
        want = expected(x, BF16, "stochastic", False, reference_words(torch.arange(999), seed))
        assert_same_bits(result, want, seed)
    assert len({oracles.bits(result).tobytes() for result in results.values()}) == len(results)


# ------------------------------------------------------------------------------------------------- properties

LAYOUTS = ("as it is", "transposed", "gaps", "misaligned", "expanded", "negated")


@st.composite
def laid_out(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any format, shape and layout, of any values."""
    dtype = draw(st.sampled_from(FORMATS))
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    layout = draw(st.sampled_from(LAYOUTS))
    size = int(np.prod(shape)) if shape else 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        values = rng.integers(0, 2**32, 2 * size + 3, dtype=np.uint32).view(np.float32)
    else:
        values = rng.choice(oracles.specials(), 2 * size + 3)
    base = torch.from_numpy(values.astype(np.float32)).to(dtype)
    x = base[:size].reshape(shape)
    if layout == "transposed" and x.dim() >= 2:
        x = x.transpose(0, -1)
    elif layout == "gaps":
        x = base[: 2 * size : 2].reshape(shape) if x.dim() != 1 else base[: 2 * size : 2]
    elif layout == "misaligned":
        x = base[1 : size + 1].reshape(shape)
    elif layout == "expanded" and x.dim() and x.numel():
        x = x[:1].expand(3, *x.shape[1:])
    elif layout == "negated" and dtype not in FP8:
        x = x.neg() if draw(st.booleans()) else torch._neg_view(x)
    return x


@settings(deadline=None, max_examples=60)
@given(
    st.lists(laid_out(), max_size=4),
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
    everything = []
    for name in ALL:
        with using(name, "cast") as device:
            placed = [tensor.to(device) for tensor in tensors]
            everything.append(
                halfstep.foreach_cast(placed, target, rounding=rounding, saturate=saturate, seed=seed, offsets=offsets)
            )
            if placed:
                one = halfstep.cast(
                    placed[0], target, rounding=rounding, saturate=saturate, seed=seed, offset=offsets[0]
                )
                assert_same_bits(one, everything[-1][0], name)
    for place, tensor in enumerate(tensors):
        words = reference_words(torch.arange(tensor.numel()) + offsets[place], number, 0, place)
        plain = tensor.resolve_neg().contiguous().view(-1)
        want = expected(plain, target, rounding, saturate, words).reshape(tensor.shape)
        for name, results in zip(ALL, everything, strict=True):
            assert_same_bits(results[place], want, name)


@pytest.mark.parametrize("name", ALL)
def test_a_lazy_negation_is_read_with_its_sign(name: str) -> None:
    values = torch.arange(1.0, 9.0)
    with using(name, "cast") as device:
        x = torch._neg_view(values.to(device))
        assert x.is_neg() and not is_flat(x)
        for result in (halfstep.cast(x, BF16), halfstep.foreach_cast([x], BF16)[0]):
            assert result.tolist() == (-values).tolist()
        z = torch.complex(torch.zeros(8), values).to(device)
        assert halfstep.cast(z.conj().imag, FP16).tolist() == (-values).tolist()
        out = torch._neg_view(torch.zeros(8, dtype=BF16, device=device))
        halfstep.cast(values.to(device), BF16, out=out)
        assert out.tolist() == values.tolist()


# ------------------------------------------------------------------------------------------- autograd and registration


@pytest.mark.parametrize("name", ALL)
def test_the_gradient_is_rounded_to_nearest_whatever_the_way_forward(name: str) -> None:
    with using(name, "cast") as device:
        for rounding in ROUNDINGS:
            seed = 1 if rounding == "stochastic" else None
            x = torch.randn(9, 7, device=device).to(BF16).t().requires_grad_()
            incoming = torch.randn(7, 9, device=device).to(FP16)
            halfstep.cast(x, FP16, rounding=rounding, saturate=True, seed=seed).backward(incoming)
            assert x.grad is not None and x.grad.dtype == BF16
            assert_same_bits(x.grad, incoming.to(BF16))


def test_gradients_through_fp8_are_fp8() -> None:
    """As with torch's own .to(): autograd gives a tensor a gradient of its dtype."""
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = halfstep.cast(x, E5M2)
    y.backward(torch.tensor([0.3, 100.0]).to(E5M2))
    assert x.grad is not None and x.grad.dtype == FP32
    assert x.grad.tolist() == torch.tensor([0.3, 100.0]).to(E5M2).float().tolist()
    z = torch.tensor([1.0, -2.0]).to(E4M3).requires_grad_()
    halfstep.cast(z, FP32).backward(torch.tensor([0.3, 1e9]))
    assert z.grad is not None and z.grad.dtype == E4M3
    assert z.grad.float()[0].item() == 0.3125 and z.grad.float()[1].isnan(), "no saturation: an overflow is not hidden"


@pytest.mark.parametrize("target", [FP16, E4M3], ids=names)
@MODES
def test_the_operator_is_registered_properly(target: torch.dtype, rounding: str) -> None:
    seed = torch.tensor(5) if rounding == "stochastic" else None
    for x in (torch.randn(5, 7).t(), torch.randn(9, 4)[:, :3], torch.randn(())):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tests = ("test_schema", "test_faketensor") if target in FP8 else None
            arguments = (x, target, rounding, True, seed, 3)
            if tests:
                torch.library.opcheck(torch.ops.halfstep.cast.default, arguments, test_utils=tests)
            else:
                torch.library.opcheck(torch.ops.halfstep.cast.default, (x.requires_grad_(), *arguments[1:]))


def test_it_compiles_in_one_graph() -> None:
    def function(x: torch.Tensor, seed: int | None, offset: int) -> torch.Tensor:
        y = halfstep.cast(x * 3, E4M3, rounding="stochastic", saturate=True, seed=seed, offset=offset)
        return halfstep.cast(y, FP32) + halfstep.cast(x, BF16, rounding="toward_zero")

    torch._dynamo.reset()
    x = torch.randn(50, 7).t()
    with torch._dynamo.config.patch(error_on_recompile=False):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        for seed, offset in ((1, 0), (2, 8), (3, 9), (2**63 - 1, 10), (2**62, 2**40)):
            assert_same_bits(compiled(x, seed, offset), function(x, seed, offset), seed)


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
    for result, want in zip(function(x), (one, other), strict=True):
        assert torch.equal(result, want)


def test_kernels_are_not_compiled_anew_for_each_seed() -> None:
    """Triton looks at an integer's width, at 1, and at multiples of 16."""
    for value in (0, 1, 16, 2**32 - 1, 2**31, 2**60 - 1):
        hidden = module._disguised(value)
        assert -(2**63) <= hidden < -(2**31) and hidden % 2 == 1
        assert (hidden + 2**62) >> 1 == value


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"seed": 3},
            ValueError,
            "Expected seed to be None with rounding='nearest', which uses no random numbers, but got 3: leave it out, "
            "or "
            "pass rounding='stochastic'",
        ),
        (
            {"rounding": "toward_zero", "seed": 0},
            ValueError,
            "Expected seed to be None with rounding='toward_zero', which uses no random numbers, but got 0: leave it "
            "out, "
            "or pass rounding='stochastic'",
        ),
        (
            {"rounding": "stochastic", "seed": -1},
            ValueError,
            "Expected seed to be from 0 to 2^63 - 1, but got -1: reduce it with seed % 2**63",
        ),
        (
            {"rounding": "stochastic", "seed": 1.5},
            TypeError,
            "Expected seed to be an integer from 0 to 2^63 - 1, but got 1.5, a float",
        ),
    ],
)
def test_seeds_that_are_refused(options: dict[str, object], error: type[Exception], message: str) -> None:
    for call in (
        lambda: halfstep.cast(torch.ones(3), FP16, **options),  # type: ignore[arg-type]
        lambda: halfstep.foreach_cast([torch.ones(3)], FP16, **options),  # type: ignore[arg-type]
    ):
        with pytest.raises(error) as raised:
            call()
        assert str(raised.value) == message


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: halfstep.cast(torch.ones(3), FP16, offset=-4),
            ValueError,
            "Expected offset to be the index of an element in its tensor, from 0 to 2^60 - 1, but got -4",
        ),
        (
            lambda: halfstep.cast(torch.ones(3), FP16, offset=2.0),  # type: ignore[arg-type]
            TypeError,
            "Expected offset to be an integer, a number of elements, but got 2.0, a float",
        ),
        (
            lambda: halfstep.foreach_cast([torch.ones(3)], FP16, offsets=[2**60]),
            ValueError,
            f"Expected offsets[0] to be the index of an element in its tensor, from 0 to 2^60 - 1, but got {2**60}",
        ),
        (
            lambda: halfstep.foreach_cast([torch.ones(3)], FP16, offsets=[0, 1]),
            ValueError,
            "Expected offsets to have one number per tensor, 1, but got 2",
        ),
        (
            lambda: torch.ops.halfstep.cast(torch.ones(3), FP16, "stochastic"),
            ValueError,
            "Expected seed to be a tensor on the CPU for stochastic rounding, but got none: use halfstep.cast",
        ),
    ],
)
def test_what_is_refused_is_named(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()  # type: ignore[operator]
    assert str(raised.value) == message
