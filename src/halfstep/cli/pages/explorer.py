"""The answers of the explorer of formats: a number in one format, in all of them, and in two compared, as texts.

The keys of a state are those of the page's address: ``x``, the number, or ``c``, a code of the format ``f``; ``g``, the
format to compare with; ``r``, the rounding mode; ``o``, ``n`` and ``s``, what overflow, NaN and subnormals become.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from halfstep.cli.formats import number_text
from halfstep.cli.formats.compare import pair_words
from halfstep.cli.formats.properties import figures
from halfstep.cli.formats.rules import chances, double_roundings, ends_around, rule
from halfstep.cli.formats.sentences import double_rounding_words, power, reasons, text
from halfstep.cli.formats.shared_values import lowest_exponent, shared_in
from halfstep.cli.formats.text import outcome, ulps
from halfstep.cli.formats.values import Encoded, Stored, finite, number_dict, overflows, special_text
from halfstep.cli.pages.shell import command_line
from halfstep.numerics.formats.exact import (
    ENCODE_ROUNDINGS,
    NANS,
    OVERFLOWS,
    decode_exact,
    encode_exact,
    neighbours,
    next_down_exact,
    next_up_exact,
)
from halfstep.numerics.formats.parse import Number, parse_number
from halfstep.numerics.formats.table import Format, formats

EXAMPLE = {"x": "0.1", "f": "bf16", "g": "fp16", "r": "nearest", "o": "inf", "n": "canonical", "s": "1"}
CHOICES = {
    "r": [[mode, mode] for mode in ENCODE_ROUNDINGS[:-1]],
    "o": [[mode, mode] for mode in OVERFLOWS],
    "n": [[mode, mode] for mode in NANS],
    "s": [["1", "kept"], ["0", "flushed to zero"]],
}
_CODE = re.compile(r"\s*(0x[0-9a-f_]+|0b[01_]+|[0-9][0-9_]*)\s*", re.ASCII | re.IGNORECASE)
_NEAR = 4  # numbers of each format that are shown below and above


class _Question(NamedTuple):
    """A number, or a code of `format`, and how it is rounded."""

    number: Number
    format: Format
    code: int | None
    name: str  # the number or the code, as it was typed
    rounding: str
    overflow: str
    nan: str
    subnormals: bool

    def result(self, format: Format, rounding: str = "", subnormals: bool = False) -> tuple[Encoded, str]:
        """The number in a format, and why the format refuses it, if it does. A code that was chosen stays."""
        if self.code is not None and format.name == self.format.name:
            return Encoded(self.number, format, Stored(self.code, format)), ""
        return self.encoded(self.number, format, rounding or self.rounding, subnormals)

    def encoded(self, number: Number, format: Format, rounding: str, subnormals: bool = False) -> tuple[Encoded, str]:
        kept = subnormals or self.subnormals
        try:
            code = encode_exact(number, format, rounding, overflow=self.overflow, nan=self.nan, subnormals=kept)
        except ValueError as error:
            return Encoded(self.number, format, None), str(error)
        return Encoded(self.number, format, Stored(code, format)), ""


def explorer(state: dict[str, str], move: dict[str, Any]) -> dict[str, Any]:
    """The answer to a state, after a move: ``flip``, the bit of a code, or ``step``, 1 or -1, to the next number."""
    state = {**EXAMPLE, **{key: text for key, text in state.items() if key in (*EXAMPLE, "c")}}
    for key, choices in CHOICES.items():
        if [state[key]] not in [choice[:1] for choice in choices]:
            state[key] = EXAMPLE[key]
    state.pop("x" if state.get("c") else "c", None)
    answer: dict[str, Any] = {"state": state, "fields": {"c": "", **state}, "error": "", "chosen": None, "all": None}
    question = format = None
    try:
        format = _format(state["f"])
        question = _question(state, format)
        here, refusal = question.result(format)
        if here.stored is not None and {"flip", "step"} & set(move):
            return explorer({**state, "c": _moved(here.stored, move)}, {})
        answer["error"] = refusal
        answer["fields"]["x"] = state.get("x", _whole(question.number))
        if here.stored is not None:
            answer["fields"]["c"] = here.stored.hex
            answer["chosen"] = _chosen(question, here)
        every = formats.values() if format.name in formats else [format, *formats.values()]
        answer["all"] = {"rows": [_row(each.name, *question.result(each)) for each in every], "here": format.name}
    except ValueError as error:
        answer["error"] = str(error)
    if format is not None and state["g"].strip():
        answer["pair"] = _pair(question, format, state["g"])
    options = [("number", answer["fields"].get("x", "")), ("format", state["f"])]
    options += [("format", state["g"])] if state["g"].strip() else []
    options += [("rounding", state["r"]), ("overflow", state["o"])]
    return {**answer, "command": command_line("halfstep explore", options)}


def _format(name: str) -> Format:
    try:
        return formats[name.strip()]
    except KeyError as error:
        raise ValueError(str(error)) from error


def _question(state: dict[str, str], format: Format) -> _Question:
    code, typed = None, state.get("c", "")
    if typed:
        if not (match := _CODE.fullmatch(typed)):
            raise ValueError(f"Expected a code such as 0x3dcd, 0b101 or 61, but got {typed!r}")
        digits = match[1].replace("_", "").lower()
        code = int(digits, 0 if digits[:2] in ("0x", "0b") else 10)
        number = decode_exact(code, format)
    else:
        number = parse_number(state["x"])
    name = state["x"].strip() if code is None else Stored(code, format).hex
    return _Question(number, format, code, name, state["r"], state["o"], state["n"], state["s"] == "1")


def _moved(stored: Stored, move: dict[str, Any]) -> str:
    """The code after a move. Among the codes of NaN, which have no order, a step leads to the next code."""
    format, step = stored.format, 1 if move.get("step") == 1 else -1
    if isinstance(move.get("flip"), int):
        code = stored.code ^ 1 << move["flip"] % format.bits
    elif stored.sort == "nan":
        code = (stored.code + step) % format.codes
    else:
        code = encode_exact((next_up_exact if step > 0 else next_down_exact)(stored.value, format), format)
    return Stored(code, format).hex


# -------------------------------------------------------------------------------------------------------- one format


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _whole(number: Number) -> str:
    """A number with all its digits, which can be typed again, unless they never end."""
    if isinstance(number, float):
        return special_text(number)
    return number_text.decimal(number) or f"≈{number_text.rounded(number, 17)}"


def _outcome(result: Encoded) -> str:
    refused = result.stored is None and result.number == result.number
    return "refused" if refused else outcome(result)


def _row(name: str, result: Encoded, refusal: str) -> list[str]:
    """The cells of a table: name, stored value, code, error in ulps, outcome."""
    if result.stored is None:
        return [name, refusal, "", "", _outcome(result)]
    return [name, result.stored.text(20), result.stored.hex, ulps(result), _outcome(result)]


def _chosen(question: _Question, here: Encoded) -> dict[str, Any]:
    """The number in the chosen format."""
    stored, number, error = here.stored, question.number, ulps(here)
    assert stored is not None
    away = f", {error} ulp" if error not in ("", "0") else ""
    return {
        "title": f"{_cut(question.name, 40)} in {here.format.name} is {stored.text(24)}: {_outcome(here)}{away}",
        "bits": [[name, digits, _field(name, digits, here.format)] for name, digits in stored.fields],
        "line": _line(question, here) if finite(number) else None,
        "why": _why(question, here),
        "facts": _facts(here),
        "modes": {"rows": _modes(question, here.format), "here": question.rounding},
    }


def _field(name: str, digits: str, format: Format) -> str:
    """The label of a field of the code: its name, and its value as an integer."""
    return name if name == "sign" or format.kind == "integer" else f"{name}: {int(digits, 2)}"


def _why(question: _Question, here: Encoded) -> list[str]:
    if question.code is not None and not finite(question.number):
        return [f"The code is that of {special_text(float(question.number))}."]
    kept, _ = question.result(here.format, subnormals=True)
    sentences = reasons(kept, question.rounding)
    if here.stored is not None and kept.stored != here.stored:
        sentences.append(f"Subnormal results are flushed to zero: {here.stored.hex} is stored.")
    if question.rounding == "nearest" and kept.stored == here.stored:
        sentences += [double_rounding_words(twice, here) for twice in double_roundings(question.number, here.format)]
    return sentences


def _line(question: _Question, here: Encoded) -> dict[str, Any] | None:
    """Where the number lies between its neighbours; None where nothing is rounded or both of them overflow."""
    form, around = here.format, neighbours(here.number, here.format)
    low, high = ends_around(here, around)
    if rule(here, around) in ("exact", "sign", "least") or overflows(low if here.number > 0 else high, form):
        return None
    percent = float(100 * (Fraction(here.number) - low) / (high - low))
    value = None if here.stored is None else here.stored.value
    where = f"{percent:.2f}".rstrip("0").rstrip(".")
    return {
        "ends": [
            [text(end, here.format), _code_in(end, here.format) or f"not in {here.format.name}"] for end in (low, high)
        ],
        "at": percent,
        "taken": [value == low, value == high],
        "label": f"{_cut(question.name, 24)} lies {where} % of the way; halfway is {text((low + high) / 2, form)}",
    }


def _code_in(value: Number, format: Format) -> str:
    """The code of a number of the format; empty if it is none."""
    code = encode_exact(value, format)
    return Stored(code, format).hex if decode_exact(code, format) == value else ""


def _formula(stored: Stored) -> str:
    """A code's value, by its fields."""
    format, field = stored.format, {name: int(digits, 2) for name, digits in stored.fields}
    if not finite(stored.value):
        return "the code of a NaN" if stored.sort == "nan" else "the largest exponent, and mantissa 0"
    if format.kind == "integer":
        return "two's complement"
    if format.kind == "scale":
        return f"2^({stored.code} \u2212 {format.bias})"
    normal = int(field["exponent"] > 0)
    fraction = f"({normal} + {field['mantissa']}/2^{format.mantissa})" if format.mantissa else str(normal)
    return f"(\u22121)^{field['sign']} · 2^({field['exponent'] or 1} \u2212 {format.bias}) · {fraction}"


def _facts(here: Encoded) -> list[list[str]]:
    stored, format = here.stored, here.format
    assert stored is not None
    rows = [("format", f"{format.name}: {format.title}"), ("code", f"{stored.hex} = {stored.bits}")]
    rows += [("formula", _formula(stored)), ("exact value", _whole(stored.value))]
    if isinstance(stored.value, Fraction) and stored.value:
        top, under = stored.value.numerator, stored.value.denominator
        fraction = f"{top}/2^{under.bit_length() - 1}" if under > 2**30 else str(stored.value)
        rows += [("shortest", stored.shortest), ("hexadecimal", number_dict(stored.value)["hex"] or "")]
        rows += [("fraction", fraction)]
    if here.error is not None:
        rows.append(("error", _cut(_whole(here.error), 60) + (f" = {ulps(here)} ulp" if here.error else "")))
    if finite(stored.value):
        rows.append(("ulp", power(Fraction(neighbours(stored.value, format).ulp))))
    for name, following in (("previous", next_down_exact), ("next", next_up_exact)):
        near = following(stored.value, format)
        code = Stored(encode_exact(near, format), format).hex
        rows.append((name, "none" if stored.sort == "nan" else f"{text(near, format)} ({code})"))
    return [list(row) for row in [*rows, ("class", stored.sort)]]


def _modes(question: _Question, format: Format) -> list[list[str]]:
    """A row for each rounding mode, and for each possible result of stochastic rounding."""
    rows = [_row(mode, *question.result(format, mode)) for mode, _ in CHOICES["r"]]
    ends = []
    for share, end in chances(question.number, format, "inf"):
        result, refusal = question.encoded(end.number, format, "nearest")
        ends.append((share, result, refusal))
    if question.code is not None or len({end.stored for _, end, _ in ends}) == 1:
        result, refusal = question.result(format, "nearest")
        ends = [(Fraction(1), result, refusal)]
    for share, result, refusal in ends:
        rows.append([*_row("stochastic", result, refusal)[:4], f"with {number_text.rounded(100 * share, 6)} %"])
    return rows


# -------------------------------------------------------------------------------------------------------- two formats


def _pair(question: _Question | None, first: Format, name: str) -> dict[str, Any]:
    try:
        second = _format(name)
    except ValueError as error:
        return {"title": "Two formats compared", "error": str(error)}
    title = f"{first.name} and {second.name}"
    if first.name == second.name:
        return {"title": title, "error": f"Both are {first.name}: choose another format under “Compare with”."}
    pairs = zip(figures(first), figures(second), strict=True)
    around = _around(question, (first, second)) if question is not None and finite(question.number) else None
    return {
        "title": title,
        "names": [first.name, second.name],
        "words": pair_words(first, second),
        "figures": [[name, left, right] for (name, left), (_, right) in pairs],
        "around": around,
        **_density(first, second),
    }


def _around(question: _Question, pair: tuple[Format, Format]) -> dict[str, Any]:
    """The numbers of both formats around the number, from the least, with their codes; and the number itself."""
    number, values = Fraction(question.number), set()
    for format in pair:
        exact = bool(_code_in(number, format))
        values |= {number} if exact else set()
        for following, count in ((next_down_exact, _NEAR - exact), (next_up_exact, _NEAR)):
            near: Number = number
            for _ in range(count):
                near = following(near, format)
                if not finite(near):
                    break
                near = Fraction(near)
                values.add(near)
    digits = max(format.max_digits10 for format in pair) + 2
    rows = []
    for value in sorted(values | {number}):
        whole = number_text.decimal(value)
        shown = whole if whole is not None and len(whole) <= 24 else f"≈{number_text.rounded(value, digits)}"
        codes = [_code_in(value, format) for format in pair]
        if any(codes):
            has = "both" if all(codes) else f"only {pair[codes[0] == ''].name}"
            rows.append([shown, has, *(code or "-" for code in codes)])
        else:
            stored = (question.result(format)[0].stored for format in pair)
            cells = ("refused" if each is None else f"→ {each.text(20)}" for each in stored)
            rows.append([_cut(question.name, 24), "neither", *cells])
        if value == number:
            here = rows[-1][0]
    name = _cut(question.name, 40) if question.code is None else text(number, question.format)
    return {"title": f"Numbers around {name}", "rows": rows, "here": here}


def _density(first: Format, second: Format) -> dict[str, Any]:
    """Runs of binades with the same numbers of positive values: a table, and heights, 0 for none and 1 + log2 else."""
    tops = [Fraction(first.max), Fraction(second.max)]
    runs: list[tuple[int, int, list[int]]] = []
    for exponent in range(min(lowest_exponent(first), lowest_exponent(second)), max(first.emax, second.emax) + 1):
        counts = [shared_in(exponent, (form,), top) for form, top in zip((first, second), tops, strict=True)]
        counts.append(shared_in(exponent, (first, second), min(tops)))
        if runs and runs[-1][2] == counts:
            runs[-1] = (runs[-1][0], exponent + 1, counts)
        else:
            runs.append((exponent, exponent + 1, counts))

    def shown(count: int) -> str:
        return f"2^{count.bit_length() - 1}" if count > 10**6 and not count & (count - 1) else f"{count:,}"

    def height(count: int) -> float:
        return round(1 + math.log2(count), 3) if count else 0

    return {
        "binades": [[f"2^{low}", f"2^{high}", *map(shown, counts)] for low, high, counts in runs],
        "heights": [[low, high, *map(height, counts[:2])] for low, high, counts in runs],
    }
