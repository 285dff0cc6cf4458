"""Pictures of formats: their ranges, codes and labels."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lookup_run import lines
from matplotlib.figure import Figure

from halfstep.cli.formats import pictures
from halfstep.numerics.formats.table import Format, formats

ALL = list(formats.values())


def drawn(draw: Callable[[Any, Any], None], what: Any, size: tuple[float, float] = (12, 7)) -> Any:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    draw(axes, what)
    figure.draw_without_rendering()
    return axes


def boxes(axes: Any) -> list[tuple[str, Any]]:
    """Texts and where they stand."""
    renderer = axes.figure._get_renderer()
    labels = [*axes.texts, *axes.get_yticklabels()]
    return [(text.get_text(), text.get_window_extent(renderer)) for text in labels if text.get_text()]


@pytest.mark.parametrize("chosen", [ALL, [formats["fp64"]]])
def test_no_labels_overlap(chosen: list[Format]) -> None:
    axes = drawn(pictures.draw_range, chosen, (12, 1.3 + 0.32 * len(chosen)))
    for (left, first), (right, second) in itertools.combinations(boxes(axes), 2):
        assert not first.overlaps(second), (left, right)
    assert all(box.x0 >= 0 and box.x1 <= axes.figure.bbox.x1 for _, box in boxes(axes))


@pytest.mark.parametrize("name", ["e8m0fnu", "e2m1"])  # the widest codes, and the fewest
def test_codes_fit_their_cells(name: str) -> None:
    row = formats[name]
    axes = drawn(pictures.draw_codes, row, (12, 1.6 + 0.36 * max(1, row.codes // 16)))
    assert len(axes.texts) == row.codes
    renderer = axes.figure._get_renderer()
    width = axes.get_window_extent(renderer).width / 16
    assert all(text.get_window_extent(renderer).width <= width for text in axes.texts)


def test_the_range_is_from_the_least_to_the_largest() -> None:
    axes = drawn(pictures.draw_range, [formats["fp16"]])
    bars = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in axes.patches)
    assert bars == [(-24, -14), (-14, pytest.approx(math.log2(65504)))]  # subnormal, then normal
    assert [text.get_text() for text in axes.texts] == ["5.96e-8", "65504"]


def test_codes_are_placed_by_their_hexadecimal_digits() -> None:
    axes = drawn(pictures.draw_codes, formats["e4m3"])
    texts = [text.get_text() for text in axes.texts]
    assert (texts[0x00], texts[0x38], texts[0x7E], texts[0x7F], texts[0x80], texts[0xFE]) == (
        "0", "1", "448", "nan", "-0", "-448",
    )  # fmt: skip
    assert axes.texts[0x38].get_position() == (8.5, 3.5)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_pictures_are_written_and_reproducible(tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"x.{suffix}"
    words = ("ladder", "-f", "fp16", "bf16", "--codes", "e2m1", "--out", str(out))
    assert lines(*words) == [f"{out}: range, codes"]
    first = out.read_bytes()
    assert first.startswith({"png": b"\x89PNG", "svg": b"<?xml"}[suffix])
    if suffix == "svg":
        assert lines(*words) and out.read_bytes() == first  # the same words, the same bytes
        for title in ("Range:", "All 16 codes of e2m1fn", 'width="864pt"'):  # 12 inches: 1200 pixels
            assert title in first.decode()
