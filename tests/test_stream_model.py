"""The model of a GPU's streams and graphs itself: what it lets happen, what it refuses, what it sees."""

from __future__ import annotations

import pytest
import torch
from stream_model import Model


@pytest.mark.parametrize("waits", [False, True])
def test_streams_run_in_any_order_that_events_allow(waits: bool) -> None:
    found = set()
    for seed in range(20):
        with Model("random", seed):
            x = torch.zeros((), device="cuda")
            torch.cuda.synchronize()
            side = torch.cuda.Stream()
            x.add_(1)
            if waits:
                side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                x.mul_(3)
            torch.cuda.synchronize()
            found.add(x.item())
    assert found == ({3.0} if waits else {1.0, 3.0})


def test_memory_that_is_freed_is_the_next_ones() -> None:
    with Model("late"):
        x = torch.ones(4, device="cuda")
        address = x.data_ptr()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x + 1  # and x is not kept for it
        del x
        z = torch.full((4,), 5.0, device="cuda")
        torch.cuda.current_stream().synchronize()
        assert z.data_ptr() == address
        torch.cuda.synchronize()
        assert y.tolist() == [6.0] * 4


def test_a_graph_reads_addresses_and_keeps_nothing_of_others() -> None:
    with Model("late"):
        x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        pinned = torch.full((4,), 3.0).pin_memory()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y.copy_(pinned, non_blocking=True)
            own = x * 2
            y.add_(own)
        assert y.tolist() == [0.0] * 4
        graph.replay()
        assert y.tolist() == [5.0] * 4
        x.fill_(2.0)
        graph.replay()
        assert y.tolist() == [7.0] * 4
        del pinned
        graph.replay()
        assert y.tolist() != [7.0] * 4, "the copy reads what is there now"


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda x: x.item(), "_local_scalar_dense"),
        (lambda x: x.tolist(), "a copy from the device"),
        (lambda x: x.cpu(), "a copy from the device"),
        (lambda x: bool(x), "_local_scalar_dense"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.reshape(1)[[0]], "an index from the host"),
        (lambda x: torch.tensor([1.0], device="cuda"), "a copy to the device"),
        (lambda x: torch.ones(3).to("cuda"), "a copy to the device"),
        (lambda x: torch.cuda.current_stream().synchronize(), "synchronize"),
        (lambda x: torch.equal(x, x), "equal"),
    ],
)
def test_what_waits_is_named_and_refused(call: object, named: str) -> None:
    with Model("late") as model:
        x = torch.ones((), device="cuda")
        call(x)  # type: ignore[operator]
        assert len(model.blocking) == 1 and named in model.blocking[0]
        torch.cuda.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="called a synchronizing CUDA operation"):
            call(x)  # type: ignore[operator]
        torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(RuntimeError, match="previous error during capture"), torch.cuda.graph(graph):
            call(x)  # type: ignore[operator]
        assert not torch.cuda.is_current_stream_capturing()
