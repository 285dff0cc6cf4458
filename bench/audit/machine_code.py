"""Analyze the code of a compiled kernel: global memory accesses, registers, spills, barriers, contractions.

The input is the text that Triton keeps for a compiled kernel: PTX on NVIDIA, assembly on AMD, and TTGIR on both.

**Bulk path.** A kernel has a few uniform loads (pointers, sizes, scalars), a wide path for aligned tensors, and narrow
code for tails. Debug information gives the source line of every access, and TTGIR tells whether the line moves a single
value or a tile. The bulk path consists of the tile accesses of at least 64 bits or 4 elements, or else of the widest
ones. Atomic operations are ignored, since kernels use them only for flags; so are accesses without a line (line 0),
which the compiler merged from several uniform ones.

**Limits.** Each instruction counts once, even if it is predicated or in a loop. Loads that a software pipeline issues
before its loop are counted in addition to those in the loop.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from halfstep.kernels.block_instructions import EXACT

# The narrowest accesses that count as wide. Where 4 fp32 elements take 128 bits, 4 elements of 16 or 8 bits take fewer.
WIDE_BITS, WIDE_ELEMENTS = 64, 4

Site = tuple[str, int]  # source file name and line


class Access(NamedTuple):
    """A global memory instruction: whether it writes, its width per thread in bits, and its source line."""

    writes: bool
    bits: int
    site: Site


class Resources(NamedTuple):
    """The resources of a compiled kernel, except shared memory, whose size is a launch argument."""

    registers: int  # per thread
    spills: int  # bytes per thread
    barriers: int


# Debug lines in PTX and AMD assembly. For inlined code, the line is the innermost one.
_LINE = re.compile(r"^\s*\.loc\s+(\d+) (\d+)")
_FILE = re.compile(r'^\s*\.file\s+(\d+) (?:"[^"]*" )?"([^"]+)"', re.MULTILINE)

# --- TTGIR ---------------------------------------------------------------------------------------------------------

_LOC_NAMED = re.compile(r'^(#loc\d*) = loc\("[^"]*"\((#loc\d*)\)\)')
_LOC_FILE = re.compile(r'^(#loc\d*) = loc\("([^"]+)":(\d+):\d+\)')
_LOC_CALL = re.compile(r"^(#loc\d*) = loc\(callsite\((#loc\d*) at #loc\d*\)\)")
_MEMORY_OP = re.compile(r"\b(tt\.|amdg(?:pu)?\.buffer_)(load|store)\b.*: (.*?) loc\((#loc\d*)\)$")
_ELEMENT = re.compile(r"tensor<(?:\d+x)+(?:!tt\.ptr<)?[a-z]+(\d+)")


def _locations(ttgir: str) -> dict[str, Site]:
    sites: dict[str, Site] = {}
    alias: dict[str, str] = {}
    for line in ttgir.splitlines():
        if match := _LOC_FILE.match(line):
            sites[match[1]] = (Path(match[2]).name, int(match[3]))
        elif match := _LOC_NAMED.match(line) or _LOC_CALL.match(line):
            alias[match[1]] = match[2]
    for name, end in alias.items():
        while end in alias:
            end = alias[end]
        if end in sites:
            sites[name] = sites[end]
    return sites


def _operations(ttgir: str) -> Iterator[tuple[Site | None, bool, str]]:
    """For each memory operation: source line, whether it writes, and the type of the value."""
    sites = _locations(ttgir)
    for match in filter(None, map(_MEMORY_OP.search, ttgir.splitlines())):
        yield sites.get(match[4]), match[2] == "store", match[3]


def uniform_sites(ttgir: str) -> set[Site]:
    """Source lines whose memory operations all access one value per program: table entries, scalars, flags."""
    tiled: dict[Site | None, bool] = {}
    for site, _, moved in _operations(ttgir):
        tiled[site] = tiled.get(site, False) or "tensor<" in moved
    return {site for site, any_tile in tiled.items() if site is not None and not any_tile}


def element_bits(ttgir: str) -> dict[tuple[Site, bool], set[int]]:
    """The widths in bits of tile elements, by source line and whether the line writes."""
    widths: dict[tuple[Site, bool], set[int]] = {}
    for site, writes, moved in _operations(ttgir):
        if site is not None and (element := _ELEMENT.search(moved)):
            widths.setdefault((site, writes), set()).add(max(8, int(element[1])))  # a bool takes a byte of memory
    return widths


def tile_elements(ttgir: str) -> int:
    """Elements of the largest tile that the kernel loads or stores; 0 if it moves single values only."""
    shapes = (re.search(r"tensor<((?:\d+x)+)", moved) for _, _, moved in _operations(ttgir))
    return max((math.prod(map(int, shape[1].split("x")[:-1])) for shape in shapes if shape), default=0)


def layout_conversions(ttgir: str) -> int:
    """The number of operations that move a tile between threads to change its layout."""
    return len(re.findall(r"\bttg\.convert_layout\b", ttgir))


# --- NVIDIA --------------------------------------------------------------------------------------------------------

_PTX_GLOBAL = re.compile(r"\b(ld|st)(?:\.\w+)*?\.global\S*?(?:\.v(\d))?\.[busf](\d+)\s")
_PTX_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (0x[0-9a-f]+|\d+)")
_PTX_BARRIER = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?:bar|barrier)(?:\.cta)?\.(?:sync|red|arrive)\b", re.MULTILINE)


def ptx_accesses(text: str) -> Iterator[Access]:
    """Every global memory instruction in PTX, including asynchronous copies to shared memory.

    Since Triton 3.9, each line of inline assembly has a debug line, numbered consecutively; the first one is the source
    line.
    """
    files = dict(_FILE.findall(text))
    site: Site = ("", 0)
    lines = None  # number of debug lines so far in a block of inline assembly; None outside of blocks
    for line in text.splitlines():
        if "begin inline asm" in line:
            lines = 0
        elif "end inline asm" in line:
            lines = None
        elif match := _LINE.match(line):
            if not lines:
                site = (Path(files.get(match[1], "")).name, int(match[2]))
            if lines is not None:
                lines += 1
        elif match := _PTX_GLOBAL.search(line):
            yield Access(match[1] == "st", int(match[2] or 1) * int(match[3]), site)
        elif match := _PTX_ASYNC.search(line):
            yield Access(False, 8 * int(match[1], 0), site)


def ptx_resources(text: str, usage: str) -> Resources:
    """Registers and spills from ``cuobjdump --dump-resource-usage``, barriers from PTX."""
    numbers = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    if "REG" not in numbers:
        raise ValueError(f"cuobjdump reports no registers: {usage.strip()!r}")
    return Resources(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], len(_PTX_BARRIER.findall(text)))


_PTX_FUSED = re.compile(r"\b(?:fma|mad)(?:\.\w+)*\.(?:f16|f16x2|bf16|bf16x2|f32|f32x2|f64)\b")
_PTX_INEXACT = re.compile(
    r"\b(?:(?:div|sqrt|rcp|rsqrt|ex2|lg2|sin|cos|tanh)(?:\.\w+)*\.(?:approx|full)|\w+(?:\.\w+)*\.ftz)\S*"
)
_PTX_EXACT = re.compile(rf"// begin inline asm\s*\{{\s*{re.escape(EXACT)}\n.*?// end inline asm", re.DOTALL)


def ptx_inexact(ptx: str) -> list[str]:
    """Instructions whose results differ from the reference: fused multiply-adds, approximations, flushed subnormals.

    In PTX, ``div.rn`` and ``sqrt.rn`` are single instructions. In SASS, they are expanded and legitimately use fused
    multiply-adds, which could not be told from contractions. Inline assembly that begins with the comment `EXACT` has
    the results of separate operations although it contains such instructions; tests of its results verify that.
    """
    ptx = _PTX_EXACT.sub("", ptx)
    counts = Counter(match.group(0) for pattern in (_PTX_FUSED, _PTX_INEXACT) for match in pattern.finditer(ptx))
    return [f"{count}x {name}" for name, count in sorted(counts.items())]


# --- AMD -----------------------------------------------------------------------------------------------------------

_AMD_GLOBAL = re.compile(r"^\s*(?:global|buffer|flat)_(load|store)_(\S+)")
_AMD_WIDTHS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}


def amd_accesses(text: str) -> Iterator[Access]:
    """Every vector memory instruction in AMD assembly. Scalar loads (``s_load``) are uniform and not included."""
    files = dict(_FILE.findall(text))
    site: Site = ("", 0)
    for line in text.splitlines():
        if match := _LINE.match(line):
            site = (Path(files.get(match[1], "")).name, int(match[2]))
        elif match := _AMD_GLOBAL.match(line):
            direction, rest = match[1], match[2]
            word = next((part for part in rest.split("_") if part in _AMD_WIDTHS), None)
            bits = _AMD_WIDTHS[word] if word else 8 if "byte" in rest else 16 if "short" in rest else 32
            yield Access(direction == "store", bits, site)


def amd_resources(text: str) -> Resources:
    """Registers and spills from the metadata at the end of AMD assembly; barriers from the instructions."""
    numbers = {key: int(value) for key, value in re.findall(r"\.(\w+): +(\d+)$", text, re.MULTILINE)}
    barriers = len(re.findall(r"^\s*s_barrier\b", text, re.MULTILINE))
    spills = 4 * (numbers["vgpr_spill_count"] + numbers["sgpr_spill_count"])
    return Resources(numbers["vgpr_count"], spills, barriers)


_AMD_FUSED = re.compile(
    r"^\s*v_(?:pk_)?(?:fma|fmac|fmamk|fmaak|mac|mad|madmk|madak)_(?:legacy_)?(f16|f32|f64)", re.MULTILINE
)
_LLVM_TO_INT64 = re.compile(r"\bfpto[su]i (?:<(\d+) x )?(half|float|double)>? \S+ to (?:<\d+ x )?i64")
_LLVM_INT64_DIVISION = re.compile(r"\b[su](?:div|rem) i64\b")
# By width: the LLVM type, the first instruction of a square root, and the number of its fused multiply-adds.
_AMD_EXPANSIONS = {
    "f32": ("float", "v_sqrt_f32", 2),
    "f64": ("double", "v_rsq_f64", 7),
    "f16": ("half", "v_sqrt_f16", 0),
}
# The required modes of a launch: keep subnormals (3), round to nearest even (0), keep fp16 infinities (0).
_AMD_MODES = dict.fromkeys(("float_denorm_mode_32", "float_denorm_mode_16_64"), 3)
_AMD_MODES |= dict.fromkeys(("float_round_mode_32", "float_round_mode_16_64", "fp16_overflow"), 0)
_AMD_MODE = re.compile(rf"^\s*\.amdhsa_({'|'.join(_AMD_MODES)}) (\d+)", re.MULTILINE)
_AMD_SETS_MODE = re.compile(r"^\s*(s_setreg(?:_imm32)?_b32)\b", re.MULTILINE)
_LLVM_FUSED = re.compile(r"\bcall\b.*@llvm\.(fma|fmuladd)\b")
_LLVM_FLAGS = re.compile(r"\b(?:fadd|fsub|fmul|fdiv|fneg|call)\b[^,(]*?\b(contract|afn|arcp|reassoc|fast)\b")
_LLVM_INEXACT = re.compile(
    r"\bcall\b.*@(llvm\.(?:amdgcn\.(?:rcp|rsq|sqrt|exp2|log)|exp2?|log2?)|__ocml_\w+)\b|(!fpmath)"
)


def amd_inexact(llir: str, text: str) -> list[str]:
    """Instructions whose results differ from the reference on AMD, from LLVM IR and assembly; see `ptx_inexact`.

    The modes of a launch, or those that a kernel sets, determine the rounding and whether subnormals are kept. LLVM IR
    shows explicit fused multiply-adds, flags that permit them, and approximations. Contraction happens later, in the
    translation to assembly, where correctly rounded operations are also expanded to fused multiply-adds. In the output
    of Triton 3.7, these are 5 for a division, 2 (fp32) or 7 (fp64) for a square root, 1 for a conversion to a 64-bit
    integer, and 2 (fp32) for a division of 64-bit integers. Any beyond these are contractions; divisions that share a
    denominator need fewer, so a contraction may go unnoticed.
    """
    counts: Counter[str] = Counter()
    for line in llir.splitlines():
        if line.startswith("declare"):
            continue
        for pattern in (_LLVM_FUSED, _LLVM_FLAGS, _LLVM_INEXACT):
            if match := pattern.search(line):
                counts[next(filter(None, match.groups()))] += 1
    counts.update(f"{mode} {value}" for mode, value in _AMD_MODE.findall(text) if _AMD_MODES[mode] != int(value))
    counts.update(_AMD_SETS_MODE.findall(text))
    for width, (llvm_type, root, per_root) in _AMD_EXPANSIONS.items():
        divisions = len(re.findall(rf"^\s*v_div_fixup_{width}", text, re.MULTILINE))
        roots = len(re.findall(rf"^\s*{root}", text, re.MULTILINE))
        conversions = sum(int(lanes or 1) for lanes, of in _LLVM_TO_INT64.findall(llir) if of == llvm_type)
        fused = _AMD_FUSED.findall(text).count(width)
        integers = 2 * len(_LLVM_INT64_DIVISION.findall(llir)) if width == "f32" else 0
        expected = 5 * divisions + per_root * roots + conversions + integers
        if fused > expected:
            name = f"{width} fused multiply-add beyond those of division, square root and conversion"
            counts[name] = fused - expected
    return [f"{count}x {name}" for name, count in sorted(counts.items())]


# --- both ----------------------------------------------------------------------------------------------------------


def bulk(accesses: list[Access], ttgir: str) -> list[Access]:
    """The accesses of the bulk path, as defined in the docstring of this module."""
    uniform, widths = uniform_sites(ttgir), element_bits(ttgir)
    chosen: list[Access] = []
    for writes in (False, True):
        tiles = [
            access
            for access in accesses
            if access.writes is writes and access.site not in uniform and access.site[1] != 0
        ]
        widest = max((access.bits for access in tiles), default=0)
        for access in tiles:
            elements = min(widths.get((access.site, writes), {WIDE_BITS}))
            if access.bits >= min(widest, WIDE_BITS, WIDE_ELEMENTS * elements):
                chosen.append(access)
    return chosen


def operand_bits(chosen: list[Access], ttgir: str) -> dict[int, int]:
    """The width of the narrowest of the `chosen` accesses, by the width of the elements it moves, both in bits."""
    widths = element_bits(ttgir)
    narrowest: dict[int, int] = {}
    for access in chosen:
        for element in widths.get((access.site, access.writes), ()):
            narrowest[element] = min(access.bits, narrowest.get(element, access.bits))
    return dict(sorted(narrowest.items()))
