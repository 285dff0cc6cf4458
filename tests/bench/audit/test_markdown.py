"""The audit's Markdown table."""

from __future__ import annotations

from halfstep.bench.audit import markdown

EQUAL = {
    **{"bytes_read": 4, "bytes_written": 2.5, "access_bits": 128, "spills": 0},
    **{"shared_bytes": 0, "barriers": 0, "layout_conversions": 0},
}
ROWS = [
    {"kernel": "cast.kernel", "variant": variant, "target": target, "registers": registers, **EQUAL}
    for variant in ("b", "a")
    for target, registers in (("gfx942", 20), ("sm_100", 32), ("sm_80", 30))
]


def test_a_variant_has_one_line_and_targets_stand_beside_each_other_where_they_differ() -> None:
    assert markdown.table(ROWS).splitlines() == [
        "Bytes per element; where targets differ, sm_80 / sm_100 / gfx942. No spills.",
        "",
        "| kernel | variant | bytes read + written | access bits | registers | shared bytes | barriers | conversions |",
        "|---|---|---|---|---|---|---|---|",
        "| `cast.kernel` | a | 4 + 2.5 | 128 | 30 / 32 / 20 | 0 | 0 | 0 |",
        "|  | b | 4 + 2.5 | 128 | 30 / 32 / 20 | 0 | 0 | 0 |",
    ]


def test_spills_get_a_column_where_there_are_any() -> None:
    lines = markdown.table([{**ROWS[0], "spills": 3}, *ROWS[1:]]).splitlines()
    assert "No spills" not in lines[0]
    assert lines[2].endswith("| conversions | spills |")
    assert lines[4].endswith("| 0 | 0 |")
    assert lines[5].endswith("| 0 | 0 / 0 / 3 |")
