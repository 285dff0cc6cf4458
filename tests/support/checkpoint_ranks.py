"""Ranks that save in one topology and load in another, for test_checkpoint_topologies.py.

The same four processes run all topologies: those of two ranks on the first two processes, one process on the first.
Gradients are the same full tensors on all ranks, sharded by hand, so that only the optimizer matters.
"""

from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from states import differences
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.optim.classes import saving

WORLD = 4
STEPS_BEFORE, STEPS_AFTER = 3, 2
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)

# Layouts and ways that `make test` runs. Torch's functions save and load no other layouts.
SAMPLE = {"bf16 split": ("torch",), "bf16 split24, 8-bit moments": ("held",)}
# By name: the dtype of the weights and the optimizer's options. Each is another way to keep masters and moments.
LAYOUTS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "bf16 split": (torch.bfloat16, {}),
    "bf16 split, bf16 moments by chance": (
        torch.bfloat16,
        {"state_dtype": torch.bfloat16, "rounding": "stochastic", "seed": 3},
    ),
    "bf16 split24, 8-bit moments": (
        torch.bfloat16,
        {"master_weights": "split24", "state_dtype": "8bit", "rounding": "stochastic", "seed": 3},
    ),
    "bf16 full, amsgrad": (torch.bfloat16, {"master_weights": "full", "amsgrad": True}),
    "fp16 full": (torch.float16, {}),
    "fp32": (torch.float32, {}),
}


class Block(torch.nn.Module):
    """Two layers that tensor parallelism shards by columns and rows, and a norm that it does not shard."""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        # 6 and 10 rows over 4 ranks are uneven; the norm's 5 leave the last rank with none.
        self.up = torch.nn.Linear(inputs, hidden)
        self.down = torch.nn.Linear(hidden, outputs)
        self.norm = torch.nn.LayerNorm(inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


def model_of(layout: str, seed: int = 0, crossed: bool = False) -> torch.nn.Module:
    """A model for a layout, or with `crossed` one for all of them."""
    torch.manual_seed(seed)
    dtype, options = LAYOUTS[layout]
    # Stochastic rounding needs the index of each element in the whole parameter, as one range per shard. Uneven shards
    # of TP x FSDP are no such range, so the layouts with stochastic rounding have 8 rows, which 2 x 2 ranks divide
    # evenly.
    hidden = 8 if "rounding" in options else 6
    sizes = 5, hidden, 10
    if options.get("state_dtype") == "8bit":
        # Matrices of more than 4,096 elements. Two ranks cut the columns of `down` between two blocks;
        # the blocks of `up` are short, and 18 rows of `down` over 4 ranks are uneven.
        sizes = 20, 256, 18
    if crossed:
        sizes = 20, 240, 18
    model = torch.nn.Sequential(Block(*sizes), torch.nn.Linear(sizes[2], 1)).to(dtype)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    return model


def meshes() -> dict[str, DeviceMesh]:
    """The mesh of each topology. All ranks create all meshes, since creating process groups is collective."""
    return {
        "FSDP2 4": DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",)),
        "FSDP2 2": DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)),
        "HSDP 2x2": DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard")),
        "TP x FSDP": DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")),
    }


def _sharded(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    fully_shard(model[0], mesh=mesh)  # type: ignore[index]
    return fully_shard(model, mesh=mesh)


def _tensor_parallel(model: torch.nn.Module, mesh: DeviceMesh) -> torch.nn.Module:
    plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return _sharded(model, mesh["dp"])


# How many of the four ranks take part in it.
TOPOLOGIES = {"single": 1, "DDP 2": 2, "FSDP2 4": 4, "FSDP2 2": 2, "HSDP 2x2": 4, "TP x FSDP": 4}


class World:
    """The process group for each number of ranks, and the meshes."""

    def __init__(self) -> None:
        self.groups = {1: dist.new_group([0]), 2: dist.new_group([0, 1]), 4: dist.group.WORLD}
        self.meshes = meshes()

    def group(self, topology: str) -> Any:
        return self.groups[TOPOLOGIES[topology]]

    def wrap(self, model: torch.nn.Module, topology: str) -> torch.nn.Module:
        if topology == "single":
            return model
        if topology == "DDP 2":
            return torch.nn.parallel.DistributedDataParallel(model, process_group=self.group(topology))
        mesh = self.meshes[topology]
        return _tensor_parallel(model, mesh) if topology == "TP x FSDP" else _sharded(model, mesh)


def optimizer_of(model: torch.nn.Module, layout: str, lr: float = 1e-2) -> halfstep.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": lr / 2}]
    return halfstep.AdamW(groups, lr=lr, **LAYOUTS[layout][1])


def cut(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """`whole`, sharded as `like`."""
    if not isinstance(like, DTensor):
        return whole.clone()
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    """A step with gradients that depend only on its number and the parameter."""
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * number + index)
        parameter.grad = cut(torch.randn(parameter.shape, generator=generator).to(parameter.dtype), parameter)
    optimizer.step()
    optimizer.zero_grad()


def whole(value: Any) -> Any:
    """Unsharded copies of everything."""
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if hasattr(value, "local_shards"):  # FSDP1's ShardedTensor
        gathered = [torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None]
        value.gather(0, gathered[0])
        dist.broadcast_object_list(gathered, src=0)
        return gathered[0]
    return value.clone() if isinstance(value, torch.Tensor) else value


def contents(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Unsharded weights, masters, moments, step counts and options, by the name of the parameter. Collective."""
    with saving(optimizer, "canonical"):
        state = get_optimizer_state_dict(model, optimizer)
    return whole({"model": get_model_state_dict(model), "optimizer": state})


def reference(layout: str) -> list[dict[str, Any]]:
    """The contents of one process that is not interrupted, when the others save and at the end."""
    model = model_of(layout)
    optimizer = optimizer_of(model, layout)
    found = []
    for number in range(STEPS_BEFORE + STEPS_AFTER):
        if number == STEPS_BEFORE:
            found.append(contents(model, optimizer))
        step(model, optimizer, number)
    return [*found, contents(model, optimizer)]


def save_ours(
    folder: Path,
    model: torch.nn.Module,
    optimizer: halfstep.AdamW,
    group: Any,
    optimizer_state: Literal["held", "canonical"] = "canonical",
) -> None:
    scaler = halfstep.GradScaler("cpu", init_scale=128.0)
    scaler.scale(torch.ones(()))
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "process_group": group}
    checkpoint.save(folder, STEPS_BEFORE, {"seen": 17}, optimizer_state=optimizer_state, **parts)


def save_held(folder: Path, model: torch.nn.Module, optimizer: halfstep.AdamW, group: Any) -> None:
    save_ours(folder, model, optimizer, group, "held")


def load_ours(folder: Path, model: torch.nn.Module, optimizer: halfstep.AdamW, group: Any) -> None:
    path = checkpoint.newest(folder)
    assert path is not None and path.name == f"step-{STEPS_BEFORE:08d}"
    scaler = halfstep.GradScaler("cpu")
    state = checkpoint.load(path, model=model, optimizer=optimizer, scaler=scaler, process_group=group)
    assert state == {"seen": 17} and scaler.state_dict()["scale"] == 128.0


def _flat_state(model: torch.nn.Module, optimizer: halfstep.AdamW) -> dict[str, Any]:
    """As torchtitan saves it."""
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer, options=FLAT)}


def save_torch(folder: Path, model: torch.nn.Module, optimizer: halfstep.AdamW, group: Any) -> None:
    with saving(optimizer, "canonical"):
        dcp.save(_flat_state(model, optimizer), checkpoint_id=folder, process_group=group, no_dist=group is None)


def load_torch(folder: Path, model: torch.nn.Module, optimizer: halfstep.AdamW, group: Any) -> None:
    with saving(optimizer, "canonical"):
        state = _flat_state(model, optimizer)
        dcp.load(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=FLAT)


def sources(topology: str, every: bool) -> list[str]:
    """The topologies whose checkpoints a topology loads: the previous one in the order of `TOPOLOGIES`, or `every`."""
    names = list(TOPOLOGIES)
    return names if every else [names[names.index(topology) - 1]]


def ways_of(layout: str, every: bool) -> dict[str, Any]:
    """How checkpoints are saved and loaded: as canonical or held state, and as flat states by torch's functions."""
    ways = {"canonical": (save_ours, load_ours), "held": (save_held, load_ours), "torch": (save_torch, load_torch)}
    if every:
        return {way: ways[way] for way in ways if way != "torch" or layout in SAMPLE}
    return {way: ways[way] for way in SAMPLE[layout]}


def matrix(rank: int, folder: Path, world: World, layout: str, every: bool) -> dict[str, list[str]]:
    """Save in every topology and load in each from its `sources`. Returns the differences from one process, by pair."""
    saved, end = reference(layout)
    ways = ways_of(layout, every)
    for name, ranks in TOPOLOGIES.items():
        if rank < ranks:
            model = world.wrap(model_of(layout), name)
            optimizer = optimizer_of(model, layout)
            for number in range(STEPS_BEFORE):
                step(model, optimizer, number)
            for way, (save, _) in ways.items():
                save(folder / way / name, model, optimizer, world.group(name))
        dist.barrier()
    found: dict[str, list[str]] = {}
    for name, ranks in TOPOLOGIES.items():
        if rank < ranks:
            for way, (_, load) in ways.items():
                for source in sources(name, every):
                    model = world.wrap(model_of(layout, seed=1), name)
                    optimizer = optimizer_of(model, layout, lr=5.0)
                    load(folder / way / source, model, optimizer, world.group(name))
                    wrong = differences(saved, contents(model, optimizer), "loaded")
                    for number in range(STEPS_BEFORE, STEPS_BEFORE + STEPS_AFTER):
                        step(model, optimizer, number)
                    wrong += differences(end, contents(model, optimizer), "continued")
                    found[f"{way}: {source} -> {name}"] = wrong
        dist.barrier()
    return found


# ---------------------------------------------------------------------------------------- from each layout to another

CROSSED = [name for name, (dtype, _) in LAYOUTS.items() if dtype == torch.bfloat16]
CUTS_BLOCKS = "TP x FSDP"  # two ranks cut the 240 columns of `down`, and so a block of each row
Pair = tuple[str, str, str, str]  # saved layout and topology, loaded layout and topology


def _pair(saved: str, loaded: str) -> Pair:
    """A topology that saves each layout, and all in which each is loaded; none of 8 bits where blocks are cut."""
    number, names = CROSSED.index(saved), list(TOPOLOGIES)
    into = names[(number + CROSSED.index(loaded)) % len(names)]
    into = "FSDP2 2" if into == CUTS_BLOCKS and "8-bit" in loaded else into
    return saved, ("FSDP2 4", CUTS_BLOCKS, "FSDP2 2", "HSDP 2x2")[number], loaded, into


PAIRS = [_pair(saved, loaded) for saved in CROSSED for loaded in CROSSED]
# Each layout is saved once and loaded once.
PAIRS_OF_SAMPLE = [_pair(*pair) for pair in zip(CROSSED, (*CROSSED[1:], CROSSED[0]), strict=True)]


def cross(rank: int, folder: Path, world: World, pairs: list[Pair]) -> dict[Pair, list[str]]:
    """What differs between a load of the state as it is held and one of the canonical state, by pair."""
    for layout, topology in dict.fromkeys(pair[:2] for pair in pairs):
        if rank < TOPOLOGIES[topology]:
            model = world.wrap(model_of(layout, crossed=True), topology)
            optimizer = optimizer_of(model, layout)
            for number in range(STEPS_BEFORE):
                step(model, optimizer, number)
            for way, save in (("held", save_held), ("canonical", save_ours)):
                save(folder / layout / way, model, optimizer, world.group(topology))
        dist.barrier()
    found = {}
    for pair in pairs:
        saved, _, layout, topology = pair
        if rank < TOPOLOGIES[topology]:
            loaded = []
            for way in ("held", "canonical"):
                model = world.wrap(model_of(layout, seed=1, crossed=True), topology)
                optimizer = optimizer_of(model, layout, lr=5.0)
                load_ours(folder / saved / way, model, optimizer, world.group(topology))
                at_once = contents(model, optimizer)
                step(model, optimizer, STEPS_BEFORE)
                loaded.append([at_once, contents(model, optimizer)])
            found[pair] = differences(loaded[1], loaded[0])
        dist.barrier()
    return found


def run(rank: int, folder: Path, layouts: list[str], pairs: list[Pair], every: bool) -> dict[str, Any]:
    """What differs between topologies, with each layout, and between layouts, by pair."""
    world = World()
    return {
        "topologies": {layout: matrix(rank, folder / layout, world, layout, every) for layout in layouts},
        "layouts": cross(rank, folder / "layouts", world, pairs),
    }
