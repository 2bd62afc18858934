"""/api/...: Ollama's API, for the many tools that speak nothing else.

Answers are streams unless it is said otherwise: JSON objects, a line each.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shoal.errors import RequestError
from shoal.outputs import CompletionOutput
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.server.apis.params import read_prompts, spare_grammar
from shoal.server.apis.parts import readable
from shoal.server.apis.protocol import Count, MinusOneOrMore, Positive, Seconds, Seed, TokenId, Word, Words
from shoal.server.apis.response_shapes import LogprobShapes, encode
from shoal.server.apis.shapes import ContentLogprob
from shoal.server.apis.tokens import embed
from shoal.server.apis.tools import (
    AnswerFormat,
    ToolPlan,
    check_finish,
    functions_among,
    is_object,
    plan_tools,
    thinking_of,
)
from shoal.server.errors import ApiError
from shoal.server.http.exchange import Dialect, Exchange
from shoal.server.served.generation import Generation
from shoal.server.served.model import Prompt, ServedModel
from shoal.text.answer import Delta
from shoal.text.conversation import with_whole_escapes
from shoal.text.reading.parts import CallDelta, Part
from shoal.text.thinking import Thinking

# The release of Ollama whose API this is: clients compare it with the one that brought what they need.
API_VERSION = "0.12.6"
# See Exchange.
NAMES = {
    "structured_outputs": "format",
    "logprobs": "top_logprobs",
    "repetition_penalty": "options.repeat_penalty",
    **{
        name: f"options.{name}"
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "seed",
            "stop",
            "presence_penalty",
            "frequency_penalty",
        )
    },
}
NOW = (0, "0", "0s")  # values of keep_alive with which Ollama unloads a model at once
EFFORTS = ("low", "medium", "high", "max")
NANOSECONDS = 1_000_000_000
NEVER = "2100-01-01T00:00:00Z"  # models stay


# Requests


class OllamaOptions(Struct, kw_only=True):
    """Sampling options. The options of Ollama's own runner (num_ctx, num_gpu, num_thread and the like) are
    accepted and ignored: the server was started with its own."""

    num_predict: int | None = None  # not above 0: as many as fit
    temperature: float | None = None
    top_k: MinusOneOrMore | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Seed | None = None
    stop: Word | Words | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    main_gpu: int | None = None
    num_thread: int | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    low_vram: bool | None = None
    numa: bool | None = None


class OllamaRequest(Struct, kw_only=True):
    """The fields that all requests for text have."""

    model: str | None = None  # None: the first model
    stream: bool | None = None  # true unless it is said
    format: str | dict[str, Any] | None = None  # "json", or a JSON schema
    options: OllamaOptions | None = None
    think: bool | str | None = None  # or one of EFFORTS
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    keep_alive: float | str | None = None  # taken: models stay
    timeout: Seconds | None = None  # as in our other APIs


class OllamaFunction(Struct, kw_only=True):
    name: str
    arguments: Any  # an object, unless a model wrote another value


class OllamaToolCall(Struct, kw_only=True):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(Struct, kw_only=True):
    role: str
    content: str | list[Any] | None = None
    thinking: str | None = None
    images: list[str] | None = None  # models here read text: refused of a user, else left out
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = None  # the tool that gave the result
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt as it is, without the chat template
    context: list[TokenId] | None = None  # returned with the previous answer
    images: list[str] | None = None  # refused
    suffix: str | None = None  # refused
    template: str | None = None  # refused


class OllamaShowRequest(Struct, kw_only=True):
    model: str | None = None
    name: str | None = None  # its older name
    verbose: bool | None = None


class OllamaEmbedRequest(Struct, kw_only=True):
    input: str | list[str]
    model: str | None = None
    truncate: bool | None = None  # true unless it is said: the first tokens that fit
    dimensions: Positive | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaEmbeddingsRequest(Struct, kw_only=True):
    prompt: str
    model: str | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


# Answers


class OllamaError(Struct):
    error: str


class OllamaAnswer(Struct, kw_only=True, omit_defaults=True):
    """The fields of every answer. Durations are in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[ContentLogprob] | None = None  # for the tokens since the object before


class OllamaAnswerMessage(Struct, kw_only=True, omit_defaults=True):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[OllamaToolCall] | None = None


class OllamaChatAnswer(OllamaAnswer, kw_only=True):
    message: OllamaAnswerMessage


class OllamaGenerateAnswer(OllamaAnswer, kw_only=True):
    response: str
    thinking: str | None = None
    context: list[int] | None = None


class OllamaDetails(Struct):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct, kw_only=True, omit_defaults=True):
    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    modified_at: str | None = None
    expires_at: str | None = None  # set for loaded models
    size_vram: int | None = None
    context_length: int | None = None


class OllamaModels(Struct):
    models: list[OllamaModel]


class OllamaShown(Struct):
    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaEmbeddings(Struct):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Struct):
    embedding: list[float]


def error_body(error: ApiError) -> bytes:
    return encode({"error": error.message})


def error_line(error: ApiError) -> bytes:
    return error_body(error) + b"\n"


OLLAMA = Dialect("Ollama", OllamaError, error_body, error_line, "application/x-ndjson")


# Text


async def chat(exchange: Exchange) -> None:
    request = exchange.decode(OllamaChatRequest)
    exchange.names |= {**NAMES, "prompt": "messages"}
    model = exchange.models.find(request.model)
    messages = [_to_chat(exchange, i, message) for i, message in enumerate(request.messages or ())]
    writer = OllamaWriter(exchange, request.model or model.name, is_chat=True)
    if not messages:
        await exchange.json(writer.loaded(request.keep_alive))
        return
    functions, _ = functions_among(exchange, request.tools)
    plan = plan_tools(functions, None, None, model.loaded.tool_call_parser)
    params = _params(request, model)
    plan.constrain(params, *model.loaded.parsers, exchange.names)
    prompt = await _chat_prompt(request, model, messages, plan)
    await _answer(exchange, request, model, prompt, params, plan, writer)


async def generate(exchange: Exchange) -> None:
    request = exchange.decode(OllamaGenerateRequest)
    exchange.names |= NAMES
    model = exchange.models.find(request.model)
    _refuse_images(request.images, "images")
    for name, why in (
        ("suffix", "no model here fills in the middle"),
        ("template", "the model's own is used; send the prompt as the model reads it (raw)"),
    ):
        if getattr(request, name):
            raise RequestError(f"{name} is given, and {why}; leave it out", field=name)
    writer = OllamaWriter(exchange, request.model or model.name, is_chat=False)
    if not request.prompt:
        await exchange.json(writer.loaded(request.keep_alive))
        return
    params, plan = _params(request, model), ToolPlan()
    if request.raw:
        plan.thinks = params.structured_outputs is None
        [prompt] = await read_prompts(model, request.prompt, field="prompt")
    else:
        plan.constrain(params, *model.loaded.parsers, exchange.names)
        messages = [{"role": "system", "content": request.system}] if request.system else []
        messages.append({"role": "user", "content": request.prompt})
        prompt = await _chat_prompt(request, model, messages, plan)
    if request.context:
        prompt = Prompt([*request.context, *prompt.token_ids], prompt.text)
    writer.gives_context = not request.raw
    await _answer(exchange, request, model, prompt, params, plan, writer)


async def _chat_prompt(
    request: OllamaRequest, model: ServedModel, messages: list[dict[str, Any]], plan: ToolPlan
) -> Prompt:
    think, thinking = request.think, thinking_of(None, plan)
    if think and model.loaded.reasoning_parser == "none":
        raise RequestError(
            f"think must be false for the model {model.name}, which does not think aloud; leave it out",
            field="think",
        )
    if isinstance(think, str):
        if think not in EFFORTS:
            raise RequestError(
                f"think must be true, false or one of {', '.join(EFFORTS)}, got {think!r:.40}; choose one",
                field="think",
            )
        thinking = thinking_of(think, plan)
    elif think is not None and plan.thinks:
        thinking = Thinking(is_on=think)
    # The model continues an answer that the caller has begun.
    begun = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return await model.chat_prompt(
        messages, tools=plan.tools, continue_final_message=begun, thinking=thinking
    )


async def _answer(
    exchange: Exchange,
    request: OllamaRequest,
    model: ServedModel,
    prompt: Prompt,
    params: SamplingParams,
    plan: ToolPlan,
    writer: OllamaWriter,
) -> None:
    wanted = request.options.num_ctx if request.options is not None else None
    if wanted is not None and wanted > model.max_model_len:
        exchange.warn(
            "num_ctx",
            f"options.num_ctx {wanted} is more than the {model.max_model_len} tokens that "
            f"{model.name} was started with (--max-model-len)",
        )
    spare_grammar(params, request.options.repeat_penalty if request.options is not None else None)
    parser = AnswerFormat(plan, *model.loaded.parsers, prompt.text or "", params).parser(
        is_whole=not request.stream
    )
    async with exchange.generate(
        model, [prompt], params, timeout=request.timeout, cuts_max_tokens=True
    ) as generation:
        if params.logprobs is not None:
            writer.shapes = LogprobShapes(model, params.logprobs, as_ids=False)
        if request.stream is False:
            [answer] = await generation.collect()
            writer.add(parser.push(answer.text, answer.finish_reason), answer)
            await exchange.json(writer.last(check_finish(answer.finish_reason), generation))
            return
        async for [delta] in generation:
            is_last = delta.finish_reason is not None
            writer.add(parser.push(delta.text, delta.finish_reason), delta)
            writer.is_broken = parser.is_broken
            if line := writer.line(is_last):
                await exchange.send(line)
            if is_last:
                reason = check_finish(delta.finish_reason)
    await exchange.end(writer.last(reason, generation) + b"\n")


class OllamaWriter:
    """Collects what has come of an answer and is not sent yet. A tool call is sent when it is whole, because
    its arguments are an object and not a text."""

    def __init__(self, exchange: Exchange, name: str, *, is_chat: bool) -> None:
        """name: the model's name as the client wrote it."""
        self.name, self.is_chat, self.gives_context = name, is_chat, False
        self._arrival = exchange.arrival
        self._content: list[str] = []
        self._thinking: list[str] = []
        self._calls: list[CallDelta] = []  # the last one may still grow
        self.is_broken = False  # a call is broken: it is text, as it cannot be made
        self._token_ids: list[int] = []  # the whole answer's
        self.shapes: LogprobShapes | None = None  # for requests that want log-probabilities
        self._rows: list[Any] = []

    def add(self, parts: Sequence[Part], answer: Delta | CompletionOutput) -> None:
        """answer: what the parts were made of."""
        if self.gives_context:
            self._token_ids += answer.token_ids
        if self.shapes is not None:
            self._rows += self.shapes.of_text(answer)
        for part in parts:
            if not isinstance(part, CallDelta):
                (self._thinking if part.reasoning else self._content).append(part.text)
            elif part.name is not None:
                self._calls.append(part)
            else:
                self._calls[-1].arguments += part.arguments

    def line(self, is_last: bool) -> bytes:
        """Returns the next object to be sent. It is empty if nothing new can be sent."""
        num_whole = len(self._calls) if is_last else len(self._calls) - 1
        if not (self._content or self._thinking or num_whole > 0):
            return b""
        return encode({**self._head(False), **self._take(max(0, num_whole))}) + b"\n"

    def last(self, reason: str, generation: Generation) -> bytes:
        """Returns the last object: all that was not sent yet, and how long the answer took."""
        prompt, [times] = generation.prompts[0], generation.times
        # From arrival to start: reading, tokenizing, waiting, and waking a model that slept. From the first
        # token to now, as in Ollama: clients divide by it after an answer of one token, too.
        marks = self._arrival, times.arrival + times.queued, times.first, time.perf_counter()
        arrival, started, first, now = map(_nanoseconds, marks)
        found = {**self._head(True), **self._take(len(self._calls)), "done_reason": reason}
        if self.gives_context:
            found["context"] = [*prompt.token_ids, *self._token_ids]
        return encode(
            {
                **found,
                "total_duration": now - arrival,
                "load_duration": started - arrival,
                "prompt_eval_count": generation.usage.prompt_tokens,
                "prompt_eval_duration": max(0, first - started),
                "eval_count": generation.usage.completion_tokens,
                "eval_duration": now - first,
            }
        )

    def loaded(self, keep_alive: float | str | None) -> bytes:
        """Returns the answer to a request without a prompt: Ollama's clients load a model with it or, with
        a keep_alive of 0, unload it."""
        reason = "unload" if keep_alive in NOW else "load"
        return encode({**self._head(True), **self._take(0), "done_reason": reason})

    def _head(self, is_done: bool) -> dict[str, Any]:
        return {"model": self.name, "created_at": _time(time.time()), "done": is_done}

    def _take(self, num_calls: int) -> dict[str, Any]:
        content, thinking, calls = "".join(self._content), "".join(self._thinking), self._calls[:num_calls]
        self._content, self._thinking, self._calls = [], [], self._calls[num_calls:]
        if self.is_broken:
            content = "".join(call.arguments for call in calls if not is_object(call.arguments)) + content
            calls = [call for call in calls if is_object(call.arguments)]
        thought = {"thinking": thinking} if thinking else {}
        rows, self._rows = self._rows, []
        more = {"logprobs": rows} if rows else {}
        if not self.is_chat:
            return {"response": content, **thought, **more}
        made = {"tool_calls": [_tool_call(call) for call in calls]} if calls else {}
        return {"message": {"role": "assistant", "content": content, **thought, **made}, **more}


def _tool_call(call: CallDelta) -> dict[str, Any]:
    """A call in Ollama's shape. Arguments that were cut short become an empty object, because Ollama's field
    must be an object."""
    try:
        arguments = msgspec.json.decode(with_whole_escapes(call.arguments))
    except msgspec.DecodeError:
        arguments = {}
    return {
        "id": call.id,
        "function": {
            "index": call.index,
            "name": call.name,
            "arguments": arguments if isinstance(arguments, dict) else {},
        },
    }


def _to_chat(exchange: Exchange, i: int, message: OllamaMessage) -> dict[str, Any]:
    """The message in the shape of OpenAI's chat API."""
    content, is_user = message.content or "", message.role == "user"
    if is_user:
        _refuse_images(message.images, f"messages[{i}].images")
    elif message.images:
        texts = [{"type": "text", "text": content}] if isinstance(content, str) and content else content
        content = [*texts, *({"type": "image"} for _ in message.images)]
    content = readable(exchange, content, is_user=is_user)
    found: dict[str, Any] = {"role": message.role, "content": content}
    for name, value in (
        ("reasoning_content", message.thinking),
        ("name", message.tool_name),
        ("tool_call_id", message.tool_call_id),
    ):
        if value is not None:
            found[name] = value
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id or f"call_{i}_{k}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": call.function.arguments},
            }
            for k, call in enumerate(message.tool_calls)
        ]
    return found


def _refuse_images(images: list[str] | None, param: str) -> None:
    if images:
        raise RequestError(f"{param} is given, and models here read text alone; leave it out", field=param)


def _params(request: OllamaRequest, model: ServedModel) -> SamplingParams:
    options = request.options or OllamaOptions()
    given = {
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "min_p": options.min_p,
        "seed": options.seed,
        "stop": options.stop or None,
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
    }
    given = {name: value for name, value in given.items() if value is not None}
    wanted = options.num_predict
    return SamplingParams(
        **{**model.loaded.default_params, **given},
        structured_outputs=_structured(request.format),
        logprobs=_num_logprobs(request),
        max_tokens=model.max_model_len if wanted is not None and wanted < 0 else wanted or None,
    )


def _num_logprobs(request: OllamaRequest) -> int | None:
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs set to true", field="top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _structured(form: str | dict[str, Any] | None) -> StructuredOutputsParams | None:
    if form is None or form == "":
        return None
    if form == "json":
        return StructuredOutputsParams(json_object=True)
    if isinstance(form, str):
        raise RequestError(f'format must be "json" or a JSON schema, got {form!r:.40}', field="format")
    return StructuredOutputsParams(json=form)


# Embeddings


async def embed_texts(exchange: Exchange) -> None:
    request = exchange.decode(OllamaEmbedRequest)
    exchange.names |= {"prompt": "input", "n": "input"}
    model = exchange.models.find(request.model)
    texts = [request.input] if isinstance(request.input, str) else request.input
    vectors, num_tokens = [], 0
    if any(texts):
        prompts = await _prompts(model, texts, truncates=request.truncate is not False)
        vectors = await embed(exchange, model, prompts, dimensions=request.dimensions)
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
    duration = _nanoseconds(time.perf_counter() - exchange.arrival)
    await exchange.json(OllamaEmbeddings(request.model or model.name, vectors, duration, 0, num_tokens))


async def embed_text(exchange: Exchange) -> None:
    """The older form of the endpoint, for one text."""
    request = exchange.decode(OllamaEmbeddingsRequest)
    model = exchange.models.find(request.model)
    vectors: list[list[float]] = [[]]
    if request.prompt:
        prompts = await _prompts(model, [request.prompt], truncates=True)
        vectors = await embed(exchange, model, prompts)
    await exchange.json(OllamaEmbedding(vectors[0]))


async def _prompts(model: ServedModel, texts: list[str], *, truncates: bool) -> list[Prompt]:
    """The prompts of an embedding request. With `truncates`, a text that is too long is cut to the first
    tokens that fit."""
    limit = model.max_model_len if truncates else None
    return [Prompt(ids[:limit]) for ids in await model.encode(texts, must_fit=not truncates)]


# Models


async def version(exchange: Exchange) -> None:
    await exchange.json({"version": API_VERSION})


async def tags(exchange: Exchange) -> None:
    models = exchange.models
    own = [
        _model(model, name, modified_at=_time(model.loaded.summary.modified))
        for model in models
        for name in model.names
    ]
    # Nothing is known of external workers' models but their names.
    external = [
        OllamaModel(name=_tagged(name), model=_tagged(name), size=0, digest="", details=NO_DETAILS)
        for model in models.external
        for name in model.names
    ]
    await exchange.json(OllamaModels(own + external))


async def ps(exchange: Exchange) -> None:
    """Lists the models that are awake."""
    states = [(model, await model.sleep_state()) for model in exchange.models]
    await exchange.json(
        OllamaModels(
            [
                _model(
                    model,
                    model.name,
                    expires_at=NEVER,
                    size_vram=model.loaded.summary.num_bytes if model.on_gpu else 0,
                    context_length=model.max_model_len,
                )
                for model, state in states
                if "weights" not in state.asleep
            ]
        )
    )


async def show(exchange: Exchange) -> None:
    request = exchange.decode(OllamaShowRequest)
    model = exchange.models.find(request.model or request.name)
    summary = model.loaded.summary
    template = (model.loaded.tokenizer.chat_template if model.loaded.tokenizer is not None else None) or ""
    sizes = {**summary.sizes, "context_length": model.max_model_len}
    info: dict[str, Any] = {
        "general.architecture": summary.architecture,
        "general.parameter_count": summary.num_parameters,
    }
    info |= {f"{summary.architecture}.{name}": value for name, value in sizes.items()}
    capabilities = ["completion"]
    if template and model.loaded.tool_call_parser != "none":
        capabilities.append("tools")
    if model.loaded.reasoning_parser != "none":
        capabilities.append("thinking")
    parameters = "\n".join(
        f"{'repeat_penalty' if name == 'repetition_penalty' else name} {value}"
        for name, value in model.loaded.default_params.items()
    )
    await exchange.json(
        OllamaShown(
            f"FROM {model.name}\n",
            parameters,
            template,
            _details(model),
            info,
            capabilities,
            _time(summary.modified),
        )
    )


def _model(model: ServedModel, name: str, **more: Any) -> OllamaModel:
    tagged = _tagged(name)
    return OllamaModel(
        name=tagged,
        model=tagged,
        size=model.loaded.summary.num_bytes,
        digest=model.loaded.summary.digest,
        details=_details(model),
        **more,
    )


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


NO_DETAILS = OllamaDetails("", "", "", [], "", "")


def _details(model: ServedModel) -> OllamaDetails:
    summary = model.loaded.summary
    return OllamaDetails(
        "",
        summary.format,
        summary.architecture,
        [summary.architecture],
        _size(summary.num_parameters),
        summary.quantization,
    )


def _size(count: int) -> str:
    """A number of parameters in Ollama's notation: 134.52M, 8.2B."""
    for unit, name, digits in ((10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 2)):
        if count >= unit:
            return f"{count / unit:.{digits}f}{name}"
    return str(count)


def _time(seconds: float) -> str:
    """A time in the notation of RFC 3339, in UTC."""
    time = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return time.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * NANOSECONDS))
