"""Tensors and steps for every Adam layout, on the devices of each implementation."""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import block_oracle
import numpy as np
import oracles
import torch
from implementations import using
from noise import Noise
from oracles import BF16, DTYPES, FP16, FP32, NUMPY, AdamOptions, AdamTensor, adam_step, assert_same_bits

from halfstep.kernels import adam
from halfstep.kernels.adam import FULL_MASTER, NO_MASTER, SPLIT_MASTER, Layout
from halfstep.kernels.multi_tensor import TensorTable

INF, NAN = float("inf"), float("nan")
MAX_NORM = adam.FAMILY.group._fields.index("max_norm")
CODED = torch.uint8  # the dtype that stands for moments in 8 bits
WEIGHTS = [(FP32, NO_MASTER), (FP16, NO_MASTER), (FP16, FULL_MASTER), *((BF16, master) for master in range(4))]
LAYOUTS = [
    Layout(param, grad, state, master, amsgrad, l2)
    for (param, master), grad, state, amsgrad, l2 in product(
        WEIGHTS, DTYPES, (FP32, BF16, CODED), (False, True), (False, True)
    )
]
STOCHASTIC_LAYOUTS = [
    dataclasses.replace(layout, stochastic=True)
    for layout in LAYOUTS
    if adam.rounds_stochastically(layout.param, layout.state, layout.master)
]
USUAL = [Layout(FP32, FP32, FP32, NO_MASTER, False, False), Layout(BF16, BF16, FP32, SPLIT_MASTER, False, False)]


def pairwise(layouts: list[Layout]) -> list[Layout]:
    """A few layouts that together contain every pair of choices that occurs in any layout."""

    def pairs(layout: Layout) -> set[object]:
        weight = (layout.param, layout.master)
        choices = (weight, layout.grad, layout.state, layout.amsgrad, layout.l2, layout.stochastic)
        return set(combinations(enumerate(choices), 2))

    missing, chosen = set().union(*map(pairs, layouts)), []
    while missing:
        chosen.append(max(layouts, key=lambda layout: len(pairs(layout) & missing)))
        missing -= pairs(chosen[-1])
    return chosen


FEW = pairwise(LAYOUTS + STOCHASTIC_LAYOUTS)


def label(layout: object) -> str:
    if not isinstance(layout, Layout):
        return str(layout)
    names = {FP32: "fp32", FP16: "fp16", BF16: "bf16", CODED: "8bit"}
    parts = [f"p {names[layout.param]}", f"g {names[layout.grad]}", f"s {names[layout.state]}"]
    parts.append(("none", "full", "split", "split24")[layout.master])
    return " ".join(parts + ["amsgrad"] * layout.amsgrad + ["L2"] * layout.l2 + ["stochastic"] * layout.stochastic)


@dataclass
class Step:
    """The gradients of one step, in numpy, and its options."""

    grads: list[np.ndarray]
    grad_scale: float | None = None
    found_inf: float | None = None
    sum_of_squares: float | None = None
    max_norm: float | None = None

    def expected(self, tensors: list[AdamTensor]) -> list[AdamTensor]:
        return [
            adam_step(
                tensor,
                grad,
                grad_scale=self.grad_scale,
                found_inf=0.0 if self.found_inf is None else self.found_inf,
                sum_of_squares=self.sum_of_squares,
                max_norm=self.max_norm,
            )
            for tensor, grad in zip(tensors, self.grads, strict=True)
        ]


def make(
    layout: Layout,
    weights: np.ndarray,
    rng: np.random.Generator,
    step: float = 0.0,
    noise: Noise | None = None,
    columns: int | None = None,
    **options: object,
) -> AdamTensor:
    """A tensor of a layout from fp32 weights, with random moments unless its step count is 0, and random `noise`.

    With moments in 8 bits, a row has `columns` elements; None chooses a number that divides the size.
    """
    size = len(weights)
    extra: np.ndarray | None = None
    with np.errstate(all="ignore"):
        if layout.master in adam.REMAINDERS:
            code, extra = oracles.split(weights) if layout.master == SPLIT_MASTER else oracles.split24(weights, None)
            param = code.view(NUMPY[BF16])
        else:
            param = weights.astype(NUMPY[layout.param])
            extra = weights if layout.master == FULL_MASTER else None
    started = np.float32(step > 0)
    m = rng.standard_normal(size).astype(np.float32) * started
    v, top = (rng.random(size).astype(np.float32) * started for _ in range(2))
    scales: dict[str, np.ndarray] = {}
    if layout.coded:
        columns = columns or next((n for n in (129, 128, 48, 35) if size % n == 0), size)
        moments = {"m": m, "v": v, **({"top": top} if layout.amsgrad else {})}
        for name, x in moments.items():
            shape = (size // columns, columns) if size else (0, 0)
            moments[name], scales[f"{name}_scales"] = block_oracle.encoded(x.reshape(shape), None, name == "m")
        m, v, top = (moments[name].reshape(-1) if name in moments else None for name in ("m", "v", "top"))
    else:
        m, v, top = (x.astype(NUMPY[layout.state]) for x in (m, v, top))
    known = {"decay": 0.01, **options, "decoupled": not layout.l2}
    if layout.stochastic and noise is None:
        noise = Noise(int(rng.integers(2**63)), int(rng.integers(2**32)), int(rng.choice([0, 1, 2, 8, 2**34 - 16])))
    return AdamTensor(
        param,
        m,
        v,
        np.float32(step),
        extra,
        top if layout.amsgrad else None,
        AdamOptions(**known),  # type: ignore[arg-type]
        noise,
        **scales,
    )


def cut(tensor: AdamTensor, shape: tuple[int, ...], ranges: Sequence[tuple[int, int]]) -> AdamTensor:
    """A block of a tensor of `shape`, and how it lies in the whole as a single dimension's map can say it.

    With moments in 8 bits, columns begin at a block.
    """
    at = tuple(slice(start, stop) for start, stop in ranges)
    assert tensor.noise is not None
    strides = [int(np.prod(shape[dim + 1 :])) for dim in range(len(shape))]
    base = sum(start * stride for (start, _), stride in zip(ranges, strides, strict=True))
    inner_cut = [dim for dim in range(1, len(shape)) if ranges[dim] != (0, shape[dim])]
    assert len(inner_cut) <= 1
    held = [stop - start for start, stop in ranges]
    inner = int(np.prod(held[inner_cut[0] :])) if inner_cut else 0
    inner_whole = int(np.prod(shape[inner_cut[0] :])) if inner_cut else 0
    parts = {}
    for name, array in tensor.arrays().items():
        if name.endswith("scales"):  # of a matrix
            first, last = ranges[1]
            parts[name] = array[at[0], first // block_oracle.SPAN : -(-last // block_oracle.SPAN)].copy()
        elif name != "step":
            parts[name] = array.reshape(shape)[at].reshape(-1).copy()
    noise = dataclasses.replace(tensor.noise, base=base, inner=inner, inner_whole=inner_whole)
    return dataclasses.replace(tensor, **parts, noise=noise)


class Memory:
    """The tensors of a batch on a device, each in a separate buffer with margins that must not change."""

    NAMES = ("param", "extra", "m", "v", "top", "m_scales", "v_scales", "top_scales")
    OPERANDS = (adam.PARAM, adam.EXTRA, adam.M, adam.V, adam.TOP, *adam.SCALES_OF.values())

    def __init__(self, layout: Layout, tensors: list[AdamTensor], device: torch.device, offset: int) -> None:
        self.device, self.offset = device, offset
        self.buffers: list[tuple[torch.Tensor, int]] = []
        self.lists: list[list[torch.Tensor]] = [[] for _ in range(adam.CODED_OPERANDS)]
        for name, operand in zip(self.NAMES, self.OPERANDS, strict=True):
            arrays = [getattr(tensor, name) for tensor in tensors]
            if arrays[0] is not None:
                self.lists[operand] = [self.place(array) for array in arrays]
        self.lasting = len(self.buffers)
        self.lists[adam.STEP] = [torch.tensor(float(tensor.step), device=device) for tensor in tensors]
        shapes = [(tensor.param.size,) for tensor in tensors]
        if layout.coded:
            rows = [len(tensor.v_scales) for tensor in tensors]
            shapes = [(n, tensor.param.size // max(n, 1)) for n, tensor in zip(rows, tensors, strict=True)]
        self.table = TensorTable(layout.sizes(shapes), layout.operands, layout.chunk, device)
        if layout.coded:
            self.table.write(adam.COLUMNS, [columns for _, columns in shapes])
        if layout.stochastic:
            named = [(t.noise.stream, *t.noise.place(t.param.size), t.noise.seed) for t in tensors if t.noise]
            for operand, values in zip(range(adam.STREAM, adam.SEED + 1), zip(*named, strict=True), strict=True):
                self.table.write(operand, list(values))
        for operand, held in enumerate(self.lists):
            if held:
                self.table.write(operand, [tensor.data_ptr() for tensor in held])
        kinds: list[AdamOptions] = []
        for tensor in tensors:
            if tensor.options not in kinds:
                kinds.append(tensor.options)
        columns = [[o.lr, o.decay, float(o.maximize), 0.0, o.beta1, o.beta2, o.eps, float(o.decoupled)] for o in kinds]
        self.groups = torch.tensor(columns, dtype=torch.float64, device=device)
        indices = torch.tensor([kinds.index(tensor.options) for tensor in tensors], device=device)
        hyper = torch.full((len(tensors), adam.FAMILY.hyper_columns), NAN, device=device)
        self.batch = adam.Batch(layout, self.table, self.lists, indices, hyper)

    def place(self, array: np.ndarray) -> torch.Tensor:
        values = oracles.to_torch(array)
        buffer = torch.full((self.offset + values.numel() + 17,), 42, dtype=values.dtype, device=self.device)
        self.buffers.append((buffer, values.numel()))
        view = buffer[self.offset : self.offset + values.numel()].view(values.shape)
        view.copy_(values)
        return view

    def step(self, step: Step, limits: tuple[float, ...] | None = None) -> None:
        """Take a step. `limits`: the norms to which the groups clip, if they differ."""
        del self.buffers[self.lasting :]  # earlier gradients
        self.lists[adam.GRAD] = [self.place(grad) for grad in step.grads]
        self.table.write(adam.GRAD, [grad.data_ptr() for grad in self.lists[adam.GRAD]])

        def scalar(value: float | None, dtype: torch.dtype) -> torch.Tensor | None:
            return None if value is None else torch.tensor(value, dtype=dtype, device=self.device)

        self.groups[:, MAX_NORM] = torch.tensor(limits or (step.max_norm or 0.0,), dtype=torch.float64)
        control = adam.Control(
            scalar(step.grad_scale, FP32), scalar(step.found_inf, FP32), scalar(step.sum_of_squares, torch.float64)
        )
        adam.step(self.batch, self.groups, control)
        for grad, passed in zip(self.lists[adam.GRAD], step.grads, strict=True):
            assert (oracles.bits(grad) == oracles.bits(passed)).all(), "a gradient was written"
        for buffer, size in self.buffers:
            assert (buffer[: self.offset] == 42).all() and (buffer[self.offset + size :] == 42).all(), "wrote outside"

    def compare(self, expected: list[AdamTensor], what: str, exactly: bool = False) -> None:
        """Compare every array with the oracle's. All NaNs are equal unless `exactly`."""
        names = {**dict(zip(self.NAMES, self.OPERANDS, strict=True)), "step": adam.STEP}
        for index, tensor in enumerate(expected):
            for name, array in tensor.arrays().items():
                held = self.lists[names[name]][index]
                if exactly:
                    assert (oracles.bits(held) == oracles.bits(array)).all(), (
                        f"{what}: {name} of tensor {index} changed"
                    )
                else:
                    assert_same_bits(held.reshape(array.shape), array, f"{what}: {name} of tensor {index}")


def examine(
    names: tuple[str, ...], layout: Layout, tensors: list[AdamTensor], steps: list[Step], *offsets: int
) -> list[AdamTensor]:
    """Take the steps in each implementation, at each offset in elements from an aligned address, and compare with the
    oracle. Returns the oracle's last state."""
    expected, history = tensors, []
    for step in steps:
        expected = step.expected(expected)
        history.append(expected)
    for name, offset in itertools.product(names, offsets or (0,)):
        with using(name, "adam") as device:
            memory = Memory(layout, tensors, device, offset)
            for number, (step, after) in enumerate(zip(steps, history, strict=True), 1):
                memory.step(step)
                memory.compare(after, f"{name}, offset {offset}, step {number}")
    return expected


def standard(layout: Layout, seed: int = 0) -> tuple[list[AdamTensor], list[Step]]:
    """Tensors and steps that reach every branch: three groups, odd sizes, empty, hostile values, a skip, a clip."""
    rng = np.random.default_rng(seed)

    def normal(size: int, scale: float = 1.0) -> np.ndarray:
        return (rng.standard_normal(size) * scale).astype(np.float32)

    hostile = rng.integers(0, 2**32, 64, dtype=np.uint32).view(np.float32)
    edges = np.array([0.0, -0.0, INF, -INF, NAN, 1e-45, -1e-45, 1e-38, 3e38, -3.4028234e38, 65504, 1e20, 1e-20])
    weights = np.concatenate([hostile, edges.astype(np.float32), oracles.specials()])
    tensors = [
        make(layout, normal(37), rng),
        make(layout, normal(0), rng, step=3),
        make(layout, normal(2048 + 21), rng, step=9, lr=0.1, beta1=0.5, beta2=0.5, maximize=True, decay=0.3),
        make(layout, weights, rng, step=2, beta1=0.0, beta2=0.0, eps=0.0),
        make(layout, weights[::-1].copy(), rng, step=1000, beta2=0.25),
    ]

    def gradients(scale: float) -> list[np.ndarray]:
        made = [normal(tensor.param.size, scale) for tensor in tensors]
        for grad in made[3:]:
            grad[: len(edges)] = rng.permutation(edges)
        with np.errstate(all="ignore"):
            return [grad.astype(NUMPY[layout.grad]) for grad in made]

    return tensors, [
        Step(gradients(1.0)),
        Step(gradients(100.0), grad_scale=1024.0, found_inf=0.0, sum_of_squares=12.5, max_norm=1.0),
        Step(gradients(1.0), grad_scale=3.0, found_inf=1.0),
        Step(gradients(1e-3), grad_scale=1.0 / 3.0, found_inf=0.0),
    ]
