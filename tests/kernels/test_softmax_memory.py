"""What softmax reads and writes: addresses that the interpreter sees for Triton, pages without access for C++.

NaN in what is dropped proves that it does not count (test_softmax.py); only this proves that it is not loaded.
"""

import forks
import numpy as np
import pytest
import torch
from implementations import using
from softmax_paths import small_strided_tiles, two_launches
from traffic import recording

import halfstep
from halfstep.kernels import backend
from halfstep.kernels.softmax import dispatch
from halfstep.kernels.softmax.rule import GROUP

pytestmark = pytest.mark.sample(3)

FP32, BF16 = torch.float32, torch.bfloat16

INTERPRETED = pytest.mark.skipif(backend.triton is None or not backend.INTERPRET, reason="needs TRITON_INTERPRET=1")
REACH = 8  # elements: whole vectors are loaded, of so many at most


def near(kept: np.ndarray) -> np.ndarray:
    """True less than REACH elements from a True."""
    return np.convolve(kept, np.ones(2 * REACH - 1), mode="same") > 0


@INTERPRETED
@pytest.mark.parametrize(
    ("queries", "keys", "log"), [(12, 176, False), (7, 173, True), (140, 69, False), (3, GROUP + 5, False)]
)
def test_columns_that_causal_drops_are_not_loaded(
    queries: int, keys: int, log: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = halfstep.log_softmax if log else halfstep.softmax
    batch = 2 if queries < 10 else 1
    x = torch.randn(batch, queries, keys, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    kept = torch.ones(queries, keys).tril().expand(batch, queries, keys).flatten().numpy() > 0
    with using("triton", "softmax"):
        with recording(monkeypatch) as traffic:
            y = function(x, causal=True, precision="exact")
        loads = traffic.counts(traffic.loaded, x)
        assert (loads[kept] > 0).all()
        assert not loads[~near(kept)].any()
        dy = torch.randn(batch, queries, keys, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
        with recording(monkeypatch) as traffic:
            dispatch.backward(dy, y, -1, 1.0, True, log, True, torch.bfloat16)
        for tensor in (dy, y):
            loads = traffic.counts(traffic.loaded, tensor)
            assert (loads[kept] > 0).all()
            assert not loads[~near(kept)].any()


@INTERPRETED
@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize(
    ("columns", "source", "target", "offset"),
    [
        *((304, FP32, FP32, 0), (301, FP32, BF16, 3), (304, BF16, FP32, 3), (301, BF16, BF16, 0), (255, BF16, BF16, 3)),
        *((GROUP + 3, BF16, BF16, 1), (2 * GROUP - 1, FP32, FP32, 0)),
    ],
)
def test_each_element_is_loaded_and_stored_once_and_nothing_outside_of_the_rows(
    columns: int, source: torch.dtype, target: torch.dtype, offset: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice with two launches. A row that begins off a boundary is moved in vectors, and one by one at both ends."""
    if launches == 2:
        if columns <= GROUP:
            pytest.skip("one group needs one launch")
        two_launches(monkeypatch)
    rows, pad = 3, 100
    storage = torch.randn(pad + rows * columns + pad, generator=torch.Generator().manual_seed(0)).to(source)
    begin = pad - pad % 16 + offset
    x = storage[begin : begin + rows * columns].view(rows, columns)
    inside = np.zeros(len(storage), dtype=bool)
    inside[begin : begin + rows * columns] = True
    with using("triton", "softmax"):
        with recording(monkeypatch) as traffic:
            y = halfstep.softmax(x, dtype=target, precision="exact")
        assert (traffic.counts(traffic.stored, y) == 1).all()
        assert launches == 2 or sum(map(len, traffic.stored)) == y.numel()
        loads = traffic.counts(traffic.loaded, x)
        assert (loads[inside] == launches).all()
        assert not loads[~inside].any()
        grad = torch.ones_like(y)
        with recording(monkeypatch) as traffic:
            dx = dispatch.backward(grad, y, -1, 1.0, False, False, True, source)
        assert (traffic.counts(traffic.stored, dx) == 1).all()
        for tensor in (grad, y):
            assert (traffic.counts(traffic.loaded, tensor) == launches).all()


@INTERPRETED
@pytest.mark.parametrize("boolean", [False, True], ids=["additive", "boolean"])
@pytest.mark.parametrize("offset", [48, 49], ids=["in step", "out of step"])
def test_masks_are_read_where_they_are(offset: int, boolean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In vectors like x or one by one, and nothing but its own rows, and of these what is near what `causal` keeps."""
    rows, columns = 3, 301
    storage = torch.randn(600 + rows * columns, generator=torch.Generator().manual_seed(0))
    storage = storage > 0 if boolean else storage.bfloat16()
    mask = storage[offset : offset + rows * columns].view(rows, columns)
    own = np.zeros(len(storage), dtype=bool)
    own[offset : offset + rows * columns] = True
    view = own.copy()
    for causal in (False, True):
        kept = torch.ones(rows, columns).tril().numpy() > 0 if causal else np.ones((rows, columns), dtype=bool)
        view[offset : offset + rows * columns] = kept.ravel()
        with using("triton", "softmax"), recording(monkeypatch) as traffic:
            halfstep.softmax(torch.zeros(rows, columns, dtype=torch.bfloat16), mask=mask, causal=causal)
        loads = traffic.counts(traffic.loaded, mask)
        assert (loads[view] > 0).all()
        assert not loads[~(near(view) & own)].any()


@INTERPRETED
@pytest.mark.parametrize("one_pass", [False, True])
def test_strided_tiles_touch_each_element_as_often_as_the_docstring_says(
    one_pass: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not one_pass:
        small_strided_tiles(monkeypatch)
    x = torch.randn(3, 34, 40, generator=torch.Generator().manual_seed(0))
    trips = 1 if one_pass else 2
    with using("triton", "softmax"):
        for view, dim in ((x, -2), (x, -3), (x.transpose(1, 2), -1), (x.permute(2, 0, 1), -2)):
            with recording(monkeypatch) as traffic:
                y = halfstep.softmax(view, dim, precision="fast")
            assert (traffic.counts(traffic.loaded, x) == trips).all()
            assert (traffic.counts(traffic.stored, y) == 1).all()
        for dim in (-3, -2):
            y = halfstep.softmax(x, dim, precision="fast")
            with recording(monkeypatch) as traffic:
                dx = dispatch.backward(x, y, dim, 1.0, False, False, False, x.dtype)
            for tensor in (x, y):
                assert (traffic.counts(traffic.loaded, tensor) == trips).all()
            assert (traffic.counts(traffic.stored, dx) == 1).all()


# A row of the mask reaches over 2^31 elements and more, of which it touches few. A wrong address ends
# the process, so this runs in one of its own.
FAR_MASK = """
import torch
import halfstep
from halfstep.kernels.softmax import rows, rule


def check(dtype, columns, step, strided):
    near = (torch.randn(columns, generator=torch.Generator().manual_seed(0)) > 0).to(dtype)
    far = torch.empty(columns * step, dtype=dtype)[::step]
    assert far.stride(0) * (columns - 1) > 2**31
    far.copy_(near)
    x = torch.randn(1, columns, generator=torch.Generator().manual_seed(1))
    expected = rule.forward(x, near, rule.Options(-1, 1.0, False, False, True, torch.float32))
    with halfstep.backend("triton"):
        assert torch.equal(halfstep.softmax(x, mask=far, precision="exact"), expected), (dtype, columns)
        if strided:
            y = halfstep.softmax(x.T.expand(columns, 3), 0, mask=far[:, None], precision="fast").T
            assert (y - expected).abs().max() < 1e-8, (dtype, columns)


check(torch.bool, 8192, 270_000, strided=True)
rows.FORWARD_TILE = rule.GROUP
check(torch.float16, 8185, 264_000, strided=False)
"""


def test_a_mask_may_step_further_than_32_bits_count() -> None:
    with using("triton", "softmax") as device:
        if device.type != "cpu":
            pytest.skip("made for CPU tensors")
    done = forks.run(["-c", FAR_MASK])
    assert (done.returncode, done.stderr) == (0, "")
