"""Random loops with mistakes (tests/support/mistakes.py): the plain optimizer's bits, or an error with a remedy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import mistakes
import pytest
import torch

# `python tests/support/mistakes.py --loops N --seed S` runs others.
LOOPS = 90


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would wait for one another longer than these small models take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("way", mistakes.WAYS)
@pytest.mark.parametrize("layout", mistakes.LAYOUTS_OF_16_BITS)
def test_mistakes_have_the_bits_of_the_plain_optimizer_or_are_refused(layout: str, way: str) -> None:
    counts: Counter[str] = Counter()
    for seed in range(LOOPS // 3):
        actions = mistakes.loop_of(seed)
        assert mistakes.is_allowed(actions)
        text = mistakes.verdict(way, layout, actions)
        counts[text] += 1
        if mistakes.is_wrong(text):
            wrong = mistakes.shortened(actions, lambda tried: mistakes.is_wrong(mistakes.verdict(way, layout, tried)))
            pytest.fail(f"loop {seed}, {' '.join(wrong)}: {mistakes.verdict(way, layout, wrong)}")
    assert counts["same bits"]


def test_loops_contain_every_action() -> None:
    """And there are such without mistakes, and a loop that cannot differ is not called wrong."""
    drawn = {action for seed in range(LOOPS) for action in mistakes.loop_of(seed)}
    assert drawn == {name for name in vars(mistakes.Loop) if not name.startswith("_")}
    assert mistakes.verdict("plain", "split", mistakes.loop_of(0)) == "same bits"
