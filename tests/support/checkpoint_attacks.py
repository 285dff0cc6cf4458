"""Manipulated checkpoints with valid checksums, and checks of what loading them does.

`Bases` writes good checkpoints of each kind once. `attack` manipulates one of them at random. `Guard` records what a
load must not do. fuzz_checkpoints.py uses them for thousands of checkpoints, and the tests for a few.
"""

import copy
import dataclasses
import hashlib
import importlib
import io
import json
import os
import pickle
import pickletools
import random
import shutil
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.checkpoint import atomic as files
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.optim.classes import saving

MODEL, OPTIMIZER = "model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"
CANARY = "halfstep_canary"


def model_of(value: float = 0.5) -> torch.nn.Module:
    model = torch.nn.Linear(4, 3).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def _muon(parameters: Any, lr: float) -> halfstep.Muon:
    weight, bias = parameters
    return halfstep.Muon([{"params": [weight]}, {"params": [bias], "algorithm": "adamw"}], lr=lr)


OPTIMIZERS: dict[str, Any] = {
    "ours": halfstep.AdamW,
    "offloaded": OffloadedAdamW,
    "muon": _muon,
    "sgd": partial(torch.optim.SGD, momentum=0.9),
    "adamw": torch.optim.AdamW,
}


def optimizer_of(model: torch.nn.Module, name: str = "ours") -> Any:
    """An optimizer after one step."""
    optimizer = OPTIMIZERS[name](model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.25)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def scaler_of() -> halfstep.GradScaler:
    scaler = halfstep.GradScaler("cpu", init_scale=64.0)
    scaler.scale(torch.ones(()))
    return scaler


EXTRA = {"epoch": 3, "name": "run", "order": [1, 2, 3], "rng": torch.get_rng_state(), "pair": (1.5, None)}


def state_dicts(model: torch.nn.Module, optimizer: halfstep.AdamW, form: Any = "held") -> dict[str, Any]:
    """What torch.distributed.checkpoint saves."""
    with saving(optimizer, form):
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


class Bases:
    """Good checkpoints in `folder` of the optimizer `name`: of this version, of torch, and of earlier versions."""

    def __init__(self, folder: Path, name: str = "ours") -> None:
        model = model_of()
        optimizer = optimizer_of(model, name)
        scaler = scaler_of()
        self.shards = checkpoint.save(folder / "shards", 7, EXTRA, model=model, optimizer=optimizer, scaler=scaler)
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": EXTRA}
        self.whole = checkpoint.save(folder / "whole", 7, whole)
        self.state = state_dicts(model, optimizer)
        self.theirs = folder / "theirs" / "step-00000007"
        write_by_torch(self.state, self.theirs)
        self.before = folder / "before" / "step-00000007"
        write_by_torch(state_dicts(model, optimizer, "canonical"), self.before)
        torch.save({"step": 7, "scaler": scaler.state_dict(), "state": EXTRA}, self.before / "halfstep.pt")
        seal(self.before, {"format": files.FORMAT_1, "step": 7, "world_size": 1, "files": {}})


def write_by_torch(state: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


# ---------------------------------------------------------------------------------------------------------------- seals


def content_of(path: Path) -> Any:
    return json.loads((path / files.MANIFEST).read_bytes())["content"]


def seal(path: Path, content: Any = None) -> None:
    """Write the manifest with the sizes and hashes that the files have now, if there is one or its content is given."""
    if content is None and not (path / files.MANIFEST).is_file():
        return
    content = content or content_of(path)
    content["files"] = {}
    for file in path.iterdir():
        if file.name != files.MANIFEST and file.is_file():
            data = file.read_bytes()
            content["files"][file.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal_manifest(path, content)


def seal_manifest(path: Path, content: Any) -> None:
    (path / files.MANIFEST).write_bytes(files.sealed(content))


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    tree = json.loads((path / files.STATE).read_bytes())
    changed = change(tree)
    (path / files.STATE).write_text(json.dumps(tree if changed is None else changed))


def change_header(file: Path, change: Callable[[Any], Any]) -> None:
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    changed = change(header)
    text = json.dumps(header if changed is None else changed).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


# -------------------------------------------------------------------------------------------------------------- pickles


class Call:
    """An object whose pickle makes the reader call a function by name."""

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self.call = module, name, arguments

    def __reduce__(self) -> Any:
        module, name, arguments = self.call
        return attrgetter(name)(importlib.import_module(module)), arguments


CALLS: tuple[tuple[Any, ...], ...] = (
    ("os", "system", "touch halfstep_owned"),
    ("builtins", "eval", "1/0"),
    ("builtins", "exec", "import halfstep_canary"),
    ("builtins", "open", "halfstep_owned", "w"),
    ("sys", "exit", 3),
    ("subprocess", "run", ["true"]),
    ("socket", "create_connection", ("127.0.0.1", 9)),
    ("importlib", "import_module", CANARY),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter", "halfstep_owned"),
    ("torch", "load", "x"),
    ("torch.hub", "load", "x", "y"),
    ("builtins", "bytearray", 1 << 40),
    ("builtins", "getattr", "x", "y"),
    ("pathlib", "Path.touch", Path("halfstep_owned")),
    ("torch._utils", "_rebuild_wrapper_subclass", 1, 2),
    ("torch._tensor", "_rebuild_from_type_v2", print, str, (1,), {}),
    ("collections", "deque", [1]),
    ("numpy", "zeros", 1 << 40),
)
# By name alone: what need not exist to be asked for.
NAMED = (
    *((module, name) for module, name, *_ in CALLS),
    ("torch.distributed.checkpoint", "FsspecReader"),
    ("torch.distributed.checkpoint._async_process_executor", "_AsyncCheckpointProcess"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("unittest.__main__", "main"),
    (CANARY, "run"),
)


def _global(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def bombs() -> list[bytes]:
    """Small pickles that expand to a lot of memory, or otherwise attack the reader."""
    deep = 100_000
    laugh = b"".join(b"](" + 3 * (b"h" + bytes([n])) + b"eq" + bytes([n + 1]) for n in range(60))
    tuples = b"K\x01" + b"".join(b"q" + bytes([n]) + (b"h" + bytes([n])) * 2 + b"\x87" for n in range(80))
    return [
        b"\x80\x02" + b"]" * deep + b"a" * (deep - 1) + b".",
        b"\x80\x02)" + b"\x85" * deep + b".",
        b"\x80\x02}()" + b"\x85" * deep + b"K\x01u.",
        b"\x80\x02" + b"(" * deep + b".",
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x02]" + b"".join(b"r" + struct.pack("<I", 2**32 - 1 - n * 2**20) for n in range(1000)) + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x04\x96" + struct.pack("<Q", 1 << 62) + b"x.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        b"\x80\x02X\xff\xff\xff\x7f.",
        b"\x80\x02\x8b" + struct.pack("<i", -1) + b".",
        b"\x80\x02]q\x00" + laugh + b".",
        b"\x80\x02" + tuples + b".",
        b"\x80\x02}" + tuples + b"K\x01s.",
        b"\x80\x02]q\x00h\x00a.",
        b"\x80\x02}q\x00X\x01\x00\x00\x00xh\x00s.",
        b"\x80\x04\x8f" * 50_000 + b".",
        _global(CANARY, "run") + b")R.",
        _global("os", "getcwd") + b")R.",
        b"\x80\x04\x8c\x02os\x8c\x0dsystem.__call__\x93)R.",
        b"(S'true'\nios\nsystem\n.",
        b"\x82\x01.",
        b"",
        b".",
        b"N",
    ]


NUMBERS = (-1, 0, 1, 2, 7, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, 0.5, float("nan"), float("inf"), -1.0)
ODD: tuple[Any, ...] = (
    *(*NUMBERS, -(2**70), 10**5000, True, None, "", "x", "a\nb\x1b[2J", "../../x", "/dev/zero", "\ud800", b"x" * 100),
    *([], {}, (), [[]], {"x": 1}, {1, 2}, 1 + 2j, [1, [2, [3]]], range(3), [CANARY], ("x",) * 1000),
    *(torch.zeros(()), torch.zeros(3), torch.zeros(3, 4), torch.full((3, 4), float("nan")), torch.zeros(2, 0)),
    *(torch.zeros(1).expand(1000, 1000), torch.ones(3, dtype=torch.int64), torch.ones(3, 4, dtype=torch.bool)),
    *(torch.Size([2, 2]), torch.Size([2**62] * 70), torch.float16, torch.complex128, torch.device("cpu")),
    torch.ones(3).to_sparse(),
)


def odd(rng: random.Random) -> Any:
    return Call(*rng.choice(CALLS)) if rng.random() < 0.15 else rng.choice(ODD)


def mutated_pickle(data: bytes, rng: random.Random) -> bytes:
    """A pickle with one to three instructions changed, removed, repeated or inserted."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            starts = [*(start or 0 for _, _, start in pickletools.genops(data)), len(data)]
        except Exception:
            return data
        number, other = rng.randrange(len(starts) - 1), rng.randrange(len(starts) - 1)
        begin, end = starts[number], starts[number + 1]
        code, argument = data[begin : begin + 1], data[begin + 1 : end]
        module, name = rng.choice(NAMED)
        asked = _global(rng.choice((module, CANARY)), name) + rng.choice((b")R", b"", b")\x81", b"}b"))
        damaged = bytearray(argument or b"\0")
        damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        new = rng.choice(
            (
                b"",
                data[begin:end] * 2,
                bytes([rng.choice(b"()]}.NtuasRb\x81\x85\x86\x87\x88\x8f\x90\x91\x94q0a2eohj")]) + argument,
                asked + data[begin:end],
                rng.choice((b"J", b"M", b"K", b"\x8a", b"q", b"h", b"r", b"j")) + rng.randbytes(rng.randrange(1, 9)),
                data[starts[other] : starts[other + 1]],
                code + bytes(damaged),
                code + argument[::-1],
            )
        )
        data = data[:begin] + new + data[end:]
    return data


def with_pickle(archive: bytes, rng: random.Random, change: Callable[[bytes], bytes]) -> bytes:
    """A torch archive with a changed pickle, sometimes not packed as torch does."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(out, "w") as target, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in source.infolist():
            name, data = info.filename, source.read(info)
            if name.endswith("data.pkl"):
                data = change(data)
            elif rng.random() < 0.02:
                data = b"big" if name.endswith(("byteorder", "version")) else data[: rng.randrange(len(data) + 1)]
            if rng.random() < 0.02:
                name = rng.choice(("archive/data.pkl", "../x", "data/0", "x" * 300))
            target.writestr(name, data, zipfile.ZIP_DEFLATED if rng.random() < 0.02 else zipfile.ZIP_STORED)
    return out.getvalue()


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    if not data:
        return data
    begin, width = rng.randrange(len(data)), rng.choice((1, 1, 4, 8))
    return rng.choice(
        (
            data[:begin],
            data + rng.randbytes(rng.randrange(1, 300)),
            data[:begin] + data[begin + rng.randrange(1, 200) :],
            data[:begin] + rng.choice((b"\xff" * width, bytes(width), rng.randbytes(width))) + data[begin + width :],
        )
    )


def mutated(value: Any, rng: random.Random, odd: Callable[[random.Random], Any] = odd) -> Any:
    """A copy of nested containers and objects in which one value is replaced, removed, repeated or renamed."""
    if isinstance(value, list | tuple) and value and rng.random() < 0.8:
        items, index = list(value), rng.randrange(len(value))
        items[index : index + 1] = rng.choice(([mutated(items[index], rng, odd)],) * 8 + ([], items * 2, items * 1000))
        try:
            return type(value)(items)
        except TypeError:  # of torch.Size
            return odd(rng)
    content = value if isinstance(value, dict) else vars(value) if dataclasses.is_dataclass(value) else {}
    if not content or rng.random() < 0.1:
        return odd(rng)
    key, other, content = rng.choice(list(content)), rng.choice(list(content)), dict(content)
    way = rng.random() if isinstance(value, dict) else 1.0
    if way < 0.1:
        del content[key]
    elif way < 0.17:
        content[rng.choice(("x", "step", "lr", "params", "a.b", "$tensor"))] = content.pop(key)
    elif way < 0.22:
        content[rng.choice(("extra", "params", "x\ny"))] = odd(rng)
    elif way < 0.3:
        content[key] = content[other]
    else:
        content[key] = mutated(content[key], rng, odd)
    if isinstance(value, dict):
        return content
    changed = copy.copy(value)
    vars(changed).update(content)
    return changed


# -------------------------------------------------------------------------------------------------------------- attacks

JSON_ODD: tuple[Any, ...] = (
    *(*NUMBERS, 10**400, True, None),
    *("", "x", "F64", "I8", "C64", "F4", "../../x", "/dev/zero", "\ud800", "a\nb\x1b[2J"),
    *([], {}, [[]], [1, [2, [3]]], {"x": 1}, [0] * 70, [2**62] * 2, {"$exec": "1"}, {"$tuple": [], "x": 1}),
    *({"$tensor": name} for name in ("x", "model.bias", 3, [])),
    *({"$tuple": 3}, {"$size": [-1, "x"]}, {"$dict": [[[], 1]]}, {"$dict": [1]}, {"$set": [[1]]}, {"$bytes": "&"}),
    *({"$dtype": "load"}, {"$dtype": "float"}, {"$device": "cuda:99"}, {"$array": "model.weight"}, {"$complex": [1]}),
)


def mutated_json(value: Any, rng: random.Random) -> Any:
    return mutated(value, rng, lambda rng: rng.choice(JSON_ODD))


def _tree(path: Path, rng: random.Random) -> None:
    change_json(path, lambda tree: mutated_json(tree, rng))


def _header(path: Path, rng: random.Random) -> None:
    change_header(rng.choice(sorted(path.glob("*.safetensors"))), lambda header: mutated_json(header, rng))


def _manifest(path: Path, rng: random.Random) -> None:
    content = content_of(path)
    try:
        if "tensors" in content and rng.random() < 0.8:
            content["tensors"] = mutated_json(content["tensors"], rng)
            seal_manifest(path, content)
        else:
            seal_manifest(path, mutated_json(content, rng))
    except (TypeError, ValueError, UnicodeEncodeError):
        (path / files.MANIFEST).write_text(rng.choice(("[" * 10**5, "{}", "null", '{"content": 1e999, "sha256": ""}')))


def _bytes(path: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(path.iterdir()))
    file.write_bytes(mutated_bytes(file.read_bytes(), rng))


def _swap(path: Path, rng: random.Random) -> None:
    first, second = rng.choices(sorted(path.iterdir()), k=2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def _special_file(path: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(path.iterdir()))
    file.unlink()
    rng.choice((lambda: os.mkfifo(file), file.mkdir, lambda: file.symlink_to("/dev/zero")))()


def _metadata(path: Path, rng: random.Random) -> None:
    file, way = path / ".metadata", rng.random()
    data = rng.choice(bombs()) if way < 0.15 else mutated_pickle(file.read_bytes(), rng)
    if way > 0.4:
        with suppress(Exception):  # what cannot be pickled
            data = pickle.dumps(mutated(pickle.loads(file.read_bytes()), rng), protocol=rng.choice((2, 4, 5)))
    file.write_bytes(data)


def _objects(path: Path, rng: random.Random) -> None:
    """Change what halfstep wrote next to torch's files."""
    file = path / "halfstep.pt"
    if rng.random() < 0.3:
        torch.save(mutated(torch.load(file, weights_only=True), rng), file)
    else:
        change = rng.choice((lambda data: rng.choice(bombs()), lambda data: mutated_pickle(data, rng)))
        file.write_bytes(with_pickle(file.read_bytes(), rng, change))


def _entry(path: Path, rng: random.Random) -> None:
    metadata: Any = pickle.loads((path / ".metadata").read_bytes())
    index = rng.choice(list(metadata.storage_data))
    info, shard = metadata.storage_data[index], (path / "__0_0.distcp").read_bytes()
    entry = shard[info.offset : info.offset + info.length]
    written = io.BytesIO()
    torch.save(odd(rng), written)
    mutated = with_pickle(entry, rng, lambda data: mutated_pickle(data, rng))
    replace_entry(path, index.fqn, rng.choice((mutated, written.getvalue())))


def replace_entry(path: Path, name: str, entry: bytes) -> None:
    """Write other bytes for an object into torch's shard, and update its offset in the metadata."""
    metadata: Any = pickle.loads((path / ".metadata").read_bytes())
    shard = (path / "__0_0.distcp").read_bytes()
    for index, info in metadata.storage_data.items():
        if index.fqn == name:
            info.offset, info.length = len(shard), len(entry)
    (path / "__0_0.distcp").write_bytes(shard + entry)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


ANY = (_bytes, _swap, _special_file)
OURS, TORCHS = (_tree, _header, _manifest), (_metadata, _metadata, _entry)
# By base: how it is changed.
WAYS: dict[str, tuple[Callable[[Path, random.Random], None], ...]] = {
    "shards": (*ANY, *OURS * 3),
    "whole": (*OURS * 2, _bytes),
    "theirs": (*ANY, *TORCHS * 2),
    "before": (*ANY, *TORCHS * 2, *(_objects,) * 3, _manifest),
}


def attack(bases: Bases, base: str, path: Path, rng: random.Random) -> str:
    """Write a bad checkpoint, with valid checksums. Returns a description."""
    if base == "theirs" and rng.random() < 0.2:
        try:
            write_by_torch(mutated(bases.state, rng), path)
            return "theirs, state"
        except BaseException:  # torch cannot write everything
            shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(getattr(bases, base), path)
    way = rng.choice(WAYS[base])
    way(path, rng)
    if way is not _manifest and rng.random() < 0.95:
        with suppress(ValueError, TypeError, LookupError):  # the manifest itself is damaged
            seal(path)
    return f"{base}, {way.__name__.strip('_')}"


# ---------------------------------------------------------------------------------------------------------------- guard

# By the name's beginning: what no load has any business with.
FORBIDDEN = tuple(
    "import exec compile pickle. socket. subprocess. ctypes. http. ftplib. urllib. os.system os.exec os.fork os.spawn "
    "os.posix_spawn os.remove os.rename os.mkdir os.rmdir os.truncate os.chmod os.chown os.link os.symlink os.putenv "
    "shutil. tempfile. webbrowser.".split()
)


class Guard:
    """Records forbidden events while it is active. An audit hook, which cannot be removed."""

    def __init__(self) -> None:
        self.watching = False
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching:
            return
        writes = event == "open" and len(arguments) > 2 and bool((arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR))
        if writes or event.startswith(FORBIDDEN):
            self.seen.append(f"{event} {str(arguments)[:200]}")

    @contextmanager
    def watch(self) -> Iterator[list[str]]:
        self.seen, self.watching = [], True
        try:
            yield self.seen
        finally:
            self.watching = False


def bits(value: Any) -> Any:
    """Nested state in a form that can be compared, with the bits of tensors."""
    if isinstance(value, torch.Tensor):
        plain = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
        return str(value.dtype), tuple(value.shape), plain.view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return hex(value) if type(value) is int else repr(value)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scaler: Any) -> Any:
    """The bits of everything that a failed load must not change."""
    content: dict[str, Any] = {"model": dict(model.state_dict())}
    if optimizer is not None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        content["state"] = [dict(optimizer.state.get(parameter) or {}) for parameter in parameters]
        content["groups"] = [{**group, "params": None} for group in optimizer.param_groups]
        content["canonical"] = optimizer.state_dict()
    if scaler is not None:
        content["scaler"] = scaler.state_dict()
    return bits(content)
