"""Published shapes of models and data of GPUs, by name, and a reader of Hugging Face's ``config.json``."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

from halfstep.numerics.messages import instead, whole
from halfstep.numerics.planning.models import Transformer

_llama = partial(Transformer, gated=True, biases=False, norm="rms", positions=False, dropout=False)
_qwen2 = partial(_llama, biases="qkv")
_qwen3 = partial(_llama, head_dim=128, qk_norm="head")
_gemma2 = partial(_llama, tied=True, block_norms=4)
_gpt2 = partial(Transformer, vocab=50257, seq=1024, tied=True)


# From the published config.json of each model: layers, hidden, heads, vocabulary, positions, FFN width, KV heads.
MODELS: dict[str, Transformer] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "tinyllama-1.1b": _llama(22, 2048, 32, 32000, 2048, 5632, 4),
    "llama-2-7b": _llama(32, 4096, 32, 32000, 4096, 11008, 32),
    "llama-2-13b": _llama(40, 5120, 40, 32000, 4096, 13824, 40),
    "llama-2-70b": _llama(80, 8192, 64, 32000, 4096, 28672, 8),
    "llama-3-8b": _llama(32, 4096, 32, 128256, 8192, 14336, 8),
    "llama-3.1-8b": _llama(32, 4096, 32, 128256, 131072, 14336, 8),
    "llama-3-70b": _llama(80, 8192, 64, 128256, 8192, 28672, 8),
    "llama-3.1-70b": _llama(80, 8192, 64, 128256, 131072, 28672, 8),
    "llama-3.3-70b": _llama(80, 8192, 64, 128256, 131072, 28672, 8),
    "llama-3.1-405b": _llama(126, 16384, 128, 128256, 131072, 53248, 8),
    "llama-3.2-1b": _llama(16, 2048, 32, 128256, 131072, 8192, 8, tied=True),
    "llama-3.2-3b": _llama(28, 3072, 24, 128256, 131072, 8192, 8, tied=True),
    "smollm2-135m": _llama(30, 576, 9, 49152, 8192, 1536, 3, tied=True),
    "smollm2-360m": _llama(32, 960, 15, 49152, 8192, 2560, 5, tied=True),
    "smollm2-1.7b": _llama(24, 2048, 32, 49152, 8192, 8192, 32, tied=True),
    "smollm3-3b": _llama(36, 2048, 16, 128256, 65536, 11008, 4, tied=True),
    "mistral-7b": _llama(32, 4096, 32, 32000, 32768, 14336, 8),
    "mistral-7b-v0.3": _llama(32, 4096, 32, 32768, 32768, 14336, 8),
    "ministral-8b": _llama(36, 4096, 32, 131072, 32768, 12288, 8, head_dim=128),
    "mistral-nemo-12b": _llama(40, 5120, 32, 131072, 131072, 14336, 8, head_dim=128),
    "mistral-small-24b": _llama(40, 5120, 32, 131072, 32768, 32768, 8, head_dim=128),
    "mixtral-8x7b": _llama(32, 4096, 32, 32000, 32768, 14336, 8, experts=8, active_experts=2),
    "mixtral-8x22b": _llama(56, 6144, 48, 32768, 65536, 16384, 8, experts=8, active_experts=2),
    "phi-3-mini": _llama(32, 3072, 32, 32064, 4096, 8192, 32),
    "phi-4-mini": _llama(32, 3072, 24, 200064, 131072, 8192, 8, tied=True),
    "phi-4": _llama(40, 5120, 40, 100352, 16384, 17920, 10),
    "qwen2.5-0.5b": _qwen2(24, 896, 14, 151936, 32768, 4864, 2, tied=True),
    "qwen2.5-1.5b": _qwen2(28, 1536, 12, 151936, 131072, 8960, 2, tied=True),
    "qwen2.5-3b": _qwen2(36, 2048, 16, 151936, 32768, 11008, 2, tied=True),
    "qwen2.5-7b": _qwen2(28, 3584, 28, 152064, 131072, 18944, 4),
    "qwen2.5-14b": _qwen2(48, 5120, 40, 152064, 131072, 13824, 8),
    "qwen2.5-32b": _qwen2(64, 5120, 40, 152064, 131072, 27648, 8),
    "qwen2.5-72b": _qwen2(80, 8192, 64, 152064, 131072, 29568, 8),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 151936, 40960, 3072, 8, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 151936, 40960, 6144, 8, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 151936, 40960, 9728, 8, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 151936, 40960, 12288, 8),
    "qwen3-14b": _qwen3(40, 5120, 40, 151936, 40960, 17408, 8),
    "qwen3-32b": _qwen3(64, 5120, 64, 151936, 40960, 25600, 8),
    "qwen3-30b-a3b": _qwen3(48, 2048, 32, 151936, 40960, 768, 4, experts=128, active_experts=8),
    "qwen3-235b-a22b": _qwen3(94, 4096, 64, 151936, 40960, 1536, 4, experts=128, active_experts=8),
    "gemma-2b": _llama(18, 2048, 8, 256000, 8192, 16384, 1, head_dim=256, tied=True),
    "gemma-7b": _llama(28, 3072, 16, 256000, 8192, 24576, 16, head_dim=256, tied=True),
    "gemma-2-2b": _gemma2(26, 2304, 8, 256000, 8192, 9216, 4, head_dim=256),
    "gemma-2-9b": _gemma2(42, 3584, 16, 256000, 8192, 14336, 8, head_dim=256),
    "gemma-2-27b": _gemma2(46, 4608, 32, 256000, 8192, 36864, 16, head_dim=128),
    "gemma-3-270m": _gemma2(18, 640, 4, 262144, 32768, 2048, 1, head_dim=256, qk_norm="head"),
    "gemma-3-1b": _gemma2(26, 1152, 4, 262144, 32768, 6912, 1, head_dim=256, qk_norm="head"),
    "olmo-2-1b": _llama(16, 2048, 16, 100352, 4096, 8192, 16, qk_norm="width"),
    "olmo-2-7b": _llama(32, 4096, 32, 100352, 4096, 11008, 32, qk_norm="width"),
    "olmo-2-13b": _llama(40, 5120, 40, 100352, 4096, 13824, 40, qk_norm="width"),
    "olmo-2-32b": _llama(64, 5120, 40, 100352, 4096, 27648, 8, qk_norm="width"),
    "olmo-3-7b": _llama(32, 4096, 32, 100278, 65536, 11008, 32, qk_norm="width"),
    "olmo-3-32b": _llama(64, 5120, 40, 100278, 65536, 27648, 8, qk_norm="width"),
}

# By the model_type of a config.json: the family, options that are not in the file, and the default for tied heads.
_FAMILIES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "granite", "phi3"), (_llama, {}, False)),
    **dict.fromkeys(("qwen3", "qwen3_moe"), (_qwen3, {}, False)),
    **dict.fromkeys(("olmo2", "olmo3"), (_llama, {"qk_norm": "width"}, False)),
    "smollm3": (_llama, {}, True),
    "qwen2": (_qwen2, {}, False),
    "gemma": (_llama, {"head_dim": 256}, True),
    "gemma2": (_gemma2, {"head_dim": 256}, True),
    "gemma3_text": (_gemma2, {"head_dim": 256, "qk_norm": "head"}, True),
}
# The keys of sizes in a config.json.
_SIZES = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads", "vocab": "vocab_size",
    "seq": "max_position_embeddings", "ffn": "intermediate_size",
}  # fmt: skip
_GPT2 = {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab": "vocab_size", "seq": "n_positions"}
_EXPERTS = {
    "mixtral": {"experts": "num_local_experts", "active_experts": "num_experts_per_tok"},
    "qwen3_moe": {"experts": "num_experts", "active_experts": "num_experts_per_tok", "ffn": "moe_intermediate_size"},
}
HUB = "https://huggingface.co"  # unless HF_ENDPOINT is set, as in Hugging Face's own libraries


@cache  # the planner's page reads it again for every request
def _downloaded(address: str) -> Any:
    from urllib.request import urlopen

    with urlopen(address, timeout=5) as reply:
        return json.loads(reply.read(2**20))


def _read(source: str) -> Any:
    """The config.json at a path, or of a repository on Hugging Face if the path does not exist."""
    from http.client import HTTPException

    path = Path(source)
    try:
        if not path.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(?<!\.json)", source, re.ASCII):
            hub = os.environ.get("HF_ENDPOINT", HUB).rstrip("/")
            return _downloaded(f"{hub}/{source}/resolve/main/config.json")
        return json.loads((path / "config.json" if path.is_dir() else path).read_text(encoding="utf-8"))
    except (OSError, HTTPException, ValueError, RecursionError) as error:
        meant = instead(source.rpartition("/")[2].lower(), MODELS, listed=False)
        reason = getattr(error, "strerror", None) or error  # without errno, which differs under Pyodide
        raise ValueError(
            "Expected model to be a published shape, a config.json of Hugging Face, or a repository there that can be "
            f"read without a login, such as Qwen/Qwen3-8B, but got {source!r}: {meant}{reason}"
        ) from error


def from_config(config: Mapping[str, Any] | str | Path) -> Transformer:
    """The shape of a model from its Hugging Face ``config.json``.

    Args:
        config: the content of the file, the path of the file or its folder, or, if that path does not exist, a
            repository on Hugging Face, such as ``"Qwen/Qwen3-8B"``. Only its ``config.json`` is downloaded.

    Raises:
        ValueError: the file cannot be read, or its model type is not supported.

    Examples:
        >>> from halfstep.numerics.planning import from_config
        >>> llama = {"model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
        >>> llama |= {"num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256}
        >>> from_config(llama | {"max_position_embeddings": 8192}).parameters
        8030261248
    """
    if not isinstance(config, Mapping):
        source = str(config)
        config = _read(source)
        if not isinstance(config, Mapping):
            raise ValueError(f"Expected {source} to hold a JSON object: pass a config.json of Hugging Face")
    name, planned = str(config.get("model_type")), ["gpt2", *_FAMILIES]
    if name not in planned:
        hint = ": pass a file with its text_config" if "text_config" in config else ""
        raise ValueError(
            f"Expected model_type to be one of {', '.join(planned)}, but got {name!r}{hint}; "
            f"{instead(name, planned, False)}or give the shape as numbers"
        )

    family, options, tied = _FAMILIES.get(name, (Transformer, {}, True))
    fields = {**options, "tied": bool(config.get("tie_word_embeddings", tied))}
    if config.get("attention_bias") and name != "qwen2":
        raise ValueError("Expected attention_bias to be false, but got true: give the shape as numbers")
    if name == "qwen3_moe" and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
        raise ValueError("Expected all blocks to have experts, but some do not: give the shape as numbers")
    for field, key in (_GPT2 if name == "gpt2" else {**_SIZES, **_EXPERTS.get(name, {})}).items():
        if key not in config:
            raise ValueError(f"Expected config.json to have {key}, but it does not: pass the model's complete config")
        fields[field] = whole(key, config[key])
    optional = {"ffn": "n_inner"} if name == "gpt2" else {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    for field, key in optional.items():
        if config.get(key) is not None:
            fields[field] = whole(key, config[key])
    return family(**fields)


GIB = 2**30
RESERVE = Fraction(1, 10)  # fraction of the memory reserved for what a plan does not count; a rule of thumb


@dataclass(frozen=True)
class Card:
    """One GPU."""

    name: str
    memory: int  # bytes
    flops: float | None  # peak FLOP/s of dense 16-bit matrix products, if known
    bandwidth: float | None  # memory bandwidth in bytes per second, if known


# Memory in GB, dense 16-bit matrix TFLOP/s and memory bandwidth in GB/s, from the vendors' datasheets and whitepapers.
# A GPU has as many GiB as its datasheet gives GB, minus the memory that the driver and ECC take (an H200 of "141 GB"
# offers 139.8 GiB, an L40S with ECC 45.0 GiB). FLOP/s are those of bf16 (V100, T4: fp16) accumulated in fp32.
_CARDS: dict[str, tuple[int, float, float]] = {
    "a100-40": (40, 312, 1555), "a100-80": (80, 312, 2039), "h100": (80, 989.4, 3350), "h100-pcie": (80, 756, 2000),
    "h100-nvl": (94, 835.5, 3900), "h200": (141, 989.4, 4800), "b200": (180, 2250, 8000), "gb200": (186, 2500, 8000),
    "l4": (24, 121, 300), "l40s": (48, 362.05, 864), "a10": (24, 125, 600), "a10g": (24, 70, 600),
    "a30": (24, 165, 933), "a40": (48, 149.7, 696), "a6000": (48, 154.8, 768), "rtx6000-ada": (48, 364.2, 960),
    "rtx-pro-6000": (96, 503.8, 1792), "v100-16": (16, 125, 900), "v100-32": (32, 125, 900), "t4": (16, 65, 300),
    "rtx3090": (24, 71, 936), "rtx4090": (24, 165.2, 1008), "rtx5080": (16, 112.6, 960),
    "rtx5090": (32, 209.5, 1792), "mi250x": (128, 383, 3276.8), "mi300x": (192, 1307.4, 5300),
    "mi325x": (256, 1307.4, 6000), "mi355x": (288, 2500, 8000),
}  # fmt: skip
CARDS = {
    name: Card(name, memory * GIB, round(tflops * 1e12), round(bandwidth * 1e9))
    for name, (memory, tflops, bandwidth) in _CARDS.items()
}


# Parts of a GPU's name to ignore: torch.cuda.get_device_name gives "NVIDIA A100-SXM4-80GB" and "NVIDIA H100 80GB HBM3".
_NOT_OF_A_NAME = re.compile(
    r"nvidia|amd|instinct|geforce|tesla|rtx|generation|sxm\d?|(?<=a100-)pcie|hbm\d?e?|(?<=\d)gi?b|[^a-z0-9.]"
)


def card(name: str) -> Card:
    """The GPU of this name, a short one or the driver's, or a GPU with this much memory, such as ``"24GiB"``.

    Raises:
        ValueError: there is no such GPU. The message suggests the closest name.

    Examples:
        >>> from halfstep.numerics.planning import card
        >>> card("h100").memory == card("NVIDIA H100 80GB HBM3").memory == card("80GiB").memory == 80 * 2**30
        True
    """
    text = name.lower().strip()
    # Vendors write GB for GiB.
    if (memory := re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?(?:g|gb|gib)", text)) and Fraction(memory[1]) > 0:
        return Card(f"{memory[1]} GiB", int(Fraction(memory[1]) * GIB), None, None)
    meant = _NOT_OF_A_NAME.sub("", text)
    for gpu in CARDS.values():
        short = _NOT_OF_A_NAME.sub("", gpu.name)
        if meant in (short, f"{short}{gpu.memory // GIB}"):
            return gpu
    several = [card for card in CARDS if meant and card.startswith(f"{meant}-")]
    raise ValueError(
        f"Expected card to be the name of a GPU or a size such as 24GiB, but got {name!r}: "
        f"{instead(text, several or CARDS)}"
    )


def usable(gpu: Card) -> int:
    """The memory of a GPU in bytes, minus a reserve of 10 % for what a plan does not count.

    Examples:
        >>> from halfstep.numerics.planning import card, usable
        >>> usable(card("h100")) == 72 * 2**30
        True
    """
    return int(gpu.memory * (1 - RESERVE))
