"""What a checkpoint shows of the training that wrote it."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping

import torch

from halfstep.integrations.doctor.findings import Diagnosis, Finding, count, dtypes_of, find, in_bytes, listed
from halfstep.integrations.doctor.setup import HALF, distinct, holds_bf16_only, nonfinite
from halfstep.integrations.tensor_files import TensorFiles

_SQUARES = ("exp_avg_sq", "max_exp_avg_sq")
_STATE = (*_SQUARES, "exp_avg", "master", "master_param", "momentum_buffer")


def examine_checkpoint(checkpoint: TensorFiles, progress: Callable[[float], None] = lambda done: None) -> Diagnosis:
    """Examine what `read_all` has read.

    Args:
        checkpoint: all parts of one checkpoint.
        progress: is called with the share of the bytes that has been examined.
    """
    tensors = checkpoint.tensors
    total = sum(map(_bytes, tensors.values()))
    examined = f"{', '.join(checkpoint.files)} with {count(len(tensors), 'tensor')}, {in_bytes(total or 1)}"
    return Diagnosis.of(examined, _findings(tensors, total or 1, progress))


def _findings(tensors: Mapping[str, torch.Tensor], total: int, progress: Callable[[float], None]) -> Iterator[Finding]:
    broken: dict[str, str] = {}
    hits: dict[str, list[str]] = defaultdict(list)  # names of tensors, by finding
    same: dict[tuple[torch.dtype, torch.Size, bytes], list[str]] = defaultdict(list)
    done = 0
    for name, tensor in tensors.items():
        entry, strided = name.rpartition(".")[2], tensor.layout == torch.strided and not tensor.is_meta
        if tensor.is_floating_point() and not tensor.numel():
            hits["tensors-without-elements"].append(name)
        if value := nonfinite(tensor):
            broken[name] = value
        if entry in _SQUARES and strided and tensor.element_size() > 1 and bool((distinct(tensor) < 0).any()):
            hits["negative-second-moment"].append(name)
        if strided and holds_bf16_only(tensor):
            hits["state-was-rounded" if entry in _STATE else "weights-in-twice-the-bytes"].append(name)
        if entry in _SQUARES and tensor.dtype in HALF:
            hits["moments-in-16-bits"].append(name)
        if strided and tensor.numel() >= 1024 and _bytes(tensor) == tensor.nbytes:
            codes = tensor.detach().flatten().contiguous().view(torch.uint8).numpy()
            same[tensor.dtype, tensor.shape, hashlib.blake2b(codes.data, digest_size=16).digest()].append(name)
        done += _bytes(tensor)
        progress(done / total)
    if broken:
        first, value = next(iter(broken.items()))
        yield find("values-not-finite", listed([*broken], "tensor"), what=f"{first} holds {value}")
    twice = [names for names in same.values() if len({tensors[name].data_ptr() for name in names}) > 1]
    # All elements of a constant tensor are the same, which says nothing.
    twice = [names for names in twice if bool((tensors[names[0]] != tensors[names[0]].flatten()[0]).any())]
    hits["saved-twice"] = [name for names in twice for name in names]
    needless = {"saved-twice": sum(_bytes(tensors[name]) for names in twice for name in names[1:])}
    needless["weights-in-twice-the-bytes"] = (
        sum(_bytes(tensors[name]) for name in hits["weights-in-twice-the-bytes"]) // 2
    )
    for finding, names in hits.items():
        if names:
            values = dict(zip(("first", "second"), names, strict=False), bytes=needless.get(finding, 0))
            if finding == "moments-in-16-bits":
                values["what"] = f"second moments are in {dtypes_of(tensors[name] for name in names)}"
                values["stake"] = "unless they were rounded stochastically, they grew but never fell, and steps shrank"
            if finding == "state-was-rounded":
                values["keys"] = " and ".join(dict.fromkeys(name.rpartition(".")[2] for name in names))
            severity = "warning" if finding == "state-was-rounded" else None
            yield find(finding, listed(names, "tensor"), severity, **values)


def _bytes(tensor: torch.Tensor) -> int:
    return distinct(tensor).nbytes if tensor.layout == torch.strided else tensor.numel() * tensor.element_size()
