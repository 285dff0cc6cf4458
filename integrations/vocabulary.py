"""Log-probabilities where the ranks of a mesh share the vocabulary: the logits are a DTensor with Shard(-1).

No rank sees a whole row. Each computes its part of the rows as `halfstep.log_probabilities` does, and one collective
gives all ranks its three numbers per row, four with the entropy: the maximum M, the logarithm L of the sum of
exponentials relative to it, the logit of the target, and the mean of z - M. They are put together in the order of the
ranks, so that all ranks have the same bits. With M and L of the whole row, each rank then writes the gradient of its
part, without a collective. Only a second derivative takes another one: each rank knows what its columns add to it.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from halfstep.kernels.log_probabilities import LogProbabilities, dispatch
from halfstep.kernels.log_probabilities.public import check_arguments
from halfstep.kernels.log_probabilities.rule import Options, Row, exponential, gradient, logarithm, scaled
from halfstep.kernels.softmax.rule import math_dtype

_IGNORED, _ELSEWHERE = -2, -1  # targets on a rank


def _of_ranks(numbers: torch.Tensor, owner: torch.Tensor, exact: bool) -> torch.Tensor:
    """The results of whole rows from the numbers of all ranks, (ranks, 3 or 4, rows), NaN where `owner` is -1."""
    tops, logs, logits, *depths = numbers.unbind(1)
    top, log = tops.amax(0), logs.amax(0).clamp(min=0.0)
    weights = exponential((tops - top) + (logs - log), exact)
    total = reduce(torch.add, weights)  # in the order of the ranks
    nothing, total = total == 0, torch.where(total == 0, 1.0, total)
    log_sum = torch.where(nothing, 0.0, log + logarithm(total))
    z = logits.gather(0, owner.clamp(min=0).unsqueeze(0)).squeeze(0)
    entropy = torch.zeros_like(top)
    for depth in depths:
        moment = reduce(torch.add, torch.where(weights == 0, 0.0, weights * (depth + (tops - top))))
        entropy = torch.where(nothing, 0.0, log_sum - moment / total)
    selected = torch.where(owner >= 0, (z - top) - log_sum, math.nan)
    logsumexp = torch.where(nothing, -math.inf, top + log_sum)
    return torch.stack(Row(selected, logsumexp, top, log_sum, entropy, torch.zeros_like(top)))


class _Local(torch.autograd.Function):
    """`to_local`, of which torch 2.11 loses the second derivative."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.mesh, ctx.placements, ctx.sizes = x.device_mesh, x.placements, {"shape": x.shape, "stride": x.stride()}
        local = x.to_local()
        return local.view_as(local)  # what autograd writes into a result must not get into the DTensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> DTensor:
        return DTensor.from_local(grad, ctx.mesh, ctx.placements, run_check=False, **ctx.sizes)


class _OfAllRanks(torch.autograd.Function):
    """Numbers that all ranks have alike, used by each for its columns: their gradient is the sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return numbers.view_as(numbers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: torch.Tensor) -> Any:
        grads = grads.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grads, group=ctx.group)
        return grads, None


def _differentiable_backward(
    grads: torch.Tensor, logits: torch.Tensor, local: torch.Tensor, results: torch.Tensor, options: Options, group: Any
) -> torch.Tensor:
    """The gradient of the columns of a rank by operations of torch that can be differentiated once more."""
    grads, results = _OfAllRanks.apply(torch.stack([grads, results]), group).unsqueeze(-1)
    row, ignored = Row(*results), (local == _IGNORED).unsqueeze(-1)
    z = scaled(logits, options.temperature).masked_fill(ignored, 0.0)  # NaN would come back in the second derivative
    y = z - row.logsumexp.masked_fill(ignored | (row.logsumexp == -math.inf), 0.0)
    hit = local.unsqueeze(-1) == torch.arange(z.shape[-1], dtype=torch.int64, device=z.device)
    dx = gradient(y, hit, Row(*grads), row, options._replace(exact=False), z.shape[-1])
    return dx.masked_fill(ignored, 0.0).to(logits.dtype)


class _Vocabulary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, classes: int, group: Any, options: Options, inplace: bool
    ) -> torch.Tensor:
        """The results of rows of so many classes, from the columns that this rank has."""
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        ignored, target, width = targets == options.ignore_index, targets.long(), -(-classes // ranks)
        owner = torch.where((target >= 0) & (target < classes), target // width, -1)
        here = owner == rank
        local = torch.where(here, target - rank * width, _ELSEWHERE).masked_fill(ignored, _IGNORED)
        ctx.options = options = options._replace(ignore_index=_IGNORED)
        numbers = torch.zeros(3 + options.entropy, *targets.shape, dtype=math_dtype(logits.dtype), device=logits.device)
        if logits.shape[-1]:
            row = Row(*dispatch.forward(logits, local, *options, False))
            z = scaled(logits.gather(-1, torch.where(here, local, 0).unsqueeze(-1)).squeeze(-1), options.temperature)
            logs = torch.where(row.logsumexp == -math.inf, -math.inf, row.log_sum)
            torch.stack([row.maximum, logs, z, row.log_sum - row.entropy][: len(numbers)], out=numbers)
        else:  # a rank that has no columns
            numbers[0], numbers[1] = torch.finfo(numbers.dtype).min, -math.inf
        gathered = numbers.new_empty(ranks, *numbers.shape)
        dist.all_gather(list(gathered), numbers, group=group)
        results = _of_ranks(gathered, owner, options.exact).masked_fill(ignored, 0.0)
        ctx.inplace, ctx.group = inplace, group
        ctx.save_for_backward(logits, local, results)
        return results

    @staticmethod
    def backward(ctx: Any, grads: torch.Tensor) -> Any:
        logits, local, results = ctx.saved_tensors
        if torch.is_grad_enabled():
            dispatch.check_differentiable(ctx.inplace)
            dx = _differentiable_backward(grads, logits, local, results, ctx.options, ctx.group)
        elif logits.shape[-1]:
            dx = dispatch.backward(grads, logits.detach(), local, results, *ctx.options, ctx.inplace)
        else:
            dx = torch.zeros_like(logits)
        return dx, None, None, None, None, None


def log_probabilities(
    logits: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    *,
    ignore_index: int = -100,
    exact: bool = False,
    inplace_backward: bool = False,
) -> LogProbabilities:
    """`halfstep.log_probabilities` of logits whose vocabulary is sharded, as a column-parallel head leaves them.

    One collective of three numbers per row, four with the entropy, in the forward, and none in the backward. All ranks
    have the same bits, which are not those of whole rows. Second derivatives are plain operations of torch and one more
    collective; third ones are not available.

    Args:
        logits: a DTensor of shape (..., V), of which one dimension of the mesh shards the last dimension. Others may
            replicate it or shard another dimension.
        targets: a plain tensor, the targets of the rows that this rank has. The others as for
            `halfstep.log_probabilities`.

    Raises:
        TypeError: `logits` is no DTensor, or not sharded like this; or a dtype is not supported.
        ValueError: `targets` do not have the shape of the rows that this rank has; other arguments as for
            `halfstep.log_probabilities`. Targets out of range give NaN on every device.

    Examples:
        >>> import torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.tensor import Shard, distribute_tensor
        >>> from halfstep.integrations.vocabulary import log_probabilities
        >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
        >>> logits = distribute_tensor(torch.zeros(2, 4), init_device_mesh("cpu", (1,)), [Shard(-1)])
        >>> log_probabilities(logits, torch.tensor([3, 0])).log_probabilities
        tensor([-1.3863, -1.3863])
        >>> dist.destroy_process_group()
    """
    last = [
        dim for dim, part in enumerate(getattr(logits, "placements", ())) if part in (Shard(-1), Shard(logits.ndim - 1))
    ]
    if not isinstance(logits, DTensor) or len(last) != 1 or any(part.is_partial() for part in logits.placements):
        raise TypeError(
            "Expected logits to be a DTensor whose last dimension one dimension of the mesh shards, but got "
            f"{getattr(logits, 'placements', type(logits).__name__)}: use halfstep.log_probabilities for whole rows, "
            "or logits.redistribute(placements=[Shard(-1)])"
        )
    local = _Local.apply(logits)
    check_arguments(local, targets, temperature, inplace_backward, logits.is_leaf)
    options = Options(float(temperature), ignore_index, bool(entropy), False, bool(exact))
    group = logits.device_mesh.get_group(last[0])
    row = _Vocabulary.apply(local, targets, logits.shape[-1], group, options, inplace_backward).unbind(0)
    return LogProbabilities(row[0], row[1], row[4] if entropy else None)
