"""Statistics of rows of logits, and their derivative, in plain torch: the specification of the kernels.

Of a row x with target t, with ``z = x * (1 / temperature)``, M = max(z), d = z - M, e = exp(d), s = sum(e), L = log(s)
and y = d - L, the logarithms of the probabilities p of V classes, the results are six numbers, in the order of `Row`:

    y[t]    M + L    M    L    entropy = -sum(p * y) = L - sum(e * d) / s    mean(y) = sum(d) / V - L

The second is the logsumexp; the third and fourth serve the backward only. Terms of the last two sums have one sign.
With gradients a, b, c and q of the first two and the last two, times 1 / temperature, which is rounded once:

    dx = exp(y) * (b - a - q - c * (y + entropy)), + a at the target, + q / V

All of it in fp32 (fp64 for fp64 logits), every operation rounded, and sums in one order. Chunks of 1,024 columns have
a maximum m of their own, never below the lowest finite number, and sums of e, e * d and d relative to it. A sum over a
chunk halves over the bits 8, 9, 0, 1, 2, 7, 6, 5, 4, 3 of the column, and missing columns are 0. With w = exp(m - M),
chunk by chunk ``w * s``, ``w * (t + (m - M) * s)`` and ``u + columns * (m - M)`` are then summed in the same way over
1,024 chunks, and these sums one after the other.

* -inf is a probability of 0. Of a row that has nothing else, the logarithms are -inf, the entropy and gradients 0.
* A result of -inf is a constant: gradients that reach it are ignored. So a target of -inf has no gradient.
* NaN or +inf makes the whole row NaN. A target outside of the classes makes its first result and its gradients NaN.
* A row whose target is `ignore_index` is not looked at: its results and gradients are 0.

`exact` takes the exponential of exponential.py, and its logarithm serves always. Otherwise each device has its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from halfstep.kernels.exponential import reference_exp, reference_log
from halfstep.kernels.softmax.rule import math_dtype

CHUNK = 1024  # columns
ORDER = (8, 9, 0, 1, 2, 7, 6, 5, 4, 3)  # bits of the column over which a sum halves
ELEMENTS = 2**18  # that are computed at a time


class Row(NamedTuple):
    """The results of rows, or their gradients, each of the shape of the targets."""

    selected: torch.Tensor
    logsumexp: torch.Tensor
    maximum: torch.Tensor
    log_sum: torch.Tensor
    entropy: torch.Tensor  # 0 unless asked for
    mean: torch.Tensor  # the same


class Options(NamedTuple):
    temperature: float
    ignore_index: int
    entropy: bool
    mean: bool
    exact: bool


def exponential(d: torch.Tensor, exact: bool) -> torch.Tensor:
    return reference_exp(d, False) if exact and d.dtype == torch.float32 else d.exp()


def logarithm(s: torch.Tensor) -> torch.Tensor:
    return reference_log(s) if s.dtype == torch.float32 else s.log()


def _number(value: float, like: torch.Tensor) -> torch.Tensor:
    """A divisor: by a number of the host, torch does not divide on a GPU but multiplies by its reciprocal."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _padded(terms: torch.Tensor, value: float) -> torch.Tensor:
    """(..., n) as (..., chunks, columns of a chunk), of fewer columns where n is smaller: they are a power of two."""
    columns = terms.shape[-1]
    width = min(CHUNK, max(2, 1 << (columns - 1).bit_length()))
    return torch.nn.functional.pad(terms, (0, -columns % width), value=value).unflatten(-1, (-1, width))


def chunk_sum(terms: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, a power of two up to `CHUNK`, in the order of the specification."""
    bits = [*range(terms.shape[-1].bit_length() - 1)]
    terms = terms.unflatten(-1, (2,) * len(bits))
    for bit in filter(bits.__contains__, ORDER):
        low, high = terms.unbind(-1 - bits.index(bit))
        terms = low + high
        bits = [other for other in bits if other != bit]
    return terms


def _sum_of_chunks(terms: torch.Tensor) -> torch.Tensor:
    total, *others = chunk_sum(_padded(terms, 0.0)).unbind(-1)
    for block in others:
        total = total + block
    return total


def _chunks(z: torch.Tensor, options: Options) -> tuple[torch.Tensor, ...]:
    """The maximum and the sums of e, e * d and d of the chunks of rows, each of shape (rows, chunks)."""
    columns = z.shape[-1]
    z = _padded(z, -math.inf)
    m = z.amax(-1).clamp(min=torch.finfo(z.dtype).min)
    d = z - m.unsqueeze(-1)
    e = exponential(d, options.exact)
    t = chunk_sum(e * d.clamp(min=torch.finfo(d.dtype).min)) if options.entropy else torch.zeros_like(m)
    u = torch.zeros_like(m)
    if options.mean:
        d.flatten(-2)[:, columns:] = 0.0
        u = chunk_sum(d)
    return m, chunk_sum(e), t, u


def _row(chunks: Sequence[torch.Tensor], columns: int, options: Options) -> Row:
    """The results of rows from those of their chunks, the selected one left out."""
    m, s, t, u = chunks
    top = m.amax(-1)
    offset = m - top.unsqueeze(-1)
    w = exponential(offset, options.exact)
    total = _sum_of_chunks(w * s)
    nothing = total == 0
    top, total = torch.where(total.isnan(), total, top), torch.where(nothing, 1.0, total)
    log_sum = logarithm(total)
    logsumexp = torch.where(nothing, -math.inf, top + log_sum)
    entropy = mean = torch.zeros_like(top)
    if options.entropy:
        entropy = log_sum - _sum_of_chunks(torch.where(w == 0, 0.0, w * (t + offset * s))) / total
    if options.mean:
        starts = torch.arange(0, columns, CHUNK, dtype=torch.int64, device=m.device)
        sizes = (columns - starts).clamp(max=CHUNK).to(m.dtype)
        mean = _sum_of_chunks(u + sizes * offset) / _number(columns, top) - log_sum
    return Row(top, logsumexp, top, log_sum, entropy, mean)


def scaled(x: torch.Tensor, temperature: float) -> torch.Tensor:
    """z in the dtype in which it is computed."""
    z = x.to(math_dtype(x.dtype))
    return z if temperature == 1.0 else z * (1.0 / temperature)


def _blocks(rows: int, columns: int) -> Iterator[slice]:
    step = max(1, ELEMENTS // columns)
    return (slice(first, first + step) for first in range(0, rows, step))


def forward(logits: torch.Tensor, targets: torch.Tensor, options: Options) -> torch.Tensor:
    """The results of all rows, fp32 or fp64, of shape (6, *targets.shape).

    Args:
        logits: fp32, fp16, bf16 or fp64 of shape (..., V), V not 0.
        targets: int32 or int64 of shape (...).
    """
    columns = logits.shape[-1]
    x, target = logits.reshape(-1, columns), targets.reshape(-1).long()
    results = torch.empty(len(Row._fields), len(target), dtype=math_dtype(x.dtype), device=x.device)
    for rows in _blocks(len(target), columns):
        parts = [_chunks(scaled(part, options.temperature), options) for part in x[rows].split(ELEMENTS, 1)]
        row = _row([torch.cat(chunks, -1) for chunks in zip(*parts, strict=True)], columns, options)
        valid = (target[rows] >= 0) & (target[rows] < columns)
        z = scaled(x[rows].gather(1, torch.where(valid, target[rows], 0).unsqueeze(1)).squeeze(1), options.temperature)
        selected = torch.where(valid, (z - row.maximum) - row.log_sum, math.nan)
        stacked = torch.stack(row._replace(selected=selected))
        results[:, rows] = torch.where(target[rows] == options.ignore_index, 0.0, stacked)
    return results.view(len(results), *targets.shape)


def gradient(y: torch.Tensor, hit: torch.Tensor, grads: Row, row: Row, options: Options, columns: int) -> torch.Tensor:
    """dx of rows that are not ignored. `hit` is True at the target; grads and results have a last dimension of 1."""
    nothing = row.logsumexp == -math.inf
    a = torch.where(row.selected == -math.inf, 0.0, grads.selected)
    a = torch.where(row.selected.isnan(), row.selected, a)
    b, c = (torch.where(nothing, 0.0, grad) for grad in (grads.logsumexp, grads.entropy))
    q = torch.where(row.mean == -math.inf, 0.0, grads.mean)
    if options.temperature != 1.0:
        a, b, c, q = (grad * (1.0 / options.temperature) for grad in (a, b, c, q))
    factor, p = (b - a) - q if options.mean else b - a, exponential(y, options.exact)
    if options.entropy:
        finite = y.masked_fill(y == -math.inf, 0.0)  # -inf would be NaN in the second derivative
        dx = torch.where(y == -math.inf, 0.0, p * (factor - c * (finite + row.entropy)))
    else:
        dx = p * factor
    dx = torch.where(hit, dx + a, dx)
    return dx + q / _number(columns, y) if options.mean else dx


def _columns(rows: torch.Tensor) -> Row:
    return Row(*rows.unsqueeze(-1))


def backward(
    grads: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    results: torch.Tensor,
    options: Options,
    out: torch.Tensor,
) -> None:
    """Write the gradient of the logits, given those of the results, into `out`, which may be `logits`.

    Args:
        grads, results: of shape (6, *targets.shape), in the dtype of `forward`.
        logits, out: of one dtype and shape (..., V).
    """
    columns = logits.shape[-1]
    x, target = logits.reshape(-1, columns), targets.reshape(-1, 1).long()
    grads, results = grads.reshape(len(grads), -1), results.reshape(len(results), -1)
    dx = out.view(x.shape) if out.is_contiguous() else torch.empty_like(x)
    for rows in _blocks(len(target), columns):
        row = _columns(results[:, rows])
        for first in range(0, columns, ELEMENTS):
            part = x[rows, first : first + ELEMENTS]
            y = (scaled(part, options.temperature) - row.maximum) - row.log_sum
            hit = target[rows] == torch.arange(first, first + part.shape[1], dtype=torch.int64, device=x.device)
            of_part = gradient(y, hit, _columns(grads[:, rows]), row, options, columns)
            dx[rows, first : first + ELEMENTS] = torch.where(target[rows] == options.ignore_index, 0.0, of_part)
    if not out.is_contiguous():
        out.copy_(dx.view(out.shape))


def differentiable_backward(
    grads: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor, options: Options
) -> torch.Tensor:
    """The gradient of the logits by operations of torch that can be differentiated again; bits are torch's."""
    ignored = (targets == options.ignore_index).unsqueeze(-1)
    z = scaled(logits, options.temperature).masked_fill(ignored, 0.0)  # NaN would come back in the second derivative
    target = targets.long().unsqueeze(-1).masked_fill(ignored, 0)
    d = z - z.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(z.dtype).min)
    s = d.exp().sum(-1, keepdim=True)
    y = d - torch.where(s == 0, 1.0, s).log()
    counted = y.masked_fill(y == -math.inf, 0.0)
    hit = target == torch.arange(z.shape[-1], dtype=torch.int64, device=z.device)
    selected = torch.where(hit, y, 0.0).sum(-1, keepdim=True)
    selected = torch.where(hit.any(-1, keepdim=True), selected, math.nan)
    entropy, mean = -(y.exp() * counted).sum(-1, keepdim=True), y.mean(-1, keepdim=True)
    row = Row(selected, torch.where(s == 0, -math.inf, s.log()), s, s, entropy, mean)
    dx = gradient(y, hit, _columns(grads), row, options._replace(exact=False), z.shape[-1])
    return dx.masked_fill(ignored, 0.0).to(logits.dtype)
