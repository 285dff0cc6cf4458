"""Every message with which the library refuses something. Run as a program, it writes them to docs/errors.md.

The messages are read from the source: the first argument of what is raised, with "…" where a value is put in. Where it
is an argument of the function that raises, the texts that callers pass are put in.
"""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from halfstep.bench.audit import markdown

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "errors.md"
FOLDERS = ("kernels", "numerics", "integrations")
BLOCK = "messages"  # of the page, as halfstep.bench.audit.markdown marks it

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
    "Distributed training": ("integrations/ddp", "integrations/fsdp", "integrations/zero"),
    "Checkpoints and files": ("integrations/checkpoint", "integrations/pickles", "integrations/tensor_files"),
    "Trainers": ("integrations/trainers",),
    "Kernels": ("kernels",),
    "Number formats": ("numerics/formats",),
    "Statistics": ("numerics/statistics", "integrations/monitor"),
    "Planning": ("numerics/planning",),
    "The doctor": ("integrations/doctor",),
    "Any argument": ("numerics", "integrations"),
}


Names = dict[str, ast.expr]  # what names stand for


def _text(node: ast.expr, names: Names) -> str | None:
    """What a string expression says, with "…" for every value; None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return _text(names[node.id], {})
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, names) if node.conversion == -1 else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _text(node.left, names), _text(node.right, names)
        return None if left is None and right is None else f"{left or '…'}{right or '…'}"
    return None


def _called(tree: ast.AST) -> str:
    return ast.unparse(tree).split(".")[-1]


def calls(*sources: str) -> dict[str, list[ast.Call]]:
    """The calls of each function in modules, by its name; without functions that several of them define."""
    found: dict[str, list[ast.Call]] = {}
    defined: Counter[str] = Counter()
    for tree in map(ast.parse, sources):
        defined.update({node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)})
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                found.setdefault(_called(node.func), []).append(node)
    return {name: made for name, made in found.items() if defined[name] == 1}


def _arguments(function: ast.FunctionDef, call: ast.Call) -> Names:
    """The parameters of a function and what a call passes for them."""
    names = [parameter.arg for parameter in function.args.posonlyargs + function.args.args]
    return dict(zip(names, call.args, strict=False)) | {word.arg: word.value for word in call.keywords if word.arg}


def messages(source: str, callers: dict[str, list[ast.Call]]) -> list[tuple[str, str]]:
    """(class of the exception, message) of each ``raise`` whose message is written there, in the order of the file.

    Args:
        source: a module.
        callers: the calls of its functions, see `calls`.
    """
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = _called(node.exc.func)
            around = [one for one in functions if one.lineno <= node.lineno <= (one.end_lineno or 0)]
            passed = [_arguments(one, call) for one in around for call in callers.get(one.name, [])]
            for names in passed or [{}]:
                text = _text(node.exc.args[0], names)
                if text and name[0].isupper() and name != "AssertionError" and len(text.strip("…")) > 8:
                    found.add((node.lineno, name, " ".join(text.split())))
    return [(name, text) for _, name, text in sorted(found)]


def _part(path: str) -> str:
    return next(title for title, begins in PARTS.items() if path.startswith(begins))


def table() -> str:
    """The list of all messages, by part."""
    parts: dict[str, dict[str, str]] = {title: {} for title in PARTS}
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    sources = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    everywhere = calls(*sources.values())
    for name, source in sources.items():
        for kind, text in messages(source, {**calls(source), **everywhere}):
            parts[_part(name)].setdefault(text, kind)
    lines: list[str] = []
    for title, found in parts.items():
        if found:
            lines += [f"### {title}", ""]
            lines += [f"- {kind}: {_code(text)}" for text, kind in sorted(found.items())] + [""]
    return "\n".join(lines).rstrip()


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{text}`"


if __name__ == "__main__":
    markdown.write(BLOCK, table(), PAGE)
