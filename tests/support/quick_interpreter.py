"""Triton's interpreter without repeated work.

At every call of a ``@triton.jit`` function, including the helpers of a kernel, the interpreter scans
``triton.language`` for the functions that it must replace. One scan per launch suffices. The others take more than half
of the time of a kernel with many helpers.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Make the interpreter scan ``triton.language`` once per launch. Does nothing with other versions of Triton."""
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
