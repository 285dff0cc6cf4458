"""Loading state of the 8-bit optimizers of bitsandbytes, torchao and flashoptim; real state if they are installed."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracles import BF16, FP16, FP32, bits
from states import copies_of, parameters_of, through_a_file, train

import halfstep
from halfstep.integrations import checkpoint
from halfstep.integrations.optim import foreign_codes

SHAPES = ((64, 128), (33, 200), (70,))  # bitsandbytes keeps states of less than 4,096 elements in fp32


def loaded(saved: Any, parameters: list[Any]) -> Iterator[dict[str, torch.Tensor]]:
    """The moments after loading in both ways."""
    for load in (lambda o, s: o.load_state_dict(s), checkpoint.load_optimizer):
        copies = copies_of(parameters)
        optimizer = halfstep.AdamW(copies, lr=0.5)
        load(optimizer, saved)
        assert optimizer.param_groups[0]["lr"] == 1e-2 and optimizer.param_groups[0]["betas"] == (0.8, 0.99)
        yield from optimizer.canonical_state_dict()["state"].values()
        train(optimizer, range(1))
        assert all(torch.isfinite(p).all() for p in copies)


def near(found: torch.Tensor, exact: torch.Tensor, share: float) -> bool:
    """Whether the root mean square error is below `share` of that of the numbers."""
    return bool((found.double() - exact.double()).square().mean() < share**2 * exact.double().square().mean())


OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.99), "weight_decay": 0.1}


def moments_of_torch(dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    parameters = parameters_of(dtype, SHAPES)
    optimizer = halfstep.AdamW(parameters, **OPTIONS)
    train(optimizer, range(6))
    return list(optimizer.canonical_state_dict()["state"].values())


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["AdamW8bit", "Adam8bit", "PagedAdamW8bit"])
def test_states_of_bitsandbytes_are_decoded(kind: str, dtype: torch.dtype) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    if kind.startswith("Paged") and not torch.cuda.is_available():
        pytest.skip("pages need a GPU")
    parameters = parameters_of(dtype, SHAPES)
    theirs = getattr(bnb.optim, kind)(parameters, **OPTIONS)
    train(theirs, range(6))
    exact, held = moments_of_torch(dtype), [theirs.state[p] for p in parameters]
    saved = through_a_file(theirs.state_dict(), weights_only=False)
    for number, state in enumerate(loaded(saved, parameters)):
        own = held[number % len(SHAPES)]
        assert state["step"] == 6 and state.keys() - {"master"} == {"step", "exp_avg", "exp_avg_sq"}
        for moment, which in (("exp_avg", 1), ("exp_avg_sq", 2)):
            expected = own[f"state{which}"]
            if expected.dtype == torch.uint8:
                expected = bnb.functional.dequantize_blockwise(
                    expected, absmax=own[f"absmax{which}"], code=own[f"qmap{which}"], blocksize=256
                )
            assert (bits(state[moment]) == bits(expected.view(state[moment].shape))).all()
            assert near(state[moment], exact[number % len(SHAPES)][moment], 0.03)


@pytest.mark.filterwarnings("ignore:OptimState:UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("kind", ["OptimState8bit", "OptimState4bit", "OptimStateFp8"])
def test_states_of_torchao_are_decoded(kind: str, dtype: torch.dtype) -> None:
    """The states of its optimizers, whose steps are compiled, filled by its own operators."""
    optim = pytest.importorskip("torchao.optim")
    from torchao.optim import subclass_4bit, subclass_8bit, subclass_fp8

    module = {"OptimState8bit": subclass_8bit, "OptimState4bit": subclass_4bit, "OptimStateFp8": subclass_fp8}[kind]
    name = {"OptimState8bit": "AdamW8bit", "OptimState4bit": "AdamW4bit", "OptimStateFp8": "AdamWFp8"}[kind]
    parameters = parameters_of(dtype, SHAPES)
    theirs = getattr(optim, name)(parameters, **OPTIONS)
    exact = moments_of_torch(dtype)
    for p, moments in zip(parameters, exact, strict=True):
        p.grad = torch.zeros_like(p)
        state = theirs.state[p]
        state["step"] = torch.tensor(6.0)
        for moment, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            state[moment] = theirs._new_buffer(p, signed).copy_(moments[moment])
    held = [theirs.state[p] for p in parameters]
    assert isinstance(held[0]["exp_avg"], getattr(module, kind))
    saved = through_a_file(theirs.state_dict(), weights_only=False)
    for number, state in enumerate(loaded(saved, parameters)):
        for moment in ("exp_avg", "exp_avg_sq"):
            own = held[number % len(SHAPES)][moment]
            expected = own.dequantize().float() if hasattr(own, "codes") else own.float()
            assert type(state[moment]) is torch.Tensor and (bits(state[moment]) == bits(expected)).all()
            assert near(state[moment], exact[number % len(SHAPES)][moment], 0.3 if "4" in kind else 0.03)


def as_flashoptim(parameters: list[Any], moments: list[Any], master_bits: int | None) -> tuple[Any, list[Any]]:
    """Its state_dict of these moments, coded by its rule, and the masters that its rests stand for, in float64."""
    states, masters = {}, []
    for index, (p, state) in enumerate(zip(parameters, moments, strict=True)):
        entry: dict[str, Any] = {"step": torch.tensor(6)}
        for moment, maximum, dtype in (("exp_avg", 127, torch.int8), ("exp_avg_sq", 255, torch.uint8)):
            values = state[moment].double().flatten()
            values = values.sqrt() if maximum == 255 else values
            groups = torch.nn.functional.pad(values, (0, -len(values) % 32)).view(-1, 32)
            scales = groups.abs().amax(1).half()
            shares = (groups / scales.double()[:, None].clamp(min=1e-12)).clamp(-1, 1)
            shares = 2 * shares / (1 + shares.abs()) if maximum == 127 else shares
            codes = (shares * maximum + 0.5).floor().flatten()[: p.numel()].view(p.shape).to(dtype)
            entry[f"{moment}::quantized"] = codes
            entry[f"{moment}::scales"] = scales.view(BF16) if p.dtype == BF16 else scales
        if master_bits is not None:
            dtype = torch.int8 if master_bits == 24 else torch.int16
            limit = torch.iinfo(dtype).max
            rest = torch.randint(-limit, limit + 1, p.shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
            entry["error_bits"] = rest.to(p.dtype) if master_bits == 24 else rest.view(p.dtype)
            _, exponent = np.frexp(p.detach().double().numpy())
            gap = np.ldexp(1.0, exponent - (8 if p.dtype == BF16 else 11))
            masters.append(p.detach().double() + torch.from_numpy(gap) / 2 * (rest.double() / limit))
        states[index] = entry
    group = {**OPTIONS, "eps": 1e-8, "params": [0, 1, 2], "initial_lr": 1e-2, "lr": 1e-2}
    if master_bits is not None:
        group["master_bytewidth"] = master_bits // 8
    return {"state": states, "param_groups": [group]}, masters


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
@pytest.mark.parametrize("master_bits", [None, 24, 32])
def test_states_and_masters_of_flashoptim_are_decoded(dtype: torch.dtype, master_bits: int | None) -> None:
    if dtype == FP32 and master_bits:
        pytest.skip("fp32 parameters have no rests")
    parameters, exact = parameters_of(dtype, SHAPES), moments_of_torch(dtype)
    saved, masters = as_flashoptim(parameters, exact, master_bits)
    for number, state in enumerate(loaded(through_a_file(saved, weights_only=False), parameters)):
        index = number % len(SHAPES)
        assert state["step"] == 6 and not any("::" in key or "bits" in key for key in state)
        for moment in ("exp_avg", "exp_avg_sq"):
            assert near(state[moment], exact[index][moment], 0.03)
        if master_bits is not None:
            torch.testing.assert_close(state["master"].double(), masters[index], rtol=2**-23, atol=0)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("width", [torch.int8, torch.int16], ids=str)
def test_flashoptims_own_kernels_decode_the_same(dtype: torch.dtype, width: torch.dtype) -> None:
    """Moments and masters of its kernels, run by the interpreter, beside fp16 subnormals and zero weights."""
    optimizers = pytest.importorskip("flashoptim").optimizers
    numbers = torch.randn(3, 100) * torch.exp2(-20 * torch.rand(3, 100))
    for moment, maximum in (("exp_avg", 127), ("exp_avg_sq", 255)):
        spec = {"exp_avg": (False, True), "exp_avg_sq": (True, False)}[moment]
        values = numbers if maximum == 127 else numbers.square()
        codes = torch.empty_like(values, dtype=torch.int8 if maximum == 127 else torch.uint8)
        scales = torch.empty(10, dtype=FP16)
        kind = optimizers.tl.int8 if maximum == 127 else optimizers.tl.uint8
        optimizers._triton_quantize_kernel.fn[(1,)](
            values, codes, scales, 300, float(maximum), kind, 32, *spec, BLOCK_SIZE_N=256
        )
        expected = torch.empty_like(values)
        optimizers._triton_dequantize_kernel.fn[(1,)](
            codes, scales, expected, 300, float(maximum), 32, *spec, BLOCK_SIZE_N=256
        )
        held = {f"{moment}::quantized": codes, f"{moment}::scales": scales}
        assert (bits(foreign_codes.decode(held, "x")[moment]) == bits(expected)).all()
    # The interpreter converts subnormal bf16 numbers to other fp32 numbers.
    weight = torch.cat([numbers.flatten(), numbers.flatten() * 2.0**-90, torch.zeros(4)]).to(dtype)
    limit = torch.iinfo(width).max
    rest = torch.randint(-limit, limit + 1, weight.shape, dtype=width)
    expected = torch.empty(weight.shape)
    optimizers._reconstruct_fp32_kernel[(1,)](
        *(weight, rest, expected, weight.numel()),
        BLOCK_SIZE=1024,
        NUM_MANTISSA_BITS=7 if dtype == BF16 else 10,
        SIGNED_MAX_VAL=limit,
    )
    found = foreign_codes.master_of_flashoptim(weight, rest, None, "x")
    assert (bits(found) == bits(expected)).all()


def test_codes_load_into_ours_rounded_to_nearest() -> None:
    parameters, exact = parameters_of(BF16, SHAPES), moments_of_torch(BF16)
    saved, _ = as_flashoptim(parameters, exact, None)
    plain = {index: foreign_codes.decode(entry, "x") for index, entry in saved["state"].items()}
    results = []
    for states in (saved["state"], plain):
        optimizer = halfstep.AdamW(parameters, state_dtype="8bit")
        optimizer.load_state_dict({**saved, "state": states})
        results.append([bits(value) for p in parameters for value in optimizer.state[p].values()])
        assert optimizer.state[parameters[0]]["exp_avg"].dtype == torch.uint8
    assert all((a == b).all() for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("blocks", [33, 5, 4])
def test_scales_of_another_block_size_are_refused(blocks: int) -> None:
    """Blocks of 256 and, in older versions of bitsandbytes, of 2,048 elements."""
    codes = torch.randint(256, SHAPES[0], dtype=torch.uint8)
    state = {"step": 3, "state1": codes, "state2": codes}
    for which in (1, 2):
        state |= {f"qmap{which}": torch.linspace(-1, 1, 256), f"absmax{which}": torch.rand(blocks) + 1}
    parameter = parameters_of(FP32, SHAPES)[0]
    optimizer = halfstep.AdamW([parameter])
    saved = {"state": {0: state}, "param_groups": [{**optimizer.state_dict()["param_groups"][0]}]}
    if blocks == 4:
        optimizer.load_state_dict(saved)
        expected = torch.linspace(-1, 1, 256)[codes.flatten().int()].view(4, 2048) * state["absmax1"][:, None]
        assert torch.equal(optimizer.state[parameter]["exp_avg"].flatten(), expected.flatten())
        return
    message = f"Expected 32 or 4 scales for the 8192 codes of 'exp_avg' in the state of parameter 0, but got {blocks}: "
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(saved)
    assert not optimizer.state


def test_states_that_cannot_be_decoded_are_refused() -> None:
    parameter = parameters_of(FP32, SHAPES)[0]
    optimizer = halfstep.AdamW([parameter])
    groups = optimizer.state_dict()["param_groups"]
    tensorwise = {"step": 3, "state1": torch.zeros(SHAPES[0], dtype=torch.uint8), "max1": torch.zeros(1)}
    with pytest.raises(ValueError, match=r"Expected the state of parameter 0 to have a scale for each block"):
        optimizer.load_state_dict({"state": {0: tensorwise}, "param_groups": groups})
    rest = {"step": 3, "exp_avg": parameter * 0, "exp_avg_sq": parameter * 0, "error_bits": torch.zeros(SHAPES[0])}
    with pytest.raises(ValueError, match=r"Expected 'error_bits' in the state of parameter 0 to be int8 or int16"):
        optimizer.load_state_dict({"state": {0: rest}, "param_groups": groups})
    with pytest.raises(checkpoint.CheckpointError, match=r"does not fit this one: Expected the state of parameter 0"):
        checkpoint.load_optimizer(optimizer, {"state": {0: tensorwise}, "param_groups": groups})
