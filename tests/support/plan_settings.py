"""Random settings of `halfstep plan`, and what the command answers to them.

Settings are texts by the names of options, as in the address of the planner; "" is an option without a value.
"""

from __future__ import annotations

import json
import random
from typing import Any

from halfstep.cli import plan as command
from halfstep.cli import plan_tables
from halfstep.cli.command_line import UsageError
from halfstep.numerics.planning import CARDS, CHECKPOINTING, LAYOUTS, MODELS, STRATEGIES

Settings = dict[str, str]
FORMATS = ("fp32", "bf16", "fp16")
# Options that settings have now and then, with their values.
OPTIONS = {
    "card": (*CARDS, "H100"), "reserve": ("0%", "12.5%", "4GiB", "500MB", "1.5gib"), "step-ms": ("1200", "17.25"),
    "checkpointing": (*CHECKPOINTING, ""), "seq": ("1", "100", "512", "1024"), "accumulate": ("2", "5", "32"),
    "moments": ("fp32", "bf16", "8bit", "fp8,fp16"), "gradients": FORMATS, "accumulator": FORMATS, "compress": FORMATS,
    "tensor-parallel": ("2", "4"), "lora": ("8", "64"), "rank": ("0", "1"), "step-in-backward": ("", "1000000", "2G"),
    "fit": ("batch", "params"),
    **{name: ("",) for name in ("offload", "amsgrad", "bucket-view", "eager-attention", "tied")},
}  # fmt: skip


def words(settings: Settings) -> list[str]:
    """The settings as a command line."""
    return [f"--{name}={text}" if text else f"--{name}" for name, text in settings.items()]


def answer(settings: Settings) -> dict[str, Any]:
    """The JSON and the sentences of the command, or the message with which it refuses."""
    try:
        options = command.parser().parse(words(settings))
        content = command.planned(options)
    except (UsageError, ValueError) as error:
        return {"refused": str(error).removesuffix("; see halfstep plan --help")}
    said = plan_tables.sentences(content)
    return {"json": json.dumps(content, indent=2, ensure_ascii=False), "said": said}


def settings(seed: int) -> Settings:
    """Random settings, most of which can be planned."""
    draw = random.Random(seed)
    heads = draw.choice((1, 6, 8, 16))
    sizes = {"layers": draw.choice((1, 5, 24, 80)), "hidden": heads * draw.choice((8, 64, 128)), "heads": heads}
    shape = {name: str(size) for name, size in {**sizes, "vocab": 50304, "seq": draw.choice((127, 2048))}.items()}
    params = {"params": draw.choice(("7e9", "350M", "13_000_001")), "seq": "512"}
    models = (params, {"model": draw.choice(list(MODELS))}, shape)
    row, gpus = draw.choice(LAYOUTS), draw.choice((1, 2, 3, 8, 8, 12, 64, 1024))
    strategy = draw.choice(list(STRATEGIES)[1:]) if gpus > 1 else "single"
    state = {**draw.choice(models), "optimizer": row.optimizer, "precision": row.precision}
    state |= {"gpus": str(gpus), "strategy": strategy, "batch": draw.choice("127")}
    if strategy == "hsdp":
        state["shard"] = str(gpus // 2 if gpus % 2 == 0 else gpus)
    state |= {name: draw.choice(values) for name, values in OPTIONS.items() if draw.random() < 0.06}
    listed = list(state.items())
    draw.shuffle(listed)  # which message comes first must not depend on the order
    return dict(listed)


def typos(seed: int) -> Settings:
    """Settings of `settings`, one of which is wrong."""
    draw, state = random.Random(seed), settings(seed)
    name = draw.choice([name for name in state if state[name]])
    at = draw.randrange(len(state[name]) + 1)
    return {**state, name: state[name][:at] + draw.choice("abfp0189-.,%' \"é") + state[name][at:]}
