"""Parameters, gradients and runs for tests of optimizers, and comparisons of their bits."""

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from oracles import bits
from torch.distributed.tensor import DTensor

SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (33, 17), (1,), (), (0,), (0, 4))

# By name, how a tensor with four dimensions may lie in memory.
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda v: v.transpose(0, 3).contiguous().transpose(0, 3),
    "channels_last": lambda v: v.contiguous(memory_format=torch.channels_last),
    "gaps": lambda v: torch.cat([v, v], dim=3)[..., : v.shape[3]],
    "misaligned": lambda v: torch.cat([v.flatten()[:1], v.flatten()])[1:].view(v.shape),
}


def parameters_of(dtype: torch.dtype, shapes: Iterable[Any] = SHAPES, seed: int = 0) -> list[Any]:
    """Of 8 significant bits, so that every dtype starts from the same."""
    generator = torch.Generator().manual_seed(seed)
    values = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    return [torch.nn.Parameter(value.to(dtype)) for value in values]


def copies_of(parameters: Iterable[torch.Tensor]) -> list[Any]:
    """New parameters of the same numbers."""
    return [torch.nn.Parameter(parameter.detach().clone()) for parameter in parameters]


def give_gradients(step: int, *lists: Iterable[Any], without: Iterable[int] = ()) -> None:
    """The same gradients of 8 significant bits for all lists, none at the places named."""
    for parameters in lists:
        generator = torch.Generator().manual_seed(1000 + step)
        for place, parameter in enumerate(parameters):
            value = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.grad = None if place in without else value.to(parameter.dtype)


def train(
    optimizer: Any, steps: Iterable[int], parameters: Iterable[Any] | None = None, without: Iterable[int] = ()
) -> None:
    """Steps of all parameters, or of these, with the gradients of `give_gradients`."""
    if parameters is None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
    parameters = list(parameters)
    for step in steps:
        give_gradients(step, parameters, without=without)
        optimizer.step()


def held(optimizer: Any, parameters: Iterable[torch.Tensor], keys: Iterable[str] = ()) -> list[Any]:
    """Bits of all parameters and of the canonical state, or of some `keys` of it."""
    entries = optimizer.canonical_state_dict()["state"].values()
    state = [bits(entry[key]) for entry in entries for key in sorted(entry) if not keys or key in keys]
    return [bits(parameter.detach()) for parameter in parameters] + state


def same(left: list[Any], right: list[Any]) -> bool:
    """Whether arrays of bits are equal."""
    return len(left) == len(right) and all((a == b).all() for a, b in zip(left, right, strict=True))


def masters(optimizer: Any) -> list[torch.Tensor]:
    """The fp32 weights, by parameter."""
    return [master.clone() for master in optimizer.masters().values()]


def differences(expected: Any, found: Any, where: str = "", without: Iterable[str] = ()) -> list[str]:
    """The places where two nested states differ in class, dtype, shape or any bit, but for some keys.

    Of sharded tensors, this rank's shards are compared.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return [f"{where}: {sorted(map(str, expected.keys() ^ found.keys()))}"]
        pairs = [(key, expected[key], found[key]) for key in expected if key not in without]
    elif isinstance(expected, (list, tuple)) and isinstance(found, (list, tuple)) and len(expected) == len(found):
        pairs = [*zip(range(len(expected)), expected, found, strict=True)]
    elif isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        shards = [getattr(tensor, "_local_tensor", tensor).detach() for tensor in (expected, found)]
        alike = {(type(shard), shard.dtype, shard.shape) for shard in shards}  # detached, a Parameter is a Tensor
        same = len(alike) == 1 and torch.equal(*(shard.contiguous().reshape(-1).view(torch.uint8) for shard in shards))
        return [] if same and isinstance(expected, DTensor) == isinstance(found, DTensor) else [where]
    else:
        same = type(expected) is type(found) and expected == found
        return [] if same else [f"{where}: {expected!r} and {found!r}"]
    return [line for key, left, right in pairs for line in differences(left, right, f"{where}/{key}", without)]


def same_bits(left: Any, right: Any) -> bool:
    """Whether there are no `differences`."""
    return not differences(left, right)


def same_runs(left: Any, right: Any) -> bool:
    """Whether two optimizers have the same canonical state, and masters or weights in fp32, to the bit."""
    states = [optimizer.canonical_state_dict()["state"] for optimizer in (left, right)]
    return same_bits(*states) and same_bits(masters(left), masters(right))


def through_a_file(state: Any, weights_only: bool = True) -> Any:
    """`state` after `torch.save` and `torch.load`."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)
