"""`halfstep plan`: what it refuses, prints, writes and draws."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from halfstep.__main__ import main as halfstep_main
from halfstep.cli import numbers
from halfstep.cli.pages import planner
from halfstep.numerics.planning import MODELS, OPTIMIZERS, STRATEGIES, layout, plan


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert halfstep_main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return json.loads(run(capsys, *arguments, "--json"))


@pytest.mark.parametrize(
    ("text", "number"), [("7e9", 7e9), ("7B", 7e9), ("1.5b", 1.5e9), ("350M", 3.5e8), ("7_000", 7e3), ("2.5e1", 25)]
)
def test_ways_to_write_a_number(text: str, number: float) -> None:
    assert numbers.count()(text) == number


def test_every_option_reaches_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model gpt2 --eager-attention --gpus 32 --strategy hsdp --shard 4 --precision fp16 --state-dtype bf16"
    content = told(capsys, *words.split(), *"--batch 3 --seq 512 --offload --checkpointing --loss-chunks 4".split())
    expected = plan(
        model=replace(MODELS["gpt2"], flash=False), gpus=32, strategy="hsdp", shard=4, precision="fp16",
        moments="bf16", batch=3, seq=512, offload=True, checkpointing="full", loss_chunks=4,
    )  # fmt: skip
    assert content["halfstep"] == halfstep.__version__ and content["compare"] is None and content["ways"] == []
    assert content["plans"] == [{"label": "halfstep, fp16, hsdp", **expected.as_dict(), "card": None}]
    buckets = plan(8, gpus=2, bucket_view=True, optimizer="halfstep-full")
    (viewed,) = told(capsys, *"--params 8 --gpus 2 --bucket-view --optimizer halfstep-full".split())["plans"]
    assert viewed["parts"] == buckets.as_dict()["parts"]
    adapters = told(capsys, "--model", "gpt2", "--lora", "8")["plans"][0]["parts"]
    assert adapters == plan(model=MODELS["gpt2"], batch=1, lora=8).as_dict()["parts"]


def test_a_card_by_name_and_by_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the latter no speed is known, and no times are printed."""
    (one,) = told(capsys, "--model", "gpt2", "--card", "A100-40")["plans"]
    assert one["card"]["usable"] == 36 * 2**30 and one["card"]["fits"]
    assert one["card"]["left"] == 36 * 2**30 - one["totals"]["peak"]
    assert run(capsys, "--model", "gpt2", "--card", "A100-40").startswith("Fits a100-40 (40.0 GiB): ")
    (one,) = told(capsys, "--model", "gpt2", "--card", "24GiB")["plans"]
    assert one["card"]["memory"] == 24 * 2**30 and one["card"]["bandwidth"] is None and one["card"]["fits"]
    printed = run(capsys, "--model", "gpt2", "--batch", "1", "--card", "24 gb")
    assert printed.startswith("Fits 24 GiB: ") and " ms" not in printed


def test_the_config_of_a_model_is_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its path, its folder, and from a server with the paths of Hugging Face, which HF_ENDPOINT names."""
    config = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
    file = tmp_path / "an" / "owner.s-llama" / "resolve" / "main" / "config.json"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    monkeypatch.setattr(SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
        for name in (str(file), str(file.parent), "an/owner.s-llama"):
            assert told(capsys, "--model", name) == told(capsys, "--model", "llama-3-8b")
        assert halfstep_main(["plan", "--model", "an/qwen3-8bb"]) == 2
        server.shutdown()
    refused = capsys.readouterr().err
    assert "HTTP Error 404" in refused and "did you mean 'qwen3-8b'?" in refused
    assert halfstep_main(["plan", "--model", "an/qwen3-8bb"]) == 2  # nobody listens any more
    assert "<urlopen error" in capsys.readouterr().err
    file.write_text("{")
    assert halfstep_main(["plan", "--model", str(file)]) == 2
    assert f"got '{file}': Expecting property name" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        "--model llama-3-8b --card h100 --seq 8192 --precision amp-bf16 --optimizer torch",
        "--params 7e9 --card 24GiB --moments bf16",
    ],
)
def test_each_way_to_fit_does_when_typed(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = told(capsys, *words.split())
    assert not content["plans"][0]["card"]["fits"] and content["ways"]
    printed = run(capsys, *words.split())
    assert printed.index("Does not fit") < printed.index("It fits with any one of these") < printed.index("part")
    for way in content["ways"]:
        arguments = words.split()
        for name, text in way["options"].items():
            if f"--{name}" in arguments:
                at = arguments.index(f"--{name}")
                del arguments[at : at + 2]  # in these cases each has a value
            arguments += [] if text is None else [f"--{name}", *([text] if text else [])]
        (after,) = told(capsys, *arguments)["plans"]
        assert after["card"]["fits"] and after["totals"]["peak"] == way["peak"]
        assert all(cost in printed for cost in way["costs"])


def test_the_table_holds_every_part_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama-3-8b", "--gpus", "16", "--strategy", "hsdp", "--shard", "8", "--seq", "4096"]
    (one,) = told(capsys, *arguments)["plans"]
    printed = run(capsys, *arguments)
    for part in one["parts"]:
        line = next(line for line in printed.splitlines() if line.startswith(f"{part['name']}  "))
        assert ("≈" in line) == (not part["exact"])
    for message in one["communication"]:
        assert re.search(rf"^{message['what']}  +{message['name']}", printed, flags=re.MULTILINE)


def test_layouts_and_strategies_compared(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--params", "7e9", "--gpus", "8", "--card", "h100"]
    labels = [one["label"] for one in told(capsys, *common, "--compare", "strategies")["plans"]]
    assert labels == [*(name for name in STRATEGIES if name not in ("single", "hsdp")), "hsdp, groups of 4"]
    layouts = told(capsys, *common, "--compare", "layouts")["plans"]
    assert [one["label"] for one in layouts[:2]] == ["torch, fp32", "torch, amp-bf16"]
    named = {one["settings"]["optimizer"] for one in layouts}
    assert named == set(OPTIMIZERS) - {"halfstep", "halfstep-muon"}  # which are the rows of split masters
    flat = told(capsys, *common, "--compare", "layouts", "--strategy", "zero1")["plans"]
    assert named - {one["settings"]["optimizer"] for one in flat} == {
        name for name in named if name.startswith("halfstep") and (name.endswith("8bit") or "muon" in name)
    }
    for optimizer, labels in (("halfstep", ["ddp", "zero1-torch", "fsdp"]), ("halfstep-muon", ["ddp", "fsdp"])):
        words = ("--compare", "strategies", "--moments", "8bit", "--optimizer", optimizer, "--step-in-backward")
        plans = told(capsys, *common, *words)["plans"]
        assert [one["label"] for one in plans] == [*labels, "hsdp, groups of 4"]
    for what in ("layouts", "strategies"):
        printed = run(capsys, *common, "--compare", what)
        assert "fits" in printed and "yes" in printed and ("no" in printed.split())
    for precision in ("fp16", "fp32", "amp-bf16", "amp-fp16"):
        assert told(capsys, *common, "--compare", "layouts", "--precision", precision)["plans"]


def test_a_strategy_that_cannot_offload_is_planned_without(capsys: pytest.CaptureFixture[str]) -> None:
    plans = told(capsys, "--params", "7e9", "--gpus", "8", "--offload", "--compare", "strategies")["plans"]
    hosted = {one["label"] for one in plans if one["totals"]["host"]}
    assert hosted == {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp1", "hsdp, groups of 4"}
    assert halfstep_main(["plan", "--params", "7e9", "--offload"]) == 0
    crossing = r"[\d.]+ GiB cross the bus: [\d,]+ ms at 25 GB/s and [\d,]+ ms at 55 GB/s"
    assert re.search(crossing, capsys.readouterr().out)


def test_steps_in_the_backward(capsys: pytest.CaptureFixture[str]) -> None:
    plans = told(capsys, "--params", "7e9", "--gpus", "8", "--step-in-backward", "--compare", "strategies")["plans"]
    stepping = {one["label"]: one["settings"]["step_in_backward"] for one in plans}
    assert {label for label, size in stepping.items() if size == 25 * 2**20} == {"ddp", "fsdp", "hsdp, groups of 4"}
    layouts = "--params 7e9 --gpus 8 --step-in-backward --compare layouts --strategy".split()
    assert not any(
        one["settings"]["step_in_backward"] for one in told(capsys, *layouts, "fsdp")["plans"] if "muon" in one["label"]
    )
    assert halfstep_main(["plan", *layouts, "zero1"]) == 2


def test_every_part_has_its_colour() -> None:
    model, drawn = MODELS["gpt2"], set()
    for strategy in STRATEGIES:
        for optimizer, precision in (
            ("halfstep", "bf16"),
            ("halfstep", "fp16"),
            ("torch", "amp-bf16"),
            ("halfstep-sgd", "bf16"),
            ("halfstep-muon", "bf16"),
        ):
            if not STRATEGIES[strategy].holds(layout(optimizer, precision)):
                continue
            sizes = {"gpus": 1 if strategy == "single" else 8, "shard": 4 if strategy == "hsdp" else None}
            sizes |= {"batch": 2, "checkpointing": "full"}
            content = plan(model=model, strategy=strategy, optimizer=optimizer, precision=precision, **sizes).as_dict()
            assert sum(part["bytes"] for part in planner.at_peak(content)) == content["totals"]["peak"]
            drawn |= {part["name"] for part in content["parts"]}
    drawn |= {part.name for part in plan(model=model, gpus=8, strategy="fsdp", lora=8).parts}
    assert drawn == set(planner.COLOURS)
    hosted = plan(7e9, gpus=8, strategy="zero2", offload=True).as_dict()
    assert [part["name"] for part in planner.at_peak(hosted)] == ["weights", "gradients", "buckets"]


def test_the_page_can_be_typed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    (python,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"model": torch.nn.Linear(3, 5)}
    exec(python, names)
    assert names["training"].totals.peak < 80 * 2**30
    strategies = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    (compared,) = re.findall(r"```sh\n(halfstep plan .*?)```", strategies, flags=re.DOTALL)
    shell = "".join([*re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL), compared])
    for line in shell.replace("\\\n", " ").splitlines():
        words = line.split()
        if "--page" in words:  # which waits for a browser
            continue
        assert words[:2] == ["halfstep", "plan"] and run(capsys, *words[2:])


def test_the_page_shows_what_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    found = re.findall(r"```console\n\$ halfstep plan ((?:[^\n]*\\\n)*[^\n]*)\n(.*?)```", text, flags=re.DOTALL)
    assert len(found) == 3
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.chdir(tmp_path)
    for typed, shown in found:
        printed = "\n".join(map(str.rstrip, run(capsys, *typed.replace("\\\n", " ").split()).splitlines())) + "\n"
        assert printed.startswith(shown.removesuffix("...\n")) and (printed == shown or shown.endswith("...\n"))
