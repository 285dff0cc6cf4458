"""`halfstep.integrations.trainers.transformers` with the real library, and with TRL and PEFT."""

import math
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import trainer_tools as tools
from states import same_bits

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import step_in_backward

pytestmark = tools.skip_without("transformers", "trl", "peft", "bitsandbytes")
transformers, trl = tools.imported("transformers"), tools.imported("trl")
transformers_ranks = tools.imported("transformers_ranks")
ours = tools.imported("halfstep.integrations.trainers.transformers")


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_without_clipping_the_norm_is_logged_and_nothing_written(found: dict[str, list[Any]], kind: str) -> None:
    (rank,), (clipped,) = found[f"{kind} without clipping"], found[f"one process {kind}"]
    assert rank["unwritten"] == [True] * tools.STEPS and rank["as_far"]
    assert rank["norms"][0] == clipped["norms"][0] and not same_bits(rank["state"], clipped["state"])


@pytest.mark.parametrize(
    ("scheme", "kind", "fp32"),
    [
        *((None, kind, fp32) for kind in ("bf16", "fp16") for fp32 in (True, False)),
        *(("nf4", "bf16", True), ("nf4", "bf16", False), ("int8", "fp16", False)),
    ],
)
def test_adapters_train_on_frozen_weights(
    found: dict[str, list[Any]], kind: str, fp32: bool, scheme: str | None
) -> None:
    """Also on weights that bitsandbytes keeps in 4 and 8 bits."""
    (rank,) = found[f"LoRA {scheme} {kind} {fp32}"]
    own = {"bf16": ("torch.bfloat16", "torch.int16"), "fp16": ("torch.float16", "torch.float32")}[kind]
    assert rank["base"] == [{None: own[0], "nf4": "torch.uint8", "int8": "torch.int8"}[scheme]]
    assert rank["adapters"] == ["torch.float32" if fp32 else own[0]]
    assert rank["masters"] == ([] if fp32 else [own[1]])
    assert rank["trained"] and rank["moved"] and rank["frozen"] and rank["exported"]
    assert rank["moments"] == ["torch.bfloat16"]  # as optim_args says
    assert rank["unwritten"] == [True] * tools.STEPS
    assert rank["skipped"] == [kind == "fp16" and step == tools.BROKEN for step in range(tools.STEPS)]
    assert rank["losses"][-1] < rank["losses"][0]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (None, {}),
        ("", {}),
        ("state_dtype=torch.bfloat16", {"state_dtype": torch.bfloat16}),
        (
            "state_dtype=8bit, master_weights=split24, rounding=stochastic",
            {"state_dtype": "8bit", "master_weights": "split24", "rounding": "stochastic"},
        ),
        ("master_weights=None,amsgrad=True,seed=7", {"master_weights": None, "amsgrad": True, "seed": 7}),
    ],
)
def test_optim_args_are_options_of_ours(text: str | None, options: dict[str, Any]) -> None:
    assert ours.options_in(text) == options
    halfstep.AdamW([torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16))], **options)


@pytest.mark.parametrize("text", ["momentum=0.9", "rounding"])
def test_other_optim_args_raise(text: str) -> None:
    with pytest.raises(ValueError, match=f"Expected optim_args to be name=value.*but got '{text}': set learning rate"):
        ours.options_in(text)


def trainer_with(tmp_path: Path, **options: Any) -> Any:
    given = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": "none", **options}
    return ours.Trainer(model=transformers_ranks.language_model(), args=transformers.TrainingArguments(**given))


def test_other_optimizers_stay(tmp_path: Path) -> None:
    trainer = trainer_with(tmp_path, optim="sgd")
    assert type(trainer.create_optimizer()) is torch.optim.SGD
    assert type(trainer.accelerator) is ours.Accelerator and trainer.accelerator.scaler is None


def test_the_lines_of_the_page_run(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to="none", max_steps=1, disable_tqdm=True, save_strategy="no"
    )
    names = {**tools.page_names(), "args": args, "dataset": transformers_ranks.sentences()}
    names["model"] = transformers_ranks.language_model().bfloat16()
    exec(tools.page_block("transformers, TRL and PEFT"), names)
    assert type(names["trainer"].optimizer.optimizer) is halfstep.AdamW
    assert issubclass(names["SFTTrainer"], trl.SFTTrainer) and issubclass(names["SFTTrainer"], ours.TrainerMixin)


def test_an_exported_checkpoint_is_what_from_pretrained_loads(tmp_path: Path) -> None:
    """Of two ranks under FSDP2, with tied weights."""
    rank_processes.run(transformers_ranks.save_sharded, 2, tmp_path)
    ((_, path),) = checkpoint.checkpoints(tmp_path)
    assert len(list(path.glob("model-*.safetensors"))) == 2
    expected = transformers_ranks.gpt2()
    expected.config.save_pretrained(checkpoint.export(path, tmp_path / "out").parent)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert found.lm_head.weight is found.transformer.wte.weight
    assert same_bits(dict(found.state_dict()), dict(expected.state_dict()))


def _trained(folder: Path, way: str, limit: float, of_library: bool = False, **options: Any) -> tuple[Any, list[float]]:
    """The weights of a run, and the norms that it logs."""
    model = transformers_ranks.language_model().bfloat16()
    cls = OffloadedAdamW if way == "offload" else halfstep.AdamW
    optimizer: Any = cls(model.parameters(), lr=tools.LR, **options)
    if way == "release":
        step_in_backward(model, optimizer, clipping="previous" if options else None)
    given = transformers_ranks.arguments(
        folder, max_grad_norm=limit, max_steps=3, save_strategy="no", gradient_accumulation_steps=1
    )
    trainer = (transformers.Trainer if of_library else ours.Trainer)(
        model=model,
        args=transformers.TrainingArguments(**given),
        train_dataset=transformers_ranks.sentences(),
        optimizers=(optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)),
    )
    trainer.train()
    return list(model.parameters()), [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.parametrize("of_library", [False, True])
@pytest.mark.parametrize("limit", [0.0, tools.MAX_NORM])
def test_offloaded_gradients_are_cleared_clipped_and_logged(tmp_path: Path, limit: float, of_library: bool) -> None:
    expected, norms = _trained(tmp_path, "plain", limit, of_library)
    found, logged = _trained(tmp_path, "offload", limit, of_library)
    assert logged == norms and min(norms) > tools.MAX_NORM
    assert all(map(torch.equal, expected, found))


def test_freed_gradients_are_clipped_by_the_optimizer_or_refused(tmp_path: Path) -> None:
    _, norms = _trained(tmp_path, "plain", tools.MAX_NORM)
    _, logged = _trained(tmp_path, "release", tools.MAX_NORM, max_grad_norm=tools.MAX_NORM)
    assert logged[0] == pytest.approx(norms[0], rel=1e-6) and min(logged) > tools.MAX_NORM
    expected, _ = _trained(tmp_path, "plain", 0.0)
    found, unknown = _trained(tmp_path, "release", 0.0)
    assert all(map(torch.equal, expected, found)) and all(map(math.isnan, unknown))
    with pytest.raises(RuntimeError, match="call step_in_backward with clipping='previous', or disable clipping"):
        _trained(tmp_path, "release", tools.MAX_NORM)
    for limit in (0.0, tools.MAX_NORM):  # transformers reads the gradients for its log too
        with pytest.raises(RuntimeError, match=r"a trainer of halfstep\.integrations\.trainers"):
            _trained(tmp_path, "release", limit, of_library=True)
