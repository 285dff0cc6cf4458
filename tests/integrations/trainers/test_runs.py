"""What docs/trainers.md promises of every trainer, with the real libraries, in one process and on two gloo ranks."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from states import same_bits
from trainer_tools import BROKEN, LR, MAX_NORM, SCALE, STEPS, own_loop, skip_without

STRATEGIES = {
    "accelerate": ("one process", "DDP", "FSDP2"),
    "transformers": ("one process", "DDP", "FSDP2", "SFT"),
    "lightning": ("one process", "DDP", "FSDP2"),
    "fabric": ("one process", "DDP", "FSDP2"),
    "torchtitan": ("one process", "FSDP2"),
}
NEEDED = {"transformers": ("transformers", "trl", "peft", "bitsandbytes"), "fabric": ("lightning",)}
PRECISIONS = ("bf16-true", "16-true", "bf16-mixed", "16-mixed")
Results = Callable[[str], dict[str, list[Any]]]


def is_fp16(run: str) -> bool:
    return run.endswith(("fp16", " 16-true", " 16-mixed"))


def runs(alone: bool = False) -> pytest.MarkDecorator:
    """A parameter for each library, strategy and precision; `alone`, those that a loop of our own can repeat."""
    names = [
        pytest.param(library, f"{strategy} {kind}", marks=skip_without(*NEEDED.get(library, (library,))))
        for library, strategies in STRATEGIES.items()
        for strategy in strategies
        for kind in (PRECISIONS if library in ("lightning", "fabric") else ("bf16", "fp16"))
        if not alone or (strategy == "one process" and not kind.endswith("mixed") and library != "transformers")
    ]
    return pytest.mark.parametrize(("library", "run"), names)


@runs()
def test_every_run_trains_skips_together_and_exports(results: Results, library: str, run: str) -> None:
    """It trains, all ranks skip an overflow and hold the schedule, clipping writes nothing, and the export is exact."""
    first, *others = results(library)[run]
    before, after = first["fit"]
    assert after < 0.7 * before
    taken = [step + 1 - (is_fp16(run) and step >= BROKEN) for step in range(STEPS)]
    rates = [LR * 0.5**count for count in taken]
    if library in ("transformers", "torchtitan"):
        rates = [LR * (1 - count / STEPS / (1 if library == "transformers" else 2)) for count in taken]
    for rank in (first, *others):
        assert rank["sharded"] == run.startswith("FSDP2")
        assert rank["sharded"] or same_bits(rank["state"], first["state"])
        if run.endswith((" bf16", "bf16-true")):
            assert rank["masters"] == ["torch.int16"] and rank["weights"] == ["torch.bfloat16"]
        assert rank["unwritten"] == [True] * STEPS and rank["exported"]
        assert rank["skipped"] == [is_fp16(run) and step == BROKEN for step in range(STEPS)]
        assert rank["rates"] == pytest.approx(rates, rel=1e-12, abs=LR / 50 if library == "torchtitan" else 0)
        assert len(set(rank["rates"])) == len(set(taken))
        assert all(rank.get("resumed", {}).values()) and ("resumed" in rank or run.startswith("SFT"))
    if library != "lightning":  # it does not tell the norm
        finite = [norm for norm in first["norms"] if math.isfinite(norm)]
        assert len(finite) == STEPS - is_fp16(run) and min(finite) > MAX_NORM
        assert library == "transformers" or all(rank["norms"] == first["norms"] for rank in others)
    skips = [step >= BROKEN for step in range(STEPS)]
    scaled = [{"halfstep/scale": SCALE / 2**skip, "halfstep/skipped": float(skip)} for skip in skips]
    shared = {key: [row.pop(key, None) for row in first["log"]] for key in ("halfstep/grad_norm", "halfstep/underflow")}
    assert first["log"] == (scaled if is_fp16(run) else [{}] * STEPS)
    if library in ("accelerate", "transformers", "lightning"):  # their runs have a monitor
        norms, underflow = shared.values()
        assert norms == pytest.approx(first.get("norms", norms), rel=1e-6, nan_ok=True)
        assert None not in norms and all(0 <= share < 1 for share in underflow)


@runs(alone=True)
def test_the_bits_are_those_of_a_loop_of_our_own(results: Results, library: str, run: str) -> None:
    (rank,) = results(library)[run]
    if library == "torchtitan":
        assert same_bits(rank["state"], rank["own"])
        return
    own = own_loop("fp16" if is_fp16(run) else "bf16")
    assert same_bits(rank["state"], own["state"]) and rank["rates"] == own["rates"]
    assert rank.get("norms", own["norms"]) == own["norms"]
