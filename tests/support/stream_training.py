"""Random programs of captures, replays, eager steps and other calls, compared with eager runs.

The same program runs twice: on the model of a GPU (stream_model.py), and on the CPU, where a replay is an eager step
with the options and the parameters of its capture. All bits must be equal at the end and at several points before.

As a program it is the campaign: ``python tests/support/stream_training.py --tries 10000 --seed 0``.
"""

import copy
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import campaign
import torch
from stream_model import Model

import halfstep

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Shapes and dtypes of the first group, and of groups added later. Moments of the matrix can have codes.
FIRST = (((5,), FP32), ((300,), BF16), ((17,), FP16), ((35, 120), BF16))
LATER = (((9,), BF16), ((33,), FP32))
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"max_grad_norm": 1.0},
    {"amsgrad": True},
    {"state_dtype": BF16, "rounding": "stochastic", "seed": 5},
    {"state_dtype": "8bit", "seed": 5},
    {"master_weights": "full", "max_grad_norm": 0.5},
    {"master_weights": None, "rounding": "stochastic"},
)
STEPS = ("eager", "eager", "capture", *["replay"] * 3, "option", "load", "clear", "group", "stream", "aside")
# What copies gradients to the device or state from it, as a program of its own may wait for.
MAKING = ("eager", "replay", "save", "load", "add_group", "aside")


def normal(size: int, dtype: torch.dtype, seed: int, device: torch.device) -> torch.Tensor:
    """The same numbers on every device."""
    values = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values if device.type == "cpu" else values.to(device)


class Training:
    """Parameters of several dtypes, optimizer and scaler, and the operations of programs."""

    def __init__(self, device: torch.device, options: dict[str, Any]) -> None:
        self.device = device
        self.parameters = self._made(FIRST, 0)
        self.optimizer = halfstep.AdamW(self.parameters, lr=0.01, **options)
        self.scaler = halfstep.GradScaler(device.type, init_scale=256.0, growth_interval=3)
        self.scaler.scale(torch.zeros((), device=device))
        self.saved: dict[str, Any] | None = None
        self.graphs: list[Any] = []

    def _made(self, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]], seed: int) -> list[torch.nn.Parameter]:
        return [
            torch.nn.Parameter(normal(math.prod(shape), dtype, seed + number, self.device).view(shape))
            for number, (shape, dtype) in enumerate(kinds)
        ]

    def gradients(self, seed: int, count: int) -> list[torch.Tensor]:
        """Gradients of the first `count` parameters. Every seventh seed has an overflow."""
        made = [normal(p.numel(), p.dtype, seed + n, self.device) * 64 for n, p in enumerate(self.parameters[:count])]
        if seed % 7 == 3:
            made[seed % count][0] = torch.inf
        return [one.view(p.shape) for one, p in zip(made, self.parameters, strict=False)]

    def _step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def eager(self, seed: int, fresh: bool) -> None:
        """A step with new gradients, in new memory or in that of the last ones."""
        for parameter, values in zip(self.parameters, self.gradients(seed, len(self.parameters)), strict=True):
            if fresh or parameter.grad is None:
                parameter.grad = values
            else:
                parameter.grad.copy_(values)
        self._step()

    def change(self, seed: int) -> None:
        """Another learning rate, or other betas, or another weight decay."""
        for group in self.optimizer.param_groups:
            name = ("lr", "betas", "weight_decay")[seed % 3]
            group[name] = (0.8, 0.99 + seed % 10 / 1000) if name == "betas" else (1 + seed % 10) / 500

    def save(self) -> None:
        """Keep a checkpoint on the host."""
        state = self.optimizer.state_dict()
        self.saved = {
            "state": {
                index: {key: value.cpu().clone() for key, value in entry.items()}
                for index, entry in state["state"].items()
            },
            "param_groups": copy.deepcopy(state["param_groups"]),
        }

    def load(self) -> None:
        """Load the last checkpoint, if it fits."""
        if self.saved is not None and len(self.saved["param_groups"]) == len(self.optimizer.param_groups):
            self.optimizer.load_state_dict(self.saved)

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def add_group(self) -> None:
        if len(self.optimizer.param_groups) == 1:
            made = self._made(LATER, 50)
            self.parameters += made
            self.optimizer.add_param_group({"params": made, "lr": 0.02})

    def bits(self) -> list[bytes]:
        """The bits of everything on which further training depends."""
        state = self.optimizer.canonical_state_dict()["state"]
        found = [parameter.detach() for parameter in self.parameters]
        found += [state[index][key] for index in sorted(state) for key in sorted(state[index])]
        found += [self.scaler._scale, self.scaler._counts]  # type: ignore[list-item]
        return [one.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in found]


class Plain(Training):
    """A training on the CPU, in which a replay is an eager step with the captured options."""

    def capture(self, seed: int) -> None:
        options = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        self.graphs.append((options, len(self.parameters)))

    def replay(self, which: int, seed: int) -> None:
        options, count = self.graphs[which]
        groups, grads = self.optimizer.param_groups, [parameter.grad for parameter in self.parameters]
        kept = [dict(group) for group in groups]
        for group, then in zip(groups, options, strict=False):
            group.update(then)
        for parameter in self.parameters:
            parameter.grad = None
        for parameter, values in zip(self.parameters, self.gradients(seed, count), strict=False):
            parameter.grad = values
        self._step()
        for group, before in zip(groups, kept, strict=True):
            group.update(before)
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad

    def stream(self) -> None:
        pass

    def aside(self, seed: int) -> None:
        pass


class Modelled(Training):
    """A training on the model of a GPU, with graphs and streams."""

    def __init__(self, model: Model, options: dict[str, Any]) -> None:
        super().__init__(model.device, options)
        self.model = model
        self.streams = [model.current, model.stream()]
        self.aside_answers: list[tuple[torch.Tensor, float]] = []

    def capture(self, seed: int) -> None:
        kept = [parameter.grad for parameter in self.parameters]
        static = [torch.zeros_like(parameter) for parameter in self.parameters]
        for parameter, grad in zip(self.parameters, static, strict=True):
            parameter.grad = grad
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        if seed % 2:  # else the next step has the graph's gradients
            for parameter, grad in zip(self.parameters, kept, strict=True):
                parameter.grad = grad
        self.graphs.append((graph, static))

    def replay(self, which: int, seed: int) -> None:
        graph, static = self.graphs[which]
        for grad, values in zip(static, self.gradients(seed, len(static)), strict=True):
            grad.copy_(values)
        graph.replay()

    def stream(self) -> None:
        """Continue on the other one of two streams, after it has waited for this one."""
        self.streams.reverse()
        self.streams[0].wait_stream(self.streams[1])
        self.model.current = self.streams[0]

    def aside(self, seed: int) -> None:
        """A check of other tensors of the same sizes, on a stream that no other one waits for."""
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            tensors = [torch.full((p.numel(),), 1.0 + seed % 5, dtype=p.dtype, device="cuda") for p in self.parameters]
            found = halfstep.foreach_check(tensors).sum_of_squares
            self.aside_answers.append((found, sum(p.numel() for p in self.parameters) * (1.0 + seed % 5) ** 2))

    def read_asides(self) -> None:
        torch.cuda.synchronize()
        for found, expected in self.aside_answers:
            assert found.item() == expected, "a check on another stream"


def program(seed: int, length: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The operations of a program: names of methods and their arguments."""
    choose = random.Random(seed)
    graphs = 0
    yield "eager", (seed, True)
    for number in range(length):
        what, own = choose.choice(STEPS), seed + 97 * number
        if what == "eager":
            yield "eager", (own, choose.random() < 0.5)
        elif what == "capture":
            yield "capture", (own,)
            graphs += 1
        elif what == "replay" and graphs:
            yield "replay", (choose.randrange(graphs), own)
        elif what == "option":
            yield "change", (own,)
        elif what == "load":
            yield choose.choice(("save", "load")), ()
        elif what == "group":
            yield "add_group", ()
            yield "eager", (own, True)  # a capture needs state
        elif what in ("clear", "stream"):
            yield what, ()
        elif what == "aside":
            yield "aside", (own,)


def run(seed: int, length: int = 14, order: str = "random", kernels: str = "native") -> Counter[str]:
    """Run one program twice, and compare. The host must not wait, nor copy from memory that is not pinned.

    Returns the number of executions of each operation.
    """
    options = OPTIONS[seed % len(OPTIONS)]
    done = Counter(what for what, _ in program(seed, length))
    plain = Plain(torch.device("cpu"), options)
    for what, arguments in program(seed, length):
        getattr(plain, what)(*arguments)
    with Model(order, seed, kernels) as model:
        with model.looking():
            modelled = Modelled(model, options)
        for what, arguments in program(seed, length):
            with model.looking() if what in MAKING else nullcontext():
                getattr(modelled, what)(*arguments)
        assert model.blocking == [] and model.pageable == [], f"seed {seed}: {model.blocking}, {model.pageable}"
        with model.looking():
            assert modelled.bits() == plain.bits(), f"seed {seed}: bits differ after {dict(done)}"
            modelled.read_asides()
    return done


if __name__ == "__main__":
    sys.exit(campaign.main(__doc__, run, 10000))
