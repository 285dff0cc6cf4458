"""The operations of an AMP step with clipping: each gradient is read twice and never written, nothing is allocated.

Launches, five for any number of tensors, are counted on a GPU in test_gpu.py.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from unittest import mock

import forks
import pytest
import torch
from counted_bytes import Operations
from implementations import ALL, using
from torch.optim.optimizer import _global_optimizer_pre_hooks
from traffic import recording

import halfstep
from halfstep.kernels import backend

SIZES = (5, 300, 4097, 0, 1)


def training(
    device: torch.device, dtype: torch.dtype, clip: str
) -> tuple[Callable[[], None], list[torch.nn.Parameter], halfstep.GradScaler]:
    """A step to repeat, its parameters and its scaler; clipping by the optimizer or by the scaler."""
    parameters = [torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device)) for size in SIZES]
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, 8.0)
    optimizer = halfstep.AdamW(parameters, max_grad_norm=1.0 if clip == "optimizer" else None)
    scaler = halfstep.GradScaler(device.type, init_scale=8.0, growth_interval=2)
    scaler.scale(torch.zeros((), device=device))

    def step() -> None:
        if clip == "scaler":
            scaler.clip_grad_norm_(optimizer, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return step, parameters, scaler


def test_a_step_calls_few_functions_of_few_files() -> None:
    """Those of Python in halfstep, with new gradients. Python 3.12 and later count comprehensions no more."""
    with using("native", "adam") as device:
        parameters = [torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16, device=device)) for _ in range(10)]
        optimizer, scaler = halfstep.AdamW(parameters), halfstep.GradScaler(device.type)
        scaler.scale(torch.zeros((), device=device))
        home, called = str(Path(halfstep.__file__).parent), []

        def note(frame: FrameType, event: str, argument: object) -> None:
            if event == "call" and frame.f_code.co_filename.startswith(home):
                called.append(frame.f_code)

        # The optimizer has registered the hook of ZeRO-1 if a test has imported that.
        with mock.patch.dict(_global_optimizer_pre_hooks, clear=True):
            for step in range(4):
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                if step == 3:
                    sys.setprofile(note)
                try:
                    scaler.step(optimizer)
                finally:
                    sys.setprofile(None)
                scaler.update()
    assert 20 < len(called) <= 45, " ".join(code.co_name for code in called)
    assert len({code.co_filename for code in called}) <= 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_after_the_second_step_nothing_is_allocated_or_copied(dtype: torch.dtype) -> None:
    """In C++; Triton's interpreter copies what it works on, so its turn comes on a GPU, in test_gpu.py."""
    with using("native", "adam") as device:
        step, _, _ = training(device, dtype, "optimizer")
        with Operations():  # while a mode watches, the table of the gradients is that of `TableCache`, made once
            for _ in range(2):
                step()
        with Operations() as operations:
            for number in range(4):
                step()
                assert operations.names == [], f"step {number + 3}"


def test_the_norm_that_the_scaler_returns_is_all_that_its_clipping_adds() -> None:
    with using("native", "adam") as device:
        step, _, _ = training(device, torch.bfloat16, "scaler")
        with Operations():
            for _ in range(2):
                step()
        with Operations() as operations:
            step()
    assert sorted(operations.names) == ["aten._to_copy.default", "aten.sqrt.default"]


@pytest.mark.skipif(backend.triton is None or not backend.INTERPRET, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(("dtype", "clip"), [(torch.bfloat16, "optimizer"), (torch.float32, "scaler")])
def test_each_gradient_is_read_twice_and_written_never(
    dtype: torch.dtype, clip: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with using("triton", "adam") as device:
        step, parameters, _ = training(device, dtype, clip)
        step()
        with recording(monkeypatch) as traffic:
            step()
    for parameter in parameters:
        assert parameter.grad is not None
        if parameter.numel():
            assert (traffic.counts(traffic.loaded, parameter.grad) == 2).all()
            assert not traffic.counts(traffic.stored, parameter.grad).any()
            assert (traffic.counts(traffic.stored, parameter.detach()) == 1).all(), "the recording sees stores"


@pytest.mark.parametrize("name", ALL)
def test_gradients_in_memory_that_must_not_be_written_can_be_stepped(name: str) -> None:
    """torch's own scaler ends such a process: it writes every gradient even where it changes nothing."""
    if name == "native":
        with using(name, "adam"):
            pass
    code = f"""
import ctypes, mmap, sys
import torch, halfstep
halfstep.backend({"auto" if name == "native" else name!r})
pages = mmap.mmap(-1, mmap.PAGESIZE)
held = torch.frombuffer(pages, dtype=torch.float32)
held.fill_(8.0)
parameter = torch.nn.Parameter(torch.ones(held.numel()))
parameter.grad = held
address = held.data_ptr()
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ) == 0
for limit in (1.0, None):
    optimizer = halfstep.AdamW([parameter], lr=0.1, max_grad_norm=limit)
    scaler = halfstep.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    if limit is None:
        scaler.clip_grad_norm_(optimizer, 1.0)
    before = parameter.max().item()
    scaler.step(optimizer)
    scaler.update()
    assert parameter.max().item() < before
print("stepped", flush=True)
torch.amp.GradScaler("cpu", init_scale=1.0)._unscale_grads_(optimizer, torch.ones(()), torch.zeros(()), True)
print("written", flush=True)
"""
    if name == "triton" and (backend.triton is None or not backend.INTERPRET):
        pytest.skip("needs TRITON_INTERPRET=1")
    done = forks.run(["-c", code])
    assert done.stdout == "stepped\n", done.stderr
    assert done.returncode < 0, "the page could be written after all"
