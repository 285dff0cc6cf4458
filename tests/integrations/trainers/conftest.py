"""The runs of all trainers, each started once."""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import rank_processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of a library to one process of xdist, which makes the library's runs for all of them."""
    for item in items:
        if isinstance(item, pytest.Function) and {"found", "results"} & set(item.fixturenames):
            module = item.path.stem.removeprefix("test_")
            library = item.callspec.params["library"] if module == "runs" else module
            item.add_marker(pytest.mark.xdist_group(library))


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, list[Any]]]:
    """A function of a library, that returns what each rank of each run has seen, by the name of the run."""

    @functools.cache
    def of(library: str) -> dict[str, list[Any]]:
        arguments = [str(tmp_path_factory.mktemp(library))]
        arguments += [library] if library in ("lightning", "fabric") else []
        run = importlib.import_module(f"{'lightning' if library == 'fabric' else library}_ranks").run
        ranks = rank_processes.run(run, 2, *arguments)
        if library == "torchtitan":  # it has a process group for one rank too, which loads what two saved
            (alone,) = rank_processes.run(run, 1, *arguments)
        else:
            alone = rank_processes.alone(run, *arguments)
        runs: dict[str, list[Any]] = {name: [rank[name] for rank in ranks] for name in ranks[0]}
        return {**runs, **{name: [result] for name, result in alone.items()}}

    return of


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, results: Callable[[str], dict[str, list[Any]]]) -> dict[str, list[Any]]:
    """The results of each rank, by run, of the library after which a module of tests is named."""
    return results(request.path.stem.removeprefix("test_"))
