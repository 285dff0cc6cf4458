"""Typical training loops (tests/support/user_loops.py) with each way to step: the same result, or an error.

With steps in the backward and with masters on the host, a loop must leave the bits that the plain optimizer leaves, or
raise an error that names the remedy. To differ and say nothing always fails, but for what `DIFFERENT` quotes from the
documentation. The plain optimizer has the bits of its reference, and in fp32 agrees with torch's AdamW.
"""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator

import mistakes
import pytest
import torch
from states import differences
from tolerances import ADAM_AGAINST_TORCH
from torch import Tensor
from user_loops import LAYOUTS_OF_16_BITS, OFFLOADED, PROGRAMS, REMEDY, Run, has_trained, results

import halfstep

IN_BACKWARD = ("release", "offload step")  # the ways that have used and freed the gradients when a backward returns

# What cannot be done when the gradients are used in the backward. Each of these loops must be refused.
REFUSED = {
    "reads or writes the gradients of the whole model after the backward": """
        clip_grad_norm clipped_by_the_optimizer gradients_as_numpy
        norm_of_gradients_in_the_log_after_the_step a_row_without_gradient
        a_step_skipped_for_nan_gradients accumulation_without_sync_clipped nanogpt
        hooks_after_accumulation_after_the_optimizer two_steps_with_the_same_gradients""",
    "scales the loss, and must know about all gradients whether they are finite": """
        scaler_of_torch scaler_of_torch_clipped scaler_of_ours scaler_of_ours_in_fp16_that_overflows
        scaler_of_ours_clipped""",
    "has several backwards in a step, and does not say so": "accumulation reentrant_checkpoints_that_share_a_block",
    "discards gradients after the backward that has used them": """
        gradients_of_one_layer_dropped a_step_skipped_and_zeroed_at_the_top an_exception_in_a_backward
        td3_with_a_delayed_actor""",
    "sets an option after the backward that has used it": "learning_rate_set_between_backward_and_step",
}
# `in_backward="step"` has no context for the micro-batches before the last one, as steps in the backward have.
REFUSED_BY_OFFLOAD_STEP = """
    accumulation_without_sync accumulation_with_an_odd_last_batch two_backwards_of_one_graph""".split()
# What differs and cannot be noticed: the weights between backward and step are those after the step.
DIFFERENT = (
    "decay_by_hand_between_backward_and_step",
    "model_copied_between_backward_and_step",
    "the_last_step_skipped",
)
# torch's AdamW in fp32 is as near as rounding lets it be, except where the loop rounds to 16 bits in its middle.
NOT_AS_TORCH = ("autocast",)

refused = {(name, way) for name in " ".join(REFUSED.values()).split() for way in IN_BACKWARD}
refused |= {(name, "offload step") for name in REFUSED_BY_OFFLOAD_STEP}
different = {(name, way) for name in DIFFERENT for way in IN_BACKWARD}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Threads would wait for one another longer than these small models take."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def outcome(name: str, way: str, layout: str) -> dict[str, Tensor]:
    """What a program leaves. Each optimizer must have trained."""
    if name.startswith("compiled"):
        torch._dynamo.reset()
    run = Run(way, layout)
    PROGRAMS[name](run)
    left = results(run)
    assert has_trained(run)
    return left


@functools.cache
def expected(name: str, layout: str) -> dict[str, Tensor]:
    """What a program leaves with the plain optimizer, computed by its reference."""
    with halfstep.backend("reference"):
        return outcome(name, "plain", layout)


def cases(names: Iterable[str]) -> pytest.MarkDecorator:
    """Parametrize a test with programs and layouts. Other layouts than the first for a sixth of the programs."""
    indices = {name: index for index, name in enumerate(PROGRAMS)}
    return pytest.mark.parametrize(
        ("name", "layout"),
        [
            pytest.param(name, layout, marks=[pytest.mark.exhaustive] * (number > 0 and indices[name] % 6 != number))
            for name in names
            for number, layout in enumerate(LAYOUTS_OF_16_BITS)
        ],
    )


def ways_of(name: str) -> list[str]:
    """The ways to step that must have the bits of the plain optimizer. Compiling a program takes long."""
    ways = ("release", "offload copy") if name.startswith("compiled") else ("plain", "release", *OFFLOADED)
    return [way for way in ways if (name, way) not in refused | different]


@cases(PROGRAMS)
def test_the_bits_are_those_of_the_plain_optimizer(name: str, layout: str) -> None:
    found = {way: differences(outcome(name, way, layout), expected(name, layout)) for way in ways_of(name)}
    assert found == {way: [] for way in found}


# Programs add groups of vectors, or compile for a long time.
NOT_OF_MUON = ("unfrozen_layers_in_new_groups", *(name for name in PROGRAMS if name.startswith("compiled")))
OF_MUON = [name for name in PROGRAMS if name not in NOT_OF_MUON]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (i % 4 > 0)) for i, name in enumerate(OF_MUON)]
)
def test_muon_has_the_bits_of_its_reference_and_of_steps_in_the_backward(name: str) -> None:
    layout = LAYOUTS_OF_16_BITS[OF_MUON.index(name) % len(LAYOUTS_OF_16_BITS)]
    with halfstep.backend("reference"):
        reference = outcome(name, "muon", layout)
    ways = ["muon", "muon release"][: 1 + ((name, "release") not in refused | different)]
    assert [way for way in ways if differences(outcome(name, way, layout), reference)] == []


def is_refused(name: str, way: str, layout: str) -> bool:
    """Whether a program ends with an error that names the remedy."""
    try:
        outcome(name, way, layout)
    except (RuntimeError, TypeError, ValueError) as error:
        return REMEDY.search(str(error)) is not None
    return False


@cases(sorted({name for name, _ in refused}))
def test_loops_that_need_the_gradients_later_are_refused_with_a_remedy(name: str, layout: str) -> None:
    assert [way for way in IN_BACKWARD if (name, way) in refused and not is_refused(name, way, layout)] == []


@pytest.mark.parametrize("name", DIFFERENT)
def test_code_that_reads_weights_before_the_step_sees_them_stepped(name: str) -> None:
    assert differences(outcome(name, "release", "split"), expected(name, "split"))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_AS_TORCH and "compiled" not in name])
def test_the_plain_optimizer_in_fp32_agrees_with_torch(name: str) -> None:
    left, of_torch = outcome(name, "plain", "fp32"), outcome(name, "torch", "fp32")
    for key, values in of_torch.items():
        torch.testing.assert_close(left[key], values, **ADAM_AGAINST_TORCH)


def test_the_tables_name_programs() -> None:
    tables = [*" ".join(REFUSED.values()).split(), *REFUSED_BY_OFFLOAD_STEP, *DIFFERENT, *NOT_AS_TORCH]
    assert len(PROGRAMS) >= 62 and set(tables) <= set(PROGRAMS) and len(set(tables)) == len(tables)


# Number 52 writes a parameter without a gradient.
# In the layouts by turns, but 52 in each.
LOOPS = [(seed, LAYOUTS_OF_16_BITS[seed % len(LAYOUTS_OF_16_BITS)]) for seed in range(30)]
LOOPS += [(52, layout) for layout in LAYOUTS_OF_16_BITS]


@pytest.mark.parametrize("way", mistakes.WAYS)
def test_mistakes_have_the_bits_of_the_plain_optimizer_or_are_refused(way: str) -> None:
    counts: Counter[str] = Counter()
    for seed, layout in LOOPS:
        actions = mistakes.loop_of(seed)
        text = mistakes.verdict(way, layout, actions)
        counts[text] += 1
        assert text in ("same bits", "remedy named"), f"loop {seed}, {layout}, {' '.join(actions)}"
    assert counts["same bits"]


def test_loops_contain_every_action() -> None:
    """And a loop that cannot differ is not called wrong."""
    drawn = {action for seed in range(90) for action in mistakes.loop_of(seed)}
    assert drawn == set(mistakes.ACTIONS)
    assert mistakes.verdict("plain", "split", mistakes.loop_of(0)) == "same bits"
