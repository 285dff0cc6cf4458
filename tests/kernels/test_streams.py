"""Tables, scratch memory and checks on streams and in graphs, on a model of a GPU that runs late (stream_model.py)."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from stream_model import Model

import halfstep
from halfstep.kernels import cast, native, streams, unscale
from halfstep.kernels.cells import Grid, width
from halfstep.kernels.multi_tensor import TableCache
from halfstep.kernels.softmax import dispatch
from halfstep.kernels.statistics import foreach_count_
from halfstep.kernels.streams import all_to_device, to_device, upload

KERNELS = ["native", "triton"]


@pytest.fixture(autouse=True)
def no_graphs() -> None:
    """Those of tests before, if something still refers to them."""
    gc.collect()
    streams._of_graphs.clear()


@contextmanager
def captured() -> Iterator[torch.cuda.CUDAGraph]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        yield graph


def ones(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count,), value, device="cuda")


# --------------------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("kernels", KERNELS)
def test_two_streams_check_tensors_of_the_same_sizes_at_once(kernels: str) -> None:
    with Model("late", kernels=kernels):
        one, other = [ones(4, 1.0), ones(4, 1.0)], [ones(4, 2.0), ones(4, 2.0)]
        side = torch.cuda.Stream()
        for tensors in (other, one):
            halfstep.foreach_check(tensors)
        torch.cuda.synchronize()
        behind = halfstep.foreach_check(one).sum_of_squares
        with torch.cuda.stream(side):
            ahead = halfstep.foreach_check(other).sum_of_squares
            side.synchronize()
        assert (behind.item(), ahead.item()) == (8.0, 32.0)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_graph_reads_its_own_table_whatever_eager_calls_did_since(kernels: str) -> None:
    with Model("late", kernels=kernels):
        recorded = [ones(4), ones(4)]
        halfstep.foreach_check(recorded)
        with captured() as graph:
            found = halfstep.foreach_check(recorded).sum_of_squares
        for size in (4, 5, 6, 7, 8, 9, 10, 11, 12, 13):
            halfstep.foreach_check([ones(size, 3.0), ones(size, 3.0)])
        graph.replay()
        assert found.item() == 8.0
        recorded[0].fill_(2.0)
        assert halfstep.foreach_check(recorded).sum_of_squares.item() == 4 * 4 + 4
        graph.replay()
        assert found.item() == 4 * 4 + 4


@pytest.mark.parametrize("warm", [False, True])
def test_a_second_capture_has_a_table_of_its_own(warm: bool) -> None:
    """Of two captures with equal contents the second must not count on what only the first one copies."""
    with Model("late"):
        tensors, others = [ones(4), ones(9)], [ones(4, 2.0), ones(9, 2.0)]
        if warm:
            halfstep.foreach_check(others)
        with captured():
            halfstep.foreach_check(tensors)
        with captured() as second:
            found = halfstep.foreach_check(tensors).sum_of_squares
        second.replay()
        assert found.item() == 13.0
        assert halfstep.foreach_check(tensors).sum_of_squares.item() == 13.0


def test_an_eager_call_does_not_take_a_captured_copy_for_done() -> None:
    with Model("late"):
        before, after = [ones(4), ones(4)], [ones(4, 3.0), ones(4, 3.0)]
        halfstep.foreach_check(before)
        with captured():
            halfstep.foreach_check(after)  # another set of addresses, copied at a replay that never comes
        assert halfstep.foreach_check(after).sum_of_squares.item() == 72.0


def test_a_capture_copies_nothing_from_pageable_memory_and_waits_for_nothing() -> None:
    with Model("late") as model:
        x, y = ones(40), torch.empty(40, dtype=torch.bfloat16, device="cuda")
        with captured() as graph:
            halfstep.cast(x, torch.bfloat16, out=y)
            found = halfstep.foreach_unscale_([x], 0.5)
        x.fill_(4.0)
        graph.replay()
        graph.replay()
        assert model.pageable == [] and model.blocking == []
        assert y.tolist() == [2.0] * 40 and found.norm.square().round().item() == 40.0


def test_what_a_graph_copies_from_lives_as_long_as_the_graph() -> None:
    with Model("late"):
        tensors = [ones(4), ones(4)]
        with captured() as graph:
            found = halfstep.foreach_check(tensors).sum_of_squares
        for _ in range(3):  # whoever gets the pinned memory next
            upload(torch.full((4, 2), -1, dtype=torch.int64), torch.device("cuda"))
        graph.replay()
        assert found.item() == 8.0
        assert len(streams._of_graphs) == 1 and not streams._for_good
        del graph
        gc.collect()
        assert len(streams._of_graphs) == 0


def test_where_torch_does_not_name_the_graph_pinned_memory_is_kept_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "_for_good", [])
    with Model("late"):
        monkeypatch.delattr(torch.cuda.CUDAGraph, "get_currently_capturing_graph")
        with captured() as graph:
            found = halfstep.foreach_check([ones(4), ones(4)]).sum_of_squares
        upload(torch.full((4, 2), -1, dtype=torch.int64), torch.device("cuda"))
        graph.replay()
        assert found.item() == 8.0
        assert len(streams._for_good) == 1 and len(streams._of_graphs) == 0


def test_a_table_whose_copy_failed_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TableCache(operands=1, chunk=4)
    one, other = [torch.ones(5)], [torch.ones(5)]
    table = cache.table(one)
    with monkeypatch.context() as patch:
        patch.setattr("halfstep.kernels.multi_tensor.upload", lambda *arguments, **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            table.point(0, other)
    assert table.written[0] is None
    assert cache.table(one).rows[2].item() == one[0].data_ptr()


# --------------------------------------------------------------------------------------------------- copies and devices


@pytest.mark.parametrize("order", ["late", "at once"])
def test_copies_to_the_cpu_take_one_wait(order: str) -> None:
    with Model(order) as model:
        cpu, gpu = torch.device("cpu"), model.device
        numbers = [torch.full((), 1.5, device=gpu) * 2, None, torch.tensor(4), torch.full((3,), 5, device=gpu) + 1]
        moved = all_to_device(numbers, cpu, [torch.float64, torch.float32, torch.int64, torch.float32])
        assert model.blocking == ["Stream.synchronize"] and model.pageable == []
        assert moved[1] is None and moved[2] is numbers[2]
        assert [one.tolist() for one in moved if one is not None] == [3.0, 4, [6.0] * 3]
        assert [one.dtype for one in moved if one is not None] == [torch.float64, torch.int64, torch.float32]
        model.blocking.clear()
        assert to_device(torch.full((), 2.5, device=gpu) * 2, cpu).item() == 5.0
        assert model.blocking == ["a copy from the device"]


def test_copies_to_a_gpu_do_not_wait() -> None:
    with Model("late") as model:
        numbers = [torch.tensor(1.5), torch.full((), 2, device=model.device), None]
        moved = all_to_device(numbers, model.device)
        assert moved[1] is numbers[1] and moved[2] is None
        assert to_device(torch.tensor(3), model.device, torch.float32).dtype == torch.float32
        assert model.blocking == [] and moved[0] is not None and moved[0].item() == 1.5


# ------------------------------------------------------------------------------------------------------ no hidden waits


def test_scratch_of_a_graph_is_its_own() -> None:
    with Model("late"):
        x = [ones(5000)]
        with captured() as graph:
            found = halfstep.foreach_check(x).sum_of_squares
        for cache in unscale._tables.values():
            cache._tables.clear()
        halfstep.foreach_check([ones(5000, 3.0)])
        graph.replay()
        halfstep.foreach_check([ones(5000, 3.0)])
        assert found.item() == 5000.0


# ---------------------------------------------------------------------------------------------------------- no compiler


def test_tensors_of_a_gpu_compile_nothing_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ of all families takes ten seconds and more to compile."""

    def compiles(*family: str) -> None:
        raise AssertionError(f"C++ is compiled: {family}")

    with Model("late", kernels="triton") as model:
        monkeypatch.setattr(native, "library", compiles)
        for module in (cast, dispatch):  # whose operators the model runs on tensors of the CPU
            monkeypatch.setattr(
                module, "resolve", lambda device, family: "triton" if device.type == "cuda" else "reference"
            )
        x = torch.full((3, 40), 2.0, device=model.device)
        halfstep.cast(x, torch.bfloat16)
        halfstep.foreach_cast([x], torch.bfloat16)
        halfstep.foreach_cast([x], torch.float16, out=[torch.empty(3, 40, dtype=torch.float16, device="cuda")])
        halfstep.cast(x, "mxfp8")
        halfstep.foreach_cast([x, x], "nvfp4")
        halfstep.foreach_check([x])
        halfstep.foreach_unscale_([x], 0.5)
        halfstep.softmax(x)
        halfstep.log_softmax(x, dim=0)
        foreach_count_([x], torch.zeros(1, width(True), dtype=torch.int64, device="cuda"), Grid(20, -6, 8, 7 << 20))
        for layout in ({}, {"state_dtype": "8bit", "max_grad_norm": 1.0}):
            weights = [torch.nn.Parameter(torch.ones(64, 65, dtype=torch.bfloat16, device=model.device))]
            optimizer = halfstep.AdamW(weights, **layout)
            scaler = halfstep.GradScaler("cuda")
            scaler.scale(torch.zeros((), device=model.device))
            for _ in range(2):
                weights[0].grad = torch.ones_like(weights[0])
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
