"""Requests, sampling parameters, outputs and the Engine protocol: the types that every room shares.

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

WEIGHTS, KV_CACHE = "weights", "kv_cache"
MEMORY_TAGS = (WEIGHTS, KV_CACHE)  # the memory regions that can sleep
SLEEP_MODES = ("abort", "wait", "keep")  # for running requests


class FinishReason(enum.StrEnum):
    """The reason why a request ended. Every request ends exactly once, with one of these."""

    STOP = "stop"  # an end-of-text id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, max_model_len or the whole cache reached
    ABORT = "abort"  # aborted by the caller
    ERROR = "error"  # the engine failed


@dataclass(slots=True)
class Request:
    """One sequence to generate. `params.n` is 1 here: RequestBuilder makes `n` requests of a prompt."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower runs first
    arrival: float = 0.0  # seconds by the clock of the engine; breaks ties of priority
    cache_salt: str | None = None  # part of the block keys: requests share a prefix only under one salt
    adapter: str | None = None  # the same for adapters
    embed: bool = False  # one Output with the pooled hidden state of the prompt, and no tokens
    eos_token_ids: tuple[int, ...] = ()  # all end-of-text ids of the model; not checked under ignore_eos
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words, tokenized
    # The first tokens of the answer, if another worker sampled them: the engine continues after them. They
    # count for max_tokens, min_tokens, penalties and grammars like its own.
    output_token_ids: list[int] = field(default_factory=list)
    # Prefill and decode on different workers. The prefill request (offers_kv) computes the prompt and holds
    # its KV blocks for readers; when its first chunk has been launched, an Output has a ticket for them. The
    # decode request has that ticket (kv_ticket): it reads the missing blocks, and computes those it cannot
    # get.
    offers_kv: bool = False
    kv_ticket: bytes | None = None
    # A prefetch for a request whose first token is sampled elsewhere: it reads the ticket's blocks while they
    # are computed, and holds them until the continuation starts in its place. It samples no token.
    fetches_only: bool = False
    continues: str | None = None  # in the continuation: request_id of its prefetch
    external_id: str = ""  # the id for the client and for the logs of all processes
    trace_headers: dict[str, str] | None = None  # W3C trace context: traceparent and tracestate
    session: str | None = None  # requests of one session go to the same worker of a fleet
    tags: tuple[str, ...] = ()  # only workers of a fleet with all of these tags may get the request
    worker: str = ""  # set by a fleet: the worker that generates, until the first token
    prefill_worker: str = ""  # set by a fleet: the worker that computed the prompt, if it was another one

    @property
    def log_id(self) -> str:
        """The id of the request in the log."""
        return self.external_id or self.request_id

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end the request: end of text, and its own stop ids."""
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
    """A part of a request's time, reported by its engine. It began `ago_s` seconds before the Output with the
    span was made: only durations cross processes, as the clocks of hosts differ."""

    name: str  # "queue", "routing", "transfer", "prefill", "migration"
    ago_s: float
    seconds: float
    worker: str = ""  # in a fleet
    attributes: dict[str, str | int | float] = field(default_factory=dict)


@dataclass(slots=True)
class Drafted:
    """Drafts that an Output's steps verified. `places` has a number for each token of the Output:
    which draft of its step the token was, from 1; 0: none."""

    num_steps: int  # that verified drafts
    num_verified: int  # drafts
    places: list[int]

    @property
    def num_accepted(self) -> int:
        return sum(place > 0 for place in self.places)


@dataclass(slots=True)
class Output:
    """The part of an answer that one step added. The last Output of a request has the finish reason."""

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, with the first token
    finish_reason: FinishReason | None = None
    # the stop id or stop string that ended it; None for an end-of-text id
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    spans: list[Span] | None = None  # the time up to the first token; with that token
    embedding: list[float] | None = None  # [hidden size], of unit length, for a request with `embed`
    # the reason, if finish_reason is ERROR; caused by the request if stop_reason is "grammar"
    error: str | None = None
    # Once for a request with offers_kv, before the first token; not if it was preempted before its first
    # step.
    kv_ticket: bytes | None = None
    drafted: Drafted | None = None  # None: no drafts were verified

    @property
    def queued_seconds(self) -> float:
        """Seconds for which the request waited for its first step, by the spans of this Output."""
        return sum(span.seconds for span in self.spans if span.name == "queue") if self.spans else 0.0


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """Facts about a model's files, for lists of models. The engine does not need them."""

    architecture: str = ""  # "llama", "qwen3"
    format: str = ""  # "gguf" | "safetensors"
    num_parameters: int = 0
    quantization: str = ""  # the type of most weights: "Q4_K", "BF16"
    num_bytes: int = 0  # size of the files with weights
    modified: float = 0.0  # seconds since 1970
    digest: str = "0" * 64  # hexadecimal; differs between different files
    sizes: Mapping[str, int] = field(default_factory=dict)  # "embedding_length" and more of GGUF's names


class Engine(Protocol):
    """Takes a request and returns a stream of outputs: a worker, a router, a prefill/decode pair, a fake."""

    def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Yields outputs; the last one has a finish_reason. Outputs that a slow reader has not read yet are
        merged. Closing the iterator early aborts the request. Raises RequestError for an impossible request,
        UnavailableError if the engine is asleep, paused or full, and EngineDeadError."""
        ...

    async def abort(self, request_id: str) -> None:
        """Ends a request with FinishReason.ABORT. Ignores unknown ids: the request may just have ended."""
        ...

    async def stats(self) -> Stats:
        """Returns current figures. Raises EngineDeadError if the engine has ended."""
        ...


def check_tags(tags: Sequence[str] | None) -> list[str]:
    """Returns the tags; all for None. Raises ConfigError for unknown tags."""
    if tags is None:
        return list(MEMORY_TAGS)
    unknown = [tag for tag in tags if tag not in MEMORY_TAGS] if not isinstance(tags, str) else [tags]
    if unknown or not tags:
        raise ConfigError(
            f"tags must be a list of {' and '.join(MEMORY_TAGS)}, got {tags!r:.80}; leave it out for all",
            field="tags",
        )
    return [tag for tag in MEMORY_TAGS if tag in tags]


def check_sleep(level: int, tags: Sequence[str] | None, mode: str) -> list[str]:
    """Returns the tags. Raises ConfigError for unknown levels, tags and modes."""
    if level not in (0, 1, 2) or isinstance(level, bool):
        raise ConfigError(
            f"level must be 0 (pause), 1 (keep the weights) or 2 (drop them), got {level!r}; choose one",
            field="level",
        )
    if mode not in SLEEP_MODES:
        raise ConfigError(
            f"mode must be one of {', '.join(SLEEP_MODES)}, got {mode!r}; choose one", field="mode"
        )
    return check_tags(tags)
