"""The doctor inside real trainers: no findings in healthy runs, and the names of faults that users reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_tools import batch, error, imported, network, skip_without

from halfstep.integrations.doctor import watch

pytestmark = skip_without("accelerate", "transformers", "peft")
accelerate, transformers, peft = imported("accelerate"), imported("transformers"), imported("peft")

SHAPE = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_healthy_training_in_accelerate(precision: str) -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    with watch(model, optimizer, accelerator.scaler, schedule) as watched:
        for step in range(6):
            with accelerator.accumulate(model):
                inputs, targets = batch(step)
                accelerator.backward(error(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert watched.steps == 3 and watched.diagnosis.ok, str(watched)


def _trained(folder: Path, model: Any, trainer: Any = None, **options: Any) -> list[str]:
    """The names of what is found while transformers' Trainer takes some steps."""
    found: list[Any] = []

    class Watching(transformers.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.watching = watch(kwargs["model"], kwargs["optimizer"], None, kwargs["lr_scheduler"])
            found.append(self.watching.__enter__())

        def on_train_end(self, arguments: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.watching.__exit__(None, None, None)

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32, (16, 8), generator=generator)
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2, use_cpu=True,
        report_to=[], disable_tqdm=True, save_strategy="no", **options,
    )  # fmt: skip
    (trainer or transformers.Trainer)(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[Watching()],
    ).train()
    assert found[0].steps == 4
    names: list[str] = found[0].diagnosis.names
    return names


def _llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SHAPE, num_attention_heads=2, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def test_healthy_trainings_in_transformers(tmp_path: Path) -> None:
    assert _trained(tmp_path, _llama()) == []
    assert _trained(tmp_path, _llama(), bf16=True) == []
    adapted = peft.get_peft_model(_llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert _trained(tmp_path, adapted, bf16=True) == []


def test_bf16_weights_under_bf16_autocast(tmp_path: Path) -> None:
    """huggingface/transformers#33780: "bf16=True" does not upcast weights that were loaded in bf16."""
    names = _trained(tmp_path, _llama().to(torch.bfloat16), bf16=True)
    assert {"autocast-over-16-bit-weights", "moments-in-16-bits", "buffers-in-16-bits"} <= set(names)


def test_bf16_weights_with_our_trainer(tmp_path: Path) -> None:
    """The masters are split, and only the rotary frequencies, converted with the weights, remain."""
    ours = imported("halfstep.integrations.trainers.transformers")
    assert _trained(tmp_path, _llama().to(torch.bfloat16), ours.Trainer) == ["buffers-in-16-bits"]
