"""Values of softmax and log-softmax, forward and backward, against numpy in fp64, for all three implementations."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from implementations import ALL, twin, using
from softmax_oracle import Case, assert_within, backward_oracle, oracle
from softmax_paths import small_strided_tiles

import halfstep
from halfstep.kernels.softmax import dispatch, rows, rule, strided

pytestmark = pytest.mark.sample(3)

INF, NAN = math.inf, math.nan
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (FP32, FP16, BF16)


def check(case: Case, name: str, dy: torch.Tensor | None = None) -> torch.Tensor:
    """Forward and backward through one implementation. Returns the gradient."""
    if dy is None:
        dy = torch.randn(case.x.shape, generator=torch.Generator().manual_seed(1)).to(case.out)
    what = (
        f"{name} log={case.log} {tuple(case.x.shape)} strides {case.x.stride()} {case.x.dtype}->{case.out} "
        f"dim {case.dim} scale {case.scale} mask {None if case.mask is None else case.mask.shape} causal {case.causal}"
    )
    with using(name, "softmax") as device:
        x = twin(case.x, device).requires_grad_()
        y = case.run(device, x)
        y.backward(twin(dy, device))
    assert y.dtype == case.out and y.is_contiguous()
    assert x.grad is not None and x.grad.dtype == case.x.dtype
    assert_within(y, *oracle(case), what)
    exact, bound = backward_oracle(case, y.detach().cpu(), dy)
    # torch accumulates the gradient of an expanded tensor with a layout of its own, in 16 bits; not ours to judge.
    if case.x.untyped_storage().nbytes() >= case.x.numel() * case.x.element_size():
        assert_within(x.grad, exact, bound, f"{what}, backward")
    return x.grad.cpu()


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


# ------------------------------------------------------------------------------------------------------- fixed cases

# 1; a power of two below, at and above; the widest vector (16) and four of them; the limits of tiles and warps.
SIZES = (1, 3, 15, 16, 17, 63, 64, 65, 129, 512, 513, 1000, 1025, 4097)


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize("name", ALL)
def test_rows_of_every_length(name: str, columns: int, log: bool) -> None:
    """In the fast form; test_softmax_exact.py has the other."""
    for dtype in DTYPES if columns <= 1025 and name != "triton" else (BF16,):
        check(Case(normal(5, columns, dtype=dtype), log=log, precision="fast"), name)
        check(Case(normal(5, columns, dtype=dtype), causal=True, scale=0.3, log=log, precision="fast"), name)


@pytest.mark.parametrize("name", ALL)
def test_the_real_limits_of_one_block(name: str) -> None:
    for columns, precision in ((rows.BACKWARD_TILE + 1, "fast"), (rows.FORWARD_TILE, "exact"), (40_003, "fast")):
        check(Case(normal(2, columns, dtype=BF16), precision=precision), name)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (0, 4), (4, 0), (2, 0, 3), (1, 1, 1), (3, 1), (1, 3)])
def test_empty_and_tiny_shapes(name: str, shape: tuple[int, ...]) -> None:
    for log in (False, True):
        for dim in range(-max(len(shape), 1), max(len(shape), 1)):
            x = normal(*shape)
            function = torch.log_softmax if log else torch.softmax
            with using(name, "softmax") as device:
                moved = twin(x, device).requires_grad_()
                y = Case(x, dim, log=log).run(device, moved)
                y.sum().backward()
            assert y.shape == x.shape and moved.grad is not None and moved.grad.shape == x.shape
            torch.testing.assert_close(y.detach().cpu(), function(x, dim))


@pytest.mark.parametrize(("queries", "keys", "precision"), [(40, 40, "exact"), (20, 133, "fast"), (5, 303, "exact")])
@pytest.mark.parametrize("name", ALL)
def test_masked_values_are_ignored(name: str, queries: int, keys: int, precision: str) -> None:
    x, dy = normal(2, queries, keys), normal(2, queries, keys, seed=1)
    above = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    for log in (False, True):
        clean = check(Case(x, causal=True, log=log, precision=precision), name, dy)
        dirty = check(
            Case(x.masked_fill(above, NAN), causal=True, log=log, precision=precision), name, dy.masked_fill(above, NAN)
        )
        assert torch.equal(clean, dirty)
        assert (clean[:, above] == 0).all()
        check(Case(x.masked_fill(above, NAN), mask=~above, log=log, precision=precision), name)


@pytest.mark.parametrize("name", ALL)
def test_a_gradient_that_is_not_finite_stays_in_its_row_and_out_of_constants(name: str) -> None:
    x, dy = normal(9, 140), normal(9, 140, seed=1)
    dy[0, 0], dy[1, 0], dy[2, 1], dy[2, 0], dy[8, 3] = INF, NAN, -INF, INF, NAN
    keep = torch.arange(140) % 5 != 4
    for log in (False, True):
        check(Case(x, log=log), name, dy)
        gradient = check(Case(x, mask=keep, log=log), name, dy)
        assert gradient[3:8].isfinite().all()
        if log:
            assert (gradient[:, ~keep] == 0).all()
        gradient = check(Case(x, causal=True, log=log), name, dy)
        assert (gradient.triu(1) == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_expanded_tensors_and_dimensions_that_do_not_fold_into_three(name: str) -> None:
    """Other layouts are among the generated cases."""
    base = normal(4, 6, 5, 34, dtype=BF16)
    for x in (base[:1].expand(3, 6, 5, 34), base[..., :1].expand(4, 6, 5, 20)):
        keep = torch.rand(x.shape, generator=torch.Generator().manual_seed(5)) > 0.3
        check(Case(x, mask=keep.transpose(-1, -2).contiguous().transpose(-1, -2)), name)
        check(Case(x, mask=keep[0, :1, 0].float(), dtype=FP32), name, torch.ones(1).expand(x.shape))
    x = normal(2, 3, 2, 3, 2, 9).transpose(0, 4).transpose(1, 3)
    check(Case(x, mask=torch.rand(2, 1, 2, 1, 2, 9, generator=torch.Generator().manual_seed(6)) > 0.2), name)
    check(Case(normal(2, 3, 2, 3, 2, 9), mask=normal(2, 1, 2, 1, 2, 9)), name)


@pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])
@pytest.mark.parametrize("one_pass", [True, False])
def test_sums_over_elements_that_lie_apart(one_pass: bool, log: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels for other dimensions than the last, in one pass and in two; softmax and log_softmax take half of the
    layouts each."""
    if not one_pass:
        small_strided_tiles(monkeypatch)
    x = normal(3, 37, 42, dtype=BF16)
    x[0] = -INF
    x[1, :30] = -INF
    x[2, 5, 3], x[2, 6, 4] = NAN, INF
    views = [
        (x, 1),
        (x, 0),
        (x.transpose(1, 2), 2),
        (x[:, ::2, 1:], 1),
        (x[..., ::3], 1),
        (x[:, None].transpose(1, 3), 2),
        (x[:, :1].expand(3, 5, 42), 1),
        (normal(2, 3, 2, 3, 2, 9).transpose(0, 4).transpose(1, 3), 2),
    ]
    for number, (view, dim) in enumerate(views[log::2]):
        masks: list[tuple[torch.Tensor | None, torch.dtype | None]] = [
            (normal(*view.shape), FP32),
            (normal(view.shape[-1]) > 0, None),
            (normal(view.shape[dim], *[1] * (view.ndim - 1 - dim)).to(BF16), None),
        ]
        # The first layout with every mask, each other one with one of them.
        for mask, out in [(None, BF16), *masks] if number == 0 else masks[number % 3 :][:1]:
            check(Case(view, dim, scale=0.5, mask=mask, dtype=out, log=log, precision="fast"), "triton")


@pytest.mark.parametrize(("dtype", "halvings"), [(BF16, (3, 3, 1, 0)), (FP32, (2, 2, 0, 0))], ids=["bf16", "fp32"])
def test_sums_that_threads_exchange_by_halves(dtype: torch.dtype, halvings: tuple[int, ...]) -> None:
    """Vectors of neighbours that each belong to another sum: the halves come together in their places."""
    run, limit = 16 // dtype.itemsize, strided.STRIDED_FORWARD
    for (columns, across), often in zip(((70, 16), (70, 48), (20, 256), (16, 256)), halvings, strict=True):
        assert strided.tile_shape(columns, across, limit, run=run)[0].HALVINGS == often
        x = normal(2, columns, across, dtype=dtype)
        x[0, :, 1] = -INF
        x[0, 3, 2], x[1, 4, 5] = NAN, INF
        x[1, :-1, 7] = -INF
        for log in (False, True):
            check(Case(x, 1, scale=0.5, log=log, precision="fast"), "triton")
        check(Case(x, 1, mask=normal(2, columns, across) > -2, dtype=FP16, precision="fast"), "triton")


# ------------------------------------------------------------------------------------------------- generated cases


@st.composite
def cases(draw: st.DrawFn, largest: int) -> tuple[Case, torch.Tensor]:
    """A case, and a gradient of its result. `largest` is the limit of every size except the last."""
    seed = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    shape = (*draw(st.lists(st.integers(1, largest), max_size=3)), draw(st.integers(1, 200)))
    dtype, out = draw(st.sampled_from(DTYPES)), draw(st.sampled_from((None, *DTYPES)))
    order = draw(st.permutations(range(len(shape))))
    padding = draw(st.sampled_from((0, 0, 1, 8)))
    stored = torch.randn([shape[d] + padding for d in order], generator=seed)
    stored = (stored * draw(st.sampled_from((0.1, 3.0, 30.0)))).to(dtype)
    x = stored.permute([order.index(d) for d in range(len(shape))])
    x = x[tuple(slice(padding, None) for _ in shape)]
    specials = st.sampled_from((NAN, INF, -INF, -INF, 1e-40, -0.0, 65504.0, 1e37))
    for value in draw(st.lists(specials, max_size=3)):
        hit = torch.rand(shape, generator=seed) < draw(st.sampled_from((0.02, 0.5)))
        x[hit] = torch.tensor(value, dtype=torch.float32).to(dtype)  # 1e37 is infinite in fp16
    dim = draw(st.integers(-len(shape), len(shape) - 1)) if draw(st.booleans()) else -1
    causal = len(shape) > 1 and dim % len(shape) == len(shape) - 1 and draw(st.booleans())
    mask = None
    kind = draw(st.sampled_from(("none", "boolean", "additive")))
    if kind != "none":
        sizes = [size if draw(st.booleans()) else 1 for size in shape][draw(st.integers(0, len(shape))) :]
        mask = torch.rand(sizes, generator=seed) < 0.7
        if kind == "additive":
            values = torch.randn(sizes, generator=seed)
            mask = torch.where(mask, values, -INF).to(draw(st.sampled_from((*DTYPES, torch.float64))))
    scale = draw(st.sampled_from((1.0, 0.125, -0.7, 3.3, 0.0)))
    case = Case(x, dim, scale, mask, causal, out, draw(st.booleans()), draw(st.sampled_from(("fast", "exact"))))
    dy = torch.randn(shape, generator=seed).to(case.out)
    return case, dy


@pytest.mark.parametrize(("name", "strided_tile"), [*((name, None) for name in ALL), ("triton", 16)])
def test_generated_cases_match_float64(name: str, strided_tile: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if strided_tile:
        small_strided_tiles(monkeypatch, strided_tile, 128)

    @settings(
        max_examples=100 if name != "triton" else 3 if strided_tile else 10,  # what the interpreter has time for
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(cases(largest=6 if name != "triton" else 3))
    def run(drawn: tuple[Case, torch.Tensor]) -> None:
        case, dy = drawn
        check(case, name, dy)

    run()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dim", [0, -1])
def test_lazy_negations_are_read_with_their_sign(name: str, dim: int) -> None:
    """Their memory holds the opposite numbers: ``x.conj().imag`` of a complex tensor, for example."""
    with using(name, "softmax") as device:
        x, mask, grad = (normal(5, 33, seed=seed).to(device) for seed in range(3))
        lazy = [torch._neg_view(tensor.neg()).requires_grad_(tensor is x) for tensor in (x, mask, grad)]
        assert all(tensor.is_neg() for tensor in lazy)
        y = halfstep.softmax(lazy[0], dim, mask=lazy[1])
        y.backward(lazy[2])
        plain = x.clone().requires_grad_()
        halfstep.softmax(plain, dim, mask=mask).backward(grad)
        assert torch.equal(lazy[0].grad, plain.grad)
        assert torch.equal(y, halfstep.softmax(x, dim, mask=mask))


@pytest.mark.parametrize("name", ["native", "triton"])
def test_rows_too_long_or_too_many_to_count_in_32_bits_are_left_to_the_rule(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "LONGEST", 9)
    called = []
    for function in ("forward", "backward"):
        original = getattr(rule, function)
        monkeypatch.setattr(
            rule, function, lambda *args, original=original: called.append(original.__name__) or original(*args)
        )
    with using(name, "softmax") as device:
        for shape, expected in (((9, 9), []), ((2, 10), ["forward", "backward"]), ((10, 2), ["forward", "backward"])):
            called.clear()
            halfstep.softmax(normal(*shape).to(device).requires_grad_(), precision="fast").sum().backward()
            assert called == expected, shape
