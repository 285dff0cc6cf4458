"""Triton's interpreter without work that has no effect on its results.

The interpreter spends most of its time not in numpy but in the Python around it. Four parts of that have no effect:

* At every call of a ``@triton.jit`` function, including the helpers of a kernel, it scans ``triton.language`` for the
  functions that it must replace. One scan per launch suffices.
* For every sum, difference and product of integers it computes in 64 bits whether the result overflows, and passes that
  to ``device_assert``, which ignores it unless the option ``debug`` is set. Results wrap around either way.
* It looks up the numpy type of a Triton type in a dictionary that it builds for each look-up.
* For each intermediate result it makes the type of the block several times, and validates and wraps its shape. Here,
  equal types that are derived from another type are one object, and each type keeps its wrapped shape.

tests/kernels/test_softmax.py takes 38 s of processor time instead of 135 s.
"""

import dataclasses
import functools
from typing import Any


def install() -> None:
    """Remove that work from the interpreter."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    builder = interpreter.interpreter_builder
    builder.options = without_ignored_checks(builder.options)
    interpreter._get_np_dtype = remembered_by_element(interpreter._get_np_dtype)
    remember_block_types(interpreter.interpreter_builder, interpreter.tl.core)
    patch, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()  # of `tl` and `tl.core`, those whose functions are replaced for the launch under way

    @functools.cache
    def used_by(fn: Any) -> set[int]:
        return {id(interpreter.tl), id(interpreter.tl.core)} & {id(value) for value in fn.__globals__.values()}

    def patch_once(fn: Any) -> Any:
        used = used_by(fn)
        if used and used <= done:
            return interpreter._LangPatchScope()
        done.update(used)
        return patch(fn)

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        try:
            return call(self, *args, **kwargs)
        finally:
            done.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch


def without_ignored_checks(options: Any) -> Any:
    """The options of a builder without the check for overflow, unless ``debug`` makes the check raise."""
    return options if options.debug else dataclasses.replace(options, sanitize_overflow=False)


def remembered_by_element(look_up: Any) -> Any:
    """``look_up``, called once for each type of elements: a block has the numpy type of its elements."""
    known: dict[str, Any] = {}

    def remembered(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in known:
            known[name] = look_up(kind)
        return known[name]

    return remembered


def remember_block_types(builder: Any, core: Any) -> None:
    """Make each type of a block once, where it is derived from another type, and the shape of tensors once per type."""
    known: dict[tuple[str, tuple[int, ...]], Any] = {}

    def block_type(element: Any, shape: Any) -> Any:
        key = element.name, tuple(shape)
        if key not in known:
            known[key] = core.block_type(element, shape)
        return known[key]

    def with_element_ty(self: Any, element: Any) -> Any:
        return block_type(element, self.shape)

    original = core.tensor.__init__

    def make(self: Any, handle: Any, type: Any) -> None:
        if "_made" not in vars(type):
            original(self, handle, type)
            type._made = {name: value for name, value in vars(self).items() if name != "handle"}
        else:
            vars(self).update(type._made, handle=handle)

    builder.get_block_ty = block_type
    core.block_type.with_element_ty, core.tensor.__init__ = with_element_ty, make
