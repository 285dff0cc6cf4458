"""Machine instructions that a launch issues: what ptxas makes of the PTX, as often as the software GPU ran it.

Each instruction of PTX becomes a line of debug information. ptxas gives every machine instruction the line of the PTX
that it was made of, and the software GPU counted how many warps ran that. Machine instructions are counted by basic
block, as often as most of its accesses to memory, shuffles and exponentials, or of all in it if it has none of these:
a few others were moved there from a block that runs more or less often. A machine instruction whose predicate is false
is issued like any other.

The subroutines of divisions and roots, which only some numbers take, and the calls of them are left out;
`counts.MACHINE` says what they take. If ptxas copied a block, as it does where it unrolls a loop, the copies are taken
to run equally often.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import multimode

_ENDS = ("BRA", "EXIT", "CALL", "RET", "BRX", "JMP")
# Those of which ptxas makes exactly one, so that more of a line are copies.
_ANCHORS = ("LDG", "STG", "MUFU.EX2", "SHFL", "BAR", "ATOM")


@dataclass
class Block:
    """A basic block: its labels, and of each instruction the name, the operands and the line of the PTX."""

    labels: set[str]
    instructions: list[tuple[str, str, int]]


def numbered(ptx: str) -> str:
    """PTX whose debug information says on which of its own lines an instruction stands."""
    lines: list[str] = []
    depth = 0
    for number, line in enumerate(ptx.splitlines(), 1):
        bare = line.partition("//")[0].strip()
        if bare.startswith(".section"):  # debug information is the last of the file
            break
        if bare.startswith((".loc", ".file")):
            continue
        if bare.startswith(".visible"):
            lines.append('.file 1 "kernel.ptx"')
        if depth and bare and not bare.startswith((".", "{", "}")) and not re.fullmatch(r"[$\w]+:", bare):
            lines.append(f".loc 1 {number} 0")
        depth += (bare == "{") - (bare == "}")
        lines.append(re.sub(r"^(\.target \w+), debug", r"\1", line))
    return "\n".join(lines) + "\n"


@cache
def assembled(ptx: str, target: str) -> str:
    """The machine code of PTX, disassembled, with the lines of the PTX."""
    import triton

    asked = re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
    assert asked
    tool = triton.knobs.nvidia.ptxas_blackwell if target == "sm_100" else triton.knobs.nvidia.ptxas
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(numbered(ptx))
        cubin = Path(folder) / "out.cubin"
        command = [tool.path, "-lineinfo", f"--gpu-name={asked[1]}", str(file), "-o", str(cubin)]
        subprocess.run(command, check=True)
        command = [triton.knobs.nvidia.nvdisasm.path, "-g", "-c", str(cubin)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def blocks(listing: str) -> list[Block]:
    """The basic blocks of disassembled machine code, in its order."""
    found = [Block(set(), [])]
    line, inside = 0, False
    for raw in listing.splitlines():
        text = raw.strip()
        if at := re.match(r'//## File ".*", line (\d+)', text):
            line = int(at[1])
        elif text.startswith((".text.", ".section")):
            inside = text.startswith((".text.", ".section\t.text", ".section .text"))
        elif not inside:
            continue
        elif label := re.match(r"(\.L_\w+|\$\S+):$", text):
            if found[-1].instructions:
                found.append(Block(set(), []))
            found[-1].labels.add(label[1])
        elif one := re.match(r"(?:/\*\w+\*/)?\s*(?:@!?U?P\w+\s+)?([A-Z][\w.]*)(.*?);", text):
            found[-1].instructions.append((one[1], one[2], line))
            if one[1].split(".")[0] in _ENDS:
                found.append(Block(set(), []))
    return [block for block in found if block.instructions]


def issued(listing: str, warps: dict[int, int]) -> Counter[str]:
    """How often each machine instruction is issued, by its name.

    Args:
        listing: as `assembled` returns it.
        warps: how many warps ran each line of the PTX.
    """
    found = blocks(listing)
    every = [one for block in found for one in block.instructions]
    called = {name for opcode, operands, _ in every if opcode.startswith("CALL") for name in _names(operands)}
    copies = Counter(line for opcode, _, line in every if opcode.startswith(_ANCHORS))
    places = Counter(line for block in found for line in {line for *_, line in block.instructions})
    result: Counter[str] = Counter()
    for block in found:
        if block.labels & called:  # subroutines stand behind the kernel
            break
        if any(opcode.startswith("CALL") for opcode, *_ in block.instructions):
            continue
        anchors = [line for opcode, _, line in block.instructions if opcode.startswith(_ANCHORS) and line in warps]
        lines = anchors or [line for *_, line in block.instructions if line in warps]
        if not lines:
            continue
        ran, copied = multimode((warps[line], copies[line] or 1) for line in lines)[-1]
        here = {line for *_, line in block.instructions}
        if 2 * sum(places[line] > 1 for line in here) <= len(here):  # only accesses were moved out of a loop
            copied = 1
        for opcode, *_ in block.instructions:
            result[opcode] += ran / copied  # type: ignore[assignment]
    return result


def _names(operands: str) -> list[str]:
    return re.findall(r"`\(([^)]*)\)", operands)
