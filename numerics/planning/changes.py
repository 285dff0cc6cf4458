"""The smallest changes with which a training fits a GPU that it does not fit.

Needs no torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from halfstep.numerics.planning.catalog import GIB
from halfstep.numerics.planning.layouts import layout
from halfstep.numerics.planning.models import Transformer
from halfstep.numerics.planning.plans import USUAL_BUCKET, Plan, plan
from halfstep.numerics.planning.sharding import BUSES

SHORTEST = 512  # tokens of the shortest sequence that is proposed
MOST_GPUS = 64
MOST_CHANGES = 4  # in one way


class Change(NamedTuple):
    """A change of arguments of `plan`, by the names of the command's options; `effort` ranks it among others."""

    options: dict[str, Any]
    text: str  # what it is and what it costs, with the numbers of `_costs` in braces
    effort: int


@dataclass(frozen=True)
class Way:
    """Changes that make a training fit."""

    options: dict[str, Any]  # the arguments of `plan` that change; ``flash`` is that of the model
    texts: tuple[str, ...]  # for each change, what it is and what it costs
    plan: Plan  # with the changes


def ways_to_fit(memory: int, most: int = 4, **arguments: Any) -> list[Way]:
    """The smallest changes of a training whose peak is then at most `memory` bytes, those of least effort first.

    No way contains all changes of another one, or larger ones, nor all its changes but those of `_MILD` and more. A
    training that fits needs no change: the list is then empty.

    Args:
        memory: bytes, without the reserve for what a plan does not count; see `usable`.
        most: the number of ways.
        arguments: the arguments of `plan`.

    Raises:
        ValueError: `plan` refuses an argument.

    Examples:
        >>> from halfstep.numerics.planning import MODELS, card, usable, ways_to_fit
        >>> ways = ways_to_fit(usable(card("h100")), model=MODELS["llama-3-8b"], batch=1, seq=2048)
        >>> ways[0].options, ways[0].plan.totals.peak >> 30
        ({'optimizer': 'halfstep-split-8bit', 'step_in_backward': 26214400}, 67)
    """
    before = plan(**arguments)
    if before.totals.peak <= memory:
        return []
    levers = [lever for lever in _levers(before, arguments) if lever]
    # A pick is the number of a change by the number of its lever.
    picks = [
        dict(zip(some, numbers, strict=True))
        for count in range(1, MOST_CHANGES + 1)
        for some in itertools.combinations(range(len(levers)), count)
        for numbers in itertools.product(*(range(len(levers[lever])) for lever in some))
    ]
    picks.sort(key=lambda pick: sum(levers[lever][number].effort for lever, number in pick.items()))
    ways: list[tuple[dict[int, int], frozenset[int], Way]] = []
    for pick in picks:
        hard = frozenset(lever for lever in pick if not _MILD >= levers[lever][0].options.keys())
        if any(
            other < hard or all(pick.get(lever, -1) >= number for lever, number in smaller.items())
            for smaller, other, _ in ways
        ):
            continue
        changes = [levers[lever][number] for lever, number in pick.items()]
        options = {name: value for change in changes for name, value in change.options.items()}
        try:
            after = plan(**_changed(arguments, options))
        except ValueError:  # these changes do not go together
            continue
        if after.totals.peak <= memory:
            costs = _costs(before, after)
            changed = {name: value for name, value in options.items() if before.settings.get(name) != value}
            ways.append((pick, hard, Way(changed, tuple(change.text.format_map(costs) for change in changes), after)))
            if len(ways) == most:
                break
    return [way for _, _, way in ways]


def _changed(arguments: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    changes = dict(options)
    if changes.pop("flash", False):
        changes["model"] = replace(arguments["model"], flash=True)
    return {**arguments, **changes}


def _costs(before: Plan, after: Plan) -> dict[str, str]:
    """What changes cost, as texts: bytes per parameter, FLOPs, memory of the host, bytes over the bus and sent."""
    bus = sum(each.bytes for each in after.communication if each.ranks == 1)
    again = 0.0 if after.work is None else after.work.hardware / after.work.training - 1
    trained = after.parameters - before.parameters  # with LoRA, whose adapters are all that is added
    each, usual = (float(made.layout.per_parameter(made.settings["amsgrad"])) for made in (after, before))
    times = ", ".join(f"{bus / rate:.2g} s at {rate // 10**9} GB/s" for _, rate in BUSES)
    return {
        "bytes": f"{each:.4g} instead of {usual:.4g} B per parameter",
        "again": f"{again:.0%} more FLOPs",
        "host": f"{after.totals.host / GIB:.0f} GiB there per GPU; {bus / 1e9:.3g} GB over PCIe a step, {times}",
        "sent": f"{after.bytes_sent / 1e9:.3g} GB a step",
        "trained": f"{trained:,} numbers ({100 * trained / after.parameters:.2g}%)",
    }


def _levers(before: Plan, arguments: dict[str, Any]) -> Iterator[Sequence[Change]]:
    """Changes by what they change; a way takes at most one of each."""
    settings = before.settings
    model, batch, seq, gpus = arguments.get("model"), settings["batch"], settings["seq"], settings["gpus"]
    no_view = {"bucket_view": False} if settings["bucket_view"] else {}
    yield list(_layouts(before))
    if settings["step_in_backward"] is None:
        released = "steps in the backward: no accumulation, a second backward to clip exactly"
        yield [Change({"step_in_backward": USUAL_BUCKET, **no_view}, released, 1)]
    if isinstance(model, Transformer):
        flash = "attention scores not stored (scaled_dot_product_attention): same result"
        yield [Change({"flash": True}, flash, 0)] * (not model.flash)
        chunked = "logits in 16 chunks (Liger's fused loss): same result"
        yield [Change({"loss_chunks": 16}, chunked, 1)] * (settings["loss_chunks"] == 1)
        if settings["checkpointing"] != "full":
            yield [Change({"checkpointing": "full"}, "activations recomputed: {again}", 2)]
        if batch > 1:
            smaller = f"1 instead of {batch} sequences at a time: {batch} micro-batches for the same step"
            yield [Change({"batch": 1}, smaller, 2)]
        shorter = (seq >> halvings for halvings in range(1, seq.bit_length()))
        yield [
            Change({"seq": length}, f"{length:,} instead of {seq:,} tokens: shorter context", 2 + halvings)
            for halvings, length in enumerate(shorter, 1)
            if length >= SHORTEST
        ]
        if settings["lora"] is None:
            yield [Change({"lora": 16}, "LoRA: {trained} trained, all weights frozen", 6)]
    if not settings["offload"]:
        yield [Change({"offload": True}, "states and steps on the host: {host}", 3)]
    more = [gpus * factor for factor in (1, 2, 4, 8, 16, 32, 64) if gpus * factor <= MOST_GPUS]
    yield [
        Change(
            {"gpus": count, "strategy": "fsdp", **no_view},
            f"everything divided among {count} GPUs by FSDP2: each sends {{sent}}",
            1 if count == gpus else 3 + number,
        )
        for number, count in enumerate(more)
        if count // settings["tensor_parallel"] > 1 and (count, "fsdp") != (gpus, settings["strategy"])
    ]


# Changes that neither change what is learned nor need more hardware.
_MILD = {"flash", "loss_chunks", "checkpointing", "batch"}
# Layouts of halfstep, by the weights' precision: arguments, text and effort.
_EXACT = {"precision": "bf16", "moments": None, "master": None}
_BF16_LAYOUTS: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({**_EXACT, "optimizer": "halfstep"}, "bf16 weights with exact fp32 masters", 1),
    ({**_EXACT, "optimizer": "halfstep-split-8bit"}, "exact fp32 masters, moments in 8 bits", 1),
    ({**_EXACT, "optimizer": "halfstep-split24-8bit"}, "masters of 24 bits, moments in 8 bits", 2),
    ({**_EXACT, "optimizer": "halfstep-stochastic-8bit"}, "no masters, stochastic rounding, moments in 8 bits", 5),
)
_FP16_LAYOUTS: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({"optimizer": "halfstep", "moments": "8bit"}, "fp32 masters, moments in 8 bits", 1),
)


def _layouts(before: Plan) -> Iterator[Change]:
    """Layouts of halfstep with fewer bytes per parameter."""
    amsgrad = before.settings["amsgrad"]
    for options, text, effort in _FP16_LAYOUTS if before.settings["precision"] == "fp16" else _BF16_LAYOUTS:
        row = layout(options["optimizer"], options.get("precision", "fp16"), moments=options.get("moments"))
        if row.per_parameter(amsgrad) < before.layout.per_parameter(amsgrad):
            yield Change(options, f"{text}: {{bytes}}", effort)
