"""Every pairing of an optimizer or a scaler of ours with torch's, by strategy, on a rank of two.

For each pairing, a small model takes three steps, once with unscaling in `step` and once with `unscale_` before it. In
the second step a gradient has an Inf: in the shard of the last rank if gradients are sharded, otherwise in all copies,
as after a reduction. All ranks must agree.
"""

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep.numerics.scaling.sharding import local

WORLD = 2
STEPS, BROKEN = 3, 1

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "halfstep.AdamW": partial(halfstep.AdamW, lr=0.01),
    "torch.optim.AdamW": partial(torch.optim.AdamW, lr=0.01),
    "torch.optim.AdamW(fused=True)": partial(torch.optim.AdamW, lr=0.01, fused=True),
}
SCALERS: dict[str, Callable[..., Any]] = {
    "halfstep.GradScaler": halfstep.GradScaler,
    "torch.amp.GradScaler": torch.amp.GradScaler,
    "ShardedGradScaler": ShardedGradScaler,
}


def fsdp2(model: torch.nn.Module) -> torch.nn.Module:
    for layer in model:  # type: ignore[attr-defined]
        fully_shard(layer, mesh=init_device_mesh("cpu", (WORLD,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    return model


STRATEGIES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "one process": lambda model: model,
    "DDP": DistributedDataParallel,
    "FSDP1": partial(FullyShardedDataParallel, device_id=torch.device("cpu"), use_orig_params=True),
    "FSDP2": fsdp2,
}
SHARDED = ("FSDP1", "FSDP2")
# torch's scaler combines no flags over the ranks of FSDP1.
PAIRS = [
    (optimizer, scaler, strategy)
    for optimizer in OPTIMIZERS
    for scaler in SCALERS
    for strategy in STRATEGIES
    if "halfstep" in optimizer + scaler and (scaler, strategy) != ("torch.amp.GradScaler", "FSDP1")
]


def train(model: torch.nn.Module, optimizer: Any, scaler: Any, strategy: str, unscale: bool) -> str:
    """Three steps, the second with an Inf. The control, whose scaler is disabled, omits the second step."""
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        scaler.scale(model(inputs).square().mean()).backward()
        if step == BROKEN and not scaler.is_enabled():
            continue
        if step == BROKEN and (strategy not in SHARDED or dist.get_rank() == WORLD - 1):
            held = [local(p.grad) for p in model.parameters() if p.grad is not None and local(p.grad).numel()]
            held[0].view(-1)[0] = float("inf")
        try:
            if unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        except RuntimeError as caught:
            return str(caught)
        scaler.update()
    return ""


def bare() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))


def all_ranks_agree_and_have_the_weights_of_one_process(
    optimizer_name: str, scaler_name: str, strategy: str, unscale: bool
) -> None:
    model = STRATEGIES[strategy](bare())
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scaler = SCALERS[scaler_name]("cpu", init_scale=8.0)
    error = train(model, optimizer, scaler, strategy, unscale)
    steps = {float(local(state["step"])) for state in optimizer.state.values() if "step" in state}
    weights = [local(p.detach()).reshape(-1).clone() for p in model.parameters()]
    if strategy in SHARDED:
        of_ranks: list[Any] = [None] * WORLD
        dist.all_gather_object(of_ranks, weights)
        weights = [torch.cat(shards) for shards in zip(*of_ranks, strict=True)]
    assert (sorted(steps), scaler.get_scale(), error) == ([2.0], 4.0, "")
    for weight, expected in zip(weights, control(), strict=True):
        torch.testing.assert_close(weight, expected)


@functools.cache
def control() -> list[torch.Tensor]:
    """The weights of one process after the steps without the one that overflows, without a scaler."""
    model = bare()
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), halfstep.GradScaler("cpu", enabled=False), "", False)
    return [p.detach().reshape(-1) for p in model.parameters()]


def the_norm_of_a_torch_optimizer_has_the_dtype_that_torchs_clipping_returns() -> None:
    """And that of ours is fp32, as its gradients are in its step.

    Each of torch's optimizers unscales the gradients in place once more. The limit is too large to change them.
    """
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, dtypes in ((bf16, [bf16, fp32, bf16, bf16]), (fp32, [fp32] * 4)):
        model = fsdp2(bare().to(dtype))
        scaler = halfstep.GradScaler("cpu", init_scale=8.0)
        scaler.scale(model(torch.ones(3, 4, dtype=dtype)).float().mean()).backward()
        norms = [torch.nn.utils.clip_grad_norm_(model.parameters(), 1e6)]
        for make in OPTIMIZERS.values():
            scaler.scale(torch.zeros(()))
            optimizer = make(model.parameters())
            norms.append(scaler.clip_grad_norm_(optimizer, 1e6))
            scaler.step(optimizer)
            scaler.update()
        torchs, *ours = (getattr(norm, "full_tensor", lambda norm=norm: norm)() for norm in norms)
        assert [norm.dtype for norm in (torchs, *ours)] == dtypes
        for norm, times in zip(ours, (8, 8, 64), strict=True):
            assert float(norm) * times == pytest.approx(float(torchs), rel=2**-6)


CASES: dict[str, Callable[[], None]] = {
    **{
        f"{', '.join(pair)}{', unscale_' * unscale}": partial(
            all_ranks_agree_and_have_the_weights_of_one_process, *pair, unscale
        )
        for pair in PAIRS
        for unscale in (False, True)
    },
    "norms": the_norm_of_a_torch_optimizer_has_the_dtype_that_torchs_clipping_returns,
}
