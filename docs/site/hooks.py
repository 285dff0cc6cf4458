"""Hooks of mkdocs: links to files outside of docs/ lead to the repository, docstrings are read from a copy, the
explorer of formats and the planner are pages of the site, and each page names its version."""

from __future__ import annotations

import ast
import posixpath
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def on_startup(command: str, dirty: bool) -> None:
    """Copy the package: mkdocstrings follows neither links nor folders without ``__init__.py``."""
    copy = _ROOT / "out" / "source" / "halfstep"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(_ROOT / "src" / "halfstep", copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path in list(copy.rglob("*.py")):
        (path.parent / "__init__.py").touch()
        path.write_text(with_docstrings(path.read_text(encoding="utf-8")), encoding="utf-8")


def with_docstrings(source: str) -> str:
    """A module in which the docstrings that classes put together of strings of the module are written out."""
    tree = ast.parse(source)
    texts = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and ast.unparse(node.body[0]).startswith("__doc__ = "):
            text = eval(compile(ast.Expression(node.body[0].value), "docstring", "eval"), texts)
            node.body[0] = ast.Expr(ast.Constant(text))
    return ast.unparse(ast.fix_missing_locations(tree))


def on_config(config: Any) -> Any:
    """Say below each page of which version it is."""
    version = runpy.run_path(str(_ROOT / "src" / "halfstep" / "_version.py"))["__version__"]
    log = subprocess.run(["git", "log", "-1", "--format=, commit %h of %cs"], cwd=_ROOT, capture_output=True, text=True)
    config.copyright = f"halfstep {version}{log.stdout.strip()}"
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the explorer and the planner, with all that they load."""
    from mkdocs.structure.files import File

    sys.path[:0] = [str(_ROOT / "src"), str(_ROOT / "docs" / "site")]
    import pages

    folder = _ROOT / "out" / "pages"
    shutil.rmtree(folder, ignore_errors=True)
    print(pages.build(folder, _ROOT / "out" / "pyodide"))
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        files.append(File.generated(config, path.relative_to(folder).as_posix(), content=path.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Replace relative links that leave docs/."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(found: re.Match[str]) -> str:
        begin, target, anchor, end = found[1], found[2], found[3] or "", found[4]
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path == "README.md":
            return begin + posixpath.relpath("index.md", folder or ".") + anchor + end
        if path.startswith("docs/"):
            return found[0]
        return f"{begin}{config.repo_url}/blob/main/{path}{anchor}{end}"

    return _LINK.sub(replaced, markdown)
