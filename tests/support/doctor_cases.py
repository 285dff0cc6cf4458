"""Training loops, healthy and with faults, for tests/integrations/test_doctor.py; on ranks: doctor_ranks.py.

Each case is a loop in which texts are replaced, and the name of the finding, or of the error, that must tell.
"""

from __future__ import annotations

import copy
import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import library_wrappers
import torch
from release_models import Wrapped
from torch import nn

import halfstep
from halfstep.integrations import doctor as doctor_module
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import step_in_backward

AMP = """
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
doctor(model, optimizer, scaler)
with watch(model, optimizer, scaler, schedule):
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
doctor(model, optimizer, scaler)
"""

PLAIN = """
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
doctor(model, optimizer)
with watch(model, optimizer):
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
doctor(model, optimizer)
"""


class Config:
    tie_word_embeddings = True


class Net(nn.Module):
    """Two layers whose weights the configuration ties."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = Config()
        self.embedding, self.body = nn.Embedding(32, 16), nn.Linear(16, 16)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.body(self.embedding(tokens)).relu()))
        return logits


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


def loss_under_autocast_for_a_gpu(model: nn.Module, step: int) -> torch.Tensor:
    torch.set_autocast_enabled("cuda", True)  # as torch.autocast("cuda") where there is a GPU
    try:
        return loss_of(model, step)
    finally:
        torch.set_autocast_enabled("cuda", False)


class Masked(Net):
    """Infinities in masks, and buffers that are larger than their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))
        self.limit = nn.Parameter(torch.full((32,), float("inf")), requires_grad=False)
        self.register_buffer("ones", torch.ones(1).expand(1 << 40))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens).minimum(self.limit)


class Adapted(nn.Module):
    """A frozen layer, by default in bf16, or codes of a quantized one; and an adapter in fp32."""

    def __init__(self, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        weight = torch.randn(16, 16).bfloat16() if weight is None else weight
        self.base = nn.Parameter(weight, requires_grad=False)
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        adapted: torch.Tensor = values @ self.base.float() + self.up(self.down(values))
        return adapted


class Copying(torch.optim.AdamW):
    """As apex's and Megatron's: steps fp32 copies of 16-bit weights that it makes itself."""

    def __init__(self, model: nn.Module) -> None:
        self.originals = list(model.parameters())
        super().__init__([weight.detach().float().requires_grad_() for weight in self.originals])

    def step(self, closure: Any = None) -> None:
        copy_gradients(self.originals, self.param_groups[0]["params"])
        super().step()
        copy_weights(self.param_groups[0]["params"], self.originals)


def copy_gradients(weights: list[torch.Tensor], copies: list[torch.Tensor]) -> None:
    for weight, copied in zip(weights, copies, strict=True):
        copied.grad = None if weight.grad is None else weight.grad.float()


@torch.no_grad()
def copy_weights(copies: list[torch.Tensor], weights: list[torch.Tensor]) -> None:
    for weight, copied in zip(weights, copies, strict=True):
        weight.copy_(copied)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def loaded(model: nn.Module, optimizer: Any, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, Any]:
    """A model and an optimizer of these classes in `dtype`, with what a file holds of these ones."""
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    twin = Net().to(dtype)
    twin.load_state_dict(weights)
    resumed = type(optimizer)(twin.parameters(), **options)
    resumed.load_state_dict(state)
    return twin, resumed


def replace_parameters(model: nn.Module) -> None:
    """As fully_shard does, and conversions under torch.__future__.set_overwrite_module_params_on_conversion."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))


def adam_closure(model: nn.Module, optimizer: Any) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    return closure


NAMES = {"copy": copy, "halfstep": halfstep, "math": math, "OffloadedAdamW": OffloadedAdamW}
NAMES |= {"step_in_backward": step_in_backward, "Wrapped": Wrapped}


class Case(NamedTuple):
    """A loop, the texts that are replaced in it in pairs, what tells (None: nothing), and where it was reported."""

    loop: str
    edits: tuple[str, ...]
    name: str | None = None
    reported: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(self.edits[1::2]).strip()}"

    def told(self) -> list[str]:
        """The names of what is found before, in and after the steps, and of the error that ends them."""
        loop = self.loop
        for old, new in zip(self.edits[::2], self.edits[1::2], strict=True):
            assert old in loop, old
            loop = loop.replace(old, new)
        names: list[str] = []

        def doctor(*setup: Any) -> None:
            names.extend(doctor_module.doctor(*setup).names)

        @contextmanager
        def watch(*setup: Any) -> Iterator[Any]:
            with doctor_module.watch(*setup) as watched:
                yield watched
            names.extend(watched.diagnosis.names)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exec(loop, {**NAMES, **vars(library_wrappers), **globals(), "doctor": doctor, "watch": watch})
            except Exception as error:
                names.append(type(error).__name__)
        return names


def plain(*edits: str, name: str | None = None, reported: str = "") -> Case:
    return Case(PLAIN, edits, name, reported)


def amp(*edits: str, name: str | None = None, reported: str = "") -> Case:
    return Case(AMP, edits, name, reported)


def overflow(steps: str) -> tuple[str, str]:
    return f"loss = {LOSS}", f"loss = {LOSS} * (math.inf if {steps} else 1.0)"


def ours(options: str, *edits: str) -> Case:
    """bf16 weights and halfstep.AdamW."""
    return Case(PLAIN, (*HALF, ADAMW, f"halfstep.AdamW(model.parameters(), {options})", *edits))


ADAMW, SCALER = "torch.optim.AdamW(model.parameters(), lr=1e-3)", 'torch.amp.GradScaler("cpu", init_scale=1024.0)'
LOSS, CLIP = "loss_of(model, step)", "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
UNSCALE, ZERO, SCHEDULE = "        scaler.unscale_(optimizer)\n", "        optimizer.zero_grad()\n", "schedule.step()"
SCALED = AMP[AMP.index("        scaler.scale") : AMP.index("        schedule.step")]
GROUPS = "torch.optim.AdamW(groups(model))"
WITH, BEFORE = "doctor(model, optimizer)\nwith", "model = Net()\n"
FUSED = "torch.optim.AdamW(model.parameters(), fused=True)"
NO_CLIP, HALF = (UNSCALE, "", CLIP, ""), ("Net()", "Net().bfloat16()")
EACH = ("optimizer.step()", "[one.step() for one in optimizer]")
EACH += ("optimizer.zero_grad()", "[one.zero_grad() for one in optimizer]")
BY_HAND = (
    "        copy_gradients(list(model.parameters()), copies)\n        optimizer.step()\n"
    "        copy_weights(copies, list(model.parameters()))\n        model.zero_grad()\n"
)
HEALTHY = {
    "AdamW": plain(),
    "fp16 autocast with clipping": amp(),
    # torch's optimizers
    "fused Adam with amsgrad": plain(ADAMW, "torch.optim.Adam(model.parameters(), amsgrad=True, fused=True)"),
    "SGD": plain(ADAMW, "torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)"),
    "Adafactor": plain(ADAMW, "torch.optim.Adafactor(model.parameters())"),
    "two optimizers": plain(
        *(ADAMW, "[torch.optim.SGD([model.body.weight], lr=0.02, momentum=0.9), torch.optim.AdamW(others)]"),
        *(BEFORE, f"{BEFORE}others = [one for one in model.parameters() if one is not model.body.weight]\n"),
        *EACH,
    ),
    "sparse embeddings": plain(
        *("Net()", 'nn.ModuleDict({"table": nn.Embedding(32, 8, sparse=True), "head": nn.Linear(8, 1)})'),
        *(ADAMW, "[torch.optim.SparseAdam(model.table.parameters()), torch.optim.AdamW(model.head.parameters())]"),
        *(LOSS, "model.head(model.table(torch.tensor([step, 3]))).sum()", CLIP, ""),
        *EACH,
    ),
    "a closure": plain(
        *(ADAMW, "torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=2)", CLIP, "", ZERO, ""),
        *("        loss.backward()\n", "", "optimizer.step()", "optimizer.step(adam_closure(model, optimizer))"),
    ),
    "gradients set to zero": plain(
        ZERO, "", "        loss =", f"{ZERO.replace('()', '(set_to_none=False)')}        loss ="
    ),
    "gradients cleared by hand": plain(ZERO, "        for one in model.parameters(): one.grad = None\n"),
    "accumulation": plain(
        *(f"        loss = {LOSS}\n        loss.backward()\n", ""),
        *(CLIP, f"        for micro in range(3): (loss_of(model, 3 * step + micro) / 3).backward()\n{CLIP}"),
    ),
    "clipping by value and a logged norm": plain(
        *(
            CLIP,
            "        norm = nn.utils.get_total_norm([one.grad for one in model.parameters()])\n"
            "        nn.utils.clip_grad_value_(model.parameters(), 1.0)\n",
        ),
    ),
    "a warm-up from zero": plain(
        *(WITH, f"schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))\n{WITH}"),
        *("watch(model, optimizer)", "watch(model, optimizer, None, schedule)", ZERO, f"{ZERO}        {SCHEDULE}\n"),
    ),
    # The optimizer gets all parameters, which is harmless: frozen ones have no gradient and no state.
    "a frozen base and an adapter": plain("Net()", "Adapted()", LOSS, "model(torch.randn(4, 16)).square().mean()"),
    "layers frozen after training": plain(
        *(BEFORE, f"{BEFORE}model.embedding.weight.requires_grad_(False)\n"),
        *("AdamW(model.parameters()", "AdamW([one for one in model.parameters() if one.requires_grad]"),
    ),
    "batch norms and channels_last": plain(
        *("Net()", "nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3))"),
        *(WITH, f"model.to(memory_format=torch.channels_last)\n{WITH}"),
        *(f"loss = {LOSS}", 'with torch.autocast("cpu", torch.bfloat16): y = model(torch.randn(2, 3, 8, 8))'),
        *("loss.backward()", "y.float().square().mean().backward()"),
    ),
    # autocast and loss scaling
    "bf16 autocast": plain("loss = ", 'with torch.autocast("cpu", torch.bfloat16): loss = '),
    "accumulation and a fused optimizer": amp(
        *(ADAMW, FUSED, *NO_CLIP, "schedule.step()", "pass"),
        *("scaler.scale(loss).backward()", f"scaler.scale(loss).backward(); scaler.scale({LOSS}).backward()"),
        *overflow("step == 1"),
    ),
    "overflows and a guarded schedule": amp(
        *overflow("step in (1, 2)"),
        *NO_CLIP,
        *("scaler.update()", "before = scaler.get_scale(); scaler.update()"),
        *(SCHEDULE, f"if scaler.get_scale() >= before: {SCHEDULE}"),
    ),
    "our scaler and schedule": amp(
        *("torch.amp.GradScaler", "halfstep.GradScaler", "torch.optim.AdamW", "halfstep.AdamW", *NO_CLIP),
        *(
            "schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)",
            "schedule = halfstep.SkipAwareScheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99), scaler)",
        ),
        *overflow("step in (0, 2)"),
    ),
    "our scaler with fp16 weights and clipping in the step": amp(
        *(
            "Net()",
            "Net().half()",
            "torch.amp.GradScaler",
            "halfstep.GradScaler",
            "torch.float16",
            "torch.float16, False",
        ),
        *("torch.optim.AdamW(", "halfstep.AdamW(max_grad_norm=1.0, params=", *NO_CLIP, SCHEDULE, "pass"),
        *overflow("step == 1"),
    ),
    # Clipping before unscaling is the same as after it.
    "a loss scale of 1": amp("init_scale=1024.0", "init_scale=1.0", UNSCALE, ""),
    # The autocast of compiled modules is not seen.
    "a compiled model": amp("Net()", 'torch.compile(Net(), backend="eager")'),
    # They hold numbers of bf16, since they were made from bf16 weights.
    "masters before the first step": plain(
        *(*HALF, ADAMW, "torch.optim.SGD(model.parameters(), lr=0.1)", "range(4)", "range(0)"),
        *(WITH, "for one in model.parameters(): optimizer.state[one]['master'] = one.detach().float()\n" + WITH),
    ),
    # Its last step is skipped, but others of the epoch are not.
    "a schedule per epoch": amp(
        *(SCHEDULE, f"if step % 3 == 2: {SCHEDULE}", "range(4)", "range(6)"), *overflow("step == 2")
    ),
    "a disabled scaler": amp('"cpu", init_scale=1024.0', '"cpu", enabled=False', "torch.float16", "torch.bfloat16"),
    "gradients of a skipped last step": amp(*overflow("step == 3"), SCHEDULE, "pass"),
    "a scaled loss that is divided": amp(
        "scaler.scale(loss).backward()", "(scaler.scale(loss) / 2).backward(); scaler.scale(loss.detach())"
    ),
    # halfstep's optimizers
    "split masters": ours("lr=1e-5"),
    "full masters": ours('lr=1e-5, master_weights="full"'),
    "8-bit moments": ours('master_weights="split24", state_dtype="8bit", rounding="stochastic"'),
    "bf16 moments": ours('state_dtype=torch.bfloat16, rounding="stochastic"'),
    "no masters": ours('lr=1e-5, master_weights=None, rounding="stochastic"'),
    "clipping inside the step": ours("max_grad_norm=0.1", CLIP, ""),
    "a resumed run": ours(
        *(
            'master_weights="full"',
            WITH,
            "train(model, optimizer)\nmodel, optimizer = loaded(model, optimizer, "
            f"torch.bfloat16, master_weights='full')\n{WITH}",
        ),
    ),
    "steps in the backward": ours("lr=1e-3", CLIP, "", WITH, f"step_in_backward(model, optimizer)\n{WITH}"),
    "masters on the host": ours("lr=1e-3", CLIP, "", "halfstep.AdamW", "OffloadedAdamW"),
    "a deep copy": ours("weight_decay=0.1", BEFORE.strip(), "model = copy.deepcopy(Net())"),
    # wrappers of libraries
    "a wrapped optimizer": ours("lr=1e-3", "(model, optimizer)", "(model, Wrapped(optimizer))"),
    "timm's scaler": amp(
        *(SCALER, f"NativeScaler({SCALER})", ADAMW, GROUPS, SCHEDULE, "pass"),
        *(SCALED, "        scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())\n"),
    ),
    "mmengine's wrapper": plain(
        *(ADAMW, f"OptimWrapper({GROUPS})", "        loss.backward()\n", "", CLIP, "", ZERO, ""),
        *("optimizer.step()", "optimizer.update_params(loss)"),
    ),
    **{
        f"mmengine's wrapper with a scaler{passed}": amp(
            *(ADAMW, f"AmpOptimWrapper({GROUPS}, {SCALER})", f"scaler = {SCALER}\n", "", ZERO, "", SCHEDULE, "pass"),
            *("schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)\n", ""),
            *(", scaler, schedule)", f"{passed})", ", scaler)", f"{passed})"),
            *(SCALED, "        optimizer.update_params(loss)\n"),
        )
        for passed in ("", ", optimizer")
    },
    "mmengine's wrappers by name": plain(
        *(
            "Net()",
            'nn.ModuleDict({"one": Net(), "other": Net()})',
            "        loss.backward()\n",
            "",
            CLIP,
            "",
            ZERO,
            "",
        ),
        *(
            ADAMW,
            "OptimWrapperDict(**{name: OptimWrapper(torch.optim.AdamW(part.parameters())) for name, part in "
            "model.items()})",
        ),
        *(f"loss = {LOSS}", "wrappers = optimizer.optim_wrappers"),
        *("optimizer.step()", "[wrappers[name].update_params(loss_of(part, step)) for name, part in model.items()]"),
        *("\nwith", "\ndoctor(model, optimizer.optim_wrappers)\nwith"),
    ),
    "a precision plugin": amp(", scaler", ", plugin", "\ndoctor(", "\nplugin = Precision(scaler)\ndoctor("),
    "a precision plugin without a scaler": plain("(model, optimizer)", "(model, optimizer, Precision(None))"),
    "a container of optimizers": ours(
        *(
            "lr=1e-3",
            "halfstep.AdamW(model.parameters(), lr=1e-3)",
            "OptimizersContainer([halfstep.AdamW([one]) for one in model.parameters()])",
        ),
    ),
    # copies in fp32
    "copies of the optimizer": plain(*HALF, ADAMW, "Copying(model)", CLIP, "", ZERO, "        model.zero_grad()\n"),
    **{
        f"copies of the loop{stash}": plain(
            *(*HALF, ADAMW, "torch.optim.AdamW(copies)", CLIP, "", ZERO, ""),
            *("optimizer =", f"copies = [{make} for one in model.parameters()]\noptimizer ="),
            *(WITH, f"{stash}{WITH}", "        optimizer.step()\n", BY_HAND),
        )
        for make, stash in (
            ("one.detach().float().requires_grad_()", ""),
            ("nn.Parameter(one.detach().float())", "optimizer._amp_stash = Stash(list(model.parameters()))\n"),
        )
    },
    # the rest
    "infinite masks and expanded buffers": plain("Net()", "Masked()"),
    "a mean of weights": plain(
        WITH,
        f"mean = torch.optim.swa_utils.AveragedModel(model)\n{WITH}",
        ZERO,
        f"{ZERO}        mean.update_parameters(model)\n",
    ),
    "recomputed activations": plain(
        LOSS, "torch.utils.checkpoint.checkpoint(loss_of, model, step, use_reentrant=False)"
    ),
}

BREAKS = [
    # Loss scaling, clipping and schedules.
    amp("scaler.scale(loss).backward()", "scaler.scale(loss); loss.backward()", name="loss-not-scaled"),
    amp(
        *(UNSCALE, "", *overflow("step == 1"), SCHEDULE, "pass"),
        name="clipped-scaled-gradients",
        reported="milesial/Pytorch-UNet#468, rwth-i6/returnn#1590",
    ),
    amp("scaler.step(optimizer)", "optimizer.step()", name="step-without-scaler"),
    amp(
        CLIP + "        scaler.step(optimizer)\n",
        "        scaler.step(optimizer)\n" + CLIP,
        name="clipping-without-effect",
    ),
    amp(
        *(UNSCALE, f"{UNSCALE}        scaler.scale(loss_of(model, 9)).backward()\n"),
        name="accumulated-after-unscale",
        reported="huggingface/accelerate#641",
    ),
    amp(LOSS, f"{LOSS} * 1e38 * 1e38", name="every-step-skipped"),
    amp(LOSS, f"{LOSS} * math.nan", *NO_CLIP, name="every-step-skipped", reported="pytorch/pytorch#40497"),
    amp(*overflow("step == 1"), name="schedule-advanced-on-skip", reported="pytorch/pytorch#55585, #67590"),
    amp(
        *('"cpu", init_scale=1024.0', '"cpu", enabled=False'),
        name="fp16-without-scaler",
        reported="OpenRLHF/OpenRLHF#1155, verl-project/verl#4036",
    ),
    amp("init_scale=1024.0", "init_scale=1e-6", name="scale-collapsed"),
    amp(
        *("init_scale=1024.0", "init_scale=2.0**-148", LOSS, f"{LOSS} * math.inf", *NO_CLIP),
        name="scale-collapsed",
        reported="NVIDIA/apex#834, Junjue-Wang/FactSeg#6",
    ),
    amp('"cpu", torch.float16', '"cpu", torch.bfloat16', name="scaler-without-fp16"),
    amp('"cpu", torch.float16', '"cuda", torch.float16', name="scaler-without-fp16"),
    amp(ZERO, "", name="gradients-not-cleared"),
    amp("scaler.scale(loss).backward()", "scaler.scale(loss)", name="AssertionError"),  # by torch's scaler
    amp("doctor(model, optimizer, scaler)", 'doctor(model, optimizer, "fp16")', name="TypeError"),
    amp("doctor(model, optimizer, scaler)", "doctor(model, optimizer, scaler.scale)", name="TypeError"),
    amp("doctor(model, optimizer, scaler)", "doctor(model, optimizer, torch.float16)", name="TypeError"),
    amp(
        *("Net()", "Net().half()", "torch.optim.AdamW", "torch.optim.SGD"),
        name="fp16-weights-with-torch-scaler",
        reported="pytorch/pytorch#74739",
    ),
    # Gradients.
    plain(ZERO, "", name="gradients-not-cleared", reported="meta-pytorch/torchforge#71, wenet-e2e/wekws#73"),
    plain("loss.backward()", "loss.backward(); optimizer.zero_grad()", name="steps-without-gradients"),
    plain("        loss.backward()\n", "", name="steps-without-gradients"),
    plain("optimizer.step()", "optimizer.step"),
    plain("torch.optim.AdamW(", "halfstep.AdamW(max_grad_norm=1.0, params=", name="clipped-twice"),
    plain(
        *("optimizer.zero_grad()", "model.head.weight.requires_grad_(False)"),
        name="frozen-with-gradient",
        reported="facebookresearch/fairseq#4702",
    ),
    plain(
        *(WITH, f"iterator = model.parameters()\n{WITH}", "norm_(model.parameters()", "norm_(iterator"),
        name="clipping-without-effect",
    ),
    # Which parameters.
    plain(WITH, f"model = copy.deepcopy(model).to(torch.bfloat16)\n{WITH}", name="optimizer-of-other-parameters"),
    plain("AdamW(model.parameters()", "AdamW(Net().parameters()", name="optimizer-of-other-parameters"),
    plain("AdamW(model.parameters()", "AdamW(Net().half().float().parameters()", name="optimizer-of-other-parameters"),
    plain(
        *(WITH, f"replace_parameters(model)\n{WITH}"),
        name="optimizer-of-other-parameters",
        reported="pytorch/pytorch#149205, Lightning-AI/pytorch-lightning#19067",
    ),
    plain("AdamW(model.parameters()", "AdamW(model.body.parameters()", name="parameters-not-optimized"),
    plain(
        *(BEFORE, f"{BEFORE}model.head.weight = nn.Parameter(model.head.weight.detach().clone())\n"),
        name="tie-broken",
        reported="verl-project/verl#7834, NVIDIA-NeMo/Automodel#2213",
    ),
    plain(BEFORE, f"{BEFORE}model.head.weight = nn.Parameter(model.head.weight.data)\n", name="tied-weights-twice"),
    plain(
        *(
            "Net()",
            "Adapted(torch.zeros(16, 16, dtype=torch.uint8))",
            LOSS,
            "model(torch.randn(4, 16)).square().mean()",
        ),
        name="quantized-in-optimizer",
        reported="huggingface/transformers#32943",
    ),
    plain(*(WITH, f"train(model, optimizer)\nmodel.norm.requires_grad_(False)\n{WITH}"), name="frozen-with-state"),
    # Precision.
    plain(*HALF, name="moments-in-16-bits", reported="inclusionAI/AReaL#1292, huggingface/accelerate#2674"),
    plain(WITH, f"model.to(torch.bfloat16)\n{WITH}", name="moments-in-16-bits"),
    plain("Net()", "Net().half()", name="fp16-without-scaler"),
    plain(
        *(
            ADAMW,
            "halfstep.AdamW(model.to(torch.bfloat16).parameters(), lr=1e-6, master_weights=None, rounding='nearest')",
        ),
        name="updates-lost",
    ),
    plain(*HALF, "1e-3", "1e-5", name="updates-lost", reported="pytorch/pytorch#120376, NVIDIA-NeMo/RL#2865"),
    plain(*HALF, "lr=1e-3", "lr=1e-4, weight_decay=0.1", name="decay-lost"),
    plain("lr=1e-3", "lr=1e-12"),
    plain("lr=1e-3", "lr=1e-14", BEFORE, f"{BEFORE}model.norm.bias.data.fill_(1.0)\n", name="weights-unchanged"),
    plain(
        *(WITH, f"train(model, optimizer)\nfor s in optimizer.state.values(): s['step'] = s['step'].half()\n{WITH}"),
        name="step-in-16-bits",
    ),
    plain(
        *(*HALF, "loss = ", 'with torch.autocast("cpu", torch.bfloat16): loss = '),
        name="autocast-over-16-bit-weights",
        reported="huggingface/transformers#33780",
    ),
    plain(LOSS, "loss_under_autocast_for_a_gpu(model, step)", name="autocast-without-effect"),
    plain("Net()", "Net().half()", name="eps-is-zero", reported="pytorch/pytorch#147437, chainer/chainer#6299"),
    # Optimizer.load_state_dict casts to the dtype of the parameters: bf16 there, and fp32 here afterwards.
    plain(
        *(
            WITH,
            "train(model, optimizer)\nmodel, optimizer = loaded(*loaded(model, optimizer, torch.bfloat16), "
            f"torch.float32)\n{WITH}",
        ),
        name="state-was-rounded",
        reported="pytorch/pytorch#43706",
    ),
    plain(
        *(BEFORE, f"{BEFORE}model.register_buffer('inv_freq', torch.ones(4).bfloat16())\n"),
        name="buffers-in-16-bits",
        reported="huggingface/transformers#25681, EleutherAI/gpt-neox#1003",
    ),
    # NaN and infinity.
    plain(BEFORE, f"{BEFORE}model.body.weight.data.fill_(math.nan)\n", name="values-not-finite"),
    plain(BEFORE, f"{BEFORE}model.norm.bias.data[3] = -math.inf\n", name="values-not-finite"),
    plain(LOSS, f"{LOSS} * math.nan", name="values-not-finite"),
    plain("lr=1e-3", "lr=1e30", name="values-not-finite"),
    plain(ZERO, f"{ZERO}optimizer.state[model.norm.bias]['exp_avg_sq'][2] = math.nan\n", name="values-not-finite"),
    plain(ZERO, f"{ZERO}loss_of(model, 0).mul(math.inf).backward()\n", name="values-not-finite"),
]
