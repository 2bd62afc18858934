"""Engines with sleep mode on the CPU, which end with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from shoal import LLM


@contextmanager
def sleeping_engines(kv_cache_memory_bytes: int = 8 << 20) -> Iterator[Callable[..., LLM]]:
    """Yields a function of a model and options that builds an engine."""
    engines: list[LLM] = []

    def build(path: Any, **options: Any) -> LLM:
        defaults = {
            "dtype": "float32",
            "max_model_len": 256,
            "device": "cpu",
            "enable_sleep_mode": True,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
        }
        engines.append(LLM(str(path), **defaults | options))
        return engines[-1]

    yield build
    for engine in engines:
        if engine.core.error is None:
            engine.core.check()
        engine.exit()
