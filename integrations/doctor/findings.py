"""The result of an examination, and the texts of all findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from halfstep.numerics.formats.table import formats


@dataclass(frozen=True)
class Finding:
    """One problem.

    Attributes:
        name: an identifier that is stable across versions; docs/doctor.md lists all of them.
        severity: ``"error"`` if training will fail or computes something other than intended, ``"warning"`` if it
            loses accuracy, memory or time.
        where: the parameters, groups or objects affected.
        what: what is wrong.
        stake: what it costs, such as a fraction of the updates, bytes, or the loss.
        remedy: how to fix it.
    """

    name: str
    severity: Literal["error", "warning"]
    where: str
    what: str
    stake: str
    remedy: str

    def __str__(self) -> str:
        texts = [f"  {label:8}{getattr(self, label)}" for label in ("where", "what", "stake", "remedy")]
        return "\n".join([f"{self.severity}: {self.name}", *texts])


@dataclass(frozen=True)
class Diagnosis:
    """The `findings` of an examination, errors first, and a description of what was `examined`."""

    examined: str
    findings: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, examined: str, findings: Iterable[Finding]) -> Diagnosis:
        """Make a diagnosis of findings in any order."""
        return cls(examined, tuple(sorted(findings, key=lambda finding: finding.severity)))

    ok = property(lambda self: not self.findings, doc="Whether nothing was found.")
    names = property(lambda self: [finding.name for finding in self.findings], doc="The names of the findings.")

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis as plain values for JSON."""
        return {"examined": self.examined, "findings": [asdict(finding) for finding in self.findings]}

    @property
    def headline(self) -> str:
        """What was examined, and the number of findings."""
        return f"{self.examined}: {count(len(self.findings), 'finding') if self.findings else 'no findings'}"

    def __str__(self) -> str:
        return "\n".join([self.headline, *map(str, self.findings)])


def find(name: str, where: str | Sequence[Any], severity: Any = None, /, **values: Any) -> Finding:
    """The finding `name`, with its texts formatted with `values`; ``bytes`` is a number.

    `where` is a text, or parameters as names or as objects with a name. `severity` overrides that of the table.
    """
    usual, *texts = TEXTS[name]
    if not isinstance(where, str):
        where = listed([getattr(parameter, "name", parameter) for parameter in where])
    values.update(_SHARED, bytes=in_bytes(values.get("bytes", 0)))
    return Finding(name, severity or usual, where, *(text.format(**values) for text in texts))


def count(number: int, noun: str) -> str:
    """``"1 step"``, ``"2 steps"``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def listed(names: Iterable[str], noun: str = "parameter") -> str:
    """The number of names and the first three of them: ``"5 parameters: a, b, c, ..."``."""
    names = list(dict.fromkeys(names))
    return f"{count(len(names), noun)}: {', '.join([*names[:3], *['...'] * (len(names) > 3)])}"


def in_bytes(number: float) -> str:
    """A number of bytes as text: ``"1.13 KiB"``."""
    power = next(power for power in (0, 1, 2, 3) if number < 1024 ** (power + 1) or power == 3)
    size, unit = number / 1024**power, ("B", "KiB", "MiB", "GiB")[power]
    return f"{size:,.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"


def dtype_name(dtype: torch.dtype) -> str:
    """``"bf16"`` for `torch.bfloat16`."""
    name = str(dtype).removeprefix("torch.")
    return formats[name].name if name in formats else name


def dtypes_of(tensors: Iterable[torch.Tensor]) -> str:
    """The dtypes of tensors as text: ``"bf16 and fp32"``."""
    return " and ".join(sorted({dtype_name(tensor.dtype) for tensor in tensors}))


_SHARED = {
    "masters": "keep weights, or masters of them, in fp32, as halfstep.AdamW and halfstep.Muon do in fewer bytes than "
    "fp32 weights",
    "first_nonfinite": "halfstep.integrations.doctor.first_nonfinite(model), which names the operation that produces "
    "the first NaN or Inf",
}
# For each finding: severity, name and what is wrong; what it costs; how to fix it.
_TEXTS = """
--- of a training set-up, at rest
error values-not-finite: {what}
    everything computed from them stays NaN or Inf; a step carries non-finite gradients over to the weights
    load an earlier checkpoint, and repeat the step in {first_nonfinite}
error optimizer-of-other-parameters: the optimizer has none of the model's parameters
    nothing is trained: fully_shard, FSDP, a copy or a conversion replaced them after the optimizer was created
    create the optimizer after the model is sharded, moved and converted
warning parameters-not-optimized: they require a gradient, but no optimizer has them
    they never change, and their gradients take memory
    add them to the optimizer, pass all optimizers here, or call requires_grad_(False)
error frozen-with-gradient: they are frozen, but still have a gradient, which every step applies again
    frozen weights keep changing; {gradients} of gradients
    set .grad of frozen parameters to None
warning frozen-with-state: they are frozen, but the optimizer has state for them
    {states}
    pass only parameters that require a gradient to the optimizer
error quantized-in-optimizer: their dtype is {dtypes}: they are codes of quantized weights
    a step fails, or updates the codes as if they were weights
    pass [p for p in model.parameters() if p.requires_grad] to the optimizer
error tied-weights-twice: the optimizer has the same memory more than once
    each step updates it twice, with separate states: {bytes} too many
    tie the modules by one Parameter (a.weight = b.weight) before creating the optimizer
error tie-broken: the configuration says that input and output embeddings are tied, but they are two parameters
    they are trained separately, and only one is saved; {bytes} of weights too many
    call model.tie_weights() after loading, to_empty() and sharding, and before creating the optimizer
error moments-in-16-bits: {what}
    {stake}
    {masters}; state_dtype="8bit" and rounding="stochastic" keep moments in fewer bits
error updates-lost: 16-bit weights without fp32 masters lose updates below half an ulp
    {share} % {which} change nothing
    {masters}
error decay-lost: lr · weight_decay is {decay:.2g}, less than the relative spacing of {dtypes}, and there are no masters
    weight decay changes no weight
    {masters}
error eps-is-zero: eps={eps:g} rounds to 0 in fp16, in which the optimizer computes
    where a gradient is 0 or its square underflows, the update is 0 / 0: NaN weights
    use fp32 moments and masters (halfstep.AdamW has both), or eps of at least 1e-7
error step-in-16-bits: the step count is in 16 bits
    it stops at 256 in bf16 and at 2,048 in fp16, and bias corrections with it
    keep step counts in fp32 or int64, and exclude them from casts
error state-was-rounded: all fp32 values of {keys} are bf16 values: they were rounded to bf16 at some point
    a resumed run differs from an uninterrupted one, unless the optimizer keeps them in bf16 or 8 bits
    Optimizer.load_state_dict rounds to the dtype of the parameters: load into fp32 ones, or use halfstep.AdamW
warning buffers-in-16-bits: {what} in {dtypes}
    angles of far positions, or running statistics, are wrong by up to 1 part in 256 (fp16: in 2,048)
    keep these buffers in fp32: recompute them after model.to(dtype), or call halfstep.cast_parameters
error fp16-without-scaler: gradients are in fp16, but no loss scaler is passed or enabled
    gradients below 6e-8 become 0, and an overflow turns weights into NaN
    use halfstep.GradScaler, and pass it here; or bf16, which needs none
error fp16-weights-with-torch-scaler: torch.amp.GradScaler refuses fp16 gradients
    the first step raises "Attempting to unscale FP16 gradients."
    use halfstep.GradScaler with halfstep.AdamW, or fp32 weights under autocast
error scaler-not-sharded: torch.amp.GradScaler looks for overflows in the local shard only
    after an overflow, some ranks step and others skip, and their scales differ from then on
    use halfstep.GradScaler, or torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler
error fused-under-sharded-scaler: ShardedGradScaler does not all-reduce overflows for torch's fused optimizers
    after an overflow on one rank, ranks diverge; after unscale_, the step raises
    use fused=False, or halfstep.GradScaler with halfstep.AdamW
error scaler-of-one-mesh: torch.amp.GradScaler all-reduces overflows over the mesh of the first gradient only
    ranks diverge after an overflow in a shard on another mesh; plain tensors beside DTensors make the first step raise
    use halfstep.GradScaler, whose decision covers all ranks that have a part of the model
warning scaler-on-another-device: the loss scale is on {device}, but the weights are on {devices}
    each step waits for copies of the scale and the flags; torch's fused optimizers refuse this
    compute the loss on the device of the weights, or use halfstep.GradScaler
error scale-collapsed: the loss scale is {scale:g}
    a scale below 1 shrinks gradients; with a scale of 0 or Inf, unscaled gradients are NaN, which goes unnoticed
    repeat the first step that overflows in {first_nonfinite}; halfstep.GradScaler has a minimum scale
error state-not-sharded: the parameters are DTensors, but their state is in plain tensors
    torch.distributed.checkpoint takes the shards of all ranks for one tensor: ranks load each other's state
    use an optimizer whose state has the placements of its parameters (torch's and halfstep's)
error optimizer-cannot-shard: {library} does not support {what} ({issue})
    {stake}
    use halfstep.AdamW, or shard these parameters differently
--- of some steps
error gradients-not-cleared: its gradient was added to the one that the last step used
    each step uses the sum of the gradients of all earlier steps
    call optimizer.zero_grad() after each step
error accumulated-after-unscale: a scaled gradient was added to one that unscale_ had already unscaled
    the new gradient is too large by a factor of the loss scale
    call unscale_ and clip once, after the last micro-batch of a step
error loss-not-scaled: the scaler unscales gradients of a loss that scaler.scale(loss) did not scale
    gradients are {scale:g} times too small, and may underflow or be dominated by eps
    call scaler.scale(loss).backward()
error step-without-scaler: optimizer.step() was called instead of scaler.step(optimizer)
    overflows are not skipped, and become NaN weights{stake}
    call scaler.step(optimizer)
error clipped-scaled-gradients: clip_grad_norm_ was called on gradients that are multiplied by the loss scale
    the effective limit is {scale:g} times smaller than specified, and changes with the scale
    call scaler.unscale_(optimizer) first, or use max_grad_norm= of halfstep.AdamW
warning clipped-twice: clip_grad_norm_ was called {calls} before a step{what}
    the smaller limit applies, and gradients are read and written once more: {bytes} of traffic per step
    clip once, with max_grad_norm= of halfstep.AdamW, which reads gradients once and writes none
error clipping-without-effect: {what}
    gradients are not clipped
    call it between backward() and the step, with model.parameters()
error clipped-by-local-norm: torch.nn.utils.clip_grad_norm_ computes the norm of the local shards
    each rank scales its shards by a different factor
    call model.clip_grad_norm_(max_norm), or use max_grad_norm= of halfstep.AdamW
warning schedule-advanced-on-skip: the schedule advanced after a step that the loss scaler had skipped
    the learning rate runs ahead of the steps: warm-up is shorter, and the decay ends early
    wrap it in halfstep.SkipAwareScheduler(scheduler, scaler)
error every-step-skipped: the loss scaler skipped all {steps}: these gradients are not finite
    nothing is trained, and the loss scale keeps falling
    run a step in {first_nonfinite}
error steps-without-gradients: in {steps}, all gradients were missing or 0, and no weight changed
    nothing is trained
    call loss.backward() before the step, and zero_grad() after it
error weights-unchanged: {steps} with gradients changed no weight
    nothing is trained
    check that the optimizer has these parameters and not copies, and that lr is not too small for their dtype
error autocast-over-16-bit-weights: autocast({dtype}) expects fp32 weights, but these are in {dtypes}
    weights are updated in 16 bits, which autocast is meant to avoid
    load the model with dtype=torch.float32, or use halfstep.AdamW, which has masters, without autocast
warning autocast-without-effect: autocast is enabled for a device other than that of the weights
    all operations run in the dtype of the weights, and take the time and memory of that dtype
    pass the model's device type to autocast
warning scaler-without-fp16: a loss scaler is enabled, but nothing is computed in fp16
    each step reads the gradients once more: {bytes}
    pass enabled=False: bf16 and fp32 have the range that fp16 lacks
--- of a checkpoint
error negative-second-moment: a mean of squares contains negative values
    its root is NaN, and so are the weights after the next step
    load an older checkpoint, and check the code that converted the optimizer state
warning weights-in-twice-the-bytes: they are in fp32, but contain only bf16 values
    {bytes} of the file are redundant
    save these weights in bf16, which changes no value
error tensors-without-elements: they have no elements: shards of another rank, or weights that ZeRO-3 had not gathered
    the checkpoint does not contain the model
    gather the weights before saving, or save with torch.distributed.checkpoint
warning saved-twice: {first} and {second} have the same bits in two places
    {bytes}; if they were tied, they are two parameters after loading
    tie the weights before saving, and again after loading
--- of an environment
error version-too-old: halfstep needs {name} {least} or newer
    kernels fail or compute different bits
    pip install '{name}>={least}'
warning no-triton: there is a GPU, but Triton is not installed
    halfstep runs as plain torch, with several times the memory traffic
    pip install triton
warning no-compiler: there is no C++ compiler
    on the CPU, halfstep runs as plain torch: the same bits, but a step with 8-bit moments takes 260 times as long
    install g++ or clang++, or point CXX at one
warning cache-not-writable: the folder of compiled kernels is not writable
    each process compiles them again, which takes 2 to 6 s per kernel family
    set HALFSTEP_CACHE to a writable folder
warning kernels-interpreted: Triton kernels run in its interpreter
    each is slower than plain torch
    unset TRITON_INTERPRET, which is for tests without a GPU
"""
TEXTS = {
    name: (severity, *map(str.strip, texts.splitlines()))
    for severity, name, texts in re.findall(
        r"^(error|warning) ([a-z0-9-]+): (.*\n    .*\n    .*\n)", _TEXTS, re.MULTILINE
    )
}
