"""Interrupt `step` and `load_state_dict` at any moment: they leave no partial update.

Two ways of interrupting:

- ``bytecode``: KeyboardInterrupt is raised before a random bytecode of halfstep, as Python itself does. Only with C++
  kernels, since the launches of other implementations consist of Python code and would be interrupted inside.
- ``signal``: a real SIGINT at a random time, on any backend.

As a program it is the campaign: ``python tests/support/interrupts.py --tries 2000 --seed 0``. With ``--offloaded`` the
optimizer is `OffloadedAdamW`, in three buckets; with ``--muon`` it is `Muon`, whose step has Python code in the middle,
and with ``--offloaded-muon`` `OffloadedMuon`.
With ``--sharded`` the parameters are DTensors of this rank alone.
"""

import argparse
import gc
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import halfstep
from halfstep.integrations import optim
from halfstep.integrations.offload import OffloadedAdamW, OffloadedMuon
from halfstep.integrations.optim.state import like
from halfstep.numerics.scaling.sharding import local

OURS: Any = str(Path(optim.__file__).resolve().parents[2])  # halfstep's code; a tuple for several folders
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Training:
    """Three parameters of each dtype, one of them strided, and gradients for any step."""

    def __init__(self, optimizer: str = "AdamW", sharded: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)
        self.parameters = []
        for dtype in DTYPES:
            for shape in ((33, 5), (7,)):
                self.parameters.append(torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
            self.parameters.append(torch.nn.Parameter(torch.randn((6, 4), generator=generator).to(dtype)[:, ::2]))
        if sharded:
            mesh = init_device_mesh("cpu", (1,))
            wholes = [parameter.detach() for parameter in self.parameters]
            self.parameters = [torch.nn.Parameter(DTensor.from_local(whole, mesh, [Shard(0)])) for whole in wholes]
        self.optimizer: Any
        if optimizer == "OffloadedAdamW":
            self.optimizer = OffloadedAdamW(self.parameters, lr=0.1, bucket_bytes=400)
        elif optimizer.endswith("Muon"):
            vectors = [parameter for parameter in self.parameters if parameter.dim() == 1]
            matrices = [parameter for parameter in self.parameters if parameter.dim() == 2]
            muon = halfstep.Muon if optimizer == "Muon" else partial(OffloadedMuon, bucket_bytes=400)
            self.optimizer = muon([{"params": matrices}, {"params": vectors, "algorithm": "adamw"}], lr=0.1)
        else:
            self.optimizer = halfstep.AdamW(self.parameters, lr=0.1)

    def give_gradients(self, step: int) -> None:
        generator = torch.Generator().manual_seed(1 + step)
        for parameter in self.parameters:
            parameter.grad = like(parameter, torch.randn(parameter.shape, generator=generator).to(parameter.dtype))

    def bits(self) -> list[bytes]:
        """The bits of everything on which further training depends."""
        state = self.optimizer.state_dict()
        found = [parameter.detach() for parameter in self.parameters]
        for number in range(len(self.parameters)):
            entry = state["state"].get(number, {"step": 0})
            if entry["step"] > 0:  # state of a parameter that was never stepped is as good as none
                found += [entry[key] for key in sorted(entry)]
        lrs = [repr(group["lr"]).encode() for group in state["param_groups"]]
        return [local(one).contiguous().view(-1).view(torch.uint8).numpy().tobytes() for one in found] + lrs


def _interrupt() -> None:
    raise KeyboardInterrupt


def at_bytecode(
    number: int,
    action: Callable[[], Any],
    interrupt: Callable[[], None] = _interrupt,
    files: Any = OURS,
    opcodes: bool = True,
) -> int:
    """Interrupt `action` before its `number`-th bytecode in these files, halfstep's by default.

    Without `opcodes`, calls and lines are counted, of which there are fewer. Returns the number of those executed,
    which is `number` if the action was interrupted.
    """
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(files):
            return None
        frame.f_trace_opcodes = opcodes
        if event == "opcode" or not opcodes:
            count += 1
            if count == number:
                sys.settrace(None)
                interrupt()
        return trace

    enabled, functions, tracer = torch.is_grad_enabled(), torch._C._get_torch_function_state(), sys.gettrace()
    gc.disable()  # finalizers of objects of others are none of the action's bytecodes
    sys._getframe().f_trace_opcodes = opcodes  # Python 3.12 traces bytecodes only if a frame asked before settrace
    sys.settrace(trace)
    try:
        action()
    except KeyboardInterrupt:
        assert count == number
    finally:
        gc.enable()
        sys.settrace(tracer)  # that of coverage, where it is measured
        # What a trace function raises has left gradients, and __torch_function__ of subclasses, disabled; what a signal
        # handler raises has not (300 tries).
        torch.set_grad_enabled(enabled)
        torch._C._set_torch_function_state(functions)
    return count


def at_time(seconds: float, action: Callable[[], Any]) -> bool:
    """Send SIGINT to this process after some seconds. Returns whether it interrupted `action`."""
    timer, ended = threading.Timer(seconds, signal.raise_signal, [signal.SIGINT]), False
    try:
        timer.start()
        action()
        ended = True
        timer.join()
        time.sleep(0)  # the interrupt comes here at the latest
    except KeyboardInterrupt:
        return not ended
    finally:
        timer.cancel()
    return False


class Campaign:
    """Interrupts a training repeatedly. It must continue with the bits of an uninterrupted one."""

    def __init__(self, how: str, seed: int, optimizer: str, sharded: bool) -> None:
        self.how, self.choose = how, random.Random(seed)
        self._training = partial(Training, optimizer, sharded)
        self.outcomes: Counter[str] = Counter()
        self._lengths: dict[str, float] = {}

    def _interrupted(self, what: str, action: Callable[[], Any], spare: Callable[[], Any]) -> bool:
        """Interrupt `action` at a random moment. `spare` does the same and is timed first."""
        if what not in self._lengths:
            start = time.perf_counter()
            spare()
            self._lengths[what] = time.perf_counter() - start
            if self.how == "bytecode":
                self._lengths[what] = at_bytecode(0, spare)
        length = 1.3 * self._lengths[what]  # not every step runs as many; what comes too late is counted
        if self.how == "bytecode":
            number = self.choose.randint(1, int(length))
            return at_bytecode(number, action) == number
        return at_time(self.choose.uniform(0, length), action)

    def judge(self, what: str, found: Any, before: Any, after: Any) -> bool:
        """Count the outcome of an interrupt. Returns whether the action was completed."""
        outcome = "before" if found == before else "after" if found == after else "DIVIDED"
        self.outcomes[f"{what}: {outcome}"] += 1
        return outcome != "before"

    def steps(self, tries: int) -> None:
        """Interrupt steps. Every tenth try starts a new training, whose first step creates the state."""
        for number in range(tries):
            if number % 10 == 0:
                trained, twin = self._training(), self._training()
                step = 0
            for one in (trained, twin):
                one.give_gradients(step)
            spare = self._training()
            spare.give_gradients(step)
            before = twin.bits()
            twin.optimizer.step()
            what = "first step" if step == 0 else "step"
            if step:
                spare.optimizer.step()
            if not self._interrupted(what, trained.optimizer.step, spare.optimizer.step):
                self.outcomes[f"{what}: too late"] += 1
            elif not self.judge(what, trained.bits(), before, twin.bits()):
                trained.optimizer.step()
            assert trained.bits() == twin.bits() or self.divided, "the training goes on otherwise"
            step += 1

    def loads(self, tries: int) -> None:
        """Interrupt loads, of two states alternately."""
        target, spare = self._training(), self._training()
        states, bits = [], []
        for lr in (0.1, 0.2):
            source = self._training()
            source.optimizer.param_groups[0]["lr"] = lr
            for step in range(int(lr * 20)):
                source.give_gradients(step)
                source.optimizer.step()
            states.append(source.optimizer.state_dict())
            target.optimizer.load_state_dict(states[-1])
            bits.append(target.bits())
        at = 1
        for _ in range(tries):
            load = partial(target.optimizer.load_state_dict, states[1 - at])
            if not self._interrupted("load", load, partial(spare.optimizer.load_state_dict, states[0])):
                self.outcomes["load: too late"] += 1
                at = 1 - at
            elif self.judge("load", target.bits(), bits[at], bits[1 - at]):
                at = 1 - at

    @property
    def divided(self) -> int:
        """The number of partial updates."""
        return sum(count for outcome, count in self.outcomes.items() if "DIVIDED" in outcome)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=2000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto", help="for the signals")
    optimizers = {"--offloaded": "OffloadedAdamW", "--muon": "Muon", "--offloaded-muon": "OffloadedMuon"}
    for name, optimizer in optimizers.items():
        parser.add_argument(name, dest="optimizer", action="store_const", const=optimizer, default="AdamW")
    parser.add_argument("--sharded", action="store_true")
    given = parser.parse_args(argv)
    if given.sharded:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have it ignored in the background
    divided = 0
    for how in ("bytecode", "signal") if given.backend == "auto" and "Muon" not in given.optimizer else ("signal",):
        campaign = Campaign(how, given.seed, given.optimizer, given.sharded)
        with halfstep.backend(given.backend):
            campaign.steps(given.tries)
            campaign.loads(given.tries)
        print(how, dict(sorted(campaign.outcomes.items())), flush=True)
        divided += campaign.divided
    print(f"{divided} of {given.tries} interrupts of each kind left something done in part")
    return 1 if divided else 0


if __name__ == "__main__":
    sys.exit(main())
