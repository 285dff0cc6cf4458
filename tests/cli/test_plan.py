"""`halfstep plan`: its arguments and its output."""

import json
import re
import threading
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from lookup_run import complaint, lines

import halfstep
from halfstep.cli import command_line
from halfstep.cli.pages import planner
from halfstep.numerics.planning import MODELS, OPTIMIZERS, STRATEGIES, layout, plan


def printed(words: str) -> str:
    return "\n".join(lines("plan", *words.split()))


def told(words: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(printed(f"{words} --json"))
    return content


@pytest.mark.parametrize(
    ("text", "number"), [("7e9", 7e9), ("7B", 7e9), ("1.5b", 1.5e9), ("350M", 3.5e8), ("7_000", 7e3), ("2.5e1", 25)]
)
def test_numbers_may_have_suffixes_and_exponents(text: str, number: float) -> None:
    assert command_line.count()(text) == number


def test_every_option_reaches_the_plan() -> None:
    words = "--model gpt2 --eager-attention --gpus 32 --strategy hsdp --shard 4 --precision fp16 --state-dtype bf16"
    content = told(f"{words} --batch 3 --seq 512 --offload --checkpointing --loss-chunks 4")
    expected = plan(
        model=replace(MODELS["gpt2"], flash=False), gpus=32, strategy="hsdp", shard=4, precision="fp16",
        moments="bf16", batch=3, seq=512, offload=True, checkpointing="full", loss_chunks=4,
    )  # fmt: skip
    assert content["halfstep"] == halfstep.__version__ and content["compare"] is None and content["ways"] == []
    assert content["plans"] == [{"label": "halfstep, fp16, hsdp", **expected.as_dict(), "card": None}]
    buckets = plan(8, gpus=2, bucket_view=True, optimizer="halfstep-full").as_dict()
    assert told("--params 8 --gpus 2 --bucket-view --optimizer halfstep-full")["plans"][0]["parts"] == buckets["parts"]
    adapters = plan(model=MODELS["gpt2"], batch=1, lora=8).as_dict()
    assert told("--model gpt2 --lora 8")["plans"][0]["parts"] == adapters["parts"]


def test_a_card_by_name_and_by_its_memory() -> None:
    """Of the latter no speed is known, and no times are printed."""
    (one,) = told("--model gpt2 --card A100-40")["plans"]
    assert one["card"]["usable"] == 36 * 2**30 and one["card"]["fits"]
    assert one["card"]["left"] == 36 * 2**30 - one["totals"]["peak"]
    assert printed("--model gpt2 --card A100-40").startswith("Fits a100-40 (40.0 GiB): ")
    (one,) = told("--model gpt2 --card 24GiB")["plans"]
    assert one["card"]["memory"] == 24 * 2**30 and one["card"]["bandwidth"] is None and one["card"]["fits"]
    shown = printed("--model gpt2 --batch 1 --card 24gb")
    assert shown.startswith("Fits 24 GiB: ") and " ms" not in shown


def test_the_config_of_a_model_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert told(f"--model {name}") == told("--model llama-3-8b")
        refused = complaint("plan", "--model", "an/qwen3-8bb")
        server.shutdown()
    assert "HTTP Error 404" in refused and "did you mean 'qwen3-8b'?" in refused
    assert "<urlopen error" in complaint("plan", "--model", "an/qwen3-8bb")  # nobody listens any more
    file.write_text("{")
    assert f"got '{file}': Expecting property name" in complaint("plan", "--model", str(file))


@pytest.mark.parametrize(
    "words",
    [
        "--model llama-3-8b --card h100 --seq 8192 --precision amp-bf16 --optimizer torch",
        "--params 7e9 --card 24GiB --moments bf16",
    ],
)
def test_each_way_to_fit_fits_when_typed(words: str) -> None:
    content, shown = told(words), printed(words)
    assert not content["plans"][0]["card"]["fits"] and content["ways"]
    assert shown.index("Does not fit") < shown.index("It fits with any one of these") < shown.index("part")
    for way in content["ways"]:
        arguments = words
        for name, text in way["options"].items():
            arguments = re.sub(rf"--{name} \S+", "", arguments)  # in these cases each has a value
            arguments += "" if text is None else f" --{name} {text}"
        (after,) = told(arguments)["plans"]
        assert after["card"]["fits"] and after["totals"]["peak"] == way["peak"]
        assert all(cost in shown for cost in way["costs"])


def test_the_table_holds_every_part_and_message() -> None:
    words = "--model llama-3-8b --gpus 16 --strategy hsdp --shard 8 --seq 4096"
    (one,) = told(words)["plans"]
    for part in one["parts"]:
        line = next(line for line in printed(words).splitlines() if line.startswith(f"{part['name']}  "))
        assert ("≈" in line) == (not part["exact"])
    for message in one["communication"]:
        assert re.search(rf"^{message['what']}  +{message['name']}", printed(words), flags=re.MULTILINE)


def test_layouts_and_strategies_compared() -> None:
    common = "--params 7e9 --gpus 8 --card h100 --compare"
    labels = [one["label"] for one in told(f"{common} strategies")["plans"]]
    assert labels == [*(name for name in STRATEGIES if name not in ("single", "hsdp")), "hsdp, groups of 4"]
    layouts = told(f"{common} layouts")["plans"]
    assert [one["label"] for one in layouts[:2]] == ["torch, fp32", "torch, amp-bf16"]
    named = {one["settings"]["optimizer"] for one in layouts}
    assert named == set(OPTIMIZERS) - {"halfstep", "halfstep-muon"}  # which are the rows of split masters
    flat = {one["settings"]["optimizer"] for one in told(f"{common} layouts --strategy zero1")["plans"]}
    ours = {name for name in named if name.startswith("halfstep")}
    assert named - flat == {name for name in ours if name.endswith("8bit") or "muon" in name}
    for optimizer, labels in (("halfstep", ["ddp", "zero1-torch", "fsdp"]), ("halfstep-muon", ["ddp", "fsdp"])):
        plans = told(f"{common} strategies --moments 8bit --optimizer {optimizer} --step-in-backward")["plans"]
        assert [one["label"] for one in plans] == [*labels, "hsdp, groups of 4"]
    for what in ("layouts", "strategies"):
        assert {"fits", "yes", "no"} <= set(printed(f"{common} {what}").split())
    for precision in ("fp16", "fp32", "amp-bf16", "amp-fp16"):
        assert told(f"{common} layouts --precision {precision}")["plans"]


def test_what_a_strategy_cannot_do_is_left_out_of_its_plan() -> None:
    common = "--params 7e9 --gpus 8 --compare"
    hosted = {one["label"] for one in told(f"{common} strategies --offload")["plans"] if one["totals"]["host"]}
    assert hosted == {"ddp", "zero1", "zero2", "zero3", "fsdp", "fsdp1", "hsdp, groups of 4"}
    plans = told(f"{common} strategies --offload --optimizer halfstep-muon")["plans"]
    plans += told(f"{common} layouts --offload --step-in-backward --strategy fsdp")["plans"]
    kept = {one["label"] for one in plans if one["settings"]["keep_weights"] and one["totals"]["host"]}
    muon = {name for name in OPTIMIZERS if name.startswith("halfstep-muon-")}
    assert kept == muon | {"ddp", "fsdp", "hsdp, groups of 4"}
    crossing = r"[\d.]+ GiB cross the bus: [\d,]+ ms at 25 GB/s and [\d,]+ ms at 55 GB/s"
    assert re.search(crossing, printed("--params 7e9 --offload"))
    plans = told(f"{common} strategies --step-in-backward")["plans"]
    stepping = {one["label"] for one in plans if one["settings"]["step_in_backward"] == 25 * 2**20}
    assert stepping == {"ddp", "fsdp", "hsdp, groups of 4"}
    layouts = told(f"{common} layouts --step-in-backward --strategy fsdp")["plans"]
    assert not any(one["settings"]["step_in_backward"] for one in layouts if "muon" in one["label"])
    assert complaint("plan", *f"{common} layouts --step-in-backward --strategy zero1".split())


def test_every_part_has_its_colour() -> None:
    model, drawn = MODELS["gpt2"], set()
    names = ("halfstep", "bf16"), ("halfstep", "fp16"), ("torch", "amp-bf16"), ("halfstep-sgd", "bf16")
    for optimizer, precision in (*names, ("halfstep-muon", "bf16")):
        for strategy in (name for name, row in STRATEGIES.items() if row.holds(layout(optimizer, precision))):
            sizes = {"gpus": 1 if strategy == "single" else 8, "shard": 4 if strategy == "hsdp" else None}
            sizes |= {"batch": 2, "checkpointing": "full"}
            content = plan(model=model, strategy=strategy, optimizer=optimizer, precision=precision, **sizes).as_dict()
            assert sum(part["bytes"] for part in planner.at_peak(content)) == content["totals"]["peak"]
            drawn |= {part["name"] for part in content["parts"]}
    drawn |= {part.name for part in plan(model=model, gpus=8, strategy="fsdp", lora=8).parts}
    assert drawn == set(planner.COLOURS)
    hosted = plan(7e9, gpus=8, strategy="zero2", offload=True).as_dict()
    assert [part["name"] for part in planner.at_peak(hosted)] == ["weights", "gradients", "buckets"]
