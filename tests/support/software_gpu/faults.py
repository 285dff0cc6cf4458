"""Faults to seed into the PTX or the assembly of a kernel, as errors in kernels or compilers could cause."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

# The text that a line contains and the text that replaces it; None removes the line.
Change = Callable[[re.Match[str]], "str | None"]


def _doubled(found: re.Match[str]) -> str:
    return f"{found[1]}{2 * int(found[2])}{found[3]}"


PTX: dict[str, tuple[str, Change]] = {
    "barrier removed": (r"\s*bar\.sync\s+0;", lambda found: None),
    "guard of a load dropped": (r"\s*@!?%p\d+ (ld\.global.*)", lambda found: f"\t{found[1]}"),
    "guard of a store dropped": (r"\s*@!?%p\d+ (st\.global.*)", lambda found: f"\t{found[1]}"),
    "guard of shared memory dropped": (r"\s*@!?%p\d+ ((?:st|ld)\.shared.*)", lambda found: f"\t{found[1]}"),
    "store left out": (r"\s*(?:@!?%p\d+ )?st\.global.*", lambda found: None),
    "stride doubled": (r"(\s*(?:mad|mul)\.wide\.[su]32\s+.*, )([248])((?:, %rd\d+)?;.*)", _doubled),
    "comparison off by one": (
        r"(\s*setp\.)(lt|ge|gt|le)(\.[su](?:32|64)\s.*)",
        lambda found: found[1] + {"lt": "le", "ge": "gt", "gt": "ge", "le": "lt"}[found[2]] + found[3],
    ),
    "alignment promised that is not there": (
        r"(.*(?:ld|st)\.global\.(?:\S*\.)?v[24]\.b32 .*\[ %rd\d+ \+ )0( \].*)",
        lambda found: f"{found[1]}4{found[2]}",
    ),
    "shuffle from the lane itself": (
        r"(\s*shfl\.sync\.bfly\.b32\s+%r\d+, %r\d+, )(\d+)(, 31, -1;.*)",
        lambda found: f"{found[1]}0{found[3]}",
    ),
    "sign of a sum changed": (r"(\s*)add(\.rn\.f32(?:x2)?\s.*)", lambda found: f"{found[1]}sub{found[2]}"),
    "product made a sum": (r"(\s*)mul(\.rn\.f32(?:x2)?\s.*)", lambda found: f"{found[1]}add{found[2]}"),
    "operands of a selection exchanged": (
        r"(\s*selp\.\w+\s+%\w+, )([^,]+), ([^,]+)(, %p\d+;.*)",
        lambda found: f"{found[1]}{found[3]}, {found[2]}{found[4]}",
    ),
    "branch turned round": (
        r"(\s*@)(!?)(%p\d+ bra\s.*)",
        lambda found: found[1] + ("" if found[2] else "!") + found[3],
    ),
    "atomic operation left out": (r"\s*(?:@!?%p\d+ )?atom\..*", lambda found: None),
    "parameter of the neighbour": (
        r"(\s*ld\.param\.b64\s+%rd\d+, \[\w+_param_)(\d+)(\];.*)",
        lambda found: f"{found[1]}{int(found[2]) + (1 if found[2] == '0' else -1)}{found[3]}",
    ),
}

# A mask in AMD's assembly sends a lane's address past the end of its buffer, or takes the lane out of EXEC.
AMD: dict[str, tuple[str, Change]] = {
    "barrier removed": (r"\s*s_barrier", lambda found: None),
    "guard dropped": (r"\s*s_and_saveexec_b64 (s\[\d+:\d+\]), .*", lambda found: f"\ts_mov_b64 {found[1]}, exec"),
    "end of a buffer moved": (r"(\s*s_(?:mov_b32|brev_b32) s\d+, )0x7ffffff[ce]", lambda found: f"{found[1]}-1"),
    "store left out": (r"\s*(?:global|buffer)_store_.*", lambda found: None),
    "stride doubled": (
        r"(\s*(?:v_lshlrev_b32_e32 v\d+, |s_lshl_b64 s\[\S+ s\[\S+ |v_lshl_add_u64 \S+ \S+ ))([1-4])(,.*|)",
        lambda found: f"{found[1]}{int(found[2]) + 1}{found[3]}",
    ),
    "exchange with the lane itself": (
        r"(\s*v_\w+_dpp .*)(?:row_(?:shl|shr|bcast):\d+|quad_perm:\S+) row_mask.*",
        lambda found: f"{found[1]}quad_perm:[0,1,2,3] row_mask:0xf bank_mask:0xf",
    ),
    "sign of a sum changed": (r"(\s*v_)add(_f32_e32 .*)", lambda found: f"{found[1]}sub{found[2]}"),
    "product made a sum": (r"(\s*v_(?:pk_)?)mul(_f32.*)", lambda found: f"{found[1]}add{found[2]}"),
    "atomic operation left out": (r"\s*(?:global_atomic|buffer_atomic|ds_add)_.*", lambda found: None),
}


def seeded(text: str, kind: str, lines_run: set[int]) -> Iterator[tuple[int, str]]:
    """All texts with one fault of a kind in an executed line: the line, and the text."""
    amd = ".amdgcn_target" in text
    pattern, change = (AMD if amd else PTX)[kind]
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = re.fullmatch(pattern, line.split(";" if amd else "//")[0].rstrip())
        if found and number + 1 in lines_run:
            made = change(found)
            if made != line:
                yield (
                    number + 1,
                    "\n".join([*lines[:number], *([""] if made is None else [made]), *lines[number + 1 :]]),
                )
