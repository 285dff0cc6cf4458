"""Recorded bounds: which changes violate them, with which compiler, and what a partial audit records."""

import json
from pathlib import Path
from typing import Any

import pytest

from halfstep.bench.audit import bounds as audit_bounds
from halfstep.bench.audit.bounds import Bounds

RECORDED = {"bytes_read": 4.0, "bytes_written": 2.5, "access_bits": 64, "registers": 40}
RECORDED |= {"spills": 0, "shared_bytes": 1024, "barriers": 2, "layout_conversions": 1}
REMEDY = "the command"


def row(kernel: str = "cast.kernel", variant: str = "fp32 to fp16", target: str = "sm_90", **measures: Any) -> dict:
    return {"kernel": kernel, "variant": variant, "target": target, **RECORDED, **measures}


def bounds(*rows: dict[str, Any], triton: str = "3.7.1") -> Bounds:
    return Bounds(triton, {audit_bounds.key(each): audit_bounds.entry(each) for each in rows})


def departures(*rows: dict[str, Any], triton: str = "3.7.1", recorded: Bounds | None = None) -> list[str]:
    return audit_bounds.departures(list(rows), recorded or bounds(row()), triton, None, ["sm_90", "gfx942"], REMEDY)


def test_unchanged_and_improved_rows_are_within_bounds() -> None:
    assert departures(row()) == departures(row(registers=48)) == []  # one unit of their allocation more
    better = {name: value - 1 for name, value in RECORDED.items() if name != "access_bits"}
    assert departures(row(**better, access_bits=128)) == []


@pytest.mark.parametrize(
    ("measure", "value", "sentence"),
    [
        ("bytes_read", 4.01, "bytes_read 4.01 is above the recorded 4"),
        ("bytes_written", 3.0, "bytes_written 3.0 is above the recorded 2.5"),
        ("access_bits", 32, "access_bits 32 is below the recorded 64"),
        ("registers", 49, "registers 49 is above the recorded 40 + 8"),
        ("spills", 1, "spills 1 is above the recorded 0"),
        ("shared_bytes", 1025, "shared_bytes 1025 is above the recorded 1024"),
        ("barriers", 3, "barriers 3 is above the recorded 2"),
        ("layout_conversions", 2, "layout_conversions 2 is above the recorded 1"),
        ("bytes_read", None, "bytes_read None is not the recorded 4"),
    ],
)
def test_regressions_are_named(measure: str, value: float | None, sentence: str) -> None:
    assert departures(row(**{measure: value})) == [f"cast.kernel | fp32 to fp16 | sm_90: {sentence}"]
    of_every_compiler = measure in ("bytes_read", "bytes_written", "spills")
    assert bool(departures(row(**{measure: value}), triton="3.6.0")) is of_every_compiler


def test_every_variant_has_an_entry_and_every_entry_a_variant() -> None:
    assert departures(row(), row(target="gfx942"), row(variant="new"), row(variant="new", target="gfx942")) == [
        "cast.kernel | fp32 to fp16 | gfx942: no bounds are recorded; look at it, and record: the command",
        "cast.kernel | new | gfx942: no bounds are recorded; look at it, and record: the command",
        "cast.kernel | new | sm_90: no bounds are recorded; look at it, and record: the command",
    ]
    assert departures(row(), recorded=bounds(row(), row(variant="old"))) == [
        "cast.kernel | old | sm_90: recorded, but no variant has this name any more; record: the command"
    ]


def test_entries_outside_a_partial_audit_are_not_stale() -> None:
    recorded = bounds(row(), row(target="sm_80"), row(kernel="adam.kernel"), row(kernel="cast.old_kernel"))
    left = audit_bounds.departures([row()], recorded, "3.7.1", {"cast"}, ["sm_90"], REMEDY)
    assert [line.partition(":")[0] for line in left] == ["cast.old_kernel | fp32 to fp16 | sm_90"]


def test_the_file_has_one_sorted_line_per_entry_and_reads_back(tmp_path: Path) -> None:
    file = tmp_path / "bounds.json"
    written = bounds(row(target="sm_90"), row(target="gfx942"), row(kernel="adam.kernel", access_bits=None))
    audit_bounds.save(written, file)
    assert audit_bounds.load(file) == written
    lines = file.read_text().splitlines()
    assert lines[0] == '{"triton": "3.7.1", "bounds": {'
    assert [line.split('"')[1] for line in lines[1:-1]] == [
        "adam.kernel | fp32 to fp16 | sm_90",
        "cast.kernel | fp32 to fp16 | gfx942",
        "cast.kernel | fp32 to fp16 | sm_90",
    ]
    assert '"bytes_read": 4, "bytes_written": 2.5' in lines[2]


def test_a_partial_recording_keeps_the_rest_unless_another_triton_recorded_it(tmp_path: Path) -> None:
    file = tmp_path / "bounds.json"
    everything = [row(), row(variant="old"), row(target="sm_80"), row(kernel="adam.kernel")]
    summary = audit_bounds.record(everything, file, "3.7.1", None, ["sm_80", "sm_90"])
    assert summary == f"{file}: 4 recorded, 4 entries differ"
    part = [row(registers=32), row(variant="new")]
    summary = audit_bounds.record(part, file, "3.7.1", {"cast"}, ["sm_90"])
    assert summary == f"{file}: 2 recorded, 3 entries differ"
    expected = bounds(row(registers=32), row(variant="new"), row(target="sm_80"), row(kernel="adam.kernel"))
    assert audit_bounds.load(file) == expected
    with pytest.raises(ValueError, match=r"with Triton 3\.7\.1 and not 3\.8\.0, .*leave out --module and --target"):
        audit_bounds.record([row()], file, "3.8.0", {"cast"}, ["sm_90"])
    assert audit_bounds.load(file) == expected
    audit_bounds.record([row()], file, "3.8.0", None, ["sm_80", "sm_90"])
    assert audit_bounds.load(file) == bounds(row(), triton="3.8.0")


@pytest.mark.parametrize("content", [None, "not json", "[]", json.dumps({"triton": "3.7.1"})])
def test_a_file_without_bounds_is_refused(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "bounds.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(
        ValueError, match=r"expected .*bounds\.json to be written by `halfstep bench audit --record`: \w+: "
    ):
        audit_bounds.load(file)
