"""Plans of trainings: bytes per GPU by part, messages per step and FLOPs, and the largest plan that fits a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
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
    Sharding,
    Shards,
    Strategy,
    elements,
)

ALWAYS, BACKWARD, STEP = "always", "backward", "step"
GPU, HOST = "gpu", "host"
USUAL_BUCKET = 25 * 2**20  # bytes, of `halfstep.integrations.offload`
WITH_ADAPTERS = ("single", "ddp", "fsdp", "hsdp")
STEPPING_IN_BACKWARD = ("single", "ddp", "fsdp", "hsdp")  # the strategies that `halfstep.integrations.release` supports
DDP_BUCKET = 25 * 2**20  # bytes; torch's default: 1 MiB for the first bucket and 25 MiB for the others
DEEPSPEED_BUCKET = 500_000_000  # elements; DeepSpeed's default reduce_bucket_size
# What `step` allocates, by optimizer.
TEMPORARIES = {"torch": "square root of exp_avg_sq", "apex-o2": "fp32 gradients", "deepspeed": "fp32 gradients"}
OTHER_TEMPORARIES = "fp32 copies of smaller states"


@dataclass(frozen=True)
class Part:
    """A part of the memory of one GPU."""

    name: str
    bytes: int  # on this GPU, or in this GPU's share of the host's memory
    per_parameter: Fraction | None = None  # bytes per parameter before sharding; None if it depends on something else
    divisor: int = 1  # the number of GPUs among which it is sharded
    phase: str = BACKWARD  # when it is allocated: "always", "backward" (forward and backward) or "step"
    exact: bool = False  # otherwise `bytes` is an estimate
    place: str = GPU  # or "host"
    note: str = ""

    @property
    def counts(self) -> bool:
        """Whether the ZeRO paper counts it: weights, gradients and states, but neither buckets nor scalars."""
        return self.phase == ALWAYS and self.name not in ("buckets", "scalars")


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
    """FLOPs of one GPU in one step, micro-batches included."""

    forward: int
    training: int  # forward and backward, three times `forward` unless weights are frozen: the count of MFU
    hardware: int  # `training` and what checkpointing recomputes: the count of HFU
    exact: bool  # counted from the shape; otherwise 6 per parameter and token (Kaplan et al., Scaling laws, 2020, §2.1)


@dataclass(frozen=True)
class Plan:
    """The resources that training a model takes on each GPU."""

    parameters: int  # of the model
    active_parameters: int  # that compute a token
    layout: Layout
    strategy: Strategy
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
        return sum(each.bytes for each in self.communication if each.ranks > 1)

    @property
    def bytes_sent_per_parameter(self) -> Fraction:
        """`bytes_sent` per parameter, for data parallelism only."""
        return sum((each.per_parameter for each in self.communication if each.per_parameter is not None), Fraction(0))

    @property
    def state_per_parameter(self) -> Fraction:
        """Bytes per parameter of weights, gradients and states on one GPU, as the ZeRO paper counts them."""
        shares = ((part.per_parameter or Fraction(0)) / part.divisor for part in self.parts if part.counts)
        return sum(shares, Fraction(0))

    def mfu(self, seconds: float, peak_flops: float) -> float:
        """Model FLOPs utilization: the share of the peak in a step of `seconds`. 0.5 and above is good."""
        return self._utilisation("training", seconds, peak_flops)

    def hfu(self, seconds: float, peak_flops: float) -> float:
        """Hardware FLOPs utilization: `mfu` including the FLOPs that checkpointing recomputes."""
        return self._utilisation("hardware", seconds, peak_flops)

    def _utilisation(self, flops: str, seconds: float, peak_flops: float) -> float:
        if self.work is None:
            raise ValueError(
                "Expected batch, but got None, and FLOPs depend on it: pass batch, and without a model also seq"
            )
        return work.utilisation(getattr(self.work, flops), seconds, peak_flops)

    def as_dict(self) -> dict[str, Any]:
        """The plan as numbers, strings, lists and dicts. docs/planning.md describes the keys."""
        return {
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
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
    return _Training(**locals()).plan()


@dataclass(frozen=True)
class _Training:
    """The arguments of `plan`, checked and with defaults filled in. The properties follow from them."""

    params: float | None
    model: Transformer | None
    units: Sequence[Unit] | None
    gpus: int
    strategy: str
    shard: int | None
    tensor_parallel: int
    sequence_parallel: bool
    precision: str
    optimizer: str
    moments: str | None
    master: str | None
    gradients: str | None
    accumulator: str | None
    amsgrad: bool
    batch: int | None
    seq: int | None
    accumulate: int
    checkpointing: str
    offload: bool
    bucket_view: bool
    compress: str | None
    step_in_backward: int | None
    lora: int | None
    rank: int | None
    loss_chunks: int

    def __post_init__(self) -> None:
        for name in ("gpus", "tensor_parallel", "accumulate", "loss_chunks"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        for name in ("shard", "batch", "seq", "step_in_backward", "lora"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole(name, getattr(self, name)))
        divides("tensor_parallel", self.tensor_parallel, "gpus", self.gpus, "every replica needs as many GPUs")
        if self.strategy is None:
            object.__setattr__(self, "strategy", "single" if self.ranks == 1 else "ddp")
        if self.seq is None and self.model is not None:
            object.__setattr__(self, "seq", self.model.seq)
        self._check_strategy()
        self._check_layout()
        self._check_model()
        if self.step_in_backward is not None:
            self._check_step_in_backward()
        if self.lora is not None:
            self._check_lora()
        ways = self.sharding.ways
        if self.rank is not None and not (isinstance(self.rank, int) and 0 <= self.rank < ways):
            raise ValueError(f"Expected rank to be an integer from 0 to {ways - 1}, but got {self.rank!r}")
        self._check_batch()

    def _check_strategy(self) -> None:
        one_of("strategy", self.strategy, STRATEGIES)
        name, t = self.strategy, self.tensor_parallel
        if name == "single" and self.ranks > 1:
            raise ValueError(
                f"strategy is 'single', but there are {self.ranks} data-parallel GPUs; choose 'ddp', or gpus={t}"
            )
        if self.offload and not self.how.offloads:
            able = ", ".join(s.name for s in STRATEGIES.values() if s.offloads)
            raise ValueError(
                f"Expected strategy to be {able} with offload=True, but got {name!r}, which offloads nothing"
            )
        if self.mirrored and not self.optimizer.startswith("halfstep"):
            raise ValueError(
                f"Expected optimizer to be one of halfstep's with offload=True and strategy {name!r}, which stands for "
                f"halfstep.integrations.offload, but got {self.optimizer!r}: leave offload out"
            )
        if self.bucket_view and (not self.how.buckets or self.ranks == 1 or self.step_in_backward is not None):
            raise ValueError(
                f"bucket_view is True, but strategy {name!r} on {self.ranks} GPUs, or a step in the backward, has no "
                "buckets of DDP; leave it out"
            )
        if self.sequence_parallel and t == 1:
            raise ValueError("Expected tensor_parallel to be 2 or more with sequence_parallel=True, but got 1")

    def _check_layout(self) -> None:
        if self.amsgrad and not self.row.amsgrad:
            raise ValueError(f"amsgrad is True, but optimizer {self.optimizer!r} does not support it; leave it out")
        if self.row.needs_rows and not self.how.keeps_rows:
            able = ", ".join(s.name for s in STRATEGIES.values() if s.keeps_rows)
            raise ValueError(
                f"Expected strategy to be {able} with moments in 8 bits, whose blocks lie within rows of parameters, "
                f"but got {self.strategy!r}: choose one of these, or moments 'bf16'"
            )
        for name, value in (("accumulator", self.accumulator), ("compress", self.compress)):
            if value is not None:
                one_of(name, value, GRADIENTS)
        if self.compress is not None and self.ranks == 1:
            raise ValueError(f"compress is {self.compress!r}, but one data-parallel GPU sends nothing; leave it out")

    def _check_model(self) -> None:
        passed = [name for name in ("params", "model", "units") if getattr(self, name) is not None]
        if len(passed) != 1:
            raise ValueError(f"Expected one of params, model and units, but got {' and '.join(passed) or 'none'}")
        t, model = self.tensor_parallel, self.model
        if self.units is not None and t > 1:
            raise ValueError(
                f"Expected tensor_parallel to be 1 with units, but got {t}: pass the units of one GPU instead"
            )
        if self.units is not None and not parameters_of(self.units):
            raise ValueError("Expected units to contain parameters, but got none: give at least one tensor")
        if model is not None:
            model.check_parallel(t)
        elif self.units is None:
            whole("params", self.params)

    def _check_batch(self) -> None:
        model = self.model
        one_of("checkpointing", self.checkpointing, work.CHECKPOINTING)
        for name, usual in (("checkpointing", "none"), ("loss_chunks", 1)):
            if model is None and getattr(self, name) != usual:
                raise ValueError(
                    f"{name} is {getattr(self, name)!r}, but activations are unknown without a model: pass model as "
                    "well"
                )
        if model is not None and model.positions and self.seq is not None and self.seq > model.seq:
            raise ValueError(
                f"Expected seq to be from 1 to {model.seq}, the positions of the model, but got {self.seq}"
            )

    def _check_step_in_backward(self) -> None:
        """Raise where `halfstep.integrations.release.step_in_backward` does, or frees no gradients."""
        if self.strategy not in STEPPING_IN_BACKWARD:
            raise ValueError(
                f"Expected strategy to be {', '.join(STEPPING_IN_BACKWARD)} with step_in_backward, but got "
                f"{self.strategy!r}, which keeps all gradients"
            )
        if not self.optimizer.startswith("halfstep"):
            raise ValueError(
                f"Expected optimizer to be one of halfstep's with step_in_backward, but got {self.optimizer!r}: leave "
                "step_in_backward out"
            )
        if self.accumulate > 1 or self.accumulator is not None:
            raise ValueError(
                "Expected accumulate to be 1 and accumulator None with step_in_backward, since accumulated gradients "
                f"exist until the last micro-batch, but got {self.accumulate} and {self.accumulator!r}"
            )
        if self.strategy == "ddp" and self.compress is not None:
            raise ValueError(
                f"Expected compress to be None with step_in_backward and strategy 'ddp', but got {self.compress!r}: "
                "buckets are reduced in the format of the gradients"
            )

    def _check_lora(self) -> None:
        """Raise where adapters are not planned."""
        if self.model is None:
            raise ValueError(
                "Expected model with lora, whose adapters stand beside its matrices, but got None: pass model"
            )
        if self.strategy not in WITH_ADAPTERS:
            raise ValueError(f"Expected strategy to be {', '.join(WITH_ADAPTERS)} with lora, but got {self.strategy!r}")
        for name, wanted in (("tensor_parallel", 1), ("offload", False), ("step_in_backward", None)):
            value = getattr(self, name)
            if value != wanted:
                raise ValueError(f"Expected {name} to be {wanted} with lora, but got {value!r}: leave one of them out")

    # ------------------------------------------------------------------------------------------- what follows from them

    @property
    def ranks(self) -> int:
        """Data-parallel GPUs."""
        return self.gpus // self.tensor_parallel

    @property
    def how(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def mirrored(self) -> bool:
        """Whether weights and gradients also stay on the GPU while the host has them."""
        return self.offload and self.strategy in MIRRORED

    @cached_property
    def row(self) -> Layout:
        return layout(
            self.optimizer, self.precision, moments=self.moments, master=self.master, gradients=self.gradients
        )

    @cached_property
    def sharding(self) -> Sharding:
        return Sharding.of(self.how, self.ranks, self.shard, shaped=self.params is None)

    @cached_property
    def everything(self) -> Sequence[Unit]:
        """The weights of one tensor-parallel GPU."""
        if self.model is not None:
            t, rank = self.tensor_parallel, self.lora
            return self.model.units(t) if rank is None else self.model.units_with_adapters(rank)
        if self.units is not None:
            return self.units
        size = -(-whole("params", self.params) // self.tensor_parallel)
        return (Unit("model", (Tensor("parameters", (size,)),), root=True),)

    @cached_property
    def trained(self) -> Sequence[Unit]:
        """`everything`, but for frozen weights."""
        return self.everything if self.lora is None or self.model is None else self.model.adapters(self.lora)

    @cached_property
    def shards(self) -> Shards:
        """Those of the planned rank."""
        return self.sharding.shards(self.trained, self.rank)

    @cached_property
    def summed(self) -> StoredFormat | None:
        return None if self.accumulator is None else STORED_FORMATS[self.accumulator]

    @property
    def sent(self) -> StoredFormat:
        """The format in which gradients are sent."""
        return STORED_FORMATS[self.compress] if self.compress is not None else self.summed or self.row.gradients

    @property
    def parameters(self) -> int:
        if self.model is not None and self.lora is None:
            return self.model.parameters
        return parameters_of(self.everything) if self.params is None else whole("params", self.params)

    def plan(self) -> Plan:
        row, how, t = self.row, self.how, self.tensor_parallel
        parts = (
            *(*_stored(self), *_buckets(self), *_gathered(self), *_autocast_copies(self)),
            *(*_activations(self), *_temporaries(self)),
        )
        messages = self.sharding.communication(
            *(self.trained, self.everything),
            gradient_width=self.sent.per_parameter,
            weight_width=row.compute.per_parameter if how.gathers else row.weights.per_parameter,
            accumulate=self.accumulate,
        )
        if self.offload:
            messages += sharding.over_the_bus(row, how, self.shards, self.accumulate)
        if self.model is not None and t > 1 and self.batch is not None and self.seq is not None:
            messages += sharding.between_layers(row, self.model, self.batch, self.seq, t, self.accumulate)
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "units"}
        shape = None if self.model is None else asdict(self.model)
        settings |= {"params": self.parameters, "model": shape, "gradients": row.gradients.name}
        states = {name for name, _ in row.states(self.amsgrad)}
        moved = row.moved_besides_states * elements(self.shards.states)
        moved += 2 * sum(part.bytes for part in parts if part.name in states)
        totals = _totals(parts)
        idle = 0 if self.model is None else self.model.parameters - self.model.active_parameters
        counts = (self.parameters, self.parameters - idle)
        return Plan(*counts, row, how, settings, parts, totals, messages, _work(self), math.ceil(moved))


# ---------------------------------------------------------------------------------------------------------- parts


def _stored(training: _Training) -> Iterator[Part]:
    """Weights, gradients and states."""
    row, how, shards, offload = training.row, training.how, training.shards, training.offload
    rest, states_at = HOST if offload and how.offloads == "all" else GPU, HOST if offload else GPU
    listed: list[tuple[str, StoredFormat | None, Locals, bool, str]] = [
        ("weights", row.weights, shards.weights, how.weights, rest),
        ("gradients", row.gradients, shards.gradients, how.gradients, rest),
        ("accumulated gradients", training.summed, shards.gradients, how.gradients, rest),
        *((name, stored, shards.states, how.states, states_at) for name, stored in row.states(training.amsgrad)),
    ]
    if training.lora is not None and training.model is not None:
        frozen = training.sharding.shards(training.model.units()).weights
        listed.insert(0, ("frozen weights", row.weights, frozen, how.weights, rest))
    for name, stored, tensors, divided, place in listed:
        if stored is None:
            continue
        size = sum(count * stored.bytes(each, length) for each, count, length in tensors)
        divisor = training.sharding.ways if divided else 1
        whole_part = partial(Part, name, size, stored.per_parameter, divisor, ALWAYS, True, note=stored.name)
        if name in ("weights", "gradients") and training.mirrored:
            yield replace(whole_part(place=HOST), name=f"{name} on the host")
        if name == "gradients" and offload and how.name == "single":
            largest = max(row.gradients.bytes(each) for each, _, _ in tensors) if training.sharding.shaped else 0
            size = min(size, 2 * (training.step_in_backward or USUAL_BUCKET) + largest)
            yield Part(name, size, None, divisor, place=place, note="on their way to the host")
        elif name == "gradients" and training.step_in_backward is not None:
            size, note = _bucket(training, training.step_in_backward, size)
            yield Part(name, size, None, divisor, place=place, note=note)
        else:
            yield whole_part(place=place)
    if training.sharding.shaped and row.scalars:
        size = row.scalars * sum(count for _, count, _ in shards.states)
        counted = not row.optimizer.startswith("te")  # those of TransformerEngine were not measured
        yield Part("scalars", size, None, 1, ALWAYS, counted, states_at, "step counts, scales")


def _bucket(training: _Training, bucket_bytes: int, size: int) -> tuple[int, str]:
    """The most bytes of gradients with steps in the backward, of `size` bytes in all, and what they are.

    A bucket holds what it had before its last gradient, and that one. Replicas reduce a copy of one bucket, in which
    gradients begin at multiples of 16 bytes and a mark follows for each, while the next one is filled. FSDP2 reduces
    the gradients of a unit into one buffer, which exists until the last of them is stepped. The units with the first
    and the last gradient of the bucket may be larger than what the bucket takes of them.
    """
    gradients, shaped, stored = training.shards.gradients, training.sharding.shaped, training.row.gradients
    if shaped and training.how.gathers and training.sharding.ways > 1:
        units = [training.sharding.shards([replace(unit, count=1)]).gradients for unit in training.trained]
        bucket_bytes += 2 * max(sum(count * stored.bytes(each) for each, count, _ in unit) for unit in units)
    elif shaped:
        bucket_bytes += max(stored.bytes(each) for each, _, _ in gradients) - 1
    bucket_bytes = min(bucket_bytes, size)
    if training.strategy != "ddp" or training.ranks == 1:
        return bucket_bytes, "one bucket, stepped in the backward"
    added = 16 * sum(count for _, count, _ in gradients) if shaped else 0
    return 2 * bucket_bytes + added, "one bucket filled and one reduced, stepped in the backward"


def _buckets(training: _Training) -> Iterator[Part]:
    how, width, local = training.how, training.row.gradients.width, parameters_of(training.trained)
    if training.ranks == 1:
        return
    if how.by == "flat":
        note = "5e8 gradients, DeepSpeed's default"
        yield Part("buckets", min(DEEPSPEED_BUCKET, local) * width, note=note)
    if how.buckets and training.step_in_backward is None:
        if not training.bucket_view:
            note = "DDP's copy of the gradients"
            yield Part("buckets", local * width, Fraction(width), 1, ALWAYS, True, note=note)
        if training.sent.width < width:
            # The size of a bucket is counted before compression.
            size = min(DDP_BUCKET, local * width) * training.sent.width // width
            yield Part("compressed bucket", size, note="one of 25 MiB on its way")


def _gathered(training: _Training) -> Iterator[Part]:
    """Unsharded units under FSDP: the one being computed, the next one being gathered, and the root."""
    if not training.how.gathers or training.sharding.ways == 1 or not training.sharding.shaped:
        return
    blocks = [unit for unit in training.everything if not unit.root]
    largest = max((unit.elements for unit in blocks), default=0)
    root = parameters_of(unit for unit in training.everything if unit.root)
    width = training.row.compute.width
    weights = (root + largest * (2 if sum(unit.count for unit in blocks) > 1 else 1)) * width
    yield Part("gathered weights", weights, note="the root and two units")
    trained = max((unit.elements for unit in training.trained if not unit.root), default=0)
    gradients = (trained or root) * (width + training.sent.width)
    yield Part("unreduced gradients", gradients, note="largest unit, and its copy to reduce")


def _autocast_copies(training: _Training) -> Iterator[Part]:
    """The 16-bit copies of fp32 weights that autocast caches until the backward. FSDP gathers 16-bit weights itself."""
    if training.row.autocast and not training.how.gathers:
        compute, shaped = training.row.compute, training.sharding.shaped
        cast = sum(tensor.elements * count for tensor, count in tensors_of(training.everything) if tensor.cast)
        note = "by autocast, kept for backward"
        yield Part("cast weights", cast * compute.width, compute.per_parameter, exact=shaped, note=note)


def _activations(training: _Training) -> Iterator[Part]:
    model, batch, seq, width = training.model, training.batch, training.seq, training.row.compute.width
    if model is None or batch is None or seq is None:
        return
    saved = work.activations(
        *(model, batch, seq),
        width=width,
        tensor_parallel=training.tensor_parallel,
        sequence_parallel=training.sequence_parallel,
        checkpointing=training.checkpointing,
    )
    logits = -(-batch * seq // training.loss_chunks) * model.vocab // training.tensor_parallel
    loss = (logits * (4 + width), "log-softmax, and 16-bit logits") if width < 4 else (logits * 4, "log-softmax")
    for name, size, note in (
        ("activations", saved.saved, "saved by the blocks"),
        ("recomputed", saved.recomputed, "blocks computed again at once"),
        ("outer activations", saved.ends, "around the blocks"),
        ("logits", 4 * logits, "in fp32"),
        ("loss", *loss),
    ):
        if size:
            yield Part(name, size, note=note)


def _temporaries(training: _Training) -> Iterator[Part]:
    """The memory that the step allocates temporarily."""
    each = training.row.temporary
    if each:
        size, divisor = each * elements(training.shards.states), training.sharding.ways if training.how.states else 1
        place, note = HOST if training.offload else GPU, TEMPORARIES.get(training.optimizer, OTHER_TEMPORARIES)
        yield Part("step temporaries", size, Fraction(each), divisor, STEP, place=place, note=note)


def _totals(parts: Sequence[Part]) -> Totals:
    state, backward, step = (
        sum(part.bytes for part in parts if part.phase == phase and part.place == GPU)
        for phase in (ALWAYS, BACKWARD, STEP)
    )
    host = sum(part.bytes for part in parts if part.place == HOST)
    return Totals(state, backward, step, state + max(backward, step), host)


def _work(training: _Training) -> Work | None:
    model, batch, seq, lora = training.model, training.batch, training.seq, training.lora or 0
    if batch is None or seq is None:
        return None
    t, times = training.tensor_parallel, training.accumulate
    if model is None:
        forward = -(-2 * training.parameters * batch * seq * times // t)
        return Work(forward, 3 * forward, 3 * forward, False)
    forward = times * (work.forward_flops(model, batch, seq) + work.adapter_flops(model, batch, seq, lora)) // t
    both = times * work.training_flops(model, batch, seq, lora) // t
    again = times * work.recomputed_flops(model, batch, seq, training.checkpointing) // t
    return Work(forward, both, both + again, True)


# ------------------------------------------------------------------------------------------------------------ fit

_ENDLESS = 2**70  # a size that no card holds: its memory does not grow


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
        arguments = {**arguments, "model": None, "units": None, "checkpointing": "none"}
    elif not isinstance(model, Transformer):
        raise ValueError(
            f"Expected model to be a Transformer with what={what!r}, but got none: pass model=Transformer(...), or fit "
            "'params'"
        )

    def at(size: int) -> Plan:
        change = {"model": replace(model, layers=size)} if what == "layers" and model is not None else {what: size}
        return plan(**{**arguments, **change})

    high = 1
    while at(high).totals.peak <= memory:
        high *= 2
        if high > _ENDLESS:
            raise ValueError(
                f"Expected strategy not to offload everything that grows with what={what!r}, but got "
                f"{at(1).strategy.name!r} with offload=True: leave offload out, or fit 'batch' of a model"
            )
    if high == 1:
        return None
    low = high // 2  # fits, and `high` does not. Not by `bisect`, whose range has 32 bits in a browser's Python.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if at(middle).totals.peak <= memory else (low, middle)
    return at(low)
