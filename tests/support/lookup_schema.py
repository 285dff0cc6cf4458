"""The shape of the lookup's JSON, as docs/lookup.md describes it, and a checker of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Rule = Any  # a type, a text to match, a list of one rule, a dict of rules, a tuple of alternatives, or a function

DECIMAL = r"-?\d+(\.\d+)?(e-?\d+)?|-?inf|nan"
HEX = r"-?0x[01](\.[0-9a-f]+)?p[+-]\d+"
CODE = r"0x[0-9a-f]+"


def fraction(text: Any) -> bool:
    """A fraction in lowest terms."""
    return isinstance(text, str) and str(Fraction(text)) == text


def number(more: dict[str, Rule] | None = None) -> dict[str, Rule]:
    return {"decimal": (DECIMAL, None), "hex": (HEX, None), "fraction": (fraction, None), **(more or {})}


NUMBER = number()
INPUT = {"text": str, **NUMBER}
CLASS = "zero|subnormal|normal|infinity|nan"
STORED = {
    "format": str,
    "code": CODE,
    "bits": {"sign": "[01]?", "exponent": "[01]*", "mantissa": "[01]*"},
    "class": CLASS,
    "value": number({"shortest": DECIMAL}),
}
ENCODED = {
    **{key: (rule, None) for key, rule in STORED.items() if key != "format"},
    "format": str,
    "outcome": "exact|rounded|underflow|overflow|saturated|none",
    "error": (number({"ulps": DECIMAL, "relative": (DECIMAL, None)}), None),
}
ELSEWHERE = [{"value": (NUMBER, None), "who": [str]}]
FORMAT = {
    **dict.fromkeys(("name", "title"), str),
    "kind": "ieee|fn|fnuz|finite|scale|integer",
    **dict.fromkeys(("exponent", "mantissa", "bias", "bits", "precision", "emin", "emax", "integer_range"), int),
    **dict.fromkeys(("digits10", "max_digits10", "codes", "values", "nans"), int),
    "bytes": float,
    "decimal_digits": float,
    **dict.fromkeys(("max", "lowest", "min_normal", "min_subnormal", "eps", "overflow"), NUMBER),
    **dict.fromkeys(("infinity_code", "nan_code", "largest_code"), (CODE, None)),
    **dict.fromkeys(("signed", "has_infinity", "has_nan", "has_negative_zero", "has_zero", "has_subnormals"), bool),
    **dict.fromkeys(("torch", "numpy", "ml_dtypes"), (str, None)),
    "aliases": [str],
    "hardware": [str],
}
PAIR = {
    "formats": [str],
    "shared_values": int,
    "only_in": {str: int},
    "eps_ratio": NUMBER,
    "max_ratio": NUMBER,
    "min_ratio": NUMBER,
    "words": [str],
}
WHY = {
    "input": INPUT,
    **ENCODED,
    "rule": "exact|nearer|tie|tie_up|overflow|special|sign|least",
    "explanation": [str],
    "below": (STORED, None),
    "above": (STORED, None),
    "midpoint": (NUMBER, None),
    "ulp": (NUMBER, None),
    "roundings": {"nearest|nearest_away|toward_zero|up|down|odd": (CODE, None)},
    "stochastic": [{"code": (CODE, None), "probability": fraction}],
    "rounded_twice": [{"via": [str], **ENCODED}],
    "elsewhere": ELSEWHERE,
}
MODES = {"rounding": str, "overflow": "inf|saturate|nan", "seed": (int, None)}
COMMANDS = {
    "format": ({"formats": [str]}, FORMAT),
    "encode": ({"numbers": [str], "formats": [str], **MODES}, {"input": INPUT, **ENCODED, "elsewhere": ELSEWHERE}),
    "decode": ({"codes": [str], "formats": [str], "width": (int, None)}, {"input": {"text": str}, **STORED}),
    "why": ({"number": str, "formats": [str], "overflow": "inf|saturate|nan"}, WHY),
    "compare": (
        {"formats": [str]},
        {"formats": [FORMAT], "pairs": [PAIR], "examples": [{"input": INPUT, **ENCODED}]},
    ),
    "ladder": (
        {"out": str, "kind": "range|density|codes|all", "formats": [str], "codes": str},
        {"file": str, "kind": "range|density|codes", "formats": [str]},
    ),
}


def violations(value: Any, rule: Rule, where: str = "$") -> list[str]:
    """The places where `value` violates `rule`."""
    if isinstance(rule, tuple):
        found = [violations(value, one, where) for one in rule]
        return [] if [] in found else found[0]
    if isinstance(rule, dict):
        return _of_object(value, rule, where)
    if isinstance(rule, list):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [line for place, one in enumerate(value) for line in violations(one, rule[0], f"{where}[{place}]")]
    if rule is None:
        fine = value is None
    elif isinstance(rule, str):
        fine = isinstance(value, str) and re.fullmatch(rule, value) is not None
    elif rule is float:
        fine = isinstance(value, int | float) and not isinstance(value, bool)
    elif isinstance(rule, type):
        fine = type(value) is rule
    else:
        check: Callable[[Any], bool] = rule
        fine = check(value)
    return [] if fine else [f"{where}: {value!r} is not {rule}"]


def _of_object(value: Any, rule: dict[Any, Rule], where: str) -> list[str]:
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no object"]
    if all(key is str or (isinstance(key, str) and "|" in key) for key in rule):  # keys of a kind
        ((key, inner),) = rule.items()
        wrong = [] if key is str else [f"{where}: no key {one!r}" for one in value if not re.fullmatch(key, one)]
        return wrong + [line for name, one in value.items() for line in violations(one, inner, f"{where}.{name}")]
    found = [f"{where}: lacks {key!r}" for key in rule if key not in value]
    found += [f"{where}: has {key!r}, which is not documented" for key in value if key not in rule]
    return found + [
        line for key in rule if key in value for line in violations(value[key], rule[key], f"{where}.{key}")
    ]


def wrong_with(answer: Any) -> list[str]:
    """The places where the output of a command is not as documented."""
    top = violations(answer, {"command": "|".join(COMMANDS), "input": object_, "results": list_})
    if top:
        return top
    about, result = COMMANDS[answer["command"]]
    return violations(answer["input"], about, "input") + violations(answer["results"], [result], "results")


def object_(value: Any) -> bool:
    return isinstance(value, dict)


def list_(value: Any) -> bool:
    return isinstance(value, list)
