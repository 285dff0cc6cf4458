"""``halfstep plan``: the memory, messages and FLOPs of a training on each GPU, computed without a GPU.

The command prints bytes by part, messages per step and FLOPs and, with ``--card``, whether the training fits and, if
not, the smallest changes with which it does. docs/planning.md describes what is counted, and how.

Exit status: 0, also if nothing fits; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from halfstep._version import __version__
from halfstep.cli.command_line import answer, run
from halfstep.cli.plan_options import COMPARISONS, FITS, MASTERS, OF_A_PLAN, OPTIONS, parser
from halfstep.cli.terminal import say
from halfstep.numerics.messages import instead, one_of
from halfstep.numerics.planning import (
    CARDS,
    LAYOUTS,
    MODELS,
    PRECISIONS,
    STRATEGIES,
    Card,
    Plan,
    Transformer,
    card,
    fit,
    from_config,
    layout,
    plan,
    usable,
    ways_to_fit,
)
from halfstep.numerics.planning.sharding import MIRRORED
from halfstep.numerics.planning.training import STEPPING_IN_BACKWARD

SHAPE = ("layers", "hidden", "heads", "vocab", "seq")
NOT_OF_PLAN = ("card", "reserve", "step_ms", "fit", "compare")  # options of a plan that `plan` does not take


def shape(options: argparse.Namespace) -> Transformer | None:
    """The transformer that the options describe; None if they give a number of parameters only.

    Raises:
        ValueError: the shape is incomplete, or there are options of a shape without one.
    """
    sizes = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    changing = [option for option in OPTIONS["Model"] if option.name not in ("model", "params", *SHAPE)]
    changing = [option for option in changing if getattr(options, option.dest) not in (None, False)]
    changes = {each.field or each.dest: each.sets if each.flag else getattr(options, each.dest) for each in changing}
    if options.model is not None:
        published = MODELS.get(options.model.lower())
        elsewhere = "/" in options.model or options.model.endswith(".json") or Path(options.model).exists()
        if published is None and not elsewhere:
            meant = instead(options.model.lower(), MODELS, listed=False)
            raise ValueError(
                f"Expected --model to be the name of a published shape, but got {options.model!r}: {meant}halfstep "
                "plan --help lists them; for others pass a repository of Hugging Face such as Qwen/Qwen3-8B, the path "
                "of its config.json, or --layers, --hidden, --heads, --vocab and --seq"
            )
        sizes.pop("seq", None)
        return replace(published or from_config(options.model), **sizes, **changes)
    if not sizes.keys() - {"seq"}:
        if changes:
            names = sorted((option.name for option in changing), key=lambda name: name.startswith("no-"))
            typed = ", ".join(f"--{name}" for name in names)
            raise ValueError(f"{typed} without a shape; give --model, or {', '.join('--' + n for n in SHAPE)}")
        return None
    missing = [f"--{name}" for name in SHAPE if name not in sizes]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; a shape is {', '.join('--' + name for name in SHAPE)}")
    return Transformer(**sizes, **changes)


def _refuse_unused(options: argparse.Namespace, model: Transformer | None) -> None:
    """Raise ValueError for an option that no answer would depend on."""
    usual = {option.dest: option.default for group in OPTIONS.values() for option in group}
    card, tokens = options.card is not None, model is not None or None not in (options.batch, options.seq)
    selective = options.checkpointing == "selective" and model is not None and model.flash
    for name, used, why in (
        *((name, card, f"without a card; give --card, one of {', '.join(CARDS)}") for name in ("fit", "step_ms")),
        ("reserve", card, "without a card; leave it out, or give --card"),
        *((name, options.compare is None, "with --compare; leave one of them out") for name in ("fit", "step_ms")),
        ("rank", options.compare != "strategies", "with --compare strategies; leave one of them out"),
        ("optimizer", options.compare != "layouts", "with --compare layouts, which plans all; leave one of them out"),
        ("params", model is None, f"{options.params} with a shape; leave one of them out"),
        ("checkpointing", not selective, "selective without --eager-attention: no scores are stored; leave it out"),
        ("no_biases", not options.qkv_biases, "with --qkv-biases; leave one of them out"),
        ("step_ms", tokens, "with --params only; give --batch and --seq too, or a shape"),
        *((name, tokens, "with --params; give both --batch and --seq, or neither") for name in ("batch", "seq")),
    ):
        if not used and getattr(options, name) != usual[name]:
            raise ValueError(f"--{name.replace('_', '-')} {why}")


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `plan`."""
    model = shape(options)
    if model is None and options.params is None:
        raise ValueError(
            "expected a model, but got none: pass --params 7e9, --model llama-3-8b, or the shape of a transformer"
        )
    _refuse_unused(options, model)
    names = {option.dest for option in OF_A_PLAN.values() if option not in OPTIONS["Model"]} - {*NOT_OF_PLAN}
    arguments = {name: getattr(options, name) for name in names}
    if options.optimizer == "halfstep" and options.master in MASTERS:
        which = {"auto": "", "none": "-stochastic"}.get(options.master, f"-{options.master}")
        arguments |= {"optimizer": f"halfstep{which}", "master": None}
    if model is None:
        return {**arguments, "params": options.params}
    return {**arguments, "model": model, "batch": 1 if options.batch is None else options.batch}


def compared(
    what: str, arguments: dict[str, Any], gpus: Sequence[int] = (), strategies: Sequence[str] = ()
) -> list[tuple[str, Plan]]:
    """Plans of all layouts of one precision, or of strategies, each with its label.

    Layouts are compared with torch's AdamW in fp32 and under autocast; only ours step in the backward. A strategy that
    cannot offload is planned without offload, one that keeps all gradients without steps in the backward, and one
    without DDP's buckets without their views. Moments in 8 bits are left out where the strategy cuts rows of
    parameters, and so are such strategies. ``hsdp`` without ``shard`` has two groups.

    Args:
        what: ``"layouts"`` or ``"strategies"``.
        arguments: the arguments of `plan`.
        gpus: numbers of GPUs for each strategy. Default: that of `arguments`.
        strategies: names of strategies. Default: all except ``"single"``.

    Raises:
        ValueError: the arguments cannot be used for the comparison.
    """
    one_of("compare", what, COMPARISONS)
    if what == "strategies":
        counts = gpus or (arguments["gpus"],)
        if min(counts) // arguments["tensor_parallel"] < 2:
            raise ValueError(f"gpus is {min(counts)}; strategies differ only on 2 or more data-parallel GPUs")
        row = layout(arguments["optimizer"], arguments["precision"], moments=arguments["moments"])
        fitting = [name for name, how in STRATEGIES.items() if how.keeps_rows or not row.needs_rows]
        names = strategies or [name for name in fitting if name != "single"]
        for name in names:
            one_of("strategy", name, [name for name in STRATEGIES if name != "single"])
        return [_strategy(arguments, name, count, len(counts) > 1) for name in names for count in counts]
    for name in ("moments", "master", "gradients"):
        if arguments[name] is not None:
            raise ValueError(f"{name} is {arguments[name]!r} while layouts are compared; leave it out")
    one_of("precision", arguments["precision"], PRECISIONS)
    compute = layout("torch", arguments["precision"]).compute.name
    same = (arguments["precision"], "fp32" if compute == "fp32" else f"amp-{compute}")
    one_of("strategy", arguments["strategy"] or "single", STRATEGIES)
    cuts_rows = not STRATEGIES[arguments["strategy"] or "single"].keeps_rows
    rows = [
        row
        for row in LAYOUTS
        if (row.precision == same[0] or (row.optimizer == "torch" and row.precision in ("fp32", *same)))
        and (row.amsgrad or not arguments["amsgrad"])
        and not (row.needs_rows and cuts_rows)
        and (row.optimizer, row.precision) != ("halfstep", "bf16")  # the same as halfstep-split
    ]
    rows.sort(key=lambda row: ("fp32", f"amp-{compute}", compute).index(row.precision))
    released = [arguments["step_in_backward"] if row.optimizer.startswith("halfstep") else None for row in rows]
    return [
        (
            row.optimizer if row.precision == arguments["precision"] != "fp32" else row.name,
            plan(**{**arguments, "optimizer": row.optimizer, "precision": row.precision, "step_in_backward": step}),
        )
        for row, step in zip(rows, released, strict=True)
    ]


def _strategy(arguments: dict[str, Any], name: str, gpus: int, counted: bool) -> tuple[str, Plan]:
    """The label and the plan of a strategy. `counted`: whether the label gives the number of GPUs."""
    ranks = gpus // arguments["tensor_parallel"]
    shard = arguments["shard"] or (ranks // 2 if ranks % 2 == 0 else ranks) if name == "hsdp" else None
    able = bool(STRATEGIES[name].offloads) and (name not in MIRRORED or arguments["optimizer"].startswith("halfstep"))
    released = arguments["step_in_backward"] if name in STEPPING_IN_BACKWARD else None
    view = arguments["bucket_view"] and STRATEGIES[name].buckets and released is None
    changes = {"strategy": name, "gpus": gpus, "shard": shard, "step_in_backward": released, "bucket_view": view}
    parts = [name, *([] if shard is None else [f"groups of {shard}"]), *([f"{gpus:,} GPUs"] if counted else [])]
    return ", ".join(parts), plan(**{**arguments, **changes, "offload": arguments["offload"] and able})


def _with_card(result: Plan, gpu: Card | None, reserve: Fraction | int, step_ms: float | None = None) -> dict[str, Any]:
    """The JSON of a plan, with the card, whether the plan fits, MFU and HFU."""
    content: dict[str, Any] = {**result.as_dict(), "card": None, "mfu": None, "hfu": None}
    if gpu is not None:
        left = usable(gpu, reserve) - result.totals.peak
        content["card"] = {**asdict(gpu), "usable": usable(gpu, reserve), "left": left, "fits": left >= 0}
        if step_ms is not None and gpu.flops is not None:
            content["mfu"] = result.mfu(step_ms / 1e3, gpu.flops)
            content["hfu"] = result.hfu(step_ms / 1e3, gpu.flops)
    return content


def changed_options(changes: dict[str, Any]) -> dict[str, str | None]:
    """Changed arguments of `plan` as options of the command: text, "" for a flag, None for one to leave out."""
    options: dict[str, str | None] = {}
    for dest, value in changes.items():
        option = OF_A_PLAN["eager-attention" if dest == "flash" else dest.replace("_", "-")]
        value = (value,) if dest == "gpus" else value
        default = value == option.default or dest == "flash"  # which no option sets
        options[option.name] = None if default else "" if value == option.const else option.text(value)
    return options


def planned(options: argparse.Namespace, with_ways: bool = True) -> dict[str, Any]:
    """The content of ``--json``, which docs/planning.md describes; `with_ways`, with the ways to fit.

    Raises:
        ValueError: an option is refused.
    """
    one_of("--fit", options.fit, FITS)
    gpus, strategies = options.gpus, options.strategy.split(",") if options.strategy else [None]
    for name, values in (("--gpus", gpus), ("--strategy", strategies)):
        if len(values) > 1 and options.compare != "strategies":
            text = ",".join(map(str, values))
            raise ValueError(f"{name} is {text}; give one value, or add --compare strategies to plan each")
    arguments = {**_arguments(options), "gpus": gpus[0], "strategy": strategies[0]}
    gpu = None if options.card is None else card(options.card)
    if options.step_ms is not None and gpu is not None and gpu.flops is None:
        raise ValueError(f"--step-ms with a card of unknown speed, {gpu.name}; give a --card by name")
    if options.compare is None:
        result = plan(**arguments)
        plans = [(f"{result.layout.name}, {result.strategy.name}", result)]
    else:
        plans = compared(options.compare, arguments, gpus, [name for name in strategies if name])
    largest, ways = None, []
    if gpu is not None and options.compare is None:
        memory = usable(gpu, options.reserve)
        ways = ways_to_fit(memory, **arguments) if with_ways else []
        if options.fit != "none":
            best = fit(options.fit, memory, **arguments)
            largest = {"what": options.fit, "plan": None if best is None else _with_card(best, gpu, options.reserve)}
    return {
        "halfstep": __version__,
        "compare": options.compare,
        "plans": [
            {"label": label, **_with_card(result, gpu, options.reserve, options.step_ms)} for label, result in plans
        ],
        "fit": largest,
        "ways": [
            {"options": changed_options(way.options), "costs": list(way.texts), "peak": way.plan.totals.peak}
            for way in ways
        ],
    }


def _plan(options: argparse.Namespace) -> int:
    if options.port and options.page is not True:
        raise ValueError("--port without a server; leave it out, or give --page without a file")
    others = [each for group in OPTIONS.values() for each in group if each.name not in ("page", "no-open", "port")]
    if options.page is not None and all(getattr(options, option.dest) == option.default for option in others):
        return _page(options)
    from halfstep.cli import plan_tables

    content = planned(options)
    answer(options, lambda: content, lambda: plan_tables.shown(content))
    if options.out is not None:
        from halfstep.cli import plan_picture

        plan_picture.draw(options.out, content)
    return 0 if options.page is None else _page(options)


def _page(options: argparse.Namespace) -> int:
    """Serve the planner with the given settings, or write it to a file. Returns the exit status."""
    from halfstep.cli.pages.planner import settings
    from halfstep.cli.pages.server import serve, write

    state, stream = settings(options) or None, sys.stderr if options.json else sys.stdout
    if options.page is True:
        return serve("planner", state, options.port, not options.no_open, stream)
    say(write(options.page, "planner", state, not options.no_open), stream)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep plan`` with the arguments `argv`. Returns the exit status."""
    return run(parser(), argv, _plan, (ValueError, ImportError))
