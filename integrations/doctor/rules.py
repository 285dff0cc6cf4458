"""The rules that examine a training set-up between steps (`RULES`), a checkpoint, and this machine."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch

from halfstep.integrations.doctor.findings import Diagnosis, Finding, count, dtypes_of, find, in_bytes, listed
from halfstep.integrations.doctor.setup import HALF, Entry, Setup, distinct, holds_bf16_only, nonfinite, sample, size_of
from halfstep.integrations.tensor_files import TensorFiles
from halfstep.kernels import compiler, native
from halfstep.kernels.block_codes import NAN_BLOCK, NAN_RANGE
from halfstep.kernels.muon.rule import matrices, ratio
from halfstep.numerics.messages import percent
from halfstep.numerics.scaling.scaler import GradScaler
from halfstep.numerics.scaling.sharding import is_sharded, local
from halfstep.numerics.scaling.stand_ins import gradient_of
from halfstep.numerics.state_layout import SCALE_KEYS

# The moments that torch's optimizers will create at their first step, in the parameter's dtype.
_MOMENTS_OF_TORCH: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam"), ("exp_avg", "exp_avg_sq")),
    "Adamax": ("exp_avg", "exp_inf"),
    "RMSprop": ("square_avg",),
    "Muon": ("momentum_buffer",),
    "Adadelta": ("square_avg", "acc_delta"),
}
# Second moments and similar averages, which change by a small fraction per step.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "acc_delta")
_STATE = ("exp_avg_sq", "max_exp_avg_sq", "exp_avg", "master", "master_param", "momentum_buffer")  # in checkpoints
_EXACT_BUFFERS = {
    **dict.fromkeys(("inv_freq", "original_inv_freq"), "rotary frequencies"),
    "freqs": "rotary angles",
    **dict.fromkeys(("running_mean", "running_var"), "running statistics of a normalization"),
}
# By library: the shards it cannot handle, where that is reported, and what happens.
_CANNOT_SHARD = {
    "transformer_engine": (
        *("shards without elements", "TransformerEngine #3202, #3207"),
        "the step fails on some ranks, and others hang",
    ),
    "bitsandbytes": (
        *("DTensors", "bitsandbytes #89, #1633"),
        "checkpoints cannot be resharded; illegal memory accesses",
    ),
}


def doctor(model: torch.nn.Module, optimizer: Any, scaler: Any = None) -> Diagnosis:
    """Examine a training set-up built with any library, and report what is wrong with it.

    Nothing is modified, and no step is needed: call it before training, after some steps, or after loading a
    checkpoint. After a step it finds more, because the optimizer then has state. It reads weights, gradients and state
    once, to look for NaN and Inf, and waits for the device. `halfstep.integrations.doctor.watch` finds what shows only
    during steps: schedules that advance on skips, clipping of scaled gradients, autocast, lost updates.

    Args:
        model: the model, with its wrappers for training (DistributedDataParallel, FSDP, ``torch.compile``).
        optimizer: its optimizer, or a sequence or mapping of several. Wrappers such as Accelerate's and mmengine's are
            unwrapped, and searched for a scaler.
        scaler: the loss scaler, or an object that has it as ``_scaler``, ``loss_scaler`` or ``scaler``: timm's
            NativeScaler, an Accelerator, Lightning's plugin. None if there is none.

    Returns:
        The findings, errors first. docs/doctor.md describes each.

    Raises:
        TypeError: `model` is not a module, an optimizer has no ``param_groups``, or `scaler` is not a scaler.

    Note:
        Under FSDP and tensor parallelism, each rank examines its own shards, without communication.

    Examples:
        >>> model = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        >>> print(halfstep.doctor(model, halfstep.AdamW(model.parameters())))
        Linear of 1 parameter, AdamW of halfstep: no findings
        >>> halfstep.doctor(model, torch.optim.AdamW(model.parameters())).names
        ['moments-in-16-bits', 'decay-lost']
    """
    return examine(Setup(model, optimizer, scaler))


@torch.no_grad()
def examine(setup: Setup) -> Diagnosis:
    """Apply all rules to a set-up."""
    return Diagnosis.of(setup.in_words(), (finding for rule in RULES for finding in rule(setup)))


def _values(setup: Setup) -> Iterator[Finding]:
    tensors: list[tuple[str, str, Any]] = [(name, "weights", parameter) for name, parameter in setup.parameters]
    tensors += [(name, "buffers", buffer) for name, buffer in setup.model.named_buffers()]
    # A loss scaler skips steps whose gradients overflow, and the last one may be such a step.
    if setup.scaler is None:
        tensors += [(name, "gradients", gradient_of(parameter)) for name, parameter in setup.parameters]
    for entry in setup.entries:
        tensors += [(entry.name, "weights", entry.parameter)] * (id(entry.parameter) not in setup.names)
        tensors += [(entry.name, key, value) for key, value in entry.state.items()]
        tensors += [(entry.name, key, _marks(value)) for key, value in entry.scales.items() if key in SCALE_KEYS]
    names_by_role: dict[str, list[str]] = defaultdict(list)
    for name, role, tensor in tensors:
        value = "" if tensor is None else nonfinite(tensor)
        masks = role == "buffers" or (role == "weights" and not tensor.requires_grad)  # may contain infinities
        if value == "NaN" or (value and not masks):
            names_by_role[f"{value} in {role}"].append(name)
    if names_by_role:
        where = listed((name for names in names_by_role.values() for name in names), "tensor")
        severity = "warning" if all(role.endswith("gradients") for role in names_by_role) else "error"
        yield find("values-not-finite", where, severity, what=", ".join(names_by_role))


def _marks(scales: torch.Tensor) -> torch.Tensor:
    """From the scales of an 8-bit moment: NaN for each block that stands for NaN, 0 for the others."""
    values = local(scales)
    return torch.where(values == (NAN_BLOCK if values.dtype == torch.uint8 else NAN_RANGE), math.nan, 0.0)


# ---------------------------------------------------------------------------------------- parameters of the optimizers


def _membership(setup: Setup) -> Iterator[Finding]:
    optimized = {id(entry.parameter) for entry in setup.entries}
    outside = [name for name, parameter in setup.trainable if id(parameter) not in optimized]
    if optimized and outside and not setup.steps_copies:
        disjoint = optimized.isdisjoint(setup.names)
        yield find("optimizer-of-other-parameters" if disjoint else "parameters-not-optimized", outside)


# Findings that concern a single parameter.
_OF_A_PARAMETER: dict[str, Callable[[Entry], bool]] = {
    "frozen-with-gradient": lambda e: e.frozen and e.grad is not None,
    "frozen-with-state": lambda e: e.frozen and bool(e.state),
    "quantized-in-optimizer": lambda e: not e.parameter.is_floating_point() and not e.parameter.is_complex(),
    # Below half of the smallest relative spacing, rounding to nearest returns w (1 - decay) to w for all w.
    "decay-lost": lambda e: e.loses_updates and 0 < e.decay < torch.finfo(e.parameter.dtype).eps / 4,
    # Values up to half of fp16's smallest subnormal round to 0.
    "eps-is-zero": lambda e: (
        e.parameter.dtype == torch.float16 and "betas" in e.group and not e.keeps_updates and e.eps <= 2.0**-25
    ),
    "step-in-16-bits": lambda e: isinstance(e.step, torch.Tensor) and e.step.dtype in HALF,
    "state-not-sharded": lambda e: (
        local(e.parameter).numel() < e.parameter.numel()
        and is_sharded(e.parameter)
        and any(not is_sharded(value) and value.numel() > 1 for value in e.state.values())
    ),
}


def _parameters(setup: Setup) -> Iterator[Finding]:
    for name, is_wrong in _OF_A_PARAMETER.items():
        if entries := list(filter(is_wrong, setup.entries)):
            yield find(
                name,
                entries,
                dtypes=dtypes_of(entry.parameter for entry in entries),
                gradients=in_bytes(size_of(*(entry.grad for entry in entries))),
                states=in_bytes(_size_of_states(entries)),
                decay=max(entry.decay for entry in entries),
                eps=entries[0].eps,
            )


def _tied(setup: Setup) -> Iterator[Finding]:
    by_memory: dict[tuple[Any, ...], list[Entry]] = defaultdict(list)
    for entry in setup.entries:
        shard = local(entry.parameter)
        if shard.numel() and shard.layout == torch.strided and not shard.is_meta:
            by_memory[shard.device, shard.data_ptr(), shard.numel()].append(entry)
    if tied := [entries for entries in by_memory.values() if len(entries) > 1]:
        needless = _size_of_states(entry for entries in tied for entry in entries[1:])
        yield find("tied-weights-twice", [entry for entries in tied for entry in entries], bytes=needless)
    model: Any = next((module for module in setup.model.modules() if hasattr(module, "config")), None)
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False) is True:
        getters = (getattr(model, name, None) for name in ("get_input_embeddings", "get_output_embeddings"))
        ends: list[Any] = [getattr(get() if callable(get) else None, "weight", None) for get in getters]
        if None not in ends and ends[0] is not ends[1] and local(ends[0]).data_ptr() != local(ends[1]).data_ptr():
            yield find("tie-broken", [setup.names.get(id(end), "?") for end in ends], bytes=size_of(ends[1]))


def _size_of_states(entries: Iterable[Entry]) -> int:
    return sum(size_of(*entry.state.values()) for entry in entries)


# ----------------------------------------------------------------------------------------------------------- precision


def _moments(setup: Setup) -> Iterator[Finding]:
    """16-bit moments, including those that torch's optimizers will create at their first step."""
    low = [
        (entry, key, tensor)
        for entry in setup.entries
        if not entry.stochastic
        for key, tensor in (entry.state or _state_of_torch(entry)).items()
        if tensor.dtype in HALF and key != "master"
    ]
    if low:
        entries, keys, tensors = zip(*low, strict=True)
        squares = [key for key in sorted(keys) if key in _SQUARES]
        beta = max((float(entry.group["betas"][1]) for entry in entries if "betas" in entry.group), default=0.999)
        stake, severity, size = "small changes are lost", "warning", size_of(*tensors)
        if squares and 1 - beta < 2.0**-8:
            stake = f"{squares[0]} falls by at most {percent(1 - beta)} % a step, which is rounded away: steps shrink"
            severity = "error"
        yield find(
            "moments-in-16-bits",
            entries,
            severity,
            what=f"{' and '.join(sorted(set(keys)))} in {dtypes_of(tensors)}, rounded to nearest",
            stake=f"{stake}; {in_bytes(size)} now, {in_bytes(2 * size)} in fp32",
        )


def _state_of_torch(entry: Entry) -> dict[str, torch.Tensor]:
    """The state that one of torch's optimizers creates at its first step: tensors like the parameter."""
    cls = type(entry.optimizer)
    if not f"{cls.__module__}.".startswith("torch.optim.") or not entry.parameter.requires_grad:
        return {}
    momentum = ("momentum_buffer",) * bool(cls is torch.optim.SGD and entry.group["momentum"])
    return dict.fromkeys(_MOMENTS_OF_TORCH.get(cls.__name__, momentum), entry.parameter)


def _updates(setup: Setup) -> Iterator[Finding]:
    """Next updates that rounding would lose. Adam's follow from its state, or are taken as lr before the first step;
    Muon's are taken to have the size of a matrix whose singular values are 1."""
    updates, lost = Counter[str](), Counter[str]()
    for entry in setup.entries:
        weight = sample(entry.parameter)
        is_muon = "ns_steps" in entry.group and entry.group.get("algorithm") != "adamw"
        if not (is_muon or "betas" in entry.group) or not entry.loses_updates or weight.is_meta:
            continue
        size, steps = entry.lr, entry.steps_taken
        if is_muon:
            _, rows, columns = matrices(entry.parameter.shape, entry.group.get("blocks", 1))
            size *= ratio(entry.group["adjust_lr_fn"] or "original", rows, columns) / max(rows, columns, 1) ** 0.5
        update = torch.full_like(weight, size, dtype=torch.float64)
        first, second = entry.state.get("exp_avg"), entry.state.get("exp_avg_sq")
        if steps >= 1 and first is not None and second is not None and first.is_floating_point():
            beta1, beta2 = map(float, entry.group["betas"])
            root = (sample(second).double() / (1 - beta2**steps)).sqrt()
            update = entry.lr * sample(first).double() / (1 - beta1**steps) / (root + entry.eps)
        nonzero = update != 0
        larger = (weight.double() + update.abs().copysign(weight.double())).to(weight.dtype)
        updates[entry.name] += int(nonzero.sum())
        lost[entry.name] += int((nonzero & (larger == weight)).sum())
    stepped = any(entry.steps_taken >= 1 for entry in setup.entries)
    yield from lost_updates(updates, lost, "of the next step's updates" if stepped else "of updates as large as lr")


def lost_updates(updates: Counter[str], lost: Counter[str], which: str) -> Iterator[Finding]:
    """A finding if more than 1 % of the updates, counted by parameter name, are lost."""
    total = updates.total()
    if total and lost.total() / total > 0.01:
        shares = {name: lost[name] / max(1, number) for name, number in updates.items()}
        words = [f"{name} {percent(shares[name])} %" for name in sorted(shares, key=shares.__getitem__)[::-1]]
        yield find("updates-lost", listed(words), share=percent(lost.total() / total), which=which)


def _rounded(setup: Setup) -> Iterator[Finding]:
    """State that was rounded to 16 bits at some point, and buffers that need more than 16 bits."""
    rounded = [
        (key, entry)
        for key in ("exp_avg", "exp_avg_sq", "master")
        for entry in setup.entries
        if key in entry.state and (key != "master" or entry.half)
        if entry.steps_taken >= 2 and holds_bf16_only(entry.state[key])
    ]
    if rounded:
        keys = dict.fromkeys(key for key, _ in rounded)
        severity = "error" if "master" in keys else "warning"
        yield find("state-was-rounded", [entry for _, entry in rounded], severity, keys=" and ".join(keys))
    buffers = {name: buffer for name, buffer in setup.model.named_buffers() if buffer.dtype in HALF}
    if exact := [name for name in buffers if name.rpartition(".")[2] in _EXACT_BUFFERS]:
        role, dtypes = _EXACT_BUFFERS[exact[0].rpartition(".")[2]], dtypes_of(buffers[name] for name in exact)
        yield find("buffers-in-16-bits", listed(exact, "buffer"), what=role, dtypes=dtypes)


# ------------------------------------------------------------------------------------------- loss scaling and sharding


def _scaling(setup: Setup) -> Iterator[Finding]:
    fp16, scaler = setup.computes_in_fp16(), setup.scaler
    if fp16 and scaler is None and setup.entries and not setup.steps_copies:
        yield find("fp16-without-scaler", fp16)
    scale = 1.0 if scaler is None else float(scaler.get_scale())
    if not 1 <= scale < math.inf:
        severity = "warning" if 0 < scale < 1 else "error"
        yield find("scale-collapsed", type(scaler).__name__, severity, scale=scale)


def _scaler_of_torch(setup: Setup) -> Iterator[Finding]:
    """Situations that torch's scalers cannot handle and halfstep's can."""
    if not isinstance(setup.scaler, torch.amp.GradScaler) or isinstance(setup.scaler, GradScaler):
        return
    weights: list[Any] = [entry.parameter for entry in setup.entries]
    sharded = any(cls.__name__ == "ShardedGradScaler" for cls in type(setup.scaler).__mro__)
    fused = [optimizer for optimizer in setup.optimizers if getattr(optimizer, "_step_supports_amp_scaling", False)]
    half = [name for name, parameter in setup.trainable if parameter.dtype == torch.float16]
    if half and not sharded and not fused:
        yield find("fp16-weights-with-torch-scaler", half)
    scale = getattr(setup.scaler, "_scale", None)
    devices = {local(weight).device for weight in weights}
    if scale is not None and devices and scale.device not in devices and not sharded:
        on = ", ".join(map(str, devices))
        yield find("scaler-on-another-device", type(setup.scaler).__name__, device=scale.device, devices=on)
    if setup.is_flat() and not sharded:
        yield find("scaler-not-sharded", "FullyShardedDataParallel")
    if setup.is_flat() and sharded and fused:
        yield find("fused-under-sharded-scaler", ", ".join(type(optimizer).__name__ for optimizer in fused))
    meshes = {weight.device_mesh if is_sharded(weight) else None for weight in weights}
    if len(meshes) > 1:
        where = "plain tensors and DTensors" if None in meshes else f"{len(meshes)} meshes"
        yield find("scaler-of-one-mesh", where)


def _shards(setup: Setup) -> Iterator[Finding]:
    for library, (shards, issue, stake) in _CANNOT_SHARD.items():
        entries = [
            entry
            for entry in setup.entries
            if is_sharded(entry.parameter) and type(entry.optimizer).__module__.split(".")[0] == library
            if shards == "DTensors" or not local(entry.parameter).numel()
        ]
        if entries:
            yield find("optimizer-cannot-shard", entries, library=library, what=shards, issue=issue, stake=stake)


RULES = (_values, _membership, _tied, _moments, _updates, _parameters, _rounded, _scaling, _scaler_of_torch, _shards)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def examine_checkpoint(checkpoint: TensorFiles, progress: Callable[[float], None] = lambda done: None) -> Diagnosis:
    """Examine all parts of a checkpoint. `progress` is called with the fraction of the bytes that has been examined."""
    tensors = checkpoint.tensors
    total = sum(map(_bytes, tensors.values())) or 1
    examined = f"{', '.join(checkpoint.files)} with {count(len(tensors), 'tensor')}, {in_bytes(total)}"
    return Diagnosis.of(examined, _of_tensors(tensors, total, progress))


def _of_tensors(tensors: dict[str, torch.Tensor], total: int, progress: Callable[[float], None]) -> Iterator[Finding]:
    names_by_finding: dict[str, list[str]] = defaultdict(list)
    by_content: dict[tuple[torch.dtype, torch.Size, bytes], list[str]] = defaultdict(list)
    done = 0
    for name, tensor in tensors.items():
        entry, strided = name.rpartition(".")[2], tensor.layout == torch.strided and not tensor.is_meta
        squares = entry in ("exp_avg_sq", "max_exp_avg_sq")
        for finding, is_wrong in (
            ("tensors-without-elements", tensor.is_floating_point() and not tensor.numel()),
            ("values-not-finite", bool(nonfinite(tensor))),
            (
                "negative-second-moment",
                squares and strided and tensor.element_size() > 1 and bool((distinct(tensor) < 0).any()),
            ),
            ("state-was-rounded", entry in _STATE and strided and holds_bf16_only(tensor)),
            ("weights-in-twice-the-bytes", entry not in _STATE and strided and holds_bf16_only(tensor)),
            ("moments-in-16-bits", squares and tensor.dtype in HALF),
        ):
            names_by_finding[finding] += [name] * is_wrong
        if strided and tensor.numel() >= 1024 and _bytes(tensor) == tensor.nbytes:
            codes = tensor.detach().flatten().contiguous().view(torch.uint8).numpy()
            if (codes != codes[0]).any():
                key = tensor.dtype, tensor.shape, hashlib.blake2b(codes.data, digest_size=16).digest()
                by_content[key].append(name)
        done += _bytes(tensor)
        progress(done / total)
    for names in by_content.values():
        names_by_finding["saved-twice"] += names if len({tensors[name].data_ptr() for name in names}) > 1 else []
    for finding, names in names_by_finding.items():
        if names:
            dtypes, first = dtypes_of(tensors[name] for name in names), names[0]
            broken = finding == "values-not-finite"
            yield find(
                finding,
                listed(names, "tensor"),
                "warning" if finding == "state-was-rounded" else None,
                **dict(zip(("first", "second"), names, strict=False)),
                bytes=sum(_bytes(tensors[name]) for name in names) // 2,
                what=f"{first} holds {nonfinite(tensors[first])}" if broken else f"second moments are in {dtypes}",
                stake="unless they were rounded stochastically, they grew but never fell, and steps shrank",
                keys=" and ".join(dict.fromkeys(name.rpartition(".")[2] for name in names)),
            )


def _bytes(tensor: torch.Tensor) -> int:
    return distinct(tensor).nbytes if tensor.layout == torch.strided else tensor.numel() * tensor.element_size()


# -------------------------------------------------------------------------------------------------------- environments

OLDEST = {"torch": (2, 11), "triton": (3, 6)}


def facts() -> dict[str, str]:
    """The versions of torch and, if installed, Triton; and the ``kernels`` that run: Triton, C++ or torch."""
    versions = {"torch": str(torch.__version__)}
    with suppress(importlib.metadata.PackageNotFoundError):
        versions["triton"] = importlib.metadata.version("triton")
    if torch.cuda.is_available():
        return versions | {"kernels": "Triton" if "triton" in versions else "torch"}
    return versions | {"kernels": "C++" if compiler.FOLDER.is_dir() or compiler.compiler() else "torch"}


def examine_environment() -> Diagnosis:
    """Examine what halfstep needs of this machine. Nothing is compiled, and no other machine is contacted."""
    return Diagnosis.of("this environment", _of_machine(facts()))


def _of_machine(there: dict[str, str]) -> Iterator[Finding]:
    for name, oldest in OLDEST.items():
        parts = there.get(name, "").split("+")[0].split(".")[:2]
        if all(part.isdecimal() for part in parts) and tuple(map(int, parts)) < oldest:
            yield find("version-too-old", f"{name} {there[name]}", name=name, least=".".join(map(str, oldest)))
    if there["kernels"] == "torch":
        yield find("no-triton", "triton") if torch.cuda.is_available() else find("no-compiler", "C++")
    cache = native.cache_folder()
    parent = next(folder for folder in (cache, *cache.parents) if folder.exists())
    if there["kernels"] == "C++" and not compiler.FOLDER.is_dir() and not os.access(parent, os.W_OK):
        yield find("cache-not-writable", str(cache))
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        yield find("kernels-interpreted", "TRITON_INTERPRET")
