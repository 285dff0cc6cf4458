"""The cases of `halfstep bench run` for pytest-benchmark: ``pytest bench``, or ``pytest bench -k "adamw and bf16"``.

Each is checked against float64 before it is timed. Unavailable providers and wrong peers are skipped.
"""

from __future__ import annotations

from typing import Any

import torch

from halfstep.bench.cases import GROUPS, Sizes, cases
from halfstep.bench.harness import FAILED, WRONG, Case, check, ours

SIZES = Sizes(elements=2**18, columns=(256, 4_096, 2**18), cast_elements=(2**18,), tensors=(1, 50), large=0, slow=False)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pytest_generate_tests(metafunc: Any) -> None:
    """Parametrize the benchmark. A hook, because a decorator would need pytest to import this module."""
    pairs = [(case, provider) for case in cases(GROUPS, SIZES) for provider in case.providers]
    metafunc.parametrize(("case", "provider"), pairs, ids=[f"{case.name}, {provider}" for case, provider in pairs])


def test_benchmark(case: Case, provider: str, benchmark: Any) -> None:
    import pytest

    result, job = check(case, case.prepare(DEVICE), provider)
    if job is None:
        assert not (ours(provider) and result.status in (WRONG, FAILED)), result.reason
        pytest.skip(result.reason)
    call = job.call

    def waited() -> None:
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.group = case.name
    benchmark.extra_info.update(bytes_moved=result.bytes_moved, error=result.error)
    benchmark(waited)
