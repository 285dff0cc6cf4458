"""The explorer's exact.mjs against halfstep's codec: in node, and in a headless Chromium where there is one."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import run_script

from halfstep.cli.formats import number_text
from halfstep.cli.pages.explorer.page import script_of_formats
from halfstep.numerics.formats.codec import encode
from halfstep.numerics.formats.exact import (
    ENCODE_ROUNDINGS,
    OVERFLOWS,
    decode_exact,
    encode_exact,
    next_down_exact,
    next_up_exact,
)
from halfstep.numerics.formats.table import Format, formats

SMALL = [name for name in formats if formats[name].bits <= 16]
SEED = 20_201_117_000_000_003

CODES = """
const texts = (x) => x.type === "finite" ? decimal(x) : specialText(x);
const out = {};
for (const name of input) {
  const f = formats[name];
  out[name] = [];
  for (let code = 0n; code < 1n << f.bits; code++) {
    const value = decode(code, f);
    const around = [-1n, 1n].map((step) => nextCode(value, f, step))
      .map((c) => (c === null ? null : texts(decode(c, f))));
    out[name].push([texts(value), classify(code, f), ...around]);
  }
}
answer(out);
"""
NUMBERS = """
const out = [];
const parsed = (text) => {
  if (!text.includes("/")) return decode(BigInt(text), formats.fp64);
  const [n, d] = text.split("/").map(BigInt);
  return finite(n < 0n, n < 0n ? -n : n, d);
};
for (const { name, rounding, overflow, subnormals, values, seed } of input.runs) {
  const f = formats[name];
  out.push(input.values[values].map((text, i) =>
    encode(parsed(text), f, rounding, { overflow, subnormals, seed: BigInt(seed), offset: BigInt(i) }).toString()));
}
answer(out);
"""


def answers_of(engine: str, body: str, given: Any, folder: Path) -> Any:
    """What the script answers."""
    return run_script(engine, script_of_formats(), body, given, folder)


def written(value: Any) -> str:
    """The exact decimal expansion."""
    if isinstance(value, float) and value - value != 0:
        return "nan" if value != value else str(value)
    if isinstance(value, Fraction) and value != 0:
        return str(number_text.decimal(value))
    return "-0" if str(value) == "-0.0" else "0"


def kind_of(code: int, form: Format) -> str:
    value = decode_exact(code, form)
    if isinstance(value, float) and value != 0:
        return "NaN" if value != value else "infinity"
    if value == 0:
        return "zero"
    return "subnormal" if abs(value) < Fraction(form.min_normal) and form.has_subnormals else "normal"


def check_codes(engine: str, names: list[str], folder: Path) -> int:
    answers = answers_of(engine, CODES, names, folder)
    for name in names:
        form = formats[name]
        assert len(answers[name]) == form.codes
        for code, answer in enumerate(answers[name]):
            value = decode_exact(code, form)
            around: list[str | None] = [None, None]
            if value == value:
                around = [written(next_down_exact(value, form)), written(next_up_exact(value, form))]
            assert answer == [written(value), kind_of(code, form), *around], (name, hex(code))
    return sum(formats[name].codes for name in names)


def floats_around(form: Format, count: int, random: np.random.Generator) -> np.ndarray:
    """Numbers of the format, ties between two of them, their float64 neighbours, and patterns over all exponents."""
    codes = random.integers(0, form.codes, count // 4, dtype=np.uint64)
    values = np.array([float(decode_exact(int(code), form)) for code in codes])
    with np.errstate(invalid="ignore", over="ignore"):
        ties = values + np.array([form.ulp(x) / 2 if np.isfinite(x) else 0.0 for x in values.tolist()])
        beside = np.nextafter(ties, np.where(np.arange(ties.size) % 2, np.inf, -np.inf))
    scale = np.ldexp(1.0, random.integers(max(-1074, form.emin - form.mantissa - 3), min(1024, form.emax + 3), count))
    spread = (random.uniform(1, 2, count) * np.where(np.arange(count) % 2, 1, -1) * scale)[: count // 8]
    patterns = random.integers(0, 2**64, count - 3 * (count // 4) - count // 8 - 7, dtype=np.uint64).view(np.float64)
    edges = [0.0, -0.0, np.inf, -np.inf, form.max, np.nextafter(form.overflow, 0), min(form.overflow, 1.7e308)]
    found = np.concatenate([edges, values, ties, beside, spread, patterns])
    return found if form.has_nan else np.where(np.isnan(found), 1.0, found)


def check_numbers(engine: str, floats: int, fractions: int, folder: Path) -> int:
    """Compare `floats` float64 numbers and `fractions` exact fractions in every mode; how many codes are equal."""
    random = np.random.default_rng(17)
    runs: list[dict[str, Any]] = []
    values: dict[str, list[str]] = {}
    expected: list[list[str]] = []
    for name in formats:
        form = formats[name]
        near = floats_around(form, floats // len(formats) + 1, random)
        exact = [Fraction(float(x)) * Fraction(random.integers(1, 99).item(), 97)
                 for x in near[np.isfinite(near) & (near != 0)][:: floats // max(fractions, 1) or 1]]  # fmt: skip
        values[name] = [str(int(pattern)) for pattern in near.view(np.uint64)]
        values[name + "/"] = [f"{x.numerator}/{x.denominator}" for x in exact]
        for rounding in ENCODE_ROUNDINGS:
            seed = SEED if rounding == "stochastic" else None
            for overflow in OVERFLOWS[: 3 if form.has_nan else 2]:
                for subnormals in (True, False):
                    options: dict[str, Any] = {"overflow": overflow, "subnormals": subnormals, "seed": seed}
                    run = {"name": name, "rounding": rounding, **options, "seed": str(SEED)}  # beyond 2^53
                    runs += [{**run, "values": name}, {**run, "values": name + "/"}]
                    expected.append([str(code) for code in encode(near, name, rounding, **options).tolist()])
                    expected.append([str(encode_exact(x, form, rounding, **options, offset=i))
                                     for i, x in enumerate(exact)])  # fmt: skip
    answers = answers_of(engine, NUMBERS, {"runs": runs, "values": values}, folder)
    for run, ours, theirs in zip(runs, answers, expected, strict=True):
        wrong = [i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b]
        assert not wrong, (run, values[run["values"]][wrong[0]], ours[wrong[0]], theirs[wrong[0]])
    return sum(map(len, expected))


def test_codes_in_node(tmp_path: Path) -> None:
    names = [name for name in SMALL if formats[name].bits <= 8]
    assert check_codes("node", names, tmp_path) == sum(formats[name].codes for name in names)


def test_numbers_in_node(tmp_path: Path) -> None:
    assert check_numbers("node", 1_400, 100, tmp_path) > 50_000


@pytest.mark.exhaustive
def test_every_code_to_16_bits_in_chromium(tmp_path: Path) -> None:
    assert check_codes("chromium", SMALL, tmp_path) == sum(formats[name].codes for name in SMALL)


@pytest.mark.exhaustive
def test_100_000_numbers_in_every_mode_in_chromium(tmp_path: Path) -> None:
    assert check_numbers("chromium", 100_000, 2_000, tmp_path) > 2_100_000


def test_the_fields_that_the_script_derives_are_those_of_the_table(tmp_path: Path) -> None:
    body = """
    const number = (x) => (x === null ? null : x.toString());
    answer(Object.values(formats).map((f) => [f.name, ...[f.bits, f.signBit, f.largest, f.infinityCode, f.nanCode,
      f.emin, f.emax].map(number), f.negativeZero, f.subnormals]));
    """

    def row(form: Format) -> list[Any]:
        derived = [getattr(form, field) for field in ("bits", "sign_bit", "largest_code", "infinity_code", "nan_code")]
        texts = [None if number is None else str(number) for number in (*derived, form.emin, form.emax)]
        return [form.name, *texts, form.has_negative_zero, form.has_subnormals]

    assert answers_of("node", body, None, tmp_path) == [row(formats[name]) for name in formats]
