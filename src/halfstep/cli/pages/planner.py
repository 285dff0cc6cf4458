"""The answers of the planner: the controls of its form, and a plan, its comparison and its commands as texts.

The keys of a state are the names of the options of ``halfstep plan``; an empty text is an option without a value.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from halfstep.cli import numbers
from halfstep.cli import plan as command
from halfstep.cli.command_line import UsageError
from halfstep.cli.pages.shell import command_line
from halfstep.cli.plan_options import OF_A_PLAN, OPTIONS, parser
from halfstep.cli.plan_picture import MEMORY_KINDS, stack
from halfstep.cli.plan_tables import (
    NOTHING_FITS,
    digits,
    headline,
    message_rows,
    part_rows,
    sentences,
    size,
    typed,
    verdict,
)
from halfstep.numerics.planning import CARDS, LAYOUTS, MODELS, OPTIMIZERS, STRATEGIES, Transformer

EXAMPLE = {
    **{"model": "llama-3-8b", "gpus": "8", "card": "h100", "strategy": "fsdp"},
    **{"batch": "1", "seq": "4096", "checkpointing": "full"},
}
# Colours of the kinds of memory on a dark ground; on a light one they are those of `halfstep plan --out`.
DARK = ("#3d8fd1", "#e69f00", "#9fd8f7", "#2a9d8f", "#cc79a7", "#f0e442", "#ec7a45", "#a8a8a8", "#ffffff")
_COLOURS = {name: [light, dark] for (name, light, _), dark in zip(MEMORY_KINDS, DARK, strict=True)}
_LEAST_ASSIGNED = 512  # width; of narrower models so many layers fit that ZeroRedundancyOptimizer's rule takes seconds
_SET_BY_LAYOUTS = ("moments", "master", "gradients", "optimizer")
_CUSTOM, _NUMBER = "own shape", "number of parameters"  # instead of a published model
_SIZES = ("layers", "hidden", "heads", "vocab")
_SHAPE = [option for option in OPTIONS["Model"] if option.name not in ("model", "params")]
FIELDS = {option.name: option for options in OPTIONS.values() for option in options if option.label}

State = dict[str, str]


def settings(options: argparse.Namespace) -> State:
    """The options of a command line that are not the defaults, as a state."""
    values = {option: getattr(options, option.dest) for option in OF_A_PLAN.values()}
    return {option.name: option.text(value) for option, value in values.items() if value != option.default}


def _parsed(state: State) -> argparse.Namespace:
    """The options of a state.

    Raises:
        ValueError: an option or its value is refused.
    """
    for name in state:
        if name not in OF_A_PLAN:
            raise ValueError(f"unknown option --{name}")
    try:
        return parser().parse([f"--{name}={text}" if text else f"--{name}" for name, text in state.items()])
    except UsageError as error:
        raise ValueError(str(error).partition("; see halfstep plan --help")[0]) from error


def _content(state: State, with_ways: bool = True) -> dict[str, Any]:
    """The JSON of ``halfstep plan`` for a state."""
    return command.planned(_parsed(state), with_ways)


def _default(name: str) -> str:
    return OF_A_PLAN[name].text(OF_A_PLAN[name].default)


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
    groups = []
    for title, options in OPTIONS.items():
        if options[0].label:
            fields: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
            for option in options:
                wide, text = option.name in ("model", "strategy", "optimizer"), option.help.replace("%%", "%")
                field = {"name": option.name, "label": option.label, "help": text, "flag": option.flag, "wide": wide}
                fields[option.folded].append(field)
            groups.append({"title": title, "fields": fields[0], "more": fields[1]})
    return groups


def _preset(state: State) -> Transformer | None:
    return MODELS.get(state.get("model", "").lower())


def _sort(state: State) -> str:
    """The name of the model, or what else describes it."""
    return state.get("model") or (_NUMBER if "params" in state else _CUSTOM)


def _same(names: Any, default: str = "") -> list[list[str]]:
    return [*([["", default]] if default else []), *([name, name] for name in names)]


def _choices(state: State) -> dict[str, list[list[Any]]]:
    """The choices of each select: values and texts, or labels of groups and such lists."""
    card, precision, optimizer = state.get("card", ""), _chosen(state, "precision"), _chosen(state, "optimizer")
    rows = {row.optimizer: row for row in LAYOUTS if row.precision == precision}
    row = rows.get(optimizer)
    moments = list(row.moments_allowed) if row else []
    if not optimizer.startswith("halfstep"):
        moments += [f"{first},{second}" for first in moments for second in moments if second != first]
    optimizers = [[name, f"{name}: {float(row.per_parameter()):g} B"] for name, row in rows.items()]
    cards = [[gpu.name, f"{gpu.name}, {gpu.memory / 2**30:g} GiB"] for gpu in CARDS.values()]
    cards += [[card, card]] if card and card.lower() not in CARDS else []  # a size, such as "24GiB"
    strategies = [[s.name, s.text if s.text.startswith(s.name) else f"{s.name}: {s.text}"] for s in STRATEGIES.values()]
    return {
        **{option.name: _same(option.choices, option.unset) for option in FIELDS.values() if option.choices},
        "model": _same([*MODELS, _CUSTOM, _NUMBER]),
        "card": [["", "none"], *cards],
        "strategy": [["", "default"], *strategies],
        "optimizer": [
            ["bytes per parameter", optimizers],
            [f"not in {precision}", _same(name for name in OPTIMIZERS if name not in rows)],
        ],
        "moments": _same(moments, "default"),
        "master": _same(row.master_allowed if row else (), "default"),
    }


def _controls(state: State) -> dict[str, dict[str, Any]]:
    """The value of each field, and what else of it depends on the state: choices, placeholder, hidden, fixed."""
    preset, choices = MODELS.get(state.get("model", "").lower()), _choices(state)
    sort = state.get("model") or (_NUMBER if "params" in state else _CUSTOM)
    shaped = (*(option.name for option in _SHAPE), "lora", "checkpointing", "loss-chunks")
    hidden = {name: sort == _NUMBER for name in shaped}
    hidden |= {name: sort != _CUSTOM for name in _SIZES}
    hidden |= {"params": sort != _NUMBER, "shard": _chosen(state, "strategy") != "hsdp"}
    hidden |= {name: len(choices[name]) == 1 for name in ("master", "moments")}
    controls: dict[str, dict[str, Any]] = {}
    for name, option in FIELDS.items():
        control: dict[str, Any] = {"hidden": hidden.get(name, False) and name not in state}
        if option.flag:
            fixed = preset is not None and bool(option.field) and getattr(preset, option.field) is option.sets
            control |= {"fixed": fixed, "value": name in state or fixed}
        elif name == "model":
            control["value"] = sort.lower() if preset else sort
        else:
            control["value"] = state.get(name, _default(name)) or option.text(option.const)
            usual = getattr(preset, option.dest, None) or ("1" if name == "batch" and sort != _NUMBER else "")
            control["placeholder"] = str(usual)
        controls[name] = control | ({"choices": choices[name]} if name in choices else {})
    return controls


def changed(state: State, name: str, value: str | None) -> State:
    """The state after a change in the form: `value` is None for an option that is left out."""
    if value is not None and not OF_A_PLAN[name].flag and value in ("", _default(name)):
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
    return _without_none({**state, **changes})


def _of_model(state: State, value: str) -> dict[str, str | None]:
    """The options of another model. A custom shape begins with that of the last model."""
    cleared: dict[str, str | None] = {"params": None, **{option.name: None for option in _SHAPE}}
    if value in MODELS:
        longest = MODELS[value].seq if MODELS[value].positions else None
        short = longest is None or _integer(state.get("seq", ""), 0) <= longest
        kept = {"eager-attention": state.get("eager-attention"), "seq": state.get("seq") if short else None}
        return {**cleared, **kept, "model": value}
    try:
        before = command.shape(_parsed(state))
    except ValueError:
        before = MODELS.get(state.get("model", "").lower())
    before = before or next(iter(MODELS.values()))
    if value == _NUMBER:
        tokens = ("batch", "seq") if not {"batch", "seq"} <= state.keys() else ()
        unused = dict.fromkeys(("model", "checkpointing", "lora", "loss-chunks", *tokens))
        return {**cleared, **unused, "params": str(before.parameters)}
    changes = {**cleared, "model": None, "seq": state.get("seq", str(before.seq))}
    for option in _SHAPE:
        field = getattr(before, option.field or option.dest)
        if option.flag:
            changes[option.name] = "" if field is option.sets else None
        elif field and field != getattr(Transformer, option.dest, None):
            changes[option.name] = str(field)
    return changes


# ---------------------------------------------------------------------------------------------------------- the answer


def planner(state: State, move: dict[str, Any]) -> dict[str, Any]:
    """The answer to a state, after a move: ``set``, the name of an option and its value, None to leave it out;
    ``json``, whether the JSON of the command is wanted too."""
    state = {OF_A_PLAN[name].name if name in OF_A_PLAN else name: text for name, text in state.items()}
    if "set" in move:
        name, value = move["set"] if isinstance(move["set"], list) and len(move["set"]) == 2 else ("", "")
        if not isinstance(name, str) or name not in OF_A_PLAN or not isinstance(value, (str, type(None))):
            raise ValueError(f"Expected an option and its value, but got {move['set']!r}")
        state = changed(state, name, value)
    allowed = [(name, text) for name, text in _compared(state).items() if name in OF_A_PLAN]
    answer: dict[str, Any] = {
        **{"state": state, "controls": _controls(state), "compare": state.get("compare", "strategies")},
        **{"command": command_line("halfstep plan", allowed), "error": "", "plan": None},
    }
    try:
        answer["plan"] = _plan(_single(state))
        if move.get("json"):
            answer["json"] = json.dumps(_content(_compared(state)), indent=2, ensure_ascii=False)
    except ValueError as error:
        answer["error"] = str(error)
    try:
        answer["comparison"] = _comparison(state)
    except ValueError as error:
        answer["comparison"] = {"rows": [], "note": "" if str(error) == answer["error"] else str(error)}
    return answer


def _single(state: State) -> State:
    """The plan that is shown: of several numbers of GPUs or strategies, the first."""
    first = {name: text.split(",")[0] if name in ("gpus", "strategy") else text for name, text in state.items()}
    first.pop("compare", None)
    return first


def _compared(state: State) -> State:
    """The options of a state that its comparison does not ignore; without one, all."""
    compare = state.get("compare")
    unused = (*(("fit", "step-ms", "rank") if compare else ()), *(_SET_BY_LAYOUTS if compare == "layouts" else ()))
    return {name: text for name, text in state.items() if name not in unused}


def _size(value: int) -> str:
    return size(value) if value else "0"


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
    """A plan as texts, and widths and colours of its bar."""
    content = _content(state)
    (plan,) = content["plans"]
    card, peak = plan["card"], plan["totals"]["peak"]
    whole, sizes = _scale([plan]), stack(plan)
    scale = f"The bar is {size(whole)}, the peak."
    if card:
        reserve = "the dashed line is what remains after the reserve"
        scale += f" The line is the card's {size(card['memory'])}, {reserve}."
        if whole == card["memory"]:
            scale = f"The bar is the card's {size(card['memory'])}; {reserve}."
    unknown = f"{size(peak)} per GPU at the peak. Choose a card to see whether it fits, and what does."
    return {
        "verdict": verdict(plan) if card else unknown,
        "headline": headline(plan),
        "ways": [
            {
                **{"words": typed(way["options"]), "peak": size(way["peak"]), "costs": way["costs"]},
                "state": _without_none({**state, **way["options"]}),
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
        "parts": [[row[i] for i in (0, 3, 1, 2, 4, 5)] for row in part_rows(plan)],
        "sent": [[row[i] for i in (0, 5, 1, 2, 3, 4)] for row in message_rows(plan)],
        "words": sentences(content),
    }


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


def _largest(state: State, quantity: str) -> list[str]:
    """The largest that fits, and its unit."""
    try:
        plan = _content({**state, "fit": quantity}, with_ways=False)["fit"]["plan"]
    except ValueError:
        return ["no limit", "everything is on the host"]
    if plan is None:
        return ["none", NOTHING_FITS[quantity]]
    if quantity == "params":
        return [f"{plan['parameters']:,}", "parameters, without activations"]
    if quantity == "batch":
        return [f"{plan['settings']['batch']:,}", "sequences per GPU"]
    count, layers = plan["parameters"], f"{plan['settings']['model']['layers']:,} layers"
    unit, word = (10**9, " billion") if count >= 10**9 else (10**6, " million")
    return [layers, f"{count / unit:,.1f}{word} parameters" if count >= unit else f"{count:,} parameters"]


def _comparison(state: State) -> dict[str, Any]:
    """All strategies or all layouts: rows, and the state that each row leads to."""
    layouts = state.get("compare") == "layouts"
    options = _single(state) if layouts else dict(state)
    if "," not in options.get("strategy", "") and not layouts:
        options.pop("strategy", None)
    plans = _content(_compared({**options, "compare": "layouts" if layouts else "strategies"}))["plans"]
    whole, card, hosted = _scale(plans), plans[0]["card"], any(plan["totals"]["host"] for plan in plans)
    head = ["Layout" if layouts else "Strategy", "Peak", *["Fits"] * bool(card), "Picture", "Always", "Sent in a step"]
    names, rows = ("optimizer", "precision") if layouts else ("strategy", "gpus"), []
    for plan in plans:
        totals, settings = plan["totals"], plan["settings"]
        cells = [plan["label"], size(totals["peak"]), *(["yes" if plan["card"]["fits"] else "no"] if card else [])]
        cells += ["", size(totals["state"]), _size(plan["bytes_sent"]), *[_size(totals["host"])] * hosted]
        here = all(str(settings[name]) == _chosen(state, name) for name in names)
        leading = _leading(state, layouts, settings)
        rows.append({"cells": cells, "bar": _bar(plan, whole), "here": here, "state": leading})
    shown = f"the {size(whole)} of the {card['name']}" if card and whole == card["memory"] else ""
    note = f"Bars are of {shown or f'{size(whole)}, the largest peak'}. Choose a row to plan it."
    return {"head": head + ["Host"] * hosted, "rows": rows, "note": note}


def _leading(state: State, layouts: bool, settings: dict[str, Any]) -> State:
    """The state in which a row of the comparison is the plan."""
    if layouts:
        row = {name: settings[name] for name in ("optimizer", "precision")}
        changes = {name: None if value == _default(name) else value for name, value in row.items()}
        changes |= {"step-in-backward": state.get("step-in-backward") if settings["step_in_backward"] else None}
        return _without_none({**state, **dict.fromkeys(_SET_BY_LAYOUTS), **changes})
    return _without_none({**state, **{name: settings[name] for name in ("strategy", "gpus", "shard")}, "rank": None})


def _without_none(options: dict[str, Any]) -> State:
    return {name: str(value) for name, value in options.items() if value is not None}
