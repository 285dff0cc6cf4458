"""Checks made with the sums of 16-bit gradients: the bits of a check after the backward, whatever a loop does between.

For test_cases_on_ranks.py.
"""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shard_ranks import IN_FP32, whole
from states import differences, same_bits
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

import halfstep
from halfstep.integrations import fsdp
from halfstep.kernels import backend, unscale
from halfstep.numerics.scaling import decision, early_checks

STEPS = 4
Loop = Callable[["Run"], None]


class Run:
    """A training loop of some steps, of which a case is the middle."""

    def __init__(self, scaled: bool, dtype: torch.dtype, **sharding: Any) -> None:
        torch.manual_seed(0)
        # A shard of the first weight has two chunks, and shards of rank 1 are smaller, or empty.
        layers = torch.nn.Linear(70, 131), torch.nn.Tanh(), torch.nn.Linear(131, 1)
        self.model: Any = torch.nn.Sequential(*layers).to(dtype)
        fully_shard(self.model[0], mp_policy=IN_FP32, **sharding)
        fully_shard(self.model, mp_policy=IN_FP32, **sharding)
        if dtype != torch.float32:
            fsdp.keep_reduced_gradients(self.model)
        fsdp.send_gradients_in_16_bits(self.model, check_sums=True)
        self.optimizer = halfstep.AdamW(self.model.parameters(), lr=1e-2, max_grad_norm=None if scaled else 1e-3)
        self.scaler = halfstep.GradScaler("cpu", init_scale=3.0, growth_interval=2, enabled=scaled)
        self.number = 0

    @property
    def grads(self) -> list[Any]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def backward(self, spoiled: bool = False) -> None:
        self.number += 1
        generator = torch.Generator().manual_seed(10 * self.number + dist.get_rank())
        loss = (
            self.model(torch.randn(6, 70, generator=generator).to(self.model[0].weight.dtype)).float().square().mean()
        )
        self.scaler.scale(loss * float("nan") if spoiled else loss).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()


def trained(loop: Loop, early: bool, *options: Any, **sharding: Any) -> tuple[dict[str, Any], list[int], int]:
    """Weights, norms, scales and overflows; the gradients that each step has read to check them; the early checks."""
    run, read, made, results = Run(*options, **sharding), [0], [0], {}
    check_groups, sum_and_check = unscale._check_groups, fsdp.sum_and_check

    def counted(implementation: str, groups: list[Any], *arguments: Any) -> None:
        read[-1] += sum(len(group.tensors) for group in groups)
        check_groups(implementation, groups, *arguments)

    def summed(*arguments: Any) -> list[Any]:
        before = read[-1]
        checks = sum_and_check(*arguments)
        made[0] += len(checks)
        read[-1] = before  # C++ reads them a second time
        return checks

    late = mock.patch.object(decision, "early_checks", lambda *_: ())
    with (
        mock.patch.object(unscale, "_check_groups", counted),
        mock.patch.object(fsdp, "sum_and_check", summed),
        mock.patch.object(decision, "early_checks", decision.early_checks) if early else late,
    ):
        for step in range(STEPS):
            run.optimizer.zero_grad()
            loop(run)
            norm = run.optimizer.grad_norm
            results[f"norm {step}"] = torch.zeros(()) if norm is None else norm.clone()
            results[f"scale {step}"] = torch.tensor(run.scaler.get_scale())
            results[f"squares {step}"] = run.optimizer.last_verdict.sum_of_squares.clone()
            read.append(0)
    results |= {name: whole(parameter) for name, parameter in run.model.named_parameters()}
    checker = run.scaler.checker(run.optimizer)
    results |= {f"counts {device}": counts for device, counts in checker.counts.items()}
    return results, read[:-1], made[0]


# ------------------------------------------------------------------------------------------------------------- loops


def plain(run: Run) -> None:
    run.backward()
    run.step()


def without_communication(run: Run) -> None:
    """Micro-batches that are communicated together, in fp32."""
    run.model.set_requires_gradient_sync(False)
    run.backward()
    run.model.set_requires_gradient_sync(True)
    run.backward()
    run.step()


def clipped_by_ours(run: Run) -> None:
    run.backward()
    (
        run.scaler.clip_grad_norm_(run.optimizer, 1e-3)
        if run.scaler.is_enabled()
        else run.optimizer.clip_grad_norm_(2e-4)
    )
    run.step()


def divided_by_four(run: Run) -> None:
    run.model.set_gradient_divide_factor(4.0)
    plain(run)


def divided_afterwards(run: Run) -> None:
    """FSDP2 then divides the sums in place."""
    for module in (run.model, run.model[0]):
        module.set_force_sum_reduction_for_comms(True)
    plain(run)


def overflow_on_a_rank(run: Run) -> None:
    run.backward(spoiled=run.number == 2 and dist.get_rank() == 1)
    run.step()


def accumulated(run: Run) -> None:
    """After two steps, a second micro-batch is communicated and added to the sharded gradients."""
    run.backward()
    if run.number > 2:
        run.backward()
    run.step()


def partly_accumulated(run: Run) -> None:
    run.backward()
    run.model[0].weight.grad = None
    run.backward()
    run.step()


def without_a_layer(run: Run) -> None:
    """Each second step has a gradient less, so that the others are elsewhere in the sum."""
    run.model[2].bias.requires_grad_(run.number % 2 == 0)
    plain(run)


def with_another_scale(run: Run) -> None:
    run.backward()
    if run.scaler.is_enabled():
        run.scaler.update(5.0 + run.number)
    run.step()


def unscaled_in_place(run: Run) -> None:
    run.backward()
    if run.number % 2 and run.scaler.is_enabled():
        run.scaler.unscale_(run.optimizer)
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-3)
    run.step()


def unscaled_and_clipped_by_the_step(run: Run) -> None:
    """After two steps without a scaler, whose checks of the next gradients are without a factor."""
    run.optimizer.max_grad_norm = 1e-3
    if run.number < 2:
        run.model(torch.ones(6, 70)).float().square().mean().backward()
        run.optimizer.step()
        run.number += 1
        return
    run.backward()
    run.scaler.unscale_(run.optimizer)
    run.step()


def with_hooks(run: Run) -> None:
    """FSDP2 calls them between the sum and the end of the backward. They write by a list of DTensors."""
    parameters = [*run.model.parameters()]
    for parameter in parameters if run.number == 0 else ():
        parameter.register_post_accumulate_grad_hook(lambda p: torch._foreach_mul_([p.grad], 0.5))
    plain(run)


def with_an_all_reduce_hook(run: Run) -> None:
    for module in (run.model, run.model[0]):
        module.set_all_reduce_hook(lambda total: total.data.mul_(0.5))
    plain(run)


def writing(write: Callable[[Run], object]) -> Loop:
    def loop(run: Run) -> None:
        run.backward()
        if run.number > 2:  # since then, gradients are checked early
            write(run)
        run.step()

    return loop


def through_numpy(run: Run) -> None:
    for grad in run.grads:
        grad.to_local().numpy()[:] *= 0.5


def replaced(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad = parameter.grad.detach() * 0.5


def averaged(run: Run) -> None:
    """A collective, which increments no version."""
    for grad in run.grads:
        if grad.to_local().numel() == grad.numel() / 2:
            dist.all_reduce(grad.to_local())


def spoiled_on_a_rank(run: Run) -> None:
    shard = run.grads[0].data.to_local()
    if dist.get_rank() == 0:
        shard[0, 3] = float("inf")


def shard_assigned(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.grad._local_tensor = parameter.to_local().detach() * 0.5


WRITERS: dict[str, Callable[[Run], object]] = {
    "mul_": lambda run: [grad.mul_(0.5) for grad in run.grads],
    "a list": lambda run: torch._foreach_mul_(run.grads, 0.5),
    "torch's clipping": lambda run: torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1e-4),
    "clipping of values": lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3),
    "data": lambda run: [grad.data.mul_(0.5) for grad in run.grads],
    "the shard": lambda run: [grad._local_tensor.mul_(0.5) for grad in run.grads],
    "data of the shard": lambda run: [grad._local_tensor.data.mul_(0.5) for grad in run.grads],
    "numpy": through_numpy,
    "another gradient": replaced,
    "another shard": shard_assigned,
    "a collective": averaged,
    "an infinity": spoiled_on_a_rank,
    "zeros": lambda run: run.optimizer.zero_grad(set_to_none=False),
    "inference mode": lambda run: torch.inference_mode()(lambda: run.grads[0].mul_(0.5))(),
    "nothing, but reading": lambda run: torch.nn.utils.get_total_norm(run.grads),
    "ours": lambda run: halfstep.foreach_unscale_([grad.to_local() for grad in run.grads], 0.5),
}
READ_NOTHING = (plain, without_communication, clipped_by_ours, divided_by_four, overflow_on_a_rank)
ONLY_SCALED = (with_another_scale, unscaled_in_place, unscaled_and_clipped_by_the_step)
READ_AGAIN = (accumulated, partly_accumulated, without_a_layer, *ONLY_SCALED)
NEVER_EARLY = (with_hooks, with_an_all_reduce_hook, divided_afterwards)


# ------------------------------------------------------------------------------------------------------------- cases


def early_checks_have_the_bits_of_late_ones(loop: Loop, reads: bool | None, *options: Any, **sharding: Any) -> None:
    """`reads`: whether steps after the first read gradients to check them; None if they have no early checks."""
    expected, read, _ = trained(loop, False, *options, **sharding)
    assert min(read) >= 3
    found, read, made = trained(loop, True, *options, **sharding)
    assert differences(expected, found) == []
    assert (made > 0) is (reads is not None)
    if reads is not None:
        assert (sum(read[1:]) > 0) is reads, read


def the_kernel_has_the_same_bits(loop: Loop) -> None:
    if backend.TAKES_CPU_TENSORS:
        in_torch, _, _ = trained(loop, True, True, torch.float32)
        with halfstep.backend("triton"):
            by_kernels, read, made = trained(loop, True, True, torch.float32)
        assert differences(in_torch, by_kernels) == [] and made > 0 and (sum(read[1:]) > 0) is (loop is without_a_layer)


def no_check_is_made_in_vain_twice() -> None:
    """Nor for gradients that will be added to others."""
    for loop, expected in ((plain, 12), (writing(WRITERS["nothing, but reading"]), 8), (accumulated, 12)):
        _, _, made = trained(loop, True, False, torch.float32)
        assert made == expected


def the_class_of_a_checked_gradient_is_unnoticed() -> None:
    run = Run(False, torch.float32)
    for _ in range(2):
        run.optimizer.zero_grad()
        plain(run)
    for access in (copy.deepcopy, str, lambda grad: torch.save(grad, io.BytesIO()), lambda grad: grad.to_local()):
        run.optimizer.zero_grad()
        plain(run)
        grad = run.grads[0]
        assert isinstance(grad, DTensor) and type(grad) is not DTensor and grad.placements and grad.shape == (131, 70)
        access(grad)
        assert type(grad) is DTensor


def a_saved_gradient_is_a_usual_dtensor() -> None:
    run, file = Run(False, torch.float32), io.BytesIO()
    for _ in range(2):
        run.optimizer.zero_grad()
        plain(run)
    values = run.grads[0].unread_shard.clone()
    torch.save(run.grads[0], file)
    assert b"halfstep" not in file.getvalue()
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded) is DTensor and same_bits(loaded.to_local(), values)


def early_checks_end_with_their_gradients() -> None:
    gc.collect()
    others = len(early_checks.handed_over)
    run = Run(False, torch.float32)
    for _ in range(3):
        run.optimizer.zero_grad()
        plain(run)
    assert len(early_checks.handed_over) == others + 4
    run.optimizer.zero_grad()
    assert len(early_checks.handed_over) == others


def _cases() -> dict[str, Callable[[], None]]:
    """Where all is read again, one loop has a scaler and the next one `max_grad_norm`."""
    again = {loop.__name__: loop for loop in READ_AGAIN} | {f"written by {k}": writing(w) for k, w in WRITERS.items()}
    loops: list[tuple[str, Loop, bool | None, bool]] = [
        *((loop.__name__, loop, False, scaled) for loop in READ_NOTHING for scaled in (True, False)),
        *(
            (name, loop, True, loop in ONLY_SCALED or number % 2 == 0)
            for number, (name, loop) in enumerate(again.items())
        ),
        *((loop.__name__, loop, None, True) for loop in NEVER_EARLY),
    ]
    return {
        f"{name}, {'a scaler' if scaled else 'max_grad_norm'}": partial(
            early_checks_have_the_bits_of_late_ones, loop, reads, scaled, torch.float32
        )
        for name, loop, reads, scaled in loops
    }


CASES: dict[str, Callable[[], None]] = {
    **_cases(),
    "kept bf16": partial(early_checks_have_the_bits_of_late_ones, plain, False, True, torch.bfloat16),
    **{f"kernel, {loop.__name__}": partial(the_kernel_has_the_same_bits, loop) for loop in (plain, without_a_layer)},
    "columns": partial(
        *(early_checks_have_the_bits_of_late_ones, plain, False, False, torch.float32),
        shard_placement_fn=lambda parameter: Shard(int(parameter.shape[-1] == 70)),
    ),
    "in vain": no_check_is_made_in_vain_twice,
    "the class": the_class_of_a_checked_gradient_is_unnoticed,
    "saving": a_saved_gradient_is_a_usual_dtensor,
    "the end": early_checks_end_with_their_gradients,
}


def replicas_reduce_the_sums_again() -> None:
    """HSDP all-reduces them, which increments no version."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    early_checks_have_the_bits_of_late_ones(divided_by_four, None, True, torch.float32, mesh=mesh)


ON_FOUR_RANKS: dict[str, Callable[[], None]] = {"HSDP": replicas_reduce_the_sums_again}
