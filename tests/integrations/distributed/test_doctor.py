"""The doctor on two ranks: no findings in healthy set-ups, and the names of faults of sharded ones."""

import doctor_ranks
import pytest
import rank_processes


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, list[str]]]:
    return rank_processes.run(doctor_ranks.run, doctor_ranks.WORLD)


@pytest.mark.parametrize("name", doctor_ranks.HEALTHY)
def test_no_false_alarm(ranks: list[dict[str, list[str]]], name: str) -> None:
    assert [rank[name] for rank in ranks] == [[], []]


@pytest.mark.parametrize("finding", doctor_ranks.ISSUES.values())
def test_the_doctor_names_faults_of_sharded_set_ups(ranks: list[dict[str, list[str]]], finding: str) -> None:
    assert all(finding in rank[finding] for rank in ranks), [rank[finding] for rank in ranks]
