"""A replacement for Triton's code between a kernel's call and its launch, for one thread and for a while.

`repeated_launches` is for captures, which launch the same few kernels thousands of times, once a layer and
graph. Triton asks anew each time which of its compiled variants the arguments need, and that question is most
of what a launch takes. So it is answered once for all calls whose arguments are of the same kinds.
engine/runner/runner.py uses it where it captures CUDA graphs; compilation.py replaces launches with it too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_replacing = threading.Lock()  # All engines of a process share Triton's launch.
_only_prepared = threading.local()


@contextmanager
def only_prepared() -> Iterator[None]:
    """While this context lasts, launches of this thread in CUDA C++ run nothing (cuda_library.py)."""
    before, _only_prepared.on = is_only_prepared(), True
    try:
        yield
    finally:
        _only_prepared.on = before


def is_only_prepared() -> bool:
    return getattr(_only_prepared, "on", False)


@contextmanager
def launches_replaced(replace: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While this context lasts, launches of this thread go to `replace(run)`, where `run` is Triton's own
    launch, `run(kernel, *arguments, grid=..., warmup=..., **options)`."""
    import triton  # It is imported only now, because a CPU run must not pay for it.

    with _replacing:
        run, here = triton.JITFunction.run, threading.get_ident()
        replaced = replace(run)

        def launch(self: Any, *arguments: Any, **options: Any) -> Any:
            return (replaced if threading.get_ident() == here else run)(self, *arguments, **options)

        triton.JITFunction.run = launch
        try:
            yield
        finally:
            triton.JITFunction.run = run


@contextmanager
def repeated_launches() -> Iterator[None]:
    """While this context lasts, a launch of this thread whose arguments have the same kinds as an
    earlier one takes the compiled kernel of that one. Of the same kind are tensors with equal types and
    alignments, descriptors with equal tiles, and any other values if they are equal.

    Hooks of launches (`triton.knobs.runtime`) hear of the first launch of each kind alone."""
    with launches_replaced(_Repeated):
        yield


class _Repeated:
    def __init__(self, run: Callable[..., Any]) -> None:
        import triton

        self._run, self._driver = run, triton.runtime.driver.active
        self._device = self._driver.get_current_device()
        # By kernel and kinds: what launches the compiled kernel, and the arguments that are always the same.
        self._found: dict[tuple[Any, ...], tuple[Callable[..., None], Any, Any, tuple[Any, ...]]] = {}

    def __call__(self, kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        key = (kernel.fn, *map(_kind, arguments), *options.items())  # a kernel itself is hashed by its source
        found = self._found.get(key)
        if found is None:
            compiled = self._run(kernel, *arguments, grid=grid, warmup=warmup, **options)
            if compiled is not None and not warmup:
                named = kernel.params[len(arguments) :]
                rest = tuple(options.get(parameter.name, parameter.default) for parameter in named)
                self._found[key] = compiled.run, compiled.function, compiled.packed_metadata, rest
            return compiled
        launch, function, metadata, rest = found
        x, y, z = (*grid, 1, 1)[:3]
        stream = self._driver.get_current_stream(self._device)
        launch(x, y, z, stream, function, metadata, None, None, None, *arguments, *rest)
        return None


_PLAIN = frozenset((int, float, bool, type(None)))


def _kind(argument: Any) -> Any:
    """Returns the properties of an argument that choose the variant of a kernel, or more of them."""
    if argument.__class__ in _PLAIN:
        return argument.__class__, argument
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16
    if hasattr(argument, "block_shape"):  # a descriptor; each kernel takes one class of them
        return argument.base.dtype, *argument.block_shape, argument.layout
    return argument.__class__, argument
