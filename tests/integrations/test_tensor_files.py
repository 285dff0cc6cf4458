"""Reading files of tensors: values come back as written, and malicious files do no harm."""

import contextlib
import io
import json
import os
import pickle
import resource
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import pytest
import torch
from safetensors.torch import save_file

from halfstep.integrations import checkpoint, pickles
from halfstep.integrations.tensor_files import TensorFileError, read_all, read_tensors


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def archive(path: Path, data: bytes, compression: int = zipfile.ZIP_STORED) -> Path:
    """An archive of torch.save with this pickle."""
    torch.save({"a": torch.ones(3)}, path)
    with zipfile.ZipFile(path) as file:
        entries = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in entries.items():
            file.writestr(name, data if name.endswith("data.pkl") else content)
    return path


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_safetensors_are_read_with_every_dtype_and_not_written(tmp_path: Path) -> None:
    dtypes = "float64 float32 float16 bfloat16 float8_e4m3fn int64 uint8".split()
    tensors = {dtype: torch.arange(24, dtype=torch.uint8).view(getattr(torch, dtype)) for dtype in dtypes}
    tensors |= {"0-dim": torch.tensor(1.5), "empty": torch.empty(0, 3), "flag": torch.tensor([True])}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    found = read_tensors(path)
    assert attacks.bits(found) == attacks.bits({name: tensors[name] for name in found}) and len(found) == len(tensors)
    before = path.read_bytes()
    found["float32"].zero_()
    assert path.read_bytes() == before, "nothing that is written reaches the file"


def test_nested_values_of_torch_save_are_read_by_dotted_names(tmp_path: Path) -> None:
    shared = torch.arange(4.0)
    weight = torch.randn(4, 6)
    content: dict[Any, Any] = {
        "model": {"w": shared, "b": shared[1:]},
        "list": [torch.ones(1), {"x": torch.zeros(2)}, ()],
        "transposed": weight.T,
        "part": weight[1:3, ::2],
        "parameter": torch.nn.Parameter(weight[0]),
        "complex": torch.ones(2, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "fp8": torch.ones(3).to(torch.float8_e4m3fn),
        "unsigned": torch.ones(3, dtype=torch.uint16),
        3: shared,
        "others": [torch.Size([1]), torch.float32, b"x", {1}, 1j, 1 << 70, torch.device("cpu"), "\ud800", None],
    }
    torch.save(content, tmp_path / "x.bin")
    found = read_tensors(tmp_path / "x.bin")
    names = ["model.w", "model.b", "list.0", "list.1.x", *list(content)[2:-2], "3"]
    assert list(found) == names
    expected = [shared, shared[1:], torch.ones(1), torch.zeros(2), *list(content.values())[2:-2], shared]
    assert attacks.bits(list(found.values())) == attacks.bits(expected)
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "state.pth")
    assert list(read_tensors(tmp_path / "state.pth")) == ["weight", "bias"]
    torch.save(torch.ones(2), tmp_path / "one.pt")
    assert list(read_tensors(str(tmp_path / "one.pt"))) == ["tensor"]


def test_checkpoint_folders_are_read_and_verified(tmp_path: Path) -> None:
    model = attacks.model_of()
    optimizer = attacks.optimizer_of(model)
    path = checkpoint.save(tmp_path, 3, {"ema": torch.ones(3)}, model=model)
    assert list(read_tensors(path)) == ["model.weight", "model.bias", "state.ema"]
    assert torch.equal(read_tensors(path)["model.weight"], model.weight)
    state = attacks.state_dicts(model, optimizer, "canonical")
    attacks.write_by_torch(state, tmp_path / "theirs")
    found = read_tensors(tmp_path / "theirs")
    assert torch.equal(found["optimizer.state.bias.master"], state["optimizer"]["state"]["bias"]["master"])
    shard = path / attacks.MODEL
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(TensorFileError, match=r"is damaged: its file model.* does not have the checksum"):
        read_tensors(path)
    with pytest.raises(TensorFileError, match="is a folder that is not a checkpoint, or is damaged: it has no"):
        read_tensors(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
# Headers of safetensors with 8 bytes of data.
HEADERS: dict[str, Any] = {
    "no entry": {"a": 3},
    "beyond": {"a": {**ENTRY, "data_offsets": [0, 12]}},
    "two in one place": {"a": ENTRY, "b": ENTRY},
    "deep": b'{"__metadata__":' + b"[" * 10**6 + b"]" * 10**6 + b"}",
    "no JSON": b"{x",
    "100 MB": b"{" + b" " * 10**8 + b"}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_safetensors_headers_are_refused(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x.safetensors", HEADERS[name], bytes(8))
    with pytest.raises(TensorFileError, match=r"x\.safetensors is not a safetensors file, is truncated or damaged: "):
        read_tensors(path)


@pytest.mark.timeout(120)  # a second; an hour if each name were compared with all others
def test_many_names_are_read_in_time_that_grows_with_their_number(tmp_path: Path) -> None:
    empty = {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(100_000)}
    assert len(read_tensors(write(tmp_path / "x.safetensors", empty))) == len(empty)


def test_files_of_other_formats_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x"
    for content, words in (
        (b"", "is empty; pass a checkpoint"),
        (b"1234567", "is not a safetensors file"),
        (struct.pack("<Q", 2**63) + b"{}", "is not a safetensors file"),
        (pickle.dumps({}), "is a pickle, as torch wrote files before 1.6; load it with torch.load"),
        (b"PK\x03\x04", "is not a file of torch.save, or is damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(TensorFileError, match=words):
            read_tensors(path)
    with pytest.raises(TensorFileError, match=r"nowhere.pt cannot be read: No such file or directory"):
        read_tensors(tmp_path / "nowhere.pt")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(TensorFileError, match="is a pipe or a device; pass a file of tensors"):
            read_tensors(other)


def test_an_entry_that_ends_after_its_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x/data/0", bytes(2000))
        file.writestr("x/data.pkl", bytes(10))
    content = bytearray(path.read_bytes())
    sizes = content.rindex(b"PK\x01\x02") + 20
    content[sizes : sizes + 8] = struct.pack("<II", 200, 200)  # more than there is to the end of the file
    path.write_bytes(content)
    for file in (str(path), io.BytesIO(content)):
        with pytest.raises(pickles.PickleError, match=r"is not an archive of torch\.save, or is damaged"):
            pickles.load(file, len(content))


REFUSED: dict[str, tuple[Any, str]] = {
    "code": (attacks.Call("os", "mkdir", "owned"), r"holds an object of posix\.mkdir: save a state_dict"),
    "sparse": (torch.eye(3).to_sparse(), r"holds a sparse tensor: save its to_dense\(\)"),
    "csr": (torch.eye(3).to_sparse_csr(), r"holds a sparse tensor: save its to_dense\(\)"),
    "object": (Path("x"), r"holds an object of pathlib"),
    "function": (read_tensors, r"holds an object of halfstep\.integrations\.tensor_files\.read_tensors"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_objects_are_named_and_not_executed(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    value, words = REFUSED[name]
    torch.save({"a": value, "b": torch.ones(1)}, tmp_path / "x.pt")
    with pytest.raises(TensorFileError, match=words):
        read_tensors(tmp_path / "x.pt")
    assert os.listdir(tmp_path) == ["x.pt"]


def test_memory_and_time_are_bounded_by_the_file(tmp_path: Path) -> None:
    before, begun = peak(), time.process_time()
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(1).expand(10**6, 10**6)}, path)
    assert read_tensors(path)["a"].shape == (1, 1)
    torch.save({"a": torch.ones(10**4).as_strided((5000, 5000), (1, 1))}, path)
    with pytest.raises(TensorFileError, match=r"the strides of 'a' turn 9,999 elements into 25,000,000"):
        read_tensors(path)
    indices = torch.zeros(1, 1, dtype=torch.int64).expand(1, 10**8)
    sparse = torch.sparse_coo_tensor(indices, torch.ones(1).expand(10**8), (10**12,), check_invariants=False)
    torch.save({"a": sparse}, path)
    assert path.stat().st_size < 4000
    with pytest.raises(TensorFileError, match="holds a sparse tensor"):
        read_tensors(path)
    nested: list[Any] = [torch.ones(1)]
    for _ in range(60):
        nested = [nested, nested]
    torch.save(nested, path)
    with pytest.raises(TensorFileError, match="containers that contain themselves, or each other too often"):
        read_tensors(path)
    torch.save({"a": torch.ones(3, 5)}, path)
    whole = path.read_bytes()
    for old, new in ((b"K\x03K\x05\x86", b"K\xffK\xff\x86"), (b"K\x05K\x01\x86", b"K\xffK\xff\x86")):
        assert whole.count(old) == 1
        path.write_bytes(whole.replace(old, new))
        with pytest.raises(TensorFileError, match=r"x\.pt"):
            read_tensors(path)
    with pytest.raises(TensorFileError, match="it is compressed"):
        read_tensors(archive(path, b"\x80\x02]" + b"0" * 10**8, zipfile.ZIP_DEFLATED))
    assert peak() - before < 500 << 20 and time.process_time() - begun < 10


@pytest.mark.parametrize("number", range(len(attacks.bombs())))
def test_pickle_bombs_are_refused_in_bounded_time_and_memory(tmp_path: Path, number: int) -> None:
    before, begun = peak(), time.process_time()
    with contextlib.suppress(pickles.PickleError):
        pickles.read(attacks.bombs()[number], {})
    with pytest.raises(TensorFileError, match=r"x\.pt"):
        if read_tensors(archive(tmp_path / "x.pt", attacks.bombs()[number])) == {}:
            raise TensorFileError("x.pt holds nothing")
    assert peak() - before < 200 << 20 and time.process_time() - begun < 5


def test_colliding_names_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    names = {
        "b": {"a": torch.ones(1)},
        "b.a": torch.ones(2),
        "b.a (2)": torch.ones(3),
        "\x1b[2J\n\u202e": torch.ones(4),
    }
    torch.save({**names, 3: torch.ones(5), "3": torch.ones(6)}, path)
    found = {name: tensor.numel() for name, tensor in read_tensors(path).items()}
    assert found == {"b.a": 1, "b.a (2)": 2, "b.a (2) (2)": 3, r"\x1b[2J\n\u202e": 4, "3": 5, "3 (2)": 6}
    torch.save({"a" * 2001: torch.ones(1)}, path)
    with pytest.raises(TensorFileError, match="a tensor name is longer than 2,000 characters"):
        read_tensors(path)
    save_file({"\x1b]0;x\x07": torch.ones(1)}, tmp_path / "x.safetensors")
    assert list(read_tensors(tmp_path / "x.safetensors")) == [r"\x1b]0;x\x07"]


def test_a_folder_of_hugging_face_and_one_of_several_files(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({f"w{number}": torch.ones(number)}, tmp_path / f"model-{number}.safetensors")
    save_file({"w1": torch.zeros(1)}, tmp_path / "ema.safetensors")
    torch.save({"step": torch.tensor(3)}, tmp_path / "optimizer.pt")
    torch.save({"folder": Path("x")}, tmp_path / "arguments.bin")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "step-1").mkdir()
    found = read_all([tmp_path])
    assert found.tensors.keys() == {"w1", "w2", "step"} and found.files[-1] == str(tmp_path / "optimizer.pt")
    reasons = {Path(path).name: why for path, why in found.skipped.items()}
    assert reasons.keys() == {"arguments.bin", "config.json", "model-1.safetensors", "step-1"}
    assert (
        "holds an object of pathlib" in reasons["arguments.bin"]
        and "has a tensor 'w1'" in reasons["model-1.safetensors"]
    )

    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{number}": f"model-{number}.safetensors" for number in (1, 2)}}))
    found = read_all([tmp_path])
    assert float(found.tensors["w1"]) == 1 and found.skipped[str(tmp_path / "ema.safetensors")] == "not in the index"
    assert found.lines()[0].startswith("read: ") and len(found.lines()) == 1 + len(found.skipped)

    (tmp_path / "model-2.safetensors").write_bytes(b"damaged!")
    with pytest.raises(TensorFileError, match=r"model-2.safetensors is not a safetensors file, is truncated"):
        read_all([tmp_path])
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(TensorFileError, match=r"lacks model-2.safetensors, which its index lists; add it"):
        read_all([tmp_path])
    index.write_text("[]")
    with pytest.raises(TensorFileError, match=r"index.json is damaged: .*; download it again"):
        read_all([tmp_path])
    (tmp_path / "run" / "step-1").mkdir(parents=True)
    with pytest.raises(TensorFileError, match=r"run has no file of tensors; pass a checkpoint in it, such as .*step-1"):
        read_all([tmp_path / "run"])
