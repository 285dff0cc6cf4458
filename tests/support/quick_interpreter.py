"""Triton's interpreter without the work it repeats.

At every call of a ``@triton.jit`` function, a kernel's helpers among them, the interpreter looks through
``triton.language`` for the functions that it must replace. Within a launch the first look serves all later ones, which
take more than half of the time of a kernel that has many helpers.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Look through ``triton.language`` once per launch; nothing where this Triton's interpreter is built otherwise."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not hasattr(interpreter, "_LangPatchScope"):  # before Triton 3.7
        return
    patch, call = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()  # of `tl` and `tl.core`, those whose functions are replaced for the launch under way

    def patch_once(fn: Any) -> Any:
        used = {id(interpreter.tl), id(interpreter.tl.core)} & {id(value) for value in fn.__globals__.values()}
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
