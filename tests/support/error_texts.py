"""Every message with which the library refuses something. Run as a program, it writes them to docs/errors.md.

The messages are read from the source: the first argument of what is raised, with "…" where a value is put in.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
BEGIN, END = "<!-- messages: generated -->", "<!-- messages: end -->"

# Title of each part: the files whose messages it lists. The first that fits counts.
PARTS: dict[str, tuple[str, ...]] = {
    "Optimizers": ("kernels/adam", "kernels/multi_tensor", "integrations/optim"),
    "Loss scaling and clipping": (
        "kernels/unscale",
        "kernels/loss_scale",
        "numerics/scaling",
        "integrations/scheduler",
    ),
    "Steps inside the backward, masters and moments on the host": ("integrations/release", "integrations/offload"),
    "Distributed training": ("integrations/ddp", "integrations/fsdp", "integrations/zero", "integrations/ranks"),
    "Checkpoints and files": (
        *("integrations/archive", "integrations/checkpoint", "integrations/pickle_data", "integrations/tensor_files"),
        *("integrations/torch_file", "integrations/unfinished_saves"),
    ),
    "Trainers": ("integrations/trainers",),
    "Kernels": ("kernels",),
    "Number formats": ("numerics/formats",),
    "Statistics": ("numerics/statistics", "integrations/monitor"),
    "Planning": ("numerics/planning",),
    "The doctor": ("integrations/doctor",),
    "Any argument": ("numerics", "integrations"),
}


def _text(node: ast.expr) -> str | None:
    """What a string expression says, with "…" for every value; None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left), _text(node.right)
        return None if left is None and right is None else f"{left or '…'}{right or '…'}"
    return None


def messages(source: str) -> list[tuple[str, str]]:
    """(class of the exception, message) of each ``raise`` whose message is written there, in the order of the file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = ast.unparse(node.exc.func).split(".")[-1]
            text = _text(node.exc.args[0])
            if text and name[0].isupper() and name != "AssertionError" and len(text.strip("…")) > 8:
                found.append((node.lineno, name, " ".join(text.split())))
    return [(name, text) for _, name, text in sorted(found)]


def _part(path: str) -> str:
    return next(title for title, begins in PARTS.items() if path.startswith(begins))


def table() -> str:
    """The list of all messages, by part."""
    parts: dict[str, dict[str, str]] = {title: {} for title in PARTS}
    for folder in ("kernels", "numerics", "integrations"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            for kind, text in messages(path.read_text(encoding="utf-8")):
                parts[_part(name)].setdefault(text, kind)
    lines: list[str] = []
    for title, found in parts.items():
        if found:
            lines += [f"### {title}", ""]
            lines += [f"- {kind}: {_code(text)}" for text, kind in sorted(found.items())] + [""]
    return "\n".join(lines).rstrip()


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def written(page: str) -> str:
    """The page with the list between its two marks."""
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
