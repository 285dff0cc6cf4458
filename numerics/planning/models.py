"""The parameters of a model, tensor by tensor, and a parametric transformer."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from halfstep.numerics.messages import divides, one_of, whole
from halfstep.numerics.owners import is_matrix

NORMS, QK_NORMS = ("layer", "rms"), ("", "head", "width")
_SIZES = ("layers", "hidden", "heads", "vocab", "seq", "ffn", "kv_heads", "head_dim", "block_norms")


@dataclass(frozen=True)
class Tensor:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    kind: str = "matrix"  # or "bias", "norm", "embedding"; "all" for parameters whose shapes are unknown

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def for_muon(self) -> bool:
        """Whether `halfstep.muon_groups` assigns it to Muon."""
        return self.kind == "all" or (self.kind != "embedding" and is_matrix(self.name, self.shape))

    @property
    def cast(self) -> bool:
        """Whether autocast makes a 16-bit copy of it, as of all operands of matrix products."""
        return self.kind in ("matrix", "bias", "all")


@dataclass(frozen=True)
class Unit:
    """Parameters that FSDP gathers together: those of a block, or of the root, which has all that are in no block."""

    name: str
    tensors: tuple[Tensor, ...]  # in the order of the model
    count: int = 1  # number of such units in the model
    root: bool = False  # FSDP2 keeps the root gathered between forward and backward

    @property
    def elements(self) -> int:
        """Number of parameters of one such unit."""
        return sum(tensor.elements for tensor in self.tensors)

    def of_muon(self, for_muon: bool) -> Unit:
        """The unit with only the tensors that Muon steps, or only the others."""
        return replace(self, tensors=tuple(tensor for tensor in self.tensors if tensor.for_muon == for_muon))


def unit(
    name: str, shapes: Iterable[Iterable[int]] | Mapping[str, Iterable[int]], count: int = 1, root: bool = False
) -> Unit:
    """A `Unit` from the shapes of its parameters, or from their names and shapes.

    Examples:
        >>> from halfstep.numerics.planning import plan, unit
        >>> model = torch.nn.Linear(3, 5)
        >>> plan(units=[unit("all", [p.shape for p in model.parameters()])]).parameters
        20
    """
    named = shapes if isinstance(shapes, Mapping) else {f"{name}.{i}": shape for i, shape in enumerate(shapes)}
    tensors = tuple(Tensor(key, tuple(int(size) for size in shape)) for key, shape in named.items())
    return Unit(name, tensors, whole("count", count), root)


def tensors_of(units: Iterable[Unit]) -> Iterator[tuple[Tensor, int]]:
    """Every tensor with the number of times that it occurs in the model."""
    return ((tensor, unit.count) for unit in units for tensor in unit.tensors)


def each_tensor_of(units: Iterable[Unit]) -> Iterator[Tensor]:
    """Every tensor, repeated as it occurs in the model, and in that order."""
    return (tensor for unit in units for _ in range(unit.count) for tensor in unit.tensors)


def parameters_of(units: Iterable[Unit]) -> int:
    """The number of parameters in all units."""
    return sum(unit.count * unit.elements for unit in units)


@dataclass(frozen=True)
class Transformer:
    """A decoder or encoder of identical blocks: attention and MLP, each with a norm and a residual connection.

    The defaults are those of GPT-2: learned positions, LayerNorm before attention, MLP and head, and biases in all
    linear layers except the head.

    Args:
        layers: number of blocks.
        hidden: model width h.
        heads: number of attention heads a; divides `hidden` unless `head_dim` is set.
        vocab: vocabulary size V, the rows of the embedding and of the head.
        seq: maximum sequence length s, the rows of learned positions.
        ffn: width of the MLP. Default: 4·h.
        kv_heads: heads of keys and values (grouped-query attention); divides `heads`. Default: `heads`.
        head_dim: width of one head. Default: `hidden` / `heads`.
        gated: whether the MLP has three matrices, down(act(gate(x)) · up(x)), instead of two.
        biases: whether linear layers have biases: True, False, or ``"qkv"`` for queries, keys and values only. The head
            never has one.
        norm: ``"layer"`` with weight and bias, or ``"rms"`` with a weight only.
        block_norms: number of norms in a block.
        qk_norm: norms of queries and keys: ``""`` for none, ``"head"`` for one of `head_dim` weights that all heads
            share, or ``"width"`` for one over all heads.
        final_norm: whether there is a norm before the head, as in pre-norm models but not in the original transformer.
        positions: whether positions are learned; rotary positions have no parameters.
        tied: whether the head shares the matrix of the embedding.
        dropout: whether there is dropout, on attention weights, on the outputs of attention and MLP, and on the
            embedding.
        flash: whether attention saves one fp32 number per row of scores, as flash attention and torch's
            scaled_dot_product_attention do, instead of the scores.
        experts: number of experts (MLPs) of a mixture-of-experts block, which also has a router; 0 for a dense MLP.
        active_experts: number of experts per token.

    Raises:
        ValueError: a size is not an integer of at least 1, or does not divide another size as required.

    Examples:
        >>> from halfstep.numerics.planning import Transformer
        >>> Transformer(layers=12, hidden=768, heads=12, vocab=50257, seq=1024, tied=True).parameters
        124439808
    """

    layers: int
    hidden: int
    heads: int
    vocab: int
    seq: int
    ffn: int | None = None
    kv_heads: int | None = None
    gated: bool = False
    biases: bool | str = True
    norm: str = "layer"
    final_norm: bool = True
    positions: bool = True
    tied: bool = False
    dropout: bool = True
    flash: bool = True
    head_dim: int | None = None
    block_norms: int = 2
    qk_norm: str = ""
    experts: int = 0
    active_experts: int = 0

    def __post_init__(self) -> None:
        smallest = {**dict.fromkeys(_SIZES, 1), "experts": 0, "active_experts": 1 if self.experts else 0}
        for name, least_size in smallest.items():
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole(name, getattr(self, name), least_size))
        if self.active_experts > self.experts:
            raise ValueError(
                f"Expected active_experts to be at most experts, {self.experts}, but got {self.active_experts}"
            )
        one_of("norm", self.norm, NORMS)
        one_of("qk_norm", self.qk_norm, QK_NORMS)
        if self.head_dim is None:
            divides("heads", self.heads, "hidden", self.hidden, "every head needs the same width")
        divides("kv_heads", self.kv, "heads", self.heads, "every key needs the same number of queries")

    @property
    def kv(self) -> int:
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads if self.head_dim is None else self.head_dim

    @property
    def kv_width(self) -> int:
        """Total width of the keys; also that of the values."""
        return self.head_width * self.kv

    @property
    def query_width(self) -> int:
        """Total width of the queries; also that of the attention output before its projection."""
        return self.head_width * self.heads

    @property
    def mlp(self) -> int:
        return 4 * self.hidden if self.ffn is None else self.ffn

    @property
    def matrices(self) -> int:
        """Number of matrices of one MLP."""
        return 3 if self.gated else 2

    def units(self) -> tuple[Unit, ...]:
        """The block and the root."""
        h, queries, qkv, f = self.hidden, self.query_width, self.query_width + 2 * self.kv_width, self.mlp

        def linear(name: str, rows: int, columns: int) -> list[Tensor]:
            has_bias = self.biases is True or (self.biases == "qkv" and name == "attention.qkv")
            bias = [Tensor(f"{name}.bias", (rows,), "bias")] if has_bias else []
            return [Tensor(f"{name}.weight", (rows, columns)), *bias]

        def norm(name: str) -> list[Tensor]:
            return [Tensor(f"{name}.{part}", (h,), "norm") for part in ("weight", "bias")[: 1 + (self.norm == "layer")]]

        block = [*norm("norm1"), *linear("attention.qkv", qkv, h), *linear("attention.out", h, queries)]
        widths = {"": (), "width": (queries, self.kv_width), "head": (self.head_width,) * 2}[self.qk_norm]
        block += [Tensor(f"attention.{name}_norm", (width,), "norm") for name, width in zip("qk", widths, strict=False)]
        for number in range(2, self.block_norms + 1):
            block += norm(f"norm{number}")
        if self.experts:
            up = (self.experts, (self.matrices - 1) * f, h)
            block += [Tensor("router", (self.experts, h)), Tensor("experts.up", up)]
            block.append(Tensor("experts.down", (self.experts, h, f)))
        else:
            for name in ("mlp.up", "mlp.gate")[: self.matrices - 1][::-1]:
                block += linear(name, f, h)
            block += linear("mlp.down", h, f)
        # A tied embedding is also the head, and therefore an operand of a matrix product.
        root = [Tensor("embed", (self.vocab, h), "matrix" if self.tied else "embedding")]
        root += [Tensor("positions", (self.seq, h), "embedding")] if self.positions else []
        root += norm("norm") if self.final_norm else []
        root += [] if self.tied else [Tensor("head", (self.vocab, h))]
        return Unit("block", tuple(block), self.layers), Unit("root", tuple(root), root=True)

    def adapters(self, rank: int) -> tuple[Unit, ...]:
        """LoRA adapters of this rank (Hu et al., 2021): two per matrix of the blocks, except router and experts."""
        block = self.units()[0]
        matrices = [tensor for tensor in block.tensors if len(tensor.shape) == 2 and tensor.name != "router"]
        tensors = [Tensor(f"{tensor.name}_a", (rank, tensor.shape[1])) for tensor in matrices]
        tensors += [Tensor(f"{tensor.name}_b", (tensor.shape[0], rank)) for tensor in matrices]
        return (replace(block, tensors=tuple(tensors)),)

    def units_with_adapters(self, rank: int) -> tuple[Unit, ...]:
        """All units, with the LoRA adapters in the units of their matrices."""
        block, root = self.units()
        return replace(block, tensors=block.tensors + self.adapters(rank)[0].tensors), root

    @property
    def parameters(self) -> int:
        """The number of parameters. A tied embedding counts once."""
        return parameters_of(self.units())

    @property
    def active_parameters(self) -> int:
        """The number of parameters used per token: all but those of experts that the router does not select."""
        idle = self.experts - self.active_experts
        return self.parameters - self.layers * idle * self.matrices * self.mlp * self.hidden
