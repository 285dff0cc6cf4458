"""Random settings of `halfstep plan`, and what the command answers to them.

Settings are texts by the names of options, as in the address of the planner; "" is an option without a value.
"""

from __future__ import annotations

import json
import random
from typing import Any

from halfstep.cli import plan as command
from halfstep.cli import plan_picture, plan_tables
from halfstep.cli.command_line import UsageError
from halfstep.numerics.planning import CARDS, CHECKPOINTING, LAYOUTS, MODELS, STRATEGIES

Settings = dict[str, str]
FLAGS = ("gated", "no-biases", "no-final-norm", "no-positions", "tied", "no-dropout", "flash")


def words(settings: Settings) -> list[str]:
    """The settings as a command line."""
    return [f"--{name}={text}" if text else f"--{name}" for name, text in settings.items()]


def answer(settings: Settings) -> dict[str, Any]:
    """The JSON and the sentences of the command, and the bars of its plans, or the message with which it refuses."""
    try:
        given = command.parser().parse(words(settings))
        content = command.planned(given)
    except (UsageError, ValueError) as error:
        return {"refused": str(error).removesuffix("; see halfstep plan --help")}
    said = plan_tables.sentences(content, command.shape_over_params(given)) if content["compare"] is None else []
    stacks = [[[kind, str(size)] for kind, size in plan_picture.stack(made).items()] for made in content["plans"]]
    return {"json": json.dumps(content, indent=2, ensure_ascii=False), "said": said, "stacks": stacks}


def settings(seed: int) -> Settings:
    """Random settings, most of which can be planned."""
    draw = random.Random(seed)

    def maybe(share: float) -> bool:
        return draw.random() < share

    found: Settings = {}
    shape = _shape(draw, found)
    rows = [row for row in LAYOUTS if maybe(0.9) or row.precision == "bf16"]
    row = draw.choice(rows)
    if (row.optimizer, row.precision) != ("halfstep", "bf16") or maybe(0.3):
        found["optimizer"], found["precision"] = row.optimizer, row.precision
    found["gpus"] = str(draw.choice((1, 1, 2, 3, 4, 6, 8, 8, 12, 16, 31, 64, 256, 1024, 5000)))
    t = draw.choice((1, 1, 1, 1, 2, 4, 8))
    if t > 1 and (int(found["gpus"]) % t == 0 or maybe(0.02)):
        found["tensor-parallel"] = str(t)
        if maybe(0.4):
            found["sequence-parallel"] = ""
    ranks = max(1, int(found["gpus"]) // int(found.get("tensor-parallel", 1)))
    if maybe(0.9):
        found["strategy"] = "single" if ranks == 1 and maybe(0.6) else draw.choice(list(STRATEGIES)[maybe(0.98) :])
    ways = ranks
    if found.get("strategy") == "hsdp" or maybe(0.02):
        ways = draw.choice([size for size in range(1, ranks + 1) if ranks % size == 0 or maybe(0.001)])
        found["shard"] = str(ways)
    found["batch"] = str(draw.choice((1, 2, 3, 7, 8, 64)))
    _others(draw, found, row.moments_allowed, row.master_allowed, shape, ways)
    _asked(draw, found, shape)
    if maybe(0.5):  # which message comes first must not depend on the order
        listed = list(found.items())
        draw.shuffle(listed)
        found = dict(listed)
    return found


def _shape(draw: random.Random, found: Settings) -> bool:
    """Add a model. Returns whether it has a shape."""
    kind = draw.random()
    if kind < 0.2:
        found["params"] = draw.choice(
            ["7e9", "350M", "1.5B", "1", "13_000_001", "405b", str(draw.randrange(1, 10**10))]
        )
        return False
    if kind < 0.55:
        found["model"] = draw.choice(list(MODELS))
        if draw.random() < 0.2:
            found[draw.choice(["layers", "vocab", "hidden"])] = str(draw.choice([1, 2, 7, 64, 1024, 5120]))
    else:
        heads = draw.choice([1, 2, 3, 6, 8, 12, 16, 64])
        sizes = {
            "layers": draw.choice([1, 2, 5, 12, 24, 61, 80, 126]),
            "hidden": heads * draw.choice([1, 8, 20, 64, 128]),
        }
        sizes |= {"heads": heads, "vocab": draw.choice([1, 256, 4096, 32000, 50257, 50304, 128256])}
        sizes |= {"seq": draw.choice([1, 127, 512, 2048, 4096, 131072])}
        found |= {name: str(size) for name, size in sizes.items()}
        if draw.random() < 0.5:
            found["kv-heads"] = str(draw.choice([size for size in range(1, heads + 1) if heads % size == 0]))
    found |= {name: "" for name in FLAGS if draw.random() < 0.2}
    if draw.random() < 0.2:
        found["norm"] = draw.choice(["rms", "layer"])
    if draw.random() < 0.2:
        found["ffn"] = str(draw.choice([64, 100, 11008, 8192]))
    return True


def _others(
    draw: random.Random, found: Settings, moments: tuple[str, ...], master: tuple[str, ...], shape: bool, ways: int
) -> None:
    """Add options of the layout, the step and the GPUs."""
    ours = found.get("optimizer", "halfstep").startswith("halfstep")

    def maybe(share: float) -> bool:
        return draw.random() < share

    if moments and maybe(0.3):
        found["moments"] = draw.choice(moments) if ours or maybe(0.5) else ",".join(draw.choices(moments, k=2))
    if master and maybe(0.5):
        found["master"] = draw.choice(master)
    for name in ("gradients", "accumulator", "compress"):
        if maybe(0.12):
            found[name] = draw.choice(["fp32", "bf16", "fp16"])
    if maybe(0.1 if ours else 0.05):
        found["amsgrad"] = ""
    if maybe(0.25):
        found["accumulate"] = str(draw.choice([1, 2, 5, 32]))
    if maybe(0.3):
        found["seq"] = str(draw.choice([1, 100, 512, 1024]))
    if shape and maybe(0.5):
        found["checkpointing"] = draw.choice([*CHECKPOINTING, ""])
    if found.get("strategy") not in ("zero1-torch", None) and maybe(0.2):
        found["offload"] = ""
    if maybe(0.15):
        found["bucket-view"] = ""
    if ours and found.get("strategy", "single") in ("single", "ddp", "fsdp", "hsdp") and maybe(0.3):
        found["step-in-backward"] = draw.choice(["", "1", "1000000", "2G"])
        found.pop("accumulate", None)
        found.pop("accumulator", None)
    if shape and "tensor-parallel" not in found and maybe(0.15):
        found["lora"] = draw.choice(["1", "8", "64"])
        for name in ("offload", "step-in-backward"):
            if maybe(0.95):
                found.pop(name, None)
    if maybe(0.15):
        divided = found.get("strategy") not in ("ddp", "single", None)
        found["rank"] = str(draw.randrange(ways) if divided else 0)


def _asked(draw: random.Random, found: Settings, shape: bool) -> None:
    """Add a card, what should fit, and comparisons."""

    def maybe(share: float) -> bool:
        return draw.random() < share

    if maybe(0.6):
        found["card"] = draw.choice([*CARDS, "H100"])
        if maybe(0.4):
            found["reserve"] = draw.choice(["0%", "12.5%", "4GiB", "500MB", "33.3%", "1.5gib"])
        if maybe(0.3) and (shape or ("batch" in found and "seq" in found)):
            found["step-ms"] = draw.choice(["1200", "0.5", "1e3", "17.25"])
    if maybe(0.15):
        found["compare"] = draw.choice(["layouts", "strategies"])
        if found["compare"] == "layouts":
            for name in ("moments", "master", "gradients", "step-in-backward"):
                found.pop(name, None)
        elif maybe(0.8):
            found.pop("strategy", None)
            if "shard" not in found and maybe(0.3):
                found["gpus"] = draw.choice(["8,64,1024", "16,8"])
    elif "card" in found and maybe(0.3):
        # The command assigns every tensor of each depth that it tries, of which narrow models have millions.
        narrow = found.get("strategy") == "zero1-torch" and int(found.get("hidden", "4096")) < 512
        found["fit"] = "params" if not shape else "batch" if narrow else draw.choice(["layers", "batch"])


def typos(seed: int) -> Settings:
    """Settings of `settings`, one of which is wrong."""
    draw = random.Random(seed)
    found = settings(seed)
    name = draw.choice([name for name in found if found[name]] or ["gpus"])
    text = found.get(name, "1")
    place = draw.randrange(len(text) + 1)
    sign = draw.choice("abfp0189-.,%' \"é")
    found[name] = draw.choice([text[:place] + sign + text[place:], text[:place] + text[place + 1 :] or "x", "0", "x"])
    return found
