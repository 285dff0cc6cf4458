"""Helpers for tests on a GPU and the same tests without one. Needs only torch and pytest."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import halfstep
from halfstep.kernels import backend

# A test with this parameter runs its kernels on a GPU where there is one, else under the interpreter, or compiled on
# the software GPU (pytest --software-gpu).
WHERE = [pytest.param("cuda", marks=pytest.mark.gpu), "interpreter"]

MODELED = False  # whether the GPU is the model of its streams (conftest.py)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def kernels_on(where: str) -> Iterator[torch.device]:
    """The device of ``"cuda"`` or ``"interpreter"``, with the Triton kernels switched on; or ``"cpu"``, with C++."""
    if where == "interpreter" and not backend.TAKES_CPU_TENSORS:
        pytest.skip("needs TRITON_INTERPRET=1 or --software-gpu")
    with halfstep.backend("auto" if where == "cpu" else "triton"):
        yield torch.device("cuda" if where == "cuda" else "cpu")


def interpreted(where: str) -> bool:
    """Whether the kernels are interpreted on this device, which is slow."""
    return where == "interpreter" and backend.INTERPRET


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: object = "") -> None:
    """Check that the bits are equal on any devices. -0.0 is not 0.0; a NaN equals any NaN."""
    actual, expected = actual.detach().cpu().contiguous(), expected.detach().cpu().contiguous()
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), what
    integers = _INTEGERS[actual.dtype.itemsize]
    left, right = actual.reshape(-1).view(integers), expected.reshape(-1).view(integers)
    different = left != right
    if actual.is_floating_point():
        # FP8 has no isnan of its own, and fp64 must not be narrowed.
        one, other = (t.float() if t.dtype.itemsize == 1 else t for t in (actual, expected))
        different &= ~(one.isnan() & other.isnan()).reshape(-1)
    if different.any():
        first = int(different.nonzero()[0])
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} differ, first at {first}: "
            f"{actual.reshape(-1)[first]} ({int(left[first]):#x}), expected {expected.reshape(-1)[first]} "
            f"({int(right[first]):#x})"
        )


def patterns(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Random bit patterns on the CPU, which include infinities, NaNs, subnormals and zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float32:
        codes = torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32)
        codes[::7] &= -(2**23)  # a random mantissa is hardly ever 0: make infinities and powers of two too
        return codes.view(dtype)
    return torch.randint(-(2**15), 2**15, (count,), generator=generator).to(torch.int16).view(dtype)


def normal(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normally distributed numbers on the CPU."""
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)


def placed(tensor: torch.Tensor, device: torch.device, offset: int = 0) -> torch.Tensor:
    """A copy on `device`, at an offset of `offset` elements from an aligned address."""
    memory = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype, device=device)
    view = memory[offset:]
    view.copy_(tensor.reshape(-1))
    return view.view(tensor.shape)
