"""The options of ``halfstep plan``, described once: its parser, the form of its page, and options as texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import cache, partial
from typing import Any

from halfstep.cli.command_line import Parser, output_file, picture
from halfstep.cli.numbers import above_zero, count, counts, share_or_bytes, whole
from halfstep.numerics.planning import CARDS, CHECKPOINTING, MODELS, OPTIMIZERS, PRECISIONS, STRATEGIES
from halfstep.numerics.planning.layouts import GRADIENTS
from halfstep.numerics.planning.models import NORMS, QK_NORMS

MASTERS = ("auto", "full", "split", "split24", "none")  # of halfstep.AdamW
FITS = ("none", "params", "layers", "batch")
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
    unset: str = ""  # the text of no choice in the form
    field: str = ""  # the field of a Transformer that an option without a value sets, and to what
    sets: Any = None
    folded: bool = False  # in the form

    @property
    def dest(self) -> str:
        """The name of its value among the parsed ones."""
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
        if value is None or isinstance(value, bool):
            return ""
        if isinstance(value, Fraction):  # a share of a card, whose decimals end
            return f"{Decimal(100 * value.numerator) / Decimal(value.denominator):f}%"
        if self.type is share_or_bytes:
            return f"{Decimal(value).scaleb(-6):f}MB"
        return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


_name, _choice, _format = (partial(Option, metavar=text) for text in ("NAME", "KIND", "FORMAT"))
_number = partial(Option, metavar="N", type=count())
_flag = partial(Option, type=bool, default=False)
_shape = partial(_flag, folded=True)  # one that changes the shape of a model

# In the order of the form. Options without a label are not in the form.
OPTIONS: dict[str, tuple[Option, ...]] = {
    "Model": (
        _name("model", "Model", "a repository of Hugging Face such as Qwen/Qwen3-8B, the path of its config.json, or a "
              f"published shape: {', '.join(MODELS)}"),
        Option("params", "Parameters", "number of parameters, such as 7e9, 7B or 350M", "N",
               count(", such as 7e9, 7B or 350M")),
        _number("layers", "Layers", "number of blocks"),
        _number("hidden", "Width", "width"),
        _number("heads", "Heads", "attention heads"),
        _number("vocab", "Vocabulary", "rows of embedding and head"),
        _number("ffn", "Width of the MLP", "width of the MLP (default: 4 times the width)", folded=True),
        _number("kv-heads", "Heads of keys", "heads of keys and values (default: --heads)", folded=True),
        _number("head-dim", "Width of a head", "width of one head (default: --hidden / --heads)", folded=True),
        _choice("norm", "Norm", "layer (default) or rms", choices=NORMS, unset="default", folded=True),
        _choice("qk-norm", "Norm of queries and keys", "norms of queries and keys: head or width (default: none)",
              choices=QK_NORMS[1:], unset="none", folded=True),
        _number("block-norms", "Norms of a block", "norms of a block (default: 2)", folded=True),
        _number("experts", "Experts", "MLPs of a mixture of experts, with a router", folded=True),
        _number("active-experts", "Active experts", "experts that compute each token; with --experts", folded=True),
        _shape("gated", "Gated MLP", "an MLP of three matrices, as in Llama", field="gated", sets=True),
        _shape("no-biases", "No biases", "linear layers without biases", field="biases", sets=False),
        _shape("qkv-biases", "Biases of queries, keys, values", "biases of queries, keys and values only",
               field="biases", sets="qkv"),
        _shape("no-final-norm", "No final norm", "no norm before the head (post-norm models)", field="final_norm",
               sets=False),
        _shape("no-positions", "No learned positions", "no learned positions", field="positions", sets=False),
        _shape("tied", "Tied head", "the head uses the matrix of the embedding", field="tied", sets=True),
        _shape("no-dropout", "No dropout", "no dropout, and no dropout masks", field="dropout", sets=False),
        _shape("eager-attention", "Eager attention", "attention that stores its scores, unlike torch's SDPA",
               field="flash", sets=False),
    ),
    "GPUs": (
        Option("gpus", "GPUs", "number of GPUs (default: 1); with --compare strategies also several numbers, such as "
               "8,64,1024", "N", counts, (1,)),
        _name("card", "Card", f"{', '.join(CARDS)}, or its memory, such as 24GiB; tells whether it fits and, if not, "
              "the smallest changes with which it does"),
        _name("strategy", "Strategy", f"{', '.join(STRATEGIES)} (default: ddp, on one GPU single); with --compare "
              "strategies those to compare, such as ddp,fsdp (default: all)"),
        _number("shard", "GPUs of a group", "GPUs of one group of hsdp"),
        _flag("offload", "Offload to host", "offload to the host what the strategy can offload"),
        _number("tensor-parallel", "Tensor parallel", "GPUs that share a layer", default=1, also="tp", folded=True),
        _flag("sequence-parallel", "Sequence parallel", "they also shard norms and dropouts", folded=True),
        _format("compress", "Format sent", "send gradients in bf16, fp16 or fp32", choices=GRADIENTS,
                unset="as gradients", folded=True),
        _flag("bucket-view", "Gradients are bucket views", "DDP with gradient_as_bucket_view=True", folded=True),
        Option("reserve", "Reserve", "memory reserved for what is not counted, such as 10%% or 4GiB (default: 10%%)",
               "SIZE", share_or_bytes, Fraction(1, 10), folded=True),
        Option("rank", "Rank planned", "rank to plan (default: the one that holds most)", "R", whole(0), folded=True),
    ),
    "Layout": (
        _name("optimizer", "Optimizer", f"{', '.join(OPTIMIZERS)} (default: halfstep)", default="halfstep"),
        _name("precision", "Precision", f"{', '.join(PRECISIONS)} (default: bf16)", default="bf16", choices=PRECISIONS),
        _format("moments", "Moments", "format of the moments (ours: fp32, bf16, 8bit), or two, as fp8,fp16",
                also="state-dtype"),
        Option("lora", "LoRA rank", "train adapters of R rows beside frozen weights", "R", count()),
        _format("gradients", "Gradients", "format of .grad", also="grad-dtype", choices=GRADIENTS, unset="default",
                folded=True),
        _format("accumulator", "Accumulator", "add micro-batches to a second gradient of this format",
                choices=GRADIENTS, unset="none", folded=True),
        _format("master", "Master", f"of halfstep: {', '.join(MASTERS)}; of te-master the format of the master",
                also="master-weights", folded=True),
        _flag("amsgrad", "AMSGrad", "also store max_exp_avg_sq", folded=True),
    ),
    "Step": (
        _number("batch", "Batch per GPU", "sequences of one micro-batch on one GPU (default: 1)"),
        _number("seq", "Sequence", "length of a sequence"),
        _choice("checkpointing", "Checkpointing", f"{', '.join(CHECKPOINTING)} (default: none; alone: full)",
              default="none", const="full", choices=CHECKPOINTING),
        _number("accumulate", "Micro-batches", "micro-batches in a step (default: 1)", default=1, folded=True),
        _number("loss-chunks", "Chunks of the loss", "parts in which head and loss compute the logits (default: 1)",
                default=1, folded=True),
        Option("step-in-backward", "Step in backward (bytes)", "step and free gradients in buckets of BYTES inside the "
               "backward (25 MiB if no BYTES are given)", "BYTES", count(), const=25 * 2**20, folded=True),
        Option("step-ms", "Measured step (ms)", "measured time of a step, for MFU and HFU", "MS", above_zero,
               folded=True),
    ),
    "Output": (
        Option("fit", "", f"find the largest that fits the card: {', '.join(FITS)}", "WHAT", default="none"),
        Option("compare", "", f"plan all {' or all '.join(COMPARISONS)}", "WHAT"),
        Option("out", "", "draw stacked bars: .png, .svg or .pdf", "FILE", picture),
        Option("page", "", "open the planner in the browser of this machine, with these settings, until Ctrl-C; with "
               "FILE, write this answer to it instead", "FILE", output_file, const=True),
        _flag("no-open", "", "do not open the page in the browser"),
        Option("port", "", "port of --page (default: any free one)", "N", whole(0, 65535), 0),
    ),
}  # fmt: skip
# Those of a plan, by all of their names: what a state of the page can have.
OF_A_PLAN = {
    name: option
    for options in OPTIONS.values()
    for option in options
    if option.label or option.name in ("fit", "compare")
    for name in (option.name, option.also)
    if name
}


@cache
def parser() -> Parser:
    """The parser of the command line."""
    result = Parser(
        "plan",
        usage="halfstep plan MODEL [OPTIONS]",
        description="Plan a training: bytes by part, messages per step and FLOPs of each GPU. MODEL is --params, "
        "--model or the shape of a transformer; activations and gathered units are counted only for a shape.",
    )
    for title, options in OPTIONS.items():
        group = result.add_argument_group(title)
        for option in options:
            option.add(group.add_argument)
    return result
