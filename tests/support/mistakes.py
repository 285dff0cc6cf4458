"""Random training loops with mistakes and changes of mind in mid-run, and what becomes of them.

A loop is a list of the names of actions. Most of it is as it should be; now and then a parameter is frozen, a gradient
is clipped, dropped or discarded, a backward runs twice or fails, a step is left out, weights are written. Each way to
step must leave the bits that the plain optimizer leaves, or raise an error that names the remedy. Run as a program::

    python tests/support/mistakes.py --loops 500 --seed 1
"""

from __future__ import annotations

import argparse
import copy
import functools
import random
import re
from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from user_loops import LAYOUTS, OFFLOADED, FailsOnce, Run, differences, results

REMEDY = re.compile(r"Expected .+, but got .+: .+", re.DOTALL)
WAYS = ("release", *OFFLOADED)
LAYOUTS_OF_16_BITS = [name for name, (dtype, _) in LAYOUTS.items() if dtype != torch.float32]


class Net(nn.Module):
    """A trunk, a layer that is in the optimizer from `add_a_group` on, and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.late = nn.Linear(7, 9), nn.Linear(9, 9)
        self.first, self.second = nn.Linear(9, 5), nn.Linear(9, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = FailsOnce.apply(torch.tanh(self.trunk(x)))
        hidden = hidden + self.late(hidden)
        return self.first(hidden), self.second(hidden)


class Loop:
    """A run of which the actions below are the methods."""

    def __init__(self, run: Run) -> None:
        self.run, self.model = run, run.model(Net)
        self.batches = run.batches(1000)
        model = self.model
        early = [*model.trunk.parameters(), *model.first.parameters(), *model.second.parameters()]
        self.optimizer = run.adamw(model, early)
        self.grouped = False
        self.saved = copy.deepcopy(model.state_dict())

    def _backward(self, heads: slice = slice(None)) -> None:
        x, y = next(self.batches)
        loss = sum(F.mse_loss(out, y) for out in self.model(x)[heads])
        if loss.requires_grad:  # type: ignore[union-attr]
            loss.backward()  # type: ignore[union-attr]

    def backward(self) -> None:
        self._backward()

    def backward_of_one_head(self) -> None:
        self._backward(slice(1))

    def backward_of_a_micro_batch(self) -> None:
        with self.run.no_sync():
            self._backward()

    def backward_that_fails(self) -> None:
        FailsOnce.failing = True
        try:
            self._backward()
        except torch.OutOfMemoryError:
            pass
        FailsOnce.failing = False

    def step(self) -> None:
        self.optimizer.step()

    def optimizer_zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def optimizer_zero_grad_to_zeros(self) -> None:
        self.optimizer.zero_grad(set_to_none=False)

    def model_zero_grad(self) -> None:
        self.model.zero_grad()

    def model_zero_grad_to_zeros(self) -> None:
        self.model.zero_grad(set_to_none=False)

    def zero_by_hand(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def clip_the_norm(self) -> None:
        self.run.log(nn.utils.clip_grad_norm_(self.model.parameters(), 0.1))

    def clip_values(self) -> None:
        if any(p.grad is not None for p in self.model.parameters()):  # torch refuses an empty list
            nn.utils.clip_grad_value_(self.model.parameters(), 0.05)

    def halve_the_gradients(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def drop_a_gradient(self) -> None:
        self.model.first.weight.grad = None

    def set_a_gradient(self) -> None:
        self.model.second.weight.grad = torch.full_like(self.model.second.weight, 0.25)

    def freeze_the_trunk(self) -> None:
        self.model.trunk.requires_grad_(False)

    def freeze_a_head(self) -> None:
        self.model.second.requires_grad_(False)

    def unfreeze(self) -> None:
        self.model.requires_grad_(True)

    def add_a_group(self) -> None:
        if not self.grouped:
            self.optimizer.add_param_group({"params": self.model.late.parameters(), "lr": 0.02})
        self.grouped = True

    def write_weights(self) -> None:
        with torch.no_grad():
            self.model.trunk.weight.mul_(0.75)

    def write_data(self) -> None:
        self.model.first.weight.data.clamp_(-0.2, 0.2)

    def load_the_model(self) -> None:
        self.model.load_state_dict(self.saved)

    def load_the_optimizer(self) -> None:
        self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def set_the_rate(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5

    def evaluate(self) -> None:
        with torch.no_grad():
            x, y = next(self.run.batches(1))
            self.run.log(F.mse_loss(self.model(x)[0], y))


BACKWARDS = ["backward", "backward_of_one_head"]
ZEROS = [
    *("optimizer_zero_grad", "model_zero_grad", "zero_by_hand"),
    *("optimizer_zero_grad_to_zeros", "model_zero_grad_to_zeros"),
]
CHANGES = [
    *("freeze_the_trunk", "freeze_a_head", "unfreeze", "unfreeze", "add_a_group", "write_weights", "set_the_rate"),
    *("write_data", "load_the_model", "load_the_optimizer", "evaluate"),
]
WEIGHTS = ["write_weights", "write_data", "load_the_model", "load_the_optimizer", "evaluate"]
# Between backward and step. Weights that are read or written there differ: see DIFFERENT in test_user_loops.py.
AFTER_THE_BACKWARD = [
    *("clip_the_norm", "clip_values", "halve_the_gradients", "drop_a_gradient", "set_a_gradient", "freeze_a_head"),
    *("freeze_the_trunk", "unfreeze", "add_a_group", "set_the_rate", "backward", "backward_that_fails"),
]


def loop_of(seed: int) -> list[str]:
    """The actions of a loop of 6 iterations, of which the last one takes its step."""
    draw = random.Random(seed)
    actions: list[str] = []
    for iteration in range(6):
        if actions[-1:] in ([], ["step"]) and draw.random() < 0.5:
            actions.append(draw.choice(CHANGES))
        actions.append(draw.choice(ZEROS))
        if draw.random() < 0.2:
            actions += ["backward_of_a_micro_batch"] * draw.randrange(1, 3)
        if draw.random() < 0.05:
            actions += ["backward_that_fails", *([draw.choice(ZEROS)] if draw.random() < 0.5 else [])]
        actions.append(draw.choice(BACKWARDS))
        if draw.random() < 0.25:
            actions.append(draw.choice(AFTER_THE_BACKWARD))
        if iteration == 5 or draw.random() < 0.9:
            actions.append("step")
    return actions


def is_allowed(actions: list[str]) -> bool:
    """Whether a loop does nothing that differs as documented.

    That is a backward that adds to gradients which a step has used, and code between a backward and its step that reads
    or writes weights, at the end of the loop too.
    """
    used = waiting = False
    for action in actions:
        backward = action.startswith("backward")
        if (backward and used) or (waiting and action in WEIGHTS):
            return False
        waiting = backward or (waiting and action != "step")
        used = action == "step" or (used and action not in ZEROS)
    return not waiting


def leaves(way: str, layout: str, actions: tuple[str, ...]) -> dict[str, Tensor]:
    run = Run(way, layout)
    loop = Loop(run)
    for action in actions:
        getattr(loop, action)()
    return results(run)


@functools.lru_cache(64)
def expected(layout: str, actions: tuple[str, ...]) -> dict[str, Tensor]:
    return leaves("plain", layout, actions)


def verdict(way: str, layout: str, actions: list[str]) -> str:
    """``"same bits"``, ``"remedy named"``, or what is wrong."""
    wanted = expected(layout, tuple(actions))
    try:
        left = leaves(way, layout, tuple(actions))
    except Exception as error:
        FailsOnce.failing = False
        if isinstance(error, (RuntimeError, TypeError, ValueError)) and REMEDY.search(str(error)):
            return "remedy named"
        return f"an error without a remedy: {type(error).__name__}: {error}"
    differing = differences(left, wanted)
    return f"differs in {len(differing)}, first in {differing[0]}" if differing else "same bits"


def is_wrong(text: str) -> bool:
    return text not in ("same bits", "remedy named")


def shortened(actions: list[str], wrong: Callable[[list[str]], bool]) -> list[str]:
    """The actions without those that are not needed to be wrong."""
    for index in reversed(range(len(actions))):
        shorter = actions[:index] + actions[index + 1 :]
        if is_allowed(shorter) and wrong(shorter):
            actions = shorter
    return actions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loops", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts: Counter[tuple[str, str]] = Counter()
    shortest: dict[tuple[str, ...], str] = {}
    for number in range(options.loops):
        actions = loop_of(options.seed * 1_000_003 + number)
        layout = LAYOUTS_OF_16_BITS[number % len(LAYOUTS_OF_16_BITS)]
        for way in WAYS:
            text = verdict(way, layout, actions)
            counts[way, "WRONG" if is_wrong(text) else text] += 1
            if is_wrong(text):
                short = shortened(actions, lambda tried: is_wrong(verdict(way, layout, tried)))  # noqa: B023
                shortest.setdefault((way, *short), f"{layout}: {verdict(way, layout, short)}")
    for way in WAYS:
        print(way, {text: count for (of, text), count in sorted(counts.items()) if of == way})
    for (way, *short), text in sorted(shortest.items(), key=lambda item: (item[0][0], len(item[0]))):
        print(f"{way}, {', '.join(short)}: {text}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
