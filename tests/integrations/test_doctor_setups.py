"""The doctor names faults that users reported, and finds nothing in healthy training set-ups.

Those on two ranks are in tests/integrations/distributed/test_doctor.py.
"""

from __future__ import annotations

from collections.abc import Callable

import faulty_setups
import healthy_setups
import one_line_breaks
import pytest

from halfstep.integrations.doctor import Diagnosis


@pytest.mark.parametrize(
    ("build", "name"),
    [(build, name) for build, name, _ in faulty_setups.ISSUES],
    ids=[build.__name__ for build, _, _ in faulty_setups.ISSUES],
)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step", "ignore:`parameters` is an empty generator")
def test_the_doctor_names_it(build: Callable[[], Diagnosis], name: str) -> None:
    diagnosis = build()
    assert name in diagnosis.names, str(diagnosis)
    (found,) = (finding for finding in diagnosis.findings if finding.name == name)
    assert found.where and found.what and found.stake and found.remedy


@pytest.mark.parametrize("case", one_line_breaks.BREAKS, ids=lambda case: f"{case.name}: {case.replacement.strip()}")
def test_a_broken_line_is_named(case: one_line_breaks.Break) -> None:
    names = one_line_breaks.told_by(case)
    assert case.name in names if case.name is not None else names == []


@pytest.mark.parametrize("loop", [one_line_breaks.AMP, one_line_breaks.PLAIN], ids=["amp", "plain"])
def test_no_false_alarm_in_the_loops_that_are_broken(loop: str) -> None:
    assert one_line_breaks.told(loop) == []


@pytest.mark.parametrize("build", healthy_setups.HEALTHY, ids=[build.__name__ for build in healthy_setups.HEALTHY])
def test_no_false_alarm(build: Callable[[], list[str]]) -> None:
    assert build() == []


def test_there_are_as_many_as_promised() -> None:
    assert sum(bool(threads) for _, _, threads in faulty_setups.ISSUES) >= 15
    assert len(healthy_setups.HEALTHY) >= 30
