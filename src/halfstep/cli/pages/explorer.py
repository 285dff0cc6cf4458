"""The answers of the explorer of formats: a number in one format, in all of them, and in two compared, as texts.

The keys of a state are those of the page's address: ``x``, the number, or ``c``, a code of the format ``f``; ``g``, the
format to compare with; ``b`` and ``k``, the numbers and the format of a block; ``r``, the rounding mode; ``o``, ``n``
and ``s``, what overflow, NaN and subnormals become.
"""

from __future__ import annotations

import itertools
import math
import re
from fractions import Fraction
from typing import Any, NamedTuple

from halfstep.cli.command_line import typed_command
from halfstep.cli.formats import block, values
from halfstep.cli.formats.compare import count_text, figures, lowest_exponent, pair_words, shared_in
from halfstep.cli.formats.values import Encoded, Stored
from halfstep.kernels.formats import BLOCKS, SCALE_RULES
from halfstep.numerics.formats import exact
from halfstep.numerics.formats.exact import ENCODE_ROUNDINGS, NANS, OVERFLOWS, Number
from halfstep.numerics.formats.table import Format, formats

EXAMPLE = {"x": "0.1", "f": "bf16", "g": "fp16", "r": "nearest", "o": "inf", "n": "canonical", "s": "1"}
EXAMPLE |= {"b": "0.1 -100 500 3", "k": "mxfp8_e4m3"}
_OF_BLOCKS = [name for row in BLOCKS for name in (row.name, *(f"{row.name}_{rule}" for rule in SCALE_RULES[1:]))]
CHOICES = {
    "r": [[mode, mode] for mode in ENCODE_ROUNDINGS[:-1]],
    "o": [[mode, mode] for mode in OVERFLOWS],
    "n": [[mode, mode] for mode in NANS],
    "s": [["1", "kept"], ["0", "flushed to zero"]],
    "k": [[name, name] for name in _OF_BLOCKS if name in formats],
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
    options: dict[str, Any]  # of `encode`

    def result(self, format: Format, **changes: Any) -> Encoded:
        """The number in a format, with changed options. A code that was chosen stays."""
        code = self.code
        if code is None or format.name != self.format.name:
            try:
                code = exact.encode_exact(self.number, format, **{**self.options, **changes})
            except ValueError as error:
                return Encoded(self.number, format, None, str(error))
        return Encoded(self.number, format, Stored(code, format))


def explorer(state: dict[str, str], move: dict[str, Any]) -> dict[str, Any]:
    """The answer to a state, after a move: ``flip``, a bit (``to`` 0 or 1); ``field``, name and text; ``step``, ±1."""
    state = {**EXAMPLE, **{key: text for key, text in state.items() if key in (*EXAMPLE, "c")}}
    for key, choices in CHOICES.items():
        if state[key] not in (value for value, _ in choices):
            state[key] = EXAMPLE[key]
    state.pop("x" if state.get("c") else "c", None)
    answer: dict[str, Any] = {"state": state, "fields": {"c": "", **state}, "error": "", "chosen": None, "all": None}
    question = format = None
    try:
        format = formats.element(state["f"].strip())
        question = _question(state, format)
        result = question.result(format)
        answer["error"] = result.refusal
        if result.stored is not None and {"flip", "field", "step"} & set(move):
            try:
                return explorer({**state, "c": _moved(result.stored, move)}, {})
            except ValueError as error:
                answer["error"] = str(error)
        answer["fields"]["x"] = state.get("x", values.all_digits(question.number))
        if result.stored is not None:
            answer["fields"]["c"] = result.stored.hex
            answer["chosen"] = _chosen(question, result, result.stored)
        listed = [*formats.values()] if format.name in formats else [format, *formats.values()]
        rows = [_row(row.name, question.result(row)) for row in listed]
        answer["all"] = {"rows": rows, "here": format.name, "range": _range(question.number, format, listed)}
    except ValueError as error:
        answer["error"] = str(error)
    second = [("format", state["g"])] if state["g"].strip() else []
    if format and second:
        answer["pair"] = _pair(question, format, state["g"])
    answer["block"] = _block(state)
    options = [("number", answer["fields"].get("x", "")), ("format", state["f"]), *second]
    options += [("rounding", state["r"]), ("overflow", state["o"])]
    return {**answer, "command": typed_command("halfstep explore", options)}


def _question(state: dict[str, str], format: Format) -> _Question:
    options = {"rounding": state["r"], "overflow": state["o"], "nan": state["n"], "subnormals": state["s"] == "1"}
    if not (typed := state.get("c")):
        return _Question(exact.parse_number(state["x"]), format, None, state["x"].strip(), options)
    code = _integer(typed, "a code")
    return _Question(exact.decode_exact(code, format), format, code, values.code_text(code, format), options)


def _integer(typed: str, expected: str) -> int:
    if not (match := _INTEGER.fullmatch(typed)):
        raise ValueError(f"Expected {expected} such as 0x3dcd, 0b101 or 61, but got {typed!r}")
    digits = match[1].replace("_", "").lower()
    return int(digits, 0 if digits[:2] in ("0x", "0b") else 10)


def _moved(stored: Stored, move: dict[str, Any]) -> str:
    """The code after a move. Among the codes of NaN, which have no order, a step leads to the next code."""
    format, step, code, fields = stored.format, 1 if move.get("step") == 1 else -1, stored.code, stored.fields
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
            code = exact.encode_exact(exact.next_exact(stored.value, format, up=step > 0), format)
    return values.code_text(code, format)


def _block(state: dict[str, str]) -> dict[str, Any]:
    """Numbers as a block: what decides its scale, and what becomes of each."""
    names, form = state["b"].split(), formats[state["k"]]
    try:
        if not 0 < len(names) <= form.size:
            raise ValueError(f"Expected 1 to {form.size} numbers for a block of {form.name}, but got {len(names)}")
        coded = block.coded([exact.parse_number(name) for name in names], form, state["r"], state["o"])
    except ValueError as error:
        return {"error": str(error)}
    elements = [block.ELEMENT_COLUMNS, block.element_rows([_cut(name, 24) for name in names], coded), coded.decides]
    rules = [block.RULE_COLUMNS, block.rule_rows(coded, state["r"], state["o"]), SCALE_RULES.index(form.rule)]
    title = f"{form.title}: {form.size} in a block, {form.scale.name} for a scale"
    return {"title": title, "words": block.reasons(coded), "elements": elements, "rules": rules}


# -------------------------------------------------------------------------------------------------------- one format


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _row(name: str, result: Encoded) -> list[str]:
    """The cells of a table: name, stored value, code, error in ulps, outcome."""
    if result.stored is None:
        return [name, result.refusal, "", "", "no NaN" if result.number != result.number else "refused"]
    return [name, result.stored.text(20), result.stored.hex, result.ulps_text, result.outcome_text]


def _chosen(question: _Question, result: Encoded, stored: Stored) -> dict[str, Any]:
    error, value = f", {result.ulps_text} ulp" if result.error else "", values.all_digits(stored.value)
    form, modes = result.format, {"rows": _modes(question, result.format), "here": question.options["rounding"]}
    integer = form.kind == "integer"
    return {
        "value": [values.fitting(stored.value, _LONGEST, 24), value if len(value) > _LONGEST else ""],
        "title": f"{_cut(question.name, 40)} in {form.name} is {stored.text(24)}: {result.outcome_text}{error}",
        "bits": [[name, bits, "" if integer else str(int(bits, 2))] for name, bits in stored.fields.items()],
        "line": _line(question, result),
        "why": _why(question, result),
        "facts": _facts(result, stored),
        "modes": modes,
    }


def _why(question: _Question, result: Encoded) -> list[str]:
    if question.code is not None and not values.finite(question.number):
        return [f"The code is that of {values.special(float(question.number))}."]
    kept, rounding = question.result(result.format, subnormals=True), question.options["rounding"]
    sentences = values.reasons(kept, rounding)
    if result.stored is not None and kept.stored != result.stored:
        sentences.append(f"Subnormal results are flushed to zero: {result.stored.hex} is stored.")
    elif rounding == "nearest":
        doubles = values.double_roundings(question.number, result.format)
        sentences += [values.double_rounding_words(via, twice, result) for via, twice in doubles]
    return sentences


def _line(question: _Question, result: Encoded) -> dict[str, Any] | None:
    """Where the number lies between its neighbours; None where nothing is rounded or both of them overflow."""
    number, format = result.number, result.format
    if result.rule in ("special", "exact", "sign", "least") or values.overflows(result.ends[number < 0], format):
        return None
    ends, (low, high) = [], result.ends
    for value in (low, high):
        code = values.code_text(exact.code_of(value if value or number > 0 else -0.0, format), format)
        ends.append((values.among(value, format), f"not in {format.name}" if values.overflows(value, format) else code))
    stored = [result.stored is not None and result.stored.value == value for value in (low, high)]
    percent = float(100 * (Fraction(number) - low) / (high - low))
    where, halfway = f"{percent:.2f}".rstrip("0").rstrip("."), values.among((low + high) / 2, format)
    label = f"{_cut(question.name, 24)} lies {where} % of the way; halfway is {halfway}"
    return {"ends": ends, "at": percent, "taken": stored, "label": label}


def _code_in(value: Number, format: Format) -> str:
    """The code of a number of the format; empty if it is none."""
    code = exact.encode_exact(value, format)
    return values.code_text(code, format) if exact.decode_exact(code, format) == value else ""


def _facts(result: Encoded, stored: Stored) -> list[list[str]]:
    value, format = stored.value, result.format
    code = f"{stored.hex} = {' '.join(stored.fields.values())}"
    rows = [("format", f"{format.name}: {format.title}"), ("code", code)]
    if isinstance(value, Fraction) and value:
        under = value.denominator
        fraction = f"{value.numerator}/2^{under.bit_length() - 1}" if under > 2**30 else str(value)
        rows += [("shortest", stored.shortest), ("hexadecimal", values.hex_float(value) or ""), ("fraction", fraction)]
    if result.error is not None:
        ulps = f" = {result.ulps_text} ulp" if result.error else ""
        rows.append(("error", _cut(values.all_digits(result.error), 60) + ulps))
    if values.finite(value):
        low, high = Encoded(value, format, stored).ends
        rows.append(("ulp", values.power(high - low)))
    for name, up in (("previous", False), ("next", True)):
        near = exact.next_exact(value, format, up=up)
        code = values.code_text(exact.encode_exact(near, format), format)
        rows.append((name, "none" if stored.category == "nan" else f"{values.among(near, format)} ({code})"))
    return [list(row) for row in [*rows, ("class", stored.category)]]


def _modes(question: _Question, format: Format) -> list[list[str]]:
    """A row for each rounding mode, and for each possible result of stochastic rounding."""

    def encode(number: Number, mode: str) -> Encoded:
        return question._replace(number=number).result(format, rounding=mode)

    rows = []
    for end, mode, chance in values.roundings(question.number, format, encode):
        rows.append(_row(mode, end))
        if chance is not None:
            rows[-1][-1] = f"with {values.rounded(100 * chance, 6)} %"
    return rows


# -------------------------------------------------------------------------------------------------------- all formats


def _range(number: Number, format: Format, listed: list[Format]) -> dict[str, Any]:
    """Where the number lies in the range of each format, in percent of the axis of fp32 or a wider one."""
    magnitude = abs(Fraction(number)) if values.finite(number) else Fraction(0)
    at = math.log2(magnitude.numerator) - math.log2(magnitude.denominator) if magnitude else None
    low = min(lowest_exponent(formats["fp32"]), lowest_exponent(format)) - 4
    high = max(128, format.emax) + 5

    def percent(exponent: float) -> float:
        return round(100 * min(max((exponent - low) / (high - low), 0), 1), 1)

    rows: list[list[Any]] = []
    for row in listed:
        limits = (row.min_subnormal, row.min_normal, row.max)
        ends = " to ".join(map(values.short, limits[::2]))
        rows.append([row.name, *(percent(math.log2(limit)) for limit in limits), ends])
    words = "It is not on this axis." if at is None else f"The magnitude is 2^{at:.2f}."
    step = next(2**n for n in range(12) if (high - low) / 2**n <= 7)
    ticks = [[percent(e), f"2^{e}"] for e in range(-(-low // step) * step, high + 1, step)]
    return {"at": at if at is None else percent(at), "rows": rows, "ticks": ticks, "words": words}


# -------------------------------------------------------------------------------------------------------- two formats


def _pair(question: _Question | None, first: Format, name: str) -> dict[str, Any]:
    try:
        second = formats.element(name.strip())
    except ValueError as error:
        return {"title": "Two formats compared", "error": str(error)}
    title = f"{first.name} and {second.name}"
    if first.name == second.name:
        return {"title": title, "error": f"Both are {first.name}: choose another format under “Compare with”."}
    pairs = zip(figures(first), figures(second), strict=True)
    return {
        "title": title,
        "names": [first.name, second.name],
        "words": pair_words(first, second),
        "figures": [[name, left, right] for (name, left), (_, right) in pairs],
        "around": _around(question, (first, second)) if question and values.finite(question.number) else None,
        **_density(first, second),
    }


def _around(question: _Question, pair: tuple[Format, Format]) -> dict[str, Any]:
    """The numbers of both formats around the number, from the least, with their codes; and the number itself."""
    number = Fraction(question.number)
    shown = {number}
    for format, up in itertools.product(pair, (False, True)):
        near: Number = number
        for _ in range(_NEAR - (not up and bool(_code_in(number, format)))):
            near = exact.next_exact(near, format, up=up)
            if not values.finite(near):
                break
            shown.add(Fraction(near))
    digits = max(format.max_digits10 for format in pair) + 2
    rows = []
    for value in sorted(shown):
        codes = [_code_in(value, format) for format in pair]
        if any(codes):
            has = "both" if all(codes) else f"only {pair[codes[0] == ''].name}"
            rows.append([values.fitting(value, 24, digits), has, *(code or "-" for code in codes)])
        else:
            results = (question.result(format).stored for format in pair)
            cells = ("refused" if stored is None else f"→ {stored.text(20)}" for stored in results)
            rows.append([_cut(question.name, 24), "neither", *cells])
        if value == number:
            label = rows[-1][0]
    name = _cut(question.name, 40) if question.code is None else values.among(number, question.format)
    return {"title": f"Numbers around {name}", "rows": rows, "here": label}


def _density(first: Format, second: Format) -> dict[str, Any]:
    """Runs of binades with the same numbers of positive values: a table, and heights, 0 for none and 1 + log2 else."""
    exponents = range(min(lowest_exponent(first), lowest_exponent(second)), max(first.emax, second.emax) + 1)

    def counts_in(exponent: int) -> list[int]:
        return [shared_in(exponent, *chosen) for chosen in ((first,), (second,), (first, second))]

    def height(count: int) -> float:
        return round(1 + math.log2(count), 3) if count else 0

    runs = [(counts, [*group]) for counts, group in itertools.groupby(exponents, counts_in)]
    return {
        "binades": [
            [f"2^{run[0]}", f"2^{run[-1] + 1}", *(count_text(count, f"{count:,}") for count in counts)]
            for counts, run in runs
        ],
        "heights": [[run[0], run[-1] + 1, *map(height, counts[:2])] for counts, run in runs],
    }
