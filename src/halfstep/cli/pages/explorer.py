"""The answers of the explorer of formats: a number in one format, in all of them, and in two compared, as texts.

The keys of a state are those of the page's address: ``x``, the number, or ``c``, a code of the format ``f``; ``g``, the
format to compare with; ``r``, the rounding mode; ``o``, ``n`` and ``s``, what overflow, NaN and subnormals become.
"""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from halfstep.cli.formats.compare import count_text, figures, lowest_exponent, pair_words, shared_in
from halfstep.cli.formats.values import (
    Encoded,
    Stored,
    all_digits,
    among,
    chances,
    double_rounding_words,
    double_roundings,
    finite,
    fitting,
    hex_float,
    line_between,
    power,
    reasons,
    rounded,
    short,
    special,
)
from halfstep.cli.pages.shell import command_line
from halfstep.numerics.formats.exact import (
    ENCODE_ROUNDINGS,
    NANS,
    OVERFLOWS,
    Number,
    decode_exact,
    encode_exact,
    next_down_exact,
    next_up_exact,
    parse_number,
    ulp_exact,
)
from halfstep.numerics.formats.table import Format, formats

EXAMPLE = {"x": "0.1", "f": "bf16", "g": "fp16", "r": "nearest", "o": "inf", "n": "canonical", "s": "1"}
CHOICES = {
    "r": [[mode, mode] for mode in ENCODE_ROUNDINGS[:-1]],
    "o": [[mode, mode] for mode in OVERFLOWS],
    "n": [[mode, mode] for mode in NANS],
    "s": [["1", "kept"], ["0", "flushed to zero"]],
}
_INTEGER = re.compile(r"\s*(0x[0-9a-f_]+|0b[01_]+|[0-9][0-9_]*)\s*", re.ASCII | re.IGNORECASE)
_NEAR = 4  # numbers of each format that are shown below and above
_LONGEST = 40  # characters of a headline


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
        options: dict[str, Any] = {"overflow": self.overflow, "nan": self.nan}
        try:
            code = encode_exact(number, format, rounding, subnormals=subnormals or self.subnormals, **options)
        except ValueError as error:
            return Encoded(self.number, format, None), str(error)
        return Encoded(self.number, format, Stored(code, format)), ""


def explorer(state: dict[str, str], move: dict[str, Any]) -> dict[str, Any]:
    """The answer to a state, after a move: ``flip``, a bit (``to`` 0 or 1); ``field``, name and text; ``step``, ±1."""
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
        here, answer["error"] = question.result(format)
        if here.stored is not None and {"flip", "field", "step"} & set(move):
            try:
                return explorer({**state, "c": _moved(here.stored, move)}, {})
            except ValueError as error:
                answer["error"] = str(error)
        answer["fields"]["x"] = state.get("x", all_digits(question.number))
        if here.stored is not None:
            answer["fields"]["c"] = here.stored.hex
            answer["chosen"] = _chosen(question, here, here.stored)
        every = formats.values() if format.name in formats else [format, *formats.values()]
        answer["all"] = {"rows": [_row(each.name, *question.result(each)) for each in every], "here": format.name}
        answer["all"]["range"] = _range(question.number, format, list(every))
    except ValueError as error:
        answer["error"] = str(error)
    other = [("format", state["g"])] if state["g"].strip() else []
    if format is not None and other:
        answer["pair"] = _pair(question, format, state["g"])
    options = [("number", answer["fields"].get("x", "")), ("format", state["f"]), *other]
    return {
        **answer,
        "command": command_line("halfstep explore", [*options, ("rounding", state["r"]), ("overflow", state["o"])]),
    }


def _format(name: str) -> Format:
    try:
        return formats[name.strip()]
    except KeyError as error:
        raise ValueError(str(error)) from error


def _question(state: dict[str, str], format: Format) -> _Question:
    how = state["r"], state["o"], state["n"], state["s"] == "1"
    if not (typed := state.get("c")):
        return _Question(parse_number(state["x"]), format, None, state["x"].strip(), *how)
    code = _integer(typed, "a code")
    return _Question(decode_exact(code, format), format, code, Stored(code, format).hex, *how)


def _integer(typed: str, what: str) -> int:
    """An integer in hexadecimal, binary or decimal."""
    if not (match := _INTEGER.fullmatch(typed)):
        raise ValueError(f"Expected {what} such as 0x3dcd, 0b101 or 61, but got {typed!r}")
    digits = match[1].replace("_", "").lower()
    return int(digits, 0 if digits[:2] in ("0x", "0b") else 10)


def _moved(stored: Stored, move: dict[str, Any]) -> str:
    """The code after a move. Among the codes of NaN, which have no order, a step leads to the next code."""
    format, step, code = stored.format, 1 if move.get("step") == 1 else -1, stored.code
    fields = dict(stored.fields)
    match move:
        case {"field": [str(name), str(typed)]} if name in fields:
            value, width = _integer(typed or "0", f"a number for the {name}"), len(fields[name])
            if value >> width:
                raise ValueError(
                    f"Expected the {name} of {format.name} to be from 0 to {2**width - 1}, but got {typed}"
                )
            code = int("".join({**fields, name: f"{value:0{width}b}"}.values()), 2)
        case {"flip": int(bit)}:
            code ^= ((code >> bit % format.bits & 1) != move.get("to")) << bit % format.bits
        case _ if stored.category == "nan":
            code = (code + step) % format.codes
        case _:
            code = encode_exact((next_up_exact if step > 0 else next_down_exact)(stored.value, format), format)
    return Stored(code, format).hex


# -------------------------------------------------------------------------------------------------------- one format


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _outcome(result: Encoded) -> str:
    refused = result.stored is None and result.number == result.number
    return "refused" if refused else result.outcome_text


def _row(name: str, result: Encoded, refusal: str) -> list[str]:
    """The cells of a table: name, stored value, code, error in ulps, outcome."""
    if result.stored is None:
        return [name, refusal, "", "", _outcome(result)]
    return [name, result.stored.text(20), result.stored.hex, result.ulps_text, _outcome(result)]


def _chosen(question: _Question, here: Encoded, stored: Stored) -> dict[str, Any]:
    """The number in the chosen format."""
    away, value = f", {here.ulps_text} ulp" if here.error else "", all_digits(stored.value)
    return {
        "value": [fitting(stored.value, _LONGEST, 24), value if len(value) > _LONGEST else ""],
        "title": f"{_cut(question.name, 40)} in {here.format.name} is {stored.text(24)}: {_outcome(here)}{away}",
        "bits": [
            [name, digits, "" if here.format.kind == "integer" else str(int(digits, 2))]
            for name, digits in stored.fields.items()
        ],
        "line": _line(question, here),
        "why": _why(question, here),
        "facts": _facts(here, stored),
        "modes": {"rows": _modes(question, here.format), "here": question.rounding},
    }


def _why(question: _Question, here: Encoded) -> list[str]:
    if question.code is not None and not finite(question.number):
        return [f"The code is that of {special(float(question.number))}."]
    kept, _ = question.result(here.format, subnormals=True)
    sentences = reasons(kept, question.rounding)
    if here.stored is not None and kept.stored != here.stored:
        sentences.append(f"Subnormal results are flushed to zero: {here.stored.hex} is stored.")
    elif question.rounding == "nearest":
        sentences += [double_rounding_words(twice, here) for twice in double_roundings(question.number, here.format)]
    return sentences


def _line(question: _Question, here: Encoded) -> dict[str, Any] | None:
    """Where the number lies between its neighbours; None where nothing is rounded or both of them overflow."""
    if here.rule == "least" or not (line := line_between(here)):
        return None
    ends, middle, position, stored = line
    percent = float(100 * position)
    where = f"{percent:.2f}".rstrip("0").rstrip(".")
    return {
        "ends": ends,
        "at": percent,
        "taken": [stored == 0, stored == 1],
        "label": f"{_cut(question.name, 24)} lies {where} % of the way; halfway is {middle}",
    }


def _code_in(value: Number, format: Format) -> str:
    """The code of a number of the format; empty if it is none."""
    code = encode_exact(value, format)
    return Stored(code, format).hex if decode_exact(code, format) == value else ""


def _formula(stored: Stored) -> str:
    """A code's value, by its fields."""
    format, field = stored.format, {name: int(digits, 2) for name, digits in stored.fields.items()}
    if not finite(stored.value):
        return "the code of a NaN" if stored.category == "nan" else "the largest exponent, and mantissa 0"
    if format.kind == "integer":
        return "two's complement"
    if format.kind == "scale":
        return f"2^({stored.code} \u2212 {format.bias})"
    normal = int(field["exponent"] > 0)
    fraction = f"({normal} + {field['mantissa']}/2^{format.mantissa})" if format.mantissa else str(normal)
    return f"(\u22121)^{field['sign']} · 2^({field['exponent'] or 1} \u2212 {format.bias}) · {fraction}"


def _facts(here: Encoded, stored: Stored) -> list[list[str]]:
    value, format = stored.value, here.format
    rows = [("format", f"{format.name}: {format.title}"), ("code", f"{stored.hex} = {stored.bits}")]
    rows += [("formula", _formula(stored))]
    if isinstance(value, Fraction) and value:
        top, under = value.numerator, value.denominator
        rows += [("shortest", stored.shortest), ("hexadecimal", hex_float(value) or "")]
        zeros = (top & -top).bit_length() - 1
        integer = f"{top >> zeros} · 2^{zeros}" if zeros > 30 else str(value)
        rows += [("fraction", f"{top}/2^{under.bit_length() - 1}" if under > 2**30 else integer)]
    if here.error is not None:
        rows.append(("error", _cut(all_digits(here.error), 60) + (f" = {here.ulps_text} ulp" if here.error else "")))
    if finite(value):
        rows.append(("ulp", power(Fraction(ulp_exact(value, format)))))
    for name, following in (("previous", next_down_exact), ("next", next_up_exact)):
        near = following(value, format)
        code = Stored(encode_exact(near, format), format).hex
        rows.append((name, "none" if stored.category == "nan" else f"{among(near, format)} ({code})"))
    return [list(row) for row in [*rows, ("class", stored.category)]]


def _modes(question: _Question, format: Format) -> list[list[str]]:
    """A row for each rounding mode, and for each possible result of stochastic rounding."""
    rows = [_row(mode, *question.result(format, mode)) for mode, _ in CHOICES["r"]]
    ends = [
        (share, question.encoded(end.number, format, "nearest"))
        for share, end in chances(question.number, format, "inf")
    ]
    if question.code is not None or len({end.stored for _, (end, _) in ends}) == 1:
        ends = [(Fraction(1), question.result(format, "nearest"))]
    return rows + [[*_row("stochastic", *end)[:4], f"with {rounded(100 * share, 6)} %"] for share, end in ends]


# -------------------------------------------------------------------------------------------------------- all formats


def _range(number: Number, format: Format, every: list[Format]) -> dict[str, Any]:
    """Where the number lies in the range of each format, in percent of the axis of fp32 or a wider one."""
    magnitude = abs(Fraction(number)) if finite(number) else Fraction(0)
    at = math.log2(magnitude.numerator) - math.log2(magnitude.denominator) if magnitude else None
    low = min(lowest_exponent(each) for each in (formats["fp32"], format)) - 4
    high = max(128, format.emax) + 5

    def percent(exponent: float) -> float:
        return round(100 * min(max((exponent - low) / (high - low), 0), 1), 1)

    rows: list[list[Any]] = []
    where: dict[str, list[str]] = {"subnormal in": [], "below the least of": [], "beyond the largest of": []}
    for each in every:
        limits = (each.min_subnormal, each.min_normal, each.max)
        rows.append([each.name, *(percent(math.log2(limit)) for limit in limits), " to ".join(map(short, limits[::2]))])
        beyond = [limits[0] <= magnitude < limits[1], magnitude < limits[0], magnitude > limits[2]]
        for names in itertools.compress(where.values(), beyond):
            names.append(each.name)
    words = [f"{text} {', '.join(names)}" for text, names in where.items() if names]
    words = ["It has no place on this axis"] if at is None else [f"The magnitude is 2^{at:.2f}", *words]
    step = next(2**n for n in range(12) if (high - low) / 2**n <= 7)
    ticks = [[percent(e), f"2^{e}"] for e in range(-(-low // step) * step, high + 1, step)]
    return {"at": at if at is None else percent(at), "rows": rows, "ticks": ticks, "words": "; ".join(words) + "."}


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
    number = Fraction(question.number)
    values = {number}
    for format in pair:
        exact = bool(_code_in(number, format))
        for following, count in ((next_down_exact, _NEAR - exact), (next_up_exact, _NEAR)):
            near: Number = number
            for _ in range(count):
                near = following(near, format)
                if not finite(near):
                    break
                values.add(Fraction(near))
    digits = max(format.max_digits10 for format in pair) + 2
    rows = []
    for value in sorted(values):
        codes = [_code_in(value, format) for format in pair]
        if any(codes):
            has = "both" if all(codes) else f"only {pair[codes[0] == ''].name}"
            rows.append([fitting(value, 24, digits), has, *(code or "-" for code in codes)])
        else:
            stored = (question.result(format)[0].stored for format in pair)
            cells = ("refused" if each is None else f"→ {each.text(20)}" for each in stored)
            rows.append([_cut(question.name, 24), "neither", *cells])
        if value == number:
            here = rows[-1][0]
    name = _cut(question.name, 40) if question.code is None else among(number, question.format)
    return {"title": f"Numbers around {name}", "rows": rows, "here": here}


def _density(first: Format, second: Format) -> dict[str, Any]:
    """Runs of binades with the same numbers of positive values: a table, and heights, 0 for none and 1 + log2 else."""
    runs: list[tuple[int, int, list[int]]] = []
    for exponent in range(min(lowest_exponent(first), lowest_exponent(second)), max(first.emax, second.emax) + 1):
        counts = [shared_in(exponent, *chosen) for chosen in ((first,), (second,), (first, second))]
        if runs and runs[-1][2] == counts:
            runs[-1] = (runs[-1][0], exponent + 1, counts)
        else:
            runs.append((exponent, exponent + 1, counts))

    def height(count: int) -> float:
        return round(1 + math.log2(count), 3) if count else 0

    binades = [
        [f"2^{low}", f"2^{high}", *(count_text(count, f"{count:,}") for count in counts)] for low, high, counts in runs
    ]
    return {"binades": binades, "heights": [[low, high, *map(height, counts[:2])] for low, high, counts in runs]}
