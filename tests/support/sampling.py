"""Tests of many cases, of which `make test` runs a sample: those with the mark ``sample(k)``, often of a whole module.

Of each such test, the sample has the first case, one in `k`, chosen by its name, and if there are several parameters,
the first case of every value of each. The others are marked exhaustive. A test without parameters is always run.
"""

import zlib
from collections import defaultdict

import pytest


def chosen(names: list[str], values: list[dict[str, int]], one_in: int) -> list[bool]:
    """Whether each case is in the sample, of the cases' names and of their parameters' values, as numbers."""
    seen: set[tuple[str, int]] = set()
    found: list[bool] = []
    for name, of in zip(names, values, strict=True):
        new = not found or (len(of) > 1 and not seen.issuperset(of.items()))
        found.append(new or zlib.crc32(name.encode()) % one_in == 0)
        if found[-1]:
            seen.update(of.items())
    return found


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[tuple[str, str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is not None and hasattr(item, "callspec") and item.get_closest_marker("exhaustive") is None:
            cases[item.parent.nodeid if item.parent else "", item.originalname, mark.args[0]].append(item)  # type: ignore[attr-defined]
    for (_, _, one_in), these in cases.items():
        names = [item.callspec.id for item in these]  # type: ignore[attr-defined]
        # Not `callspec.indices`, which number the cases since pytest 9. The values are kept alive by the cases.
        values = [{key: id(one) for key, one in item.callspec.params.items()} for item in these]  # type: ignore[attr-defined]
        for item, is_chosen in zip(these, chosen(names, values, one_in), strict=True):
            if not is_chosen:
                item.add_marker(pytest.mark.exhaustive)
