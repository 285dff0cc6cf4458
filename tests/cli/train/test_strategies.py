"""Every strategy trains to the loss of one process, resumes to the same bits, and continues under another strategy.

All runs of two processes are made one after the other in the same two processes, and those of four likewise.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from train_runs import differences, make_small, newest, report, train_together

from halfstep.__main__ import main
from halfstep.cli.train import data, loop, model
from halfstep.cli.train.world import ExecutionOptions, LaunchError, ThisRank, shard_size
from halfstep.integrations import ddp, fsdp

pytestmark = pytest.mark.sample(3)

# From this scale it grows twice without reaching the limit, next to which the order of sums would decide.
OPTIONS = "--size nano --steps 6 --batch 8 --init-scale 4096 --growth-interval 2 --save-every 2".split()
STEP = "checkpoints/{precision}/step-00000004"
TWO = {
    "ddp": "--strategy ddp --precision fp16",
    "ddp, 2 parts": "--strategy ddp --precision fp16 --accumulate 2",
    "ddp, sent in fp16": "--strategy ddp --precision fp32 --compress fp16",
    "ddp, sent in bf16": "--strategy ddp --precision fp16 --compress bf16",
    "ddp, fp32": "--strategy ddp --precision fp32",
    "zero1": "--strategy zero1 --precision fp16",
    "zero1, bf16": "--strategy zero1 --precision bf16 --accumulate 4 --activation-checkpointing",
    "fsdp": "--strategy fsdp --precision bf16",
    "fsdp, recomputed": "--strategy fsdp --precision bf16 --activation-checkpointing",
    "fsdp, 2 parts": "--strategy fsdp --precision bf16 --accumulate 2",
    "fsdp, on the CPU": "--strategy fsdp --precision bf16 --cpu-offload",
    "tp": "--strategy tp --precision fp16",
    "tp, fp32": "--strategy tp --precision fp32",
    "tp, bf16": "--strategy tp --precision bf16 --accumulate 2 --activation-checkpointing",
}
RESUMED = ["zero1", "tp", "ddp, 2 parts"]
CONTINUED = {
    "ddp to fsdp": ("ddp", "--strategy fsdp --precision fp16"),
    "zero1 to ddp": ("zero1", "--strategy ddp --precision fp16"),
    "fsdp to tp": ("fsdp", "--strategy tp --precision bf16"),
    "tp to zero1": ("tp, bf16", "--strategy zero1 --precision bf16"),
}
FOUR = {"hsdp": "--strategy hsdp --precision bf16 --shard-size 2"}


def _precision(words: str) -> str:
    return words.split()[words.split().index("--precision") + 1]


class Runs:
    """The folder of all runs, their words in `words`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "text.py"
        self.text.write_bytes(Path(os.__file__).read_bytes())
        self.words: dict[str, str] = {}

    def out(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-").replace(",", "")

    def all_words(self, name: str, words: str, resumed: str | None = None) -> list[str]:
        self.words[name] = words
        file = [] if resumed is None else ["--resume", str(self.saved(resumed))]
        return [*OPTIONS, *words.split(), "--data", str(self.text), "--out", str(self.out(name)), *file]

    def saved(self, name: str) -> Path:
        return self.out(name) / STEP.format(precision=_precision(self.words[name]))

    def state(self, name: str) -> dict[str, Any]:
        step, state = newest(self.out(name), _precision(self.words[name]))
        assert step == 6
        return state

    def report(self, name: str) -> dict[str, Any]:
        return report(self.out(name))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("strategies"))
    orders = [made.all_words(name, words) for name, words in TWO.items()]
    orders += [made.all_words(f"{name}, resumed", TWO[name], name) for name in RESUMED]
    orders += [made.all_words(name, words, start) for name, (start, words) in CONTINUED.items()]
    train_together(2, orders)
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        for precision in ("fp32", "fp16", "bf16"):
            words = f"--precision {precision}"
            assert main(["train", *made.all_words(precision, words)]) == 0
            more = f"{words} --accumulate 4 --activation-checkpointing"
            assert main(["train", *made.all_words(f"{precision}, 4 parts", more)]) == 0
        for start in ("zero1", "tp"):
            words = ["train", *made.all_words(f"{start} to single", "--precision fp16", start)]
            assert main(words) == 0
    return made


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    made = Runs(tmp_path_factory.mktemp("four"))
    orders = [made.all_words(name, words) for name, words in FOUR.items()]
    train_together(4, [*orders, made.all_words("hsdp, resumed", FOUR["hsdp"], "hsdp")])
    return made


def _agree(run: dict[str, Any], alone: dict[str, Any]) -> None:
    """As test_resume.py has it for ddp and fsdp."""
    assert run["final_val_loss"] == pytest.approx(alone["final_val_loss"], rel=5e-3)
    assert run["final_train_loss"] == pytest.approx(alone["final_train_loss"], rel=5e-3)
    assert run["train_loss"][0] == pytest.approx(alone["train_loss"][0], rel=1e-4)


@pytest.mark.parametrize("name", [*TWO, "fp32, 4 parts", "fp16, 4 parts", "bf16, 4 parts"])
def test_the_loss_is_that_of_one_process(runs: Runs, name: str) -> None:
    precision = _precision(runs.words[name])
    run, alone = runs.report(name), runs.report(precision)
    _agree(run, alone)
    assert run["strategy"] in [*runs.words[name].split(), "single"]
    assert run["world_size"] == (2 if name in TWO else 1)
    # Shards and parts are counted once, copies not again.
    if precision != "fp32":
        assert run["gradients"]["total"]["elements"] == alone["gradients"]["total"]["elements"]


@pytest.mark.parametrize("name", ["ddp, fp32", "tp, fp32", "fp32, 4 parts"])
def test_in_fp32_every_step_is_that_of_one_process(runs: Runs, name: str) -> None:
    run, alone = runs.report(name), runs.report("fp32")
    assert run["train_loss"] == pytest.approx(alone["train_loss"], rel=2e-5)


def test_the_loss_of_four_is_that_of_one(runs: Runs, four: Runs) -> None:
    run, alone = four.report("hsdp"), runs.report("bf16")
    _agree(run, alone)
    assert run["gradients"]["total"]["elements"] == alone["gradients"]["total"]["elements"]
    for part in ("param", "gradient", "optimizer"):
        key = f"{part}_bytes_per_param"
        assert run[key] == pytest.approx(alone[key] / 2, rel=0.02), "two ranks share a copy, and there are two"


def test_each_rank_holds_its_part(runs: Runs) -> None:
    whole = [runs.report("fp16")[f"{part}_bytes_per_param"] for part in ("param", "gradient", "optimizer")]
    sizes = {name: [runs.report(name)[f"{part}_bytes_per_param"] for part in ("param", "gradient", "optimizer")]
             for name in ("ddp", "zero1", "tp")}  # fmt: skip
    assert sizes["ddp"] == whole == [2, 2, 12]
    assert sizes["zero1"][:2] == [2, 2] and sizes["zero1"][2] == pytest.approx(6, rel=0.05)
    # Of nano's 43,328 parameters 24,576 lie in attention and MLP.
    divided = 2 * 12 * 32 * 32
    kept = (runs.report("tp")["parameters"] - divided / 2) / runs.report("tp")["parameters"]
    assert sizes["tp"] == pytest.approx([kept * size for size in whole])


@pytest.mark.parametrize("name", RESUMED)
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(runs: Runs, name: str) -> None:
    assert differences(runs.state(name), runs.state(f"{name}, resumed")) == []


def test_hsdp_resumes_to_the_same_bits(four: Runs) -> None:
    assert differences(four.state("hsdp"), four.state("hsdp, resumed")) == []


@pytest.mark.parametrize("name", [*CONTINUED, "zero1 to single", "tp to single"])
def test_another_strategy_continues(runs: Runs, name: str) -> None:
    start = CONTINUED[name][0] if name in CONTINUED else name.split()[0]
    before, after = runs.report(start), runs.report(name)
    assert after["train_loss"][:4] == before["train_loss"][:4]
    assert after["strategy"] != before["strategy"] and after["steps"] == len(after["train_loss"]) == 6
    _agree(after, runs.report(_precision(runs.words[name])))
    whole = runs.state(_precision(runs.words[name]))["optimizer"]["state"]
    state = runs.state(name)["optimizer"]["state"]
    assert state.keys() == whole.keys()
    for number, entry in state.items():
        assert {key: (v.shape, v.dtype) for key, v in entry.items()} == {
            key: (v.shape, v.dtype) for key, v in whole[number].items()
        }


def test_zero1_has_the_bits_of_ddp(runs: Runs) -> None:
    assert differences(runs.state("ddp"), runs.state("zero1")) == []
    assert differences(runs.state("ddp"), runs.state("zero1 to ddp")) == []


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("fsdp, recomputed", "fsdp"),
        ("fsdp, on the CPU", "fsdp"),
    ],
)
def test_what_only_saves_time_or_memory_changes_no_bit(runs: Runs, name: str, plain: str) -> None:
    assert differences(runs.state(name), runs.state(plain)) == []


@pytest.mark.parametrize(("name", "plain"), [("ddp, sent in fp16", "ddp, fp32"), ("ddp, sent in bf16", "ddp")])
def test_compressed_gradients_are_other_gradients(runs: Runs, name: str, plain: str) -> None:
    assert runs.report(name)["train_loss"][0] == runs.report(plain)["train_loss"][0]
    assert runs.report(name)["train_loss"][1:] != runs.report(plain)["train_loss"][1:]


def test_the_report_says_how_the_run_was_laid_out(runs: Runs, four: Runs) -> None:
    assert json.loads((four.out("hsdp") / "report.json").read_text())["layout"] == {
        "strategy": "hsdp",
        "processes": 4,
        "shard_size": 2,
        "accumulate": 1,
        "activation_checkpointing": False,
        "cpu_offload": False,
        "compress": "none",
        "restarts": 0,
    }
    page = (runs.out("zero1, bf16") / "report.html").read_text()
    assert "<th>strategy</th><td>zero1</td>" in page and "<th>activation checkpointing</th><td>yes</td>" in page


# ------------------------------------------------------------------------------ what an option does, seen from one rank


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


CPU = torch.device("cpu")


def _trainer(strategy: str, layout: ExecutionOptions, precision: str = "fp16") -> loop.Trainer:
    settings = loop.Settings("nano", 6, 8, 0, 1e-3, 0.1, 0, 2.0**10, 100)
    corpus = data.read_corpus(Path(os.__file__), settings.context)
    return loop.Trainer(loop.Run(precision, precision), settings, corpus, ThisRank(strategy, CPU, 0, 1, layout))


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_are_sent_once_per_step(alone: None, strategy: str, parts: int) -> None:
    trainer = _trainer(strategy, ExecutionOptions(accumulate=parts))
    sent: list[int] = []  # how many micro-batches have been through the model
    seen: list[int] = []
    trainer.model.register_forward_pre_hook(lambda module, inputs: seen.append(len(inputs[0])))
    if isinstance(trainer.model, DistributedDataParallel):

        def count(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            sent.append(len(seen))
            return ddp.mean_in_fp16_hook(None, bucket)

        # DistributedDataParallel compares the annotations with the types.
        count.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        trainer.model.register_comm_hook(None, count)
    else:
        for parameter in trainer.model.parameters():  # which get their gradients when these are reduced
            parameter.register_post_accumulate_grad_hook(lambda _: sent.append(len(seen)))
    trainer.advance()
    assert seen == [8 // parts] * parts
    assert sent and set(sent) == {parts}


@pytest.mark.parametrize("recompute", [False, True])
def test_recomputed_blocks_go_forward_twice(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    forward = model._Block._forward
    monkeypatch.setattr(model._Block, "_forward", lambda self, x: (calls.append(self), forward(self, x))[1])
    trainer = _trainer("single", ExecutionOptions(activation_checkpointing=recompute))
    trainer.advance()
    assert len(calls) == (4 if recompute else 2)
    calls.clear()
    trainer.validate()
    assert len(calls) == 2 * loop.VALIDATION_ROWS / 8, "nothing is computed twice where no gradient is wanted"


@pytest.mark.parametrize("offload", [False, True])
def test_offloaded_shards_lie_on_the_cpu(alone: None, offload: bool) -> None:
    trainer = _trainer("fsdp", ExecutionOptions(cpu_offload=offload))
    groups = [group for module in trainer.plain.modules() if isinstance(module, FSDPModule)
              for group in fsdp._groups(module)]  # fmt: skip
    assert len(groups) == 3, "two blocks and the rest"
    assert {param.offload_to_cpu for group in groups for param in group.fsdp_params} == {offload}


# ------------------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("size", "words", "expected"),
    [
        (2, "--strategy fsdp --compress fp16", "expected --strategy ddp or zero1 with --compress fp16, but got fsdp"),
        (
            1,
            "--cpu-offload",
            "expected --strategy fsdp or hsdp with --cpu-offload, but got single: choose one of these",
        ),
        (2, "--strategy ddp --shard-size 2", "expected --strategy hsdp with --shard-size, but got ddp"),
        (2, "--strategy hsdp", "type: torchrun --nproc-per-node 4 -m halfstep train --strategy hsdp --shard-size 2"),
        (8, "--strategy hsdp --shard-size 3", "pass --shard-size 2 or 4, or use --strategy fsdp"),
        (8, "--strategy hsdp", "--strategy hsdp on nodes of 8 processes does not divide 8 processes"),
        (
            3,
            "--strategy tp",
            "expected 1 or 2 processes with --strategy tp, which divides the model's 2 heads, but got 3",
        ),
        (2, "--strategy ddp --accumulate 3", "to be a multiple of 6 (2 processes times --accumulate 3), but got 8"),
        (
            2,
            "--strategy tp --accumulate 3",
            "expected --batch, the global batch, to be a multiple of 3 (--accumulate 3), but got 8",
        ),
        (1, "--accumulate 0", "but got '0'"),
        (2, "", "use --strategy ddp, fsdp, hsdp, zero1 or tp, or start without torchrun"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_does(
    size: int,
    words: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": 1}
    for name, value in chain(place.items(), [("MASTER_ADDR", "localhost")]):
        monkeypatch.setenv(name, str(value))
    assert main(["train", "--size", "nano", "--batch", "8", "--out", str(tmp_path / "out"), *words.split()]) == 2
    printed = capsys.readouterr()
    assert expected in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("strategy", ["hsdp", "zero1", "tp"])
def test_alone_the_line_to_type_is_given(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert main(["train", "--strategy", strategy, "--out", str(tmp_path / "out")]) == 2
    ranks = 4 if strategy == "hsdp" else 2
    assert f"torchrun --nproc-per-node {ranks} -m halfstep train --strategy {strategy}" in capsys.readouterr().err


def test_hsdp_shards_over_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert shard_size(ExecutionOptions(), 8) == 4
    assert shard_size(ExecutionOptions(shard_size=2), 8) == 2
    with pytest.raises(LaunchError, match="on nodes of 4 processes does not divide 6 processes"):
        shard_size(ExecutionOptions(), 6)
