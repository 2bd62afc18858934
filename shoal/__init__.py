"""Shoal: a small, very fast LLM inference system. `from shoal import LLM, SamplingParams`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.api import Logprob
from shoal.engine_args import EngineArgs
from shoal.inputs import TextPrompt, TokensPrompt
from shoal.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
)
from shoal.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from shoal.engine.llm import LLM

__version__ = "0.1.0"  # a literal, so the build reads it without importing the package

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Imports `LLM` on first use, as it needs libraries for text, which commands don't."""
    if name == "LLM":
        from shoal.engine.llm import LLM

        return LLM
    raise AttributeError(f"module 'shoal' has no attribute {name!r}")
