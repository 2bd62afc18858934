"""/v1/chat/completions/batch: many conversations in, the next message of each out, as in vLLM."""

from __future__ import annotations

import msgspec

from shoal.errors import RequestError, ShoalError
from shoal.server.apis.chat import ChatAnswer, Conversation, conversation_of, generation_of
from shoal.server.apis.params import names_by_ids
from shoal.server.apis.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from shoal.server.apis.response_shapes import ABSENT_FROM_ANSWERS, usage_dict
from shoal.server.errors import context_overflow, to_api_error
from shoal.server.http.exchange import Exchange

# Fields that this path refuses, as vLLM's does, and what a client gives or leaves out instead.
WAYS = {
    "stream": "send it to /v1/chat/completions for each conversation",
    "tools": "send them to /v1/chat/completions for each conversation",
    "functions": "send them to /v1/chat/completions for each conversation",
    "prompt_logprobs": "send it to /v1/chat/completions for each conversation",
}


async def create_chat_batch(exchange: Exchange) -> None:
    batch = exchange.decode(BatchChatCompletionRequest)
    for name, way in WAYS.items():
        value = getattr(batch, name)
        if value is not None and value is not False and value != []:
            raise RequestError(
                f"{name} must be left out for a batch of conversations, got {value!r:.60}; {way}", field=name
            )
    if batch.n not in (None, 1):
        raise RequestError(
            f"n must be 1 for a batch of conversations, got {batch.n}; repeat a conversation", field="n"
        )
    conversations = [await _conversation(exchange, batch, i) for i in range(len(batch.messages))]
    generation = generation_of(exchange, conversations)
    by_ids = names_by_ids(exchange, conversations[0].request)
    async with generation:
        wholes = await generation.collect()
    answers = [ChatAnswer(conversation, generation, by_ids) for conversation in conversations]
    await exchange.json(
        {
            "id": generation.request_id,
            "object": "chat.completion",
            "created": answers[0].created,
            "model": generation.model.name,
            "choices": [answer.choice(whole) for answer, whole in zip(answers, wholes, strict=True)],
            **ABSENT_FROM_ANSWERS,
            "usage": usage_dict(generation.usage),
        }
    )


async def _conversation(exchange: Exchange, batch: BatchChatCompletionRequest, i: int) -> Conversation:
    """One of the batch. Raises ApiError that names it."""
    fields = msgspec.structs.asdict(batch) | {"messages": batch.messages[i]}
    try:
        found = await conversation_of(exchange, ChatCompletionRequest(**fields))
        if (length := len(found.prompt.token_ids)) >= found.model.max_model_len:
            raise context_overflow(found.model.max_model_len, length, found.params.max_tokens)
        return found
    except ShoalError as error:
        api_error = to_api_error(error, exchange.names)
        where = f"messages[{i}]"
        if api_error.param is not None and api_error.param.startswith("messages"):
            api_error.param = where + api_error.param.removeprefix("messages")
        api_error.message += f" (in {where})"
        raise api_error from None
