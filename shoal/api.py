"""What crosses every seam: requests, sampling parameters, outputs, and the protocol of an engine.

Torch-free. Field names and meanings are vLLM's where vLLM has them.
"""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from typing import Any, Protocol

from shoal import neutral_fields
from shoal.errors import ConfigError, RequestError
from shoal.fields import check_fields, option

MAX_LOGIT_BIAS = 100.0
MEMORY_TAGS = ("weights", "kv_cache")  # the regions that can sleep
SLEEP_MODES = ("abort", "wait", "keep")  # what becomes of requests that run
# Upper bounds by which steps are counted: vLLM's.
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class FinishReason(enum.StrEnum):
    """Why a request ended. Every request ends exactly once, with one of these."""

    STOP = "stop"  # an end-of-text id, a stop id or a stop string
    LENGTH = "length"  # max_tokens, max_model_len or the whole cache reached
    ABORT = "abort"  # the caller took it back
    ERROR = "error"  # the engine failed


STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(slots=True)
class StructuredOutputsParams:
    """What the text of an answer must look like. Names are vLLM's. Raises RequestError unless exactly one of
    the kinds is given."""

    json: str | dict[str, Any] | bool | None = None  # a JSON schema, or its text
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or GBNF/EBNF where it begins with `root ::=`
    json_object: bool | None = None  # any JSON object
    # Alternatives and sequences of texts and JSON, in xgrammar's form, or their JSON text.
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None  # between the tokens of JSON
    disable_any_whitespace: bool | None = None  # none between them
    # Objects have the keys that their schema names and no others, unless it says so itself. None: as
    # structured_outputs_config says.
    disable_additional_properties: bool | None = None

    def __post_init__(self) -> None:
        given = [name for name in STRUCTURED_KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            what = f"gives {' and '.join(given)}" if given else "gives none of its kinds"
            raise RequestError(
                f"structured_outputs {what}; give exactly one of {', '.join(STRUCTURED_KINDS)}"
            )
        if self.choice is not None and (
            not isinstance(self.choice, list)
            or not all(isinstance(c, str) and c for c in self.choice)
            or not self.choice
        ):
            raise RequestError(
                f"structured_outputs.choice {self.choice!r:.80} is not a list of texts; give at least one"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise RequestError(
                    f"structured_outputs.{name} {getattr(self, name)!r:.80} is no text; give a string"
                )


DRAWING, LENGTH = "how tokens are drawn", "where an answer ends"


@neutral_fields.takes(neutral_fields.SAMPLING)
@dataclass(slots=True)
class SamplingParams:
    """How tokens are drawn and when a request ends. Raises RequestError for impossible values.

    The draw of a token depends on (seed, position) alone; answer i of `n` uses seed + i.
    """

    n: int = option(1, "answers to the prompt", low=1, section="answers")
    presence_penalty: float = option(
        0.0, "above 0 discourages what was said, once", low=-2, high=2, section=DRAWING
    )
    frequency_penalty: float = option(0.0, "above 0 discourages what was said, each time", low=-2, high=2)
    repetition_penalty: float = option(1.0, "above 1 discourages what was said, in the prompt too", above=0)
    temperature: float = option(1.0, "0 is greedy", low=0, common=True)
    top_p: float = option(
        1.0, "smallest set of tokens with this probability mass", above=0, high=1, common=True
    )
    top_k: int = option(0, "the k most likely tokens; 0 and -1 are off", low=-1)
    min_p: float = option(0.0, "tokens at least this fraction as likely as the best", low=0, high=1)
    seed: int | None = option(None, "same seed, same tokens")
    stop: str | list[str] | None = option(None, "texts that end the answer", section=LENGTH)
    stop_token_ids: list[int] | None = option(None, "token ids that end the answer")
    bad_words: list[str] | None = option(
        None, "words whose tokens never follow one another in an answer", section="what may be said"
    )
    include_stop_str_in_output: bool = option(
        False, "the text keeps the stop string that ended it", section=LENGTH
    )
    ignore_eos: bool = option(False, "go on behind an end-of-text id")
    max_tokens: int | None = option(16, "most tokens of an answer", low=1, common=True)
    min_tokens: int = option(0, "tokens before the answer may end", low=0)
    logprobs: int | None = option(
        None,
        "log-probabilities of so many likeliest tokens, too; -1: of all",
        low=-1,
        section="what is returned",
    )
    prompt_logprobs: int | None = option(None, "likewise, for each token of the prompt", low=-1)
    detokenize: bool = option(True, "text, beside token ids")
    skip_special_tokens: bool = option(True, "the text has no special tokens")
    spaces_between_special_tokens: bool = option(True, "means nothing here: there are none anyway")
    logit_bias: dict[int, float] | None = option(
        None, "added to the logits of these token ids, -100 to 100", section="what may be said"
    )
    allowed_token_ids: list[int] | None = option(None, "no other token ids are drawn")
    structured_outputs: StructuredOutputsParams | None = option(None, "what the text must look like")
    skip_reading_prefix_cache: bool = option(
        False, "compute every prompt token, even if its KV is cached", section="execution"
    )

    def __post_init__(self) -> None:
        self._take_lists()
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        if self.seed == -1:
            self.seed = None
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = False
        self.check()

    def _take_lists(self) -> None:
        self.stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name in ("stop", "stop_token_ids", "bad_words", "allowed_token_ids"):
            value = getattr(self, name)
            if value is None and name != "allowed_token_ids":
                setattr(self, name, [])
            elif value is not None and (isinstance(value, str) or not isinstance(value, Iterable)):
                raise RequestError(f"{name} {value!r} is not a list; put it in one")
            elif value is not None:
                setattr(self, name, list(value))

    def check(self) -> None:
        """Raises RequestError for impossible values, which may have been given since it was built."""
        check_fields(self, RequestError)
        allowed = [] if self.allowed_token_ids is None else self.allowed_token_ids
        if {*map(type, (self.stop, self.stop_token_ids, self.bad_words, allowed))} != {list}:
            self._take_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} > max_tokens {self.max_tokens}; lower min_tokens or raise "
                "max_tokens"
            )
        if self.stop and not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(
                f"stop {self.stop!r} holds an empty or non-text entry; every stop string needs at least one "
                "character"
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings need text, and this request is for token ids alone (detokenize "
                "is off); use stop_token_ids"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids and not all(isinstance(i, int) and i >= 0 for i in ids):
                raise RequestError(
                    f"{name} {ids!r} holds something that is no token id; give integers from 0 up"
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids is empty, so no token could ever be drawn; name at least one id or leave "
                "it out"
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs {self.structured_outputs!r:.80} is no StructuredOutputsParams; build "
                "StructuredOutputsParams(...)"
            )
        if self.bad_words and not all(isinstance(w, str) and w for w in self.bad_words):
            raise RequestError(
                f"bad_words {self.bad_words!r} holds an empty or non-text entry; a bad word needs at least "
                "one character"
            )
        if self.logit_bias is not None:
            try:
                self.logit_bias = {int(i): float(b) for i, b in self.logit_bias.items()}
            except (TypeError, ValueError, AttributeError, OverflowError):
                raise RequestError(
                    f"logit_bias {self.logit_bias!r} is not a map from token id to number"
                ) from None
            for token_id, bias in self.logit_bias.items():
                if token_id < 0 or math.isnan(bias):
                    raise RequestError(
                        f"logit_bias {{{token_id}: {bias}}} is not a token id from 0 up and a number; mend "
                        f"or drop it"
                    )
            # vLLM cuts biases to these bounds, too.
            self.logit_bias = {
                i: min(max(b, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for i, b in self.logit_bias.items()
            }

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def needs_extras(self) -> bool:
        """Whether the logits must be changed or looked at outside of the captured step, for these parameters
        (engine/runner/sampling.py)."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
            or self.logprobs is not None
            or self.structured_outputs is not None
        )


@neutral_fields.takes(neutral_fields.BEAM_SEARCH)
@dataclass(slots=True)
class BeamSearchParams:
    """How `LLM.beam_search` looks for likely texts. Raises RequestError for impossible values.

    A finished beam's score is the sum of its log-probabilities, divided by its number of generated tokens
    (its end-of-text id too) to the power of `length_penalty`. `temperature` changes nothing, as in vLLM:
    beams are scored by the model's own log-probabilities.
    """

    beam_width: int = option(MISSING, "beams of each prompt, as many as texts are returned", low=1)
    max_tokens: int = option(MISSING, "most tokens of a beam", low=1)
    ignore_eos: bool = option(False, "go on behind an end-of-text id")
    temperature: float = option(0.0, "means nothing here", low=0)
    length_penalty: float = option(1.0, "above 1 prefers longer texts", above=-math.inf)

    def __post_init__(self) -> None:
        check_fields(self, RequestError)


# The fields of generation_config.json that are defaults of SamplingParams.
GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def sampling_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the defaults of SamplingParams' fields in a model's generation_config.json."""
    found = {name: v for name in GENERATION_FIELDS if (v := generation_config.get(name)) is not None}
    if (most := found.pop("max_new_tokens", None)) is not None and most:
        found["max_tokens"] = most
    return found


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


SINCE_START = {"since_start": True}  # a field that counts since the start of its engine, and never falls


@dataclass(slots=True)
class KvTierStats:
    """A tier below the device, all ranks together."""

    capacity_bytes: int = 0
    capacity_blocks: int = 0
    used_bytes: int = 0
    used_blocks: int = 0
    stored_blocks: int = field(default=0, metadata=SINCE_START)  # that came from above
    stored_bytes: int = field(default=0, metadata=SINCE_START)  # of these
    fetched_blocks: int = field(default=0, metadata=SINCE_START)  # brought back to the device
    fetched_bytes: int = field(default=0, metadata=SINCE_START)  # of these
    # Blocks whose transfer failed: they were computed again, or are lost here.
    failed_blocks: int = field(default=0, metadata=SINCE_START)
    fetch_seconds_per_block: float = 0.0  # to the device, as measured lately
    store_seconds_per_block: float = 0.0  # into the tier; 0 until something was stored
    # Fetches that were begun though the tier looked slower than computing, to measure it again.
    trial_fetches: int = field(default=0, metadata=SINCE_START)


@dataclass(slots=True)
class KvTransferStats:
    """KV blocks that were read from other workers by one transport."""

    blocks: int = field(default=0, metadata=SINCE_START)
    num_bytes: int = field(default=0, metadata=SINCE_START)  # over all ranks
    # From the first byte asked for to the last one that came, summed over the reads.
    seconds: float = field(default=0.0, metadata=SINCE_START)


@dataclass(slots=True)
class KvLoans:
    """KV blocks of prompts that other workers may read here."""

    offers: int = 0  # now
    held_blocks: int = 0  # now; a block counts once for each offer
    blocks_out: int = field(default=0, metadata=SINCE_START)  # of offers that a reader was done with
    bytes_out: int = field(default=0, metadata=SINCE_START)  # likewise
    # Offers that have ended, by how: "done", or the failure's kind (kv/ticket.py).
    ended: dict[str, int] = field(default_factory=dict, metadata=SINCE_START)


@dataclass(slots=True)
class Stats:
    """The engine at one moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_deferred: int = 0  # of those: for a grammar, a store, another worker, a sleeping model
    num_blocks: int = 0
    num_free_blocks: int = 0  # free or evictable
    num_preemptions: int = field(default=0, metadata=SINCE_START)
    prefix_cache_queries: int = field(default=0, metadata=SINCE_START)  # tokens looked up
    prefix_cache_hits: int = field(default=0, metadata=SINCE_START)  # tokens found
    # Tokens that were not found there and looked up in the tiers below, and those fetched.
    external_prefix_cache_queries: int = field(default=0, metadata=SINCE_START)
    external_prefix_cache_hits: int = field(default=0, metadata=SINCE_START)
    # Blocks that were evicted from the device, and are kept nowhere else.
    kv_dropped_blocks: int = field(default=0, metadata=SINCE_START)
    kv_compute_seconds_per_block: float = 0.0  # of a prompt, as measured lately; 0 without such tiers
    kv_tiers: dict[str, KvTierStats] = field(default_factory=dict)  # "host", "disk", "store", those there are
    kv_loans: KvLoans | None = None  # None: others read nothing here
    kv_transfers: dict[str, KvTransferStats] = field(default_factory=dict)  # by transport
    # Requests that computed instead of reading, by what went wrong.
    kv_transfer_failures: dict[str, int] = field(default_factory=dict, metadata=SINCE_START)
    step_tokens: int = field(default=0, metadata=SINCE_START)  # computed in all steps
    # What the engine has measured, where it has a target for the gap between tokens; 0: nothing yet.
    decode_step_s: float = 0.0  # of a step with the decodes that run now
    prompt_token_s: float = 0.0  # of each prompt token in a step
    steps_by_tokens: list[int] = field(
        default_factory=lambda: [0] * (len(STEP_TOKENS) + 1), metadata=SINCE_START
    )

    @property
    def kv_cache_usage(self) -> float:
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0


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


@dataclass(slots=True)
class MemoryReport:
    """What `sleep` or `wake_up` did, summed over ranks. Bytes and seconds.

    Of what is in use now the regions' and this process's parts are told; the rest is that of contexts (of
    CUDA, some 0.5 GiB a process) and of other processes. On the CPU regions alone are counted. An engine's
    call that changes no region tells its seconds alone.
    """

    seconds: float = 0.0
    freed_bytes: int = 0  # of device memory given back (sleep) ...
    taken_bytes: int = 0  # ... or taken again (wake_up)
    host_bytes: int = 0  # kept in host memory now
    in_use_bytes: int = 0  # of device memory, by whomever ...
    region_bytes: int = 0  # ... of them in these regions ...
    process_bytes: int = 0  # ... and in what else PyTorch holds in this process


@dataclass(slots=True)
class SleepState:
    """What of a worker sleeps. Whoever is asked says what is so, not what was asked for last."""

    level: int | None = None  # the deepest since all was awake; 0: only paused; None: awake
    asleep: set[str] = field(default_factory=set)  # tags of the regions that are given back
    kept: str = ""  # where the sleeping weights are: "host", "file"; "": dropped, or awake

    @property
    def is_sleeping(self) -> bool:
        return self.level is not None


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


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `text` is empty when detokenization is off. If finish_reason is "error", `error` says why,
    and text and tokens are those that came before."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    # vLLM's, which mean nothing here.
    lora_request: None = None
    routed_experts: None = None
    kv_transfer_params: None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """The times of a request in seconds, with vLLM's names: `arrival_time` by the wall clock, the others by
    time.monotonic. They are of the first answer, if there are several."""

    arrival_time: float
    queued_ts: float
    scheduled_ts: float = 0.0  # 0.0: not yet
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # between arrival and first token
    num_generation_tokens: int = 0
    is_corrupted: bool = False

    def count(self, num_tokens: int, queued_seconds: float, now: float) -> None:
        """Takes in tokens that came at `now`. queued_seconds: what the first output says of the queue."""
        if not self.num_generation_tokens:
            self.scheduled_ts = self.queued_ts + queued_seconds
            self.first_token_ts, self.first_token_latency = now, now - self.queued_ts
        self.last_token_ts = now
        self.num_generation_tokens += num_tokens


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt, as `LLM.generate` returns them."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestMetrics | None = None  # with disable_log_stats=False
    # vLLM's, which mean nothing here.
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam: `tokens` are the prompt's ids and the generated ones; `text` is both as text, None without a
    tokenizer."""

    tokens: list[int]
    logprobs: list[TokenLogprobs]  # one a generated token
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None  # "stop" at an end-of-text id, "length" at a limit of tokens
    stop_reason: int | str | None = None  # the end-of-text id


@dataclass(slots=True)
class BeamSearchOutput:
    """The `beam_width` best beams of one prompt, the best first, as `LLM.beam_search` returns them."""

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
    """The embedding of one prompt, as `LLM.embed` returns it."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int | None = None
