"""The parts of a plan: what takes memory on one GPU, when, and whether that is exact. Needs no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from halfstep.numerics.planning import plan_work
from halfstep.numerics.planning.plan_layouts import Layout, Stored
from halfstep.numerics.planning.plan_shapes import Transformer, Unit, tensors_of
from halfstep.numerics.planning.plan_sharding import Locals, Shards, Strategy

_DEEPSPEED_BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size

ALWAYS, BACKWARD, STEP = "always", "backward", "step"
GPU, HOST = "gpu", "host"


@dataclass(frozen=True)
class Part:
    """One thing that takes memory on one GPU.

    Args:
        name: of the part.
        bytes: on this GPU (or its share of the host).
        per_parameter: bytes for each parameter, before the division; None where it does not go by parameters.
        divisor: GPUs among which it is divided.
        phase: when it is there: ``"always"``, ``"backward"`` (forward and backward) or ``"step"``.
        exact: to the byte, or an estimate.
        place: ``"gpu"`` or ``"host"``.
        note: what it is, or what one would not expect.
    """

    name: str
    bytes: int
    per_parameter: Fraction | None
    divisor: int
    phase: str
    exact: bool
    place: str = GPU
    note: str = ""

    @property
    def counts(self) -> bool:
        """Whether the ZeRO paper would count it: weights, gradients and states, but no buckets and scalars."""
        return self.phase == ALWAYS and self.name not in ("buckets", "scalars")


@dataclass(frozen=True)
class Totals:
    """Bytes per GPU.

    Args:
        state: what is always there: weights, gradients, states.
        backward: what forward and backward need besides.
        step: what the optimizer's step needs besides.
        peak: `state` and the larger of the two. Gradients set to None between steps are not there when activations
            are most, so it is rather too much than too little.
        host: bytes of the host's memory for this GPU.
    """

    state: int
    backward: int
    step: int
    peak: int
    host: int


def _bytes(stored: Stored, held: Locals) -> int:
    return sum(count * stored.bytes(size) for size, count in held)


def kept(
    row: Layout,
    how: Strategy,
    ways: int,
    mine: Shards,
    summed: Stored | None,
    amsgrad: bool,
    offload: bool,
    shaped: bool,
) -> list[Part]:
    """Weights, gradients and states."""
    everything = HOST if offload and how.offloads == "all" else GPU
    states = HOST if offload else GPU
    by = {True: ways, False: 1}

    def part(name: str, stored: Stored, held: Locals, divided: bool, place: str) -> Part:
        return Part(name, _bytes(stored, held), stored.per_parameter, by[divided], ALWAYS, True, place, stored.name)

    parts = [
        part("weights", row.weights, mine.weights, how.weights, everything),
        part("gradients", row.gradients, mine.gradients, how.gradients, everything),
    ]
    if summed is not None:
        parts.append(part("accumulated gradients", summed, mine.gradients, how.gradients, everything))
    parts += [part(name, stored, mine.states, how.states, states) for name, stored in row.states(amsgrad)]
    if shaped and row.scalars:
        size = row.scalars * sum(count for _, count in mine.states)
        counted = not row.optimizer.startswith("te")  # TransformerEngine's are read in its source only
        parts.append(Part("scalars", size, None, 1, ALWAYS, counted, states, "step counts, scales"))
    return parts


def buckets(how: Strategy, ranks: int, local: int, row: Layout, sent: Stored, bucket_view: bool) -> list[Part]:
    if ranks == 1 or not (how.buckets or how.by == "flat"):
        return []
    if how.by == "flat":
        size = min(_DEEPSPEED_BUCKET, local) * row.gradients.width
        return [Part("buckets", size, None, 1, BACKWARD, False, GPU, "5e8 gradients, DeepSpeed's default")]
    parts = []
    width = row.gradients.width
    if not bucket_view:
        note = "DDP's copy of the gradients"
        parts.append(Part("buckets", local * width, Fraction(width), 1, ALWAYS, True, GPU, note))
    if sent.width < width:
        # torch's default: the first bucket 1 MiB, the others 25 MiB, counted in the gradients' own format.
        size = min(25 * 2**20, local * width) * sent.width // width
        parts.append(Part("compressed bucket", size, None, 1, BACKWARD, False, GPU, "one of 25 MiB on its way"))
    return parts


def gathered(row: Layout, how: Strategy, ways: int, held: Sequence[Unit], sent: Stored, shaped: bool) -> list[Part]:
    """Whole units in flight under FSDP: the one computed and the next one gathered; the root stays."""
    if not how.gathers or ways == 1 or not shaped:
        return []
    largest = max((one.elements for one in held if not one.root), default=0)
    root = sum(one.elements * one.count for one in held if one.root)
    several = sum(one.count for one in held if not one.root) > 1
    whole_units = root + largest * (2 if several else 1)
    reduced = largest or root
    width = row.compute.width
    return [
        Part(
            *("gathered weights", whole_units * width, None, 1, BACKWARD, False, GPU),
            "the root and two units",
        ),
        Part(
            *("unreduced gradients", reduced * (width + sent.width), None, 1, BACKWARD, False, GPU),
            "largest unit, and its copy to reduce",
        ),
    ]


def autocast_copies(row: Layout, how: Strategy, held: Sequence[Unit], shaped: bool) -> list[Part]:
    """What autocast keeps of fp32 weights from forward to backward; FSDP gathers them cast instead."""
    if not row.autocast or how.gathers:
        return []
    cast = sum(count * tensor.elements for tensor, count in tensors_of(held) if tensor.cast)
    note = "by autocast, kept for backward"
    size = cast * row.compute.width
    return [Part("cast weights", size, row.compute.per_parameter, 1, BACKWARD, shaped, GPU, note)]


def activations(
    row: Layout, model: Transformer, batch: int, seq: int, t: int, sequence_parallel: bool, checkpointing: str
) -> list[Part]:
    width = row.compute.width
    found = plan_work.activations(
        model,
        batch,
        seq,
        width=width,
        tensor_parallel=t,
        sequence_parallel=sequence_parallel,
        checkpointing=checkpointing,
    )
    logits = batch * seq * model.vocab // t
    listed = [
        ("activations", found.saved, "saved by the blocks"),
        ("recomputed", found.recomputed, "blocks computed again at once"),
        ("outer activations", found.ends, "around the blocks"),
        ("logits", 4 * logits, "in fp32"),
        (
            "loss",
            logits * (4 + (width if width < 4 else 0)),
            "log-softmax, and 16-bit logits" if width < 4 else "log-softmax",
        ),
    ]
    return [Part(name, size, None, 1, BACKWARD, False, GPU, note) for name, size, note in listed if size]


def totals(parts: Sequence[Part]) -> Totals:
    def of(phase: str) -> int:
        return sum(part.bytes for part in parts if part.phase == phase and part.place == GPU)

    state, backward, step = of(ALWAYS), of(BACKWARD), of(STEP)
    host = sum(part.bytes for part in parts if part.place == HOST)
    return Totals(state, backward, step, state + max(backward, step), host)


def temporaries(row: Layout, how: Strategy, ways: int, mine: Shards, offload: bool) -> list[Part]:
    """What the step allocates for its own length."""
    if not row.temporary:
        return []
    size = row.temporary * sum(size * count for size, count in mine.states)
    each, divisor, place = Fraction(row.temporary), ways if how.states else 1, HOST if offload else GPU
    notes = {"torch": "square root of exp_avg_sq", "apex-o2": "fp32 gradients"}
    note = notes.get(row.optimizer, "fp32 copies of smaller states")
    return [Part("step temporaries", size, each, divisor, STEP, False, place, note)]
