"""Every implementation gives the digests in tests/golden, which `python tests/support/golden.py --write` records."""

from __future__ import annotations

from itertools import groupby, product

import golden
import pytest
from implementations import ALL, using

# The words of a name that one test has in common.
WORDS = {"adam": 3, "muon": 3, "sgd": 3, "cast": 1}
# `make test` runs one case in so many, and `make exhaustive` the others. The C++ kernels always run all cases.
ONE_IN = {
    ("reference", "adam"): 3,
    ("reference", "sgd"): 3,
    ("triton", "adam"): 15,
    ("triton", "sgd"): 9,
    ("reference", "muon"): 3,
    ("triton", "muon"): 9,
    ("triton", "cast"): 3,
}


def groups() -> list[object]:
    parameters = []
    exact = [(subject, names) for subject, (_, names, _) in golden.CASES.items() if subject != "softmax"]
    for implementation, (subject, names), chosen in product(ALL, exact, (True, False)):
        if (implementation, subject) == ("native", "statistics"):  # has no C++
            continue
        one_in = ONE_IN.get((implementation, subject), 1)
        part = [name for number, name in enumerate(names) if (number % one_in == 0) is chosen]

        def words(name: str, count: int = WORDS.get(subject, 0)) -> list[str]:
            return name.split(" ")[:count]

        for shared, cases in groupby(sorted(part, key=words), words):
            marks = [pytest.mark.golden] * (implementation == "triton") + [pytest.mark.exhaustive] * (not chosen)
            name = "-".join([subject, *shared, implementation, *["others"] * (not chosen)])
            parameters.append(pytest.param(subject, list(cases), implementation, marks=marks, id=name))
    return parameters


@pytest.mark.parametrize(("subject", "names", "implementation"), groups())
def test_results_have_the_recorded_digests(subject: str, names: list[str], implementation: str) -> None:
    run, _, family = golden.CASES[subject]
    recorded = golden.recorded(subject)
    with using(implementation, family) as device:
        assert {name: golden.digest(run(name, device)) for name in names} == {name: recorded[name] for name in names}


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_softmax_has_the_recorded_digests(implementation: str, request: pytest.FixtureRequest) -> None:
    target = request.config.getoption("--software-gpu") if implementation == "triton" else None
    key = golden.implementation_of_softmax(implementation, target)
    digests = golden.recorded("softmax").get(key)
    if digests is None:
        pytest.skip(f"no digests of softmax are recorded for {key}")
    with using(implementation, "softmax"):
        assert {name: golden.digest(golden.softmax(name)) for name in golden.CASES["softmax"][1]} == digests


def test_every_case_of_a_subject_is_recorded() -> None:
    for subject, (_, names, _) in golden.CASES.items():
        digests = golden.recorded(subject)
        for recorded in digests.values() if subject == "softmax" else [digests]:
            assert list(recorded) == names
