"""ServedModel: an engine with what the server must know of its model to speak text to it."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from shoal.api import Control, Engine, SleepState, Stats, sampling_defaults
from shoal.errors import RequestError
from shoal.metrics import ModelMetrics
from shoal.server.admission import Admission
from shoal.server.errors import ApiError
from shoal.tokenizer import Tokenizer

T = TypeVar("T")

LONG_TEXT = 4096      # characters: from here on text is tokenized in a thread (about 1 ms), so that a burst never holds up the streams
TEXT_THREADS = 2
TEMPLATE_NAMES = frozenset({"self", "messages", "tools", "chat_template", "add_generation_prompt",
                            "continue_final_message", "tokenize", "tool_call_parser"})


class ServedEngine(Engine, Control, Protocol):
    """What stands behind a model: a worker, a fleet, a fake."""


@dataclass(slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None


@dataclass(eq=False)
class ServedModel:
    """Built before the server, in the running loop; `admission` and `metrics` are the server's view of it."""

    names: list[str]                         # clients may use any; the first is the one answered with
    engine: ServedEngine
    tokenizer: Tokenizer | None              # None: token ids only
    max_model_len: int
    vocab_size: int                          # ids of a prompt lie below
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    generation_config: dict[str, Any] = field(default_factory=dict)    # the model's defaults of sampling parameters
    seed: int = 0                            # of requests that bring none
    max_queued_requests: int = 1024
    request_timeout: float | None = None     # seconds
    tool_call_parser: str = "none"           # "hermes" | "llama3_json" | "none"
    reasoning_parser: str = "none"           # "qwen3" | "none"
    trust_request_chat_template: bool = False
    max_logprobs: int = 20                   # most that a request may ask for; -1: no limit
    closes_objects: bool = True              # of a JSON schema, where nothing says otherwise

    def __post_init__(self) -> None:
        self.name = self.names[0]
        self.admission = Admission(self.max_num_seqs, self.max_queued_requests)
        self.metrics = ModelMetrics(self.name, self.max_model_len)
        self.numbers = itertools.count()
        self.seeds = random.Random(self.seed)
        self.default_params = sampling_defaults(self.generation_config)
        self.default_max_tokens: int | None = self.default_params.pop("max_tokens", None)
        self.last_stats = Stats()
        self.last_sleep_state = SleepState()
        self._threads = ThreadPoolExecutor(TEXT_THREADS, thread_name_prefix="text")

    def need_tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise RequestError(f"the model {self.name} is served without a tokenizer (skip_tokenizer_init): send token ids")
        return self.tokenizer

    async def encode(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        tokenizer = self.need_tokenizer()
        return await self.for_text(text_size(texts), lambda: [tokenizer.encode(text, add_special_tokens) for text in texts])

    async def chat_prompt(self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
                          chat_template: str | None = None, add_generation_prompt: bool | None = None,
                          continue_final_message: bool | None = None,
                          add_special_tokens: bool | None = None, documents: list[dict[str, Any]] | None = None,
                          variables: dict[str, Any] | None = None) -> Prompt:
        """A conversation through the model's chat template. Raises RequestError with the template's own words where it refuses."""
        tokenizer = self.need_tokenizer()
        if chat_template is not None and not self.trust_request_chat_template and chat_template not in tokenizer.chat_templates:
            raise ApiError(400, "chat_template: this server takes no templates from requests; start it with --trust-request-chat-template, "
                                "as a template may run for ever", param="chat_template")
        variables = dict(variables or {})
        if taken := TEMPLATE_NAMES & variables.keys():
            raise ApiError(400, f"chat_template_kwargs: {sorted(taken)} cannot be set here; use the request's own fields",
                           param="chat_template_kwargs")
        if documents is not None:
            variables["documents"] = documents
        generates = not continue_final_message if add_generation_prompt is None else add_generation_prompt

        def render() -> Prompt:
            text = tokenizer.apply_chat_template(messages, tools=tools, chat_template=chat_template, add_generation_prompt=generates,
                                                 continue_final_message=bool(continue_final_message),
                                                 tokenize=False, tool_call_parser=self.tool_call_parser,
                                                 **variables)
            return Prompt(tokenizer.encode(text, bool(add_special_tokens)), text)

        return await self.for_text(text_size([messages, variables]) + (LONG_TEXT if tools else 0), render)

    async def for_text(self, size: int, work: Callable[[], T]) -> T:
        """`work()`, in a thread if it handles as much text as `size` says. Threads are few: a burst queues here, not on the cores."""
        return work() if size < LONG_TEXT else await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def text_size(value: Any) -> int:
    """Characters of the texts in some JSON, and a few for whatever else there is: all of it takes time."""
    if isinstance(value, str):
        return 8 + len(value)
    if isinstance(value, dict):
        return 8 + sum(map(text_size, value.values()))
    return 8 + (sum(map(text_size, value)) if isinstance(value, (list, tuple)) else 0)
