"""What vLLM's scripts import from here; `shoal/api.py` has it."""

from shoal.api import BeamSearchParams, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "SamplingParams", "StructuredOutputsParams"]
