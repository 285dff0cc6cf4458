"""Random settings of `halfstep plan`.

Settings are texts by the names of options, as in the address of the planner; "" is an option without a value.
"""

import random

from halfstep.numerics.planning import CARDS, CHECKPOINTING, LAYOUTS, MODELS, STRATEGIES

Settings = dict[str, str]
# Options that settings have now and then, with their values.
OPTIONS = {
    "card": (*CARDS, "H100"), "checkpointing": (*CHECKPOINTING, ""), "seq": ("1", "100", "512", "1024"),
    "moments": ("fp32", "bf16", "8bit", "fp8"), "lora": ("8", "64"), "step-in-backward": ("", "1000000", "2G"),
    **{name: ("",) for name in ("offload", "keep-weights", "bucket-view", "eager-attention")},
}  # fmt: skip


def words(settings: Settings) -> list[str]:
    return [f"--{name}={text}" if text else f"--{name}" for name, text in settings.items()]


def settings(seed: int) -> Settings:
    """Random settings, most of which can be planned."""
    draw = random.Random(seed)
    params = {"params": draw.choice(("7e9", "350M", "13_000_001")), "seq": "512"}
    models = (params, {"model": draw.choice(list(MODELS))}, {"model": draw.choice(list(MODELS)), "seq": "777"})
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
