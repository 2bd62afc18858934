"""The names that vLLM's scripts import from `sampling_params`. `shoal/api.py` defines them."""

from shoal.api import BeamSearchParams, SamplingParams, StructuredOutputsParams

__all__ = ["BeamSearchParams", "SamplingParams", "StructuredOutputsParams"]
