"""Sampling parameters of a request, with the names that vLLM has in this module."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, TypeVar

from shoal.errors import RequestError
from shoal.options.fields import check_fields, option

MAX_LOGIT_BIAS = 100.0
STRUCTURED_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

T = TypeVar("T")

# Fields of vLLM's parameters that Shoal does not have. Programs may pass them with these neutral values;
# others are refused by name, as the answer would be wrong.
# RequestOutputKind: `generate` returns CUMULATIVE and FINAL_ONLY outputs in any case.
WHOLE_OUTPUTS = (None, 0, 2)
NEUTRAL_SAMPLING: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "truncate_prompt_tokens": (None,),
    "prompt_logprob_token_ids": (None, []),
    "prompt_logprob_start": (None, 0),
    "logprob_token_ids": (None, []),
    "flat_logprobs": (None, False),
    "output_kind": WHOLE_OUTPUTS,
    "stream_interval": (None, 1),
    "skip_clone": (None, False, True),
    "output_text_buffer_length": (None, 0),
    "guided_decoding": (None,),
    "logits_processors": (None, []),
    "extra_args": (None, {}),
    "repetition_detection": (None,),
    "routed_experts_prompt_start": (None, 0),
    "trace_decode_token_ids": (None, []),
}
NEUTRAL_BEAM_SEARCH: Mapping[str, tuple[Any, ...]] = {
    "include_stop_str_in_output": (None, False),
    "structured_outputs": (None,),
}


def _takes(fields: Mapping[str, tuple[Any, ...]]) -> Callable[[type[T]], type[T]]:
    """Returns a class decorator: the constructor accepts these fields, too, each with its neutral values, and
    raises RequestError for others."""

    def decorate(cls: type[T]) -> type[T]:
        plain = cls.__init__

        @functools.wraps(plain)
        def init(self: T, *args: Any, **given: Any) -> None:
            for name in given.keys() & fields.keys():
                value = given.pop(name)
                if getattr(value, "value", value) not in fields[name]:  # an enum is compared by its number
                    raise RequestError(
                        f"{name} must be {' or '.join(map(repr, fields[name]))}, got {value!r:.100}; Shoal's "
                        f"{cls.__name__} does not have it, so leave it out",
                        field=name,
                    )
            plain(self, *args, **given)

        cls.__init__ = init  # type: ignore[method-assign, assignment]
        return cls

    return decorate


@dataclass(slots=True)
class StructuredOutputsParams:
    """A constraint on the text of an answer. Names are vLLM's. Raises RequestError unless exactly one kind is
    given."""

    json: str | dict[str, Any] | bool | None = None  # a JSON schema, or its text
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None  # Lark, or GBNF/EBNF where it begins with `root ::=`
    json_object: bool | None = None  # any JSON object
    # Alternatives and sequences of texts and JSON, in xgrammar's form, or their JSON text.
    structural_tag: str | dict[str, Any] | None = None
    whitespace_pattern: str | None = None  # regex of the white space between the tokens of JSON
    disable_any_whitespace: bool | None = None  # no white space between them
    # True: objects have only the keys that their schema names, unless the schema allows others. None: the
    # default of structured_outputs_config.
    disable_additional_properties: bool | None = None
    # Reasoning that precedes the constrained text: its opening mark, without which there is none ("": the
    # prompt has the mark), its closing mark, and the text between that and the constrained one.
    reasoning: tuple[str, str, str] | None = None

    def __post_init__(self) -> None:
        if len(given := self.kinds) != 1:
            got = " and ".join(given) or "nothing"
            raise RequestError(
                f"structured_outputs must have exactly one of {', '.join(STRUCTURED_KINDS)}, got {got}; "
                "give one",
                field="structured_outputs",
            )
        if self.choice is not None and (
            not isinstance(self.choice, list)
            or not all(isinstance(c, str) and c for c in self.choice)
            or not self.choice
        ):
            raise RequestError(
                f"structured_outputs.choice must be a list of strings, got {self.choice!r:.80}; give at "
                "least one",
                field="structured_outputs.choice",
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise RequestError(
                    f"structured_outputs.{name} must be a string, got {getattr(self, name)!r:.80}; give one",
                    field=f"structured_outputs.{name}",
                )

    @property
    def kinds(self) -> list[str]:
        """The kinds of STRUCTURED_KINDS that are given. False as `json` is a schema, which no value fits."""
        values = {name: getattr(self, name) for name in STRUCTURED_KINDS}
        return [
            name
            for name, value in values.items()
            if value is not None and (value is not False or name == "json")
        ]


# Fields of SamplingParams that hold lists, and what may be given.
LISTS = {
    "stop": "a string or a list of strings",
    "stop_token_ids": "a list of token ids",
    "bad_words": "a list of strings",
    "allowed_token_ids": "a list of token ids",
}
SAMPLING_SECTION, LENGTH_SECTION = "sampling", "length of an answer"


@_takes(NEUTRAL_SAMPLING)
@dataclass(slots=True)
class SamplingParams:
    """Parameters of sampling and of the end of a request. Raises RequestError for impossible values.

    The sampled token depends only on the logits, the seed and the position; answer i of `n` uses seed + i.
    """

    n: int = option(1, "number of answers to the prompt", low=1, section="answers")
    presence_penalty: float = option(
        0.0,
        "penalty of tokens that are in the answer already, once per token; above 0 discourages them",
        low=-2,
        high=2,
        section=SAMPLING_SECTION,
    )
    frequency_penalty: float = option(
        0.0, "penalty of tokens in the answer, for each occurrence; above 0 discourages them", low=-2, high=2
    )
    repetition_penalty: float = option(
        1.0, "factor against tokens of the prompt and the answer; above 1 discourages them", above=0
    )
    temperature: float = option(1.0, "divisor of the logits; 0 is greedy", low=0, common=True)
    top_p: float = option(
        1.0,
        "probability mass of the smallest set of likely tokens to sample from",
        above=0,
        high=1,
        common=True,
    )
    top_k: int = option(0, "number of most likely tokens to sample from; 0 and -1: all", low=-1)
    min_p: float = option(
        0.0, "least probability of a token, as a fraction of the best token's", low=0, high=1
    )
    seed: int | None = option(None, "seed of the sampling: the same seed gives the same tokens")
    stop: str | list[str] | None = option(None, "texts that end the answer", section=LENGTH_SECTION)
    stop_token_ids: list[int] | None = option(None, "token ids that end the answer")
    bad_words: list[str] | None = option(
        None, "words that never appear in an answer", section="allowed tokens"
    )
    include_stop_str_in_output: bool = option(
        False, "keep the stop string at the end of the text", section=LENGTH_SECTION
    )
    ignore_eos: bool = option(False, "continue after an end-of-text id")
    max_tokens: int | None = option(16, "most tokens of an answer", low=1, common=True)
    min_tokens: int = option(0, "least tokens of an answer", low=0)
    logprobs: int | None = option(
        None,
        "number of likeliest tokens whose log-probabilities are returned for each token; -1: all",
        low=-1,
        section="returned fields",
    )
    prompt_logprobs: int | None = option(None, "the same number for each token of the prompt", low=-1)
    detokenize: bool = option(True, "return text in addition to token ids")
    skip_special_tokens: bool = option(True, "leave special tokens out of the text")
    spaces_between_special_tokens: bool = option(True, "accepted for vLLM compatibility; has no effect")
    logit_bias: dict[int, float] | None = option(
        None,
        "numbers from -100 to 100 that are added to the logits of these token ids",
        section="allowed tokens",
    )
    allowed_token_ids: list[int] | None = option(None, "token ids to sample from; default: all")
    structured_outputs: StructuredOutputsParams | None = option(
        None, "constraint on the text, such as a JSON schema"
    )
    skip_reading_prefix_cache: bool = option(
        False, "compute every prompt token, even if its KV is cached", section="execution"
    )
    thinking_token_budget: int | None = option(
        None, "most tokens of reasoning in an answer, which continues after them; -1: no limit", low=-1
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
        for name, kind in LISTS.items():
            value = getattr(self, name)
            if value is None and name != "allowed_token_ids":
                setattr(self, name, [])
            elif value is not None and (
                isinstance(value, str | bytes | bytearray) or not isinstance(value, Iterable)
            ):
                raise RequestError(f"{name} must be {kind}, got {value!r:.200}; give one", field=name)
            elif value is not None:
                setattr(self, name, list(value))

    def check(self) -> None:
        """Raises RequestError for impossible values, which may have been set after the construction."""
        check_fields(self, RequestError)
        allowed = [] if self.allowed_token_ids is None else self.allowed_token_ids
        if {*map(type, (self.stop, self.stop_token_ids, self.bad_words, allowed))} != {list}:
            self._take_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens {self.min_tokens} > max_tokens {self.max_tokens}; lower min_tokens or raise "
                "max_tokens",
                field="min_tokens",
            )
        if self.stop and not all(isinstance(s, str) and s for s in self.stop):
            raise RequestError(
                f"stop must be strings of at least one character, got {self.stop!r:.200}; leave the others "
                "out",
                field="stop",
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop strings need text, and detokenize is False; use stop_token_ids", field="stop"
            )
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids and not all(isinstance(i, int) and i >= 0 for i in ids):
                raise RequestError(
                    f"{name} must be integers from 0, got {ids!r:.200}; give token ids", field=name
                )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError(
                "allowed_token_ids must have at least one id, got an empty list; name one or leave it out",
                field="allowed_token_ids",
            )
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise RequestError(
                f"structured_outputs must be a StructuredOutputsParams, got {self.structured_outputs!r:.80}; "
                "build one",
                field="structured_outputs",
            )
        if self.bad_words and not all(isinstance(w, str) and w for w in self.bad_words):
            raise RequestError(
                f"bad_words must be strings of at least one character, got {self.bad_words!r:.200}; leave "
                "the others out",
                field="bad_words",
            )
        if self.logit_bias is not None:
            try:
                self.logit_bias = {int(i): float(b) for i, b in self.logit_bias.items()}
            except (TypeError, ValueError, AttributeError, OverflowError):
                raise RequestError(
                    f"logit_bias must map token ids to numbers, got {self.logit_bias!r:.200}; give a map",
                    field="logit_bias",
                ) from None
            for token_id, bias in self.logit_bias.items():
                if token_id < 0 or math.isnan(bias):
                    raise RequestError(
                        "logit_bias must map token ids from 0 to numbers, got "
                        f"{{{token_id}: {bias}}}; correct or drop it",
                        field="logit_bias",
                    )
            # vLLM cuts biases to these bounds, too.
            self.logit_bias = {
                i: min(max(b, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for i, b in self.logit_bias.items()
            }

    @property
    def has_penalties(self) -> bool:
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)

    @property
    def needs_sampler_options(self) -> bool:
        """True if sampling needs more than the fields of a state row (engine/runner/whole_rows.py), or more
        than tokens is returned."""
        return bool(
            self.has_penalties
            or self.logit_bias
            or self.allowed_token_ids is not None
            or self.min_tokens
            or self.logprobs is not None
            or self.structured_outputs is not None
        )


@_takes(NEUTRAL_BEAM_SEARCH)
@dataclass(slots=True)
class BeamSearchParams:
    """Parameters of `LLM.beam_search`. Raises RequestError for impossible values.

    A finished beam's score is the sum of its log-probabilities, divided by its number of generated tokens
    (with its end-of-text id) to the power of `length_penalty`. `temperature` has no effect, as in vLLM: beams
    are scored by the model's own log-probabilities.
    """

    beam_width: int = option(MISSING, "number of beams, and of returned texts, per prompt", low=1)
    max_tokens: int = option(MISSING, "most tokens of a beam", low=1)
    ignore_eos: bool = option(False, "continue after an end-of-text id")
    temperature: float = option(0.0, "accepted for vLLM compatibility; has no effect", low=0)
    length_penalty: float = option(
        1.0, "exponent of the length in a score; above 1 prefers longer texts", above=-math.inf
    )

    def __post_init__(self) -> None:
        check_fields(self, RequestError)


# From fields of generation_config.json to SamplingParams' names, where these differ.
RENAMED_FIELDS = {"max_new_tokens": "max_tokens", "stop_strings": "stop"}
# Fields of generation_config.json that are defaults of SamplingParams.
GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens")


def sampling_defaults(generation_config: Mapping[str, Any], has_text: bool = True) -> dict[str, Any]:
    """Returns the defaults of SamplingParams' fields in a model's generation_config.json. `has_text`: stop
    strings need text, so an engine without a tokenizer has none."""
    found = {name: v for name in GENERATION_FIELDS if (v := generation_config.get(name)) is not None}
    if (most := found.pop("max_new_tokens", None)) is not None and most:
        found["max_tokens"] = most
    if has_text and (texts := generation_config.get("stop_strings")):
        found["stop"] = texts
    return found
