"""Triton's interpreter without two kinds of work that change no result and take three quarters of its time."""

from __future__ import annotations

import dataclasses
from types import FunctionType, SimpleNamespace

import triton.language as tl
from triton.runtime import interpreter

patch = interpreter._patch_lang
patched: list[interpreter._LangPatchScope] = []


def quicken() -> None:
    """Omits the int64 copy of each integer operation, which looks for overflows that nobody reports, and the
    patches of the language for each call of a device function, as the kernel that calls it has made them."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug, "an interpreter that debugs reports overflows"
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = patch_once


def patch_once(fn: FunctionType) -> interpreter._LangPatchScope:
    """Stands in for `_patch_lang`: patches both modules of the language, whichever of them `fn` uses."""
    if patched:
        return interpreter._LangPatchScope()
    scope = patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    restore = scope.restore

    def end() -> None:
        patched.clear()
        restore()

    scope.restore = end
    patched.append(scope)
    return scope
