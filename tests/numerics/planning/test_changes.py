"""`ways_to_fit`: every way fits, needs each of its changes, and comes before ways of more effort."""

from dataclasses import replace
from typing import Any

import pytest

from halfstep.numerics.planning import MODELS, Way, card, plan, usable, ways_to_fit
from halfstep.numerics.planning.models import parameters_of

LLAMA = {"model": MODELS["llama-3-8b"], "batch": 1}
EAGER = {"model": replace(MODELS["llama-3-8b"], flash=False), "batch": 1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("24GiB", LLAMA | {"seq": 2048}),
    ("24GiB", LLAMA | {"gpus": 4, "strategy": "ddp"}),
    ("h100", EAGER),
    ("h100", LLAMA | {"gpus": 8, "strategy": "fsdp", "batch": 4}),
    ("rtx4090", LLAMA | {"optimizer": "torch-fused", "precision": "amp-bf16", "seq": 1024}),
    ("t4", {"model": MODELS["gpt2-xl"], "precision": "fp16", "batch": 8}),
    ("a100-80", {"model": MODELS["mixtral-8x7b"], "batch": 1, "gpus": 8, "strategy": "fsdp"}),
    ("l4", {"params": 3e9}),
    ("a6000", LLAMA | {"seq": 2048, "optimizer": "halfstep-muon"}),
]

ONE_CHANGE = (("gpus", "strategy"), ("precision", "optimizer", "moments"))  # options that change together


def _with(arguments: dict[str, Any], options: dict[str, Any]) -> int:
    options = dict(options)
    if options.pop("flash", None):
        options["model"] = replace(arguments["model"], flash=True)
    return plan(**{**arguments, **options}).totals.peak


@pytest.mark.parametrize(("name", "arguments"), CASES)
def test_each_way_fits_and_needs_all_its_changes(name: str, arguments: dict[str, Any]) -> None:
    memory = usable(card(name))
    assert _with(arguments, {}) > memory
    ways = ways_to_fit(memory, **arguments)
    assert ways
    for way in ways:
        assert _with(arguments, way.options) == way.plan.totals.peak <= memory
        assert way.texts and not any("{" in text for text in way.texts)
        for option in way.options:
            together = next((options for options in ONE_CHANGE if option in options), (option,))
            fewer = {key: value for key, value in way.options.items() if key not in together}
            try:
                assert _with(arguments, fewer) > memory, (way.options, option)
            except ValueError:  # the rest does not go together without it
                continue


def test_what_fits_needs_no_change_and_nothing_fits_a_tiny_card() -> None:
    assert ways_to_fit(usable(card("h100")), model=MODELS["gpt2"], batch=1) == []
    assert ways_to_fit(2**20, **LLAMA) == []


def test_llama_3_8b_on_24_gib_goes_to_the_host() -> None:
    """The logits of 128,256 words take more than is left; flash attention is proposed where scores are stored."""
    way = ways_to_fit(usable(card("24GiB")), **LLAMA | {"seq": 1024})[0]
    assert way.options == {"loss_chunks": 16, "offload": True}
    (eager, *_) = ways_to_fit(usable(card("24GiB")), **EAGER | {"seq": 1024})
    assert eager.options == {"flash": True, **way.options} and eager.plan == way.plan
    assert way.plan.totals.host == 14 * 8_030_261_248 + 4 * (32 * 7 + 3)  # and a step count for each parameter


def test_ways_differ_in_more_than_what_costs_nothing() -> None:
    """One GPU of 24 GiB: the host, adapters or more GPUs, not five times the host. On the GPUs that there are, FSDP."""
    changed = [way.options.keys() - {"loss_chunks", "checkpointing"} for way in _ways("24GiB", **LLAMA)]
    assert [sorted(options) for options in changed] == [["offload"], ["lora"], *[["gpus", "strategy"]] * 2]
    eight = _ways("80GiB", **LLAMA, gpus=8, bucket_view=True)
    assert [way.options for way in eight[:2]] == [
        {"strategy": "fsdp", "bucket_view": False},
        {"optimizer": "halfstep-split24-8bit", "checkpointing": "full"},
    ]


def test_muon_stays_muon() -> None:
    (way, *_) = _ways("80GiB", **LLAMA | {"seq": 2048}, optimizer="halfstep-muon")
    assert way.options["optimizer"].startswith("halfstep-muon-split")
    (way, *_) = _ways("24GiB", **LLAMA | {"gpus": 4, "strategy": "fsdp", "seq": 2048}, optimizer="halfstep-muon")
    assert way.options == {"offload": True, "keep_weights": True}


def test_what_a_way_costs() -> None:
    host, adapters, *_ = _ways("24GiB", **LLAMA)
    copied = 3 * 2 * 8_030_261_248  # gradients leave, and weights leave and come
    assert host.texts[-1] == (
        f"states and steps on the host: 105 GiB there per GPU; {copied / 1e9:.3g} GB over PCIe a step, "
        f"{copied / 25e9:.2g} s at 25 GB/s, {copied / 55e9:.2g} s at 55 GB/s"
    )
    trained = parameters_of(LLAMA["model"].adapters(16))
    assert adapters.texts[-1] == f"LoRA: {trained:,} numbers (0.47%) trained, all weights frozen"
    assert adapters.plan.work is not None
    again = adapters.plan.work.hardware / adapters.plan.work.training - 1
    assert f"activations recomputed: {again:.0%} more FLOPs" in adapters.texts


def _ways(name: str, **arguments: Any) -> list[Way]:
    return ways_to_fit(usable(card(name)), **arguments)
