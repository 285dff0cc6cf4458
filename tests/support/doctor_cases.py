"""Training loops, healthy and with faults, for tests/integrations/test_doctor.py; on ranks: doctor_ranks.py.

Each case is a loop in which texts are replaced, and the name of the finding, or of the error, that must tell.
"""

# ruff: noqa: F401 (the loops use these names)

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import library_wrappers
import torch
from torch import nn

import halfstep
from halfstep.integrations import doctor as doctor_module
from halfstep.integrations.offload import OffloadedAdamW
from halfstep.integrations.release import step_in_backward

LOOPS = {
    "amp": """
model = Net()
# model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
# ready
doctor(model, optimizer, scaler)
with watch(model, optimizer, scaler, schedule):
    for step in range(4):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, step)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
doctor(model, optimizer, scaler)
""",
    "plain": """
model = Net()
# model
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
# ready
doctor(model, optimizer)
with watch(model, optimizer):
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    # end
doctor(model, optimizer)
""",
}
LOOPS["bf16"] = LOOPS["plain"].replace("Net()", "Net().bfloat16()")
LOOPS["ours"] = LOOPS["bf16"].replace("torch.optim.AdamW", "halfstep.AdamW")


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
        step_by_hand(self.originals, self.param_groups[0]["params"], super().step)


def step_by_hand(weights: list[torch.Tensor], copies: list[torch.Tensor], step: Callable[[], Any]) -> None:
    for weight, copied in zip(weights, copies, strict=True):
        copied.grad = None if weight.grad is None else weight.grad.float()
    step()
    for weight, copied in zip(weights, copies, strict=True):
        weight.data.copy_(copied.detach())


def groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}]


def train(model: nn.Module, optimizer: Any, steps: int = 3) -> None:
    for step in range(steps):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def loaded(model: nn.Module, optimizer: Any, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, Any]:
    """A model and an optimizer of these classes in `dtype`, with the state of these ones after some steps."""
    train(model, optimizer)
    twin = Net().to(dtype)
    twin.load_state_dict(model.state_dict())
    resumed = type(optimizer)(twin.parameters(), **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return twin, resumed


def replace_parameters(model: nn.Module) -> None:
    """As fully_shard does, and conversions under torch.__future__.set_overwrite_module_params_on_conversion."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().clone()))


def closure(model: nn.Module, optimizer: Any) -> torch.Tensor:
    optimizer.zero_grad()
    loss = loss_of(model, 0)
    loss.backward()
    return loss


class Case(NamedTuple):
    """A loop, the texts that are replaced in it, what tells, and where the fault was reported."""

    loop: str
    edits: list[tuple[str, str]]
    name: str
    reported: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {' '.join(new for _, new in self.edits)}"

    def told(self) -> list[str]:
        """The names of what is found before, in and after the steps, and of the error that ends them."""
        loop = LOOPS[self.loop]
        for old, new in self.edits:
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
                exec(loop, {**vars(library_wrappers), **globals(), "doctor": doctor, "watch": watch})
            except Exception as error:
                names.append(type(error).__name__)
        return names


STATEMENTS = {
    "loss": "loss = loss_of(model, step)",
    "backward": "loss.backward()",
    "unscale": "scaler.unscale_(optimizer)",
    "clip": "clip_grad_norm_(model.parameters(), 1.0)",
    "optimizer.step": "optimizer.step()",
    "scaler.step": "scaler.step(optimizer)",
    "update": "scaler.update()",
    "schedule": "schedule.step()",
    "zero_grad": "optimizer.zero_grad()",
}


def _edits(line: str) -> Iterator[tuple[str, str]]:
    """What a line below a case means: ``old -> new``, ``without clip ...`` or ``overflow if ...``."""
    if line.startswith("without "):
        yield from ((STATEMENTS[name], "pass") for name in line.split()[1:])
    elif line.startswith("overflow if "):
        condition = line.removeprefix("overflow if ")
        yield STATEMENTS["loss"], f"{STATEMENTS['loss']} * (math.inf if {condition} else 1.0)"
    else:
        old, _, new = line.partition(" -> ")
        yield old, new


def cases(table: str) -> list[Case]:
    """The cases of a table: lines of ``loop: name # reported``, and below each its edits."""
    read: list[Case] = []
    for line in filter(None, table.splitlines()):
        if line.startswith("    "):
            read[-1].edits.extend(_edits(line.strip()))
        else:
            case, _, reported = line.partition(" # ")
            loop, _, name = case.partition(": ")
            read.append(Case(loop, [], name, reported))
    return read


HEALTHY = cases(r"""
plain: AdamW
amp: fp16 autocast with clipping
plain: Adafactor
    AdamW -> Adafactor
plain: sparse embeddings
    Net() -> nn.ModuleDict({"table": nn.Embedding(32, 8, sparse=True), "head": nn.Linear(8, 1)})
    optimizer = torch.optim.AdamW( -> optimizer = torch.optim.SparseAdam(
    (model.parameters(), lr -> (model.table.parameters(), lr
    # ready -> optimizer = [optimizer, torch.optim.AdamW(model.head.parameters())]
    loss_of(model, step) -> model.head(model.table(torch.tensor([step, 3]))).sum()
    without clip
    optimizer.step() -> [one.step() for one in optimizer]
    optimizer.zero_grad() -> [one.zero_grad() for one in optimizer]
plain: a closure
    AdamW(model.parameters(), lr=1e-3) -> LBFGS(model.parameters(), lr=0.1, max_iter=2)
    without clip backward zero_grad
    optimizer.step() -> optimizer.step(lambda: closure(model, optimizer))
plain: gradients set to zero
    without zero_grad
    loss = loss_of -> optimizer.zero_grad(set_to_none=False); loss = loss_of
plain: accumulation
    without loss
    loss.backward() -> for micro in range(3): (loss_of(model, 3 * step + micro) / 3).backward()
plain: a warm-up from zero
    # ready -> schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 10, 1.0))
    watch(model, optimizer) -> watch(model, optimizer, None, schedule)
    optimizer.zero_grad() -> optimizer.zero_grad(); schedule.step()
plain: a frozen base and an adapter
    Net() -> Adapted()
    loss_of(model, step) -> model(torch.randn(4, 16)).square().mean()
plain: batch norms, channels_last and bf16 autocast
    Net() -> nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 1, 3))
    # ready -> model.to(memory_format=torch.channels_last)
    loss = loss_of(model, step) -> with torch.autocast("cpu", torch.bfloat16): y = model(torch.randn(2, 3, 8, 8))
    loss.backward() -> y.float().square().mean().backward()
amp: accumulation and a fused optimizer
    lr=1e-3 -> fused=True
    without unscale clip schedule
    scaler.scale(loss).backward() -> scaler.scale(loss).backward(); scaler.scale(loss_of(model, 9)).backward()
    overflow if step == 1
amp: overflows and a guarded schedule
    overflow if step in (1, 2)
    without unscale clip
    scaler.update() -> before = scaler.get_scale(); scaler.update()
    schedule.step() -> if scaler.get_scale() >= before: schedule.step()
amp: our scaler and schedule
    torch.amp.GradScaler -> halfstep.GradScaler
    torch.optim.AdamW -> halfstep.AdamW
    without unscale clip
    # ready -> schedule = halfstep.SkipAwareScheduler(schedule, scaler)
    overflow if step in (0, 2)
amp: our scaler with fp16 weights and clipping in the step
    Net() -> Net().half()
    torch.amp.GradScaler -> halfstep.GradScaler
    torch.float16 -> torch.float16, False
    torch.optim.AdamW( -> halfstep.AdamW(max_grad_norm=1.0, params=
    without unscale clip schedule
    overflow if step == 1
amp: a loss scale of 1, at which clipping before unscaling is the same
    init_scale=1024.0 -> init_scale=1.0
    without unscale
amp: a compiled model, whose autocast is not seen
    Net() -> torch.compile(Net(), backend="eager")
bf16: masters before the first step, which hold numbers of bf16 since they were made from bf16 weights
    AdamW(model.parameters(), lr=1e-3) -> SGD(model.parameters(), lr=0.1)
    range(4) -> range(0)
    # ready -> for one in model.parameters(): optimizer.state[one]['master'] = one.detach().float()
amp: a schedule per epoch, of whose steps only the last is skipped
    schedule.step() -> if step % 3 == 2: schedule.step()
    range(4) -> range(6)
    overflow if step == 2
amp: a disabled scaler
    init_scale=1024.0 -> enabled=False
    torch.float16 -> torch.bfloat16
amp: gradients of a skipped last step
    overflow if step == 3
    without schedule
amp: a scaled loss that is divided
    scaler.scale(loss).backward() -> (scaler.scale(loss) / 2).backward(); scaler.scale(loss.detach())
ours: split masters
    lr=1e-3 -> lr=1e-5
ours: 8-bit moments
    lr=1e-3 -> master_weights="split24", state_dtype="8bit", rounding="stochastic"
ours: no masters
    lr=1e-3 -> lr=1e-5, master_weights=None, rounding="stochastic"
ours: clipping inside the step
    lr=1e-3 -> max_grad_norm=0.1
    without clip
ours: a resumed run with full masters
    lr=1e-3 -> master_weights="full"
    # ready -> model, optimizer = loaded(model, optimizer, torch.bfloat16, master_weights="full")
ours: steps in the backward
    without clip
    # ready -> step_in_backward(model, optimizer)
ours: masters on the host
    without clip
    halfstep.AdamW -> OffloadedAdamW
amp: timm's scaler
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) -> scaler = NativeScaler(torch.amp.GradScaler("cpu"))
    AdamW(model.parameters(), lr=1e-3) -> AdamW(groups(model))
    scaler.scale(loss).backward() -> scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
    without unscale clip scaler.step update schedule
amp: mmengine's wrapper with a scaler
    # ready -> optimizer = AmpOptimWrapper(torch.optim.AdamW(groups(model)), scaler)
    optimizer, scaler, schedule) -> optimizer)
    doctor(model, optimizer, scaler) -> doctor(model, optimizer, optimizer)
    without zero_grad unscale clip scaler.step update schedule
    scaler.scale(loss).backward() -> optimizer.update_params(loss)
plain: mmengine's wrappers by name
    Net() -> nn.ModuleDict({"one": Net(), "other": Net()})
    # model -> wrappers = {name: OptimWrapper(torch.optim.AdamW(part.parameters())) for name, part in model.items()}
    torch.optim.AdamW(model.parameters(), lr=1e-3) -> OptimWrapperDict(**wrappers)
    # ready -> doctor(model, wrappers)
    without loss clip optimizer.step zero_grad
    loss.backward() -> [wrappers[name].update_params(loss_of(part, step)) for name, part in model.items()]
amp: a precision plugin
    optimizer, scaler -> optimizer, Precision(scaler)
plain: a precision plugin without a scaler
    (model, optimizer) -> (model, optimizer, Precision(None))
ours: a container of optimizers
    halfstep.AdamW(model.parameters(), lr=1e-3) -> OptimizersContainer([halfstep.AdamW([p]) for p in weights])
    # model -> weights = list(model.parameters())
bf16: copies of the optimizer
    torch.optim.AdamW(model.parameters(), lr=1e-3) -> Copying(model)
    without clip
    optimizer.zero_grad() -> model.zero_grad()
bf16: copies of the loop
    # model -> copies = [one.detach().float().requires_grad_() for one in model.parameters()]
    model.parameters(), lr=1e-3 -> copies
    without clip
    optimizer.step() -> step_by_hand(list(model.parameters()), copies, optimizer.step)
    optimizer.zero_grad() -> model.zero_grad()
bf16: copies of the loop that are parameters and known to the optimizer
    # model -> copies = [nn.Parameter(one.detach().float()) for one in model.parameters()]
    model.parameters(), lr=1e-3 -> copies
    # ready -> optimizer._amp_stash = Stash(list(model.parameters()))
    without clip
    optimizer.step() -> step_by_hand(list(model.parameters()), copies, optimizer.step)
    optimizer.zero_grad() -> model.zero_grad()
plain: infinite masks and expanded buffers
    Net() -> Masked()
""")

BREAKS = cases(r"""
amp: loss-not-scaled
    scaler.scale(loss).backward() -> scaler.scale(loss); loss.backward()
amp: clipped-scaled-gradients # milesial/Pytorch-UNet#468, rwth-i6/returnn#1590
    without unscale schedule
    overflow if step == 1
amp: step-without-scaler
    scaler.step(optimizer) -> optimizer.step()
amp: clipping-without-effect
    without clip
    scaler.step(optimizer) -> scaler.step(optimizer); clip_grad_norm_(model.parameters(), 1.0)
amp: accumulated-after-unscale # huggingface/accelerate#641
    scaler.unscale_(optimizer) -> scaler.unscale_(optimizer); scaler.scale(loss_of(model, 9)).backward()
amp: every-step-skipped # pytorch/pytorch#40497
    loss = loss_of(model, step) -> loss = loss_of(model, step) * math.nan
    without unscale clip
amp: schedule-advanced-on-skip # pytorch/pytorch#55585, #67590
    overflow if step == 1
amp: fp16-without-scaler # OpenRLHF/OpenRLHF#1155, verl-project/verl#4036
    init_scale=1024.0 -> enabled=False
amp: scale-collapsed
    init_scale=1024.0 -> init_scale=1e-6
amp: scale-collapsed # NVIDIA/apex#834, Junjue-Wang/FactSeg#6
    init_scale=1024.0 -> init_scale=2.0**-148
    loss = loss_of(model, step) -> loss = loss_of(model, step) * math.inf
    without unscale clip
amp: scaler-without-fp16
    "cpu", torch.float16 -> "cpu", torch.bfloat16
amp: AssertionError # by torch's scaler
    scaler.scale(loss).backward() -> scaler.scale(loss)
amp: fp16-weights-with-torch-scaler # pytorch/pytorch#74739
    Net() -> Net().half()
    torch.optim.AdamW -> torch.optim.SGD
amp: scaler-on-another-device
    # ready -> scaler.scale(torch.ones(1)); model.to("meta"); optimizer = torch.optim.AdamW(model.parameters())
plain: gradients-not-cleared # meta-pytorch/torchforge#71, wenet-e2e/wekws#73
    without zero_grad
plain: steps-without-gradients
    loss.backward() -> loss.backward(); optimizer.zero_grad()
plain: clipped-twice
    torch.optim.AdamW( -> halfstep.AdamW(max_grad_norm=1.0, params=
plain: frozen-with-gradient # facebookresearch/fairseq#4702
    optimizer.zero_grad() -> model.head.weight.requires_grad_(False)
plain: clipping-without-effect
    # ready -> iterator = model.parameters()
    norm_(model.parameters() -> norm_(iterator
plain: optimizer-of-other-parameters
    # ready -> model = copy.deepcopy(model).to(torch.bfloat16)
plain: optimizer-of-other-parameters
    AdamW(model.parameters() -> AdamW(Net().half().float().parameters()
plain: optimizer-of-other-parameters # pytorch/pytorch#149205, Lightning-AI/pytorch-lightning#19067
    # ready -> replace_parameters(model)
plain: parameters-not-optimized
    AdamW(model.parameters() -> AdamW(model.body.parameters()
plain: tie-broken # verl-project/verl#7834, NVIDIA-NeMo/Automodel#2213
    # model -> model.head.weight = nn.Parameter(model.head.weight.detach().clone())
plain: tied-weights-twice
    # model -> model.head.weight = nn.Parameter(model.head.weight.data)
plain: quantized-in-optimizer # huggingface/transformers#32943
    Net() -> Adapted(torch.zeros(16, 16, dtype=torch.uint8))
    loss_of(model, step) -> model(torch.randn(4, 16)).square().mean()
plain: frozen-with-state
    # ready -> train(model, optimizer); model.norm.requires_grad_(False)
bf16: moments-in-16-bits # inclusionAI/AReaL#1292, huggingface/accelerate#2674
plain: fp16-without-scaler
    Net() -> Net().half()
ours: updates-lost
    lr=1e-3 -> lr=1e-6, master_weights=None, rounding="nearest"
bf16: updates-lost # pytorch/pytorch#120376, NVIDIA-NeMo/RL#2865
    1e-3 -> 1e-5
bf16: decay-lost
    lr=1e-3 -> lr=1e-4, weight_decay=0.1
plain: weights-unchanged
    lr=1e-3 -> lr=1e-14
    # model -> model.norm.bias.data.fill_(1.0)
plain: step-in-16-bits
    # ready -> train(model, optimizer); [state.update(step=state["step"].half()) for state in optimizer.state.values()]
bf16: autocast-over-16-bit-weights # huggingface/transformers#33780
    loss = loss_of -> with torch.autocast("cpu", torch.bfloat16): loss = loss_of
plain: autocast-without-effect
    loss_of(model, step) -> loss_under_autocast_for_a_gpu(model, step)
plain: eps-is-zero # pytorch/pytorch#147437, chainer/chainer#6299
    Net() -> Net().half()
plain: state-was-rounded # pytorch/pytorch#43706
    # ready -> model, optimizer = loaded(*loaded(model, optimizer, torch.bfloat16), torch.float32)
plain: buffers-in-16-bits # huggingface/transformers#25681, EleutherAI/gpt-neox#1003
    # model -> model.register_buffer("inv_freq", torch.ones(4).bfloat16())
plain: values-not-finite
    # model -> model.body.weight.data.fill_(math.nan)
plain: values-not-finite
    lr=1e-3 -> lr=1e30
plain: values-not-finite
    # end -> loss_of(model, 0).mul(math.inf).backward()
""")
