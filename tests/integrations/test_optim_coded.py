"""AdamW with 8-bit moments: which parameters, checkpoints, other layouts, errors."""

import math
import re
from functools import partial
from typing import Any

import pytest
import states
import torch
from oracles import BF16, FP32
from states import give_gradients, same_bits, through_a_file, train

import halfstep
from halfstep.kernels import block_codes

pytestmark = pytest.mark.sample(3)

SHAPES = ((40, 130), (16, 9, 32), (4096,), (63, 65), (8, 512), (5, 7, 0), ())
CODED = (True, True, False, False, True, False, False)


parameters_of = partial(states.parameters_of, shapes=SHAPES)


def in_memory(optimizer: Any, parameters: list[Any]) -> list[Any]:
    """All parameters and all state, with moments in fp32: of the same moments, some blocks have several codes."""
    found = [p.detach() for p in parameters]
    for state in (optimizer.state[p] for p in parameters):
        moments = [key for key in state if f"{key}_scale" in state]
        found += [block_codes.decode(state[key], state[f"{key}_scale"], key == "exp_avg") for key in moments]
        found += [state[key] for key in sorted(state) if key not in moments and not key.endswith("_scale")]
    return found


def test_steps_are_stochastic_unless_nearest_is_chosen_which_warns() -> None:
    """To nearest, second moments stop changing."""
    results = []
    for options in ({}, {"rounding": "stochastic"}, {"seed": 1}):
        parameters = parameters_of(BF16)
        optimizer = halfstep.AdamW(parameters, lr=1e-2, state_dtype="8bit", **options)
        train(optimizer, range(3))
        results.append(in_memory(optimizer, parameters))
    assert same_bits(results[0], results[1]) and not same_bits(results[0], results[2])
    message = "group 0 rounds moments of 8 bits to nearest: with betas[1] near 1, its steps are less than half the"
    parameters = parameters_of(BF16)
    with pytest.warns(UserWarning, match=re.escape(message)):
        optimizer = halfstep.AdamW(parameters, lr=1e-2, state_dtype="8bit", rounding="nearest")
    train(optimizer, range(3))
    assert not same_bits(results[0], in_memory(optimizer, parameters))


def test_only_groups_with_8_bits_are_stochastic_by_default() -> None:
    results = []
    for rounding in ("auto", "nearest"):
        parameters = parameters_of(BF16)
        groups = [{"params": parameters[1:]}, {"params": parameters[:1], "state_dtype": "8bit", "seed": 7}]
        for group in groups[1:]:
            group["rounding"] = "stochastic" if rounding == "nearest" else rounding
        optimizer = halfstep.AdamW(groups, lr=1e-2, state_dtype=BF16, rounding=rounding)
        train(optimizer, range(3))
        results.append(in_memory(optimizer, parameters))
    assert same_bits(*results)


def test_moments_of_a_checkpoint_are_bf16_numbers() -> None:
    """So that a checkpoint whose moments were converted to bf16 has half the size and loads with the same moments."""
    parameters = parameters_of(BF16)
    optimizer = halfstep.AdamW(parameters, lr=1e-2, state_dtype="8bit", amsgrad=True)
    train(optimizer, range(5))
    saved = optimizer.canonical_state_dict()
    for index, coded in enumerate(CODED):
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if coded else ():
            saved["state"][index][key] = saved["state"][index][key].bfloat16()
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    again = halfstep.AdamW(others, state_dtype="8bit", amsgrad=True)
    again.load_state_dict(through_a_file(saved))
    assert same_bits(in_memory(optimizer, parameters), in_memory(again, others))


def test_a_checkpoint_of_torch_loads_rounded_to_nearest() -> None:
    parameters = parameters_of(FP32)
    theirs = torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)
    train(theirs, range(5))
    theirs.state[parameters[0]]["exp_avg_sq"][3, 5] = math.inf
    theirs.state[parameters[0]]["exp_avg"][4, 5] = math.nan
    theirs.state[parameters[0]]["exp_avg_sq"][5, 5] = -1.0
    saved = theirs.state_dict()
    ours = halfstep.AdamW(parameters, state_dtype="8bit", amsgrad=True)
    ours.load_state_dict(saved)
    for index, parameter in enumerate(parameters):
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if CODED[index] else ():
            signed, given = key == "exp_avg", saved["state"][index][key]
            limited = given if signed else given.clamp(max=block_codes.LARGEST_POSITIVE)
            codes, scales = block_codes.encode(limited, len(parameter), signed)
            if not signed and index == 0 and key == "exp_avg_sq":
                codes[5, : block_codes.SPAN], scales[5, 0] = 0, block_codes.NAN_RANGE  # a negative one is none
            assert torch.equal(ours.state[parameter][key], codes)
            assert torch.equal(ours.state[parameter][f"{key}_scale"], scales)
    state = ours.canonical_state_dict()["state"][0]
    # As in the step, an infinite second moment is the largest; a NaN spoils its block, and nothing else.
    assert state["exp_avg_sq"][3, 5] == block_codes.LARGEST_POSITIVE
    assert state["exp_avg"][4].isnan().sum() == state["exp_avg"].isnan().sum() == block_codes.SPAN
    near = state["exp_avg"][5] - saved["state"][0]["exp_avg"][5]
    assert (near.abs() <= saved["state"][0]["exp_avg"][5].abs() / 16 + state["exp_avg"][5].abs().max() * 2.0**-17).all()


def test_parameters_that_fsdp1_has_flattened_are_refused() -> None:
    """The mark that FullyShardedDataParallel leaves on its flat parameters and on views into them."""
    parameter = torch.nn.Parameter(torch.ones(8192))
    parameter._fsdp_flattened = True
    parameter.grad = torch.ones_like(parameter)
    message = "Expected state_dtype to be torch.float32 or torch.bfloat16 for parameter 0 with a gradient (group 0),"
    with pytest.raises(ValueError, match=re.escape(message)):
        halfstep.AdamW([parameter], state_dtype="8bit").step()
    assert (parameter == 1).all()


def test_fp32_moments_are_taken_over_as_they_load() -> None:
    """After a change of the option, or an assignment of canonical state."""
    runs = []
    for loads in (False, True):
        parameters = parameters_of(BF16)[:1]
        optimizer = halfstep.AdamW(parameters)
        train(optimizer, range(1))
        optimizer.param_groups[0]["state_dtype"] = "8bit"
        if loads:
            optimizer.load_state_dict(optimizer.state_dict())
        give_gradients(1, parameters)
        optimizer.step()
        runs.append({"weight": parameters[0], **optimizer.state[parameters[0]]})
    assert runs[0].keys() == runs[1].keys() and all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])


GRADIENTS = {
    "constant": lambda base, noise, part: base,
    "normal": lambda base, noise, part: base * noise,
    "falling": lambda base, noise, part: base * noise * 10.0 ** (-part),
    "bursts": lambda base, noise, part: base * noise * (100.0 if part % 0.25 < 0.005 else 1.0),
}


@pytest.mark.parametrize("kind", GRADIENTS)
def test_a_second_moment_follows_that_of_float64_in_the_mean(kind: str) -> None:
    """2,000 steps: as many roundings of each element, by up to 1/16 of it."""
    size, steps, beta2 = 4096, 2000, 0.999
    generator = torch.Generator().manual_seed(0)
    base = torch.exp2(-6 * torch.rand(size, generator=generator))
    parameter = torch.nn.Parameter(torch.zeros(1, size))
    optimizer = halfstep.AdamW([parameter], lr=1e-30, state_dtype="8bit")
    exact = torch.zeros(size, dtype=torch.float64)
    for number in range(steps):
        grad = GRADIENTS[kind](base, torch.randn(size, generator=generator), number / steps)
        exact += (1 - beta2) * (grad.double().square() - exact)
        parameter.grad = grad.view(1, size)
        optimizer.step()
    ratio = optimizer.canonical_state_dict()["state"][0]["exp_avg_sq"].double().view(-1) / exact
    error = (ratio - 1).square().mean().sqrt().item()
    assert 0.01 < error < 0.4, "roundings by chance add up to this error, and to no more"
    assert abs(ratio.mean().item() - 1) < 5 * error / size**0.5
