"""The code paths of the softmax kernels, at sizes that the interpreter finishes in seconds."""

import pytest

from halfstep.kernels.softmax import rows, strided
from halfstep.kernels.softmax.rule import GROUP


def two_launches(patch: pytest.MonkeyPatch) -> None:
    """Rows of more than one group go through two launches."""
    patch.setattr(rows, "FORWARD_TILE", GROUP)
    patch.setattr(rows, "BACKWARD_TILE", GROUP)


def small_strided_tiles(patch: pytest.MonkeyPatch, tile: int = 1, loop: int = 512) -> None:
    """Sums over another dimension than the last that are longer than a tile go through loops."""
    patch.setattr(strided, "STRIDED_FORWARD", tile)
    patch.setattr(strided, "STRIDED_BACKWARD", tile)
    patch.setattr(strided, "STRIDED_LOOP", loop)
