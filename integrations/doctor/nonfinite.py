"""Find the first operation that produces NaN or Inf from finite inputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep.integrations.doctor.findings import dtype_name
from halfstep.numerics.scaling.sharding import local


@dataclass(eq=False)
class NonFinite:
    """The result of `first_nonfinite`; false until an operation has produced NaN or Inf from finite inputs."""

    module: str = ""  # the name of the innermost running module; "" for the model itself or in the backward
    kind: str = ""  # the class of this module
    operation: str = ""  # torch's name for it, such as "aten.exp.default"
    value: str = ""  # the first non-finite value of its output: "NaN", "Inf" or "-Inf"
    inputs: tuple[str, ...] = ()  # descriptions: shape, dtype and largest magnitude
    backward: str = ""  # the autograd node that ran it, such as "SqrtBackward0"; "" in the forward

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
    """Find the first operation in this block that returns NaN or Inf although all of its inputs are finite.

    Inside the block, every operation in forward and backward is followed by a check that waits for the device, and
    hooks on the modules of `model` record which one is running. Operations inside a compiled graph are not seen
    individually: run the model without ``torch.compile``.

    Args:
        model: the model whose modules are to be named.

    Yields:
        A `NonFinite`, which becomes true as soon as such an operation is found, and describes it.

    Note:
        Intended infinities (masks filled with ``-inf``) are not reported: constants, and the results of operations that
        only fill, mask, copy or select.

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
    result = NonFinite()
    running: list[tuple[str, str]] = []  # names and classes of the running modules, innermost last

    def leave(*arguments: Any) -> None:
        del running[-1:]

    with ExitStack() as stack:
        for name, module in model.named_modules():
            label = name, type(module).__name__
            enter = module.register_forward_pre_hook(lambda module, args, label=label: running.append(label))
            stack.callback(enter.remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(_Check(result, running))
        yield result


# Operations that do not compute: their infinities are intended, or were in their inputs.
_PASSIVE = ("fill", "masked", "where", "full", "copy", "empty", "scalar_tensor", "lift", "new_", "zeros", "ones")


class _Check(TorchDispatchMode):
    def __init__(self, result: NonFinite, running: list[tuple[str, str]]) -> None:
        super().__init__()
        self._result, self._running = result, running

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options, name, result = options or {}, str(operation), self._result
        inputs = [] if result else _floating((arguments, options))
        if result or name.split(".")[1].startswith(_PASSIVE) or not all(map(_is_finite, inputs)):
            return operation(*arguments, **options)
        # In-place operations overwrite their inputs, so describe these first.
        words = tuple(map(_in_words, inputs)) if operation._schema.is_mutable else ()
        output = operation(*arguments, **options)
        broken = next((tensor for tensor in _floating(output) if not _is_finite(tensor)), None)
        if broken is not None:
            values, node = local(broken).flatten(), torch._C._current_autograd_node()
            value = values[~values.isfinite()][0].item()
            result.operation, result.inputs = name, words or tuple(map(_in_words, inputs))
            result.value = "NaN" if value != value else "Inf" if value > 0 else "-Inf"
            result.backward = "" if node is None else node.name()
            if self._running:
                result.module, result.kind = self._running[-1]
        return output


def _floating(values: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return [x for x in tensors if x.is_floating_point() and not x.is_meta and x.layout == torch.strided]


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(local(tensor).isfinite().all())


def _in_words(tensor: torch.Tensor) -> str:
    shard = local(tensor)
    largest = f" up to {shard.abs().max().item():.4g}" if shard.numel() else ""
    return f"{dtype_name(tensor.dtype)} of shape {tuple(tensor.shape)}{largest}"
