"""The kernels of casts to formats of blocks: along rows and columns and in squares, of one tensor and of a list.

Bytes are those of numbers and codes; a scale of one byte is stored by all threads that have elements of its block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import torch

import halfstep
from halfstep.bench.audit.launches import Variant
from halfstep.kernels.block_cast import kernels

_NAMES = ("mxfp8", "mxfp4", "nvfp4")
_FORMS: dict[str, dict[str, Any]] = {
    "": {},
    "columns": {"axis": 0},
    "squares": {"axis": (0, 1)},
    "stochastic": {"rounding": "stochastic", "seed": 0},
}


def variants() -> Iterator[Variant]:
    bf16, fp32 = (torch.empty(128, 128, dtype=dtype, device="cpu") for dtype in (torch.bfloat16, torch.float32))
    cases = [(bf16, "bf16", *case) for case in product(_NAMES, _FORMS)]
    cases += [(bf16, "bf16", name, "") for name in ("mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2")]
    cases += [(fp32, "fp32", name, "") for name in _NAMES]
    for x, source, name, form in cases:
        moved = x.itemsize, 0.5 if "fp4" in name else 1.0
        title = f"{source} to {name}{', ' * bool(form)}{form}"
        copies = 2 if "fp4" in name and form == "columns" else 1  # rows whose codes share a byte are two tiles
        cast = partial(halfstep.cast, x, name, **_FORMS[form])
        yield Variant(kernels.block_cast_kernel, title, cast, *moved, copies=copies)
        if x is bf16 and name in _NAMES and form in ("", "stochastic"):
            listed = partial(halfstep.foreach_cast, [x, x], name, **_FORMS[form])
            yield Variant(kernels.multi_block_cast_kernel, f"list, {title}", listed, *moved)
    for x, source in ((bf16, "bf16"), (fp32, "fp32")):
        yield Variant(kernels.largest_kernel, source, partial(halfstep.cast, x, "nvfp4"), x.itemsize)
        yield Variant(kernels.multi_largest_kernel, source, partial(halfstep.foreach_cast, [x, x], "nvfp4"), x.itemsize)
