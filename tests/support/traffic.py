"""The addresses that Triton kernels load and store, recorded by the interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch


@dataclass
class Traffic:
    """The addresses of all elements that were loaded and stored."""

    loaded: list[np.ndarray] = field(default_factory=list)
    stored: list[np.ndarray] = field(default_factory=list)

    @staticmethod
    def counts(of: list[np.ndarray], tensor: torch.Tensor) -> np.ndarray:
        """The number of accesses to each element of a contiguous tensor. Other addresses are ignored."""
        size = tensor.element_size()
        start, length = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes() // size
        index = (np.concatenate(of).astype(np.int64) - start) // size
        return np.bincount(index[(index >= 0) & (index < length)], minlength=length)


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traffic]:
    from triton.runtime.interpreter import InterpreterBuilder

    traffic = Traffic()
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        traffic.loaded.append(ptrs.data[mask.data].ravel())
        return load(self, ptrs, mask, *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        traffic.stored.append(ptrs.data[mask.data].ravel())
        return store(self, ptrs, value, mask, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_masked_load", masked_load)
        patch.setattr(InterpreterBuilder, "create_masked_store", masked_store)
        yield traffic
