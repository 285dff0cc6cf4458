"""train_gpt.py --base, --lora, --patience, and its share of the peak: what is trained, what it takes, when it ends."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
import train_gpt
from gpt import GPT, SIZES, Precision, add_adapters, merged
from train_runs import differences, make_small, newest, options, report, train, train_together

from halfstep.numerics.planning import plan

CPU = torch.device("cpu")
NANO = SIZES["nano"]


def _model() -> GPT:
    return GPT(NANO, Precision.on("fp32", CPU), 0)


def _loss(model: GPT) -> torch.Tensor:
    tokens = torch.randint(0, 256, (4, 33), generator=torch.Generator().manual_seed(0))
    loss: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:])
    return loss


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The --out of a short run in bf16."""
    out = tmp_path_factory.mktemp("base")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        words = ["--size", "nano", "--steps", 6, "--batch", 4, "--save-every", 6, "--data", os.__file__]
        assert train(*words, "--out", out) == 0
    return out


def test_adapters_begin_as_the_model_and_train_only_themselves() -> None:
    model = _model()
    expected = _loss(model)
    add_adapters(model, 4, 8.0, 0)
    assert model.blocks[0].down.lora_a.std().item() == pytest.approx(128**-0.5, rel=0.15)
    assert torch.equal(_loss(model), expected)
    _loss(model).backward()
    names = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    matrices = [f"blocks.{block}.{name}" for block in (0, 1) for name in ("qkv", "out", "up", "down")]
    assert names == {f"{name}.lora_{letter}" for name in matrices for letter in "ab"}


def test_adapters_compute_the_product_of_the_paper() -> None:
    """W + (alpha / r) B A in fp64, of every matrix in the blocks."""
    torch.manual_seed(1)
    model, target = _model(), _model()
    add_adapters(model, 3, 5.0, 7)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if name.endswith("lora_b"):
                weight.normal_(std=0.1)
        for name, weight in target.named_parameters():
            matrix = name.removesuffix("weight")
            if f"{matrix}lora_a" in weights:
                product = weights[f"{matrix}lora_b"].double() @ weights[f"{matrix}lora_a"].double()
                weight += (5.0 / 3.0 * product).float()
    torch.testing.assert_close(_loss(model), _loss(target), rtol=1e-5, atol=0)
    found = merged({name: weight.detach() for name, weight in weights.items()}, 5.0 / 3.0)
    assert found.keys() == dict(target.named_parameters()).keys()
    for name, weight in target.named_parameters():
        torch.testing.assert_close(found[name], weight.detach(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_bytes_and_flops_are_those_that_are_planned(precision: str) -> None:
    corpus = train_gpt.read_corpus(Path(os.__file__), 32)
    run = train_gpt.Run(precision, precision)
    trainer = train_gpt.Trainer(run, options(lora=4, lora_alpha=8.0), corpus, train_gpt.World(CPU))
    trainer.advance()
    trainer.flush()
    found = trainer.row()
    planned = plan(model=train_gpt.shape_of(NANO), precision=precision, lora=4, batch=4)
    parts = {part.name: part.bytes for part in planned.parts}
    assert found["parameters"] == planned.parameters
    assert found["trained_parameters"] * {"bf16": 2, "fp32": 4}[precision] == parts["gradients"]
    states = sum(parts[name] for name in ("remainder", "exp_avg", "exp_avg_sq") if name in parts)
    sizes = [found[f"{part}_bytes_per_param"] for part in ("param", "gradient", "optimizer")]
    expected = [parts["weights"] + parts["frozen weights"], parts["gradients"], states]
    assert sizes == pytest.approx([size / planned.parameters for size in expected], rel=1e-12)
    assert planned.work is not None
    assert found["flops_per_s"] * found["step_ms_p50"] / 1000 == pytest.approx(planned.work.training)
    assert found["mfu"] is None, "there is no datasheet of a CPU"


def test_flops_of_adapters_are_those_of_their_products() -> None:
    """Counted by torch in forward and backward, in which products for frozen weights do not take place."""
    from torch.utils.flop_counter import FlopCounterMode

    for rank in (0, 4):
        model = _model()
        if rank:
            add_adapters(model, rank, 1.0, 0)
        with FlopCounterMode(display=False) as counter:
            _loss(model).backward()
        expected = train_gpt.training_flops(train_gpt.shape_of(NANO), 4, 32, rank)
        if rank:  # the input of the first block needs no gradient, and neither do its queries, keys and values
            expected -= 2 * 4 * 32 * 96 * 32 + 2 * 4 * 32 * rank * 32
        assert counter.get_total_flops() == expected


def test_fine_tuning_in_one_process_and_on_two_ranks(base: Path, tmp_path: Path) -> None:
    """The base stays as it is, the loss is that of one process, and its weights are the base of another run."""
    words = ["--size", "nano", "--steps", 4, "--batch", 4, "--data", torch.__file__, "--save-every", 2]
    words += ["--base", base, "--lora", 4]
    single = tmp_path / "single"
    assert train(*words, "--out", single) == 0
    train_together(2, [[*words, "--strategy", name, "--out", tmp_path / name] for name in ("ddp", "fsdp", "zero1")])
    expected = report(single)
    assert expected["trained_parameters"] == 2 * 4 * ((32 + 96) + (32 + 32) + (32 + 128) + (128 + 32))
    assert expected["findings"] == []
    before = train_gpt.read_base(base, "nano")
    for name in ("single", "ddp", "fsdp", "zero1"):
        assert report(tmp_path / name)["final_val_loss"] == pytest.approx(expected["final_val_loss"], rel=2e-3)
        _, state = newest(tmp_path / name, "bf16")
        for key, weight in before.items():
            assert torch.equal(state["model"][key], weight), (name, key)
    after = train_gpt.read_base(single, "nano")
    up = "blocks.0.up.weight"
    assert after.keys() == before.keys() and not torch.equal(after[up], before[up])
    _, whole = newest(single, "bf16")
    shutil.rmtree(single / "checkpoints" / "bf16" / "step-00000004")
    assert train(*words, "--out", single, "--resume") == 0
    assert differences(whole, newest(single, "bf16")[1]) == []


def test_training_ends_when_the_validation_loss_no_longer_falls(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = iter([3.0, 2.5, 2.6, 2.4, 2.4, 2.7, 1.0])

    def validate(self: train_gpt.Trainer) -> None:
        self.history["validation"].append([self.step, next(losses)])

    monkeypatch.setattr(train_gpt.Trainer, "validate", validate)
    words = ["--size", "nano", "--steps", 40, "--batch", 2, "--data", text, "--out", tmp_path]
    assert train(*words, "--validate-every", 3, "--patience", 2) == 0
    assert "bf16: ended early at step 18; the best validation loss is 2.4000, at step 12" in capsys.readouterr().out
    found = report(tmp_path)
    assert (found["steps"], found["stopped_early"], found["best_step"], found["best_val_loss"]) == (18, True, 12, 2.4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lora", "4"], "--lora 4 without --base, whose frozen weights it adapts"),
        (["--lora-alpha", "4"], "--lora-alpha without --lora; pass both, or neither"),
        (["--base", "BASE", "--init", "gpt2"], "--init with --base, whose weights replace those drawn; pass one"),
        (["--base", "BASE", "--size", "tiny"], "is of another run: size is tiny and was nano"),
        (["--base", "/nowhere"], "/nowhere"),
        (["--base", "EMPTY"], "holds checkpoints of 0 runs; pass one checkpoint"),
        (["--lora", "0"], "argument --lora: expected an integer of at least 1, but got '0'"),
    ],
)
def test_refused(
    base: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {"BASE": base, "EMPTY": tmp_path}
    assert train(*(paths.get(word, word) for word in words)) == 2
    assert message in capsys.readouterr().err
