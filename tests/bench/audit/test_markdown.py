"""The audit's Markdown table and the block of a document that holds it."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfstep.bench.audit import markdown

EQUAL = {"bytes_read": 4, "bytes_written": 2.5, "shared_bytes": 0, "barriers": 0, "layout_conversions": 0}
ENTRIES = {
    f"cast.kernel | {variant} | {target}": {**EQUAL, "access_bits": 128, "registers": registers, "spills": 0}
    for variant in ("b", "a")
    for target, registers in (("gfx942", 20), ("sm_100", 32), ("sm_80", 30))
}


def test_a_variant_has_one_line_and_targets_stand_beside_each_other_where_they_differ() -> None:
    assert markdown.table(markdown.from_bounds(ENTRIES)).splitlines() == [
        "Bytes per element; where targets differ, sm_80 / sm_100 / gfx942. No spills.",
        "",
        "| kernel | variant | bytes read + written | access bits | registers | shared bytes | barriers | conversions |",
        "|---|---|---|---|---|---|---|---|",
        "| `cast.kernel` | a | 4 + 2.5 | 128 | 30 / 32 / 20 | 0 | 0 | 0 |",
        "|  | b | 4 + 2.5 | 128 | 30 / 32 / 20 | 0 | 0 | 0 |",
    ]


def test_spills_get_a_column_where_there_are_any() -> None:
    rows = markdown.from_bounds(ENTRIES)
    rows[0]["spills"] = 3
    lines = markdown.table(rows).splitlines()
    assert "No spills" not in lines[0]
    assert lines[2].endswith("| conversions | spills |")
    assert lines[4].endswith("| 0 | 0 |")
    assert lines[5].endswith("| 0 | 0 / 0 / 3 |")


def test_only_the_block_between_the_markers_changes(tmp_path: Path) -> None:
    file = tmp_path / "document.md"
    file.write_text("above\n<!-- table: generated -->\nold\nlines\n<!-- table: end -->\nbelow\n")
    markdown.write("table", "new", file)
    assert file.read_text() == "above\n<!-- table: generated -->\nnew\n<!-- table: end -->\nbelow\n"


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- table: generated -->\nno end",
        "\n<!-- table: end -->\n<!-- table: generated -->\n",
        "<!-- table: generated -->\n\n<!-- table: end -->\n" * 2,
    ],
)
def test_a_document_without_the_block_is_left_alone(text: str, tmp_path: Path) -> None:
    file = tmp_path / "document.md"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"--markdown .*document\.md: it must contain the markers .* once each"):
        markdown.write("table", "new", file)
    assert file.read_text() == text
    with pytest.raises(ValueError, match=r"--markdown .*missing\.md: .*No such file"):
        markdown.write("table", "new", tmp_path / "missing.md")
