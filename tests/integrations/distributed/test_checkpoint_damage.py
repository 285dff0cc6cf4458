"""Folders of shards are complete or absent; what is damaged, missing or foreign is named; the last good one loads."""

from __future__ import annotations

import enum
import io
import json
import os
import pickle
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import halfstep
from halfstep.integrations import checkpoint, checkpoint_files, checkpoint_sharded, unfinished_saves

SHARD = "__0_0.distcp"


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
    expected, reference = _training(float(step))
    model, optimizer = _training(-1.0)
    assert checkpoint.load(path, model=model, optimizer=optimizer) == {"at": step}
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])
    for number, entry in reference.state_dict()["state"].items():
        for key, value in entry.items():
            assert torch.equal(optimizer.canonical_state_dict()["state"][number][key], value)


def _refused(path: Path, words: str) -> None:
    """`path` is refused in these words, naming it; the model and the optimizer are as they were."""
    model, optimizer = _training(-1.0)
    before = [value.clone() for value in (*model.parameters(), *optimizer.state[model.weight].values())]
    with pytest.raises(checkpoint.CheckpointError, match=words) as error:
        checkpoint.load(path, model=model, optimizer=optimizer)
    assert str(path) in str(error.value)
    now = (*model.parameters(), *optimizer.state[model.weight].values())
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


@pytest.fixture
def two(tmp_path: Path) -> tuple[Path, Path]:
    return _save(tmp_path, 10), _save(tmp_path, 20)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_folder_holds_what_its_manifest_lists_and_torch_reads_it(two: tuple[Path, Path]) -> None:
    good, path = two
    written = json.loads((path / "manifest.json").read_text())["content"]
    assert sorted(os.listdir(path)) == sorted([*written["files"], "manifest.json"])
    assert sorted(written["files"]) == [".metadata", SHARD, "halfstep.pt"]
    assert all((path / name).stat().st_size == known["bytes"] for name, known in written["files"].items())
    assert (written["step"], written["world_size"]) == (20, 1)
    model, _ = _training(0.0)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert torch.equal(state["model"]["weight"], _training(20.0)[0].weight)
    assert torch.load(path / "halfstep.pt", weights_only=True)["state"] == {"at": 20}
    _is_good(good, 10)
    _is_good(path, 20)


def test_every_flipped_byte_is_found(two: tuple[Path, Path]) -> None:
    _, path = two
    unnoticed = []
    for name in (SHARD, ".metadata", "halfstep.pt", "manifest.json"):
        file = path / name
        whole = file.read_bytes()
        for place in range(0, len(whole), max(1, len(whole) // 60)):
            damaged = bytearray(whole)
            damaged[place] ^= 0x01
            file.write_bytes(damaged)
            if checkpoint_files.complaint(path) is None:
                unnoticed.append((name, place))
        file.write_bytes(whole)
    assert unnoticed == []
    _is_good(path, 20)


def test_a_flipped_byte_in_a_shard_names_it_and_the_good_one(two: tuple[Path, Path]) -> None:
    good, path = two
    data = bytearray((path / SHARD).read_bytes())
    data[len(data) // 2] ^= 0x10
    (path / SHARD).write_bytes(data)
    _refused(path, rf"{SHARD} does not have the checksum in manifest.json: it was changed or damaged.*{good} is good")
    assert checkpoint.newest(path.parent) == path, "only loading reads every byte"
    _is_good(good, 10)


def test_a_truncated_shard_is_named_and_newest_passes_over_it(two: tuple[Path, Path]) -> None:
    good, path = two
    whole = (path / SHARD).read_bytes()
    (path / SHARD).write_bytes(whole[:-7])
    _refused(path, rf"{SHARD} has {len(whole) - 7} of {len(whole)} bytes: it was cut off; {good} is good")
    assert checkpoint.newest(path.parent) == good
    _is_good(good, 10)


@pytest.mark.parametrize("name", [SHARD, ".metadata", "halfstep.pt"])
def test_a_missing_file_is_named(two: tuple[Path, Path], name: str) -> None:
    good, path = two
    (path / name).unlink()
    _refused(path, rf"its file {name} is missing; {good} is good")
    assert checkpoint.newest(path.parent) == good


def test_without_its_manifest_it_is_no_checkpoint(two: tuple[Path, Path]) -> None:
    _, path = two
    (path / "manifest.json").unlink()
    assert [step for step, _ in checkpoint.checkpoints(path.parent)] == [10]
    _refused(path, "its manifest.json is missing")


def test_a_shard_of_another_step_is_told(two: tuple[Path, Path]) -> None:
    good, path = two
    shutil.copy(good / SHARD, path / SHARD)
    _refused(path, rf"{SHARD} does not have the checksum in manifest.json: it is {SHARD} of {good.name}")


def test_a_shard_too_many_is_told(two: tuple[Path, Path]) -> None:
    """As a job with more ranks leaves it, that wrote into the same folder."""
    good, path = two
    shutil.copy(good / SHARD, path / "__1_0.distcp")
    _refused(path, r"it holds __1_0.distcp, which its manifest.json does not list: shards of another checkpoint")


def test_when_none_is_good_that_is_said(two: tuple[Path, Path]) -> None:
    _, path = two
    for one in two:
        (one / SHARD).unlink()
    _refused(path, "no other checkpoint in that folder is good")


def test_one_that_is_not_there_is_told_with_those_that_are(two: tuple[Path, Path]) -> None:
    good, path = two
    _refused(path.with_name("step-00000099"), rf"no checkpoint .*step-00000099; .*{good}, {path}")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_torch_alone_is_read_without_checksums_but_not_without_its_files(tmp_path: Path) -> None:
    model, optimizer = _training(5.0)
    path = tmp_path / "theirs"
    dcp.save(checkpoint_sharded.state_of(model, optimizer), checkpoint_id=path, no_dist=True)
    fresh, other = _training(0.0)
    assert checkpoint.load(path, model=fresh, optimizer=other) == {}
    assert torch.equal(fresh.weight, model.weight)
    (path / SHARD).unlink()
    _refused(path, f"its file {SHARD} is missing")
    (path / ".metadata").unlink()
    _refused(path, "neither manifest.json nor .metadata: it is not a checkpoint")


def test_torchs_optimizer_is_saved_and_loaded_as_well_and_ours_continues_it(tmp_path: Path) -> None:
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
        moment = other.canonical_state_dict()["state"][0]["exp_avg"]
        assert torch.equal(moment.float(), theirs.state_dict()["state"][0]["exp_avg"].float())
    assert torch.equal(other.canonical_state_dict()["state"][0]["master"], model.weight.float())


def test_a_folder_that_a_rank_does_not_see_is_told(tmp_path: Path) -> None:
    with pytest.raises(
        checkpoint.CheckpointError, match=r"Expected a folder that all ranks share, but rank 0 does not see .*nowhere"
    ):
        checkpoint_sharded._write_shards(tmp_path / "nowhere", {}, io.BytesIO(), checkpoint_sharded.Ranks())
    record = {SHARD: {"bytes": 5, "sha256": ""}}
    own = unfinished_saves.UnfinishedSave(tmp_path)
    arguments = (own, tmp_path / "step-00000001", 1, record, 2, checkpoint_sharded.Ranks())
    with pytest.raises(checkpoint.CheckpointError, match=rf"rank 0 sees 0 of 5 bytes of .*{SHARD}"):
        checkpoint_sharded._complete(*arguments)
    own.end()


def test_another_model_groups_or_precision_are_told(tmp_path: Path) -> None:
    path = _save(tmp_path, 1)
    model, optimizer = _training(0.0, rows=5)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"weight has shape \(3, 4\) in the checkpoint and \(5, 4\) in"
    ):
        checkpoint.load(path, model=model, optimizer=optimizer)
    with pytest.raises(checkpoint.CheckpointError, match=r"bfloat16 in the checkpoint and torch.float32 in the model"):
        checkpoint.load(path, model=_training(0.0)[0].float())
    with pytest.raises(checkpoint.CheckpointError, match=r"same tensors: 0.bias, 0.weight, bias, weight; use the same"):
        checkpoint.load(path, model=torch.nn.Sequential(_training(0.0)[0]))
    model, _ = _training(0.0)
    for groups, words in (
        ([model.weight], r"same groups: bias on one side only"),
        ([{"params": [model.weight]}, {"params": [model.bias]}], r"same groups: \[2\] parameters there, \[1, 1\] here"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=words):
            checkpoint.load(path, model=model, optimizer=halfstep.AdamW(groups))
    with pytest.raises(checkpoint.CheckpointError, match="no state of a scaler: pass scaler=None"):
        checkpoint.load(path, model=model, scaler=halfstep.GradScaler("cpu"))
    weights_only = checkpoint.save(tmp_path / "weights", 1, model=model)
    with pytest.raises(checkpoint.CheckpointError, match="no state of an optimizer; pass optimizer=None"):
        checkpoint.load(weights_only, model=model, optimizer=halfstep.AdamW(model.parameters()))
    assert checkpoint.load(weights_only, model=model) == {}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("member", [None, "__subclasses__"])
def test_members_of_enums_may_be_pickled_by_name(tmp_path: Path, member: str | None) -> None:
    """As Python 3.11.0 to 3.11.3 do, with `getattr`; of other attributes there are none."""

    class ByName(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, enum.Enum):
                return getattr, (type(value), member or value.name)
            return NotImplemented

    model, optimizer = _training(2.0)
    dcp.save(checkpoint_sharded.state_of(model, optimizer), checkpoint_id=tmp_path, no_dist=True)
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    with (tmp_path / ".metadata").open("wb") as file:
        ByName(file).dump(metadata)
    fresh, other = _training(0.0)
    if member is None:
        checkpoint.load(tmp_path, model=fresh, optimizer=other)
        assert torch.equal(fresh.weight, model.weight)
    else:
        with pytest.raises(
            checkpoint.CheckpointError, match="it asks for the attribute '__subclasses__', which no che"
        ):
            checkpoint.load(tmp_path, model=fresh, optimizer=other)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_no_code_is_run_from_a_folder(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    model, optimizer = _training(1.0)
    path = tmp_path / "theirs"
    optimizer.param_groups[0]["note"] = Evil()
    with pytest.raises(
        checkpoint.CheckpointError, match=r"optimizer\.param_groups\[0\]\.note to be .* but got a .*Evil, which load"
    ):
        checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)
    dcp.save(checkpoint_sharded.state_of(model, optimizer), checkpoint_id=path, no_dist=True)
    fresh, other = _training(0.0)
    with pytest.raises(checkpoint.CheckpointError, match=r"its file __0_0.distcp .* it asks for posix\.mkdir"):
        checkpoint.load(path, model=fresh, optimizer=other)
    (path / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(checkpoint.CheckpointError, match=r"\.metadata cannot be used: it asks for posix\.mkdir"):
        checkpoint.load(path, model=fresh, optimizer=other)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"asynchronous": True}, "Expected model to be given together with asynchronous, but got None"),
        ({"optimizer": 1}, "Expected model to be given together with optimizer, but got None: pass model="),
        ({"scaler": 1}, "Expected model to be given together with scaler, but got None"),
    ],
)
def test_what_needs_the_model_is_refused_without(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        checkpoint.save(tmp_path, 1, {}, **arguments)
    assert os.listdir(tmp_path) == []


def test_the_two_kinds_are_not_taken_for_each_other(tmp_path: Path) -> None:
    file, shards = checkpoint.save(tmp_path, 1, {"x": 1}), _save(tmp_path, 2)
    assert checkpoint.checkpoints(tmp_path) == [(1, file), (2, shards)]
    with pytest.raises(ValueError, match=r"Expected a folder of shards with model=, but got one file"):
        checkpoint.load(file, model=_training(0.0)[0])
    with pytest.raises(
        ValueError, match=r"Expected one file without model=, but got a folder of shards, .*: pass model="
    ):
        checkpoint.load(shards)
    assert [step for step, _ in checkpoint.checkpoints(_save(tmp_path, 3).parent)] == [2, 3]
    assert not file.exists(), "keep counts both"


# ------------------------------------------------------------------------------------------------------ interruptions


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_save_that_ends_early_costs_nothing(
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
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [1, 2]
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    _is_good(newest, 2)
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
    assert {SHARD, ".metadata.tmp", "halfstep.pt", "manifest.json"} < set(order[:place])
    assert order[place - 1].startswith(".halfstep-")  # the folder's list of files
    assert order[place + 1 :] == [tmp_path.name]


def test_a_step_saved_again_replaces_the_first_at_no_moment_without_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _save(tmp_path, 7)
    seen = []
    replace = os.replace

    def renamed(old: Any, new: Any) -> None:
        replace(old, new)
        seen.append(checkpoint.checkpoints(tmp_path))
        if len(seen) == 1:
            _is_good(seen[0][0][1], 7)

    monkeypatch.setattr(os, "replace", renamed)
    model, optimizer = _training(8.0)
    path = checkpoint.save(tmp_path, 7, {"at": 8}, model=model, optimizer=optimizer)
    assert len(seen) >= 2 and all([step for step, _ in found] == [7] for found in seen)
    assert os.listdir(tmp_path) == [path.name]
    _is_good(path, 8)


def test_a_replacement_that_was_interrupted_is_undone(tmp_path: Path) -> None:
    path = _save(tmp_path, 7)
    os.replace(path, tmp_path / ".replaced-step-00000007")
    ((step, found),) = checkpoint.checkpoints(tmp_path)
    assert step == 7
    _is_good(found, 7)
    _save(tmp_path, 8)
    assert sorted(os.listdir(tmp_path)) == ["step-00000007", "step-00000008"]


# ------------------------------------------------------------------------------------------------------ in background


def test_training_goes_on_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    write = checkpoint_sharded._write_shards
    monkeypatch.setattr(checkpoint_sharded, "_write_shards", lambda *a: (go.wait(20), write(*a))[1])
    model, optimizer = _training(3.0)
    extra = {"at": 3, "list": [1]}
    pending = checkpoint.save(tmp_path, 3, extra, model=model, optimizer=optimizer, asynchronous=True)
    assert not pending.done() and pending.path.name == "step-00000003" and not pending.path.exists()
    with pytest.raises(TimeoutError):
        pending.result(0.01)
    with torch.no_grad():
        model.weight.zero_()
        optimizer.state[model.weight]["exp_avg"].zero_()
        optimizer.state[model.weight]["master"].zero_()
    extra["list"].append(2)  # type: ignore[attr-defined]
    extra["at"] = 4
    go.set()
    assert pending.result() == pending.path and pending.done()
    fresh, other = _training(0.0)
    assert checkpoint.load(pending.path, model=fresh, optimizer=other) == {"at": 3, "list": [1]}
    expected, reference = _training(3.0)
    assert torch.equal(fresh.weight, expected.weight)
    for key, value in reference.state_dict()["state"][0].items():
        assert torch.equal(other.canonical_state_dict()["state"][0][key], value), key


@pytest.mark.parametrize("told", [True, False])
def test_an_error_in_the_background_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
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


def test_saves_in_the_background_follow_each_other(tmp_path: Path) -> None:
    for step in range(1, 5):
        _save(tmp_path, step, asynchronous=True, keep=3)
    pending = _save(tmp_path, 5, asynchronous=True, keep=3)
    pending.result()
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [3, 4, 5]
    _is_good(pending.path, 5)
