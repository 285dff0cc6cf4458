"""The answers of the planner: the controls of its form, and a plan, its comparison and its commands as texts.

The keys of a state are the names of the options of ``halfstep plan``; an empty text is an option without a value.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

from halfstep.cli import numbers
from halfstep.cli import plan as command
from halfstep.cli.command_line import UsageError
from halfstep.cli.pages.shell import command_line
from halfstep.cli.plan_picture import MEMORY_KINDS, stack
from halfstep.cli.plan_tables import digits, sentences, size, typed, verdict
from halfstep.numerics.planning import (
    CARDS,
    CHECKPOINTING,
    LAYOUTS,
    MODELS,
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    Layout,
    Strategy,
    Transformer,
)
from halfstep.numerics.planning.layouts import GRADIENTS
from halfstep.numerics.planning.models import NORMS, QK_NORMS

EXAMPLE = {
    **{"model": "llama-3-8b", "gpus": "8", "card": "h100", "strategy": "fsdp"},
    **{"batch": "1", "seq": "4096", "flash": "", "checkpointing": "full"},
}
# Colours of the kinds of memory on a dark ground; on a light one they are those of `halfstep plan --out`.
DARK = ("#3d8fd1", "#e69f00", "#9fd8f7", "#2a9d8f", "#cc79a7", "#f0e442", "#ec7a45", "#a8a8a8", "#ffffff")
_COLOURS = {name: [light, dark] for (name, light, _), dark in zip(MEMORY_KINDS, DARK, strict=True)}
_MOST_ASSIGNED = 65536  # GPUs; ZeroRedundancyOptimizer assigns whole parameters to one GPU after another
_LEAST_ASSIGNED = 512  # the width of models, of which so many layers fit that assigning them takes seconds
_PHASES = {"always": "always", "backward": "forward, backward", "step": "step"}
_NOT_OF_THE_PLAN = ("help", "json", "out", "page", "open", "port")

# Title, fields, and fields that are folded; each field with its label.
FIELDS: tuple[tuple[str, dict[str, str], dict[str, str]], ...] = (
    (
        "Model",
        {"model": "Model", "params": "Parameters", "layers": "Layers", "hidden": "Width", "heads": "Heads",
         "vocab": "Vocabulary"},
        {"ffn": "Width of the MLP", "kv-heads": "Heads of keys", "head-dim": "Width of a head", "norm": "Norm",
         "qk-norm": "Norm of queries and keys", "block-norms": "Norms of a block", "experts": "Experts",
         "active-experts": "Active experts", "gated": "Gated MLP", "no-biases": "No biases",
         "qkv-biases": "Biases of queries, keys, values", "no-final-norm": "No final norm",
         "no-positions": "No learned positions", "tied": "Tied head", "no-dropout": "No dropout",
         "flash": "Flash attention"},
    ),
    (
        "GPUs",
        {"gpus": "GPUs", "card": "Card", "strategy": "Strategy", "shard": "GPUs of a group",
         "offload": "Offload to host"},
        {"tensor-parallel": "Tensor parallel", "sequence-parallel": "Sequence parallel", "compress": "Format sent",
         "bucket-view": "Gradients are bucket views", "reserve": "Reserve", "rank": "Rank planned"},
    ),
    (
        "Layout",
        {"optimizer": "Optimizer", "precision": "Precision", "moments": "Moments", "lora": "LoRA rank"},
        {"gradients": "Gradients", "accumulator": "Accumulator", "master": "Master", "amsgrad": "AMSGrad"},
    ),
    (
        "Step",
        {"batch": "Batch per GPU", "seq": "Sequence", "checkpointing": "Checkpointing"},
        {"accumulate": "Micro-batches", "loss-chunks": "Chunks of the loss",
         "step-in-backward": "Step in backward (bytes)", "step-ms": "Measured step (ms)"},
    ),
)  # fmt: skip
_SET_BY_LAYOUTS = ("moments", "master", "gradients", "step-in-backward")
_WIDE = ("model", "strategy", "optimizer")
_CUSTOM, _NUMBER = "own shape", "number of parameters"  # instead of a published model
_FLAGS = {
    **{"gated": ("gated", True), "no-biases": ("biases", False), "no-final-norm": ("final_norm", False)},
    **{"no-positions": ("positions", False), "tied": ("tied", True), "no-dropout": ("dropout", False)},
    **{"flash": ("flash", True), "qkv-biases": ("biases", "qkv")},
}
_SHAPE = ("layers", "hidden", "heads", "vocab", *FIELDS[0][2])

State = dict[str, str]


# ------------------------------------------------------------------------------------------------------------ options


@cache
def _parser() -> Any:
    return command.parser()


@cache
def _options() -> dict[str, argparse.Action]:
    """The options of a plan by all of their names."""
    actions = [action for action in _parser()._actions if action.dest not in _NOT_OF_THE_PLAN]
    return {name[2:]: action for action in actions for name in action.option_strings}


def _name(action: argparse.Action) -> str:
    return action.option_strings[0][2:]


def _written(value: Any) -> str:
    """The value of an option as its text."""
    if isinstance(value, Fraction):  # a share of a card, whose decimals end
        return f"{Decimal(100 * value.numerator) / Decimal(value.denominator):f}%"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _default(name: str) -> str:
    value = _options()[name].default
    return "" if value is None or value is False else _written(value)


def settings(options: argparse.Namespace) -> State:
    """The options of a command line that are not the defaults, as a state."""
    state = {}
    for action in dict.fromkeys(_options().values()):
        value = getattr(options, action.dest)
        if value != action.default:
            in_bytes = action.type is numbers.share_or_bytes and not isinstance(value, Fraction)
            text = "" if value is True else f"{Decimal(value).scaleb(-6):f}MB" if in_bytes else _written(value)
            state[_name(action)] = text
    return state


def _parsed(state: State) -> argparse.Namespace:
    """The options of a state.

    Raises:
        ValueError: an option or its value is refused.
    """
    for name in state:
        if name not in _options():
            raise ValueError(f"unknown option --{name}")
    words = [f"--{name}={text}" if text else f"--{name}" for name, text in state.items()]
    try:
        options: argparse.Namespace = _parser().parse(words)
    except UsageError as error:
        raise ValueError(str(error).partition("; see halfstep plan --help")[0]) from error
    return options


def _content(state: State, with_ways: bool = True) -> dict[str, Any]:
    """The JSON of ``halfstep plan`` for a state."""
    return command.planned(_parsed(state), with_ways)


def _chosen(state: State, name: str) -> str:
    return state.get(name) or _default(name)


def _integer(text: str, default: int) -> int:
    try:
        return int(numbers.count()(text))
    except argparse.ArgumentTypeError:
        return default


# ----------------------------------------------------------------------------------------------------------- the form


def form() -> list[dict[str, Any]]:
    """The fields of the form, which never change."""

    def listed(labels: dict[str, str]) -> list[dict[str, Any]]:
        actions = _options()
        return [
            {
                **{"name": name, "label": label, "help": (actions[name].help or "").replace("%%", "%")},
                **{"flag": actions[name].nargs == 0, "wide": name in _WIDE},
            }
            for name, label in labels.items()
        ]

    return [{"title": title, "fields": listed(first), "more": listed(more)} for title, first, more in FIELDS]


def _preset(state: State) -> Transformer | None:
    return MODELS.get(state.get("model", "").lower())


def _sort(state: State) -> str:
    """The name of the model, or what else describes it."""
    return state.get("model") or (_NUMBER if "params" in state else _CUSTOM)


def _row(state: State) -> Layout | None:
    pair = (_chosen(state, "optimizer"), _chosen(state, "precision"))
    return next((row for row in LAYOUTS if (row.optimizer, row.precision) == pair), None)


def _same(names: Any, default: str = "") -> list[list[str]]:
    return [*([["", default]] if default else []), *([name, name] for name in names)]


def _described(how: Strategy) -> str:
    return how.text if how.text.startswith(how.name) else f"{how.name}: {how.text}"


def _choices(state: State) -> dict[str, list[list[Any]]]:
    """The choices of each select: values and texts, or labels of groups and such lists."""
    row = _row(state)
    moments = list(row.moments_allowed) if row else []
    if not _chosen(state, "optimizer").startswith("halfstep"):
        moments += [f"{first},{second}" for first in moments for second in moments if second != first]
    precision = _chosen(state, "precision")
    rows = {row.optimizer: row for row in LAYOUTS if row.precision == precision}
    optimizers = [[name, f"{name}: {float(row.per_parameter()):g} B"] for name, row in rows.items()]
    return {
        "model": _same([*MODELS, _CUSTOM, _NUMBER]),
        "norm": _same(NORMS, "default"),
        "qk-norm": _same(QK_NORMS[1:], "none"),
        "card": [
            ["", "none"],
            *([card.name, f"{card.name}, {card.memory / 2**30:g} GiB"] for card in CARDS.values()),
            *([own, own] for own in [state.get("card", "")] if own and own.lower() not in CARDS),  # a size, "24GiB"
        ],
        "strategy": [["", "default"], *([how.name, _described(how)] for how in STRATEGIES.values())],
        "optimizer": [
            ["bytes per parameter", optimizers],
            [f"not in {precision}", _same(name for name in OPTIMIZERS if name not in rows)],
        ],
        "precision": _same(PRECISIONS),
        "moments": _same(moments, "default"),
        "master": _same(row.master_allowed if row else (), "default"),
        "gradients": _same(GRADIENTS, "default"),
        "accumulator": _same(GRADIENTS, "none"),
        "compress": _same(GRADIENTS, "as gradients"),
        "checkpointing": _same(CHECKPOINTING),
    }  # fmt: skip


def _controls(state: State) -> dict[str, dict[str, Any]]:
    """The value of each field, and what else of it depends on the state: choices, placeholder, hidden, fixed."""
    preset, sort, choices = _preset(state), _sort(state), _choices(state)
    hidden = {name: sort == _NUMBER for name in (*_SHAPE, "lora", "checkpointing")}
    hidden |= {name: sort != _CUSTOM for name in ("layers", "hidden", "heads", "vocab")}
    hidden |= {"params": sort != _NUMBER, "shard": _chosen(state, "strategy") != "hsdp"}
    hidden |= {name: len(choices[name]) == 1 for name in ("master", "moments")}
    controls: dict[str, dict[str, Any]] = {}
    for name in (name for _, first, more in FIELDS for name in (*first, *more)):
        action = _options()[name]
        control: dict[str, Any] = {"hidden": hidden.get(name, False) and name not in state}
        if action.nargs == 0:
            field, wanted = _FLAGS.get(name, ("", None))
            control["fixed"] = preset is not None and bool(field) and getattr(preset, field) is wanted
            control["value"] = name in state or control["fixed"]
        else:
            value = state.get(name, _default(name)) or ("" if action.const is None else _written(action.const))
            control["value"] = (sort.lower() if preset else sort) if name == "model" else value
            if name in choices:
                control["choices"] = choices[name]
            else:
                usual = getattr(preset, name.replace("-", "_"), None)
                control["placeholder"] = str(usual or ("1" if name == "batch" and sort != _NUMBER else ""))
        controls[name] = control
    return controls


def changed(state: State, name: str, value: str | None) -> State:
    """The state after a change in the form: `value` is None for an option that is left out."""
    if value is not None and _options()[name].nargs != 0 and value in ("", _default(name)):
        value = None
    if name == "compare" and value == "strategies":  # what the page shows without it
        value = None
    changes: dict[str, str | None] = {name: value}
    if name == "model":
        changes |= _of_model(state, value or "")
    if name == "strategy":
        ranks = _integer(_chosen(state, "gpus"), 2) // _integer(_chosen(state, "tensor-parallel"), 1)
        changes["shard"] = str(ranks if ranks % 2 else ranks // 2) if value == "hsdp" else None
    if name in ("optimizer", "precision"):
        changes |= {"moments": None, "master": None}
    if name == "precision":
        having = [row.optimizer for row in LAYOUTS if row.precision == (value or _default("precision"))]
        if having and _chosen(state, "optimizer") not in having:
            changes["optimizer"] = None if having[0] == _default("optimizer") else having[0]
    return {key: text for key, text in {**state, **changes}.items() if text is not None}


def _of_model(state: State, value: str) -> dict[str, str | None]:
    """The options of another model. A custom shape begins with that of the last model."""
    cleared: dict[str, str | None] = {"params": None, **dict.fromkeys(_SHAPE)}
    if value in MODELS:
        longest = MODELS[value].seq if MODELS[value].positions else None
        short = longest is None or _integer(state.get("seq", ""), 0) <= longest
        return {**cleared, "flash": state.get("flash"), "model": value, "seq": state.get("seq") if short else None}
    try:
        before = command._model(_parsed(state))
    except ValueError:
        before = _preset(state)
    before = before or next(iter(MODELS.values()))
    if value == _NUMBER:
        return {**cleared, "model": None, "checkpointing": None, "lora": None, "params": str(before.parameters)}
    names = ("layers", "hidden", "heads", "vocab", "ffn", "kv-heads", "head-dim", "experts", "active-experts")
    sizes = {name: getattr(before, name.replace("-", "_")) or None for name in names}
    usual = {"norm": Transformer.norm, "qk-norm": Transformer.qk_norm, "block-norms": Transformer.block_norms}
    others = {name: getattr(before, name.replace("-", "_")) for name in usual}
    flags = {name: "" for name, (field, wanted) in _FLAGS.items() if getattr(before, field) is wanted}
    return {
        **{**cleared, "model": None, **flags},
        **{name: None if value is None else str(value) for name, value in sizes.items()},
        **{name: None if value == usual[name] else str(value) for name, value in others.items()},
        "seq": state.get("seq", str(before.seq)),
    }


# ---------------------------------------------------------------------------------------------------------- the answer


def planner(state: State, move: dict[str, Any]) -> dict[str, Any]:
    """The answer to a state, after a move: ``set``, the name of an option and its value, None to leave it out;
    ``json``, whether the JSON of the command is wanted too."""
    options = _options()
    state = {_name(options[name]) if name in options else name: text for name, text in state.items()}
    if "set" in move:
        name, value = move["set"] if isinstance(move["set"], list) and len(move["set"]) == 2 else ("", "")
        if not isinstance(name, str) or name not in options or not isinstance(value, (str, type(None))):
            raise ValueError(f"Expected an option and its value, but got {move['set']!r}")
        state = changed(state, name, value)
    allowed = [(name, text) for name, text in state.items() if name in options]
    answer: dict[str, Any] = {
        **{"state": state, "controls": _controls(state), "compare": state.get("compare", "strategies")},
        **{"command": command_line("halfstep plan", allowed), "error": "", "plan": None},
    }
    try:
        single = _single(state)
        if single.get("strategy") == "zero1-torch" and not _assignable(single):
            raise ValueError(
                f"The page plans zero1-torch on up to {_MOST_ASSIGNED:,} GPUs; halfstep plan has no such limit."
            )
        answer["plan"] = _plan(single)
        if move.get("json"):
            answer["json"] = json.dumps(_content(state), indent=2, ensure_ascii=False)
    except ValueError as error:
        answer["error"] = str(error)
    try:
        answer["comparison"] = _comparison(state)
    except ValueError as error:
        answer["comparison"] = {"rows": [], "note": "" if str(error) == answer["error"] else str(error)}
    return answer


def _several(state: State, name: str) -> bool:
    return "," in state.get(name, "")


def _single(state: State) -> State:
    """The plan that is shown: of several numbers of GPUs or strategies, the first."""
    first = {name: text.split(",")[0] if name in ("gpus", "strategy") else text for name, text in state.items()}
    first.pop("compare", None)
    return first


def _assignable(state: State) -> bool:
    try:
        return max(numbers.counts(_chosen(state, "gpus"))) <= _MOST_ASSIGNED
    except argparse.ArgumentTypeError:  # refused later, with its message
        return True


def _size(value: int) -> str:
    return size(value) if value else "0"


def _each(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _scale(plans: list[dict[str, Any]]) -> int:
    """The bytes of a whole bar: the card, unless it is four times as large as every peak, or smaller than one."""
    peak = max(1, *(plan["totals"]["peak"] for plan in plans))
    memory = plans[0]["card"]["memory"] if plans[0]["card"] else 0
    return memory if peak < memory < 4 * peak else peak


def _bar(plan: dict[str, Any], whole: int) -> dict[str, Any]:
    """Colours and widths in percent, and the marks of the card's memory and of what remains after the reserve."""
    card = plan["card"] or {}
    sizes = {name: card[name] for name in ("memory", "usable") if card.get(name, whole + 1) <= whole}
    marks = [[100 * value / whole, name == "usable"] for name, value in sizes.items()]
    return {"parts": [[*_COLOURS[name], 100 * value / whole] for name, value in stack(plan).items()], "marks": marks}


def _plan(state: State) -> dict[str, Any]:
    content = _content(state)
    (plan,) = content["plans"]
    card, peak = plan["card"], plan["totals"]["peak"]
    whole, sizes = _scale([plan]), stack(plan)
    said = sentences(content, command.shape_over_params(_parsed(state)))
    words = f"{size(peak)} per GPU at the peak. Choose a card to see whether it fits."
    scale = f"The bar is {size(whole)}, the peak."
    if card:
        words = verdict(plan)
        memory = f"{size(card['memory'])} of the {card['name']}"
        scale += f" A GPU has the {memory}."
        if whole == card["memory"]:
            scale = f"The bar is the {memory}; the dashed line is what remains after the reserve."
    return {
        "verdict": words,
        "ways": [
            {
                "cells": [typed(way["options"]), size(way["peak"]), "; ".join(way["costs"])],
                "state": {name: text for name, text in {**state, **way["options"]}.items() if text is not None},
            }
            for way in content["ways"]
        ],
        "fits": card["fits"] if card else None,
        "figures": _figures(state, plan),
        "bar": _bar(plan, whole),
        "scale": scale if peak else "Everything is on the host.",
        "memory": [
            *([name, size(value), f"{100 * value / peak:.1f} %", *_COLOURS[name]] for name, value in sizes.items()),
            ["all", _size(peak), "100.0 %" if peak else ""],
        ],
        "parts": [
            [
                *(part["name"], ("" if part["exact"] else "≈ ") + _size(part["bytes"]), _each(part["per_parameter"])),
                f"{part['divisor']:,}" if part["divisor"] > 1 else "",
                _PHASES[part["phase"]] if part["place"] == "gpu" else "on the host",
                part["note"],
            ]
            for part in plan["parts"]
        ],
        "sent": [
            [
                *(sent["what"], _size(sent["bytes"]), sent["name"], f"{sent['ranks']:,}" if sent["ranks"] > 1 else ""),
                *(f"{sent['times']:,}", _each(sent["per_parameter"])),
            ]
            for sent in plan["communication"]
        ],
        "words": said,
    }  # fmt: skip


def _figures(state: State, plan: dict[str, Any]) -> list[list[str]]:
    """Name, value and note of each figure."""
    totals, card, options, work = plan["totals"], plan["card"], plan["settings"], plan["work"]
    rows = [["Peak per GPU", size(totals["peak"]), f"{size(totals['state'])} of it always"]]
    if totals["host"]:
        rows.append(["On the host", size(totals["host"]), "for this GPU"])
    rows.append(["Sent by each GPU", _size(plan["bytes_sent"]), "in a step"])
    moved = size(plan["step_traffic"])
    timed = card and card["bandwidth"] is not None  # of a card given by its memory no speed is known
    if timed and not options["offload"]:
        note = f"{moved} at {card['bandwidth'] / 1e12:g} TB/s"
        rows.append(["Optimizer's step", f"{digits(1e3 * plan['step_traffic'] / card['bandwidth'])} ms", note])
    else:
        rows.append(["Optimizer's step", moved, "moved on the host" if options["offload"] else "moved"])
    if timed and work:
        note = f"at the peak of {card['flops'] / 1e12:g} TFLOP/s"
        rows.append(["Matrix products", f"{digits(1e3 * (work['hardware'] / card['flops']))} ms", note])
    if card and options["model"]:
        rows.append(["Largest batch", *_largest(state, "batch")])
        if options["strategy"] != "zero1-torch" or options["model"]["hidden"] >= _LEAST_ASSIGNED:
            rows.append(["Largest model of this width", *_largest(state, "layers")])
    elif card:
        rows.append(["Largest model", *_largest(state, "params")])
    if plan["mfu"] is not None:
        rows.append(["MFU", f"{plan['mfu']:.3f}", f"HFU {plan['hfu']:.3f}"])
    return rows


def _largest(state: State, what: str) -> list[str]:
    """The largest that fits, and its unit."""
    try:
        plan = _content({**state, "fit": what}, with_ways=False)["fit"]["plan"]
    except ValueError:
        return ["no limit", "everything is on the host"]
    if plan is None:
        return ["none", {"params": "no model", "layers": "not even one layer", "batch": "not even one sequence"}[what]]
    if what == "params":
        return [f"{plan['parameters']:,}", "parameters, without activations"]
    if what == "batch":
        return [f"{plan['settings']['batch']:,}", "sequences per GPU"]
    return [f"{plan['settings']['model']['layers']:,} layers", _in_words(plan["parameters"])]


def _in_words(parameters: int) -> str:
    for unit, word in ((10**9, "billion"), (10**6, "million")):
        if parameters >= unit:
            return f"{parameters / unit:,.1f} {word} parameters"
    return f"{parameters:,} parameters"


def _comparison(state: State) -> dict[str, Any]:
    """All strategies or all layouts: rows, and the state that each row leads to."""
    what = state.get("compare", "strategies")
    options = {name: text for name, text in state.items() if name not in ("fit", "step-ms", "rank")}
    unassigned = ""
    if what == "layouts":
        options = {name: text for name, text in _single(options).items() if name not in _SET_BY_LAYOUTS}
    elif not _several(options, "strategy"):
        options.pop("strategy", None)
        if not _assignable(options):
            row = _row(state)
            fitting = [name for name, how in STRATEGIES.items() if how.keeps_rows or row is None or not row.needs_rows]
            options["strategy"] = ",".join(name for name in fitting if name not in ("single", "zero1-torch"))
            unassigned = f" zero1-torch is left out with more than {_MOST_ASSIGNED:,} GPUs; halfstep plan has it."
    plans = _content({**options, "compare": what})["plans"]
    whole, card = _scale(plans), plans[0]["card"]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "Layout" if what == "layouts" else "Strategy": lambda plan: plan["label"],
        "Peak": lambda plan: size(plan["totals"]["peak"]),
        **({"Fits": lambda plan: "yes" if plan["card"]["fits"] else "no"} if card else {}),
        "Picture": lambda plan: "",
        "Always": lambda plan: size(plan["totals"]["state"]),
        "Sent in a step": lambda plan: _size(plan["bytes_sent"]),
    }
    if any(plan["totals"]["host"] for plan in plans):
        columns["Host"] = lambda plan: _size(plan["totals"]["host"])
    names = ("optimizer", "precision") if what == "layouts" else ("strategy", "gpus")
    rows = [
        {
            "cells": [cell(plan) for cell in columns.values()],
            "bar": _bar(plan, whole),
            "here": all(str(plan["settings"][name]) == _chosen(state, name) for name in names),
            "state": _leading(state, what, plan["settings"]),
        }
        for plan in plans
    ]
    shown = f"{size(whole)}, the largest peak"
    if card and whole == card["memory"]:
        shown = f"the {size(whole)} of the {card['name']}"
    return {"head": list(columns), "rows": rows, "note": f"Bars are of {shown}. Choose a row to plan it.{unassigned}"}


def _leading(state: State, what: str, settings: dict[str, Any]) -> State:
    """The state in which a row of the comparison is the plan."""
    if what == "layouts":
        changes = {name: settings[name] for name in ("optimizer", "precision")}
        changes = {name: None if value == _default(name) else value for name, value in changes.items()}
        changes |= dict.fromkeys(_SET_BY_LAYOUTS[:3])
    else:
        changes = {name: settings[name] for name in ("strategy", "gpus", "shard")} | {"rank": None}
    return {name: str(text) for name, text in {**state, **changes}.items() if text is not None}
