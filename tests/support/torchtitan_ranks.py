"""A rank that trains with halfstep's classes for torchtitan, for tests/integrations/trainers/test_torchtitan.py."""

from __future__ import annotations

import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import trainer_tools as tools
from states import same_bits
from torch.distributed.fsdp import FSDPModule

import halfstep

# torchtitan looks for an accelerator when it is imported. This is what a CPU lacks of one.
DEVICE = types.SimpleNamespace(
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=2**30),
    memory_stats=lambda device: {},
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    synchronize=lambda: None,
)
with (
    mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
    mock.patch("torch._utils._get_device_module", lambda kind: DEVICE),
):
    from torchtitan.components.checkpointer import CheckpointManager
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import Llama3Model, _build_llama3_layers, model_registry
    from torchtitan.trainer import Trainer as TheirTrainer

    from halfstep.integrations.trainers.torchtitan import OptimizersContainer, ScalerConfig, Trainer

WORDS, WIDTH, BATCH, LENGTH = 32, 16, 4, 16
NORM = {"weight": torch.nn.init.ones_}
WEIGHT = {"weight": lambda weight: torch.nn.init.normal_(weight, std=0.1)}


class Words(BaseTokenizer):
    """A tokenizer that nothing asks for tokens."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *args: Any) -> list[int]:
        raise NotImplementedError

    decode = encode

    def get_vocab_size(self) -> int:
        return WORDS


class Sentences(BaseDataLoader):
    """Sequences in which each word follows from the one before it."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **options: Any) -> None:
        self.rank, self.world, self.number = dp_rank, dp_world_size, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            first = BATCH * (self.number * self.world + self.rank)
            rows = (torch.arange(first, first + BATCH)[:, None] + 3 * torch.arange(LENGTH + 1)) % WORDS
            self.number += 1
            yield {"input": rows[:, :-1]}, rows[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def llama() -> Any:
    spec = model_registry("debugmodel")
    rope = ComplexRoPE.Config(dim=WIDTH // 2, max_seq_len=LENGTH, theta=10000)
    sizes = {"dim": WIDTH, "n_heads": 2, "hidden_dim": 32}
    with mock.patch("torchtitan.models.llama3.get_attention_config", lambda kind: ScaledDotProductAttention.Config()):
        layers = _build_llama3_layers(n_layers=2, rope=rope, attn_backend="sdpa", **sizes)
    spec.model = Llama3Model.Config(
        dim=WIDTH,
        vocab_size=WORDS,
        tok_embeddings=Embedding.Config(num_embeddings=WORDS, embedding_dim=WIDTH, param_init=WEIGHT),
        norm=RMSNorm.Config(normalized_shape=WIDTH, param_init=NORM),
        lm_head=Linear.Config(in_features=WIDTH, out_features=WORDS, param_init=WEIGHT),
        layers=layers,
    )
    parallelize = spec.parallelize_fn

    def sharded(model: Any, **options: Any) -> Any:
        model = parallelize(model, **options)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
        return model

    spec.parallelize_fn = sharded
    return spec


class Watched(Trainer):
    """A trainer in whose backward the last rank has an Inf in one step, and that keeps what it sees."""

    def __init__(self, config: Any, broken: int | None) -> None:
        super().__init__(config)
        self.broken, self.kept, self.found = broken, [], {"rates": [], "skipped": [], "unwritten": []}
        self.metrics_processor.logger.log = lambda metrics, step: self.kept.append(metrics)

    def forward_backward_step(self, **given: Any) -> Any:
        with tools.broken_backward(self.model_parts[0], self.broken is not None and self.step == self.broken + 1):
            loss = super().forward_backward_step(**given)
        self.before = tools.gradients(self.model_parts[0].parameters())
        return loss

    def train_step(self, batches: Any) -> None:
        super().train_step(batches)
        self.found["unwritten"].append(same_bits(self.before, tools.gradients(self.model_parts[0].parameters())))
        self.found["rates"].append(self.optimizers.optimizers[0].param_groups[0]["lr"])
        self.found["skipped"].append(self.scaler is not None and bool(self.scaler.last_step_skipped()))


def configuration(folder: Path, kind: str, seed: int = 0, chunks: int = 0, cls: Any = Trainer, **options: Any) -> Any:
    dtype = str(tools.DTYPES[kind]).removeprefix("torch.")
    loss: Any = CrossEntropyLoss.Config()
    return cls.Config(
        model_spec=llama(),
        loss=ChunkedLossWrapper.Config(num_chunks=chunks, loss_fn=loss) if chunks else loss,
        dump_folder=str(folder),
        tokenizer=Words.Config(),
        dataloader=Sentences.Config(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, total_steps=2 * tools.STEPS),
        training=TrainingConfig(
            local_batch_size=BATCH,
            global_batch_size=2 * BATCH * dist.get_world_size(),
            seq_len=LENGTH,
            steps=tools.STEPS,
            max_norm=tools.MAX_NORM,
            dtype=dtype,
            mixed_precision_param=dtype,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=tools.SAVED, export_dtype=dtype, keep_latest_k=0, **options.pop("checkpoint", {})
        ),
        activation_checkpoint=None,
        debug=DebugConfig(seed=seed),
        **{"optimizer": default_adamw(lr=tools.LR, weight_decay=0.01), **options},
    )


def trainer_of(folder: Path, kind: str, **options: Any) -> Any:
    scaler = ScalerConfig(init_scale=tools.SCALE) if kind == "fp16" else None
    return Watched(configuration(folder, kind, scaler=scaler, **options), tools.BROKEN if kind == "fp16" else None)


def train(trainer: Any) -> None:
    """Without two seconds of sleep at the end, and a function of torch.distributed that torch 2.13 does not have."""
    with mock.patch("torchtitan.trainer.time.sleep"), mock.patch("torchtitan.trainer.dist_utils.set_pg_timeouts"):
        trainer.train()
    trainer.close()


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: tools.full(one) for name, one in trainer.model_parts[0].state_dict().items()}


def whole(folder: Path, kind: str) -> dict[str, Any]:
    """A run that is saved on the way, one that resumes it from another initialization, and what that exports."""
    trainer = trainer_of(folder, kind, checkpoint={"last_save_model_only": False})
    before = weights_of(trainer)
    train(trainer)
    (optimizer,) = trainer.optimizers.optimizers
    found = {
        **trainer.found,
        **tools.seen(trainer.model_parts[0].parameters(), optimizer),
        "fit": [one["loss_metrics/global_avg_loss"] for one in (trainer.kept[0], trainer.kept[-1])],
        "norms": [one["grad_norm"] for one in trainer.kept],
        "log": tools.logged(trainer.kept),
        "sharded": all(2 * one.to_local().numel() == one.numel() for one in trainer.model_parts[0].parameters()),
        "before": before,
    }
    again = trainer_of(folder, kind, seed=1, checkpoint={"last_save_model_only": True, "load_step": tools.SAVED})
    train(again)
    losses = [
        [one["loss_metrics/global_avg_loss"] for one in kept] for kept in (again.kept, trainer.kept[tools.SAVED :])
    ]
    found["resumed"] = {
        "state": same_bits(tools.state_of(again.optimizers.optimizers[0]), found["state"]),
        "rest": again.found["rates"] == found["rates"][tools.SAVED :] and losses[0] == losses[1],
        "scaler": [one.get("halfstep/scale") for one in again.kept]
        == [one.get("halfstep/scale") for one in found["log"][tools.SAVED :]],
    }
    held = weights_of(again)
    exported = {name: torch.zeros_like(one) for name, one in held.items()}
    dcp.load(exported, checkpoint_id=str(folder / "checkpoint" / f"step-{tools.STEPS}"), no_dist=True)
    found["exported"] = same_bits(exported, held)
    return found


def loaded(folder: Path, kind: str) -> dict[str, Any]:
    """What the checkpoint of any number of ranks is on these."""
    trainer = trainer_of(folder, kind, seed=2)
    trainer.checkpointer.load(step=tools.SAVED)
    flat = trainer.optimizers.state_dict()
    state = {name: tools.full(one) for name, one in flat.items() if isinstance(one, torch.Tensor)}
    scale = None if trainer.scaler is None else trainer.scaler.get_scale()
    return {"weights": weights_of(trainer), "state": state, "scale": scale, "step": trainer.step}


def own_loop(kind: str, before: dict[str, torch.Tensor], rates: list[float]) -> list[Any]:
    """The same training without torchtitan's trainer and without FSDP, on its model."""
    spec = llama()
    spec.model.update_from_config(config=configuration(Path(), kind))
    torch.set_default_dtype(tools.DTYPES[kind])
    model = spec.model.build()
    torch.set_default_dtype(torch.float32)
    model.init_weights(buffer_device=None)
    model.load_state_dict(before)
    (options,) = default_adamw(lr=tools.LR, weight_decay=0.01).param_groups
    optimizer = halfstep.AdamW(model.parameters(), **options.optimizer_kwargs)
    scaler = halfstep.GradScaler("cpu", init_scale=tools.SCALE, enabled=kind == "fp16")
    optimizer.max_grad_norm = None if scaler.is_enabled() else tools.MAX_NORM
    batches = iter(Sentences(Sentences.Config(), dp_world_size=1, dp_rank=0))
    for step in range(tools.STEPS):
        for _ in range(2):
            words, targets = next(batches)
            outputs = model(words["input"]).flatten(0, 1).float()
            loss = torch.nn.functional.cross_entropy(outputs, targets.flatten(), reduction="sum")
            scaler.scale(loss / (2 * targets.numel())).backward()
        if step == tools.BROKEN and scaler.is_enabled():
            model.tok_embeddings.weight.grad.view(-1)[0] = float("inf")
        if scaler.is_enabled():
            scaler.clip_grad_norm_(optimizer, tools.MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = rates[step]
    return tools.state_of(optimizer)


def chunked(folder: Path) -> list[list[float]]:
    """The norms with a loss that runs a backward for each chunk, and with torchtitan's other loss, in fp16."""
    norms = []
    for chunks in (2, 0):
        trainer = trainer_of(folder / str(chunks), "fp16", chunks=chunks)
        train(trainer)
        norms.append([one["grad_norm"] for one in trainer.kept])
    return norms


def container_alone(folder: Path) -> dict[str, Any]:
    """torchtitan's own trainer, with the container in its configuration."""
    groups = default_adamw(lr=tools.LR).param_groups
    trainer = configuration(
        folder, "bf16", cls=TheirTrainer, optimizer=OptimizersContainer.Config(param_groups=groups)
    ).build()
    train(trainer)
    (optimizer,) = trainer.optimizers.optimizers
    return {"masters": tools.masters_of(optimizer), "type": type(trainer) is TheirTrainer}


@tools.quietly()
def run(rank: int, folder: str) -> dict[str, Any]:
    world = dist.get_world_size()
    found: dict[str, Any] = {}
    for kind in tools.DTYPES:
        place = Path(folder) / f"of{world}" / kind
        result = found[f"{'FSDP2' if world > 1 else 'one process'} {kind}"] = whole(place, kind)
        found[f"{kind} saved by two, loaded by {world}"] = loaded(Path(folder) / "of2" / kind, kind)
        if world == 1:
            result["own"] = own_loop(kind, result["before"], result["rates"])
    if world == 1:
        found["chunked"] = chunked(Path(folder) / "chunked")
        found["container alone"] = container_alone(Path(folder) / "alone")
    return found
