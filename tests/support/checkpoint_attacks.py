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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.checkpoint import folder as files
from halfstep.integrations.optim.classes import saving

MODEL, OPTIMIZER = "model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors"
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


def state_dicts(model: torch.nn.Module, optimizer: halfstep.AdamW, form: Any = "held") -> dict[str, Any]:
    """What torch.distributed.checkpoint saves."""
    with saving(optimizer, form):
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


class Bases:
    """Good checkpoints in `folder`: of this version, of torch, and of earlier versions."""

    def __init__(self, folder: Path) -> None:
        model = model_of()
        optimizer = optimizer_of(model)
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
        seal(self.before, {"format": files.BEFORE, "step": 7, "world_size": 1, "files": {}})


def write_by_torch(state: Any, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path, no_dist=True)


# ---------------------------------------------------------------------------------------------------------------- seals


def content_of(path: Path) -> Any:
    """The content of a manifest."""
    return json.loads((path / files.MANIFEST).read_bytes())["content"]


def seal(path: Path, content: Any = None) -> None:
    """Write the manifest with the sizes and hashes that the files have now, if there is one or its content is given."""
    if content is None and not (path / files.MANIFEST).is_file():
        return
    content = content or content_of(path)
    content["files"] = {}
    for one in path.iterdir():
        if one.name != files.MANIFEST and one.is_file():
            data = one.read_bytes()
            content["files"][one.name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    seal_manifest(path, content)


def seal_manifest(path: Path, content: Any) -> None:
    """Write a manifest with this content."""
    (path / files.MANIFEST).write_bytes(files.sealed(content))


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    """Change what is in state.json."""
    tree = json.loads((path / files.STATE).read_bytes())
    changed = change(tree)
    (path / files.STATE).write_text(json.dumps(tree if changed is None else changed))


def change_header(file: Path, change: Callable[[Any], Any]) -> None:
    """Change the header of a safetensors file."""
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


def mutated_tree(value: Any, rng: random.Random, odd: Callable[[random.Random], Any] = odd) -> Any:
    """A nested state in which one value is replaced, removed, repeated or renamed."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        content = dict(value)
        way = rng.random()
        if way < 0.1:
            del content[key]
        elif way < 0.17:
            content[rng.choice(("x", "step", "lr", "params", "a.b", "$tensor"))] = content.pop(key)
        elif way < 0.22:
            content[rng.choice(("extra", "params", "x\ny"))] = odd(rng)
        else:
            content[key] = mutated_tree(content[key], rng, odd)
        return content
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], mutated_tree(value[place], rng, odd), *value[place + 1 :]]
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

JSON_ODD: tuple[Any, ...] = (
    *(-1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**400, 0.5, float("nan"), float("inf"), -1.0, True, None, "", "x"),
    *("../../x", "/dev/zero", "\ud800", "a\nb\x1b[2J", [], {}, [[]], [1, [2, [3]]], {"x": 1}, [0] * 70, [2**62] * 2),
    *(
        {"$tensor": "x"},
        {"$tensor": "model.bias"},
        {"$tensor": 3},
        {"$tensor": []},
        {"$tuple": 3},
        {"$size": [-1, "x"]},
    ),
    *({"$dict": [[[], 1]]}, {"$dict": [1]}, {"$set": [[1]]}, {"$bytes": "&"}, {"$dtype": "load"}, {"$dtype": "float"}),
    *({"$device": "cuda:99"}, {"$array": "model.weight"}, {"$complex": [1]}, {"$exec": "1"}, {"$tuple": [], "x": 1}),
)


def mutated_json(value: Any, rng: random.Random) -> Any:
    return mutated_tree(value, rng, lambda rng: rng.choice(JSON_ODD))


def attack(bases: Bases, path: Path, rng: random.Random) -> str:
    """Write a bad checkpoint, with valid checksums. Returns a description."""
    base = rng.choice(("shards", "shards", "shards", "theirs", "before"))
    shutil.copytree(getattr(bases, base), path)
    ways = {"bytes": _bytes, "swap": _swap, "file": _special_file}
    ways |= {"state.json": _tree, "header": _header, "parts": _parts} if base == "shards" else {}
    ways |= {"metadata": _metadata, "opcodes": _opcodes, "entry": _entry, "bomb": _bomb} if base != "shards" else {}
    ways |= {"manifest": _manifest} if base != "theirs" else {"state": lambda path, rng: _state(bases, path, rng)}
    ways |= {"beside": _beside} if base == "before" else {}
    way = rng.choice([*ways, *list(ways)[3:], *list(ways)[3:]])
    ways[way](path, rng)
    if way not in ("manifest", "parts") and rng.random() < 0.95:
        with suppress(ValueError, TypeError, LookupError):  # the manifest itself is damaged
            seal(path)
    return f"{base}, {way}"


def attack_whole(bases: Bases, path: Path, rng: random.Random) -> str:
    """Write a bad checkpoint of whole state dicts, which `load_model` and `load_optimizer` take."""
    shutil.copytree(bases.whole, path)
    way = rng.choice(("state.json", "state.json", "header", "parts", "bytes"))
    {"state.json": _tree, "header": _header, "parts": _parts, "bytes": _bytes}[way](path, rng)
    if way != "parts":
        with suppress(ValueError, TypeError, LookupError):
            seal(path)
    return f"whole, {way}"


def _tree(path: Path, rng: random.Random) -> None:
    def change(tree: Any) -> Any:
        part = rng.choice(list(tree))
        return {**tree, part: mutated_json(tree[part], rng)} if rng.random() < 0.9 else mutated_json(tree, rng)

    change_json(path, change)


def _header(path: Path, rng: random.Random) -> None:
    change_header(rng.choice(sorted(path.glob("*.safetensors"))), lambda header: mutated_json(header, rng))


def _parts(path: Path, rng: random.Random) -> None:
    """The shape, dtype or parts of a tensor as the manifest lists them."""
    content = content_of(path)
    name = rng.choice(list(content["tensors"]))
    entry = content["tensors"][name]
    way = rng.randrange(4)
    if way == 0:
        entry["dtype"] = rng.choice(("F64", "I8", "BOOL", "C64", "F8_E4M3", "F4", "float32", *JSON_ODD))
    elif way == 1:
        entry["shape"] = [rng.choice((0, 1, 2, 7, 2**31, 2**40, 2**62, one)) for one in entry["shape"]]
    elif way == 2 and entry["parts"]:
        entry["parts"] = rng.choice((entry["parts"] * 2, entry["parts"] * 1000, [], entry["parts"][0]))
    else:
        content["tensors"][name] = mutated_json(entry, rng)
    seal_manifest(path, content)


def _manifest(path: Path, rng: random.Random) -> None:
    try:
        seal_manifest(path, mutated_json(content_of(path), rng))
    except (TypeError, ValueError, UnicodeEncodeError):
        (path / files.MANIFEST).write_text(rng.choice(("[" * 10**5, "{}", "null", '{"content": 1e999, "sha256": ""}')))


def _bytes(path: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(path.iterdir()))
    file.write_bytes(mutated_bytes(file.read_bytes(), rng))


def _swap(path: Path, rng: random.Random) -> None:
    one, other = rng.choice(sorted(path.iterdir())), rng.choice(sorted(path.iterdir()))
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


def _special_file(path: Path, rng: random.Random) -> None:
    file = rng.choice(sorted(path.iterdir()))
    file.unlink()
    rng.choice((lambda: os.mkfifo(file), file.mkdir, lambda: file.symlink_to("/dev/zero")))()


def _metadata(path: Path, rng: random.Random) -> None:
    (path / ".metadata").write_bytes(mutated_metadata((path / ".metadata").read_bytes(), rng))


def _opcodes(path: Path, rng: random.Random) -> None:
    (path / ".metadata").write_bytes(mutated_pickle((path / ".metadata").read_bytes(), rng))


def _bomb(path: Path, rng: random.Random) -> None:
    bomb = rng.choice(bombs())
    file = path / "halfstep.pt"
    if file.exists() and rng.random() < 0.5:
        file.write_bytes(with_pickle(file.read_bytes(), rng, lambda data: bomb))
    else:
        (path / ".metadata").write_bytes(bomb)


def _beside(path: Path, rng: random.Random) -> None:
    file = path / "halfstep.pt"
    if rng.random() < 0.5:
        file.write_bytes(with_pickle(file.read_bytes(), rng, lambda data: mutated_pickle(data, rng)))
    else:
        torch.save(mutated_tree(torch.load(file, weights_only=True), rng), file)


def _state(bases: Bases, path: Path, rng: random.Random) -> None:
    shutil.rmtree(path)
    try:
        write_by_torch(mutated_tree(bases.state, rng), path)
    except BaseException:  # torch cannot write everything
        path.mkdir(exist_ok=True)


def _entry(path: Path, rng: random.Random) -> None:
    """Change one entry of the shard, and update its offset in the metadata."""
    metadata: Any = pickle.loads((path / ".metadata").read_bytes())
    info = metadata.storage_data[rng.choice(list(metadata.storage_data))]
    shard = path / "__0_0.distcp"
    data = shard.read_bytes()
    entry = data[info.offset : info.offset + info.length]
    if rng.random() < 0.5:
        entry = with_pickle(entry, rng, lambda data: mutated_pickle(data, rng))
    else:
        written = io.BytesIO()
        torch.save(odd(rng), written)
        entry = written.getvalue()
    info.offset, info.length = len(data), len(entry)
    shard.write_bytes(data + entry)
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
        plain = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
        return str(value.dtype), tuple(value.shape), plain.view(torch.uint8).numpy().tobytes()
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
