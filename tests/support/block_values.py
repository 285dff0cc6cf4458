"""Numbers for tests of formats of blocks."""

import ml_dtypes
import numpy as np


def some_blocks(count: int, size: int, seed: int = 0) -> np.ndarray:
    """Blocks of fp32 over its whole range: random ones, some with a few exponents, numbers of few bits, ties, zeros."""
    random = np.random.default_rng(seed)
    patterns = random.integers(0, 2**32, (count, size), dtype=np.uint32)
    exponents = random.integers(0, 255, (count, 1)).clip(0, 254) - random.integers(0, 20, (count, size))
    near = (patterns & 0x807FFFFF) | exponents.clip(0, 254).astype(np.uint32) << 23
    near[::3] &= 0xFFF00000  # with ties of every format
    patterns = np.where(random.random((count, 1)) < 0.9, near, patterns)
    patterns[random.random(patterns.shape) < 0.05] &= 0x80000000
    values = patterns.view(np.float32)
    values[~np.isfinite(values)] = 1
    return values


def midpoints_of_nvfp4(count: int, g: np.float32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Blocks with numbers at the midpoints of E2M1 and one ulp beside them, where a rounding more or less shows.

    Returns:
        The blocks, what numpy divides them by a scale to in fp32, and the scales in E4M3 by the global scale `g`.
    """
    largest = np.random.default_rng(4).uniform(500, 1800, (count, 1)).astype(np.float32)
    scales = (largest / np.float32(6) / g).astype(ml_dtypes.float8_e4m3fn)
    reciprocal = np.float32(1) / g / scales.astype(np.float32)
    near = np.array([0.25, 0.75, 1.25, 1.75, 2.5], np.float32) / reciprocal
    rows = np.concatenate([largest, near, np.nextafter(near, 0 * near), np.nextafter(near, 2 * near)], 1)
    return rows, rows * reciprocal, scales
