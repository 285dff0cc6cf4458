"""CI, the release workflow and the templates: they parse, and name only what is there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FILES = [*sorted((ROOT / ".github").glob("**/*.yml")), ROOT / ".pre-commit-config.yaml"]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "RELEASING.md", "pyproject.toml")]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def parsed(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs() -> dict[str, dict[str, Any]]:
    return {f"{path.stem}/{name}": job for path in WORKFLOWS for name, job in parsed(path)["jobs"].items()}


def steps(key: str) -> list[str]:
    return [step[key] for job in jobs().values() for step in job["steps"] if key in step]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_parses(path: Path) -> None:
    assert isinstance(parsed(path), dict)


def test_every_python_that_is_named_is_tested() -> None:
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PYPROJECT)
    assert jobs()["ci/test"]["strategy"]["matrix"]["python"] == named


def test_workflows_run_what_is_there() -> None:
    commands = steps("run")
    for target in re.findall(r"\bmake ([a-z-]+)", "\n".join(commands)):
        assert re.search(rf"^{target}:", MAKEFILE, flags=re.MULTILINE), target
    tests = re.findall(r"tests/[\w/]+\.py", "\n".join(commands))
    assert tests and all((ROOT / test).exists() for test in tests), tests
    assert {"make lint", "make test", "make trainers", "make docs", "make software-gpu", "make audit"} <= set(commands)


def test_actions_are_pinned_by_major_version() -> None:
    for action in steps("uses"):
        assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", action), action


def test_only_what_publishes_may_write() -> None:
    for path in WORKFLOWS:
        assert parsed(path)["permissions"] == {"contents": "read"}, path
    assert {name: job["permissions"] for name, job in jobs().items() if "permissions" in job} == {
        "docs/publish": {"pages": "write", "id-token": "write"},
        "release/publish": {"id-token": "write"},
        "release/announce": {"contents": "write"},
    }
    assert all("timeout-minutes" in job for job in jobs().values())


@pytest.mark.parametrize(
    ("tag", "changelog", "passes"),
    [
        ("v1.2.3", "## 1.2.3 - 2026-12-01\n", True),
        ("v1.2.4", "## 1.2.4 - 2026-12-01\n", False),
        ("v1.2.3", "## Unreleased\n", False),
    ],
    ids=["same", "another version", "not in the changelog"],
)
def test_a_tag_of_another_version_is_not_published(tmp_path: Path, tag: str, changelog: str, passes: bool) -> None:
    (script,) = (
        text for text in steps("run") if "GITHUB_REF_NAME" in text and "CHANGELOG.md" in text and "grep" in text
    )
    (tmp_path / "dist").mkdir()
    for name in ("halfstep-1.2.3.tar.gz", "halfstep-1.2.3-py3-none-any.whl"):
        (tmp_path / "dist" / name).touch()
    (tmp_path / "CHANGELOG.md").write_text(changelog)
    environment = {**os.environ, "GITHUB_REF_NAME": tag}
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environment, capture_output=True)
    assert (done.returncode == 0) is passes


def test_the_notes_are_the_changelogs_section(tmp_path: Path) -> None:
    (script,) = (text for text in steps("run") if "gh release create" in text)
    awk = script.splitlines()[0]
    text = (
        "# Changelog\n\n## Unreleased\n\n## 1.2.3 - 2026-12-01\n\n### Added\n- this\n\n## 1.2.2 - 2026-11-01\n- that\n"
    )
    (tmp_path / "CHANGELOG.md").write_text(text)
    environment = {**os.environ, "GITHUB_REF_NAME": "v1.2.3"}
    subprocess.run(["bash", "-e", "-c", awk], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "notes.md").read_text().strip() == "### Added\n- this"


def test_pre_commit_has_the_ruff_of_make_lint() -> None:
    (ruff,) = (repo for repo in parsed(ROOT / ".pre-commit-config.yaml")["repos"] if "ruff" in repo["repo"])
    assert f"\nruff=={ruff['rev'].removeprefix('v')}\n" in (ROOT / "constraints.txt").read_text()


def test_every_address_is_of_one_repository_and_leads_to_a_file() -> None:
    found = {url for path in (*FILES, *PAGES) for url in re.findall(r"github\.com/halfstep[\w./-]*", path.read_text())}
    assert found
    for url in found:
        rest = re.fullmatch(r"github\.com/halfstep/halfstep(?:/issues|/(?:tree|blob)/main/(?P<path>[\w./-]+))?", url)
        assert rest is not None, url
        assert rest["path"] is None or (ROOT / rest["path"]).exists(), url
