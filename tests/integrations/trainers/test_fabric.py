"""`halfstep.integrations.trainers.fabric` with the real library, in one process and on two ranks with gloo."""

import math
from typing import Any

import pytest
import torch
import trainer_tools as tools
from states import same_bits

import halfstep

pytestmark = tools.skip_without("lightning")
lightning_ranks = tools.imported("lightning_ranks")
ours = tools.imported("halfstep.integrations.trainers.fabric")


def ready(precision: str, make: Any = halfstep.AdamW) -> tuple[Any, Any, Any]:
    scaler = halfstep.GradScaler("cpu", init_scale=tools.SCALE) if precision.startswith("16") else None
    fabric = ours.Fabric(accelerator="cpu", devices=1, precision=precision, scaler=scaler)
    model = tools.network()
    model, optimizer = fabric.setup(model, make(model.parameters(), lr=tools.LR))
    fabric.backward(tools.error(model(tools.batch(0)[0]), tools.batch(0)[1]))
    return fabric, model, optimizer


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed"])
@pytest.mark.parametrize("case", ["value", "norm", "optimizer"])
def test_other_calls_clip_in_place_as_fabric_does(precision: str, case: str) -> None:
    fabric, model, optimizer = ready(precision, torch.optim.AdamW if case == "optimizer" else halfstep.AdamW)
    limit = (
        {"clip_val": tools.MAX_NORM}
        if case == "value"
        else {"max_norm": tools.MAX_NORM, "norm_type": 1 if case == "norm" else 2}
    )
    fabric.clip_gradients(model, optimizer, **limit)
    order = {"value": math.inf, "norm": 1, "optimizer": 2}[case]
    norm = torch.nn.utils.get_total_norm([one.grad for one in model.parameters()], order)
    torch.testing.assert_close(norm, torch.tensor(tools.MAX_NORM))
    optimizer.step()


@pytest.mark.parametrize("precision", ["16-true", "16-mixed"])
def test_clipping_by_value_unscales(precision: str) -> None:
    fabric, model, optimizer = ready(precision)
    scaled = max(one.grad.abs().max().item() for one in model.parameters())
    fabric.clip_gradients(model, optimizer, clip_val=1e3)
    assert max(one.grad.abs().max().item() for one in model.parameters()) == pytest.approx(
        scaled / tools.SCALE, rel=1e-3
    )


def test_a_norm_that_is_not_finite_raises_as_in_fabric() -> None:
    """Without a scaler, which would skip the step."""
    fabric, model, optimizer = ready("bf16-mixed")
    model.module[0].weight.grad[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="norm of the gradients to be finite, but got nan: pass error_if_nonfinite"):
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
    assert fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False).isnan()


def test_errors_name_the_argument_and_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"Expected scaler to be a halfstep\.GradScaler, but got a GradScaler"):
        ours.Fabric(accelerator="cpu", precision="16-mixed", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match="precision to be '16-mixed' or '16-true' with a scaler, but got 'bf16-mixed'"):
        ours.Fabric(accelerator="cpu", precision="bf16-mixed", scaler=halfstep.GradScaler("cpu"))


def test_other_precisions_are_those_of_fabric() -> None:
    fabric = ours.Fabric(accelerator="cpu", devices=1, precision="32-true")
    assert fabric.scaler is None and fabric.scaler_metrics() == {}
    for precision in ("16-mixed", "16-true"):
        assert type(ours.Fabric(accelerator="cpu", devices=1, precision=precision).scaler) is halfstep.GradScaler


def test_the_lines_of_the_page_run() -> None:
    names = tools.page_names()
    before = [one.clone() for one in names["model"].parameters()]
    exec(
        tools.page_block("Fabric").replace("Fabric(precision", "Fabric(accelerator='cpu', devices=1, precision"), names
    )
    assert type(names["fabric"]) is ours.Fabric and names["norm"] > 0
    assert not same_bits(before, list(names["model"].module.parameters()))
