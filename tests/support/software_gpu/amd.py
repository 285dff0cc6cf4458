"""Translate the assembly that Triton compiles for AMD's gfx942 to the arrays that the machine runs (waves.h)."""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .ptx import Assembly

PLACE = np.dtype([(name, "i4") for name in ("kind", "index", "change", "part")] + [("value", "u8")])
INSTRUCTION = np.dtype(
    [("operands", PLACE, 7)]
    + [(name, "i4") for name in ("operation", "values", "bytes", "sign")]
    + [("offsets", "i4", 2)]
    + [(name, "i4") for name in ("target", "dpp", "rows", "banks", "zero", "keep")],
    align=True,
)
# In the order of `Kind` and `Change` in waves.h.
NONE, VECTOR, SCALAR, CONSTANT = range(4)
NEGATED, ABSOLUTE, EXTENDED, HIGH_FOR_LOW, HIGH_FOR_HIGH, NEGATED_HIGH = (1 << bit for bit in range(6))

SPECIAL = {"vcc": 106, "vcc_lo": 106, "vcc_hi": 107, "m0": 124, "exec": 126, "exec_lo": 126, "exec_hi": 127}
# What the machine takes for granted. Denormal mode 3 keeps subnormal numbers, round mode 0 is to nearest even.
ASSUMED = {
    "float_round_mode_32": 0,
    "float_round_mode_16_64": 0,
    "float_denorm_mode_32": 3,
    "float_denorm_mode_16_64": 3,
    "ieee_mode": 1,
    "fp16_overflow": 0,
    "private_segment_fixed_size": 0,
    "uses_dynamic_stack": 0,
    "group_segment_fixed_size": 0,
    "user_sgpr_kernarg_segment_ptr": 1,
    "user_sgpr_kernarg_preload_offset": 0,
    "user_sgpr_dispatch_ptr": 0,
    "user_sgpr_queue_ptr": 0,
    "user_sgpr_dispatch_id": 0,
    "user_sgpr_private_segment_size": 0,
    "system_sgpr_workgroup_id_x": 1,
    "system_sgpr_workgroup_id_y": 0,
    "system_sgpr_workgroup_id_z": 0,
    "system_vgpr_workitem_id": 0,
}

_MODIFIER = re.compile(r"\s([a-z]\w*):(\[[^]]*\]|swizzle\([^)]*\)|\S+)")
_PARTS = {"DWORD": 0} | {f"BYTE_{k}": 1 + k for k in range(4)} | {f"WORD_{k}": 5 + k for k in range(2)}
_DPP = {"row_shl": 0x100, "row_shr": 0x110, "row_ror": 0x120}
_DPP_WORDS = {"row_mirror": 0x140, "row_half_mirror": 0x141}
_WIDTHS = {"byte": (1, 1), "short": (2, 1), "dword": (4, 1), "dwordx2": (4, 2), "dwordx3": (4, 3), "dwordx4": (4, 4)}
_LOCAL = {"b8": 1, "u8": 1, "b16": 2, "u16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}

# (name) -> number of the operation and of its operands (-1: this module knows), None if the machine does not know it.
Find = Callable[[str], "tuple[int, int] | None"]


class UnknownAssembly(Exception):
    """An instruction or a mode that the machine does not support."""


class _Flat(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_void_p),
        *((name, ctypes.c_int32) for name in ("length", "entry", "vectors", "user_scalars")),
        ("arguments", ctypes.c_char_p),
        ("argument_bytes", ctypes.c_int32),
    ]


@dataclass
class Program(Assembly):
    """A kernel in AMD's assembly."""

    entry: int  # the first instruction where the hardware loads the first arguments into registers, as MI300X does
    vectors: int  # registers of a wave
    user_scalars: int  # registers that are set before the block's number
    arguments: list[tuple[int, int]]  # offset and bytes of each in the segment that the kernel reads them from
    argument_bytes: int  # of that segment

    lanes: ClassVar[int] = 64  # of a warp

    def run(self, machine: Any, arguments: int, *launch: Any) -> bytes | None:
        """Run the kernel with the driver's array of arguments at `arguments`. Returns the error, if there is one."""
        places = (ctypes.c_void_p * len(self.arguments)).from_address(arguments)
        packed = bytearray(self.argument_bytes)
        for place, (offset, size) in zip(places, self.arguments, strict=True):
            packed[offset : offset + size] = ctypes.string_at(place, size)
        flat = _Flat(self.code.ctypes.data, len(self.code), self.entry, self.vectors, self.user_scalars)
        flat.arguments, flat.argument_bytes = bytes(packed), len(packed)
        failed: bytes | None = machine.run_waves(ctypes.byref(flat), *launch)
        return failed


Fields = dict[str, Any]


def _number(text: str, name: str) -> int:
    """The bits of a constant in the format of the operation. A 32-bit literal is the upper half of an fp64 number."""
    wide = name.endswith("64")
    if re.fullmatch(r"-?\d+\.\d+", text):
        kind = (
            np.float64
            if name.endswith("_f64")
            else np.float16
            if re.fullmatch(r"v_(?!fma_mix).*_f16", name)
            else np.float32
        )
        return int(np.array(float(text), kind).view(f"u{kind().itemsize}"))
    value = int(text, 0)
    if wide and text.startswith("0x"):
        if name.endswith("_f64"):
            return value << 32
        if value >= 2**31:
            raise UnknownAssembly(f"{text} as one of 64 bits")
    if re.fullmatch(r"s_(?:mov|add|mul|cmp)k(?:_\w\w)?_[iu]32", name):
        value &= 0xFFFF
        if name.endswith("i32") and value >= 2**15:
            value -= 2**16
    return value % 2**64


def _place(text: str, name: str) -> tuple[int, int, int, int, int]:
    change = 0
    if found := re.fullmatch(r"sext\((.*)\)", text):
        text, change = found[1], EXTENDED
    if found := re.fullmatch(r"-(\||v|s\d|s\[|vcc|exec)(.*)", text):
        text, change = found[1] + found[2], change | NEGATED
    if found := re.fullmatch(r"\|(.*)\|", text):
        text, change = found[1], change | ABSOLUTE
    if text in SPECIAL:
        return SCALAR, SPECIAL[text], change, 0, 0
    if found := re.fullmatch(r"([vs])(?:(\d+)|\[(\d+):\d+\])", text):
        return VECTOR if found[1] == "v" else SCALAR, int(found[2] or found[3]), change, 0, 0
    if text == "off":
        return NONE, 0, 0, 0, 0
    return CONSTANT, 0, change, 0, _number(text, name)


def _bits(text: str) -> list[int]:
    return [int(bit) for bit in text.strip("[]").split(",")]


def _swizzle(text: str) -> int:
    if found := re.fullmatch(r"swizzle\(SWAP,(\d+)\)", text):
        return 0x1F | int(found[1]) << 10
    if text.isdecimal() and int(text) < 2**15:
        return int(text)
    raise UnknownAssembly(text)


def _memory(
    name: str, parts: list[str], given: dict[str, str], words: set[str]
) -> tuple[str, list[str], Fields] | None:
    """The operation of an access, its operands in the order of waves.cpp, and its fields."""
    offset = int(given.pop("offset", "0"), 0) if not name.startswith("ds_swizzle") else 0
    if found := re.fullmatch(r"(global|buffer)_(load|store)_([us])?(byte|short|dword(?:x\d)?)(_d16_hi)?", name):
        words -= {"offen", "sc0", "sc1", "nt"}
        size, values = _WIDTHS[found[4]]
        if found[2] == "store" and found[1] == "global":
            parts = [parts[1], parts[0], *parts[2:]]
        if found[5] and found[2] == "load":
            return None
        half = {"half": True} if found[5] else {}
        return f"{found[1]}_{found[2]}", parts, {
            "values": values, "bytes": size, "sign": found[3] == "s", "offsets": (offset, 0), **half
        }  # fmt: skip
    if re.fullmatch(r"(global|buffer)_atomic_\w+", name):
        words -= {"offen", "sc1"}  # sc0 asks for the value before, which no kernel here reads
        if name.startswith("global"):
            parts = [parts[1], parts[0], *parts[2:]]
        return name, parts, {"values": 2 if name.endswith("x2") else 1, "bytes": 4, "offsets": (offset, 0)}
    if found := re.fullmatch(r"s_load_(dword)(?:x(\d+))?", name):
        base = parts[2]
        fixed = base.startswith("0x") or base.isdecimal()
        return "s_load", [parts[0], parts[1], *([] if fixed else [base])], {
            "values": int(found[2] or 1), "offsets": (int(base, 0) if fixed else offset, 0)
        }  # fmt: skip
    if found := re.fullmatch(r"ds_(read|write)(2?)(st64)?_(\w\d+)", name):
        size = _LOCAL[found[4]]
        offsets = (offset, 0)
        if found[2]:
            each = size * (64 if found[3] else 1)
            offsets = (int(given.pop("offset0", "0")) * each, int(given.pop("offset1", "0")) * each)
        if found[1] == "write":
            parts = [parts[1], parts[-1], parts[0]]
        return f"ds_{found[1]}", parts, {"values": 2 if found[2] else 1, "bytes": size, "offsets": offsets}
    if name == "ds_add_u32":
        return name, [parts[1], "off", parts[0]], {"offsets": (offset, 0)}
    if name == "ds_bpermute_b32":
        return name, parts, {"offsets": (offset, 0)}
    if name == "ds_swizzle_b32":
        return name, parts, {"offsets": (_swizzle(given.pop("offset")), 0)}
    return None


def _dpp(given: dict[str, str], words: set[str]) -> Fields:
    control = None
    if "quad_perm" in given:
        control = sum(lane << 2 * at for at, lane in enumerate(_bits(given.pop("quad_perm"))))
    for key in [key for key in given if key in _DPP]:
        control = _DPP[key] | int(given.pop(key))
    for word in words & set(_DPP_WORDS):
        words.remove(word)
        control = _DPP_WORDS[word]
    if "row_bcast" in given:
        control = {"15": 0x142, "31": 0x143}[given.pop("row_bcast")]
    if control is None:
        raise UnknownAssembly("an exchange between lanes of a kind that the machine does not know")
    return {
        "dpp": 1 + control,
        "rows": int(given.pop("row_mask"), 0),
        "banks": int(given.pop("bank_mask"), 0),
        "zero": int(given.pop("bound_ctrl", "0")),
    }


def _decode(statement: str, find: Find, labels: dict[str, int]) -> Fields:
    """The fields of one instruction."""
    opcode, _, rest = statement.partition(" ")
    given = dict(_MODIFIER.findall(f" {rest}"))
    plain = _MODIFIER.sub("", f" {rest}").strip()
    parts = [part.strip() for part in re.split(r",(?![^[]*\])", plain)] if plain else []
    words: set[str] = set()
    if parts and " " in parts[-1]:
        parts[-1], *more = parts[-1].split()
        words = set(more)
    form = re.search(r"_(e32|e64|dpp|sdwa)$", opcode)
    name = opcode[: form.start()] if form else opcode
    if re.fullmatch(r"s_waitcnt|s_nop|buffer_wbl2|buffer_inv", name):
        return {"operation": _found(find, name, 0)}
    if name.startswith(("s_branch", "s_cbranch")):
        return {"operation": _found(find, name, 0), "target": labels[parts[0]]}

    fields: Fields = {}
    memory = _memory(name, parts, given, words)
    if memory:
        name, parts, fields = memory
        half = fields.pop("half", False)
        places = [list(_place(part, name)) for part in parts]
        if half:
            places[0][2] |= HIGH_FOR_LOW
    else:
        if name in ("s_addk_i32", "s_mulk_i32"):
            parts = [parts[0], *parts]
        elif name.startswith("v_div_fmas"):
            parts = [*parts, "vcc"]
        elif name.startswith("v_fmac"):
            parts = [*parts, parts[0]]
        places = [list(_place(part, name)) for part in parts]
        name = name.replace("s_cmpk_", "s_cmp_")
        first = 2 if re.match(r"v_(?:\w+_co_u32|div_scale|mad_[iu]64)", name) else 1  # where the sources begin
        sources = places[first:]
        if name.startswith(("v_pk_", "v_fma_mix")):
            mixed = name.startswith("v_fma_mix")
            low = _bits(given.pop("op_sel", "[" + ",".join("0" * len(sources)) + "]"))
            high = _bits(given.pop("op_sel_hi", "[" + ",".join("01"[not mixed] * len(sources)) + "]"))
            negated = _bits(given.pop("neg_lo", "[0,0,0]")), _bits(given.pop("neg_hi", "[0,0,0]"))
            for at, source in enumerate(sources):
                source[2] |= low[at] * HIGH_FOR_LOW | high[at] * HIGH_FOR_HIGH | negated[0][at] * NEGATED
                source[2] |= negated[1][at] * (ABSOLUTE if mixed else NEGATED_HIGH)
                if source[0] == CONSTANT and high[at]:
                    raise UnknownAssembly("a constant for the upper half")
        elif "op_sel" in given:
            for bit, source in zip(_bits(given.pop("op_sel")), [*sources, None], strict=False):
                if source is None and bit:
                    raise UnknownAssembly("a result in the upper half")
                if source is not None:
                    source[2] |= bit * HIGH_FOR_LOW
        if opcode.endswith("_dpp"):
            fields |= _dpp(given, words)
        if opcode.endswith("_sdwa"):
            fields["keep"] = {"UNUSED_PAD": 0, "UNUSED_PRESERVE": 1}[given.pop("dst_unused", "UNUSED_PAD")]
            places[0][3] = _PARTS[given.pop("dst_sel", "DWORD")]
            for at, source in enumerate(sources[:2]):
                source[3] = _PARTS[given.pop(f"src{at}_sel", "DWORD")]
    if name == "v_sub_u32" and words == {"clamp"}:
        name, words = "v_sub_u32 clamp", set()
    if given or words:
        raise UnknownAssembly(f"{', '.join([*given, *words])} at {name}")
    if name.startswith("v_") and (places[0][0] == VECTOR) != (not name.startswith(("v_cmp_", "v_read"))):
        raise UnknownAssembly(f"{parts[0]} as the result of {name}")
    return fields | {"operation": _found(find, name, len(places)), "operands": places}


def _found(find: Find, name: str, operands: int) -> int:
    found = find(name)
    if found is None:
        raise UnknownAssembly(f"the machine does not know {name}")
    if found[1] not in (-1, operands):
        raise UnknownAssembly(f"{name} takes {found[1]} operands, not {operands}")
    return found[0]


def settings(text: str) -> dict[str, int]:
    """The launch settings in the assembly: ``.amdhsa_`` directives that are numbers."""
    return {key: int(value) for key, value in re.findall(r"^\s*\.amdhsa_(\w+) (\d+)$", text, re.MULTILINE)}


def _unified(line: str, offset: int) -> str:
    """A line with accumulation registers as the vector registers from `offset` on, which they are on gfx90a and later.

    Compilers keep numbers there for which the others do not suffice.
    """
    line = re.sub(r"^v_accvgpr_(?:read|write|mov)_b32", "v_mov_b32", line)
    line = re.sub(r"(?<![\w.$])a(\d+)(?!\w)", lambda found: f"v{int(found[1]) + offset}", line)
    return re.sub(
        r"(?<![\w.$])a\[(\d+):(\d+)\]", lambda found: f"v[{int(found[1]) + offset}:{int(found[2]) + offset}]", line
    )


def read(text: str, find: Find) -> Program:
    """Parse the assembly of one kernel.

    Raises:
        UnknownAssembly: it holds something that the machine does not know; says what and on which line.
    """
    entry = re.search(r"^\s*\.amdhsa_kernel (\w+)$", text, re.MULTILINE)
    if entry is None:
        raise UnknownAssembly("no kernel in this assembly")
    name, asked = entry[1], settings(text)
    for key, value in ASSUMED.items():
        if asked.get(key) != value:
            raise UnknownAssembly(f"{name} asks for .amdhsa_{key} {asked.get(key)}, not {value}")
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+(?:"[^"]*" )?"([^"]+)"', text, re.MULTILINE))

    statements: list[tuple[int, str, str]] = []  # line, source, statement
    labels: dict[str, int] = {}
    source, start, inside = "?", 0, False
    for number, line in enumerate(text.splitlines(), 1):
        line = _unified(line.partition(";")[0].strip(), asked.get("accum_offset", 0))
        if line == f"{name}:":
            inside = True
        elif not inside or not line:
            continue
        elif line.startswith(".section"):
            break
        elif found := re.match(r"\.loc\s+(\d+)\s+(\d+)", line):
            source = f"{files.get(found[1], '?')}:{found[2]}"
        elif found := re.fullmatch(r"([.$\w]+):", line):
            labels[found[1]] = len(statements)
        elif line == ".p2align\t8":
            start = len(statements)  # behind the code for firmware that loads no arguments into registers
        elif not line.startswith("."):
            statements.append((number, source, " ".join(line.split())))

    code = np.zeros(len(statements), INSTRUCTION)
    for index, (number, _, statement) in enumerate(statements):
        try:
            for key, value in _decode(statement, find, labels).items():
                if key == "operands":
                    for at, place in enumerate(value):
                        code[index]["operands"][at] = tuple(place)
                else:
                    code[index][key] = value
        except (UnknownAssembly, KeyError, ValueError, IndexError) as error:
            raise UnknownAssembly(f"{name}, line {number}: {statement!r}: {error}") from error

    listed = text.partition(".args:")[2].partition(".group_segment_fixed_size:")[0]
    if "hidden_" in listed:
        raise UnknownAssembly(f"{name} takes hidden arguments")
    if asked["user_sgpr_count"] != 2 + asked["user_sgpr_kernarg_preload_length"]:
        raise UnknownAssembly(f"{name} asks for {asked['user_sgpr_count']} scalar registers to be set")
    return Program(
        name=name,
        code=code,
        opcodes=[statement.partition(" ")[0] for _, _, statement in statements],
        lines=[number for number, _, _ in statements],
        sources=[at for _, at, _ in statements],
        entry=start if asked["user_sgpr_kernarg_preload_length"] else 0,
        vectors=asked["next_free_vgpr"],
        user_scalars=asked["user_sgpr_count"],
        arguments=[
            (int(offset), int(size)) for offset, size in re.findall(r"\.offset:\s+(\d+)\s+\.size:\s+(\d+)", listed)
        ],
        argument_bytes=asked["kernarg_size"],
    )
