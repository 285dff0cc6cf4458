"""The smallest changes that make a training fit a GPU."""

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

SHORTEST = 512  # the shortest sequence to propose, in tokens
MOST_GPUS = 64
MOST_CHANGES = 4  # per way
MOST_WAYS = 4
# Arguments whose changes neither affect what is learned nor need more hardware.
MILD = {"flash", "loss_chunks", "checkpointing", "batch"}


class Change(NamedTuple):
    """A change of arguments of `plan`."""

    options: dict[str, Any]
    text: str  # the change and its cost, with the keys of `_costs` in braces
    effort: int  # ranks ways: that of a way is the sum over its changes


@dataclass(frozen=True)
class Way:
    """Changes that together make a training fit."""

    options: dict[str, Any]  # the arguments of `plan` that change, and the model's ``flash``
    texts: tuple[str, ...]  # a description of each change and its cost
    plan: Plan  # with the changes


def ways_to_fit(memory: int, **arguments: Any) -> list[Way]:
    """Up to four ways to reduce the peak to at most `memory` bytes, those of least effort first.

    No way includes all changes of an earlier one, or larger ones, nor, apart from those in `MILD`, all of its changes
    and more. If the training fits already, the list is empty.

    Args:
        memory: available bytes, after subtracting a reserve for what a plan does not count; see `usable`.
        arguments: the arguments of `plan`.

    Raises:
        ValueError: `plan` rejects an argument.

    Examples:
        >>> from halfstep.numerics.planning import MODELS, card, usable, ways_to_fit
        >>> ways = ways_to_fit(usable(card("h100")), model=MODELS["llama-3-8b"], batch=1, seq=2048)
        >>> ways[0].options, ways[0].plan.totals.peak >> 30
        ({'optimizer': 'halfstep-split24-8bit'}, 65)
    """
    before = plan(**arguments)
    if before.totals.peak <= memory:
        return []
    levers = [lever for lever in _levers(before, arguments) if lever]
    # A pick maps the index of a lever to the index of one of its changes.
    picks = [
        dict(zip(chosen, numbers, strict=True))
        for count in range(1, MOST_CHANGES + 1)
        for chosen in itertools.combinations(range(len(levers)), count)
        for numbers in itertools.product(*(range(len(levers[lever])) for lever in chosen))
    ]
    picks.sort(key=lambda pick: sum(levers[lever][number].effort for lever, number in pick.items()))
    solutions: list[tuple[dict[int, int], frozenset[int], Way]] = []
    for pick in picks:
        hard = frozenset(lever for lever in pick if not MILD >= levers[lever][0].options.keys())
        if any(
            its_hard < hard or all(pick.get(lever, -1) >= number for lever, number in smaller.items())
            for smaller, its_hard, _ in solutions
        ):
            continue
        changes = [levers[lever][number] for lever, number in pick.items()]
        options = {name: value for change in changes for name, value in change.options.items()}
        changed = arguments | {name: value for name, value in options.items() if name != "flash"}
        if "flash" in options:
            changed["model"] = replace(arguments["model"], flash=True)
        try:
            after = plan(**changed)
        except ValueError:  # these changes cannot be combined
            continue
        if after.totals.peak <= memory:
            costs = _costs(before, after)
            shown = {name: value for name, value in options.items() if before.settings.get(name) != value}
            texts = tuple(change.text.format_map(costs) for change in changes)
            solutions.append((pick, hard, Way(shown, texts, after)))
            if len(solutions) == MOST_WAYS:
                break
    return [solution for *_, solution in solutions]


def _costs(before: Plan, after: Plan) -> dict[str, str]:
    """The costs of changes as texts: bytes per parameter, FLOPs, host memory, bytes over PCIe and bytes sent."""
    bus = sum(message.bytes for message in after.communication if message.ranks == 1)
    again = 0.0 if after.work is None else after.work.hardware / after.work.training - 1
    trained = after.parameters - before.parameters  # with LoRA, which adds only its adapters
    less, usual = after.bytes_per_parameter, before.bytes_per_parameter
    times = ", ".join(f"{bus / rate:.2g} s at {rate // 10**9} GB/s" for _, rate in BUSES)
    return {
        "bytes": f"{less:.4g} instead of {usual:.4g} B per parameter",
        "again": f"{again:.0%} more FLOPs",
        "host": f"{after.totals.host / GIB:.0f} GiB there per GPU; {bus / 1e9:.3g} GB over PCIe a step, {times}",
        "sent": f"{after.bytes_sent / 1e9:.3g} GB a step",
        "trained": f"{trained:,} numbers ({100 * trained / after.parameters:.2g}%)",
    }


def _levers(before: Plan, arguments: dict[str, Any]) -> Iterator[Sequence[Change]]:
    """Alternative changes of one setting each; a way includes at most one change per lever."""
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
        recomputed = Change({"checkpointing": "full"}, "activations recomputed: {again}", 2)
        yield [recomputed] * (settings["checkpointing"] != "full")
        smaller = f"1 instead of {batch} sequences at a time: {batch} micro-batches for the same step"
        yield [Change({"batch": 1}, smaller, 2)] * ((batch or 1) > 1)
        shorter = [seq >> halvings for halvings in range(1, seq.bit_length()) if seq >> halvings >= SHORTEST]
        context = [f"{length:,} instead of {seq:,} tokens: shorter context" for length in shorter]
        yield [Change({"seq": shorter[i]}, context[i], 3 + i) for i in range(len(shorter))]
        yield [Change({"lora": 16}, "LoRA: {trained} trained, all weights frozen", 6)] * (settings["lora"] is None)
    hosted = {"offload": True}, {"offload": True, "keep_weights": True}  # the latter where Muon needs it
    chosen = hosted if before.layout.adamw is not None else hosted[:1]
    yield [Change(way, "states and steps on the host: {host}", 3) for way in chosen] * (not settings["offload"])
    divided = "everything divided among {} GPUs by FSDP2: each sends {{sent}}"
    yield [
        Change({"gpus": count, "strategy": "fsdp", **no_view}, divided.format(count), 3 + power if power else 1)
        for power, count in enumerate(gpus << power for power in range(7))
        if count <= MOST_GPUS and count > 1 and (count, "fsdp") != (gpus, settings["strategy"])
    ]


def _layouts(before: Plan) -> Iterator[Change]:
    """halfstep layouts with fewer bytes per parameter, for the precision of the weights."""
    bf16: dict[str, Any] = {"precision": "bf16", "moments": None}
    family = "halfstep" if before.layout.adamw is None else "halfstep-muon"
    rows: tuple[tuple[dict[str, Any], str, int], ...] = (
        ({**bf16, "optimizer": family}, "bf16 weights with exact fp32 masters", 1),
        ({**bf16, "optimizer": f"{family}-split-8bit"}, "exact fp32 masters, moments in 8 bits", 1),
        ({**bf16, "optimizer": f"{family}-split24-8bit"}, "masters of 24 bits, moments in 8 bits", 2),
        ({**bf16, "optimizer": f"{family}-stochastic-8bit"}, "no masters, stochastic rounding, moments in 8 bits", 5),
    )
    if before.layout.optimizer == "halfstep-sgd":
        coded = {"optimizer": "halfstep-sgd", "precision": before.settings["precision"], "moments": "8bit"}
        rows = ((coded, "momentum in 8 bits", 1),)
    elif before.settings["precision"] == "fp16":
        rows = (({"optimizer": family, "moments": "8bit"}, "fp32 masters, moments in 8 bits", 1),)
    for options, text, effort in rows:
        row = layout(options["optimizer"], options.get("precision", "fp16"), moments=options["moments"])
        if row.per_parameter() < before.layout.per_parameter():
            yield Change(options, f"{text}: {{bytes}}", effort)
