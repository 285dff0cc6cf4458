"""A training to plan: its settings, checked, and what follows from them. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

from halfstep.numerics.messages import divides, one_of, whole
from halfstep.numerics.planning.layouts import GRADIENTS, STORED_FORMATS, Layout, layout
from halfstep.numerics.planning.models import Tensor, Transformer, Unit, parameters_of
from halfstep.numerics.planning.sharding import MIRRORED, STRATEGIES, Sharding, Shards, Strategy
from halfstep.numerics.planning.work import CHECKPOINTING
from halfstep.numerics.state_layout import StoredFormat

STEPPING_IN_BACKWARD = ("single", "ddp", "fsdp", "hsdp")  # the strategies that `halfstep.integrations.release` supports
WITH_ADAPTERS = STEPPING_IN_BACKWARD


@dataclass(frozen=True)
class Training:
    """The training of a model, given by exactly one of `params`, `model` and `units`.

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
    """

    params: float | None = None
    _: KW_ONLY
    model: Transformer | None = None
    units: Sequence[Unit] | None = None
    gpus: int = 1
    strategy: str = ""
    shard: int | None = None
    tensor_parallel: int = 1
    sequence_parallel: bool = False
    precision: str = "bf16"
    optimizer: str = "halfstep"
    moments: str | None = None
    master: str | None = None
    gradients: str | None = None
    accumulator: str | None = None
    amsgrad: bool = False
    batch: int | None = None
    seq: int | None = None
    accumulate: int = 1
    checkpointing: str = "none"
    offload: bool = False
    bucket_view: bool = False
    compress: str | None = None
    step_in_backward: int | None = None
    lora: int | None = None
    rank: int | None = None
    loss_chunks: int = 1

    def __post_init__(self) -> None:
        optional = ("shard", "batch", "seq", "step_in_backward", "lora")
        for name in ("gpus", "tensor_parallel", "accumulate", "loss_chunks", *optional):
            if name not in optional or getattr(self, name) is not None:
                object.__setattr__(self, name, whole(name, getattr(self, name)))
        divides("tensor_parallel", self.tensor_parallel, "gpus", self.gpus, "every replica needs as many GPUs")
        if not self.strategy:
            object.__setattr__(self, "strategy", "single" if self.ranks == 1 else "ddp")
        if self.seq is None and self.model is not None:
            object.__setattr__(self, "seq", self.model.seq)
        one_of("strategy", self.strategy, STRATEGIES)
        one_of("checkpointing", self.checkpointing, CHECKPOINTING)
        for name in ("accumulator", "compress"):
            if getattr(self, name) is not None:
                one_of(name, getattr(self, name), GRADIENTS)
        sources = [name for name in ("params", "model", "units") if getattr(self, name) is not None]
        if len(sources) != 1:
            raise ValueError(f"Expected one of params, model and units, but got {' and '.join(sources) or 'none'}")
        for refused, name, allowed, remedy in (*self._strategies(), *self._combinations()):
            if refused:
                raise ValueError(f"Expected {name} to be {allowed}, but got {getattr(self, name)!r}: {remedy}")
        if self.model is not None:
            self.model.check_parallel(self.tensor_parallel)
        elif self.units is None:
            whole("params", self.params)
        elif not parameters_of(self.units):
            raise ValueError("Expected units to contain parameters, but got none: give at least one tensor")

    def _strategies(self) -> Iterator[tuple[bool, str, str, str]]:
        """What some strategies do not support: whether this one is refused, argument, what is allowed, and remedy."""
        offloading = [strategy.name for strategy in STRATEGIES.values() if strategy.offloads]
        by_rows = [strategy.name for strategy in STRATEGIES.values() if strategy.keeps_rows]
        stepping = self.step_in_backward is not None
        rows = "moments in 8 bits, whose blocks lie within rows of parameters"
        for used, able, feature, remedy in (
            (self.offload, offloading, "offload=True", "leave offload out, or choose one of these"),
            (self.row.needs_rows, by_rows, rows, "choose one of these, or moments 'bf16'"),
            (stepping, STEPPING_IN_BACKWARD, "step_in_backward", "leave it out, others keep all gradients"),
            (self.lora is not None, WITH_ADAPTERS, "lora", "choose one of these"),
        ):
            yield used and self.strategy not in able, "strategy", f"{', '.join(able)} with {feature}", remedy

    def _combinations(self) -> Iterator[tuple[bool, str, str, str]]:
        """The same of arguments that cannot be combined."""
        strategy, t, ranks, last = self.strategy, self.tensor_parallel, self.ranks, self.sharding.divisor - 1
        stepping, lora = self.step_in_backward is not None, self.lora is not None
        ours, no_model = self.optimizer.startswith("halfstep"), self.model is None
        no_views = not self.strategy_row.buckets or ranks == 1 or stepping
        released = " and step_in_backward" if stepping else ""
        no_ddp = f"False with strategy {strategy!r} on {ranks} GPUs{released}, without DDP's buckets"
        until = "with step_in_backward, since accumulated gradients exist until the last micro-batch"
        positions = self.model.seq if self.model is not None and self.model.positions else self.seq
        out, pick, shape = "leave it out", "leave one of them out", "pass model as well"
        yield strategy == "single" and ranks > 1, "strategy", f"'ddp' or another for {ranks} GPUs", f"or pass gpus={t}"
        yield self.mirrored and not ours, "optimizer", f"one of halfstep's with offload=True and {strategy!r}", pick
        yield self.bucket_view and no_views, "bucket_view", no_ddp, out
        yield self.sequence_parallel and t == 1, "tensor_parallel", "2 or more with sequence_parallel=True", pick
        yield self.amsgrad and not self.row.amsgrad, "amsgrad", f"False with optimizer {self.optimizer!r}", out
        yield self.compress is not None and ranks == 1, "compress", "None on one data-parallel GPU", out
        yield self.units is not None and t > 1, "tensor_parallel", "1 with units", "pass the units of one GPU instead"
        yield stepping and not ours, "optimizer", "one of halfstep's with step_in_backward", pick
        yield stepping and self.accumulate > 1, "accumulate", f"1 {until}", pick
        yield stepping and self.accumulator is not None, "accumulator", f"None {until}", pick
        reduced = "None with step_in_backward and strategy 'ddp', which reduces in the format of the gradients"
        yield stepping and strategy == "ddp" and self.compress is not None, "compress", reduced, out
        yield lora and no_model, "model", "a Transformer with lora, whose adapters adapt its matrices", shape
        yield lora and t > 1, "tensor_parallel", "1 with lora", pick
        yield lora and self.offload, "offload", "False with lora", pick
        yield lora and stepping, "step_in_backward", "None with lora", pick
        bounded = self.rank is None or (isinstance(self.rank, int) and 0 <= self.rank <= last)
        yield not bounded, "rank", f"an integer from 0 to {last}", "ranks are those among which the model is divided"
        unknown = "without a model, of which activations are unknown"
        yield no_model and self.checkpointing != "none", "checkpointing", f"'none' {unknown}", shape
        yield no_model and self.loss_chunks > 1, "loss_chunks", f"1 {unknown}", shape
        beyond = (self.seq or 0) > (positions or 0)
        yield beyond, "seq", f"from 1 to {positions}, the positions of the model", "shorten it"

    # ------------------------------------------------------------------------------------------- what follows from them

    @property
    def ranks(self) -> int:
        """Data-parallel GPUs."""
        return self.gpus // self.tensor_parallel

    @property
    def strategy_row(self) -> Strategy:
        return STRATEGIES[self.strategy]

    @property
    def mirrored(self) -> bool:
        """Whether weights and gradients also stay on the GPU while the host has them."""
        return self.offload and self.strategy in MIRRORED

    @cached_property
    def row(self) -> Layout:
        formats = {name: getattr(self, name) for name in ("moments", "master", "gradients")}
        return layout(self.optimizer, self.precision, **formats)

    @cached_property
    def sharding(self) -> Sharding:
        return Sharding(self.strategy_row, self.ranks, self.shard, shaped=self.params is None)

    @cached_property
    def everything(self) -> Sequence[Unit]:
        """The weights of one tensor-parallel GPU."""
        if self.model is not None:
            return (
                self.model.units(self.tensor_parallel)
                if self.lora is None
                else self.model.units_with_adapters(self.lora)
            )
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

    @property
    def summed(self) -> StoredFormat | None:
        """The format of the second gradient."""
        return None if self.accumulator is None else STORED_FORMATS[self.accumulator]

    @property
    def sent(self) -> StoredFormat:
        """The format in which gradients are sent."""
        return STORED_FORMATS[self.compress] if self.compress is not None else self.summed or self.row.gradients

    @property
    def parameters(self) -> int:
        """Parameters of the model, with those of adapters."""
        if self.model is not None and self.lora is None:
            return self.model.parameters
        return parameters_of(self.everything) if self.params is None else whole("params", self.params)
