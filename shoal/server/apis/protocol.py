"""Request bodies of OpenAI's APIs: one Struct each, with OpenAI's and vLLM's field names. Unknown fields are
ignored, as theirs are, but `unknown_fields` finds them.

Types and ranges of integers (they must fit the wire) are checked here; the meaning of a value is checked
where it is used (SamplingParams, the engine). The OpenAPI document is made from these Structs.
"""

from __future__ import annotations

import dataclasses
import typing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shoal.errors import RequestError
from shoal.options.fields import kind_of
from shoal.sampling_params import SamplingParams, StructuredOutputsParams

AS_MANY_AS_FIT = -1  # max_tokens: fill the context
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(gt=0)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
MinusOneOrMore = Annotated[int, Meta(ge=-1, lt=2**31)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, Meta(min_length=1)]
Word = Annotated[str, Meta(max_length=1000)]
Words = Annotated[list[Word], Meta(max_length=256)]  # each is searched for at every token
Prompts = str | list[str | TokenId | list[TokenId]]  # a text, texts, ids, or lists of ids


class JsonSchemaFormat(Struct, kw_only=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None  # llama.cpp's place for it, with either type of JSON
    format: dict[str, Any] | None = None  # a structural tag's, in xgrammar's form
    structures: list[dict[str, Any]] | None = None  # the same in its older form
    triggers: list[str] | None = None


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None  # a last chunk with the usage of the whole answer
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk
    # OpenAI pads events against eavesdroppers by default; this server never does
    include_obfuscation: bool | None = None


def _plain_fields() -> list[tuple[str, Any, None]]:
    """Returns an optional field for each number and each boolean of SamplingParams, except the fields that
    differ between endpoints."""
    hints = typing.get_type_hints(SamplingParams)
    found: list[tuple[str, Any, None]] = []
    for field in dataclasses.fields(SamplingParams):
        kind, _ = kind_of(hints[field.name])
        limits, meaning = field.metadata["limits"], field.metadata["help"]
        if field.name in ("logprobs", "detokenize") or kind not in (int, float, bool):
            continue
        meta = Meta(description=meaning)
        if kind is int and limits.low is None:
            meta = Meta(description=meaning, ge=-(2**63), le=2**63 - 1)
        elif kind is int:
            low = AS_MANY_AS_FIT if field.name == "max_tokens" else limits.low
            meta = Meta(description=meaning, ge=low, lt=2**31)
        found.append((field.name, Annotated[kind, meta] | None, None))
    return found


PlainSamplingFields: Any = msgspec.defstruct(
    "PlainSamplingFields", _plain_fields(), kw_only=True, module=__name__
)


class SamplingFields(PlainSamplingFields, Struct, kw_only=True):
    """SamplingParams' fields. None means the model's own default (generation_config.json), else
    SamplingParams' default. Numbers and booleans are generated from SamplingParams; lists are here, with
    the bounds that an untrusted request needs."""

    stop: Word | Words | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: Words | None = None
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def sampling_params(self, defaults: dict[str, Any], vocab_size: int, **more: Any) -> SamplingParams:
        """defaults: the model's own, by field. more: overrides all. Raises RequestError, and ApiError for
        lists of tokens that are longer than the vocabulary."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if (value := getattr(self, name)) is not None and len(value) > vocab_size:
                raise RequestError(
                    f"{name} must have at most one entry for each of the {vocab_size} tokens, got "
                    f"{len(value)}; name each once",
                    field=name,
                )
        given = {name: value for name in SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        return SamplingParams(**{**defaults, **given, **more})


SAMPLING_NAMES = SamplingFields.__struct_fields__


class GenerationFields(SamplingFields, kw_only=True):
    """Fields of every request for tokens, besides the sampling fields."""

    model: str | None = None  # None: the first model
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Text | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    timeout: Seconds | None = None
    user: str | None = None
    thinking_token_budget: MinusOneOrMore | None = None  # most tokens of reasoning; -1: no limit


class TextFields(GenerationFields, kw_only=True):
    """Requests whose answer is text."""

    best_of: Positive | None = None  # only n itself is possible
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: MinusOneOrMore | None = None  # number of last tokens kept; -1: as many as fit
    # llama.cpp's names of structured_outputs' fields, and below vLLM's older ones.
    json_schema: str | dict[str, Any] | bool | None = None
    grammar: str | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_decoding_backend: str | None = None  # there is one


class ChatCompletionRequest(TextFields, kw_only=True):
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: MinusOneOrMore | None = None
    max_completion_tokens: MinusOneOrMore | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None  # OpenAI's older names: legacy_functions.py
    function_call: str | dict[str, Any] | None = None
    modalities: list[str] | None = None  # text alone
    audio: dict[str, Any] | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None


class BatchChatCompletionRequest(ChatCompletionRequest, kw_only=True):
    """Several conversations, whose other fields are the same."""

    messages: Annotated[  # type: ignore[assignment]
        list[Annotated[list[dict[str, Any]], Meta(min_length=1)]], Meta(min_length=1)
    ]


class CompletionRequest(TextFields, kw_only=True):
    prompt: Prompts
    max_tokens: MinusOneOrMore | None = None  # 0, with echo: the prompt alone, for its log-probabilities
    echo: bool | None = None  # the prompt before its continuation
    logprobs: MinusOneOrMore | None = None
    suffix: str | None = None  # refused: no model here fills in the middle


class EmbeddingRequest(Struct, kw_only=True):
    """Either `input` or `messages`, a conversation that goes through the chat template."""

    input: Prompts | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Positive | None = None  # number of first components kept, scaled to unit length again
    user: str | None = None
    truncate_prompt_tokens: MinusOneOrMore | None = None
    add_special_tokens: bool | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Text | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    timeout: Seconds | None = None


class TokenizeRequest(Struct, kw_only=True):
    """Either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Struct, kw_only=True):
    tokens: list[TokenId]
    model: str | None = None


class TokenSampling(SamplingFields, kw_only=True):
    """The sampling parameters of the token-level endpoint: SamplingParams by name."""

    logprobs: MinusOneOrMore | None = None


class TokenRequest(Struct, kw_only=True):
    """Token ids in, token ids out: what a router sends to a worker."""

    token_ids: Annotated[list[TokenId], Meta(min_length=1)]
    version: Literal[1] = 1  # the version of this endpoint's protocol; another one is refused
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    model: str | None = None
    sampling_params: TokenSampling | None = None
    stream: bool = False
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Text | None = None
    timeout: Seconds | None = None


class UpdateWeightsRequest(Struct, kw_only=True):
    """Exactly one of them: a checkpoint's folder or file, or a model's name on the hub."""

    path: Text | None = None
    model: Text | None = None
