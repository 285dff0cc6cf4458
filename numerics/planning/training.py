"""The settings of a training to plan, their validation, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple

from halfstep.numerics.messages import divides, one_of, whole
from halfstep.numerics.planning.layouts import Layout, layout
from halfstep.numerics.planning.models import Tensor, Transformer, Unit, parameters_of
from halfstep.numerics.planning.sharding import STRATEGIES, Scratch, Sharding, Shards, Strategy, scratch_of
from halfstep.numerics.planning.work import CHECKPOINTING


class Stepped(NamedTuple):
    """Parameters whose states have the same layout."""

    row: Layout
    units: Sequence[Unit]
    shards: Shards  # those of the planned rank
    share: Fraction  # their fraction of all trained parameters


@dataclass(frozen=True)
class Training:
    """The training of a model, specified by exactly one of `params`, `model` and `units`.

    Args:
        params: number of parameters. Without shapes, activations and gathered units are unknown and not counted.
        model: a transformer.
        units: the parameters of any model, grouped into the units that FSDP gathers; see `unit`.
        gpus: number of GPUs.
        strategy: a name of `STRATEGIES`. Default: ``"single"`` on one GPU, otherwise ``"ddp"``.
        shard: GPUs in one group of ``"hsdp"``.
        precision, optimizer, moments: the layout; see `layout`.
        batch: sequences per GPU.
        seq: sequence length. Default: `model.seq`.
        checkpointing: see `work.activations`.
        offload: whether the strategy offloads what it can to the host. With ``"single"`` and ``"ddp"`` this means
            `halfstep.integrations.offload`, with a halfstep optimizer.
        keep_weights: whether weights stay on the GPU with `offload`, as they always do with ``"single"`` and ``"ddp"``.
            With ``"fsdp"`` and ``"hsdp"`` this means `halfstep.integrations.offload` instead of CPUOffloadPolicy.
        bucket_view: whether gradients are views of DDP's buckets (``gradient_as_bucket_view``).
        step_in_backward: the `bucket_bytes` of `halfstep.integrations.release.step_in_backward`, which keeps only the
            gradients of one bucket, or of two with ``"ddp"``, which then means its `process_group`. Default: all
            gradients exist until the step.
        lora: rank of the LoRA adapters of the matrices in the blocks (Hu et al., 2021). All other weights are then
            frozen. Default: all weights are trained.
        rank: the rank whose memory is planned, among those that shard the model. Default: the rank that has most.
        loss_chunks: the number of chunks of tokens for which head and loss compute logits one after the other, as the
            chunked losses of Liger and torchtune do.

    Raises:
        ValueError: an argument is out of its range, or two arguments cannot be combined.
    """

    params: float | None = None
    _: KW_ONLY
    model: Transformer | None = None
    units: Sequence[Unit] | None = None
    gpus: int = 1
    strategy: str | None = None
    shard: int | None = None
    precision: str = "bf16"
    optimizer: str = "halfstep"
    moments: str | None = None
    batch: int | None = None
    seq: int | None = None
    checkpointing: str = "none"
    offload: bool = False
    keep_weights: bool = False
    bucket_view: bool = False
    step_in_backward: int | None = None
    lora: int | None = None
    rank: int | None = None
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        optional = ("shard", "batch", "seq", "step_in_backward", "lora")
        for name in ("gpus", "loss_chunks", *optional):
            if name not in optional or getattr(self, name) is not None:
                object.__setattr__(self, name, whole(name, getattr(self, name)))
        if not self.strategy:
            object.__setattr__(self, "strategy", "single" if self.gpus == 1 else "ddp")
        if self.seq is None and self.model is not None:
            object.__setattr__(self, "seq", self.model.seq)
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("checkpointing", self.checkpointing, CHECKPOINTING)
        divides("shard", self.shard or 1, "gpus", self.gpus, "every group needs as many GPUs")
        sources = [name for name in ("params", "model", "units") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise ValueError(f"Expected one of params, model and units, but got {' and '.join(sources) or 'none'}")
        for refused, name, allowed, remedy in self._combinations():
            if refused:
                raise ValueError(f"Expected {name} to be {allowed}, but got {getattr(self, name)!r}: {remedy}")
        if self.params is not None:
            whole("params", self.params)
        elif not parameters_of(self.weights):
            raise ValueError("Expected units to contain parameters, but got none: pass at least one tensor")

    def _combinations(self) -> Iterator[tuple[bool, str, str, str]]:
        """Checks of combinations of arguments: whether to refuse, the argument, what is allowed, and the remedy."""
        strategy, gpus, last = self.strategy, self.gpus, self.sharding.divisor - 1
        stepping, lora, no_model = self.step_in_backward is not None, self.lora is not None, self.model is None
        rows, muon = "moments in 8 bits, whose blocks lie within rows of parameters", self.row.adamw is not None
        release, step_after = "step_in_backward", "leave it out, others keep all gradients"
        if muon:
            rows = "Muon, which needs whole matrices, or parts of rows to exchange"
            release = "step_in_backward and Muon, whose matrices must be whole on each rank"
            step_after = "leave step_in_backward out, and step after the backward"
        for used, able, feature, remedy in (
            (self.offload, lambda row: row.offloads, "offload=True", "leave offload out, or choose one of these"),
            (self.keep_weights, lambda row: row.by_rows, "keep_weights=True", "leave it out, or choose one of these"),
            (True, lambda row: row.holds(self.row), rows, "choose one of these" + ", or moments 'bf16'" * (not muon)),
            (stepping and self.row.ours, lambda row: row.releases(self.row), release, step_after),
            (lora, lambda row: row.by_rows, "lora", "choose one of these"),
        ):
            names = [row.name for row in STRATEGIES.values() if able(row)]
            yield used and strategy not in names, "strategy", f"{', '.join(names)} with {feature}", remedy
        no_views = not self.strategy_row.buckets or gpus == 1 or stepping
        released = " and step_in_backward" if stepping else ""
        no_ddp = f"False with strategy {strategy!r} on {gpus} GPUs{released}, without DDP's buckets"
        positions = self.model.seq if self.model is not None and self.model.positions else self.seq
        out, pick, shape = "leave it out", "leave one of them out", "pass model as well"
        yield strategy == "single" and gpus > 1, "strategy", f"'ddp' or another for {gpus} GPUs", "or pass gpus=1"
        grouped = strategy == "hsdp"
        yield grouped and self.shard is None, "shard", "the GPUs of one group with strategy 'hsdp'", "pass shard=8"
        yield not grouped and self.shard is not None, "shard", f"None with strategy {strategy!r}, without groups", out
        foreign = self.mirrored and not self.row.ours
        yield self.keep_weights and not self.offload, "keep_weights", "False without offload", "pass offload=True"
        mirrored = f"offload=True and {'keep_weights=True' if self.keep_weights else repr(strategy)}"
        yield foreign, "optimizer", f"one of halfstep's with {mirrored}", pick
        yield self.bucket_view and no_views, "bucket_view", no_ddp, out
        yield stepping and not self.row.ours, "optimizer", "one of halfstep's with step_in_backward", pick
        products = "True with offload=True and Muon, whose matrix products need a GPU"
        yield muon and self.offload and not self.mirrored, "keep_weights", products, "pass keep_weights=True"
        yield muon and self.offload and stepping, "step_in_backward", "None with offload=True and Muon", pick
        yield lora and no_model, "model", "a Transformer with lora, whose adapters adapt its matrices", shape
        yield lora and self.offload, "offload", "False with lora", pick
        yield lora and stepping, "step_in_backward", "None with lora", pick
        bounded = self.rank is None or (isinstance(self.rank, int) and 0 <= self.rank <= last)
        yield not bounded, "rank", f"an integer from 0 to {last}", "ranks are those among which the model is divided"
        unknown = "without a model, of which activations are unknown"
        yield no_model and self.checkpointing != "none", "checkpointing", f"'none' {unknown}", shape
        yield no_model and self.loss_chunks > 1, "loss_chunks", f"1 {unknown}", shape
        beyond = (self.seq or 0) > (positions or 0)
        yield beyond, "seq", f"from 1 to {positions}, the positions of the model", "shorten it"

    @property
    def strategy_row(self) -> Strategy:
        return STRATEGIES[str(self.strategy)]

    @property
    def mirrored(self) -> bool:
        """Whether weights and gradients are on the GPU as well as on the host."""
        return self.offload and (self.keep_weights or self.strategy_row.by == "nothing")

    @cached_property
    def row(self) -> Layout:
        return layout(self.optimizer, self.precision, moments=self.moments)

    @cached_property
    def sharding(self) -> Sharding:
        return Sharding(self.strategy_row, self.gpus, self.shard, shaped=self.params is None)

    @cached_property
    def weights(self) -> Sequence[Unit]:
        """All weights, including frozen ones."""
        if self.model is not None:
            return self.model.units() if self.lora is None else self.model.units_with_adapters(self.lora)
        if self.units is not None:
            return self.units
        return (Unit("model", (Tensor("parameters", (whole("params", self.params),), "all"),), root=True),)

    @cached_property
    def trained(self) -> Sequence[Unit]:
        """The weights that are not frozen."""
        return self.weights if self.lora is None or self.model is None else self.model.adapters(self.lora)

    @cached_property
    def by_rule(self) -> list[Stepped]:
        """The trained parameters by the layout of their states: with Muon, the matrices and all others."""
        units: dict[Layout, Sequence[Unit]] = {self.row: self.trained}
        if self.row.adamw is not None:
            for row, of_muon in ((self.row, True), (self.row.adamw, False)):
                units[row] = [unit.of_muon(of_muon) for unit in self.trained]
        counts = {row: Fraction(parameters_of(of_row), parameters_of(self.trained)) for row, of_row in units.items()}
        shards = self.sharding.shards
        return [Stepped(row, units[row], shards(units[row], self.rank), counts[row]) for row in units if counts[row]]

    @cached_property
    def scratch(self) -> Scratch | None:
        """What Muon's matrices need; None if there are none."""
        row, units, *_ = self.by_rule[0]
        sharding = self.sharding
        if row.adamw is None:
            return None
        return scratch_of(tuple(units), sharding.divisor, self.rank or 0, sharding.shaped, row.needs_rows)

    @cached_property
    def shards(self) -> Shards:
        """The shards of the planned rank."""
        return self.sharding.shards(self.trained, self.rank)
