"""halfstep train --base, --lora, --init, --patience: what is trained, what it takes, and when it ends."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train_runs import make_small, newest, report, train_together

from halfstep.__main__ import main
from halfstep.cli.train import adapters, loop, throughput
from halfstep.cli.train.data import read_corpus
from halfstep.cli.train.model import GPT, INITS, SIZES
from halfstep.cli.train.precision import Precision
from halfstep.cli.train.world import ThisRank
from halfstep.integrations.checkpoint import CheckpointError
from halfstep.numerics.planning import plan

CPU = torch.device("cpu")
NANO = SIZES["nano"]


def _made(precision: str = "fp32", **options: Any) -> GPT:
    return GPT(NANO, Precision.on(precision, CPU), 0, **options)


def _loss(model: GPT) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 256, (4, 33), generator=generator)
    found: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The --out of a short run in bf16."""
    out = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        words = ["--size", "nano", "--steps", "6", "--batch", "4", "--save-every", "6", "--data", os.__file__]
        assert main(["train", *words, "--out", str(out)]) == 0
    return out


# ------------------------------------------------------------------------------------------------------------ adapters


def test_adapters_begin_as_the_model_and_train_only_themselves() -> None:
    model = _made()
    expected = _loss(model)
    adapters.add(model, 4, 8.0, 0)
    assert torch.equal(_loss(model), expected)
    _loss(model).backward()
    names = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    matrices = [f"blocks.{block}.{name}" for block in (0, 1) for name in ("attention.qkv", "attention.out", "mlp.up")]
    assert {f"{name}_{letter}" for name in matrices for letter in "ab"} < names
    assert names == {name for name, _ in model.named_parameters() if name.endswith(("_a", "_b"))}


def test_adapters_compute_the_product_of_the_paper() -> None:
    """W + (alpha / r) B A in fp64, of every matrix in the blocks."""
    torch.manual_seed(1)
    model, merged = _made(), _made()
    adapters.add(model, 3, 5.0, 7)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith("_b"):
                weight.normal_(std=0.1)
        for name, target in merged.named_parameters():
            if f"{name}_a" in weights:
                product = weights[f"{name}_b"].double() @ weights[f"{name}_a"].double()
                target += (5.0 / 3.0 * product).float()
    torch.testing.assert_close(_loss(model), _loss(merged), rtol=1e-5, atol=0)
    state = {name: weight.detach() for name, weight in weights.items()}
    found = adapters._merged(state, {"lora": 3, "lora_alpha": 5.0})
    assert found.keys() == dict(merged.named_parameters()).keys()
    for name, target in merged.named_parameters():
        torch.testing.assert_close(found[name], target.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bytes_are_those_that_are_planned(precision: str) -> None:
    settings = loop.Settings("nano", 2, 4, 0, 1e-3, 0.1, 0, 1.0, 60, lora=4, lora_alpha=8.0)
    run, corpus = loop.Run(precision, precision), read_corpus(os.__file__, 32)
    trainer = loop.Trainer(run, settings, corpus, ThisRank("single", CPU))
    trainer.advance()
    trainer.flush()
    found = trainer.result(early=True)
    planned = plan(model=throughput.shape_of(NANO), precision=precision, lora=4, batch=4)
    parts = {part.name: part.bytes for part in planned.parts}
    assert found.parameters == planned.parameters
    assert found.trained * {"bf16": 2, "fp32": 4}[precision] == parts["gradients"]
    assert found.param_bytes == parts["weights"] + parts["frozen weights"]
    assert found.gradient_bytes == parts["gradients"]
    states = sum(parts[name] for name in ("remainder", "exp_avg", "exp_avg_sq") if name in parts)
    assert found.optimizer_bytes == states
    assert planned.work is not None and planned.work.training == found.flops_per_step


def test_flops_of_adapters_are_those_of_their_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by torch in forward and backward, in which products for frozen weights do not take place."""
    from torch.utils.flop_counter import FlopCounterMode

    for rank in (0, 4):
        model = _made()
        if rank:
            adapters.add(model, rank, 1.0, 0)
        with FlopCounterMode(display=False) as counter:
            _loss(model).backward()
        expected = throughput.step_flops(NANO, 4, rank)
        if rank:  # the input of the first block needs no gradient, and neither do its queries, keys and values
            expected -= 2 * 4 * 32 * 96 * 32 + 2 * 4 * 32 * rank * 32
        assert counter.get_total_flops() == expected


# --------------------------------------------------------------------------------------------------------- the command


def test_fine_tuning_in_one_process_and_on_two_ranks(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base stays as it is, the loss is that of one process, and its weights are the base of another run."""
    words = ["train", "--size", "nano", "--steps", "4", "--batch", "4", "--data", torch.__file__, "--save-every", "4"]
    words += ["--base", str(base), "--lora", "4"]
    make_small(monkeypatch)
    assert main([*words, "--out", str(tmp_path / "single")]) == 0
    runs = [[*words, "--strategy", name, "--out", str(tmp_path / name)] for name in ("ddp", "fsdp", "zero1")]
    train_together(2, [run[1:] for run in runs])
    expected = report(tmp_path / "single")
    assert expected["trained_parameters"] == 2 * 4 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32))
    assert expected["findings"] == []
    before = adapters.read_base(base, "nano").weights
    for name in ("single", "ddp", "fsdp", "zero1"):
        found = report(tmp_path / name)
        assert found["final_val_loss"] == pytest.approx(expected["final_val_loss"], rel=2e-3)
        _, state = newest(tmp_path / name, "bf16")
        for key, weight in before.items():
            assert torch.equal(state["model"][key], weight), (name, key)
    merged = adapters.read_base(tmp_path / "single", "nano").weights
    assert merged.keys() == before.keys() and not torch.equal(merged["blocks.0.mlp.up"], before["blocks.0.mlp.up"])


def test_a_resumed_fine_tuning_has_the_same_bits(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    words = ["train", "--size", "nano", "--steps", "6", "--batch", "4", "--data", torch.__file__, "--save-every", "3"]
    words += ["--base", str(base), "--lora", "2", "--out", str(tmp_path)]
    assert main(words) == 0
    _, whole = newest(tmp_path, "bf16")
    shutil.rmtree(tmp_path / "checkpoints" / "bf16" / "step-00000006")
    assert main([*words, "--resume"]) == 0
    _, resumed = newest(tmp_path, "bf16")
    assert all(torch.equal(whole["model"][name], weight) for name, weight in resumed["model"].items())


def test_training_ends_when_the_validation_loss_no_longer_falls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_small(monkeypatch)
    losses = iter([3.0, 2.5, 2.6, 2.4, 2.4, 2.7, 1.0])

    def validate(self: loop.Trainer) -> float:
        self.history.validation.append((self.step, next(losses)))
        return 0.0

    monkeypatch.setattr(loop.Trainer, "validate", validate)
    words = ["--size", "nano", "--steps", "40", "--batch", "2", "--data", os.__file__, "--out", str(tmp_path)]
    assert main(["train", *words, "--validate-every", "3", "--patience", "2"]) == 0
    assert "bf16: ended early at step 18; the best validation loss is 2.4000, at step 12" in capsys.readouterr().out
    found = report(tmp_path)
    assert (found["steps"], found["stopped_early"], found["best_step"], found["best_val_loss"]) == (18, True, 12, 2.4)


@pytest.mark.parametrize("init", INITS)
def test_each_way_of_drawing_weights_has_its_variance(init: str) -> None:
    up = _made(init=init).blocks[0].mlp.up.detach()  # type: ignore[union-attr]
    rows, columns = up.shape
    expected = {
        "scaled": columns**-0.5,
        "gpt2": 0.02,
        "xavier": (2 / (rows + columns)) ** 0.5,
        "kaiming": (2 / columns) ** 0.5,
        "orthogonal": rows**-0.5,
    }[init]
    assert up.std().item() == pytest.approx(expected, rel=0.05)
    if init == "orthogonal":
        torch.testing.assert_close(up.T @ up, torch.eye(columns), rtol=0, atol=1e-5)


def test_mfu_is_that_of_the_planner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    words = ["--size", "nano", "--steps", "3", "--batch", "4", "--data", os.__file__, "--out", str(tmp_path)]
    assert main(["train", *words]) == 0
    found = json.loads((tmp_path / "report.json").read_text())["runs"][0]
    planned = plan(model=throughput.shape_of(NANO), batch=4)
    assert found["mfu"] == pytest.approx(planned.mfu(found["step_ms_p50"] / 1000, found["peak"]["flops"]))
    assert 0 < found["mfu"] < 1 and found["peak"]["source"].startswith("measured")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora", "4"], "--lora 4 without --base, whose frozen weights it adapts; pass --base with a checkpoint "),
        (["--lora-alpha", "4"], "--lora-alpha 4 without --lora; pass --lora R too, or neither"),
        (["--base", "BASE", "--lora", "4", "--strategy", "tp"], "--lora 4 with --strategy tp, which shards the "),
        (["--base", "BASE", "--init", "gpt2"], "--init gpt2 with --base, whose weights replace those drawn; pass one"),
        (["--base", "BASE", "--size", "tiny"], "has size 'nano', and --size is 'tiny'; pass --size nano"),
        (["--base", "/nowhere"], "/nowhere"),
        (["--lora", "0"], "argument --lora: expected an integer of at least 1, but got '0'"),
        (["--patience", "0"], "argument --patience: expected an integer of at least 1, but got '0'"),
    ],
)
def test_refused(base: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *(str(base) if word == "BASE" else word for word in words)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_single_run_is_no_base(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint; pass one checkpoint"):
        adapters.read_base(tmp_path, "nano")
