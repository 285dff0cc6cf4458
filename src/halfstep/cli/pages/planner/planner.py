"""The planner as one page, which needs no server and no network.

Models, cards, layouts, strategies and options are written into the page from Python. plan.mjs has the rules of
`numerics.planning`, command.mjs those of ``halfstep plan``, numbers.mjs exact arithmetic.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from decimal import Decimal
from fractions import Fraction
from typing import Any

from halfstep._version import __version__
from halfstep.cli import numbers
from halfstep.cli import plan as command
from halfstep.cli.pages.html import html, literal, text
from halfstep.cli.plan_picture import MEMORY_KINDS
from halfstep.numerics.planning import (
    CARDS,
    CHECKPOINTING,
    LAYOUTS,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    Layout,
    Transformer,
    layouts,
    models,
    plans,
    sharding,
)
from halfstep.numerics.planning.layouts import StoredFormat

# What the page shows first without settings.
EXAMPLE = {
    **{"model": "llama-3-8b", "gpus": "8", "card": "h100", "strategy": "fsdp"},
    **{"batch": "1", "seq": "4096", "flash": "", "checkpointing": "full"},
}
# Options of the command that are none of the plan.
_NOT_OF_THE_PLAN = ("help", "json", "out", "page", "open")
# Integers become BigInts, except in these fields, which are floats.
_EXACT = """
const exactly = (value, key) => {
  if (typeof value === "number") return ["flops", "bandwidth"].includes(key) ? value : BigInt(value);
  if (value === null || typeof value !== "object") return value;
  if (Array.isArray(value)) return value.map((one) => exactly(one, key));
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, exactly(one, name)]));
};
"""


def facts() -> dict[str, Any]:
    """Everything that the rules take from tables of Python."""
    stored = {**layouts.STORED_FORMATS, **{form.name: form for row in LAYOUTS for form in _formats(row).values()}}
    return {
        "halfstep": __version__,
        "options": [_option(action) for action in _options()],
        "shape": command.SHAPE,
        "fits": command.FITS,
        "comparisons": command.COMPARISONS,
        "models": {name: asdict(model) for name, model in MODELS.items()},
        "model_defaults": {field.name: _default(field.default) for field in fields(Transformer)},
        "norms": models.NORMS,
        "cards": [asdict(card) for card in CARDS.values()],
        "formats": [
            {
                **{name: getattr(form, name) for name in ("name", "width", "group", "scale")},
                "without_rows": form.without_rows and form.without_rows.name,
            }
            for form in stored.values()
        ],
        "layouts": [_row(row) for row in LAYOUTS],
        "optimizers": OPTIMIZERS,
        "precisions": PRECISIONS,
        "gradients": layouts.GRADIENTS,
        "second_moments": layouts.SECOND_MOMENTS,
        "remainders": [form.name for form in layouts.REMAINDERS],
        "te_scales": layouts.TE_SCALES,
        "strategies": [asdict(strategy) for strategy in STRATEGIES.values()],
        "whole_rows": sharding.WHOLE_ROWS,
        "least_coded": sharding.LEAST_CODED,
        "checkpointing": CHECKPOINTING,
        "mirrored": sharding.MIRRORED,
        "with_adapters": plans.WITH_ADAPTERS,
        "stepping_in_backward": plans.STEPPING_IN_BACKWARD,
        "usual_bucket": plans.USUAL_BUCKET,
        "ddp_bucket": plans.DDP_BUCKET,
        "deepspeed_bucket": plans.DEEPSPEED_BUCKET,
        "temporaries": plans.TEMPORARIES,
        "other_temporaries": plans.OTHER_TEMPORARIES,
        "memory_kinds": [{"kind": kind, "colour": colour, "names": names} for kind, colour, names in MEMORY_KINDS],
    }


def _default(value: Any) -> Any:
    return None if value is MISSING else value


def _formats(row: Layout) -> dict[str, StoredFormat]:
    named = {
        name: getattr(row, name) for name in ("weights", "gradients", "master", "exp_avg", "exp_avg_sq", "compute")
    }
    return {name: form for name, form in named.items() if form is not None}


def _row(row: Layout) -> dict[str, Any]:
    """A layout with the names of its formats."""
    others = {field.name: getattr(row, field.name) for field in fields(Layout)}
    return {**others, **{name: form.name for name, form in _formats(row).items()}}


# ------------------------------------------------------------------------------------------------------------ options


def _options() -> list[argparse.Action]:
    return [action for action in command.parser()._actions if action.dest not in _NOT_OF_THE_PLAN]


def _kind(action: argparse.Action) -> str:
    """The kind of value that an option takes, which command.mjs reads."""
    if action.nargs == 0:
        return "flag"
    named = {numbers.counts: "counts", numbers.above_zero: "above_zero", numbers.share_or_bytes: "share_or_bytes"}
    if action.type is None or action.type in named:
        return "text" if action.type is None else named[action.type]
    return "count" if _accepts(action, "1k") else "index"


def _accepts(action: argparse.Action, word: str) -> bool:
    return not _refusal(action, word)


def _refusal(action: argparse.Action, word: str) -> str:
    """Why an option refuses a word; empty if it does not."""
    try:
        assert callable(action.type)
        action.type(word)
    except argparse.ArgumentTypeError as error:
        return str(error)
    return ""


def _option(action: argparse.Action) -> dict[str, Any]:
    kind = _kind(action)
    expected = "" if kind in ("flag", "text") else _refusal(action, "?").removesuffix("'?'")
    return {
        "dest": action.dest,
        "names": action.option_strings,
        "kind": kind,
        "const": None if kind == "flag" or action.const is None else _written(action.const),
        "default": None if kind == "flag" or action.default is None else _written(action.default),
        "expected": expected,
        "trims": kind in ("count", "index", "above_zero"),
        "help": (action.help or "").replace("%%", "%"),
    }


def _written(value: Any) -> str:
    """The value of an option as its text."""
    if isinstance(value, Fraction):  # a share of a card, whose decimals end
        return f"{Decimal(100 * value.numerator) / Decimal(value.denominator):f}%"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def settings(given: argparse.Namespace) -> dict[str, str]:
    """The options that are not the defaults, as texts by the names that the page has in its address."""
    found = {}
    for action in _options():
        value = getattr(given, action.dest)
        if value != action.default:
            size = action.type is numbers.share_or_bytes and not isinstance(value, Fraction)
            found[action.option_strings[0][2:]] = (
                "" if value is True else f"{Decimal(value).scaleb(-6):f}MB" if size else _written(value)
            )
    return found


# --------------------------------------------------------------------------------------------------------------- page


def script_of_plans() -> str:
    """numbers.mjs, plan.mjs and command.mjs, and ``facts``, from which they take their tables."""
    given = f"export const facts = exactly({literal(facts())}, null);\n"
    rules = "".join(text(__package__, name) for name in ("plan.mjs", "command.mjs"))
    return text(__package__, "numbers.mjs") + _EXACT + given + rules


def planner_page(initial: Mapping[str, str]) -> str:
    """The HTML of the planner with the settings `initial`, as `settings` gives them, unless the address has others."""
    begin = f"const initial = {literal(dict(initial or EXAMPLE))};\n"
    return html(__package__, script_of_plans() + begin + text(__package__, "planner.mjs"))
