"""The first operation that makes a NaN or an infinity out of finite numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.numerics.scaling.topology import local


class NonFinite:
    """The result of `first_nonfinite`; false as long as no operation made NaN or Inf out of finite numbers.

    Attributes:
        module: the name of the innermost module that was computing, ``""`` for the model itself or the backward.
        kind: the class of this module.
        operation: the operation as torch names it, such as ``"aten.exp.default"``.
        value: ``"NaN"``, ``"Inf"`` or ``"-Inf"``: the first one in its result.
        inputs: shapes, dtypes and largest magnitudes of its inputs, in words.
        backward: the node of the autograd graph that ran it, such as ``"SqrtBackward0"``; ``""`` in the forward.
    """

    def __init__(self) -> None:
        self.module = self.kind = self.operation = self.value = self.backward = ""
        self.inputs: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.operation)

    def __str__(self) -> str:
        if not self:
            return "no operation made NaN or Inf out of finite numbers"
        where = f"{self.module or 'the model'} ({self.kind})" if self.kind else "no module"
        where = self.backward or where
        return f"{self.value} from {self.operation} in {where}; inputs: {', '.join(self.inputs) or 'none'}"


@contextmanager
def first_nonfinite(model: torch.nn.Module) -> Iterator[NonFinite]:
    """Find the first operation in this block that returns NaN or Inf, although all that it gets is finite.

    Inside the block, every operation in forward and backward is followed by a check that waits for the device, and
    modules of `model` note which of them is computing. Outside of the block nothing is left, so that it costs nothing.
    Operations inside of compiled graphs are not seen one by one: call the model before ``torch.compile``.

    Args:
        model: the model whose modules are to be named.

    Yields:
        An object that is true as soon as such an operation was found, and says which.

    Note:
        Results that are meant to be infinite (masks filled with ``-inf``) are not reported: constants, and operations
        that only fill, mask, copy or choose.

    Examples:
        >>> from halfstep.integrations.doctor import first_nonfinite
        >>> class Doubling(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x.half() * 60000).sum()
        >>> model = torch.nn.Sequential(torch.nn.Identity(), Doubling())
        >>> with first_nonfinite(model) as found:
        ...     loss = model(torch.full((2,), 2.0))
        >>> print(found)
        Inf from aten.mul.Tensor in 1 (Doubling); inputs: fp16 of shape (2,) up to 2
    """
    found = NonFinite()
    running: list[tuple[str, str]] = []
    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(running, name)))
        handles.append(module.register_forward_hook(_leave(running), always_call=True))
    try:
        with _Check(found, running):
            yield found
    finally:
        for handle in handles:
            handle.remove()


def _enter(running: list[tuple[str, str]], name: str) -> Any:
    return lambda module, arguments: running.append((name, type(module).__name__))


def _leave(running: list[tuple[str, str]]) -> Any:
    def leave(module: Any, arguments: Any, result: Any) -> None:
        if running:
            running.pop()

    return leave


# Operations that make no number out of numbers: their infinities are meant, or were there before.
_PASSIVE = ("fill", "masked", "where", "full", "copy", "empty", "scalar_tensor", "lift", "new_", "zeros", "ones", "_to")


class _Check(TorchDispatchMode):
    def __init__(self, found: NonFinite, running: list[tuple[str, str]]) -> None:
        super().__init__()
        self._found, self._running = found, running

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        name = str(operation)
        seen = self._found or name.split(".")[1].startswith(_PASSIVE[:-1])
        # Operations in place overwrite what they get, so it is looked at first.
        inputs = [] if seen else _floating((arguments, options))
        finite = not seen and all(map(_finite, inputs))
        words = tuple(map(_words, inputs)) if finite and _writes(operation) else ()
        result = operation(*arguments, **options)
        if not finite:
            return result
        for output in _floating(result):
            if not _finite(output):
                values = local(output)
                first = values.flatten()[~values.flatten().isfinite()][0].item()
                self._found.operation = name
                self._found.value = "NaN" if first != first else "Inf" if first > 0 else "-Inf"
                self._found.inputs = words or tuple(map(_words, inputs))
                node = torch._C._current_autograd_node()
                self._found.backward = "" if node is None else node.name()
                if self._running:
                    self._found.module, self._found.kind = self._running[-1]
                break
        return result


def _writes(operation: Any) -> bool:
    return bool(getattr(operation._schema, "is_mutable", False))


def _floating(values: Any) -> list[torch.Tensor]:
    leaves = [one for one in tree_leaves(values) if isinstance(one, torch.Tensor)]
    return [one for one in leaves if one.is_floating_point() and not one.is_meta and one.layout == torch.strided]


def _finite(values: torch.Tensor) -> bool:
    return bool(local(values).isfinite().all())


def _words(values: torch.Tensor) -> str:
    from halfstep.integrations.doctor.setup import dtype_name

    mine = local(values)
    largest = f" up to {mine.abs().max().item():.4g}" if mine.numel() else ""
    return f"{dtype_name(values.dtype)} of shape {tuple(values.shape)}{largest}"
