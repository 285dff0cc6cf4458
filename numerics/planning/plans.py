"""A plan: bytes per GPU by part, messages per step and FLOPs of one training, and the largest that fits a card."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import Any

from halfstep.numerics.planning import plan_parts, plan_sharding, plan_traffic, plan_work
from halfstep.numerics.planning.plan_cards import GIB, Card
from halfstep.numerics.planning.plan_errors import divides, one_of, whole
from halfstep.numerics.planning.plan_layouts import FORMATS, Layout, layout
from halfstep.numerics.planning.plan_parts import Part, Totals
from halfstep.numerics.planning.plan_shapes import Tensor, Transformer, Unit, parameters_of
from halfstep.numerics.planning.plan_sharding import STRATEGIES, Strategy
from halfstep.numerics.planning.plan_traffic import Collective
from halfstep.numerics.planning.plan_work import CHECKPOINTING

RESERVE = Fraction(1, 10)  # of a card's memory, for what is not counted; a rule of thumb


@dataclass(frozen=True)
class Work:
    """FLOPs of one GPU in one step, micro-batches included.

    Args:
        forward: of one forward.
        training: three forwards; what MFU counts.
        hardware: with what checkpointing computes again; what HFU counts.
        exact: counted from the model's shape, or 6 per parameter and token (Kaplan et al., Scaling laws, 2020, §2.1).
    """

    forward: int
    training: int
    hardware: int
    exact: bool


@dataclass(frozen=True)
class Plan:
    """What training a model takes of each GPU. `settings` are the arguments of `plan`, as they were understood."""

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
        """The part of that name; ValueError with the names there are."""
        one_of("part", name, [part.name for part in self.parts])
        return next(part for part in self.parts if part.name == name)

    @property
    def bytes_sent(self) -> int:
        """Bytes that one GPU sends to others in a step; copies to and from its host are not in it."""
        return sum(each.bytes for each in self.communication if each.ranks > 1)

    @property
    def bytes_sent_per_parameter(self) -> Fraction:
        """The same per parameter, for data parallelism only."""
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
        """Share of the peak that the model's FLOPs reach in a step of so many seconds; 0.5 and above is good."""
        return plan_work.utilisation(self._work().training, seconds, peak_flops)

    def hfu(self, seconds: float, peak_flops: float) -> float:
        """The same with the FLOPs that checkpointing computes again."""
        return plan_work.utilisation(self._work().hardware, seconds, peak_flops)

    def _work(self) -> Work:
        if self.work is None:
            raise ValueError("batch is not given and without it there is no work; give batch, and seq without a model")
        return self.work

    def as_dict(self) -> dict[str, Any]:
        """Everything in plain numbers, text, lists and dicts; docs/planning.md describes the keys."""
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
    """The model as one tensor-parallel GPU holds it."""
    given = [name for name, value in (("params", params), ("model", model), ("units", units)) if value is not None]
    if len(given) != 1:
        raise ValueError(f"{' and '.join(given) or 'nothing'} is given; allowed is one of params, model and units")
    if model is not None:
        return model.units(t)
    if units is not None:
        if t > 1:
            raise ValueError(f"tensor_parallel is {t} with units; allowed is 1: give the units of one GPU instead")
        if not parameters_of(units):
            raise ValueError("units hold no parameters; give at least one tensor")
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
    rank: int | None = None,
) -> Plan:
    """Plan the training of a model. One of `params`, `model` and `units` says which.

    Args:
        params: how many parameters. Without shapes activations and gathered units are not known and left out.
        model: a transformer.
        units: parameters of any model by the units that FSDP gathers; see `unit`.
        gpus: in all.
        strategy: a name of `STRATEGIES`. Default: ``"single"`` on one data-parallel GPU, else ``"ddp"``.
        shard: GPUs of one group of ``"hsdp"``.
        tensor_parallel: GPUs that share every layer; divides `gpus`.
        sequence_parallel: norms and dropouts are divided among them too (Korthikanti et al., 2022).
        precision, optimizer, moments, master, gradients: of the layout; see `plan_layouts.layout`.
        accumulator: format of a second gradient in which micro-batches are summed.
        amsgrad: keep ``max_exp_avg_sq``.
        batch: sequences of one micro-batch on one GPU.
        seq: their length. Default: the model's.
        accumulate: micro-batches in a step.
        checkpointing: see `plan_work.activations`.
        offload: what the strategy can leave in the host's memory is there.
        bucket_view: gradients are views of DDP's buckets, DDP's ``gradient_as_bucket_view``.
        compress: format in which gradients are sent: DDP's hooks, FSDP2's ``reduce_dtype``.
        rank: whose memory among those that divide the model. Default: of the rank that holds most.

    Raises:
        ValueError: an argument is out of its range, or two do not go together. The text says which and what to do.
    """
    gpus, t = whole("gpus", gpus), whole("tensor_parallel", tensor_parallel)
    accumulate = whole("accumulate", accumulate)
    divides("tensor_parallel", t, "gpus", gpus, "every replica needs as many GPUs")
    ranks = gpus // t
    chosen = strategy if strategy is not None else "single" if ranks == 1 else "ddp"
    one_of("strategy", chosen, STRATEGIES)
    how = STRATEGIES[chosen]
    if how.name == "single" and ranks > 1:
        raise ValueError(f"strategy is 'single' with {ranks} data-parallel GPUs; take 'ddp', or gpus={t}")
    if offload and not how.offloads:
        able = ", ".join(s.name for s in STRATEGIES.values() if s.offloads)
        raise ValueError(f"offload is True, and strategy {how.name!r} leaves nothing on the host; allowed are {able}")
    if sequence_parallel and t == 1:
        raise ValueError("sequence_parallel is True with tensor_parallel 1; allowed from 2")
    row = layout(optimizer, precision, moments=moments, master=master, gradients=gradients)
    if amsgrad and not row.amsgrad:
        raise ValueError(f"amsgrad is True, and optimizer {optimizer!r} does not have it; leave it out")
    for name, value in (("accumulator", accumulator), ("compress", compress)):
        if value is not None:
            one_of(name, value, ("fp32", "bf16", "fp16"))
    held = _units_of(params, model, units, t)
    local = parameters_of(held)
    shard = None if shard is None else whole("shard", shard)
    ways, _ = plan_sharding.groups(how, ranks, shard)
    if rank is not None and not (isinstance(rank, int) and 0 <= rank < ways):
        raise ValueError(f"rank is {rank!r}; allowed are whole numbers from 0 to {ways - 1}")
    batch, seq = _micro_batch(model, batch, seq, checkpointing)
    mine = plan_sharding.shard(held, how, ways, rank, shaped=params is None)
    summed = None if accumulator is None else FORMATS[accumulator]
    sent = FORMATS[compress] if compress is not None else summed or row.gradients

    parts = plan_parts.kept(row, how, ways, mine, summed, amsgrad, offload, shaped=params is None)
    parts += plan_parts.buckets(how, ranks, local, row, sent, bucket_view)
    parts += plan_parts.gathered(row, how, ways, held, sent, shaped=params is None)
    parts += plan_parts.autocast_copies(row, how, held, shaped=params is None)
    if model is not None and batch is not None and seq is not None:
        parts += plan_parts.activations(row, model, batch, seq, t, sequence_parallel, checkpointing)
    parts += plan_parts.temporaries(row, how, ways, mine, offload)
    total = model.parameters if model is not None else local if units is not None else whole("params", params)
    messages = plan_traffic.communication(
        how,
        ranks,
        parameters=plan_sharding.padded(held, how, ways, shaped=params is None),
        gradient_width=sent.per_parameter,
        weight_width=row.compute.per_parameter if how.gathers else row.weights.per_parameter,
        accumulate=accumulate,
        shard_size=shard,
        kept=plan_sharding.padded([one for one in held if one.root], how, ways, shaped=params is None)
        if how.by in ("rows", "units") and len(held) > 1
        else 0,
    )
    if offload:
        messages += plan_traffic.over_the_bus(row, how, mine, accumulate)
    if model is not None and t > 1 and batch is not None and seq is not None:
        messages += plan_traffic.between_layers(row, model, batch, seq, t, accumulate)
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
        "rank": rank,
    }
    moved = row.moved_per_step(amsgrad) * sum(size * count for size, count in mine.states)
    return Plan(
        total,
        row,
        how,
        settings,
        tuple(parts),
        plan_parts.totals(parts),
        messages,
        _work(model, total, batch, seq, t, accumulate, checkpointing),
        -(-moved.numerator // moved.denominator),
    )


def _micro_batch(
    model: Transformer | None, batch: int | None, seq: int | None, checkpointing: str
) -> tuple[int | None, int | None]:
    """Batch and sequence length, checked."""
    one_of("checkpointing", checkpointing, CHECKPOINTING)
    if model is None and checkpointing != "none":
        raise ValueError(f"checkpointing is {checkpointing!r}, and without a model nothing is known of its activations")
    batch = None if batch is None else whole("batch", batch)
    if seq is not None:
        seq = whole("seq", seq)
        if model is not None and model.positions and seq > model.seq:
            raise ValueError(f"seq is {seq}; the model has {model.seq} positions: allowed are 1 to {model.seq}")
    elif model is not None:
        seq = model.seq
    return batch, seq


# ----------------------------------------------------------------------------------------------------------- work


def _work(
    model: Transformer | None,
    total: int,
    batch: int | None,
    seq: int | None,
    t: int,
    accumulate: int,
    checkpointing: str,
) -> Work | None:
    if batch is None or seq is None:
        return None
    if model is None:
        forward = -(-2 * total * batch * seq * accumulate // t)
        return Work(forward, 3 * forward, 3 * forward, False)
    forward = accumulate * plan_work.forward_flops(model, batch, seq) // t
    again = accumulate * plan_work.recomputed_flops(model, batch, seq, checkpointing) // t
    return Work(forward, 3 * forward, 3 * forward + again, True)


# ------------------------------------------------------------------------------------------------------------ fit


def fit(what: str, memory: int, **arguments: Any) -> Plan | None:
    """The largest plan whose peak is at most `memory` bytes, found by bisection; None if the smallest is larger.

    Args:
        what: ``"batch"``, of a model; ``"layers"``, of a model, all else kept; or ``"params"``, of no known shape, so
            without activations.
        memory: bytes, after taking off a reserve for what is not counted (`RESERVE`).
        arguments: those of `plan`.

    Raises:
        ValueError: arguments that `plan` refuses, or that do not say what is to be fitted.
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
        raise ValueError(f"what is {what!r} and there is no model; give model=Transformer(...), or fit 'params'")
    elif what == "layers":

        def at(size: int) -> Plan:
            return plan(**{**arguments, "model": replace(model, layers=size)})

    else:

        def at(size: int) -> Plan:
            return plan(**{**arguments, "batch": size})

    return _largest(at, memory)


def _largest(at: Callable[[int], Plan], memory: int) -> Plan | None:
    """The plan of the largest size from 1 whose peak fits; peaks grow with the size."""
    low, best = 1, at(1)
    if best.totals.peak > memory:
        return None
    high = 2
    while (more := at(high)).totals.peak <= memory:
        low, best, high = high, more, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if (tried := at(middle)).totals.peak <= memory:
            low, best = middle, tried
        else:
            high = middle
    return best


def usable(gpu: Card, reserve: Fraction | int = RESERVE) -> int:
    """Bytes of a card after a reserve: a share below 1 of its memory, or bytes."""
    kept = gpu.memory * reserve if reserve < 1 else reserve
    left = int(gpu.memory - kept)
    if reserve < 0 or left < 1:
        raise ValueError(
            f"reserve is {reserve}; allowed are a share from 0 to below 1, or fewer bytes than the "
            f"{gpu.memory / GIB:g} GiB of {gpu.name!r}"
        )
    return left
