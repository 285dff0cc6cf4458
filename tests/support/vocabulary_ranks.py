"""Log-probabilities of a vocabulary that ranks share, against those of whole rows, for test_cases_on_ranks.py."""

from collections.abc import Callable
from functools import partial

import log_probabilities_oracle as oracle
import torch
import torch.distributed as dist
from devices import assert_same_bits, normal
from errors import refuses
from softmax_oracle import assert_within
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import halfstep
from halfstep.integrations.vocabulary import log_probabilities

INF, NAN = torch.inf, torch.nan


def example(classes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    logits = (4 * normal(8 * classes, torch.float32)).to(dtype).view(8, classes)
    logits[1], logits[2, 0], logits[3, -1], logits[4, : classes // 2] = -INF, NAN, INF, -INF
    return logits, torch.tensor([0, 1, 2, -100, classes - 1, 0, classes, classes // 2])


def agrees(classes: int, dtype: torch.dtype, exact: bool, inplace: bool) -> None:
    """Within the bounds of fp64, the same bits on all ranks, and the gradient of whole rows."""
    mesh, (logits, targets) = init_device_mesh("cpu", (dist.get_world_size(),)), example(classes, dtype)
    whole = logits.clone().requires_grad_()
    shards = distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_()
    row = log_probabilities(shards * 1, targets, 0.7, True, exact=exact, inplace_backward=inplace)
    options = 0.7, -100, True, False, exact, False
    expected = torch.ops.halfstep.log_probabilities(whole, targets, *options)[[0, 1, 4]]
    numbers = torch.stack(row)  # type: ignore[arg-type]
    for got, (value, bound) in zip(numbers, oracle.oracle(logits, targets, 0.7), strict=False):
        assert_within(got, value, 4 * bound, "vocabulary")
    everywhere = [torch.empty_like(numbers) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, numbers.detach())
    for other in everywhere:
        assert_same_bits(other, numbers)
    weights = torch.tensor([[2.0], [-1.0], [0.5]])
    (numbers * weights).sum().backward()
    (expected * weights).sum().backward()
    assert isinstance(shards.grad, DTensor) and whole.grad is not None
    tolerances = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-5}
    torch.testing.assert_close(shards.grad.full_tensor(), whole.grad, equal_nan=True, **tolerances)


def differentiates_twice(classes: int) -> None:
    """The gradient, and the product of the second derivatives with a vector, are those of whole rows."""
    mesh, (logits, targets) = init_device_mesh("cpu", (dist.get_world_size(),)), example(classes, torch.float64)
    logits[2:4] = logits[6:].nan_to_num(posinf=0.0)
    logits[7, 0], targets[6:] = NAN, -100
    numbers: list[torch.Tensor] = []
    for function, distribute in (
        (halfstep.log_probabilities, lambda x: x),
        (log_probabilities, lambda x: distribute_tensor(x, mesh, [Shard(1)])),
    ):
        x, vector = (distribute(x) for x in (logits, normal(8 * classes, torch.float64, 3).view(8, classes)))
        row = function(x.requires_grad_(), targets, 0.7, True)
        value = (row.log_probabilities.clamp(min=-9) * row.entropy + row.logsumexp.clamp(min=-9).square()).sum()
        (first,) = torch.autograd.grad(value, x, create_graph=True)
        second = torch.autograd.grad(getattr(product := (first * vector).sum(), "full_tensor", lambda: product)(), x)[0]
        numbers += [x.detach().full_tensor() if isinstance(x, DTensor) else x.detach() for x in (first, second)]
    assert all(each.isfinite().all() and each.norm() > 1 for each in numbers)
    torch.testing.assert_close(numbers[2:], numbers[:2])
    over = log_probabilities(x * 1, targets, inplace_backward=True).logsumexp.sum()
    refuses(RuntimeError, "inplace_backward=False", partial(torch.autograd.grad, over, x, create_graph=True))


def rows_may_be_sharded_too() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    logits = distribute_tensor(normal(80, torch.float32).view(4, 20), mesh, [Shard(0), Shard(1)])
    targets = torch.tensor([3, 19]) + mesh.get_local_rank(0)
    targets[1] = 19
    row = log_probabilities(logits, targets)
    whole = halfstep.log_probabilities(logits.full_tensor()[2 * mesh.get_local_rank(0) :][:2], targets)
    torch.testing.assert_close(row.log_probabilities, whole.log_probabilities)


def what_is_not_sharded_by_columns_is_refused() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    logits, targets = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
    for placement in (Shard(0), Replicate()):
        whole = distribute_tensor(logits, mesh, [placement])
        refuses(TypeError, "use halfstep.log_probabilities for whole rows", partial(log_probabilities, whole, targets))
        refuses(TypeError, "halfstep.integrations.vocabulary", partial(halfstep.log_probabilities, whole, targets))
    refuses(TypeError, "but got Tensor", partial(log_probabilities, logits, targets))
    shards = distribute_tensor(logits, mesh, [Shard(1)])
    refuses(ValueError, "got targets of shape (2,)", partial(log_probabilities, shards, targets[:2]))
    refuses(ValueError, "finite in fp32, but got 0", partial(log_probabilities, shards, targets, 0))
    refuses(TypeError, "to have dtype", partial(log_probabilities, shards, targets.float()))
    shards.requires_grad_()
    refuses(ValueError, "but got a leaf", partial(log_probabilities, shards, targets, inplace_backward=True))


CASES: dict[str, Callable[[], None]] = {
    "fp32": partial(agrees, 50, torch.float32, False, False),
    "bf16, exact, in place": partial(agrees, 2051, torch.bfloat16, True, True),
    "twice": partial(differentiates_twice, 6),
    "refused": what_is_not_sharded_by_columns_is_refused,
}
ON_FOUR_RANKS: dict[str, Callable[[], None]] = {
    "a rank without columns": partial(agrees, 9, torch.float32, True, False),
    "twice, a rank without columns": partial(differentiates_twice, 9),
    "rows too": rows_may_be_sharded_too,
}
