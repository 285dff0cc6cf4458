"""A load that fails, early or late, on one rank or on two, leaves model, optimizer and scaler unchanged."""

import functools
import io
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import failing_loads
import pytest
import rank_processes
import torch
import torch.multiprocessing

import halfstep
from halfstep.integrations import checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*lr_scheduler.step")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> attacks.Bases:
    return attacks.Bases(tmp_path_factory.mktemp("bases"))


Make = Callable[[Path, attacks.Bases], None]


def _torch(change: Callable[[Any], Any]) -> Make:
    """A folder as torch alone writes it of a changed state."""

    def make(path: Path, bases: attacks.Bases) -> None:
        state = pickle.loads(pickle.dumps(bases.state))
        change(state)
        attacks.write_by_torch(state, path)

    return make


def _changed(change: Callable[[Path], Any], base: str = "shards", sealed: bool = True) -> Make:
    """A copy of a base, changed, with valid checksums unless not `sealed`."""

    def make(path: Path, bases: attacks.Bases) -> None:
        shutil.copytree(getattr(bases, base), path)
        change(path)
        if sealed:
            attacks.seal(path)

    return make


def _json(change: Callable[[Any], Any]) -> Make:
    def changed(tree: Any) -> None:
        change(tree)

    return _changed(lambda path: attacks.change_json(path, changed))


def _group(name: str, value: Any) -> Make:
    return _json(lambda tree: tree["optimizer"]["param_groups"][0].update({name: value}))


def _entry(name: str, value: Any, instead: str = "") -> Make:
    def change(state: Any) -> None:
        entry = state["optimizer"]["state"]["weight"]
        entry.pop(instead, None)
        entry[name] = value

    return _torch(change)


def _scale(name: str, value: Any) -> Make:
    return _json(lambda tree: tree["scaler"].update({name: value}))


def _header(change: Callable[[Any], Any]) -> Make:
    return _changed(lambda path: attacks.change_header(path / FILE, change))


def _manifest(change: Callable[[Any], Any]) -> Make:
    def changed(path: Path) -> None:
        content = attacks.content_of(path)
        change(content)
        attacks.seal_manifest(path, content)

    return _changed(changed, sealed=False)


def _part(**values: Any) -> Make:
    return _manifest(lambda content: content["tensors"][MOMENT].update(values))


def _metadata(change: Callable[[Any], Any]) -> Make:
    """A folder of torch with changed metadata."""

    def changed(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return _changed(changed, "before")


def _stored(name: str, value: Any) -> Make:
    def change(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            if index.fqn == MOMENT:
                setattr(info, name, value)

    return _metadata(change)


def _in_shard(name: str, value: Any) -> Make:
    """Another object in torch's shard than `name`."""
    written = io.BytesIO()
    torch.save(value, written)
    return _changed(lambda path: attacks.replace_entry(path, name, written.getvalue()), "before")


MOMENT = "optimizer.state.weight.exp_avg"
FILE = attacks.OPTIMIZER
TUPLES: Any = functools.reduce(lambda item, _: (item, item), range(80), 1)
# By what is wrong: the folder, and words of the error. The optimizer that loads is ours, where nothing else is said.
FAILURES: dict[str, tuple[Make, str]] = {
    "lr -1": (_group("lr", -1.0), "Invalid learning rate: -1.0"),
    "lr tensor of many": (_group("lr", {"$tensor": MOMENT}), "Tensor lr must be 1-element"),
    "betas three": (_group("betas", {"$tuple": [0.9, 0.9, 0.9]}), "betas"),
    "differentiable": (_group("differentiable", True), "differentiable"),
    "groups' names": (_group("params", ["weight", "bias", "more"]), "same groups: more in only one of them"),
    "groups' type": (_group("params", 3), "is not a state_dict with 'state' and 'param_groups'"),
    "no params": (_json(lambda tree: tree["optimizer"]["param_groups"][0].pop("params")), "is not a state_dict with"),
    "no moment": (_json(lambda tree: tree["optimizer"]["state"]["weight"].pop("exp_avg_sq")), "lacks 'exp_avg_sq'"),
    "moment's shape": (_entry("exp_avg", torch.zeros(7)), "'exp_avg' in the state"),
    "moment's dtype": (_entry("exp_avg", torch.zeros(3, 4, dtype=torch.int64)), "to have a floating-point dtype"),
    "step's shape": (_entry("step", torch.zeros(2)), "'step'"),
    "master's shape": (_entry("master", torch.zeros(3), instead="master_remainder"), "'master' in the state"),
    "no optimizer": (_json(lambda tree: tree.pop("optimizer")), "no state of an optimizer"),
    "no model": (_json(lambda tree: tree.pop("model")), "holds no model"),
    "no weight": (_json(lambda tree: tree["model"].pop("weight")), "same tensors: weight"),
    "model's shape": (_torch(lambda s: s["model"].update(weight=torch.zeros(9, 9).bfloat16())), r"weight is \(9, 9\)"),
    "model's dtype": (_torch(lambda s: s["model"].update(bias=torch.zeros(3))), "float32 in the checkpoint"),
    "model's object": (
        _json(lambda tree: tree["model"].update(bias="x")),
        "bias is not a dense tensor in the checkpoint",
    ),
    "scale 0": (_scale("scale", 0.0), "Expected scale to be a number .*, but got 0.0"),
    "no key of the scaler": (_json(lambda tree: tree["scaler"].pop("growth_factor")), "but got one without growth_fac"),
    "no scaler": (_json(lambda tree: tree.update(scaler=None)), "no state of a scaler"),
    "scaler's type": (_json(lambda tree: tree.update(scaler=[1])), "."),
    "state's type": (_json(lambda tree: tree.update(state=[1])), "its state is a list"),
    "unknown tag": (_json(lambda tree: tree["state"].update(x={"$exec": "1"})), r"values are damaged: .*'\$exec'"),
    "unknown tensor": (_json(lambda tree: tree["state"].update(x={"$tensor": "x"})), "values are damaged"),
    "deep": (
        _changed(lambda path: (path / "state.json").write_text("[" * 10**6)),
        "state.json is damaged: RecursionError",
    ),
    "cut state.json": (_changed(lambda path: (path / "state.json").write_text("{")), "state.json is damaged: JSON"),
    "header's dtype": (
        _header(lambda h: h["state.weight.exp_avg"].update(dtype="I32")),
        r"\(3, 4\) torch.int32 in its",
    ),
    "header's shape": (_header(lambda h: h["state.weight.exp_avg"].update(shape=[4, 3])), r"\(4, 3\) torch.float32 in"),
    "header's offsets": (
        _header(lambda h: h["state.weight.exp_avg"].update(data_offsets=[0, 2**40])),
        "cannot be read",
    ),
    "damage": (
        _changed(lambda path: (path / FILE).open("r+b").write(b"?"), sealed=False),
        "does not have the checksum",
    ),
    "huge": (_part(shape=[2**40], parts=[[FILE, [0], [2**40]]]), r"its tensors need .* bytes, and its files have"),
    "overlap": (_part(parts=[[FILE, [0, 0], [2, 4]], [FILE, [1, 0], [1, 4]]]), "parts that overlap"),
    "hole": (_part(parts=[[FILE, [0, 0], [2, 4]]]), "parts that do not cover it exactly"),
    "beyond": (_part(parts=[[FILE, [1, 0], [3, 4]]]), "a part that extends beyond it"),
    "negative": (_part(parts=[[FILE, [-1, 0], [4, 4]], [FILE, [0, 0], [-1, 4]]]), "a part that extends beyond it"),
    "unlisted file": (_part(parts=[["../x", [0, 0], [3, 4]]]), "is in '../x', which is not listed"),
    "dtype unknown": (_part(dtype="Q9"), "is damaged: KeyError"),
    "manifest outside": (_manifest(lambda content: content["files"].update({"../x": {}})), "does not list files"),
    "manifest empty": (_manifest(lambda content: content.pop("files")), "does not list files"),
    "no state.json": (_manifest(lambda content: content["files"].pop("state.json")), "does not list state.json"),
    "later format": (_manifest(lambda content: content.update(format="halfstep checkpoint 3")), "upgrade halfstep"),
    "tensor in torch's shard": (_in_shard(MOMENT, torch.zeros(2, 2)), r"exp_avg' is \(2, 2\) torch.float32 in its fil"),
    "none in torch's shard": (_in_shard(MOMENT, {"x": 1}), "exp_avg' is no tensor in its file"),
    "code in torch's shard": (
        _in_shard("optimizer.param_groups.0.lr", attacks.Call("os", "getcwd")),
        r"an object of posix\.getcwd",
    ),
    "torch's offset": (_stored("offset", 2**40), "does not match the file"),
    "torch's file": (_stored("relative_path", "../x"), "is not in the folder"),
    "torch's offsets, slow to hash": (
        _metadata(lambda metadata: setattr(metadata.state_dict_metadata[MOMENT].chunks[0], "offsets", TUPLES)),
        "it has an index without a name",
    ),
    "torch's size": (_metadata(lambda metadata: metadata.state_dict_metadata.pop(MOMENT)), "KeyError"),
}


@pytest.mark.parametrize("optimizer_has_state", [True, False])
@pytest.mark.parametrize("name", FAILURES)
def test_a_failed_load_changes_nothing(
    bases: attacks.Bases, tmp_path: Path, name: str, optimizer_has_state: bool
) -> None:
    make, words = FAILURES[name]
    path = tmp_path / "of-torch"
    make(path, bases)
    model = attacks.model_of(-1.0)
    optimizer: Any = attacks.optimizer_of(model) if optimizer_has_state else halfstep.AdamW(model.parameters())
    scaler = attacks.scaler_of() if (path / "manifest.json").exists() else None
    before = attacks.state_of(model, optimizer, scaler)
    with pytest.raises(checkpoint.CheckpointError, match=words):
        checkpoint.load(path, model=model, optimizer=optimizer, scaler=scaler)
    assert attacks.state_of(model, optimizer, scaler) == before


@pytest.mark.parametrize("saved", ["sgd", "adamw", "ours"])
@pytest.mark.parametrize("loads", ["sgd", "adamw", "ours", "broken"])
def test_one_optimizers_state_in_another_fits_or_changes_nothing(tmp_path: Path, saved: str, loads: str) -> None:
    model = attacks.model_of(2.0)
    optimizer = attacks.optimizer_of(model, saved)
    path = checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer, optimizer_state="canonical")
    fresh = attacks.model_of(-1.0)
    other = attacks.optimizer_of(fresh, "sgd" if loads == "broken" else loads)
    if loads == "broken":  # as one that finds fault when all is done

        def refuse(optimizer: Any) -> None:
            raise RuntimeError("no")

        other.register_load_state_dict_post_hook(refuse)
    before = attacks.state_of(fresh, other, None)
    groups, entries = other.param_groups, other.state[fresh.weight]
    try:
        checkpoint.load(path, model=fresh, optimizer=other)
    except checkpoint.CheckpointError:
        assert saved == "sgd" or loads == "broken"
        assert attacks.state_of(fresh, other, None) == before
        assert other.param_groups is groups and other.state[fresh.weight] is entries, "schedulers hold them"
        return
    assert loads != "broken" and (loads, saved) != ("ours", "sgd")
    assert torch.equal(fresh.weight, model.weight)


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), SystemExit(3), GeneratorExit(), MemoryError()])
def test_any_exception_during_a_load_restores_everything(bases: attacks.Bases, raised: BaseException) -> None:
    model = attacks.model_of(-1.0)
    optimizer, scaler = attacks.optimizer_of(model), halfstep.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    scaler.scale(torch.zeros(()))
    before = attacks.state_of(model, optimizer, scaler)

    load = scaler.load_state_dict

    def ended(state: Any) -> None:
        load(state)
        raise raised

    scaler.load_state_dict = ended  # type: ignore[method-assign]
    expected = checkpoint.CheckpointError if isinstance(raised, Exception) else type(raised)
    with pytest.raises(expected):
        checkpoint.load(bases.shards, model=model, optimizer=optimizer, scaler=scaler)
    assert attacks.state_of(model, optimizer, scaler) == before


def test_no_load_changes_the_files(bases: attacks.Bases) -> None:
    held = {path.name: path.read_bytes() for path in bases.shards.iterdir()}
    model = attacks.model_of(-1.0)
    checkpoint.load(bases.shards, model=model, optimizer=attacks.optimizer_of(model), scaler=attacks.scaler_of())
    assert {path.name: path.read_bytes() for path in bases.shards.iterdir()} == held


def test_a_failed_load_raises_on_both_ranks_and_changes_nothing(tmp_path: Path) -> None:
    found = rank_processes.run(failing_loads.run, 2, tmp_path)
    assert found[0].keys() == found[1].keys() and len(found[0]) > 10
    for rank in found:
        for name, (error, unchanged) in rank.items():
            assert unchanged, name
            assert error is not None, f"{name} loaded"
    for name, (error, _) in found[1].items():
        if name.startswith("rank 1 is stopped"):
            assert error.startswith("SystemExit")
            assert "rank 1: it was ended by SystemExit" in found[0][name][0]
        elif "rank 1" in name:
            assert "rank 1" in error and "rank 1" in found[0][name][0]


def test_a_save_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    first, second = rank_processes.run(failing_loads.saves, 2, tmp_path)
    assert len(first) == 12 and first.keys() == second.keys()
    for name, (error, untouched) in (*first.items(), *second.items()):
        assert untouched, name
        assert error is not None, f"{name} was saved"
    for name in first:
        errors = first[name][0], second[name][0]
        if name.startswith("interrupted"):
            assert errors[1].startswith("KeyboardInterrupt") and "rank 1: it was interrupted" in errors[0]
        elif "parameters" in name:
            assert all("Expected all ranks to hold the same parameters" in error for error in errors)
        elif "a part" in name:
            assert all("state.x with parts that do not cover it exactly: save on all" in error for error in errors)
        else:
            assert all(error.startswith("CheckpointError: cannot write") and "rank 1: " in error for error in errors)
