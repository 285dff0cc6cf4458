"""What can be said of a training set-up at rest, without a step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from halfstep.integrations.doctor.findings import Diagnosis, Finding, in_bytes, in_order, some
from halfstep.integrations.doctor.setup import (
    HALF,
    Held,
    Setup,
    dtype_name,
    dtypes_of,
    names_of,
    nonfinite,
    sample,
    world_size,
)
from halfstep.integrations.optim.state import SCALES, OptimizerState
from halfstep.kernels.block_codes import NAN_BLOCK, NAN_RANGE
from halfstep.numerics.formats.table import formats
from halfstep.numerics.messages import percent
from halfstep.numerics.scaling.scaler import GradScaler
from halfstep.numerics.scaling.topology import is_sharded, local
from halfstep.numerics.statistics.updates import count_lost

Rule = Callable[[Setup], Iterator[Finding]]

# What torch's optimizers keep per parameter, in the parameter's dtype, before their first step shows it.
_STATES_OF_TORCH = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adadelta": 2}
# Second moments and other means of squares, which change by a small share of themselves.
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "acc_delta")
_SUBNORMAL_FP16 = 2.0**-25  # half of fp16's smallest number, below which a number rounds to 0


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
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"Expected model to be a torch.nn.Module, but got a {type(model).__name__}")
    with torch.no_grad():
        setup = Setup(model, optimizer, scaler)
        return in_order(setup.counted(), [finding for rule in RULES for finding in rule(setup)])


# --------------------------------------------------------------------------------------------- which parameters it has


def _membership(setup: Setup) -> Iterator[Finding]:
    if not setup.held or setup.own_copies:
        return
    inside = {id(one.parameter) for one in setup.held}
    outside = [name for name, parameter in setup.trainable() if id(parameter) not in inside]
    if outside and not any(id(one.parameter) in setup.names for one in setup.held):
        yield Finding(
            "optimizer-of-other-parameters",
            "error",
            some(outside),
            "the optimizer holds none of the model's parameters: they were replaced after it was made, as by "
            "fully_shard, FSDP, a copy of the model, or a conversion",
            "nothing is trained",
            "make the optimizer after the model is sharded, moved and converted",
        )
    elif outside:
        yield Finding(
            "parameters-not-optimized",
            "warning",
            some(outside),
            "they require a gradient, and no optimizer holds them",
            "they stay as they are, and their gradients take memory",
            "add them to the optimizer, pass all optimizers here, or call requires_grad_(False)",
        )


def _values(setup: Setup) -> Iterator[Finding]:
    entries = [(name, "weights", parameter) for name, parameter in setup.parameters()]
    entries += [(name, "buffers", buffer) for name, buffer in setup.model.named_buffers()]
    # A loss scaler skips steps whose gradients overflow, and the last one may be such a step.
    grads = [(name, "gradients", one.grad) for name, one in setup.parameters() if one.grad is not None]
    entries += [] if setup.scaler is not None else grads
    for one in setup.held:
        entries += [(one.name, "weights", one.parameter)] * (id(one.parameter) not in setup.names)
        entries += [(one.name, key, value) for key, value in one.state.items()]
        entries += [(one.name, key, _marks(value)) for key, value in one.scales.items() if key in SCALES.values()]
    values = nonfinite([value for _, _, value in entries])
    hit = [
        (name, kind, value)
        for (name, kind, tensor), value in zip(entries, values, strict=True)
        # Masks hold infinities in buffers and frozen parameters.
        if value == "NaN" or (value and kind != "buffers" and (kind != "weights" or tensor.requires_grad))
    ]
    if hit:
        kinds = {value: list(dict.fromkeys(kind for _, kind, other in hit if other == value)) for _, _, value in hit}
        only_grads = all(kind == "gradients" for _, kind, _ in hit)
        yield Finding(
            "values-not-finite",
            "warning" if only_grads else "error",
            some(list(dict.fromkeys(name for name, _, _ in hit)), "tensor"),
            "; ".join(f"{value} in {' and '.join(found)}" for value, found in kinds.items()),
            "a step writes them into the weights, unless a loss scaler skips it"
            if only_grads
            else "all that is computed from them is NaN or Inf, and so it stays",
            "load weights and state from before, and repeat the step in halfstep.integrations.doctor.first_nonfinite("
            "model), which names the first operation that makes NaN or Inf out of finite numbers",
        )


def _marks(scales: torch.Tensor) -> torch.Tensor:
    """NaN for each block of NaN of a moment in 8 bits, from its scales; 0 for the others."""
    values = local(scales)
    return torch.where(values == (NAN_BLOCK if values.dtype == torch.uint8 else NAN_RANGE), math.nan, 0.0)


def _frozen(setup: Setup) -> Iterator[Finding]:
    stale = [one for one in setup.held if not one.parameter.requires_grad and one.parameter.grad is not None]
    if stale and not setup.own_copies:
        yield Finding(
            "frozen-with-gradient",
            "error",
            some(names_of(stale)),
            "they are frozen, but still have a gradient, which every step uses again",
            f"frozen weights keep changing; {in_bytes(sum(_size(one.parameter.grad) for one in stale))} of gradients",
            "set .grad of frozen parameters to None",
        )
    idle = [one for one in setup.held if not one.parameter.requires_grad and one.state]
    if idle and not setup.own_copies:
        yield Finding(
            "frozen-with-state",
            "warning",
            some(names_of(idle)),
            "they are frozen, and the optimizer holds state for them",
            in_bytes(sum(_size(value) for one in idle for value in one.state.values())),
            "make the optimizer of the parameters that require a gradient only",
        )
    odd = [one for one in setup.held if not one.parameter.is_floating_point() and not one.parameter.is_complex()]
    if odd:
        yield Finding(
            "quantized-in-optimizer",
            "error",
            some(names_of(odd)),
            f"their dtype is {dtypes_of([one.parameter for one in odd])}: the codes of quantized weights",
            "a step fails, or changes the codes as if they were numbers",
            "make the optimizer of [p for p in model.parameters() if p.requires_grad]",
        )


def _tied(setup: Setup) -> Iterator[Finding]:
    places: dict[tuple[Any, ...], list[Held]] = defaultdict(list)
    for one in setup.held:
        values = local(one.parameter)
        if values.numel() and values.layout == torch.strided and not values.is_meta:
            places[values.device, values.data_ptr(), values.numel()].append(one)
    twice = [group for group in places.values() if len(group) > 1]
    if twice:
        names = [one.name for group in twice for one in group]
        yield Finding(
            "tied-weights-twice",
            "error",
            some(names),
            "the optimizer holds the same memory more than once",
            "each step updates it twice, with two states: "
            f"{in_bytes(sum(_size(v) for group in twice for one in group[1:] for v in one.state.values()))} too many",
            "tie the modules by one Parameter (a.weight = b.weight) before the optimizer is made",
        )
    config = getattr(_unwrapped(setup.model), "config", None)
    if getattr(config, "tie_word_embeddings", False) is True:
        ends = [_weight_of(setup.model, name) for name in ("get_input_embeddings", "get_output_embeddings")]
        if None not in ends and ends[0] is not ends[1] and local(ends[0]).data_ptr() != local(ends[1]).data_ptr():
            yield Finding(
                "tie-broken",
                "error",
                some([setup.names.get(id(one), "?") for one in ends]),
                "the configuration says that input and output embeddings are tied, but they are two parameters",
                f"they are trained apart, and only one is saved; {in_bytes(_size(ends[1]))} of weights too many",
                "call model.tie_weights() after loading, to_empty() and sharding, before the optimizer is made",
            )


# --------------------------------------------------------------------------------------------------------- precision


def _state_of(one: Held) -> list[tuple[str, torch.Tensor]]:
    return [(key, value) for key, value in one.state.items() if value.is_floating_point() and value.dtype in HALF]


def _moments(setup: Setup) -> Iterator[Finding]:
    low = [one for one in setup.held if _state_of(one) and not one.stochastic]
    keys = sorted({key for one in low for key, _ in _state_of(one)} - {"master"})
    bytes_now = sum(_size(value) for one in low for _, value in _state_of(one))
    if not low:  # not yet there
        low = [
            one
            for one in setup.held
            if one.half and not one.state and type(one.optimizer).__module__.startswith("torch.optim.")
        ]
        low = [one for one in low if _states_of_torch(one) and one.parameter.requires_grad]
        keys = ["exp_avg_sq"] if any(one.family == "adam" for one in low) else ["state"]
        bytes_now = sum(_size(one.parameter) * _states_of_torch(one) for one in low)
    if not low or not keys:
        return
    squares = [key for key in keys if key in _SQUARES]
    beta = max((float(one.group["betas"][1]) for one in low if "betas" in one.group), default=0.999)
    dtypes = dtypes_of([value for one in low for _, value in _state_of(one)] or [one.parameter for one in low])
    stops = bool(squares) and 1 - beta < 2.0**-8
    held = f"{in_bytes(bytes_now)} are held, fp32 takes {in_bytes(2 * bytes_now)}"
    yield Finding(
        "moments-in-16-bits",
        "error" if stops else "warning",
        some(names_of(low)),
        f"{' and '.join(keys)} {'is' if len(keys) == 1 else 'are'} in {dtypes}, rounded to nearest",
        f"{squares[0]} changes by at most {percent(1 - beta)} % of itself as it falls, and bf16 rounds that away: it "
        f"grows, but never falls, and steps shrink; {held}"
        if stops
        else f"small changes are lost; {held}",
        _OURS,
    )


_OURS = (
    "keep weights, or masters of them, in fp32: halfstep.AdamW does so for 16-bit weights, in less memory than fp32 "
    'weights; its state_dtype="8bit" and rounding="stochastic" keep moments in fewer bits'
)


def _states_of_torch(one: Held) -> int:
    if isinstance(one.optimizer, OptimizerState):
        return 0
    name = next((kind.__name__ for kind in type(one.optimizer).__mro__ if kind.__name__ in _STATES_OF_TORCH), "")
    if name:
        return _STATES_OF_TORCH[name]
    return 1 if one.family == "sgd" and one.group.get("momentum") else 0


def _without_master(setup: Setup) -> list[Held]:
    return [one for one in setup.held if not one.keeps_updates and one.parameter.requires_grad and _rate(one) > 0]


def _rate(one: Held) -> float:
    return float(one.group.get("lr") or 0.0)


def _updates(setup: Setup) -> Iterator[Finding]:
    counts = {one.name: lost_next(one) for one in _without_master(setup) if one.family == "adam"}
    if not counts:
        return
    updates, lost = (sum(count[index] for count in counts.values()) for index in (0, 1))
    if updates and lost / updates > 0.01:
        known = any(one.taken >= 1 for one in setup.held)
        yield lost_finding(counts, "of the next step's updates" if known else "of updates as large as lr")


def lost_next(one: Held) -> tuple[int, int]:
    """How many elements of a parameter the next step of Adam would update, and how many updates rounding loses."""
    weight = sample(one.parameter)
    if weight.is_meta or not weight.numel():
        return 0, 0
    update = torch.full_like(weight, _rate(one), dtype=torch.float64)
    first, second = one.state.get("exp_avg"), one.state.get("exp_avg_sq")
    if one.taken >= 1 and first is not None and second is not None and first.is_floating_point():
        beta1, beta2 = map(float, one.group["betas"])
        m = sample(first).double() / (1 - beta1**one.taken)
        v = sample(second).double() / (1 - beta2**one.taken)
        update = _rate(one) * m / (v.sqrt() + float(one.group.get("eps", 0.0)))
    updates, lost = count_lost(weight, update, formats[dtype_name(one.parameter.dtype)]).tolist()
    return updates, lost


def lost_finding(counts: dict[str, tuple[int, int]], which: str) -> Finding:
    """The finding that updates are lost, from how many there are and how many are lost by parameter."""
    updates, lost = (sum(count[index] for count in counts.values()) for index in (0, 1))
    worst = sorted((key for key, count in counts.items() if count[1]), key=lambda key: -counts[key][1] / counts[key][0])
    shares = ", ".join(f"{key} {percent(counts[key][1] / counts[key][0])} %" for key in worst[:3])
    return Finding(
        "updates-lost",
        "error",
        f"{len(worst):,} parameters: {shares}{', ...' if len(worst) > 3 else ''}",
        "16-bit weights are updated without fp32 masters, and an update below half of the spacing of a weight is lost",
        f"{percent(lost / updates)} % {which} change nothing",
        _OURS,
    )


def _decay(setup: Setup) -> Iterator[Finding]:
    lost = []
    for one in _without_master(setup):
        decay = _rate(one) * float(one.group.get("weight_decay") or 0.0)
        decoupled = one.group.get("decoupled_weight_decay", "AdamW" in type(one.optimizer).__name__)
        # Nearest rounding keeps w (1 - decay) at w for all w below half of the smallest relative spacing.
        if decoupled and 0 < decay < 2.0 ** (-9 if one.parameter.dtype == torch.bfloat16 else -12):
            lost.append(one)
    if lost:
        decay = max(_rate(one) * float(one.group["weight_decay"]) for one in lost)
        yield Finding(
            "decay-lost",
            "error",
            some(names_of(lost)),
            f"lr · weight_decay is {decay:.2g}, less than the relative spacing of {dtypes_of([lost[0].parameter])}, "
            "and there are no masters",
            "weight decay changes no weight",
            _OURS,
        )


def _eps(setup: Setup) -> Iterator[Finding]:
    zero = [
        one
        for one in setup.held
        if one.parameter.dtype == torch.float16
        and one.family == "adam"
        and not one.keeps_updates
        and float(one.group.get("eps", 1.0)) <= _SUBNORMAL_FP16
    ]
    if zero:
        yield Finding(
            "eps-is-zero",
            "error",
            some(names_of(zero)),
            f"eps={zero[0].group['eps']:g} rounds to 0 in fp16, in which the optimizer computes",
            "where a gradient is 0 or its square underflows, the update is 0 / 0: NaN weights",
            "use fp32 moments and masters (halfstep.AdamW has both), or eps of at least 1e-7",
        )


def _steps(setup: Setup) -> Iterator[Finding]:
    low = [one for one in setup.held if isinstance(one.step, torch.Tensor) and one.step.dtype in HALF]
    if low:
        step = low[0].step
        yield Finding(
            "step-in-16-bits",
            "error",
            some(names_of(low)),
            f"the step count is in {dtype_name(step.dtype)}",
            f"it stops at {256 if step.dtype == torch.bfloat16 else 2048:,}, and bias corrections with it",
            "keep step counts in fp32 or int64; they are not weights",
        )


def _rounded(setup: Setup) -> Iterator[Finding]:
    """fp32 state whose values are all numbers of bf16: the last 16 bits are 0."""
    found: dict[str, list[Held]] = defaultdict(list)
    for one in setup.held:
        for key, value in one.state.items():
            known = key in ("exp_avg", "exp_avg_sq") or (key == "master" and one.half)
            if known and one.taken >= 2 and value.dtype == torch.float32 and holds_bf16_only(value):
                found[key].append(one)
    if found:
        lost = "master" in found
        yield Finding(
            "state-was-rounded",
            "error" if lost else "warning",
            some(names_of(one for held in found.values() for one in held)),
            f"{' and '.join(found)} in fp32 hold numbers of bf16 only: they were in bf16 in between, as "
            "Optimizer.load_state_dict casts the state to the dtype of the parameters",
            "the bits that training had added to the weights are gone"
            if lost
            else "a run that is resumed differs from one that goes on",
            "load the checkpoint into fp32 parameters, or use halfstep.AdamW, whose checkpoints keep fp32 state",
        )


def holds_bf16_only(value: torch.Tensor) -> bool:
    """Whether an fp32 tensor has many different elements, and all are numbers of bf16."""
    found = sample(value)
    if found.is_meta or found.numel() < 256:
        return False
    codes = found.contiguous().view(torch.int32)
    return bool(((codes & 0xFFFF) == 0).all()) and codes.unique().numel() >= 64


def _buffers(setup: Setup) -> Iterator[Finding]:
    low = [
        (name, buffer)
        for name, buffer in setup.model.named_buffers()
        if buffer.dtype in HALF and name.rpartition(".")[2] in _EXACT_BUFFERS
    ]
    if low:
        yield Finding(
            "buffers-in-16-bits",
            "warning",
            some([name for name, _ in low], "buffer"),
            f"{_EXACT_BUFFERS[low[0][0].rpartition('.')[2]]} in {dtypes_of([buffer for _, buffer in low])}",
            "angles of far positions, or running statistics, are wrong by up to 1 part in 256 (fp16: in 2,048)",
            "keep these buffers in fp32: make them again after model.to(dtype), or convert parameters only",
        )


_EXACT_BUFFERS = {
    "inv_freq": "rotary frequencies",
    "original_inv_freq": "rotary frequencies",
    "freqs": "rotary angles",
    "running_mean": "running statistics of a normalization",
    "running_var": "running statistics of a normalization",
}


# --------------------------------------------------------------------------------------------------------- loss scaling


def _scaling(setup: Setup) -> Iterator[Finding]:
    fp16, scaler = setup.computes_in_fp16(), setup.scaler
    if fp16 and scaler is None and setup.held and not setup.own_copies:
        yield fp16_without_scaler(fp16)
    if scaler is None or isinstance(scaler, GradScaler) or not isinstance(scaler, torch.amp.GradScaler):
        yield from _scale(scaler)
        return
    kind = "ShardedGradScaler" if _is_sharded_scaler(scaler) else "GradScaler"
    fused = [one for one in setup.optimizers if getattr(one, "_step_supports_amp_scaling", False)]
    half = [name for name, parameter in setup.trainable() if parameter.dtype == torch.float16]
    if half and kind == "GradScaler" and not fused:
        yield Finding(
            "fp16-weights-with-torch-scaler",
            "error",
            some(half),
            "torch.amp.GradScaler refuses fp16 gradients",
            'the first step raises "Attempting to unscale FP16 gradients."',
            "use halfstep.GradScaler with halfstep.AdamW, or fp32 weights under autocast",
        )
    flat = setup.wraps("FullyShardedDataParallel") and world_size() > 1
    if flat and kind == "GradScaler":
        yield Finding(
            "scaler-not-sharded",
            "error",
            "FullyShardedDataParallel",
            "torch.amp.GradScaler looks for overflows in the shard of its own rank only",
            "after an overflow, some ranks step and others do not, and their scales differ from then on",
            "use halfstep.GradScaler, or torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
        )
    if flat and kind == "ShardedGradScaler" and fused:
        yield Finding(
            "fused-under-sharded-scaler",
            "error",
            ", ".join(type(one).__name__ for one in fused),
            "torch's fused optimizers skip steps themselves, and ShardedGradScaler then does not reduce what it found",
            "after an overflow on one rank, ranks diverge; after unscale_, the step raises",
            "use fused=False, or halfstep.GradScaler with halfstep.AdamW",
        )
    sharded = [one.parameter for one in setup.held if is_sharded(one.parameter)]
    meshes = {parameter.device_mesh for parameter in sharded}  # type: ignore[attr-defined]
    plain = len(sharded) < len({id(one.parameter) for one in setup.held})
    if len(meshes) > 1 or (sharded and plain):
        kinds = f"{len(meshes)} meshes" + (" and plain tensors" if plain else "")
        yield Finding(
            "scaler-of-one-mesh",
            "error",
            kinds,
            "torch.amp.GradScaler reduces what it found over the mesh of the first gradient only"
            + (", and refuses plain tensors beside DTensors" if plain else ""),
            "after an overflow in a shard of another mesh, ranks diverge" if not plain else "the first step raises",
            "use halfstep.GradScaler, whose decision covers all ranks that hold a part of the model",
        )
    yield from _scale(scaler)


def fp16_without_scaler(where: str) -> Finding:
    """The finding that fp16 is computed in without a loss scaler."""
    return Finding(
        "fp16-without-scaler",
        "error",
        where,
        "gradients are in fp16, and no loss scaler is passed or enabled",
        "gradients below 6e-8 become 0, and after an overflow weights become NaN",
        "use halfstep.GradScaler, and pass it here; or bf16, which needs none",
    )


def _is_sharded_scaler(scaler: Any) -> bool:
    return any(kind.__name__ == "ShardedGradScaler" for kind in type(scaler).__mro__)


def _scale(scaler: Any) -> Iterator[Finding]:
    if scaler is None or not hasattr(scaler, "get_scale"):
        return
    scale = float(scaler.get_scale())
    if scale >= 1 and math.isfinite(scale):
        return
    broken = scale == 0 or not math.isfinite(scale)
    yield Finding(
        "scale-collapsed",
        "error" if broken else "warning",
        type(scaler).__name__,
        f"the loss scale is {scale:g}",
        "unscaled gradients are NaN, which is not noticed as an overflow: NaN weights"
        if broken
        else "gradients are made smaller instead of larger: many steps in a row have overflowed",
        "find the first step that overflows (halfstep.integrations.doctor.first_nonfinite), and load a checkpoint from "
        "before; halfstep.GradScaler has a smallest scale",
    )


# ------------------------------------------------------------------------------------------------------------- sharding


def _shards(setup: Setup) -> Iterator[Finding]:
    plain = [
        one
        for one in setup.held
        if is_sharded(one.parameter)
        and local(one.parameter).numel() < one.parameter.numel()
        and any(not is_sharded(value) for key, value in one.state.items() if value.numel() > 1)
    ]
    if plain:
        yield Finding(
            "state-not-sharded",
            "error",
            some(names_of(plain)),
            "the parameters are DTensors, and their state is plain tensors",
            "torch.distributed.checkpoint takes the shards of all ranks for the same tensor: ranks load the state of "
            "others",
            "use an optimizer whose state has the placements of its parameters (torch's and halfstep's)",
        )
    for library, only_empty, issue, effect in _HAZARDS:
        of = [one for one in setup.held if type(one.optimizer).__module__.split(".")[0] == library]
        hit = [one for one in of if is_sharded(one.parameter)]
        hit = [one for one in hit if not only_empty or not local(one.parameter).numel()]
        if hit:
            yield Finding(
                "optimizer-cannot-shard",
                "error",
                some(names_of(hit)),
                f"{library} does not support {'shards without elements' if only_empty else 'DTensors'} ({issue})",
                effect,
                "use halfstep.AdamW, or another sharding of these parameters",
            )


# Library, whether only shards without elements are concerned, where it is reported, what happens.
_HAZARDS = (
    ("transformer_engine", True, "TransformerEngine #3202, #3207", "the step fails on some ranks, and others hang"),
    ("bitsandbytes", False, "bitsandbytes #89, #1633", "checkpoints cannot be resharded; illegal memory accesses"),
)


def _size(values: torch.Tensor | None) -> int:
    if values is None:
        return 0
    mine = local(values)
    return mine.numel() * mine.element_size()


def _unwrapped(model: torch.nn.Module) -> Any:
    for name in ("module", "_orig_mod"):
        inner = getattr(model, name, None)
        if isinstance(inner, torch.nn.Module) and not hasattr(model, "config"):
            return _unwrapped(inner)
    return model


def _weight_of(model: torch.nn.Module, getter: str) -> Any:
    get = getattr(_unwrapped(model), getter, None)
    module = get() if callable(get) else None
    return getattr(module, "weight", None)


RULES: Sequence[Rule] = (
    _values,
    _membership,
    _frozen,
    _tied,
    _moments,
    _updates,
    _decay,
    _eps,
    _steps,
    _rounded,
    _buffers,
    _scaling,
    _shards,
)
