"""Checkpoints of the optimizer state in the held format: size, resuming in another process, and errors."""

from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import pytest
import torch
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards
from torch.distributed.fsdp import FullyShardedDataParallel

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.checkpoint import storage
from halfstep.integrations.offload import OffloadedAdamW

pytestmark = [pytest.mark.sample(3), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

BF16 = torch.bfloat16
# By name: the dtype of the weights, the optimizer's options, and the bytes of state per element of a coded matrix.
LAYOUTS: dict[str, tuple[torch.dtype, dict[str, Any], float]] = {
    "split, fp32": (BF16, {}, 10),
    "split, bf16": (BF16, {"state_dtype": BF16}, 6),
    "split, 8 bits": (BF16, {"state_dtype": "8bit"}, 4 + 3 / 32),
    "split24, 8 bits, amsgrad": (
        BF16,
        {"master_weights": "split24", "state_dtype": "8bit", "amsgrad": True},
        4 + 5 / 32,
    ),
    "fp16": (torch.float16, {}, 12),
    "fp16, 8 bits": (torch.float16, {"state_dtype": "8bit"}, 6 + 3 / 32),
}
layouts = pytest.mark.parametrize("layout", LAYOUTS)
ELSEWHERE = (
    "load it into a halfstep optimizer, in one process or under fully_shard, and save it again with "
    "optimizer_state='canonical'"
)
OF_AN_ENTRY = 1024  # bytes of an entry on disk besides its elements: in the header, the manifest and state.json

Run = tuple[torch.nn.Module, Any]


def _run(layout: str, steps: int = 0, seed: int = 0, where: Any = halfstep.AdamW) -> Run:
    dtype, options, _ = LAYOUTS[layout]
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Linear(64, 96), torch.nn.LayerNorm(96)).to(dtype)
    run = model, where(model.parameters(), lr=1e-2, **options)
    _train(run, range(steps))
    return run


def _train(run: Run, steps: Any) -> None:
    model, optimizer = run
    for step in steps:
        tokens = torch.randint(0, 256, (16,), generator=torch.Generator().manual_seed(step))
        (model(tokens).float().square().mean() * model[1].weight.float().square().mean()).backward()  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad()


def _bits(run: Run) -> Any:
    """The bits of weights and state, as they lie in memory."""
    state = [sorted(run[1].state[p].items()) for group in run[1].param_groups for p in group["params"]]
    return attacks.bits([list(run[0].parameters()), state])


def _save(folder: Path, run: Run, **options: Any) -> Path:
    return checkpoint.save(folder, 3, model=run[0], optimizer=run[1], **options)


def _load(path: Path, run: Run) -> None:
    checkpoint.load(path, model=run[0], optimizer=run[1])


def _bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.iterdir())


@layouts
def test_the_file_takes_the_bytes_that_the_state_takes(layout: str, tmp_path: Path) -> None:
    """Counted in the files, against memory and against bytes per element."""
    model, optimizer = _run(layout, steps=1)
    path = _save(tmp_path, (model, optimizer))
    alone = checkpoint.save(tmp_path / "model", 3, model=model)
    held = [value for state in optimizer.state.values() for value in state.values()]
    entries = len(held) + sum(len(group) for group in optimizer.param_groups)
    assert _bytes(path) - _bytes(alone) <= sum(value.nbytes for value in held) + OF_AN_ENTRY * entries
    known = storage.Reader(path).tensors
    stored = {
        name: entry.size.numel() * entry.dtype.itemsize
        for name, entry in known.items()
        if name.startswith("optimizer.state.1.weight.") and not name.endswith(".step")
    }
    assert sum(stored.values()) == LAYOUTS[layout][2] * 96 * 64


@pytest.mark.parametrize("asynchronous", [False, True])
@layouts
def test_a_resumed_run_has_the_same_bits(layout: str, asynchronous: bool, tmp_path: Path) -> None:
    """Steps that are taken while a checkpoint is written in the background do not reach it."""
    run = _run(layout, steps=3, where=OffloadedAdamW if asynchronous else halfstep.AdamW)
    pending: Any = _save(tmp_path, run, asynchronous=asynchronous)
    expected = [_bits(run)]
    _train(run, range(3, 5))
    expected.append(_bits(run))
    resumed = _run(layout, steps=1, seed=1)
    _load(pending.result() if asynchronous else pending, resumed)
    found = [_bits(resumed)]
    _train(resumed, range(3, 5))
    assert [*found, _bits(resumed)] == expected


def test_one_file_of_gathered_state_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    run, resumed = _run("split, 8 bits", steps=3), _run("split, 8 bits", seed=1)
    state = {"model": run[0].state_dict(), "optimizer": run[1].state_dict()}
    saved = checkpoint.load(checkpoint.save(tmp_path, 3, checkpoint.gather(state)))
    checkpoint.load_model(resumed[0], saved["model"])
    checkpoint.load_optimizer(resumed[1], saved["optimizer"])
    assert _bits(resumed) == _bits(run)


def test_held_is_the_default_and_other_optimizers_are_saved_canonical(tmp_path: Path) -> None:
    model, optimizer = _run("split, 8 bits", steps=1)

    def keys(**options: Any) -> set[str]:
        path = checkpoint.save(tmp_path, 3, model=model, **{"optimizer": optimizer, **options})
        return {name.rpartition(".")[2] for name in storage.Reader(path).tensors}

    assert keys() == keys(optimizer_state="held") >= {"exp_avg_codes", "exp_avg_scale", "master_remainder"}
    canonical = {"step", "exp_avg", "exp_avg_sq", "master", "weight", "bias"}
    assert keys(optimizer_state="canonical") == canonical
    theirs = torch.optim.AdamW(model.parameters())
    assert keys(optimizer=theirs) == keys(optimizer=theirs, optimizer_state="held") == canonical - {"master"}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:Please use DTensor")
def test_shards_of_a_tensor_that_one_rank_has_are_in_files_of_their_own(tmp_path: Path) -> None:
    whole, model = torch.arange(12.0).reshape(4, 3), torch.nn.Linear(1, 1)
    shards = [Shard.from_tensor_and_offsets(whole[row : row + 2].clone(), [row, 0], 0) for row in (0, 2)]
    path = checkpoint.save(tmp_path, 1, {"whole": init_from_local_shards(shards, 4, 3)}, model=model)
    assert torch.equal(checkpoint.load(path, model=model)["whole"], whole)


def test_an_optimizer_of_torch_is_refused(tmp_path: Path) -> None:
    path = _save(tmp_path, _run("split, 8 bits", steps=1))
    model, _ = _run("split, 8 bits", seed=1)
    with pytest.raises(checkpoint.CheckpointError, match=f"of 0.weight, which AdamW cannot load: {ELSEWHERE}"):
        _load(path, (model, torch.optim.AdamW(model.parameters())))


@pytest.mark.usefixtures("one_rank")
def test_flat_parameters_of_fsdp1_are_saved_canonical_and_load_nothing_else(tmp_path: Path) -> None:
    def flat() -> Run:
        module = torch.nn.Linear(4, 4).bfloat16()
        model = FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)
        return model, halfstep.AdamW(model.parameters())

    source, target = flat(), flat()
    for parameter in source[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    source[1].step()
    path = _save(tmp_path, source)
    names = {name.split(".")[-1] for name in storage.Reader(path).tensors}
    assert {"master", "exp_avg"} < names and "master_remainder" not in names
    _load(path, target)
    for one, other in zip(source[1].masters().values(), target[1].masters().values(), strict=True):
        assert torch.equal(one, other)
    for options, key in (({}, "master_remainder"), ({"master_weights": "full", "state_dtype": BF16}, "exp_avg")):
        model = torch.nn.Linear(4, 4).bfloat16()
        optimizer = halfstep.AdamW(model.parameters(), **options)
        path = _save(tmp_path, (model, optimizer))
        message = f"such as {key} of weight, which FullyShardedDataParallel cannot load: {ELSEWHERE}"
        with pytest.raises(checkpoint.CheckpointError, match=message):
            _load(path, flat())
