"""The zones of a format in a picture: each is named, and the name lies within it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from halfstep.cli.results_picture import draw_exponents, figure
from halfstep.numerics.formats.table import formats


@pytest.mark.parametrize("name", ["fp16", "e5m2", "e4m3fn"])
@pytest.mark.parametrize("found", [{-10: 3, -8: 5}, {-60: 1, 0: 2}, {5: 2, 60: 1}, {}])
def test_every_zone_is_named_within_itself(name: str, found: dict[int, int]) -> None:
    pytest.importorskip("matplotlib")
    form = formats[name]
    made = figure(6.5, 4.0)
    axes = made.add_subplot()
    draw_exponents(axes, found, sum(found.values()), form, 2.0**3, "gradients")
    made.canvas.draw()
    ends = [form.emin - form.mantissa - 1 - 3, form.emin - 3, form.emax + 1 - 3]
    low, high = axes.get_xlim()
    names = ("flushed\nto zero", "subnormal", "normal", "overflow")
    zones = dict(zip(names, pairwise([low, *ends, high]), strict=True))
    named = {text.get_text(): text.get_window_extent() for text in axes.texts}
    assert set(named) >= {"flushed\nto zero", "overflow"}
    for zone, extent in named.items():
        (left, _), (right, _) = axes.transAxes.inverted().transform(extent.get_points())
        start, end = ((place - low) / (high - low) for place in zones[zone])
        assert start <= left < right <= end, zone
