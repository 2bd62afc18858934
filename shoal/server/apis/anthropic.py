"""/v1/messages: Anthropic's API, for text and tools."""

from __future__ import annotations

import uuid
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Struct

from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.server.apis.params import filled, spare_grammar
from shoal.server.apis.parts import readable
from shoal.server.apis.protocol import Count, MinusOneOrMore, Seconds, Words
from shoal.server.apis.shapes import AnthropicErrorResponse
from shoal.server.apis.tools import AnswerFormat, ToolPlan, check_finish, plan_tools, warn_left_out
from shoal.server.errors import CONTEXT_EXCEEDED, ApiError
from shoal.server.http.exchange import Dialect, Exchange
from shoal.server.served.generation import Usage
from shoal.server.served.model import Prompt, ServedModel
from shoal.text.chat_template import without_billing_line, without_billing_lines
from shoal.text.conversation import with_whole_escapes
from shoal.text.reading.parts import CallDelta, Part
from shoal.text.thinking import Thinking

ANTHROPIC_VERSION = b"anthropic-version"  # a header that its clients always send
ROLES = ("user", "assistant", "system", "developer")
THINKING = frozenset({"enabled", "adaptive", "between_tools"})
# See Exchange.
NAMES = {"prompt": "messages", "stop": "stop_sequences"}
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class GivenBlock(NamedTuple):
    message: int  # its number
    field: str  # its name in errors
    given: dict[str, Any]


class AnthropicTool(Struct, kw_only=True):
    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None  # "custom"; Anthropic's own tools are left out
    strict: bool | None = None  # a call follows the schema


class AnthropicToolChoice(Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingOption(Struct, kw_only=True):
    type: str  # "disabled", or one of THINKING
    budget_tokens: Count | None = None  # the most tokens of thinking


class OutputFormat(Struct, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True):
    format: OutputFormat | None = None
    effort: str | None = None  # holds if `thinking` is not disabled


class CountTokensRequest(Struct, kw_only=True):
    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingOption | None = None  # left out: no thinking, as Anthropic's API has it
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # its older name
    thread: dict[str, Any] | None = None  # refused: see _refuse_thread


class MessagesRequest(CountTokensRequest, kw_only=True):
    max_tokens: MinusOneOrMore  # 0: the prompt goes into the prefix cache, and nothing is generated
    stop_sequences: Words | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: MinusOneOrMore | None = None
    stream: bool | None = None
    timeout: Seconds | None = None  # as in our other APIs
    metadata: dict[str, Any] | None = None


class TextBlock(Struct, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw | dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(Struct):
    input_tokens: int  # without the cached ones
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class Message(Struct, kw_only=True):
    id: str
    model: str
    content: list[Block]
    usage: MessageUsage
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None = None
    stop_sequence: str | None = None


class TokenCount(Struct):
    input_tokens: int


async def create_message(exchange: Exchange) -> None:
    request = exchange.decode(MessagesRequest)
    _refuse_thread(request)
    exchange.names |= NAMES
    model = exchange.models.find(request.model)
    plan, params = _plan(exchange, request, model), _params(exchange, request, model)
    plan.constrain(params, *model.loaded.parsers, exchange.names)
    spare_grammar(params, None)
    prompt = await _prompt(exchange, request, model, plan)
    form = AnswerFormat(plan, *model.loaded.parsers, prompt.text or "", params)
    prompt.budget = form.budget(_budget(request), model.loaded.tokenizer)
    parser = form.parser(is_whole=not request.stream)
    writer = MessageWriter(request.model or model.name, len(prompt.token_ids))
    async with exchange.generate(
        model,
        [prompt],
        params,
        user=(request.metadata or {}).get("user_id"),
        timeout=request.timeout,
        cuts_max_tokens=True,
    ) as answers:
        if request.max_tokens == 0:
            events = writer.begin()
            check_finish(await answers.warm())
            events += writer.finish("length", None, answers.usage)
            await (exchange.end(events) if request.stream else exchange.json(writer.message))
            return
        if not request.stream:
            [answer] = await answers.collect()
            writer.add(parser.push(answer.text, answer.finish_reason))
            writer.finish(check_finish(answer.finish_reason), answer.stop_reason, answers.usage)
            await exchange.json(writer.message)
            return
        events = writer.begin()
        async for [delta] in answers:
            last = delta.finish_reason is not None
            events += writer.add(parser.push(delta.text, delta.finish_reason))
            if last:
                writer.is_broken = parser.is_broken
                events += writer.finish(check_finish(delta.finish_reason), delta.stop_reason, answers.usage)
            if events:
                await exchange.send(events)
                events = b""
    await exchange.end(b"")


async def count_tokens(exchange: Exchange) -> None:
    request = exchange.decode(CountTokensRequest)
    _refuse_thread(request)
    exchange.names |= NAMES
    model = exchange.models.find(request.model)
    plan = _plan(exchange, request, model)
    params = SamplingParams(structured_outputs=_structured(exchange, request))
    plan.constrain(params, *model.loaded.parsers, exchange.names)
    prompt = await _prompt(exchange, request, model, plan)
    await exchange.json(TokenCount(len(prompt.token_ids)))


def _refuse_thread(request: CountTokensRequest) -> None:
    """Raises ApiError for a request that holds the new turns alone. Anthropic's SDKs know the code, and send
    whole conversations from then on."""
    if request.thread is not None:
        raise ApiError(
            400,
            "thread: this server keeps no conversations; send all messages, without `thread`",
            param="thread",
            code="thread_unsupported_request",
        )


def error_body(error: ApiError) -> bytes:
    """Returns the body of an error in Anthropic's shape. Claude Code knows a prompt that is too long by these
    words, and shortens its conversation."""
    too_long = "prompt is too long: " if error.code == CONTEXT_EXCEEDED else ""
    kind = ERRORS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    shown: dict[str, Any] = {"type": kind, "message": too_long + error.message}
    if error.code is not None:
        shown["details"] = {"error_code": error.code}
    return msgspec.json.encode({"type": "error", "error": shown})


def error_event(error: ApiError) -> bytes:
    return b"event: error\ndata: " + error_body(error) + b"\n\n"


ANTHROPIC = Dialect(
    "Anthropic",
    AnthropicErrorResponse,
    error_body,
    error_event,
    id_headers=("x-request-id", "request-id"),  # its SDKs read the second
)


class MessageWriter:
    """Builds the message of an answer, and returns its events as bytes."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self.message = Message(
            id=f"msg_{uuid.uuid4().hex}", model=model, content=[], usage=MessageUsage(prompt_tokens, 0)
        )
        self.is_broken = False  # a call in it cannot be made
        self._text: list[str] = []  # the text of the open block
        self._delta = b""  # the constant beginning of its delta events

    def begin(self) -> bytes:
        return _event("message_start", message=self.message)

    def add(self, parts: list[Part]) -> bytes:
        events = []
        for part in parts:
            text = part.arguments if isinstance(part, CallDelta) else part.text
            if (opened := self._opened_by(part)) is not None:
                events += [self._close(), self._open(opened)]
            if text:
                self._text.append(text)
                events.append(b"%b%b}}\n\n" % (self._delta, msgspec.json.encode(text)))
        return b"".join(events)

    def finish(self, reason: str, stop: int | str | None, usage: Usage) -> bytes:
        message = self.message
        events = self._close()
        message.usage = MessageUsage(
            usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens, usage.cached_tokens
        )
        if reason == "length":
            message.stop_reason = "max_tokens"
        elif isinstance(stop, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", stop
        else:
            has_calls = any(isinstance(block, ToolUseBlock) for block in message.content)
            message.stop_reason = "tool_use" if has_calls and not self.is_broken else "end_turn"
        delta = {"stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence}
        return events + _event("message_delta", delta=delta, usage=message.usage) + _event("message_stop")

    def _opened_by(self, part: Part) -> Block | None:
        """The new block that `part` begins. None if it continues the open one."""
        open_block = self.message.content[-1] if self.message.content else None
        if isinstance(part, CallDelta):
            return None if part.name is None else ToolUseBlock(part.id or "", part.name, {})
        if part.reasoning:
            return None if isinstance(open_block, ThinkingBlock) else ThinkingBlock("")
        return None if isinstance(open_block, TextBlock) else TextBlock("")

    def _open(self, block: Block) -> bytes:
        content = self.message.content
        content.append(block)
        self._text = []
        kind, field = (
            ("text_delta", "text")
            if isinstance(block, TextBlock)
            else ("thinking_delta", "thinking")
            if isinstance(block, ThinkingBlock)
            else ("input_json_delta", "partial_json")
        )
        self._delta = (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":'
            % (len(content) - 1, kind.encode(), field.encode())
        )
        return _event("content_block_start", index=len(content) - 1, content_block=block)

    def _close(self) -> bytes:
        """Ends the open block, if there is one."""
        if not self.message.content:
            return b""
        block, text, index = self.message.content[-1], "".join(self._text), len(self.message.content) - 1
        events = b""
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
            events = _event(
                "content_block_delta", index=index, delta={"type": "signature_delta", "signature": ""}
            )
        # arguments that were cut short stay an empty input: the block has to hold an object
        elif _is_json(text := with_whole_escapes(text)):
            block.input = msgspec.Raw(text.encode())
        return events + _event("content_block_stop", index=index)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except msgspec.DecodeError:
        return False
    return True


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _plan(exchange: Exchange, request: CountTokensRequest, model: ServedModel) -> ToolPlan:
    functions, left_out = [], []
    for tool in request.tools or ():
        if tool.type in (None, "custom"):
            functions.append(
                {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema or {"type": "object", "properties": {}},
                    "strict": tool.strict,
                }
            )
        else:  # one of Anthropic's own, such as web search: its clients send them with everything
            left_out.append(tool.name)
            warn_left_out(exchange, tool.type)
    choice, parallel = request.tool_choice, None
    wanted: str | dict[str, Any] | None = None
    if choice is not None:
        parallel = not choice.disable_parallel_tool_use
        wanted = "required" if choice.type == "any" else choice.type
        if choice.type == "tool":
            wanted = {"type": "function", "function": {"name": choice.name}}
    return plan_tools(
        [{"type": "function", "function": f} for f in functions],
        wanted,
        parallel,
        model.loaded.tool_call_parser,
        left_out,
    )


def _structured(exchange: Exchange, request: CountTokensRequest) -> StructuredOutputsParams | None:
    form = request.output_config.format if request.output_config is not None else None
    exchange.names["structured_outputs"] = "output_format" if form is None else "output_config.format"
    form = form or request.output_format
    return StructuredOutputsParams(json=form.schema) if form is not None else None


def _params(exchange: Exchange, request: MessagesRequest, model: ServedModel) -> SamplingParams:
    given = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "stop": request.stop_sequences,
    }
    return SamplingParams(
        **{**model.loaded.default_params, **{k: v for k, v in given.items() if v is not None}},
        max_tokens=filled(model, request.max_tokens) or 1,  # the engine gives one at least
        structured_outputs=_structured(exchange, request),
    )


async def _prompt(
    exchange: Exchange, request: CountTokensRequest, model: ServedModel, plan: ToolPlan
) -> Prompt:
    messages = _messages(exchange, request)
    mode = request.thinking.type if request.thinking is not None else "disabled"
    thinks = mode != "disabled" and plan.thinks
    if thinks and mode not in THINKING:
        exchange.warn("thinking.type", f"thinking.type {mode!r:.60} is taken for 'adaptive'")
    if thinks and model.loaded.reasoning_parser == "none":
        exchange.warn("thinking", f"the model {model.name} does not think aloud: `thinking` is ignored")
    effort = request.output_config.effort if request.output_config is not None and thinks else None
    # The model continues an answer that the caller has begun.
    begun = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return await model.chat_prompt(
        messages,
        tools=plan.tools,
        continue_final_message=begun,
        thinking=Thinking(is_on=thinks, effort=effort, budget=_budget(request)),
        needs_tools=not plan.is_enforced,
    )


def _budget(request: CountTokensRequest) -> int | None:
    thinking = request.thinking
    return None if thinking is None or thinking.type == "disabled" else thinking.budget_tokens


def _messages(exchange: Exchange, request: CountTokensRequest) -> list[dict[str, Any]]:
    """The conversation as messages of OpenAI's chat API. Raises RequestError."""
    if not request.messages:
        raise RequestError("messages is empty; send at least one", field="messages")
    messages: list[dict[str, Any]] = []
    system = request.system or ""
    if isinstance(system, list):
        system = "\n".join(without_billing_lines([_text("system", block) for block in system]))
    if system := without_billing_line(system):
        messages.append({"role": "system", "content": system})
    for role, blocks in _turns(request.messages):
        messages += [_answer(exchange, blocks)] if role == "assistant" else _said(exchange, role, blocks)
    return messages


def _turns(messages: list[dict[str, Any]]) -> list[tuple[str, list[GivenBlock]]]:
    """Returns the role and the blocks of each turn. Consecutive turns of the user, or of the assistant, are
    one, as Anthropic's API has it. Raises RequestError."""
    found: list[tuple[str, list[GivenBlock]]] = []
    for i, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RequestError(
                f"messages[{i}].role must be one of {', '.join(ROLES)}, got {role!r:.100}",
                field=f"messages[{i}].role",
            )
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            raise RequestError(
                f"messages[{i}].content must be text or a list of blocks, got {content!r:.100}",
                field=f"messages[{i}].content",
            )
        if not found or found[-1][0] != role or role not in ("user", "assistant"):
            found.append((role, []))
        found[-1][1].extend(
            GivenBlock(i, f"messages[{i}].content[{k}]", block) for k, block in enumerate(blocks)
        )
    return found


def _said(exchange: Exchange, role: str, blocks: list[GivenBlock]) -> list[dict[str, Any]]:
    """The messages of one turn. Each tool's result is a message of its own in the chat API."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in blocks:
        given, field = block.given, block.field
        if given.get("type") == "tool_result":
            if not isinstance(call := given.get("tool_use_id"), str):
                raise RequestError(
                    f"{field}.tool_use_id must be the id of a call, got {call!r:.100}",
                    field=f"{field}.tool_use_id",
                )
            content = _text(f"{field}.content", readable(exchange, given.get("content") or ""))
            found.append({"role": "tool", "tool_call_id": call, "content": content})
        elif given.get("type") == "tool_use":
            raise RequestError(
                f"{field} is a tool_use in the role {role}; send it with the role assistant", field=field
            )
        else:
            texts += [_text(field, part) for part in readable(exchange, [given], is_user=True)]
    if texts or not found:
        found.append({"role": role, "content": "\n".join(texts)})
    return found


def _answer(exchange: Exchange, blocks: list[GivenBlock]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    last = None  # the number of the message whose text came last
    for block in blocks:
        given, field = block.given, block.field
        kind = given.get("type")
        if kind == "tool_use":
            for name in ("id", "name"):
                if not isinstance(given.get(name), str):
                    raise RequestError(
                        f"{field}.{name} must be a text, got {given.get(name)!r:.100}",
                        field=f"{field}.{name}",
                    )
            function = {"name": given["name"], "arguments": given.get("input")}
            message.setdefault("tool_calls", []).append(
                {"id": given["id"], "type": "function", "function": function}
            )
        elif kind == "thinking":
            if not isinstance(given.get("thinking"), str):
                raise RequestError(
                    f"{field}.thinking must be a text, got {given.get('thinking')!r:.100}",
                    field=f"{field}.thinking",
                )
            message["reasoning_content"] = message.get("reasoning_content", "") + given["thinking"]
        elif kind == "tool_result":
            raise RequestError(
                f"{field} is a tool_result in the role assistant; send it with the role user", field=field
            )
        elif text := "".join(_text(field, part) for part in readable(exchange, [given])):
            if message["content"] and last != block.message:
                message["content"] += "\n"
            message["content"] += text
            last = block.message
    return message


def _text(field: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise RequestError(
                f"{field} must be text, got {part!r:.100}; send {{'type': 'text', 'text': ...}}", field=field
            )
        texts.append(text)
    return "\n".join(texts)
