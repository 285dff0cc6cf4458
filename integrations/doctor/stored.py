"""What a checkpoint shows of the training that wrote it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from halfstep.integrations.doctor.at_rest import holds_bf16_only
from halfstep.integrations.doctor.findings import Diagnosis, Finding, in_bytes, in_order, some
from halfstep.integrations.doctor.setup import HALF, distinct, dtypes_of
from halfstep.integrations.tensor_files import read_tensors

_STATE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master", "master_param", "momentum_buffer")
_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
_PIECE = 1 << 24  # elements looked at together


def examine_checkpoint(paths: Sequence[str | Path], progress: Callable[[float], None] = lambda done: None) -> Diagnosis:
    """Examine a checkpoint, of torch.save or safetensors, without executing anything in it.

    Args:
        paths: the file, or all parts of one checkpoint.
        progress: is called with the share of the bytes that has been read.

    Raises:
        TensorFileError: a file cannot be read, or holds something else than tensors.
    """
    tensors = {name: one for path in paths for name, one in read_tensors(path).items()}
    total = sum(_bytes(one) for one in tensors.values()) or 1
    broken: dict[str, str] = {}
    negative: list[str] = []
    rounded: list[str] = []
    same: dict[tuple[torch.dtype, torch.Size, bytes], list[str]] = defaultdict(list)
    done = 0
    for name, values in tensors.items():
        if values.layout == torch.strided and not values.is_meta:
            _look(name, values, broken, negative, rounded)
            if values.numel() >= 1024 and _bytes(values) == values.nbytes:
                same[values.dtype, values.shape, _digest(values)].append(name)
        done += _bytes(values)
        progress(done / total)
    findings = [
        *_broken(broken),
        *_negative(negative),
        *_low(tensors),
        *_rounded(rounded, tensors),
        *_empty([name for name, one in tensors.items() if not one.numel() and one.is_floating_point()]),
        *_twice([names for key, names in same.items() if len(names) > 1], tensors),
    ]
    count = f"{len(tensors):,} tensor{'s' * (len(tensors) != 1)}"
    return in_order(f"{', '.join(str(path) for path in paths)} with {count}, {in_bytes(total)}", findings)


def _bytes(values: torch.Tensor) -> int:
    return distinct(values).nbytes if values.layout == torch.strided else values.numel() * values.element_size()


def _entry(name: str) -> str:
    return name.rpartition(".")[2]


def _look(name: str, values: torch.Tensor, broken: dict[str, str], negative: list[str], rounded: list[str]) -> None:
    if not values.is_floating_point() or values.element_size() == 1 or not values.numel():
        return
    nan = inf = 0
    for piece in distinct(values).flatten().split(_PIECE):
        nan += int(piece.isnan().sum())
        inf += int(piece.isinf().sum())
        if _entry(name) in _SQUARES and bool((piece < 0).any()) and name not in negative:
            negative.append(name)
    if nan or inf:
        broken[name] = " and ".join([f"{nan:,} NaN"] * bool(nan) + [f"{inf:,} Inf"] * bool(inf))
    if values.dtype == torch.float32 and holds_bf16_only(values):
        rounded.append(name)


def _digest(values: torch.Tensor) -> bytes:
    found = hashlib.blake2b(digest_size=16)
    for piece in values.detach().flatten().split(_PIECE):
        found.update(piece.contiguous().view(torch.uint8).numpy().data)
    return found.digest()


def _broken(broken: dict[str, str]) -> list[Finding]:
    if not broken:
        return []
    first = next(iter(broken))
    return [
        Finding(
            "values-not-finite",
            "error",
            some(list(broken), "tensor"),
            f"{first} holds {broken[first]}",
            "a run that is resumed from it computes NaN",
            "load an older checkpoint; halfstep inspect counts values by class",
        )
    ]


def _negative(names: list[str]) -> list[Finding]:
    if not names:
        return []
    return [
        Finding(
            "negative-second-moment",
            "error",
            some(names, "tensor"),
            "a mean of squares holds negative numbers",
            "its root is NaN, and so are the weights after the next step",
            "load an older checkpoint; look for a conversion of the optimizer's state that is wrong",
        )
    ]


def _low(tensors: dict[str, torch.Tensor]) -> list[Finding]:
    low = [name for name, one in tensors.items() if _entry(name) in _SQUARES and one.dtype in HALF]
    if not low:
        return []
    dtypes = dtypes_of([tensors[name] for name in low])
    return [
        Finding(
            "moments-in-16-bits",
            "error",
            some(low, "tensor"),
            f"second moments are in {dtypes}",
            "unless the optimizer rounded stochastically, they grew but never fell, and steps shrank",
            "keep moments in fp32, or use halfstep.AdamW with rounding='stochastic'",
        )
    ]


def _rounded(names: list[str], tensors: dict[str, torch.Tensor]) -> list[Finding]:
    state = [name for name in names if _entry(name) in _STATE]
    weights = [name for name in names if _entry(name) not in _STATE]
    found = []
    if state:
        found.append(
            Finding(
                "state-was-rounded",
                "warning",
                some(state, "tensor"),
                "they are in fp32, and hold numbers of bf16 only",
                "unless the optimizer holds moments in bf16 or 8 bits, they were rounded to bf16 in between: a run "
                "that is resumed differs from one that goes on",
                "save what the optimizer holds; Optimizer.load_state_dict casts it to the dtype of the parameters",
            )
        )
    if weights:
        wasted = sum(_bytes(tensors[name]) for name in weights) / 2
        found.append(
            Finding(
                "weights-in-twice-the-bytes",
                "warning",
                some(weights, "tensor"),
                "they are in fp32, and hold numbers of bf16 only",
                f"{in_bytes(wasted)} of the file say nothing",
                "save these weights in bf16, which changes no value",
            )
        )
    return found


def _empty(names: list[str]) -> list[Finding]:
    if not names:
        return []
    return [
        Finding(
            "tensors-without-elements",
            "error",
            some(names, "tensor"),
            "they have no elements: shards of another rank, or weights that ZeRO-3 had not gathered",
            "the checkpoint does not hold the model",
            "gather the weights before saving, or save with torch.distributed.checkpoint",
        )
    ]


def _twice(groups: list[list[str]], tensors: dict[str, torch.Tensor]) -> list[Finding]:
    groups = [group for group in groups if len({tensors[name].data_ptr() for name in group}) > 1]
    groups = [group for group in groups if bool((tensors[group[0]] != tensors[group[0]].flatten()[0]).any())]
    if not groups:
        return []
    names = [name for group in groups for name in group]
    wasted = sum(_bytes(tensors[name]) for group in groups for name in group[1:])
    return [
        Finding(
            "saved-twice",
            "warning",
            some(names, "tensor"),
            f"{groups[0][0]} and {groups[0][1]} have the same bits in two places",
            f"{in_bytes(wasted)}; if they were tied, they are two parameters after loading",
            "tie the weights before saving, and again after loading",
        )
    ]
