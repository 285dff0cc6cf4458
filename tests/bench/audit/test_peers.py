"""Peers in the audit: settings come from their own launch, and what is missing or has changed is named, not fatal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.runtime.jit import JITFunction

from halfstep.bench.audit import peers
from halfstep.bench.audit.launches import Variant, recorded
from halfstep.bench.audit.peers import Job

Found = tuple[tuple[Variant, ...], tuple[str, ...]]


def _kernel(x, y, scale, n, stride, flag, BLOCK: triton.language.constexpr):  # type: ignore[no-untyped-def]
    pass


KERNEL: Any = JITFunction(_kernel)


def launch(**changes: Any) -> None:
    """What a peer's launcher does."""
    x = torch.empty(64, dtype=torch.bfloat16, device="meta")
    y = torch.empty(64, dtype=torch.uint8, device="meta")
    arguments = {"x": x, "y": y, "scale": 0.5, "n": 64, "stride": 1, "flag": None, **changes}
    KERNEL[(1,)](**arguments, BLOCK=1024, num_warps=8, num_stages=2)


@pytest.fixture
def find(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Found]]:
    """Look for peers, given their jobs, of which all but "absent" are installed in version 1.2."""

    def look(*jobs: Job) -> Found:
        peers.find.cache_clear()
        monkeypatch.setattr(peers, "JOBS", jobs)
        return peers.find()

    monkeypatch.setattr(peers, "version_of", lambda peer: None if peer == "absent" else "1.2")
    yield look
    peers.find.cache_clear()


def test_a_variant_is_what_the_peer_launches_and_what_is_not_there_is_named_once(find: Callable[..., Found]) -> None:
    absent = [Job("absent", name, launch, 2, 1) for name in ("one", "two")]
    (variant,), left_out = find(*absent, Job("peer", "a case", launch, 2, 1))
    assert left_out == ("absent is not installed and left out: pip install absent",)
    assert list(peers.variants()) == [variant]
    assert (variant.peer, variant.kernel, variant.name, variant.exact) == ("peer", KERNEL, "a case", False)
    assert (variant.bytes_read, variant.bytes_written) == (2, 1)
    compiled = recorded(variant, "sm_90")
    assert (compiled.options["num_warps"], compiled.options["num_stages"]) == (8, 2)


def _gone() -> None:
    raise AttributeError("module 'peer' has no attribute 'AdamW'")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (_gone, "AttributeError: module 'peer' has no attribute 'AdamW'"),
        (lambda: None, "RuntimeError: it launched no Triton kernel"),
    ],
)
def test_a_changed_peer_is_named_and_the_others_stay(
    changed: Callable[[], None], reason: str, find: Callable[..., Found]
) -> None:
    (variant,), (line,) = find(Job("peer", "old", changed, 2, 1), Job("other", "a case", launch, 2, 1))
    assert line == f"peer 1.2, old, is left out: this version is not supported: {reason}"
    assert variant.peer == "other"
