"""A hundred short training loops as people write them, for test_user_loops.py.

Each program is a function of a `Run`, which hands out models, batches and optimizers. Everything else in a program is
torch, and nothing in it knows which optimizer it drives: torch's AdamW, `halfstep.AdamW`, the same with steps in the
backward, or one of `OffloadedAdamW`. What a program writes to a log or averages is compared as well as what it trains.
"""

from __future__ import annotations

import copy
import io
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler, swa_utils
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import StepInBackward, step_in_backward

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
BUCKET_BYTES = 200  # a few tensors, so that there are several buckets

LAYOUTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "split": (BF16, {}),
    "split24, 8 bits": (BF16, {"master_weights": "split24", "state_dtype": "8bit", "rounding": "stochastic"}),
    "full": (BF16, {"master_weights": "full"}),
    "fp32": (FP32, {}),
}
# `in_backward` of the offloaded ones.
OFFLOADED: dict[str, Any] = {"offload copy": "copy", "offload step": "step", "offload None": None}


class Run:
    """What one run of a program uses, and what it leaves to be compared.

    Attributes:
        way: whose optimizer it is: ``"torch"``, ``"plain"``, ``"release"``, or a name in `OFFLOADED`.
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

    def model(self, kind: Callable[[], nn.Module] | None = None, dtype: torch.dtype | None = None) -> Any:
        """A model in the dtype of the layout, or in another, except where everything is fp32."""
        return (kind or mlp)().to(self._dtype(dtype))

    def start(self, kind: Callable[[], nn.Module] | None = None, **options: Any) -> tuple[Any, Any]:
        """A model, and the optimizer of all of its parameters."""
        model = self.model(kind)
        return model, self.adamw(model, **options)

    def backwards(
        self, model: nn.Module, optimizer: Any, count: int = 4, **data: Any
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Train; what is in the loop runs between each backward and its step."""
        tokens = data.pop("tokens", False)
        for x, y in self.tokens(count) if tokens else self.batches(count, **data):
            optimizer.zero_grad()
            (model(x, y) if tokens else F.mse_loss(model(x), y)).backward()
            yield x, y
            optimizer.step()

    def steps(self, model: nn.Module, optimizer: Any, count: int = 4, **data: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """Train; what is in the loop runs after each step."""
        for x, y in self.batches(count, **data):
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            yield x, y

    def train(self, model: nn.Module, optimizer: Any, count: int = 4, **data: Any) -> None:
        deque(self.backwards(model, optimizer, count, **data), maxlen=0)

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
        """The optimizer of the run, of the parameters of a model or of some."""
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
                optimizer = halfstep.AdamW(params, lr=lr, **options)
                if self.way == "release":
                    self._handles.append(step_in_backward(model, optimizer, bucket_bytes=BUCKET_BYTES))
        self.trains(optimizer, list(model.parameters()))
        return optimizer

    def trains(self, optimizer: Any, parameters: list[Tensor]) -> None:
        """Compare these parameters at the end, and require that some of them move."""
        self.optimizers.append((optimizer, parameters, [p.detach().clone() for p in parameters]))

    def scaler(self, kind: Any = halfstep.GradScaler) -> Any:
        return (torch.amp.GradScaler if self.way == "torch" else kind)("cpu", init_scale=2.0**8, growth_interval=2)

    def no_sync(self) -> AbstractContextManager[None]:
        """What loops enter for all micro-batches but the last; `accumulate` of steps in the backward."""
        return self._handles[-1].accumulate() if self._handles else nullcontext()

    def log(self, *values: Any) -> None:
        self.logged += [float(value) for value in values]

    def _dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        return self.dtype if dtype is None or self.dtype is FP32 else dtype


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


def differences(results: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of what is missing, or has other bits."""

    def same(a: Tensor, b: Tensor) -> bool:
        return (a.dtype, a.shape) == (b.dtype, b.shape) and a.numpy(force=True).tobytes() == b.numpy().tobytes()

    return sorted(
        name
        for name in results.keys() | expected.keys()
        if name not in results or name not in expected or not same(_bits(results[name]), _bits(expected[name]))
    )


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().reshape(-1).view(torch.uint8)


# --------------------------------------------------------------------------------------------------------------- models


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.LayerNorm(13), nn.Linear(13, 5))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(10), nn.Linear(10, 14), nn.Linear(14, 10)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return y


class GPT(nn.Module):
    """An embedding that is also the head, and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 10)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(10)
        self.head = nn.Linear(10, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 7)),
        nn.Conv1d(1, 3, 3, bias=False),
        nn.BatchNorm1d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(15, 5),
    )


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 13), nn.Dropout(0.3), nn.ReLU(), nn.Linear(13, 5))


class Heads(nn.Module):
    """A trunk and two heads, of which a batch may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(7, 9), nn.Linear(9, 5), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.first(hidden), self.second(hidden)


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.actor, self.critic = nn.Linear(7, 9), nn.Linear(9, 5), nn.Linear(9, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(7, 5).requires_grad_(False)
        self.a, self.b = nn.Linear(7, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x)) * 2
        return y


class FailsOnce(torch.autograd.Function):
    """The identity, whose backward fails at the first call, as an allocation does."""

    failing = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        if FailsOnce.failing:
            FailsOnce.failing = False
            raise torch.OutOfMemoryError("out of memory")
        return grad


def grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


# ------------------------------------------------------------------------------------------- where gradients are zeroed


def tutorial(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        run.log(loss.item())


def zero_grad_after_the_step(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def zero_grad_between_forward_and_backward(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def model_zero_grad_first(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def model_zero_grad_after_the_step(run: Run) -> None:
    """As the Trainer of transformers."""
    model, optimizer = run.start()
    for x, y in run.batches(4):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        model.zero_grad()


def zero_grad_to_zeros(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def model_zero_grad_to_zeros(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        model.zero_grad(set_to_none=False)


def zeros_for_a_head_that_a_batch_does_not_use(run: Run) -> None:
    model, optimizer = run.start(Heads)
    for step, (x, y) in enumerate(run.batches(5)):
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(x)[step % 2], y).backward()
        optimizer.step()  # the other head has a gradient of zeros, and is decayed


def a_head_that_a_batch_does_not_use(run: Run) -> None:
    model, optimizer = run.start(Heads)
    for step, (x, y) in enumerate(run.batches(5)):
        optimizer.zero_grad()
        F.mse_loss(model(x)[step % 2], y).backward()
        optimizer.step()


def gradients_set_to_none_by_hand(run: Run) -> None:
    """As apex advised, and nanoGPT's early versions."""
    model, optimizer = run.start()
    for x, y in run.batches(4):
        for p in model.parameters():
            p.grad = None
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def gradients_zeroed_by_hand(run: Run) -> None:
    """As `zero_grad` of old versions of torch."""
    model, optimizer = run.start()
    for x, y in run.batches(4):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()


def data_of_gradients_zeroed(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        for p in model.parameters():
            p.grad.data.zero_()


def zeroed_twice(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        optimizer.zero_grad()
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def one_module_zeroed_at_a_time(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        for module in model:
            module.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


# ------------------------------------------------------------------------------------------------- clipping by the loop


def clip_grad_norm(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        run.log(clip_grad_norm_(model.parameters(), 0.1))


def clip_grad_norm_and_model_zero_grad(run: Run) -> None:
    """transformers' inner loop."""
    model, optimizer = run.start(GPT)
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model.zero_grad()
    for x, y in run.tokens(4):
        loss = model(x, y)
        loss.backward()
        run.log(loss.detach(), clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        scheduler.step()
        model.zero_grad()


def clip_grad_norm_of_groups(run: Run) -> None:
    """Clips what the optimizer holds, as lightning and PPO of stable-baselines do."""
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        run.log(clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1))


def clip_infinity_norm_of_one_module(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        run.log(clip_grad_norm_(model[0].parameters(), 0.01, norm_type=math.inf, foreach=False))


def clip_in_two_calls(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
        run.log(norm)


def clip_grad_value(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()


def clip_each_gradient_by_hand(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        for p in model.parameters():
            p.grad.data.clamp_(-0.02, 0.02)


def clip_the_norm_by_hand(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        total = math.sqrt(sum(p.grad.data.norm(2).item() ** 2 for p in model.parameters() if p.grad is not None))
        run.log(total)
        if total > 0.1:
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.data.mul_(0.1 / (total + 1e-6))


def clip_with_foreach(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        norm = torch.stack(torch._foreach_norm(grads(model))).norm()
        torch._foreach_mul_(grads(model), (0.1 / (norm + 1e-6)).clamp(max=1).item())
        run.log(norm)


def adaptive_clipping(run: Run) -> None:
    """timm's, of each unit to the norm of its weight (Brock et al., 2021)."""
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        for p in model.parameters():
            limit = p.detach().norm().clamp(min=1e-3) * 0.01
            norm = p.grad.detach().norm()
            p.grad.detach().copy_(torch.where(norm < limit, p.grad, p.grad * (limit / norm.clamp(min=1e-6))))


def clipped_by_the_optimizer(run: Run) -> None:
    model, optimizer = run.start(**({} if run.way == "torch" else {"max_grad_norm": 1000.0}))
    run.train(model, optimizer)


# ----------------------------------------------------------------------------------- gradients that are read or written


def norm_of_gradients_in_the_log(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        run.log(*(p.grad.norm() for p in model.parameters() if p.grad is not None))


def norm_of_gradients_in_the_log_after_the_step(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.steps(model, optimizer):
        run.log(sum(p.grad.float().pow(2).sum() for p in model.parameters() if p.grad is not None) ** 0.5)


def histogram_of_gradients(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer, 3):
        for p in model.parameters():
            if p.requires_grad and p.grad is not None:
                run.log(*torch.histc(p.grad.detach().float().cpu(), 4))


def flat_vector_of_gradients(run: Run) -> None:
    model, optimizer = run.start()
    last = None
    for _ in run.backwards(model, optimizer):
        flat = torch.cat([p.grad.flatten() for p in model.parameters()])
        if last is not None:
            run.log(F.cosine_similarity(flat.float(), last.float(), dim=0))
        last = flat


def gradients_as_numpy(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        run.log(max(abs(p.grad.detach().float().cpu().numpy()).max() for p in model.parameters()))


def centralized_gradients(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        for p in model.parameters():
            if p.dim() > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))


def noise_on_gradients(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        for p in model.parameters():
            p.grad += 0.01 * torch.randn_like(p.grad)


def gradients_replaced_by_others(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        for p in model.parameters():
            p.grad = p.grad * 0.5 + 0.01 * p.detach()


def decay_added_to_gradients(run: Run) -> None:
    model, optimizer = run.start(weight_decay=0.0)
    for _ in run.backwards(model, optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.grad.add_(p, alpha=0.1)


def a_row_without_gradient(run: Run) -> None:
    model, optimizer = run.start(GPT)
    for _ in run.backwards(model, optimizer, tokens=True):
        model.embedding.weight.grad[3] = 0


def masked_gradients(run: Run) -> None:
    """A pruned layer stays pruned."""
    model, optimizer = run.start()
    mask = torch.rand_like(model[0].weight) > 0.5
    model[0].weight.data.mul_(mask)
    for x, y in run.batches(4):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        model[0].weight.grad.mul_(mask)
        optimizer.step()
        model[0].weight.data.mul_(mask)


def gradients_of_one_layer_dropped(run: Run) -> None:
    """The last layer is not trained in the first steps (DINO)."""
    model, optimizer = run.start()
    for step, _ in enumerate(run.backwards(model, optimizer)):
        if step < 2:
            for name, p in model.named_parameters():
                if name.startswith("3."):
                    p.grad = None


def nan_gradients_set_to_zero(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(4)):
        optimizer.zero_grad()
        if step == 2:
            x[0, 0] = math.nan
        F.mse_loss(model(x), y).backward()
        for p in model.parameters():
            if p.grad is not None:
                torch.nan_to_num(p.grad, nan=0, posinf=1e5, neginf=-1e5, out=p.grad)
        optimizer.step()


def a_step_skipped_for_nan_gradients(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(5)):
        if step == 2:
            x[0, 0] = math.nan
        F.mse_loss(model(x), y).backward()
        if any(not torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None):
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


def sharpness_aware(run: Run) -> None:
    """SAM in two backwards, written in the loop."""
    model, optimizer = run.start()
    for x, y in run.backwards(model, optimizer):
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = []
        with torch.no_grad():
            for p in model.parameters():
                moved.append(p.grad * (0.05 / (norm + 1e-12)))
                p.add_(moved[-1])
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, by in zip(model.parameters(), moved, strict=True):
                p.sub_(by)


def two_steps_with_the_same_gradients(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        optimizer.step()


def averaged_by_hand(run: Run) -> None:
    """As loops without DistributedDataParallel average over ranks, of which there is one."""
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= 2


def slow_gradients(run: Run) -> None:
    """Grokfast: an average of gradients is added to each (Lee et al., 2024)."""
    model, optimizer = run.start()
    average: dict[str, Tensor] = {}
    for _ in run.backwards(model, optimizer):
        for name, p in model.named_parameters():
            if p.requires_grad:
                average.setdefault(name, p.grad.data.detach().clone())
                average[name] = average[name] * 0.9 + p.grad.data.detach() * 0.1
                p.grad.data = p.grad.data + average[name] * 2


# ------------------------------------------------------------------------------------------------------ weights written


def weights_clamped(run: Run) -> None:
    """The critic of the first Wasserstein GAN."""
    model, optimizer = run.start()
    for _ in run.steps(model, optimizer):
        for p in model.parameters():
            p.data.clamp_(-0.2, 0.2)


def decay_by_hand_after_the_step(run: Run) -> None:
    model, optimizer = run.start(weight_decay=0.0)
    for _ in run.steps(model, optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)


def decay_by_hand_between_backward_and_step(run: Run) -> None:
    model, optimizer = run.start(weight_decay=0.0)
    for _ in run.backwards(model, optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.99)


def decay_with_foreach_on_data(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.steps(model, optimizer):
        torch._foreach_mul_([p.data for p in model.parameters()], 0.99)


def weights_written_by_numpy(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.steps(model, optimizer):
        for p in model.parameters():
            p.data.view(torch.uint8).numpy().reshape(-1)[:4] = 0


def rows_of_unit_norm(run: Run) -> None:
    """As nGPT and dictionaries of sparse autoencoders."""
    model, optimizer = run.start()
    for _ in run.steps(model, optimizer):
        model[0].weight.data = F.normalize(model[0].weight.data, dim=1)


def weights_set_by_copies_of_data(run: Run) -> None:
    model, optimizer = run.start()
    best = [p.data.clone() for p in model.parameters()]
    for step, _ in enumerate(run.steps(model, optimizer)):
        if step == 1:  # back to the best
            for p, value in zip(model.parameters(), best, strict=True):
                p.data.copy_(value)


def a_layer_initialized_again(run: Run) -> None:
    model, optimizer = run.start()
    for step, _ in enumerate(run.steps(model, optimizer, 5)):
        if step == 2:
            nn.init.normal_(model[3].weight, std=0.02)
            model[0].reset_parameters()


def noise_on_weights(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.steps(model, optimizer):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.01)


def weights_from_a_vector(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.steps(model, optimizer):
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 0.99, model.parameters())


def decay_through_groups(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.steps(model, optimizer):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.mul_(1 - group["lr"])


# -------------------------------------------------------------------------------------------------- averages of weights


def ema_that_is_evaluated(run: Run) -> None:
    model = run.model()
    ema = copy.deepcopy(model).requires_grad_(False)
    run.averages.append(ema)
    optimizer = run.adamw(model)
    for x, y in run.steps(model, optimizer):
        with torch.no_grad():
            for average, p in zip(ema.parameters(), model.parameters(), strict=True):
                average.mul_(0.9).add_(p, alpha=0.1)
        run.log(F.mse_loss(ema(x), y))


def ema_swapped_in_for_evaluation(run: Run) -> None:
    model, optimizer = run.start()
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


def ema_copied_back(run: Run) -> None:
    model, optimizer = run.start()
    ema = [p.detach().clone() for p in model.parameters()]
    for step, (x, y) in enumerate(run.batches(5)):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        torch._foreach_lerp_(ema, [p.data for p in model.parameters()], 0.1)
        if step % 2:
            for p, average in zip(model.parameters(), ema, strict=True):
                p.data.copy_(average)


def lookahead(run: Run) -> None:
    model, optimizer = run.start()
    slow = [p.detach().clone() for p in model.parameters()]
    for step, _ in enumerate(run.steps(model, optimizer, 6)):
        if step % 3 == 2:
            for p, anchor in zip(model.parameters(), slow, strict=True):
                anchor += 0.5 * (p.data - anchor)
                p.data.copy_(anchor)


class Lookahead:
    """The wrapper that is copied from project to project: slow weights of what the groups of the optimizer hold."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.steps = optimizer, 0
        self.state: dict[Any, dict[str, Any]] = defaultdict(dict)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        self.optimizer.step()
        self.steps += 1
        for group in self.optimizer.param_groups:
            for fast in group["params"]:
                state = self.state[fast]
                if "slow" not in state:
                    state["slow"] = fast.data.clone()
                if self.steps % 2 == 0:
                    state["slow"].add_(fast.data - state["slow"], alpha=0.5)
                    fast.data.copy_(state["slow"])


def lookahead_around_the_optimizer(run: Run) -> None:
    model = run.model()
    optimizer = Lookahead(run.adamw(model))
    run.train(model, optimizer, 6)


def stochastic_weight_averaging(run: Run) -> None:
    model = run.model(convnet)
    averaged = swa_utils.AveragedModel(model)
    run.averages.append(averaged)
    optimizer = run.adamw(model)
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.005, anneal_epochs=2)
    for step, _ in enumerate(run.steps(model, optimizer, 6)):
        if step > 1:
            averaged.update_parameters(model)
            scheduler.step()
    swa_utils.update_bn([x for x, _ in run.batches(2)], averaged)


def ema_of_torch(run: Run) -> None:
    model = run.model()
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
    run.averages.append(averaged)
    optimizer = run.adamw(model)
    for _ in run.steps(model, optimizer):
        averaged.update_parameters(model)


def switch_ema(run: Run) -> None:
    """The average becomes the model at the end of each epoch (Li et al., 2024)."""
    model = run.model()
    averaged = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = run.adamw(model)
    for _ in range(2):
        for _ in run.steps(model, optimizer, 3):
            averaged.update_parameters(model)
        model.load_state_dict(averaged.module.state_dict())


# ------------------------------------------------------------------------------------------ parameters that come and go


def gradual_unfreezing(run: Run) -> None:
    """ULMFiT: one more layer from the top at each epoch, all of them in the optimizer from the beginning."""
    model = run.model().requires_grad_(False)
    optimizer = run.adamw(model)
    layers = [module for module in reversed(model) if list(module.parameters())]
    for layer in layers:
        layer.requires_grad_(True)
        run.train(model, optimizer, 2)


def unfrozen_layers_in_new_groups(run: Run) -> None:
    """As lightning's BaseFinetuning."""
    model = run.model().requires_grad_(False)
    model[3].requires_grad_(True)
    optimizer = run.adamw(model, [p for p in model.parameters() if p.requires_grad])
    for step, (x, y) in enumerate(run.batches(6)):
        if step in (2, 4):
            layer = model[2 if step == 2 else 0]
            layer.requires_grad_(True)
            optimizer.add_param_group({"params": layer.parameters(), "lr": 0.001 * step})
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def backbone_frozen_later(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(5)):
        if step == 2:
            model[0].requires_grad_(False)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def frozen_and_unfrozen_in_turn(run: Run) -> None:
    model, optimizer = run.start(Heads)
    for step, (x, y) in enumerate(run.batches(6)):
        model.first.requires_grad_(step % 2 == 0)
        optimizer.zero_grad()
        sum(F.mse_loss(out, y) for out in model(x)).backward()
        optimizer.step()


def lora(run: Run) -> None:
    model = run.model(LoRA)
    optimizer = run.adamw(model, filter(lambda p: p.requires_grad, model.parameters()))
    run.train(model, optimizer)


def lora_merged_and_begun_again(run: Run) -> None:
    """ReLoRA (Lialin et al., 2023)."""
    model, optimizer = run.start(LoRA)
    for step, _ in enumerate(run.steps(model, optimizer, 5)):
        if step == 2:
            model.base.weight.data += 2 * model.b.weight.data @ model.a.weight.data
            nn.init.kaiming_uniform_(model.a.weight, a=math.sqrt(5))
            nn.init.zeros_(model.b.weight)


def decay_of_matrices_only(run: Run) -> None:
    model = run.model(GPT)
    params = dict(model.named_parameters()).values()
    optimizer = run.adamw(
        model,
        [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0, "lr": 0.02},
        ],
    )
    run.train(model, optimizer, tokens=True)


def a_learned_parameter_of_the_loss(run: Run) -> None:
    """Uncertainty weights of two tasks (Kendall et al., 2018)."""
    model = run.model(Heads)
    model.register_parameter("log_variances", nn.Parameter(torch.zeros(2, dtype=model.trunk.weight.dtype)))
    optimizer = run.adamw(model)
    for x, y in run.batches(4):
        optimizer.zero_grad()
        losses = torch.stack([F.mse_loss(out, y) for out in model(x)])
        (losses * torch.exp(-model.log_variances) + model.log_variances).sum().backward()
        optimizer.step()


def a_new_head_and_a_new_optimizer(run: Run) -> None:
    model, optimizer = run.start()
    run.train(model, optimizer, 3)
    model = copy.deepcopy(model)
    model[3] = nn.Linear(13, 2).to(model[0].weight.dtype)
    optimizer = run.adamw(model, lr=0.001)
    for x, y in run.batches(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), y[:, :2]).backward()
        optimizer.step()


# --------------------------------------------------------------------------------------------------------- accumulation


def accumulation(run: Run) -> None:
    model, optimizer = run.start()
    optimizer.zero_grad()
    for step, (x, y) in enumerate(run.batches(6)):
        (F.mse_loss(model(x), y) / 3).backward()
        if (step + 1) % 3 == 0:
            optimizer.step()
            optimizer.zero_grad()


def accumulation_and_model_zero_grad(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(6)):
        (F.mse_loss(model(x), y) / 2).backward()
        if step % 2 == 1:
            optimizer.step()
            model.zero_grad()


def accumulation_without_sync(run: Run) -> None:
    """nanoGPT's, and Accelerate's."""
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(6)):
        with nullcontext() if step % 2 else run.no_sync():
            (F.mse_loss(model(x), y) / 2).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def accumulation_without_sync_clipped(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(6)):
        with nullcontext() if step % 3 == 2 else run.no_sync():
            F.mse_loss(model(x), y).backward()
        if step % 3 == 2:
            run.log(clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            model.zero_grad()


def accumulation_divided_at_the_end(run: Run) -> None:
    """The gradients are divided by the number of tokens, which is known after the last micro-batch."""
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(6)):
        with nullcontext() if step % 2 else run.no_sync():
            F.mse_loss(model(x), y, reduction="sum").backward()
        if step % 2:
            for p in model.parameters():
                p.grad.div_(60)
            optimizer.step()
            optimizer.zero_grad()


def accumulation_with_an_odd_last_batch(run: Run) -> None:
    model, optimizer = run.start(Heads)
    for step, (x, y) in enumerate(run.batches(5)):
        last = step % 2 == 1 or step == 4
        with nullcontext() if last else run.no_sync():
            F.mse_loss(model(x)[step % 2], y).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def accumulated_gradients_discarded(run: Run) -> None:
    """A batch without labels in the middle of an accumulation throws away what there is."""
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(6)):
        if step == 3:
            model.zero_grad()
            continue
        with nullcontext() if step % 2 else run.no_sync():
            F.mse_loss(model(x), y).backward()
        if step % 2:
            optimizer.step()
            model.zero_grad()


def two_backwards_of_one_graph(run: Run) -> None:
    model, optimizer = run.start(Heads)
    for x, y in run.batches(4):
        optimizer.zero_grad()
        first, second = model(x)
        with run.no_sync():
            F.mse_loss(first, y).backward(retain_graph=True)
        F.l1_loss(second, y).backward()
        optimizer.step()


def two_losses_in_two_backwards(run: Run) -> None:
    model, optimizer = run.start(Heads)
    for x, y in run.batches(4):
        optimizer.zero_grad()
        F.mse_loss(model(x)[0], y).backward()
        F.l1_loss(model(x)[1], y).backward()
        optimizer.step()


def two_losses_in_one_backward(run: Run) -> None:
    model, optimizer = run.start(Heads)
    for x, y in run.batches(4):
        optimizer.zero_grad()
        first, second = model(x)
        torch.autograd.backward([F.mse_loss(first, y), F.l1_loss(second, y)])
        optimizer.step()


# ----------------------------------------------------------------------------------------------------------- schedulers


def warmup_and_cosine(run: Run) -> None:
    model, optimizer = run.start(lr=0.02)
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 4)
    scheduler = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [2])
    for _ in run.steps(model, optimizer, 6):
        scheduler.step()


def one_cycle(run: Run) -> None:
    model, optimizer = run.start()
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.03, total_steps=6)  # and the first beta
    for _ in run.steps(model, optimizer, 6):
        scheduler.step()


def reduced_on_plateau(run: Run) -> None:
    model, optimizer = run.start()
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
    for x, y in run.batches(6):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step(loss.item())
    run.log(optimizer.param_groups[0]["lr"])


def learning_rate_set_at_the_top(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(4)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def learning_rate_set_between_backward_and_step(run: Run) -> None:
    """build-nanogpt."""
    model, optimizer = run.start()
    for step, _ in enumerate(run.backwards(model, optimizer)):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)


def learning_rate_as_a_tensor(run: Run) -> None:
    model, optimizer = run.start(lr=torch.tensor(0.01))
    scheduler = lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in run.steps(model, optimizer, 5):
        scheduler.step()


def decay_that_is_scheduled(run: Run) -> None:
    """DINO's loop sets rate and decay at the top."""
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(4)):
        for group in optimizer.param_groups:
            group["lr"], group["weight_decay"], group["betas"] = 0.01 * 0.8**step, 0.1 * step, (0.9 - 0.1 * step, 0.99)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


# ---------------------------------------------------------------------------------------------------------------- hooks


def hooks_on_tensors(run: Run) -> None:
    model, optimizer = run.start()
    for p in model.parameters():
        p.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
    run.train(model, optimizer)


def hooks_on_modules(run: Run) -> None:
    model, optimizer = run.start()
    model[0].register_forward_hook(lambda module, args, out: out * 1.5)
    model[3].register_full_backward_hook(lambda module, grads, _: run.log(grads[0].norm()))
    run.train(model, optimizer)


def hooks_after_accumulation_before_the_optimizer(run: Run) -> None:
    model = run.model()

    def clip(p: Tensor) -> None:
        p.grad.clamp_(-0.02, 0.02)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clip)
    optimizer = run.adamw(model)
    run.train(model, optimizer)


def hooks_after_accumulation_after_the_optimizer(run: Run) -> None:
    model, optimizer = run.start()

    def change(p: Tensor) -> None:
        p.grad.mul_(0.5).add_(0.01)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(change)
    run.train(model, optimizer)


def hooks_that_add_decay_to_gradients(run: Run) -> None:
    model, optimizer = run.start()

    def decay(p: Tensor) -> None:
        p.grad.add_(0.1 * p.detach())

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(decay)
    run.train(model, optimizer)


def hooks_on_the_optimizer(run: Run) -> None:
    model, optimizer = run.start()
    optimizer.register_step_post_hook(lambda *_: [p.data.mul_(0.99) for p in model.parameters()] and None)
    run.train(model, optimizer)


def gradients_of_activations(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        optimizer.zero_grad()
        hidden = model[:2](x)
        hidden.retain_grad()
        F.mse_loss(model[2:](hidden), y).backward()
        run.log(hidden.grad.norm())
        optimizer.step()


# ------------------------------------------------------------------------------------------------------ kinds of models


def tied_weights(run: Run) -> None:
    model, optimizer = run.start(GPT)
    for x, y in run.tokens(4):
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        run.log(loss.item())


def batch_norm_and_evaluation(run: Run) -> None:
    model = run.model(convnet)
    run.averages.append(model)  # its statistics
    optimizer = run.adamw(model)
    for x, y in run.batches(4):
        model.train()
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.inference_mode():
            run.log(F.mse_loss(model(x), y))


def dropout_layers(run: Run) -> None:
    model, optimizer = run.start(dropout)
    run.train(model, optimizer)


def parametrized_weight(run: Run) -> None:
    model = run.model(lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(7, 5))))
    optimizer = run.adamw(model)
    run.train(model, optimizer)


def spectral_norm(run: Run) -> None:
    # torch's power iteration has no bf16, so the layer is in fp32 in each layout.
    model = run.model(lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(7, 5))), FP32)
    optimizer = run.adamw(model)
    for x, y in run.batches(4, FP32):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def pruned_layer(run: Run) -> None:
    from torch.nn.utils import prune

    model = run.model()
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    optimizer = run.adamw(model)
    for step, _ in enumerate(run.steps(model, optimizer)):
        if step == 1:
            model[0].weight_orig.data.mul_(model[0].weight_mask)


def recurrent_network(run: Run) -> None:
    # Unrolled by hand: a weight is used several times in a backward.
    cell = run.model(lambda: nn.ModuleDict({"cell": nn.GRUCell(7, 5)}))
    optimizer = run.adamw(cell)
    for x, y in run.batches(3):
        optimizer.zero_grad()
        hidden = torch.zeros_like(y)
        for _ in range(3):
            hidden = cell["cell"](x, hidden)
        F.mse_loss(hidden, y).backward()
        optimizer.step()


def truncated_backpropagation(run: Run) -> None:
    cell = run.model(lambda: nn.ModuleDict({"cell": nn.GRUCell(7, 5)}))
    optimizer = run.adamw(cell)
    hidden = torch.zeros(6, 5, dtype=cell["cell"].weight_ih.dtype)
    for x, y in run.batches(4):
        hidden = cell["cell"](x, hidden.detach())
        loss = F.mse_loss(hidden, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def checkpointed_blocks(run: Run) -> None:
    model, optimizer = run.start(GPT)
    for x, y in run.tokens(4):
        optimizer.zero_grad()
        hidden = model.embedding(x)
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        F.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


def reentrant_checkpointed_blocks(run: Run) -> None:
    model, optimizer = run.start(GPT)
    for x, y in run.tokens(4):
        optimizer.zero_grad()
        hidden = model.embedding(x)
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        F.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


def reentrant_checkpoints_that_share_a_block(run: Run) -> None:
    model = run.model(GPT)
    model.blocks[1] = model.blocks[0]
    optimizer = run.adamw(model)
    for x, y in run.tokens(4):
        optimizer.zero_grad()
        hidden = model.embedding(x)
        for block in model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=True)
        F.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1), y.flatten()).backward()
        optimizer.step()


def channels_last(run: Run) -> None:
    model = run.model(lambda: nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten(), nn.Linear(90, 5)))
    model = model.to(memory_format=torch.channels_last)
    optimizer = run.adamw(model)
    for x, y in run.batches(3):
        optimizer.zero_grad()
        image = (x[:, None, :6, None] * x[:, None, None]).to(memory_format=torch.channels_last)
        F.mse_loss(model(image), y).backward()
        optimizer.step()


# --------------------------------------------------------------------------------------------------- several optimizers


def players() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(3, 9), nn.Tanh(), nn.Linear(9, 7))
    return generator, nn.Sequential(nn.Linear(7, 9), nn.LeakyReLU(0.2), nn.Linear(9, 1))


def gan(run: Run) -> None:
    """DCGAN's: the discriminator is not frozen, and the backward of the generator adds to its gradients."""
    g, d = (player.to(run.dtype) for player in players())
    optimizer_g, optimizer_d = run.adamw(g, betas=(0.5, 0.99)), run.adamw(d, betas=(0.5, 0.99))
    for real, _ in run.batches(4):
        fake = g(torch.randn(6, 3).to(run.dtype))
        d.zero_grad()
        F.softplus(-d(real)).mean().backward()
        F.softplus(d(fake.detach())).mean().backward()
        optimizer_d.step()
        g.zero_grad()
        F.softplus(-d(fake)).mean().backward()
        optimizer_g.step()


def gan_in_one_backward_each(run: Run) -> None:
    g, d = (player.to(run.dtype) for player in players())
    optimizer_g, optimizer_d = run.adamw(g), run.adamw(d)
    for real, _ in run.batches(4):
        fake = g(torch.randn(6, 3).to(run.dtype))
        optimizer_g.zero_grad()
        F.softplus(-d(fake)).mean().backward()
        optimizer_g.step()
        optimizer_d.zero_grad()
        (F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()).backward()
        optimizer_d.step()


def gan_with_a_frozen_discriminator(run: Run) -> None:
    """pix2pix and CycleGAN: `set_requires_grad`."""
    g, d = (player.to(run.dtype) for player in players())
    optimizer_g, optimizer_d = run.adamw(g), run.adamw(d)
    for real, _ in run.batches(4):
        fake = g(torch.randn(6, 3).to(run.dtype))
        d.requires_grad_(True)
        optimizer_d.zero_grad()
        ((F.softplus(-d(real)).mean() + F.softplus(d(fake.detach())).mean()) / 2).backward()
        optimizer_d.step()
        d.requires_grad_(False)
        optimizer_g.zero_grad()
        F.softplus(-d(fake)).mean().backward()
        optimizer_g.step()


def wasserstein_gan_with_gradient_penalty(run: Run) -> None:
    g, d = (player.to(run.dtype) for player in players())
    optimizer_g, optimizer_d = run.adamw(g), run.adamw(d)
    for step, (real, _) in enumerate(run.batches(6)):
        d.requires_grad_(step % 3 < 2)
        if step % 3 < 2:
            fake = g(torch.randn(6, 3).to(run.dtype)).detach()
            middle = torch.lerp(real, fake, torch.rand(6, 1).to(run.dtype)).requires_grad_(True)
            (slope,) = torch.autograd.grad(d(middle).sum(), middle, create_graph=True)
            penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
            optimizer_d.zero_grad()
            (d(fake).mean() - d(real).mean() + 10 * penalty).backward()
            optimizer_d.step()
        else:
            optimizer_g.zero_grad()
            (-d(g(torch.randn(6, 3).to(run.dtype))).mean()).backward()
            optimizer_g.step()


def autoencoder_with_an_optimizer_per_half(run: Run) -> None:
    encoder, decoder = run.model(lambda: nn.Linear(7, 3)), run.model(lambda: nn.Linear(3, 7))
    optimizers = [run.adamw(encoder), run.adamw(decoder, lr=0.02)]
    for x, _ in run.batches(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.mse_loss(decoder(torch.tanh(encoder(x))), x).backward()
        for optimizer in optimizers:
            optimizer.step()


def embeddings_with_their_own_optimizer(run: Run) -> None:
    """Two optimizers of parts of one model, of which one is torch's, as Muon and AdamW are combined."""
    model = run.model(GPT)
    optimizer = run.adamw(model, model.blocks.parameters())
    rest = torch.optim.SGD([*model.embedding.parameters(), *model.norm.parameters()], lr=0.01, momentum=0.9)
    for x, y in run.tokens(4):
        model(x, y).backward()
        optimizer.step()
        rest.step()
        model.zero_grad()


# -------------------------------------------------------------------------------------------------------- reinforcement


def ppo(run: Run) -> None:
    """cleanrl's: several epochs of shuffled minibatches, clipped."""
    agent = run.model(ActorCritic)
    optimizer = run.adamw(agent, eps=1e-5)
    for update, (x, _) in enumerate(run.batches(2)):
        optimizer.param_groups[0]["lr"] = (1 - update / 2) * 0.01
        with torch.no_grad():
            logits, values = agent(x)
            actions = logits.argmax(1)
            old = logits.log_softmax(1).gather(1, actions[:, None]).squeeze(1)
            returns = values + x.sum(1)
        for _ in range(2):
            for rows in torch.randperm(6).split(3):
                logits, values = agent(x[rows])
                new = logits.log_softmax(1).gather(1, actions[rows, None]).squeeze(1)
                ratio, advantage = (new - old[rows]).exp(), x[rows].sum(1)
                policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
                entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()
                loss = policy - 0.01 * entropy + 0.5 * ((values - returns[rows]) ** 2).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()


def reinforce(run: Run) -> None:
    policy = run.model()
    optimizer = run.adamw(policy)
    for x, _ in run.batches(4):
        log_probs = policy(x).log_softmax(1)
        losses = [-log_probs[row, row % 5] * x[row].sum() for row in range(6)]
        optimizer.zero_grad()
        torch.stack(losses).sum().backward()
        optimizer.step()


def dqn_with_a_target_network(run: Run) -> None:
    q = run.model()
    target = copy.deepcopy(q)
    run.averages.append(target)
    optimizer = run.adamw(q)
    for step, (x, y) in enumerate(run.batches(6)):
        with torch.no_grad():
            best = target(x).max(dim=1).values * 0.9 + y[:, 0]
        optimizer.zero_grad()
        F.smooth_l1_loss(q(x)[:, 0], best).backward()
        optimizer.step()
        if step % 2:
            for slow, p in zip(target.parameters(), q.parameters(), strict=True):
                slow.data.copy_(0.3 * p.data + 0.7 * slow.data)


def td3_with_a_delayed_actor(run: Run) -> None:
    """The loss of the actor goes through the critic, whose gradients its own next `zero_grad` discards."""
    actor, critic = run.model(lambda: nn.Linear(7, 2)), run.model(lambda: nn.Linear(9, 1))
    optimizer_a, optimizer_c = run.adamw(actor), run.adamw(critic)
    for step, (x, y) in enumerate(run.batches(6)):
        optimizer_c.zero_grad()
        F.mse_loss(critic(torch.cat([x, y[:, :2]], 1)), y[:, 2:3]).backward()
        optimizer_c.step()
        if step % 2:
            optimizer_a.zero_grad()
            (-critic(torch.cat([x, actor(x)], 1)).mean()).backward()
            optimizer_a.step()


def moments_set_to_zero(run: Run) -> None:
    """The optimizer forgets its moments when the task changes."""
    model, optimizer = run.start()
    for step, _ in enumerate(run.steps(model, optimizer, 5)):
        if step == 2:
            optimizer.state = defaultdict(dict)


# ------------------------------------------------------------------------------------------------------------ precision


def _scaled(run: Run, scaler: Any, dtype: torch.dtype | None, clip: bool = False, bad: int | None = None) -> None:
    model = run.model(dtype=dtype)
    optimizer = run.adamw(model)
    for step, (x, y) in enumerate(run.batches(5, dtype)):
        optimizer.zero_grad()
        if step == bad:
            x[0] = 30000.0
            y[0] = -30000.0
        scaler.scale(F.mse_loss(model(x), y)).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
    run.log(scaler.get_scale())


def scaler_of_torch(run: Run) -> None:
    _scaled(run, run.scaler(torch.amp.GradScaler), None)


def scaler_of_torch_clipped(run: Run) -> None:
    _scaled(run, run.scaler(torch.amp.GradScaler), None, clip=True)


def scaler_of_ours(run: Run) -> None:
    _scaled(run, run.scaler(), None)


def scaler_of_ours_in_fp16_that_overflows(run: Run) -> None:
    _scaled(run, run.scaler(), FP16, bad=2)


def scaler_of_ours_clipped(run: Run) -> None:
    model, optimizer = run.start()
    scaler = run.scaler()
    for x, y in run.batches(4):
        scaler.scale(F.mse_loss(model(x), y)).backward()
        scaler.unscale_(optimizer)
        if run.way == "torch":
            clip_grad_norm_(model.parameters(), 0.1)
        else:
            scaler.clip_grad_norm_(optimizer, 0.1)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()


class NativeScaler:
    """timm's, which clips between unscaling and the step."""

    def __init__(self, scaler: Any) -> None:
        self._scaler = scaler

    def __call__(self, loss: Tensor, optimizer: Any, parameters: Iterable[Tensor], clip: float, step: bool) -> None:
        self._scaler.scale(loss).backward()
        if step:
            self._scaler.unscale_(optimizer)
            clip_grad_norm_(parameters, clip)
            self._scaler.step(optimizer)
            self._scaler.update()


def timm(run: Run) -> None:
    model, optimizer = run.start()
    scale = NativeScaler(run.scaler(torch.amp.GradScaler))
    for step, (x, y) in enumerate(run.batches(6)):
        with nullcontext() if step % 2 else run.no_sync():
            scale(F.mse_loss(model(x), y) / 2, optimizer, model.parameters(), 0.1, step % 2 == 1)
        if step % 2:
            optimizer.zero_grad()


def autocast(run: Run) -> None:
    model = run.model(dtype=FP32)
    optimizer = run.adamw(model)
    for x, y in run.batches(4, FP32):
        with torch.autocast("cpu", BF16):
            loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def norms_in_fp32(run: Run) -> None:
    """The model is in 16 bits but for its norms."""
    model = run.model(lambda: nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.Linear(13, 5)))
    model[1].float()
    dtype = model[0].weight.dtype
    optimizer = run.adamw(model)
    for x, y in run.batches(4):
        optimizer.zero_grad()
        hidden = model[1](model[0](x).float()).to(dtype)
        F.mse_loss(model[2](hidden), y).backward()
        optimizer.step()


# ---------------------------------------------------------------------------------------------- compiled and functional


def compiled_model(run: Run) -> None:
    model = run.model()
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = run.adamw(model)
    for x, y in run.batches(4):
        optimizer.zero_grad()
        F.mse_loss(compiled(x), y).backward()
        optimizer.step()


def compiled_training_step(run: Run) -> None:
    model, optimizer = run.start()

    @torch.compile(backend="eager")
    def train(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for x, y in run.batches(4):
        run.log(train(x, y).detach())


def compiled_optimizer(run: Run) -> None:
    model, optimizer = run.start()

    @torch.compile(fullgraph=False, backend="eager")
    def step() -> None:
        optimizer.step()

    for x, y in run.batches(4):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        step()


def gradients_of_torch_func(run: Run) -> None:
    model, optimizer = run.start()
    params = dict(model.named_parameters())

    def loss_of(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.func.functional_call(model, values, (x,)), y)

    for x, y in run.batches(4):
        grads_by_name = torch.func.grad(loss_of)({name: p.detach() for name, p in params.items()}, x, y)
        for name, p in params.items():
            p.grad = grads_by_name[name]
        optimizer.step()
        optimizer.zero_grad()


def gradients_of_autograd_grad(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        computed = torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters()))
        for p, grad in zip(model.parameters(), computed, strict=True):
            p.grad = grad
        optimizer.step()


def gradients_of_two_tasks_projected(run: Run) -> None:
    """PCGrad (Yu et al., 2020): each task's gradients are taken from `.grad`, and others are put there."""
    model, optimizer = run.start(Heads)
    shared = list(model.trunk.parameters())
    for x, y in run.batches(4):
        taken = []
        for head in range(2):
            optimizer.zero_grad()
            F.mse_loss(model(x)[head], y).backward()
            taken.append([p.grad.clone() for p in shared])
        optimizer.zero_grad()
        for p, a, b in zip(shared, *taken, strict=True):
            dot = (a * b).sum()
            p.grad = a + b - (torch.clamp(dot, max=0) / (b * b).sum()) * b
        optimizer.step()


def gradient_penalty(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):
        x.requires_grad_(True)
        loss = F.mse_loss(model(x), y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        optimizer.zero_grad()
        (loss + slope.pow(2).sum()).backward()
        optimizer.step()


def distillation(run: Run) -> None:
    teacher, student = run.model().eval().requires_grad_(False), run.model()
    optimizer = run.adamw(student)
    for x, _ in run.batches(4):
        with torch.no_grad():
            wanted = teacher(x).softmax(1)
        optimizer.zero_grad()
        F.kl_div(student(x).log_softmax(1), wanted, reduction="batchmean").backward()
        optimizer.step()


def momentum_teacher(run: Run) -> None:
    """BYOL: the teacher is an average of the student, and begins as a copy."""
    student = run.model()
    teacher = copy.deepcopy(student).requires_grad_(False)
    run.averages.append(teacher)
    optimizer = run.adamw(student)
    for x, _ in run.batches(4):
        loss = -F.cosine_similarity(student(x), teacher(x.flip(0))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for slow, p in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.data = slow.data * 0.9 + p.data * 0.1


def reptile(run: Run) -> None:
    """Meta-learning: an inner loop on a copy, whose distance is the gradient (Nichol et al., 2018)."""
    model, optimizer = run.start()
    for x, y in run.batches(3):
        inner = copy.deepcopy(model)
        steps = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(2):
            steps.zero_grad()
            F.mse_loss(inner(x), y).backward()
            steps.step()
        optimizer.zero_grad()
        for p, moved in zip(model.parameters(), inner.parameters(), strict=True):
            p.grad = p.data - moved.data
        optimizer.step()


# ------------------------------------------------------------------------------- saved, copied, closures, interruptions


def resumed_from_a_file(run: Run) -> None:
    model, optimizer = run.start()
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


def rolled_back_in_the_middle(run: Run) -> None:
    """A spike of the loss takes the run back to its last checkpoint, in the same objects."""
    model, optimizer = run.start()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for step, _ in enumerate(run.steps(model, optimizer, 6)):
        if step == 1:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 3:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])


def model_loaded_in_the_middle(run: Run) -> None:
    model, optimizer = run.start()
    best = copy.deepcopy(model.state_dict())
    for step, _ in enumerate(run.steps(model, optimizer, 5)):
        if step == 2:
            model.load_state_dict(best)


def state_saved_between_backward_and_step(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        optimizer.state_dict()
        model.state_dict()


def model_copied_between_backward_and_step(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        run.averages.append(copy.deepcopy(model))


def model_moved_between_backward_and_step(run: Run) -> None:
    model, optimizer = run.start()
    for _ in run.backwards(model, optimizer):
        model.to("cpu").train()


def closure(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):

        def compute(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        run.log(optimizer.step(compute).detach())


def closure_after_model_zero_grad(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.batches(4):

        def compute(x: Tensor = x, y: Tensor = y) -> float:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss.item()

        model.zero_grad()
        optimizer.step(compute)


def nan_losses_skipped_before_the_backward(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(5)):
        loss = F.mse_loss(model(x), y)
        if step == 2:
            loss = loss * math.nan
        if not math.isfinite(loss.item()):
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def a_step_skipped_after_the_backward(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(5)):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if step == 2:  # too large
            model.zero_grad()
            continue
        optimizer.step()
        model.zero_grad()


def a_step_skipped_and_zeroed_at_the_top(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(5)):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        if step != 2:
            optimizer.step()


def the_last_step_skipped(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(4)):
        model.zero_grad()
        F.mse_loss(model(x), y).backward()
        if step == 3:
            return
        optimizer.step()


def an_exception_in_a_forward(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(5)):
        try:
            loss = F.mse_loss(model(x if step != 2 else x[:, :3]), y)
        except RuntimeError:
            optimizer.zero_grad()
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def an_exception_in_a_backward(run: Run) -> None:
    """Batches that do not fit are skipped, as fairseq does."""
    model, optimizer = run.start(GPT)
    for step, (x, y) in enumerate(run.tokens(5)):
        try:
            optimizer.zero_grad()
            hidden = model.blocks[0](model.embedding(x))
            FailsOnce.failing = step == 2
            hidden = model.blocks[1](FailsOnce.apply(hidden))
            F.cross_entropy(model.head(model.norm(hidden)).flatten(0, 1), y.flatten()).backward()
        except torch.OutOfMemoryError:
            model.zero_grad()
            continue
        optimizer.step()


def an_exception_before_any_gradient(run: Run) -> None:
    model, optimizer = run.start()
    for step, (x, y) in enumerate(run.batches(5)):
        FailsOnce.failing = step == 2
        try:
            FailsOnce.apply(F.mse_loss(model(x), y)).backward()
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


def evaluation_between_backward_and_step(run: Run) -> None:
    model, optimizer = run.start(dropout)
    for x, y in run.steps(model, optimizer):
        model.eval()
        with torch.no_grad():
            run.log(F.mse_loss(model(x), y), model[0].weight.norm())
        model.train()


def a_model_frozen_for_evaluation(run: Run) -> None:
    model, optimizer = run.start()
    for x, y in run.steps(model, optimizer):
        model.requires_grad_(False)
        x.requires_grad_(True)  # an adversarial example
        F.mse_loss(model(x), y).backward()
        run.log(x.grad.norm())
        model.requires_grad_(True)


def adversarial_training(run: Run) -> None:
    """FGSM: the first backward is for the input, and its gradients of the weights are discarded."""
    model, optimizer = run.start()
    for x, y in run.batches(4):
        x.requires_grad_(True)
        F.mse_loss(model(x), y).backward()
        harder = (x + 0.05 * x.grad.sign()).detach()
        optimizer.zero_grad()
        F.mse_loss(model(harder), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def range_test_of_the_learning_rate(run: Run) -> None:
    """fastai's: a short run with growing rates, after which everything is as before."""
    model, optimizer = run.start()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for _ in range(2):
        for step, (x, y) in enumerate(run.batches(3)):
            optimizer.param_groups[0]["lr"] = 0.001 * 3**step
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            run.log(loss.item())
        model.load_state_dict(before[0])
        optimizer.load_state_dict(before[1])
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


# ---------------------------------------------------------------------------------------------------- loops of projects


def nanogpt(run: Run) -> None:
    model = run.model(GPT)
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = run.adamw(model, groups, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        for micro, (x, y) in enumerate(run.tokens(2)):
            with nullcontext() if micro else run.no_sync():
                scaler.scale(model(x, y) / 2).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)


def mingpt(run: Run) -> None:
    model, optimizer = run.start(GPT, betas=(0.9, 0.95))
    for x, y in run.tokens(4):
        loss = model(x, y)
        model.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def litgpt(run: Run) -> None:
    """Accumulates in a context, steps when the last micro-batch is done, and logs a running mean."""
    model, optimizer = run.start(GPT)
    running: deque[float] = deque(maxlen=2)
    for step, (x, y) in enumerate(run.tokens(6)):
        accumulating = (step + 1) % 2 != 0
        with run.no_sync() if accumulating else nullcontext():
            loss = model(x, y)
            (loss / 2).backward()
        running.append(loss.detach().item())
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
    run.log(*running)


class OptimWrapper:
    """mmengine's: `update_params` does everything."""

    def __init__(self, optimizer: Any, accumulative_counts: int, no_sync: Callable[[], Any]) -> None:
        self.optimizer, self.counts, self.inner, self.no_sync = optimizer, accumulative_counts, 0, no_sync

    def update_params(self, loss: Callable[[], Tensor]) -> None:
        self.inner += 1
        should_update = self.inner % self.counts == 0
        with nullcontext() if should_update else self.no_sync():
            (loss() / self.counts).backward()
        if should_update:
            self.optimizer.step()
            self.optimizer.zero_grad()


def mmengine(run: Run) -> None:
    model = run.model(convnet)
    wrapper = OptimWrapper(run.adamw(model), 2, run.no_sync)
    for x, y in run.batches(6):
        wrapper.update_params(lambda x=x, y=y: F.mse_loss(model(x), y))  # type: ignore[misc]


def nanochat(run: Run) -> None:
    """Two optimizers in a list, rates scaled from their first values, gradients set to None through the model."""
    model = run.model(GPT)
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    ids = set(map(id, matrices))
    optimizers = [
        run.adamw(model, matrices, lr=0.02),
        run.adamw(model, [p for p in model.parameters() if id(p) not in ids]),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    for step, (x, y) in enumerate(run.tokens(4)):
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * (1 - step / 4)
        model(x, y).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)


def direct_preference_optimization(run: Run) -> None:
    """TRL's: chosen and rejected go through the model in one backward, and a frozen copy is the reference."""
    policy = run.model(GPT)
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = run.adamw(policy)
    for x, y in run.tokens(4):
        with torch.no_grad():
            margin = reference(x.flip(0), y) - reference(x, y)
        loss = -F.logsigmoid(policy(x.flip(0), y) - policy(x, y) - margin)
        loss.backward()
        optimizer.step()
        policy.zero_grad()


def two_epochs_with_early_stopping(run: Run) -> None:
    model, optimizer = run.start()
    best, state = math.inf, copy.deepcopy(model.state_dict())
    for _ in range(3):
        run.train(model, optimizer, 2)
        with torch.no_grad():
            loss = sum(F.mse_loss(model(x), y).item() for x, y in run.batches(2, first=9))
        if loss > best:
            break
        best, state = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(state)
    run.log(best)


# ------------------------------------------------------------------------------------------------------------------ all

PROGRAMS: dict[str, Callable[[Run], None]] = {
    name: function
    for name, function in list(globals().items())
    if getattr(function, "__annotations__", None) == {"run": "Run", "return": "None"}
}
