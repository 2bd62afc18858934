"""/v1/completions: text or token ids in, their continuation out."""

from __future__ import annotations

import time
from typing import Any

from shoal.api import TokenLogprobs
from shoal.errors import RequestError
from shoal.outputs import CompletionOutput
from shoal.server.apis.params import (
    check_stream_options,
    filled,
    names_by_ids,
    num_kept,
    read_prompts,
    spare_grammar,
    text_params,
)
from shoal.server.apis.protocol import AS_MANY_AS_FIT, CompletionRequest
from shoal.server.apis.response_shapes import (
    ABSENT_FROM_ANSWERS,
    Chunks,
    LogprobShapes,
    TextPlace,
    encode,
    prompt_logprobs_list,
    usage_dict,
)
from shoal.server.http.exchange import Exchange
from shoal.server.served.generation import Generation
from shoal.server.served.model import Prompt, ServedModel
from shoal.text.answer import Delta
from shoal.text.formats.registry import THOUGHTS_BY_NAME
from shoal.text.thinking_budget import ThinkingBudget

DEFAULT_MAX_TOKENS = 16
TAIL = 4096  # last tokens of a prompt in which unfinished reasoning is found


async def _generation_of(exchange: Exchange, request: CompletionRequest, model: ServedModel) -> Generation:
    """Returns the generation of a checked request. Raises ApiError and RequestError."""
    if request.suffix:
        raise RequestError(
            "suffix is given, and no model here fills in the middle; leave it out", field="suffix"
        )
    fills = request.max_tokens == AS_MANY_AS_FIT
    keep = num_kept(
        model, request.truncate_prompt_tokens, 1 if fills else request.max_tokens or DEFAULT_MAX_TOKENS
    )
    prompts = await read_prompts(
        model,
        request.prompt,
        field="prompt",
        keep=keep,
        add_special_tokens=request.add_special_tokens is not False,
    )
    max_tokens = filled(model, request.max_tokens)
    if max_tokens == 0:
        if not request.echo:
            raise RequestError(
                "max_tokens must be at least 1 without echo, got 0; raise it, or set echo", field="max_tokens"
            )
        max_tokens = 1  # the engine's least; that token is not shown
    if max_tokens is None:  # OpenAI's default, or what fits
        longest = max(len(p.token_ids) for p in prompts)
        max_tokens = max(1, min(DEFAULT_MAX_TOKENS, model.max_model_len - longest))
    params = text_params(
        exchange,
        model,
        request,
        max_tokens=max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=request.logprobs if request.echo and request.prompt_logprobs is None else None,
    )
    spare_grammar(params, request.repetition_penalty)
    if params.structured_outputs is None and request.max_tokens != 0:
        for prompt in prompts:
            prompt.budget = _budget(model, prompt, request.thinking_token_budget)
    return exchange.generate(
        model,
        prompts,
        params,
        id_prefix="cmpl-",
        request_id=request.request_id,
        user=request.user,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout=request.timeout,
        cuts_max_tokens=fills,
    )


def _budget(model: ServedModel, prompt: Prompt, limit: int | None) -> ThinkingBudget | None:
    thoughts, tokenizer = THOUGHTS_BY_NAME.get(model.loaded.reasoning_parser), model.loaded.tokenizer
    if limit is None or limit < 0 or thoughts is None or tokenizer is None:
        return None
    text = prompt.text
    if text is None:
        text = tokenizer.decode(prompt.token_ids[-TAIL:], skip_special_tokens=False)
    return ThinkingBudget.of(limit, thoughts, thoughts.start_of(text), tokenizer)


async def create_completion(exchange: Exchange) -> None:
    request = exchange.decode(CompletionRequest)
    model = exchange.models.find(request.model)
    options = check_stream_options(request.stream, request.stream_options, exchange.context.config)
    generation = await _generation_of(exchange, request, model)
    answer = _Answer(model, request, generation, names_by_ids(exchange, request))
    if request.stream:
        chunks = Chunks(answer.id, "text_completion", answer.created, model.name, options, generation.usage)
        async with generation:
            async for deltas in generation:
                events = b""
                for delta in deltas:
                    chunks.num_sent += len(delta.token_ids)
                    events += chunks.chunk(answer.chunk(delta))
                await exchange.send(events)
        await exchange.end(chunks.end())
        return
    async with generation:
        wholes = await generation.collect()
    await exchange.json(
        {
            "id": answer.id,
            "object": "text_completion",
            "created": answer.created,
            "model": model.name,
            "choices": [answer.choice(whole) for whole in wholes],
            **ABSENT_FROM_ANSWERS,
            "usage": usage_dict(generation.usage),
        }
    )


class _Answer:
    """Shapes the choices of one request."""

    def __init__(
        self, model: ServedModel, request: CompletionRequest, generation: Generation, by_ids: bool
    ) -> None:
        """by_ids: log-probabilities name tokens by their ids."""
        self.model, self.request, self.generation = model, request, generation
        self.id, self.created = generation.request_id, int(time.time())
        self.shapes = LogprobShapes(model, request.logprobs or 0, by_ids)
        self._places: dict[int, TextPlace] = {}  # the next token's, by choice
        self._is_echo_alone = request.max_tokens == 0
        self._is_plain = (
            not (request.echo or request.return_token_ids)
            and request.prompt_logprobs is None
            and request.logprobs is None
        )

    def choice(self, whole: CompletionOutput) -> dict[str, Any]:
        request, index = self.request, whole.index
        if self._is_echo_alone:
            whole = CompletionOutput(index, "", [], logprobs=[], finish_reason="length")
        shown = self._shown(
            index, whole.text, whole.token_ids, whole.logprobs, self.generation.prompt_logprobs[index], True
        )
        return {
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            **shown,
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
            "token_ids": whole.token_ids if request.return_token_ids else None,
        }

    def chunk(self, delta: Delta) -> bytes:
        """The choice of a stream's chunk, as JSON."""
        if self._is_plain and delta.finish_reason is None:
            return b'{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}' % (
                delta.index,
                encode(delta.text),
            )
        is_first = delta.index not in self._places
        if self._is_echo_alone:
            delta = Delta(delta.index, "", [], prompt_logprobs=delta.prompt_logprobs, finish_reason="length")
        shown = self._shown(
            delta.index, delta.text, delta.token_ids, delta.logprobs, delta.prompt_logprobs, is_first
        )
        if self.request.return_token_ids:
            shown["token_ids"] = delta.token_ids
        return encode({**shown, "finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason})

    def _shown(
        self,
        index: int,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        prompt_logprobs: list[TokenLogprobs | None] | None,
        is_first: bool,
    ) -> dict[str, Any]:
        request = self.request
        prompt = self.generation.prompts[index // self.generation.params.n]
        place = self._places.get(index)
        if place is None:
            place = self._places[index] = self._first_place()
        ids, steps = token_ids, list(logprobs or ())
        before: list[TokenLogprobs | None] = []
        said: str | None = None
        if is_first and request.echo:
            said = prompt.text
            if said is None and self.model.loaded.tokenizer is not None:
                said = self.model.loaded.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
            text = (said or "") + text
            if prompt_logprobs is not None:
                ids, before = [*prompt.token_ids, *token_ids], prompt_logprobs
        shown: dict[str, Any] = {"index": index, "text": text, "logprobs": None}
        if request.logprobs is not None:
            spelt = self._spelt(prompt.token_ids[: len(before)], said or "", token_ids)
            shown["logprobs"] = self.shapes.completion(ids, [*before, *steps], spelt, place)
        if is_first and request.prompt_logprobs is not None:
            shown["prompt_logprobs"] = prompt_logprobs_list(prompt_logprobs)
        if is_first and request.return_token_ids:
            shown["prompt_token_ids"] = prompt.token_ids
        return shown

    def _first_place(self) -> TextPlace:
        tokenizer = self.model.loaded.tokenizer
        return TextPlace() if tokenizer is None else TextPlace(tokenizer.token_bytes.errors)

    def _spelt(self, echoed_ids: list[int], said: str, token_ids: list[int]) -> list[bytes]:
        """Returns the bytes that each token adds to the text: first the echoed tokens of the prompt, whose
        text is `said`, then the tokens of the answer."""
        tokenizer = self.model.loaded.tokenizer
        if tokenizer is None:
            return [b""] * (len(echoed_ids) + len(token_ids))
        pieces = tokenizer.token_bytes
        echoed, begin = [pieces[i] for i in echoed_ids], said.encode()
        if echoed and not begin.startswith(echoed[0]):
            # nothing, if the tokenizer put it before the text
            echoed[0] = tokenizer.shown_bytes[echoed_ids[0]]
        if pieces.strips_first_space and b"".join(echoed) == b" " + begin:
            first = next(i for i, data in enumerate(echoed) if data)
            echoed[first] = echoed[first][1:]
        shown = tokenizer.shown_bytes if self.generation.params.skip_special_tokens else pieces
        return echoed + [shown[i] for i in token_ids]
