"""The canonical state of an optimizer: saved from and loaded into every layout, also from other optimizers."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, Literal

import torch
from torch.optim.optimizer import Optimizer

from halfstep.integrations.interrupts import apply
from halfstep.integrations.optim.foreign_codes import decode, master_of_flashoptim
from halfstep.integrations.optim.held import canonical_state, fit_master, held_state, loaded_state
from halfstep.integrations.optim.options import LAYOUT_OPTIONS, check_options
from halfstep.integrations.optim.state import (
    CODES,
    REMAINDER,
    WHOLE,
    Agreed,
    OptimizerState,
    encoded,
    entries,
    foreign_moments,
    is_complete,
    is_remainder,
    like,
    new_entry,
    step_count,
)
from halfstep.kernels.rounding import join_master
from halfstep.numerics.scaling.topology import local
from halfstep.numerics.scaling.verdict import parameters_of

# Options of a group that apex, TransformerEngine and flashoptim have in addition to torch's.
FOREIGN_OPTIONS = ("step", "bias_correction", "master_bytewidth")
SPLIT = ("split", "split24")


def _is_nothing(value: Any) -> bool:
    """Whether an entry is missing: None in TransformerEngine, an empty dict in a flat state of torch."""
    return value is None or (isinstance(value, dict) and not value)


def canonical(where: str, parameter: torch.Tensor, saved: dict[str, Any], group: dict[str, Any]) -> dict[str, Any]:
    """One parameter's saved state with our names; `group` is its saved group."""
    state = decode({key: value for key, value in saved.items() if not _is_nothing(value)}, where)
    if group.get("step") is not None:
        state.setdefault("step", group["step"])
    rest = state.pop("error_bits", None)
    if isinstance(rest, torch.Tensor) and "master" not in state:
        weight, rest = local(parameter.detach()), local(rest)
        master = master_of_flashoptim(weight, rest.to(weight.device), group.get("master_bytewidth"), where)
        return {**state, "master": like(parameter, master)}
    master = state.pop("master_param", None)
    if not isinstance(master, torch.Tensor) or parameter.dtype == torch.float32:
        return state
    if master.dtype == torch.int16:  # the lower 16 bits of a master that was rounded as in `split_master`
        return {**state, REMAINDER: master}
    return {**state, "master": master}


def matched_groups(
    groups: list[dict[str, Any]], state_dict: dict[str, Any], kept: Iterable[str]
) -> tuple[list[dict[str, Any]], dict[Any, tuple[torch.Tensor, dict[str, Any]]]]:
    """The groups after a load that leaves the options `kept`, and the parameter and the group of each saved index."""
    for key in ("state", "param_groups"):
        if key not in state_dict:
            raise ValueError(
                f"state_dict has keys {list(state_dict)}; it lacks {key!r}: it is not an optimizer's state_dict"
            )
    saved_groups = state_dict["param_groups"]
    if len(saved_groups) != len(groups):
        raise ValueError(
            f"loaded state dict has a different number of parameter groups: expected {len(groups)}, but got "
            f"{len(saved_groups)}"
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
                f"Expected bias_correction to be True in group {number} of the checkpoint, but got "
                f"{saved['bias_correction']}: continue with the optimizer that saved it"
            )
        names, here = saved.get("param_names"), group.get("param_names")
        if names and here and names != here and sorted(names) == sorted(here):
            first = next(place for place, pair in enumerate(zip(names, here, strict=True)) if pair[0] != pair[1])
            raise ValueError(
                f"Expected the parameters of group {number} in the order of the checkpoint, but parameter {first} is "
                f"{names[first]!r} there and {here[first]!r} here: create the optimizer with the parameters in that "
                "order"
            )
        known = {name: value for name, value in saved.items() if name not in FOREIGN_OPTIONS}
        merged = {**group, **known, **{name: group[name] for name in kept}, "params": group["params"]}
        if isinstance(merged["lr"], torch.Tensor):
            merged["lr"] = merged["lr"].clone()
        check_options(merged)
        result.append(merged)
        owners.update({index: (p, merged) for index, p in zip(saved["params"], group["params"], strict=True)})
    return result, owners


def saving(optimizer: Any, form: Literal["held", "canonical"]) -> AbstractContextManager[None]:
    """In this context ``optimizer.state_dict()`` of an optimizer of halfstep has a format; those of others stay."""
    return optimizer._saving(form) if isinstance(optimizer, CanonicalState) else nullcontext()


def check_format(form: Any) -> None:
    """Raise unless `form` is a format of `state_dict`."""
    if form not in ("held", "canonical"):
        raise ValueError(f"Expected state_dict_format to be 'held' or 'canonical', but got {form!r}")


def check_masters(owners: dict[Any, tuple[torch.Tensor, dict[str, Any]]], state_dict: dict[str, Any]) -> None:
    """Raise if all split masters of a group are missing, which its option says that it had when it was saved.

    Code that loads flat states looks entries up by the names in memory, and leaves out those that it does not find.
    """
    for number, group in enumerate(state_dict["param_groups"]):
        states = [(owners[index][0], state_dict["state"].get(index) or {}) for index in group["params"]]
        halves = [parameter for parameter, state in states if parameter.dtype == torch.bfloat16 and state]
        masters = [state for _, state in states if not (_is_nothing(state.get("master")) and REMAINDER not in state)]
        if group.get("master_weights") in SPLIT and halves and not masters:
            raise ValueError(
                f"Expected {REMAINDER!r} or 'master' in the states of group {number}, whose masters were "
                f"{group['master_weights']!r} when it was saved, but got none: code that loads flat states looks up "
                "'master' only; set optimizer.state_dict_format = 'canonical' before saving and loading"
            )


class CanonicalState(OptimizerState):
    """`state_dict` and `load_state_dict`."""

    # Options that a checkpoint does not change, in addition to those of the layout.
    _fixed_options: tuple[str, ...] = ()
    _recorded: dict[int, torch.Tensor]  # state tensors that CUDA graphs write to
    state_dict_format: Literal["held", "canonical"]

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """The state of each parameter as it is held, in the bytes that it takes in memory. Allocates nothing.

        * ``step``, and moments in fp32 or bf16 as ``exp_avg`` and ``exp_avg_sq``;
        * moments in 8 bits as ``exp_avg_codes`` and ``exp_avg_scale`` ...;
        * a full master as ``master``, in fp32. It is copied where other code has written the parameter since;
        * the remainder of a split master as ``master_remainder``.

        Integers of 16 bits, which NCCL and gloo do not transfer, are shown as pairs of bytes in one more dimension.

        `load_state_dict` loads it into every layout, with the same bits. As in torch, the tensors are those of the
        optimizer, which the next step changes.

        With ``state_dict_format="canonical"`` it is what `canonical_state_dict` returns. So it is, in each format, for
        the parameters that FullyShardedDataParallel has flattened, since its ``optim_state_dict`` allows one dtype per
        parameter.

        Raises:
            ValueError: the attribute `state_dict_format` is neither ``"held"`` nor ``"canonical"``.

        Examples:
            >>> weight = torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
            >>> optimizer = halfstep.AdamW([weight])
            >>> weight.grad = torch.ones_like(weight)
            >>> optimizer.step()
            >>> list(optimizer.state_dict()["state"][0])
            ['step', 'exp_avg', 'exp_avg_sq', 'master_remainder']
            >>> list(optimizer.canonical_state_dict()["state"][0])
            ['step', 'exp_avg', 'exp_avg_sq', 'master']
        """
        check_format(self.state_dict_format)
        self._note_agreed()
        # Hooks see what is saved, so they run at the end.
        hooks, self._optimizer_state_dict_post_hooks = self._optimizer_state_dict_post_hooks, OrderedDict()
        try:
            packed = Optimizer.state_dict(self)
        finally:
            self._optimizer_state_dict_post_hooks = hooks
        for index, parameter in enumerate(parameters_of(self)):
            if (state := packed["state"].get(index)) is None:
                continue
            full = "master" in state and not is_remainder(state["master"])
            written = self._master(parameter, compare=True) if full else None
            flattened = getattr(parameter, "_fsdp_flattened", False)
            saved = canonical_state if flattened or self.state_dict_format == "canonical" else held_state
            packed["state"][index] = saved(state, parameter, written)
        # The layout in memory is not loaded. It is saved because code that loads flat checkpoints expects every option
        # of a group: dtypes as text, because some readers of checkpoints do not support them, and split masters only if
        # there are remainders, so that a load notices if these are missing.
        for group in packed["param_groups"]:
            group["state_dtype"] = str(group["state_dtype"]).removeprefix("torch.")
            kind = group["master_weights"]
            if any(REMAINDER in packed["state"].get(index, {}) for index in group["params"]):
                group["master_weights"] = "split" if kind == "auto" else kind
            elif kind in SPLIT:
                group["master_weights"] = "auto"
        for hook in list(hooks.values()):
            replaced = hook(self, packed)
            packed = packed if replaced is None else replaced
        return packed

    @contextmanager
    def _saving(self, form: Literal["held", "canonical"]) -> Iterator[None]:
        """In this context `state_dict` has this format, also for code that calls it by its name."""
        before, self.state_dict_format = self.state_dict_format, form
        try:
            yield
        finally:
            self.state_dict_format = before

    def held_state_dict(self) -> dict[str, Any]:
        """What `state_dict` returns with ``state_dict_format="held"``, the default."""
        with self._saving("held"):
            return self.state_dict()

    def canonical_state_dict(self) -> dict[str, Any]:
        """The state in fp32 on the CPU: ``step``, ``exp_avg``, ``exp_avg_sq``, ``master`` ... of each parameter.

        It is the same for every layout, and loads into torch's and other optimizers. There is no ``master`` for fp32
        parameters, and none with ``master_weights=None``. It takes 8 to 16 bytes per parameter on the host, and
        memory for a few rows of a parameter on a GPU. Tensors that are in fp32 on the CPU are not copied. DTensors
        stay DTensors, whose local tensors are on the CPU.
        """
        with self._saving("canonical"):
            return self.state_dict()

    def _complete_state(self, parameter: torch.Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """The state of a parameter in its layout, with missing entries created. It is replaced after all of them exist.

        Other code, such as ``ZeroRedundancyOptimizer.load_state_dict``, may have assigned codes and remainders under
        the names of a checkpoint, moments in other dtypes, and masters of other kinds.
        """
        state = self.state.get(parameter)
        if state is not None and any(name in state for name in (REMAINDER, *CODES.values())):
            where = "state of parameter with a gradient"
            state, weight = loaded_state(state, parameter, group, where, final=bool(self._recorded))
            self.state[parameter] = state
            if weight is not None:
                local(parameter.detach()).copy_(weight)
        if state is not None and is_complete(state, parameter, group):
            return state
        state, dtypes = dict(state or {}), entries(parameter, group)
        self._fit_master(parameter, group, state)
        for key in foreign_moments(state, parameter, group):
            if dtypes[key] == torch.uint8:
                state |= encoded(key, local(state[key]).float(), parameter)
            else:
                state[key] = state[key].to(dtypes[key])
        missing = {key: dtype for key, dtype in dtypes.items() if key not in state}
        if missing:
            if missing.get("master") == torch.float32:
                self._agreed[id(parameter)] = Agreed.now(parameter)
            created = {key: new_entry(key, dtype, parameter) for key, dtype in missing.items()}
            state = {**dict.fromkeys(dtypes), **state, **created}
        step, device = state["step"], local(parameter).device
        if not isinstance(step, torch.Tensor) or (step.dtype, step.device) != (torch.float32, device):
            state["step"] = step_count(step, "state of a parameter").to(device)
        self.state[parameter] = state
        return state

    def _fit_master(self, parameter: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Convert the master in a state to the present kind, after a change of dtype or options."""
        master, dtype = state.get("master"), entries(parameter, group).get("master")
        if not isinstance(master, torch.Tensor):
            return
        values, whole = local(parameter.detach()), local(master)
        if is_remainder(master):
            if dtype == master.dtype:
                return
            if parameter.dtype != torch.bfloat16:  # without which it is useless
                del state["master"]
                return
            whole = join_master(values, whole)
        elif dtype is None or dtype == torch.float32:
            if dtype is None:
                del state["master"]
            return
        elif (written := self._master_if_written(parameter)) is not None:
            whole = written
        values.copy_(fit_master(state, whole, parameter, group))

    @torch.no_grad()
    def fit_masters(self, parameters: Iterable[torch.Tensor]) -> None:
        """Convert loaded masters of another layout now, and not in the first step. Load these parameters first."""
        loaded = set(map(id, parameters))
        for group in self.param_groups:
            for parameter in group["params"]:
                if id(parameter) in loaded and self.state.get(parameter):
                    self._complete_state(parameter, group)

    @torch._disable_dynamo
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an Adam or AdamW of halfstep, torch, apex or TransformerEngine with the same bits.

        The model may be loaded before or after: what `state_dict` or `canonical_state_dict` saved has the same bits in
        both orders. There are two exceptions, for which load the model first: a full master that is loaded into a split
        layout, where the weights halfway between two bf16 numbers would differ, and a load after a step was captured
        in a CUDA graph, into another layout.

        States of the 8-bit optimizers of bitsandbytes, torchao and flashoptim are decoded by their rules. flashoptim's
        masters belong to the present parameters: load the model first. Under sharding, pass such states to
        `halfstep.integrations.checkpoint.load_optimizer`.

        The options that define the layout (`master_weights`, `state_dtype`, `rounding`) are not loaded; all others are.
        If the checkpoint has a master, the parameter is set to the rounded master.

        apex and TransformerEngine store the step count per group: it becomes that of each parameter with state.
        TransformerEngine's masters are loaded for fp16 and bf16 parameters; those of fp32 parameters, which
        TransformerEngine does not update, are left out. apex saves no masters:
        `halfstep.integrations.checkpoint.with_masters` adds them. Neither checkpoint stores whether weight decay is
        decoupled; that depends on the class that loads it.

        If a step was captured in a CUDA graph, the state is copied into the tensors that the graph uses.

        Raises:
            ValueError: groups, parameters, shapes, keys or numbers do not match. The optimizer and its parameters are
                unchanged, as they are after Ctrl-C.
        """
        state_dict = dict(state_dict)
        for hook in list(self._optimizer_load_state_dict_pre_hooks.values()):
            replaced = hook(self, state_dict)
            if replaced is not None:
                state_dict = replaced
        self._load(state_dict)
        for post_hook in list(self._optimizer_load_state_dict_post_hooks.values()):
            post_hook(self)

    def _load(self, state_dict: dict[str, Any]) -> None:
        """Load a state, without hooks."""
        groups, owners = matched_groups(self.param_groups, state_dict, (*LAYOUT_OPTIONS, *self._fixed_options))
        saved_groups = {index: group for group in state_dict["param_groups"] for index in group["params"]}
        check_masters(owners, state_dict)
        loaded = {}
        for index, (parameter, group) in owners.items():
            if saved := state_dict["state"].get(index):
                where = f"state of parameter {index}"
                entry = canonical(where, parameter, saved, saved_groups[index])
                loaded[parameter] = loaded_state(entry, parameter, group, where, final=bool(self._recorded))
        fresh: dict[Any, Any] = defaultdict(dict)
        fresh.update((key, value) for key, value in state_dict["state"].items() if key not in owners)
        fresh.update((parameter, state) for parameter, (state, _) in loaded.items())
        # Everything has been validated. The plan is discarded first, because it is derived from the old state.
        self._forget()
        pairs = ((local(p.detach()), weight) for p, (_, weight) in loaded.items() if weight is not None)
        writes: list[partial[Any]] = [partial(held.copy_, weight) for held, weight in pairs]
        for parameter, (state, _) in loaded.items():
            writes += self._in_place(parameter, state)
        writes.append(partial(self.__dict__.update, state=fresh, param_groups=groups, _agreed={}))
        self._commit(WHOLE, [(list(loaded), writes)])
        self._agree()

    def _commit(self, part: int, writes: list[tuple[list[torch.Tensor], list[partial[Any]]]]) -> None:
        """Make the calls of a step or a load (then `part` is `WHOLE`): all of them, whatever interrupts.

        Each pair is parameters, and the calls that write these and their state. Their order does not matter.
        """
        apply(list(chain.from_iterable(map(itemgetter(1), writes))))

    def _in_place(self, parameter: torch.Tensor, state: dict[str, Any]) -> list[partial[Any]]:
        """Calls that copy a loaded state into the tensors that CUDA graphs use, which replace those in `state`."""
        calls = []
        for key, held in self.state.get(parameter, {}).items() if self._recorded else ():
            value = state.get(key)
            if not isinstance(value, torch.Tensor) or id(local(held)) not in self._recorded:
                continue
            if (value.shape, value.dtype, value.device) == (held.shape, held.dtype, held.device):
                calls.append(partial(local(held).copy_, local(value)))
                state[key] = held
        return calls
