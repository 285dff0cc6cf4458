"""Where `halfstep.integrations.fsdp.keep_reduced_gradients` cannot be tested."""

from __future__ import annotations

import pytest
import torch


def can_keep() -> bool:
    """Whether this torch is one that `keep_reduced_gradients` supports (docs/versions.md)."""
    return tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


def skip_where_gradients_cannot_be_kept() -> None:
    if not can_keep():
        pytest.skip(f"keep_reduced_gradients refuses torch {torch.__version__}")
