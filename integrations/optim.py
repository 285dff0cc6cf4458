"""`torch.optim.Optimizer` classes over the Adam kernels.

A step gathers, per device and dtype combination, the tensors of all parameter groups into one `Batch` and launches it
once. The batch is kept: later steps compare addresses and write down only those that moved.

**State.** In memory ``state[p]`` holds ``step`` (0-dim fp32 on the parameter's device), ``exp_avg``, ``exp_avg_sq``,
with amsgrad ``max_exp_avg_sq``, and for a low-precision parameter ``master``: fp32, or, where the master is split, the
16 bits (int16) that complete the bf16 parameter to it. The name is one so that code that looks for a checkpoint's
entries by the names in memory (``flatten_optimizer_state_dict``, torchtitan) finds it. ``state_dict()`` is canonical:
whatever the layout, it has ``master`` and the moments in fp32, so it loads bit for bit into every other one.
`torch.optim.Optimizer.load_state_dict` would cast all of it to the parameter's dtype; ours does not call it.

**Random bits.** With ``rounding="stochastic"`` every rounding is named by the seed, the parameter's number in the
optimizer (over all groups, as in ``state_dict``), its step count and the element's place in the whole parameter, shards
included: kernels/adam.py. The seed is saved with the groups' options, so a resumed run draws what an uninterrupted one
would have drawn, on any number of ranks.

**The master is the weight.** Loading a checkpoint sets both it and the visible parameter, its rounding. A parameter
written from outside between steps (``load_state_dict`` of the model, ``copy_``, a weight swap) is never overwritten by
a stale master. A full master is compared with the parameter once its version or address has changed, and replaced
where it no longer rounds to it. A split master is the parameter and 16 bits more, which stay: it keeps every bit where
the same was written again, and lies within half a bf16 ulp of the parameter everywhere. Which elements were written
cannot be told, and to drop the bits of all would, in a training that writes after each step (masks, weight clipping),
lose every update below that ulp. `refresh_master` drops them on demand.

**CUDA graphs.** A step that is captured makes tables of its own, which nothing else sees (`halfstep.kernels.streams`),
and leaves no trace in what eager steps keep: captures, replays and eager steps mix in any order. A replay steps with
the options of its capture, but for those that are tensors on the device. Moments, masters and step counts are shared:
they must be there before, and once captured `load_state_dict` writes into them instead of replacing them. A replay does
not see that a parameter with a full master was written from outside; call `refresh_master` before it.

**Interrupts.** `step` and `load_state_dict` first prepare everything that can fail or take long, and then change
weights and state in one sequence that Ctrl-C does not divide (`halfstep.integrations.interrupts`).
"""

from __future__ import annotations

import gc
import math
import sys
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import repeat
from numbers import Real
from operator import attrgetter, is_, itemgetter
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, ParamsT

from halfstep.integrations.interrupts import apply
from halfstep.kernels import adam
from halfstep.kernels.multi_tensor import DTYPE_CODES, TensorTable, checked_addresses, has_memory, is_flat
from halfstep.kernels.philox import check_seed
from halfstep.kernels.rounding import join_master, split_master
from halfstep.kernels.streams import capturing, upload
from halfstep.kernels.unscale import Factor, Verdict
from halfstep.numerics.scaling.foreign_scalers import StepSupportsAmpScaling
from halfstep.numerics.scaling.topology import is_sharded, local, settle_gradients
from halfstep.numerics.scaling.verdict import StepsOnVerdict, parameters_of

MASTERS = ("auto", "full", "split", None)
STATE_DTYPES = (torch.float32, torch.bfloat16)
ROUNDINGS = ("nearest", "stochastic")
CANONICAL_KEYS = ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master")
# Options that say how state lies in memory: a checkpoint does not change them.
LAYOUT_OPTIONS = ("master_weights", "state_dtype", "rounding")
# What apex and TransformerEngine keep in a group beside torch's options.
FOREIGN_OPTIONS = ("step", "bias_correction")

_MASTER_CODES = {None: adam.NO_MASTER, "full": adam.FULL_MASTER, "split": adam.SPLIT_MASTER}
_address = torch.Tensor.data_ptr
# The options of a group that a step looks at.
_OPTIONS = (
    *("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused"),
    *("decoupled_weight_decay", "master_weights", "state_dtype", "rounding", "seed"),
)
_options_of = itemgetter(*_OPTIONS)


def _all_contiguous(tensors: list[torch.Tensor]) -> bool:
    try:
        return all(map(torch.Tensor.is_contiguous, tensors)) and not any(map(torch.Tensor.is_neg, tensors))
    except RuntimeError:  # what some sparse layouts answer
        return False


# --------------------------------------------------------------------------------------------------------- validation


def _plain(value: Any) -> Any:
    """numpy's numbers as Python's, so that checkpoints hold no objects of numpy; others as they are."""
    if isinstance(value, (tuple, list)) and any(isinstance(one, (np.ndarray, np.generic)) for one in value):
        return type(value)(map(_plain, value))
    return value.item() if isinstance(value, (np.ndarray, np.generic)) and value.size == 1 else value


def _number(value: Any, message: str, allowed: str, fits: Callable[[float], bool]) -> None:
    """Raise unless a hyper-parameter is a finite number in its range; device and fake tensors are not read."""
    value = _plain(value)
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" or not has_memory(value):
            return
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ValueError(f"{message}: {value!r}; allowed are {allowed}")
    if not math.isfinite(value) or not fits(float(value)):
        raise ValueError(f"{message}: {value}; allowed are {allowed}")


def _check_options(group: dict[str, Any]) -> None:
    """Validate the options of a parameter group; messages begin with torch's words, which others match on."""
    lr, betas = group["lr"], group["betas"]
    if isinstance(lr, torch.Tensor):
        if group["foreach"] and not group["capturable"]:
            raise ValueError(
                "lr as a Tensor is not supported for capturable=False and foreach=True; leave foreach away, "
                "it has no use here"
            )
        if lr.numel() != 1:
            raise ValueError(f"Tensor lr must be 1-element; its shape is {tuple(lr.shape)}")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas is {betas!r}; allowed is a pair of numbers from 0 to below 1")
    tensors = [isinstance(beta, torch.Tensor) for beta in betas]
    if any(tensors) and not all(tensors):
        raise ValueError("betas must be either both floats or both Tensors")
    for index, beta in enumerate(betas):
        if isinstance(beta, torch.Tensor):
            if group["foreach"] and not group["capturable"]:
                raise ValueError(
                    f"betas[{index}] as a Tensor is not supported for capturable=False and foreach=True; "
                    "leave foreach away, it has no use here"
                )
            if beta.numel() != 1:
                raise ValueError(f"Tensor betas[{index}] must be 1-element; its shape is {tuple(beta.shape)}")
        message = f"Invalid beta parameter at index {index}"
        _number(beta, message, "numbers from 0 to below 1", lambda x: 0.0 <= x < 1.0)
    _number(lr, "Invalid learning rate", "finite numbers from 0", lambda x: x >= 0)
    _number(group["eps"], "Invalid epsilon value", "finite numbers from 0", lambda x: x >= 0)
    _number(group["weight_decay"], "Invalid weight_decay value", "finite numbers from 0", lambda x: x >= 0)
    if group["foreach"] and group["fused"]:
        raise RuntimeError("`fused` and `foreach` cannot be `True` together; neither changes what is computed here")
    if group["differentiable"]:
        if group["fused"]:
            raise RuntimeError("`fused` does not support `differentiable`; use torch.optim for a differentiable step")
        raise ValueError("differentiable is True; allowed is False: use torch.optim for a differentiable step")
    if group["master_weights"] not in MASTERS:
        raise ValueError(f"master_weights is {group['master_weights']!r}; allowed are {', '.join(map(repr, MASTERS))}")
    if group["state_dtype"] not in STATE_DTYPES:
        raise ValueError(f"state_dtype is {group['state_dtype']!r}; allowed are {', '.join(map(str, STATE_DTYPES))}")
    if group["rounding"] not in ROUNDINGS:
        raise ValueError(f"rounding is {group['rounding']!r}; allowed are {', '.join(map(repr, ROUNDINGS))}")
    check_seed(group["seed"])


def _check_parameter(parameter: torch.Tensor, where: str, master_weights: str | None) -> None:
    if parameter.layout != torch.strided:
        raise TypeError(f"{where} has layout {parameter.layout}; allowed are dense parameters")
    if parameter.dtype not in DTYPE_CODES:
        raise TypeError(
            f"{where} has dtype {parameter.dtype}; allowed are float32, float16 and bfloat16: "
            "use torch.optim for other dtypes"
        )
    if any(size > 1 and stride == 0 for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
        raise ValueError(
            f"{where} has shape {tuple(parameter.shape)} and strides {parameter.stride()}: several elements share one "
            "number; allowed is memory of its own for each: use .contiguous()"
        )
    if master_weights == "split" and parameter.dtype == torch.float16:
        raise ValueError(
            f"{where} is float16 and master_weights is 'split'; allowed for float16 are 'full', 'auto' and None"
        )


def _master_of(parameter: torch.Tensor, master_weights: str | None) -> str | None:
    """The master that "auto" means for this parameter; fp32 parameters need none."""
    if parameter.dtype == torch.float32:
        return None
    if master_weights == "auto":
        return "split" if parameter.dtype == torch.bfloat16 else "full"
    return master_weights


def _layout_of(parameter: torch.Tensor, grad: torch.dtype, group: dict[str, Any]) -> adam.Layout:
    """What the kernel for this parameter is compiled for."""
    master = _MASTER_CODES[_master_of(parameter, group["master_weights"])]
    return adam.Layout(
        parameter.dtype,
        grad,
        group["state_dtype"],
        master,
        bool(group["amsgrad"]),
        not group["decoupled_weight_decay"] and bool(group["weight_decay"] != 0),
        group["rounding"] == "stochastic" and adam.rounds_stochastically(parameter.dtype, group["state_dtype"], master),
    )


def _dense(values: torch.Tensor, layout: adam.Layout) -> torch.Tensor:
    """A parameter's local values as the kernels walk them: themselves where they can, else a copy.

    Gaps between elements need one; so does, where random bits go by the row-major order, any other order; and a lazy
    negation, whose memory holds the opposite numbers.
    """
    keep = is_flat(values) and (values.is_contiguous() or not layout.stochastic)
    return values if keep else values.resolve_neg().contiguous()


def _place(parameter: torch.Tensor, where: str) -> tuple[int, int, int]:
    """Where a parameter's local part lies in the whole: `BASE`, `INNER` and `INNER_WHOLE` of the kernels' table.

    Raises:
        ValueError: the part is no range of rows, of another dimension, or of both.
    """
    if not is_sharded(parameter):
        return 0, max(parameter.numel(), 1), max(parameter.numel(), 1)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    whole, held = tuple(parameter.shape), tuple(local(parameter).shape)
    shape, offset = compute_local_shape_and_global_offset(whole, mesh, placements)
    # Two mesh dimensions may cut one dimension in an interleaved order: its parts are ranges only if all are of a size.
    ways = [1] * len(whole)
    for placement, size in zip(placements, mesh.shape, strict=True):
        if not placement.is_replicate() and getattr(placement, "dim", None) is not None:
            ways[placement.dim] *= size
    interleaved = {getattr(p, "dim", None) for p in placements if type(p).__name__ == "_StridedShard"}
    uneven = any(whole[dim] % ways[dim] for dim in interleaved if dim is not None)
    if tuple(shape) == held and 0 in held:
        return 0, 1, 1
    cut = [dim for dim, (part, all_of_it) in enumerate(zip(held, whole, strict=True)) if part != all_of_it]
    first = next((dim for dim, size in enumerate(whole) if size != 1), 0)  # a range of rows, whatever else is cut
    inner = [dim for dim in cut if dim != first]
    if tuple(shape) != held or uneven or len(inner) > 1 or any(p.is_partial() for p in placements):
        raise ValueError(
            f"{where} has placements {tuple(placements)} on a mesh of shape {tuple(mesh.shape)}, and rounding is "
            "'stochastic'; allowed are shards that are a range of rows, of one other dimension, or of both: shard "
            "evenly, or use rounding='nearest'"
        )
    beyond = [math.prod(whole[dim + 1 :]) for dim in range(len(whole))]
    base = sum(start * stride for start, stride in zip(offset, beyond, strict=True))
    if not inner:
        return base, math.prod(held), math.prod(held)
    return base, math.prod(held[inner[0] :]), math.prod(whole[inner[0] :])


def _scalar(value: torch.Tensor | float | None, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    """A steering number as the kernels read it; a tensor that already fits is not copied, none is waited for."""
    if value is None:
        return None
    if not isinstance(value, torch.Tensor):
        return torch.full((), float(value), dtype=dtype, device=device)
    if value.dtype is dtype and value.device == device:
        return value
    return value.to(device=device, dtype=dtype, non_blocking=True)


def _as_fp32(value: Any) -> torch.Tensor:
    """A number as an fp32 tensor on the CPU, a tensor where it is."""
    if isinstance(value, torch.Tensor):
        return value.to(torch.float32)
    return torch.as_tensor(value, dtype=torch.float32, device="cpu")


def _is_zero(lr: torch.Tensor | float) -> bool:
    """Whether a learning rate is known to be 0; device tensors are not read."""
    return bool(lr == 0) if not isinstance(lr, torch.Tensor) or lr.device.type == "cpu" else False


def _skipping_zeros(control: adam.Control, verdict: Verdict) -> adam.Control:
    """The same control, but the step is skipped, step counts included, if all gradients on all ranks are 0.

    Moments would stay as they are, but for L2 decay, and 0 / (0 + eps) is NaN at eps = 0.
    """
    # The sum is 0 only if every number is: the largest is brought near 1 before it is squared.
    nothing = (verdict.sum_of_squares == 0).float()
    if control.found_inf is not None:
        found_inf = control.found_inf.reshape(()).to(device=nothing.device, dtype=torch.float32)
        nothing = torch.maximum(nothing, found_inf)
    return adam.Control(control.grad_scale, nothing, control.sum_of_squares)


# ------------------------------------------------------------------------------------------------------------ batches


def _version(parameter: torch.Tensor) -> int:
    """A number that grows whenever a parameter is written, through its DTensor or its local part."""
    return parameter._version + parameter._local_tensor._version if is_sharded(parameter) else parameter._version  # type: ignore[attr-defined]


def _address_of(values: torch.Tensor) -> int:
    return values.data_ptr() if has_memory(values) else 0


class _Agreed(NamedTuple):
    """When a parameter and its full master last held the same weight."""

    version: int
    address: int
    dtype: torch.dtype

    @classmethod
    def now(cls, parameter: torch.Tensor) -> _Agreed:
        return cls(_version(parameter), _address_of(local(parameter)), parameter.dtype)

    def may_be_written(self, parameter: torch.Tensor) -> bool:
        """Whether somebody may have written the parameter since. A change of dtype is none: the master says more."""
        if parameter.dtype != self.dtype:
            return False
        return (self.version, self.address) != (_version(parameter), _address_of(local(parameter)))


def _as_written(parameter: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    """A full master, replaced by local values where they are not its rounding; nothing waits for the device."""
    return torch.where(parameter != master.to(parameter.dtype), parameter.float(), master)


def _state_keys(layout: adam.Layout) -> dict[int, str]:
    """By operand, the names of the state tensors that a layout keeps."""
    keys = {adam.M: "exp_avg", adam.V: "exp_avg_sq", adam.STEP: "step"}
    if layout.master != adam.NO_MASTER:
        keys[adam.EXTRA] = "master"
    if layout.amsgrad:
        keys[adam.TOP] = "max_exp_avg_sq"
    return keys


def _needed(master: str | None, group: dict[str, Any]) -> list[str]:
    """The names of what a step needs in a parameter's state."""
    further = ["max_exp_avg_sq"] * bool(group["amsgrad"]) + ["master"] * bool(master)
    return ["step", "exp_avg", "exp_avg_sq", *further]


def _is_complete(state: dict[str, Any], master: str | None, group: dict[str, Any]) -> bool:
    """Whether a parameter's state has what a step needs, and the master is of the kind that is kept."""
    step, held = state.get("step"), state.get("master")
    fits = not isinstance(held, torch.Tensor) or (bool(master) and (held.dtype == torch.int16) == (master == "split"))
    counted = isinstance(step, torch.Tensor) and step.dtype == torch.float32
    return fits and counted and all(key in state for key in _needed(master, group))


class _Batch:
    """What one launch updates, and how to tell whether it still describes the tensors."""

    def __init__(
        self,
        layout: adam.Layout,
        parameters: list[torch.Tensor],
        states: list[dict[str, Any]],
        rows: list[int],
        names: dict[int, list[int]],
    ):
        """`rows` are the parameters' groups, `names` further rows of the table; full masters agree now."""
        self.parameters, self.states = parameters, states
        self.sharded = any(map(is_sharded, parameters))
        self.keys = keys = _state_keys(layout)
        held = [local(parameter.detach()) for parameter in parameters]
        self.device = held[0].device
        self.dense = [_dense(one, layout) for one in held]
        self.copied = [(one, copy) for one, copy in zip(held, self.dense, strict=True) if one is not copy]
        self.held = held
        self.addresses = list(map(_address, held))
        self.contiguous = all(map(torch.Tensor.is_contiguous, self.dense))
        lists: list[list[torch.Tensor]] = [[] for _ in range(adam.OPERANDS)]
        lists[adam.PARAM] = self.dense
        for operand in keys:
            lists[operand] = self._state(operand)
        # All rows but the gradients'; the table is made with those.
        operands = adam.STOCHASTIC_OPERANDS if layout.stochastic else adam.OPERANDS
        self._contents: list[list[int] | None] = [names.get(row) for row in range(operands)]
        for operand in (adam.PARAM, *keys):
            self._contents[operand] = checked_addresses(lists[operand])
        hyper = torch.empty(len(held), adam.HYPER_COLUMNS, dtype=torch.float32, device=self.device)
        row_of = upload(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.device)
        self.batch = adam.Batch(layout, None, lists, row_of, hyper)
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return list(map(_version if self.sharded else attrgetter("_version"), self.parameters))

    def agreed(self) -> dict[int, _Agreed]:
        """By the parameter's id, when it and its full master agreed."""
        if self.batch.layout.master != adam.FULL_MASTER:
            return {}
        dtype = self.batch.layout.param
        entries = [_Agreed(*known, dtype) for known in zip(self.versions, self.addresses, strict=True)]
        return dict(zip(map(id, self.parameters), entries, strict=True))

    def _state(self, operand: int) -> list[torch.Tensor]:
        tensors = list(map(itemgetter(self.keys[operand]), self.states))
        return list(map(local, tensors)) if self.sharded else tensors

    def still_describes(self) -> bool:
        """Whether parameters and state lie where they lay, taking up state tensors that were replaced."""
        held = [local(parameter) for parameter in self.parameters] if self.sharded else self.parameters
        if list(map(_address, held)) != self.addresses:
            return False
        for operand in self.keys:
            now = self._state(operand)
            # On plain tensors: the same objects. Shards are taken anew each time, and only where they lie tells.
            if not self.sharded and not all(map(is_, now, self.batch.lists[operand])):
                return False
            if list(map(_address, now)) != self._contents[operand]:
                return False
        return True

    def take_outside_writes(self) -> None:
        """Let parameters that somebody wrote replace their full masters; a split one follows by itself."""
        if self.batch.layout.master != adam.FULL_MASTER:
            return
        now = self._versions()
        if now == self.versions:
            return
        masters = self.batch.lists[adam.EXTRA]
        for index, (before, after) in enumerate(zip(self.versions, now, strict=True)):
            if before != after:
                masters[index].copy_(_as_written(self.held[index], masters[index]))
        self.versions = now

    def _in_order(self, gradients: list[torch.Tensor], contiguous: bool) -> list[torch.Tensor]:
        """The gradients with their elements in the parameters' order, copied where autograd chose another."""
        if self.contiguous and contiguous:
            return gradients
        ordered = []
        for grad, dense in zip(gradients, self.dense, strict=True):
            grad = grad.resolve_neg()
            if grad.stride() != dense.stride() and not (grad.is_contiguous() and dense.is_contiguous()):
                grad = torch.empty_strided(grad.shape, dense.stride(), dtype=grad.dtype, device=grad.device).copy_(grad)
            ordered.append(grad)
        return ordered

    def prepare(
        self, grads: list[torch.Tensor], contiguous: bool, groups: torch.Tensor, control: adam.Control
    ) -> list[partial[Any]]:
        """All of a step that can fail or take long, and the calls that make it; they hold addresses only.

        Args:
            grads: one per parameter.
            contiguous: whether all of them are.
            groups: the table of the groups' options.
            control: on this device.
        """
        if self.sharded:
            grads = list(map(local, grads))
            contiguous = _all_contiguous(grads)
        gradients = self._in_order(grads, contiguous)
        self.take_outside_writes()
        for parameter, copy in self.copied:
            copy.copy_(parameter)
        self.batch.lists[adam.GRAD] = gradients
        if self.batch.table is None:
            contents = list(self._contents)
            contents[adam.GRAD] = checked_addresses(gradients)
            numels = [one.numel() for one in self.held]
            self.batch.table = TensorTable(numels, len(contents), adam.CHUNK, self.device, contents)
        else:
            self.batch.table.point(adam.GRAD, gradients)
        back = (partial(parameter.copy_, copy) for parameter, copy in self.copied)
        return [adam.launch(self.batch, groups, control), *back]

    def finish(self) -> None:
        """After the calls."""
        self.batch.lists[adam.GRAD] = []  # or their memory would outlive zero_grad
        # The kernels write through addresses, which autograd cannot see.
        torch.autograd.graph.increment_version(self.parameters)
        if self.batch.layout.master == adam.FULL_MASTER:
            self.versions = self._versions()


class _OwnOperations(_Batch):
    """Tensors whose memory no kernel may read (wrapper subclasses, fake and meta tensors): the reference steps them."""

    def __init__(
        self, layout: adam.Layout, parameters: list[torch.Tensor], states: list[dict[str, Any]], rows: list[int]
    ):
        self.parameters, self.states = parameters, states
        self.sharded = any(map(is_sharded, parameters))
        self.keys = _state_keys(layout)
        self.known = list(map(local, parameters))
        self.device = self.known[0].device
        self.addresses = [0] * len(parameters)
        self.held = [local(parameter.detach()) for parameter in parameters]
        lists: list[list[torch.Tensor]] = [[] for _ in range(adam.OPERANDS)]
        for operand in self.keys:
            lists[operand] = self._state(operand)
        row_of = upload(torch.tensor(rows, dtype=torch.int64, device="cpu"), self.device)
        hyper = torch.zeros(len(rows), adam.HYPER_COLUMNS, dtype=torch.float32, device=self.device)
        self.batch = adam.Batch(layout, None, lists, row_of, hyper)
        self.versions = self._versions()

    def still_describes(self) -> bool:
        return all(map(is_, map(local, self.parameters), self.known)) and all(
            all(map(is_, self._state(operand), self.batch.lists[operand])) for operand in self.keys
        )

    def prepare(
        self, grads: list[torch.Tensor], contiguous: bool, groups: torch.Tensor, control: adam.Control
    ) -> list[partial[Any]]:
        # Taken anew: `parameter.data` may have been replaced.
        self.held = self.batch.lists[adam.PARAM] = [local(parameter.detach()) for parameter in self.parameters]
        self.take_outside_writes()
        self.batch.lists[adam.GRAD] = list(map(local, grads))
        return [adam.launch(self.batch, groups, control)]


# ----------------------------------------------------------------------------------------------------------- optimizer


class _Masters(Mapping[torch.Tensor, torch.Tensor]):
    """What `masters` returns: each master is put together when it is asked for."""

    def __init__(self, optimizer: _AdamBase) -> None:
        self._optimizer = optimizer
        self._own = dict.fromkeys(parameters_of(optimizer))

    @torch.no_grad()
    def __getitem__(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._own:
            raise KeyError("not a parameter of this optimizer")
        master = self._optimizer._master(parameter)
        return parameter.detach().float() if master is None else master

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._own)

    def __len__(self) -> int:
        return len(self._own)


class _AdamBase(StepsOnVerdict, Optimizer):
    """What Adam and AdamW share: everything but their signatures.

    They inherit from torch's classes of the same names, for frameworks that ask `isinstance`, and nothing of theirs:
    what this class does not define comes from `torch.optim.Optimizer`, called by its name.
    """

    # False: torch's scalers unscale in place, and decide whether to call step().
    _step_supports_amp_scaling = StepSupportsAmpScaling()
    # Options that a checkpoint does not change, beside those of the layout.
    _fixed_options: tuple[str, ...] = ()

    def __init__(self, params: ParamsT, defaults: dict[str, Any], max_grad_norm: float | None) -> None:
        _check_options(defaults)
        if max_grad_norm is not None:
            _number(max_grad_norm, "Invalid max_grad_norm value", "None and finite numbers above 0", lambda x: x > 0)
        self.max_grad_norm = max_grad_norm
        self._squares: torch.Tensor | None = None
        self._checked_norm: float | None = None
        self._agreed: dict[int, _Agreed] = {}
        self._stepped_without_gradients = False
        self._recorded: dict[int, torch.Tensor] = {}
        Optimizer.__init__(self, params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)
        self.__dict__.setdefault("max_grad_norm", None)
        self.__dict__.setdefault("_squares", None)
        self.__dict__.setdefault("_checked_norm", None)
        self.__dict__.setdefault("_stepped_without_gradients", False)
        self.__dict__.setdefault("_recorded", {})  # state tensors that CUDA graphs write to
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
        self._forget()
        self._agree()

    @torch.no_grad()
    def __getstate__(self) -> dict[str, Any]:
        self._note_agreed()
        state: dict[Any, Any] = defaultdict(dict, self.state)
        for parameter in self._with_full_master():
            state[parameter] = {**state[parameter], "master": self._master(parameter)}
        return {**Optimizer.__getstate__(self), "state": state, "max_grad_norm": self.max_grad_norm}

    def _forget(self) -> None:
        """Drop what is derived from parameters and state."""
        self._note_agreed()
        self._stepped: list[torch.Tensor] | None = None
        self._stepped_kinds: tuple[list[torch.dtype], set[type]] = ([], set())
        self._stepped_state: tuple[Any, int] = (None, 0)
        self._checked: list[tuple[Any, ...]] = []
        self._kinds: list[tuple[Any, ...]] = []
        self._members: list[tuple[_Batch, list[int]]] = []
        self._group_tables: dict[torch.device, tuple[list[list[float]] | None, torch.Tensor]] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `torch.optim.Optimizer.add_param_group`.

        Raises:
            TypeError, ValueError: an option or a parameter is not allowed; the optimizer is unchanged.
        """
        if isinstance(param_group, dict):  # else torch raises
            _check_options({**self.defaults, **param_group})
        Optimizer.add_param_group(self, param_group)
        number = len(self.param_groups) - 1
        added = self.param_groups[-1]
        added.update({name: _plain(added[name]) for name in ("lr", "betas", "eps", "weight_decay")})
        try:
            for index, parameter in enumerate(added["params"]):
                # What is frozen now may be of any kind (quantized weights); if it is ever stepped, it is checked then.
                if parameter.requires_grad and not is_lazy(parameter):
                    _check_parameter(parameter, f"parameter {index} of group {number}", added["master_weights"])
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise
        self._forget()

    @property
    def grad_norm(self) -> torch.Tensor | None:
        """The unscaled gradients' 2-norm before clipping, from the last step with `max_grad_norm`; 0-dim, on device."""
        return None if self._squares is None else self._squares.sqrt().float()

    # ------------------------------------------------------------------------------------------------------- masters

    def _note_agreed(self) -> None:
        """Take over from the batches, which are about to go, when their parameters and masters agreed."""
        for batch, _ in self.__dict__.get("_members", ()):
            self._agreed.update(batch.agreed())

    def _agree(self) -> None:
        """Note that parameters and full masters hold the same weights now."""
        self._agreed = {id(parameter): _Agreed.now(parameter) for parameter in self._with_full_master()}

    def _with_full_master(self) -> list[torch.Tensor]:
        held = (
            (parameter, self.state[parameter].get("master"))
            for parameter in parameters_of(self)
            if parameter in self.state
        )
        return [p for p, master in held if isinstance(master, torch.Tensor) and master.dtype == torch.float32]

    def _master_if_written(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The local values that a full master must become because somebody wrote the parameter; None if nobody did."""
        held, own = local(parameter.detach()), local(self.state[parameter]["master"])
        known = self._agreed.get(id(parameter))
        comparable = held.device == own.device and held.shape == own.shape
        if known is None or not comparable or not known.may_be_written(parameter):
            return None
        return _as_written(held, own)

    def _master(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The fp32 master as it is now, none for fp32 parameters; it changes nothing.

        So weights that are swapped in for a while (an average, for evaluation) cost the masters no bits, even if a
        checkpoint is made of them.
        """
        state = self.state[parameter] if parameter in self.state else {}
        master = state.get("master")
        if parameter.dtype == torch.float32 or not isinstance(master, torch.Tensor):
            return None
        if master.dtype == torch.int16:
            return _like(parameter, join_master(local(parameter.detach()), local(master)))
        written = self._master_if_written(parameter)
        return master if written is None else _like(parameter, written)

    def masters(self) -> Mapping[torch.Tensor, torch.Tensor]:
        """By parameter, its weight in fp32: the master, or the parameter where there is none.

        Where the optimizer holds it in fp32 (fp32 parameters, full masters) nothing is copied: clone what you want to
        keep, since the next step changes it, and write nothing into it. A split master is put together when it is asked
        for, one at a time while `items` runs. For DTensors they are DTensors.

        A moving average of the weights, which in bf16 would stand still::

            average = {p: master.clone() for p, master in optimizer.masters().items()}
            for p, master in optimizer.masters().items():  # after each step
                average[p].lerp_(master, 1 - decay)
        """
        self._note_agreed()
        return _Masters(self)

    @torch.no_grad()
    def _take_outside_writes(self, recording: bool = False) -> None:
        """Let parameters that somebody wrote replace their full masters, whether or not they are in a batch."""
        self._note_agreed()
        for parameter in self._with_full_master():
            written = self._master_if_written(parameter)
            if written is None:
                continue
            local(self.state[parameter]["master"]).copy_(written)
            if not recording:  # else it is done at the replay, and does no harm a second time
                self._agreed[id(parameter)] = _Agreed.now(parameter)

    @torch._disable_dynamo
    @torch.no_grad()
    def refresh_master(self, parameters: torch.Tensor | Iterable[torch.Tensor] | None = None) -> None:
        """Make masters exactly the weights as they are now, dropping what they knew beyond the parameter's dtype.

        To call after writing weights that have nothing to do with those before, or through ``.data``, which a full
        master cannot notice. Nothing waits for the device.

        Args:
            parameters: of this optimizer; None for all.

        Raises:
            ValueError: a tensor is not a parameter of this optimizer; nothing was changed.
        """
        own = {id(parameter) for parameter in parameters_of(self)}
        if parameters is None:
            parameters = parameters_of(self)
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        for index, parameter in enumerate(chosen):
            if id(parameter) not in own:
                raise ValueError(
                    f"parameters[{index}] has shape {tuple(parameter.shape)} and dtype {parameter.dtype} and is not in "
                    "this optimizer; allowed are the parameters that it was given"
                )
        self._note_agreed()
        for parameter in chosen:
            state = self.state[parameter] if parameter in self.state else {}
            if "master" in state:
                master = local(state["master"])
                master.zero_() if master.dtype == torch.int16 else master.copy_(local(parameter.detach()))
            self._agreed[id(parameter)] = _Agreed.now(parameter)

    # -------------------------------------------------------------------------------------------------------- state

    def _new_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        value = parameter.detach()
        state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32, device=value.device)}
        for key in ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
            state[key] = torch.zeros_like(value, dtype=group["state_dtype"], memory_format=torch.preserve_format)
        master = _master_of(parameter, group["master_weights"])
        if master == "full":
            state["master"] = value.to(torch.float32, memory_format=torch.preserve_format)
        elif master == "split":
            state["master"] = torch.zeros_like(value, dtype=torch.int16, memory_format=torch.preserve_format)
        return state

    def _complete_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter, with whatever it lacks; what was there before stays until all of it is made."""
        known = self.state.get(parameter)
        kept = _master_of(parameter, group["master_weights"])
        if known is not None and _is_complete(known, kept, group):
            return known
        state = {} if known is None else dict(known)
        self._fit_master(parameter, kept, state)
        if any(key not in state for key in _needed(kept, group)):
            if kept == "full" and "master" not in state:
                self._agreed[id(parameter)] = _Agreed.now(parameter)
            state = {**self._new_state(parameter, group), **state}
        if not isinstance(state["step"], torch.Tensor) or state["step"].dtype != torch.float32:
            state["step"] = _step_count(state["step"], "a parameter's state").to(parameter.device)
        self.state[parameter] = state
        return state

    def _fit_master(self, parameter: torch.Tensor, kept: str | None, state: dict[str, Any]) -> None:
        """Turn the master into the kind to keep: dtype or option may have changed, or canonical state was put in."""
        master = state.get("master")
        if not isinstance(master, torch.Tensor):
            return
        split = master.dtype == torch.int16
        if kept == "split" and not split:
            written = self._master_if_written(parameter)
            weight, rest = split_master(local(master) if written is None else written)
            local(parameter.detach()).copy_(weight)
            state["master"] = _like(parameter, rest)
        elif kept == "full" and split and parameter.dtype == torch.bfloat16:
            state["master"] = _like(parameter, join_master(local(parameter.detach()), local(master)))
        elif kept is None or (kept == "full" and split):
            del state["master"]  # without the bf16 parameter that they complete, 16 bits say nothing

    # --------------------------------------------------------------------------------------------------------- step

    def _options_changed(self) -> bool:
        """Whether an option of any group may differ from what the last step saw.

        Numbers are compared as objects, which is exact and compares no tensors. What can change in place always may.
        """
        now = list(map(_options_of, self.param_groups))
        if len(now) != len(self._checked) or self._limit != self._checked_norm:
            return True
        for values, before in zip(now, self._checked, strict=True):
            if not all(map(is_, values, before)) or type(values[1]) is not tuple:
                return True
            if not {float, int}.issuperset(map(type, (values[0], *values[1], values[2], values[3]))):
                return True
        return False

    def _grouped(
        self, parameters: list[torch.Tensor], grads: list[torch.Tensor], recording: bool = False
    ) -> list[tuple[_Batch, list[int]]]:
        """Parameters in batches by device and layout, after checking that every one can be stepped.

        Args:
            parameters, grads: what is stepped.
            recording: for a CUDA graph; state is then neither made nor changed.
        """
        self._note_agreed()
        row_of = {id(p): row for row, group in enumerate(self.param_groups) for p in group["params"]}
        rows = [row_of[id(parameter)] for parameter in parameters]
        stream_of = {id(parameter): number for number, parameter in enumerate(parameters_of(self))}
        kinds: dict[tuple[Any, ...], list[int]] = {}
        names: dict[int, tuple[int, ...]] = {}
        seen: set[int] = set()
        for index, (parameter, grad) in enumerate(zip(parameters, grads, strict=True)):
            if id(parameter) in seen:  # torch has warned; in one launch two updates of it would race
                continue
            seen.add(id(parameter))
            group = self.param_groups[rows[index]]
            where = f"parameter {index} with a gradient (group {rows[index]})"
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"{where} has a gradient of layout {grad.layout}; allowed are dense gradients: "
                    "use torch.optim.SparseAdam, or sparse=False in the embedding"
                )
            _check_parameter(parameter, where, group["master_weights"])
            if grad.dtype not in DTYPE_CODES:
                raise TypeError(
                    f"{where} has a gradient of dtype {grad.dtype}; allowed are float32, float16 and bfloat16"
                )
            if recording:
                known = self.state.get(parameter)
                if known is None or not _is_complete(known, _master_of(parameter, group["master_weights"]), group):
                    raise RuntimeError(
                        f"{where} has no complete state yet and the step is recorded into a CUDA graph, each replay of "
                        "which would make it anew; allowed are parameters with state: take a step with the same "
                        "parameters and options before the capture"
                    )
            state = self._complete_state(parameter, group)
            layout = _layout_of(parameter, grad.dtype, group)
            tensors = (parameter, grad, *map(state.__getitem__, _state_keys(layout).values()))
            addressable = all(map(has_memory, map(local, tensors)))
            for key, value in state.items():
                if key in CANONICAL_KEYS:
                    self._check_state(where, key, value, parameter, group, layout, addressable, recording)
            if layout.stochastic:
                if not addressable:
                    raise TypeError(
                        f"{where} is a {type(local(parameter)).__name__} without memory of its own, and rounding is "
                        "'stochastic'; allowed is rounding='nearest'"
                    )
                seed = group["seed"]
                names[index] = (stream_of[id(parameter)], *_place(parameter, where), seed)
            kinds.setdefault((local(parameter).device, layout, addressable), []).append(index)
        self._take_outside_writes(recording)
        batches: list[tuple[_Batch, list[int]]] = []
        for (_, layout, addressable), indices in kinds.items():
            members = [parameters[index] for index in indices]
            states = [self.state[parameter] for parameter in members]
            if not addressable:
                batches.append((_OwnOperations(layout, members, states, [rows[index] for index in indices]), indices))
                continue
            named = list(zip(*(names[index] for index in indices), strict=True)) if layout.stochastic else []
            further = {adam.STREAM + row: list(values) for row, values in enumerate(named)}
            batches.append((_Batch(layout, members, states, [rows[index] for index in indices], further), indices))
        return batches

    def _check_state(
        self,
        where: str,
        key: str,
        value: Any,
        parameter: torch.Tensor,
        group: dict[str, Any],
        layout: adam.Layout,
        addressable: bool,
        recording: bool,
    ) -> None:
        """Raise unless a state tensor can stand beside its parameter in one launch."""
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"state {key!r} of {where} is a {type(value).__name__}; allowed is a tensor")
        held, own = local(value), local(parameter)
        master = torch.int16 if layout.master == adam.SPLIT_MASTER else torch.float32
        dtype = {"step": torch.float32, "master": master}.get(key, group["state_dtype"])
        shape = () if key == "step" else tuple(own.shape)
        fits = held.numel() == 1 if key == "step" else held.shape == own.shape
        if held.dtype != dtype or held.device != own.device or not fits:
            raise ValueError(
                f"state {key!r} of {where} is {tuple(held.shape)} {held.dtype} on {held.device}; allowed is {shape} "
                f"{dtype} on {own.device}: move it back, or load it with load_state_dict"
            )
        if not addressable:
            return
        dense = _dense(own, layout)
        same_order = held.stride() == dense.stride() or (held.is_contiguous() and dense.is_contiguous())
        if key != "step" and not same_order:
            # Elements in another order than the parameter's: lay them out as the kernels walk them.
            if recording:
                raise RuntimeError(
                    f"state {key!r} of {where} lies in another order than the parameter and the step is recorded into "
                    "a CUDA graph; allowed is the same order: take a step before the capture"
                )
            ordered = torch.empty_strided(dense.shape, dense.stride(), dtype=held.dtype, device=held.device).copy_(held)
            self.state[parameter][key] = _like(parameter, ordered)

    def _group_table(self, device: torch.device, changed: bool, recording: bool) -> torch.Tensor:
        """The hyper-parameters of all groups on a device, written again only if one changed; a graph's own for one."""
        if not (changed or recording) and device in self._group_tables:
            return self._group_tables[device][1]
        values: list[list[float]] = []
        late: list[tuple[int, int, torch.Tensor]] = []
        limit = self._limit
        for row, group in enumerate(self.param_groups):
            columns = [0.0] * adam.GROUP_COLUMNS
            options = (group["lr"], *group["betas"], group["eps"], group["weight_decay"])
            for column, value in zip((adam.LR, adam.BETA1, adam.BETA2, adam.EPS, adam.DECAY), options, strict=True):
                if isinstance(value, torch.Tensor) and value.device.type != "cpu":
                    late.append((row, column, value))
                else:
                    columns[column] = float(value)
            columns[adam.MAXIMIZE] = float(bool(group["maximize"]))
            columns[adam.DECOUPLED] = float(bool(group["decoupled_weight_decay"]))
            columns[adam.MAX_NORM] = 0.0 if limit is None else float(limit)
            values.append(columns)
        known, table = (None, None) if recording else self._group_tables.get(device, (None, None))
        if known != values or table is None:
            if table is not None:
                self._group_tables[device] = (None, table)  # until it is written
            table = upload(torch.tensor(values, dtype=torch.float64, device="cpu"), device, out=table)
            if not recording:
                self._group_tables[device] = (values, table)
        for row, column, value in late:
            table[row, column].copy_(value.reshape(()), non_blocking=True)
        return table

    @property
    def _limit(self) -> float | None:
        """The 2-norm to which the coming step clips."""
        asked = None if self._decision is None else self._decision.max_norm
        return min((one for one in (asked, self.max_grad_norm) if one is not None), default=None)

    def _control(self) -> adam.Control:
        """Scale, flag and norm for this step: decided by a scaler, or measured here if clipping needs it."""
        decision = self._decision
        if decision is None:  # torch's scalers set attributes where they are told that step() unscales
            scale, found_inf, squares = getattr(self, "grad_scale", None), getattr(self, "found_inf", None), None
        else:
            # Of gradients that were unscaled in place, and may have been changed since, the sum is formed anew.
            current = decision.scale is not None or decision.max_norm is not None
            scale, found_inf = decision.scale, decision.verdict.found_inf
            squares = decision.verdict.sum_of_squares if current else None
        if self._limit is None:
            return adam.Control(scale, found_inf)
        if squares is None:
            factor = None if scale is None else Factor(_as_fp32(scale).reshape(()), inverted=True)
            verdict = self._checker.verdict(factor)
            squares = None if verdict is None else verdict.sum_of_squares
        self._squares = squares
        return adam.Control(scale, found_inf, squares)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss and gradients first, and returns the loss.

        Returns:
            What the closure returned, or None.

        Raises:
            ValueError: an option of a group is out of range; nothing was changed.
            RuntimeError: a gradient is sparse; nothing was changed.
            TypeError: a dtype is not supported; nothing was changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step_on_device()
        return loss

    @torch._disable_dynamo
    @torch.no_grad()
    def _step_on_device(self) -> None:
        changed = self._options_changed()
        if changed:
            for group in self.param_groups:
                _check_options(group)
        # torch.distributed.checkpoint takes such a step, with gradients of 0, to find out what state there is.
        # A rank without gradients never has state: it takes part in the first such step only, as the others do.
        first_at_rest = not self.state and all(_is_zero(group["lr"]) for group in self.param_groups)
        first_at_rest = first_at_rest and not self._stepped_without_gradients
        parameters = parameters_of(self)
        grads = list(map(attrgetter("grad"), parameters))
        if any(map(is_, grads, repeat(None))):
            parameters = [parameter for parameter, grad in zip(parameters, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        if not parameters:
            if not self._stepped_without_gradients:
                self._warn_if_sharded_since()
            # Others may have some, and wait for this rank's part of their sums.
            self._stepped_without_gradients = True
            self._control()
            if first_at_rest:
                self._checker.verdict(keep=False)
            return
        types = set(map(type, grads))
        if types != {torch.Tensor}:
            settle_gradients(parameters)
            grads = list(map(attrgetter("grad"), parameters))
        contiguous = _all_contiguous(grads)
        recording = capturing(grads[0].device) or (
            len(self._members) > 1 and any(capturing(batch.device) for batch, _ in self._members)
        )
        if recording:
            members = self._grouped(parameters, grads, recording)
        else:
            self._find_members(parameters, grads, types, contiguous, changed)
            members = self._members
        control = self._control()
        if first_at_rest:
            verdict = self._checker.verdict(keep=False)
            assert verdict is not None
            control = _skipping_zeros(control, verdict)
        calls: list[partial[Any]] = []
        needed: list[tuple[adam.Control, torch.Tensor]] = []  # the calls hold only their addresses
        for batch, indices in members:
            device = batch.device
            own = grads if len(indices) == len(grads) else [grads[index] for index in indices]
            here = adam.Control(
                _scalar(control.grad_scale, torch.float32, device),
                _scalar(control.found_inf, torch.float32, device),
                _scalar(control.sum_of_squares, torch.float64, device),
            )
            groups = self._group_table(device, changed, recording)
            needed.append((here, groups))
            calls += batch.prepare(own, contiguous, groups, here)
        apply(calls)
        if recording:  # nothing of it has happened; what a replay writes to must stay
            for batch, _ in members:
                if not capturing(batch.device):
                    batch.finish()
            held = (one for batch, _ in members for operand in batch.keys for one in batch.batch.lists[operand])
            self._recorded.update((id(one), one) for one in held)
            return
        for batch, _ in members:
            batch.finish()
        self._checked = list(map(_options_of, self.param_groups))
        self._checked_norm = self._limit

    def _find_members(
        self,
        parameters: list[torch.Tensor],
        grads: list[torch.Tensor],
        types: set[type],
        contiguous: bool,
        changed: bool,
    ) -> None:
        """Have the batches describe what is stepped: mostly the last step's do.

        Args:
            parameters, grads: what is stepped.
            types: of the gradients.
            contiguous: whether all of them are.
            changed: whether an option of a group may have changed since.
        """
        if changed:
            kinds = [
                (
                    *(group["amsgrad"], group["decoupled_weight_decay"], bool(group["weight_decay"] != 0)),
                    *(group["master_weights"], group["state_dtype"], group["rounding"], group["seed"]),
                )
                for group in self.param_groups
            ]
            if kinds != self._kinds:
                self._stepped = None
                self._kinds = kinds
        grad_kinds = list(map(attrgetter("dtype"), grads)), types
        if (
            self._stepped is not None
            and len(parameters) == len(self._stepped)
            and all(map(is_, parameters, self._stepped))
            and grad_kinds == self._stepped_kinds
            # Somebody may have cleared the state, or put another in its place, to start anew.
            and self.state is self._stepped_state[0]
            and len(self.state) == self._stepped_state[1]
            # Sparse gradients never say that they are contiguous.
            and (contiguous or all(grad.layout == torch.strided for grad in grads))
            and all(batch.still_describes() for batch, _ in self._members)
        ):
            return
        self._note_agreed()
        self._stepped, self._members = None, []
        self._members = self._grouped(parameters, grads)
        self._stepped, self._stepped_kinds = parameters, grad_kinds
        self._stepped_state = (self.state, len(self.state))

    def _warn_if_sharded_since(self) -> None:
        """Say so if the model was sharded after the optimizer was made, which then trains parameters of nobody.

        They have no gradients, while DTensors of the same shapes do. Looked for once, when nothing has a gradient, and
        only in a process group, without which nothing is sharded: the walk over all objects takes a while.
        """
        cls = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
        own = [parameter for parameter in parameters_of(self) if parameter.requires_grad and not is_lazy(parameter)]
        if cls is None or not torch.distributed.is_initialized() or not own or any(map(is_sharded, own)):
            return
        leaves = [one for one in gc.get_objects() if issubclass(type(one), cls) and one.is_leaf and one.requires_grad]
        with_gradient = {leaf.shape for leaf in leaves if leaf.grad is not None}
        shapes = {parameter.shape for parameter in own}
        if shapes & with_gradient and shapes <= {leaf.shape for leaf in leaves}:
            warnings.warn(
                f"none of the {len(own)} parameters of this optimizer has a gradient, while DTensors of the same "
                "shapes do: the model was sharded after the optimizer was made, so that it trains nothing; make the "
                "optimizer after fully_shard",
                UserWarning,
                stacklevel=5,
            )

    # --------------------------------------------------------------------------------------------------- checkpoints

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state in canonical form: per parameter ``step``, ``exp_avg``, ``exp_avg_sq``, ``master`` ... in fp32.

        There is no ``master`` for fp32 parameters, which are their own, nor with ``master_weights=None``.
        """
        self._note_agreed()
        # Hooks registered by others see the canonical form, so they run at the end.
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            packed = Optimizer.state_dict(self)
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        for index, parameter in enumerate(parameters_of(self)):
            state = packed["state"].get(index)
            if state is None:
                continue
            canonical = dict(state)
            canonical.pop("master", None)
            master = self._master(parameter)
            if master is not None:
                canonical["master"] = master
            for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
                if key in canonical and canonical[key].dtype != torch.float32:
                    canonical[key] = canonical[key].float()
            packed["state"][index] = canonical
        # How state lies in memory is not loaded. It is there because what loads a flat checkpoint asks for every option
        # that a group has, and as text because not everything that reads checkpoints knows dtypes.
        packed["param_groups"] = [
            {**group, "state_dtype": str(group["state_dtype"]).removeprefix("torch.")}
            for group in packed["param_groups"]
        ]
        for hook in list(hooks.values()):
            replaced = hook(self, packed)
            packed = packed if replaced is None else replaced
        return packed

    @torch._disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of halfstep's, torch's, apex's or TransformerEngine's Adam or AdamW, keeping every bit.

        Options that say how state lies in memory (`master_weights`, `state_dtype`, `rounding`) stay as they are here;
        all others are taken from the checkpoint. Where it has a master, the parameter is set to the master's rounding.

        apex and TransformerEngine count steps per group: each parameter with state takes its group's count.
        TransformerEngine's masters are taken for fp16 and bf16 parameters; those beside fp32 parameters are never
        updated there and are left out. Its 16-bit remainders complete the parameter as it is now: load the model first.
        apex saves no masters: `halfstep.integrations.checkpoint.with_masters` adds them. Neither checkpoint says
        whether weight decay is decoupled; the class it is loaded into does.

        Once a step was captured into a CUDA graph, what is loaded is written into the tensors that the graph writes to.

        Raises:
            ValueError: groups, parameters, shapes, keys or numbers do not fit; the optimizer and its parameters are
                unchanged, as they are after Ctrl-C.
        """
        state_dict = dict(state_dict)
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        groups, owners = _matched_groups(self.param_groups, state_dict, (*LAYOUT_OPTIONS, *self._fixed_options))
        counts = {
            index: group["step"] for group in state_dict["param_groups"] if "step" in group for index in group["params"]
        }
        loaded = {
            parameter: self._loaded_state(
                index, parameter, group, _canonical(index, parameter, saved, counts.get(index))
            )
            for index, (parameter, group) in owners.items()
            if (saved := state_dict["state"].get(index))
        }
        fresh: dict[Any, Any] = defaultdict(dict)
        fresh.update((key, value) for key, value in state_dict["state"].items() if key not in owners)
        fresh.update((parameter, state) for parameter, (state, _) in loaded.items())
        # Everything fits. What was derived from the state before goes first: without it all is found out anew.
        self._forget()
        pairs = ((local(p.detach()), weight) for p, (_, weight) in loaded.items() if weight is not None)
        writes = [partial(held.copy_, local(weight)) for held, weight in pairs]
        for parameter, (state, _) in loaded.items():
            writes += self._in_place(parameter, state)
        apply([*writes, partial(self.__dict__.update, state=fresh, param_groups=groups, _agreed={})])
        self._agree()
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def _in_place(self, parameter: torch.Tensor, state: dict[str, Any]) -> list[partial[Any]]:
        """Calls that write a loaded state into the tensors that CUDA graphs use, which take its place in `state`."""
        calls = []
        for key, held in self.state.get(parameter, {}).items() if self._recorded else ():
            value = state.get(key)
            if not isinstance(value, torch.Tensor) or id(local(held)) not in self._recorded:
                continue
            if (value.shape, value.dtype, value.device) == (held.shape, held.dtype, held.device):
                calls.append(partial(local(held).copy_, local(value)))
                state[key] = held
        return calls

    def _loaded_state(
        self, index: int, parameter: torch.Tensor, group: dict[str, Any], saved: dict[str, Any]
    ) -> tuple[dict[str, Any], torch.Tensor | None]:
        """One parameter's state in this optimizer's layout, and what the parameter must become (None: stay)."""
        where = f"state of parameter {index}"
        for key in ("step", "exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ())):
            if key not in saved:
                raise ValueError(
                    f"{where} lacks {key!r}; it has {', '.join(map(repr, saved)) or 'nothing'}: "
                    "the checkpoint is not of an Adam with the same options"
                )
        state: dict[str, Any] = {}
        for key, value in saved.items():
            if key == "step":
                state[key] = _step_count(value, where).to(parameter.device)
            elif key in CANONICAL_KEYS:
                if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                    shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                    raise ValueError(
                        f"{key!r} in the {where} has shape {shape}; allowed is {tuple(parameter.shape)}: "
                        "the checkpoint is of another model, or its parameters stand in another order"
                    )
                if not value.is_floating_point():
                    raise ValueError(
                        f"{key!r} in the {where} has dtype {value.dtype}; allowed are floating-point dtypes"
                    )
                dtype = torch.float32 if key == "master" else group["state_dtype"]
                state[key] = torch.empty_like(parameter, dtype=dtype, requires_grad=False).copy_(value)
            else:
                state[key] = _moved(value, parameter.device)
        master = state.pop("master", None)
        if not group["amsgrad"]:
            state.pop("max_exp_avg_sq", None)
        kept = _master_of(parameter, group["master_weights"])
        if master is None:
            if kept == "full":
                state["master"] = parameter.detach().to(torch.float32, memory_format=torch.preserve_format)
            elif kept == "split":
                state["master"] = torch.zeros_like(parameter, dtype=torch.int16, requires_grad=False)
            return state, None
        if kept == "split":
            weight, rest = split_master(local(master))
            state["master"] = _like(parameter, rest)
            return state, _like(parameter, weight)
        if kept == "full":
            state["master"] = master
        return state, master.to(parameter.dtype)


def _like(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Local values as a tensor of the parameter's kind: a DTensor with its mesh and placements, or themselves."""
    if not is_sharded(parameter):
        return values
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        values,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _step_count(saved: Any, where: str) -> torch.Tensor:
    """A saved step count as a tensor of its own, 0-dim fp32, where it was.

    Raises:
        ValueError: it is no whole number from 0 that fp32 holds.
    """
    device, value = torch.device("cpu"), saved
    if isinstance(saved, torch.Tensor):
        if saved.numel() != 1:
            raise ValueError(f"'step' in the {where} has shape {tuple(saved.shape)}; allowed is one number")
        held = local(saved.detach())
        if not has_memory(held):
            return held.reshape(()).to(torch.float32, copy=True)
        device, value = held.device, held.item()
    value = _plain(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
        raise ValueError(f"'step' in the {where} is {value!r}; allowed are whole numbers from 0")
    if value != int(value) or float(np.float32(value)) != value:
        raise ValueError(
            f"'step' in the {where} is {value!r}, which is no step count in fp32; allowed are whole numbers from 0 "
            "that fp32 holds: all up to 16,777,216"
        )
    return torch.full((), float(value), dtype=torch.float32, device=device)


def _moved(value: Any, device: torch.device) -> Any:
    """State of others, its tensors on the device of their parameter, as `torch.optim.Optimizer` has it."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(one, device) for key, one in value.items()}
    return type(value)(_moved(one, device) for one in value) if type(value) in (list, tuple, set) else value


def _is_nothing(value: Any) -> bool:
    """TransformerEngine's None, or the empty dict that torch puts where a flat state lacks an entry."""
    return value is None or (isinstance(value, dict) and not value)


def _canonical(index: Any, parameter: torch.Tensor, saved: dict[str, Any], count: Any) -> dict[str, Any]:
    """One parameter's saved state by our names, whoever saved it; `count` is the step count of its group, or None."""
    state = {key: value for key, value in saved.items() if not _is_nothing(value) and key != "master_param"}
    if count is not None:
        state.setdefault("step", count)
    master = saved.get("master_param")
    if not isinstance(master, torch.Tensor) or parameter.dtype == torch.float32:
        return state
    if master.dtype == torch.int16:
        # The lower half of the bits, the upper one rounded half away from 0: as `split_master` splits, but for NaN.
        where = f"'master_param' in the state of parameter {index}"
        if parameter.dtype != torch.bfloat16:
            raise ValueError(
                f"{where} has dtype torch.int16, a remainder of a bfloat16 weight, and the parameter has dtype "
                f"{parameter.dtype}; allowed is bfloat16: load model and optimizer in bfloat16, then convert"
            )
        if master.shape != parameter.shape:
            raise ValueError(
                f"{where} has shape {tuple(master.shape)}; allowed is {tuple(parameter.shape)}: "
                "the checkpoint is of another model, or its parameters stand in another order"
            )
        weight = local(parameter.detach())
        master = _like(parameter, join_master(weight, local(master).to(weight.device)))
    return {**state, "master": master}


def _matched_groups(
    groups: list[dict[str, Any]], state_dict: dict[str, Any], kept: Iterable[str]
) -> tuple[list[dict[str, Any]], dict[Any, tuple[torch.Tensor, dict[str, Any]]]]:
    """The groups as they will be after loading, and to which parameter each saved index belongs.

    Args:
        groups: as they are.
        state_dict: what is loaded.
        kept: options that stay as they are.
    """
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"state_dict has keys {list(state_dict)}; it lacks {key!r}: it is not an optimizer's state_dict"
            )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            "loaded state dict has a different number of parameter groups: "
            f"{len(saved_groups)}; allowed is {len(groups)}, as in this optimizer"
        )
    result, owners = [], {}
    for number, (group, saved) in enumerate(zip(groups, saved_groups, strict=True)):
        if "params" not in saved:
            raise ValueError(f"group {number} of the checkpoint has {', '.join(map(repr, saved))}; it lacks 'params'")
        if len(group["params"]) != len(saved["params"]):
            raise ValueError(
                "loaded state dict contains a parameter group that doesn't match the size of optimizer's group: "
                f"group {number} has {len(saved['params'])} parameters there, {len(group['params'])} here"
            )
        if not saved.get("bias_correction", True):
            raise ValueError(
                f"bias_correction is {saved['bias_correction']} in group {number} of the checkpoint; allowed is True: "
                "train on with the optimizer that saved it"
            )
        names, here = saved.get("param_names"), group.get("param_names")
        if names and here and names != here and sorted(names) == sorted(here):
            first = next(place for place, pair in enumerate(zip(names, here, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"the parameters of group {number} stand in another order in the checkpoint: parameter {first} is "
                f"{names[first]!r} there, {here[first]!r} here; allowed is the same order: make the optimizer in it"
            )
        known = {name: value for name, value in saved.items() if name not in FOREIGN_OPTIONS}
        merged = {**group, **known, **{name: group[name] for name in kept}, "params": group["params"]}
        if isinstance(merged["lr"], torch.Tensor):
            merged["lr"] = merged["lr"].clone()
        _check_options(merged)
        result.append(merged)
        owners.update({index: (p, merged) for index, p in zip(saved["params"], group["params"], strict=True)})
    return result, owners


_ARGUMENTS = """

    Args:
        params: iterable of parameters, of ``(name, parameter)`` pairs, or of group dicts; fp32, fp16 and bf16 may mix.
            One given twice in a group is warned of, as in torch, and stepped once.
        lr: learning rate; a float, or a one-element tensor that is read on the device.
        betas: decay rates of the two moments, each from 0 to below 1.
        eps: added to the root of the second moment.
        weight_decay: {decay}.
        amsgrad: divide by the largest second moment so far (Reddi et al., 2018).
        maximize: ascend instead of descend.
        foreach, capturable, fused: accepted as torch accepts them; every step is fused and capturable.
        differentiable: must be False.
{extra}        master_weights: ``"split"`` (bf16 weight + 16-bit remainder = exact fp32 master, 2 B per parameter),
            ``"full"`` (fp32 copy, 4 B), ``None`` (round the weight every step), or ``"auto"``: split for bf16, full
            for fp16. fp32 parameters need none.
        state_dtype: of the moments: fp32, or bf16. Rounded to nearest, a bf16 second moment with beta2 near 1 stops
            moving once its steps fall below half an ulp: with bf16 use ``rounding="stochastic"``.
        rounding: ``"nearest"``, or ``"stochastic"``: bf16 moments and 16-bit parameters without a master are rounded to
            either neighbour with the probability that makes the mean right. fp32 numbers and masters are not rounded,
            so where there is nothing else the steps are those of ``"nearest"``. The bits depend on the seed, the
            parameter's number, its step and the element's place in the whole parameter; with FSDP1, whose flat shards
            do not say where they lie, in the shard.
        seed: of stochastic rounding, 0 to 2^63 - 1; saved and loaded with the groups' options.
        max_grad_norm: clip all gradients together to this 2-norm inside the step; the gradients are not written.

    Raises:
        ValueError, RuntimeError: a hyper-parameter is out of its range or not supported.
        TypeError: a parameter that requires a gradient is not a dense fp32, fp16 or bf16 tensor, or `seed` not an
            integer. Frozen parameters may be of any kind.
"""


class Adam(_AdamBase, torch.optim.Adam):
    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        foreach: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
        master_weights: Literal["auto", "full", "split"] | None = "auto",
        state_dtype: torch.dtype = torch.float32,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        max_grad_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "foreach": foreach,
            "capturable": capturable,
            "differentiable": differentiable,
            "fused": fused,
            "decoupled_weight_decay": decoupled_weight_decay,
            "master_weights": master_weights,
            "state_dtype": state_dtype,
            "rounding": rounding,
            "seed": seed,
        }
        _AdamBase.__init__(self, params, defaults, max_grad_norm)

    __doc__ = (
        "Adam (Kingma and Ba, 2015) with exact fp32 master weights, a drop-in for `torch.optim.Adam`."
        + _ARGUMENTS.format(
            decay="L2 penalty: ``weight_decay`` times the weight is added to the gradient",
            extra="        decoupled_weight_decay: decay the weight as AdamW does.\n",
        )
    )


class AdamW(Adam, torch.optim.AdamW):
    # As torch's: whatever is loaded into an AdamW decays as AdamW does.
    _fixed_options = ("decoupled_weight_decay",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        master_weights: Literal["auto", "full", "split"] | None = "auto",
        state_dtype: torch.dtype = torch.float32,
        rounding: Literal["nearest", "stochastic"] = "nearest",
        max_grad_norm: float | None = None,
        seed: int = 0,
    ) -> None:
        Adam.__init__(
            self,
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            foreach=foreach,
            maximize=maximize,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
            decoupled_weight_decay=True,
            master_weights=master_weights,
            state_dtype=state_dtype,
            rounding=rounding,
            max_grad_norm=max_grad_norm,
            seed=seed,
        )

    __doc__ = (
        "AdamW (Loshchilov and Hutter, 2019) with exact fp32 master weights, a drop-in for `torch.optim.AdamW`."
        + _ARGUMENTS.format(
            decay="decoupled decay: the weight shrinks by ``lr * weight_decay`` of itself per step", extra=""
        )
    )
