"""Token ids: /tokenize, /detokenize, /v1/embeddings, and the token-level endpoint that a router speaks to a
worker."""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

from shoal.api import TokenLogprobs
from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams
from shoal.server.apis.params import read_prompts, shortened
from shoal.server.apis.parts import readable_message
from shoal.server.apis.protocol import (
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    TokenRequest,
    TokenSampling,
)
from shoal.server.apis.response_shapes import LOWEST, encode
from shoal.server.apis.shapes import AddedToken, TokenizerInfo
from shoal.server.errors import ApiError
from shoal.server.http.exchange import DONE, Exchange
from shoal.server.served.model import Prompt, ServedModel
from shoal.text.answer import Delta

TOKEN_PROTOCOL = 1  # version of /inference/v1/generate
MAX_INPUTS = 2048  # in one request for embeddings, as OpenAI documents it; more where the queue is longer


async def tokenize(exchange: Exchange) -> None:
    request = exchange.decode(TokenizeRequest)
    model = exchange.models.find(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("prompt and messages: give exactly one of them", field="prompt")
    if request.messages is not None:
        ids = (await _prompt_of(exchange, model, request, request.messages, tools=request.tools)).token_ids
    else:
        [ids] = await model.encode(
            [request.prompt or ""], request.add_special_tokens is not False, must_fit=False
        )
    texts = model.need_tokenizer().convert_ids_to_tokens(ids) if request.return_token_strs else None
    await exchange.json(
        {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": texts}
    )


async def _prompt_of(
    exchange: Exchange,
    model: ServedModel,
    request: TokenizeRequest | EmbeddingRequest,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
    must_fit: bool = True,
) -> Prompt:
    """Returns the messages of a request as the model's chat template writes them. `must_fit`: a prompt that
    is longer than the context is an error."""
    return await model.chat_prompt(
        [readable_message(exchange, message) for message in messages],
        tools=tools,
        chat_template=request.chat_template,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        variables=request.chat_template_kwargs,
        must_fit=must_fit,
    )


async def detokenize(exchange: Exchange) -> None:
    request = exchange.decode(DetokenizeRequest)
    model = exchange.models.find(request.model)
    tokenizer = model.need_tokenizer()
    text = await model.for_text(
        len(request.tokens), lambda: tokenizer.decode(request.tokens, skip_special_tokens=False)
    )
    await exchange.json({"prompt": text})


async def tokenizer_info(exchange: Exchange) -> None:
    """Answers with what a tokenizer_config.json would say of the model ?model=NAME, or of the first model. It
    is for clients that render chat templates themselves."""
    names = exchange.query().get("model")
    model = exchange.models.find(names[0] if names else None)
    tokenizer = model.need_tokenizer()
    added = {str(i): AddedToken(tokenizer.token_text(i), special=True) for i in tokenizer.all_special_ids}
    special = tokenizer.special_tokens_map
    await exchange.json(
        TokenizerInfo(
            "PreTrainedTokenizerFast",
            tokenizer.chat_template,
            model.max_model_len,
            len(tokenizer),
            added,
            special.get("bos_token"),
            special.get("eos_token"),
            special.get("unk_token"),
            special.get("pad_token"),
        )
    )


async def create_embeddings(exchange: Exchange) -> None:
    request = exchange.decode(EmbeddingRequest)
    model = exchange.models.find(request.model)
    keep = model.max_model_len if request.truncate_prompt_tokens == -1 else request.truncate_prompt_tokens
    if (request.input is None) == (request.messages is None):
        raise RequestError("input and messages: give exactly one of them", field="input")
    if request.messages is not None:
        exchange.names["prompt"] = "messages"
        prompt = await _prompt_of(exchange, model, request, request.messages, must_fit=keep is None)
        prompts = [shortened(prompt, keep)]
    else:
        exchange.names |= {"prompt": "input", "n": "input"}
        prompts = await read_prompts(
            model,
            request.input or [],
            field="input",
            keep=keep,
            add_special_tokens=request.add_special_tokens is not False,
        )
    vectors = await embed(
        exchange,
        model,
        prompts,
        dimensions=request.dimensions,
        request_id=request.request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout=request.timeout,
        user=request.user,
    )
    data = [
        {
            "object": "embedding",
            "index": i,
            "embedding": _packed(vector) if request.encoding_format == "base64" else vector,
        }
        for i, vector in enumerate(vectors)
    ]
    tokens = sum(len(prompt.token_ids) for prompt in prompts)
    await exchange.json(
        {
            "object": "list",
            "data": data,
            "model": model.name,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
    )


async def embed(
    exchange: Exchange,
    model: ServedModel,
    prompts: Sequence[Prompt],
    *,
    dimensions: int | None = None,
    request_id: str | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
    timeout: float | None = None,
    user: str | None = None,
) -> list[list[float]]:
    """Returns a vector of unit length for each prompt: [number of prompts, `dimensions` or the model's
    hidden size]. Raises ApiError and RequestError."""
    most = max(MAX_INPUTS, model.admission.limit)
    if len(prompts) > most:
        raise RequestError(
            f"input must have at most {most} entries, got {len(prompts)}; send several requests",
            field="input",
        )
    generation = exchange.generate(
        model,
        prompts,
        SamplingParams(max_tokens=1),
        id_prefix="embd-",
        request_id=request_id,
        user=user,
        priority=priority,
        cache_salt=cache_salt,
        timeout=timeout,
        embed=True,
    )
    found: dict[int, list[float]] = {}
    async with generation:
        async for deltas in generation:
            for delta in deltas:
                if delta.embedding is None:  # the engine aborted it, to sleep
                    raise ApiError(503, "the engine ended this request before it was computed; send it again")
                found[delta.index] = _scaled(delta.embedding, dimensions)
    return [found[i] for i in range(len(prompts))]


def _scaled(vector: list[float], dimensions: int | None) -> list[float]:
    """The first `dimensions` numbers, scaled to unit length again."""
    if dimensions is None or dimensions == len(vector):
        return vector
    if dimensions > len(vector):
        raise RequestError(
            f"dimensions must be at most {len(vector)}, the model's, got {dimensions}; ask for fewer",
            field="dimensions",
        )
    length = math.sqrt(sum(v * v for v in vector[:dimensions])) or 1.0
    return [v / length for v in vector[:dimensions]]


def _packed(vector: list[float]) -> str:
    """The numbers in OpenAI's base64: little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode("ascii")


async def generate_tokens(exchange: Exchange) -> None:
    """Takes token ids and answers with token ids. Each event of a stream has what came since the event
    before; the last one has the finish reason."""
    request = exchange.decode(TokenRequest)
    model = exchange.models.find(request.model)
    sampling = request.sampling_params or TokenSampling()
    if sampling.n not in (None, 1):
        raise RequestError(
            f"sampling_params.n must be 1 on this endpoint, got {sampling.n}; send the request once for each "
            "answer",
            field="sampling_params.n",
        )
    # Stop strings need text, and this endpoint has only ids.
    if sampling.stop:
        raise RequestError(
            "sampling_params.stop must be absent on this endpoint, which has only ids; use stop_token_ids",
            field="sampling_params.stop",
        )
    more: dict[str, Any] = {"detokenize": False, "logprobs": sampling.logprobs}
    params = sampling.sampling_params(
        {}, model.loaded.vocab_size, **more, **({"max_tokens": None} if sampling.max_tokens is None else {})
    )
    generation = exchange.generate(
        model,
        [Prompt(request.token_ids)],
        params,
        request_id=request.request_id,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout=request.timeout,
    )
    head = {"version": TOKEN_PROTOCOL, "request_id": generation.request_id}
    if request.stream:
        async with generation:
            async for [delta] in generation:
                await exchange.send(
                    b"data: " + encode({**head, **_event(delta, generation.usage.cached_tokens)}) + b"\n\n"
                )
        await exchange.end(DONE)
        return
    async with generation:
        [answer] = await generation.collect()
    whole = Delta(
        0,
        "",
        answer.token_ids,
        answer.logprobs,
        generation.prompt_logprobs[0],
        answer.finish_reason,
        answer.stop_reason,
    )
    await exchange.json(
        {**head, "prompt_tokens": len(request.token_ids), **_event(whole, generation.usage.cached_tokens)}
    )


def _event(delta: Delta, num_cached: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "token_ids": delta.token_ids,
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
        "num_cached_tokens": num_cached,
    }
    if delta.logprobs is not None:
        found["logprobs"] = [_numbers(step) for step in delta.logprobs]
    if delta.prompt_logprobs is not None:
        found["prompt_logprobs"] = [_numbers(step) for step in delta.prompt_logprobs]
    return found


def _numbers(step: TokenLogprobs | None) -> dict[int, tuple[float, int | None]] | None:
    """A map from each id to [log-probability, rank]."""
    return None if step is None else {i: (max(e.logprob, LOWEST), e.rank) for i, e in step.items()}
