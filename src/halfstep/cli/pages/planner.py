"""The answers of the planner: its form, and a plan, its comparison and its commands as texts.

The keys of a state are the names of the options of ``halfstep plan``; an empty text is an option without a value.
"""

from __future__ import annotations

from typing import Any

from halfstep.cli import plan as command
from halfstep.cli.command_line import UsageError, typed_command
from halfstep.cli.plan_options import OF_A_PLAN, OPTIONS, parser
from halfstep.cli.plan_tables import comparison, headline, message_rows, part_rows, sentences, size, typed, verdict
from halfstep.numerics.planning import CARDS, LAYOUTS, MODELS, OPTIMIZERS, STRATEGIES

EXAMPLE = {"model": "llama-3-8b", "gpus": "8", "card": "h100", "strategy": "fsdp"}
EXAMPLE |= {"batch": "1", "seq": "4096", "checkpointing": "full"}
# Colours of the parts on a light and on a dark ground. On the light one they are those of Okabe and Ito, which
# colour-blind readers can tell apart; neighbours also differ in lightness.
COLOURS = {
    part: colours
    for parts, *colours in (
        (("weights", "frozen weights"), "#0072b2", "#3d8fd1"),
        (("gradients",), "#e69f00", "#e69f00"),
        (("master", "remainder"), "#56b4e9", "#9fd8f7"),
        (("exp_avg", "exp_avg_sq", "momentum_buffer", "scalars"), "#004d40", "#2a9d8f"),
        (("buckets", "gathered weights", "unreduced gradients"), "#cc79a7", "#cc79a7"),
        (("cast weights",), "#f0e442", "#f0e442"),
        (("activations", "recomputed", "outer activations"), "#d55e00", "#ec7a45"),
        (("logits", "loss"), "#999999", "#a8a8a8"),
        (("step temporaries", "scratch"), "#000000", "#ffffff"),
    )
    for part in parts
}
_SET_BY_LAYOUTS = ("moments", "optimizer")
_NUMBER = "number of parameters"  # instead of a published model
_OF_A_SHAPE = ("eager-attention", "lora", "checkpointing", "loss-chunks")
FIELDS = {option.name: option for options in OPTIONS.values() for option in options if option.label}

State = dict[str, str]


def _content(state: State) -> dict[str, Any]:
    """The JSON of ``halfstep plan`` for a state. Raises ValueError for an option or value that is refused."""
    for name in state:
        if name not in OF_A_PLAN:
            raise ValueError(f"unknown option --{name}")
    try:
        options = parser().parse([f"--{name}={text}" if text else f"--{name}" for name, text in state.items()])
    except UsageError as error:
        raise ValueError(str(error).partition("; see halfstep plan --help")[0]) from error
    return command.planned(options)


def _chosen(state: State, name: str) -> str:
    option = OF_A_PLAN[name]
    return state.get(name) or option.text(option.default)


def _same(names: Any, default: str = "") -> list[list[str]]:
    return [*([["", default]] if default else []), *([name, name] for name in names)]


def _choices(state: State) -> dict[str, list[list[str]]]:
    card, precision = state.get("card", ""), _chosen(state, "precision")
    rows = {row.optimizer: f"{float(row.per_parameter()):g} B/param" for row in LAYOUTS if row.precision == precision}
    cards = [[gpu.name, f"{gpu.name}, {gpu.memory / 2**30:g} GiB"] for gpu in CARDS.values()]
    cards += [[card, card]] if card and card.lower() not in CARDS else []  # a size, such as "24GiB"
    strategies = [[s.name, s.text if s.text.startswith(s.name) else f"{s.name}: {s.text}"] for s in STRATEGIES.values()]
    fixed = [option for option in FIELDS.values() if option.choices]
    return {
        **{option.name: _same(option.choices, "" if option.default else "default") for option in fixed},
        "model": [["", _NUMBER], *_same(MODELS)],
        "card": [["", "none"], *cards],
        "strategy": [["", "default"], *strategies],
        "optimizer": [[name, f"{name}: {rows.get(name, f'not in {precision}')}"] for name in OPTIMIZERS],
    }


def _form(state: State) -> list[dict[str, Any]]:
    """The fields by group: what never changes, the value, choices, and whether the field is hidden."""
    model, choices, optimizer = state.get("model", ""), _choices(state), _chosen(state, "optimizer")
    hidden = {**dict.fromkeys(_OF_A_SHAPE, not model), "params": bool(model)}
    hidden |= {"shard": state.get("strategy") != "hsdp", "moments": not optimizer.startswith("halfstep")}
    groups = []
    for title, options in OPTIONS.items():
        fields = []
        for option in (option for option in options if option.label):
            name, wide = option.name, option.name in ("model", "strategy", "optimizer")
            value: str | bool = (state[name] or option.text(option.const)) if name in state else _chosen({}, name)
            if name == "model":
                value = model.lower() if model.lower() in MODELS else model
            field = {"name": name, "label": option.label, "help": option.help, "flag": option.flag, "wide": wide}
            field |= {"value": name in state if option.flag else value, "choices": choices.get(name)}
            fields.append(field | {"hidden": hidden.get(name, False) and name not in state})
        groups += [{"title": title, "fields": fields}] if fields else []
    return groups


def planner(state: State, move: dict[str, Any]) -> dict[str, Any]:
    """The answer to a state. The planner has no moves: the page changes the state itself."""
    state = {OF_A_PLAN[name].name if name in OF_A_PLAN else name: text for name, text in state.items()}
    allowed = [(name, text) for name, text in _compared(state).items() if name in OF_A_PLAN]
    answer: dict[str, Any] = {
        **{"state": state, "form": _form(state), "compare": state.get("compare", "strategies")},
        **{"command": typed_command("halfstep plan", allowed), "error": "", "plan": None},
    }
    try:
        answer["plan"] = _plan({name: text for name, text in state.items() if name != "compare"})
    except ValueError as error:
        answer["error"] = str(error)
    try:
        answer["comparison"] = _comparison(state)
    except ValueError as error:
        answer["comparison"] = {"rows": [], "note": "" if str(error) == answer["error"] else str(error)}
    return answer


def _compared(state: State) -> State:
    """The options of a state that its comparison does not ignore; without one, all."""
    layouts = state.get("compare") == "layouts"
    return {name: text for name, text in state.items() if not layouts or name not in _SET_BY_LAYOUTS}


def _scale(plans: list[dict[str, Any]]) -> int:
    """The bytes of a whole bar: the card, unless it is four times as large as every peak, or smaller than one."""
    peak = max(1, *(plan["totals"]["peak"] for plan in plans))
    memory = plans[0]["card"]["memory"] if plans[0]["card"] else 0
    return memory if peak < memory < 4 * peak else peak


def at_peak(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts on the GPU at the peak: what is always allocated, and what the larger phase adds."""
    totals = plan["totals"]
    phases = ("always", "backward" if totals["backward"] >= totals["step"] else "step")
    return [part for part in plan["parts"] if part["place"] == "gpu" and part["phase"] in phases]


def _bar(plan: dict[str, Any], whole: int) -> dict[str, Any]:
    """Colours and widths in percent, and the marks of the card's memory and of what remains after the reserve."""
    card = plan["card"] or {}
    sizes = {name: card[name] for name in ("memory", "usable") if card.get(name, whole + 1) <= whole}
    marks = [[100 * value / whole, name == "usable"] for name, value in sizes.items()]
    parts = [[*COLOURS[part["name"]], 100 * part["bytes"] / whole] for part in at_peak(plan)]
    return {"parts": parts, "marks": marks}


def _plan(state: State) -> dict[str, Any]:
    content = _content(state)
    (plan,) = content["plans"]
    card, whole = plan["card"], _scale(content["plans"])
    scale = f"The bar is {size(whole)}."
    if card and card["memory"] <= whole:
        scale += f" The line is the card's {size(card['memory'])}, the dashed one what remains after the reserve."
    coloured = [part["name"] for part in at_peak(plan)]
    ways = []
    for way in content["ways"]:
        shown = {"words": typed(way["options"]), "peak": size(way["peak"]), "costs": way["costs"]}
        ways.append(shown | {"state": _without_none({**state, **way["options"]})})
    return {
        "verdict": verdict(plan),
        "headline": headline(plan),
        "ways": ways,
        "fits": card["fits"] if card else None,
        "bar": _bar(plan, whole),
        "scale": scale if plan["totals"]["peak"] else "Everything is on the host.",
        "parts": [
            [*(row[i] for i in (0, 3, 1, 2, 4, 5)), *(COLOURS[row[0]] if row[0] in coloured else [])]
            for row in part_rows(plan)
        ],
        "sent": [[row[i] for i in (0, 3, 1, 2)] for row in message_rows(plan)],
        "words": sentences(content),
    }


def _comparison(state: State) -> dict[str, Any]:
    """All strategies or all layouts: rows, and the state that each row leads to."""
    layouts = state.get("compare") == "layouts"
    content = _content(_compared({**state, "compare": "layouts" if layouts else "strategies"}))
    title, header, table = comparison(content)
    plans, names = content["plans"], ("optimizer", "precision") if layouts else ("strategy",)
    whole, card, rows = _scale(plans), plans[0]["card"], []
    for plan, (label, *cells) in zip(plans, table, strict=True):
        selected = all(plan["settings"][name] == _chosen(state, name) for name in names)
        changes = {name: plan["settings"][name] for name in (*names, *(() if layouts else ("shard",)))}
        if layouts:
            changes = {name: None if value == _chosen({}, name) else value for name, value in changes.items()}
            stepping = state.get("step-in-backward") if plan["settings"]["step_in_backward"] else None
            changes = {**dict.fromkeys(_SET_BY_LAYOUTS), **changes, "step-in-backward": stepping}
        leading = _without_none({**state, **changes})
        rows.append({"cells": [label, "", *cells], "bar": _bar(plan, whole), "here": selected, "state": leading})
    shown = f"the {size(whole)} of the {card['name']}" if card and whole == card["memory"] else ""
    note = f"{title}. Bars are of {shown or f'{size(whole)}, the largest peak'}. Choose a row to plan it."
    return {"head": [header[0], "picture", *header[1:]], "rows": rows, "note": note}


def _without_none(options: dict[str, Any]) -> State:
    return {name: str(value) for name, value in options.items() if value is not None}
