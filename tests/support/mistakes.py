"""Random training loops with mistakes and changes in mid-run, and their outcomes.

A loop is a list of the names of actions. Most of it is as it should be; now and then a parameter is frozen, a gradient
is clipped, dropped or discarded, a backward runs twice or fails, a step is left out, weights are written. Each way to
step must leave the bits that the plain optimizer leaves, or raise an error that names the remedy. No loop does what
differs as documented: a backward that adds to gradients which a step has used, or code between a backward and its step
that reads or writes weights.

python tests/support/mistakes.py --tries 170 --seed 1
"""

import copy
import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import campaign
import torch
import torch.nn.functional as F
from states import differences
from torch import Tensor, nn
from user_loops import LAYOUTS_OF_16_BITS, OFFLOADED, REMEDY, FailsOnce, Run, grads, results

WAYS = ("release", *OFFLOADED)


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
    """A run, and what the actions below change."""

    def __init__(self, run: Run) -> None:
        self.run, self.model = run, run.model(Net)
        self.batches = run.batches(1000)
        model = self.model
        early = [*model.trunk.parameters(), *model.first.parameters(), *model.second.parameters()]
        self.optimizer = run.adamw(model, early)
        self.saved = copy.deepcopy(model.state_dict())

    def backward(self, heads: int = 2) -> None:
        x, y = next(self.batches)
        loss: Any = sum(F.mse_loss(out, y) for out in self.model(x)[:heads])
        if loss.requires_grad:
            loss.backward()

    def backward_of_a_micro_batch(self) -> None:
        with self.run.no_sync():
            self.backward()

    def backward_that_fails(self) -> None:
        FailsOnce.failing = True
        with suppress(torch.OutOfMemoryError):
            self.backward()
        FailsOnce.failing = False

    def clip_values(self) -> None:
        if grads(self.model):  # torch refuses an empty list
            nn.utils.clip_grad_value_(self.model.parameters(), 0.05)

    def add_a_group(self) -> None:
        if len(self.optimizer.param_groups) == 1:
            self.optimizer.add_param_group({"params": self.model.late.parameters(), "lr": 0.02})

    def evaluate(self) -> None:
        with torch.no_grad():
            x, y = next(self.run.batches(1))
            self.run.log(F.mse_loss(self.model(x)[0], y))


ACTIONS: dict[str, Callable[[Loop], Any]] = {
    "backward": Loop.backward,
    "backward_of_one_head": lambda loop: loop.backward(1),
    "backward_of_a_micro_batch": Loop.backward_of_a_micro_batch,
    "backward_that_fails": Loop.backward_that_fails,
    "step": lambda loop: loop.optimizer.step(),
    "optimizer_zero_grad": lambda loop: loop.optimizer.zero_grad(),
    "optimizer_zero_grad_to_zeros": lambda loop: loop.optimizer.zero_grad(set_to_none=False),
    "model_zero_grad": lambda loop: loop.model.zero_grad(),
    "model_zero_grad_to_zeros": lambda loop: loop.model.zero_grad(set_to_none=False),
    "zero_by_hand": lambda loop: [setattr(p, "grad", None) for p in loop.model.parameters()],
    "clip_the_norm": lambda loop: loop.run.log(nn.utils.clip_grad_norm_(loop.model.parameters(), 0.1)),
    "clip_values": Loop.clip_values,
    "halve_the_gradients": lambda loop: [grad.mul_(0.5) for grad in grads(loop.model)],
    "drop_a_gradient": lambda loop: setattr(loop.model.first.weight, "grad", None),
    "set_a_gradient": lambda loop: setattr(
        loop.model.second.weight, "grad", torch.full_like(loop.model.second.weight, 0.25)
    ),
    "freeze_the_trunk": lambda loop: loop.model.trunk.requires_grad_(False),
    "freeze_a_head": lambda loop: loop.model.second.requires_grad_(False),
    "unfreeze": lambda loop: loop.model.requires_grad_(True),
    "add_a_group": Loop.add_a_group,
    "write_weights": lambda loop: loop.model.trunk.weight.detach().mul_(0.75),
    "write_data": lambda loop: loop.model.first.weight.data.clamp_(-0.2, 0.2),
    "load_the_model": lambda loop: loop.model.load_state_dict(loop.saved),
    "load_the_optimizer": lambda loop: loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict())),
    "set_the_rate": lambda loop: [group.update(lr=group["lr"] * 0.5) for group in loop.optimizer.param_groups],
    "evaluate": Loop.evaluate,
}
BACKWARDS = ["backward", "backward_of_one_head"]
ZEROS = [
    *("optimizer_zero_grad", "model_zero_grad", "zero_by_hand"),
    *("optimizer_zero_grad_to_zeros", "model_zero_grad_to_zeros"),
]
CHANGES = [
    *("freeze_the_trunk", "freeze_a_head", "unfreeze", "unfreeze", "add_a_group", "write_weights", "set_the_rate"),
    *("write_data", "load_the_model", "load_the_optimizer", "evaluate"),
]
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


def leaves(way: str, layout: str, actions: tuple[str, ...]) -> dict[str, Tensor]:
    run = Run(way, layout)
    loop = Loop(run)
    for action in actions:
        ACTIONS[action](loop)
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


def run(seed: int) -> Counter[str]:
    """Run one loop in every layout and way. Counts the verdicts, none of which may be wrong."""
    actions = loop_of(seed)
    cases = itertools.product(LAYOUTS_OF_16_BITS, WAYS)
    texts = {f"{way}, {layout}": verdict(way, layout, actions) for layout, way in cases}
    wrong = {case: text for case, text in texts.items() if text not in ("same bits", "remedy named")}
    assert not wrong, f"{wrong}: {' '.join(actions)}"
    return Counter(texts.values())


if __name__ == "__main__":
    torch.set_num_threads(1)
    raise SystemExit(campaign.main(__doc__, run, 500))
