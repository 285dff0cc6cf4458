"""Shared by the trainers' tests: a small model, its batches, gradients and bits. See docs/trainers/."""

import importlib
import importlib.util
import io
import logging
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

import halfstep

STEPS, SAVED, BROKEN = 6, 4, 2  # steps of a run, those before it is saved, and the one whose gradient has an Inf
LR, MAX_NORM, SCALE = 0.05, 0.05, 2.0**10
TRAINERS = "accelerate transformers peft trl datasets lightning torchtitan safetensors bitsandbytes".split()
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def quietly() -> Iterator[None]:
    """Without what libraries print, log and warn of. Ranks leave together."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        yield
        if dist.is_initialized():
            dist.barrier()
    logging.disable(logging.NOTSET)


def missing(*libraries: str) -> list[str]:
    return [one for one in libraries if importlib.util.find_spec(one) is None]


def skip_without(*libraries: str) -> pytest.MarkDecorator:
    """Skips the tests of a module whose libraries are not installed, as in `make test`."""
    return pytest.mark.skipif(
        bool(missing(*libraries)), reason=f"needs {', '.join(missing(*libraries))}: make trainers"
    )


def imported(module: str) -> Any:
    """A module, or None where a trainer that it needs is not installed; its tests are skipped then."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in TRAINERS:
            raise
        return None


def network(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    layers = torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers)


def batch(number: int, rank: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs, and targets that depend on them."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    inputs = torch.randn(16, 8, generator=generator, dtype=torch.float32)  # Lightning sets another default dtype
    return inputs, inputs[:, :4].abs() - inputs[:, 4:]


def error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.float() - targets).square().mean()


def scaler_for(kind: str, **options: Any) -> halfstep.GradScaler | None:
    return halfstep.GradScaler("cpu", **{"init_scale": SCALE, **options}) if kind == "fp16" else None


def local(tensor: Any) -> torch.Tensor:
    held: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return held


def full(tensor: Any) -> torch.Tensor:
    """All of a tensor, copied."""
    gathered: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return gathered.detach().clone()


def gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [local(one.grad).clone() for one in parameters if one.grad is not None]


def fit_of(weights: dict[str, torch.Tensor]) -> list[float]:
    """The errors of the network before training, and with `weights`, on which a wrapper may have put a prefix."""
    dtype = next(iter(weights.values())).dtype
    (inputs, targets), model = batch(0), network().to(dtype)
    before = error(model(inputs.to(dtype)), targets).item()
    model.load_state_dict({name.removeprefix("module.").removeprefix("network."): x for name, x in weights.items()})
    return [before, error(model(inputs.to(dtype)), targets).item()]


def scaler_state(scaler: Any) -> Any:
    return None if scaler is None else scaler.state_dict()


def logged(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """What scaler and monitor add to rows of a log, without the parameters' own."""
    return [{key: row[key] for key in row if key.startswith("halfstep/") and key.count("/") == 1} for row in rows]


def state_of(optimizer: Any) -> list[Any]:
    """Weights and state of an optimizer, in its order, copied."""
    return [
        [local(one.detach()).clone(), {key: local(value).clone() for key, value in optimizer.state[one].items()}]
        for group in optimizer.param_groups
        for one in group["params"]
    ]


def masters_of(optimizer: Any) -> list[str]:
    """The dtypes of the masters in an optimizer's state: int16 is a split master."""
    return sorted({str(state["master"].dtype) for state in optimizer.state.values() if "master" in state})


def seen(parameters: Iterable[Any], optimizer: Any) -> dict[str, Any]:
    """What the tests compare of weights and their optimizer after a run."""
    weights = list(parameters)
    return {
        "sharded": all(hasattr(weight, "full_tensor") for weight in weights),
        "masters": masters_of(optimizer),
        "weights": sorted({str(weight.dtype) for weight in weights}),
        "state": state_of(optimizer),
    }


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def broken_backward(model: torch.nn.Module, broken: bool) -> Iterator[None]:
    """Put an Inf into a gradient of the last rank: in the backward, before ranks add theirs, or after it in a shard."""
    broken = broken and rank() == world() - 1
    sharded = any(isinstance(module, FSDPModule) for module in model.modules())
    hooks = []
    if broken and not sharded:
        trained = next(one for one in model.parameters() if one.requires_grad)
        hooks.append(trained.register_hook(lambda grad: torch.full_like(grad, float("inf"))))
    yield
    for hook in hooks:
        hook.remove()
    if broken and sharded:
        break_gradient(model.parameters())


def break_gradient(parameters: Iterable[torch.Tensor]) -> None:
    """Write an Inf into a gradient, if there is one."""
    for grad in (local(one.grad) for one in parameters if one.grad is not None):
        if grad.numel():
            grad.view(-1)[0] = float("inf")
            return


def own_loop(kind: str, broken: int | None = BROKEN, steps: int = STEPS, micro: int = 2) -> dict[str, Any]:
    """The run of the tests in a loop of our own: the weights and state, norms and learning rates that trainers need."""
    model = network().to(DTYPES[kind])
    optimizer = halfstep.AdamW(model.parameters(), lr=LR)
    scaler = scaler_for(kind)
    norms, rates = [], []
    rate = LR
    for step in range(steps):
        for part in range(micro):
            inputs, targets = batch(micro * step + part)
            loss = error(model(inputs.to(DTYPES[kind])), targets) / micro
            (loss if scaler is None else scaler.scale(loss)).backward()
        if step == broken and scaler is not None:
            break_gradient(model.parameters())
        optimizer.param_groups[0]["lr"] = rate
        if scaler is None:
            optimizer.max_grad_norm = MAX_NORM
            optimizer.step()
            norms.append(optimizer.grad_norm.item())
        else:
            norms.append(scaler.clip_grad_norm_(optimizer, MAX_NORM).item())
            scaler.step(optimizer)
            scaler.update()
        if scaler is None or step != broken:
            rate *= 0.5
        rates.append(rate)
        optimizer.zero_grad()
    return {"state": state_of(optimizer), "norms": norms, "rates": rates}


def page_block(heading: str) -> str:
    """The first lines of Python under a heading of docs/trainers/."""
    folder = Path(__file__).resolve().parents[2] / "docs" / "trainers"
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted(folder.glob("*.md")))
    section = re.split(rf"^##? {re.escape(heading)}$", pages, flags=re.MULTILINE)[-1]
    return re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)[0]


def page_names() -> dict[str, Any]:
    """What the lines of the page take for granted."""
    model = network()
    placeholder = torch.optim.SGD(model.parameters(), lr=1.0)
    return {
        "halfstep": halfstep,
        "torch": torch,
        "model": model,
        "loss": error,
        "schedule": torch.optim.lr_scheduler.ExponentialLR(placeholder, 0.5),
        "batches": [batch(number) for number in range(4)],
    }
