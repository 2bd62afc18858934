"""How long a simulated worker takes for a step by a measured profile (`shoal plan --profile`), so that any
model and machine can be simulated, and a simulation can be held against the fleet that it stands for."""

from __future__ import annotations

from shoal.fleet.planner.engine_profile import EngineProfile
from shoal.fleet.simulator.timing import StepTime, StepWork


class ProfileTiming:
    """A StepTiming. A step takes what the profile says of its decodes, and for each prompt in it what its
    first token takes beyond an idle worker's step. `data.max_kv_tokens` is the room of the cache."""

    def __init__(self, profile: EngineProfile) -> None:
        self.data = profile.data
        self._profile = profile
        self._shortest = min(point.input_length for point in self.data.prefill)

    def step(self, work: StepWork) -> StepTime:
        """Chunks count as so many of their mean size and place in their prompts."""
        num_decodes, context = work.num_decodes, work.context_tokens
        decode_s = self._decode_s(num_decodes, context)
        if not work.num_chunks:
            return StepTime(decode_s, self._decode_s(num_decodes, context + num_decodes) - decode_s)
        size = work.chunk_tokens / work.num_chunks
        before = max(0.0, work.chunk_pairs / work.chunk_tokens - (size + 1) / 2)  # of the prompt, in the mean
        idle_s = self._decode_s(1, size)
        chunk_s = max(0.0, self._begun_s(before + size, idle_s) - self._begun_s(before, idle_s))
        return StepTime((decode_s if num_decodes else idle_s) + work.num_chunks * chunk_s, 0.0)

    def _begun_s(self, num_tokens: float, idle_s: float) -> float:
        """How long an idle worker, whose step takes `idle_s`, computes at so many tokens of a prompt. Below
        the shortest that was measured there is a line to a step without any."""
        found = self._profile.ttft_s(num_tokens)
        share = min(1.0, num_tokens / self._shortest)
        return idle_s + share * (found - idle_s)

    def _decode_s(self, num_decodes: int, context_tokens: float) -> float:
        if not num_decodes:
            return 0.0
        return self._profile.itl_s(context_tokens / self.data.max_kv_tokens, context_tokens / num_decodes)
