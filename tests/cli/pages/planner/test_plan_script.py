"""The planner's scripts against `halfstep plan`: in node, and in a headless Chromium where there is one."""

from __future__ import annotations

import difflib
import math
import random
import struct
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from browser import run_script
from plan_settings import Settings, answer, settings, typos

from halfstep.cli.pages.planner.planner import script_of_plans
from halfstep.cli.plan_tables import digits, size

ANSWERS = """
answer(input.map((options) => {
  try {
    const content = contentOf(options);
    const said = content.compare === null ? sentences(content, shapeOverParams(options)) : [];
    const stacks = content.plans.map((made) => stack(made).map(([kind, size]) => [kind, size.toString()]));
    return { json: json(content), said, stacks };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return { refused: error.message };
  }
}));
"""
TEXTS = """
answer({
  floats: input.floats.map((x) => [floatText(x), ...[6, 3, 4].map((n) => general(x, n)),
    ...[0, 1, 3].map((n) => fixed(x, n)), digits(x)]),
  quotients: input.quotients.map(([n, d]) => floatText(nearestDouble(BigInt(n), BigInt(d)))),
  sizes: input.sizes.map((n) => size(BigInt(n))),
  roots: input.roots.map((n) => isqrt(BigInt(n)).toString()),
  words: input.words.map(([a, b]) => [repr(a), floatText(likeness(Array.from(a), Array.from(b)))]),
});
"""
GPT2 = {"model": "gpt2", "gpus": "8"}
FEW = {"params": "1e9"}
# Settings that the command refuses, and how its message begins.
REFUSED: list[tuple[Settings, str]] = [
    ({}, "expected a model, but got none"),
    ({"gpus": "8"}, "expected a model, but got none"),
    ({"params": "many"}, "argument --params: expected an integer of at least 1, such as 7e9, 7B or 350M, but"),
    ({"params": "0.5"}, "argument --params: expected an integer"),
    ({**FEW, "gpus": "1.5"}, "argument --gpus: expected integers of at least 1, such as 8 or 8,64, but got '1.5'"),
    ({**FEW, "gpus": "8,64"}, "--gpus is 8,64; give one value"),
    ({**FEW, "gpus": "8", "strategy": "ddp,fsdp"}, "--strategy is ddp,fsdp; give one value"),
    ({**FEW, "rank": "-1"}, "argument --rank: expected an integer of at least 0, but got '-1'"),
    ({**FEW, "tp": "0"}, "argument --tensor-parallel/--tp: expected an integer of at least 1, but got '0'"),
    ({**FEW, "step-ms": "nan"}, "argument --step-ms: expected a number above 0, but got 'nan'"),
    ({**FEW, "reserve": "5"}, "argument --reserve: expected a share or a size"),
    ({**FEW, "reserve": "100%"}, "argument --reserve: expected a share below 100%, but got '100%'"),
    ({**FEW, "card": "rtx4090", "reserve": "24GiB"}, "Expected reserve to be a share from 0 to below 1, or fewer"),
    ({**FEW, "card": "rtx4090", "reserve": "99.99999999999%"}, "Expected reserve to be a share from 0 to below 1, or"),
    ({**FEW, "strategy": "fsdb"}, "Expected strategy to be one of single, ddp, zero1"),
    ({**FEW, "strategy": "sdx"}, "Expected strategy to be one of single, ddp, zero1"),  # like fsdp as much as hsdp
    ({**FEW, "card": "h10"}, "Expected card to be one of a100-40"),
    ({**FEW, "model": "gpt2"}, "--params is 1,000,000,000, but the shape has 124,439,808; leave one"),
    ({"model": "gtp2"}, "Expected --model to be one of gpt2, gpt2-xl"),
    ({"layers": "12", "hidden": "768"}, "--heads, --vocab, --seq missing; a shape is"),
    ({**FEW, "flash": "", "tied": ""}, "--tied, --flash without a shape; give --model, or --layers"),
    ({"model": "gpt2", "heads": "11"}, "Expected heads to divide hidden, 768, but got 11"),
    ({"model": "gpt2", "kv-heads": "5"}, "Expected kv_heads to divide heads, 12, but got 5"),
    ({"model": "gpt2", "norm": "batch"}, "Expected norm to be 'layer' or 'rms', but got 'batch'"),
    ({"model": "gpt2", "seq": "2048"}, "Expected seq to be from 1 to 1024, the positions of the model"),
    ({**FEW, "gpus": "8", "tensor-parallel": "3"}, "Expected tensor_parallel to divide gpus, 8, but got 3"),
    ({**GPT2, "tensor-parallel": "8"}, "Expected tensor_parallel to divide heads, 12, but got 8"),
    ({**FEW, "gpus": "8", "strategy": "single"}, "strategy is 'single', but there are 8 data-parallel GPUs"),
    ({**GPT2, "strategy": "zero1-torch", "offload": ""}, "Expected strategy to be single, ddp, zero1, zero2, zero3"),
    ({**FEW, "optimizer": "torch", "offload": ""}, "Expected optimizer to be one of halfstep's with offload=True"),
    ({**GPT2, "sequence-parallel": ""}, "Expected tensor_parallel to be 2 or more with sequence_parallel=True"),
    ({**FEW, "optimizer": "halfstp"}, "Expected optimizer to be one of halfstep, halfstep-full"),
    ({**FEW, "precision": "fp8"}, "Expected precision to be one of fp32, bf16, fp16, amp-bf16, amp-fp16, but got"),
    ({**FEW, "optimizer": "apex-o2"}, "Expected precision to be one of fp16 for optimizer 'apex-o2', but got 'bf16'"),
    ({**FEW, "gradients": "int8"}, "Expected gradients to be one of fp32, bf16, fp16, but got 'int8'"),
    ({**FEW, "accumulator": "int8"}, "Expected accumulator to be one of fp32"),
    ({**FEW, "compress": "int8"}, "Expected compress to be one of fp32"),
    ({**FEW, "optimizer": "apex", "moments": "bf16"}, "moments is 'bf16', but the format of the moments of optimizer"),
    ({**FEW, "moments": "fp32,bf16,fp32"}, "Expected moments to be one format, or two separated by a comma"),
    ({**FEW, "moments": "fp8"}, "Expected moments to be one of fp32, bf16, 8bit, but got 'fp8'"),
    ({**FEW, "moments": "fp32,bf16"}, "Expected moments to be one format for optimizer 'halfstep'"),
    ({**FEW, "master": "fp16"}, "master is 'fp16', but the format of the master of optimizer 'halfstep' is fixed"),
    ({**FEW, "optimizer": "te-master", "master": "bf16"}, "Expected master to be one of fp32, fp16, but got 'bf16'"),
    ({**FEW, "optimizer": "te", "amsgrad": ""}, "amsgrad is True, but optimizer 'te' does not support it"),
    ({**GPT2, "moments": "8bit", "strategy": "fsdp1"}, "Expected strategy to be single, ddp, zero1-torch, fsdp, hsdp"),
    ({**GPT2, "strategy": "zero1", "step-in-backward": ""}, "Expected strategy to be single, ddp, fsdp, hsdp with"),
    ({**FEW, "optimizer": "torch", "step-in-backward": ""}, "Expected optimizer to be one of halfstep's with step_in"),
    ({**FEW, "accumulate": "2", "step-in-backward": ""}, "Expected accumulate to be 1 and accumulator None with"),
    ({**FEW, "accumulator": "fp32", "step-in-backward": ""}, "Expected accumulate to be 1 and accumulator None with"),
    ({**GPT2, "compress": "fp16", "step-in-backward": ""}, "Expected compress to be None with step_in_backward and"),
    ({**FEW, "lora": "8"}, "Expected model with lora, whose adapters stand beside its matrices, but got None"),
    ({**GPT2, "strategy": "zero2", "lora": "8"}, "Expected strategy to be single, ddp, fsdp, hsdp with lora, but got"),
    ({"model": "gpt2", "lora": "8", "offload": ""}, "Expected offload to be False with lora, but got True"),
    ({"model": "gpt2", "lora": "8", "step-in-backward": "5"}, "Expected step_in_backward to be None with lora, but"),
    ({"model": "llama-3-8b", "gpus": "2", "tp": "2", "lora": "8"}, "Expected tensor_parallel to be 1 with lora, but"),
    ({**GPT2, "shard": "4"}, "shard is 4, but strategy 'ddp' has no groups"),
    ({**GPT2, "strategy": "hsdp"}, "strategy is 'hsdp', but shard is not given"),
    ({**GPT2, "strategy": "hsdp", "shard": "3"}, "Expected shard to divide the number of data-parallel GPUs, 8, but"),
    ({**GPT2, "strategy": "fsdp", "rank": "8"}, "Expected rank to be an integer from 0 to 7, but got 8"),
    ({**GPT2, "checkpointing": "ful"}, "Expected checkpointing to be one of none, selective, full, sqrt, but got"),
    ({**FEW, "checkpointing": ""}, "checkpointing is 'full', but activations are unknown without a model"),
    ({**FEW, "fit": "params"}, "--fit without a card; give --card, one of a100-40"),
    ({**FEW, "step-ms": "10"}, "--step-ms without a card"),
    ({**FEW, "step-ms": "10", "card": "h100"}, "--step-ms with --params only; give --batch and --seq too, or a shape"),
    ({**FEW, "fit": "model"}, "Expected --fit to be one of none, params, layers, batch, but got 'model'"),
    ({**FEW, "fit": "batch", "card": "h100"}, "Expected model to be a Transformer with what='batch', but got none"),
    (
        {**FEW, "gpus": "8", "strategy": "zero3", "offload": "", "card": "h100", "fit": "params"},
        "Expected strategy not to offload everything that grows with what='params', but got 'zero3'",
    ),
    ({**FEW, "compare": "layout"}, "Expected compare to be one of layouts, strategies, but got 'layout': did you mean"),
    ({**FEW, "compare": "strategies"}, "gpus is 1; strategies differ only on 2 or more data-parallel GPUs"),
    ({**GPT2, "strategy": "ddp,single", "compare": "strategies"}, "Expected strategy to be one of ddp, zero1"),
    ({**FEW, "compare": "layouts", "moments": "bf16"}, "moments is 'bf16' while layouts are compared; leave it out"),
    ({**FEW, "compare": "layouts", "step-in-backward": "9"}, "step_in_backward is 9 while layouts are compared"),
    ({**FEW, "compare": "layouts", "card": "h100", "fit": "params"}, "--fit with --compare; give one of them"),
]  # fmt: skip


# What random settings seldom have.
RARE: list[Settings] = [
    *({"model": "gpt2", "gpus": "31", "strategy": "fsdp", "rank": rank} for rank in ("0", "29", "30")),
    {**GPT2, "strategy": "hsdp", "shard": "4", "rank": "3", "optimizer": "halfstep-split-8bit"},
    {"model": "gpt2", "gpus": "7", "strategy": "zero1-torch", "rank": "6", "moments": "8bit"},
    {"params": "1e12", "gpus": "5000", "strategy": "zero1-torch", "offload": "", "accumulate": "3"},
    {"params": "9e18", "gpus": "3", "batch": "7", "seq": "1000001"},
    {**GPT2, "strategy": "fsdp", "lora": "3", "step-in-backward": ""},
    {**GPT2, "strategy": "fsdp", "step-in-backward": "1"},
    {**GPT2, "strategy": "ddp", "step-in-backward": "1", "compress": "fp32"},
    {"model": "gpt2", "offload": "", "step-in-backward": "1000"},
    {"layers": "3", "hidden": "2", "heads": "1", "vocab": "1", "seq": "1", "gpus": "64", "strategy": "zero1-torch"},
    {"model": "gpt2", "optimizer": "te-master", "moments": "fp8, fp16", "master": "fp16"},
    {"model": "LLAMA-3-8B", "card": "H100", "reserve": "0%", "step-ms": "1e-3"},
]


def answers(engine: str, given: list[Settings], folder: Path) -> list[dict[str, Any]]:
    """What the scripts answer to each settings, as `plan_settings.answer` does for the command."""
    return run_script(engine, script_of_plans(), ANSWERS, given, folder)


def check(engine: str, given: Iterable[Settings], folder: Path) -> int:
    """Compare the scripts with the command; how many of the settings are planned."""
    planned, listed = 0, list(given)
    for one, theirs in zip(listed, answers(engine, listed, folder), strict=True):
        ours = answer(one)
        assert theirs == ours, one
        planned += "json" in ours
    return planned


def test_random_settings_in_node(tmp_path: Path) -> None:
    assert check("node", [settings(seed) for seed in range(300)], tmp_path) > 200


def test_rare_settings_in_node(tmp_path: Path) -> None:
    assert check("node", RARE, tmp_path) > len(RARE) - 5


def test_mistakes_in_node(tmp_path: Path) -> None:
    assert check("node", [typos(seed) for seed in range(120)], tmp_path) < 40


def test_what_is_wrong_is_said_as_by_the_command(tmp_path: Path) -> None:
    said = answers("node", [one for one, _ in REFUSED], tmp_path)
    for (one, begins), theirs in zip(REFUSED, said, strict=True):
        ours = answer(one)
        assert ours["refused"].startswith(begins) and theirs == ours, one


def test_options_that_the_command_line_parses_differently(tmp_path: Path) -> None:
    given = [{**FEW, "unknown": ""}, {**FEW, "gpus": ""}, {**FEW, "offload": "yes"}]
    assert [one["refused"] for one in answers("node", given, tmp_path)] == [
        "unknown option --unknown",
        "argument --gpus: expected one argument",
        "argument --offload: takes no value, and was given 'yes'",
    ]


# Settings as a link may hold them, and the arguments of the command that is copied.
HOSTILE: list[tuple[Settings, list[str]]] = [
    ({"model": "gpt2", "x;touch pwn": ""}, ["--model", "gpt2"]),
    ({"model": "gpt2", "$(touch pwn)": "1", "`touch pwn`": ""}, ["--model", "gpt2"]),
    ({"model": "gpt2; touch pwn"}, ["--model", "gpt2; touch pwn"]),
    ({"model": "gpt2\ntouch pwn"}, ["--model", "gpt2touch pwn"]),
    ({"model": "'; touch pwn; '"}, ["--model", "'; touch pwn; '"]),
    ({"model": "\\'; touch pwn #"}, ["--model", "\\'; touch pwn #"]),
    ({"model": "$(touch pwn)`touch pwn`!touch"}, ["--model", "$(touch pwn)`touch pwn`!touch"]),
    ({"model": "x\x1b[201~\x03\r\x9btouch pwn\x7f\u202e\u2028"}, ["--model", "x[201~touch pwn"]),
    ({"model": "--page=pwn", "card": "--out"}, ["--model=--page=pwn", "--card=--out"]),
    ({"model": "", "offload": "", "rank": "-1"}, ["--model", "--offload", "--rank=-1"]),
    ({"model": "*", "card": "~", "gpus": "8,64"}, ["--model", "*", "--card", "~", "--gpus", "8,64"]),
]  # fmt: skip


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_the_command_of_a_link_runs_halfstep_plan_and_nothing_else(shell: str, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    lines = run_script(
        "node", script_of_plans(), "answer(input.map(commandLine));", [one for one, _ in HOSTILE], tmp_path
    )
    for line, (options, expected) in zip(lines, HOSTILE, strict=True):
        code = f"halfstep() {{ printf '%s\\n' \"$@\"; }}\n{line}"
        done = subprocess.run([shell, "-c", code], capture_output=True, text=True, cwd=tmp_path / "run")
        assert (done.stdout.splitlines(), done.stderr) == (["plan", *expected], ""), options
        assert not any((tmp_path / "run").iterdir()), options


@pytest.mark.exhaustive
def test_10_000_random_settings_in_chromium(tmp_path: Path) -> None:
    planned = sum(check("chromium", map(settings, range(at, at + 1000)), tmp_path) for at in range(0, 14_000, 1000))
    assert planned > 10_000


@pytest.mark.exhaustive
def test_3_000_mistakes_in_chromium(tmp_path: Path) -> None:
    for at in range(0, 3000, 1000):
        check("chromium", map(typos, range(at, at + 1000)), tmp_path)


def test_texts_and_numbers_are_those_of_python(tmp_path: Path) -> None:
    draw = random.Random(17)
    floats = [
        0.5,
        1.5,
        2.5,
        0.125,
        0.25,
        0.75,
        9.995,
        99.95,
        999.5,
        1e15,
        1e16,
        123456789012345680.0,
        1e-4,
        1e-5,
        999999.5,
    ]
    floats += [0.0, 1.0, 5e-324, 2.5e22, 1e23, 9.9999995, 1.7976931348623157e308, 2.0, 14.0, 8.015625, 1 / 3]
    floats += [struct.unpack("<d", draw.randbytes(8))[0] for _ in range(600)]
    floats += [draw.randrange(10**6) / 2 ** draw.randrange(12) for _ in range(600)]
    floats = [abs(x) for x in floats if x - x == 0]
    quotients = [(draw.randrange(2 ** draw.randrange(1, 300)), draw.randrange(1, 2 ** draw.randrange(1, 300) + 1))
                 for _ in range(600)]  # fmt: skip
    quotients += [(2**53 + 1, 1), (2**53 + 3, 1), (2**54 + 2, 2**3), (2**60 + 2**7 + 1, 1), (1, 3), (0, 5)]
    quotients += [((2**53 + 1) * 2**100 + 1, 2**100), ((2**53 + 3) * 2**100 - 1, 2**100)]  # almost ties
    sizes = [0, 1, 1023, 1024, 1025, 2**40 - 1, 2**40, 10 * 2**30, 100 * 2**20 - 2**19, 10 * 2**20 + 2**19 // 10]
    sizes += [draw.randrange(2 ** draw.randrange(1, 60)) for _ in range(1000)]
    roots = [*range(300), *(draw.randrange(2 ** draw.randrange(1, 200)) for _ in range(500)), 10**30, 10**30 - 1]
    words = [
        "",
        "'",
        '"',
        "'\"",
        "\\",
        "a\nb\t\r",
        "\x00\x7f\x9f",
        "é",
        "fp16",
        "bf16",
        "halfstep-split",
        "zero1-torch",
        "🙂x",
    ]
    pairs = [(a, b) for a in words for b in words]
    pairs += [tuple("".join(draw.choices("abc-", k=draw.randrange(9))) for _ in range(2)) for _ in range(500)]
    given = {
        "floats": floats,
        "quotients": [[str(n), str(d)] for n, d in quotients],
        "sizes": list(map(str, sizes)),
        "roots": list(map(str, roots)),
        "words": pairs,
    }
    found = run_script("node", script_of_plans(), TEXTS, given, tmp_path)
    for x, texts in zip(floats, found["floats"], strict=True):
        assert texts == [repr(x), f"{x:g}", f"{x:.3g}", f"{x:.4g}", f"{x:,.0f}", f"{x:,.1f}", f"{x:,.3f}", digits(x)]
    assert found["quotients"] == [repr(n / d) for n, d in quotients]
    assert found["sizes"] == [size(n) for n in sizes]
    assert found["roots"] == [str(math.isqrt(n)) for n in roots]
    for (a, b), texts in zip(pairs, found["words"], strict=True):
        assert texts == [repr(a), repr(difflib.SequenceMatcher(None, a, b).ratio())]
