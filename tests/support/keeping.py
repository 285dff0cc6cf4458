"""Where `halfstep.integrations.fsdp.keep_reduced_gradients` cannot be tested."""

from __future__ import annotations

import pytest
import torch


def skip_where_gradients_cannot_be_kept() -> None:
    """Skip the test with versions of torch that `keep_reduced_gradients` does not support (docs/versions.md)."""
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    if not hasattr(torch.Tensor, "grad_dtype") or release >= (2, 15):
        pytest.skip(f"keep_reduced_gradients refuses torch {torch.__version__}")
