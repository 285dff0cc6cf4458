"""The code paths of the softmax kernels, at sizes that the interpreter finishes in seconds."""

from __future__ import annotations

import pytest

from halfstep.kernels.softmax import rows, strided

PATHS = ("one pass", "two passes", "pieces")


def small_tiles(patch: pytest.MonkeyPatch, tile: int, loop: int, programs: int | None = None) -> None:
    """Rows longer than `tile` go through the loops, in steps of `loop`, in pieces that `programs` programs share."""
    patch.setattr(rows, "FORWARD_TILE", tile)
    patch.setattr(rows, "BACKWARD_TILE", tile)
    for limit in ("FORWARD_LOOP", "BACKWARD_LOOP", "PIECE"):
        patch.setattr(rows, limit, loop)
    if programs is not None:
        patch.setattr(rows, "_programs_at_once", lambda device: programs)


def programs_of(path: str) -> int:
    """How many programs run at once, for `small_tiles` to take a path: with one there are no pieces."""
    return 1 if path == "two passes" else 400


def small_strided_tiles(patch: pytest.MonkeyPatch, tile: int = 1, loop: int = 512) -> None:
    """The same of sums over another dimension than the last."""
    patch.setattr(strided, "STRIDED_FORWARD", tile)
    patch.setattr(strided, "STRIDED_BACKWARD", tile)
    patch.setattr(strided, "STRIDED_LOOP", loop)
