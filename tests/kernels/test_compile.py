"""Every kernel variant compiles for every target with no GPU: no spills, no contraction, the bytes of the floor."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from halfstep.bench import audit

SUPPORT = Path(__file__).parents[1] / "support"


def run_audit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process that starts with TRITON_INTERPRET=1, as the tests do."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(SUPPORT)}
    return subprocess.run(
        [sys.executable, "-m", "halfstep.bench.audit", *arguments], capture_output=True, text=True, env=environment
    )


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.stdout, done.stderr
    return json.loads(done.stdout)["variants"]


@pytest.fixture(scope="module")
def audited() -> subprocess.CompletedProcess[str]:
    return run_audit("--json")


def test_every_variant_of_every_family_compiles_for_every_target_without_spills_or_contraction(
    audited: subprocess.CompletedProcess[str],
) -> None:
    rows = rows_of(audited)
    failing = {f"{row['kernel']} {row['variant']} {row['target']}": row["problems"] for row in rows if row["problems"]}
    assert not failing
    assert audited.returncode == 0
    for row in rows:
        assert row["spills"] == 0
    listed = {
        (f"{family.rpartition('.')[2]}.{variant.kernel.__name__}", variant.name, target)
        for family in audit.FAMILIES
        for variant in importlib.import_module(family).variants()
        for target in audit.TARGETS
    }
    assert {(row["kernel"], row["variant"], row["target"]) for row in rows} == listed
    assert len(rows) == len(listed), "two variants of one kernel share a name"


def test_what_promises_the_references_bits_says_so() -> None:
    """The audit looks for contractions only where `exact` is set, so leaving it out would pass unseen."""
    for family in ("adam", "cast", "unscale"):
        for variant in importlib.import_module(f"halfstep.kernels.{family}").variants():
            assert variant.exact, f"{family} {variant.name}"


def test_the_audit_rejects_what_it_must() -> None:
    done = run_audit("--json", "--module", "failing_kernels", "--target", "sm_90", "--target", "gfx942")
    problems = {(row["variant"], row["target"]): "; ".join(row["problems"]) for row in rows_of(done)}
    assert done.returncode == 1
    assert "8x fma.rn.f32" in problems["contracted", "sm_90"]
    assert "fused multiply-add" in problems["contracted", "gfx942"]
    assert "8x fma.rn.f32" in problems["fused by hand", "sm_90"]
    assert "1x fma" in problems["fused by hand", "gfx942"]
    assert "div.full.f32" in problems["approximate", "sm_90"]
    assert problems["approximate", "gfx942"] == ""  # AMD's plain division is correctly rounded
    for target in ("sm_90", "gfx942"):
        assert problems["mistyped", target].startswith("does not compile: CompilationError")
    assert "spills" in problems["spills", "sm_90"]


def test_bytes_and_widths_come_from_the_machine_code() -> None:
    rows = rows_of(run_audit("--json", "--module", "sample_kernels"))
    assert len(rows) == 3 * len(audit.TARGETS)
    for row in rows:
        assert row["problems"] == []
        assert (row["bytes_read"], row["bytes_written"]) == (row["floor_read"], row["floor_written"]), row
        assert row["floor_bytes"] == row["floor_read"] + row["floor_written"]
        assert row["access_bits"] == (64 if row["kernel"].endswith(".table_kernel") else 128)
        assert row["spills"] == row["shared_bytes"] == row["barriers"] == row["layout_conversions"] == 0
        assert 0 < row["registers"] < 100
        assert 0.25 < row["occupancy"] <= 1
    floors = {row["target"]: row["floor_ms"] for row in rows if row["variant"] == "bf16"}
    assert floors["sm_90"] == {"H100": pytest.approx(10 / 3.35), "H200": pytest.approx(10 / 4.8)}


def test_the_table_names_what_fails() -> None:
    done = run_audit("--module", "failing_kernels", "--target", "sm_80")
    assert done.returncode == 1
    assert "FAIL failing_kernels.multiply_add_kernel contracted on sm_80: promises the reference's bits" in done.stdout
    assert "5 of 5 fail" in done.stdout
    assert "does not compile" in done.stdout
