"""The plan of a training: memory per GPU by part, communication and FLOPs per step."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from fractions import Fraction
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
USUAL_BUCKET = 25 * 2**20  # bytes; the default bucket_bytes of `halfstep.integrations.offload`
DEEPSPEED_BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size


@dataclass(frozen=True)
class Part:
    """A part of the memory of one GPU."""

    name: str
    bytes: int  # on this GPU, or in host memory for this GPU
    per_parameter: float | None = None  # bytes per parameter before sharding; None if not proportional to parameters
    divisor: int = 1  # the number of GPUs over which it is sharded
    phase: str = BACKWARD  # when it is allocated: "always", "backward" (forward and backward) or "step"
    exact: bool = False  # otherwise `bytes` is an estimate
    place: str = GPU  # or "host"
    note: str = ""


@dataclass(frozen=True)
class Totals:
    """Bytes per GPU.

    If gradients are set to None between steps, the peak is an upper bound, since they are then not allocated while
    activations are largest.
    """

    state: int  # always allocated: weights, gradients, states
    backward: int  # allocated in addition during forward and backward
    step: int  # allocated in addition during the optimizer step
    peak: int  # `state` plus the larger of `backward` and `step`
    host: int  # host memory for this GPU


@dataclass(frozen=True)
class Work:
    """FLOPs of one GPU in one step."""

    training: int  # forward and backward, as counted for MFU
    hardware: int  # `training` and the recomputation of checkpointing, as counted for HFU
    exact: bool  # counted from the shape; otherwise 6 per parameter and token (Kaplan et al., Scaling laws, 2020, §2.1)


@dataclass(frozen=True)
class Plan:
    """The resources per GPU that training a model needs."""

    parameters: int  # number of parameters of the model
    active_parameters: int  # number of parameters used per token
    layout: Layout
    settings: dict[str, Any]  # the arguments of `plan`, with defaults filled in
    parts: tuple[Part, ...]
    totals: Totals
    communication: tuple[Collective, ...]  # what one GPU sends per step
    work: Work | None  # per step; None without a batch
    step_traffic: int  # bytes that the optimizer step reads and writes
    bytes_per_parameter: float  # of weight, gradient and states, before sharding

    def part(self, name: str) -> Part:
        """The part with this name; raises ValueError if there is none."""
        one_of("part", name, [part.name for part in self.parts])
        return next(part for part in self.parts if part.name == name)

    @property
    def bytes_sent(self) -> int:
        """Bytes that one GPU sends to others per step, without copies to and from its host."""
        return sum(message.bytes for message in self.communication if message.ranks > 1)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain values for JSON. docs/planning.md describes the keys."""
        row = self.layout
        return {
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "settings": self.settings,
            "layout": {"name": row.name, "bytes_per_parameter": self.bytes_per_parameter, "source": row.source},
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
        params: number of parameters; alternatively pass `model` or `units`.
        settings: the other arguments of `Training`.

    Raises:
        ValueError: an argument is out of its range, or two arguments cannot be combined.

    Examples:
        >>> from halfstep.numerics.planning import plan
        >>> plan(7e9, gpus=8, strategy="fsdp").part("exp_avg").bytes  # 4 per parameter, an eighth on each GPU
        3500000000
    """
    training = Training(params, **settings)
    row, strategy, model, shards = training.row, training.strategy_row, training.model, training.shards
    parts = tuple(part for of in (_stored, _buckets, _computed, _activations, _temporaries) for part in of(training))
    widths = row.gradients.per_parameter, (row.compute if strategy.weights else row.weights).per_parameter
    messages = [*training.sharding.communication(training.trained, training.weights, widths)]
    if training.offload:
        messages += sharding.over_the_bus(row, strategy, shards, training.mirrored, training.scratch)
    if (scratch := training.scratch) is not None and (ranks := training.sharding.divisor) > 1:
        flags = math.ceil(2 * sharding.ring(ranks) * scratch.exchanged)  # a byte each
        exchanged = ("all-reduce", "which gradients exist", flags), ("all-to-all", "parts of matrices", scratch.sent)
        messages += [Collective(*message, ranks) for message in exchanged if message[-1]]
    parameters = parameters_of(training.weights)
    idle = 0 if model is None else model.parameters - model.active_parameters
    settings = {field.name: getattr(training, field.name) for field in fields(training) if field.name != "units"}
    settings |= {"params": parameters, "model": None if model is None else asdict(model)}
    states = {name for rule in training.by_rule for name, _ in rule.row.states()}
    moved = 2 * Fraction(sum(part.bytes for part in parts if part.name in states))
    moved += sum(rule.row.moved_besides_states * elements(rule.shards.states) for rule in training.by_rule)
    each = sum(rule.row.per_parameter() * rule.share for rule in training.by_rule)
    phases = Counter[str]()
    for part in parts:
        phases[part.phase if part.place == GPU else HOST] += part.bytes
    state, backward, step = phases[ALWAYS], phases[BACKWARD], phases[STEP]
    totals = Totals(state, backward, step, state + max(backward, step), phases[HOST])
    counts, flops = (parameters, parameters - idle), _work(training)
    return Plan(*counts, row, settings, parts, totals, tuple(messages), flops, math.ceil(moved), float(each))


def _stored(training: Training) -> Iterator[Part]:
    row, strategy, shards, shaped = training.row, training.strategy_row, training.shards, training.sharding.shaped
    states_at = HOST if training.offload else GPU
    others_at = states_at if strategy.weights and not training.mirrored else GPU
    listed = defaultdict[str, list[tuple[StoredFormat, Locals, Fraction | int]]](list)
    if training.lora is not None and training.model is not None:
        frozen = training.sharding.shards(training.model.units()).weights
        listed["frozen weights"].append((row.weights, frozen, 1))
    for rule in training.by_rule:
        forms = ("weights", rule.row.weights), ("gradients", rule.row.gradients), *rule.row.states()
        for name, stored in forms:
            local = getattr(rule.shards, name, rule.shards.states)
            listed[name].append((stored, local, rule.share))
    for name, of_rules in listed.items():
        what = name.removeprefix("frozen ")
        divisor = training.sharding.divisor if getattr(strategy, what, strategy.states) else 1
        memory = others_at if what in ("weights", "gradients") else states_at
        size = sum(count * form.bytes(numel, length) for form, local, _ in of_rules for numel, count, length in local)
        each = float(sum(form.per_parameter * share for form, _, share in of_rules))
        part = Part(name, size, each, divisor, ALWAYS, True, memory, of_rules[0][0].name)
        if name in ("weights", "gradients") and training.mirrored:
            form = of_rules[0][0]  # that of all rules
            unpadded = sum(count * form.bytes(numel, length) for numel, count, length in shards.states)
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
    if training.scratch is not None:
        size, note = 2 * (training.scratch.parts + training.scratch.received), "matrices of Muon, in bf16"
        # Steps bucket by bucket take less, unless ranks exchange the matrices.
        in_buckets = training.step_in_backward is not None or (training.offload and not training.scratch.received)
        exact = shaped and not in_buckets
        yield Part("scratch", size, None, 1, ALWAYS, exact, note=f"{note}, as they are orthogonalized")
        if training.offload:
            size, note = 2 * training.scratch.host, f"{note}, copied to the GPU and back"
            yield Part("scratch on the host", size, None, 1, ALWAYS, exact, HOST, note)


def _bucket(training: Training, bucket_bytes: int, size: int) -> tuple[int, str]:
    """The peak bytes of gradients with steps in the backward, out of `size` bytes in total, and a note.

    A full bucket exceeds `bucket_bytes` by up to its last gradient. Replicas reduce a copy of one bucket, with its
    gradients padded to 8 elements and a flag for each, while the next bucket is filled. FSDP2 reduces the gradients of
    a unit in one buffer, which exists until the last of them is stepped, so the units of the bucket's first and last
    gradient count in full.
    """
    gradients, shaped = training.shards.gradients, training.sharding.shaped
    divided = training.strategy_row.weights and training.sharding.divisor > 1
    bucket_bytes = min(bucket_bytes + _largest(training) - (shaped and not divided), size)
    if training.strategy != "ddp" or training.gpus == 1:
        return bucket_bytes, "one bucket, stepped in the backward"
    added = 8 * training.row.gradients.width * sum(count for _, count, _ in gradients) if shaped else 0
    return 2 * bucket_bytes + added, "one bucket filled and one reduced, stepped in the backward"


def _largest(training: Training) -> int:
    """The bytes of the largest gradient or, under FSDP2, of the buffers of two units; 0 if shapes are unknown."""
    stored = training.row.gradients
    if not training.sharding.shaped:
        return 0
    if not training.strategy_row.weights or training.sharding.divisor == 1:
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


def _computed(training: Training) -> Iterator[Part]:
    """The weights in the format of the computation: under FSDP the current unit, the next one being prefetched, and the
    root; otherwise the 16-bit copies of fp32 weights that autocast keeps until the backward."""
    compute, shaped, gathers = training.row.compute, training.sharding.shaped, training.strategy_row.weights
    if training.row.autocast and not gathers:
        cast = sum(tensor.elements * count for tensor, count in tensors_of(training.weights) if tensor.cast)
        note = "by autocast, kept for backward"
        yield Part("cast weights", cast * compute.width, float(compute.per_parameter), exact=shaped, note=note)
    if not gathers or training.sharding.divisor == 1 or not shaped:
        return
    blocks, width = [unit for unit in training.weights if not unit.root], compute.width
    largest = max((unit.elements for unit in blocks), default=0)
    root = parameters_of(unit for unit in training.weights if unit.root)
    weights = (root + largest * (2 if sum(unit.count for unit in blocks) > 1 else 1)) * width
    yield Part("gathered weights", weights, note="the root and two units")
    trained = max((unit.elements for unit in training.trained if not unit.root), default=0)
    gradients = (trained or root) * (width + training.row.gradients.width)
    yield Part("unreduced gradients", gradients, note="largest unit, and its copy to reduce")


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
    width, divisor = training.row.temporary, training.sharding.divisor if training.strategy_row.states else 1
    if width:
        size, memory = width * elements(training.shards.states), HOST if training.offload else GPU
        yield Part("step temporaries", size, width, divisor, STEP, place=memory, note="square root of exp_avg_sq")
    if training.scratch is not None and training.scratch.copies:
        yield Part("step temporaries", training.scratch.copies, phase=STEP, note="copies of the largest matrix")


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
