"""GPUs from their makers' datasheets: memory, dense bf16 matrix FLOP/s, memory bandwidth.

Datasheets write GB; the parts have that many GiB, less what the driver and ECC take (an H200 of "141 GB" offers
139.8 GiB, an L40S of "48 GB" with ECC 45.0 GiB). FLOP/s are without sparsity, products of bf16 summed in fp32.

Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfstep.numerics.planning.plan_errors import one_of

GIB = 2**30


@dataclass(frozen=True)
class Card:
    """One GPU: `memory` in bytes, `flops` dense bf16 per second, `bandwidth` of its memory in bytes per second."""

    name: str
    memory: int
    flops: float
    bandwidth: float
    source: str


CARDS = {
    card.name: card
    for card in (
        Card("a100-40", 40 * GIB, 312e12, 1.555e12, "NVIDIA A100 datasheet, 40GB SXM"),
        Card("a100-80", 80 * GIB, 312e12, 2.039e12, "NVIDIA A100 datasheet, 80GB SXM"),
        Card("h100", 80 * GIB, 989.4e12, 3.35e12, "NVIDIA H100 datasheet, SXM"),
        Card("h200", 141 * GIB, 989.4e12, 4.8e12, "NVIDIA H200 datasheet, SXM"),
        Card("b200", 180 * GIB, 2250e12, 8.0e12, "NVIDIA HGX B200 datasheet, per GPU"),
        Card("mi300x", 192 * GIB, 1307.4e12, 5.3e12, "AMD Instinct MI300X datasheet"),
        Card("l40s", 48 * GIB, 362.05e12, 0.864e12, "NVIDIA L40S datasheet"),
        Card("rtx4090", 24 * GIB, 165.2e12, 1.008e12, "NVIDIA Ada architecture whitepaper, RTX 4090"),
    )
}


def card(name: str) -> Card:
    """The GPU of that name; ValueError, with the nearest name, if there is none."""
    one_of("card", name.lower(), CARDS)
    return CARDS[name.lower()]
