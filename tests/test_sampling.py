"""A sample of many cases has every value of every parameter, and leaves the rest to `make exhaustive`."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.sample(10**9)


@pytest.mark.parametrize("letter", "abc")
@pytest.mark.parametrize("number", [0, 1])
def test_case(number: int, letter: str) -> None:
    assert letter in "abc"


def test_the_sample_has_every_value_once(request: pytest.FixtureRequest) -> None:
    if request.config.option.markexpr != "not exhaustive":
        pytest.skip("nothing is left out")
    cases = [item.name for item in request.session.items if item.path == request.path and "test_case" in item.name]
    assert len(cases) == 4 and all(any(value in case for case in cases) for value in "abc01"), cases
