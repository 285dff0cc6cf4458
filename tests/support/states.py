"""Parameters, gradients and runs for tests of optimizers, and the bits that they compare."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from typing import Any

import torch
from oracles import bits

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


def same_bits(left: Any, right: Any) -> bool:
    """Equal to the bit, dtypes, shapes and classes included, through dicts and lists."""
    if isinstance(left, torch.Tensor):
        alike = type(left) is type(right) and (left.dtype, left.shape) == (right.dtype, right.shape)
        return alike and bool((bits(left.detach()) == bits(right.detach())).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same_bits(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same_bits, left, right))
    return type(left) is type(right) and left == right


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
