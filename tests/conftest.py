"""Chooses how Triton kernels run, before any test imports halfstep: on a GPU, in Triton's interpreter, or compiled on
the software GPU (``pytest --software-gpu sm_90``)."""

import gc
import importlib.metadata
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import quick_interpreter
import rank_processes
import torch
import torch.distributed as dist

pytest_plugins = ["sampling"]  # in tests/support

# A shell makes background processes ignore Ctrl-C, and Python then does not raise KeyboardInterrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.pop("COLUMNS", None)  # which xdist sets in its processes, whose output is no terminal

HAS_GPU = torch.cuda.is_available()
# One thread per process if several processes run tests: OpenMP's threads busy-wait for one another.
ALONE = os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") == "1"
torch.set_num_threads(min(torch.get_num_threads(), 2) if ALONE else 1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        *("--software-gpu",),
        metavar="TARGET",
        help="run the Triton kernels as compiled for sm_80, sm_90, sm_100 or gfx942, in software (tests/support)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose how the Triton kernels run, before anything imports halfstep."""
    target = config.getoption("--software-gpu")
    if target:
        from software_gpu import gpu

        gpu.install(target)
    elif not HAS_GPU:
        os.environ.setdefault("TRITON_INTERPRET", "1")
        refuse_unlike_versions()
        quick_interpreter.install()


@pytest.fixture(scope="session", autouse=True)
def groups_are_not_freed() -> Iterator[None]:
    """Keep process groups that a test destroys, as the ends of examples/ do, since freeing one can block."""
    destroy, kept = dist.destroy_process_group, []

    def keep_and_destroy(group: Any = None) -> None:
        kept.extend(dist.distributed_c10d._world.pg_map)
        destroy(group)

    with mock.patch.object(dist, "destroy_process_group", keep_and_destroy):
        yield


# Launches on the software GPU by kernel, of this process and, in the main process, of its workers.
LAUNCHED: Counter[str] = Counter()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--software-gpu"):
        from software_gpu import gpu

        LAUNCHED.update(gpu.installed().launched)
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["launched"] = dict(LAUNCHED)
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["crashes"] = rank_processes.CRASHES


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    LAUNCHED.update(getattr(node, "workeroutput", {}).get("launched", {}))
    rank_processes.CRASHES.extend(getattr(node, "workeroutput", {}).get("crashes", ()))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for crash in rank_processes.CRASHES:
        terminalreporter.write_line(f"a rank crashed, and the ranks ran once more: {crash}")
    if LAUNCHED:
        kernels = ", ".join(f"{name} {count}" for name, count in sorted(LAUNCHED.items()))
        terminalreporter.write_line(
            f"{LAUNCHED.total()} launches ran on the software {config.getoption('--software-gpu')}: {kernels}"
        )


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def refuse_unlike_versions() -> None:
    """Stop before the tests if Triton's interpreter cannot run: up to 3.6 it does not support numpy 2.4 or later."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return
    unlike = release(triton) < (3, 7) and release(numpy.__version__) >= (2, 4)
    if os.environ.get("TRITON_INTERPRET") == "1" and unlike:
        raise pytest.UsageError(
            f"the interpreter of triton {triton} does not support numpy {numpy.__version__}; install 'numpy<2.4', or "
            "triton 3.7 or later"
        )


def release(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(map(int, version.split(".")[:2]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU, skip the tests marked gpu that the model of a GPU's streams cannot run."""
    if not HAS_GPU:
        for item in items:
            marker = item.get_closest_marker("gpu")
            if marker and (marker.kwargs or config.getoption("--software-gpu")):
                reason = marker.kwargs.get("only", "the software GPU has no streams")
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))


@pytest.fixture(autouse=True)
def streams_of_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Without a GPU, run a test marked gpu on the model of a GPU's streams, whose device is as late as possible."""
    if HAS_GPU or not request.node.get_closest_marker("gpu"):
        yield
        return
    import devices
    from stream_model import Model

    with Model("late", size=1 << 26), mock.patch.object(devices, "MODELED", True):
        yield


def pytest_runtest_logfinish() -> None:
    """End a worker of xdist whose GPU's context is lost, so that a new one runs the other tests."""
    if HAS_GPU and "PYTEST_XDIST_WORKER" in os.environ:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            os._exit(1)


def pytest_collection_finish() -> None:
    """Hide the modules and tests from the garbage collector: they stay, and each collection would visit all of them."""
    gc.collect()
    gc.freeze()


def state_of_torch() -> tuple[bool, Any, torch.dtype, torch.device, int]:
    functions, threads = torch._C._get_torch_function_state(), torch.get_num_threads()
    return torch.is_grad_enabled(), functions, torch.get_default_dtype(), torch.get_default_device(), threads


@pytest.fixture
def default_bf16() -> Iterator[None]:
    """torch's default dtype is bf16, as many scripts for language models set it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """Check that a test leaves the global state of torch unchanged, so that it cannot affect later tests."""
    before = state_of_torch()
    yield
    after = state_of_torch()
    assert after == before, (
        f"(grad enabled, torch function, default dtype, device, threads) were {before} and are {after}"
    )
