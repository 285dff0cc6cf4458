"""Model, optimizer and scaler as they are before something is loaded into them, to be put back if it fails."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from halfstep.numerics.scaling.topology import local


def _remembered(value: Any, depth: int, tensors: bool = True) -> tuple[Any, Any]:
    """An object, and what was in it: of dicts and lists `depth` levels, of tensors with one element the number."""
    if isinstance(value, dict) and depth:
        return value, {key: _remembered(one, depth - 1, tensors) for key, one in value.items()}
    if isinstance(value, list) and depth:
        return value, [_remembered(one, depth - 1, tensors) for one in value]
    if isinstance(value, torch.Tensor) and depth and tensors and value.numel() == 1:
        return value, value.detach().clone()
    return value, None


def _restored(remembered: tuple[Any, Any]) -> Any:
    """The same object, with what was in it."""
    value, content = remembered
    if isinstance(content, dict):
        content = {key: _restored(one) for key, one in content.items()}
        value.clear()
        value.update(content)
    elif isinstance(content, list):
        value[:] = map(_restored, content)
    elif isinstance(content, torch.Tensor):
        value.detach().copy_(content)
    return value


class Rollback:
    """What model, optimizer and scaler are before a load, and how to make them that again.

    An optimizer that loads takes other tensors and leaves those it had as they are, so they are kept, not copied. Of
    the model `exchange` leaves the old values where the new ones were read. Only FSDP1, which writes its flat
    parameters by itself, costs a copy of them.
    """

    def __init__(self, model: torch.nn.Module | None, optimizer: Any, scaler: Any = None) -> None:
        self.model = model
        self.exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.copies: list[torch.Tensor] = []
        self.objects: dict[str, Any] = {}
        self.vars: list[tuple[Any, Any]] = []
        for owner in (optimizer, scaler):
            if owner is not None:
                # An optimizer's state tensors are many, and are replaced rather than written.
                held = {name: _remembered(value, 3, name != "state") for name, value in vars(owner).items()}
                self.vars.append((vars(owner), held))

    def _tensors(self) -> list[torch.Tensor]:
        assert self.model is not None
        return [local(one.detach()) for one in (*self.model.parameters(), *self.model.buffers())]

    def copy(self) -> None:
        """Keep a copy of the model's tensors, which are about to be written otherwise than by `exchange`."""
        self.copies = [one.clone() for one in self._tensors()]

    def exchange(self, live: torch.Tensor, fresh: torch.Tensor) -> None:
        """Put the values of `fresh` into `live`, and the other way round."""
        held = live.clone()
        live.copy_(fresh)
        fresh.copy_(held)
        self.exchanged.append((live, fresh))

    def put_back(self) -> None:
        """Make all three what they were, bit for bit."""
        for live, old in reversed(self.exchanged):
            live.copy_(old)
        if self.copies:
            for live, old in zip(self._tensors(), self.copies, strict=True):
                live.copy_(old)
        if self.objects:
            assert self.model is not None
            set_model_state_dict(self.model, self.objects, options=StateDictOptions(strict=False))
        for held in self.vars:
            _restored(held)
