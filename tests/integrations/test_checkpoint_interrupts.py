"""Ctrl-C while a checkpoint is written or read: KeyboardInterrupt, a good checkpoint, and no leftover files."""

import gc
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import checkpoint_attacks as attacks
import interrupt_checkpoints
import pytest

from halfstep.integrations import checkpoint, interrupts
from halfstep.integrations.checkpoint import storage


@pytest.mark.parametrize("kind", interrupt_checkpoints.KINDS)
def test_interrupts_at_random_moments(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In a process of its own, which must not abort; most of the tries are interrupted."""
    status = interrupt_checkpoints.main(["--kind", kind, "--tries", "10", "--seed", "1"])
    printed = capsys.readouterr()
    assert status == 0 and "\n0 complaints.\n" in printed.out, printed
    assert f"{kind}: interrupted" in printed.out


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sends SIGINT to this process while the part of a file is written whose number it holds."""
    wanted, write = [-1], storage.write_file

    def counted(pieces: Iterable[Any]) -> Iterator[Any]:
        for piece in pieces:
            if wanted[0] == 0:
                os.kill(os.getpid(), signal.SIGINT)
            wanted[0] -= 1
            yield piece

    monkeypatch.setattr(storage, "write_file", lambda path, pieces: write(path, counted(pieces)))
    return wanted


@pytest.mark.parametrize("number", [0, 1, 3])
@pytest.mark.parametrize("shards", [False, True])
def test_an_interrupt_between_two_parts_is_prompt_and_is_what_is_raised(
    tmp_path: Path, parts: list[int], number: int, shards: bool
) -> None:
    model = attacks.model_of()
    options: dict[str, Any] = {"model": model, "optimizer": attacks.optimizer_of(model)} if shards else {}
    state = {} if shards else {"model": model.state_dict(), "a": model.weight, "b": model.bias.clone()}
    checkpoint.save(tmp_path, 1, state, **options)
    parts[0] = number
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, state, **options)
    assert parts[0] == -1, "it was told at once, not at the end"
    assert [name for name in os.listdir(tmp_path) if not name.startswith("step-00000001")] == []
    gc.collect()  # a view of a BytesIO in the traceback would crash Python 3.12.1, and 3.13 would report it
    found = checkpoint.load(tmp_path / "step-00000001", **options)
    assert found.keys() == state.keys()


def test_signals_are_delayed_and_then_delivered_in_order() -> None:
    heard = []
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: heard.append(number))
    try:
        with interrupts.held():
            signal.raise_signal(signal.SIGUSR2)
            signal.raise_signal(signal.SIGUSR1)
            assert heard == []
            with interrupts.held():
                pass
            assert heard == [], "the inner one belongs to the outer one"
            interrupts.poll()
            assert heard == [signal.SIGUSR2, signal.SIGUSR1]
            signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR2, signal.SIGUSR1, signal.SIGUSR1]
        with pytest.raises(KeyboardInterrupt), interrupts.held():
            signal.raise_signal(signal.SIGINT)
            heard.append(0)
        assert heard[-1] == 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt) as error, interrupts.held():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("and an error")
        assert isinstance(error.value.__context__, ValueError)
    finally:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)


def test_other_threads_neither_delay_nor_deliver_signals() -> None:
    def elsewhere() -> None:
        with interrupts.held():
            interrupts.poll()

    with pytest.raises(KeyboardInterrupt), interrupts.held():
        signal.raise_signal(signal.SIGINT)
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        done = True
    assert done
