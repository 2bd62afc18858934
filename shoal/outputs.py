"""Results of offline generation, with the names that vLLM has in this module."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.api import TokenLogprobs


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `text` is empty when detokenization is off. If finish_reason is "error", `error` has the
    reason, and the text and tokens are the ones generated before it."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    # Fields of vLLM without a meaning here.
    lora_request: None = None
    routed_experts: None = None
    kv_transfer_params: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request in seconds, with vLLM's names: `arrival_time` by the wall clock, the others by
    time.monotonic. With several answers, the times of the first one."""

    arrival_time: float
    queued_ts: float
    scheduled_ts: float = 0.0  # 0.0: not yet
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # between arrival and first token
    num_generation_tokens: int = 0
    is_corrupted: bool = False

    def count(self, num_tokens: int, queued_seconds: float, now: float) -> None:
        """Counts tokens that arrived at `now`. queued_seconds: from the first output."""
        if not self.num_generation_tokens:
            self.scheduled_ts = self.queued_ts + queued_seconds
            self.first_token_ts, self.first_token_latency = now, now - self.queued_ts
        self.last_token_ts = now
        self.num_generation_tokens += num_tokens


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt: the result of `LLM.generate`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None  # with disable_log_stats=False
    # Fields of vLLM without a meaning here.
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: `tokens` are the prompt's ids and the generated ones; `text` is both as text, None without a
    tokenizer."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]  # one entry per generated token
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # "stop" at an end-of-text id, "length" at a limit of tokens
    stop_reason: int | str | None = None  # the end-of-text id


@dataclass(slots=True)
class BeamSearchOutput:
    """The `beam_width` best beams of one prompt, best first: the result of `LLM.beam_search`."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class EmbeddingOutput:
    """The hidden state after a prompt's last token: [hidden size], of unit length."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt: the result of `LLM.embed`."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None
