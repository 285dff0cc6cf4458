"""Plans of trainings: bytes per GPU by part, messages per step and FLOPs, and the largest plan that fits a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from halfstep.numerics.messages import divides, one_of, whole
from halfstep.numerics.planning import sharding, work
from halfstep.numerics.planning.layouts import GRADIENTS, STORED_FORMATS, Layout, StoredFormat, layout
from halfstep.numerics.planning.models import Tensor, Transformer, Unit, parameters_of, tensors_of
from halfstep.numerics.planning.sharding import (
    MIRRORED,
    STRATEGIES,
    Collective,
    Locals,
    Shards,
    Strategy,
    elements,
    keeps_rows,
)

ALWAYS, BACKWARD, STEP = "always", "backward", "step"
GPU, HOST = "gpu", "host"
USUAL_BUCKET = 25 * 2**20  # bytes, of `halfstep.integrations.offload`
WITH_ADAPTERS = ("single", "ddp", "fsdp", "hsdp")
STEPPING_IN_BACKWARD = ("single", "ddp", "fsdp", "hsdp")  # the strategies that `halfstep.integrations.release` supports
DDP_BUCKET = 25 * 2**20  # bytes; torch's default: 1 MiB for the first bucket and 25 MiB for the others
DEEPSPEED_BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size
# What `step` allocates, by optimizer.
TEMPORARIES = {"torch": "square root of exp_avg_sq", "apex-o2": "fp32 gradients"}
OTHER_TEMPORARIES = "fp32 copies of smaller states"


@dataclass(frozen=True)
class Part:
    """A part of the memory of one GPU.

    Args:
        name: name of the part.
        bytes: its size on this GPU, or in this GPU's share of the host's memory.
        per_parameter: bytes per parameter before sharding; None if the size does not depend on parameters.
        divisor: the number of GPUs among which it is sharded.
        phase: when it is allocated: ``"always"``, ``"backward"`` (forward and backward) or ``"step"``.
        exact: whether `bytes` is exact; otherwise it is an estimate.
        place: ``"gpu"`` or ``"host"``.
        note: an explanation.
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
        """Whether the ZeRO paper counts it: weights, gradients and states, but neither buckets nor scalars."""
        return self.phase == ALWAYS and self.name not in ("buckets", "scalars")


@dataclass(frozen=True)
class Totals:
    """Bytes per GPU.

    Args:
        state: what is always allocated: weights, gradients, states.
        backward: what forward and backward need in addition.
        step: what the optimizer's step needs in addition.
        peak: the sum of `state` and the larger of the two. It is an upper bound if gradients are set to None between
            steps, since they are then not allocated when activations are largest.
        host: bytes of the host's memory for this GPU.
    """

    state: int
    backward: int
    step: int
    peak: int
    host: int


@dataclass(frozen=True)
class Work:
    """FLOPs of one GPU in one step, micro-batches included.

    Args:
        forward: FLOPs of the forward.
        training: FLOPs of forward and backward, three times `forward` unless weights are frozen: the count of MFU.
        hardware: `training` and the FLOPs that checkpointing recomputes: the count of HFU.
        exact: whether the FLOPs are counted from the shape of the model. Otherwise they are 6 per parameter and token
            (Kaplan et al., Scaling laws, 2020, §2.1).
    """

    forward: int
    training: int
    hardware: int
    exact: bool


@dataclass(frozen=True)
class Plan:
    """The resources that training a model takes on each GPU.

    Attributes:
        parameters: number of parameters of the model.
        layout: formats of weights, gradients and states.
        strategy: how data parallelism divides them.
        settings: the arguments of `plan`, with defaults filled in.
        parts: the parts of the memory.
        totals: their sums.
        communication: the messages of one GPU in a step.
        work: FLOPs in a step; None if the batch is not inputs.
        step_traffic: bytes that the step of the optimizer reads and writes.
    """

    parameters: int
    layout: Layout
    strategy: Strategy
    settings: dict[str, Any]
    parts: tuple[Part, ...]
    totals: Totals
    communication: tuple[Collective, ...]
    work: Work | None
    step_traffic: int

    def part(self, name: str) -> Part:
        """The part with this name.

        Raises:
            ValueError: there is no such part.
        """
        one_of("part", name, [part.name for part in self.parts])
        return next(part for part in self.parts if part.name == name)

    @property
    def bytes_sent(self) -> int:
        """Bytes that one GPU sends to others in a step, without copies to and from its host."""
        return sum(each.bytes for each in self.communication if each.ranks > 1)

    @property
    def bytes_sent_per_parameter(self) -> Fraction:
        """`bytes_sent` per parameter, for data parallelism only."""
        return sum((each.per_parameter for each in self.communication if each.per_parameter is not None), Fraction(0))

    @property
    def state_per_parameter(self) -> Fraction:
        """Bytes per parameter of weights, gradients and states on one GPU, as the ZeRO paper counts them."""
        return sum(
            (
                part.per_parameter / part.divisor
                for part in self.parts
                if part.counts and part.per_parameter is not None
            ),
            Fraction(0),
        )

    def mfu(self, seconds: float, peak_flops: float) -> float:
        """Model FLOPs utilization: the share of the peak in a step of `seconds`. 0.5 and above is good."""
        return work.utilisation(self._work().training, seconds, peak_flops)

    def hfu(self, seconds: float, peak_flops: float) -> float:
        """Hardware FLOPs utilization: `mfu` including the FLOPs that checkpointing recomputes."""
        return work.utilisation(self._work().hardware, seconds, peak_flops)

    def _work(self) -> Work:
        if self.work is None:
            raise ValueError(
                "Expected batch, but got None, and FLOPs depend on it: pass batch, and without a model also seq"
            )
        return self.work

    def as_dict(self) -> dict[str, Any]:
        """The plan as numbers, strings, lists and dicts. docs/planning.md describes the keys."""
        return {
            "parameters": self.parameters,
            "settings": self.settings,
            "layout": {
                "name": self.layout.name,
                "bytes_per_parameter": float(self.layout.per_parameter(self.settings["amsgrad"])),
                "note": self.layout.note,
                "source": self.layout.source,
            },
            "parts": [{**asdict(part), "per_parameter": _number(part.per_parameter)} for part in self.parts],
            "totals": asdict(self.totals),
            "communication": [{**asdict(c), "per_parameter": _number(c.per_parameter)} for c in self.communication],
            "bytes_sent": self.bytes_sent,
            "work": None if self.work is None else asdict(self.work),
            "step_traffic": self.step_traffic,
        }


def _number(value: Fraction | None) -> float | None:
    return None if value is None else float(value)


def _units_of(params: float | None, model: Transformer | None, units: Sequence[Unit] | None, t: int) -> Sequence[Unit]:
    """The part of the model that one tensor-parallel GPU holds."""
    given = [name for name, value in (("params", params), ("model", model), ("units", units)) if value is not None]
    if len(given) != 1:
        raise ValueError(f"Expected one of params, model and units, but got {' and '.join(given) or 'none'}")
    if model is not None:
        return model.units(t)
    if units is not None:
        if t > 1:
            raise ValueError(
                f"Expected tensor_parallel to be 1 with units, but got {t}: pass the units of one GPU instead"
            )
        if not parameters_of(units):
            raise ValueError("Expected units to contain parameters, but got none: give at least one tensor")
        return units
    return (Unit("model", (Tensor("parameters", (-(-whole("params", params) // t),)),), root=True),)


def plan(
    params: float | None = None,
    *,
    model: Transformer | None = None,
    units: Sequence[Unit] | None = None,
    gpus: int = 1,
    strategy: str | None = None,
    shard: int | None = None,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
    precision: str = "bf16",
    optimizer: str = "halfstep",
    moments: str | None = None,
    master: str | None = None,
    gradients: str | None = None,
    accumulator: str | None = None,
    amsgrad: bool = False,
    batch: int | None = None,
    seq: int | None = None,
    accumulate: int = 1,
    checkpointing: str = "none",
    offload: bool = False,
    bucket_view: bool = False,
    compress: str | None = None,
    step_in_backward: int | None = None,
    lora: int | None = None,
    rank: int | None = None,
    loss_chunks: int = 1,
) -> Plan:
    """Plan the training of a model, given by exactly one of `params`, `model` and `units`.

    Args:
        params: number of parameters. Without shapes, activations and gathered units are unknown and not counted.
        model: a transformer.
        units: the parameters of any model, grouped into the units that FSDP gathers; see `unit`.
        gpus: number of GPUs.
        strategy: a name of `STRATEGIES`. Default: ``"single"`` on one data-parallel GPU, otherwise ``"ddp"``.
        shard: GPUs in one group of ``"hsdp"``.
        tensor_parallel: GPUs that share every layer; must divide `gpus`.
        sequence_parallel: whether they also shard norms and dropouts (Korthikanti et al., 2022).
        precision, optimizer, moments, master, gradients: the layout; see `layout`.
        accumulator: format of a second gradient to which micro-batches are added.
        amsgrad: whether the optimizer stores ``max_exp_avg_sq``.
        batch: sequences in one micro-batch on one GPU.
        seq: length of a sequence. Default: `model.seq`.
        accumulate: micro-batches in a step.
        checkpointing: see `work.activations`.
        offload: whether the memory of the host holds what the strategy can offload. With ``"single"`` and ``"ddp"`` it
            stands for `halfstep.integrations.offload`, with one of halfstep's optimizers.
        bucket_view: whether gradients are views of DDP's buckets (``gradient_as_bucket_view``).
        compress: format in which gradients are sent: by DDP's hooks, or FSDP2's ``reduce_dtype``.
        step_in_backward: the `bucket_bytes` of `halfstep.integrations.release.step_in_backward`, with which only the
            gradients of one bucket exist, or of two with ``"ddp"``, which stands for its `process_group`. Default: all
            gradients exist until the step.
        lora: rows of the adapters beside the matrices of the blocks, whose weights are then frozen, as those of
            embedding, norms and head (Hu et al., LoRA, 2021). Default: all weights are trained.
        rank: the rank whose memory is planned, among those that shard the model. Default: the one that holds most.
        loss_chunks: the number of parts of the tokens of which head and loss compute logits one after the other, as
            the chunked losses of Liger and torchtune do.

    Raises:
        ValueError: an argument is out of its range, or two arguments cannot be combined.

    Examples:
        >>> from halfstep.numerics.planning import plan
        >>> made = plan(7e9, gpus=8, strategy="fsdp")
        >>> made.part("exp_avg").bytes  # 4 bytes per parameter, an eighth on each GPU
        3500000000
    """
    gpus, t = whole("gpus", gpus), whole("tensor_parallel", tensor_parallel)
    accumulate, loss_chunks = whole("accumulate", accumulate), whole("loss_chunks", loss_chunks)
    divides("tensor_parallel", t, "gpus", gpus, "every replica needs as many GPUs")
    ranks = gpus // t
    chosen = strategy if strategy is not None else "single" if ranks == 1 else "ddp"
    one_of("strategy", chosen, STRATEGIES)
    how = STRATEGIES[chosen]
    if how.name == "single" and ranks > 1:
        raise ValueError(f"strategy is 'single', but there are {ranks} data-parallel GPUs; choose 'ddp', or gpus={t}")
    if offload and not how.offloads:
        able = ", ".join(s.name for s in STRATEGIES.values() if s.offloads)
        raise ValueError(
            f"Expected strategy to be {able} with offload=True, but got {how.name!r}, which offloads nothing"
        )
    if offload and how.name in MIRRORED and not optimizer.startswith("halfstep"):
        raise ValueError(
            f"Expected optimizer to be one of halfstep's with offload=True and strategy {how.name!r}, which stands for "
            f"halfstep.integrations.offload, but got {optimizer!r}: leave offload out"
        )
    if sequence_parallel and t == 1:
        raise ValueError("Expected tensor_parallel to be 2 or more with sequence_parallel=True, but got 1")
    row = layout(optimizer, precision, moments=moments, master=master, gradients=gradients)
    if amsgrad and not row.amsgrad:
        raise ValueError(f"amsgrad is True, but optimizer {optimizer!r} does not support it; leave it out")
    if row.needs_rows and not keeps_rows(how):
        able = ", ".join(s.name for s in STRATEGIES.values() if keeps_rows(s))
        raise ValueError(
            f"Expected strategy to be {able} with moments in 8 bits, whose blocks lie within rows of parameters, but "
            f"got {how.name!r}: choose one of these, or moments 'bf16'"
        )
    if step_in_backward is not None:
        step_in_backward = whole("step_in_backward", step_in_backward)
        _check_step_in_backward(how, optimizer, accumulate, accumulator, compress)
    for name, value in (("accumulator", accumulator), ("compress", compress)):
        if value is not None:
            one_of(name, value, GRADIENTS)
    held = everything = _units_of(params, model, units, t)
    if lora is not None:
        lora = whole("lora", lora)
        _check_lora(model, how, t, offload, step_in_backward)
        assert model is not None
        held, everything = model.adapters(lora), model.units_with_adapters(lora)
    local = parameters_of(held)
    shard = None if shard is None else whole("shard", shard)
    ways, _ = sharding.groups(how, ranks, shard)
    if rank is not None and not (isinstance(rank, int) and 0 <= rank < ways):
        raise ValueError(f"Expected rank to be an integer from 0 to {ways - 1}, but got {rank!r}")
    batch, seq = _micro_batch(model, batch, seq, checkpointing)
    shaped = params is None
    summed = None if accumulator is None else STORED_FORMATS[accumulator]
    sent = STORED_FORMATS[compress] if compress is not None else summed or row.gradients
    mine = sharding.shard(held, how, ways, rank, shaped)
    inputs = _Inputs(
        *(row, how, ranks, ways, tuple(held), shaped, mine, summed, sent, amsgrad, offload, bucket_view),
        bucket_bytes=step_in_backward,
        everything=tuple(everything),
    )

    frozen = _frozen(inputs, model) if lora is not None and model is not None else ()
    parts = [*frozen, *_stored(inputs), *_buckets(inputs), *_gathered(inputs), *_autocast_copies(inputs)]
    if model is not None and batch is not None and seq is not None:
        parts += _activations(row, model, batch, seq, t, sequence_parallel, checkpointing, loss_chunks)
    parts += _temporaries(inputs)
    total = model.parameters if model is not None else local if units is not None else whole("params", params)
    if lora is not None:
        total = parameters_of(everything)
    roots = [one for one in everything if one.root] if how.by in ("rows", "units") and len(everything) > 1 else []
    messages = sharding.communication(
        how,
        ranks,
        ways,
        parameters=sharding.padded(held, how, ways, shaped),
        gradient_width=sent.per_parameter,
        weight_width=row.compute.per_parameter if how.gathers else row.weights.per_parameter,
        accumulate=accumulate,
        kept=sharding.padded(roots, how, ways, shaped),
        gathered=sharding.padded(everything, how, ways, shaped),
    )
    if offload:
        messages += sharding.over_the_bus(row, how, mine, accumulate)
    if model is not None and t > 1 and batch is not None and seq is not None:
        messages += sharding.between_layers(row, model, batch, seq, t, accumulate)
    settings = {
        "params": total,
        "model": None if model is None else asdict(model),
        "gpus": gpus,
        "strategy": how.name,
        "shard": shard,
        "tensor_parallel": t,
        "sequence_parallel": sequence_parallel,
        "precision": precision,
        "optimizer": optimizer,
        "moments": moments,
        "master": master,
        "gradients": row.gradients.name,
        "accumulator": accumulator,
        "amsgrad": amsgrad,
        "batch": batch,
        "seq": seq,
        "accumulate": accumulate,
        "checkpointing": checkpointing,
        "offload": offload,
        "bucket_view": bucket_view,
        "compress": compress,
        "step_in_backward": step_in_backward,
        "lora": lora,
        "rank": rank,
        "loss_chunks": loss_chunks,
    }
    states = {name for name, _ in row.states(amsgrad)}
    moved = row.moved_besides_states * elements(mine.states) + 2 * sum(p.bytes for p in parts if p.name in states)
    done = _work(model, total, batch, seq, t, accumulate, checkpointing, lora or 0)
    return Plan(total, row, how, settings, tuple(parts), _totals(parts), messages, done, math.ceil(moved))


def _micro_batch(
    model: Transformer | None, batch: int | None, seq: int | None, checkpointing: str
) -> tuple[int | None, int | None]:
    """Batch and sequence length, checked."""
    one_of("checkpointing", checkpointing, work.CHECKPOINTING)
    if model is None and checkpointing != "none":
        raise ValueError(
            f"checkpointing is {checkpointing!r}, but activations are unknown without a model: pass model as well"
        )
    batch = None if batch is None else whole("batch", batch)
    if seq is not None:
        seq = whole("seq", seq)
        if model is not None and model.positions and seq > model.seq:
            raise ValueError(f"Expected seq to be from 1 to {model.seq}, the positions of the model, but got {seq}")
    elif model is not None:
        seq = model.seq
    return batch, seq


# ---------------------------------------------------------------------------------------------------------- parts


@dataclass(frozen=True)
class _Inputs:
    """The values from which the parts of a plan are computed.

    Args:
        row, how: the layout and the strategy.
        ranks: number of data-parallel GPUs.
        ways: number of GPUs among which the model is divided.
        units: the part of the model on one tensor-parallel GPU.
        shaped: whether `units` have the shapes of the parameters, and not only their number.
        mine: the shards of the planned rank.
        summed: format of the accumulator.
        sent: format in which gradients are sent.
        bucket_bytes: the size of the buckets that are stepped in the backward, or None.
        everything: `units`, and with adapters, which are then the `units`, the frozen weights.
    """

    row: Layout
    how: Strategy
    ranks: int
    ways: int
    units: tuple[Unit, ...]
    shaped: bool
    mine: Shards
    summed: StoredFormat | None
    sent: StoredFormat
    amsgrad: bool
    offload: bool
    bucket_view: bool
    bucket_bytes: int | None
    everything: tuple[Unit, ...]

    @property
    def states_at(self) -> str:
        """The place of optimizer states."""
        return HOST if self.offload else GPU


def _plain(held: Locals) -> tuple[tuple[int, int, int], ...]:
    return tuple((size, count, 0) for size, count in held)


def _frozen(inputs: _Inputs, model: Transformer) -> Iterator[Part]:
    """The weights of a model with adapters that are not trained."""
    row, how = inputs.row, inputs.how
    mine = sharding.shard(model.units(), how, inputs.ways)
    size, divisor = row.weights.width * elements(mine.weights), inputs.ways if how.weights else 1
    yield Part("frozen weights", size, row.weights.per_parameter, divisor, ALWAYS, True, GPU, row.weights.name)


def _stored(inputs: _Inputs) -> Iterator[Part]:
    """Weights, gradients and states."""
    row, how, mine = inputs.row, inputs.how, inputs.mine
    rest = HOST if inputs.offload and how.offloads == "all" else GPU
    weights, gradients, states = _plain(mine.weights), _plain(mine.gradients), tuple(mine.states_with_rows)
    listed: list[tuple[str, StoredFormat | None, tuple[tuple[int, int, int], ...], bool, str]] = [
        ("weights", row.weights, weights, how.weights, rest),
        ("gradients", row.gradients, gradients, how.gradients, rest),
        ("accumulated gradients", inputs.summed, gradients, how.gradients, rest),
        *((name, stored, states, how.states, inputs.states_at) for name, stored in row.states(inputs.amsgrad)),
    ]
    for name, stored, held, divided, place in listed:
        if stored is not None:
            size = sum(count * stored.bytes(each, row_size) for each, count, row_size in held)
            divisor = inputs.ways if divided else 1
            if name in ("weights", "gradients") and inputs.offload and how.name in MIRRORED:
                yield Part(f"{name} on the host", size, stored.per_parameter, divisor, ALWAYS, True, HOST, stored.name)
            if name == "gradients" and inputs.offload and how.name == "single":
                note = "on their way to the host"
                yield Part(name, min(size, _in_flight(inputs)), None, divisor, BACKWARD, False, place, note)
            elif name == "gradients" and inputs.bucket_bytes is not None:
                size, note = _bucket(inputs, size)
                yield Part(name, size, None, divisor, BACKWARD, False, place, note)
            else:
                yield Part(name, size, stored.per_parameter, divisor, ALWAYS, True, place, stored.name)
    if inputs.shaped and row.scalars:
        size = row.scalars * sum(count for _, count in mine.states)
        counted = not row.optimizer.startswith("te")  # those of TransformerEngine were not measured
        yield Part("scalars", size, None, 1, ALWAYS, counted, inputs.states_at, "step counts, scales")


def _in_flight(inputs: _Inputs) -> int:
    """The most bytes of gradients that exist on a GPU whose optimizer is offloaded: two buckets and one gradient."""
    largest = max(inputs.row.gradients.bytes(size) for size, _ in inputs.mine.gradients) if inputs.shaped else 0
    return 2 * (inputs.bucket_bytes or USUAL_BUCKET) + largest


def _bucket(inputs: _Inputs, size: int) -> tuple[int, str]:
    """The most bytes of gradients with steps in the backward, of `size` bytes in all, and what they are.

    A bucket holds what it had before its last gradient, and that one. Replicas reduce a copy of one bucket, in which
    gradients begin at multiples of 16 bytes and a mark follows for each, while the next one is filled. FSDP2 reduces
    the gradients of a unit into one buffer, which exists until the last of them is stepped. The units with the first
    and the last gradient of the bucket may be larger than what the bucket takes of them.
    """
    assert inputs.bucket_bytes is not None
    stored = inputs.row.gradients
    one = inputs.bucket_bytes
    if inputs.shaped and inputs.how.gathers and inputs.ways > 1:
        units = [sharding.shard([replace(one, count=1)], inputs.how, inputs.ways) for one in inputs.units]
        one += 2 * max(sum(count * stored.bytes(size) for size, count in unit.gradients) for unit in units)
    elif inputs.shaped:
        one += max(stored.bytes(elements) for elements, _ in inputs.mine.gradients) - 1
    one = min(one, size)
    if inputs.how.name != "ddp" or inputs.ranks == 1:
        return one, "one bucket, stepped in the backward"
    added = 16 * sum(count for _, count in inputs.mine.gradients) if inputs.shaped else 0
    return 2 * one + added, "one bucket filled and one reduced, stepped in the backward"


def _check_step_in_backward(
    how: Strategy, optimizer: str, accumulate: int, accumulator: str | None, compress: str | None
) -> None:
    """Raise where `halfstep.integrations.release.step_in_backward` does, or frees no gradients."""
    if how.name not in STEPPING_IN_BACKWARD:
        raise ValueError(
            f"Expected strategy to be {', '.join(STEPPING_IN_BACKWARD)} with step_in_backward, but got {how.name!r}, "
            "which keeps all gradients"
        )
    if not optimizer.startswith("halfstep"):
        raise ValueError(
            f"Expected optimizer to be one of halfstep's with step_in_backward, but got {optimizer!r}: leave "
            "step_in_backward out"
        )
    if accumulate > 1 or accumulator is not None:
        raise ValueError(
            "Expected accumulate to be 1 and accumulator None with step_in_backward, since accumulated gradients exist "
            f"until the last micro-batch, but got {accumulate} and {accumulator!r}"
        )
    if how.name == "ddp" and compress is not None:
        raise ValueError(
            f"Expected compress to be None with step_in_backward and strategy 'ddp', but got {compress!r}: buckets are "
            "reduced in the format of the gradients"
        )


def _check_lora(model: Transformer | None, how: Strategy, t: int, offload: bool, step_in_backward: int | None) -> None:
    """Raise where adapters are not planned."""
    if model is None:
        raise ValueError("Expected model with lora, whose adapters stand beside its matrices, but got None: pass model")
    if how.name not in WITH_ADAPTERS:
        raise ValueError(f"Expected strategy to be {', '.join(WITH_ADAPTERS)} with lora, but got {how.name!r}")
    for name, value, wanted in (
        ("tensor_parallel", t, 1),
        ("offload", offload, False),
        ("step_in_backward", step_in_backward, None),
    ):
        if value != wanted:
            raise ValueError(f"Expected {name} to be {wanted} with lora, but got {value!r}: leave one of them out")


def _buckets(inputs: _Inputs) -> Iterator[Part]:
    how, width, local = inputs.how, inputs.row.gradients.width, parameters_of(inputs.units)
    if inputs.ranks == 1:
        return
    if how.by == "flat":
        size = min(DEEPSPEED_BUCKET, local) * width
        yield Part("buckets", size, None, 1, BACKWARD, False, GPU, "5e8 gradients, DeepSpeed's default")
    if inputs.bucket_bytes is not None:
        return
    if how.buckets and not inputs.bucket_view:
        note = "DDP's copy of the gradients"
        yield Part("buckets", local * width, Fraction(width), 1, ALWAYS, True, GPU, note)
    if how.buckets and inputs.sent.width < width:
        # The size of a bucket is counted before compression.
        size = min(DDP_BUCKET, local * width) * inputs.sent.width // width
        yield Part("compressed bucket", size, None, 1, BACKWARD, False, GPU, "one of 25 MiB on its way")


def _gathered(inputs: _Inputs) -> Iterator[Part]:
    """Unsharded units under FSDP: the one being computed, the next one being gathered, and the root."""
    if not inputs.how.gathers or inputs.ways == 1 or not inputs.shaped:
        return
    blocks = [one for one in inputs.everything if not one.root]
    largest = max((one.elements for one in blocks), default=0)
    root = parameters_of(one for one in inputs.everything if one.root)
    width = inputs.row.compute.width
    weights = (root + largest * (2 if sum(one.count for one in blocks) > 1 else 1)) * width
    trained = max((one.elements for one in inputs.units if not one.root), default=0)
    gradients = (trained or root) * (width + inputs.sent.width)
    yield Part("gathered weights", weights, None, 1, BACKWARD, False, GPU, "the root and two units")
    note = "largest unit, and its copy to reduce"
    yield Part("unreduced gradients", gradients, None, 1, BACKWARD, False, GPU, note)


def _autocast_copies(inputs: _Inputs) -> Iterator[Part]:
    """The 16-bit copies of fp32 weights that autocast caches until the backward. FSDP gathers 16-bit weights itself."""
    if inputs.row.autocast and not inputs.how.gathers:
        compute = inputs.row.compute
        cast = elements((tensor.elements, count) for tensor, count in tensors_of(inputs.everything) if tensor.cast)
        note = "by autocast, kept for backward"
        yield Part("cast weights", cast * compute.width, compute.per_parameter, 1, BACKWARD, inputs.shaped, GPU, note)


def _activations(
    row: Layout,
    model: Transformer,
    batch: int,
    seq: int,
    t: int,
    sequence_parallel: bool,
    checkpointing: str,
    loss_chunks: int,
) -> Iterator[Part]:
    width = row.compute.width
    found = work.activations(
        *(model, batch, seq),
        width=width,
        tensor_parallel=t,
        sequence_parallel=sequence_parallel,
        checkpointing=checkpointing,
    )
    logits = -(-batch * seq // loss_chunks) * model.vocab // t
    loss = (logits * (4 + width), "log-softmax, and 16-bit logits") if width < 4 else (logits * 4, "log-softmax")
    for name, size, note in (
        ("activations", found.saved, "saved by the blocks"),
        ("recomputed", found.recomputed, "blocks computed again at once"),
        ("outer activations", found.ends, "around the blocks"),
        ("logits", 4 * logits, "in fp32"),
        ("loss", *loss),
    ):
        if size:
            yield Part(name, size, None, 1, BACKWARD, False, GPU, note)


def _temporaries(inputs: _Inputs) -> Iterator[Part]:
    """The memory that the step allocates temporarily."""
    row = inputs.row
    if row.temporary:
        size, divisor = row.temporary * elements(inputs.mine.states), inputs.ways if inputs.how.states else 1
        note = TEMPORARIES.get(row.optimizer, OTHER_TEMPORARIES)
        yield Part(
            *("step temporaries", size, Fraction(row.temporary), divisor, STEP, False, inputs.states_at), note=note
        )


def _totals(parts: Sequence[Part]) -> Totals:
    state, backward, step = (
        sum(part.bytes for part in parts if part.phase == phase and part.place == GPU)
        for phase in (ALWAYS, BACKWARD, STEP)
    )
    host = sum(part.bytes for part in parts if part.place == HOST)
    return Totals(state, backward, step, state + max(backward, step), host)


# ----------------------------------------------------------------------------------------------------------- work


def _work(
    model: Transformer | None,
    total: int,
    batch: int | None,
    seq: int | None,
    t: int,
    accumulate: int,
    checkpointing: str,
    lora: int,
) -> Work | None:
    if batch is None or seq is None:
        return None
    if model is None:
        forward = -(-2 * total * batch * seq * accumulate // t)
        return Work(forward, 3 * forward, 3 * forward, False)
    forward = accumulate * (work.forward_flops(model, batch, seq) + work.adapter_flops(model, batch, seq, lora)) // t
    training = accumulate * work.training_flops(model, batch, seq, lora) // t
    again = accumulate * work.recomputed_flops(model, batch, seq, checkpointing) // t
    return Work(forward, training, training + again, True)


# ------------------------------------------------------------------------------------------------------------ fit


def fit(what: str, memory: int, **arguments: Any) -> Plan | None:
    """The largest plan whose peak is at most `memory` bytes, found by bisection; None if the smallest is larger.

    Args:
        what: the size to maximize: ``"batch"`` or ``"layers"`` of a model, or ``"params"`` of a model of unknown shape,
            without activations.
        memory: bytes, without the reserve for what a plan does not count; see `usable`.
        arguments: the other arguments of `plan`.

    Raises:
        ValueError: `plan` refuses an argument, the model is missing, or the size needs no memory of the GPU.

    Examples:
        >>> from halfstep.numerics.planning import card, fit, usable
        >>> fit("params", usable(card("h100"))).parameters  # 14 bytes each, on one GPU
        5522100809
    """
    one_of("what", what, ("params", "layers", "batch"))
    memory = whole("memory", memory)
    model = arguments.get("model")
    if what == "params":
        rest = {name: value for name, value in arguments.items() if name not in ("params", "model", "units")}
        if rest.get("checkpointing", "none") != "none":
            rest["checkpointing"] = "none"

        def at(size: int) -> Plan:
            return plan(size, **rest)

    elif not isinstance(model, Transformer):
        raise ValueError(
            f"Expected model to be a Transformer with what={what!r}, but got none: pass model=Transformer(...), or fit "
            "'params'"
        )
    elif what == "layers":

        def at(size: int) -> Plan:
            return plan(**{**arguments, "model": replace(model, layers=size)})

    else:

        def at(size: int) -> Plan:
            return plan(**{**arguments, "batch": size})

    return _largest(what, at, memory)


_ENDLESS = 2**70  # a size that no card holds: its memory does not grow


def _largest(what: str, at: Callable[[int], Plan], memory: int) -> Plan | None:
    """The plan of the largest size whose peak is at most `memory`."""
    low, best = 1, at(1)
    if best.totals.peak > memory:
        return None
    high = 2
    while (more := at(high)).totals.peak <= memory:
        low, best, high = high, more, 2 * high
        if high > _ENDLESS:
            raise ValueError(
                f"Expected strategy not to offload everything that grows with what={what!r}, but got "
                f"{best.strategy.name!r} with offload=True: leave offload out, or fit 'batch' of a model"
            )
    while high - low > 1:
        middle = (low + high) // 2
        if (tried := at(middle)).totals.peak <= memory:
            low, best = middle, tried
        else:
            high = middle
    return best
