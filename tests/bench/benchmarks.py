"""The cases of `halfstep bench run` for pytest-benchmark: ``pytest tests/bench/benchmarks.py``.

One test per case and provider, small sizes. Each is checked against float64 before it is timed; a provider that is not
here is skipped with the reason, one that is wrong fails if it is ours and is skipped if it is a peer's. `pytest` alone
does not run them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from halfstep.bench.cases.catalogue import GROUPS, cases
from halfstep.bench.cases.sizes import Sizes
from halfstep.bench.harness import OK, Case, check, ours

SIZES = Sizes(
    elements=2**18, columns=(256, 4_096, 2**18), cast_elements=(2**18,), tensors=(1, 100), large=0, slow=False
)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PAIRS = [(case, provider) for case in cases(list(GROUPS), SIZES) for provider in case.providers]


@pytest.mark.parametrize(("case", "provider"), PAIRS, ids=[f"{case.name}, {provider}" for case, provider in PAIRS])
def test_benchmark(case: Case, provider: str, benchmark: Any) -> None:
    checked = check(case, case.prepare(DEVICE), provider)
    if checked.job is None:
        assert checked.result.status != OK
        if ours(provider) and checked.result.status != "unavailable":
            pytest.fail(f"{checked.result.status}: {checked.result.reason}")
        pytest.skip(checked.result.reason)
    call = checked.job.call

    def waited() -> None:
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.group = case.name
    benchmark.extra_info.update(bytes_moved=case.bytes_moved, error=checked.result.error)
    benchmark(waited)
