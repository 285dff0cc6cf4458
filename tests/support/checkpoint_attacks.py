"""Manipulated checkpoints with valid checksums, and checks of what a load of them does.

`Bases` writes good checkpoints of each kind once. `attack` manipulates one of them at random. `Guard` records what a
load must not do. fuzz_checkpoints.py uses them for thousands of checkpoints, and the tests for a few.
"""

from __future__ import annotations

import hashlib
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
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import halfstep
from halfstep.integrations import checkpoint, checkpoint_files, checkpoint_sharded
from halfstep.kernels.block_codes import encode

SHARD = "__0_0.distcp"
CANARY = "halfstep_canary"


def model_of(value: float = 0.5) -> torch.nn.Module:
    model = torch.nn.Linear(4, 3).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    return model


def optimizer_of(model: torch.nn.Module, kind: str = "ours") -> torch.optim.Optimizer:
    if kind == "ours":
        optimizer: torch.optim.Optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    elif kind == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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


class Bases:
    """Good checkpoints in `folder`: one file, shards of halfstep, of torch, and of the state as it is held."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = model_of()
        optimizer = optimizer_of(model)
        whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "extra": EXTRA}
        self.file = checkpoint.save(folder / "file", 7, checkpoint.gather(whole))
        self.shards = checkpoint.save(folder / "shards", 7, EXTRA, model=model, optimizer=optimizer, scaler=scaler_of())
        self.state = checkpoint_sharded.state_of(model, optimizer)
        self.theirs = folder / "theirs"
        write_by_torch(self.state, self.theirs)
        self.held_state = checkpoint_sharded.state_of(model, optimizer, held=True)
        for entry in self.held_state["optimizer"]["state"].values():
            for moment in ("exp_avg", "exp_avg_sq"):  # of this small model in fp32
                values = entry.pop(moment)
                coded = encode(values, len(values), signed=moment == "exp_avg")
                entry[f"{moment}_codes"], entry[f"{moment}_scale"] = coded
        self.held = folder / "held"
        write_by_torch(self.held_state, self.held)


def write_by_torch(state: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


# ---------------------------------------------------------------------------------------------------------------- seals


def seal_file(path: Path, archive: bytes) -> None:
    path.write_bytes(archive + checkpoint_files.TRAILER % hashlib.sha256(archive).hexdigest().encode())


def unsealed(path: Path) -> bytes:
    return path.read_bytes()[: -checkpoint_files.TRAILER_LENGTH]


def seal_folder(path: Path) -> None:
    """Recompute the manifest, if there is one."""
    if not (path / checkpoint_files.MANIFEST).is_file():
        return
    records = {}
    for one in path.iterdir():
        if one.name != checkpoint_files.MANIFEST and one.is_file():
            data = one.read_bytes()
            records[one.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    checkpoint_files.write_manifest(path, 7, 1, records)


def seal_manifest(path: Path, content: Any) -> None:
    text = json.dumps(content, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    (path / checkpoint_files.MANIFEST).write_text(json.dumps({"content": content, "sha256": digest}))


# -------------------------------------------------------------------------------------------------------------- pickles


class Call:
    """An object whose pickle makes the reader call a function by name."""

    def __init__(self, module: str, name: str, *arguments: Any) -> None:
        self.what = module, name, arguments

    def __reduce__(self) -> Any:
        module, name, arguments = self.what
        __import__(module)
        found: Any = sys.modules[module]
        for part in name.split("."):
            found = getattr(found, part)
        return found, arguments


CALLS: tuple[tuple[str, str, tuple[Any, ...]], ...] = (
    ("os", "system", ("touch halfstep_owned",)),
    ("builtins", "eval", ("1/0",)),
    ("builtins", "exec", ("import halfstep_canary",)),
    ("builtins", "open", ("halfstep_owned", "w")),
    ("builtins", "print", ("halfstep",)),
    ("sys", "exit", (3,)),
    ("subprocess", "run", (["true"],)),
    ("socket", "create_connection", (("127.0.0.1", 9),)),
    ("importlib", "import_module", (CANARY,)),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter", ("halfstep_owned",)),
    ("torch", "load", ("x",)),
    ("torch.hub", "load", ("x", "y")),
    ("builtins", "bytearray", (1 << 40,)),
    ("builtins", "getattr", ("x", "y")),
    ("pathlib", "Path.touch", (Path("halfstep_owned"),)),
    ("torch._utils", "_rebuild_wrapper_subclass", (1, 2)),
    ("torch._tensor", "_rebuild_from_type_v2", (print, str, (1,), {})),
    ("collections", "deque", ([1],)),
    ("numpy", "zeros", (1 << 40,)),
)


# By name alone: what need not be there to be asked for.
NAMED = (
    *((module, name) for module, name, _ in CALLS),
    ("torch.distributed.checkpoint", "FsspecReader"),
    ("torch.distributed.checkpoint._async_process_executor", "_AsyncCheckpointProcess"),
    ("torch.distributed.checkpoint.metadata", "os.system"),
    ("unittest.__main__", "main"),
    (CANARY, "run"),
)


def _global(module: str, name: str) -> bytes:
    return b"c" + module.encode() + b"\n" + name.encode() + b"\n"


def bombs() -> list[bytes]:
    """Small pickles that expand to a lot of memory, or otherwise attack the reader."""
    deep = 100_000
    laugh = b"\x80\x02]q\x00" + b"".join(
        b"](" + b"h" + bytes([n]) + b"h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(60)
    )
    tuples = b"\x80\x02K\x01" + b"".join(b"q" + bytes([n]) + (b"h" + bytes([n])) * 2 + b"\x87" for n in range(80))
    return [
        b"\x80\x02" + b"]" * deep + b"a" * (deep - 1) + b".",
        b"\x80\x02)" + b"\x85" * deep + b".",
        b"\x80\x02}(" + b")" + b"\x85" * deep + b"K\x01u.",
        b"\x80\x02" + b"(" * deep + b".",
        b"\x80\x02]r\xff\xff\xff\xff.",
        b"\x80\x02]" + b"".join(b"r" + struct.pack("<I", 2**32 - 1 - n * 2**20) for n in range(1000)) + b".",
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",
        b"\x80\x04\x96" + struct.pack("<Q", 1 << 62) + b"x.",
        b"\x80\x04\x95" + struct.pack("<Q", 1 << 62) + b"N.",
        b"\x80\x02X\xff\xff\xff\x7f.",
        b"\x80\x02\x8b" + struct.pack("<i", -1) + b".",
        laugh + b".",
        tuples + b".",
        b"\x80\x02}" + tuples[2:] + b"K\x01s.",
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


ODD: tuple[Any, ...] = (
    *(-1, 0, 1, 2**31, 2**62, 2**63, 2**64, -(2**70), 10**5000, 0.5, float("nan"), float("inf"), -1.0, True, None),
    *("", "x", "a\nb\x1b[2J", "../../x", "\ud800", b"", b"x" * 100, [], {}, (), [[]], {"x": 1}, {1, 2}, complex(1, 2)),
    *(torch.zeros(()), torch.zeros(3), torch.zeros(3, 4), torch.full((3, 4), float("nan")), torch.zeros(2, 0)),
    *(torch.zeros(1).expand(1000, 1000), torch.ones(3, dtype=torch.int64), torch.ones(3, 4, dtype=torch.bool)),
    *(torch.Size([2, 2]), torch.float16, torch.device("cpu"), torch.ones(3).to_sparse(), [1, [2, [3]]], range(3)),
)


def odd(rng: random.Random) -> Any:
    if rng.random() < 0.15:
        module, name, arguments = rng.choice(CALLS)
        return Call(module, name, *arguments)
    return rng.choice(ODD)


def mutated_pickle(data: bytes, rng: random.Random) -> bytes:
    """A pickle with one to three instructions changed, removed, repeated or inserted."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        try:
            places = [place for _, _, place in pickletools.genops(data)]
        except Exception:
            return data
        number = rng.randrange(len(places))
        begin = places[number] or 0
        end = (places[number + 1] or 0) if number + 1 < len(places) else len(data)
        code, argument = data[begin : begin + 1], data[begin + 1 : end]
        way = rng.randrange(8)
        if way == 0:
            new = b""
        elif way == 1:
            new = data[begin:end] * 2
        elif way == 2:
            new = bytes([rng.choice(b"()]}.NtuasRb\x81\x85\x86\x87\x88\x8f\x90\x91\x94q0a2eohj")]) + argument
        elif way == 3:
            module, name = rng.choice(NAMED)
            new = (
                _global(rng.choice((module, CANARY)), name)
                + rng.choice((b")R", b"", b")\x81", b"}b"))
                + data[begin:end]
            )
        elif way == 4:
            new = rng.choice((b"J", b"M", b"K", b"\x8a", b"q", b"h", b"r", b"j")) + bytes(
                rng.randrange(256) for _ in range(rng.randrange(1, 9))
            )
        elif way == 5:
            other = rng.randrange(len(places) - 1)
            new = data[places[other] : places[other + 1]]
        elif way == 6 and argument:
            changed = bytearray(argument)
            changed[rng.randrange(len(changed))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            new = code + bytes(changed)
        else:
            new = code + argument[::-1]
        data = data[:begin] + new + data[end:]
    return data


def rezipped(archive: bytes, rng: random.Random, change: Callable[[str, bytes], bytes]) -> bytes:
    """A torch archive with changed entries, sometimes not packed as torch does."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(out, "w") as target, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in source.infolist():
            data = change(info.filename, source.read(info))
            how = zipfile.ZIP_DEFLATED if rng.random() < 0.02 else zipfile.ZIP_STORED
            name = (
                info.filename if rng.random() < 0.98 else rng.choice(("archive/data.pkl", "../x", "data/0", "x" * 300))
            )
            target.writestr(name, data, how)
    return out.getvalue()


def with_pickle(archive: bytes, rng: random.Random, change: Callable[[bytes], bytes]) -> bytes:
    def changed(name: str, data: bytes) -> bytes:
        if name.endswith("data.pkl"):
            return change(data)
        if name.endswith(("byteorder", "version")) and rng.random() < 0.02:
            return b"big"
        return data[: rng.randrange(len(data) + 1)] if rng.random() < 0.02 else data

    return rezipped(archive, rng, changed)


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    way = rng.randrange(5)
    if not changed or way == 0:
        return bytes(changed[: rng.randrange(len(changed) + 1)])
    if way == 1:
        return bytes(changed) + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 300)))
    if way == 2:
        begin = rng.randrange(len(changed))
        return bytes(changed[:begin] + changed[begin + rng.randrange(1, 200) :])
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = rng.randrange(len(changed))
        width = rng.choice((1, 1, 4, 8))
        changed[place : place + width] = rng.choice((b"\xff" * width, bytes(width), os.urandom(width)))[
            : len(changed) - place
        ]
    return bytes(changed)


def mutated_tree(value: Any, rng: random.Random) -> Any:
    """A nested state in which one value is replaced, removed, repeated or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        content = dict(value)
        way = rng.random()
        if way < 0.1:
            del content[key]
        elif way < 0.17:
            content[rng.choice(("x", "step", "lr", "params", "a.b", 0))] = content.pop(key)
        elif way < 0.22:
            content[rng.choice(("extra", "params", "x\ny"))] = odd(rng)
        else:
            content[key] = mutated_tree(content[key], rng)
        return content
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], mutated_tree(value[place], rng), *value[place + 1 :]]
    return odd(rng)


# ------------------------------------------------------------------------------------------------------------- metadata


def mutated_metadata(data: bytes, rng: random.Random) -> bytes:
    """torch's `.metadata` with one field of its objects changed."""
    metadata: Any = pickle.loads(data)  # our own
    names = list(metadata.state_dict_metadata)
    name = rng.choice(names)
    entry = metadata.state_dict_metadata[name]
    index = rng.choice(list(metadata.storage_data))
    info = metadata.storage_data[index]
    numbers = (0, 1, 2, 7, 2**31, 2**40, 2**62, 2**63 - 1)
    way = rng.randrange(14)
    if way == 0:
        info.offset = rng.choice((*numbers, *ODD))
    elif way == 1:
        info.length = rng.choice((*numbers, *ODD))
    elif way == 2:
        info.relative_path = rng.choice(("../x", "/etc/passwd", "/dev/zero", ".", "", "x", "halfstep.pt", *ODD))
    elif way == 3:
        info.transform_descriptors = rng.choice((["zstd"], [CANARY], 7))
    elif way == 4:
        places = metadata.planner_data
        places[name] = rng.choice(
            (
                *(
                    (),
                    ("model",),
                    ("model", 3),
                    ("optimizer", "state"),
                    ("optimizer", "state", "weight", "a", "b", "c"),
                ),
                *(("optimizer", "param_groups", 10**9, "lr"), ("optimizer", "param_groups", "0", "params"), (1, 2)),
                *(places[rng.choice(names)], None, "x", ("x",) * 1000, ("model", "weight"), [1]),
            )
        )
    elif way == 5:
        metadata.state_dict_metadata[rng.choice((name, "x"))] = metadata.state_dict_metadata[rng.choice(names)]
    elif way == 6:
        metadata.storage_data[index] = metadata.storage_data[rng.choice(list(metadata.storage_data))]
    elif way == 7:
        del (metadata.state_dict_metadata if rng.random() < 0.5 else metadata.planner_data)[name]
    elif way == 8:
        del metadata.storage_data[index]
    elif way == 9:
        setattr(metadata, rng.choice(("state_dict_metadata", "planner_data", "storage_data", "storage_meta")), odd(rng))
    elif hasattr(entry, "chunks"):
        if way == 10:
            entry.size = torch.Size(rng.choice((one, *numbers)) for one in entry.size)
        elif way == 11:
            chunk = entry.chunks[0]
            which = rng.choice(("offsets", "sizes"))
            setattr(chunk, which, torch.Size(rng.choice(numbers) for _ in range(rng.choice((0, 1, 2, 70)))))
        elif way == 12:
            entry.properties.dtype = rng.choice((torch.float64, torch.int8, torch.bool, torch.complex128, torch.uint16))
        else:
            entry.chunks = rng.choice(([], entry.chunks * 2, entry.chunks * 1000, None, [1]))
    else:
        metadata.state_dict_metadata[name] = odd(rng)
    return pickle.dumps(metadata, protocol=rng.choice((2, 4, 5)))


# -------------------------------------------------------------------------------------------------------------- attacks


def attack_file(bases: Bases, path: Path, rng: random.Random) -> str:
    """Write a bad checkpoint in one file, with a valid checksum. Returns a description."""
    archive = unsealed(bases.file)
    way = rng.choice(("pickle", "pickle", "pickle", "state", "state", "bytes", "bomb", "trailer"))
    if way == "pickle":
        seal_file(path, with_pickle(archive, rng, lambda data: mutated_pickle(data, rng)))
    elif way == "state":
        state = torch.load(io.BytesIO(archive), weights_only=True)
        written = io.BytesIO()
        torch.save(mutated_tree(state, rng), written)
        seal_file(path, written.getvalue())
    elif way == "bytes":
        seal_file(path, mutated_bytes(archive, rng))
    elif way == "bomb":
        bomb = rng.choice(bombs())
        seal_file(path, with_pickle(archive, rng, lambda data: bomb))
    else:
        path.write_bytes(mutated_bytes(bases.file.read_bytes(), rng))
    return way


def attack_folder(bases: Bases, path: Path, rng: random.Random) -> str:
    """Write a bad checkpoint in shards, with valid checksums. Returns a description."""
    shutil.copytree(rng.choice((bases.shards, bases.shards, bases.theirs, bases.held)), path)
    way = rng.choice(
        (
            *("metadata", "metadata", "metadata", "opcodes", "opcodes", "tensors", "objects", "objects", "bytes"),
            *("bomb", "beside", "beside", "manifest", "swap", "state", "state", "state", "state", "file"),
        )
    )
    file = path / ".metadata"
    if way == "metadata":
        file.write_bytes(mutated_metadata(file.read_bytes(), rng))
    elif way == "opcodes":
        file.write_bytes(mutated_pickle(file.read_bytes(), rng))
    elif way in ("tensors", "objects"):
        _attack_entry(path, rng, tensors=way == "tensors")
    elif way == "bytes":
        file = rng.choice(sorted(path.iterdir()))
        file.write_bytes(mutated_bytes(file.read_bytes(), rng))
    elif way == "bomb":
        file.write_bytes(rng.choice(bombs()))
    elif way == "beside" and (path / "halfstep.pt").exists():
        file = path / "halfstep.pt"
        if rng.random() < 0.5:
            file.write_bytes(with_pickle(file.read_bytes(), rng, lambda data: mutated_pickle(data, rng)))
        else:
            torch.save(mutated_tree(torch.load(file, weights_only=True), rng), file)
    elif way == "manifest" and (path / "manifest.json").exists():
        content = json.loads((path / "manifest.json").read_bytes())["content"]
        changed = mutated_tree(content, rng)
        try:
            seal_manifest(path, changed)
        except (TypeError, ValueError):
            (path / "manifest.json").write_text(
                rng.choice(("[" * 10**5, "{}", "null", '{"content": 1e999, "sha256": ""}'))
            )
        return way
    elif way == "swap":
        one, other = rng.choice(sorted(path.iterdir())), rng.choice(sorted(path.iterdir()))
        first, second = one.read_bytes(), other.read_bytes()
        one.write_bytes(second)
        other.write_bytes(first)
    elif way == "state":
        shutil.rmtree(path)
        try:
            write_by_torch(mutated_tree(rng.choice((bases.state, bases.held_state)), rng), path)
        except BaseException:  # torch cannot write everything
            path.mkdir(exist_ok=True)
    elif way == "file":
        file = rng.choice(sorted(path.iterdir()))
        file.unlink()
        kind = rng.randrange(3)
        if kind == 0:
            os.mkfifo(file)
        elif kind == 1:
            file.mkdir()
        else:
            file.symlink_to("/dev/zero")
    if rng.random() < 0.95:
        seal_folder(path)
    return way


def _attack_entry(path: Path, rng: random.Random, tensors: bool) -> None:
    """Change one entry of the shard, and update its offset in the metadata."""
    metadata: Any = pickle.loads((path / ".metadata").read_bytes())
    shard = (path / SHARD).read_bytes()
    kinds = {index: hasattr(metadata.state_dict_metadata[index.fqn], "chunks") for index in metadata.storage_data}
    index = rng.choice([index for index, kind in kinds.items() if kind == tensors])
    info = metadata.storage_data[index]
    entry = shard[info.offset : info.offset + info.length]
    if rng.random() < 0.5:
        entry = with_pickle(entry, rng, lambda data: mutated_pickle(data, rng))
    else:
        written = io.BytesIO()
        torch.save(odd(rng), written)
        entry = written.getvalue()
    info.offset, info.length = len(shard), len(entry)
    (path / SHARD).write_bytes(shard + entry)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


# ---------------------------------------------------------------------------------------------------------------- guard

# By the name's beginning: what no load has any business with.
FORBIDDEN = (
    *("import", "exec", "compile", "pickle.", "socket.", "subprocess.", "ctypes.", "http.", "ftplib.", "urllib."),
    *(
        "os.system",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.spawn",
        "os.remove",
        "os.rename",
        "os.mkdir",
        "os.rmdir",
    ),
    *(
        "os.truncate",
        "os.chmod",
        "os.chown",
        "os.link",
        "os.symlink",
        "os.putenv",
        "shutil.",
        "tempfile.",
        "webbrowser.",
    ),
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
        self.seen = []
        self.watching = True
        try:
            yield self.seen
        finally:
            self.watching = False


def bits(value: Any) -> Any:
    """Nested state in a form that can be compared, with the bits of tensors."""
    if isinstance(value, torch.Tensor):
        plain = value.detach().contiguous()
        return (
            str(plain.dtype),
            tuple(plain.shape),
            plain.view(torch.uint8).numpy().tobytes() if plain.dim() else plain.item().__repr__(),
        )
    if isinstance(value, dict):
        return {key: bits(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(one) for one in value]
    return hex(value) if type(value) is int else repr(value)


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scaler: Any) -> Any:
    """The bits of everything that a failed load must not change."""
    held: dict[str, Any] = {"model": bits(dict(model.state_dict()))}
    if optimizer is not None:
        own = [optimizer.state.get(parameter) for group in optimizer.param_groups for parameter in group["params"]]
        held["state"] = bits([None if one is None else dict(one) for one in own])
        held["groups"] = [
            {key: bits(value) for key, value in group.items() if key != "params"} for group in optimizer.param_groups
        ]
        held["canonical"] = bits(optimizer.state_dict())
    if scaler is not None:
        held["scaler"] = bits(scaler.state_dict())
    return held
