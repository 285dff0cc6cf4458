"""The JSON of every command: as documented, and nothing is lost in it."""

from __future__ import annotations

import copy
import json
import math
import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import lookup_schema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookup_run import STEADY, results, said

from halfstep.numerics.formats.exact import decode_exact, encode_exact, parse_number
from halfstep.numerics.formats.table import formats

ROOT = Path(__file__).resolve().parents[3]
NUMBERS = ("2.5", "0", "-0", "1/3", "-1e-7", "2^-25", "500", "1e60", "inf", "-inf", "nan", "1+2^-11+2^-40", "2^-9000")


@pytest.mark.parametrize(
    "words",
    [
        ("format",),
        ("format", "e5m7"),
        ("encode", *NUMBERS),
        ("encode", "1e9", "--overflow", "nan", "--rounding", "stochastic", "--seed", "1"),
        ("decode", "0x00", "0x0001", "0x7c00", "0xffffffff", "0x7fff0", "0x7ff0000000000001", "0b1111"),
        ("compare", *formats),
        *(("why", number, *formats) for number in NUMBERS),
        ("why", "1e9", "fp16", "e4m3", "e2m1", "--overflow", "saturate"),
        ("why", "1e9", "fp16", "e4m3", "e2m1", "--overflow", "nan"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_every_command_prints_what_is_documented(words: tuple[str, ...]) -> None:
    assert results(*words)  # which compares it with tests/support/lookup_schema.py


def test_the_picture_has_json_too(tmp_path: Path) -> None:
    out = tmp_path / "x.svg"
    (found,) = results("ladder", "--kind", "range", "-f", "fp16", "--out", str(out))
    assert found == {"file": str(out), "kind": "range", "formats": ["fp16"]}


def test_the_same_words_print_the_same_bytes() -> None:
    assert said("why", "0.1", "fp16", "--json") == said("why", "0.1", "fp16", "--json")


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda answer: answer.pop("input"), "$: lacks 'input'"),
        (lambda answer: answer.update(more=1), "$: has 'more', which is not documented"),
        (lambda answer: answer["results"][0].update(code=16640), "results[0].code: 16640 is not"),
        (lambda answer: answer["results"][0]["value"].update(decimal="1,5"), "results[0].value.decimal"),
        (lambda answer: answer["results"][0]["error"].pop("ulps"), "results[0].error: lacks 'ulps'"),
        (lambda answer: answer["results"][0].update(outcome="fine"), "results[0].outcome: 'fine' is not"),
        (lambda answer: answer["results"][0]["input"].update(fraction="2/4"), "results[0].input.fraction"),
    ],
)
def test_the_check_of_the_shape_can_fail(spoil: Any, complaint: str) -> None:
    answer = json.loads(said("encode", "--json", "2.5", "-f", "fp16")[1])
    spoiled = copy.deepcopy(answer)
    spoil(spoiled)
    assert lookup_schema.wrong_with(answer) == []
    assert any(complaint in line for line in lookup_schema.wrong_with(spoiled))


def test_the_page_names_every_key() -> None:
    page = (ROOT / "docs" / "lookup.md").read_text(encoding="utf-8")

    def keys(rule: Any) -> set[str]:
        if isinstance(rule, dict):
            named = {key for key in rule if isinstance(key, str) and "|" not in key}
            return named.union(*(keys(inner) for inner in rule.values()))
        return set().union(*map(keys, rule)) if isinstance(rule, list | tuple) else set()

    wanted = set().union(*(keys(rule) for pair in lookup_schema.COMMANDS.values() for rule in pair))
    assert {key for key in wanted if not re.search(rf"`{key}`", page)} == set()


_OWN = st.builds(
    lambda exponent, mantissa, kind: f"e{exponent}m{mantissa}{kind}",
    st.integers(2, 10),
    st.integers(1, 30),
    st.sampled_from(["", "fn", "fnuz", "finite"]),
)
_FORMATS = st.sampled_from(list(formats)) | _OWN
_TEXTS = st.one_of(
    st.floats(allow_nan=False).map(repr),
    st.floats(width=16, allow_nan=False).map(repr),
    st.fractions(max_denominator=10**6).map(str),
    st.builds(lambda sign, power: f"{sign}2^{power}", st.sampled_from(["", "-"]), st.integers(-1100, 1100)),
    st.builds(float.hex, st.floats(allow_nan=False, allow_infinity=False)),
)


@settings(STEADY, max_examples=150)
@given(_TEXTS, _FORMATS)
def test_what_encode_says_is_what_decode_reads(text: str, format: str) -> None:
    (found,) = results("encode", "-f", format, "--", text)
    if found["code"] is None:
        return
    (read,) = results("decode", found["code"], "-f", format)
    for key in ("code", "bits", "class", "value"):
        assert read[key] == found[key]
    row = formats[format]
    assert int(found["code"], 16) == encode_exact(text, row)
    assert len(found["code"]) == 2 + -(-row.bits // 4)
    assert "".join(found["bits"].values()) == f"{int(found['code'], 16):0{row.bits}b}"
    value = decode_exact(int(found["code"], 16), row)
    if isinstance(value, Fraction):
        assert Fraction(found["value"]["decimal"]) == Fraction(found["value"]["fraction"]) == value
        assert float.fromhex(found["value"]["hex"]) == value
        assert encode_exact(found["value"]["shortest"], row) == encode_exact(found["value"]["decimal"], row)
        given = parse_number(text)
        if not (isinstance(given, float) and math.isinf(given)):
            assert Fraction(found["error"]["fraction"]) == value - Fraction(given)
            assert (found["outcome"] == "exact") == (value == given)
