"""`halfstep.integrations.trainers.torchtitan` with the real library, on one rank and on two with FSDP2 and gloo."""

from typing import Any

import pytest
import torch
import trainer_tools as tools
from states import same_bits

import halfstep

pytestmark = tools.skip_without("torchtitan")
torchtitan_ranks = tools.imported("torchtitan_ranks")
ours = tools.imported("halfstep.integrations.trainers.torchtitan")
optimizers = tools.imported("torchtitan.components.optimizer")


@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_a_checkpoint_of_two_ranks_loads_on_one(found: dict[str, list[Any]], kind: str) -> None:
    one = found[f"{kind} saved by two, loaded by 1"]
    for rank in found[f"{kind} saved by two, loaded by 2"]:
        assert same_bits(one[0], rank) and rank["step"] == tools.SAVED
        assert rank["scale"] == (tools.SCALE / 2 if kind == "fp16" else None)


def test_a_loss_in_chunks_is_scaled(found: dict[str, list[Any]]) -> None:
    """Its gradients are computed within, by a backward for each chunk."""
    (norms,) = found["chunked"]
    for chunked, plain in zip(*norms, strict=True):
        assert chunked == plain or 0.9 < chunked / plain < 1.1


def test_the_container_alone_works_in_the_trainer_of_torchtitan(found: dict[str, list[Any]]) -> None:
    assert found["container alone"] == [{"masters": ["torch.int16"], "type": True}]


def container(model: torch.nn.Module, *groups: Any, **options: Any) -> Any:
    named = [
        optimizers.ParamGroupConfig(pattern=one, optimizer_name=name, optimizer_kwargs=given)
        for one, name, given in groups
    ]
    return ours.OptimizersContainer.Config(param_groups=named, **options).build(model_parts=[model])


@pytest.mark.parametrize("form", ["held", "canonical"])
def test_the_flat_state_has_every_entry(form: Any) -> None:
    models = [tools.network(seed).bfloat16() for seed in range(2)]
    first, second = (container(model, (".*", "AdamW", {"lr": tools.LR})) for model in models)
    for one in (first, second):
        one.optimizers[0].state_dict_format = form
    tools.error(models[0](tools.batch(0)[0].bfloat16()), tools.batch(0)[1]).backward()
    first.step()
    state = first.state_dict()
    assert ("state.0.weight.master_remainder" in state) == (form == "held")
    assert tools.masters_of(first.optimizers[0]) == ["torch.int16"]
    models[1].load_state_dict(models[0].state_dict())
    second.load_state_dict(state)
    assert same_bits(tools.state_of(first.optimizers[0]), tools.state_of(second.optimizers[0]))


def test_moments_in_bf16() -> None:
    model = tools.network().bfloat16()
    made = container(model, (".*", "AdamW", {"lr": tools.LR}), implementation="fused_opt_states_bf16")
    made.state_dict()  # creates the state
    assert {state["exp_avg"].dtype for state in made.optimizers[0].state.values()} == {torch.bfloat16}


@pytest.mark.parametrize("scaled", [True, False])
def test_several_optimizers_clip_together_in_place(scaled: bool) -> None:
    model, twin = tools.network(), tools.network()
    made = container(model, ("bias", "Adam", {"lr": tools.LR}), (".*", "AdamW", {"lr": tools.LR}))
    assert [type(one) for one in made] == [halfstep.Adam, halfstep.AdamW]
    if scaled:
        made.scaler = halfstep.GradScaler("cpu", init_scale=tools.SCALE)
    loss = tools.error(model(tools.batch(0)[0]), tools.batch(0)[1])
    (made.scaler.scale(loss) if scaled else loss).backward()
    tools.error(twin(tools.batch(0)[0]), tools.batch(0)[1]).backward()
    norm = made.clip_grad_norm_(list(model.parameters()), tools.MAX_NORM)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(twin.parameters(), tools.MAX_NORM))
    torch.testing.assert_close(tools.gradients(model.parameters()), tools.gradients(twin.parameters()))
    made.step()
    assert made.scaler is None or made.scaler._updates == 1


def test_errors_name_the_argument_and_the_remedy() -> None:
    made = container(tools.network(), (".*", "AdamW", {"lr": tools.LR}))
    with pytest.raises(ValueError, match="Expected closure to be None, but got one"):
        made.step(lambda: 0.0)
    config = ours.Trainer.Config(scaler=ours.ScalerConfig())
    config.parallelism.pipeline_parallel_degree = 2
    with pytest.raises(
        ValueError, match="Expected pipeline_parallel_degree to be 1 with a scaler, but got 2: train in"
    ):
        ours.Trainer(config)


def test_the_lines_of_the_page_run() -> None:
    names: dict[str, Any] = {"model_registry": lambda flavor: None}
    exec(tools.page_block("torchtitan"), names)
    config = names["llama3_debugmodel"]()
    assert type(config) is ours.Trainer.Config and config._owner is ours.Trainer
    assert config.training.dtype == "bfloat16" and config.scaler is None
