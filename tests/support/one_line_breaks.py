"""Two healthy training loops, and lines of them as people break them, for tests/integrations/test_doctor_setups.py.

Each break replaces text in a loop and has the name of the finding, or of the error, that must tell. Where it is None,
the doctor says nothing: what it cannot see is listed like what it sees.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any, NamedTuple

import torch

import halfstep
from halfstep.integrations.doctor import doctor, watch

AMP = """
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
diagnoses.append(doctor(model, optimizer, scaler))
with watch(model, optimizer, scaler, schedule) as watched:
    diagnoses.append(watched)
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
"""

PLAIN = """
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
diagnoses.append(doctor(model, optimizer))
with watch(model, optimizer) as watched:
    diagnoses.append(watched)
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
diagnoses.append(doctor(model, optimizer))
"""


class Net(torch.nn.Module):
    """Two layers whose weights the configuration ties."""

    class Config:
        tie_word_embeddings = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = self.Config()
        self.embedding, self.body = torch.nn.Embedding(32, 16), torch.nn.Linear(16, 16)
        self.norm, self.head = torch.nn.LayerNorm(16), torch.nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.body(self.embedding(tokens)).relu()))
        return logits


def loss_of(model: torch.nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))
    return torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


class Break(NamedTuple):
    """A loop, the text in it, what it is replaced with, and the finding or error that tells."""

    loop: str
    text: str
    replacement: str
    name: str | None


BREAKS = [
    # Loss scaling, clipping and schedules.
    Break(AMP, "scaler.scale(loss).backward()", "scaler.scale(loss); loss.backward()", "loss-not-scaled"),
    Break(AMP, "scaler.unscale_(optimizer)", "pass", "clipped-scaled-gradients"),
    Break(AMP, "scaler.step(optimizer)", "optimizer.step()", "step-without-scaler"),
    Break(
        AMP,
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        scaler.step(optimizer)\n",
        "        scaler.step(optimizer)\n        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "clipping-without-effect",
    ),
    Break(
        AMP,
        "scaler.unscale_(optimizer)",
        "scaler.unscale_(optimizer); scaler.scale(loss_of(model, 9)).backward()",
        "accumulated-after-unscale",
    ),
    Break(AMP, "loss = loss_of(model, step)", "loss = loss_of(model, step) * 1e38 * 1e38", "every-step-skipped"),
    Break(
        AMP,
        "loss = loss_of(model, step)",
        "loss = loss_of(model, step) * (math.inf if step == 1 else 1.0)",
        "schedule-advanced-on-skip",
    ),
    Break(AMP, '"cpu", init_scale=1024.0', '"cpu", enabled=False', "fp16-without-scaler"),
    Break(AMP, "init_scale=1024.0", "init_scale=1e-6", "scale-collapsed"),
    Break(AMP, '"cpu", torch.float16', '"cpu", torch.bfloat16', "scaler-without-fp16"),
    Break(AMP, '"cpu", torch.float16', '"cuda", torch.float16', "scaler-without-fp16"),
    Break(AMP, "        optimizer.zero_grad()\n", "", "gradients-not-cleared"),
    Break(AMP, "scaler.scale(loss).backward()", "scaler.scale(loss)", "AssertionError"),  # by torch's scaler
    Break(AMP, "doctor(model, optimizer, scaler)", 'doctor(model, optimizer, "fp16")', "TypeError"),
    Break(AMP, "doctor(model, optimizer, scaler)", "doctor(model, optimizer, scaler.scale)", "TypeError"),
    Break(AMP, "doctor(model, optimizer, scaler)", "doctor(model, optimizer, torch.float16)", "TypeError"),
    # Gradients.
    Break(PLAIN, "        optimizer.zero_grad()\n", "", "gradients-not-cleared"),
    Break(PLAIN, "loss.backward()", "loss.backward(); optimizer.zero_grad()", "steps-without-gradients"),
    Break(PLAIN, "        loss.backward()\n", "", "steps-without-gradients"),
    Break(PLAIN, "optimizer.step()", "optimizer.step", None),
    Break(PLAIN, "torch.optim.AdamW(", "halfstep.AdamW(max_grad_norm=1.0, params=", "clipped-twice"),
    Break(PLAIN, "optimizer.zero_grad()", "model.head.weight.requires_grad_(False)", "frozen-with-gradient"),
    # Which parameters.
    Break(
        PLAIN,
        "diagnoses.append(doctor(model, optimizer))\nwith",
        "model = copy.deepcopy(model).to(torch.bfloat16)\ndiagnoses.append(doctor(model, optimizer))\nwith",
        "optimizer-of-other-parameters",
    ),
    Break(PLAIN, "AdamW(model.parameters()", "AdamW(Net().parameters()", "optimizer-of-other-parameters"),
    Break(
        PLAIN, "AdamW(model.parameters()", "AdamW(Net().half().float().parameters()", "optimizer-of-other-parameters"
    ),
    Break(PLAIN, "AdamW(model.parameters()", "AdamW(model.body.parameters()", "parameters-not-optimized"),
    Break(
        PLAIN,
        "model = Net()\n",
        "model = Net(); model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())\n",
        "tie-broken",
    ),
    Break(
        PLAIN,
        "model = Net()\n",
        "model = Net(); model.head.weight = torch.nn.Parameter(model.head.weight.data)\n",
        "tied-weights-twice",
    ),
    # Precision.
    Break(PLAIN, "Net()", "Net().to(torch.bfloat16)", "moments-in-16-bits"),
    Break(PLAIN, "diagnoses.append(doctor", "model.to(torch.bfloat16)\ndiagnoses.append(doctor", "moments-in-16-bits"),
    Break(PLAIN, "Net()", "Net().half()", "fp16-without-scaler"),
    Break(
        PLAIN,
        "torch.optim.AdamW(model.parameters(), lr=1e-3)",
        "halfstep.AdamW(model.to(torch.bfloat16).parameters(), lr=1e-6, master_weights=None, rounding='nearest')",
        "updates-lost",
    ),
    Break(PLAIN, "lr=1e-3", "lr=1e-12", None),
    Break(
        PLAIN,
        "diagnoses.append(doctor(model, optimizer))\nwith",
        "for _ in range(2):\n"
        "    loss_of(model, 0).backward()\n"
        "    optimizer.step()\n"
        "optimizer.zero_grad()\n"
        "for state in optimizer.state.values(): state['step'] = state['step'].half()\n"
        "diagnoses.append(doctor(model, optimizer))\nwith",
        "step-in-16-bits",
    ),
    # NaN and infinity.
    Break(PLAIN, "model = Net()\n", "model = Net(); model.body.weight.data.fill_(math.nan)\n", "values-not-finite"),
    Break(PLAIN, "model = Net()\n", "model = Net(); model.norm.bias.data[3] = -math.inf\n", "values-not-finite"),
    Break(PLAIN, "loss = loss_of(model, step)", "loss = loss_of(model, step) * math.nan", "values-not-finite"),
    Break(PLAIN, "lr=1e-3", "lr=1e30", "values-not-finite"),
    Break(
        PLAIN,
        "optimizer.zero_grad()\n",
        "optimizer.zero_grad()\noptimizer.state[model.norm.bias]['exp_avg_sq'][2] = math.nan\n",
        "values-not-finite",
    ),
    Break(
        PLAIN,
        "        optimizer.zero_grad()\n",
        "        optimizer.zero_grad()\nloss_of(model, 0).mul(math.inf).backward()\n",
        "values-not-finite",
    ),
]


def told_by(case: Break) -> list[str]:
    """The names of the findings and errors of a loop in which a line is broken."""
    assert case.loop.count(case.text) >= 1, case.text
    return told(case.loop.replace(case.text, case.replacement))


def told(loop: str) -> list[str]:
    """The names of the findings of a loop, and of the error that ends it."""
    diagnoses: list[Any] = []
    names = {"copy": copy, "math": math, "torch": torch, "halfstep": halfstep, "doctor": doctor, "watch": watch}
    names |= {"Net": Net, "loss_of": loss_of, "diagnoses": diagnoses}
    errors = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(loop, names)
        except Exception as error:
            errors.append(type(error).__name__)
    found = [getattr(diagnosis, "diagnosis", diagnosis).names for diagnosis in diagnoses]
    return [name for findings in found for name in findings] + errors
