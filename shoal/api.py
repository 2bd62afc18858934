"""What crosses every seam: requests, sampling parameters, outputs, and the protocol of an engine.

Torch-free. Field names and meanings are vLLM's where vLLM has them.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.errors import ConfigError
from shoal.sampling_params import SamplingParams
from shoal.stats import Stats

MEMORY_TAGS = ("weights", "kv_cache")  # the regions that can sleep
SLEEP_MODES = ("abort", "wait", "keep")  # what becomes of requests that run


class FinishReason(enum.StrEnum):
    """Why a request ended. Every request ends exactly once, with one of these."""

    STOP = "stop"  # an end-of-text id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, max_model_len or the whole cache reached
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # the engine failed


@dataclass(slots=True)
class Request:
    """One sequence to generate: token ids in, `Output`s out. `params.n` is 1 here: `n` is fanned out above
    the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first
    arrival: float = 0.0  # seconds, by one clock for all requests of an engine; breaks ties of priority
    cache_salt: str | None = None  # part of the block keys: requests share a prefix only under one salt
    adapter: str | None = None  # likewise
    embed: bool = False  # no tokens: the pooled hidden state of the prompt, in the one Output
    eos_token_ids: tuple[int, ...] = ()  # all end-of-text ids of the model; not checked under ignore_eos
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words, tokenized
    # The first tokens of the answer, where they were drawn elsewhere: the engine goes on behind them. They
    # count as its own do for max_tokens, min_tokens, penalties and grammars.
    output_token_ids: list[int] = field(default_factory=list)
    # Prefill and decode on different workers. One computes the prompt and holds its KV blocks for others to
    # read; when the first chunk of the prompt is under way, an Output brings a ticket for them. The other one
    # brings that ticket along: it reads the blocks that it lacks, and computes what it can't get.
    offers_kv: bool = False
    kv_ticket: bytes | None = None
    # The forerunner of a request whose first token is drawn elsewhere: it brings the ticket's blocks in as
    # they are computed, and keeps them until its successor starts in its place. It draws no token.
    fetches_only: bool = False
    continues: str | None = None  # the successor's: request_id of its forerunner
    external_id: str = ""  # the id that its client and the logs of all processes know it by
    trace_headers: dict[str, str] | None = None  # W3C trace context: traceparent and tracestate
    session: str | None = None  # requests of one session fit one worker of a fleet
    tags: tuple[str, ...] = ()  # only workers of a fleet that have all of them may take it
    worker: str = ""  # a fleet writes here which of its workers has the answer, up to its first token
    prefill_worker: str = ""  # and which one has computed the prompt, if it was another

    @property
    def log_id(self) -> str:
        """The id under which lines of a log tell of it."""
        return self.external_id or self.request_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end it: end of text, and its own."""
        ends = () if self.params.ignore_eos else self.eos_token_ids
        return frozenset((*(self.params.stop_token_ids or ()), *ends))


@dataclass(slots=True)
class Logprob:
    """Natural-log probability of a token, its rank in the distribution (1 is the best), and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class Span:
    """A part of a request's time, as its engine tells of it. It began `ago_s` seconds before the Output that
    brings it was made: durations alone cross a process, as the clocks of hosts differ."""

    name: str  # "queue", "routing", "transfer", "prefill", "migration"
    ago_s: float
    seconds: float
    worker: str = ""  # of a fleet
    attributes: dict[str, str | int | float] = field(default_factory=dict)


@dataclass(slots=True)
class Output:
    """What one step added to one request. The last one carries the finish reason."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token
    finish_reason: FinishReason | None = None
    # the stop id or stop string that ended it; None for an end-of-text id
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache held
    spans: list[Span] | None = None  # where the time up to the first token went; with that token
    embedding: list[float] | None = None  # [hidden size], of unit length, if the request asked for it
    # why, where finish_reason is ERROR; the request's fault if stop_reason is "grammar"
    error: str | None = None
    # Once, of a request that offers its KV blocks, before the first token; not if it was preempted before
    # its first step.
    kv_ticket: bytes | None = None

    @property
    def queued_seconds(self) -> float:
        """How long the request waited for its first step, as far as these spans tell."""
        return sum(span.seconds for span in self.spans if span.name == "queue") if self.spans else 0.0


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What a model's files say of it, for whoever lists models. Nothing in here is needed to run it."""

    architecture: str = ""  # "llama", "qwen3"
    format: str = ""  # "gguf" | "safetensors"
    num_parameters: int = 0
    quantization: str = ""  # the type of most weights: "Q4_K", "BF16"
    num_bytes: int = 0  # of the files with weights
    modified: float = 0.0  # seconds since 1970
    digest: str = "0" * 64  # hexadecimal, another for other files
    sizes: Mapping[str, int] = field(default_factory=dict)  # "embedding_length" and more of GGUF's names


class Engine(Protocol):
    """A request in, a stream of outputs out: a worker, a router, a prefill/decode pair, a fake."""

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """The last Output has a finish_reason. Outputs that a slow reader leaves waiting are merged. Closing
        the iterator early aborts the request. Raises RequestError (impossible here), UnavailableError
        (asleep, paused, full: try later), EngineDeadError."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request with FinishReason.ABORT. Unknown ids are ignored: it may just have ended."""
        ...

    async def stats(self) -> Stats:
        """Raises EngineDeadError if the engine is gone."""
        ...


def check_tags(tags: Sequence[str] | None) -> list[str]:
    """All tags for None. Raises ConfigError for unknown ones."""
    if tags is None:
        return list(MEMORY_TAGS)
    unknown = [tag for tag in tags if tag not in MEMORY_TAGS] if not isinstance(tags, str) else [tags]
    if unknown or not tags:
        raise ConfigError(
            f"tags {tags!r:.80} must be a list of {' and '.join(MEMORY_TAGS)}; leave it out for all"
        )
    return [tag for tag in MEMORY_TAGS if tag in tags]


def check_sleep(level: int, tags: Sequence[str] | None, mode: str) -> list[str]:
    """The tags. Raises ConfigError for unknown levels, tags and modes."""
    if level not in (0, 1, 2) or isinstance(level, bool):
        raise ConfigError(
            f"level {level!r} is not 0 (pause), 1 (keep the weights) or 2 (drop them); choose one"
        )
    if mode not in SLEEP_MODES:
        raise ConfigError(f"mode {mode!r} is not one of {', '.join(SLEEP_MODES)}; choose one")
    return check_tags(tags)
