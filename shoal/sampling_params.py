"""How tokens are sampled: the parameters of a request, with the names that vLLM has in this module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from shoal import neutral_fields
from shoal.errors import RequestError
from shoal.option_fields import check_fields, option

MAX_LOGIT_BIAS = 100.0


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
