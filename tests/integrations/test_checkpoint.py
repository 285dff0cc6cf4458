"""A checkpoint is complete or absent; damaged, missing and foreign files are named; the last good one loads."""

import collections
import enum
import hashlib
import os
import pickle
import random
import re
import shutil
import signal
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import checkpoint_ranks
import forks
import fuzz_checkpoints as fuzz
import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_attacks import MODEL, OPTIMIZER
from safetensors.torch import load_file
from torch.utils._pytree import keystr, tree_leaves_with_path

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.checkpoint import atomic, storage

SUPPORT = Path(__file__).resolve().parents[1] / "support"
FILES = (MODEL, OPTIMIZER, "state.json", "manifest.json")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def _training(value: float, rows: int = 3) -> tuple[torch.nn.Module, halfstep.AdamW]:
    model = torch.nn.Linear(4, rows).bfloat16()
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, value)
    optimizer = halfstep.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def _save(folder: Path, step: int, **options: Any) -> Any:
    model, optimizer = _training(float(step))
    return checkpoint.save(folder, step, {"at": step}, model=model, optimizer=optimizer, **options)


def _is_good(path: Path, step: int) -> None:
    expected = attacks.state_of(*_training(float(step)), None)
    model, optimizer = _training(-1.0)
    assert checkpoint.load(path, model=model, optimizer=optimizer) == {"at": step}
    assert attacks.state_of(model, optimizer, None) == expected


def _refused(path: Path, words: str) -> None:
    """`path` is refused in these words, naming it; the model and the optimizer are as they were."""
    model, optimizer = _training(-1.0)
    before = attacks.state_of(model, optimizer, None)
    with pytest.raises(checkpoint.CheckpointError, match=words) as error:
        checkpoint.load(path, model=model, optimizer=optimizer)
    assert str(path) in str(error.value)
    assert attacks.state_of(model, optimizer, None) == before


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    return _save(tmp_path, 10), _save(tmp_path, 20)


# ------------------------------------------------------------------------------------------------------------- content


VALUES: dict[str, Any] = {
    "plain": [1, -0.0, float("inf"), 2**100, -1.5e-300, True, None, "\ud800 \x1b é", b"", b"\0\xff", 1 + 2j],
    "containers": {"tuple": (1, (2,)), "set": {1, 2}, "frozen": frozenset({"a"}), "size": torch.Size([2])},
    "keys": {1: "int", (1, None): "tuple", 0.5: "float", "$tensor": "no tensor", "": 0},
    "ordered": collections.OrderedDict(b=1, a=2),
    "counter": collections.Counter("abca"),
    "torch": [torch.bfloat16, torch.device("cpu"), torch.device("cuda", 1)],
    "random": [random.getstate(), np.random.default_rng(3).bit_generator.state],
    "numpy": [np.float32(2.5), np.int64(-1), np.bool_(True)],
}  # fmt: skip
TENSORS: dict[str, torch.Tensor] = {
    **{name: torch.arange(12).reshape(3, 4).to(dtype) for name, dtype in storage.DTYPES.items()},
    "number": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    "stepped": torch.arange(9)[::4],
    "one of a step": torch.arange(9.0)[4:5].as_strided((1,), (7,)),
    "expanded": torch.ones(1, 2).expand(3, 2),
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
    "negated": torch.tensor([1 + 2j, 3j]).conj().imag,
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "nan": torch.tensor([float("nan"), -0.0]),
    "a.b": torch.ones(2),
}  # fmt: skip


def test_every_value_comes_back_with_its_type_and_every_bit(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=">i4")[::-2], "b": np.zeros((0, 2), np.float16), "state": np.random.get_state()}
    state = {"values": VALUES, "tensors": TENSORS, "arrays": arrays, "a": {"b": torch.zeros(1)}, "a.b": torch.ones(1)}
    loaded = checkpoint.load(checkpoint.save(tmp_path / "new" / "folder", 7, state))
    assert repr(loaded["values"]) == repr(VALUES) and list(loaded["values"]["ordered"]) == ["b", "a"]
    assert [type(value) for value in loaded["values"]["numpy"]] == [np.float32, np.int64, np.bool_]
    expected = {name: tensor.resolve_neg() for name, tensor in TENSORS.items()}
    assert attacks.bits(loaded["tensors"]) == attacks.bits(expected)
    assert loaded["a"]["b"] == 0 and loaded["a.b"] == 1, "two tensors whose paths are spelled alike"
    a, b, random_state = loaded["arrays"].values()
    assert a.tolist() == [5, 3, 1] and a.dtype == np.int32 and b.shape == (0, 2)
    numbers = np.random.random(3).tolist()
    np.random.set_state(random_state)
    assert np.random.random(3).tolist() == numbers


class Custom:
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)
REFUSED: dict[str, tuple[Any, str]] = {
    "path": (Path("x"), r"state\.x to be a tensor.* but got a pathlib\.PosixPath, .*: save str\(\.\.\.\) of it"),
    "object": (Custom(), "but got a .*Custom, which load cannot restore"),
    "subclass": (collections.defaultdict(list), "but got a collections.defaultdict, .*: save dict"),
    "module": (torch.nn.Linear(1, 1), "Linear, which load cannot restore: save its state_dict"),
    "key": ({Path("x"): 1}, "a key of state.x to be a tensor"),
    "key with a tensor": ({(torch.ones(1),): 1}, "a key of state.x.0 not to contain tensors"),
    "cycle": (CYCLE, "nested more than 100 deep"),
    "integer": (10**4000, "state.x is an integer of more than 3,000 digits"),
    "numpy text": (np.array(["a"]), "state.x has numpy dtype <U1: save its .tolist"),
    "sparse": (torch.eye(2).to_sparse(), "tensor state.x to be dense, but got torch.sparse_coo: save its to_dense"),
    "meta": (torch.ones(1, device="meta"), "tensor state.x to be an ordinary tensor with memory, but got meta"),
    "complex128": (torch.ones(1, dtype=torch.complex128), "but got torch.complex128: save a view or a copy"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_could_not_be_read_back_are_refused_before_anything_is_written(tmp_path: Path, name: str) -> None:
    value, words = REFUSED[name]
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoint.save(tmp_path / "run", 1, {"x": value})
    assert not (tmp_path / "run").exists()


def test_options_of_a_group_and_objects_of_a_model_are_refused_alike(tmp_path: Path) -> None:
    model, optimizer = _training(1.0)
    optimizer.param_groups[0]["note"] = Custom()
    with pytest.raises(checkpoint.CheckpointError, match=r"optimizer\.param_groups\.0\.note to be .* but got a"):
        checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    model.register_buffer("phase", torch.ones(1, dtype=torch.complex128))
    with pytest.raises(checkpoint.CheckpointError, match=r"tensor model\.phase .*complex128"):
        checkpoint.save(tmp_path, 1, model=model)


def test_the_folder_holds_what_its_manifest_lists_and_others_read_the_model(two: tuple[Path, Path]) -> None:
    good, path = two
    content = attacks.content_of(path)
    assert sorted(os.listdir(path)) == sorted(FILES) == sorted([*content["files"], "manifest.json"])
    assert all((path / name).stat().st_size == known["bytes"] for name, known in content["files"].items())
    assert (content["format"], content["step"], content["world_size"]) == ("halfstep checkpoint 2", 20, 1)
    expected = dict(_training(20.0)[0].state_dict())
    assert attacks.bits(load_file(path / MODEL)) == attacks.bits(dict(sorted(expected.items(), reverse=True)))
    state = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    assert attacks.bits(state) == attacks.bits(expected)
    _is_good(good, 10)
    _is_good(path, 20)


def test_a_model_is_exported_for_other_programs(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), "b": torch.nn.Linear(3, 4)})
    model["b"].weight = model["a"].weight
    model.register_buffer("count", torch.tensor(7))
    path = checkpoint.save(tmp_path, 1, model=model)
    file = checkpoint.export(path, tmp_path / "out")
    assert file == tmp_path / "out" / "model.safetensors" and os.listdir(tmp_path / "out") == [file.name]
    found = load_file(file)
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 4), "b": torch.nn.Linear(3, 4)})
    tied["b"].weight = tied["a"].weight
    tied.register_buffer("count", torch.tensor(0))
    checkpoint.load(path, model=tied)
    assert torch.equal(tied["b"].weight, model["a"].weight) and tied["b"].weight is tied["a"].weight
    with pytest.raises(checkpoint.CheckpointError, match="holds no model: save it with model="):
        checkpoint.export(checkpoint.save(tmp_path / "whole", 1, {"x": 1}), tmp_path / "out")


def test_checkpoints_with_and_without_a_model_are_not_confused(tmp_path: Path) -> None:
    without, shards = checkpoint.save(tmp_path, 1, {"x": 1}), _save(tmp_path, 2)
    assert checkpoint.checkpoints(tmp_path) == [(1, without), (2, shards)]
    _refused(without, "it holds no model: load it without model=, then use load_model")
    with pytest.raises(ValueError, match=r"Expected model for .*, which was saved with one, but got None"):
        checkpoint.load(shards)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"asynchronous": True}, "Expected a model together with asynchronous, but got model=None"),
        ({"optimizer": 1}, "Expected a model together with optimizer, but got model=None: pass model="),
        ({"scaler": 1}, "Expected a model together with scaler, but got model=None"),
        ({"keep": 0}, "Expected keep to be an integer of at least 1, but got 0"),
        ({"keep": 2.0}, "Expected keep to be an integer of at least 1, but got 2.0"),
        ({"step": -1}, "Expected step to be an integer of at least 0, but got -1"),
        ({"step": 1.5}, "Expected step to be an integer of at least 0, but got 1.5"),
        ({"optimizer_state": "compact"}, "Expected optimizer_state to be 'held' or 'canonical', but got 'compact'"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoint.save(tmp_path, **{"step": 1, "state": {}, **arguments})
    assert os.listdir(tmp_path) == []


# -------------------------------------------------------------------------------------------------------------- damage


def test_every_flipped_byte_and_every_truncation_is_found(two: tuple[Path, Path]) -> None:
    _, path = two
    unnoticed = []
    for name in FILES:
        whole = (path / name).read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 60)):
            for damaged in (whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :], whole[:place]):
                (path / name).write_bytes(damaged)
                if atomic.is_good(path):
                    unnoticed.append((name, place, len(damaged)))
        (path / name).write_bytes(whole)
    assert unnoticed == []
    _is_good(path, 20)


def test_damage_is_named_with_a_good_checkpoint_and_newest_skips_truncated_ones(two: tuple[Path, Path]) -> None:
    good, path = two
    whole = (path / MODEL).read_bytes()
    (path / MODEL).write_bytes(whole[:-3] + bytes([whole[-3] ^ 16]) + whole[-2:])
    _refused(path, rf"{MODEL} does not have the checksum in manifest.json: it was changed or damaged.*{good} is good")
    assert checkpoint.newest(path.parent) == path, "only loading reads every byte"
    (path / MODEL).write_bytes(whole[:-7])
    _refused(path, rf"{MODEL} has {len(whole) - 7} of {len(whole)} bytes: it was cut off; {good} is good")
    assert checkpoint.newest(path.parent) == good
    shutil.copy(good / MODEL, path / MODEL)
    _refused(path, rf"{MODEL} does not have the checksum in manifest.json: it was changed or .*, or belongs to another")
    (good / MODEL).unlink()
    _refused(path, "no other checkpoint in that folder is good: delete it")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    **{name: (lambda path, name=name: (path / name).unlink(), rf"its file {name} is missing; .* is") for name in FILES},
    "manifest.json": (lambda path: (path / "manifest.json").unlink(), "it has no manifest.json"),
    "a shard of another job": (
        lambda path: shutil.copy(path / MODEL, path / "model-00002-of-00002.safetensors"),
        r"it holds model-00002-of-00002.safetensors, which its manifest.json does not list: shards of another",
    ),
    "no checkpoint": (shutil.rmtree, r"no checkpoint .*step-00000020; that folder has: .*step-00000010"),
    "4 TB": (lambda path: os.truncate(path / OPTIMIZER, 4 << 40), rf"{OPTIMIZER} has {4 << 40} of \d+ bytes"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_files_that_do_not_belong_together_are_named(two: tuple[Path, Path], name: str) -> None:
    good, path = two
    damage, words = DAMAGE[name]
    damage(path)
    begun = time.monotonic()
    _refused(path, words)
    assert checkpoint.newest(path.parent) == good and time.monotonic() - begun < 5


def test_unreadable_neighbours_are_skipped(two: tuple[Path, Path]) -> None:
    good, path = two
    for number, manifest in enumerate((b"[" * 10**5, b'{"content": 1e999}', b"\xff", b"")):
        neighbour = path.with_name(f"step-0000009{number}")
        neighbour.mkdir()
        (neighbour / "manifest.json").write_bytes(manifest)
    (path.with_name("step-00000099") / "manifest.json").mkdir(parents=True)
    content = attacks.content_of(path)
    for number, name in enumerate(("\0", "x" * 5000, "../x", "", "state.json/x", "\ud800")):
        shutil.copytree(path, neighbour := path.with_name(f"step-0000008{number}"))
        record = {"bytes": 1, "sha256": ""}
        attacks.seal_manifest(neighbour, {**content, "files": {**content["files"], name: record}})
        _refused(neighbour, ".")
    assert checkpoint.newest(path.parent) == path
    (path / MODEL).unlink()
    _refused(path, f"{good} is good")


def test_load_model_checks_everything_before_it_copies_anything() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = {name: value + 1 for name, value in before.items()}
    for wrong, words in (
        ({"1.bias": torch.zeros(6)}, r"1\.bias is \(6,\)"),
        ({"1.bias": torch.zeros(5).half()}, r"float16 in the checkpoint"),
        ({"extra": torch.zeros(1)}, "extra"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=words):
            checkpoint.load_model(model, other | wrong)
        assert attacks.bits(dict(model.state_dict())) == attacks.bits(before)
    checkpoint.load_model(model, other)
    assert attacks.bits(dict(model.state_dict())) == attacks.bits(other)


@pytest.mark.parametrize(("kind", "tries"), [(kind, max(10, int(100 * share))) for kind, share in fuzz.KINDS.items()])
def test_bad_checkpoints_run_nothing_and_change_nothing(
    kind: str, tries: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cross-section of the campaign of fuzz_checkpoints.py, which also inspects them."""
    status = fuzz.main(["--kind", kind, "--tries", str(tries), "--seed", "3"])
    printed = capsys.readouterr()
    assert status == 0 and printed.out.endswith("\n0 complaints.\n") and "refused" in printed.out, printed


# ------------------------------------------------------------------------------------------ of torch, and of before


def test_folders_of_torch_alone_are_read_but_not_without_their_files(tmp_path: Path) -> None:
    model, optimizer = _training(5.0)
    path = tmp_path / "theirs"
    attacks.write_by_torch(attacks.state_dicts(model, optimizer), path)
    fresh, other = _training(0.0)
    assert checkpoint.load(path, model=fresh, optimizer=other) == {}
    assert attacks.state_of(fresh, other, None) == attacks.state_of(model, optimizer, None)
    (path / "__0_0.distcp").unlink()
    _refused(path, r"its file '__0_0.distcp' is missing")
    (path / ".metadata").unlink()
    _refused(path, "has no manifest.json, and is not a torch.distributed.checkpoint folder with .metadata")


def test_members_of_enums_may_be_pickled_by_getattr(tmp_path: Path) -> None:
    """As Python 3.11.0 to 3.11.3 do."""

    class ByName(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented

    model, optimizer = _training(2.0)
    attacks.write_by_torch(attacks.state_dicts(model, optimizer), tmp_path)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    with (tmp_path / ".metadata").open("wb") as file:
        ByName(file).dump(metadata)
    fresh, other = _training(0.0)
    checkpoint.load(tmp_path, model=fresh, optimizer=other)
    assert torch.equal(fresh.weight, model.weight)


def test_torchs_optimizer_is_saved_and_loaded_and_halfstep_continues_it(tmp_path: Path) -> None:
    model, _ = _training(5.0)
    theirs = torch.optim.AdamW(model.parameters(), lr=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    theirs.step()
    theirs.zero_grad()
    path = checkpoint.save(tmp_path, 1, model=model, optimizer=theirs)
    for kind in (torch.optim.AdamW, halfstep.AdamW):
        fresh, _ = _training(0.0)
        other = kind(fresh.parameters())
        checkpoint.load(path, model=fresh, optimizer=other)
        assert torch.equal(fresh.weight, model.weight) and other.param_groups[0]["lr"] == 0.25
        moment = other.state[fresh.weight]["exp_avg"]
        assert torch.equal(moment.float(), theirs.state[model.weight]["exp_avg"].float())
    assert torch.equal(other.masters()[fresh.weight], model.weight.float())


def test_checkpoints_of_earlier_versions_load_and_convert_with_the_same_bits(tmp_path: Path) -> None:
    """checkpoints_before.zip was written by the version before "halfstep checkpoint 2": canonical, held, one file."""
    with zipfile.ZipFile(Path(__file__).with_name("checkpoints_before.zip")) as archive:
        archive.extractall(tmp_path / "old")

    def loaded(path: Path) -> Any:
        model = torch.nn.Linear(64, 2).bfloat16()
        optimizer = halfstep.AdamW(model.parameters(), state_dtype="8bit", seed=5)
        scaler = attacks.scaler_of()
        state = checkpoint.load(path, model=model, optimizer=optimizer, scaler=scaler)
        return attacks.state_of(model, optimizer, scaler), state

    for step in (1, 2):
        old = tmp_path / "old" / f"step-0000000{step}"
        bits, state = loaded(old)
        new = checkpoint.convert(old, tmp_path / "new" / old.name)
        assert sorted(os.listdir(new)) == sorted([*FILES, "state-00001-of-00001.safetensors"])
        assert attacks.content_of(new)["step"] == step
        renamed = checkpoint.convert(old, tmp_path / "new" / f"run{step}" / "v2-step-00000040")
        assert attacks.content_of(renamed)["step"] == 40
        bits_of_new, state_of_new = loaded(new)
        assert bits_of_new == bits and repr(state_of_new) == repr(state)
        assert state["pair"] == (1, b"x") and type(state["array"]) is np.ndarray
        assert state["generator"] == np.random.default_rng(1).bit_generator.state
        # One step of gradients of 1 from torch's seed 0, at a rate of 0.25: the first moments are 0.1, the scale 64.
        assert "0.25" in bits["groups"][0]["lr"] and float(bits["scaler"]["scale"]) == 64.0
    file = tmp_path / "old" / "step-00000003.pt"
    with pytest.raises(checkpoint.CheckpointError, match=rf"python -m halfstep convert {file} FOLDER"):
        checkpoint.load(file)
    state = checkpoint.load(checkpoint.convert(file, tmp_path / "new" / "step-00000003"))
    assert state["tokens"] == 30 and state["model"]["weight"].dtype == torch.bfloat16
    with pytest.raises(checkpoint.CheckpointError, match="step-00000003 exists: pass a folder that does not"):
        checkpoint.convert(file, tmp_path / "new" / "step-00000003")
    file.write_bytes(file.read_bytes()[:-90] + file.read_bytes()[-89:])
    with pytest.raises(checkpoint.CheckpointError, match="do not match the checksum on its last line"):
        checkpoint.convert(file, tmp_path / "new" / "step-00000004")
    shard = old / "__0_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    for call in (lambda: loaded(old), lambda: checkpoint.convert(old, tmp_path / "x")):
        with pytest.raises(checkpoint.CheckpointError, match=r"__0_0\.distcp does not have the checksum"):
            call()


def test_a_folder_of_this_format_that_four_ranks_wrote_loads_with_the_same_bits(tmp_path: Path) -> None:
    """Tensor parallelism x FSDP2 wrote checkpoint_of_four_ranks.zip on 2026-11-26 (0c8a7f7)."""
    with zipfile.ZipFile(Path(__file__).with_name("checkpoint_of_four_ranks.zip")) as archive:
        archive.extractall(tmp_path)
    model = checkpoint_ranks.model_of("bf16 split", seed=1)
    optimizer = checkpoint_ranks.optimizer_of(model, "bf16 split", lr=5.0)
    state = checkpoint.load(tmp_path / "step-00000003", model=model, optimizer=optimizer)
    # That of the same training in one process with torch 2.13; others have other bits.
    content = {keystr(path): leaf for path, leaf in tree_leaves_with_path(checkpoint_ranks.contents(model, optimizer))}
    tensors = [leaf.detach() for leaf in map(content.get, sorted(content)) if isinstance(leaf, torch.Tensor)]
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    assert (
        hashlib.sha256(torch.cat(flat).numpy().tobytes()).hexdigest()
        == "61f13ad8a2b4cdf204774e6e905be095ffb314cce39c5aef4c43dcda541b5e3f"
    )
    assert state["np"].tolist() == [0, 1, 2] and state["nest"][1] == {"a": (1, 2)} and state["a.b"].tolist() == [1, 1]


# ------------------------------------------------------------------------------------------------------ interruptions


def test_the_newest_checkpoints_are_kept_and_other_files_untouched(tmp_path: Path) -> None:
    names = "notes.txt step-1 step-00000003.pt .checkpoint-12345678 .halfstep-notes .replaced-x x.lock".split()
    names += [".halfstep-0123456789abcdef0", ".halfstep-0123456789abcdef", ".halfstep-0123456789abcdeg.lock"]
    for name in names:
        (tmp_path / name).write_text("mine")
    (tmp_path / ".halfstep-mine.removed").mkdir()
    os.mkfifo(tmp_path / ".halfstep-00000000000000ff.lock")
    mine = {*names, ".halfstep-mine.removed", ".halfstep-00000000000000ff.lock"}
    for step in (40, 10, 20, 30, 100_000_000):
        checkpoint.save(tmp_path, step, {"step": step}, keep=3 if step > 30 else 2)
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [30, 40, 100_000_000], "later ones are kept"
    assert {*os.listdir(tmp_path)} - mine == {"step-00000030", "step-00000040", "step-100000000"}
    assert mine < {*os.listdir(tmp_path)}


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_an_aborted_save_leaves_earlier_checkpoints_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, failure: BaseException
) -> None:
    for step in (1, 2):
        _save(tmp_path, step)

    def interrupted(*arguments: object) -> None:
        raise failure

    monkeypatch.setattr(os, function, interrupted)
    expected = checkpoint.CheckpointError if isinstance(failure, OSError) else KeyboardInterrupt
    with pytest.raises(expected) as error:
        _save(tmp_path, 3)
    monkeypatch.undo()
    if isinstance(failure, OSError):
        assert "step-00000003" in str(error.value) and "No space left" in str(error.value)
        assert "earlier checkpoints are untouched" in str(error.value)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
    _is_good(tmp_path / "step-00000002", 2)
    _save(tmp_path, 4)
    assert sorted(os.listdir(tmp_path)) == ["step-00000002", "step-00000004"], "what was left is cleared"


def test_everything_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def renamed(old: Any, new: Any) -> None:
        order.append(f"rename to {os.path.basename(new)}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    _save(tmp_path, 1)
    place = order.index("rename to step-00000001")
    assert {*FILES} < set(order[:place])
    assert order[place - 1] == "new"  # the folder's list of files
    assert order[place + 1 :] == [tmp_path.name]


def test_a_process_killed_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    _save(tmp_path, 7)
    program = f"""
import os, signal, sys, torch
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(SUPPORT)!r}]
import test_checkpoint as tests
replace = os.replace
def renamed(old, new):
    replace(old, new)
    os.kill(os.getpid(), signal.SIGKILL)
os.replace = renamed
tests._save(tests.Path(sys.argv[1]), 7)
"""
    killed = forks.Program(["-c", program, tmp_path])
    assert killed.wait() == -signal.SIGKILL
    assert not (tmp_path / "step-00000007").exists()
    ((step, found),) = checkpoint.checkpoints(tmp_path)
    assert step == 7 and checkpoint.newest(tmp_path) == found
    _is_good(found, 7)
    with pytest.raises(checkpoint.CheckpointError, match=re.escape(f"that folder has: {found}")):
        checkpoint.load(found.with_name("step-00000009"))
    (tmp_path / ".halfstep-notes").mkdir()
    shutil.copytree(found, tmp_path / ".halfstep-notes" / "step-00000009")
    assert checkpoint.newest(tmp_path) == found, "no other hidden folder counts"
    shutil.rmtree(tmp_path / ".halfstep-notes")
    _save(tmp_path, 8)
    assert sorted(os.listdir(tmp_path)) == ["step-00000007", "step-00000008"]
    _is_good(tmp_path / "step-00000007", 7)


def test_a_folder_that_a_rank_does_not_see_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = storage.write_shards
    monkeypatch.setattr(storage, "write_shards", lambda folder, *rest: write(Path("nowhere"), *rest))
    with pytest.raises(checkpoint.CheckpointError, match=r"Expected a folder that all ranks share, .* see nowhere"):
        _save(tmp_path, 1)
    monkeypatch.undo()
    write_file = storage.write_file
    monkeypatch.setattr(storage, "write_file", lambda *arguments: {**write_file(*arguments), "bytes": 5})
    with pytest.raises(checkpoint.CheckpointError, match=r"the first rank sees \d+ of 5 bytes of .*state"):
        _save(tmp_path, 1)
    assert os.listdir(tmp_path) == []


# ------------------------------------------------------------------------------------------------------ in background


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before this event."""
    event, write = threading.Event(), storage.write_shards
    monkeypatch.setattr(storage, "write_shards", lambda *arguments: (event.wait(20), write(*arguments))[1])
    return event


def test_training_continues_while_a_checkpoint_is_written(tmp_path: Path, go: threading.Event) -> None:
    model, optimizer = _training(3.0)
    expected = attacks.state_of(model, optimizer, None)
    state: dict[str, Any] = {"at": 3, "list": [1], "array": np.zeros(2), "tensor": torch.zeros(2)}
    pending = checkpoint.save(tmp_path, 3, state, model=model, optimizer=optimizer, asynchronous=True)
    assert not pending.done() and pending.path.name == "step-00000003" and not pending.path.exists()
    with pytest.raises(TimeoutError):
        pending.result(0.01)
    with torch.no_grad():
        model.weight.zero_()
        for value in optimizer.state[model.weight].values():
            value.zero_()
    state["list"].append(2)
    state["at"] = 4
    state["array"] += 1
    state["tensor"] += 1
    go.set()
    assert pending.result() == pending.path and pending.done()
    fresh, other = _training(0.0)
    found = checkpoint.load(pending.path, model=fresh, optimizer=other)
    assert (found["at"], found["list"], found["array"].tolist(), found["tensor"].tolist()) == (3, [1], [0, 0], [0, 0])
    assert attacks.state_of(fresh, other, None) == expected


def test_an_interrupted_wait_does_not_lose_an_asynchronous_save(tmp_path: Path, go: threading.Event) -> None:
    pending = _save(tmp_path, 1, asynchronous=True)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        _save(tmp_path, 2)
    go.set()
    _save(tmp_path, 3)
    assert pending.done() and sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("told", [True, False])
def test_an_error_of_an_asynchronous_save_is_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    _save(tmp_path, 1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    pending = _save(tmp_path, 2, asynchronous=True)
    if told:
        with pytest.raises(checkpoint.CheckpointError, match=r"step-00000002: .*No space left"):
            pending.result()
        monkeypatch.undo()
    else:
        while not pending.done():
            threading.Event().wait(0.01)
        monkeypatch.undo()
        with pytest.raises(checkpoint.CheckpointError, match=r"step-00000002: .*No space left"):
            _save(tmp_path, 3)
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [1]
    _save(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


def test_asynchronous_saves_run_one_after_the_other(tmp_path: Path) -> None:
    pendings = [_save(tmp_path, step, asynchronous=True, keep=3) for step in range(1, 6)]
    pendings[-1].result()
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [3, 4, 5]
    _is_good(pendings[-1].path, 5)
