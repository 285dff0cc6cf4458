"""The Triton kernels of installed peers, as variants for the compile audit.

The launcher of each peer is called on tensors without storage, whose pointers count as aligned, as torch allocates
them. Kernel, block size, warps and all other settings are those that the installed version computes for the case.

The least traffic of a peer is that of its own layout: with quantized moments it is lower than that of halfstep, with a
compensation term higher. Peers are optional, and halfstep imports them nowhere else. In a clone they come with
``pip install -e '.[bench]'``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from halfstep.bench.audit.launches import Variant, recording
from halfstep.cli.machine import version_of

ROWS, COLUMNS = 4096, 4096  # of the softmax
PARAMETERS = 1 << 24  # of the AdamW step


class Job(NamedTuple):
    """One launch of a peer.

    Attributes:
        peer: the name of the distribution, e.g. ``"liger-kernel"``.
        name: the name of the variant, e.g. ``"4096 bf16 forward"``.
        launch: calls the launcher of the peer. Its last launch is audited.
        bytes_read, bytes_written: the least numbers of bytes per element.
    """

    peer: str
    name: str
    launch: Callable[[], None]
    bytes_read: float
    bytes_written: float


def _tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _liger(backward: bool) -> None:
    module = importlib.import_module("liger_kernel.ops.softmax")
    x = _tensor(torch.bfloat16, ROWS, COLUMNS).requires_grad_(backward)
    y = module.LigerSoftmaxFunction.apply(x)
    if backward:
        y.backward(_tensor(torch.bfloat16, ROWS, COLUMNS))


def _optimi() -> None:
    module = importlib.import_module("optimi")
    parameter = torch.nn.Parameter(_tensor(torch.bfloat16, PARAMETERS))
    parameter.grad = _tensor(torch.bfloat16, PARAMETERS)
    module.AdamW([parameter], lr=1e-3, triton=True).step()


def flashoptim_step(quantized: bool, tensor: Callable[[torch.dtype, int], torch.Tensor], n: int) -> None:
    """One step of flashoptim's AdamW over `n` parameters. `tensor` creates all tensors.

    This calls flashoptim's launcher, since its optimizer requires a GPU.
    """
    module = importlib.import_module("flashoptim.optimizers")
    scales = n // 32 if quantized else n
    bf16, half = torch.bfloat16, torch.float16 if quantized else torch.bfloat16
    moments = {
        "mom": tensor(torch.int8 if quantized else bf16, n),
        "mom_scales_f16": tensor(half, scales),
        "var": tensor(torch.uint8 if quantized else bf16, n),
        "var_scales_f16": tensor(half, scales),
    }
    weights = {"param": tensor(bf16, n), "grad": tensor(bf16, n), "errors": tensor(torch.int8, n)}
    hyper = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 1e-5, "decoupled": True}
    module._fused_adam_step(**moments, **weights, **hyper, step=1000, quantize_optim_states=quantized)


_FLASH = "AdamW, bf16 param, bf16 grad, {} state, 24-bit master"
JOBS = (
    Job("liger-kernel", f"softmax forward {COLUMNS} bf16->bf16", partial(_liger, False), 2, 2),
    Job("liger-kernel", f"softmax backward {COLUMNS} bf16->bf16", partial(_liger, True), 4, 2),
    # Parameter, gradient, two moments and the compensation in bf16; all but the gradient are written.
    Job("torch-optimi", "AdamW, bf16 param, bf16 grad, bf16 state, Kahan", _optimi, 10, 8),
    # The default: 24-bit master and 8-bit moments. The scales of the moments, 2 bytes per 32 elements, are not counted.
    Job("flashoptim", _FLASH.format("8-bit"), partial(flashoptim_step, True, _tensor, PARAMETERS), 7, 5),
    Job("flashoptim", _FLASH.format("bf16"), partial(flashoptim_step, False, _tensor, PARAMETERS), 9, 7),
)


@functools.cache
def find() -> tuple[tuple[Variant, ...], tuple[str, ...]]:
    """The variants of the installed peers, and one line for each peer or case that is left out.

    Exceptions that a peer raises are caught and reported.
    """
    variants: list[Variant] = []
    left_out: dict[str, None] = {}
    for peer, name, launch, read, written in JOBS:
        version = version_of(peer)
        if version is None:
            left_out[f"{peer} is not installed and left out: pip install {peer}"] = None
            continue
        try:
            with recording("sm_90") as launches:
                launch()
            if not launches:
                raise RuntimeError("it launched no Triton kernel")
            variants.append(Variant(launches[-1].kernel, name, launch, read, written, exact=False, index=-1, peer=peer))
        except Exception as error:  # a future version of a peer may raise anything; the others are still audited
            reason = f"{type(error).__name__}: {error}"
            left_out[f"{peer} {version}, {name}, is left out: this version is not supported: {reason}"] = None
    return tuple(variants), tuple(left_out)


def variants() -> Iterator[Variant]:
    """The variants of the installed peers, for the audit."""
    return iter(find()[0])
