"""What clients send: one Struct a request body, with OpenAI's and vLLM's field names. Unknown fields are
ignored, as theirs are, but `unknown_fields` finds them.

Types are checked here, and ranges of integers (they must fit the wire); what a value means is checked where
it is used (SamplingParams, the engine). The OpenAPI document is made from these Structs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from shoal.option_fields import kind_of
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.server.errors import ApiError
from shoal.server.http.lenient import as_meant, with_whole_characters
from shoal.server.http.request_fields import is_silent
from shoal.server.http.wrong_key import wrong_key

T = TypeVar("T")
SMALL_BODY = 1 << 16  # bytes: whatever they hold, they are read in some milliseconds
MOST_VALUES = 1_000_000  # JSON values in a body
MOST_CONTAINERS = 100_000  # lists and objects among them
MISSING = "Object missing required field "
UNKNOWN = "Object contains unknown field "  # of a Struct that forbids them
GOT_FLOAT = "got `float`"
GOT_LOOSE = re.compile("got `(null|str|int)`$")  # see lenient.py
MOST_EXACT = 1 << 53  # beyond it a float stands for several integers

AS_MANY_AS_FIT = -1  # max_tokens: fill the context
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, Meta(gt=0)]
Positive = Annotated[int, Meta(ge=1, lt=2**31)]
MinusOneOrMore = Annotated[int, Meta(ge=-1, lt=2**31)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, Meta(min_length=1)]
Word = Annotated[str, Meta(max_length=1000)]
Words = Annotated[list[Word], Meta(max_length=256)]  # each is looked for at every token
Prompts = str | list[str | TokenId | list[TokenId]]  # a text, texts, ids, or lists of ids


class JsonSchemaFormat(Struct, kw_only=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None


class ResponseFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | bool | None = None  # llama.cpp's place for it, beside either type of JSON
    format: dict[str, Any] | None = None  # a structural tag's, in xgrammar's form
    structures: list[dict[str, Any]] | None = None  # the same in its older form
    triggers: list[str] | None = None


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None  # a last chunk with the usage of the whole answer
    continuous_usage_stats: bool | None = None  # the usage so far in every chunk
    # OpenAI pads events against listeners unless told not to; nothing is padded here
    include_obfuscation: bool | None = None


def _plain_fields() -> list[tuple[str, Any, None]]:
    """An optional field for each number and each yes-or-no of SamplingParams, but those that the endpoints
    spell each in its way."""
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
    """How tokens are drawn: SamplingParams' fields. None means the model's own default
    (generation_config.json), else SamplingParams' default. Numbers and yes-or-no follow from there; lists are
    here, with the bounds that a stranger's request needs."""

    stop: Word | Words | None = None
    stop_token_ids: list[TokenId] | None = None
    bad_words: Words | None = None
    logit_bias: dict[TokenId, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def sampling_params(self, defaults: dict[str, Any], vocab_size: int, **more: Any) -> SamplingParams:
        """`defaults`: the model's own, by field. `more` wins over everything. Raises RequestError, and
        ApiError for lists of tokens that are longer than the vocabulary."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            if (value := getattr(self, name)) is not None and len(value) > vocab_size:
                raise ApiError(
                    400,
                    f"{name} has {len(value)} entries, and the model's vocabulary has {vocab_size} tokens; "
                    "name each once",
                    param=name,
                )
        given = {name: value for name in SAMPLING_NAMES if (value := getattr(self, name)) is not None}
        return SamplingParams(**{**defaults, **given, **more})


SAMPLING_NAMES = SamplingFields.__struct_fields__


class GenerationFields(SamplingFields, kw_only=True):
    """The fields of every request for tokens that do not say how tokens are drawn."""

    model: str | None = None  # None: the first model
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Text | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    timeout: Seconds | None = None
    user: str | None = None


class TextFields(GenerationFields, kw_only=True):
    """Requests whose answer is text."""

    best_of: Positive | None = None  # only n itself is possible
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: MinusOneOrMore | None = None  # keep the last so many; -1: as many as fit
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
    functions: list[dict[str, Any]] | None = None  # OpenAI's older names: functions.py
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
    dimensions: Positive | None = None  # keep the first so many, scaled to unit length again
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


def check_size(body: bytes, num_tokens: int) -> None:
    """Refuses JSON that would take long to read although its bytes are few: a parsed `[]` is forty times as
    large, and nothing else runs meanwhile. num_tokens: how many fit into the model; so many more values are
    allowed. Raises ApiError."""
    if len(body) <= SMALL_BODY:
        return
    for marks, most, what in (
        (b"[{", MOST_CONTAINERS + num_tokens, "lists and objects"),
        (b",", MOST_VALUES + 2 * num_tokens, "values"),
    ):
        count = sum(map(body.count, marks))
        if count > most:
            raise ApiError(
                413,
                f"the body has {count} {what} (commas and brackets within texts included), more than "
                f"{most}, the most that is read at once; send several requests",
            )


def decode(kind: type[T], body: bytes) -> T:
    """The request in `body`. Raises ApiError (400), which names the field that is wrong."""
    try:
        if len(body) <= SMALL_BODY:
            return msgspec.json.decode(body, type=kind)
        with _without_collections():
            return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        if message.endswith(GOT_FLOAT) and (with_integers := _with_integers(body)) != body:
            return decode(kind, with_integers)
        if GOT_LOOSE.search(message) and (meant := as_meant(kind, body)) != body:
            return decode(kind, meant)
        field = path.replace("`", "").removeprefix("key in ").removeprefix("$.") or None
        if field and ("key` in" in path or "[...]" in path):
            field, _, rest = field.partition("[...]")
            key = wrong_key(kind, body, field)
            field += rest if key is None else f"[{key}]{rest}"
        if message.startswith(MISSING):
            name = message.removeprefix(MISSING).strip("`")
            field = f"{field}.{name}" if field else name
            message = "the field is missing"
        elif message.startswith(UNKNOWN):
            name = message.removeprefix(UNKNOWN).strip("`")
            field = f"{field}.{name}" if field else name
            message = "there is no such field"
            if field == name and issubclass(kind, Struct):
                message += f"; there are {', '.join(kind.__struct_fields__)}"
        raise ApiError(400, f"{field}: {message}" if field else message, param=field) from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except msgspec.DecodeError as error:
        if (whole := with_whole_characters(body)) != body:
            return decode(kind, whole)
        raise ApiError(400, f"the body is no JSON: {error}") from None


def _with_integers(body: bytes) -> bytes:
    """The same JSON with 2 in place of 2.0, which clients send whose language knows no integers. What cannot
    be read stays as it is."""
    try:
        return msgspec.json.encode(_INTEGERS.decode(body))
    except (ValueError, RecursionError):
        return body


def _number(text: str) -> int | float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return int(number) if number.is_integer() and abs(number) <= MOST_EXACT else number


_INTEGERS = msgspec.json.Decoder(float_hook=_number)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Python's garbage collector would look at a large body's values again and again while they come: three
    times the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def unknown_fields(kind: type, body: bytes) -> list[str]:
    """The names in `body` that are no fields of `kind`, also those within its options, such as
    "stream_options.usage". `decode` has read the body before. Raises ApiError (400) for a name that is no
    valid text, which `decode` passes over."""
    given = decode(dict[str, msgspec.Raw], body)
    options = _options_by_field(kind)
    found = [name for name in given if name not in options and not is_silent(kind, name)]
    for name, option in options.items():
        if option is not None and name in given and (raw := bytes(given[name])).startswith(b"{"):
            found += [f"{name}.{field}" for field in unknown_fields(option, raw)]
    return found


@functools.cache
def _options_by_field(kind: type) -> dict[str, type | None]:
    """Every field, with the type of its options where it has some."""
    found: dict[str, type | None] = {}
    for name, hint in typing.get_type_hints(kind).items():
        types = [t for t in (hint, *typing.get_args(hint)) if isinstance(t, type)]
        found[name] = next((t for t in types if issubclass(t, Struct) or dataclasses.is_dataclass(t)), None)
    return found
