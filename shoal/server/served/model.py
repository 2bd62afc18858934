"""ServedModel: an engine with what the server must know of its model to speak text to it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shoal.api import ModelSummary
from shoal.config import ServerConfig
from shoal.control import ServedEngine
from shoal.errors import RequestError
from shoal.model_card import ModelCard
from shoal.sampling_params import sampling_defaults
from shoal.server.errors import context_overflow
from shoal.server.served.admission import Admission
from shoal.server.served.text_threads import TextThreads
from shoal.stats import SleepState, Stats
from shoal.telemetry.metrics import ModelMetrics
from shoal.text.request_builder import RequestBuilder
from shoal.text.thinking import UNSPECIFIED, Thinking
from shoal.text.thinking_budget import ThinkingBudget
from shoal.text.tokenizer import LONG_TEXT, Tokenizer

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Longer texts, in characters, are tokenized one at a time, as each may take 200 bytes of memory a character.
HUGE_TEXT = 1 << 20
# Characters of a long text, per token of context, that are tokenized first to see whether it can fit.
HEAD_CHARACTERS = 8
HEAD_SLACK = 64  # tokens that the cut through a word may add
TEMPLATE_SECONDS = 10.0  # the time that a chat template may take
TEMPLATE_NAMES = frozenset(
    {
        "self",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "tool_call_parser",
    }
)

# An engine that does not answer in this time is busy, not dead: its figures are the last ones known.
PATIENCE_SECONDS = 5.0


@dataclass(slots=True)
class Prompt:
    token_ids: list[int]
    text: str | None = None
    budget: ThinkingBudget | None = None  # the bound of reasoning in its answers


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """The model that an engine has loaded, as far as the server needs it to speak text to it."""

    tokenizer: Tokenizer | None  # None: token ids only
    max_model_len: int
    vocab_size: int  # the ids of a prompt must be smaller
    eos_token_ids: tuple[int, ...]
    max_num_seqs: int
    # the model's defaults of sampling parameters
    generation_config: dict[str, Any] = field(default_factory=dict)
    most_new_tokens: int | None = None  # upper limit of a request's max_tokens
    tool_call_parser: str = "none"  # a name of text/formats/registry.py, or "none"
    reasoning_parser: str = "none"  # "qwen3" | "none"
    cache_config: dict[str, str] = field(default_factory=dict)  # for vllm:cache_config_info
    most_drafts: int = 0  # the most in one step of a sequence; 0: the engine makes none
    summary: ModelSummary = field(default_factory=ModelSummary)
    card: ModelCard | None = None  # None: built without a card, as in tests

    @property
    def parsers(self) -> tuple[str, str]:
        return self.tool_call_parser, self.reasoning_parser

    @functools.cached_property
    def default_params(self) -> dict[str, Any]:
        """Default sampling parameters by name, without max_tokens."""
        defaults = sampling_defaults(self.generation_config, self.tokenizer is not None)
        return {name: value for name, value in defaults.items() if name != "max_tokens"}

    @property
    def default_max_tokens(self) -> int | None:
        return sampling_defaults(self.generation_config).get("max_tokens")


@dataclass(eq=False)
class ServedModel:
    """Built before the server, in the running loop; `admission` and `metrics` are the server's view of it."""

    names: list[str]  # clients may use any; the first is the one answered with
    engine: ServedEngine
    loaded: LoadedModel  # replaced as a whole, see `become`
    seed: int = 0  # requests without a seed draw theirs from this one
    max_queued_requests: int = 1024
    request_timeout: float | None = None  # seconds
    trust_request_chat_template: bool = False
    on_gpu: bool = False
    max_logprobs: int = 20  # upper limit of a request's logprobs; -1: no limit
    template_defaults: dict[str, Any] = field(default_factory=dict)  # variables that requests do not give
    closes_objects: bool = True  # a JSON schema's objects have no other keys, unless it says so

    def __post_init__(self) -> None:
        self.name = self.names[0]
        self.admission = Admission(self.loaded.max_num_seqs, self.max_queued_requests)
        self.metrics = ModelMetrics(
            self.name, self.max_model_len, self.loaded.cache_config, self.loaded.most_drafts
        )
        self.numbers = itertools.count()
        self.builder = self._builder()
        self.last_stats = Stats()
        self.last_sleep_state = SleepState()
        self._threads = TextThreads()
        self._one_huge_text = asyncio.Semaphore(1)
        self.changed = asyncio.Event()  # set by `become`

    @property
    def max_model_len(self) -> int:
        return self.loaded.max_model_len

    def _builder(self) -> RequestBuilder:
        return RequestBuilder(
            self.loaded.tokenizer,
            self.loaded.vocab_size,
            self.loaded.eos_token_ids,
            seed=self.seed,
            closes_objects=self.closes_objects,
        )

    def become(self, loaded: LoadedModel) -> None:
        """Serves `loaded` from now on. The names, the queue and the counts stay as they are."""
        self.loaded = loaded
        self.builder = self._builder()
        self.admission.set_limit(loaded.max_num_seqs, self.max_queued_requests)
        self.metrics.cache_config = loaded.cache_config
        self.metrics.drafts.set_most(loaded.most_drafts)
        self.changed.set()

    async def stats(self) -> Stats:
        """Returns the engine's figures, now or as last known. Raises EngineDeadError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                self.last_stats = await self.engine.stats()
        return self.last_stats

    async def sleep_state(self) -> SleepState:
        """Returns what sleeps, now or as last known: an engine that falls asleep or wakes up answers
        afterwards. Raises EngineDeadError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_SECONDS):
                self.last_sleep_state = await self.engine.sleep_state()
        return self.last_sleep_state

    def need_tokenizer(self) -> Tokenizer:
        if self.loaded.tokenizer is None:
            raise RequestError(
                f"the model {self.name} is served without a tokenizer (skip_tokenizer_init): send token ids"
            )
        return self.loaded.tokenizer

    async def encode(
        self, texts: Sequence[str], add_special_tokens: bool = True, *, must_fit: bool = True
    ) -> list[list[int]]:
        """Returns the token ids of each text. must_fit: refuses a text that is longer than the model's
        context, if possible before all of it is tokenized. Raises RequestError."""
        self.need_tokenizer()
        size = text_size(texts, enough=HUGE_TEXT)
        return await self.for_text(
            size, lambda: [self._encode(text, add_special_tokens, must_fit) for text in texts]
        )

    def _encode(self, text: str, add_special_tokens: bool, must_fit: bool) -> list[int]:
        """Runs in a thread if the text is long."""
        tokenizer, most = self.need_tokenizer(), self.max_model_len
        if must_fit and len(text) > most:
            if (fewest := -(-len(text) // tokenizer.longest_token)) > most:
                raise context_overflow(most, fewest)
            head = text[: HEAD_CHARACTERS * most]
            if len(head) < len(text) and len(tokenizer.encode(head, add_special_tokens)) > most + HEAD_SLACK:
                raise context_overflow(most, most + 1)
        return tokenizer.encode(text, add_special_tokens)

    async def chat_prompt(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        add_special_tokens: bool | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        thinking: Thinking = UNSPECIFIED,
        must_fit: bool = True,
        needs_tools: bool = True,
    ) -> Prompt:
        """Renders a conversation with the model's chat template. Raises RequestError with the template's own
        message if it refuses.

        variables: the request's own, which win over `thinking`, and both over the defaults of the server.
        must_fit: as in `encode`. needs_tools: False where a grammar enforces the call. The description of
        tools is then left out, with a warning, if the template has no place and the context no room for it.
        """
        tokenizer = self.need_tokenizer()
        given = {**(variables or {}), **({} if documents is None else {"documents": documents})}
        self._check_template(tokenizer, chat_template, given)
        if len(messages) > self.max_model_len:
            raise context_overflow(self.max_model_len, len(messages))
        generates = not continue_final_message if add_generation_prompt is None else add_generation_prompt

        def render(tools: list[dict[str, Any]] | None) -> str:
            variables = tokenizer.thinking_variables(
                thinking, given, has_tools=bool(tools), chat_template=chat_template
            )
            return tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=generates,
                continue_final_message=bool(continue_final_message),
                tokenize=False,
                tool_call_parser=self.loaded.tool_call_parser,
                **{**self.template_defaults, **variables, **given},
            )

        # A template is a program and may not end, so it always runs in a thread, for a limited time.
        async def rendered(tools: list[dict[str, Any]] | None, must_fit: bool) -> Prompt:
            text = await self._threads.run_bounded(
                lambda: render(tools), TEMPLATE_SECONDS, "messages: the chat template", "messages"
            )
            [ids] = await self.encode([text], bool(add_special_tokens), must_fit=must_fit)
            return Prompt(ids, text)

        may_drop = bool(tools) and not needs_tools and not tokenizer.has_place_for_tools(chat_template)
        prompt = await rendered(tools, must_fit and not may_drop)
        if may_drop and len(prompt.token_ids) >= self.max_model_len:
            logger.warning(
                "the description of %d tools makes a prompt of %d tokens, and the model's context has %d: "
                "it is left out, and the grammar alone makes the call",
                len(tools or ()),
                len(prompt.token_ids),
                self.max_model_len,
            )
            prompt = await rendered(None, must_fit)
        return prompt

    def _check_template(
        self, tokenizer: Tokenizer, chat_template: str | None, variables: dict[str, Any]
    ) -> None:
        """Raises RequestError for a template or variables that a request must not bring."""
        if (
            chat_template is not None
            and not self.trust_request_chat_template
            and chat_template not in tokenizer.chat_templates
        ):
            raise RequestError(
                "chat_template must be a template of the model, got one in the request, which may run for "
                "ever; leave it out, or start the server with --trust-request-chat-template",
                field="chat_template",
            )
        if taken := TEMPLATE_NAMES & (variables.keys() | self.template_defaults.keys()):
            raise RequestError(
                f"chat_template_kwargs must not have {sorted(taken)}; use the request's own fields",
                field="chat_template_kwargs",
            )

    async def for_text(self, size: int, work: Callable[[], T]) -> T:
        """Returns `work()`, which handles `size` characters. It runs in a thread if they are many."""
        if size < LONG_TEXT:
            return work()
        if size < HUGE_TEXT:
            return await self.in_thread(work)
        async with self._one_huge_text:
            return await self.in_thread(work)

    async def in_thread(self, work: Callable[[], T]) -> T:
        return await self._threads.run(work)

    def close(self) -> None:
        self._threads.close()


def loaded_model(card: ModelCard, tokenizer: Tokenizer | None) -> LoadedModel:
    """Returns the model of this card."""
    info = card.info
    return LoadedModel(
        tokenizer,
        max_model_len=min(info.max_model_len, info.kv_cache_tokens),
        vocab_size=info.vocab_size,
        eos_token_ids=card.eos_token_ids,
        max_num_seqs=info.max_num_seqs,
        generation_config=info.generation_config,
        most_new_tokens=info.most_new_tokens,
        tool_call_parser=card.tool_call_parser,
        reasoning_parser=card.reasoning_parser,
        cache_config=card.cache_config,
        most_drafts=card.most_drafts,
        summary=card.summary,
        card=card,
    )


def served_model(
    card: ModelCard, engine: ServedEngine, tokenizer: Tokenizer | None, config: ServerConfig
) -> ServedModel:
    """Returns the model of this card, served by this engine."""
    return ServedModel(
        card.names,
        engine,
        loaded_model(card, tokenizer),
        seed=card.seed,
        max_queued_requests=config.max_queued_requests,
        request_timeout=config.request_timeout,
        trust_request_chat_template=config.trust_request_chat_template,
        on_gpu=card.info.device != "cpu",
        max_logprobs=card.max_logprobs,
        template_defaults=card.template_defaults,
        closes_objects=card.closes_objects,
    )


def text_size(values: Sequence[str], enough: int) -> int:
    """Returns the number of characters of the texts, plus 8 per text. Stops counting at `enough`."""
    size = 0
    for value in values:
        size += 8 + len(value)
        if size >= enough:
            break
    return size
