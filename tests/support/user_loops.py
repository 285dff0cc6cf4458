"""Short, typical training loops for test_user_loops.py.

A program is a function of a `Run`, which hands out models, batches and optimizers. Everything else in it is torch, and
nothing knows which optimizer it drives: torch's AdamW, `halfstep.AdamW`, the same with steps in the backward, or one of
`OffloadedAdamW`. What a program writes to a log or averages is compared as well as what it trains.

Most programs are the same loop with one thing changed: these are rows of `ORDERS` and `LOOPS`. The others are the
functions of `Programs`; those that take `model` and `optimizer` are given an optimizer of all parameters of an `mlp`,
or of the class that `model` is annotated with.
"""

from __future__ import annotations

import copy
import inspect
import io
import math
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from layouts import BF16, FP16, FP32, some
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import StepInBackward, step_in_backward

REMEDY = re.compile(r"Expected .+, but got .+: .+", re.DOTALL)  # of every refusal
BUCKET_BYTES = 200  # a few tensors, so that there are several buckets

LAYOUTS = some("split", "split24, 8 bits", "full", "fp32")
LAYOUTS_OF_16_BITS = [name for name, (dtype, _) in LAYOUTS.items() if dtype != FP32]
# `in_backward` of the offloaded ones.
OFFLOADED: dict[str, Any] = {"offload copy": "copy", "offload step": "step", "offload None": None}


class Run:
    """What one run of a program uses, and what it leaves to be compared.

    Attributes:
        way: whose optimizer it is: ``"torch"``, ``"plain"``, ``"release"``, ``"muon"``, ``"muon release"``, or a name
            in `OFFLOADED`.
        optimizers: the optimizers, with the parameters of each and their first values.
        logged: what the program wrote to its log.
        averages: modules that it has averaged or otherwise keeps besides those it trains.
    """

    def __init__(self, way: str, layout: str) -> None:
        self.way = way
        self.dtype, self._options = LAYOUTS[layout]
        self.optimizers: list[tuple[Any, list[Tensor], list[Tensor]]] = []
        self.logged: list[float] = []
        self.averages: list[nn.Module] = []
        self._handles: list[StepInBackward] = []
        torch.manual_seed(0)

    def model(self, build: Callable[[], nn.Module] | None = None, dtype: torch.dtype | None = None) -> Any:
        """A model in the dtype of the layout, or in another, except where everything is fp32."""
        return (build or mlp)().to(self._dtype(dtype))

    def start(self, build: Callable[[], nn.Module] | None = None, **options: Any) -> tuple[Any, Any]:
        """A model, and the optimizer of all of its parameters."""
        model = self.model(build)
        return model, self.adamw(model, **options)

    def backwards(self, model: nn.Module, optimizer: Any, count: int = 4, first: int = 0) -> Iterator[Any]:
        """Train; what is in the loop runs between each backward and its step."""
        for x, y in self.tokens(count) if isinstance(model, GPT) else self.batches(count, first=first):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            yield x, y
            optimizer.step()

    def steps(self, model: nn.Module, optimizer: Any, count: int = 4) -> Iterator[tuple[Tensor, Tensor]]:
        """Train; what is in the loop runs after each step."""
        for x, y in self.batches(count):
            optimizer.zero_grad()
            loss_of(model, x, y).backward()
            optimizer.step()
            yield x, y

    def train(self, model: nn.Module, optimizer: Any, count: int = 4, first: int = 0) -> None:
        deque(self.backwards(model, optimizer, count, first), maxlen=0)

    def batches(self, count: int, dtype: torch.dtype | None = None, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs of 7 and targets of 5 features."""
        for number in range(first, first + count):
            random = torch.Generator().manual_seed(number)
            x, y = (torch.randn(6, n, generator=random, dtype=FP32) for n in (7, 5))
            yield x.to(self._dtype(dtype)), y.to(self._dtype(dtype))

    def tokens(self, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and the tokens that follow them, of a vocabulary of 11."""
        for number in range(count):
            text = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(number))
            yield text[:, :-1], text[:, 1:]

    def adamw(self, model: nn.Module, params: Iterable[Any] | None = None, lr: Any = 0.01, **options: Any) -> Any:
        """The optimizer of the run, of the parameters of a model or of some. At the end all of them are compared."""
        params = list(model.parameters() if params is None else params)
        optimizer: Any
        if self.way == "torch":
            optimizer = torch.optim.AdamW(params, lr=lr, **options)
        else:
            dtypes = {p.dtype for p in model.parameters()}
            layout = self._options
            if FP16 in dtypes:
                layout = {**layout, "master_weights": "full"}
            elif FP32 in dtypes:
                layout = {name: value for name, value in layout.items() if name != "master_weights"}
            options = {**layout, **options}
            if self.way in OFFLOADED:
                mode = OFFLOADED[self.way]
                optimizer = OffloadedAdamW(params, lr=lr, in_backward=mode, bucket_bytes=BUCKET_BYTES, **options)
            else:
                if self.way.startswith("muon"):
                    optimizer = halfstep.Muon(divided(params), lr=lr, **options)
                else:
                    optimizer = halfstep.AdamW(params, lr=lr, **options)
                if self.way.endswith("release"):
                    self._handles.append(step_in_backward(model, optimizer, bucket_bytes=BUCKET_BYTES))
        trained = list(model.parameters())
        self.optimizers.append((optimizer, trained, [p.detach().clone() for p in trained]))
        return optimizer

    def scaler(self, kind: Any = halfstep.GradScaler) -> Any:
        return (torch.amp.GradScaler if self.way == "torch" else kind)("cpu", init_scale=2.0**8, growth_interval=2)

    def no_sync(self, last: bool = False) -> AbstractContextManager[None]:
        """What loops enter for all micro-batches but the last; `accumulate` of steps in the backward."""
        return self._handles[-1].accumulate() if self._handles and not last else nullcontext()

    def log(self, *values: Any) -> None:
        self.logged += [float(value) for value in values]

    def _dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        return self.dtype if dtype is None or self.dtype is FP32 else dtype


def divided(params: list[Any]) -> list[dict[str, Any]]:
    """Parameters or groups as groups of matrices for Muon and of others for AdamW."""
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    result = []
    for group in groups:
        of_group = list(group["params"])
        matrices = [p for p in of_group if (p[1] if isinstance(p, tuple) else p).dim() > 1]
        others = [p for p in of_group if (p[1] if isinstance(p, tuple) else p).dim() <= 1]
        result += [{**group, "params": matrices}] * bool(matrices)
        result += [{**group, "params": others, "algorithm": "adamw"}] * bool(others)
    return result


def results(run: Run) -> dict[str, Tensor]:
    """What a run leaves: weights, masters and state of each optimizer, averages, and the log."""
    left: dict[str, Tensor] = {"log": torch.tensor(run.logged, dtype=torch.float64)}
    for number, (optimizer, parameters, _) in enumerate(run.optimizers):
        for index, p in enumerate(parameters):
            left[f"optimizer {number}, weight {index}"] = p.detach().clone()
        if run.way == "torch":
            continue
        state, masters = optimizer.state_dict(), optimizer.masters()
        for index, p in enumerate(parameters):
            if p in masters:
                left[f"optimizer {number}, master {index}"] = masters[p].clone()
        for index, entries in state["state"].items():
            for name, value in entries.items():
                left[f"optimizer {number}, {name} {index}"] = torch.as_tensor(value).clone()
        rates = [
            [float(group["lr"]), *map(float, group["betas"]), group["weight_decay"]] for group in state["param_groups"]
        ]
        left[f"optimizer {number}, options"] = torch.tensor(rates, dtype=torch.float64)
    for number, module in enumerate(run.averages):
        for name, value in module.state_dict().items():
            left[f"average {number}, {name}"] = value.detach().clone()
    return left


def has_trained(run: Run) -> bool:
    """Whether each optimizer moved a weight."""
    return bool(run.optimizers) and all(
        any(not torch.equal(p, first) for p, first in zip(parameters, before, strict=True))
        for _, parameters, before in run.optimizers
    )


# --------------------------------------------------------------------------------------------------------------- models


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 14), nn.Linear(14, 10)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class GPT(nn.Module):
    """An embedding that is also the head, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor, call: Callable[..., Tensor] = lambda f, x: f(x)) -> Tensor:
        """The loss. `call` calls each block."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = call(block, x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Heads(nn.Module):
    """A trunk and two heads, of which a batch may use one."""

    def __init__(self, outputs: int = 5) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(7, 9), nn.Linear(9, 5), nn.Linear(9, outputs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.first(hidden), self.second(hidden)


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 5).requires_grad_(False)
        self.a, self.b = nn.Linear(7, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x)) * 2


class FailsOnce(torch.autograd.Function):
    """The identity, whose backward fails at the first call, as an allocation does."""

    failing = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if FailsOnce.failing:
            FailsOnce.failing = False
            raise torch.OutOfMemoryError("out of memory")
        return grad


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return model(x, y) if isinstance(model, GPT) else F.mse_loss(model(x), y)


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def params(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"]]


# --------------------------------------------------------------------------------- where gradients are set to zero

CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "zero_grad": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "step": lambda model, optimizer: optimizer.step(),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
    "p.grad.data.zero_()": lambda model, optimizer: [grad.data.zero_() for grad in grads(model)],
}
# By name, what each iteration calls in turn.
ORDERS = {
    "tutorial": ("zero_grad", "loss", "backward", "step", "log"),
    "zero_grad_between_forward_and_backward": ("loss", "zero_grad", "backward", "step"),
    "model_zero_grad_after_the_step": ("loss", "backward", "step", "model.zero_grad"),  # the Trainer of transformers
    "data_of_gradients_zeroed": ("loss", "backward", "step", "p.grad.data.zero_()"),
    "two_steps_with_the_same_gradients": ("zero_grad", "loss", "backward", "step", "step"),
}


def in_order(calls: tuple[str, ...]) -> Callable[[Run], None]:
    def program(run: Run) -> None:
        model, optimizer = run.start()
        for x, y in run.batches(4):
            for name in calls:
                if name == "loss":
                    loss = loss_of(model, x, y)
                elif name == "log":
                    run.log(loss.item())
                else:
                    loss.backward() if name == "backward" else CALLS[name](model, optimizer)

    return program


# ---------------------------------------------------------------------------------- one thing is changed in the loop


def nothing() -> None: ...


def call_backward(loss: Tensor) -> None:
    loss.backward()


def loop(
    build: Callable[[], nn.Module] = mlp,
    *,
    params: Callable[[Any], Iterable[Any]] | None = None,
    setup: Callable[..., Any] = nothing,
    top: Callable[..., Any] = nothing,
    loss: Callable[..., Any] = loss_of,
    backward: Callable[..., Any] = call_backward,
    between: Callable[..., Any] = nothing,
    skip: Callable[..., bool] = lambda: False,
    after: Callable[..., Any] = nothing,
    count: int = 4,
    dtype: torch.dtype | None = None,
    set_to_none: bool = True,
    **options: Any,
) -> Callable[[Run], None]:
    """A program: a loop whose functions get those of run, model, optimizer, step, x, y, loss and aux that they name.

    Args:
        build: makes the model.
        params: what the optimizer gets of the model, if not all parameters.
        setup: runs before the loop, when there is an optimizer. What it returns is the `aux` of the other functions.
        top: runs at the top of each iteration.
        loss: the loss of a batch.
        backward: computes the gradients.
        between: runs between a backward and its step.
        skip: whether to leave out the step.
        after: runs after the step.
        count: the number of batches.
        dtype: of model and batches, instead of that of the layout.
        set_to_none: of `zero_grad` before the loss.
        options: of the optimizer.
    """

    def program(run: Run) -> None:
        model = run.model(build, dtype)
        chosen = None if params is None else params(model)
        optimizer = run.adamw(model, chosen, **copy.deepcopy(options))  # a rate may be a tensor
        values = {"run": run, "model": model, "optimizer": optimizer}

        def call(function: Callable[..., Any]) -> Any:
            return function(**{name: values[name] for name in inspect.signature(function).parameters})

        values["aux"] = call(setup)
        batches = run.tokens(count) if isinstance(model, GPT) else run.batches(count, dtype)
        for step, (x, y) in enumerate(batches):
            values.update(step=step, x=x, y=y)
            call(top)
            optimizer.zero_grad(set_to_none=set_to_none)
            values["loss"] = call(loss)
            call(backward)
            call(between)
            if not call(skip):
                optimizer.step()
            call(after)

    return program


def each(function: Callable[[Any], Any]) -> Callable[..., None]:
    """A function of each parameter."""
    return lambda model: [function(p) for p in model.parameters()] and None


def each_of_two(function: Callable[[Any, Any], Any]) -> Callable[..., None]:
    """A function of each parameter, and of that of another model, or of other values in its place."""

    def call(model: nn.Module, aux: Any) -> None:
        for p, other in zip(model.parameters(), getattr(aux, "parameters", lambda: aux)(), strict=True):
            function(p, other)

    return call


def hooked(change: Callable[[Any], Any]) -> Callable[..., None]:
    return each(lambda p: p.register_post_accumulate_grad_hook(lambda p: [change(p)] and None))


def set_rates(optimizer: Any, step: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (step + 1)


def set_nan(x: Tensor, step: int) -> None:
    if step == 2:
        x[0, 0] = math.nan


def step_scheduler(aux: Any) -> None:
    aux.step()


def average(run: Run, module: nn.Module) -> nn.Module:
    """A module that is compared at the end."""
    run.averages.append(module)
    return module


def ema(run: Run, model: nn.Module) -> Any:
    return average(run, swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)))


def penalized(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x.requires_grad_(True)), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.pow(2).sum()


def two_losses(model: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    first, second = model(x)
    return F.mse_loss(first, y), F.l1_loss(second, y)


def two_backwards(run: Run, loss: tuple[Tensor, Tensor]) -> None:
    with run.no_sync():
        loss[0].backward(retain_graph=True)
    loss[1].backward()


def merge_lora(model: LoRA, step: int) -> None:
    """ReLoRA (Lialin et al., 2023)."""
    if step == 2:
        model.base.weight.data += 2 * model.b.weight.data @ model.a.weight.data
        nn.init.kaiming_uniform_(model.a.weight, a=math.sqrt(5))
        nn.init.zeros_(model.b.weight)


def set_gradients(model: nn.Module, computed: Iterable[Tensor]) -> None:
    each_of_two(lambda p, grad: setattr(p, "grad", grad))(model, computed)


def one_block_twice() -> nn.Module:
    model = GPT()
    model.blocks[1] = model.blocks[0]
    return model


def in_autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", BF16):
        return F.mse_loss(model(x), y)


def by_dimension(model: nn.Module) -> list[dict[str, Any]]:
    """Groups of matrices, which decay, and of vectors, which do not."""
    split = [[p for p in model.parameters() if (p.dim() < 2) == vectors] for vectors in (False, True)]
    return [{"params": split[0], "weight_decay": 0.1}, {"params": split[1], "weight_decay": 0.0}]


def update(optimizer: Any, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def linear(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(wrap(nn.Linear(7, 5)))


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    return lambda model, x, y: model(x, y, partial(checkpoint, use_reentrant=reentrant))


LOOPS: dict[str, Callable[[Run], None]] = {
    # Gradients are clipped.
    "clip_grad_norm": loop(between=lambda run, model: run.log(clip_grad_norm_(model.parameters(), 0.1))),
    # They are read or written.
    "norm_of_gradients_in_the_log_after_the_step": loop(
        after=lambda run, model: run.log(sum(grad.float().pow(2).sum() for grad in grads(model)) ** 0.5)
    ),
    "gradients_as_numpy": loop(
        between=lambda run, model: run.log(max(abs(grad.float().numpy()).max() for grad in grads(model)))
    ),
    "a_row_without_gradient": loop(GPT, between=lambda model: model.embedding.weight.grad[3].zero_()),
    # The last layer is not trained in the first steps (DINO).
    "gradients_of_one_layer_dropped": loop(
        between=lambda model, step: [setattr(p, "grad", None) for p in model[3].parameters() if step < 2]
    ),
    "state_saved_between_backward_and_step": loop(
        between=lambda model, optimizer: (optimizer.state_dict(), model.state_dict())
    ),
    "model_copied_between_backward_and_step": loop(
        between=lambda run, model: run.averages.append(copy.deepcopy(model))
    ),
    "model_moved_between_backward_and_step": loop(between=lambda model: model.to("cpu").train()),
    # Weights are written.
    "decay_by_hand_between_backward_and_step": loop(between=torch.no_grad()(each(lambda p: p.mul_(0.99)))),
    "weights_written_by_numpy": loop(after=each(lambda p: p.data.view(torch.uint8).numpy().reshape(-1)[:4].fill(0))),
    # nGPT, and dictionaries of sparse autoencoders.
    "rows_of_unit_norm": loop(
        after=lambda model: setattr(model[0].weight, "data", F.normalize(model[0].weight.data, dim=1))
    ),
    # Parameters come and go.
    "lora": loop(LoRA, params=lambda model: filter(lambda p: p.requires_grad, model.parameters())),
    "lora_merged_and_begun_again": loop(LoRA, count=5, after=merge_lora),
    "zeros_for_a_head_that_a_batch_does_not_use": loop(
        Heads, count=5, loss=lambda model, step, x, y: F.mse_loss(model(x)[step % 2], y), set_to_none=False
    ),
    # The optimizer forgets its moments when the task changes.
    "moments_set_to_zero": loop(
        count=5, after=lambda optimizer, step: setattr(optimizer, "state", defaultdict(dict)) if step == 2 else None
    ),
    # Learning rates.
    "learning_rate_set_between_backward_and_step": loop(between=set_rates),  # build-nanogpt
    # DINO's loop sets the decay too.
    "decay_that_is_scheduled": loop(
        top=lambda optimizer, step: optimizer.param_groups[0].update(
            lr=0.01 * 0.8**step, weight_decay=0.1 * step, betas=(0.9 - 0.1 * step, 0.99)
        )
    ),
    # Other models and losses.
    "reentrant_checkpoints_that_share_a_block": loop(one_block_twice, loss=checkpointed(reentrant=True)),
    # torch's power iteration has no bf16, so the layer is in fp32 in each layout.
    "spectrally_normalized": loop(linear(spectral_norm), dtype=FP32),
    "autocast": loop(dtype=FP32, loss=in_autocast),
    # Other backwards.
    "two_backwards_of_one_graph": loop(Heads, loss=two_losses, backward=two_backwards),
    "gradients_of_autograd_grad": loop(
        backward=lambda model, loss: set_gradients(model, torch.autograd.grad(loss, list(model.parameters())))
    ),
    "checkpointed_blocks": loop(GPT, loss=checkpointed(reentrant=False)),
    "reentrant_checkpointed_blocks": loop(GPT, loss=checkpointed(reentrant=True)),
    "gradient_penalty": loop(loss=penalized),
    # With something beside the model.
    "ema_of_torch": loop(setup=ema, after=lambda model, aux: aux.update_parameters(model)),
    "compiled_model": loop(
        setup=lambda model: torch.compile(model, backend="aot_eager"), loss=lambda aux, x, y: F.mse_loss(aux(x), y)
    ),
    "learning_rate_as_a_tensor": loop(
        count=5,
        setup=lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
        after=step_scheduler,
        lr=torch.tensor(0.01),
    ),
    # Hooks.
    "hooks_on_tensors": loop(setup=each(lambda p: p.register_hook(lambda grad: grad.clamp(-0.02, 0.02)))),
    "hooks_after_accumulation_after_the_optimizer": loop(setup=hooked(lambda p: p.grad.mul_(0.5).add_(0.01))),
    "hooks_on_the_optimizer": loop(
        setup=lambda model, optimizer: optimizer.register_step_post_hook(
            lambda *_: each(lambda p: p.data.mul_(0.99))(model)
        )
    ),
    # Steps are left out.
    "a_step_skipped_for_nan_gradients": loop(
        count=5, top=set_nan, skip=lambda model: any(not torch.isfinite(grad).all() for grad in grads(model))
    ),
    "a_step_skipped_and_zeroed_at_the_top": loop(count=5, skip=lambda step: step == 2),
    "the_last_step_skipped": loop(skip=lambda step: step == 3),
}


# ---------------------------------------------------------------------------------------- other loops


def accumulating(
    every: int, scale: float = 1.0, no_sync: bool = True, between: Callable[..., Any] = lambda run, model: None
) -> Callable[[Run], None]:
    """A program with a step after `every` micro-batches."""

    def program(run: Run) -> None:
        model, optimizer = run.start()
        for step, (x, y) in enumerate(run.batches(6)):
            last = (step + 1) % every == 0
            with run.no_sync(last) if no_sync else nullcontext():
                (F.mse_loss(model(x), y) * scale).backward()
            if last:
                between(run, model)
                optimizer.step()
                optimizer.zero_grad()

    return program


ACCUMULATING = {
    "accumulation": accumulating(3, 1 / 3, no_sync=False),
    "accumulation_without_sync": accumulating(2, 0.5),  # nanoGPT's, and Accelerate's
    "accumulation_without_sync_clipped": accumulating(
        3, between=lambda run, model: run.log(clip_grad_norm_(model.parameters(), 0.1))
    ),
}


def scaled(kind: Any, dtype: torch.dtype | None = None, clip: bool = False, bad: int | None = None) -> Any:
    """A program with a scaler of this class, which clips, or of which one batch overflows."""

    def program(run: Run) -> None:
        scaler, model = run.scaler(kind), run.model(dtype=dtype)
        optimizer = run.adamw(model)
        for step, (x, y) in enumerate(run.batches(5, dtype)):
            optimizer.zero_grad()
            if step == bad:
                x[0], y[0] = 30000.0, -30000.0
            scaler.scale(F.mse_loss(model(x), y)).backward()
            if clip and (run.way == "torch" or kind is not halfstep.GradScaler):
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.1)
            elif clip:
                scaler.unscale_(optimizer)
                scaler.clip_grad_norm_(optimizer, 0.1)
            scaler.step(optimizer)
            scaler.update()
        run.log(scaler.get_scale())

    return program


SCALED = {
    "scaler_of_torch": scaled(torch.amp.GradScaler),
    "scaler_of_torch_clipped": scaled(torch.amp.GradScaler, clip=True),
    "scaler_of_ours": scaled(halfstep.GradScaler),
    "scaler_of_ours_in_fp16_that_overflows": scaled(halfstep.GradScaler, FP16, bad=2),
    "scaler_of_ours_clipped": scaled(halfstep.GradScaler, clip=True),
}


class Programs:
    """Each is a function of a run, and if it takes them, of a model and its optimizer (`started`)."""

    def clipped_by_the_optimizer(run):
        run.train(*run.start(**({} if run.way == "torch" else {"max_grad_norm": 1000.0})))

    def ema_swapped_in_for_evaluation(run, model, optimizer):
        shadow = {name: p.data.clone() for name, p in model.named_parameters()}
        for x, y in run.steps(model, optimizer):
            for name, p in model.named_parameters():
                shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
            backup = {name: p.data for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.data = shadow[name]
            with torch.no_grad():
                run.log(F.mse_loss(model(x), y))
            for name, p in model.named_parameters():
                p.data = backup[name]

    def unfrozen_layers_in_new_groups(run):
        """As lightning's BaseFinetuning."""
        model = run.model().requires_grad_(False)
        model[3].requires_grad_(True)
        optimizer = run.adamw(model, [p for p in model.parameters() if p.requires_grad])
        for step, (x, y) in enumerate(run.batches(6)):
            if step in (2, 4):
                layer = model[2 if step == 2 else 0]
                layer.requires_grad_(True)
                optimizer.add_param_group({"params": layer.parameters(), "lr": 0.001 * step})
            update(optimizer, F.mse_loss(model(x), y))

    def accumulation_with_an_odd_last_batch(run, model: Heads, optimizer):
        for step, (x, y) in enumerate(run.batches(5)):
            last = step % 2 == 1 or step == 4
            with run.no_sync(last):
                F.mse_loss(model(x)[step % 2], y).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()

    def hooks_after_accumulation_before_the_optimizer(run):
        model = run.model()
        hooked(lambda p: p.grad.clamp_(-0.02, 0.02))(model)
        run.train(model, run.adamw(model))

    def embeddings_with_their_own_optimizer(run):
        """Two optimizers of parts of one model, of which one is torch's, as Muon and AdamW are combined."""
        model = run.model(GPT)
        optimizer = run.adamw(model, model.blocks.parameters())
        rest = torch.optim.SGD([*model.embedding.parameters(), *model.norm.parameters()], lr=0.01, momentum=0.9)
        for x, y in run.tokens(4):
            model(x, y).backward()
            optimizer.step()
            rest.step()
            model.zero_grad()

    def td3_with_a_delayed_actor(run):
        """The loss of the actor goes through the critic, whose gradients its own next `zero_grad` discards."""
        actor, critic = run.model(lambda: nn.Linear(7, 2)), run.model(lambda: nn.Linear(9, 1))
        optimizer_a, optimizer_c = run.adamw(actor), run.adamw(critic)
        for step, (x, y) in enumerate(run.batches(6)):
            update(optimizer_c, F.mse_loss(critic(torch.cat([x, y[:, :2]], 1)), y[:, 2:3]))
            if step % 2:
                update(optimizer_a, -critic(torch.cat([x, actor(x)], 1)).mean())

    def norms_in_fp32(run):
        """The model is in 16 bits but for its norms."""
        model = run.model(lambda: nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 5)))
        model[1].float()
        optimizer = run.adamw(model)
        for x, y in run.batches(4):
            hidden = model[1](model[0](x).float()).to(run.dtype)
            update(optimizer, F.mse_loss(model[2](hidden), y))

    def compiled_training_step(run, model, optimizer):
        @torch.compile(backend="eager")
        def train(x: Tensor, y: Tensor) -> Tensor:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for x, y in run.batches(4):
            run.log(train(x, y).detach())

    def resumed_from_a_file(run, model, optimizer):
        file = io.BytesIO()
        for step, _ in enumerate(run.steps(model, optimizer)):
            if step == 1:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model = run.model()
        model.load_state_dict(saved["model"])
        optimizer = run.adamw(model)
        optimizer.load_state_dict(saved["optimizer"])
        run.train(model, optimizer, 3, first=4)

    def rolled_back_in_the_middle(run, model, optimizer):
        """A spike of the loss takes the run back to its last checkpoint, in the same objects."""
        for step, _ in enumerate(run.steps(model, optimizer, 6)):
            if step == 1:
                saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if step == 3:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])

    def closure_after_model_zero_grad(run, model, optimizer):
        for x, y in run.batches(4):

            def compute(x: Tensor = x, y: Tensor = y) -> float:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                return loss.item()

            model.zero_grad()
            optimizer.step(compute)

    def an_exception_in_a_backward(run, model: GPT, optimizer):
        """Batches that do not fit are skipped, as fairseq does."""
        for step, (x, y) in enumerate(run.tokens(5)):
            try:
                optimizer.zero_grad()
                FailsOnce.failing = step == 2
                model(x, y, lambda block, x: block(FailsOnce.apply(x))).backward()
            except torch.OutOfMemoryError:
                model.zero_grad()
                continue
            optimizer.step()

    def nanogpt(run):
        model = run.model(GPT)
        optimizer = run.adamw(model, by_dimension(model), betas=(0.9, 0.95))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for step in range(3):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
            for micro, (x, y) in enumerate(run.tokens(2)):
                with run.no_sync(last=micro == 1):
                    scaler.scale(model(x, y) / 2).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)

    def nanochat(run):
        """Two optimizers in a list, rates scaled from their first values, gradients set to None through the model."""
        model = run.model(GPT)
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        ids = set(map(id, matrices))
        others = [p for p in model.parameters() if id(p) not in ids]
        optimizers = [run.adamw(model, matrices, lr=0.02), run.adamw(model, others)]
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group in groups:
            group["initial_lr"] = group["lr"]
        for step, (x, y) in enumerate(run.tokens(4)):
            for group in groups:
                group["lr"] = group["initial_lr"] * (1 - step / 4)
            model(x, y).backward()
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)


# ------------------------------------------------------------------------------------------------------------------ all


def started(function: Callable[..., None]) -> Callable[[Run], None]:
    """A function of `run`, and of a model and its optimizer if it takes these, as a program."""
    if "model" not in inspect.signature(function).parameters:
        return function
    build = globals()[function.__annotations__.get("model", "mlp")]
    return lambda run: function(run, *run.start(build))


PROGRAMS: dict[str, Callable[[Run], None]] = {
    **{name: in_order(calls) for name, calls in ORDERS.items()},
    **LOOPS,
    **ACCUMULATING,
    **SCALED,
    **{name: started(function) for name, function in vars(Programs).items() if inspect.isfunction(function)},
}
