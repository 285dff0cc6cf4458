"""The options of ``halfstep plan``, described once: its parser, the form of its page, and options as texts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from halfstep.cli.command_line import Parser, count, output_file, whole
from halfstep.numerics.planning import CARDS, CHECKPOINTING, MODELS, OPTIMIZERS, PRECISIONS, STRATEGIES
from halfstep.numerics.planning.layouts import MOMENTS
from halfstep.numerics.planning.plans import USUAL_BUCKET

COMPARISONS = ("layouts", "strategies")


@dataclass(frozen=True)
class Option:
    """An option of the command and, if it has a label, a field of the form."""

    name: str  # without "--"
    label: str
    help: str
    metavar: str | None = None
    type: Callable[[str], Any] = str  # bool for an option without a value
    default: Any = None
    const: Any = None  # the value of the option without a value
    also: str = ""  # another name, that of optimizers and other commands, which is shown first
    choices: Sequence[str] = ()  # in the form, where they are always the same

    @property
    def dest(self) -> str:
        return self.name.replace("-", "_")

    @property
    def flag(self) -> bool:
        """Whether it never has a value."""
        return self.type is bool

    def add(self, to: Callable[..., Any]) -> None:
        """Add it to a parser or group of argparse, whose `add_argument` is `to`."""
        names = [f"--{name}" for name in (self.also, self.name) if name]
        how: dict[str, Any] = {"type": self.type, "metavar": self.metavar, "default": self.default}
        how |= {} if self.const is None else {"nargs": "?", "const": self.const}
        to(*names, dest=self.dest, help=self.help, **({"action": "store_true"} if self.flag else how))

    def text(self, value: Any) -> str:
        """A value as it is typed; "" for True, None and False."""
        return "" if value is None or isinstance(value, bool) else str(value)


_name = partial(Option, metavar="NAME")
_number = partial(Option, metavar="N", type=count())
_flag = partial(Option, type=bool, default=False)

# In the order of the form. Options without a label are not in the form.
OPTIONS: dict[str, tuple[Option, ...]] = {
    "Model": (
        _name("model", "Model", "a Hugging Face repository such as Qwen/Qwen3-8B, the path of a config.json, or a "
              f"published shape: {', '.join(MODELS)}"),
        Option("params", "Parameters", "number of parameters, such as 7e9, 7B or 350M", "N",
               count(", such as 7e9, 7B or 350M")),
        _flag("eager-attention", "Eager attention", "attention that stores its scores, unlike torch's SDPA"),
    ),
    "GPUs": (
        _number("gpus", "GPUs", "number of GPUs (default: 1)", default=1),
        _name("card", "Card", f"{', '.join(CARDS)}, or an amount of memory, such as 24GiB; shows "
              "whether the model fits and, if not, the smallest changes that make it fit"),
        _name("strategy", "Strategy", f"{', '.join(STRATEGIES)} (default: ddp; on one GPU, single)"),
        _number("shard", "GPUs of a group", "GPUs per hsdp group"),
        _flag("offload", "Offload to host", "offload to the host what the strategy can offload"),
        _flag("keep-weights", "Weights stay on the GPU", "keep weights on the GPU with --offload under FSDP2"),
        _flag("bucket-view", "Gradients are bucket views", "DDP with gradient_as_bucket_view=True"),
    ),
    "Layout": (
        _name("optimizer", "Optimizer", f"{', '.join(OPTIMIZERS)} (default: halfstep)", default="halfstep"),
        _name("precision", "Precision", f"{', '.join(PRECISIONS)} (default: bf16)", default="bf16", choices=PRECISIONS),
        _name("moments", "Moments", f"format of halfstep's moments: {', '.join(MOMENTS)}", also="state-dtype",
              choices=tuple(MOMENTS)),
        Option("lora", "LoRA rank", "train adapters of rank R, and freeze the weights", "R", count()),
    ),
    "Step": (
        _number("batch", "Batch per GPU", "sequences per GPU (default: 1)"),
        _number("seq", "Sequence", "sequence length"),
        Option("checkpointing", "Checkpointing", f"{', '.join(CHECKPOINTING)} (default: none; no NAME: full)", "NAME",
               default="none", const="full", choices=CHECKPOINTING),
        _number("loss-chunks", "Chunks of the loss", "chunks in which the loss computes the logits (default: 1)",
                default=1),
        Option("step-in-backward", "Step in backward (bytes)", "use and free gradients in buckets of BYTES in the "
               "backward pass (without BYTES: 25 MiB)", "BYTES", count(), const=USUAL_BUCKET),
    ),
    "Output": (
        Option("compare", "", f"plan all {' or all '.join(COMPARISONS)}", "WHAT"),
        Option("page", "", "serve the planner to the browser of this machine, with these settings, until Ctrl-C; with "
               "FILE, write this answer to FILE instead", "FILE", output_file, const=True),
        _flag("no-open", "", "do not open the page in the browser"),
        Option("port", "", "port of --page (default: any free one)", "N", whole(0, 65535), 0),
    ),
}  # fmt: skip
# Those of a plan, by all of their names: what a state of the page can have.
_SHOWN = [option for options in OPTIONS.values() for option in options if option.label or option.name == "compare"]
OF_A_PLAN = {name: option for option in _SHOWN for name in (option.name, option.also) if name}


def settings(options: argparse.Namespace) -> dict[str, str]:
    """The options of a command line that are not the defaults, as a state of the page."""
    values = {option: getattr(options, option.dest) for option in OF_A_PLAN.values()}
    return {option.name: option.text(value) for option, value in values.items() if value != option.default}


@cache
def parser() -> Parser:
    result = Parser(
        "plan",
        usage="halfstep plan MODEL [OPTIONS]",
        description="Plan a training run: memory by part, communication and FLOPs per GPU. MODEL is --params or "
        "--model; activations and gathered units are counted only with --model.",
    )
    for title, options in OPTIONS.items():
        group = result.add_argument_group(title)
        for option in options:
            option.add(group.add_argument)
    return result
