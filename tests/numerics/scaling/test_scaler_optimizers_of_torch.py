"""Every optimizer in torch's test list has the same bits under halfstep's scaler and under torch's.

Six steps, one of which overflows, each with gradients unscaled by the step, by `unscale_`, and clipped in between.
"""

from typing import Any

import pytest
import torch

import halfstep

common = pytest.importorskip("torch.testing._internal.common_optimizers", exc_type=ImportError)

WAYS = ("in step", "unscaled", "clipped")
SPOILED = 2
# LBFGS needs a closure, and Muon's iterations take seconds in bf16 on a CPU.
LEFT_OUT = ("LBFGS", "Muon")
INFOS = {info.optim_cls.__name__: info for info in common.optim_db if info.optim_cls.__name__ not in LEFT_OUT}


def inputs_of(info: Any) -> list[dict[str, Any]]:
    """Arguments, by torch's list; each also with foreach, where there is such an implementation."""
    listed = common._get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info)
    options = [one.kwargs for one in listed if not one.kwargs.get("differentiable")]
    if "foreach" in info.supported_impls:
        options += [{**one, "foreach": True} for one in options if not one.get("fused")]
    return options


def gradient(step: int, shape: tuple[int, ...], sparse: bool) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(step))
    if step == SPOILED:
        values.view(-1)[-1] = float("inf")
    return values.to_sparse(1) if sparse else values


def trained(scaler: Any, make: Any, options: dict[str, Any], way: str, sparse: bool) -> list[Any]:
    """Weights, state and the history of the scale."""
    shapes = ((4, 3), (2, 5)) if sparse else ((4, 3), (5,), ())
    generator = torch.Generator().manual_seed(9)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = make(parameters, **{name: v.clone() if torch.is_tensor(v) else v for name, v in options.items()})
    history: list[Any] = []
    for step in range(6):
        scale = scaler.scale(torch.ones(()))
        for parameter in parameters:
            parameter.grad = gradient(step, tuple(parameter.shape), sparse) * scale
        if way != "in step":
            scaler.unscale_(optimizer)
        if way == "clipped":
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        scaler.step(optimizer)
        scaler.update()
        history.append((scaler.get_scale(), scaler._get_growth_tracker()))
    state = [value for held in optimizer.state_dict()["state"].values() for value in held.values()]
    return [history, *(p.detach() for p in parameters), *state]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) or bool(one.isnan().all() and other.isnan().all())
    return bool(one == other)


def scalers() -> list[Any]:
    return [cls("cpu", init_scale=64.0, growth_interval=2) for cls in (halfstep.GradScaler, torch.amp.GradScaler)]


@pytest.mark.parametrize("name", INFOS)
def test_our_scaler_has_the_bits_of_torchs_with_every_optimizer(name: str) -> None:
    info = INFOS[name]
    sparse = info.only_supports_sparse_grads
    for options in inputs_of(info):
        for way in WAYS[: 2 if sparse else 3]:  # torch does not clip sparse gradients
            mine, torchs = (trained(scaler, info.optim_cls, options, way, sparse) for scaler in scalers())
            assert len({scale for scale, _ in mine[0]}) > 1, "the scale has moved"
            assert all(map(same, mine, torchs)), (options, way)
