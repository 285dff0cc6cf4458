"""Values that formats share, counted against all their values, one by one."""

from __future__ import annotations

import itertools

import pytest

from halfstep.cli.formats.compare import shared_values
from halfstep.numerics.formats.exact import decode_exact
from halfstep.numerics.formats.table import Format, formats

SMALL = [name for name in formats if formats[name].bits <= 8] + ["e3m4", "e4m3ieee", "e5m2finite", "e2m0", "e3m2b6"]


def every_value(row: Format) -> set[object]:
    found = {decode_exact(code, row) for code in range(row.codes)}
    return {value for value in found if value == value}


@pytest.mark.parametrize(("one", "other"), list(itertools.combinations_with_replacement(SMALL, 2)))
def test_shared_values_of_small_formats(one: str, other: str) -> None:
    wanted = len(every_value(formats[one]) & every_value(formats[other]))
    assert shared_values(formats[one], formats[other]) == shared_values(formats[other], formats[one]) == wanted


def test_shared_values_of_16_bits() -> None:
    half, brain = every_value(formats["fp16"]), every_value(formats["bf16"])
    assert shared_values(formats["fp16"], formats["bf16"]) == len(half & brain)
    for name in SMALL:
        assert shared_values(formats["fp16"], formats[name]) == len(half & every_value(formats[name]))


@pytest.mark.parametrize("name", list(formats))
def test_a_format_shares_all_its_values_with_itself(name: str) -> None:
    assert shared_values(formats[name], formats[name]) == formats[name].values
