"""Reading files of tensors: what comes back is what was written, and nothing in a file can do harm."""

from __future__ import annotations

import json
import os
import pickle
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.integrations import checkpoint, pickle_data
from halfstep.integrations.tensor_files import TensorFileError, read_tensors

NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.bool: "BOOL",
    torch.uint8: "U8",
}  # fmt: skip


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], pad: int = 0, metadata: Any = None) -> Path:
    """By the format's definition; `pad` spaces after the header shift the data."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, tensor in tensors.items():
        piece = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        shape, ends = list(tensor.shape), [len(data), len(data) + len(piece)]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": shape, "data_offsets": ends}
        data += piece
    return write(path, header, data, pad)


def write(path: Path, header: Any, data: bytes, pad: int = 0) -> Path:
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * pad
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.mark.parametrize("pad", range(9))
def test_safetensors_of_every_dtype_and_alignment(pad: int, tmp_path: Path) -> None:
    bits = torch.arange(24, dtype=torch.uint8)
    tensors = {str(dtype): bits.view(dtype) for dtype in NAMES if dtype != torch.bool}
    tensors |= {"0-dim": torch.tensor(1.5), "empty": torch.empty(0, 3), "matrix": torch.arange(6.0).view(2, 3)}
    tensors |= {"odd": torch.tensor([1, 2, 3], dtype=torch.uint8), "last": torch.ones(5), "flag": torch.tensor([True])}
    found = read_tensors(write_safetensors(tmp_path / "model.safetensors", tensors, pad, {"format": "pt"}))
    assert list(found) == list(tensors)
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        as_bytes = (one.reshape(-1).view(torch.uint8) if one.numel() else one for one in (found[name], tensor))
        assert torch.equal(*as_bytes)


def test_nothing_that_is_written_reaches_the_file(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(4)})
    before = path.read_bytes()
    read_tensors(path)["a"].zero_()
    assert path.read_bytes() == before


def test_checkpoints_of_torch(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    content = {
        "model": {"w": shared, "b": shared[1:]},
        "list": [torch.ones(1), {"x": torch.zeros(2)}],
        "lr": 0.1,
        3: shared,
    }
    for number, zipped in enumerate((True, False)):
        path = tmp_path / f"{number}.bin"
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        found = read_tensors(path)
        assert list(found) == ["model.w", "model.b", "list.0", "list.1.x", "3"]
        assert torch.equal(found["model.b"], shared[1:])
    torch.save(torch.ones(2), tmp_path / "one.pt")
    assert list(read_tensors(str(tmp_path / "one.pt"))) == ["tensor"]
    module = torch.nn.Linear(2, 2)
    torch.save(module.state_dict(), tmp_path / "state.pth")
    assert list(read_tensors(tmp_path / "state.pth")) == ["weight", "bias"]


class Harm:
    def __reduce__(self) -> Any:
        return (eval, ("open('/nowhere/at/all')",))


def test_nothing_is_executed(tmp_path: Path) -> None:
    for zipped in (True, False):
        torch.save({"a": Harm()}, tmp_path / "harm.pt", _use_new_zipfile_serialization=zipped)
        with pytest.raises(TensorFileError, match=r"harm.pt holds Python objects beside tensors.*save a state_dict"):
            read_tensors(tmp_path / "harm.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Harm()))
    with pytest.raises(TensorFileError, match=r"plain.pt (holds Python objects|is not a checkpoint of torch.save)"):
        read_tensors(tmp_path / "plain.pt")
    circle: list[Any] = [torch.ones(1)]
    circle.append(circle)
    torch.save(circle, tmp_path / "circle.pt")
    with pytest.raises(TensorFileError, match=r"circle\.pt holds containers that contain themselves"):
        read_tensors(tmp_path / "circle.pt")


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (3, "its entry in the header is not a JSON object"),
        ({**ENTRY, "dtype": "F31"}, "dtype is 'F31'; known are F64, F32"),
        ({**ENTRY, "dtype": ["F32"]}, r"dtype is \['F32'\]"),
        ({**ENTRY, "shape": [-2]}, r"expected shape to be a list of integers, but got \[-2\]"),
        ({**ENTRY, "shape": [2.0]}, r"but got \[2.0\]"),
        ({**ENTRY, "shape": [True, 2]}, r"but got \[True, 2\]"),
        ({**ENTRY, "shape": None}, "expected shape to be a list of integers, but got None"),
        ({**ENTRY, "shape": [2**62, 2**62]}, "takes .* bytes, and 8 are given"),
        ({**ENTRY, "shape": [2**64]}, r"expected shape to be a list of integers, but got \[\d+\]"),
        ({**ENTRY, "shape": [3]}, "takes 12 bytes, and 8 are given; the file is damaged"),
        (
            {**ENTRY, "data_offsets": [0, 12]},
            "expected two data_offsets within the 8 bytes of data, but got .*: the file is",
        ),
        ({**ENTRY, "data_offsets": [8, 0]}, "expected two data_offsets within"),
        ({**ENTRY, "data_offsets": [-8, 0]}, "expected two data_offsets within"),
        ({**ENTRY, "data_offsets": [0]}, "expected two data_offsets within"),
        ({"dtype": "F32", "shape": [2]}, "expected two data_offsets within the 8 bytes of data, but got None"),
    ],
)
def test_hostile_entries(entry: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match=rf"x.safetensors, tensor 'a': (.*)?{said}"):
        read_tensors(write(tmp_path / "x.safetensors", {"a": entry}, b"\0" * 8))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; pass a checkpoint"),
        (b"1234567", "is 7 bytes long"),
        (struct.pack("<Q", 10) + b"{}", "its header would be 10 bytes long, and the file is 10"),
        (struct.pack("<Q", 2**63) + b"{}", "its header would be 9,223,372,036,854,775,808 bytes"),
        (struct.pack("<Q", 2) + b"[]", "has a header that is not a JSON object"),
        (struct.pack("<Q", 2) + b"{x", "has a header that is not JSON: "),
        (struct.pack("<Q", 2) + b"\xff\xfe", "has a header that is not JSON: "),
        (struct.pack("<Q", 14) + b'{"a":1,"a":2} ', "a name occurs in it twice"),
        (struct.pack("<Q", 200_000) + b"[" * 200_000, "has a header that is not JSON"),
    ],
)
def test_files_that_are_none(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(TensorFileError, match=f"x.safetensors {said}|x.safetensors .*{said}"):
        read_tensors(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    path = write_safetensors(folder / "x", {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.bfloat16)})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = read_tensors(path)
    except TensorFileError:
        return
    for tensor in found.values():
        np.asarray(tensor.reshape(-1).view(torch.uint8)).sum()


def test_tensors_in_safetensors_do_not_overlap(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    with pytest.raises(TensorFileError, match=r"tensor 'b': .* its bytes are another tensor's too"):
        read_tensors(write(tmp_path / "x.safetensors", {"a": entry, "b": entry}, b"\0" * 8))


def test_damaged_checkpoints_of_torch(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.arange(100.0)}, path)
    whole = path.read_bytes()
    for length in range(0, len(whole) - 1, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(TensorFileError, match=r"x\.pt"):
            read_tensors(path)
    for place in range(0, len(whole), 41):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        try:
            read_tensors(path)
        except TensorFileError as error:
            assert "x.pt" in str(error)


KINDS = pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old"])


@KINDS
def test_every_kind_of_tensor_comes_back(zipped: bool, tmp_path: Path) -> None:
    weight = torch.randn(4, 6)
    content: dict[str, Any] = {
        "transposed": weight.T,
        "part": weight[1:3, ::2],
        "expanded": torch.ones(1, 3).expand(5, 3),
        "parameter": torch.nn.Parameter(weight[0]),
        "buffer": torch.nn.Buffer(weight[1]),
        "sparse": torch.eye(3).to_sparse(),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    if zipped:  # torch cannot write these into its old files
        content |= {"fp8": torch.ones(3).to(torch.float8_e4m3fn), "unsigned": torch.ones(3, dtype=torch.uint16)}
    others = {
        "size": torch.Size([1, 2]),
        "dtype": torch.float32,
        "bytes": b"x",
        "set": {1},
        "complex": 1j,
        "big": 1 << 70,
    }
    for protocol in (2, 4):
        path = tmp_path / f"{protocol}.pt"
        beside = others if protocol == 2 else {}
        torch.save({**content, "others": beside}, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
        found = read_tensors(path)
        assert list(found) == list(content)
        for name, tensor in content.items():
            given = tensor.detach()
            assert (found[name].dtype, found[name].shape) == (given.dtype, given.shape)
            assert found[name].layout == given.layout
            same = (one.to_dense() if one.is_sparse else one for one in (found[name], given))
            assert torch.equal(*(one.resolve_conj().contiguous().view(-1).view(torch.uint8) for one in same))


@KINDS
def test_other_layouts_and_large_keys(zipped: bool, tmp_path: Path) -> None:
    path, content = tmp_path / "x.pt", {1 << 100: torch.ones(1), "csr": torch.eye(2).to_sparse_csr()}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(TensorFileError, match=r"a tensor of layout 'torch.sparse_csr', .*: save its .to_dense\(\)"):
        read_tensors(path)
    del content["csr"]
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    assert list(read_tensors(path)) == [str(1 << 100)]


@KINDS
@pytest.mark.parametrize("protocol", range(1, 6))  # in 0, persistent ids are text, and torch's are tuples
def test_every_protocol_of_pickle(protocol: int, zipped: bool, tmp_path: Path) -> None:
    beside = {"a\n'é": [1, -(1 << 70), 2.5, True, None, {1, "b"}, frozenset({2}), b"x", (1,) * 5], "class": Path}
    named: Any = {"w": torch.ones(2), "set": {torch.zeros(3)}, "beside": beside}
    path = tmp_path / "x.pt"
    torch.save(named, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert list(read_tensors(path)) == ["w", "set.0"]


def test_the_text_of_protocol_0() -> None:
    values = [1, -(1 << 70), 2.5, True, False, None, "a\n'é\u20ac", {"k": (1, (), {})}, [[]]]
    assert pickle_data.read(pickle.dumps(values, 0), {}) == values
    assert pickle_data.read(b"(lp0\nS'a\\n\\''\np1\nag1\na(dp2\nS\"b\"\nI1\nsaT\x01\0\0\0\xe9a.", {}) == [
        *("a\n'", "a\n'", {"b": 1}, "é"),
    ]
    two = pickle_data.sequence(pickle.dumps(1, 4) + pickle.dumps([2], 0), {})
    first = len(pickle.dumps(1, 4))
    assert [next(two), next(two)] == [(1, first), ([2], first + len(pickle.dumps([2], 0)))]


@KINDS
def test_a_file_asks_for_no_memory_that_it_does_not_fill(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1).expand(10**6, 10**6)}, path, _use_new_zipfile_serialization=zipped)
    (found,) = read_tensors(path).values()
    assert found.shape == (10**6, 10**6) and found.untyped_storage().nbytes() < 2000
    torch.save({"a": torch.ones(3, 5)}, path, _use_new_zipfile_serialization=zipped)
    whole = path.read_bytes()
    for old, new in ((b"K\x03K\x05\x86", b"K\xffK\xff\x86"), (b"K\x05K\x01\x86", b"K\xffK\xff\x86")):
        assert whole.count(old) == 1
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(
            TensorFileError, match=r"is damaged: a tensor of size .* ends at byte .* of a storage of 60"
        ):
            read_tensors(path)


@KINDS
def test_containers_that_several_hold(zipped: bool, tmp_path: Path) -> None:
    path, model = tmp_path / "x.pt", {"w": torch.ones(2)}
    torch.save({"model": model, "again": model}, path, _use_new_zipfile_serialization=zipped)
    assert list(read_tensors(path)) == ["model.w", "again.w"]
    nested: list[Any] = [torch.ones(1), 3]
    empty: list[Any] = []
    for _ in range(60):
        nested, empty = [nested, nested], [empty, empty]
    torch.save({"nested": nested}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(
        TensorFileError, match=r"hold one another so often that 1 tensors have 1,152,921,504,606,846,976 n"
    ):
        read_tensors(path)
    torch.save({"empty": empty, "a": torch.ones(1)}, path, _use_new_zipfile_serialization=zipped)
    assert list(read_tensors(path)) == ["a"]


def test_containers_nested_deeply(tmp_path: Path) -> None:
    """Each is looked at once, so the way to the innermost may be longer than any that was walked."""
    number = [place.to_bytes(4, "little") for place in range(300)]
    made = b"".join(b"]r" + place for place in number)
    linked = b"".join(b"j" + outer + b"j" + inner + b"a0" for outer, inner in pairwise(number))
    every = b"](" + b"".join(b"j" + place for place in number[::-60]) + b"e"
    (tmp_path / "x.pt").write_bytes(instructions(made, linked, every))
    with pytest.raises(TensorFileError, match="nests containers more than 100 deep; save a state_dict instead"):
        read_tensors(tmp_path / "x.pt")


@KINDS
def test_names(zipped: bool, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    names = {
        "b": {"a": torch.ones(1)},
        "b.a": torch.ones(2),
        "b.a (2)": torch.ones(3),
        "\x1b[2J\n\u202e": torch.ones(4),
    }
    torch.save({**names, 3: torch.ones(5), "3": torch.ones(6)}, path, _use_new_zipfile_serialization=zipped)
    found = {name: tensor.numel() for name, tensor in read_tensors(path).items()}
    assert found == {"b.a": 1, "b.a (2)": 2, "b.a (2) (2)": 3, r"\x1b[2J\n\u202e": 4, "3": 5, "3 (2)": 6}
    torch.save({"a" * 2001: torch.ones(1)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(TensorFileError, match="has a tensor whose name is longer than 2,000 characters"):
        read_tensors(path)
    write_safetensors(tmp_path / "x.safetensors", {"\x1b]0;x\x07": torch.ones(1)})
    assert list(read_tensors(tmp_path / "x.safetensors")) == [r"\x1b]0;x\x07"]


def instructions(*parts: bytes) -> bytes:
    """A file as torch wrote them before 1.6, whose content is these instructions."""
    head = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
    return head + b"\x80\x02" + b"".join(parts) + b"." + pickle.dumps([], 2)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([b"cos\nsystem\n(U\x04truetR"], "holds Python objects beside tensors, of os.system, and loading"),
        ([b"ctorch.hub\nload\n)R"], "of torch.hub.load"),
        ([b"cbuiltins\nbytearray\n(\x8a\x05\x00\x00\x00\x00\x01tR"], ""),
        ([b"})" + b"\x85" * 3 + b"K\x01s"], "it has a dict with a tuple for a key"),
        ([b"]r\xff\xff\xff\xff"], ""),
        ([b"\x8e\x00\x00\x00\x00\xff\x00\x00\x00"], "a string in it is .* bytes long"),
        ([b"c" + b"x" * 5000], r"is damaged: it cannot be decoded \(ValueError\)"),
        ([b"h\x65"], r"is damaged: it cannot be decoded \(KeyError\)"),
        ([b"]K\x01K\x02s"], "it adds a key to a list"),
        ([b"Q"], r"it cannot be decoded \(IndexError\)"),
        ([b"K\x01Q"], r"it cannot be decoded \(TypeError\)"),
        ([b"\x82\x01"], "its pickle has the instruction EXT1, which torch.save does not write"),
    ],
)
def test_hostile_instructions(parts: list[bytes], said: str, tmp_path: Path) -> None:
    (tmp_path / "x.pt").write_bytes(instructions(*parts))
    if not said:
        assert read_tensors(tmp_path / "x.pt") == {}
        return
    with pytest.raises(TensorFileError, match=said):
        read_tensors(tmp_path / "x.pt")


def test_no_byte_of_our_own_checkpoint_may_change(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, {"a": torch.ones(3), "step": 7})
    assert list(read_tensors(path)) == ["a"]
    whole = path.read_bytes()
    for place in [*range(0, len(whole), 37), *range(len(whole) - 90, len(whole))]:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(
            TensorFileError, match=r"step-00000007.pt is (damaged: |not a checkpoint of torch.save, or is )"
        ):
            read_tensors(path)


def test_folders_of_shards_are_checked(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, model=torch.nn.Linear(2, 2))
    with pytest.raises(TensorFileError, match=r"step-00000003 is a folder with a checkpoint in shards; give the file"):
        read_tensors(path)
    shard = next(path.glob("*.distcp"))
    with pytest.raises(TensorFileError, match=r"has data before its archive, as shards have|is damaged"):
        read_tensors(shard)
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(
        TensorFileError, match=r"a checkpoint in shards, which is damaged: its file .*distcp does not have"
    ):
        read_tensors(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_pipes_and_devices_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(TensorFileError, match="is a pipe or a device; give a file of tensors"):
            read_tensors(path)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match=r"nowhere.pt cannot be read: No such file or directory"):
        read_tensors(tmp_path / "nowhere.pt")
    with pytest.raises(TensorFileError, match=r"is a folder; give the file of tensors in it"):
        read_tensors(tmp_path)
