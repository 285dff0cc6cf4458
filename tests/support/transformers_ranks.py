"""A rank that trains with halfstep's `Trainer`, for tests/integrations/trainers/test_transformers.py."""

from operator import attrgetter
from pathlib import Path
from typing import Any

import datasets
import peft
import tokenizers
import torch
import torch.distributed as dist
import trainer_tools as tools
import transformers
import trl
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from safetensors.torch import load_file
from states import same_bits
from torch.distributed.fsdp import fully_shard

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.trainers.transformers import Trainer, TrainerMixin

WORDS = 32


def language_model(seed: int = 0, width: int = 16) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=WORDS, **sizes))


def sentences() -> list[dict[str, torch.Tensor]]:
    """Sequences in which each word follows from the one before it."""
    starts = torch.arange(64) % WORDS
    rows = [(start + 3 * torch.arange(12)) % WORDS for start in starts]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, **options: Any) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "max_steps": tools.STEPS,
        "save_steps": tools.SAVED,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 4,
        "learning_rate": tools.LR,
        "lr_scheduler_type": "linear",
        "max_grad_norm": tools.MAX_NORM,
        **options,
    }


class Seen(transformers.TrainerCallback):
    """What a callback of a user sees."""

    def __init__(self) -> None:
        self.skipped: list[bool] = []
        self.rates: list[float] = []
        self.unwritten: list[bool] = []
        self.trainer: Any = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.before = tools.gradients(given["model"].parameters())

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.unwritten.append(
            same_bits(self.before, tools.gradients(given["model"].parameters())) and self.trainer.kept
        )
        self.skipped.append(bool(self.trainer.accelerator.optimizer_step_was_skipped))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.rates.append(given["optimizer"].param_groups[0]["lr"])


class Breaking:
    """A trainer in whose backward the last rank has an Inf in one step, and that watches the clipping."""

    broken: int | None = None
    kept = True

    def training_step(self: Any, model: Any, *args: Any, **given: Any) -> Any:
        with tools.broken_backward(model, self.state.global_step == self.broken):
            return super().training_step(model, *args, **given)

    def _get_grad_norm(self: Any, model: Any, grad_norm: Any = None) -> Any:
        before = tools.gradients(model.parameters()) if grad_norm is None else self.unclipped
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.kept = same_bits(before, tools.gradients(model.parameters()))
        return norm

    def _clip_grad_norm(self: Any, model: Any) -> Any:
        self.unclipped = tools.gradients(model.parameters())
        return super()._clip_grad_norm(model)


class Watched(Breaking, Trainer):
    pass


class Sharded(Watched):
    """A trainer with ``fsdp=True``. Accelerate shards on accelerators only; this is what its state does there."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        state = self.accelerator.state
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = True


def trainer_of(folder: Path, kind: str, seed: int = 0, model: Any = None, cls: Any = Watched, **options: Any) -> Any:
    model = language_model(seed).to(tools.DTYPES[kind]) if model is None else model
    scaler = tools.scaler_for(kind)
    if cls in (Watched, Sharded):
        options = {"args": transformers.TrainingArguments(**arguments(folder, **options)), "train_dataset": sentences()}
    seen, monitor = Seen(), halfstep.AmpMonitor(model, every=1)
    trainer = cls(model=model, callbacks=[seen], scaler=scaler, monitor=monitor, **options)
    seen.trainer, trainer.seen = trainer, seen
    trainer.broken = tools.BROKEN if scaler is not None else None
    return trainer


def result(trainer: Any, folder: Path, exported: Path) -> dict[str, Any]:
    """What the tests look at after a run."""
    history = [one for one in trainer.state.log_history if "loss" in one]
    held = {name: tools.full(one) for name, one in trainer.model.state_dict().items()}
    saved = load_file(exported)
    return {
        **tools.seen(trainer.model.parameters(), trainer.optimizer.optimizer),
        "fit": [one["loss"] for one in history][:: max(1, len(history) - 1)],  # the first rank logs
        "norms": [float(one["grad_norm"]) for one in history],
        "log": tools.logged(history),
        "skipped": trainer.seen.skipped,
        "rates": trainer.seen.rates,
        "unwritten": [bool(one) for one in trainer.seen.unwritten],
        "exported": all(same_bits(saved[name], held[name]) for name in saved) and len(saved) >= len(held) - 1,
    }


def whole(folder: Path, kind: str, **options: Any) -> dict[str, Any]:
    place = folder / f"{kind}-{len(options)}"
    trainer = trainer_of(place, kind, weight_decay=0.1, **options)
    trainer.train()
    trainer.save_model(str(place / "export"))
    trainer.accelerator.wait_for_everyone()
    found = result(trainer, place, place / "export" / "model.safetensors")
    again = trainer_of(place / "again", kind, seed=1, weight_decay=0.1, **options)
    again.train(resume_from_checkpoint=str(place / f"checkpoint-{tools.SAVED}"))
    rows, rest = ([one for one in run.state.log_history if "loss" in one] for run in (trainer, again))
    scalers = [tools.scaler_state(one.accelerator.scaler) for one in (trainer, again)]
    scales = [[one.get("halfstep/scale") for one in run[tools.SAVED :]] for run in (rows, rest)]
    found["resumed"] = {
        "state": same_bits(tools.state_of(again.optimizer.optimizer), found["state"]),
        "rest": [one["loss"] for one in rest] == [one["loss"] for one in rows],
        "scaler": scalers[0] == scalers[1],
        "log": scales[0] == scales[1],
    }
    return found


def without_clipping(folder: Path, kind: str) -> dict[str, Any]:
    """``max_grad_norm=0``: the norm is logged, and nothing is clipped."""
    trainer = trainer_of(folder / f"none-{kind}", kind, max_grad_norm=0.0, save_steps=100)
    trainer.train()
    found = result(trainer, folder, folder / f"{kind}-0" / "export" / "model.safetensors")
    trainer = trainer_of(folder / f"far-{kind}", kind, max_grad_norm=1e9, save_steps=100)
    trainer.train()
    found["as_far"] = same_bits(tools.state_of(trainer.optimizer.optimizer), found["state"])
    return found


def adapters(folder: Path, kind: str, autocast: bool, scheme: str | None = None) -> dict[str, Any]:
    """LoRA on frozen weights, with adapters in their dtype or, as PEFT does by default, in fp32."""
    model = language_model().to(tools.DTYPES[kind]) if scheme is None else quantized(folder, kind, scheme)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    model = peft.get_peft_model(model, config, autocast_adapter_dtype=autocast)
    if scheme is not None and not autocast:  # PEFT makes adapters of quantized weights in fp32 in any case
        for one in filter(attrgetter("requires_grad"), model.parameters()):
            one.data = one.data.to(tools.DTYPES[kind])
    place = folder / f"lora-{kind}-{autocast}-{scheme}"
    trainer = trainer_of(place, kind, model=model, optim_args="state_dtype=bfloat16, rounding=stochastic, seed=3")
    trainer.train()
    trainer.save_model(str(place / "export"))
    base = model.get_base_model().state_dict()
    quantized_dtypes = {str(one.dtype) for name, one in base.items() if "mlp" in name and name.endswith("weight")}
    frozen = {name.replace(".base_layer", ""): one for name, one in base.items() if "lora" not in name}
    saved = load_file(place / "export" / "adapter_model.safetensors")
    held = {name.replace(".default", ""): one for name, one in model.state_dict().items() if "lora" in name}
    moments = {str(state["exp_avg"].dtype) for state in trainer.optimizer.state.values()}
    history = [one for one in trainer.state.log_history if "loss" in one]
    return {
        "adapters": sorted({str(one.dtype) for one in model.parameters() if one.requires_grad}),
        "masters": tools.masters_of(trainer.optimizer.optimizer),
        "base": sorted(quantized_dtypes),
        "moments": sorted(moments),
        "trained": sum(one.requires_grad for one in model.parameters()) == len(trainer.optimizer.state),
        "moved": any(bool(one.ne(0).any()) for name, one in held.items() if "lora_B" in name),
        "frozen": same_bits(before, frozen),
        "exported": same_bits(saved, held),
        "unwritten": trainer.seen.unwritten,
        "skipped": trainer.seen.skipped,
        "losses": [one["loss"] for one in history],
    }


def quantized(folder: Path, kind: str, scheme: str) -> Any:
    """A model whose linear weights bitsandbytes keeps in 4 or 8 bits."""
    language_model(width=64).to(tools.DTYPES[kind]).save_pretrained(folder / f"base-{kind}")  # blocks have 64 weights
    options = {
        "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": tools.DTYPES[kind]},
        "int8": {"load_in_8bit": True},
    }[scheme]
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder / f"base-{kind}",
        quantization_config=transformers.BitsAndBytesConfig(**options),
        device_map="cpu",
        dtype=tools.DTYPES[kind],
    )


class WatchedSFT(Breaking, TrainerMixin, trl.SFTTrainer):
    pass


def fine_tuning(folder: Path, kind: str) -> dict[str, Any]:
    """TRL's trainer, with a tokenizer made here."""
    vocabulary = {f"w{number}": number for number in range(WORDS - 2)} | {"<pad>": WORDS - 2, "<eos>": WORDS - 1}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    rows = [{"input_ids": one["input_ids"].tolist()} for one in sentences()]
    options = arguments(folder / f"sft-{kind}", bf16=False, save_steps=100, max_length=16)
    trainer = trainer_of(
        folder / f"sft-{kind}",
        kind,
        cls=WatchedSFT,
        args=trl.SFTConfig(**options),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model(str(folder / f"sft-{kind}" / "export"))
    return result(trainer, folder, folder / f"sft-{kind}" / "export" / "model.safetensors")


@tools.quietly()
def run(rank: int, folder: str) -> dict[str, Any]:
    several = dist.is_initialized()
    place = Path(folder) / ("several" if several else "one")
    found: dict[str, Any] = {
        f"{'DDP' if several else 'one process'} {kind}": whole(place, kind) for kind in tools.DTYPES
    }
    if several:
        sharded = {"cls": Sharded, "fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}
        return found | {f"FSDP2 {kind}": whole(place, kind, **sharded) for kind in tools.DTYPES}
    found |= {f"{kind} without clipping": without_clipping(place, kind) for kind in tools.DTYPES}
    cases = [(None, kind, fp32) for kind in tools.DTYPES for fp32 in (True, False)]
    cases += [("nf4", "bf16", True), ("nf4", "bf16", False), ("int8", "fp16", False)]
    found |= {f"LoRA {scheme} {kind} {fp32}": adapters(place, kind, fp32, scheme) for scheme, kind, fp32 in cases}
    return found | {f"SFT {kind}": fine_tuning(place, kind) for kind in tools.DTYPES}


def gpt2() -> Any:
    """A model with tied weights and random numbers."""
    torch.manual_seed(3)
    sizes = {"vocab_size": WORDS, "n_positions": 16, "n_embd": 20, "n_layer": 1, "n_head": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).bfloat16()


def save_sharded(rank: int, folder: Path) -> None:
    model = fully_shard(gpt2())
    checkpoint.save(folder, 1, model=model, optimizer=halfstep.AdamW(model.parameters()))
