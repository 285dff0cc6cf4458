"""Exact softmax, the default: one set of bits for each row, of every implementation, split and batch."""

import math
from itertools import product

import pytest
import torch
from devices import assert_same_bits
from implementations import twin, using
from softmax_oracle import Case, assert_within, backward_oracle, oracle
from softmax_paths import two_launches

from halfstep.kernels.softmax import rule

pytestmark = pytest.mark.sample(3)

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = ((BF16, BF16), (FP32, FP32), (FP16, FP32))
INF, NAN = math.inf, math.nan
LOG = pytest.mark.parametrize("log", [False, True], ids=["softmax", "log_softmax"])


def normal(*shape: int, dtype: torch.dtype = FP32, seed: int = 0, spread: float = 3.0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def results(case: Case, name: str, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with using(name, "softmax") as device:
        x = twin(case.x, device).requires_grad_()
        y = case.run(device, x)
        y.backward(twin(dy, device))
    assert x.grad is not None
    return y.detach().cpu(), x.grad.cpu()


def check(case: Case, compared: bool = True, dy: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference is right, and the kernels, and what runs on a CPU without a choice, have its bits."""
    case.precision = "exact"
    dy = normal(*case.x.shape, seed=1, spread=1.0).to(case.out) if dy is None else dy
    y, dx = results(case, "reference", dy)
    what = f"{tuple(case.x.shape)} {case.x.dtype}->{case.out} {case.dim} {case.scale} {case.causal} {case.log}"
    if compared:
        assert_within(y, *oracle(case), what)
        assert_within(dx, *backward_oracle(case, y, dy), f"{what}, backward")
    for name in ("native", "triton"):
        for mine, expected in zip(results(case, name, dy), (y, dx), strict=True):
            assert_same_bits(mine, expected, (name, what))
    return y, dx


def test_sums_are_folded_in_halves_and_missing_terms_are_zero() -> None:
    terms = normal(3, 37)
    a = terms.double()
    expected = (a[:, :5] + a[:, 32:]).float()
    expected = torch.cat([expected, terms[:, 5:32]], 1)
    for half in (16, 8, 4, 2, 1):
        expected = expected[:, :half] + expected[:, half:]
    assert torch.equal(rule.folded(terms), expected[:, 0])
    assert torch.equal(rule.folded(torch.nn.functional.pad(terms, (0, 400))), expected[:, 0])
    rotated = torch.nn.functional.pad(terms, (0, 27)).roll(5, -1)
    assert torch.equal(rule.folded(rotated), expected[:, 0])
    assert not torch.equal(rule.folded(terms.flip(-1)[:, :36]), terms[:, 1:].sum(-1))
    assert rule.folded(torch.tensor([-0.0, -0.0])).signbit().item() is False


@LOG
@pytest.mark.parametrize("columns", [1, 3, 16, 17, 64, 255, 319, 1000, 1025, 2047])
def test_row_lengths(columns: int, log: bool) -> None:
    for source, target in DTYPES if columns < 64 else DTYPES[columns % 3 :][:1]:
        check(Case(normal(5, columns, dtype=source), dtype=target, log=log))
        check(Case(normal(5, columns, dtype=source), causal=True, scale=0.3, dtype=target, log=log))


@LOG
@pytest.mark.parametrize("launches", [1, 2])
def test_rows_of_several_groups(launches: int, log: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch or two give the same bits: both those of the reference. Dead groups, and NaN in one of them."""
    if launches == 2:
        two_launches(monkeypatch)
    for columns, dtype in ((rule.GROUP + 8, BF16), (rule.GROUP + 1, BF16), (3 * rule.GROUP, FP32)):
        x = normal(4, columns, dtype=dtype) + torch.linspace(0, 12, columns).to(dtype)
        x[1, : rule.GROUP] = -INF
        x[2, -1] = NAN
        x[3] = -INF
        y, dx = check(Case(x, log=log))
        assert y[2].isnan().all() and dx[3].eq(0).all()
        fast = Case(x, log=log, precision="fast")
        mine, _ = results(fast, "triton", x)
        assert_within(mine, *oracle(fast), (columns, "fast"))


@LOG
def test_masks_scales_and_special_values(log: bool) -> None:
    x = normal(2, 9, 40)
    x[0, 0], x[0, 1, 1:], x[0, 2, 3], x[0, 3, 5], x[0, 4] = -INF, -INF, NAN, INF, torch.finfo(FP32).min
    x[0, 5, ::2], x[0, 6] = 1e-42, -0.0
    masks = None, normal(2, 1, 40) > 0, normal(9, 1), torch.where(normal(40) > 0, 0.0, -INF).double()
    for mask, scale, causal, dtype in product(masks, (1.0, -0.7, 0.0), (False, True), (FP32, BF16)):
        if (scale, dtype) != (0.0, BF16):
            check(Case(x.to(dtype), mask=mask, scale=scale, causal=causal, log=log))


@LOG
@pytest.mark.parametrize("pair", [(BF16, BF16), (BF16, FP32), (FP32, BF16)], ids=str)
def test_rows_and_masks_that_begin_off_a_boundary(pair: tuple[torch.dtype, torch.dtype], log: bool) -> None:
    """Rows of odd length, views at odd addresses, and masks and results that begin elsewhere than x does."""
    wide = normal(1, 2, 330, dtype=pair[0])
    wide[0, 1, 40:] = -INF
    masks = normal(1, 2, 303), normal(303).to(BF16), normal(1, 2, 303).half(), normal(2, 1), normal(330)[3:306] > 0
    views = wide[..., :303], wide[..., 5:308], wide[..., 3:306], normal(4, 303)[1:3]
    for x, mask in zip(views, masks[1:], strict=True):
        check(Case(x.to(pair[0]), log=log, dtype=pair[1], scale=0.5, mask=mask, causal=mask.ndim == 1))
    for mask in masks:
        check(Case(normal(1, 2, 303, dtype=pair[0]), log=log, dtype=pair[1], mask=mask))


@LOG
def test_ends_that_pass_a_block_of_columns(log: bool) -> None:
    """They stand in front of the row, where nothing is kept of a row that ends before, nor of what was not loaded."""
    check(Case(normal(129, 127, dtype=BF16), causal=True, log=log))
    for scale in (-0.7, 0.0):
        check(Case(normal(3, 255, dtype=BF16), scale=scale, log=log))


@LOG
def test_zeros_of_the_gradient_are_positive(log: bool) -> None:
    for columns in (8, 333, 1024):
        _, dx = check(Case(normal(2, columns), log=log), dy=torch.full((2, columns), -0.0))
        assert dx.eq(0).all() and not dx.signbit().any()


@LOG
def test_other_dimensions_and_strides(log: bool) -> None:
    x = normal(3, 20, 42, dtype=BF16)
    x[1, :18] = -INF
    for view, dim in ((x, 1), (x, 0), (x.transpose(1, 2), 2), (x[:, ::2, 1:], 1), (x[..., ::3], -1), (x[:, 3:, 5:], 2)):
        check(Case(view, dim, scale=0.5, mask=normal(view.shape[-1]) > -1, log=log))
    check(Case(x[:1, :1].expand(4, 5, 42), log=log), compared=False)  # torch adds up the gradients of an expanded x


@LOG
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("name", ["reference", "triton"])
def test_bits_of_a_row_do_not_depend_on_the_batch_the_address_or_padding(
    name: str, dtype: torch.dtype, log: bool
) -> None:
    rows, columns = normal(6, 301, dtype=dtype), 301
    dy = normal(6, 301, seed=1, dtype=dtype)
    alone = [results(Case(row, log=log, precision="exact"), name, grad) for row, grad in zip(rows, dy, strict=True)]
    for width, first in ((301, 0), (512, 0), (512, 5), (307, 1)):
        wide, wide_dy = torch.full((6, width), -INF, dtype=dtype), torch.zeros(6, width, dtype=dtype)
        wide[:, first : first + columns], wide_dy[:, first : first + columns] = rows, dy
        views = wide[:, first : first + columns], wide_dy[:, first : first + columns]
        for x, grad in (views, (wide, wide_dy)) if first == 0 else (views,):
            y, dx = results(Case(x, log=log, precision="exact"), name, grad)
            for row, (expected, gradient) in enumerate(alone):
                assert_same_bits(y[row, :columns], expected, (width, first))
                assert_same_bits(dx[row, :columns], gradient, (width, first))


def test_fp32_results_are_no_farther_from_float64_than_those_of_torch() -> None:
    x = normal(64, 4096, spread=4.0)
    y, _ = results(Case(x, precision="exact"), "reference", torch.ones_like(x))
    exact_y = x.double().softmax(-1)
    mine, torchs = (((z.double() - exact_y) / exact_y).abs().max() for z in (y, x.softmax(-1)))
    assert mine <= torchs
