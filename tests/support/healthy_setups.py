"""Training set-ups with nothing wrong, for tests/integrations/test_doctor_setups.py; on ranks: doctor_ranks.py."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from library_wrappers import (
    AmpOptimWrapper,
    NativeScaler,
    OptimizersContainer,
    OptimWrapper,
    OptimWrapperDict,
    Precision,
    Stash,
)
from release_models import Wrapped
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import halfstep
from halfstep.integrations.doctor import doctor, watch
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import step_in_backward

BF16, FP16 = torch.bfloat16, torch.float16


class Tied(nn.Module):
    """A language model with tied embeddings, as the configuration says."""

    class Config:
        tie_word_embeddings = True

    def __init__(self) -> None:
        super().__init__()
        self.config = self.Config()
        self.embedding, self.body = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.body(self.embedding(tokens)).relu())
        found: torch.Tensor = self.head(hidden)
        return found


def net(dtype: torch.dtype = torch.float32) -> Tied:
    torch.manual_seed(0)
    return Tied().to(dtype)


def loss_of(model: nn.Module, step: int, factor: float = 1.0) -> torch.Tensor:
    tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()) * factor


def names_found(
    model: nn.Module,
    optimizer: Any,
    body: Callable[[int], None] | None = None,
    scaler: Any = None,
    scheduler: Any = None,
    steps: int = 3,
) -> list[str]:
    """The names of what is found before, in and after some steps; `body` does one of them."""

    def plain(step: int) -> None:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = doctor(model, optimizer, scaler).names
    with watch(model, optimizer, scaler, scheduler) as watched:
        for step in range(steps):
            (body or plain)(step)
    return found + watched.diagnosis.names + doctor(model, optimizer, scaler).names


# -------------------------------------------------------------------------------------------------- torch's optimizers


def fp32_adamw() -> list[str]:
    model = net()
    return names_found(model, torch.optim.AdamW(model.parameters()))


def fp32_fused_adam_with_amsgrad() -> list[str]:
    model = net()
    return names_found(model, torch.optim.Adam(model.parameters(), amsgrad=True, fused=True))


def fp32_sgd_with_momentum() -> list[str]:
    model = net()
    return names_found(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True))


def fp32_adafactor() -> list[str]:
    model = net()
    return names_found(model, torch.optim.Adafactor(model.parameters()))


def muon_for_matrices_and_adamw_for_the_rest() -> list[str]:
    model = net()
    matrices = [model.body.weight]
    others = [one for one in model.parameters() if all(one is not matrix for matrix in matrices)]
    optimizers = [torch.optim.SGD(matrices, lr=0.02, momentum=0.9), torch.optim.AdamW(others)]

    def body(step: int) -> None:
        loss_of(model, step).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return names_found(model, optimizers, body)


def sparse_embeddings() -> list[str]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(32, 8, sparse=True), "head": nn.Linear(8, 1)})
    optimizers = [
        torch.optim.SparseAdam(model["embedding"].parameters()),
        torch.optim.AdamW(model["head"].parameters()),
    ]

    def body(step: int) -> None:
        model["head"](model["embedding"](torch.tensor([step, 3]))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return names_found(model, optimizers, body)


def a_closure() -> list[str]:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)

    def body(step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, 0)
            loss.backward()
            return loss

        optimizer.step(closure)

    return names_found(model, optimizer, body)


def gradients_set_to_zero() -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def body(step: int) -> None:
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, step).backward()
        optimizer.step()

    return names_found(model, optimizer, body)


def a_model_that_clears_gradients_itself() -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def body(step: int) -> None:
        loss_of(model, step).backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None

    return names_found(model, optimizer, body)


def accumulation_and_clipping() -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def body(step: int) -> None:
        for micro in range(3):
            (loss_of(model, 3 * step + micro) / 3).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    return names_found(model, optimizer, body)


def clipping_by_value_and_a_logged_norm() -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def body(step: int) -> None:
        loss_of(model, step).backward()
        torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None])
        clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return names_found(model, optimizer, body)


def a_warm_up_from_zero() -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))

    def body(step: int) -> None:
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return names_found(model, optimizer, body, scheduler=schedule)


class Adapted(nn.Module):
    """A frozen bf16 layer, and an adapter in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(16, 16, dtype=BF16).requires_grad_(False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(values.to(BF16)).float() + self.up(self.down(values))
        return found


def a_frozen_base_and_an_adapter() -> list[str]:
    """The optimizer was given all parameters, which is harmless: frozen ones have no gradient and no state."""
    torch.manual_seed(0)
    model = Adapted()
    optimizer = torch.optim.AdamW(model.parameters())

    def body(step: int) -> None:
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return names_found(model, optimizer, body)


def layers_frozen_after_training() -> list[str]:
    model = net()
    model.embedding.weight.requires_grad_(False)
    return names_found(model, torch.optim.AdamW([one for one in model.parameters() if one.requires_grad]))


def batch_norms_and_channels_last() -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters())

    def body(step: int) -> None:
        with torch.autocast("cpu", BF16):
            loss = model(torch.randn(2, 3, 8, 8)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return names_found(model, optimizer, body)


# ------------------------------------------------------------------------------------------- autocast and loss scaling


def bf16_autocast() -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def body(step: int) -> None:
        with torch.autocast("cpu", BF16):
            loss = loss_of(model, step)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return names_found(model, optimizer, body)


def _scaled(
    scaler: Any,
    optimizer: Callable[[Any], Any] = torch.optim.AdamW,
    dtype: torch.dtype = torch.float32,
    clip: bool = False,
    schedule: Callable[[Any, Any], Any] | None = None,
    overflow: Sequence[int] = (),
) -> list[str]:
    model = net(dtype)
    made = optimizer(model.parameters())
    scheduler = None if schedule is None else schedule(made, scaler)

    def body(step: int) -> None:
        for micro in range(2):
            with torch.autocast("cpu", FP16, enabled=dtype == torch.float32):
                loss = loss_of(model, 2 * step + micro, float("inf") if step in overflow else 1.0)
            scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(made)
            clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(made)
        before = scaler.get_scale()
        scaler.update()
        if isinstance(scheduler, halfstep.SkipAwareScheduler) or (scheduler and scaler.get_scale() >= before):
            scheduler.step()
        made.zero_grad()

    return names_found(model, made, body, scaler, scheduler, steps=4)


def _torchs() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=1024.0)


def fp16_autocast_with_clipping() -> list[str]:
    return _scaled(_torchs(), clip=True)


def fp16_autocast_with_a_fused_optimizer() -> list[str]:
    return _scaled(_torchs(), lambda parameters: torch.optim.AdamW(parameters, fused=True), overflow=[1])


def fp16_autocast_with_overflows_and_a_guarded_schedule() -> list[str]:
    return _scaled(
        _torchs(), overflow=[1, 2], schedule=lambda made, scaler: torch.optim.lr_scheduler.ExponentialLR(made, 0.9)
    )


def our_scaler_with_a_skip_aware_schedule() -> list[str]:
    return _scaled(
        halfstep.GradScaler("cpu", init_scale=1024.0),
        halfstep.AdamW,
        overflow=[0, 2],
        schedule=lambda made, scaler: halfstep.SkipAwareScheduler(
            torch.optim.lr_scheduler.ExponentialLR(made, 0.9), scaler
        ),
    )


def our_scaler_with_fp16_weights_and_clipping_in_the_step() -> list[str]:
    return _scaled(
        halfstep.GradScaler("cpu", init_scale=1024.0),
        lambda parameters: halfstep.AdamW(parameters, max_grad_norm=1.0),
        FP16,
        overflow=[1],
    )


def a_loss_scale_of_one() -> list[str]:
    """Clipping before unscaling is the same as after it."""
    model = net()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", init_scale=1.0)

    def body(step: int) -> None:
        with torch.autocast("cpu", FP16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return names_found(model, optimizer, body, scaler)


def masters_made_before_the_first_step() -> list[str]:
    """They hold numbers of bf16, since they were made from bf16 weights."""
    model = net(BF16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        optimizer.state[parameter]["master"] = parameter.detach().float()
    return names_found(model, optimizer, lambda step: None, steps=0)


def a_compiled_model_in_fp16() -> list[str]:
    """The autocast of compiled modules is not seen."""
    model = net()
    compiled = torch.compile(model, backend="eager")
    optimizer, scaler = torch.optim.AdamW(model.parameters()), _torchs()

    def body(step: int) -> None:
        with torch.autocast("cpu", FP16):
            loss = loss_of(compiled, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return names_found(compiled, optimizer, body, scaler)


def a_schedule_per_epoch() -> list[str]:
    """Its last step was skipped, but others of the epoch were not."""
    model = net()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), _torchs()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def body(epoch: int) -> None:
        for step in range(3):
            with torch.autocast("cpu", FP16):
                loss = loss_of(model, step, float("inf") if step == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        schedule.step()

    return names_found(model, optimizer, body, scaler, schedule, steps=2)


def a_disabled_scaler() -> list[str]:
    model = net()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cpu", enabled=False)

    def body(step: int) -> None:
        with torch.autocast("cpu", BF16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return names_found(model, optimizer, body, scaler)


# -------------------------------------------------------------------------------------------------------------- ours


def _ours(**options: Any) -> list[str]:
    model = net(BF16)
    return names_found(model, halfstep.AdamW(model.parameters(), **options))


def split_masters() -> list[str]:
    return _ours(lr=1e-5)


def full_masters() -> list[str]:
    return _ours(lr=1e-5, master_weights="full")


def split24_with_8_bit_moments() -> list[str]:
    return _ours(master_weights="split24", state_dtype="8bit", rounding="stochastic")


def bf16_moments_rounded_stochastically() -> list[str]:
    return _ours(state_dtype=BF16, rounding="stochastic")


def no_masters_rounded_stochastically() -> list[str]:
    return _ours(lr=1e-5, master_weights=None, rounding="stochastic")


def clipping_inside_the_step() -> list[str]:
    return _ours(max_grad_norm=0.1)


def a_resumed_run() -> list[str]:
    model = net(BF16)
    optimizer = halfstep.AdamW(model.parameters(), master_weights="full")
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = net(BF16)
    other.load_state_dict(saved["model"])
    resumed = halfstep.AdamW(other.parameters(), master_weights="full")
    resumed.load_state_dict(saved["optimizer"])
    return names_found(other, resumed)


def steps_in_the_backward() -> list[str]:
    model = net(BF16)
    optimizer = halfstep.AdamW(model.parameters())
    step_in_backward(model, optimizer)
    return names_found(model, optimizer)


def masters_on_the_host() -> list[str]:
    model = net(BF16)
    return names_found(model, OffloadedAdamW(model.parameters()))


def a_wrapped_optimizer() -> list[str]:
    model = net(BF16)
    optimizer = halfstep.AdamW(model.parameters())
    wrapped: Any = Wrapped(optimizer)

    def body(step: int) -> None:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    return names_found(model, wrapped, body)


# ------------------------------------------------------------------------------------------------ wrappers of libraries


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]


def timms_scaler() -> list[str]:
    model = net()
    optimizer, scaler = torch.optim.AdamW(_groups(model)), NativeScaler(_torchs())

    def body(step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", FP16):
            loss = loss_of(model, step)
        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())

    return names_found(model, optimizer, body, scaler)


def mmengines_wrapper() -> list[str]:
    model = net()
    wrapper = OptimWrapper(torch.optim.AdamW(_groups(model)))
    return names_found(model, wrapper, lambda step: wrapper.update_params(loss_of(model, step)))


def mmengines_wrapper_with_a_scaler() -> list[str]:
    model = net()
    wrapper = AmpOptimWrapper(torch.optim.AdamW(_groups(model)), _torchs())

    def body(step: int) -> None:
        with torch.autocast("cpu", FP16):
            loss = loss_of(model, step)
        wrapper.update_params(loss)

    return names_found(model, wrapper, body) + names_found(model, wrapper, body, wrapper)


def mmengines_wrappers_by_name() -> list[str]:
    models = nn.ModuleDict({"one": net(), "other": net()})
    wrappers = {name: OptimWrapper(torch.optim.AdamW(_groups(model))) for name, model in models.items()}

    def body(step: int) -> None:
        for name, wrapper in wrappers.items():
            wrapper.update_params(loss_of(models[name], step))

    return names_found(models, OptimWrapperDict(**wrappers), body) + doctor(models, wrappers).names


def a_precision_plugin() -> list[str]:
    """With a scaler, and without one as for bf16."""
    model = net()
    optimizer, plugin = torch.optim.AdamW(model.parameters()), Precision(_torchs())

    def body(step: int) -> None:
        with torch.autocast("cpu", FP16):
            loss = loss_of(model, step)
        plugin.scaler.scale(loss).backward()
        plugin.scaler.step(optimizer)
        plugin.scaler.update()
        optimizer.zero_grad()

    return names_found(model, optimizer, body, plugin) + names_found(model, optimizer, None, Precision(None))


def a_container_of_optimizers() -> list[str]:
    model = net(BF16)
    optimizers = [halfstep.AdamW([parameter]) for parameter in model.parameters()]
    return names_found(model, OptimizersContainer(optimizers))


# ------------------------------------------------------------------------------------------------------------ the rest


class Copies(torch.optim.AdamW):
    """As apex's and Megatron's: steps fp32 copies of 16-bit weights that it made itself."""

    def __init__(self, model: nn.Module) -> None:
        self.originals = list(model.parameters())
        super().__init__([one.detach().float().requires_grad_() for one in self.originals])

    def step(self, closure: Any = None) -> None:
        copies = self.param_groups[0]["params"]
        for one, copied in zip(self.originals, copies, strict=True):
            copied.grad = None if one.grad is None else one.grad.float()
        super().step()
        with torch.no_grad():
            for one, copied in zip(self.originals, copies, strict=True):
                one.copy_(copied)


def copies_in_fp32_of_the_optimizers_own() -> list[str]:
    model = net(BF16)
    optimizer = Copies(model)

    def body(step: int) -> None:
        loss_of(model, step).backward()
        optimizer.step()
        model.zero_grad()

    return names_found(model, optimizer, body)


def _copied(parameters: Callable[[torch.Tensor], torch.Tensor], stash: bool = False) -> list[str]:
    """Mixed precision by hand: the loop copies gradients to fp32 copies of the weights, and these back."""
    model = net(BF16)
    copies = [parameters(one.detach().float()) for one in model.parameters()]
    optimizer = torch.optim.AdamW(copies)
    if stash:
        optimizer._amp_stash = Stash(list(model.parameters()))  # type: ignore[attr-defined]

    def body(step: int) -> None:
        loss_of(model, step).backward()
        for one, copied in zip(model.parameters(), copies, strict=True):
            copied.grad = None if one.grad is None else one.grad.float()
        optimizer.step()
        with torch.no_grad():
            for one, copied in zip(model.parameters(), copies, strict=True):
                one.copy_(copied)
        model.zero_grad()

    return names_found(model, optimizer, body)


def copies_in_fp32_of_the_loop() -> list[str]:
    return _copied(lambda values: values.requires_grad_())


def copies_that_apex_stashed() -> list[str]:
    return _copied(torch.nn.Parameter, stash=True)


class Masked(Tied):
    """Infinities in masks, and buffers that are larger than their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
        self.limit = nn.Parameter(torch.full((32,), float("inf")), requires_grad=False)
        self.register_buffer("ones", torch.ones(1).expand(1 << 40))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).minimum(self.limit)


def infinite_masks_and_expanded_buffers() -> list[str]:
    torch.manual_seed(0)
    model = Masked()
    return names_found(model, torch.optim.AdamW(model.parameters()))


def gradients_of_a_skipped_step() -> list[str]:
    """They are infinite, and stay until the next step begins."""
    model = net()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), _torchs()

    def body(step: int) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", FP16):
            loss = loss_of(model, step, float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return names_found(model, optimizer, body, scaler)


def a_scaled_loss_that_is_divided() -> list[str]:
    """And one that is scaled for its value only."""
    model = net()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), _torchs()

    def body(step: int) -> None:
        for micro in range(2):
            with torch.autocast("cpu", FP16):
                loss = loss_of(model, 2 * step + micro)
            (scaler.scale(loss) / 2).backward()
            scaler.scale(loss.detach())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return names_found(model, optimizer, body, scaler)


def a_mean_of_weights_beside() -> list[str]:
    model = net()
    mean = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def body(step: int) -> None:
        loss_of(model, step).backward()
        optimizer.step()
        mean.update_parameters(model)
        optimizer.zero_grad()

    return names_found(model, optimizer, body)


def recomputed_activations() -> list[str]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())

    def body(step: int) -> None:
        torch.utils.checkpoint.checkpoint(loss_of, model, step, use_reentrant=False).backward()
        optimizer.step()
        optimizer.zero_grad()

    return names_found(model, optimizer, body)


def a_deep_copy_with_its_own_optimizer() -> list[str]:
    model = copy.deepcopy(net(BF16))
    return names_found(model, halfstep.AdamW(model.parameters(), weight_decay=0.1))


HEALTHY: list[Callable[[], list[str]]] = [
    fp32_adamw,
    fp32_fused_adam_with_amsgrad,
    fp32_sgd_with_momentum,
    fp32_adafactor,
    muon_for_matrices_and_adamw_for_the_rest,
    sparse_embeddings,
    a_closure,
    gradients_set_to_zero,
    a_model_that_clears_gradients_itself,
    accumulation_and_clipping,
    clipping_by_value_and_a_logged_norm,
    a_warm_up_from_zero,
    a_frozen_base_and_an_adapter,
    layers_frozen_after_training,
    batch_norms_and_channels_last,
    bf16_autocast,
    fp16_autocast_with_clipping,
    fp16_autocast_with_a_fused_optimizer,
    fp16_autocast_with_overflows_and_a_guarded_schedule,
    our_scaler_with_a_skip_aware_schedule,
    our_scaler_with_fp16_weights_and_clipping_in_the_step,
    a_loss_scale_of_one,
    a_compiled_model_in_fp16,
    masters_made_before_the_first_step,
    a_schedule_per_epoch,
    a_disabled_scaler,
    split_masters,
    full_masters,
    split24_with_8_bit_moments,
    bf16_moments_rounded_stochastically,
    no_masters_rounded_stochastically,
    clipping_inside_the_step,
    a_resumed_run,
    steps_in_the_backward,
    masters_on_the_host,
    a_wrapped_optimizer,
    timms_scaler,
    mmengines_wrapper,
    mmengines_wrapper_with_a_scaler,
    mmengines_wrappers_by_name,
    a_precision_plugin,
    a_container_of_optimizers,
    copies_in_fp32_of_the_optimizers_own,
    copies_in_fp32_of_the_loop,
    copies_that_apex_stashed,
    infinite_masks_and_expanded_buffers,
    gradients_of_a_skipped_step,
    a_scaled_loss_that_is_divided,
    a_mean_of_weights_beside,
    recomputed_activations,
    a_deep_copy_with_its_own_optimizer,
]
