"""`Traffic`: counts of one model's requests, tokens and latencies, for a planner with latency targets."""

from __future__ import annotations

import msgspec


class Traffic(msgspec.Struct, omit_defaults=True):
    """Sums since the start, as in Prometheus: the traffic of an interval is the difference of two. Times are
    in seconds."""

    num_requests: int = 0
    input_tokens: int = 0  # in the prompts of these requests
    num_first: int = 0  # requests with a first token
    ttft_s: float = 0.0  # sum of their times to first token
    num_ended: int = 0  # requests that ended
    output_tokens: int = 0  # tokens of ended requests
    num_gaps: int = 0  # intervals between tokens of ended requests
    gaps_s: float = 0.0

    def arrived(self, num_tokens: int) -> None:
        """Counts a request with a prompt of `num_tokens` tokens."""
        self.num_requests += 1
        self.input_tokens += num_tokens

    def began(self, ttft_s: float) -> None:
        """Counts a first token, `ttft_s` seconds after the request's arrival."""
        self.num_first += 1
        self.ttft_s += ttft_s

    def ended(self, num_tokens: int, seconds: float) -> None:
        """Counts the end of a request with `num_tokens` >= 1 tokens, `seconds` between the first and the
        last."""
        self.num_ended += 1
        self.output_tokens += num_tokens
        if num_tokens > 1:
            self.num_gaps += num_tokens - 1
            self.gaps_s += seconds

    def since(self, before: Traffic) -> Traffic:
        """Returns the traffic since `before`; all of it if a restart of the router has reset the counts."""
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
