"""Casting to nearest between fp32, fp16 and bf16: rounding against three oracles, every kind of tensor, autograd.

FP8, the other roundings and saturation: ``test_cast_modes.py``.
"""

from __future__ import annotations

import subprocess
import warnings
from pathlib import Path

import numpy as np
import oracles
import pytest
import torch
import walks
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import ALL, twin, twins, using
from oracles import BF16, DTYPES, E4M3, E5M2, FP16, FP32, assert_same_bits
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep
from halfstep.kernels import cast as module
from halfstep.kernels import native
from halfstep.kernels.multi_tensor import TableCache, is_flat

pytestmark = [
    pytest.mark.sample(3),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy, on overflow and NaN
]

PAIRS = [(source, target) for source in DTYPES for target in DTYPES]
HALVES = (FP16, BF16)


def names(value: object) -> str:
    return str(value).removeprefix("torch.")


def expected(values: np.ndarray, target: torch.dtype) -> np.ndarray:
    """What a cast must give: through fp32, which holds every source exactly, rounded once."""
    with np.errstate(invalid="ignore"):
        wide = values.astype(np.float32)
    return wide if target == FP32 else oracles.round_to(wide, target)


def every_input(source: torch.dtype) -> np.ndarray:
    """All codes of a 16-bit source; for fp32, the neighbours of each number where a rounding changes (`oracles`)."""
    if source == FP32:
        return np.concatenate([oracles.thresholds(FP16), oracles.thresholds(BF16)])
    return np.arange(2**16, dtype=np.uint16).view(oracles.NUMPY[source])


# ------------------------------------------------------------------------------------------------------------ rounding


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=names)
def test_every_pair_of_formats(name: str, source: torch.dtype, target: torch.dtype) -> None:
    values = np.random.default_rng(0).permutation(every_input(source))
    with using(name, "cast") as device:
        tensor = oracles.to_torch(values).to(device)
        one = halfstep.cast(tensor, target)
        # In pieces that end in every length of tail, so that the one-by-one path of the C++ is seen too.
        cuts = np.cumsum(np.arange(1, 64))
        pieces = [*torch.tensor_split(tensor[: cuts[-1]], torch.from_numpy(cuts[:-1])), tensor[cuts[-1] :]]
        many = torch.cat(halfstep.foreach_cast(pieces, target))
    want = expected(values, target)
    assert one.dtype == many.dtype == target
    assert_same_bits(one, want, f"cast, {name}")
    assert_same_bits(many, want, f"foreach_cast, {name}")


@pytest.mark.parametrize("target", HALVES, ids=names)
def test_the_oracles_agree_with_fractions(target: torch.dtype) -> None:
    """numpy and ml_dtypes, which judge the kernels, are themselves held against rational numbers and a sorted table."""
    rng = np.random.default_rng(0)
    probes = rng.choice(oracles.thresholds(target), 4000, replace=False)
    random = rng.integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([oracles.specials(), probes, random])
    rounded = oracles.round_to(values, target)
    for value, code, nan in zip(values.tolist(), oracles.bits(rounded).tolist(), np.isnan(rounded), strict=True):
        assert oracles.nearest_code(value, target) == (None if nan else code), value.hex()


@pytest.mark.parametrize("target", HALVES, ids=names)
def test_thresholds_are_complete(target: torch.dtype) -> None:
    """Between neighbouring probes the code takes one step at most, so a monotone rounding has no other place."""
    values = oracles.thresholds(target)
    positive = np.unique(np.abs(values[(values >= 0) & np.isfinite(values)]))  # -0 is among them
    codes = oracles.bits(oracles.round_to(positive, target)).astype(np.int64)
    steps, gaps = np.diff(codes), np.diff(positive.view(np.uint32).astype(np.int64))
    assert steps.min() >= 0 and steps.max() == 1
    assert (gaps[steps == 1] == 1).all(), "a step between fp32 values that are not neighbours"
    assert codes[0] == 0 and codes[-1] == (0x7C00 if target == FP16 else 0x7F80)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("value", "target", "code"),
    [
        (65519.996, FP16, 0x7BFF),
        (65520.0, FP16, 0x7C00),
        (-65520.0, FP16, 0xFC00),
        (2.0**-25, FP16, 0x0000),
        (-(2.0**-25), FP16, 0x8000),
        (2.0**-25 * (1 + 2.0**-23), FP16, 0x0001),
        (3 * 2.0**-25, FP16, 0x0002),
        (2.0**-14 - 2.0**-25, FP16, 0x0400),
        (1 + 2.0**-11, FP16, 0x3C00),
        (1 + 3 * 2.0**-11, FP16, 0x3C02),
        (3.3895313892515355e38, BF16, 0x7F7F),
        (3.3961775292304957e38, BF16, 0x7F80),
        (2.0**-134, BF16, 0x0000),
        (3 * 2.0**-134, BF16, 0x0002),
        (1 + 2.0**-8, BF16, 0x3F80),
        (1 + 3 * 2.0**-8, BF16, 0x3F82),
        (-0.0, FP16, 0x8000),
        (-0.0, BF16, 0x8000),
    ],
    ids=str,
)
def test_values_known_by_hand(name: str, value: float, target: torch.dtype, code: int) -> None:
    with using(name, "cast") as device:
        source = torch.full((19,), value, device=device)
        assert source[0].item() == np.float32(value)
        assert set(oracles.bits(halfstep.cast(source, target)).tolist()) == {code}
        assert set(oracles.bits(halfstep.foreach_cast([source], target)[0]).tolist()) == {code}


# Every pattern as likely as any other, and the floats that hypothesis likes.
ANY_FP32 = st.floats(width=32) | st.integers(0, 2**32 - 1).map(lambda code: float(np.uint32(code).view(np.float32)))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(ANY_FP32, max_size=40),
    st.sampled_from(HALVES),
)
def test_any_values(values: list[float], target: torch.dtype) -> None:
    for name in ALL:
        with using(name, "cast") as device:
            (result,) = halfstep.foreach_cast([torch.tensor(values, dtype=FP32, device=device)], target)
        codes = [None if x != x else b for x, b in zip(result.tolist(), oracles.bits(result).tolist(), strict=True)]
        assert codes == [oracles.nearest_code(value, target) for value in values], name


# --------------------------------------------------------------------------------------------- the portable C++


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cast.cpp for the oldest machine of this kind: no F16C, no AVX-512, so the bit arithmetic of native.h."""
    command = native.compiler()
    if command is None:
        pytest.skip("needs a C++ compiler")
    target = tmp_path_factory.mktemp("portable") / "cast.so"
    source = Path(native.__file__).resolve().parent / "cast.cpp"
    subprocess.run([*command, *native._SHARED, str(source), "-o", str(target)], check=True)
    return target


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=names)
def test_every_pair_of_formats_without_special_instructions(
    portable: Path, monkeypatch: pytest.MonkeyPatch, source: torch.dtype, target: torch.dtype
) -> None:
    monkeypatch.setattr(native, "library", lambda family: walks.load_casts(str(portable)))
    values = every_input(source)
    with halfstep.backend("auto"):
        (result,) = halfstep.foreach_cast([oracles.to_torch(values)], target)
    assert_same_bits(result, expected(values, target))


# ---------------------------------------------------------------------------------------------------- kinds of tensors


def kinds(source: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of every shape and layout, with a NaN, an infinity, a subnormal and an overflow in each large one."""
    rng = np.random.default_rng(7)

    def values(count: int) -> torch.Tensor:
        result = torch.from_numpy(rng.standard_normal(count).astype(np.float32)).to(source)
        if count > 8:
            special = torch.tensor([float("nan"), float("-inf"), 1e-6, 7e4, -0.0]).to(source)
            result[-6:-1] = special
        return result

    return {
        "empty": torch.empty(0, dtype=source),
        "empty, 2-D": values(0).reshape(0, 3),
        "0-dim": values(1).reshape(()),
        "one": values(1),
        "odd": values(4097),
        "one chunk": values(4096),
        "two chunks": values(8192),
        "misaligned": values(5001)[1:],
        "misaligned chunk": values(4099)[3:],
        "transposed": values(77 * 13).reshape(77, 13).t(),
        "permuted": values(3 * 5 * 7).reshape(3, 5, 7).permute(2, 0, 1),
        "channels last": values(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "gaps": values(60 * 40).reshape(60, 40)[:, 3:29],
        "transposed gaps": values(77 * 13).reshape(77, 13).t()[::2],
        "strided": values(999)[::3],
        "expanded": values(33).expand(5, 33),
        "expanded from one": values(1).expand(7, 11),
        "size 1 with an odd stride": values(12).as_strided((3, 1, 4), (4, 999, 1)),
        "overlapping": values(20).as_strided((9, 3), (2, 1)),
    }


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=names)
def test_every_kind_of_tensor(name: str, source: torch.dtype, target: torch.dtype) -> None:
    tensors = kinds(source)
    with using(name, "cast") as device:
        placed = twins(list(tensors.values()), device)
        before = [oracles.bits(tensor).copy() for tensor in placed]
        many = halfstep.foreach_cast(placed, target)
        for kind, original, tensor, listed, kept in zip(tensors, tensors.values(), placed, many, before, strict=True):
            want = expected(oracles.to_numpy(original), target)
            for result in (halfstep.cast(tensor, target), listed):
                assert_same_bits(result, want, kind)
                assert result.device == tensor.device and result.dtype == target
                assert result.stride() == tensor.stride() if is_flat(tensor) else result.is_contiguous(), kind
                assert not result.numel() or result.data_ptr() != tensor.data_ptr(), "a copy, whatever the dtype"
            assert (oracles.bits(tensor) == kept).all(), f"{kind}: the source was written"


@pytest.mark.parametrize("name", ALL)
def test_nothing_beyond_the_target_is_written(name: str) -> None:
    """Targets in the middle of a buffer, at every alignment, ending within, at and beyond a chunk."""
    with using(name, "cast") as device:
        for target in DTYPES:
            for offset, size in ((1, 1), (1, 17), (3, 4095), (8, 4096), (2, 4097), (1, 0)):
                source = torch.linspace(-3, 3, size, device=device)
                buffer = torch.full((offset + size + 9,), 42.0, dtype=target, device=device)
                halfstep.foreach_cast([source], target, out=[buffer[offset : offset + size]])
                assert_same_bits(buffer[offset : offset + size], expected(oracles.to_numpy(source), target))
                assert (buffer[:offset] == 42).all() and (buffer[offset + size :] == 42).all(), (target, offset, size)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("source", "target"), [(FP32, FP16), (FP16, BF16), (BF16, FP32), (FP32, FP32)], ids=names)
def test_out(name: str, source: torch.dtype, target: torch.dtype) -> None:
    """The same strides, others, gaps; the result is `out` itself."""
    values = torch.randn(6, 10).to(source)
    want = expected(oracles.to_numpy(values), target)
    with using(name, "cast") as device:
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
                results = halfstep.foreach_cast([x], target, out=[out])
                assert len(results) == 1 and results[0] is out
                assert_same_bits(out, want, f"{kind}, list")


@pytest.mark.parametrize("source", DTYPES, ids=names)
def test_a_gpu_leaves_plain_casts_of_one_tensor_to_torch(source: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """With or without `out`. What has options, or a format that torch converts otherwise, keeps its kernel."""
    launched: list[str] = []

    def stand_in(name: str) -> object:
        return type("", (), {"__getitem__": lambda self, grid: lambda *args, **kwargs: launched.append(name)})()

    for name in ("cast_kernel", "multi_cast_kernel"):
        monkeypatch.setattr(module, name, stand_in(name))
    monkeypatch.setattr(module, "resolve", lambda device, family: "triton")
    x = oracles.to_torch(every_input(source))
    for target in (*DTYPES, E4M3):
        out = torch.empty(x.shape, dtype=target)
        plain = target in DTYPES and (source == target or FP32 in (source, target))
        results = [halfstep.cast(x, target), *halfstep.foreach_cast([x], target), halfstep.cast(x, target, out=out)]
        assert results[2] is out
        assert launched == ([] if plain else ["cast_kernel"] * 3)
        for result in results if plain else ():
            assert_same_bits(result, x.to(target))
        launched.clear()
        with halfstep.backend("triton"):
            halfstep.cast(x, target)
        halfstep.cast(x, target, saturate=True)
        halfstep.foreach_cast([x, x], target)
        assert launched == ["cast_kernel", "cast_kernel", "multi_cast_kernel"]
        launched.clear()


def test_out_needs_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sizes there are: a table is built, sent and dropped for each beyond the last eight."""
    monkeypatch.setattr(TableCache, "table", None)
    for target in (BF16, E4M3):
        for name in ALL:
            with using(name, "cast") as device:
                x = torch.linspace(-9.0, 9.0, 1001, device=device)
                out = torch.empty(1001, dtype=target, device=device)
                for options in ({}, {"saturate": True}, {"rounding": "stochastic", "seed": 3}):
                    halfstep.cast(x, target, out=out, **options)
                    assert_same_bits(out, halfstep.cast(x, target, **options))


@pytest.mark.parametrize("name", ALL)
def test_a_list_of_all_dtypes_keeps_its_order(name: str) -> None:
    tensors = [torch.full((size,), float(size)).to(DTYPES[size % 3]) for size in (3, 1, 4, 0, 5, 9, 2, 6)]
    with using(name, "cast") as device:
        results = halfstep.foreach_cast(tuple(tensor.to(device) for tensor in tensors), BF16)
    assert [result.tolist() for result in results] == [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("name", ["reference", "native"])
def test_thousands_of_small_tensors(name: str) -> None:
    sizes = np.random.default_rng(3).integers(0, 9, 3000).tolist()
    tensors = [torch.randn(size) for size in sizes]
    with using(name, "cast"):
        results = halfstep.foreach_cast(tensors, BF16)
    for tensor, result in zip(tensors, results, strict=True):
        assert torch.equal(result, tensor.bfloat16())


def test_an_empty_list() -> None:
    assert halfstep.foreach_cast([], FP16) == []
    assert halfstep.foreach_cast([], FP16, out=[]) == []


# ------------------------------------------------------------------------------------------------------------ autograd


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=names)
def test_the_gradient_is_cast_back(name: str, source: torch.dtype, target: torch.dtype) -> None:
    with using(name, "cast") as device:
        x = torch.randn(7, 5, device=device).to(source).t().requires_grad_()
        incoming = (torch.randn(5, 7, device=device) * 1e3).to(target)
        y = halfstep.cast(x, target)
        y.backward(incoming)
        assert x.grad is not None and x.grad.dtype == source
        assert_same_bits(x.grad, expected(oracles.to_numpy(incoming), source))
        x.grad = None
        halfstep.cast(x, target).sum().backward()  # a gradient with stride 0
        assert (x.grad == 1).all()
        # Twice differentiable: linear, so the second derivative is through the cast's own cast.
        (first,) = torch.autograd.grad((halfstep.cast(x, target).float() ** 2).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.float().sum(), x)
        assert second.dtype == source and (second == 2).all()


def test_lists_and_out_are_not_differentiable() -> None:
    x = torch.ones(3, requires_grad=True)
    (result,) = halfstep.foreach_cast([x], FP16)
    assert not result.requires_grad
    out = torch.empty(3, dtype=FP16)
    with torch.no_grad():
        assert halfstep.cast(x, FP16, out=out) is out
    with pytest.raises(ValueError) as raised:
        halfstep.cast(x, FP16, out=out)
    assert str(raised.value) == (
        "Expected no gradient to be required with out=, but one is: leave out= out, or cast under torch.no_grad()"
    )


def test_a_write_through_out_is_seen_by_autograd() -> None:
    saved = torch.ones(3, requires_grad=True)
    out = torch.ones(3)
    product = (saved * out).sum()
    halfstep.foreach_cast([torch.zeros(3)], FP32, out=[out])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_inference_mode() -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        assert halfstep.cast(x, FP16).dtype == FP16
        assert halfstep.foreach_cast([x], FP16, out=[torch.zeros(3, dtype=FP16)])[0].tolist() == [1, 1, 1]


# ------------------------------------------------------------------------------------------------------- registration


@pytest.mark.parametrize(
    "kind", ["odd", "0-dim", "transposed", "transposed gaps", "expanded", "empty", "channels last"]
)
def test_the_operator_is_registered_properly(kind: str) -> None:
    x = kinds(FP32)[kind].nan_to_num(0, 0, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.library.opcheck(torch.ops.halfstep.cast.default, (x.requires_grad_(), BF16))
        torch.library.opcheck(torch.ops.halfstep.cast.default, (x.detach().half(), FP32))


def test_shapes_and_strides_without_data() -> None:
    for kind, tensor in kinds(FP32).items():
        real = halfstep.cast(tensor, FP16)
        with FakeTensorMode() as mode:
            fake = halfstep.cast(mode.from_tensor(tensor), FP16)
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype), kind
            for size, there, here in zip(real.shape, fake.stride(), real.stride(), strict=True):
                assert there == here or size == 1, kind


def test_it_compiles_in_one_graph() -> None:
    """Traced and differentiated as one graph; Inductor's own C++ would cost half a minute more and is not ours."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return halfstep.cast(halfstep.cast(x * 3, BF16) + 1, FP32)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 7).t().requires_grad_()
    y = x.detach().clone().requires_grad_()
    assert_same_bits(compiled(x), function(y))
    compiled(x).sum().backward()
    function(y).sum().backward()
    assert x.grad is not None and y.grad is not None
    assert_same_bits(x.grad, y.grad)


# ----------------------------------------------------------------------------------------------------------- refusals

FORMATS = "torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: halfstep.cast(torch.ones(3), torch.float64),
            TypeError,
            f"Expected dtype to be one of {FORMATS}, but got torch.float64",
        ),
        (
            lambda: halfstep.cast(torch.ones(3), "fp16"),  # type: ignore[arg-type]
            TypeError,
            f"Expected dtype to be one of {FORMATS}, but got 'fp16'",
        ),
        (
            lambda: halfstep.cast(torch.ones(3).double(), FP16),
            TypeError,
            "Expected x to have dtype float32, float16, bfloat16, float8_e4m3fn or float8_e5m2, but got torch.float64: "
            "convert it with .to() or leave it out",
        ),
        (
            lambda: halfstep.cast(torch.ones(3), FP16, rounding="up"),
            ValueError,
            "Expected rounding to be one of 'nearest', 'toward_zero', 'stochastic', but got 'up'",
        ),
        (
            lambda: halfstep.cast(torch.ones(3), FP16, out=torch.ones(3)),
            ValueError,
            "Expected out to be (3,) torch.float16 on cpu, but got (3,) torch.float32 on cpu",
        ),
        (
            lambda: halfstep.cast(torch.ones(3), FP16, out=torch.ones(1, 3).half()),
            ValueError,
            "Expected out to be (3,) torch.float16 on cpu, but got (1, 3) torch.float16 on cpu",
        ),
        (
            lambda: halfstep.foreach_cast(torch.ones(3), FP16),
            TypeError,
            "Expected tensors to be a list of tensors, but got one tensor: pass [tensors]",
        ),
        (
            lambda: halfstep.foreach_cast([torch.ones(3)], torch.int8),
            TypeError,
            f"Expected dtype to be one of {FORMATS}, but got torch.int8",
        ),
        (
            lambda: halfstep.foreach_cast([torch.ones(3)], FP16, out=[]),
            ValueError,
            "Expected out to have one tensor per input, 1, but got 0",
        ),
        (
            lambda: halfstep.foreach_cast(
                [torch.ones(1), torch.ones(3)], FP16, out=[torch.ones(1).half(), torch.ones(2).half()]
            ),
            ValueError,
            "Expected out[1] to be (3,) torch.float16 on cpu, but got (2,) torch.float16 on cpu",
        ),
        (
            lambda: halfstep.foreach_cast([torch.ones(1), torch.ones(1, device="meta")], FP16),
            ValueError,
            "Expected tensors[1] to be on the device of tensors[0], cpu, but got meta: call once per device",
        ),
    ],
)
def test_what_is_refused_is_named(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        call()  # type: ignore[operator]
    assert str(raised.value) == message


def test_out_is_refused_before_anything_is_written() -> None:
    first = torch.zeros(2, dtype=FP16)
    with pytest.raises(ValueError):
        halfstep.foreach_cast([torch.ones(2), torch.ones(2)], FP16, out=[first, torch.zeros(3, dtype=FP16)])
    assert first.tolist() == [0, 0]


def test_tables_are_per_thread_and_per_pair() -> None:
    assert set(module._tables) == {(source, target) for source in module.DTYPES for target in module.DTYPES}
    assert all(isinstance(cache, TableCache) for cache in module._tables.values())


# --------------------------------------------------------------------------------------------------- all 2^32 patterns


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", HALVES, ids=names)
@pytest.mark.parametrize("instructions", ["native", "portable"])
def test_all_fp32_patterns_against_torch(
    target: torch.dtype, instructions: str, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    """The C++ list kernel against torch's own conversion, NaN by class and sign."""
    with using("native", "cast"):
        path = str(request.getfixturevalue("portable")) if instructions == "portable" else None
        assert sum(walks.in_processes(capfd, walks.walk_casts, path, target, "nearest")) == 2 * (2**23 - 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "rounding"),
    [(E4M3, "nearest"), (E5M2, "nearest"), *((target, "toward_zero") for target in (FP16, BF16, E4M3, E5M2))],
    ids=names,
)
def test_all_fp32_patterns_to_fp8_and_toward_zero(
    target: torch.dtype, rounding: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same against ml_dtypes for FP8; toward zero against the nearest value, or the one below it."""
    with using("native", "cast"):
        assert sum(walks.in_processes(capfd, walks.walk_casts, None, target, rounding)) == 2 * (2**23 - 1)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_a_large_cast_and_a_small_one_have_the_bits_of_the_reference(source: torch.dtype, target: torch.dtype) -> None:
    bits = torch.arange(2**16, dtype=torch.int32).repeat(2)[: 2**16 + 5]
    if source == torch.float32:  # every sign, exponent and upper half, on both sides of ties
        low = torch.tensor([0, 0x7FFF, 0x8000, 0x8001])[torch.arange(len(bits)) % 4]
        x = ((bits.long() << 16) + low).to(torch.int32).view(torch.float32)
    else:
        x = bits.to(torch.int16).view(source)
    for part in (x, x[:77]):
        got = halfstep.cast(part, target)
        with halfstep.backend("reference"):
            want = halfstep.cast(part, target)
        assert torch.equal(got.isnan(), want.isnan())
        keep, width = ~want.isnan(), torch.int32 if target == torch.float32 else torch.int16
        assert torch.equal(got[keep].view(width), want[keep].view(width))
