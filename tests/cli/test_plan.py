"""`halfstep plan`: what it refuses, prints, writes and draws."""

from __future__ import annotations

import json
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from halfstep.__main__ import main as halfstep_main
from halfstep.cli import numbers, plan_picture
from halfstep.numerics.planning import OPTIMIZERS, STRATEGIES, Transformer, plan

SHAPE = ["--layers", "12", "--hidden", "768", "--heads", "12", "--vocab", "40512", "--seq", "512"]


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
    made = told(
        capsys,
        *(*SHAPE, "--ffn", "2048", "--kv-heads", "4", "--gated", "--no-biases", "--norm", "rms", "--no-final-norm"),
        *("--no-positions", "--tied", "--no-dropout", "--eager-attention", "--gpus", "32"),
        *("--strategy", "hsdp", "--shard", "4"),
        *("--tp", "2", "--sequence-parallel", "--offload", "--compress", "fp16", "--rank", "1", "--precision", "bf16"),
        *("--optimizer", "te-master", "--moments", "fp8,fp16", "--master", "fp16", "--grad-dtype", "fp32"),
        *"--accumulator fp32 --batch 3 --accumulate 2 --checkpointing sqrt --loss-chunks 4".split(),
    )
    model = Transformer(
        *(12, 768, 12, 40512, 512), ffn=2048, kv_heads=4, gated=True, biases=False, norm="rms", final_norm=False,
        positions=False, tied=True, dropout=False, flash=False,
    )  # fmt: skip
    expected = plan(
        model=model, gpus=32, strategy="hsdp", shard=4, tensor_parallel=2, sequence_parallel=True, offload=True,
        compress="fp16", rank=1, optimizer="te-master", moments="fp8,fp16", master="fp16", gradients="fp32",
        accumulator="fp32", batch=3, seq=512, accumulate=2, checkpointing="sqrt", loss_chunks=4,
    )  # fmt: skip
    assert made["halfstep"] == halfstep.__version__ and made["compare"] is None and made["fit"] is None
    (one,) = made["plans"]
    added = {name: one.pop(name) for name in ("label", "card", "mfu", "hfu")}
    assert added == {"label": "te-master, bf16, hsdp", "card": None, "mfu": None, "hfu": None}
    assert one == expected.as_dict()
    assert told(capsys, *SHAPE, "--checkpointing")["plans"][0]["settings"]["checkpointing"] == "full"
    amsgrad = told(capsys, "--params", "8", "--amsgrad", "--gpus", "2", "--bucket-view")["plans"][0]["parts"]
    assert {"max_exp_avg_sq", "buckets"} & {part["name"] for part in amsgrad} == {"max_exp_avg_sq"}


def test_a_card_a_measured_step_and_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*SHAPE, "--batch", "8", "--card", "A100-40", "--reserve", "4GiB", "--step-ms", "100", "--fit", "batch"]
    made = told(capsys, *arguments)
    (one,) = made["plans"]
    usable = 36 * 2**30
    assert one["card"]["usable"] == usable and one["card"]["fits"]
    assert one["card"]["left"] == usable - one["totals"]["peak"]
    assert one["mfu"] == one["hfu"] == pytest.approx(one["work"]["training"] / 0.1 / 312e12)
    best = made["fit"]["plan"]
    assert made["fit"]["what"] == "batch" and best["totals"]["peak"] <= usable
    more = told(capsys, *SHAPE, "--batch", str(best["settings"]["batch"] + 1))
    assert more["plans"][0]["totals"]["peak"] > usable
    printed = run(capsys, *arguments)
    assert f"a micro-batch of {best['settings']['batch']}" in printed
    assert f"MFU {one['mfu']:.3f}" in printed and printed.startswith("Fits a100-40 (40.0 GiB): ")


def test_a_card_of_which_only_the_memory_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    (one,) = told(capsys, *SHAPE, "--card", "24GiB")["plans"]
    assert one["card"]["memory"] == 24 * 2**30 and one["card"]["bandwidth"] is None and one["card"]["fits"]
    printed = run(capsys, *SHAPE, "--batch", "1", "--card", "24 gb")
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
    assert "HTTP Error 404" in refused and "did you mean 'qwen3-8b'? Otherwise pass the path of its config" in refused
    assert halfstep_main(["plan", "--model", "an/qwen3-8bb"]) == 2  # nobody listens any more
    assert "an/qwen3-8bb/resolve/main/config.json was not read: <urlopen error" in capsys.readouterr().err
    file.write_text("{")
    assert halfstep_main(["plan", "--model", str(file)]) == 2
    assert f"{file} is none" in capsys.readouterr().err


def test_what_does_not_fit_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "--model", "llama-3-70b", "--card", "rtx4090", "--fit", "batch")
    assert printed.startswith("Does not fit rtx4090 (24.0 GiB)") and "Not even one sequence fits." in printed
    largest = run(capsys, "--params", "1", "--optimizer", "torch-fused", "--precision", "fp32", "--reserve", "0%",
                  "--card", "h100", "--fit", "params")  # fmt: skip
    assert f"{80 * 2**30 // 16:,} parameters" in largest
    assert "layers (" in run(capsys, *SHAPE, "--card", "rtx4090", "--fit", "layers")


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
    # "halfstep" is the split master's row, O2 is fp16's, and flashoptim without master bits fp32's.
    assert named == set(OPTIMIZERS) - {"halfstep", "apex-o2", "flashoptim", "torch-fused-bf16"}
    flat = told(capsys, *common, "--compare", "layouts", "--strategy", "zero1")["plans"]
    assert named - {one["settings"]["optimizer"] for one in flat} == {
        name for name in named if name.startswith("halfstep") and name.endswith("8bit")
    }
    kept = told(capsys, *common, "--compare", "strategies", "--moments", "8bit")["plans"]
    assert [one["label"] for one in kept] == ["ddp", "zero1-torch", "fsdp", "hsdp, groups of 4"]
    for what in ("layouts", "strategies"):
        printed = run(capsys, *common, "--compare", what)
        assert "fits" in printed and "yes" in printed and ("no" in printed.split())
    fp16 = told(capsys, *common, "--compare", "layouts", "--precision", "fp16")["plans"]
    assert {"halfstep", "apex-o2"} <= {one["settings"]["optimizer"] for one in fp16}
    for precision in ("fp32", "amp-bf16", "amp-fp16"):
        assert told(capsys, *common, "--compare", "layouts", "--precision", precision)["plans"]


def test_strategies_on_several_numbers_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--model", "gpt2", "--compare", "strategies", "--shard", "8", "--strategy", "zero1,hsdp"]
    several = told(capsys, *common, "--gpus", "16,1024,16")["plans"]
    assert [one["label"] for one in several] == [
        *("zero1, 16 GPUs", "zero1, 1,024 GPUs", "hsdp, groups of 8, 16 GPUs", "hsdp, groups of 8, 1,024 GPUs")
    ]
    for gpus in (16, 1024):
        alone = told(capsys, *common, "--gpus", str(gpus))["plans"]
        assert [one["label"] for one in alone] == ["zero1", "hsdp, groups of 8"]
        listed = [{**one, "label": ""} for one in several if one["settings"]["gpus"] == gpus]
        assert listed == [{**one, "label": ""} for one in alone]
    printed = run(capsys, *common, "--gpus", "16,1024").splitlines()
    assert printed[0] == "124,439,808 parameters; halfstep, bf16; per GPU, GiB"
    rows = [line.split()[:4] for line in printed if line.startswith("hsdp")]
    assert rows == [["hsdp,", "shard", "8", "16"], ["hsdp,", "shard", "8", "1,024"]]


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


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_the_picture_is_drawn(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begins = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}[suffix]
    written = []
    for number in range(2):
        path = tmp_path / f"bars{number}.{suffix}"
        run(capsys, "--params", "7e9", "--gpus", "8", "--compare", "layouts", "--card", "h100", "--out", str(path))
        written.append(path.read_bytes())
    assert written[0].startswith(begins) and written[0] == written[1]


def test_every_part_has_its_colour() -> None:
    coloured = {name for _, _, names in plan_picture.MEMORY_KINDS for name in names}
    model = Transformer(12, 768, 12, 40512, 512)
    drawn = set()
    for strategy in STRATEGIES:
        for optimizer, precision in (("te-master", "bf16"), ("te-remainder", "bf16"), ("torch", "amp-bf16")):
            made = plan(
                model=model, gpus=1 if strategy == "single" else 8, shard=4 if strategy == "hsdp" else None, batch=2,
                strategy=strategy, optimizer=optimizer, precision=precision, accumulator="fp32",
                compress=None if strategy == "single" else "fp16",
                moments="fp16" if optimizer == "te-master" else None, amsgrad=optimizer == "torch",
                checkpointing="full",
            )  # fmt: skip
            assert sum(plan_picture.stack(made.as_dict()).values()) == made.totals.peak
            drawn |= {part.name for part in made.parts}
    adapters = plan(model=model, gpus=8, strategy="fsdp", lora=8)
    assert sum(plan_picture.stack(adapters.as_dict()).values()) == adapters.totals.peak
    assert drawn | {part.name for part in adapters.parts} == coloured
    hosted = plan(7e9, gpus=8, strategy="zero2", offload=True)
    shown = plan_picture.stack(hosted.as_dict())
    assert sum(shown.values()) == hosted.totals.peak and "moments" not in shown
    assert len({colour for _, colour, _ in plan_picture.MEMORY_KINDS}) == len(plan_picture.MEMORY_KINDS)


def test_the_page_can_be_typed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    (python,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names: dict[str, Any] = {"model": torch.nn.Linear(3, 5)}
    exec(python, names)
    assert names["best"].settings["batch"] > 2 and names["made"].totals.peak < 80 * 2**30
    strategies = (Path(__file__).resolve().parents[2] / "docs" / "distributed.md").read_text(encoding="utf-8")
    (compared,) = re.findall(r"```sh\n(halfstep plan .*?)```", strategies, flags=re.DOTALL)
    shell = "".join([*re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL), compared])
    for line in shell.replace("\\\n", " ").splitlines():
        words = line.split()
        if "--page" in words:  # which waits for a browser
            continue
        assert words[:2] == ["halfstep", "plan"] and run(capsys, *words[2:])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plan.png", "scaling.png"]


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


def test_the_options_of_the_optimizer_name_its_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    for words, layout in (
        ("--master-weights split24 --state-dtype 8bit", "halfstep-split24-8bit"),
        ("--master-weights none", "halfstep-stochastic"),
        ("--master-weights auto --grad-dtype fp32", "halfstep --gradients fp32"),
        ("--master full --moments bf16 --precision fp16", "halfstep-full --state-dtype bf16 --precision fp16"),
    ):
        both = [f"--params 7e9 --json {words}", f"--params 7e9 --json --optimizer {layout}"]
        first, second = (json.loads(run(capsys, *options.split()))["plans"][0] for options in both)
        assert first["parts"] == second["parts"] and first["totals"] == second["totals"]
