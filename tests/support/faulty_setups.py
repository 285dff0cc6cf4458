"""Training set-ups with mistakes and defects that users reported, for tests/integrations/test_doctor_setups.py.

Each case is a small training set-up with the fault of the threads that it names, and the finding that must be there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import halfstep
from halfstep.integrations.doctor import Diagnosis, doctor, watch

BF16, FP16 = torch.bfloat16, torch.float16


def net(dtype: torch.dtype = torch.float32, width: int = 32) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Tanh(), torch.nn.Linear(width, 1)).to(dtype)


def loss_of(model: torch.nn.Module, step: int = 0, factor: float = 1.0) -> torch.Tensor:
    values = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
    dtype = next(model.parameters()).dtype
    found: torch.Tensor = model(values.to(dtype)).float().square().mean() * factor
    return found


def scaler(init: float = 2.0**16) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init)


def moments_of_bf16_weights() -> Diagnosis:
    model = net(BF16)
    return doctor(model, torch.optim.AdamW(model.parameters()))


def updates_of_bf16_weights() -> Diagnosis:
    model = net(BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    with watch(model, optimizer) as watched:
        for step in range(3):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
    return watched.diagnosis


def decay_of_bf16_weights() -> Diagnosis:
    model = net(BF16)
    return doctor(model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1))


def weights_replaced_by_sharding() -> Diagnosis:
    """As fully_shard does after the optimizer was made."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().clone()))
    return doctor(model, optimizer)


def weights_replaced_by_conversion() -> Diagnosis:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    return doctor(model, optimizer)


def fp16_gradients_under_torchs_scaler() -> Diagnosis:
    model = net(FP16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = scaler()
    scaling.scale(loss_of(model)).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaling.step(optimizer)
    return doctor(model, optimizer, scaling)


def a_scale_of_zero() -> Diagnosis:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = scaler(2.0**-148)
    for step in range(3):
        optimizer.zero_grad()
        scaling.scale(loss_of(model, step, float("inf"))).backward()
        scaling.step(optimizer)
        scaling.update()
    return doctor(model, optimizer, scaling)


def _watched(body: Callable[[torch.nn.Module, Any, Any, Any], None], dtype: torch.dtype = FP16) -> Diagnosis:
    """Three steps of autocast with a scaler, whose `body` follows backward()."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scaling, schedule = scaler(), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with watch(model, optimizer, scaling, schedule) as watched:
        for step in range(3):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = loss_of(model, step, float("inf") if step == 1 else 1.0)
            scaling.scale(loss).backward()
            body(model, optimizer, scaling, schedule)
    return watched.diagnosis


def a_schedule_that_counts_skipped_steps() -> Diagnosis:
    def body(model: Any, optimizer: Any, scaling: Any, schedule: Any) -> None:
        scaling.step(optimizer)
        scaling.update()
        schedule.step()

    return _watched(body)


def clipping_before_unscaling() -> Diagnosis:
    def body(model: Any, optimizer: Any, scaling: Any, schedule: Any) -> None:
        clip_grad_norm_(model.parameters(), 1.0)
        scaling.step(optimizer)
        scaling.update()

    return _watched(body)


def clipping_of_a_used_generator() -> Diagnosis:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    parameters = model.parameters()
    with watch(model, optimizer) as watched:
        for step in range(2):
            loss_of(model, step).backward()
            clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return watched.diagnosis


def clipping_after_the_step() -> Diagnosis:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer) as watched:
        for step in range(2):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            clip_grad_norm_(model.parameters(), 1.0)
    return watched.diagnosis


def clipping_by_hand_and_by_the_optimizer() -> Diagnosis:
    model = net()
    optimizer = halfstep.AdamW(model.parameters(), max_grad_norm=1.0)
    with watch(model, optimizer) as watched:
        loss_of(model).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return watched.diagnosis


def accumulation_over_unscaled_gradients() -> Diagnosis:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scaling = scaler(1024.0)
    with watch(model, optimizer, scaling) as watched:
        for step in range(2):
            with torch.autocast("cpu", FP16):
                loss = loss_of(model, step)
            scaling.scale(loss).backward()
            if step == 0:
                scaling.unscale_(optimizer)
        scaling.step(optimizer)
        scaling.update()
    return watched.diagnosis


def gradients_that_are_never_cleared() -> Diagnosis:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with watch(model, optimizer) as watched:
        for step in range(2):
            loss_of(model, step).backward()
            optimizer.step()
    return watched.diagnosis


def a_loss_that_is_not_scaled() -> Diagnosis:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling = scaler()
    scaling.scale(torch.zeros(()))  # without, torch's scaler asserts
    with watch(model, optimizer, scaling) as watched:
        with torch.autocast("cpu", FP16):
            loss = loss_of(model)
        loss.backward()
        scaling.step(optimizer)
        scaling.update()
    return watched.diagnosis


def fp16_autocast_without_a_scaler() -> Diagnosis:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer) as watched:
        with torch.autocast("cpu", FP16):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
    return watched.diagnosis


def bf16_weights_under_autocast() -> Diagnosis:
    model = net(BF16)
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer) as watched:
        with torch.autocast("cpu", BF16):
            loss = loss_of(model)
        loss.backward()
        optimizer.step()
    return watched.diagnosis


def adam_in_fp16() -> Diagnosis:
    model = net(FP16)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    found = doctor(model, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert all(bool(parameter.isnan().any()) for parameter in model.parameters())  # 0 / 0
    return found


def moments_that_a_checkpoint_rounded() -> Diagnosis:
    """Optimizer.load_state_dict casts to the dtype of the parameters: bf16 there, and fp32 here afterwards."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    half = net(BF16)
    between = torch.optim.AdamW(half.parameters())
    between.load_state_dict(optimizer.state_dict())
    resumed = net()
    final = torch.optim.AdamW(resumed.parameters())
    final.load_state_dict(between.state_dict())
    return doctor(resumed, final)


def frozen_weights_that_keep_changing() -> Diagnosis:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()
    model[0].requires_grad_(False)  # type: ignore[index]
    return doctor(model, optimizer)


class Codes(torch.nn.Module):
    """As a linear layer whose weight was quantized to 4 bits, with an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(32, 16, dtype=torch.uint8), requires_grad=False)
        self.adapter = torch.nn.Linear(32, 1)


def codes_in_the_optimizer() -> Diagnosis:
    model = Codes()
    return doctor(model, torch.optim.AdamW(model.parameters()))


class Tied(torch.nn.Module):
    class Config:
        tie_word_embeddings = True

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Config()
        self.embedding, self.head = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head


def a_tie_that_a_loader_broke() -> Diagnosis:
    with torch.device("meta"):
        model = Tied()
    model.to_empty(device="cpu")  # keeps the tie of one Parameter
    model.head.weight = torch.nn.Parameter(model.embedding.weight.detach().clone())  # as a loader by name does
    return doctor(model, torch.optim.AdamW(model.parameters()))


def one_memory_under_two_parameters() -> Diagnosis:
    model = Tied()
    model.head.weight = torch.nn.Parameter(model.embedding.weight.data)
    return doctor(model, torch.optim.AdamW(model.parameters()))


class Rotary(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, 64, 2) / 64))
        self.linear = torch.nn.Linear(4, 4)


def rotary_frequencies_in_bf16() -> Diagnosis:
    model = Rotary().to(BF16)
    return doctor(model, halfstep.AdamW(model.parameters()))


def a_loss_that_is_always_nan() -> Diagnosis:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    scaling = scaler()
    with watch(model, optimizer, scaling) as watched:
        for step in range(4):
            optimizer.zero_grad()
            with torch.autocast("cpu", FP16):
                loss = loss_of(model, step, float("nan"))
            scaling.scale(loss).backward()
            scaling.step(optimizer)
            scaling.update()
    assert watched.steps == watched.skipped == 4
    return watched.diagnosis


def autocast_for_another_device() -> Diagnosis:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer) as watched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.set_autocast_enabled("cuda", True)  # as torch.autocast("cuda") where there is a GPU
        try:
            loss_of(model).backward()
        finally:
            torch.set_autocast_enabled("cuda", False)
        optimizer.step()
    return watched.diagnosis


# What is reproduced, the finding that names it, and where it was reported; "" if it is known, but we know no thread.
ISSUES: list[tuple[Callable[[], Diagnosis], str, str]] = [
    (moments_of_bf16_weights, "moments-in-16-bits", "inclusionAI/AReaL#1292, huggingface/accelerate#2674"),
    (updates_of_bf16_weights, "updates-lost", "pytorch/pytorch#120376, NVIDIA-NeMo/RL#2865"),
    (weights_replaced_by_sharding, "optimizer-of-other-parameters", "pytorch/pytorch#149205"),
    (weights_replaced_by_conversion, "optimizer-of-other-parameters", "Lightning-AI/pytorch-lightning#19067"),
    (fp16_gradients_under_torchs_scaler, "fp16-weights-with-torch-scaler", "pytorch/pytorch#74739"),
    (a_scale_of_zero, "scale-collapsed", "NVIDIA/apex#834, Junjue-Wang/FactSeg#6"),
    (a_schedule_that_counts_skipped_steps, "schedule-advanced-on-skip", "pytorch/pytorch#55585, #67590"),
    (clipping_before_unscaling, "clipped-scaled-gradients", "milesial/Pytorch-UNet#468, rwth-i6/returnn#1590"),
    (accumulation_over_unscaled_gradients, "accumulated-after-unscale", "huggingface/accelerate#641"),
    (gradients_that_are_never_cleared, "gradients-not-cleared", "meta-pytorch/torchforge#71, wenet-e2e/wekws#73"),
    (fp16_autocast_without_a_scaler, "fp16-without-scaler", "OpenRLHF/OpenRLHF#1155, verl-project/verl#4036"),
    (bf16_weights_under_autocast, "autocast-over-16-bit-weights", "huggingface/transformers#33780"),
    (adam_in_fp16, "eps-is-zero", "pytorch/pytorch#147437, chainer/chainer#6299"),
    (moments_that_a_checkpoint_rounded, "state-was-rounded", "pytorch/pytorch#43706"),
    (frozen_weights_that_keep_changing, "frozen-with-gradient", "facebookresearch/fairseq#4702"),
    (codes_in_the_optimizer, "quantized-in-optimizer", "huggingface/transformers#32943"),
    (a_tie_that_a_loader_broke, "tie-broken", "verl-project/verl#7834, NVIDIA-NeMo/Automodel#2213"),
    (rotary_frequencies_in_bf16, "buffers-in-16-bits", "huggingface/transformers#25681, EleutherAI/gpt-neox#1003"),
    (a_loss_that_is_always_nan, "every-step-skipped", "pytorch/pytorch#40497"),
    (decay_of_bf16_weights, "decay-lost", ""),
    (clipping_of_a_used_generator, "clipping-without-effect", ""),
    (clipping_after_the_step, "clipping-without-effect", ""),
    (clipping_by_hand_and_by_the_optimizer, "clipped-twice", ""),
    (a_loss_that_is_not_scaled, "loss-not-scaled", ""),
    (one_memory_under_two_parameters, "tied-weights-twice", ""),
    (autocast_for_another_device, "autocast-without-effect", ""),
]
