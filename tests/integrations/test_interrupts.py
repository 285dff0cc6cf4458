"""Ctrl-C in `step` and `load_state_dict`, in a separate process, because the program replaces signal handlers."""

import signal
from functools import partial

import forks
import interrupts
import pytest

from halfstep.integrations.optim.step_plan import apply


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        *(("auto", ""), ("auto", "--offloaded"), ("auto", "--offloaded --sharded"), ("reference", "")),
        *(("auto", "--muon"), ("auto", "--offloaded-muon"), ("auto", "--offloaded-muon --sharded")),
    ],
)
def test_an_interrupted_step_or_load_is_complete_or_not_begun(backend: str, options: str) -> None:
    tries = "15"
    done = forks.run([interrupts.__file__, "--tries", tries, "--seed", "1", "--backend", backend, *options.split()])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"0 of {tries} interrupts of each kind left something done in part" in done.stdout


class Calls(list[int]):
    def add(self, number: int) -> None:
        self.append(number)


def test_an_interrupt_in_the_middle_is_raised_after_the_last_call() -> None:
    called = Calls()
    for method in (partial(called.add, 2), partial(lambda: called.append(2))):  # Python code, where it would be raised
        called.clear()
        _interrupt(
            [partial(called.append, 1), partial(signal.raise_signal, signal.SIGINT), method, partial(called.append, 3)]
        )
        assert called == [1, 2, 3]


def _interrupt(calls: list[partial[object]]) -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        apply(calls)
    assert signal.getsignal(signal.SIGINT) is before


def test_an_error_of_a_call_leaves_the_handler_as_it_was() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ZeroDivisionError):
        apply([partial(divmod, 1, 0)])
    assert signal.getsignal(signal.SIGINT) is before
