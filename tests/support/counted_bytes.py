"""Count the bytes that are allocated for parameters, gradients and states, and the bytes of messages."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

PARTS = ("master", "error_bits", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors on this rank in lists, dicts, DTensors and attributes of objects."""
    if isinstance(value, torch.Tensor):
        yield getattr(value, "_local_tensor", value)
    elif isinstance(value, dict):
        for one in value.values():
            yield from tensors_in(one)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))


def storage_bytes(values: Any) -> int:
    """The bytes of all storages. A shared storage counts once."""
    # Meta storages have no address; each is known by its object, which must live until all are counted.
    storages = [tensor.untyped_storage() for tensor in tensors_in(values)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def counted(parameters: Iterable[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The bytes by the names of the planner. Step counts and similar tensors are ``scalars``."""
    listed = list(parameters)
    states = [dict(optimizer.state[p]) for p in listed if p in optimizer.state]
    made = {"weights": storage_bytes(listed), "gradients": storage_bytes([p.grad for p in listed])}
    for part in PARTS:
        held = [state.pop(key) for state in states for key in (part, f"{part}_scale") if key in state]
        # What completes a 16-bit weight to its master: ours is called a master too, flashoptim's has another name.
        rest = part == "error_bits" or (
            part == "master" and any(one.dtype in (torch.int16, torch.int8) for one in held)
        )
        if storage_bytes(held):
            made["remainder" if rest else part] = storage_bytes(held)
    return {**made, "scalars": storage_bytes(states)}


class Operations(TorchDispatchMode):
    """The names of torch's operations inside the block, views left out: each would allocate, copy or launch."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not function.is_view and function.namespace != "profiler":  # the label around Optimizer.step
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


class Peak(TorchDispatchMode):
    """The largest sum of bytes of storages that exist at once, of those that operators have allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[Any, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([list(args), kwargs or {}])}
        for tensor in tensors_in([result]):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self.alive[storage._cdata] = (storage._weak_ref(), storage.nbytes())
        self.alive = {key: one for key, one in self.alive.items() if not torch.UntypedStorage._expired(one[0])}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


class Outputs(TorchDispatchMode):
    """Records every operator with the bytes of the new storages that it returned."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[str, tuple[Any, ...], int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in([*args, kwargs])}
        new = [t for t in tensors_in(result) if t.untyped_storage()._cdata not in given]
        self.made.append((func.overloadpacket.__name__, args, storage_bytes(new)))
        return result


# Operators by name, and which of their arguments is the whole buffer.
COLLECTIVES = {
    "allreduce_": ("all-reduce", 0),
    "broadcast_": ("broadcast", 0),
    "allgather_": ("all-gather", 0),
    "_allgather_base_": ("all-gather", 0),
    "_reduce_scatter_base_": ("reduce-scatter", 1),
    "alltoall_base_": ("all-to-all", 1),
    "all_reduce": ("all-reduce", 0),
    "all_reduce_": ("all-reduce", 0),
}
SILENT = ("wait_tensor", "_wrap_tensor_autograd")


def _ranks(args: tuple[Any, ...]) -> int:
    """The size of the process group among the arguments of a collective, given as an object or by name."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().name():
            return dist.ProcessGroup.unbox(value).size()
    return dist.distributed_c10d._resolve_process_group(args[-1]).size()


class Messages(TorchDispatchMode):
    """Adds the bytes that this rank sends in every collective, including those of torch's C++ reducers, FSDP,
    optimizers and DTensors: with ring algorithms, as the mean over ranks. The scaler's are two fp64 numbers.

    One that is not known by name raises, so that none is missed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, Fraction] = defaultdict(Fraction)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if DTensor in types or AsyncCollectiveTensor in types:
            return NotImplemented  # their own dispatch calls operators on this rank's tensors, which come here
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ not in SILENT:
            name, whole = COLLECTIVES[func.overloadpacket.__name__]
            held = list(tensors_in(args[whole]))
            size = sum(tensor.nbytes for tensor in held)
            if name == "all-to-all":
                rank = dist.ProcessGroup.unbox(args[2]).rank()
                self.sent[name] += size - args[4][rank] * held[0].element_size()
            else:
                scalers = [(tensor.dtype, tensor.numel()) for tensor in held] == [(torch.float64, 2)]
                ways, ranks = 2 if name == "all-reduce" else 1, _ranks(args)
                self.sent["scaler" if scalers else name] += ways * Fraction(ranks - 1, ranks) * size
        return func(*args, **(kwargs or {}))
