"""Run a function with each implementation: the reference, the compiled C++ and the Triton kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import halfstep
from halfstep.kernels import backend, native

ALL = ("reference", "native", "triton")


@contextmanager
def using(name: str, family: str) -> Iterator[torch.device]:
    """Switch to an implementation and return its device; skip the test if it cannot run."""
    device = torch.device("cpu")
    if name == "native" and family != "statistics" and native.library(family) is None:
        pytest.skip("needs a C++ compiler")
    if name == "triton":
        if backend.triton is None:
            pytest.skip("needs Triton")
        if not backend.TAKES_CPU_TENSORS:
            if not torch.cuda.is_available():
                pytest.skip("needs a GPU or TRITON_INTERPRET=1")
            device = torch.device("cuda")
    with halfstep.backend("auto" if name == "native" else name):
        yield device


def devices(family: str) -> Any:
    """A fixture `device`, for which a test is run with each implementation of a family in turn."""

    @pytest.fixture(name="device", params=ALL)
    def fixture(request: pytest.FixtureRequest) -> Iterator[torch.device]:
        with using(request.param, family) as device:
            yield device

    return fixture


def twin(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on `device` with the same strides and storage offset, and therefore the same alignment."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.detach().untyped_storage())
    return whole.to(device, copy=True).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def twins(tensors: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    return [twin(tensor, device) for tensor in tensors]
