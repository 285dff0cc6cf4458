"""The shape of the lookup's JSON, as docs/lookup.md describes it, and a checker of it."""

import re
from typing import Any

# A rule is a text that matches, a type, None, a list of one rule, a dict of rules, or a tuple of alternatives.
DECIMAL = r"-?\d+(\.\d+)?(e-?\d+)?|-?inf|nan"
CODE = r"0x[0-9a-f]+"
NUMBER = {
    "decimal": (DECIMAL, None),
    "hex": (r"-?0x[01](\.[0-9a-f]+)?p[+-]\d+", None),
    "fraction": (r"-?\d+(/\d+)?", None),
}
INPUT = {"text": str, **NUMBER}
STORED = {
    "format": str,
    "code": CODE,
    "bits": {"sign": "[01]?", "exponent": "[01]*", "mantissa": "[01]*"},
    "class": "zero|subnormal|normal|infinity|nan",
    "value": {**NUMBER, "shortest": DECIMAL},
}
ENCODED = {
    **{key: (rule, None) for key, rule in STORED.items()},
    "format": str,
    "outcome": "exact|rounded|underflow|overflow|saturated|none",
    "error": ({**NUMBER, "ulps": DECIMAL, "relative": (DECIMAL, None)}, None),
}
FORMAT = {
    **dict.fromkeys(("name", "title"), str),
    "kind": "ieee|fn|fnuz|finite|scale|integer",
    **dict.fromkeys(("exponent", "mantissa", "bias", "bits", "precision", "emin", "emax", "integer_range"), int),
    **dict.fromkeys(("digits10", "max_digits10", "codes", "values", "nans"), int),
    **dict.fromkeys(("bytes", "decimal_digits"), float),
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
    "only_in": dict,
    **dict.fromkeys(("eps_ratio", "max_ratio", "min_ratio"), NUMBER),
    "words": [str],
}
WHY = {
    "input": INPUT,
    **ENCODED,
    "rule": "exact|nearer|tie|tie_up|overflow|special|sign|least",
    "explanation": [str],
    **dict.fromkeys(("below", "above"), (STORED, None)),
    **dict.fromkeys(("midpoint", "ulp"), (NUMBER, None)),
    "roundings": dict.fromkeys(("nearest", "nearest_away", "toward_zero", "up", "down", "odd"), (CODE, None)),
    "stochastic": [{"code": (CODE, None), "probability": r"\d+(/\d+)?"}],
    "rounded_twice": [{"via": [str], **ENCODED}],
    "elsewhere": (str, None),
}
BLOCK_FORMAT = {
    **dict.fromkeys(("name", "title", "element", "scale", "rule"), str),
    "size": int,
    "bits": float,
    "has_global_scale": bool,
    "aliases": [str],
}
WHY_BLOCK = {
    "format": BLOCK_FORMAT,
    "scale": STORED,
    "global_scale": NUMBER,
    "decides": int,
    "explanation": [str],
    "rms": (float, None),
    "elements": [{"input": INPUT, **ENCODED, "stored": NUMBER}],
}
ERRORS = {
    "format": str,
    **dict.fromkeys(("bits", "rms", "relative", "largest"), float),
    "zeros": int,
    "not_finite": int,
}
MODES = {"rounding": str, "overflow": "inf|saturate|nan"}
COMMANDS: dict[str, tuple[Any, Any]] = {
    "format": ({"formats": [str]}, (FORMAT, BLOCK_FORMAT)),
    "encode": (
        {"numbers": [str], "formats": [str], **MODES, "seed": (int, None)},
        {"input": INPUT, **ENCODED, "elsewhere": (str, None)},
    ),
    "decode": ({"codes": [str], "formats": [str], "width": (int, None)}, {"input": {"text": str}, **STORED}),
    "why": ({"number": str, "formats": [str], **MODES}, (WHY, WHY_BLOCK)),
    "compare": (
        {"formats": [str], "numbers": ([str], None), "file": (str, None)},
        ({"formats": [FORMAT], "pairs": [PAIR], "examples": [{"input": INPUT, **ENCODED}]}, ERRORS),
    ),
    "ladder": (
        {"out": str, "kind": "range|codes|all", "formats": [str], "codes": str},
        {"file": str, "kind": "range|codes", "formats": [str]},
    ),
}


def violations(value: Any, rule: Any, where: str = "$") -> list[str]:
    if isinstance(rule, tuple):
        tried = [violations(value, alternative, where) for alternative in rule]
        return [] if [] in tried else tried[0]
    if isinstance(rule, dict) and isinstance(value, dict):
        differing = [f"{where}: {key!r} is undocumented or lacking" for key in set(rule) ^ set(value)]
        shared = set(rule) & set(value)
        return differing + [line for key in shared for line in violations(value[key], rule[key], f"{where}.{key}")]
    if isinstance(rule, list) and isinstance(value, list):
        return [line for item in value for line in violations(item, rule[0], f"{where}[]")]
    matches = isinstance(rule, str) and isinstance(value, str) and re.fullmatch(rule, value)
    typed = isinstance(rule, type) and (type(value) is rule or (rule is float and type(value) is int))
    return [] if matches or typed or value is rule is None else [f"{where}: {value!r} is not {rule}"]


def wrong_with(answer: Any) -> list[str]:
    """The places where the output of a command is not as documented."""
    about, result = COMMANDS[answer["command"]]
    return violations(answer, {"command": str, "input": about, "results": [result]})
