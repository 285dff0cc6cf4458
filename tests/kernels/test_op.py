"""One definition of an operator serves every way of calling it. test_softmax_api.py has softmax in transforms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_bytes import Operations
from implementations import using

import halfstep

BF16 = torch.bfloat16
CASTS = [
    {"dtype": BF16},
    {"dtype": torch.float8_e5m2, "saturate": True},
    {"dtype": BF16, "rounding": "toward_zero"},
    {"dtype": BF16, "rounding": "stochastic", "seed": 3},
    {"dtype": torch.float16, "rounding": "stochastic", "seed": 3, "offset": 1001},
]
CALLS = [
    pytest.param(lambda one: halfstep.cast(one, BF16), id="cast"),
    pytest.param(lambda one: halfstep.softmax(one), id="softmax"),
]


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.dtype == other.dtype
    torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0)


@pytest.mark.parametrize("call", CALLS)
def test_dispatch_modes_see_a_single_operator(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with Operations() as seen:
        call(x(4, 8))
    assert [name for name in seen.names if name.startswith("halfstep")] in (
        ["halfstep.cast.default"],
        ["halfstep.softmax.default"],
    )


@pytest.mark.parametrize("implementation", ["reference", "native"])
@pytest.mark.parametrize("options", CASTS, ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_vmap_casts_each_sample_as_if_alone(options: dict[str, Any], dim: int, implementation: str) -> None:
    given = x(3, 5, 7)
    with using(implementation, "cast"):
        batched = torch.func.vmap(lambda one: halfstep.cast(one, **options), in_dims=dim)(given)
        alone = torch.stack([halfstep.cast(one, **options) for one in given.unbind(dim)])
    same(batched, alone)


def test_vmap_follows_its_randomness_option() -> None:
    given = torch.full((64, 33), 1.001)

    def draw(**options: Any) -> torch.Tensor:
        torch.manual_seed(11)
        return torch.func.vmap(lambda one: halfstep.cast(one, BF16, rounding="stochastic"), **options)(given)

    with pytest.raises(RuntimeError, match="called random operation while in randomness error mode"):
        draw()
    assert len(draw(randomness="same").unique(dim=0)) == 1
    assert len(draw(randomness="different").unique(dim=0)) > 32


def test_transforms_differentiate_a_cast() -> None:
    given, weight = x(3, 5), x(3, 5, 2)[..., 0]

    def loss(one: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (halfstep.cast(one, BF16).float() * factor).sum()

    expected = weight.to(BF16).float()
    same(torch.func.grad(loss)(given, weight), expected)
    same(torch.func.vmap(torch.func.grad(loss))(given, weight), expected)
    same(torch.func.jacrev(lambda one: halfstep.cast(one, BF16).float())(given[0]), torch.eye(5))


def test_forward_mode_casts_the_tangent() -> None:
    given, tangent = x(3, 5), x(3, 5, 2)[..., 0]
    for options in CASTS:
        y, derivative = torch.func.jvp(lambda one, options=options: halfstep.cast(one, **options), (given,), (tangent,))
        same(y, halfstep.cast(given, **options))
        same(derivative, halfstep.cast(tangent, options["dtype"]))
    same(torch.func.jacfwd(lambda one: halfstep.cast(one, BF16).float())(given[0]), torch.eye(5))


@pytest.mark.parametrize("call", CALLS)
def test_vmap_can_be_compiled(call: Callable[[torch.Tensor], torch.Tensor]) -> None:
    given = x(3, 5, 7)
    same(torch.compile(torch.func.vmap(call), backend="aot_eager")(given), call(given))
