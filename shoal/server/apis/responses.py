"""/v1/responses: OpenAI's newer API, its text core. A conversation is sent whole each time, unless the server
keeps responses (response_store.py)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.server.apis.params import filled, spare_grammar
from shoal.server.apis.parts import readable, warn_unread
from shoal.server.apis.protocol import GenerationFields, MinusOneOrMore
from shoal.server.apis.response_shapes import LogprobShapes
from shoal.server.apis.tools import (
    AnswerFormat,
    ToolPlan,
    check_finish,
    is_object,
    plan_tools,
    thinking_of,
    warn_left_out,
)
from shoal.server.errors import ApiError
from shoal.server.http.exchange import Exchange
from shoal.server.served.generation import Usage
from shoal.server.served.model import Prompt, ServedModel
from shoal.text.reading.parts import CallDelta, Part

# Calls of tools that clients run for OpenAI's models: the tool's name, and the field with its arguments.
CLIENT_CALLS = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
OUTPUTS = frozenset(f"{kind}_output" for kind in ("function_call", "custom_tool_call", *CLIENT_CALLS))
SAID = frozenset({"message", "reasoning", "function_call", "custom_tool_call", *CLIENT_CALLS})

FOLDER = "/v1/responses/"
LOGPROBS = "message.output_text.logprobs"  # as `include` names them
KEEPS_NONE = (
    "this server keeps no responses; send the whole conversation as `input` (`store: false` makes clients do "
    "so), or start the server with --responses-store-bytes"
)

Status = Literal["in_progress", "completed", "incomplete"]


class TextFormat(Struct, kw_only=True):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(Struct, kw_only=True):
    effort: str | None = None  # "none" switches it off; the template sees the others as reasoning_effort
    summary: str | None = None


class PromptCacheOptions(Struct, kw_only=True):
    prewarm: bool | None = None  # put the prompt into the prefix cache, and generate nothing


class ResponsesRequest(GenerationFields, kw_only=True):
    """A request. vLLM's fields `n` and `max_tokens` have no place here."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: MinusOneOrMore | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: MinusOneOrMore | None = None
    truncation: Literal["disabled", "auto"] | None = None
    prompt_cache_options: PromptCacheOptions | None = None
    store: bool | None = None  # None: true, as in OpenAI's API
    previous_response_id: str | None = None
    # Requests that need more storage are refused.
    conversation: str | dict[str, Any] | None = None
    background: bool | None = None
    prompt: dict[str, Any] | None = None


class OutputText(Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[Any] = []


class OutputMessage(Struct, tag_field="type", tag="message"):
    id: str
    content: list[OutputText]
    status: Status
    role: Literal["assistant"] = "assistant"


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    id: str
    content: list[ReasoningText]
    status: Status
    summary: list[Any] = []


class FunctionCall(Struct, tag_field="type", tag="function_call", omit_defaults=True):
    id: str
    call_id: str
    name: str
    arguments: str
    status: Status
    namespace: str | None = None


Item = OutputMessage | ReasoningItem | FunctionCall


class InputDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    reasoning_tokens: int = 0  # not counted apart


class ResponseUsage(Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class IncompleteDetails(Struct):
    reason: Literal["max_output_tokens"]


class ResponseError(Struct):
    code: str
    message: str


class Response(Struct, kw_only=True):
    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[Item]
    object: Literal["response"] = "response"
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    usage: ResponseUsage | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float
    top_p: float
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: TextOptions
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] = "disabled"
    metadata: dict[str, Any]
    user: str | None = None
    previous_response_id: str | None = None
    store: bool = False  # whether it is kept
    background: Literal[False] = False


class InputTokens(Struct):
    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class DeletedResponse(Struct):
    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


async def create_response(exchange: Exchange) -> None:
    request = exchange.decode(ResponsesRequest)
    model = exchange.models.find(request.model)
    plan, params, prompt = await _prepared(exchange, request, model)
    if request.truncation == "auto":
        exchange.warn("truncation", "an input that is too long is refused here: `truncation` is ignored")
    if request.store and not exchange.context.responses.max_bytes:
        exchange.warn("store", "this server keeps no responses (--responses-store-bytes): `store` is ignored")
    # Log-probabilities belong to items, so the answer is read as it comes.
    is_whole = not request.stream and params.logprobs is None
    form = AnswerFormat(plan, *model.loaded.parsers, prompt.text or "", params)
    prompt.budget = form.budget(request.thinking_token_budget, model.loaded.tokenizer)
    parser = form.parser(is_whole=is_whole)
    by_ids = exchange.context.config.return_tokens_as_token_ids
    shapes = None if params.logprobs is None else LogprobShapes(model, params.logprobs, as_ids=by_ids)
    is_kept = exchange.context.responses.max_bytes > 0 and request.store is not False
    writer = ResponseWriter(_response(request, model, params, plan, is_kept), _namespaced(request))
    exchange.error_event = writer.failed
    async with exchange.generate(
        model,
        [prompt],
        params,
        request_id=request.request_id,
        user=request.user,
        priority=request.priority,
        cache_salt=request.cache_salt,
        timeout=request.timeout,
        cuts_max_tokens=True,
    ) as answers:
        if request.prompt_cache_options is not None and request.prompt_cache_options.prewarm:
            events = writer.begin()
            check_finish(await answers.warm())
            events += writer.finish("stop", answers.usage)
            _keep(exchange, request, writer.response)
            await (exchange.end(events) if request.stream else exchange.json(writer.response))
            return
        if is_whole:
            [answer] = await answers.collect()
            writer.add(parser.push(answer.text, answer.finish_reason))
            writer.finish(check_finish(answer.finish_reason), answers.usage)
            _keep(exchange, request, writer.response)
            await exchange.json(writer.response)
            return
        events = writer.begin()
        async for [delta] in answers:
            last = delta.finish_reason is not None
            rows = shapes.of_text(delta) if shapes else []
            events += writer.add(parser.push(delta.text, delta.finish_reason), rows)
            if last:
                events += writer.finish(check_finish(delta.finish_reason), answers.usage)
                _keep(exchange, request, writer.response)
            if events and request.stream:
                await exchange.send(events)
                events = b""
    await (exchange.end(b"") if request.stream else exchange.json(writer.response))


async def count_input_tokens(exchange: Exchange) -> None:
    request = exchange.decode(ResponsesRequest)
    _, _, prompt = await _prepared(exchange, request, exchange.models.find(request.model))
    await exchange.json(InputTokens(len(prompt.token_ids)))


async def _prepared(
    exchange: Exchange, request: ResponsesRequest, model: ServedModel
) -> tuple[ToolPlan, SamplingParams, Prompt]:
    _refuse(request)
    exchange.names |= {"prompt": "input", "max_tokens": "max_output_tokens"}
    params = _params(exchange, request, model)
    plan = _plan(exchange, request, model)
    plan.constrain(params, *model.loaded.parsers, exchange.names)
    spare_grammar(params, request.repetition_penalty)
    effort = request.reasoning.effort if request.reasoning is not None else None
    messages = _messages(exchange, request)
    prompt = await model.chat_prompt(
        messages,
        tools=plan.tools,
        thinking=thinking_of(effort, plan, request.thinking_token_budget),
        needs_tools=not plan.is_enforced,
    )
    return plan, params, prompt


class ResponseWriter:
    """Builds the response object of an answer, and returns its events as bytes."""

    def __init__(self, response: Response, namespaced: dict[str, tuple[str, str]]) -> None:
        self.response, self._namespaced = response, namespaced
        self._number = 0  # the next event's number
        self._text: list[str] = []  # the text of the open item
        self._rows: list[Any] = []  # the log-probabilities of its tokens
        self._waiting_rows: list[Any] = []  # their tokens have shown no text yet
        self._delta = b""  # the constant beginning of its delta events

    def begin(self) -> bytes:
        return self._whole("response.created") + self._whole("response.in_progress")

    def add(self, parts: list[Part], rows: Sequence[Any] = ()) -> bytes:
        """rows: the log-probabilities of the tokens that made these parts."""
        events = []
        self._waiting_rows += rows
        for part in parts:
            text = part.arguments if isinstance(part, CallDelta) else part.text
            if (opened := self._opened_by(part)) is not None:
                events += [self._close("completed"), self._open(opened)]
            if text:
                self._text.append(text)
                events.append(self._delta_event(text))
        return b"".join(events)

    def _delta_event(self, text: str) -> bytes:
        rows, self._waiting_rows = self._waiting_rows, []
        shown = b""
        if isinstance(self.response.output[-1], OutputMessage):
            self._rows += rows
            shown = b',"logprobs":' + msgspec.json.encode(rows)
        self._number += 1
        return b'%b%b%b,"sequence_number":%d}\n\n' % (
            self._delta,
            msgspec.json.encode(text),
            shown,
            self._number - 1,
        )

    def finish(self, reason: str, usage: Usage) -> bytes:
        response, status = self.response, "incomplete" if reason == "length" else "completed"
        events = self._close(status)  # type: ignore[arg-type]
        response.status = status  # type: ignore[assignment]
        if reason == "length":
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        response.usage = ResponseUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            InputDetails(usage.cached_tokens),
            OutputDetails(),
        )
        return events + self._whole(f"response.{status}")

    def failed(self, error: ApiError) -> bytes:
        self.response.status = "failed"
        self.response.error = ResponseError(
            "rate_limit_exceeded" if error.status == 429 else "server_error", error.message
        )
        return self._whole("response.failed")

    def _opened_by(self, part: Part) -> Item | None:
        """The new item that `part` begins. None if it continues the open one."""
        open_item = self.response.output[-1] if self.response.output else None
        if isinstance(part, CallDelta):
            if part.name is None:
                return None
            namespace, name = self._namespaced.get(part.name, (None, part.name))
            return FunctionCall(_new_id("fc"), part.id or "", name, "", "in_progress", namespace)
        if part.reasoning:
            return (
                None
                if isinstance(open_item, ReasoningItem)
                else ReasoningItem(_new_id("rs"), [], "in_progress")
            )
        return (
            None if isinstance(open_item, OutputMessage) else OutputMessage(_new_id("msg"), [], "in_progress")
        )

    def _open(self, item: Item) -> bytes:
        output = self.response.output
        output.append(item)
        self._text, self._rows = [], []
        events = self._event("response.output_item.added", output_index=len(output) - 1, item=item)
        kind, where = "function_call_arguments", {"item_id": item.id, "output_index": len(output) - 1}
        if isinstance(item, OutputMessage):
            kind, where = "output_text", {**where, "content_index": 0}
            events += self._event(
                "response.content_part.added",
                item_id=item.id,
                output_index=len(output) - 1,
                content_index=0,
                part=OutputText(""),
            )
        elif isinstance(item, ReasoningItem):
            kind, where = "reasoning_text", {**where, "content_index": 0}
            events += self._event("response.content_part.added", **where, part=ReasoningText(""))
        name = f"response.{kind}.delta"
        self._delta = b'event: %b\ndata: %b,"delta":' % (
            name.encode(),
            msgspec.json.encode({"type": name, **where})[:-1],
        )
        return events

    def _close(self, status: Status) -> bytes:
        """Ends the open item, if there is one."""
        if not self.response.output:
            return b""
        item, index, text = self.response.output[-1], len(self.response.output) - 1, "".join(self._text)
        where: dict[str, Any] = {"item_id": item.id, "output_index": index}
        item.status = status
        if isinstance(item, FunctionCall):
            item.arguments = text
            if not is_object(text):  # broken, or cut short: the client cannot make this call
                item.status = "incomplete"
            events = self._event(
                "response.function_call_arguments.done", **where, name=item.name, arguments=text
            )
        else:
            where["content_index"] = 0
            if isinstance(item, OutputMessage):
                item.content = [OutputText(text, logprobs=self._rows)]
                events = self._event("response.output_text.done", **where, text=text, logprobs=self._rows)
            else:
                item.content = [ReasoningText(text)]
                events = self._event("response.reasoning_text.done", **where, text=text)
            events += self._event("response.content_part.done", **where, part=item.content[0])
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def _whole(self, name: str) -> bytes:
        return self._event(name, response=self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, **fields, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


def _messages(exchange: Exchange, request: ResponsesRequest) -> list[dict[str, Any]]:
    """The request's items as messages of the chat API: what the model said in a row becomes one message."""
    messages: list[dict[str, Any]] = (
        [{"role": "system", "content": request.instructions}] if request.instructions else []
    )
    items = _own_items(exchange, request)
    earlier = _earlier_items(exchange, request)
    for i, item in enumerate([*earlier, *items], start=-len(earlier)):
        kind = item.get("type") or "message"
        if isinstance(kind, str) and kind in OUTPUTS:
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": _text(i, item, "call_id" if "call_id" in item else "id"),
                    "content": _content(
                        f"input[{i}].output", _printed(readable(exchange, item.get("output") or ""))
                    ),
                }
            )
        elif isinstance(kind, str) and kind not in SAID:
            # A refusal would end the conversation, as clients send every item back with each request.
            warn_unread(exchange, kind)
        elif kind == "message" and item.get("role") in ("system", "developer"):
            text = _content(f"input[{i}].content", readable(exchange, item.get("content")))
            # templates know one system message, at the start
            if messages and all(m["role"] == "system" for m in messages):
                messages[-1]["content"] += "\n\n" + text
            else:
                messages.append({"role": "system", "content": text})
        elif kind == "message" and item.get("role") == "user":
            content = readable(exchange, item.get("content"), is_user=True)
            messages.append({"role": "user", "content": _content(f"input[{i}].content", content)})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            _add_to_answer(exchange, messages[-1], i, item, kind)
    return messages


def _own_items(exchange: Exchange, request: ResponsesRequest) -> list[dict[str, Any]]:
    """Makes the request's input a list of items in which none is a reference, and returns it. The answer is
    kept with this list, whatever leaves the store meanwhile. Raises RequestError and ApiError."""
    given = request.input
    items = given if isinstance(given, list) else [{"role": "user", "content": given}]
    if not items:
        raise RequestError("input is empty; give a text or a list of items", field="input")
    request.input = items = [_referenced(exchange, i, item) for i, item in enumerate(items)]
    return items


def _earlier_items(exchange: Exchange, request: ResponsesRequest) -> list[dict[str, Any]]:
    """Returns the conversation that the request continues. Raises ApiError if it is not kept."""
    name = request.previous_response_id
    if name is None:
        return []
    store = exchange.context.responses
    if not store.max_bytes:
        raise RequestError(f"previous_response_id: {KEEPS_NONE}", field="previous_response_id")
    if (items := store.conversation(name)) is None:
        raise ApiError(
            400,
            f"previous_response_id: the response {name!r:.100}, or one that it follows, is not kept any "
            "more; send the whole conversation as `input`",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return items


def _referenced(exchange: Exchange, i: int, item: dict[str, Any]) -> dict[str, Any]:
    """Returns the item of an earlier answer that `item` names by its id, or `item` itself. Raises ApiError if
    it is not kept."""
    given = {name for name, value in item.items() if value is not None}
    if item.get("type") != "item_reference" and given != {"id"}:
        return item
    name, store = _text(i, item, "id"), exchange.context.responses
    if not store.max_bytes:
        raise RequestError(
            f"input[{i}] names the item {name!r:.100} by its id: {KEEPS_NONE}", field=f"input[{i}]"
        )
    if (found := store.item(name)) is None:
        raise ApiError(
            404,
            f"input[{i}]: the item {name!r:.100} is not kept any more; send it whole, or set `store: false`, "
            "with which clients send items whole",
            param=f"input[{i}]",
        )
    return found


def _keep(exchange: Exchange, request: ResponsesRequest, response: Response) -> None:
    """Keeps an answer that is complete, if it shall be kept."""
    if not response.store:
        return
    assert isinstance(request.input, list)  # by _own_items
    is_kept = exchange.context.responses.add(
        response.id,
        request.previous_response_id,
        request.input,
        msgspec.json.encode(response),
        [item.id for item in response.output],
    )
    if not is_kept:
        exchange.warn(
            "responses_store_bytes", "a response is larger than --responses-store-bytes: it is not kept"
        )


async def get_response(exchange: Exchange) -> None:
    name = exchange.path.removeprefix(FOLDER)
    if (body := exchange.context.responses.response(name)) is None:
        raise _not_kept(name)
    await exchange.json(body)


async def delete_response(exchange: Exchange) -> None:
    name = exchange.path.removeprefix(FOLDER)
    if not exchange.context.responses.remove(name):
        raise _not_kept(name)
    await exchange.json(DeletedResponse(name))


def _not_kept(name: str) -> ApiError:
    if "/" in name:  # such as ID/input_items
        return ApiError(404, f"there is nothing at {FOLDER + name!r:.100}; ask for the response itself")
    return ApiError(
        404, f"the response {name!r:.100} is not kept here; --responses-store-bytes says how many are"
    )


def _add_to_answer(
    exchange: Exchange, message: dict[str, Any], i: int, item: dict[str, Any], kind: Any
) -> None:
    function: dict[str, Any]
    if kind == "message" and item.get("role") == "assistant":
        content = readable(exchange, item.get("content") or "")
        message["content"] += _content(f"input[{i}].content", content)
    elif kind == "reasoning":
        thoughts = _content(f"input[{i}].content", item.get("content") or item.get("summary") or "")
        message["reasoning_content"] = message.get("reasoning_content", "") + thoughts
    elif kind == "function_call":
        name = _qualified(item.get("namespace"), _text(i, item, "name"))
        if (arguments := item.get("arguments")) is None:
            raise RequestError(
                f"input[{i}].arguments must be JSON text, got None; send '{{}}' for none",
                field=f"input[{i}].arguments",
            )
        _add_call(message, i, item, {"name": name, "arguments": arguments})
    elif kind == "custom_tool_call":  # a call of a tool with text input
        function = {"name": _text(i, item, "name"), "arguments": {"input": _text(i, item, "input")}}
        _add_call(message, i, item, function)
    elif isinstance(kind, str) and kind in CLIENT_CALLS:
        name, field = CLIENT_CALLS[kind]
        if not isinstance(arguments := item.get(field), dict):
            raise RequestError(
                f"input[{i}].{field} must be an object, got {arguments!r:.100}", field=f"input[{i}].{field}"
            )
        _add_call(message, i, item, {"name": name, "arguments": arguments})
    elif kind == "message":
        raise RequestError(
            f"input[{i}] must have the role user, assistant, system or developer, got "
            f"{item.get('role')!r:.100}; choose one",
            field=f"input[{i}]",
        )
    else:
        raise RequestError(
            f"input[{i}] must be of the type message, reasoning, function_call, custom_tool_call, "
            f"local_shell_call or an output of these, got {kind!r:.100}; leave it out",
            field=f"input[{i}]",
        )


def _printed(output: Any) -> Any:
    """A tool's output, in which what each command of a shell printed is text."""
    if not isinstance(output, list):
        return output
    return [
        {"type": "text", "text": f"{part.get('stdout') or ''}{part.get('stderr') or ''}"}
        if isinstance(part, dict) and "stdout" in part
        else part
        for part in output
    ]


def _add_call(message: dict[str, Any], i: int, item: dict[str, Any], function: dict[str, Any]) -> None:
    call = {"id": _text(i, item, "call_id"), "type": "function", "function": function}
    message.setdefault("tool_calls", []).append(call)


def _text(i: int, item: dict[str, Any], name: str) -> str:
    if not isinstance(value := item.get(name), str):
        raise RequestError(
            f"input[{i}].{name} must be a text, got {value!r:.100}; send a string", field=f"input[{i}].{name}"
        )
    return value


def _content(field: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else None
        if not isinstance(text, str):
            raise RequestError(
                f"{field} must be text, got {part!r:.100}; send {{'type': 'input_text', 'text': ...}}",
                field=field,
            )
        texts.append(text)
    return "\n".join(texts)


def _plan(exchange: Exchange, request: ResponsesRequest, model: ServedModel) -> ToolPlan:
    """Tools that OpenAI's own servers run, and those without a JSON schema, are left out: Codex and others
    send them with everything."""
    functions: list[dict[str, Any]] = []
    left_out: list[str] = []
    spaces: dict[str, list[str]] = {}
    for tool in request.tools or ():
        if tool.get("type") == "function":
            functions.append(_chat_tool(tool))
        elif tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            for inner in _functions_of(tool):
                name = _qualified(tool.get("name"), inner["name"])
                functions.append(_chat_tool({**inner, "name": name}))
                spaces.setdefault(_name_of(tool), []).append(name)
        else:
            left_out.append(_name_of(tool))
            warn_left_out(exchange, tool.get("type"))
    return plan_tools(
        functions,
        _chat_choice(request.tool_choice, spaces),
        request.parallel_tool_calls,
        model.loaded.tool_call_parser,
        left_out,
    )


def _functions_of(space: dict[str, Any]) -> list[dict[str, Any]]:
    """The functions of a tool of the type namespace, as which Codex sends an MCP server."""
    return [
        tool
        for tool in space["tools"]
        if isinstance(tool, dict) and tool.get("type") == "function" and isinstance(tool.get("name"), str)
    ]


def _qualified(namespace: Any, name: str) -> str:
    """The name by which the model knows a function: two namespaces may have functions of one name."""
    if not isinstance(namespace, str) or not namespace:
        return name
    return f"{namespace}{'' if namespace.endswith('_') else '__'}{name}"


def _namespaced(request: ResponsesRequest) -> dict[str, tuple[str, str]]:
    """Namespace and name of each function of a namespace, by the name that the model knows."""
    return {
        _qualified(space["name"], tool["name"]): (space["name"], tool["name"])
        for space in request.tools or ()
        if space.get("type") == "namespace"
        and isinstance(space.get("name"), str)
        and isinstance(space.get("tools"), list)
        for tool in _functions_of(space)
    }


def _chat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the chat API's shape, in which the fields of a function are one level deeper."""
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type" and v is not None}}


def _name_of(tool: dict[str, Any]) -> str:
    return str(tool.get("name") or tool.get("type"))


def _allowed(tool: dict[str, Any], spaces: Mapping[str, Sequence[str]]) -> Sequence[str]:
    """Returns the names of the functions that an entry of allowed_tools allows: a namespace allows all of
    its own."""
    if tool.get("type") == "namespace":
        return spaces.get(_name_of(tool), [_name_of(tool)])
    return [_qualified(tool.get("namespace"), _name_of(tool))]


def _chat_choice(
    choice: str | dict[str, Any] | None, spaces: Mapping[str, Sequence[str]]
) -> str | dict[str, Any] | None:
    """`spaces`: the names of the functions of each namespace."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        mode, tools = choice.get("mode"), choice.get("tools")
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            raise RequestError(
                f"tool_choice must allow at least one tool, got {choice!r:.200}; give it the mode 'auto' or "
                "'required' and a list of tools, "
                '{"type": "function", "name": ...}',
                field="tool_choice",
            )
        named = [
            _chat_tool({"name": name})
            for tool in tools
            if isinstance(tool, dict)
            for name in _allowed(tool, spaces)
        ]
        return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    name = choice.get("name") if choice.get("type") == "function" else _name_of(choice)
    if isinstance(name, str):
        name = _qualified(choice.get("namespace"), name)
    else:
        raise RequestError(
            f"tool_choice must name a function, got {choice!r:.100}; give "
            '{"type": "function", "name": ...}, "auto", "none" or "required"',
            field="tool_choice",
        )
    return {"type": "function", "function": {"name": name}}


def _refuse(request: ResponsesRequest) -> None:
    """Raises RequestError for a request of something that this server does not have."""
    for name in ("conversation", "prompt"):
        if getattr(request, name) is not None:
            raise RequestError(
                f"{name}: this server keeps neither conversations nor prompts; send all of it as `input`",
                field=name,
            )
    if request.background:
        raise RequestError(
            "background must be false, as nothing runs in the background here", field="background"
        )
    if request.max_tokens is not None:
        raise RequestError(
            f"max_tokens must be left out, got {request.max_tokens}; give max_output_tokens",
            field="max_tokens",
        )
    if request.n not in (None, 1):
        raise RequestError(f"n must be 1 for a response, got {request.n}; send several requests", field="n")


def _params(exchange: Exchange, request: ResponsesRequest, model: ServedModel) -> SamplingParams:
    given = request.text.format if request.text is not None else None
    more: dict[str, Any] = {}
    if given is not None and given.type != "text":
        if request.structured_outputs is not None:
            raise RequestError(
                "structured_outputs and text.format both say what the answer must be; drop one of them",
                field="structured_outputs",
            )
        if given.type == "json_schema" and given.schema is None:
            raise RequestError(
                "text.format has no schema; give the JSON schema of the answer", field="text.format"
            )
        exchange.names["structured_outputs"] = "text.format"
        more["structured_outputs"] = (
            StructuredOutputsParams(json_object=True)
            if given.type == "json_object" and not given.schema
            else StructuredOutputsParams(json=given.schema)
        )
    if request.top_logprobs or LOGPROBS in (request.include or ()):
        exchange.names["logprobs"] = "top_logprobs"
        more["logprobs"] = request.top_logprobs or 0
    return request.sampling_params(
        model.loaded.default_params,
        model.loaded.vocab_size,
        max_tokens=filled(model, request.max_output_tokens),
        **more,
    )


def _response(
    request: ResponsesRequest, model: ServedModel, params: SamplingParams, plan: ToolPlan, is_kept: bool
) -> Response:
    choice: str | dict[str, Any] = request.tool_choice or "auto"
    text = request.text or TextOptions()
    return Response(
        id=_new_id("resp"),
        created_at=int(time.time()),
        model=request.model or model.name,
        status="in_progress",
        output=[],
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        parallel_tool_calls=plan.parallel,
        tool_choice=choice,
        tools=request.tools or [],
        text=TextOptions(format=text.format or TextFormat(), verbosity=text.verbosity),
        reasoning=request.reasoning,
        metadata=request.metadata or {},
        user=request.user,
        previous_response_id=request.previous_response_id,
        store=is_kept,
    )


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
