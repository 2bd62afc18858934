"""`LayerCopies`: copies of a captured layer's kernels, for layers that differ from it by addresses alone.

A CUDA graph of a step is captured by running the model's Python, which takes some 40 us a kernel, and most
kernels are launched once in each of dozens of equal layers. So three layers are captured. The third shows
whether a layer differs from the one before by the addresses of its weights and of its cache alone. Then it is
copied for the other layers, with their addresses (layer_copies.c, through the driver's functions for graphs).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_uint64, c_void_p
from pathlib import Path

from shoal.kernels import c_library

Span = tuple[int, int]  # address and bytes


class _Range(ctypes.Structure):
    """The struct Range of layer_copies.c."""

    _fields_ = (("start", c_uint64), ("size", c_uint64))


@functools.cache
def _library(driver: str) -> ctypes.CDLL | str:
    """Returns the library, compiled on first use, or why there is none. `driver`: the path of CUDA's."""
    flags = ("-O2", "-std=gnu11", "-fPIC")
    try:
        path = c_library.build(Path(__file__).parent, ("layer_copies.c",), (), flags, ("-ldl",))
    except c_library.BuildError as error:
        return str(error)
    library = ctypes.CDLL(str(path))
    library.shoal_copies_open.restype, library.shoal_copies_open.argtypes = c_char_p, (c_char_p,)
    library.shoal_copies_last.restype, library.shoal_copies_last.argtypes = c_void_p, (c_void_p,)
    spans = (POINTER(_Range), c_int, POINTER(c_uint64))
    library.shoal_copies_compare.argtypes = (c_void_p, c_void_p, c_void_p, *spans, c_char_p, c_int)
    library.shoal_copies_add.argtypes = (c_void_p, c_void_p, c_void_p, *spans, c_int)
    if missing := library.shoal_copies_open(driver.encode()):
        return f"CUDA's driver lacks {missing.decode()}"
    return library


class LayerCopies:
    """`mark` is to be called when each of three successive layers has been captured, then `add` with the
    spans of the layers to be copied. Spans are all memory that belongs to one layer alone, in the same order
    for each layer. `stream`: the handle of the stream that captures."""

    def __init__(self, driver: str = "libcuda.so.1") -> None:
        library = _library(driver)
        self.missing = library if isinstance(library, str) else None  # why no layer can be copied
        self.refused = self.missing  # why the layers of the last capture could not be copied
        self._library = library
        self._ends: list[int | None] = []

    def begin(self) -> None:
        """To be called before each capture."""
        self._ends, self.refused = [], self.missing

    def mark(self, stream: int) -> None:
        """Takes note of the end of a layer."""
        assert not isinstance(self._library, str)
        self._ends.append(self._library.shoal_copies_last(stream))

    def add(
        self, stream: int, before: Sequence[Span], copied: Sequence[Span], others: Sequence[Sequence[Span]]
    ) -> bool:
        """Copies the last of the three layers, whose spans are `copied`, for each of `others`. `before`: the
        spans of the second layer. Returns False if layers differ by more than their spans; then nothing is
        copied, and `refused` says what differs."""
        assert not isinstance(self._library, str) and len(self._ends) == 3
        if (
            None in self._ends
            or len({tuple(size for _, size in spans) for spans in (before, copied, *others)}) > 1
        ):
            self.refused = "layers differ in their memory, or run on several streams"
            return False
        why = ctypes.create_string_buffer(300)
        if self._library.shoal_copies_compare(
            *self._ends, *_ranges(before), _starts([copied]), why, len(why)
        ):
            self.refused = why.value.decode()
            return False
        code = self._library.shoal_copies_add(
            stream, *self._ends[1:], *_ranges(copied), _starts(others), len(others)
        )
        if code < -1000:
            raise RuntimeError(f"CUDA error {-1000 - code} while a layer's kernels were copied in a graph")
        if code < 0:
            self.refused = f"its kernels cannot be copied ({code})"
        return code > 0


def _ranges(spans: Sequence[Span]) -> tuple[ctypes.Array[_Range], int]:
    return (_Range * len(spans))(*(_Range(*span) for span in spans)), len(spans)


def _starts(layers: Sequence[Sequence[Span]]) -> ctypes.Array[c_uint64]:
    starts = [start for spans in layers for start, _ in spans]
    return (c_uint64 * len(starts))(*starts)
