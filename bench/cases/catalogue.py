"""All groups of cases by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from halfstep.bench.cases import adam, cast, softmax, step, unscale
from halfstep.bench.cases.sizes import Sizes
from halfstep.bench.harness import Case

GROUPS: dict[str, Callable[[Sizes], Iterable[Case]]] = {
    "softmax": softmax.cases,
    "cast": cast.cases,
    "unscale": unscale.cases,
    "adam": adam.cases,
    "step": step.cases,
}


def cases(groups: Sequence[str], sizes: Sizes) -> list[Case]:
    """All cases of `groups`, in their order. A case may need several times as much memory as the bytes it moves."""
    return [case for group in groups for case in GROUPS[group](sizes)]
