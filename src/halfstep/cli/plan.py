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
from halfstep.numerics.planning.catalog import CARDS, MODELS, Card, card, from_config, usable
from halfstep.numerics.planning.changes import ways_to_fit
from halfstep.numerics.planning.layouts import LAYOUTS, PRECISIONS, layout
from halfstep.numerics.planning.models import Transformer
from halfstep.numerics.planning.plans import Plan, fit, plan
from halfstep.numerics.planning.sharding import MIRRORED, STRATEGIES
from halfstep.numerics.planning.training import STEPPING_IN_BACKWARD

SHAPE = ("layers", "hidden", "heads", "vocab", "seq")
NOT_OF_PLAN = ("card", "reserve", "step_ms", "fit", "compare")  # options of a plan that `plan` does not take


def shape(options: argparse.Namespace) -> Transformer | None:
    """The transformer that the options describe; None if they give a number of parameters only.

    Raises:
        ValueError: the shape is incomplete, or there are options of a shape without one.
    """
    needed = ", ".join(f"--{name}" for name in SHAPE)
    sizes = {name: getattr(options, name) for name in SHAPE if getattr(options, name) is not None}
    changing, changes = [], {}
    for option in OPTIONS["Model"][2:]:
        if option.name not in SHAPE and (value := getattr(options, option.dest)) not in (None, False):
            changing.append(f"--{option.name}")
            changes[option.field or option.dest] = option.sets if option.flag else value
    if options.model is not None:
        published = MODELS.get(options.model.lower())
        elsewhere = "/" in options.model or options.model.endswith(".json") or Path(options.model).exists()
        if published is None and not elsewhere:
            meant = instead(options.model.lower(), MODELS, listed=False)
            raise ValueError(
                f"Expected --model to be the name of a published shape, but got {options.model!r}: {meant}halfstep "
                "plan --help lists them; for others pass a repository of Hugging Face such as Qwen/Qwen3-8B, the path "
                f"of its config.json, or {needed}"
            )
        sizes.pop("seq", None)
        return replace(published or from_config(options.model), **sizes, **changes)
    if sizes.keys() - {"seq"}:
        missing = [f"--{name}" for name in SHAPE if name not in sizes]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing; a shape is {needed}")
        return Transformer(**sizes, **changes)
    if changes:
        raise ValueError(f"{', '.join(changing)} without a shape; give --model, or {needed}")
    return None


def _refuse_unused(options: argparse.Namespace, model: Transformer | None) -> None:
    """Raise ValueError for an option that no answer would depend on."""
    usual = {option.dest: option.default for group in OPTIONS.values() for option in group}
    card, tokens = options.card is not None, model is not None or None not in (options.batch, options.seq)
    stored, out = model is None or not model.flash, "leave one of them out"
    for name, used, why in (
        *((name, card, f"without a card; give --card, one of {', '.join(CARDS)}") for name in ("fit", "step_ms")),
        ("reserve", card, "without a card; leave it out, or give --card"),
        *((name, options.compare is None, f"with --compare; {out}") for name in ("fit", "step_ms")),
        ("rank", options.compare != "strategies", f"with --compare strategies; {out}"),
        ("optimizer", options.compare != "layouts", f"with --compare layouts, which plans all; {out}"),
        ("params", model is None, f"{options.params} with a shape; {out}"),
        (
            *("checkpointing", stored or options.checkpointing != "selective"),
            "selective without --eager-attention: no scores are stored; leave it out",
        ),
        ("no_biases", not options.qkv_biases, f"with --qkv-biases; {out}"),
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
        suffix = {"auto": "", "none": "-stochastic"}.get(options.master, f"-{options.master}")
        arguments |= {"optimizer": f"halfstep{suffix}", "master": None}
    if model is None:
        return {**arguments, "params": options.params}
    return {**arguments, "model": model, "batch": 1 if options.batch is None else options.batch}


def compared_strategies(
    arguments: dict[str, Any], gpus: Sequence[int], strategies: Sequence[str]
) -> list[tuple[str, Plan]]:
    """Plans of strategies (default: all but ``"single"``) on numbers of GPUs, each with its label.

    A strategy that cannot offload is planned without offload, one that keeps all gradients without steps in the
    backward, and one without DDP's buckets without their views. With moments in 8 bits, strategies that cut rows of
    parameters are left out. ``hsdp`` without ``shard`` has two groups.

    Raises:
        ValueError: the arguments cannot be used for the comparison.
    """
    if min(gpus) // arguments["tensor_parallel"] < 2:
        raise ValueError(f"gpus is {min(gpus)}; strategies differ only on 2 or more data-parallel GPUs")
    row = layout(arguments["optimizer"], arguments["precision"], moments=arguments["moments"])
    several = [name for name in STRATEGIES if name != "single"]
    for name in strategies:
        one_of("strategy", name, several)
    plans = []
    for name in strategies or [name for name in several if STRATEGIES[name].keeps_rows or not row.needs_rows]:
        for count in gpus:
            ranks = count // arguments["tensor_parallel"]
            shard = arguments["shard"] or (ranks // 2 if ranks % 2 == 0 else ranks) if name == "hsdp" else None
            able = STRATEGIES[name].offloads and (name not in MIRRORED or arguments["optimizer"].startswith("halfstep"))
            released = arguments["step_in_backward"] if name in STEPPING_IN_BACKWARD else None
            view = arguments["bucket_view"] and STRATEGIES[name].buckets and released is None
            changes = {"strategy": name, "gpus": count, "shard": shard, "step_in_backward": released}
            changes |= {"bucket_view": view, "offload": arguments["offload"] and bool(able)}
            label = name + (f", groups of {shard}" if shard else "") + (f", {count:,} GPUs" if len(gpus) > 1 else "")
            plans.append((label, plan(**{**arguments, **changes})))
    return plans


def compared_layouts(arguments: dict[str, Any]) -> list[tuple[str, Plan]]:
    """Plans of all layouts of one precision, and of torch's AdamW in fp32 and under autocast, each with its label.

    Only halfstep's layouts step in the backward. Moments in 8 bits are left out where the strategy cuts rows.

    Raises:
        ValueError: the arguments cannot be used for the comparison.
    """
    for name in ("moments", "master", "gradients"):
        if arguments[name] is not None:
            raise ValueError(f"{name} is {arguments[name]!r} while layouts are compared; leave it out")
    precision, strategy = arguments["precision"], arguments["strategy"] or "single"
    one_of("precision", precision, PRECISIONS)
    one_of("strategy", strategy, STRATEGIES)
    compute = layout("torch", precision).compute.name
    of_torch = ("fp32", "fp32" if compute == "fp32" else f"amp-{compute}")
    rows = [
        row
        for row in LAYOUTS
        if (row.precision == precision or (row.optimizer == "torch" and row.precision in of_torch))
        and (row.amsgrad or not arguments["amsgrad"])
        and (STRATEGIES[strategy].keeps_rows or not row.needs_rows)
        and (row.optimizer, row.precision) != ("halfstep", "bf16")  # the same as halfstep-split
    ]
    plans = []
    for row in sorted(rows, key=lambda row: (*of_torch, precision).index(row.precision)):
        released = arguments["step_in_backward"] if row.optimizer.startswith("halfstep") else None
        changes = {"optimizer": row.optimizer, "precision": row.precision, "step_in_backward": released}
        label = row.optimizer if row.precision == precision != "fp32" else row.name
        plans.append((label, plan(**{**arguments, **changes})))
    return plans


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
        if dest == "flash":
            options["eager-attention"] = None
            continue
        option = OF_A_PLAN[dest.replace("_", "-")]
        value = (value,) if dest == "gpus" else value
        options[option.name] = None if value == option.default else "" if value == option.const else option.text(value)
    return options


def planned(options: argparse.Namespace, with_ways: bool = True) -> dict[str, Any]:
    """The content of ``--json``, which docs/planning.md describes; `with_ways`, with the ways to fit.

    Raises:
        ValueError: an option is refused.
    """
    one_of("--fit", options.fit, FITS)
    gpus, strategies = options.gpus, options.strategy.split(",") if options.strategy else []
    for name, values in (("--gpus", gpus), ("--strategy", strategies)):
        if len(values) > 1 and options.compare != "strategies":
            text = ",".join(map(str, values))
            raise ValueError(f"{name} is {text}; give one value, or add --compare strategies to plan each")
    arguments = {**_arguments(options), "gpus": gpus[0], "strategy": strategies[0] if strategies else None}
    gpu = None if options.card is None else card(options.card)
    if options.step_ms is not None and gpu is not None and gpu.flops is None:
        raise ValueError(f"--step-ms with a card of unknown speed, {gpu.name}; give a --card by name")
    largest, ways = None, []
    if options.compare is None:
        result = plan(**arguments)
        plans = [(f"{result.layout.name}, {result.strategy.name}", result)]
        if gpu is not None:
            memory = usable(gpu, options.reserve)
            ways = ways_to_fit(memory, **arguments) if with_ways else []
            best = None if options.fit == "none" else fit(options.fit, memory, **arguments)
            fitting = None if best is None else _with_card(best, gpu, options.reserve)
            largest = None if options.fit == "none" else {"what": options.fit, "plan": fitting}
    else:
        one_of("compare", options.compare, COMPARISONS)
        layouts = options.compare == "layouts"
        plans = compared_layouts(arguments) if layouts else compared_strategies(arguments, gpus, strategies)
    shown = [{"label": label, **_with_card(result, gpu, options.reserve, options.step_ms)} for label, result in plans]
    changes = [
        {"options": changed_options(way.options), "costs": list(way.texts), "peak": way.plan.totals.peak}
        for way in ways
    ]
    return {"halfstep": __version__, "compare": options.compare, "plans": shown, "fit": largest, "ways": changes}


def _plan(options: argparse.Namespace) -> int:
    if options.port and options.page is not True:
        raise ValueError("--port without a server; leave it out, or give --page without a file")
    settings = [
        option for group in OPTIONS.values() for option in group if option.name not in ("page", "no-open", "port")
    ]
    if options.page is None or any(getattr(options, option.dest) != option.default for option in settings):
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
