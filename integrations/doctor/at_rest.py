"""What can be said of a training set-up at rest, without a step: `RULES`, each a function of the set-up."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from halfstep.integrations.doctor.findings import (
    Diagnosis,
    Finding,
    count,
    dtype_name,
    dtypes_of,
    find,
    in_bytes,
    in_order,
    listed,
)
from halfstep.integrations.doctor.setup import HALF, Entry, Setup, holds_bf16_only, nonfinite, sample, size_of
from halfstep.integrations.optim.state import SCALES
from halfstep.kernels.block_codes import NAN_BLOCK, NAN_RANGE
from halfstep.numerics.formats.table import formats
from halfstep.numerics.messages import percent
from halfstep.numerics.scaling.scaler import GradScaler
from halfstep.numerics.scaling.stand_ins import gradient_of
from halfstep.numerics.scaling.topology import is_sharded, local
from halfstep.numerics.statistics.updates import count_lost

# What torch's optimizers keep per parameter, in the parameter's dtype, before their first step shows it.
_STATES_OF_TORCH = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adadelta": 2}
# Second moments and other means of squares, which change by a small share of themselves.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "acc_delta")
_EXACT_BUFFERS = {
    "inv_freq": "rotary frequencies",
    "original_inv_freq": "rotary frequencies",
    "freqs": "rotary angles",
    "running_mean": "running statistics of a normalization",
    "running_var": "running statistics of a normalization",
}
# Library, whether only shards without elements are concerned, where it is reported, what happens.
_CANNOT_SHARD = (
    ("transformer_engine", True, "TransformerEngine #3202, #3207", "the step fails on some ranks, and others hang"),
    ("bitsandbytes", False, "bitsandbytes #89, #1633", "checkpoints cannot be resharded; illegal memory accesses"),
)


def doctor(model: torch.nn.Module, optimizer: Any, scaler: Any = None) -> Diagnosis:
    """Examine a training set-up of any library, and name what is wrong with it.

    Nothing is changed, and no step is needed: it may be called before training, after some steps, or after loading a
    checkpoint; after a step more can be said, since the optimizer then has its state. It reads weights, gradients and
    state once, to look for NaN and Inf, and waits for the device. What only steps show (schedules that advance on
    skips, clipping of scaled gradients, autocast, lost updates) is found by `halfstep.integrations.doctor.watch`.

    Args:
        model: the model, with the wrappers that train it (DistributedDataParallel, FSDP, ``torch.compile``).
        optimizer: its optimizer, or a sequence or mapping if there are several; wrappers such as Accelerate's and
            mmengine's are looked into, also for a scaler.
        scaler: the loss scaler, or what holds it as ``_scaler``, ``loss_scaler`` or ``scaler``: timm's NativeScaler, an
            Accelerator, Lightning's plugin. None if there is none.

    Returns:
        The findings, errors first. docs/doctor.md describes each.

    Raises:
        TypeError: `model` is not a module, an optimizer has no ``param_groups``, or `scaler` is no scaler.

    Note:
        Under FSDP and tensor parallelism, each rank examines its own shards, without communication.

    Examples:
        >>> model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        >>> print(halfstep.doctor(model, halfstep.AdamW(model.parameters())))
        Linear of 1 parameter, halfstep.AdamW: no findings
        >>> halfstep.doctor(model, torch.optim.AdamW(model.parameters())).names
        ['moments-in-16-bits', 'decay-lost']
    """
    return examine(Setup(model, optimizer, scaler))


@torch.no_grad()
def examine(setup: Setup) -> Diagnosis:
    """Apply all rules to a set-up."""
    return in_order(setup.in_words(), (finding for rule in RULES for finding in rule(setup)))


def _values(setup: Setup) -> Iterator[Finding]:
    entries = [(name, "weights", parameter) for name, parameter in setup.parameters()]
    entries += [(name, "buffers", buffer) for name, buffer in setup.model.named_buffers()]
    # A loss scaler skips steps whose gradients overflow, and the last one may be such a step.
    if setup.scaler is None:
        grads = ((name, gradient_of(parameter)) for name, parameter in setup.parameters())
        entries += [(name, "gradients", grad) for name, grad in grads if grad is not None]
    for entry in setup.entries:
        entries += [(entry.name, "weights", entry.parameter)] * (id(entry.parameter) not in setup.names)
        entries += [(entry.name, key, value) for key, value in entry.state.items()]
        entries += [(entry.name, key, _marks(value)) for key, value in entry.scales.items() if key in SCALES.values()]
    hits = [
        (name, role, value)
        for name, role, tensor in entries
        # Masks hold infinities in buffers and frozen parameters.
        if (value := nonfinite(tensor)) == "NaN"
        or (value and role != "buffers" and (role != "weights" or tensor.requires_grad))
    ]
    if hits:
        roles: dict[str, dict[str, None]] = defaultdict(dict)
        for _, role, value in hits:
            roles[value][role] = None
        only_grads = all(role == "gradients" for _, role, _ in hits)
        yield find(
            "values-not-finite",
            listed([name for name, _, _ in hits], "tensor"),
            "warning" if only_grads else "error",
            what="; ".join(f"{value} in {' and '.join(names)}" for value, names in roles.items()),
            stake="a step writes them into the weights, unless a loss scaler skips it"
            if only_grads
            else "all that is computed from them is NaN or Inf, and so it stays",
        )


def _marks(scales: torch.Tensor) -> torch.Tensor:
    """NaN for each block of NaN of a moment in 8 bits, from its scales; 0 for the others."""
    values = local(scales)
    return torch.where(values == (NAN_BLOCK if values.dtype == torch.uint8 else NAN_RANGE), math.nan, 0.0)


# --------------------------------------------------------------------------------------------- which parameters it has


def _membership(setup: Setup) -> Iterator[Finding]:
    if not setup.entries or setup.steps_copies:
        return
    inside = {id(entry.parameter) for entry in setup.entries}
    outside = [name for name, parameter in setup.trainable() if id(parameter) not in inside]
    if outside and inside.isdisjoint(setup.names):
        yield find("optimizer-of-other-parameters", outside)
    elif outside:
        yield find("parameters-not-optimized", outside)


def _frozen(setup: Setup) -> Iterator[Finding]:
    frozen = [entry for entry in setup.entries if not entry.parameter.requires_grad and not setup.steps_copies]
    if stale := [entry for entry in frozen if entry.grad is not None]:
        yield find("frozen-with-gradient", stale, bytes=size_of(*(entry.grad for entry in stale)))
    if idle := [entry for entry in frozen if entry.state]:
        yield find("frozen-with-state", idle, bytes=_size_of_states(idle))
    codes = [e for e in setup.entries if not e.parameter.is_floating_point() and not e.parameter.is_complex()]
    if codes:
        yield find("quantized-in-optimizer", codes, dtypes=dtypes_of(entry.parameter for entry in codes))


def _tied(setup: Setup) -> Iterator[Finding]:
    at: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry in setup.entries:
        shard = local(entry.parameter)
        if shard.numel() and shard.layout == torch.strided and not shard.is_meta:
            at[shard.device, shard.data_ptr(), shard.numel()].append(entry)
    if twice := [entries for entries in at.values() if len(entries) > 1]:
        needless = [entry for entries in twice for entry in entries[1:]]
        names = [entry.name for entries in twice for entry in entries]
        yield find("tied-weights-twice", names, bytes=_size_of_states(needless))
    model = setup.model
    while not hasattr(model, "config") and isinstance(
        inner := getattr(model, "module", getattr(model, "_orig_mod", None)), torch.nn.Module
    ):
        model = inner
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False) is True:
        getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
        ends: list[Any] = [getattr(get() if callable(get) else None, "weight", None) for get in getters]
        if None not in ends and ends[0] is not ends[1] and local(ends[0]).data_ptr() != local(ends[1]).data_ptr():
            names = [setup.names.get(id(end), "?") for end in ends]
            yield find("tie-broken", names, bytes=size_of(ends[1]))


# ----------------------------------------------------------------------------------------------------------- precision


def _moments(setup: Setup) -> Iterator[Finding]:
    """Moments in 16 bits, or those that torch's optimizers will have after their first step."""
    states = {
        index: {key: value for key, value in entry.state.items() if value.dtype in HALF and key != "master"}
        for index, entry in enumerate(setup.entries)
        if not entry.stochastic
    }
    low = [entry for index, entry in enumerate(setup.entries) if states.get(index)]
    keys = sorted({key for state in states.values() for key in state})
    tensors = [value for state in states.values() for value in state.values()]
    size = size_of(*tensors)
    if not low:
        low = [entry for entry in setup.entries if entry.half and not entry.state and _states_of_torch(entry)]
        keys = ["exp_avg_sq"] if any(entry.is_adam for entry in low) else ["state"]
        tensors = [entry.parameter for entry in low]
        size = sum(size_of(entry.parameter) * _states_of_torch(entry) for entry in low)
    if low:
        squares = [key for key in keys if key in _SQUARES]
        beta = max((float(entry.group["betas"][1]) for entry in low if "betas" in entry.group), default=0.999)
        stops = bool(squares) and 1 - beta < 2.0**-8
        stake = "small changes are lost"
        if stops:
            stake = f"{squares[0]} falls by at most {percent(1 - beta)} % a step, which is rounded away: steps shrink"
        yield find(
            "moments-in-16-bits",
            low,
            "error" if stops else "warning",
            what=f"{' and '.join(keys)} in {dtypes_of(tensors)}, rounded to nearest",
            stake=f"{stake}; {in_bytes(size)} now, {in_bytes(2 * size)} in fp32",
        )


def _states_of_torch(entry: Entry) -> int:
    """The number of tensors of state that an optimizer of torch makes for a parameter in its first step."""
    if not type(entry.optimizer).__module__.startswith("torch.optim.") or not entry.parameter.requires_grad:
        return 0
    sgd = isinstance(entry.optimizer, torch.optim.SGD) and entry.group.get("momentum")
    return _STATES_OF_TORCH.get(type(entry.optimizer).__name__, int(bool(sgd)))


def _without_master(setup: Setup) -> list[Entry]:
    return [e for e in setup.entries if not e.keeps_updates and e.parameter.requires_grad and e.lr > 0]


def _updates(setup: Setup) -> Iterator[Finding]:
    counts = {entry.name: _lost_next(entry) for entry in _without_master(setup) if entry.is_adam}
    stepped = any(entry.steps_taken >= 1 for entry in setup.entries)
    yield from lost_updates(counts, "of the next step's updates" if stepped else "of updates as large as lr")


def _lost_next(entry: Entry) -> Sequence[int]:
    """How many elements of a parameter the next step of Adam would update, and how many updates rounding loses."""
    weight = sample(entry.parameter)
    if weight.is_meta or not weight.numel():
        return 0, 0
    update = torch.full_like(weight, entry.lr, dtype=torch.float64)
    first, second, taken = entry.state.get("exp_avg"), entry.state.get("exp_avg_sq"), entry.steps_taken
    if taken >= 1 and first is not None and second is not None and first.is_floating_point():
        beta1, beta2 = map(float, entry.group["betas"])
        m = sample(first).double() / (1 - beta1**taken)
        v = sample(second).double() / (1 - beta2**taken)
        update = entry.lr * m / (v.sqrt() + float(entry.group.get("eps", 0.0)))
    counts: list[int] = count_lost(weight, update, formats[dtype_name(entry.parameter.dtype)]).tolist()
    return counts


def lost_updates(counts: Mapping[str, Sequence[int]], which: str) -> Iterator[Finding]:
    """The finding that more than 1 % of the updates are lost, from the numbers of all and of lost ones by parameter."""
    updates, lost = (sum(pair[index] for pair in counts.values()) for index in (0, 1))
    if updates and lost / updates > 0.01:
        shares = {name: part / whole for name, (whole, part) in counts.items() if part}
        worst = sorted(shares, key=lambda name: -shares[name])
        where = ", ".join([f"{name} {percent(shares[name])} %" for name in worst[:3]] + ["..."] * (len(worst) > 3))
        where = f"{count(len(worst), 'parameter')}: {where}"
        yield find("updates-lost", where, share=percent(lost / updates), which=which)


def _decay(setup: Setup) -> Iterator[Finding]:
    lost, largest = [], 0.0
    for entry in _without_master(setup):
        decay = entry.lr * float(entry.group.get("weight_decay") or 0.0)
        decoupled = entry.group.get("decoupled_weight_decay", "AdamW" in type(entry.optimizer).__name__)
        # Nearest rounding keeps w (1 - decay) at w for all w below half of the smallest relative spacing.
        if decoupled and 0 < decay < 2.0 ** (-9 if entry.parameter.dtype == torch.bfloat16 else -12):
            lost.append(entry)
            largest = max(largest, decay)
    if lost:
        yield find("decay-lost", lost, decay=largest, dtypes=dtype_name(lost[0].parameter.dtype))


def _numbers(setup: Setup) -> Iterator[Finding]:
    """Numbers that 16 bits are too few for: Adam's eps, step counts, state in between, and buffers."""
    adam = [e for e in setup.entries if e.parameter.dtype == torch.float16 and e.is_adam]
    smallest = 2.0**-25  # half of fp16's smallest number, below which a number rounds to 0
    if zero := [e for e in adam if not e.keeps_updates and float(e.group.get("eps", 1.0)) <= smallest]:
        yield find("eps-is-zero", zero, eps=zero[0].group["eps"])
    if low := [e for e in setup.entries if isinstance(e.step, torch.Tensor) and e.step.dtype in HALF]:
        dtype = low[0].step.dtype
        last = 256 if dtype == torch.bfloat16 else 2048
        yield find("step-in-16-bits", low, dtype=dtype_name(dtype), last=last)
    rounded: dict[str, list[str]] = defaultdict(list)
    for entry in setup.entries:
        for key, value in entry.state.items():
            exact = key in ("exp_avg", "exp_avg_sq") or (key == "master" and entry.half)
            if exact and entry.steps_taken >= 2 and holds_bf16_only(value):
                rounded[key].append(entry.name)
    if rounded:
        yield find(
            "state-was-rounded",
            [name for names in rounded.values() for name in names],
            "error" if "master" in rounded else "warning",
            keys=" and ".join(rounded),
            stake="the bits that training had added to the weights are gone"
            if "master" in rounded
            else "a run that is resumed differs from one that goes on",
        )
    buffers = {name: buffer for name, buffer in setup.model.named_buffers() if buffer.dtype in HALF}
    if found := [name for name in buffers if name.rpartition(".")[2] in _EXACT_BUFFERS]:
        what, dtypes = _EXACT_BUFFERS[found[0].rpartition(".")[2]], dtypes_of(buffers[name] for name in found)
        yield find("buffers-in-16-bits", listed(found, "buffer"), what=what, dtypes=dtypes)


# ------------------------------------------------------------------------------------------- loss scaling and sharding


def _scaling(setup: Setup) -> Iterator[Finding]:
    fp16, scaler = setup.computes_in_fp16(), setup.scaler
    if fp16 and scaler is None and setup.entries and not setup.steps_copies:
        yield find("fp16-without-scaler", fp16)
    if isinstance(scaler, torch.amp.GradScaler) and not isinstance(scaler, GradScaler):
        sharded = any(cls.__name__ == "ShardedGradScaler" for cls in type(scaler).__mro__)
        fused = [one for one in setup.optimizers if getattr(one, "_step_supports_amp_scaling", False)]
        half = [name for name, parameter in setup.trainable() if parameter.dtype == torch.float16]
        if half and not sharded and not fused:
            yield find("fp16-weights-with-torch-scaler", half)
        if setup.is_flat() and not sharded:
            yield find("scaler-not-sharded", "FullyShardedDataParallel")
        if setup.is_flat() and sharded and fused:
            yield find("fused-under-sharded-scaler", ", ".join(type(one).__name__ for one in fused))
        weights: list[Any] = [entry.parameter for entry in setup.entries]
        meshes = {weight.device_mesh if is_sharded(weight) else None for weight in weights}
        if len(meshes) > 1:
            where = "plain tensors and DTensors" if None in meshes else f"{len(meshes)} meshes"
            yield find("scaler-of-one-mesh", where)
    if scaler is not None:
        scale = float(scaler.get_scale())
        broken = scale == 0 or not math.isfinite(scale)
        stake = "gradients are made smaller instead of larger: many steps in a row have overflowed"
        if broken:
            stake = "unscaled gradients are NaN, which is not noticed as an overflow: NaN weights"
        if broken or scale < 1:
            severity = "error" if broken else "warning"
            yield find("scale-collapsed", type(scaler).__name__, severity, scale=scale, stake=stake)


def _shards(setup: Setup) -> Iterator[Finding]:
    sharded = [entry for entry in setup.entries if is_sharded(entry.parameter)]
    split = [entry for entry in sharded if local(entry.parameter).numel() < entry.parameter.numel()]
    if plain := [e for e in split if any(not is_sharded(value) and value.numel() > 1 for value in e.state.values())]:
        yield find("state-not-sharded", plain)
    for library, only_empty, issue, stake in _CANNOT_SHARD:
        entries = [entry for entry in sharded if entry.library == library]
        if hit := [entry for entry in entries if not only_empty or not local(entry.parameter).numel()]:
            what = "shards without elements" if only_empty else "DTensors"
            yield find("optimizer-cannot-shard", hit, library=library, what=what, issue=issue, stake=stake)


def _size_of_states(entries: Sequence[Entry]) -> int:
    return sum(size_of(*entry.state.values()) for entry in entries)


RULES = (_values, _membership, _frozen, _tied, _moments, _updates, _decay, _numbers, _scaling, _shards)
