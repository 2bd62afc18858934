"""What clients asked of one model and how quickly it came: the counts that a planner for latency needs."""

from __future__ import annotations

import msgspec


class Traffic(msgspec.Struct, omit_defaults=True):
    """Sums since the start, as Prometheus has them: what happened between two moments is the difference of
    two. Times are in seconds."""

    num_requests: int = 0
    input_tokens: int = 0  # of these requests' prompts
    num_first: int = 0  # requests that had their first tokens
    ttft_s: float = 0.0  # until these, from the requests' arrivals
    num_ended: int = 0  # requests that had all their tokens
    output_tokens: int = 0  # of the ended ones
    num_gaps: int = 0  # between tokens, of the ended ones
    gaps_s: float = 0.0

    def arrived(self, num_tokens: int) -> None:
        """A request came, with a prompt of so many tokens."""
        self.num_requests += 1
        self.input_tokens += num_tokens

    def began(self, ttft_s: float) -> None:
        """A request has its first token."""
        self.num_first += 1
        self.ttft_s += ttft_s

    def ended(self, num_tokens: int, seconds: float) -> None:
        """A request has ended with so many tokens (at least one), the last of them so long after the
        first."""
        self.num_ended += 1
        self.output_tokens += num_tokens
        if num_tokens > 1:
            self.num_gaps += num_tokens - 1
            self.gaps_s += seconds

    def since(self, before: Traffic) -> Traffic:
        """What came after `before`. All that is counted, if the counting began anew meanwhile, as it does
        with a router that starts again."""
        names = self.__struct_fields__
        parts = {name: getattr(self, name) - getattr(before, name) for name in names}
        return self if min(parts.values()) < 0 else Traffic(**parts)

    @property
    def mean_input(self) -> float | None:
        return self.input_tokens / self.num_requests if self.num_requests else None

    @property
    def mean_output(self) -> float | None:
        return self.output_tokens / self.num_ended if self.num_ended else None

    @property
    def mean_ttft_s(self) -> float | None:
        return self.ttft_s / self.num_first if self.num_first else None

    @property
    def mean_itl_s(self) -> float | None:
        return self.gaps_s / self.num_gaps if self.num_gaps else None
