"""List variables and parameters of the product with meaningless names, such as ``own``; run by ``make lint``.

    python tests/support/empty_names.py            # fails if more than 1 % of a folder's names are of this kind

A name says what the value is: ``grad``, ``shard``, ``layout``, ``codes``.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "numerics", "integrations", "bench", "src", "examples")
LIMIT = 0.01  # of all names that are bound in a folder
EMPTY = frozenset(
    "one ones own owns found known held made given kind kinds place places beside taken it its thing things what that "
    "this these those some other others each every here there now then more most least many few such same seen "
    "wanted needed asked said told way ways piece pieces much one_of".split()
)


def bound_names(source: str) -> Iterator[tuple[int, str]]:
    """The line and the name of each variable that is assigned, and of each parameter."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg


def main() -> int:
    failed = False
    for folder in FOLDERS:
        names = [
            (path.relative_to(ROOT), line, name)
            for path in sorted((ROOT / folder).rglob("*.py"))
            for line, name in bound_names(path.read_text())
        ]
        empty = [entry for entry in names if entry[2].strip("_") in EMPTY]
        if len(empty) > LIMIT * len(names):
            failed = True
            print(*(f"{path}:{line}: {name}" for path, line, name in empty), sep="\n")
            print(f"{folder}: {len(empty)} of {len(names)} names say nothing; at most {LIMIT:.0%} may\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
