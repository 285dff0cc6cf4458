"""Every implementation gives the digests of tests/golden, which `python tests/support/golden.py --write` records."""

from __future__ import annotations

import golden
import pytest
from implementations import ALL, using

EXACT = [(subject, name) for subject, (_, names, _) in golden.CASES.items() if subject != "softmax" for name in names]
# Under the interpreter, `make test` runs a ninth of the optimizers' layouts, and `make exhaustive` the others.
CASES = [
    pytest.param(
        *case,
        name,
        marks=[pytest.mark.golden] * (name == "triton")
        + [pytest.mark.exhaustive] * (case[0] in ("adam", "sgd", "muon") and name == "triton" and number % 9 != 0),
    )
    for name in ALL
    for number, case in enumerate(EXACT)
]
SOFTMAX = golden.CASES["softmax"][1]


@pytest.mark.parametrize(("subject", "name", "implementation"), CASES, ids=lambda text: text.replace(" ", "-"))
def test_bits(subject: str, name: str, implementation: str) -> None:
    run, _, family = golden.CASES[subject]
    with using(implementation, family) as device:
        assert golden.digest(run(name, device)) == golden.recorded(subject)[name]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name: str, implementation: str, request: pytest.FixtureRequest) -> None:
    target = request.config.getoption("--software-gpu") if implementation == "triton" else None
    key = golden.implementation_of_softmax(implementation, target)
    digests = golden.recorded("softmax").get(key)
    if digests is None:
        pytest.skip(f"no digests of softmax are recorded for {key}")
    with using(implementation, "softmax"):
        assert golden.digest(golden.softmax(name)) == digests[name]


def test_subjects_are_recorded_whole() -> None:
    for subject, (_, names, _) in golden.CASES.items():
        digests = golden.recorded(subject)
        for recorded in digests.values() if subject == "softmax" else [digests]:
            assert list(recorded) == names
