"""Configs of all families have as many parameters as the models that transformers creates on the meta device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.numerics.planning import from_config

transformers = pytest.importorskip("transformers")

ODD = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
ODD |= {"intermediate_size": 80, "vocab_size": 131, "max_position_embeddings": 40, "head_dim": 10, "pad_token_id": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "granite": {"head_dim": None},
    "smollm3": {"head_dim": None},
    "phi3": {"head_dim": None},
    "qwen2": {"head_dim": None},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "olmo2": {"head_dim": None},
    "olmo3": {"head_dim": None},
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 40, "n_inner": 100},
}


def _parameters(config: Any) -> int:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())  # tied ones once


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_has_the_parameters_of_its_model(name: str, tmp_path: Path) -> None:
    sizes = {key: value for key, value in (ODD | CONFIGS[name]).items() if value is not None}
    config = transformers.AutoConfig.for_model(name, **sizes)
    config.save_pretrained(tmp_path)  # only what differs from the defaults
    model = from_config(json.loads((tmp_path / "config.json").read_text()) | CONFIGS[name] | {"model_type": name})
    assert model.parameters == _parameters(config)
