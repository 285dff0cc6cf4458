"""The cast kernels: every pair of formats, for one tensor and for a list."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import permutations

import torch

import halfstep
from halfstep.bench.audit.launches import Variant
from halfstep.kernels.cast import FP8, cast_kernel, multi_cast_kernel
from halfstep.kernels.formats import TABLE, format_of


def _options(source: torch.dtype, target: torch.dtype) -> list[tuple[str, bool]]:
    """The roundings to audit for a pair of dtypes, and whether they saturate. Others differ only in a constant."""
    options = [("nearest", False)]
    if source == torch.float32 and target in FP8:
        options.append(("nearest", True))
    if source in (torch.float32, torch.bfloat16) and target != torch.float32:
        options += [("toward_zero", False), ("stochastic", False)]
    return options


def variants() -> Iterator[Variant]:
    """One tensor rounded to nearest, and lists with every rounding: the kernels differ only in the tensor table."""
    for source, target in permutations([form.dtype for form in TABLE], 2):
        x, y = (torch.empty(64, dtype=source, device="cpu") for _ in range(2))
        pair = " to ".join(format_of(dtype).name.removesuffix("fn") for dtype in (source, target))
        for rounding, saturate in _options(source, target):
            how = "" if rounding == "nearest" else ", " + rounding.replace("_", " ")
            name = f"{pair}{how}{', saturating' if saturate else ''}"
            floor = source.itemsize, target.itemsize
            if rounding == "nearest" and not saturate:
                yield Variant(cast_kernel, name, partial(halfstep.cast, x, target), *floor)
            listed = partial(halfstep.foreach_cast, [x, y], target, rounding=rounding, saturate=saturate)
            yield Variant(multi_cast_kernel, f"list, {name}", listed, *floor)
