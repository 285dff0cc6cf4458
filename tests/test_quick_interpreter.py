"""Triton's interpreter as the tests run it: the same results as without `quick_interpreter`, which only saves work."""

from __future__ import annotations

from typing import Any

import pytest
import quick_interpreter
import torch

interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
tl: Any = pytest.importorskip("triton.language")

from halfstep.kernels import backend  # noqa: E402  (after Triton's interpreter is known to be there)

pytestmark = pytest.mark.skipif(not backend.interpreting(), reason="needs Triton's interpreter")


@backend.jit
def wrapping_kernel(x, y, out, BLOCK: tl.constexpr):
    """Sum, difference and product of integers."""
    offsets = tl.arange(0, BLOCK)
    a, b = tl.load(x + offsets), tl.load(y + offsets)
    tl.store(out + offsets, a + b)
    tl.store(out + BLOCK + offsets, a - b)
    tl.store(out + 2 * BLOCK + offsets, a * b)


def wrapped(options: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """What the kernel makes of numbers that overflow, with these options of the interpreter."""
    ends = torch.iinfo(dtype)
    x = torch.tensor([ends.max, ends.min, ends.max, 5], dtype=dtype)
    y = torch.tensor([1, 1, ends.max, -7 if ends.min else 7], dtype=dtype)
    out = torch.zeros(12, dtype=dtype)
    monkeypatch.setattr(interpreter.interpreter_builder, "options", options)
    wrapping_kernel[(1,)](x, y, out, BLOCK=4)
    assert torch.equal(out, torch.cat([x + y, x - y, x * y]))
    return out


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.int64])
def test_integers_wrap_around_with_and_without_the_check(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the interpreter's own options made the check raise, the tests would have to keep it."""
    usual = interpreter.InterpreterOptions()
    assert usual.sanitize_overflow and not interpreter.interpreter_builder.options.sanitize_overflow
    quick = quick_interpreter.without_ignored_checks(usual)
    assert torch.equal(wrapped(usual, monkeypatch, dtype), wrapped(quick, monkeypatch, dtype))


def test_a_check_that_raises_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    options = quick_interpreter.without_ignored_checks(interpreter.InterpreterOptions(debug=True))
    with pytest.raises(Exception, match="int32 overflow detected for operation add"):
        wrapped(options, monkeypatch)


def test_every_type_has_the_numpy_type_that_triton_gives_it() -> None:
    """Each is looked up twice, and after another type with the same elements."""
    original = interpreter._get_np_dtype.__closure__
    (look_up,) = (cell.cell_contents for cell in original if callable(cell.cell_contents))
    scalars = [getattr(tl, name) for name in dir(tl) if type(getattr(tl, name)) is tl.dtype and name != "void"]
    assert len(scalars) > 15
    remembered = quick_interpreter.remembered_by_element(look_up)
    for scalar in scalars:
        kinds = [scalar, tl.pointer_type(scalar), tl.pointer_type(tl.pointer_type(scalar))]
        for kind in [*kinds, *(tl.block_type(kind, [4, 2]) for kind in kinds)] * 2:
            assert remembered(kind) == look_up(kind), kind


def test_remembered_types_and_shapes_are_those_that_triton_makes() -> None:
    """Elements of one width, pointers and numbers, in one shape and another, are told apart."""
    for shape in ([8], [2, 4], [8]):
        given = tl.block_type(tl.float32, shape)
        for element in (tl.int32, tl.float32, tl.pointer_type(tl.int32), tl.pointer_type(tl.float32), tl.int32):
            derived = given.with_element_ty(element)
            assert derived == tl.block_type(element, shape) and derived.element_ty == element
            assert derived.shape == given.shape
            assert interpreter.interpreter_builder.get_block_ty(element, given.shape) == derived
            for handle in ("first", "second"):
                made = tl.tensor(handle, derived)
                assert (made.handle, made.type, made.dtype) == (handle, derived, element)
                assert ([size.value for size in made.shape], made.numel.value) == (shape, 8)
    scalar = tl.tensor("scalar", tl.int32)
    assert (scalar.handle, scalar.dtype, len(scalar.shape), scalar.numel.value) == ("scalar", tl.int32, 0, 1)
