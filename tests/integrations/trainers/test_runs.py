"""What docs/trainers.md promises of every trainer, with the real libraries, in one process and on two gloo ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from trainer_tools import BROKEN, LR, MAX_NORM, SCALE, STEPS, own_loop, same_bits, skip_without

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


def runs(chosen: Callable[[str], bool] = lambda run: True, without: str = "") -> pytest.MarkDecorator:
    """A parameter for each library, strategy and precision."""
    names = [
        pytest.param(library, f"{strategy} {kind}", marks=skip_without(*NEEDED.get(library, (library,))))
        for library, strategies in STRATEGIES.items()
        for strategy in strategies
        for kind in (PRECISIONS if library in ("lightning", "fabric") else ("bf16", "fp16"))
        if chosen(f"{strategy} {kind}") and library != without
    ]
    return pytest.mark.parametrize(("library", "run"), names)


@runs()
def test_it_trains(results: Results, library: str, run: str) -> None:
    first, *others = results(library)[run]
    before, after = first["fit"]
    assert after < 0.7 * before
    for rank in (first, *others):
        assert rank["sharded"] == run.startswith("FSDP2")
        assert rank["sharded"] or same_bits(rank["state"], first["state"])


@runs(lambda run: run.startswith("one process") and not run.endswith("mixed"), without="transformers")
def test_the_bits_are_those_of_a_loop_of_our_own(results: Results, library: str, run: str) -> None:
    (rank,) = results(library)[run]
    if library == "torchtitan":
        assert same_bits(rank["state"], rank["own"])
        return
    own = own_loop("fp16" if is_fp16(run) else "bf16")
    assert same_bits(rank["state"], own["state"]) and rank["rates"] == own["rates"]
    assert rank.get("norms", own["norms"]) == own["norms"]


@runs(lambda run: run.endswith((" bf16", "bf16-true")))
def test_masters_are_split(results: Results, library: str, run: str) -> None:
    for rank in results(library)[run]:
        assert rank["masters"] == ["torch.int16"] and rank["weights"] == ["torch.bfloat16"]


@runs()
def test_clipping_writes_no_gradient(results: Results, library: str, run: str) -> None:
    first, *others = results(library)[run]
    for rank in (first, *others):
        assert rank["unwritten"] == [True] * STEPS
    if library != "lightning":  # it does not tell the norm
        finite = [norm for norm in first["norms"] if math.isfinite(norm)]
        assert len(finite) == STEPS - is_fp16(run) and min(finite) > MAX_NORM
        assert library == "transformers" or all(rank["norms"] == first["norms"] for rank in others)


@runs(is_fp16)
def test_all_ranks_skip_an_overflow(results: Results, library: str, run: str) -> None:
    for rank in results(library)[run]:
        assert rank["skipped"] == [step == BROKEN for step in range(STEPS)]


@runs()
def test_a_skip_holds_the_schedule(results: Results, library: str, run: str) -> None:
    taken = [step + 1 - (is_fp16(run) and step >= BROKEN) for step in range(STEPS)]
    rates = [LR * 0.5**count for count in taken]
    if library in ("transformers", "torchtitan"):
        rates = [LR * (1 - count / STEPS / (1 if library == "transformers" else 2)) for count in taken]
    for rank in results(library)[run]:
        assert rank["rates"] == pytest.approx(rates, rel=1e-12, abs=LR / 50 if library == "torchtitan" else 0)
        assert len(set(rank["rates"])) == len(set(taken))


@runs(lambda run: not run.startswith("SFT"))
def test_resumed_bit_for_bit(results: Results, library: str, run: str) -> None:
    for rank in results(library)[run]:
        assert all(rank["resumed"].values()), rank["resumed"]


@runs()
def test_the_export_has_the_weights(results: Results, library: str, run: str) -> None:
    for rank in results(library)[run]:
        assert rank["exported"]


@runs()
def test_the_log_has_scale_and_skips(results: Results, library: str, run: str) -> None:
    skips = [step >= BROKEN for step in range(STEPS)]
    scaled = [{"halfstep/scale": SCALE / 2**skip, "halfstep/skipped": float(skip)} for skip in skips]
    first = results(library)[run][0]
    shared = {key: [row.pop(key, None) for row in first["log"]] for key in ("halfstep/grad_norm", "halfstep/underflow")}
    assert first["log"] == (scaled if is_fp16(run) else [{}] * STEPS)
    if library in ("accelerate", "transformers", "lightning"):  # their runs have a monitor
        norms, underflow = shared.values()
        assert norms == pytest.approx(first.get("norms", norms), rel=1e-6, nan_ok=True)
        assert None not in norms and all(0 <= share < 1 for share in underflow)
