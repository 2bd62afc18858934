"""/v1/chat/completions: a conversation in, the next message out."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.errors import RequestError
from shoal.outputs import CompletionOutput
from shoal.sampling_params import SamplingParams
from shoal.server.apis.legacy_functions import as_tools
from shoal.server.apis.params import (
    check_stream_options,
    filled,
    names_by_ids,
    num_kept,
    shortened,
    spare_grammar,
    text_params,
)
from shoal.server.apis.parts import readable_message
from shoal.server.apis.protocol import ChatCompletionRequest
from shoal.server.apis.response_shapes import (
    ABSENT_FROM_ANSWERS,
    ABSENT_FROM_MESSAGES,
    Chunks,
    LogprobShapes,
    encode,
    is_ended_by_token,
    prompt_logprobs_list,
    usage_dict,
)
from shoal.server.apis.tools import (
    AnswerFormat,
    AnswerParser,
    ToolPlan,
    functions_among,
    plan_tools,
    thinking_of,
    whole,
)
from shoal.server.http.exchange import MAX_UNKNOWN, Exchange
from shoal.server.served.generation import Generation
from shoal.server.served.model import Prompt, ServedModel
from shoal.text.answer import Delta
from shoal.text.reading.parts import Part, TextDelta

# Fields of OpenAI's messages and functions, and the further fields that chat templates read.
MESSAGE_FIELDS = frozenset(
    {
        "role",
        "content",
        "name",
        "tool_calls",
        "tool_call_id",
        "function_call",
        "refusal",
        "audio",
        "annotations",
        "reasoning",
        "reasoning_content",
        "thinking",
        "prefix",
    }
)
FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict", "return"})


@dataclass(slots=True)
class Conversation:
    """A checked request with its model, its prompt, and the format of its answers."""

    request: ChatCompletionRequest
    model: ServedModel
    params: SamplingParams
    prompt: Prompt
    form: AnswerFormat | None  # None: the text is the content


async def conversation_of(exchange: Exchange, request: ChatCompletionRequest) -> Conversation:
    """Returns the checked request. Raises ApiError and RequestError."""
    exchange.names["prompt"] = "messages"
    model = exchange.models.find(request.model)
    _check(request, model)
    as_tools(request, exchange.names)
    _warn_unknown(exchange, request)
    functions, left_out = functions_among(exchange, request.tools)
    plan = plan_tools(
        functions, request.tool_choice, request.parallel_tool_calls, model.loaded.tool_call_parser, left_out
    )
    if request.max_completion_tokens is not None:
        exchange.names["max_tokens"] = "max_completion_tokens"
        request.max_tokens = request.max_completion_tokens
    max_tokens = filled(model, request.max_tokens)
    params = text_params(
        exchange,
        model,
        request,
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
    )
    plan.constrain(params, *model.loaded.parsers, exchange.names)
    spare_grammar(params, request.repetition_penalty)
    prompt = await _prompt(exchange, model, request, plan)
    form = None
    if plan.mode != "none" or model.loaded.reasoning_parser != "none":
        form = AnswerFormat(plan, *model.loaded.parsers, prompt.text or "", params)
        prompt.budget = form.budget(request.thinking_token_budget, model.loaded.tokenizer)
    return Conversation(request, model, params, prompt, form)


def generation_of(exchange: Exchange, conversations: Sequence[Conversation]) -> Generation:
    """Returns the generation that answers conversations which differ only in their prompts."""
    first = conversations[0]
    return exchange.generate(
        first.model,
        [one.prompt for one in conversations],
        first.params,
        id_prefix="chatcmpl-",
        request_id=first.request.request_id,
        user=first.request.user,
        priority=first.request.priority,
        cache_salt=first.request.cache_salt,
        timeout=first.request.timeout,
        cuts_max_tokens=True,
    )


async def create_chat_completion(exchange: Exchange) -> None:
    request = exchange.decode(ChatCompletionRequest)
    options = check_stream_options(request.stream, request.stream_options, exchange.context.config)
    conversation = await conversation_of(exchange, request)
    model = conversation.model
    generation = generation_of(exchange, [conversation])
    answer = ChatAnswer(conversation, generation, names_by_ids(exchange, request))
    if request.stream:
        chunks = Chunks(
            answer.id, "chat.completion.chunk", answer.created, model.name, options, generation.usage
        )
        async with generation:
            async for deltas in generation:
                if events := b"".join([chunk for delta in deltas for chunk in answer.chunks(delta, chunks)]):
                    await exchange.send(events)
        await exchange.end(chunks.end())
        return
    async with generation:
        wholes = await generation.collect()
    await exchange.json(
        {
            "id": answer.id,
            "object": "chat.completion",
            "created": answer.created,
            "model": model.name,
            "choices": [answer.choice(w) for w in wholes],
            **ABSENT_FROM_ANSWERS,
            "usage": usage_dict(generation.usage),
            "prompt_logprobs": prompt_logprobs_list(generation.prompt_logprobs[0]),
            "prompt_token_ids": conversation.prompt.token_ids if request.return_token_ids else None,
        }
    )


def _check(request: ChatCompletionRequest, model: ServedModel) -> None:
    """Raises RequestError for values that this server cannot honor."""
    for i, message in enumerate(request.messages):
        if not isinstance(role := message.get("role"), str):  # the template checks whether the model knows it
            raise RequestError(
                f"messages[{i}].role must be a text such as 'user', got {role!r:.60}",
                field=f"messages[{i}].role",
            )
        _check_calls(f"messages[{i}].tool_calls", message.get("tool_calls"))
    if request.audio is not None or any(kind != "text" for kind in request.modalities or ()):
        raise RequestError(
            "modalities: answers here are text alone; leave modalities and audio out", field="modalities"
        )
    most, asked = model.max_logprobs, request.top_logprobs
    if asked and not request.logprobs:
        raise RequestError(
            "top_logprobs must come with logprobs true; set it, or leave top_logprobs out",
            field="top_logprobs",
        )
    if asked is not None and most >= 0 and (model.loaded.vocab_size if asked < 0 else asked) > most:
        raise RequestError(
            f"top_logprobs must be at most {most} (--max-logprobs), got {asked}; ask for fewer, or start the "
            "server with a larger limit",
            field="top_logprobs",
        )


def _check_calls(field: str, calls: Any) -> None:
    """Raises RequestError unless the calls have OpenAI's shape, which templates read."""
    if not isinstance(calls, list | None):
        raise RequestError(f"{field} must be a list of calls, got {calls!r:.60}; send one", field=field)
    for i, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(call, dict) and call.get("type") == "custom":
            function = call.get("custom")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(
                f"{field}[{i}] must be a call, got {call!r:.80}; give "
                '{"type": "function", "function": {"name": ..., "arguments": "..."}}',
                field=f"{field}[{i}]",
            )


def _warn_unknown(exchange: Exchange, request: ChatCompletionRequest) -> None:
    """Logs unknown fields within messages and functions: nothing reads them, except that a chat template
    may read fields of messages."""
    found = {f"messages[].{name}" for message in request.messages for name in message.keys() - MESSAGE_FIELDS}
    for tool in request.tools or ():
        function = tool.get("function")
        if isinstance(function, dict):
            found |= {f"tools[].function.{name}" for name in function.keys() - FUNCTION_FIELDS}
    for name in sorted(found)[:MAX_UNKNOWN]:
        unless = ", unless the chat template reads it" if name.startswith("messages") else ""
        message = f"{exchange.path} takes no field {name!r:.100}: it is ignored{unless}"
        exchange.warn(f"{exchange.path} {name:.100}", message)


async def _prompt(
    exchange: Exchange, model: ServedModel, request: ChatCompletionRequest, plan: ToolPlan
) -> Prompt:
    prompt = await model.chat_prompt(
        [readable_message(exchange, message) for message in request.messages],
        tools=plan.tools,
        chat_template=request.chat_template,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
        add_special_tokens=request.add_special_tokens,
        documents=request.documents,
        variables=request.chat_template_kwargs,
        thinking=thinking_of(request.reasoning_effort, plan, request.thinking_token_budget),
        must_fit=request.truncate_prompt_tokens is None,
        needs_tools=not plan.is_enforced,
    )
    wanted = filled(model, request.max_tokens)
    if wanted is not None and wanted >= model.max_model_len:
        wanted = None  # the answer is cut to what the prompt leaves, so the prompt need not be cut
    return shortened(prompt, num_kept(model, request.truncate_prompt_tokens, wanted))


class ChatAnswer:
    """Shapes the choices of one conversation. `form` parses the text if it may contain reasoning or calls."""

    def __init__(self, conversation: Conversation, generation: Generation, by_ids: bool) -> None:
        """by_ids: log-probabilities name tokens by their ids."""
        request, model, form = conversation.request, conversation.model, conversation.form
        self.request, self.generation, self.form = request, generation, form
        self.id, self.created = generation.request_id, int(time.time())
        self.shapes = LogprobShapes(model, request.top_logprobs or 0, by_ids)
        self._parsers: dict[int, AnswerParser] = {}
        self._begun: set[int] = set()
        self._is_legacy = request.functions is not None  # the answer's calls have the older shape
        self._is_plain = form is None and not request.logprobs and not request.return_token_ids

    def choice(self, answer: CompletionOutput) -> dict[str, Any]:
        request, reason = self.request, answer.finish_reason or "stop"
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, **ABSENT_FROM_MESSAGES}
        if self.form is not None:
            parser = self.form.parser(is_whole=True)
            read = whole(parser.push(answer.text, reason))
            message["content"] = read.content if read.content or not (read.calls or read.reasoning) else None
            if read.reasoning and request.include_reasoning is not False:
                # vLLM's name, and its older one
                message["reasoning"] = message["reasoning_content"] = read.reasoning
            if read.calls and self._is_legacy:
                message["function_call"] = {"name": read.calls[0].name, "arguments": read.calls[0].arguments}
            elif read.calls:
                message["tool_calls"] = [
                    {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                    for c in read.calls
                ]
            reason = self._finish_reason(parser, reason)
        logprobs = None if answer.logprobs is None else self.shapes.chat(answer.token_ids, answer.logprobs)
        return {
            "index": answer.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": reason,
            "stop_reason": answer.stop_reason,
            "token_ids": answer.token_ids if request.return_token_ids else None,
        }

    def chunks(self, delta: Delta, chunks: Chunks) -> list[bytes]:
        """Returns the chunks of a delta: first the role if the choice begins, then one chunk, or one per
        part where tools or reasoning split the text."""
        if delta.logprobs is not None and len(delta.token_ids) > 1 and is_ended_by_token(delta):
            # guidance reads all tokens of a chunk with text as its text, and this one is not in the text.
            ids, steps = delta.token_ids, delta.logprobs
            rest = replace(
                delta, token_ids=ids[:-1], logprobs=steps[:-1], finish_reason=None, stop_reason=None
            )
            end = replace(delta, text="", token_ids=ids[-1:], logprobs=steps[-1:], prompt_logprobs=None)
            return self.chunks(rest, chunks) + self.chunks(end, chunks)
        found = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            more = b""
            if self.request.return_token_ids:
                more = b',"prompt_token_ids":' + encode(self.generation.prompts[0].token_ids)
            if delta.prompt_logprobs is not None:
                more += b',"prompt_logprobs":' + encode(prompt_logprobs_list(delta.prompt_logprobs))
            role = (
                b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}'
                % delta.index
            )
            found.append(chunks.chunk(role, more))
        chunks.num_sent += len(delta.token_ids)
        if self._is_plain and delta.finish_reason is None:
            if delta.text:  # half a character or the start of a stop string shows nothing yet
                content = b'{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}' % (
                    delta.index,
                    encode(delta.text),
                )
                found.append(chunks.chunk(content))
            return found
        reason, parts = delta.finish_reason, [{"content": delta.text}] if delta.text else []
        if self.form is not None:
            parser = self._parsers.get(delta.index)
            if parser is None:
                parser = self._parsers[delta.index] = self.form.parser(is_whole=False)
            parts = [p for part in parser.push(delta.text, reason) if (p := self._part(part))]
            reason = None if reason is None else self._finish_reason(parser, reason)
        if not parts and reason is None and delta.logprobs is None and not self.request.return_token_ids:
            return found
        parts = parts or [{}]
        for i, part in enumerate(parts):
            is_last = i == len(parts) - 1  # it carries what belongs to the delta as a whole
            choice = {
                "index": delta.index,
                "delta": part,
                "logprobs": None,
                "finish_reason": reason if is_last else None,
            }
            if is_last and delta.logprobs is not None:
                choice["logprobs"] = self.shapes.chat(delta.token_ids, delta.logprobs)
            if is_last and self.request.return_token_ids:
                choice["token_ids"] = delta.token_ids
            if is_last and reason is not None:
                choice["stop_reason"] = delta.stop_reason
            found.append(chunks.chunk(encode(choice)))
        return found

    def _finish_reason(self, parser: AnswerParser, reason: str) -> str:
        found = parser.finish_reason(reason)
        return "function_call" if self._is_legacy and found == "tool_calls" else found

    def _part(self, part: Part) -> dict[str, Any] | None:
        if isinstance(part, TextDelta):
            if part.reasoning:
                return (
                    {"reasoning": part.text, "reasoning_content": part.text}
                    if self.request.include_reasoning is not False
                    else None
                )
            return {"content": part.text}
        function = (
            {"arguments": part.arguments}
            if part.name is None
            else {"name": part.name, "arguments": part.arguments}
        )
        if self._is_legacy:
            return {"function_call": function}
        begin = {} if part.id is None else {"id": part.id, "type": "function"}
        return {"tool_calls": [{"index": part.index, **begin, "function": function}]}
