"""`ways_to_fit`: every way fits, needs each of its changes, and comes before ways of more effort."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from halfstep.numerics.planning import MODELS, card, plan, usable, ways_to_fit

LLAMA = {"model": MODELS["llama-3-8b"], "batch": 1}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("24GiB", LLAMA | {"seq": 2048}),
    ("24GiB", LLAMA | {"gpus": 4, "strategy": "ddp"}),
    ("h100", LLAMA),
    ("h100", LLAMA | {"gpus": 8, "strategy": "fsdp", "batch": 4}),
    ("rtx4090", LLAMA | {"optimizer": "torch-fused", "precision": "amp-bf16", "seq": 1024}),
    ("t4", {"model": MODELS["gpt2-xl"], "precision": "fp16", "batch": 8}),
    ("a100-80", {"model": MODELS["mixtral-8x7b"], "batch": 1, "gpus": 8, "strategy": "fsdp"}),
    ("l4", {"params": 3e9}),
]

ONE_CHANGE = (("gpus", "strategy"), ("precision", "optimizer", "moments", "master"))  # options that change together


def _with(arguments: dict[str, Any], options: dict[str, Any]) -> int:
    options = dict(options)
    if options.pop("flash", False):
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


def test_a_training_that_fits_needs_no_change() -> None:
    assert ways_to_fit(usable(card("h100")), model=MODELS["gpt2"], batch=1) == []


def test_nothing_fits_a_tiny_card() -> None:
    assert ways_to_fit(2**20, **LLAMA) == []


def test_llama_3_8b_on_24_gib_goes_to_the_host() -> None:
    """As its authors' recipes do: full checkpointing, and states on the host."""
    way = ways_to_fit(usable(card("24GiB")), **LLAMA | {"seq": 1024})[0]
    assert way.options == {"checkpointing": "full", "offload": True}
    assert way.plan.totals.host == 14 * 8_030_261_248 + 4 * (32 * 7 + 3)  # and a step count for each parameter


def test_amsgrad_and_further_options_stay() -> None:
    ways = ways_to_fit(usable(card("h100")), **LLAMA | {"amsgrad": True, "seq": 2048})
    assert ways and all(way.plan.settings["amsgrad"] for way in ways)
