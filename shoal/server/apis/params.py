"""Conversion of a request's fields to SamplingParams and prompts."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from shoal.config import ServerConfig
from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.server.apis.protocol import AS_MANY_AS_FIT, Prompts, ResponseFormat, StreamOptions, TextFields
from shoal.server.http.exchange import Exchange
from shoal.server.served.model import Prompt, ServedModel

# Fields that constrain the text, and the kind of StructuredOutputsParams that each sets. The first two set
# any kind; llama.cpp's fields and vLLM's older ones follow.
FORMAT_FIELDS = {
    "response_format": "",
    "structured_outputs": "",
    "json_schema": "json",
    "grammar": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


def text_params(
    exchange: Exchange,
    model: ServedModel,
    request: TextFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Returns the sampling parameters of a request for text. max_tokens None: as many as fit.
    prompt_logprobs: replaces the request's own. Raises ApiError and RequestError."""
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError(
            f"best_of must be n ({request.n or 1}), got {request.best_of}; answers are not ranked, leave it "
            "out",
            field="best_of",
        )
    more: dict[str, Any] = {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "detokenize": model.loaded.tokenizer is not None,
    }
    if prompt_logprobs is not None:
        more["prompt_logprobs"] = prompt_logprobs
    fields = _format_fields(request)
    if fields:
        if fields[0] != "structured_outputs":
            exchange.names["structured_outputs"] = fields[0]
        more["structured_outputs"] = _format(request, fields[0])
    return request.sampling_params(model.loaded.default_params, model.loaded.vocab_size, **more)


def _format_fields(request: TextFields) -> list[str]:
    """Returns the given fields that constrain the text. Several may hold the same constraint, as clients
    send both the older and the newer field. Raises RequestError if they differ."""
    fields = [name for name in FORMAT_FIELDS if getattr(request, name) is not None]
    if request.grammar == "":  # llama.cpp's default
        fields.remove("grammar")
    if request.response_format is not None and request.response_format.type == "text":
        fields.remove("response_format")
    wishes = [_comparable(_format(request, field)) for field in fields] if len(fields) > 1 else []
    if any(wish != wishes[0] for wish in wishes):
        raise RequestError(
            f"{' and '.join(fields)} must not constrain the text in different ways; give one of them",
            field=fields[0],
        )
    return fields


def _comparable(wish: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
    """Returns the constraint with its schema parsed from JSON text, and without an option that has its
    default."""
    if wish is None:
        return None
    schema = wish.json
    if isinstance(schema, str):
        with contextlib.suppress(msgspec.DecodeError):
            schema = msgspec.json.decode(schema)
    return replace(wish, json=schema, disable_any_whitespace=wish.disable_any_whitespace or None)


def _format(request: TextFields, field: str) -> StructuredOutputsParams | None:
    pattern = request.guided_whitespace_pattern
    if field == "structured_outputs":
        return request.structured_outputs
    if field == "response_format":
        return from_response_format(request.response_format, pattern)
    kind = FORMAT_FIELDS[field]
    return StructuredOutputsParams(
        **{kind: getattr(request, field)}, whitespace_pattern=pattern if kind == "json" else None
    )


def from_response_format(
    wanted: ResponseFormat | None, whitespace_pattern: str | None
) -> StructuredOutputsParams | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "structural_tag":
        if wanted.format is None and wanted.structures is None:
            raise RequestError(
                "response_format must have a structural tag; give format, or structures and triggers",
                field="response_format.format",
            )
        tag: dict[str, Any] = {"type": "structural_tag"}
        if wanted.format is not None:
            tag["format"] = wanted.format
        else:
            tag |= {"structures": wanted.structures, "triggers": wanted.triggers}
        return StructuredOutputsParams(structural_tag=tag, whitespace_pattern=whitespace_pattern)
    schema = wanted.schema
    if wanted.type == "json_schema" and wanted.json_schema is not None and schema is None:
        schema = wanted.json_schema.schema
    if schema is not None and not (wanted.type == "json_object" and schema in ({}, True)):
        return StructuredOutputsParams(json=schema, whitespace_pattern=whitespace_pattern)
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True, whitespace_pattern=whitespace_pattern)
    raise RequestError(
        "response_format.json_schema.schema is missing; give the schema, or the type json_object for "
        "any object",
        field="response_format.json_schema",
    )


def check_stream_options(
    stream: bool | None, options: StreamOptions | None, config: ServerConfig
) -> StreamOptions:
    """Returns the options of a stream, with include_usage if the operator forces it. Raises RequestError for
    options without a stream, as OpenAI and vLLM do."""
    if options is not None and not stream:
        raise RequestError(
            "stream_options is for streams; set stream to true or leave it out", field="stream_options"
        )
    found = options or StreamOptions()
    return msgspec.structs.replace(found, include_usage=True) if config.enable_force_include_usage else found


def names_by_ids(exchange: Exchange, request: TextFields) -> bool:
    """Returns whether log-probabilities name tokens by their ids."""
    wanted = request.return_tokens_as_token_ids
    return exchange.context.config.return_tokens_as_token_ids if wanted is None else wanted


async def read_prompts(
    model: ServedModel,
    given: Prompts,
    *,
    field: str,
    add_special_tokens: bool = True,
    keep: int | None = None,
) -> list[Prompt]:
    """Returns the prompts of a completion or embedding request. keep: the number of last tokens that are
    kept of each; None: all. Raises RequestError for a mixture of texts and ids."""
    if isinstance(given, str):
        texts: list[Any] = [given]
    elif not given:
        raise RequestError(f"{field} is empty; give at least one prompt", field=field)
    elif are_ids(given):
        texts = [given]
    elif (kinds := set(map(type, given))) == {str} or kinds == {list}:
        texts = list(given)
    else:
        raise RequestError(
            f"{field} must not mix texts and token ids; give a text, a list of texts, ids, or a list of "
            "lists of ids",
            field=field,
        )
    if isinstance(texts[0], str):
        prompts = [
            Prompt(ids, text)
            for ids, text in zip(await model.encode(texts, add_special_tokens, must_fit=keep is None), texts)
        ]
    else:
        prompts = [Prompt(ids) for ids in texts]
    return [shortened(prompt, keep) for prompt in prompts]


def are_ids(given: Sequence[Any]) -> bool:
    """Returns whether `given`, a JSON list of texts, ids or lists, holds only ids. Building an array is
    three times as fast as looking at each type."""
    if type(given[0]) is not int:
        return False
    try:
        array("I", given)
    except TypeError:
        return False
    return True


def shortened(prompt: Prompt, keep: int | None) -> Prompt:
    """Returns the prompt with its last `keep` tokens, without a text if tokens were cut off."""
    if keep is None or len(prompt.token_ids) <= keep:
        return prompt
    return Prompt(prompt.token_ids[len(prompt.token_ids) - keep :])


def spare_grammar(params: SamplingParams, asked: float | None) -> None:
    """Drops the model's default repetition penalty for an answer under a grammar, unless the request sets
    one: JSON repeats its signs and names, and a penalty drives a small model to rare ones."""
    if params.structured_outputs is not None and asked is None:
        params.repetition_penalty = 1.0


def filled(model: ServedModel, max_tokens: int | None) -> int | None:
    """Returns `max_tokens`, or for -1 the context length, which the generation cuts to what the prompt
    leaves."""
    return model.max_model_len if max_tokens == AS_MANY_AS_FIT else max_tokens


def num_kept(model: ServedModel, asked: int | None, max_tokens: int | None) -> int | None:
    """Returns the number of prompt tokens that truncate_prompt_tokens keeps. -1 keeps as many as leave
    room for the answer."""
    return max(1, model.max_model_len - (max_tokens or 1)) if asked == -1 else asked
