"""Structs of JSON answers for the OpenAPI document. Handlers write most answers as plain dicts; a fuzz
test compares the two."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "abort"] | None


class AnthropicErrorDetails(Struct):
    error_code: str


class AnthropicError(Struct, omit_defaults=True):
    type: str
    message: str
    details: AnthropicErrorDetails | None = None


class AnthropicErrorResponse(Struct):
    type: Literal["error"]
    error: AnthropicError


class PromptDetails(Struct):
    cached_tokens: int


class CompletionDetails(Struct):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class UsageInfo(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class CalledFunction(Struct):
    name: str
    arguments: str


class ToolCall(Struct):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(Struct, omit_defaults=True):
    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None  # and under its older name:
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = []


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Struct):
    content: list[ContentLogprob]


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_token_ids: list[int] | None = None
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None


class CompletionLogprobs(Struct):
    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Completion(Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageInfo
    service_tier: None = None
    system_fingerprint: None = None
    kv_transfer_params: None = None


class Embedding(Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 of little-endian float32 where asked for


class EmbeddingUsage(Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Struct):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ModelCard(Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(Struct):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class AddedToken(Struct):
    content: str
    special: bool


class TokenizerInfo(Struct):
    tokenizer_class: str  # the class of transformers that reads such a tokenizer
    chat_template: str | None
    model_max_length: int
    vocab_size: int  # with added tokens
    added_tokens_decoder: dict[str, AddedToken]  # the special ones, by id
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None


class Detokenized(Struct):
    prompt: str


class TokenAnswer(Struct):
    version: Literal[1]
    request_id: str
    prompt_tokens: int
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    num_cached_tokens: int
    logprobs: list[dict[str, Any]] | None = None  # id: [log-probability, rank]
    prompt_logprobs: list[dict[str, Any] | None] | None = None


class Load(Struct):
    server_load: int


class Version(Struct):
    version: str
