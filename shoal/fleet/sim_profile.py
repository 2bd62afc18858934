"""How long a simulated worker takes for a step by a measured profile (`shoal plan --profile`), so that any
model and machine can be simulated, and a simulation can be held against the fleet that it stands for."""

from __future__ import annotations

from shoal.fleet.engine_profile import EngineProfile
from shoal.fleet.sim_timing import StepTime


class ProfileTiming:
    """A StepTiming. A step takes what the profile says of its decodes, and for each prompt in it what its
    first token takes beyond an idle worker's step. `data.max_kv_tokens` is the room of the cache."""

    def __init__(self, profile: EngineProfile) -> None:
        self.data = profile.data
        self._profile = profile

    def step(
        self,
        num_decodes: int,
        context_tokens: int,
        distinct_tokens: int,
        num_chunks: int = 0,
        chunk_tokens: int = 0,
        chunk_pairs: int = 0,
        num_first: int = 0,
    ) -> StepTime:
        """Chunks count as so many of their mean size and place in their prompts."""
        decode_s = self._decode_s(num_decodes, context_tokens)
        if not num_chunks:
            return StepTime(decode_s, self._decode_s(num_decodes, context_tokens + num_decodes) - decode_s)
        size = chunk_tokens / num_chunks
        before = max(0.0, chunk_pairs / chunk_tokens - (size + 1) / 2)  # tokens of the prompt, in the mean
        idle_s = self._decode_s(1, size)
        begun_s = self._profile.ttft_s(before) if before else idle_s
        chunk_s = max(0.0, self._profile.ttft_s(before + size) - begun_s)
        return StepTime((decode_s if num_decodes else idle_s) + num_chunks * chunk_s, 0.0)

    def _decode_s(self, num_decodes: int, context_tokens: float) -> float:
        if not num_decodes:
            return 0.0
        return self._profile.itl_s(context_tokens / self.data.max_kv_tokens, context_tokens / num_decodes)
