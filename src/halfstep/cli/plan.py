"""``halfstep plan``: the memory, messages and FLOPs of a training on each GPU, computed without a GPU.

The command prints bytes by part, messages per step and FLOPs and, with ``--card``, whether the training fits and, if
not, the smallest changes with which it does. ``--fit`` finds the largest model or batch that fits, ``--compare`` plans
all layouts or strategies, ``--json`` prints JSON, and ``--out`` draws stacked bars. ``--page`` serves the planner to
the browser, or writes one answer to a file. ``numerics/planning`` and docs/planning.md describe what is counted, and
how.

Exit status: 0, also if nothing fits; 2 for wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from halfstep._version import __version__
from halfstep.cli.command_line import Parser, output_file, picture, run
from halfstep.cli.numbers import above_zero, count, counts, share_or_bytes, whole
from halfstep.cli.terminal import say, show
from halfstep.numerics.messages import instead, one_of
from halfstep.numerics.planning import (
    CARDS,
    CHECKPOINTING,
    LAYOUTS,
    MODELS,
    OPTIMIZERS,
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
from halfstep.numerics.planning.changes import Way
from halfstep.numerics.planning.plans import STEPPING_IN_BACKWARD
from halfstep.numerics.planning.sharding import MIRRORED

SHAPE = ("layers", "hidden", "heads", "vocab", "seq")
OF_A_SHAPE = (
    *(
        "ffn",
        "kv_heads",
        "head_dim",
        "experts",
        "active_experts",
        "gated",
        "qkv_biases",
        "norm",
        "qk_norm",
        "block_norms",
    ),
    *("tied", "flash"),
)
FITS = ("none", "params", "layers", "batch")
OF_THE_PAGE = ("help", "page", "open", "port")
COMPARISONS = ("layouts", "strategies")


def parser() -> Parser:
    """The parser of the command line."""
    made = Parser(
        "plan",
        usage="halfstep plan MODEL [OPTIONS]",
        description="Plan a training: bytes by part, messages per step and FLOPs of each GPU. MODEL is --params, "
        "--model or the shape of a transformer; activations and gathered units are counted only for a shape.",
    )
    number: dict[str, Any] = {"type": count(), "metavar": "N"}
    name: dict[str, Any] = {"metavar": "NAME"}
    form: dict[str, Any] = {"metavar": "FORMAT"}
    flag: dict[str, Any] = {"action": "store_true"}

    add = made.add_argument_group("model").add_argument
    params = count(", such as 7e9, 7B or 350M")
    add("--params", type=params, metavar="N", help="number of parameters, such as 7e9, 7B or 350M")
    add("--model", **name, help=f"a config.json of Hugging Face, or a published shape: {', '.join(MODELS)}")
    add("--layers", **number, help="number of blocks")
    add("--hidden", **number, help="width")
    add("--heads", **number, help="attention heads")
    add("--vocab", **number, help="rows of embedding and head")
    add("--seq", **number, help="length of a sequence")
    add("--ffn", **number, help="width of the MLP (default: 4 times the width)")
    add("--kv-heads", **number, help="heads of keys and values (default: --heads)")
    add("--head-dim", **number, help="width of one head (default: --hidden / --heads)")
    add("--experts", **number, help="MLPs of a mixture of experts, with a router")
    add("--active-experts", **number, help="experts that compute each token; with --experts")
    add("--gated", **flag, help="an MLP of three matrices, as in Llama")
    add("--no-biases", **flag, help="linear layers without biases")
    add("--qkv-biases", **flag, help="biases of queries, keys and values only")
    add("--norm", default=None, metavar="KIND", help="layer (default) or rms")
    add("--qk-norm", metavar="KIND", help="norms of queries and keys: head or width (default: none)")
    add("--block-norms", **number, help="norms of a block (default: 2)")
    add("--no-final-norm", **flag, help="no norm before the head (post-norm models)")
    add("--no-positions", **flag, help="no learned positions")
    add("--tied", **flag, help="the head uses the matrix of the embedding")
    add("--no-dropout", **flag, help="no dropout, and no dropout masks")
    add("--flash", **flag, help="attention that does not store its scores")

    add = made.add_argument_group("GPUs").add_argument
    several = "number of GPUs (default: 1); with --compare strategies also several numbers, such as 8,64,1024"
    add("--gpus", type=counts, default=(1,), metavar="N", help=several)
    compared = "with --compare strategies those to compare, such as ddp,fsdp (default: all)"
    add("--strategy", **name, help=f"{', '.join(STRATEGIES)} (default: ddp, on one GPU single); {compared}")
    add("--shard", **number, help="GPUs of one group of hsdp")
    add("--tensor-parallel", "--tp", default=1, **number, help="GPUs that share a layer")
    add("--sequence-parallel", **flag, help="they also shard norms and dropouts")
    add("--offload", **flag, help="offload to the host what the strategy can offload")
    add("--bucket-view", **flag, help="DDP with gradient_as_bucket_view=True")
    add("--compress", **form, help="send gradients in bf16, fp16 or fp32")
    add("--rank", type=whole(0), metavar="R", help="rank to plan (default: the one that holds most)")

    add = made.add_argument_group("layout").add_argument
    add("--precision", default="bf16", **name, help=f"{', '.join(PRECISIONS)} (default: bf16)")
    add("--optimizer", default="halfstep", **name, help=f"{', '.join(OPTIMIZERS)} (default: halfstep)")
    add("--moments", **form, help="format of the moments (ours: fp32, bf16, 8bit), or two, as fp8,fp16")
    add("--master", **form, help="format of the master (te-master)")
    add("--gradients", "--grad-dtype", **form, help="format of .grad")
    add("--accumulator", **form, help="add micro-batches to a second gradient of this format")
    add("--amsgrad", **flag, help="also store max_exp_avg_sq")
    add("--lora", type=count(), metavar="R", help="train adapters of R rows beside frozen weights")

    add = made.add_argument_group("step").add_argument
    add("--batch", **number, help="sequences of one micro-batch on one GPU (default: 1)")
    add("--accumulate", default=1, **number, help="micro-batches in a step (default: 1)")
    kinds = f"{', '.join(CHECKPOINTING)} (default: none; full if no KIND is given)"
    add("--loss-chunks", default=1, **number, help="parts in which head and loss compute the logits (default: 1)")
    add("--checkpointing", nargs="?", const="full", default="none", metavar="KIND", help=kinds)
    buckets = "step and free gradients in buckets of BYTES inside the backward (25 MiB if no BYTES are given)"
    add("--step-in-backward", type=count(), nargs="?", const=25 * 2**20, metavar="BYTES", help=buckets)
    add("--step-ms", type=above_zero, metavar="MS", help="measured time of a step, for MFU and HFU")

    add = made.add_argument_group("card").add_argument
    add("--card", **name, help=f"{', '.join(CARDS)}, or its memory, such as 24GiB")
    reserve = "memory reserved for what is not counted, such as 10%% or 4GiB (default: 10%%)"
    add("--reserve", type=share_or_bytes, default=Fraction(1, 10), metavar="SIZE", help=reserve)
    add("--fit", default="none", metavar="WHAT", help=f"find the largest that fits: {', '.join(FITS)}")

    add = made.add_argument_group("output").add_argument
    add("--compare", metavar="WHAT", help=f"plan all {' or all '.join(COMPARISONS)}")
    add("--json", **flag, help="print JSON instead of tables")
    add("--out", type=picture, metavar="FILE", help="draw stacked bars: .png, .svg or .pdf")
    page = "serve the planner to this machine's browser, with these settings, until Ctrl-C; to FILE, write this answer"
    add("--page", type=output_file, nargs="?", const=True, metavar="FILE", help=page)
    add("--open", **flag, help="open that page in the browser; without FILE, as --page")
    add("--port", type=whole(0, 65535), default=0, metavar="N", help="port of --page (default: any free)")
    return made


def _model(given: argparse.Namespace) -> Transformer | None:
    """The transformer that the arguments describe; None if they give a number of parameters only.

    Raises:
        ValueError: the shape is incomplete, or there are options of a shape without one.
    """
    named = [name for name in SHAPE if getattr(given, name) is not None]
    left_out = [name for name in ("biases", "final_norm", "positions", "dropout") if getattr(given, f"no_{name}")]
    options = {name: getattr(given, name) for name in OF_A_SHAPE}
    options = {name: value for name, value in options.items() if value not in (None, False)}
    changes = options | dict.fromkeys(left_out, False)
    if changes.pop("qkv_biases", False):
        changes["biases"] = "qkv"
    if given.model is not None:
        is_file = given.model.lower() not in MODELS and (given.model.endswith(".json") or Path(given.model).exists())
        if not is_file and given.model.lower() not in MODELS:
            meant = instead(given.model.lower(), MODELS, listed=False)
            raise ValueError(
                f"Expected --model to be the name of a published shape, but got {given.model!r}: {meant}halfstep plan "
                "--help lists them; for others pass the path of a config.json of Hugging Face, "
                "or --layers, --hidden, --heads, --vocab and --seq"
            )
        shape = from_config(given.model) if is_file else MODELS[given.model.lower()]
        return replace(shape, **{name: getattr(given, name) for name in named if name != "seq"}, **changes)
    if not [name for name in named if name != "seq"]:
        if changes:
            words = [*options, *(f"no-{name}" for name in left_out)]
            typed = ", ".join("--" + word.replace("_", "-") for word in words)
            raise ValueError(f"{typed} without a shape; give --model, or {', '.join('--' + n for n in SHAPE)}")
        return None
    missing = [f"--{name}" for name in SHAPE if name not in named]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing; a shape is {', '.join('--' + name for name in SHAPE)}")
    return Transformer(**{name: getattr(given, name) for name in SHAPE}, **changes)


def _arguments(given: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `plan`."""
    model = _model(given)
    if model is None and given.params is None:
        raise ValueError(
            "expected a model, but got none: pass --params 7e9, --model llama-3-8b, or the shape of a transformer"
        )
    if model is not None and given.params is not None:
        share = abs(model.parameters - given.params) / model.parameters
        if share > 0.1:
            raise ValueError(
                f"--params is {given.params:,}, but the shape has {model.parameters:,}; leave one of them out"
            )
    names = (
        *("gpus", "strategy", "shard", "tensor_parallel", "sequence_parallel", "precision", "optimizer", "moments"),
        *("master", "gradients", "accumulator", "amsgrad", "accumulate", "checkpointing", "offload", "bucket_view"),
        *("compress", "step_in_backward", "lora", "rank", "loss_chunks"),
    )
    batch = given.batch if given.batch is not None else None if model is None else 1
    about = {"params": given.params} if model is None else {"model": model}
    return {**about, "batch": batch, "seq": given.seq, **{name: getattr(given, name) for name in names}}


def compared(
    what: str, arguments: dict[str, Any], gpus: Sequence[int] = (), strategies: Sequence[str] = ()
) -> list[tuple[str, Plan]]:
    """Plans of all layouts of one precision, or of strategies, each with its label.

    Layouts are compared with torch's AdamW in fp32 and under autocast. A strategy that cannot offload is planned
    without offload, and one that keeps all gradients without steps in the backward. Moments in 8 bits are left out
    where the strategy cuts rows of parameters, and so are such strategies. ``hsdp`` without ``shard`` has two groups.

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
    for name in ("moments", "master", "gradients", "step_in_backward"):
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
    return [
        (
            row.optimizer if row.precision == arguments["precision"] != "fp32" else row.name,
            plan(**{**arguments, "optimizer": row.optimizer, "precision": row.precision}),
        )
        for row in rows
    ]


def _strategy(arguments: dict[str, Any], name: str, gpus: int, counted: bool) -> tuple[str, Plan]:
    """The label and the plan of a strategy. `counted`: whether the label gives the number of GPUs."""
    ranks = gpus // arguments["tensor_parallel"]
    shard = arguments["shard"] or (ranks // 2 if ranks % 2 == 0 else ranks) if name == "hsdp" else None
    able = bool(STRATEGIES[name].offloads) and (name not in MIRRORED or arguments["optimizer"].startswith("halfstep"))
    offload = arguments["offload"] and able
    released = arguments["step_in_backward"] if name in STEPPING_IN_BACKWARD else None
    changes = {
        **{"strategy": name, "gpus": gpus, "shard": shard, "offload": offload, "rank": None},
        "step_in_backward": released,
    }
    parts = [name, *([] if shard is None else [f"groups of {shard}"]), *([f"{gpus:,} GPUs"] if counted else [])]
    return ", ".join(parts), plan(**{**arguments, **changes})


def _with_card(made: Plan, gpu: Card | None, reserve: Fraction | int, step_ms: float | None) -> dict[str, Any]:
    """The JSON of a plan, with the card, whether the plan fits, MFU and HFU."""
    content: dict[str, Any] = {**made.as_dict(), "card": None, "mfu": None, "hfu": None}
    if gpu is not None:
        left = usable(gpu, reserve) - made.totals.peak
        content["card"] = {**asdict(gpu), "usable": usable(gpu, reserve), "left": left, "fits": left >= 0}
        if step_ms is not None and gpu.flops is not None:
            content["mfu"] = made.mfu(step_ms / 1e3, gpu.flops)
            content["hfu"] = made.hfu(step_ms / 1e3, gpu.flops)
    return content


def content_of(
    plans: Sequence[tuple[str, Plan]],
    compare: str | None = None,
    gpu: Card | None = None,
    reserve: Fraction | int = Fraction(1, 10),
    step_ms: float | None = None,
    largest: tuple[str, Plan | None] | None = None,
    ways: Sequence[Way] = (),
) -> dict[str, Any]:
    """The content of ``--json``, which docs/planning.md describes."""
    found = None
    if largest is not None:
        what, best = largest
        found = {"what": what, "plan": None if best is None else _with_card(best, gpu, reserve, None)}
    return {
        "halfstep": __version__,
        "compare": compare,
        "plans": [{"label": label, **_with_card(made, gpu, reserve, step_ms)} for label, made in plans],
        "fit": found,
        "ways": [
            {"options": changed_options(way.options), "costs": list(way.texts), "peak": way.plan.totals.peak}
            for way in ways
        ],
    }


def changed_options(changes: dict[str, Any]) -> dict[str, str | None]:
    """Changed arguments of `plan` as options of the command: text, "" for a flag, None for one to leave out."""
    actions = {action.dest: action for action in parser()._actions}
    options: dict[str, str | None] = {}
    for name, value in changes.items():
        action = actions[name]
        value = (value,) if name == "gpus" else value
        if value == action.default:
            text = None
        elif value is True or (action.nargs == "?" and value == action.const):
            text = ""
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        options[action.option_strings[0][2:]] = text
    return options


def _several(given: argparse.Namespace) -> tuple[tuple[int, ...], list[str]]:
    """The numbers of GPUs and the strategies to compare. In `given`, the first of each remains.

    Raises:
        ValueError: there are several, without --compare strategies.
    """
    gpus, strategies = given.gpus, given.strategy.split(",") if given.strategy else []
    if given.compare != "strategies":
        for name, values in (("--gpus", gpus), ("--strategy", strategies)):
            if len(values) > 1:
                text = ",".join(map(str, values))
                raise ValueError(f"{name} is {text}; give one value, or add --compare strategies to plan each")
    given.gpus, given.strategy = gpus[0], strategies[0] if strategies else None
    return gpus, strategies


def planned(given: argparse.Namespace, with_ways: bool = True) -> dict[str, Any]:
    """The content of ``--json`` for the options of the command; `with_ways`, with the ways to fit.

    Raises:
        ValueError: an option is refused.
    """
    given = argparse.Namespace(**vars(given))
    gpus, strategies = _several(given)
    arguments = _arguments(given)
    gpu = None if given.card is None else card(given.card)
    one_of("--fit", given.fit, FITS)
    if gpu is None:
        for name, value in (("--fit", given.fit != "none"), ("--step-ms", given.step_ms is not None)):
            if value:
                raise ValueError(f"{name} without a card; give --card, one of {', '.join(CARDS)}")
    if given.step_ms is not None and gpu is not None and gpu.flops is None:
        raise ValueError(f"--step-ms with a card of unknown speed, {gpu.name}; give a --card by name")
    if given.step_ms is not None and "model" not in arguments and (given.batch is None or given.seq is None):
        raise ValueError("--step-ms with --params only; give --batch and --seq too, or a shape")
    if given.compare is None:
        made = plan(**arguments)
        plans = [(f"{made.layout.name}, {made.strategy.name}", made)]
    else:
        plans = compared(given.compare, arguments, gpus, strategies)
    largest, ways = None, []
    if with_ways and given.compare is None and gpu is not None:
        ways = ways_to_fit(usable(gpu, given.reserve), **arguments)
    if given.fit != "none" and gpu is not None:
        if given.compare is not None:
            raise ValueError("--fit with --compare; give one of them")
        largest = (given.fit, fit(given.fit, usable(gpu, given.reserve), **arguments))
    return content_of(plans, given.compare, gpu, given.reserve, given.step_ms, largest, ways)


def _plan(given: argparse.Namespace) -> int:
    wants_page = given.page is not None or given.open
    if wants_page and all(getattr(given, a.dest) == a.default for a in parser()._actions if a.dest not in OF_THE_PAGE):
        return _page(given)
    content = planned(given)
    if given.json:
        print(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        from halfstep.cli import plan_tables

        show(*plan_tables.shown(content, shape_over_params(given)))
    if given.out is not None:
        from halfstep.cli import plan_picture

        plan_picture.draw(given.out, content)
    return _page(given) if wants_page else 0


def _page(given: argparse.Namespace) -> int:
    """Serve the planner with the given settings, or write it to a file. Returns the exit status."""
    from halfstep.cli.pages.planner import settings
    from halfstep.cli.pages.server import serve, write

    state, stream = settings(given) or None, sys.stderr if given.json else sys.stdout
    if given.page in (None, True):
        return serve("planner", state, given.port, given.open, stream)
    say(write(Path(given.page), "planner", state, given.open), stream)
    return 0


def shape_over_params(given: argparse.Namespace) -> int | None:
    """The number of parameters that was given in addition to a shape."""
    return None if _model(given) is None else given.params


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep plan`` with the arguments `argv`. Returns the exit status."""
    return run(parser(), argv, _plan, (ValueError, ImportError))
