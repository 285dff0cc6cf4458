"""What the compile audit builds of the softmax kernels."""

from __future__ import annotations

from halfstep.kernels.backend import MOST_THREADS
from halfstep.kernels.softmax import strided
from halfstep.kernels.softmax.row_kernels import (
    backward_long_kernel,
    backward_tile_kernel,
    forward_long_kernel,
    forward_tile_kernel,
)
from halfstep.kernels.softmax.row_launches import (
    BACKWARD_ONE_PASS,
    FORWARD_ONE_PASS,
    LOOP_BLOCK,
    LOOP_WARPS,
    MOST_PIECES,
    loop_block,
    tile_shape,
)
from halfstep.kernels.variant import Variant

_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
_STAGES = {0: "", 1: "first half of pieces", 2: "second half of pieces"}


def _line(columns: int, *dtypes: str) -> int:
    """What the launcher finds for contiguous tensors."""
    return 0 if columns % 16 == 0 else 16 // min(_BYTES[dtype] for dtype in dtypes)


def _forward(
    columns: int,
    source: str,
    target: str,
    mask: int = 0,
    mask_type: str = "u8",
    causal: bool = False,
    log: bool = False,
    stage: int = 0,
    in_step: bool = True,
) -> Variant:
    line = _line(columns, source, target, *([mask_type] if mask == 2 else []))
    reach = columns + max(line - 1, 0)
    one_pass = reach <= FORWARD_ONE_PASS
    tile, block, warps = tile_shape(reach, 1024) if one_pass else (1, loop_block(line, mask), LOOP_WARPS)
    pointers = {"x": f"*{source}", "mask": f"*{mask_type}" if mask else f"*{source}", "y": f"*{target}"}
    integers = "rows columns queries size_b size_c x_a x_b x_c mask_a mask_b mask_c mask_column".split()
    fixed = {"MASK": mask, "CAUSAL": causal, "LOG": log, "FLAT": mask == 0, "WIDE": False, "BLOCK": block}
    fixed |= {"LINE": line, "MASK_IN_STEP": mask > 0 and in_step and line > 0, "Y_IN_STEP": in_step and line > 0}
    divisible = ["x", "mask", "y"]
    divisible += [] if line else ["columns", "x_a", "x_b", "x_c", "mask_a", "mask_b", "mask_c"]
    if one_pass:
        fixed["ROWS"] = tile
    else:
        pointers["partial"] = "*fp32" if stage else f"*{target}"
        integers += ["pieces", "span"]
        fixed |= {"STAGE": stage, "PIECES": MOST_PIECES if stage else 1}
        divisible += ["partial", *(["span"] if stage else [])]
        if not stage:
            fixed["span"] = 1
    if mask:  # the launcher's integer 1 is a constant to the compiler
        fixed["mask_column"] = 1
    signature = pointers | {name: "i32" for name in integers if name not in fixed} | {"scale": "fp32"}
    mask_bytes = 1 if mask == 1 else _BYTES.get(mask_type, 0)
    if not mask or (line and not in_step):  # out of step a mask is read an element at a time, which is not counted
        mask_bytes = 0
    words = [f"{columns} {source}->{target}", f"{mask_type} mask" * (mask > 0), "causal" * causal, "log" * log]
    words += [_STAGES[stage], "out of step" * (not in_step)]
    return Variant(
        forward_tile_kernel if one_pass else forward_long_kernel,
        " ".join(filter(None, words)),
        signature,
        fixed,
        divisible_by_16=tuple(divisible),
        num_warps=warps,
        num_warps_of_64=min(warps, MOST_THREADS // 64),
        exact=False,
        bytes_read=(_BYTES[source] + mask_bytes) * (1.0 if one_pass or stage else 2.0),
        bytes_written=0.0 if stage == 1 else _BYTES[target],
        elements=block * tile,
    )


def _backward(
    columns: int, source: str, target: str, causal: bool = False, log: bool = False, stage: int = 0
) -> Variant:
    line = _line(columns, source, target)
    reach = columns + max(line - 1, 0)
    one_pass = reach <= BACKWARD_ONE_PASS
    tile, block, warps = tile_shape(reach, 512) if one_pass else (1, LOOP_BLOCK, LOOP_WARPS)
    pointers = {"grad": f"*{source}", "y": f"*{source}", "dx": f"*{target}"}
    integers = ["rows", "columns", "queries"]
    fixed = {"CAUSAL": causal, "LOG": log, "WIDE": False, "BLOCK": block, "LINE": line}
    divisible = ["grad", "y", "dx", *([] if line else ["columns"])]
    if one_pass:
        fixed["ROWS"] = tile
    else:
        pointers["partial"] = "*fp32" if stage else f"*{target}"
        fixed |= {"STAGE": stage, "PIECES": MOST_PIECES if stage else 1}
        divisible += ["partial", *(["span"] if stage else [])]
        integers += ["pieces", *(["span"] if stage else [])]
        if not stage:
            fixed["span"] = 1
    return Variant(
        backward_tile_kernel if one_pass else backward_long_kernel,
        " ".join(filter(None, [f"{columns} {source}->{target}", "causal" * causal, "log" * log, _STAGES[stage]])),
        pointers | {name: "i32" for name in integers} | {"scale": "fp32"},
        fixed,
        divisible_by_16=tuple(divisible),
        num_warps=warps,
        num_warps_of_64=min(warps, MOST_THREADS // 64),
        exact=False,
        bytes_read=2.0 * _BYTES[source] * (1.0 if one_pass or stage else 2.0),
        bytes_written=0.0 if stage == 1 else _BYTES[target],
        elements=block * tile,
    )


def _strided_forward(
    columns: int, across: int, source: str, target: str, mask: int = 0, log: bool = False, transposed: bool = False
) -> Variant:
    """Forward over the first of two dimensions; `transposed`: over the last one of a transposed x."""
    fixed, _ = strided.tile_shape(columns, across, strided.STRIDED_FORWARD)
    warps, one_pass = fixed.pop("num_warps"), fixed["ONE_PASS"]
    outer = "columns size_b size_c x_a x_b x_c x_column mask_a mask_b mask_c mask_column y_a y_b y_c y_column tiles"
    fixed |= {"MASK": mask, "LOG": log, "x_c": 1, "y_column" if transposed else "y_c": 1}
    fixed |= {"mask_c": 1} if mask else {}
    integers = [name for name in outer.split() if name not in fixed]
    words = [f"{columns} apart, {across} across {source}->{target}", "u8 mask" * mask, "log" * log]
    return Variant(
        strided.forward_strided_kernel,
        " ".join(filter(None, [*words, "transposed" * transposed])),
        {"x": f"*{source}", "mask": "*u8" if mask else f"*{source}", "y": f"*{target}"}
        | {name: "i32" for name in integers}
        | {"scale": "fp32"},
        fixed,
        divisible_by_16=("x", "mask", "y", *(name for name in integers if name not in ("size_b", "tiles"))),
        num_warps=warps,
        num_warps_of_64=min(warps, MOST_THREADS // 64),
        exact=False,
        bytes_read=(_BYTES[source] + (mask > 0)) * (1.0 if one_pass else 2.0),
        bytes_written=_BYTES[target],
    )


def _strided_backward(columns: int, inner: int, source: str, target: str, log: bool = False) -> Variant:
    fixed, _ = strided.tile_shape(columns, inner, strided.STRIDED_BACKWARD)
    warps, one_pass = fixed.pop("num_warps"), fixed["ONE_PASS"]
    return Variant(
        strided.backward_strided_kernel,
        f"{columns} apart, {inner} across {source}->{target}" + " log" * log,
        {"grad": f"*{source}", "y": f"*{source}", "dx": f"*{target}"}
        | {name: "i32" for name in ("columns", "inner", "tiles")}
        | {"scale": "fp32"},
        fixed | {"LOG": log},
        divisible_by_16=("grad", "y", "dx", "inner"),
        num_warps=warps,
        num_warps_of_64=min(warps, MOST_THREADS // 64),
        exact=False,
        bytes_read=2.0 * _BYTES[source] * (1.0 if one_pass else 2.0),
        bytes_written=_BYTES[target],
    )


def variants() -> list[Variant]:
    """What the compile audit builds: each code path once or twice, where registers are tightest."""
    return [
        _forward(64, "bf16", "bf16"),
        _forward(333, "bf16", "bf16"),
        _forward(512, "fp32", "fp32"),
        _forward(512, "bf16", "bf16", causal=True),
        _forward(4096, "bf16", "bf16"),
        _forward(FORWARD_ONE_PASS, "fp32", "fp32"),
        _forward(FORWARD_ONE_PASS, "bf16", "bf16", causal=True),
        _forward(FORWARD_ONE_PASS, "bf16", "bf16", mask=1),
        _forward(FORWARD_ONE_PASS, "fp16", "fp32", mask=2, mask_type="fp32", log=True),
        _forward(FORWARD_ONE_PASS - 17, "bf16", "fp32", log=True),
        _forward(FORWARD_ONE_PASS - 17, "fp32", "fp32", causal=True),
        _forward(FORWARD_ONE_PASS - 17, "bf16", "bf16", mask=1),
        _forward(50257, "bf16", "bf16"),
        _forward(50257, "bf16", "bf16", in_step=False),
        _forward(50257, "bf16", "bf16", mask=1, in_step=False),
        _forward(50257, "bf16", "fp32", log=True),
        _forward(50257, "bf16", "bf16", mask=2, mask_type="bf16", causal=True),
        _forward(1 << 20, "fp32", "bf16", log=True),
        _forward(1 << 20, "bf16", "bf16", causal=True),
        _forward(1 << 20, "bf16", "bf16", mask=2, mask_type="bf16"),
        _forward(1 << 20, "bf16", "bf16", stage=1),
        _forward(1 << 20, "bf16", "bf16", stage=2),
        _forward((1 << 20) + 3, "bf16", "bf16", causal=True, stage=1),
        _forward((1 << 20) + 3, "bf16", "fp32", causal=True, log=True, stage=2),
        _strided_forward(64, 4096, "bf16", "bf16"),
        _strided_forward(1024, 4096, "fp32", "bf16", log=True),
        _strided_forward(1024, 4096, "bf16", "bf16", mask=1),
        _strided_forward(8192, 4096, "bf16", "bf16", mask=1),
        _strided_forward(8192, 4096, "fp32", "fp32", log=True),
        _strided_forward(512, 4096, "bf16", "bf16", transposed=True),
        _backward(64, "bf16", "bf16"),
        _backward(333, "bf16", "bf16"),
        _backward(512, "fp32", "fp32"),
        _backward(512, "bf16", "bf16", causal=True, log=True),
        _backward(4096, "bf16", "bf16"),
        _backward(BACKWARD_ONE_PASS, "fp32", "fp16", log=True),
        _backward(BACKWARD_ONE_PASS, "bf16", "bf16", causal=True),
        _backward(BACKWARD_ONE_PASS - 17, "fp32", "fp32"),
        _backward(BACKWARD_ONE_PASS - 17, "bf16", "bf16", causal=True, log=True),
        _backward(50257, "bf16", "bf16"),
        _backward(50257, "fp32", "bf16", causal=True, log=True),
        _backward(1 << 20, "fp32", "fp32"),
        _backward(1 << 20, "bf16", "bf16", causal=True, log=True),
        _backward(1 << 20, "bf16", "bf16", stage=1),
        _backward(1 << 20, "bf16", "bf16", stage=2),
        _backward((1 << 20) + 3, "bf16", "bf16", causal=True, log=True, stage=1),
        _backward((1 << 20) + 3, "bf16", "bf16", causal=True, log=True, stage=2),
        _strided_backward(64, 4096, "bf16", "bf16"),
        _strided_backward(512, 4096, "fp32", "fp32", log=True),
        _strided_backward(8192, 4096, "bf16", "bf16"),
        _strided_backward(8192, 4096, "fp32", "fp32", log=True),
    ]
