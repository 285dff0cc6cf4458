"""What an examination finds, and the texts of all findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from halfstep.numerics.formats.table import formats


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        name: its name, which stays the same between versions; docs/doctor.md lists all.
        severity: ``"error"`` if the training computes something else than is meant or will fail, ``"warning"`` if it
            loses accuracy, memory or time.
        where: the parameters, groups or objects concerned.
        what: what is the case.
        stake: what it costs: a share of the updates, bytes, or the loss.
        remedy: what to do about it.
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
    """The `findings` of an examination, errors first, and in words what was `examined`."""

    examined: str
    findings: tuple[Finding, ...] = ()

    @classmethod
    def of(cls, examined: str, findings: Iterable[Finding]) -> Diagnosis:
        """Findings in any order."""
        return cls(examined, tuple(sorted(findings, key=lambda finding: finding.severity)))

    ok = property(lambda self: not self.findings, doc="Whether nothing was found.")
    names = property(lambda self: [finding.name for finding in self.findings], doc="The names of the findings.")

    def as_dict(self) -> dict[str, Any]:
        """The diagnosis for JSON."""
        return {"examined": self.examined, "findings": [asdict(finding) for finding in self.findings]}

    @property
    def headline(self) -> str:
        """What was examined, and the number of findings."""
        return f"{self.examined}: {count(len(self.findings), 'finding') if self.findings else 'no findings'}"

    def __str__(self) -> str:
        return "\n".join([self.headline, *map(str, self.findings)])


def find(name: str, where: str | Sequence[Any], severity: Any = None, /, **values: Any) -> Finding:
    """The finding `name`, with `values` in the gaps of its texts.

    Args:
        where: words, or parameters by name or as objects with a name.
        severity: another one than the table has.
        bytes: a number of bytes, if a text has it.
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
    """Names in words, at most three of them: ``"5 parameters: a, b, c, ..."``."""
    names = list(dict.fromkeys(names))
    return f"{count(len(names), noun)}: {', '.join([*names[:3], *['...'] * (len(names) > 3)])}"


def in_bytes(number: float) -> str:
    """A number of bytes in words."""
    power = next(power for power in (0, 1, 2, 3) if number < 1024 ** (power + 1) or power == 3)
    size, unit = number / 1024**power, ("B", "KiB", "MiB", "GiB")[power]
    return f"{size:,.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"


def dtype_name(dtype: torch.dtype) -> str:
    """``"bf16"`` for `torch.bfloat16`."""
    name = str(dtype).removeprefix("torch.")
    return formats[name].name if name in formats else name


def dtypes_of(tensors: Iterable[torch.Tensor]) -> str:
    """The dtypes of tensors in words."""
    return " and ".join(sorted({dtype_name(tensor.dtype) for tensor in tensors}))


_SHARED = {
    "masters": "keep weights, or masters of them, in fp32, as halfstep.AdamW and halfstep.Muon do in fewer bytes than "
    "fp32 weights",
    "first_nonfinite": "halfstep.integrations.doctor.first_nonfinite(model), which names the operation that makes the "
    "first NaN or Inf",
}
# For each finding: severity and name, what is the case, what it costs, what to do.
_TEXTS = """
--- of a training set-up, at rest
error values-not-finite: {what}
    all that is computed from them is NaN or Inf, and so it stays; a step writes gradients into the weights
    load weights and state from before, and repeat the step in {first_nonfinite}
error optimizer-of-other-parameters: the optimizer holds none of the model's parameters
    nothing is trained: they were replaced after it was made, by fully_shard, FSDP, a copy or a conversion
    make the optimizer after the model is sharded, moved and converted
warning parameters-not-optimized: they require a gradient, and no optimizer holds them
    they stay as they are, and their gradients take memory
    add them to the optimizer, pass all optimizers here, or call requires_grad_(False)
error frozen-with-gradient: they are frozen, but still have a gradient, which every step uses again
    frozen weights keep changing; {gradients} of gradients
    set .grad of frozen parameters to None
warning frozen-with-state: they are frozen, and the optimizer holds state for them
    {states}
    make the optimizer of the parameters that require a gradient only
error quantized-in-optimizer: their dtype is {dtypes}: the codes of quantized weights
    a step fails, or changes the codes as if they were numbers
    make the optimizer of [p for p in model.parameters() if p.requires_grad]
error tied-weights-twice: the optimizer holds the same memory more than once
    each step updates it twice, with two states: {bytes} too many
    tie the modules by one Parameter (a.weight = b.weight) before the optimizer is made
error tie-broken: the configuration says that input and output embeddings are tied, but they are two parameters
    they are trained apart, and only one is saved; {bytes} of weights too many
    call model.tie_weights() after loading, to_empty() and sharding, before the optimizer is made
error moments-in-16-bits: {what}
    {stake}
    {masters}; state_dtype="8bit" and rounding="stochastic" keep moments in fewer bits
error updates-lost: 16-bit weights without fp32 masters lose updates below half of their spacing
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
    keep step counts in fp32 or int64; they are not weights
error state-was-rounded: {keys} in fp32 hold numbers of bf16 only: they were in bf16 in between
    a run that is resumed differs from one that goes on, unless the optimizer holds them in bf16 or 8 bits
    Optimizer.load_state_dict rounds to the dtype of the parameters: load into fp32 ones, or use halfstep.AdamW
warning buffers-in-16-bits: {what} in {dtypes}
    angles of far positions, or running statistics, are wrong by up to 1 part in 256 (fp16: in 2,048)
    keep these buffers in fp32: make them again after model.to(dtype), or call halfstep.cast_parameters
error fp16-without-scaler: gradients are in fp16, and no loss scaler is passed or enabled
    gradients below 6e-8 become 0, and after an overflow weights become NaN
    use halfstep.GradScaler, and pass it here; or bf16, which needs none
error fp16-weights-with-torch-scaler: torch.amp.GradScaler refuses fp16 gradients
    the first step raises "Attempting to unscale FP16 gradients."
    use halfstep.GradScaler with halfstep.AdamW, or fp32 weights under autocast
error scaler-not-sharded: torch.amp.GradScaler looks for overflows in the shard of its own rank only
    after an overflow, some ranks step and others do not, and their scales differ from then on
    use halfstep.GradScaler, or torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler
error fused-under-sharded-scaler: ShardedGradScaler does not reduce overflows for torch's fused optimizers
    after an overflow on one rank, ranks diverge; after unscale_, the step raises
    use fused=False, or halfstep.GradScaler with halfstep.AdamW
error scaler-of-one-mesh: torch.amp.GradScaler reduces overflows over the mesh of the first gradient only
    ranks diverge after an overflow in a shard of another mesh; with plain tensors beside DTensors the first step raises
    use halfstep.GradScaler, whose decision covers all ranks that hold a part of the model
warning scaler-on-another-device: the loss scale is on {device}, and the weights are on {devices}
    each step waits for copies of the scale and of the flags; torch's fused optimizers refuse it
    compute the loss on the device of the weights, or use halfstep.GradScaler
error scale-collapsed: the loss scale is {scale:g}
    below 1, gradients are made smaller instead of larger; of 0 or Inf, unscaled gradients are NaN, which is not noticed
    repeat the first step that overflows in {first_nonfinite}; halfstep.GradScaler has a smallest scale
error state-not-sharded: the parameters are DTensors, and their state is plain tensors
    torch.distributed.checkpoint takes the shards of all ranks for one tensor: ranks load the state of others
    use an optimizer whose state has the placements of its parameters (torch's and halfstep's)
error optimizer-cannot-shard: {library} does not support {what} ({issue})
    {stake}
    use halfstep.AdamW, or another sharding of these parameters
--- of some steps
error gradients-not-cleared: its gradient was added to the one that the last step used
    each step uses the sum of the gradients of all steps before it
    call optimizer.zero_grad() after each step
error accumulated-after-unscale: a scaled gradient was added to one that unscale_ had already unscaled
    the new gradient counts as many times as the loss scale says
    call unscale_ and clip once, after the last micro-batch of a step
error loss-not-scaled: the scaler unscales gradients of a loss that scaler.scale(loss) did not scale
    gradients are divided by {scale:g}, so that small ones and eps decide the step
    call scaler.scale(loss).backward()
error step-without-scaler: optimizer.step() was called, and not scaler.step(optimizer)
    overflows are not skipped, and become NaN weights{stake}
    call scaler.step(optimizer)
error clipped-scaled-gradients: clip_grad_norm_ was called on gradients that are multiplied by the loss scale
    the limit is {scale:g} times as strict as it says, and changes with the scale
    call scaler.unscale_(optimizer) first, or use max_grad_norm= of halfstep.AdamW
warning clipped-twice: clip_grad_norm_ was called {calls} before a step{what}
    the smaller limit holds, and gradients are read and written once more: {bytes} of traffic per step
    clip once, with max_grad_norm= of halfstep.AdamW, which reads gradients once and writes none
error clipping-without-effect: {what}
    gradients are not clipped
    call it between backward() and the step, with model.parameters()
error clipped-by-local-norm: torch.nn.utils.clip_grad_norm_ takes the norm of the shards of its own rank
    each rank scales its shards by another factor
    call model.clip_grad_norm_(max_norm), or use max_grad_norm= of halfstep.AdamW
warning schedule-advanced-on-skip: the schedule advanced after a step that the loss scaler had skipped
    the learning rate runs ahead of the steps: warm-up is shorter, and the decay ends early
    wrap it in halfstep.SkipAwareScheduler(scheduler, scaler)
error every-step-skipped: the loss scaler skipped all {steps}: these gradients are not finite
    nothing is trained, and the loss scale falls with each step
    run a step in {first_nonfinite}
error steps-without-gradients: in {steps}, all gradients were missing or 0, and no weight changed
    nothing is trained
    call loss.backward() before the step, and zero_grad() after it
error weights-unchanged: {steps} with gradients changed no weight
    nothing is trained
    check that the optimizer holds these parameters and not copies, and that lr is not too small for their dtype
error autocast-over-16-bit-weights: autocast({dtype}) expects fp32 weights, and these are in {dtypes}
    weights are updated in 16 bits, which autocast is there to avoid
    load the model with dtype=torch.float32, or use halfstep.AdamW, which has masters, without autocast
warning autocast-without-effect: autocast is enabled for another device than that of the weights
    all operations run in the dtype of the weights, at the memory and time of that
    pass autocast the device type of the model
warning scaler-without-fp16: nothing is computed in fp16, and a loss scaler is enabled
    each step reads the gradients once more: {bytes}
    pass enabled=False: bf16 and fp32 have the range that fp16 lacks
--- of a checkpoint
error negative-second-moment: a mean of squares holds negative numbers
    its root is NaN, and so are the weights after the next step
    load an older checkpoint; look for a conversion of the optimizer's state that is wrong
warning weights-in-twice-the-bytes: they are in fp32, and hold numbers of bf16 only
    {bytes} of the file say nothing
    save these weights in bf16, which changes no value
error tensors-without-elements: they have no elements: shards of another rank, or weights that ZeRO-3 had not gathered
    the checkpoint does not hold the model
    gather the weights before saving, or save with torch.distributed.checkpoint
warning saved-twice: {first} and {second} have the same bits in two places
    {bytes}; if they were tied, they are two parameters after loading
    tie the weights before saving, and again after loading
--- of an environment
error version-too-old: halfstep needs {name} {least} or newer
    kernels fail or give other bits
    pip install '{name}>={least}'
warning no-triton: there is a GPU, and Triton is not installed
    halfstep runs as plain torch, with several times the memory traffic
    pip install triton
warning no-compiler: there is no C++ compiler
    on the CPU, halfstep runs as plain torch: the same bits, and a step with moments of 8 bits takes 260 times as long
    install g++ or clang++, or point CXX at one
warning cache-not-writable: the folder of compiled kernels is not writable
    each process compiles them again, 2 to 6 s for each kind of kernel
    set HALFSTEP_CACHE to a folder that is
warning kernels-interpreted: Triton's kernels run in its interpreter
    each takes longer than plain torch
    unset TRITON_INTERPRET; it serves tests without a GPU
"""
TEXTS = {
    name: (severity, *map(str.strip, texts.splitlines()))
    for severity, name, texts in re.findall(
        r"^(error|warning) ([a-z0-9-]+): (.*\n    .*\n    .*\n)", _TEXTS, re.MULTILINE
    )
}
