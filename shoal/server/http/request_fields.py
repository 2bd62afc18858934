"""Fields of other servers' requests that Shoal does not have, as data; docs/request-fields.md is made of it.

A field that would change the answer is refused by its name, unless its value asks for nothing: a 200 would
be taken for the answer that was asked for. Other fields are passed over, most of them with a line in the log.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from shoal.server.errors import ApiError
from shoal.server.http.lenient import FLAGS, as_number


@dataclass(frozen=True)
class Refused:
    """neutral: values without effect, besides null. instead: what to do in place of the field."""

    instead: str
    neutral: tuple[Any, ...] = ()

    def asks_for_nothing(self, value: Any) -> bool:
        """Returns whether the value has no effect, so that the field may be ignored. Numbers and flags may
        be texts, as elsewhere."""
        meant = [value]
        if isinstance(value, str):
            meant += [FLAGS.get(value.lower()), as_number(value)]
        return value is None or any(one is not None and one in self.neutral for one in meant)


@dataclass(frozen=True)
class Ignored:
    """why: the reason that it has no effect. is_logged: the log has a line, once a client."""

    why: str
    is_logged: bool = True


LEAVE = "leave it out"
STORAGE = "it orders another company's storage, prices, filters or cache"
RUNNER = "it says how llama.cpp runs a model"
HOSTED = "such tools run on another company's servers"


SGLANG_FORMS = ("regex", "ebnf", "structural_tag")
CHAT_FORMS = (
    "response_format",
    "json_schema",
    "grammar",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
)


def _forms(names: tuple[str, ...], instead: str) -> dict[str, Refused]:
    """Fields by which other APIs say what an answer must look like."""
    neutral: dict[str, tuple[Any, ...]] = {"response_format": ({"type": "text"},), "grammar": ("",)}
    return {name: Refused(instead, neutral.get(name, ())) for name in names}


# Fields of vLLM's and llama.cpp's requests for text.
TEXT: dict[str, Refused | Ignored] = {
    **_forms(SGLANG_FORMS, "structured_outputs says what the answer must look like"),
    "use_beam_search": Refused("LLM.beam_search has beam search", (False,)),
    "length_penalty": Ignored("it belongs to use_beam_search"),
    "prompt_embeds": Refused("send text or token ids", ([], "")),
    "truncation_side": Refused(
        "truncate_prompt_tokens keeps the last tokens; cut the prompt yourself", ("left",)
    ),
    "logprob_token_ids": Refused("ask for the likeliest tokens by top_logprobs or logprobs", ([],)),
    "prompt_logprob_token_ids": Refused("prompt_logprobs has the likeliest tokens", ([],)),
    "prompt_logprob_start": Refused("prompt_logprobs begins at the first token", (0,)),
    "repetition_detection": Refused(
        "repetition_penalty and max_tokens bound repetitions",
        ({}, {"max_pattern_size": 0}, {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0}),
    ),
    "watermarking": Refused(LEAVE, (False,)),
    "echo": Refused("an answer here is the new text alone", (False,)),
    "kv_transfer_params": Refused("the router hands blocks over by itself", ({},)),
    "ec_transfer_params": Refused(LEAVE, ({},)),
    "vllm_xargs": Refused(LEAVE, ({},)),
    "logits_processors": Refused("logit_bias, bad_words and structured_outputs change logits", ([],)),
    "return_prompt_text": Refused("/detokenize shows the text of return_token_ids", (False,)),
    "n_predict": Refused("use max_tokens", (-1,)),
    "repeat_penalty": Refused("use repetition_penalty", (1,)),
    "n_probs": Refused("use logprobs", (0,)),
    "post_sampling_probs": Refused(LEAVE, (False,)),
    "mirostat": Refused("use top_p or min_p", (0,)),
    "typical_p": Refused("use top_p or min_p", (1,)),
    "dry_multiplier": Refused("use repetition_penalty", (0,)),
    "xtc_probability": Refused("use top_p or min_p", (0,)),
    "dynatemp_range": Refused("use temperature", (0,)),
    "top_n_sigma": Refused("use min_p", (-1, 0)),
    "adaptive_target": Refused("use temperature", (-1,)),
    "t_max_predict_ms": Refused("use timeout", (-1, 0)),
    "n_indent": Refused(LEAVE, (0,)),
    "lora": Refused(LEAVE, ([],)),
    "response_fields": Refused(LEAVE, ([],)),
    "parse_tool_calls": Refused("the option --tool-call-parser none leaves calls in the text", (True,)),
    "reasoning_format": Refused("use include_reasoning", ("auto", "deepseek", "deepseek-legacy")),
    "reasoning_budget": Refused("use thinking_token_budget", (-1,)),
    "mm_processor_kwargs": Ignored("models here read text"),
    "media_io_kwargs": Ignored("models here read text"),
    "routed_experts_prompt_start": Ignored("answers have no routes of experts"),
    "return_token_offsets": Ignored("it is for vLLM's render endpoints"),
    "return_mm_kwargs": Ignored("it is for vLLM's render endpoints"),
    "stream_interval": Ignored("each token is sent when it is there"),
    "session_id": Ignored("the header X-Session-ID keeps a session at one worker"),
    "samplers": Ignored("the order of samplers is fixed"),
    "min_keep": Ignored(RUNNER),
    "cache_prompt": Ignored("the prefix cache finds each prompt by itself"),
    "id_slot": Ignored(RUNNER),
    "n_keep": Ignored(RUNNER),
    "n_discard": Ignored(RUNNER),
    "n_cache_reuse": Ignored(RUNNER),
    "repeat_last_n": Ignored("repetition_penalty looks at all tokens"),
    "mirostat_tau": Ignored("it belongs to mirostat"),
    "mirostat_eta": Ignored("it belongs to mirostat"),
    "dry_base": Ignored("it belongs to dry_multiplier"),
    "dry_allowed_length": Ignored("it belongs to dry_multiplier"),
    "dry_penalty_last_n": Ignored("it belongs to dry_multiplier"),
    "dry_sequence_breakers": Ignored("it belongs to dry_multiplier"),
    "xtc_threshold": Ignored("it belongs to xtc_probability"),
    "dynatemp_exponent": Ignored("it belongs to dynatemp_range"),
    "adaptive_decay": Ignored("it belongs to adaptive_target"),
    "timings_per_token": Ignored("/requests/ID has the times of a request"),
    "return_progress": Ignored("/requests/ID has the times of a request"),
}
# Fields of OpenAI's requests.
OPENAI: dict[str, Refused | Ignored] = {
    "store": Ignored(STORAGE, is_logged=False),
    "metadata": Ignored(STORAGE, is_logged=False),
    "service_tier": Ignored(STORAGE, is_logged=False),
    "prompt_cache_key": Ignored(STORAGE, is_logged=False),
    "prompt_cache_retention": Ignored(STORAGE, is_logged=False),
    "prompt_cache_options": Ignored("/v1/responses has it"),
    "safety_identifier": Ignored(STORAGE, is_logged=False),
    "verbosity": Ignored("it is a hint to models that were trained on it", is_logged=False),
    "client_metadata": Ignored(STORAGE, is_logged=False),
    "moderation": Ignored(STORAGE),
    "prediction": Ignored("a guess of the answer saves no work here"),
    "web_search_options": Ignored(HOSTED),
}
CHAT = {**TEXT, **OPENAI}
COMPLETIONS = {name: field for name, field in CHAT.items() if name != "echo"}
RESPONSES: dict[str, Refused | Ignored] = {
    **CHAT,
    **_forms(CHAT_FORMS, "text.format says what the answer must look like"),
    "enable_response_messages": Refused(LEAVE, (False,)),
    "previous_input_messages": Refused("send all of the conversation as input", ([],)),
    "max_tool_calls": Ignored(HOSTED),
    "context_management": Ignored("a conversation is used as it is sent"),
    "background_options": Ignored("nothing runs in the background"),
    "access_programs": Ignored(STORAGE),
    "image": Ignored("answers are text"),
}
EMBEDDINGS: dict[str, Refused | Ignored] = {
    **OPENAI,
    "truncation_side": TEXT["truncation_side"],
    "normalize": Refused("vectors have unit length; leave it out", (True,)),
    "use_activation": Refused("vectors have unit length; leave it out", (True,)),
    "activation": Refused("vectors have unit length; leave it out", (True,)),
    "embd_normalize": Refused("vectors have unit length; leave it out", (2,)),
    "embed_dtype": Refused("numbers are float32", ("float32",)),
    "endianness": Refused("numbers are little-endian", ("native", "little")),
    "mm_processor_kwargs": TEXT["mm_processor_kwargs"],
    "task": Ignored("a model embeds as its configuration says"),
}
MESSAGES: dict[str, Refused | Ignored] = {
    **_forms(
        (*CHAT_FORMS, *SGLANG_FORMS, "structured_outputs"),
        "output_config.format says what the answer must look like",
    ),
    "service_tier": Ignored(STORAGE, is_logged=False),
    "container": Ignored(STORAGE, is_logged=False),
    "inference_geo": Ignored(STORAGE, is_logged=False),
    "cache_control": Ignored("the prefix cache finds each prompt by itself", is_logged=False),
    "context_management": Ignored("a conversation is used as it is sent"),
    "compaction": Ignored("a conversation is used as it is sent"),
    "mcp_servers": Ignored(HOSTED),
    "speed": Ignored(STORAGE),
    "fallbacks": Ignored(STORAGE),
    "fallback_credit_token": Ignored(STORAGE),
    "diagnostics": Ignored(STORAGE),
    "billing_policy": Ignored(STORAGE),
    "user_profile_id": Ignored(STORAGE),
    "workspace_id": Ignored(STORAGE),
    "betas": Ignored("it is sent as a header"),
    "store": Ignored(STORAGE, is_logged=False),
}
OLLAMA: dict[str, Refused | Ignored] = {
    **_forms(
        (*CHAT_FORMS, *SGLANG_FORMS, "structured_outputs"), "format says what the answer must look like"
    ),
    "shift": Ignored("an answer ends where the context is full"),
    "truncate": Ignored("a prompt that is too long is refused"),
    "width": Ignored("answers are text"),
    "height": Ignored("answers are text"),
    "steps": Ignored("answers are text"),
}
# By the name of the type of a request, or of one that it extends.
FIELDS = {
    "ChatCompletionRequest": CHAT,
    "CompletionRequest": COMPLETIONS,
    "ResponsesRequest": RESPONSES,
    "EmbeddingRequest": EMBEDDINGS,
    "CountTokensRequest": MESSAGES,
    "OllamaRequest": OLLAMA,
}


@functools.cache
def fields_of(kind: type) -> dict[str, Refused | Ignored]:
    """Returns the fields of a type of request that are refused or ignored."""
    found = [FIELDS[each.__name__] for each in kind.__mro__ if each.__name__ in FIELDS]
    own = set(getattr(kind, "__struct_fields__", ()))
    return {name: field for name, field in (found[0] if found else {}).items() if name not in own}


@functools.cache
def _refused(kind: type) -> dict[str, Refused]:
    return {name: field for name, field in fields_of(kind).items() if isinstance(field, Refused)}


def is_silent(kind: type, name: str) -> bool:
    """Returns whether a field is ignored without a line in the log."""
    field = fields_of(kind).get(name)
    return isinstance(field, Ignored) and not field.is_logged


def why_ignored(kind: type, name: str) -> str:
    """Returns why a field has no effect, as the end of a sentence; "" for a name that no API knows."""
    field = fields_of(kind).get(name)
    return f", as {field.why}" if isinstance(field, Ignored) else ""


def refuse(kind: type, body: bytes) -> None:
    """Raises ApiError for a field that would change the answer. `body` has been read as this type before.

    To look for each name in the bytes costs little; only a body that has one is parsed again."""
    refused = _refused(kind)
    found = [name for name in refused if b'"%b"' % name.encode() in body]
    if not found:
        return
    given = json.loads(body)  # which takes half a character, too
    for name in found:
        value, field = given.get(name), refused[name]
        if not field.asks_for_nothing(value):
            raise ApiError(
                400,
                f"{name} {value!r:.100} would change the answer, and this server does not have it; "
                f"{field.instead}",
                param=name,
            )
