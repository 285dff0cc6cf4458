"""What PyTorch's tests of `torch.distributed.checkpoint.state_dict` ask of torch's optimizers, asked of ours."""

from __future__ import annotations

from typing import Any

import pytest
import rank_processes

pytest.importorskip("torch.testing._internal.distributed.common_state_dict", exc_type=ImportError)
import state_dict_ranks


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_two_ranks_agree_with_one_process_in_every_case(every: bool) -> None:
    for found in rank_processes.run(state_dict_ranks.run, state_dict_ranks.WORLD, every):
        assert found["wrong"] == [] and found["ran"] == len(state_dict_ranks.cases(every))


@pytest.mark.parametrize("layout", state_dict_ranks.LAYOUTS)
@pytest.mark.parametrize("cls", state_dict_ranks.CLASSES)
def test_one_process_without_a_group(cls: Any, layout: str) -> None:
    state_dict_ranks.without_a_group(cls, layout)
