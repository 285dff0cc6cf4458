"""The planner against worked examples, the papers' formulas and published parameter counts."""

import json
import math
from fractions import Fraction
from typing import Any

import pytest

from halfstep.numerics.owners import MOST, assigned
from halfstep.numerics.planning import (
    CARDS,
    LAYOUTS,
    MODELS,
    STRATEGIES,
    Layout,
    Transformer,
    card,
    layout,
    plan,
    unit,
    work,
)
from halfstep.numerics.planning.models import parameters_of
from halfstep.numerics.planning.sharding import scratch_of

BILLION = 10**9
# 12 layers of 768, 512 positions, a vocabulary of 40512; post-norm, so without a last norm.
EXAMPLE: dict[str, Any] = {"layers": 12, "hidden": 768, "heads": 12, "vocab": 40512, "seq": 512}
EXAMPLE |= {"final_norm": False, "flash": False}  # the papers count stored scores

WORKED = Transformer(**EXAMPLE)
LORA: dict[str, Any] = {"model": WORKED, "lora": 4}


# ------------------------------------------------------------------------------------------------- bytes per parameter


@pytest.mark.parametrize("gpus", [1, 8, 1000])
def test_zero_divides_adam_in_fp32(gpus: int) -> None:
    share = Fraction(1, gpus)
    for strategy, bytes_each in (("zero1", 8 + 8 * share), ("zero2", 4 + 12 * share), ("zero3", 16 * share)):
        planned = plan(BILLION, precision="fp32", optimizer="torch", gpus=gpus, strategy=strategy)
        assert planned.totals.state == bytes_each * BILLION, strategy


@pytest.mark.parametrize(
    ("precision", "optimizer", "options", "bytes_each", "moved"),
    [  # those of ours and of torch are in test_planning_reality.py and in docs/layouts.md
        ("bf16", "halfstep", {"moments": "bf16"}, 10, 18),
        ("bf16", "halfstep-stochastic", {"moments": "8bit"}, Fraction(195, 32), Fraction(163, 16)),
        ("bf16", "flashoptim-24", {}, Fraction(57, 8), Fraction(49, 4)),  # 2 + 2 + 1 + 2 · (1 + 2/32)
    ],
)
def test_bytes_per_parameter_and_moved_by_a_step(
    precision: str, optimizer: str, options: dict[str, str], bytes_each: Fraction, moved: Fraction
) -> None:
    planned = plan(BILLION, precision=precision, optimizer=optimizer, **options)
    assert (planned.totals.state, planned.step_traffic) == (bytes_each * BILLION, moved * BILLION)
    assert layout(optimizer, precision, **options).moved_per_step() == moved


# --------------------------------------------------------------------------------------------------- the worked example


def test_the_worked_example_has_the_computed_bytes() -> None:
    assert WORKED.parameters == 147_674_112 and Transformer(**EXAMPLE, tied=True).parameters == 116_560_896
    planned = plan(model=WORKED, batch=64, precision="fp16", optimizer="halfstep")
    size = {part.name: part.bytes for part in planned.parts}
    assert size["weights"] == size["gradients"] == 2 * WORKED.parameters
    assert size["master"] + size["exp_avg"] + size["exp_avg_sq"] == 12 * WORKED.parameters
    assert size["activations"] == 64 * 349_175_808 and size["logits"] == 5_309_988_864
    assert planned.totals.peak > planned.totals.state + size["activations"] + size["logits"]


# As on the pages of the models at Hugging Face, counted from their safetensors, tied matrices once.
PUBLISHED = {
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "tinyllama-1.1b": 1_100_048_384, "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192, "llama-3-8b": 8_030_261_248, "llama-3.1-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496, "llama-3.1-70b": 70_553_706_496, "llama-3.3-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,
    "smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624, "mistral-7b": 7_241_732_096, "mistral-7b-v0.3": 7_248_023_552,
    "ministral-8b": 8_019_808_256, "mistral-nemo-12b": 12_247_782_400, "mistral-small-24b": 23_572_403_200,
    "mixtral-8x7b": 46_702_792_704, "mixtral-8x22b": 140_630_071_296, "phi-3-mini": 3_821_079_552,
    "phi-4-mini": 3_836_021_760, "phi-4": 14_659_507_200, "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "qwen3-235b-a22b": 235_093_634_560, "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896, "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320, "gemma-3-270m": 268_098_176, "gemma-3-1b": 999_885_952,
    "olmo-2-1b": 1_484_916_736, "olmo-2-7b": 7_298_617_344, "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936, "olmo-3-7b": 7_298_011_136, "olmo-3-32b": 32_233_522_176,
}  # fmt: skip


def test_published_parameter_counts() -> None:
    assert {name: model.parameters for name, model in MODELS.items()} == PUBLISHED
    active = {name: f"{model.active_parameters / 1e9:.3g}" for name, model in MODELS.items() if model.experts}
    mixtral, qwen = {"mixtral-8x7b": "12.9", "mixtral-8x22b": "39.2"}, {"qwen3-30b-a3b": "3.35"}
    assert active == {**mixtral, **qwen, "qwen3-235b-a22b": "22.2"}
    assert plan(model=MODELS["mixtral-8x7b"]).active_parameters == MODELS["mixtral-8x7b"].active_parameters


def test_activations_are_the_papers() -> None:
    s, b, h, L, a = 512, 4, 768, 12, 12
    assert work.activations(WORKED, b, s).saved == s * b * h * L * (34 + Fraction(5 * a * s, h))
    full, layer = work.activations(WORKED, b, s, checkpointing="full"), work.layer_activations(WORKED, b, s)
    assert (full.saved, full.recomputed) == (L * 2 * s * b * h, layer)


# -------------------------------------------------------------------------------------------------------------- work


@pytest.mark.parametrize("model", [WORKED, *MODELS.values()])
def test_every_matrix_takes_two_flops_per_element_and_token(model: Transformer) -> None:
    s, matrices = 64, Fraction(0)
    for block in model.units():
        for tensor in block.tensors:
            share = Fraction(model.active_experts, model.experts) if tensor.name.startswith("experts") else 1
            matrices += tensor.elements * block.count * share * (tensor.kind == "matrix")
    scores = 4 * s**2 * model.heads * (model.head_dim or model.hidden // model.heads)
    assert work.forward_flops(model, 3, s) == 3 * (2 * s * matrices + model.layers * scores)


def test_training_flops_are_narayanans() -> None:
    b, s, h, L, V = 8, 512, 768, 12, 40512
    full = plan(model=WORKED, batch=b, checkpointing="full").work
    formula = 96 * b * s * L * h**2 * (1 + Fraction(s, 6 * h) + Fraction(V, 16 * L * h))
    assert full is not None and full.exact and full.hardware == formula
    # Training with full checkpointing is four forwards of the blocks instead of three.
    forward, head = work.forward_flops(WORKED, b, s), 2 * b * s * h * V
    assert full.hardware - 3 * head == 4 * (forward - head)
    plain = plan(model=WORKED, batch=b).work
    assert plain is not None and plain.hardware == plain.training == full.training == 3 * forward
    rough = plan(7e9, batch=1, seq=2048).work
    assert rough is not None and not rough.exact and rough.training == 6 * 7 * BILLION * 2048


# ------------------------------------------------------------------------------------------ communication and shards


def sent(strategy: str, gpus: int, **options: Any) -> Fraction:
    options = {"precision": "fp32", "optimizer": "torch", "gpus": gpus, "strategy": strategy, **options}
    return Fraction(plan(24 * BILLION, **options).bytes_sent, 24 * BILLION)


@pytest.mark.parametrize("gpus", [8, 3])
def test_communication_per_parameter(gpus: int) -> None:
    ddp = 2 * Fraction(gpus - 1, gpus) * 4
    for strategy in ("ddp", "zero1", "zero2"):
        assert sent(strategy, gpus) == ddp
    for strategy in ("zero3", "fsdp", "fsdp1", "zero1-torch"):  # the last all-reduces, then broadcasts
        assert sent(strategy, gpus) == ddp * 3 / 2


def test_hybrid_sharding_sends_shards_across_groups() -> None:
    # 16 GPUs in two groups of eight: two gathers and a scatter within, an all-reduce of an eighth across.
    assert sent("hsdp", 16, shard=8) == 3 * Fraction(7, 8) * 4 + 2 * Fraction(1, 2) * Fraction(4, 8)
    assert sent("hsdp", 8, shard=8) == sent("fsdp", 8)
    assert sent("hsdp", 8, shard=1) == sent("ddp", 8)
    assert plan(BILLION, precision="fp32", gpus=16, strategy="hsdp", shard=8).totals.state == 2 * BILLION


def test_ranks_exchange_parts_of_the_matrices_of_muon() -> None:
    """All ranks together send 4 (N - 1) / N bytes per element; whole experts are not sent."""
    model = MODELS["llama-3-8b"]
    matrices = sum(tensor.elements for tensor in model.units()[0].tensors if tensor.kind == "matrix") * 32
    for options in ({"gpus": 8, "strategy": "fsdp"}, {"gpus": 16, "strategy": "hsdp", "shard": 8}):
        plans = (plan(model=model, optimizer="halfstep-muon", rank=rank, **options) for rank in range(8))
        messages = [planned.communication[-1] for planned in plans]
        assert {(message.name, message.ranks) for message in messages} == {("all-to-all", 8)}
        assert sum(message.bytes for message in messages) == 4 * matrices * 7 / 8
    units = [unit("all", {"experts": (8, 64, 64), "router": (8, 64), "embed.tokens": (64, 64)})]
    exchange = plan(units=units, gpus=4, strategy="fsdp", optimizer="halfstep-muon", rank=1).communication[-1]
    assert exchange.bytes == 2 * 2 * 64  # two rows of the router, whose owner is rank 0
    options = {"units": units, "gpus": 2**40, "strategy": "fsdp", "optimizer": "halfstep-muon"}
    assert [plan(**options, rank=rank).part("scratch").bytes for rank in (1, 7, 2**39)] == [8192, 8192, 0]
    # Launches use two memories of the host in turn: two experts, and two rows of the router.
    scratch = scratch_of((units[0].of_muon(True),), 4, 1, True, False)
    assert (scratch.host, scratch.copied) == (2 * 64 * 64 + 2 * 64,) * 2
    assert plan(24 * BILLION, gpus=8, strategy="fsdp", optimizer="halfstep-muon").communication[-1].bytes == (
        4 * 24 * BILLION // 8 * 7 // 8
    )
    # Two copies in bf16 and two products; a third copy of a matrix that was exchanged.
    for shape, copies in (((8, 16), 6 * 128 + 4 * 64), ((4, 8, 16), 4 * 128 + 4 * 64)):
        assert scratch_of((unit("all", {"weight": shape}),), 2, 0, True, False).copies == copies


def test_shards_are_padded() -> None:
    """Seven rows of five and three elements over four ranks: one flat tensor of 38 to 40, parameters to 36 and 4."""
    for strategy in ("zero1", "zero2", "zero3"):
        planned = plan(units=[unit("all", [(7, 5), (3,)])], gpus=4, strategy=strategy, precision="fp32")
        assert {message.bytes for message in planned.communication} == {40 * 4 * 3 // 4}
        assert planned.part("exp_avg").bytes == 4 * 10
    for strategy, part in (("fsdp", "weights"), ("zero1", "exp_avg")):  # of unknown shapes
        assert plan(10, gpus=4, strategy=strategy, precision="fp32").part(part).bytes == 3 * 4


def test_whole_parameters_are_assigned_to_the_rank_with_least() -> None:
    assert assigned([5, 1, 9, 4, 4], 2) == [1, 1, 0, 1, 0]
    # The rank that holds most is not always the first, and ranks beyond the parameters hold none.
    options: dict[str, Any] = {"units": [unit("all", [(5,), (4,), (3,)])], "strategy": "zero1-torch"}
    for gpus, rank, states in ((2, None, 7), (2, 0, 5), (2**40, None, 5), (2**40, 2, 3), (2**40, 3, 0)):
        assert plan(**options, gpus=gpus, precision="fp32", rank=rank).part("exp_avg").bytes == 4 * states


def test_buckets_are_no_larger_than_the_gradients() -> None:
    for size, buckets in ((10, 20), (BILLION, 10**9)):
        assert plan(size, gpus=2, strategy="zero2").part("buckets").bytes == buckets


def test_fsdp_gathers_the_root_and_two_blocks() -> None:
    planned = plan(model=WORKED, gpus=8, strategy="fsdp", precision="bf16")
    block, root = 12 * 768**2 + 13 * 768, 2 * 40512 * 768 + 512 * 768
    assert planned.part("gathered weights").bytes == 2 * (root + 2 * block)
    assert planned.part("unreduced gradients").bytes == (2 + 2) * block
    assert "gathered weights" not in [part.name for part in plan(model=WORKED, strategy="fsdp").parts]
    # FSDP gathers weights already cast: autocast finds nothing to copy.
    amp = plan(model=WORKED, gpus=8, strategy="fsdp", precision="amp-bf16", optimizer="torch")
    assert amp.part("gathered weights").bytes == planned.part("gathered weights").bytes
    assert "cast weights" not in [part.name for part in amp.parts]


def test_offloading_leaves_states_or_everything_on_the_host() -> None:
    zero2 = plan(BILLION, gpus=8, strategy="zero2", precision="bf16", optimizer="halfstep-full", offload=True)
    assert zero2.totals.host == 12 * BILLION // 8 and zero2.totals.state == 2 * BILLION + 2 * BILLION // 8
    assert zero2.bytes_sent == 2 * 2 * BILLION * 7 // 8  # copies to the host are not sent to others
    copies = [(message.name, message.bytes) for message in zero2.communication[-2:]]
    assert copies == [("copy to the host", 2 * BILLION // 8), ("copy from the host", 2 * BILLION // 8)]
    everything = plan(BILLION, gpus=8, strategy="fsdp", offload=True)
    assert everything.totals.state == 0 and everything.totals.host == 14 * BILLION // 8
    # Weights come for every forward and backward, gradients go after each backward.
    assert [c.bytes for c in everything.communication[-2:]] == [2 * BILLION // 8, 2 * 2 * BILLION // 8]
    # Ours keeps the weights on the GPU too; tests/integrations/test_offload.py measures the rest.
    units = [unit("all", [(1000, 1000)] * 1000)]
    copies = [(message.what, message.bytes // BILLION) for message in plan(units=units, offload=True).communication]
    assert copies == [("gradients", 2), ("weights", 2), ("weights", 2)]
    stepping = plan(units=units, offload=True, step_in_backward=2**20)
    assert stepping.part("gradients").bytes == 2 * 2**20 + 2 * 10**6
    kept = plan(BILLION, gpus=8, strategy="fsdp", offload=True, keep_weights=True)
    assert kept.totals.state == 2 * BILLION // 8 and kept.totals.host == 14 * BILLION // 8
    assert kept.totals.backward == kept.part("gradients").bytes == 2 * 25 * 2**20
    assert [c.bytes for c in kept.communication[-3:]] == [2 * BILLION // 8] * 3
    muon = plan(BILLION, gpus=8, strategy="fsdp", offload=True, keep_weights=True, optimizer="halfstep-muon")
    assert muon.part("scratch on the host").bytes == 2 * 2 * MOST
    assert [c.bytes for c in muon.communication[-6:-1]] == [2 * BILLION // 8] * 5  # matrices go to the GPU and return
    replicas = plan(BILLION, gpus=2, offload=True)
    assert replicas.totals.state == (2 + 2 + 2) * BILLION and replicas.totals.host == 14 * BILLION


def test_steps_in_the_backward_leave_the_gradients_of_one_bucket() -> None:
    """One gradient beyond what fills a bucket; under FSDP2 the buffers of two units."""
    unknown = plan(BILLION, step_in_backward=2**20)
    assert unknown.part("gradients").bytes == unknown.totals.backward == 2**20 and unknown.totals.state == 12 * BILLION
    assert plan(100, step_in_backward=2**20).part("gradients").bytes == 200
    assert plan(BILLION, gpus=2, precision="fp16", step_in_backward=2**20).part("gradients").bytes == 2 * 2**20
    units = [unit("root", [(10, 8)], root=True), unit("block", [(16, 8), (7,)], count=6)]
    for optimizer in ("halfstep", "halfstep-muon"):
        released = plan(units=units, optimizer=optimizer, step_in_backward=100)
        assert released.part("gradients").bytes == 99 + 2 * 16 * 8
    replicas = plan(units=units, gpus=4, step_in_backward=100)
    assert replicas.part("gradients").bytes == 2 * (99 + 2 * 16 * 8) + 16 * 13
    wide = plan(units=units, precision="fp32", gpus=4, step_in_backward=100)
    assert wide.part("gradients").bytes == 2 * (99 + 4 * 16 * 8) + 32 * 13
    assert "buckets" not in [part.name for part in replicas.parts]
    for strategy, shard, ways in (("fsdp", None, 4), ("hsdp", 2, 2)):
        planned = plan(units=units, gpus=4, strategy=strategy, step_in_backward=100, shard=shard)
        assert planned.part("gradients").bytes == 100 + 2 * 2 * (128 // ways + -(-7 // ways))
        assert planned.settings["step_in_backward"] == 100 and not planned.part("gradients").exact


# --------------------------------------------------------------------------------------------------------------- cards


def test_a_card_has_the_names_that_drivers_give_it() -> None:
    names = {
        "NVIDIA A100-SXM4-80GB": "a100-80", "A100-PCIE-40GB": "a100-40", "NVIDIA H100 80GB HBM3": "h100",
        "NVIDIA H100 PCIe": "h100-pcie", "NVIDIA H100 NVL": "h100-nvl", "A100 40GB": "a100-40", "NVIDIA H200": "h200",
        "NVIDIA GeForce RTX 4090": "rtx4090", "3090": "rtx3090", "NVIDIA A10G": "a10g", "RTX A6000": "a6000",
        "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada", "Tesla V100-SXM2-16GB": "v100-16", "NVIDIA GB200": "gb200",
        "AMD Instinct MI300X": "mi300x", **{name: name for name in CARDS},
    }  # fmt: skip
    assert {typed: card(typed).name for typed in names} == names


def test_cards_have_the_bandwidths_of_the_audit() -> None:
    from software_gpu.roofline import GPUS

    predicted = {name.lower(): gpu.bandwidth for name, gpu in GPUS.items()}
    assert {name.removesuffix("-80"): gpu.bandwidth for name, gpu in CARDS.items()}.items() >= predicted.items()


# -------------------------------------------------------------------------------------------------- errors and reports


def test_a_plan_is_plain_json_and_always_the_same() -> None:
    arguments: dict[str, Any] = {"model": WORKED, "gpus": 16, "strategy": "hsdp", "shard": 8, "batch": 2}
    planned = plan(**arguments).as_dict()
    text = json.dumps(planned)
    assert text == json.dumps(plan(**arguments).as_dict()) and json.loads(text) == planned
    keys = "parameters active_parameters settings layout parts totals communication bytes_sent work step_traffic"
    assert list(planned) == keys.split()
    assert planned["totals"]["state"] == sum(part["bytes"] for part in planned["parts"] if part["phase"] == "always")
    assert planned["bytes_sent"] == sum(message["bytes"] for message in planned["communication"]) > 0
    assert plan(**{**planned["settings"], "params": None, "model": WORKED}).as_dict() == planned


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: row.name)
def test_every_row_plans_under_every_strategy(row: Layout) -> None:
    each = row.per_parameter() * 64 * BILLION
    for name, strategy in STRATEGIES.items():
        if strategy.holds(row):
            sizes = {"gpus": 1 if name == "single" else 8, "shard": 4 if name == "hsdp" else None}
            planned = plan(64 * BILLION, precision=row.precision, optimizer=row.optimizer, strategy=name, **sizes)
            parts = (part for part in planned.parts if part.phase == "always")
            counted = [part for part in parts if part.name not in ("buckets", "scratch")]
            assert sum(part.bytes for part in counted) <= each, name
            assert sum((part.per_parameter or 0) for part in counted) * 64 * BILLION == each, name


ONE: dict[str, Any] = {"params": 1}
TWO: dict[str, Any] = {"params": 1, "gpus": 2}
MUON: dict[str, Any] = {"optimizer": "halfstep-muon"}
STEPPING: dict[str, Any] = {"step_in_backward": 9}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "Expected one of params, model and units, but got none"),
    ({"params": 1, "model": WORKED}, "Expected one of params, model and units, but got params and model"),
    *(({"params": size}, f"Expected params to be an integer of at least 1, but got {size}")
      for size in (0, 1.5, math.nan, True)),
    (ONE | {"strategy": "zero4"}, "but got 'zero4': did you mean 'zero"),
    (ONE | {"optimizer": "halfstp"}, "but got 'halfstp': did you mean 'halfstep'?"),
    (ONE | {"optimizer": "halfstep-split", "precision": "fp16"}, "Expected precision to be one of bf16 for"),
    (TWO | {"strategy": "single"}, "Expected strategy to be 'ddp' or another for 2 GPUs, but got 'single': or"),
    (TWO | {"strategy": "hsdp"}, "Expected shard to be the GPUs of one group with strategy 'hsdp', but got None: pass"),
    (TWO | {"strategy": "hsdp", "shard": 3}, "Expected shard to divide gpus, 2, but got 3"),
    (TWO | {"shard": 2}, "Expected shard to be None with strategy 'ddp', without groups, but got 2: leave it out"),
    (TWO | {"offload": True, "strategy": "zero1-torch"}, "with offload=True, but got 'zero1-torch': leave offload out"),
    (ONE | {"offload": True, "optimizer": "torch"}, "Expected optimizer to be one of halfstep's with"),
    (ONE | {"optimizer": "torch", "moments": "bf16"}, "moments to be None for optimizer 'torch', whose format"),
    (TWO | {"bucket_view": True, "strategy": "fsdp"}, "strategy 'fsdp' on 2 GPUs, without DDP's buckets, but got True"),
    (ONE | {"checkpointing": "full"}, "Expected checkpointing to be 'none' without a model, of which activations are"),
    (TWO | {"rank": 2, "strategy": "fsdp"}, "Expected rank to be an integer from 0 to 1, but"),
    ({"model": WORKED, "seq": 1024}, "Expected seq to be from 1 to 512, the positions of the model, but got 1024"),
    ({"units": []}, "Expected units to contain parameters, but got none"),
    *((TWO | {"strategy": name, "moments": "8bit"}, "ddp, zero1-torch, fsdp, hsdp with moments in 8 bits, whose "
       f"blocks lie within rows of parameters, but got '{name}': choose one of these, or moments 'bf16'")
      for name in ("zero1", "zero2", "zero3", "fsdp1")),
    *((TWO | STEPPING | {"strategy": name}, f"single, ddp, fsdp, hsdp with step_in_backward, but got '{name}'")
      for name in ("zero1", "zero1-torch", "zero2", "zero3", "fsdp1")),
    (ONE | {"step_in_backward": 0}, "Expected step_in_backward to be an integer of at least 1, but got 0"),
    (TWO | MUON | {"strategy": "zero1"}, "single, ddp, fsdp, hsdp with Muon, which needs whole"),
    (TWO | MUON | {"offload": True, "strategy": "fsdp"}, "Expected keep_weights to be True with offload=True and Muon"),
    (ONE | MUON | {"offload": True, "step_in_backward": 1}, "Expected step_in_backward to be None with offload=True"),
    (TWO | MUON | STEPPING | {"strategy": "fsdp"}, "single, ddp with step_in_backward and Muon, whose matrices must"),
    (ONE | STEPPING | {"optimizer": "torch"}, "one of halfstep's with step_in_backward, but got 'torch': leave one"),
    (ONE | {"lora": 4}, "Expected model to be a Transformer with lora, whose adapters adapt its matrices"),
    (LORA | {"gpus": 2, "strategy": "zero2"}, "to be single, ddp, fsdp, hsdp with lora, but got 'zero2'"),
    (LORA | {"offload": True}, "Expected offload to be False with lora, but got True: leave one of them out"),
    (TWO | {"keep_weights": True}, "keep_weights to be False without offload, but got True: pass offload=True"),
    (TWO | {"keep_weights": True, "offload": True, "strategy": "zero3"}, "with keep_weights=True, but got 'zero3'"),
]  # fmt: skip
SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"heads": 11}, "Expected heads to divide hidden, 768, but got 11"),
    ({"kv_heads": 5}, "Expected kv_heads to divide heads, 12, but got 5"),
    ({"norm": "batch"}, "Expected norm to be one of layer, rms, but got 'batch'"),
    ({"layers": 0}, "Expected layers to be an integer of at least 1, but got 0"),
    ({"experts": 2, "active_experts": 3}, "Expected active_experts to be at most experts, 2, but got 3"),
]


@pytest.mark.parametrize(("refuses", "arguments", "message"), [
    *((plan, *row) for row in REFUSED), *((Transformer, EXAMPLE | change, message) for change, message in SHAPES),
    (plan(10).part, {"name": "wieghts"}, "but got 'wieghts': did you mean 'weights'"),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_bad_arguments_are_refused_with_a_remedy(refuses: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as raised:
        refuses(**arguments)
    assert message in str(raised.value)


# ------------------------------------------------------------------------------------------------------------ adapters


def test_adapters_are_planned_beside_frozen_weights() -> None:
    """Rank 8 beside Llama's matrices: (columns + rows) times 8 for each, in all 32 blocks."""
    model = MODELS["llama-3-8b"]
    added = 32 * 8 * ((4096 + 6144) + 2 * 4096 + 3 * (4096 + 14336))
    assert parameters_of(model.adapters(8)) == added
    single = plan(model=model, lora=8)
    assert single.parameters == model.parameters + added
    assert single.part("frozen weights").bytes == 2 * model.parameters
    assert single.part("gradients").bytes == single.part("weights").bytes == 2 * added
    assert single.part("exp_avg").bytes == 4 * added
    replicas = plan(model=model, lora=8, gpus=4)
    (message,) = replicas.communication
    assert message.bytes == 2 * added * 2 * 3 // 4 and replicas.part("buckets").bytes == 2 * added
    shards = plan(model=model, lora=8, gpus=8, strategy="fsdp")
    assert shards.part("frozen weights").bytes == 2 * model.parameters // 8
    forward, backward, scattered = shards.communication
    everything = model.parameters + added
    root = parameters_of(unit for unit in model.units() if unit.root)
    assert forward.bytes == 2 * everything * 7 // 8 and backward.bytes == 2 * (everything - root) * 7 // 8
    assert scattered.bytes == 2 * added * 7 // 8
    block = sum(unit.elements for unit in model.units_with_adapters(8) if not unit.root)
    assert shards.part("gathered weights").bytes == 2 * (root + 2 * block)
    assert shards.part("unreduced gradients").bytes == 4 * added // 32
