"""Makes Triton's interpreter twice as fast, for the tests.

When a kernel is launched the interpreter replaces the functions of triton.language by its own, and once
more when it calls a device function, which finds all but nothing left to replace.  Looking for it takes
half of the time of small kernels.  Here the looking is done once for each module, and calls in a launch
that has replaced what they use replace nothing.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from triton import language
from triton.runtime import interpreter

NEEDED = ("_patch_lang", "_patch_builtin", "_patch_attr", "_LangPatchScope")

replaced: set[Any] = set()  # modules whose functions are the interpreter's now; none between launches


@functools.cache
def builtins(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if language.core.is_builtin(member)]


def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in builtins(package):
        member = getattr(package, name)
        if language.core.is_builtin(member):
            interpreter._patch_attr(package, name, member, builder, scope)


@functools.cache
def modules_of(function: Any) -> frozenset[Any]:
    known = (language, language.core)
    return frozenset(x for x in function.__globals__.values() if any(x is module for module in known))


def install() -> None:
    """Does nothing where this Triton's interpreter is another."""
    if not all(hasattr(interpreter, name) for name in NEEDED):
        return
    patch_lang = interpreter._patch_lang

    class Launch(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            replaced.clear()

    def patch_once(function: Any) -> Any:
        modules = modules_of(function)
        if not replaced:
            scope = Launch()
            scope._changes = patch_lang(function)._changes
            replaced.update(modules)
            return scope
        if not modules <= replaced:
            replaced.update(modules)
            return patch_lang(function)
        return interpreter._LangPatchScope()

    interpreter._patch_builtin, interpreter._patch_lang = patch_builtin, patch_once
