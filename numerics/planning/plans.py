"""Plans of trainings: bytes per GPU by part, messages per step and FLOPs, and the largest plan that fits a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from halfstep.numerics.messages import one_of
from halfstep.numerics.planning import sharding, work
from halfstep.numerics.planning.layouts import Layout
from halfstep.numerics.planning.models import parameters_of, tensors_of
from halfstep.numerics.planning.sharding import Collective, Locals, elements
from halfstep.numerics.planning.training import Training
from halfstep.numerics.state_layout import StoredFormat

ALWAYS, BACKWARD, STEP = "always", "backward", "step"
GPU, HOST = "gpu", "host"
USUAL_BUCKET = 25 * 2**20  # bytes, of `halfstep.integrations.offload`
DEEPSPEED_BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size


@dataclass(frozen=True)
class Part:
    """A part of the memory of one GPU."""

    name: str
    bytes: int  # on this GPU, or in this GPU's share of the host's memory
    per_parameter: float | None = None  # bytes per parameter before sharding; None if it depends on something else
    divisor: int = 1  # the number of GPUs among which it is sharded
    phase: str = BACKWARD  # when it is allocated: "always", "backward" (forward and backward) or "step"
    exact: bool = False  # otherwise `bytes` is an estimate
    place: str = GPU  # or "host"
    note: str = ""


@dataclass(frozen=True)
class Totals:
    """Bytes per GPU.

    The peak is an upper bound if gradients are set to None between steps, since they are then not allocated when
    activations are largest.
    """

    state: int  # what is always allocated: weights, gradients, states
    backward: int  # what forward and backward need in addition
    step: int  # what the optimizer's step needs in addition
    peak: int  # the sum of `state` and the larger of the two
    host: int  # bytes of the host's memory for this GPU


@dataclass(frozen=True)
class Work:
    """FLOPs of one GPU in one step."""

    training: int  # forward and backward: the count of MFU
    hardware: int  # `training` and what checkpointing recomputes: the count of HFU
    exact: bool  # counted from the shape; otherwise 6 per parameter and token (Kaplan et al., Scaling laws, 2020, §2.1)


@dataclass(frozen=True)
class Plan:
    """The resources that training a model takes on each GPU."""

    parameters: int  # of the model
    active_parameters: int  # that compute a token
    layout: Layout
    settings: dict[str, Any]  # the arguments of `plan`, with defaults filled in
    parts: tuple[Part, ...]
    totals: Totals
    communication: tuple[Collective, ...]  # the messages of one GPU in a step
    work: Work | None  # in a step; None without a batch
    step_traffic: int  # bytes that the step of the optimizer reads and writes

    def part(self, name: str) -> Part:
        """The part with this name; raises ValueError if there is none."""
        one_of("part", name, [part.name for part in self.parts])
        return next(part for part in self.parts if part.name == name)

    @property
    def bytes_sent(self) -> int:
        """Bytes that one GPU sends to others in a step, without copies to and from its host."""
        return sum(message.bytes for message in self.communication if message.ranks > 1)

    def as_dict(self) -> dict[str, Any]:
        """The plan as numbers, strings, lists and dicts. docs/planning.md describes the keys."""
        row = self.layout
        return {
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "settings": self.settings,
            "layout": {"name": row.name, "bytes_per_parameter": float(row.per_parameter()), "source": row.source},
            "parts": [asdict(part) for part in self.parts],
            "totals": asdict(self.totals),
            "communication": [asdict(message) for message in self.communication],
            "bytes_sent": self.bytes_sent,
            "work": None if self.work is None else asdict(self.work),
            "step_traffic": self.step_traffic,
        }


def plan(params: float | None = None, **settings: Any) -> Plan:
    """Plan the training of a model.

    Args:
        params: number of parameters; or pass `model` or `units`.
        settings: the arguments of `Training`.

    Raises:
        ValueError: an argument is out of its range, or two arguments cannot be combined.

    Examples:
        >>> from halfstep.numerics.planning import plan
        >>> plan(7e9, gpus=8, strategy="fsdp").part("exp_avg").bytes  # 4 per parameter, an eighth on each GPU
        3500000000
    """
    training = Training(params, **settings)
    row, strategy, model, shards = training.row, training.strategy_row, training.model, training.shards
    parts = tuple(
        part
        for of in (_stored, _buckets, _gathered, _autocast_copies, _activations, _temporaries)
        for part in of(training)
    )
    widths = row.gradients.per_parameter, (row.compute if strategy.gathers else row.weights).per_parameter
    messages = [*training.sharding.communication(training.trained, training.weights, widths)]
    if training.offload:
        messages += sharding.over_the_bus(row, strategy, shards, training.mirrored)
    parameters = parameters_of(training.weights)
    idle = 0 if model is None else model.parameters - model.active_parameters
    settings = {field.name: getattr(training, field.name) for field in fields(training) if field.name != "units"}
    settings |= {"params": parameters, "model": None if model is None else asdict(model)}
    states = {name for name, _ in row.states()}
    rewritten = 2 * sum(part.bytes for part in parts if part.name in states)
    moved = math.ceil(row.moved_besides_states * elements(shards.states) + rewritten)
    counts, totals, flops = (parameters, parameters - idle), _totals(parts), _work(training)
    return Plan(*counts, row, settings, parts, totals, tuple(messages), flops, moved)


# ---------------------------------------------------------------------------------------------------------- parts


def _stored(training: Training) -> Iterator[Part]:
    """Weights, gradients and states."""
    row, strategy, shards, shaped = training.row, training.strategy_row, training.shards, training.sharding.shaped
    states_at = HOST if training.offload else GPU
    others_at = states_at if strategy.offloads == "all" and not training.mirrored else GPU
    listed: list[tuple[str, StoredFormat, Locals, bool, str]] = [
        ("weights", row.weights, shards.weights, strategy.weights, others_at),
        ("gradients", row.gradients, shards.gradients, strategy.gradients, others_at),
        *((name, stored, shards.states, strategy.states, states_at) for name, stored in row.states()),
    ]
    if training.lora is not None and training.model is not None:
        frozen = training.sharding.shards(training.model.units()).weights
        listed.insert(0, ("frozen weights", row.weights, frozen, strategy.weights, others_at))
    for name, stored, tensors, divided, memory in listed:
        size = sum(count * stored.bytes(numel, length) for numel, count, length in tensors)
        divisor = training.sharding.divisor if divided else 1
        part = Part(name, size, float(stored.per_parameter), divisor, ALWAYS, True, memory, stored.name)
        if name in ("weights", "gradients") and training.mirrored:
            unpadded = sum(count * stored.bytes(numel, length) for numel, count, length in shards.states)
            yield replace(part, name=f"{name} on the host", bytes=unpadded, place=HOST)
        if name == "gradients" and training.mirrored and not strategy.buckets:
            size = min(size, 2 * (training.step_in_backward or USUAL_BUCKET) + _largest(training))
            part = Part(name, size, None, divisor, place=memory, note="on their way to the host")
        elif name == "gradients" and training.step_in_backward is not None:
            size, note = _bucket(training, training.step_in_backward, size)
            part = Part(name, size, None, divisor, place=memory, note=note)
        yield part
    if shaped and row.scalars:
        size = row.scalars * sum(count for _, count, _ in shards.states)
        yield Part("scalars", size, None, 1, ALWAYS, True, states_at, "step counts, scales")


def _bucket(training: Training, bucket_bytes: int, size: int) -> tuple[int, str]:
    """The most bytes of gradients with steps in the backward, of `size` bytes in all, and what they are.

    A bucket holds what it had before its last gradient, and that one. Replicas reduce a copy of one bucket, in which
    gradients begin at multiples of 16 bytes and a mark follows for each, while the next one is filled. FSDP2 reduces
    the gradients of a unit into one buffer, which exists until the last of them is stepped. The units with the first
    and the last gradient of the bucket may be larger than what the bucket takes of them.
    """
    gradients, shaped = training.shards.gradients, training.sharding.shaped
    divided = training.strategy_row.gathers and training.sharding.divisor > 1
    bucket_bytes = min(bucket_bytes + _largest(training) - (shaped and not divided), size)
    if training.strategy != "ddp" or training.gpus == 1:
        return bucket_bytes, "one bucket, stepped in the backward"
    added = 16 * sum(count for _, count, _ in gradients) if shaped else 0
    return 2 * bucket_bytes + added, "one bucket filled and one reduced, stepped in the backward"


def _largest(training: Training) -> int:
    """The bytes of the largest gradient or, under FSDP2, of the buffers of two units; 0 if they are not known."""
    stored = training.row.gradients
    if not training.sharding.shaped:
        return 0
    if not training.strategy_row.gathers or training.sharding.divisor == 1:
        return max(stored.bytes(numel) for numel, _, _ in training.shards.gradients)
    units = [training.sharding.shards([replace(unit, count=1)]).gradients for unit in training.trained]
    return 2 * max(sum(count * stored.bytes(numel) for numel, count, _ in unit) for unit in units)


def _buckets(training: Training) -> Iterator[Part]:
    strategy, width, local = training.strategy_row, training.row.gradients.width, parameters_of(training.trained)
    if training.gpus == 1:
        return
    if strategy.by == "flat":
        note = "5e8 gradients, DeepSpeed's default"
        yield Part("buckets", min(DEEPSPEED_BUCKET, local) * width, note=note)
    if strategy.buckets and training.step_in_backward is None and not training.bucket_view:
        note = "DDP's copy of the gradients"
        yield Part("buckets", local * width, width, 1, ALWAYS, True, note=note)


def _gathered(training: Training) -> Iterator[Part]:
    """Unsharded units under FSDP: the one being computed, the next one being gathered, and the root."""
    if not training.strategy_row.gathers or training.sharding.divisor == 1 or not training.sharding.shaped:
        return
    blocks = [unit for unit in training.weights if not unit.root]
    largest = max((unit.elements for unit in blocks), default=0)
    root = parameters_of(unit for unit in training.weights if unit.root)
    width = training.row.compute.width
    weights = (root + largest * (2 if sum(unit.count for unit in blocks) > 1 else 1)) * width
    yield Part("gathered weights", weights, note="the root and two units")
    trained = max((unit.elements for unit in training.trained if not unit.root), default=0)
    gradients = (trained or root) * (width + training.row.gradients.width)
    yield Part("unreduced gradients", gradients, note="largest unit, and its copy to reduce")


def _autocast_copies(training: Training) -> Iterator[Part]:
    """The 16-bit copies of fp32 weights that autocast caches until the backward. FSDP gathers 16-bit weights itself."""
    if training.row.autocast and not training.strategy_row.gathers:
        compute, shaped = training.row.compute, training.sharding.shaped
        cast = sum(tensor.elements * count for tensor, count in tensors_of(training.weights) if tensor.cast)
        note = "by autocast, kept for backward"
        yield Part("cast weights", cast * compute.width, float(compute.per_parameter), exact=shaped, note=note)


def _activations(training: Training) -> Iterator[Part]:
    model, batch, seq, width = training.model, training.batch, training.seq, training.row.compute.width
    if model is None or batch is None or seq is None:
        return
    saved = work.activations(model, batch, seq, width=width, checkpointing=training.checkpointing)
    logits = -(-batch * seq // training.loss_chunks) * model.vocab
    loss = (logits * (4 + width), "log-softmax, and 16-bit logits") if width < 4 else (logits * 4, "log-softmax")
    for name, size, note in (
        ("activations", saved.saved, "saved by the blocks"),
        ("recomputed", saved.recomputed, "the block computed again"),
        ("outer activations", saved.ends, "around the blocks"),
        ("logits", 4 * logits, "in fp32"),
        ("loss", *loss),
    ):
        if size:
            yield Part(name, size, note=note)


def _temporaries(training: Training) -> Iterator[Part]:
    """The memory that the step allocates temporarily."""
    width, divisor = training.row.temporary, training.sharding.divisor if training.strategy_row.states else 1
    if width:
        size, memory = width * elements(training.shards.states), HOST if training.offload else GPU
        yield Part("step temporaries", size, width, divisor, STEP, place=memory, note="square root of exp_avg_sq")


def _totals(parts: Sequence[Part]) -> Totals:
    state, backward, step = (
        sum(part.bytes for part in parts if part.phase == phase and part.place == GPU)
        for phase in (ALWAYS, BACKWARD, STEP)
    )
    host = sum(part.bytes for part in parts if part.place == HOST)
    return Totals(state, backward, step, state + max(backward, step), host)


def _work(training: Training) -> Work | None:
    model, batch, seq, lora = training.model, training.batch, training.seq, training.lora or 0
    if batch is None or seq is None:
        return None
    if model is None:
        both = 6 * parameters_of(training.weights) * batch * seq
        return Work(both, both, False)
    both = work.training_flops(model, batch, seq, lora)
    blocks = batch * model.layers * work.layer_flops(model, seq)
    return Work(both, both + (blocks if training.checkpointing == "full" else 0), True)
