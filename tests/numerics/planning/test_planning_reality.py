"""Planned bytes equal what torch allocates: weights, gradients, states, casts, activations."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from counted_bytes import Outputs, Peak, counted, storage_bytes
from gpt import DTYPES, GPT, SIZES, Precision
from torch import nn

import halfstep
from halfstep.numerics.planning import Plan, Transformer, plan, unit, work
from halfstep.numerics.planning.layouts import LAYOUTS

pytestmark = pytest.mark.sample(3)

CPU = torch.device("cpu")


class Tied(nn.Module):
    """Two blocks of `nn.TransformerEncoderLayer` between an embedding and a head with the same matrix."""

    def __init__(self, vocab: int = 33, hidden: int = 12, layers: int = 2, heads: int = 3, seq: int = 9) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.embed_positions = nn.Embedding(seq, hidden)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, heads, 4 * hidden, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.embed_positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def tied(precision: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    return Tied().to(DTYPES[precision]), lambda m: m(torch.arange(18).view(2, 9)).float().square().mean()


def rows(precision: str) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Rows of one block, of whole blocks and of a short last one; matrices of as many elements as have codes, or less.

    Most of `tied` is too small for codes.
    """
    dtype = DTYPES[precision]
    shapes = [(64, 64), (63, 65), (16, 256), (16, 3, 100), (4096,), (2, 2048), (1, 4096), (4096, 1), (0, 9)]
    model = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)
    return model, lambda m: sum((p.float().sum() for p in m.parameters()), torch.zeros(()))


BUILDERS = {"tied": tied, "rows": rows}
BF16 = torch.bfloat16


# How each row of halfstep and torch is made.
MASTERS: dict[str, dict[str, Any]] = {
    "-split": {"master_weights": "split"},
    "-split24": {"master_weights": "split24"},
    "-stochastic": {"master_weights": None, "rounding": "stochastic"},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "-full": {"master_weights": "full"},
    **MASTERS,
    **{f"{name}-bf16": {**options, "state_dtype": BF16} for name, options in MASTERS.items()},
    **{f"{name}-8bit": {**options, "state_dtype": "8bit"} for name, options in MASTERS.items()},
}
MADE: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **{f"halfstep{name}": (halfstep.AdamW, options) for name, options in OPTIONS.items()},
    **{f"halfstep-muon{name}": (halfstep.Muon, options) for name, options in OPTIONS.items()},
    "halfstep-sgd": (halfstep.SGD, {"momentum": 0.9}),
    "torch": (torch.optim.AdamW, {"foreach": True}),
    "torch-fused": (torch.optim.AdamW, {"fused": True}),
}


def optimizer_of(model: nn.Module, name: str, **more: Any) -> Any:
    kind, options = MADE[name]
    parameters = halfstep.muon_groups(model) if kind is halfstep.Muon else model.parameters()
    return kind(parameters, **{"lr": 1e-3, **options, **more})  # type: ignore[arg-type]


def allocated(model: nn.Module, optimizer: Any) -> dict[str, int]:
    scratch = optimizer._plans.scratch if isinstance(optimizer, halfstep.Muon) else {}
    sizes = {"scratch": storage_bytes(scratch)} if scratch else {}
    return counted(model.parameters(), optimizer) | sizes


def planned(made: Plan) -> dict[str, int]:
    return {part.name: part.bytes for part in made.parts if part.phase == "always"}


def plan_of(model: nn.Module, **options: Any) -> Plan:
    return plan(units=[unit("all", {name: p.shape for name, p in model.named_parameters()})], **options)


def test_every_row_of_ours_and_of_torch_is_made_here() -> None:
    """Another row must not go unchecked."""
    listed = {row.optimizer for row in LAYOUTS if row.optimizer.startswith(("halfstep", "torch"))} - {"torchao-8bit"}
    assert listed == set(MADE)


ROWS = [row for row in LAYOUTS if row.optimizer in MADE and not row.autocast]
CASES = [(row.optimizer, row.precision, None, builder) for row in ROWS for builder in BUILDERS]
NAMES = ("halfstep", "halfstep-sgd", "halfstep-muon")
CASES += itertools.product(NAMES, ("fp32", "bf16", "fp16"), ("bf16", "8bit"), ("rows",))


@pytest.mark.parametrize(("name", "precision", "moments", "builder"), CASES)
def test_weights_gradients_and_states(name: str, precision: str, moments: str | None, builder: str) -> None:
    model, loss = BUILDERS[builder](precision)
    options = {} if moments is None else {"state_dtype": BF16 if moments == "bf16" else moments}
    optimizer = optimizer_of(model, name, **options)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    found = allocated(model, optimizer)
    # foreach's step counts lie on the CPU whatever the device, so they are not planned: four bytes each.
    if name == "torch":
        assert found.pop("scalars") == 4 * len(list(model.parameters()))
    made = plan_of(model, precision=precision, optimizer=name, moments=moments)
    assert found == planned(made)
    if made.layout.ours:
        states = {key: size for key, size in found.items() if key not in ("weights", "gradients", "scratch")}
        assert storage_bytes(optimizer.state_dict()["state"]) == sum(states.values())
        # The step reads the gradient, and reads and writes all else but the weight of a full master, which it only
        # writes. Muon writes matrices in bf16, and reads them.
        other, matrices = sum(states.values()) - states.get("scalars", 0), 0
        if name.startswith("halfstep-muon"):
            matrices = sum(p.numel() for _, p in halfstep.muon_groups(model)[0]["params"])
        accesses = 1 if made.layout.state_layout.master == "full" else 2
        assert made.step_traffic == found["gradients"] + accesses * found["weights"] + 2 * other + 4 * matrices


@pytest.mark.parametrize("shape", [(64, 96), (96, 64), (2, 64, 96), (64, 2, 6, 8)])
def test_copies_of_a_matrix_while_it_is_orthogonalized(shape: tuple[int, ...]) -> None:
    model = nn.ParameterList([torch.randn(shape).bfloat16()])
    optimizer = optimizer_of(model, "halfstep-muon")
    for _ in range(2):
        model[0].grad = torch.randn(shape).bfloat16()
        with Peak() as peak:
            optimizer.step()
    assert 0 <= peak.peak - plan_of(model, optimizer="halfstep-muon").totals.step < 1024


def test_foreach_allocates_a_square_root_and_fused_nothing() -> None:
    for name in ("torch", "torch-fused"):
        model, loss = tied("fp32")
        optimizer = optimizer_of(model, name)
        loss(model).backward()
        optimizer.step()
        with Outputs() as outputs:
            optimizer.step()
        made = plan_of(model, precision="fp32", optimizer=name)
        # Beside it, scalars of the step counts.
        aside = sum(size for _, _, size in outputs.made if size > 8)
        assert aside == made.totals.step
        assert (aside > 0) == (name == "torch")


# -------------------------------------------------------------------------------------------------------------- shapes


def test_shapes_of_the_demos_gpt() -> None:
    for name, shape in SIZES.items():
        if name in ("nano", "tiny"):
            model = GPT(shape, Precision.on("fp32", CPU), seed=0)
            found = sorted(tuple(p.shape) for p in model.parameters())
            assert found == sorted(tensor.shape for one in shape.units() for tensor in one.tensors * one.count)
    assert Transformer(4, 128, 4, 256, 64, biases=False).parameters == 862_464  # what docs/training.md says


# --------------------------------------------------------------------------------------------------------------- casts


def test_autocast_casts_matrices_and_biases_once() -> None:
    model = Tied()
    shape = Transformer(2, 12, 3, 33, 9, tied=True)
    tokens = torch.arange(18).view(2, 9)
    with Outputs() as outputs, torch.autocast("cpu", torch.bfloat16):
        model(tokens)
        model(tokens)  # the second time from the cache
    parameters = {id(p) for p in model.parameters()}
    cast = sum(size for name, args, size in outputs.made if name == "_to_copy" and id(args[0]) in parameters)
    assert cast == plan(model=shape, precision="amp-bf16", optimizer="torch").part("cast weights").bytes


# --------------------------------------------------------------------------------------------------------- activations


class PaperLayer(nn.Module):
    """A block as Korthikanti et al. (2022), figure 2, draw it, every intermediate a tensor of its own."""

    def __init__(self, shape: Transformer) -> None:
        super().__init__()
        self.shape = shape
        h, kv, f = shape.hidden, shape.kv_width, shape.mlp
        self.norm1, self.norm2 = nn.LayerNorm(h), nn.LayerNorm(h)
        self.q, self.k, self.v = nn.Linear(h, h), nn.Linear(h, kv), nn.Linear(h, kv)
        self.out, self.up, self.down = nn.Linear(h, h), nn.Linear(h, f), nn.Linear(f, h)
        self.gate = nn.Linear(h, f)

    def dropout(self, x: torch.Tensor) -> torch.Tensor:
        # Its mask is a byte an element, as on a GPU; F.dropout on a CPU keeps one in the input's format.
        return torch.native_dropout(x, 0.1, True)[0] if self.shape.dropout else x

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        a = self.shape.heads
        q, k, v = (part(x).view(b, s, -1, h // a).transpose(1, 2) for part in (self.q, self.k, self.v))
        if self.shape.flash:
            grouped = self.shape.kv != a
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        else:
            scores = torch.softmax(q @ k.transpose(-2, -1) * (h // a) ** -0.5, dim=-1)
            mixed = self.dropout(scores) @ v
        return self.out(mixed.transpose(1, 2).reshape(b, s, h))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) if self.shape.gated else F.gelu(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


def saved_bytes(run: Callable[[], torch.Tensor], parameters: list[nn.Parameter]) -> int:
    """Bytes of all storages that autograd keeps for backward, the parameters' own left out."""
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = run()
    own = {p.untyped_storage()._cdata for p in parameters}
    found = storage_bytes([t for t in saved if t.untyped_storage()._cdata not in own])
    assert result.requires_grad
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"flash": False},
        {"dropout": False, "flash": False},
        {"dropout": False, "flash": False, "gated": True, "ffn": 44},
        {"dropout": False},
        {"dropout": False, "gated": True, "ffn": 44, "kv_heads": 2},
    ],
    ids=str,
)
def test_a_block_saves_what_the_paper_counts(options: dict[str, Any], dtype: torch.dtype) -> None:
    """The one difference: LayerNorm keeps mean and 1/σ of each token, which the paper leaves out as s·b, not s·b·h."""
    b, s = 3, 20
    shape = Transformer(1, 16, 4, 32, s, **options)
    layer = PaperLayer(shape).to(dtype)
    x = torch.randn(b, s, 16, dtype=dtype, requires_grad=True)
    found = saved_bytes(lambda: layer(x), list(layer.parameters()))
    width = dtype.itemsize
    norms = found - work.layer_activations(shape, b, s, width=width)
    assert norms == 2 * 2 * b * s * norm_statistics(dtype)


def norm_statistics(dtype: torch.dtype) -> int:
    """Bytes of one statistic of LayerNorm, in the format torch's CPU kernel keeps for this input."""
    return torch.native_layer_norm(torch.ones(2, 3, dtype=dtype), [3], None, None, 1e-5)[1].element_size()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_demos_gpt_saves_what_is_planned(precision: str) -> None:
    """Blocks, last norm, head and loss of a whole model; what the plan leaves out is counted here one by one."""
    shape, b = SIZES["nano"], 3
    s = shape.seq
    model = GPT(shape, Precision(precision, DTYPES[precision], emulated=False), seed=0).to(DTYPES[precision])
    tokens = torch.arange(b * s).view(b, s) % 256
    found = saved_bytes(lambda: model(tokens, tokens), list(model.parameters()))
    made = plan(model=shape, batch=b, precision=precision)
    log_softmax = made.part("logits").bytes  # in fp32, as the logits were
    planned_for = made.part("activations").bytes + made.part("outer activations").bytes + log_softmax
    norms = (2 * shape.layers + 1) * 2 * b * s * norm_statistics(DTYPES[precision])
    indices = 8 * b * s  # the tokens, which are also the targets
    weight_of_the_mean = 4
    assert found == planned_for + norms + indices + weight_of_the_mean


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_and_loss_are_allocated_at_the_end_of_a_forward(dtype: torch.dtype) -> None:
    shape = Transformer(1, 16, 2, 500, 8)
    made = plan(model=shape, batch=4, precision={torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype])
    x, head = torch.zeros(32, 16, dtype=dtype), torch.zeros(500, 16, dtype=dtype)
    targets = torch.zeros(32, dtype=torch.int64)
    with Outputs() as outputs:
        F.cross_entropy(F.linear(x, head).float(), targets)
    assert sum(size for _, _, size in outputs.made if size > 8) == made.part("logits").bytes + made.part("loss").bytes


def test_what_checkpointing_keeps() -> None:
    from torch.utils.checkpoint import checkpoint

    b, s, layers = 2, 12, 5
    shape = Transformer(layers, 16, 4, 32, s, dropout=False)
    blocks = nn.ModuleList(PaperLayer(shape) for _ in range(layers)).bfloat16()
    x = torch.randn(b, s, 16, dtype=torch.bfloat16, requires_grad=True)

    def run() -> torch.Tensor:
        y = x
        for block in blocks:
            y = checkpoint(block, y, use_reentrant=False)
        return y

    # The inputs are held by the checkpoints' frames, not saved by operators: they are what backward starts from.
    inputs: list[torch.Tensor] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    with Outputs():
        run()
    found = work.activations(shape, b, s, checkpointing="full")
    assert storage_bytes(inputs) == found.saved
    alone = saved_bytes(lambda: blocks[0](x), list(blocks.parameters()))
    assert alone == found.recomputed + 4 * b * s * norm_statistics(torch.bfloat16)


# ---------------------------------------------------------------------------------------------------------- flashoptim
