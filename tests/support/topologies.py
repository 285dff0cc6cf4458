"""Small models on four ranks in every topology that torch supports, and faults in their gradients.

Every rank has the same batch, so the gradient is that of one process, up to the order of summation.
"""

import functools
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from halfstep.integrations.fsdp import send_gradients_in_16_bits

WORLD = 4
WIDTH, HIDDEN = 6, 8
Make = Callable[[Any], Any]


class Net(torch.nn.Module):
    """A model whose first layer is a norm, which tensor parallelism does not shard, with uneven sizes."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.first = torch.nn.Linear(WIDTH, HIDDEN)
        self.second = torch.nn.Linear(HIDDEN, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 1)
        self.to(dtype)
        self.poison: float | None = None

    def broken(self, activation: torch.Tensor) -> torch.Tensor:
        """An activation whose gradient has one wrong element on this rank, if it is poisoned."""
        value = self.poison
        if value is None or not activation.requires_grad:
            return activation

        def hook(grad: torch.Tensor) -> torch.Tensor:
            grad = grad.clone()
            getattr(grad, "_local_tensor", grad).view(-1)[1] = value
            return grad

        activation.register_hook(hook)
        return activation

    def front(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.broken(self.first(self.norm(inputs))).tanh()

    def back(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(self.broken(self.second(hidden)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.back(self.front(inputs))


class Half(Net):
    """One of two pipeline stages."""

    def __init__(self, dtype: torch.dtype, stage: int) -> None:
        super().__init__(dtype)
        self.stage = stage
        for gone in (("second", "head"), ("norm", "first"))[stage]:
            delattr(self, gone)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.front(inputs) if self.stage == 0 else self.back(inputs)


class Mixture(Net):
    """A model with experts. Every input uses all of them, so each rank gathers those of the others."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.experts = torch.nn.Parameter(torch.randn(4, HIDDEN, HIDDEN, dtype=dtype) / 8)

    def back(self, hidden: torch.Tensor) -> torch.Tensor:
        experts = self.experts.full_tensor() if isinstance(self.experts, DTensor) else self.experts
        return super().back(hidden + (hidden @ experts.mean(0)).tanh())


class Tiny(Net):
    """A model with three parameters, so that some ranks have none."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        del self.norm, self.first, self.second
        self.head = torch.nn.Linear(2, 1).to(dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.broken(self.head(inputs[:, :2]))


@functools.lru_cache
def mesh_of(*names: str) -> DeviceMesh:
    """A mesh of all ranks with one or two dimensions, created once for each set of names."""
    return init_device_mesh("cpu", (WORLD,) if len(names) == 1 else (2, 2), mesh_dim_names=names)


def batch(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.float().square().mean()


class Spread:
    """A distributed model: `net` is this rank's part without wrappers, `called` the module to call with a batch.

    `breaks_shards` says whether a fault may change the gradient of one rank after its reduction. If ranks have replicas
    and communicate nothing after the reduction, as under DDP, this would be a hardware fault and no overflow.
    """

    def __init__(
        self, net: Net, called: Any = None, process_group: Any = None, breaks_shards: bool = True, pipeline: Any = None
    ) -> None:
        self.net, self.called, self.process_group = net, net if called is None else called, process_group
        self.breaks_shards, self.pipeline = breaks_shards, pipeline
        self.optimizer_of: Callable[[Make], Any] = lambda make: make(list(self.called.parameters()))

    def backward(self, scaler: Any, step: int, dtype: torch.dtype) -> None:
        inputs = batch(step, dtype)
        if self.pipeline is None:
            scaler.scale(loss_of(self.called(inputs))).backward()
        elif self.net.stage == 0:  # type: ignore[attr-defined]
            scaler.scale(torch.zeros(()))
            hidden = self.called(inputs)
            dist.send(hidden.detach().contiguous(), self.pipeline)
            grad = torch.empty_like(hidden)
            dist.recv(grad, self.pipeline)
            hidden.backward(grad)
        else:
            hidden = torch.empty(len(inputs), HIDDEN, dtype=dtype)
            dist.recv(hidden, self.pipeline)
            hidden.requires_grad_()
            scaler.scale(loss_of(self.called(hidden))).backward()
            dist.send(hidden.grad.contiguous(), self.pipeline)  # type: ignore[union-attr]

    def whole(self) -> dict[str, torch.Tensor]:
        """All parameters by name, unsharded; in a pipeline those of this rank's stage."""
        if isinstance(self.called, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(self.called, writeback=False):
                return {
                    name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
                    for name, parameter in self.called.named_parameters()
                }
        named = {name: parameter.detach() for name, parameter in self.net.named_parameters()}
        return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in named.items()}


def ddp(dtype: torch.dtype) -> Spread:
    net = Net(dtype)
    return Spread(net, DistributedDataParallel(net), breaks_shards=False)


def zero1(dtype: torch.dtype) -> Spread:
    spread = ddp(dtype)
    spread.optimizer_of = lambda make: ZeroRedundancyOptimizer(
        spread.net.parameters(), optimizer_class=lambda groups, **options: make(groups)
    )
    return spread


def fsdp1(dtype: torch.dtype, strategy: str, use_orig_params: bool, cls: type[Net] = Net) -> Spread:
    hybrid = "HYBRID" in strategy
    net = cls(dtype)
    model = FullyShardedDataParallel(
        net,
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
        device_mesh=mesh_of("copies", "shards") if hybrid else None,
    )
    return Spread(net, model)


def fsdp1_nested(dtype: torch.dtype) -> Spread:
    """A sharded module in a replicated one, and a parameter that FSDP ignores."""
    net = Net(dtype)
    cpu = torch.device("cpu")
    net.second = FullyShardedDataParallel(net.second, use_orig_params=True, device_id=cpu)
    model = FullyShardedDataParallel(
        net,
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=True,
        device_id=cpu,
        ignored_states=[net.norm.weight],
    )
    return Spread(net, model)


def fsdp2(dtype: torch.dtype, dimensions: tuple[str, ...], send: bool = False) -> Spread:
    net = Net(dtype)
    mesh = mesh_of(*dimensions)
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if send else None)
    model = fully_shard(net, mesh=mesh, mp_policy=policy)
    if send and dtype != torch.float32:
        send_gradients_in_16_bits(model)
    return Spread(net, model)


PLAN = {"first": ColwiseParallel, "second": RowwiseParallel}


def tensor_parallel(dtype: torch.dtype) -> Spread:
    """Tensor parallelism in which norm and head are plain tensors."""
    net = Net(dtype)
    mesh = mesh_of("all")
    parallelize_module(net, mesh, {name: style() for name, style in PLAN.items()})
    return Spread(net)


def sequence_parallel(dtype: torch.dtype) -> Spread:
    """Sequence parallelism, in which the gradients of the norm are partial sums."""
    net = Net(dtype)
    mesh = mesh_of("all")
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "first": ColwiseParallel(input_layouts=Shard(0)),
        "second": RowwiseParallel(),
    }
    parallelize_module(net, mesh, plan)
    return Spread(net)


def two_d(dtype: torch.dtype) -> Spread:
    """FSDP2 with tensor parallelism. The mesh of the norm, the first layer, has only the data-parallel dimension."""
    net = Net(dtype)
    mesh = mesh_of("dp", "tp")
    parallelize_module(net, mesh["tp"], {name: style() for name, style in PLAN.items()})
    return Spread(net, fully_shard(net, mesh=mesh["dp"]))


def crossed(dtype: torch.dtype) -> Spread:
    """Layers sharded over one or the other dimension of a mesh, so that no parameter is sharded over all ranks."""
    net = Net(dtype)
    mesh = mesh_of("dp", "tp")
    parallelize_module(net, mesh["tp"], {name: style() for name, style in PLAN.items()})
    fully_shard(net.norm, mesh=mesh["dp"])
    fully_shard(net.head, mesh=mesh["dp"])
    return Spread(net)


def _stages(inner: Callable[[Half, DeviceMesh], Any], dtype: torch.dtype, **options: Any) -> Spread:
    """Ranks 0 and 1 hold the first stage, 2 and 3 the second."""
    mesh = mesh_of("pp", "dp")
    stage = dist.get_rank() // 2
    net = Half(dtype, stage)
    group = mesh["pp"].get_group()
    options.setdefault("process_group", group)
    return Spread(net, inner(net, mesh), pipeline=(dist.get_rank() + 2) % WORLD, **options)


def pipeline(dtype: torch.dtype) -> Spread:
    return _stages(
        lambda net, mesh: DistributedDataParallel(net, process_group=mesh["dp"].get_group()),
        dtype,
        breaks_shards=False,
        process_group=mesh_of("pp", "dp")["pp"],
    )


def pipeline_of_shards(dtype: torch.dtype, whole_world: bool) -> Spread:
    options = {"process_group": dist.group.WORLD} if whole_world else {}
    return _stages(lambda net, mesh: fully_shard(net, mesh=mesh["dp"]), dtype, **options)


def experts(dtype: torch.dtype, placed: str) -> Spread:
    """Layers sharded over all ranks, and experts sharded over pairs of ranks, on a separate mesh."""
    net = Mixture(dtype)
    mesh = mesh_of("copies", "ep")
    if placed == "2-D":
        spread = distribute_tensor(net.experts.detach(), mesh, [Replicate(), Shard(0)])
    else:
        spread = distribute_tensor(net.experts.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
    net.experts = torch.nn.Parameter(spread)
    dense = mesh_of("all")
    return Spread(net, fully_shard(net, mesh=dense, ignored_params={net.experts}))


# FSDP1's strategies, and whether the optimizer has the original parameters.
STRATEGIES = (
    *(("FULL_SHARD", False), ("FULL_SHARD", True), ("SHARD_GRAD_OP", True), ("NO_SHARD", False)),
    *(("HYBRID_SHARD", True), ("_HYBRID_SHARD_ZERO2", False)),
)
TOPOLOGIES: dict[str, Callable[[torch.dtype], Spread]] = {
    "DDP": ddp,
    "ZeRO-1": zero1,
    **{
        f"FSDP1 {strategy}{', original parameters' if original else ''}": partial(
            fsdp1, strategy=strategy, use_orig_params=original
        )
        for strategy, original in STRATEGIES
    },
    "FSDP1, some ranks with nothing": partial(fsdp1, strategy="FULL_SHARD", use_orig_params=True, cls=Tiny),
    "FSDP1 sharded inside copied": fsdp1_nested,
    "FSDP2": partial(fsdp2, dimensions=("all",)),
    "FSDP2, sent in 16 bits": partial(fsdp2, dimensions=("all",), send=True),
    "HSDP": partial(fsdp2, dimensions=("copies", "shards")),
    "HSDP, sent in 16 bits": partial(fsdp2, dimensions=("copies", "shards"), send=True),
    "TP beside plain tensors": tensor_parallel,
    "TP with sequence parallelism": sequence_parallel,
    "TP and FSDP2, norm first": two_d,
    "TP and FSDP2 on crossed layers": crossed,
    "pipeline of DDP": pipeline,
    "pipeline of FSDP2": partial(pipeline_of_shards, whole_world=False),
    "pipeline of FSDP2, one group": partial(pipeline_of_shards, whole_world=True),
    "experts on a second mesh": partial(experts, placed="2-D"),
    "experts on pairs of ranks": partial(experts, placed="1-D"),
}
# One for each way in which ranks hold parameters and agree; `make test` runs these.
SAMPLE = (
    *("ZeRO-1", "FSDP1 FULL_SHARD", "FSDP1 HYBRID_SHARD, original parameters", "FSDP1, some ranks with nothing"),
    *("FSDP1 sharded inside copied", "HSDP", "TP with sequence parallelism", "TP and FSDP2, norm first"),
    *("TP and FSDP2 on crossed layers", "pipeline of FSDP2", "experts on pairs of ranks"),
)


def single(name: str, dtype: torch.dtype) -> Net:
    """The same model on one process."""
    return (Mixture if "experts" in name else Tiny if "nothing" in name else Net)(dtype)


# ----------------------------------------------------------------------------------------------- bits, and who has them


def stepping(optimizer: Any) -> Any:
    return optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer


def local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor).detach()


def parameters_of(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def bits(tensor: torch.Tensor) -> bytes:
    return local(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def held(optimizer: Any) -> list[dict[str, bytes]]:
    """The bits of the weights and states of this rank's optimizer, including step counts."""
    state = stepping(optimizer).state
    return [
        {"": bits(parameter), **{key: bits(value) for key, value in state.get(parameter, {}).items()}}
        for parameter in parameters_of(optimizer)
    ]


def unchanged(before: list[dict[str, bytes]], after: list[dict[str, bytes]]) -> bool:
    """Whether all bits are the same. New state must be that of zero steps."""
    return all(
        (value == old[key] if key in old else key == "master" or not any(value))
        for old, new in zip(before, after, strict=True)
        for key, value in new.items()
    )


def key_of(spread: Spread, name: str, parameter: torch.Tensor) -> str:
    """A key that is the same on all ranks with copies of the same shard."""
    if isinstance(parameter, DTensor):
        mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
        assert at is not None
        dims = mesh.mesh_dim_names or range(mesh.ndim)
        cut = [
            f"{dim}{place}"
            for dim, place, placement in zip(dims, at, parameter.placements, strict=True)
            if not placement.is_replicate()
        ]
        return f"{name} {cut}"
    handle = next(
        (
            module._handle
            for module in spread.called.modules()
            if isinstance(module, FullyShardedDataParallel)
            and module._handle is not None
            and any(parameter is one for one in (module._handle.flat_param, *(module._handle.flat_param._params or ())))
        ),
        None,
    )
    if handle is not None and handle.uses_sharded_strategy:
        return f"{name} {handle.process_group.rank()}"
    return name


def copies(spread: Spread, optimizer: Any) -> dict[int, int]:
    """Checksums of each parameter and its state on this rank, by the checksum of `key_of`."""
    owned = not isinstance(optimizer, ZeroRedundancyOptimizer)
    found = {}
    for name, parameter in spread.called.named_parameters():
        state = optimizer.state.get(parameter, {}) if owned else {}
        content = b"".join([bits(parameter), *(bits(value) for _, value in sorted(state.items()))])
        found[zlib.crc32(key_of(spread, name, parameter).encode())] = zlib.crc32(content)
    return found


def break_shard(optimizer: Any, choice: int, value: float) -> bool:
    """Write a value into a gradient on this rank. Returns False if the rank has none."""
    grads = [local(p.grad) for p in parameters_of(optimizer) if p.grad is not None and local(p.grad).numel()]
    if not grads:
        return False
    grad = grads[choice % len(grads)].view(-1)
    grad[choice % grad.numel()] = value
    return True
