"""A checkpoint is complete or it is not there; a damaged one is refused; an earlier one is never lost."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import time
from pathlib import Path

import forks
import pytest
import torch

import halfstep
from halfstep.integrations import checkpoint, checkpoint_files


def seal(path: Path, state: object) -> None:
    """Write a checkpoint as torch pickles it, with the checksum that makes it whole."""
    torch.save(state, path)
    data = path.read_bytes()
    path.write_bytes(data + checkpoint_files.TRAILER % hashlib.sha256(data).hexdigest().encode())


SUPPORT = Path(__file__).resolve().parents[1] / "support"


def _state(step: int, numbers: int = 1000) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {
        "step": step,
        "weights": {
            "fp32": torch.randn(numbers, generator=generator),
            "bf16": torch.randn(numbers, generator=generator).bfloat16(),
        },
        "points": [[1, 0.5], [2, float("inf")]],
        "nothing": None,
    }


def _same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return a == b


def test_round_trip_keeps_every_bit_and_type(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path / "new" / "folder", 7, _state(7))
    assert path.name == "step-00000007.pt"
    assert _same(checkpoint.load(path), _state(7))


def test_plain_torch_reads_it_with_weights_only(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 7, _state(7))
    assert _same(torch.load(path, weights_only=True), _state(7))


def test_the_newest_two_are_kept_in_order(tmp_path: Path) -> None:
    for step in (5, 10, 15, 100_000_000):
        checkpoint.save(tmp_path, step, _state(step))
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [15, 100_000_000]
    assert sorted(os.listdir(tmp_path)) == ["step-00000015.pt", "step-100000000.pt"]


def test_files_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("notes.txt", "step-1.pt", "step-00000003.pt.bak"):
        (tmp_path / name).write_text("mine")
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, _state(step))
    assert {"notes.txt", "step-1.pt", "step-00000003.pt.bak"} <= set(os.listdir(tmp_path))


def test_saving_an_earlier_step_never_removes_a_later_one(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 40, _state(40))
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, _state(step))
    assert [step for step, _ in checkpoint.checkpoints(tmp_path)] == [20, 30, 40]


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, _state(1, numbers=10))
    whole = path.read_bytes()
    # all of the trailer and the archive's directory, and a comb through the rest
    places = [*range(0, len(whole), 7), *range(len(whole) - 300, len(whole))]
    unnoticed = []
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 0x01
        path.write_bytes(damaged)
        try:
            checkpoint.load(path)
            unnoticed.append(place)
        except checkpoint.CheckpointError:
            pass
    assert unnoticed == []


def test_every_truncation_is_found(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 1, _state(1, numbers=10))
    whole = path.read_bytes()
    for length in [0, 1, 50, *range(100, len(whole), 97), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(checkpoint.CheckpointError, match=r"cut off"):
            checkpoint.load(path)


def test_the_error_names_the_file_and_the_good_one(tmp_path: Path) -> None:
    good, bad = checkpoint.save(tmp_path, 10, _state(10)), checkpoint.save(tmp_path, 20, _state(20))
    data = bytearray(bad.read_bytes())
    data[len(data) // 2] ^= 0x10
    bad.write_bytes(data)
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.load(bad)
    assert str(bad) in str(error.value)
    assert f"{good} is good" in str(error.value)
    good.write_bytes(good.read_bytes()[:-5])
    with pytest.raises(checkpoint.CheckpointError, match="no other checkpoint in that folder is good: delete it"):
        checkpoint.load(bad)


def test_a_missing_file_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    there = checkpoint.save(tmp_path, 10, _state(10))
    with pytest.raises(checkpoint.CheckpointError) as error:
        checkpoint.load(tmp_path / "step-00000099.pt")
    assert "step-00000099.pt" in str(error.value) and str(there) in str(error.value)


def test_a_neighbour_that_cannot_be_read_hides_no_checkpoint(tmp_path: Path) -> None:
    good = checkpoint.save(tmp_path, 10, _state(10))
    (tmp_path / "step-00000020.pt").symlink_to("/proc/self/mem")  # its first bytes are an I/O error
    model = torch.nn.Linear(2, 2)
    path = checkpoint.save(tmp_path, 30, model=model, optimizer=halfstep.AdamW(model.parameters()), keep=9)
    manifest = checkpoint_files.read_manifest(path)
    checkpoint_files.write_manifest(path, 30, 1, {**manifest["files"], "x" * 300: {"bytes": 1, "sha256": ""}})
    assert checkpoint.newest(tmp_path) == good
    with pytest.raises(checkpoint.CheckpointError, match=rf"its file x+ is missing; {re.escape(str(good))} is good"):
        checkpoint.load(path, model=model)


def test_a_folder_without_its_manifest_and_its_state_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    path = checkpoint.save(tmp_path, 10, {"tokens": 5}, model=model, optimizer=halfstep.AdamW(model.parameters()))
    for name in ("manifest.json", "halfstep.pt"):
        (path / name).unlink()
    with pytest.raises(checkpoint.CheckpointError, match=r"its manifest.json is missing; if torch wrote it, rename it"):
        checkpoint.load(path, model=model)
    assert checkpoint.load(path.rename(tmp_path / "of-torch"), model=model) == {}


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_that_is_removed_while_it_is_read_is_named(
    sharded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(2, 2)
    kept = {"model": model, "optimizer": halfstep.AdamW(model.parameters())} if sharded else {}
    path, later = (checkpoint.save(tmp_path, step, {"tokens": step}, **kept) for step in (10, 20))
    read = checkpoint_files.read_archive

    def pruned_meanwhile(path: Path, *more: int) -> object:
        checkpoint.save(tmp_path, 30, {"tokens": 30}, **kept, keep=2)
        return read(path, *more)

    monkeypatch.setattr(checkpoint_files, "read_archive", pruned_meanwhile)
    with pytest.raises(
        checkpoint.CheckpointError, match=rf"no checkpoint {path}; .* there are: {re.escape(str(later))}, "
    ):
        checkpoint.load(path, **({"model": model} if sharded else {}))


@pytest.mark.parametrize("dtype", [torch.int4, torch.uint1, torch.qint8], ids=str)
@pytest.mark.filterwarnings("ignore:.*quantized")
def test_dtypes_that_cannot_be_saved_are_named(dtype: torch.dtype, tmp_path: Path) -> None:
    tensor = torch.zeros(3, dtype=torch.uint8).view(dtype)
    with pytest.raises(checkpoint.CheckpointError, match=rf"but got {dtype}, .*: save it as .view\(torch.uint8\)"):
        checkpoint.save(tmp_path, 1, {"w": tensor})
    assert checkpoint.load(checkpoint.save(tmp_path, 1, {"w": tensor.view(torch.uint8)}))["w"].tolist() == [0, 0, 0]


def test_no_code_is_run_from_a_checkpoint(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    with pytest.raises(
        checkpoint.CheckpointError,
        match=r"Expected state\['x'\] to be .* but got a .*Evil, which load could not restore",
    ):
        checkpoint.save(tmp_path, 1, {"x": Evil()})
    path = tmp_path / "step-00000001.pt"
    seal(path, {"x": Evil()})
    with pytest.raises(checkpoint.CheckpointError, match=r"cannot be used: it asks for posix\.mkdir, which no"):
        checkpoint.load(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_an_interrupt_inside_a_save_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    checkpoint.save(tmp_path, 1, _state(1))
    checkpoint.save(tmp_path, 2, _state(2))

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, function, interrupted)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 3, _state(3))
    monkeypatch.undo()
    assert sorted(os.listdir(tmp_path)) == ["step-00000001.pt", "step-00000002.pt"]
    assert _same(checkpoint.load(tmp_path / "step-00000002.pt"), _state(2))


def test_the_file_is_on_disk_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda old, new: (order.append("replace"), replace(old, new))[1])
    checkpoint.save(tmp_path, 1, _state(1))
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_a_failed_write_is_an_error_and_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, _state(1))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(checkpoint.CheckpointError, match=r"step-00000002\.pt.*No space left.*untouched"):
        checkpoint.save(tmp_path, 2, _state(2))
    assert os.listdir(tmp_path) == ["step-00000001.pt"]


def test_kill_9_at_any_moment_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    newest = -1
    for delay in (0.0, 0.003, 0.011, 0.02, 0.037):
        process = forks.Program([SUPPORT / "save_forever.py", tmp_path])
        announced = int(process.stdout.readline())  # one save is done, the next has begun
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        later = process.stdout.read().split()
        process.wait()
        announced = int(later[-1]) if later else announced
        found = checkpoint.checkpoints(tmp_path)
        assert found[-1][0] >= announced > newest
        for step, path in found:
            state = checkpoint.load(path)
            assert state["step"] == step and torch.equal(state["weights"], torch.full((300_000,), float(step)))
        newest = found[-1][0]
    left = [name for name in os.listdir(tmp_path) if name.startswith(".")]
    checkpoint.save(tmp_path, newest + 1, _state(1))
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")], f"not cleared: {left}"


@pytest.mark.parametrize(
    ("step", "keep", "word"),
    [(-1, 2, "Expected step to be at least 0, but got -1"), (1, 0, "Expected keep to be at least 1, but got 0")],
)
def test_numbers_out_of_range_are_refused(tmp_path: Path, step: int, keep: int, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        checkpoint.save(tmp_path, step, {}, keep=keep)
    assert os.listdir(tmp_path) == []


def test_load_model_checks_everything_before_it_copies_anything() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = {name: value + 1 for name, value in before.items()}
    for name, wrong, words in (
        ("1.bias", torch.zeros(6), r"1\.bias is \(6,\)"),
        ("1.bias", torch.zeros(5).half(), r"float16 in the checkpoint"),
        ("extra", torch.zeros(1), "extra"),
    ):
        with pytest.raises(checkpoint.CheckpointError, match=words):
            checkpoint.load_model(model, {**other, name: wrong})
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    checkpoint.load_model(model, other)
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())
