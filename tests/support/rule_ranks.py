"""A model, SGD and Muon in their layouts, for test_rules.py and test_muon.py, and cases of ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from errors import refuses
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import halfstep
from halfstep.integrations.offload import OffloadedMuon
from halfstep.integrations.release import step_in_backward
from halfstep.numerics import owners

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
    "Muon": {"lr": 0.02, "weight_decay": 0.01},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "split": {},
    "split24, 8 bits": {"master_weights": "split24", "state_dtype": "8bit"},
    "split, bf16, stochastic": {"state_dtype": torch.bfloat16, "rounding": "stochastic"},
    "no master, 8 bits": {"master_weights": None, "state_dtype": "8bit"},
    "no master": {"master_weights": None, "rounding": "stochastic"},
    "full": {"master_weights": "full"},
}


class Net(torch.nn.Module):
    """A tall, a wide and an uneven matrix, a batch of two, and parameters for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 64)
        self.up = torch.nn.Linear(64, 96)
        self.experts = torch.nn.Parameter(torch.randn(2, 96, 96) * 0.1)
        self.convolution = torch.nn.Conv1d(1, 5, 3, padding=1)
        self.down = torch.nn.Linear(96, 33, bias=False)
        self.last = torch.nn.Linear(33, 128, bias=False)  # more work than `down`, so that rank 0 owns it

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.up(self.embedding(tokens)))
        x = x @ self.experts[0] + x @ self.experts[1]
        return self.last(self.down(x + self.convolution(x.unsqueeze(1)).mean(1)))


def net(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def optimizer_of(name: str, model: torch.nn.Module, cls: Any = None, **options: Any) -> Any:
    """For Muon `up` is two matrices, which are whole on two ranks, and cut on four. `cls`: if not that of the name."""
    groups: Any = model.parameters()
    if name == "Muon":
        matrices, others = halfstep.muon_groups(model, weight_decay=0.0)
        up = [named for named in matrices["params"] if named[0].endswith("up.weight")]
        single = [named for named in matrices["params"] if not named[0].endswith("up.weight")]
        groups = [{**matrices, "params": single}, *[{**matrices, "params": up, "blocks": 2}] * bool(up), others]
    return (cls or getattr(halfstep, name))(groups, **{**OPTIONS[name], **options})


def assert_same(first: torch.nn.Module, *models: torch.nn.Module) -> None:
    for model in models:
        assert all(map(torch.equal, first.parameters(), model.parameters()))


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(16, (8,), generator=torch.Generator().manual_seed(step))
    return model(tokens).float().square().mean()


def plain_steps(model: torch.nn.Module, optimizer: Any, steps: range = range(4)) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def train(model: torch.nn.Module, optimizer: Any, steps: range = range(4), scale: float = 256.0) -> None:
    """The third step overflows and is skipped."""
    scaler = halfstep.GradScaler("cpu", init_scale=scale)
    for step in steps:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if step == 2:
            next(model.parameters()).grad.mul_(torch.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()


def sharded(cut: str) -> Net:
    model, ranks = net(), dist.get_world_size()
    if cut == "hsdp":
        mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
    else:
        mesh = init_device_mesh("cpu", (ranks,))
    placement = (lambda parameter: Shard(1)) if cut == "columns" else None
    for module in (model.up, model.down, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement if module is model.down else None)
    return model


def shards_have_the_bits_of_one_process(cut: str, name: str, layout: str) -> None:
    """Weights and moments."""
    tensors = []
    for module in (sharded(cut), net()):
        optimizer = optimizer_of(name, module, max_grad_norm=50.0, **LAYOUTS[layout])
        train(module, optimizer)
        states = (optimizer.state[parameter] for parameter in module.parameters())
        moments = (state[key] for state in states for key in state if key in ("momentum_buffer", "exp_avg"))
        tensors.append(
            [getattr(tensor, "full_tensor", lambda t=tensor: t)() for tensor in (*module.parameters(), *moments)]
        )
    assert all(map(torch.equal, *tensors))


def matrices_are_exchanged_in_rounds() -> None:
    """Of matrices of 1,000 elements, or a larger one, at a time: five rounds, of which two leave rank 0 without any."""
    shapes = [(33, 96), (128, 33), (40, 40), (96, 17), (5, 300), (64, 64), (31, 31), (3, 64)]
    mesh, generator = init_device_mesh("cpu", (2,)), torch.Generator().manual_seed(0)
    whole, cut = [], []
    for shape in shapes:
        matrix = torch.randn(shape, generator=generator).bfloat16()
        whole.append(torch.nn.Parameter(matrix.clone()))
        cut.append(torch.nn.Parameter(distribute_tensor(matrix, mesh, [Shard(0)])))
    with (
        patch.object(owners, "ROUND", 1000),
        patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as sent,
    ):
        optimizers = [halfstep.Muon(matrices, lr=0.02) for matrices in (whole, cut)]
        for _ in range(3):
            for first, second in zip(whole, cut, strict=True):
                first.grad = torch.randn(first.shape, generator=generator).bfloat16()
                second.grad = distribute_tensor(first.grad, mesh, [Shard(0)])
            for optimizer in optimizers:
                optimizer.step()
    assert sent.call_count == 3 * 2 * 5
    assert all(torch.equal(first, second.full_tensor()) for first, second in zip(whole, cut, strict=True))


def gradients_that_one_rank_lacks_are_zeros() -> None:
    """In the first step rank 0 lacks all, then rank 1 the last two; no rank has one for the third matrix."""
    shapes, absent = [(33, 96), (40, 40), (12, 9), (96, 17)], [{0: (0, 1, 3)}, {1: (1, 3)}, {}]
    mesh, rank, generator = init_device_mesh("cpu", (2,)), dist.get_rank(), torch.Generator().manual_seed(0)
    matrices = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    whole = [torch.nn.Parameter(matrix.clone()) for matrix in matrices]
    sharded = [distribute_tensor(matrix, mesh, [Shard(0)]) for matrix in matrices]
    cut, offloaded = ([torch.nn.Parameter(shard.clone()) for shard in sharded] for _ in range(2))
    pairs = (halfstep.Muon, whole), (halfstep.Muon, cut), (OffloadedMuon, offloaded)
    optimizers = [cls(parameters, lr=0.02, max_grad_norm=1.0) for cls, parameters in pairs]
    for lacking in absent:
        with torch.no_grad():
            for parameter in (*whole, *cut, *offloaded):  # other code writes the weights between steps
                parameter.mul_(0.5)
        for index in (0, 1, 3):
            grad = torch.randn(shapes[index], generator=generator).bfloat16()
            shards = list(grad.chunk(2))
            for number, indices in lacking.items():
                if index in indices:
                    shards[number].zero_()
            whole[index].grad = grad
            shard = distribute_tensor(grad, mesh, [Shard(0)])
            for parameters in (cut, offloaded):
                parameters[index].grad = None if index in lacking.get(rank, ()) else shard.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for first, *others in zip(whole, cut, offloaded, strict=True):
        assert all(torch.equal(first, other.full_tensor()) for other in others)
    assert torch.equal(whole[2], matrices[2] / 8) and all(len(optimizer.state) == 3 for optimizer in optimizers)


def steps_in_the_backward_of_shards_are_refused() -> None:
    model = sharded("rows")
    text = "Expected unsharded parameters"
    refuses(ValueError, text, lambda: step_in_backward(model, optimizer_of("Muon", model)))


def matrices_that_two_dimensions_of_a_mesh_shard_are_refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(64, 64, dtype=torch.bfloat16), mesh, [Shard(0), Shard(1)]))
    optimizer = halfstep.Muon([weight])
    weight.grad = torch.ones_like(weight)
    text = "one dimension of the mesh shards"
    refuses(ValueError, text, optimizer.step)
    offloaded = OffloadedMuon([torch.nn.Parameter(torch.ones(2, 2))])
    refuses(ValueError, text, lambda: offloaded.add_param_group({"params": [weight]}))
    assert len(offloaded.param_groups) == len(offloaded._mirrors) == 1


def _shards(cut: str, *pairs: tuple[str, str]) -> dict[str, Callable[[], None]]:
    return {f"{cut}, {', '.join(pair)}": partial(shards_have_the_bits_of_one_process, cut, *pair) for pair in pairs}


UNLIKE = {"SGD": "no master, 8 bits", "Muon": "no master"}  # what the other one has instead
PAIRS = [(name, layout) for name in OPTIONS for layout in LAYOUTS if layout != UNLIKE[name]]
CASES: dict[str, Callable[[], None]] = {
    **_shards("rows", *PAIRS),
    **_shards("columns", ("Muon", "split")),
    "rounds": matrices_are_exchanged_in_rounds,
    "gradients": gradients_that_one_rank_lacks_are_zeros,
    "steps in the backward": steps_in_the_backward_of_shards_are_refused,
}
ON_FOUR_RANKS: dict[str, Callable[[], None]] = {
    **_shards("hsdp", ("Muon", "split"), ("Muon", "split24, 8 bits")),
    "two dimensions": matrices_that_two_dimensions_of_a_mesh_shard_are_refused,
}
EVERY_CASE_ON_FOUR_RANKS = _shards("rows", ("Muon", "split"), ("Muon", "split24, 8 bits"))
