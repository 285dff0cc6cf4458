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
from typing import Any

from halfstep._version import __version__
from halfstep.cli.command_line import answer, run
from halfstep.cli.plan_options import COMPARISONS, OF_A_PLAN, parser, settings
from halfstep.cli.terminal import say
from halfstep.numerics.messages import one_of
from halfstep.numerics.planning.catalog import MODELS, card, from_config, usable
from halfstep.numerics.planning.changes import ways_to_fit
from halfstep.numerics.planning.layouts import LAYOUTS, PRECISIONS, layout
from halfstep.numerics.planning.plans import Plan, plan
from halfstep.numerics.planning.sharding import STRATEGIES

# Options of a plan that are no arguments of `plan`.
NOT_OF_PLAN = {"card", "compare", "eager_attention", "model", "params"}


def _arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `plan`. Raises ValueError if there is no model, or no answer would depend on an option."""
    if options.model is None and options.params is None:
        raise ValueError("expected a model, but got none: pass --params 7e9 or --model llama-3-8b")
    shaped, out = options.model is not None, "leave one of them out"
    tokens = shaped or None not in (options.batch, options.seq)
    for name, used, why in (
        ("optimizer", options.compare != "layouts", f"with --compare layouts, which plans all; {out}"),
        ("moments", options.compare != "layouts", f"with --compare layouts, which plans all; {out}"),
        ("params", not shaped, f"{options.params} with --model; {out}"),
        ("eager-attention", shaped, "without --model; leave it out"),
        *((name, tokens, "with --params; give both --batch and --seq, or neither") for name in ("batch", "seq")),
    ):
        if not used and getattr(options, OF_A_PLAN[name].dest) != OF_A_PLAN[name].default:
            raise ValueError(f"--{name} {why}")
    arguments = {name: getattr(options, name) for name in {option.dest for option in OF_A_PLAN.values()} - NOT_OF_PLAN}
    if not shaped:
        return {**arguments, "params": options.params}
    model = MODELS.get(options.model.lower()) or from_config(options.model)
    model = replace(model, flash=False) if options.eager_attention else model
    return {**arguments, "model": model, "batch": options.batch or 1}


def compared_strategies(arguments: dict[str, Any]) -> list[tuple[str, Plan]]:
    """Plans of all strategies but ``"single"``, each with its label.

    A strategy that cannot offload is planned without offload, one that keeps all gradients without steps in the
    backward, and one without DDP's buckets without their views. With moments in 8 bits, strategies that cut rows of
    parameters are left out. ``hsdp`` without ``shard`` has two groups. Raises a ValueError for other arguments.
    """
    gpus = arguments["gpus"]
    if gpus < 2:
        raise ValueError(f"gpus is {gpus}; strategies differ only on 2 or more GPUs")
    row = layout(arguments["optimizer"], arguments["precision"], moments=arguments["moments"])
    plans = []
    for name, strategy in STRATEGIES.items():
        if name == "single" or not strategy.holds(row):
            continue
        shard = arguments["shard"] or (gpus if gpus % 2 else gpus // 2) if name == "hsdp" else None
        released = arguments["step_in_backward"] if strategy.releases(row) else None
        able = strategy.offloads and (strategy.by != "nothing" or row.ours)
        changes = {"strategy": name, "shard": shard, "step_in_backward": released}
        changes["bucket_view"] = arguments["bucket_view"] and strategy.buckets and released is None
        changes["offload"] = arguments["offload"] and bool(able)
        kept = (arguments["keep_weights"] and strategy.by_rows) or row.adamw is not None
        changes["keep_weights"] = kept and changes["offload"]
        plans.append((name + (f", groups of {shard}" if shard else ""), plan(**{**arguments, **changes})))
    return plans


def compared_layouts(arguments: dict[str, Any]) -> list[tuple[str, Plan]]:
    """Plans of all layouts of one precision, and of torch's AdamW in fp32 and under autocast, each with its label."""
    precision, strategy = arguments["precision"], arguments["strategy"] or "single"
    one_of("precision", precision, PRECISIONS)
    one_of("strategy", strategy, STRATEGIES)
    of_torch = ("fp32", f"amp-{precision.removeprefix('amp-')}")
    rows = [
        row
        for row in LAYOUTS
        if (row.precision == precision or (row.optimizer == "torch" and row.precision in of_torch))
        and STRATEGIES[strategy].holds(row)
        and (row.optimizer, row.precision) not in (("halfstep", "bf16"), ("halfstep-muon", "bf16"))  # as "-split"
    ]
    plans = []
    for row in sorted(rows, key=lambda row: (*of_torch, precision).index(row.precision)):
        muon = row.adamw is not None
        keeps = not row.ours or (muon and (arguments["offload"] or not STRATEGIES[strategy].releases(row)))
        released = None if keeps else arguments["step_in_backward"]
        changes = {"optimizer": row.optimizer, "precision": row.precision, "step_in_backward": released}
        changes["keep_weights"] = arguments["keep_weights"] or (muon and arguments["offload"])
        label = row.optimizer if row.precision == precision != "fp32" else row.name
        plans.append((label, plan(**{**arguments, **changes})))
    return plans


def changed_options(changes: dict[str, Any]) -> dict[str, str | None]:
    """Changed arguments of `plan` as options of the command: text, "" for a flag, None for one to leave out."""
    options: dict[str, str | None] = {}
    for dest, value in changes.items():
        if dest == "flash":
            options["eager-attention"] = None
            continue
        option = OF_A_PLAN[dest.replace("_", "-")]
        options[option.name] = None if value == option.default else "" if value == option.const else option.text(value)
    return options


def planned(options: argparse.Namespace) -> dict[str, Any]:
    """The content of ``--json``, which docs/planning.md describes. Raises ValueError for an option that is refused."""
    arguments = _arguments(options)
    gpu = None if options.card is None else card(options.card)
    ways = []
    if options.compare is None:
        result = plan(**arguments)
        plans = [(f"{result.layout.name}, {result.settings['strategy']}", result)]
        ways = [] if gpu is None else ways_to_fit(usable(gpu), **arguments)
    else:
        one_of("compare", options.compare, COMPARISONS)
        plans = (compared_layouts if options.compare == "layouts" else compared_strategies)(arguments)
    changes = [
        {"options": changed_options(way.options), "costs": list(way.texts), "peak": way.plan.totals.peak}
        for way in ways
    ]
    shown = []
    for label, result in plans:
        shown.append({"label": label, **result.as_dict(), "card": None})
        if gpu is not None:
            left = usable(gpu) - result.totals.peak
            shown[-1]["card"] = {**asdict(gpu), "usable": usable(gpu), "left": left, "fits": left >= 0}
    return {"halfstep": __version__, "compare": options.compare, "plans": shown, "ways": changes}


def _plan(options: argparse.Namespace) -> int:
    if options.port and options.page is not True:
        raise ValueError("--port without a server; leave it out, or give --page without a file")
    state = settings(options) or None
    if options.page is None or state is not None:
        from halfstep.cli import plan_tables

        content = planned(options)
        answer(options, lambda: content, lambda: plan_tables.shown(content))
    if options.page is None:
        return 0
    from halfstep.cli.pages.server import serve, write

    stream = sys.stderr if options.json else sys.stdout
    if options.page is True:
        return serve("planner", state, options.port, not options.no_open, stream)
    say(write(options.page, "planner", state), stream)
    return 0


def main(argv: Sequence[str]) -> int:
    return run(parser(), argv, _plan, (ValueError, ImportError))
