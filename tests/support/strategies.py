"""Tensors of every shape and layout, by name and for hypothesis."""

import numpy as np
import oracles
import torch
from hypothesis import strategies as st

LAYOUTS = ("as it is", "transposed", "gaps", "misaligned", "expanded", "negated")


def kinds(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Tensors of every shape and layout, with a NaN, an infinity, a subnormal and an overflow in each large one."""
    rng = np.random.default_rng(7)

    def values(count: int) -> torch.Tensor:
        result = torch.from_numpy(rng.standard_normal(count).astype(np.float32)).to(dtype)
        if count > 8:
            result[-6:-1] = torch.tensor([float("nan"), float("-inf"), 1e-6, 7e4, -0.0]).to(dtype)
        return result

    return {
        "empty": torch.empty(0, dtype=dtype),
        "empty, 2-D": values(0).reshape(0, 3),
        "0-dim": values(1).reshape(()),
        "one": values(1),
        "odd": values(4097),
        "one chunk": values(4096),
        "two chunks": values(8192),
        "misaligned": values(5001)[1:],
        "misaligned chunk": values(4099)[3:],
        "transposed": values(77 * 13).reshape(77, 13).t(),
        "permuted": values(3 * 5 * 7).reshape(3, 5, 7).permute(2, 0, 1),
        "channels last": values(2 * 3 * 4 * 5).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "gaps": values(60 * 40).reshape(60, 40)[:, 3:29],
        "transposed gaps": values(77 * 13).reshape(77, 13).t()[::2],
        "strided": values(999)[::3],
        "expanded": values(33).expand(5, 33),
        "expanded from one": values(1).expand(7, 11),
        "size 1 with an odd stride": values(12).as_strided((3, 1, 4), (4, 999, 1)),
        "overlapping": values(20).as_strided((9, 3), (2, 1)),
    }


@st.composite
def laid_out(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], lengths: tuple[int, ...] = ()) -> torch.Tensor:
    """A tensor of one of the dtypes: random bits, special numbers, or ordinary ones of one magnitude among a few
    special ones. Its shape is small, or one of the `lengths`."""
    dtype = draw(st.sampled_from(dtypes))
    small = st.lists(st.integers(0, 9), max_size=3)
    shape = draw(st.one_of(small, st.sampled_from([[length] for length in lengths])) if lengths else small)
    size = int(np.prod(shape)) if shape else 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = draw(st.sampled_from(["bits", "special", "ordinary", "ordinary"]))
    if values == "bits":
        numbers = rng.integers(0, 2**32, 2 * size + 3, dtype=np.uint32).view(np.float32)
    elif values == "special":
        numbers = rng.choice(oracles.specials(), 2 * size + 3)
    else:
        numbers = rng.standard_normal(2 * size + 3).astype(np.float32) * np.float32(2.0) ** draw(st.integers(-140, 120))
        for special in draw(st.lists(st.sampled_from(oracles.specials().tolist()), max_size=2)):
            numbers[rng.integers(0, len(numbers))] = special
    base = torch.from_numpy(numbers.astype(np.float32)).to(dtype)
    x, layout = base[:size].reshape(shape), draw(st.sampled_from(LAYOUTS))
    if layout == "transposed" and x.dim() >= 2:
        x = x.transpose(0, -1)
    elif layout == "gaps":
        x = base[: 2 * size : 2].reshape(shape) if x.dim() != 1 else base[: 2 * size : 2]
    elif layout == "misaligned":
        x = base[1 : size + 1].reshape(shape)
    elif layout == "expanded" and x.dim() and x.numel():
        x = x[:1].expand(3, *x.shape[1:])
    elif layout == "negated" and dtype.itemsize > 1:
        x = torch._neg_view(x)
    return x
