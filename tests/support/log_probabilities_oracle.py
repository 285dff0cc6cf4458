"""The six numbers of a row of logits and their gradient in fp64, and how far fp32 arithmetic may end from them.

Written from the definition, without chunks; it shares no code with the package, and knows its rules for -inf and NaN.
"""

import numpy as np
import torch
from tolerances import LOG_PROBABILITIES_UNITS, SOFTMAX_DEPTH

UNIT = 2.0**-24
Numbers = list[tuple[np.ndarray, np.ndarray]]  # exact values and bounds


def oracle(logits: torch.Tensor, targets: torch.Tensor, temperature: float, ignore_index: int = -100) -> Numbers:
    """Of selected log-probability, logsumexp, entropy and mean log-probability of the rows of a matrix."""
    x, t, classes = logits.double().numpy(), targets.numpy(), logits.shape[1]
    with np.errstate(all="ignore"):
        z = x / temperature
        top = np.where(x.max(1) == -np.inf, 0.0, z.max(1))[:, None]
        d = z - top
        e = np.exp(d)
        s = e.sum(1, keepdims=True)
        p = np.where(s == 0, 0.0, e / s)
        y, depth = d - np.log(s), np.where(e == 0, 0.0, np.abs(d))
        size = 0.0 if temperature == 1.0 else np.where(np.isfinite(z), np.abs(z), 0.0)  # what scaling rounded
        log_sum = UNIT * (LOG_PROBABILITIES_UNITS + (p * (SOFTMAX_DEPTH * depth + 2 * size)).sum(1))
        rows = np.arange(len(x))
        valid = (t >= 0) & (t < classes)
        at = rows, np.where(valid, t, 0)
        selected = np.where(valid, y[at], np.nan)
        logsumexp = top[:, 0] + np.log(s[:, 0])
        entropy = -np.where(p == 0, 0.0, p * y).sum(1)
        entropy = np.where(np.isnan(s[:, 0]), np.nan, entropy)
        mean = y.mean(1)
        largest = np.max(size, axis=1, initial=0.0) if temperature != 1.0 else 0.0
        of_entropy = (p * depth * (2 * LOG_PROBABILITIES_UNITS + SOFTMAX_DEPTH * depth + 2 * np.max(size))).sum(1)
        finite_mean = np.where(np.isfinite(d), np.abs(d), 0.0).mean(1)
        bounds = (
            log_sum + UNIT * (2 * largest + 3 * np.abs(selected)),
            log_sum + UNIT * (largest + np.abs(logsumexp)),
            log_sum + UNIT * (of_entropy + np.abs(entropy)),
            log_sum + UNIT * (LOG_PROBABILITIES_UNITS * finite_mean + 3 * largest + np.abs(mean)),
        )
        counted = t != ignore_index
        nothing = x.max(1) == -np.inf
        selected, logsumexp, mean = (np.where(nothing, -np.inf, v) for v in (selected, logsumexp, mean))
        values = selected, logsumexp, np.where(nothing, 0.0, entropy), mean
        return [(np.where(counted, v, 0.0), b) for v, b in zip(values, bounds, strict=True)]


def gradient_oracle(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float, grads: np.ndarray, ignore_index: int = -100
) -> tuple[np.ndarray, np.ndarray]:
    """The gradient of finite rows, given those (4, rows) of the results of `oracle`."""
    x, t, classes = logits.double().numpy(), targets.numpy(), logits.shape[1]
    a, b, c, q = (grad[:, None] / temperature for grad in grads)
    z = x / temperature
    d = z - z.max(1, keepdims=True)
    y = d - np.log(np.exp(d).sum(1, keepdims=True))
    p = np.exp(y)
    entropy = -(p * y).sum(1, keepdims=True)
    counted = (t != ignore_index)[:, None]
    hit = counted & (t[:, None] == np.arange(classes))
    dx = p * (b - a - q - c * (y + entropy)) + hit * a + q / classes
    size = 0.0 if temperature == 1.0 else np.abs(z) + np.abs(z).max(1, keepdims=True)
    units = 2 * LOG_PROBABILITIES_UNITS + (SOFTMAX_DEPTH + 2) * (np.abs(y) + np.abs(d)) + 4 * np.max(size)
    scale = p * (np.abs(a) + np.abs(b) + np.abs(q) + np.abs(c) * (np.abs(y) + entropy + 1)) + np.abs(hit * a)
    bound = UNIT * (units * scale + 4 * np.abs(q) / classes) + 2.0**-126
    return np.where(counted, dx, 0.0), bound
