"""``halfstep bench codec``: the speed of the codec on one core, compared with numpy, torch, ml_dtypes and gfloat.

Each library rounds the same fp32 array. halfstep returns codes, gfloat float32 values, the others arrays of their own
dtypes. A peer's time is reported only if its results agree with those of halfstep. All are timed in interleaved rounds,
in processor time of this process. The best round counts, since other work on the machine can only add time.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from halfstep.bench import timing
from halfstep.cli.command_line import Parser, run
from halfstep.cli.numbers import whole
from halfstep.numerics.formats import codec
from halfstep.numerics.formats.table import formats

NEAREST = ("fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu")
BY_MODE = ("fp16", "bf16", "e4m3fn", "e8m0fnu")
GFLOAT = {"fp16": "binary16", "bf16": "bfloat16", "e4m3fn": "ocp_e4m3", "e5m2": "ocp_e5m2", "e8m0fnu": "ocp_e8m0"}
GFLOAT_MODES = {
    "nearest": "TiesToEven",
    "nearest_away": "TiesToAway",
    "toward_zero": "TowardZero",
    "up": "TowardPositive",
    "down": "TowardNegative",
    "stochastic": "StochasticFastest",
}


def _peers(values: np.ndarray, name: str, rounding: str) -> dict[str, Callable[[], Any]]:
    """The installed peers that support this conversion, by name."""
    form = formats[name]
    found: dict[str, Callable[[], Any]] = {}
    if rounding == "nearest":
        if name == "fp16":
            found["numpy"] = lambda: values.astype(np.float16)
        dtype, tensor = getattr(torch, str(form.torch)), torch.from_numpy(values)
        found["torch"] = lambda: tensor.to(dtype)
        if form.ml_dtypes:
            try:
                import ml_dtypes
            except ImportError:
                pass
            else:
                target = getattr(ml_dtypes, form.ml_dtypes)
                found["ml_dtypes"] = lambda: values.astype(target)
    if name in GFLOAT and rounding in GFLOAT_MODES:
        try:
            import gfloat
            from gfloat import formats as rows
        except ImportError:
            return found
        row, mode = getattr(rows, f"format_info_{GFLOAT[name]}"), getattr(gfloat.RoundMode, GFLOAT_MODES[rounding])
        if rounding == "stochastic":
            rng = np.random.default_rng(0)
            found["gfloat"] = lambda: gfloat.round_ndarray(
                row, values, mode, srbits=rng.integers(0, 2**23, values.size), srnumbits=23
            )
        else:
            found["gfloat"] = lambda: gfloat.round_ndarray(row, values, mode)
    return found


def _as_float64(result: Any) -> np.ndarray:
    return result.double().numpy() if isinstance(result, torch.Tensor) else np.asarray(result).astype(np.float64)


def measure(name: str, rounding: str, size: int, turns: int) -> dict[str, float]:
    """Millions of elements per second of halfstep and of each peer; NaN for a peer with different results."""
    values = np.random.default_rng(0).standard_normal(size).astype(np.float32)
    if name == "e8m0fnu":
        values = np.abs(values)
    seed = 1 if rounding == "stochastic" else None
    jobs: dict[str, Callable[[], Any]] = {"halfstep": lambda: codec.encode(values, name, rounding, seed=seed)}
    jobs |= _peers(values, name, rounding)
    ours = codec.decode(jobs["halfstep"](), name)
    wrong = set()
    for who, job in jobs.items():
        if who != "halfstep":
            theirs = _as_float64(job())
            step = codec.ulp(values, name) if rounding == "stochastic" else 0.0  # the random bits differ
            if not (np.abs(theirs - ours) <= step).all():
                wrong.add(who)
    taken = timing.rounds(timing.CpuClock(time.process_time), list(jobs.values()), least=turns, most=turns)
    return {
        who: float("nan") if who in wrong else size / min(seconds) / 1e6
        for who, seconds in zip(jobs, taken, strict=True)
    }


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _parser() -> Parser:
    parser = Parser("bench codec", "Time the codec on one core, and numpy, torch, ml_dtypes and gfloat.")
    parser.add_argument(
        "--size", type=whole(1, 2**32), default=2**20, metavar="N", help="elements of the array (default: 1 Mi)"
    )
    parser.add_argument("--turns", type=whole(1), default=5, metavar="N", help="rounds, of which the best counts")
    return parser


def _run(options: argparse.Namespace) -> int:
    """Print two Markdown tables."""
    torch.set_num_threads(1)
    who = ("halfstep", "numpy", "torch", "ml_dtypes", "gfloat")
    print(f"Million elements per second, one core, {platform.machine()}, {options.size} fp32 normal numbers.\n")
    print(_line(["to nearest even", *who]))
    print(_line(["---"] * (len(who) + 1)))
    for name in NEAREST:
        speed = measure(name, "nearest", options.size, options.turns)
        print(_line([name, *(f"{speed[peer]:.0f}" if peer in speed else "" for peer in who)]), flush=True)
    print()
    print(_line(["halfstep, and over gfloat", *codec.ENCODE_ROUNDINGS]))
    print(_line(["---"] * (len(codec.ENCODE_ROUNDINGS) + 1)))
    for name in BY_MODE:
        cells = []
        for rounding in codec.ENCODE_ROUNDINGS:
            speed = measure(name, rounding, options.size, options.turns)
            ratio = f", {speed['halfstep'] / speed['gfloat']:.0f}x" if "gfloat" in speed else ""
            cells.append(f"{speed['halfstep']:.0f}{ratio}")
        print(_line([name, *cells]), flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    """Run ``halfstep bench codec`` with the arguments `argv`. Returns the exit status."""
    return run(_parser(), argv, _run)
