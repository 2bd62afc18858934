"""LLM: the offline interface, with vLLM's names and meanings. It adds text to an EngineCore in this process.
The module is torch-free; the first LLM imports torch."""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from msgspec import ValidationError, convert
from tqdm import tqdm

from shoal.api import check_sleep
from shoal.config import DEFAULT_MODEL, EngineConfig
from shoal.engine.answers import AnswerGroup, EmbeddingAnswer, LimitedAnswer, SequenceAnswer
from shoal.engine.beam_search import BeamSearch
from shoal.engine.early_device import open_device_early
from shoal.engine.turns import LateInterrupts, TurnLock, only_young_garbage
from shoal.errors import RequestError, UnavailableError
from shoal.kv_events import EventBatch
from shoal.options.fields import described
from shoal.outputs import BeamSearchOutput, EmbeddingRequestOutput, RequestMetrics, RequestOutput
from shoal.sampling_params import BeamSearchParams, SamplingParams, sampling_defaults
from shoal.stats import MemoryReport, Stats
from shoal.text.formats.registry import THOUGHTS_BY_NAME, choose_thoughts
from shoal.text.request_builder import RequestBuilder
from shoal.text.thinking_budget import ThinkingBudget
from shoal.text.tokenizer import Tokenizer, end_token_ids, load_tokenizer
from shoal.weights.source import CheckpointFiles, resolve

if TYPE_CHECKING:
    from shoal.engine.step_part import PartBuilder

Prompt = str | Sequence[int] | dict[str, Any]
Message = dict[str, Any]
Groups = TypeVar("Groups", "AnswerGroup", "EmbeddingAnswer")
PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
P = ParamSpec("P")
R = TypeVar("R")


def _alone(method: Callable[Concatenate[LLM, P], R]) -> Callable[Concatenate[LLM, P], R]:
    """While the method runs, no other thread's call touches the engine."""

    @functools.wraps(method)
    def alone(self: LLM, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            self._drop_abandoned()
            return method(self, *args, **kwargs)

    return alone


class LLM:
    """Loads a checkpoint and generates. Options are EngineConfig's fields, and disable_log_stats=False, with
    which each RequestOutput has its times. Threads may share it: the thread whose turn it is steps for all of
    them, so their requests run in one batch.

    `more_parts` build parts of the engine in addition to Shoal's own (engine/step_part.py), for experiments:
    each gets (config, ranks, scheduler).

    Raises UserError (a ValueError) for impossible options, checkpoints and requests; the engine lives on
    after a bad request.
    """

    __doc__ = f"{__doc__}\n\n{described(EngineConfig)}\n"

    def __init__(
        self, model: str = DEFAULT_MODEL, *, more_parts: Sequence[PartBuilder] = (), **options: Any
    ) -> None:
        for name in ("tokenizer", "dtype"):  # a path, a torch.dtype
            if options.get(name) is not None:
                options[name] = str(options[name]).removeprefix("torch.")
        self._keeps_times = options.pop("disable_log_stats", True) is False
        config = EngineConfig.from_options(model=str(model), **options)
        with only_young_garbage:
            self._load(config, more_parts)

    def _load(self, config: EngineConfig, more_parts: Sequence[PartBuilder]) -> None:
        open_device_early(config.device)
        from shoal.engine.core import EngineCore  # It imports torch, and the GPU is opened meanwhile.

        files = resolve(config.model, config.revision, config.download_dir, overrides=config.hf_overrides)
        files = files.overridden(config.hf_overrides).check()
        self._lock = TurnLock()  # held for a step, and whenever else the core is touched
        self._late_interrupts = LateInterrupts()
        self._ids = itertools.count()
        self._answers: dict[str, SequenceAnswer | EmbeddingAnswer] = {}
        self._abandoned: deque[AnswerGroup | EmbeddingAnswer] = (
            deque()
        )  # to be dropped at the engine's next turn
        self._learn_text(config, files)
        self.core = EngineCore(config, files, more_parts=more_parts)
        self.config = self.core.config

    def _learn_text(self, config: EngineConfig, files: CheckpointFiles) -> None:
        """Loads tokenizer, generation config and end-of-text ids. Raises CheckpointError."""
        self.tokenizer: Tokenizer | None = None
        if not config.skip_tokenizer_init:
            self.tokenizer = load_tokenizer(files, config.tokenizer, config.chat_template)
        vocab_size = files.config.vocab_size
        self.generation_config = config.sampling_config(files.generation_config)
        self.eos_token_ids = end_token_ids(files.eos_token_ids, self.tokenizer, vocab_size)
        self._builder = RequestBuilder(
            self.tokenizer,
            vocab_size,
            self.eos_token_ids,
            seed=config.seed,
            closes_objects=config.closes_objects,
        )

    # Generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Returns one RequestOutput for each prompt, in order. A prompt is text, token ids, or a dict with
        "prompt" (text) or "prompt_token_ids", and "cache_salt" if wanted. Raises RequestError for an
        impossible request and UnavailableError while the engine sleeps; then none of them has run."""
        with only_young_garbage:
            prompts = _as_list(prompts)
            params = self._params_for(len(prompts), sampling_params)
            if priority is None:
                priority = [0] * len(prompts)
            elif len(priority) != len(prompts) or not all(isinstance(p, int) for p in priority):
                raise RequestError(
                    f"priority {priority!r:.80} is not one integer for each of {len(prompts)} prompts; lower "
                    "runs first"
                )
            groups = self._add([self._group(*each) for each in zip(prompts, params, priority)])
            self._run(groups, use_tqdm)
            return [group.output() for group in groups]

    def embed(
        self, prompts: Prompt | Sequence[Prompt], use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """Returns one embedding for each prompt, in order: the hidden state after its last token, of unit
        length. Prompts, and what is raised, are as for `generate`."""
        embeddings = []
        params = SamplingParams(max_tokens=1)
        with only_young_garbage:
            for prompt in _as_list(prompts):
                _, ids, salt = self._tokenize(prompt)
                number = next(self._ids)
                [request] = self._builder.build(
                    [ids], params, iter([f"{number}-0"]), arrival=float(number), cache_salt=salt, embed=True
                )
                embeddings.append(EmbeddingAnswer(request))
            self._run(self._add(embeddings), use_tqdm)
            return [embedding.result() for embedding in embeddings]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Returns the `beam_width` likeliest texts of each prompt: `transformers`' num_beams, and vLLM's
        LLM.beam_search. Each token is a step of all beams of all prompts, which the prefix cache makes cheap.
        Raises RequestError if beam_width and the model's end-of-text ids are together more than max_logprobs,
        and for a prompt that leaves no room for a token."""
        searches, salts = [], []
        for prompt in _as_list(prompts):
            _, ids, salt = self._tokenize(prompt)
            room = self.config.max_model_len - len(ids)
            searches.append(BeamSearch(ids, params, self.eos_token_ids, min(params.max_tokens, room)))
            salts.append(salt)
        if searches and searches[0].num_candidates > self.config.max_logprobs >= 0:
            raise RequestError(
                f"beam_width {params.beam_width} needs the {searches[0].num_candidates} likeliest tokens of "
                f"each step, more than max_logprobs {self.config.max_logprobs}; choose fewer beams or raise "
                "max_logprobs of the engine"
            )
        hidden = not (use_tqdm and sys.stderr.isatty())
        with tqdm(total=params.max_tokens, desc="Beam search", disable=hidden) as bar:
            while any(search.running for search in searches):
                self._advance(searches, salts)
                bar.update()
        outputs = [BeamSearchOutput(search.results()) for search in searches]
        if self.tokenizer is not None:
            for output in outputs:
                for beam in output.sequences:
                    beam.text = self.tokenizer.decode(beam.tokens)
        return outputs

    def _advance(self, searches: Sequence[BeamSearch], salts: Sequence[str | None]) -> None:
        """Adds one token to every running beam."""
        beams = [
            {"prompt_token_ids": beam.tokens, "cache_salt": salt}
            for search, salt in zip(searches, salts)
            for beam in search.running
        ]
        num_candidates = searches[0].num_candidates
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=num_candidates, detokenize=False)
        outputs = self.generate(beams, params, use_tqdm=False)
        likeliest = iter([output.outputs[0].logprobs[0] for output in outputs])  # type: ignore[index]
        for search in searches:
            if search.running:
                search.advance([next(likeliest) for _ in search.running])

    def _run(self, groups: Sequence[AnswerGroup | EmbeddingAnswer], use_tqdm: bool) -> None:
        """Steps until they are finished."""
        bar = tqdm(total=len(groups), desc="Prompts", disable=not (use_tqdm and sys.stderr.isatty()))
        try:
            # One after the other: checking thousands of them at each step takes a fifth of their time.
            with self._late_interrupts:
                for group in groups:
                    while not group.finished:
                        with self._lock:
                            if not group.finished:  # by a step of another thread
                                self._step()
                        self._late_interrupts.apply()
                    bar.update()
        finally:
            self._drop(groups)
            bar.close()

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Renders one conversation, or a list of them, through the model's chat template, and generates the
        answers: one RequestOutput for each conversation, in order. Raises as `generate`, and RequestError for
        messages that the template refuses."""
        if not isinstance(messages, Sequence) or not messages:
            raise RequestError(
                f"messages must be a conversation, got {messages!r:.80}; give a list of "
                "{'role': ..., 'content': ...}"
            )
        conversations = [messages] if isinstance(messages[0], dict) else messages
        prompts = [
            self.chat_prompt(
                m,  # type: ignore[arg-type]
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                continue_final_message=continue_final_message,
                **(chat_template_kwargs or {}),
            )
            for m in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], **options: Any) -> dict[str, Any]:
        """Returns the prompt of a conversation, as text and token ids, for `generate`. The template writes
        the special tokens, so none are added. `options`: arguments of `apply_chat_template`. Raises
        RequestError for messages that the template refuses."""
        tokenizer = self.get_tokenizer()
        text = tokenizer.apply_chat_template(
            messages, **{"add_generation_prompt": True} | options, tokenize=False
        )
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, every_step: bool = False
    ) -> Iterator[RequestOutput]:
        """Yields the growing RequestOutput of one prompt after every step that adds to it; with `every_step`
        after the others too, so that a long prompt can be abandoned in the middle. Closing the iterator
        aborts the request. Raises as `generate`, at the first `next`."""
        [params] = self._params_for(1, sampling_params)
        [group] = groups = self._add([self._group(prompt, params, 0)])
        shown = group.progress
        try:
            while not group.finished or group.progress != shown:
                output = None
                with self._late_interrupts, self._lock:
                    if group.progress == shown:  # another call's steps may have moved it on
                        self._step()
                    if every_step or group.progress != shown:
                        shown, output = group.progress, group.output()
                if output is not None:
                    yield output
        finally:
            self._drop(groups)

    def get_default_sampling_params(self) -> SamplingParams:
        """Returns the model's own defaults, from generation_config.json."""
        return SamplingParams(**sampling_defaults(self.generation_config, self.tokenizer is not None))

    # Everything else

    def get_tokenizer(self) -> Tokenizer:
        """Returns the model's tokenizer. Raises RequestError for an engine without one
        (skip_tokenizer_init)."""
        if self.tokenizer is None:
            raise RequestError(
                "this engine runs without a tokenizer (skip_tokenizer_init); give token ids, "
                "or build it with one"
            )
        return self.tokenizer

    @_alone
    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False if blocks were still in use (they are forgotten too)."""
        return self.core.reset_prefix_cache()

    @_alone
    def drain_kv_events(self) -> list[EventBatch]:
        """Returns the blocks cached and removed since the last call, one batch for each step with a change
        (shoal/kv_events.py); vLLM's `take_events`. After more than `buffer_steps` of them, one batch that
        clears all and stores what is cached now. Raises ConfigError unless kv_events_config enables
        events."""
        return self.core.kv_events.drain()

    @_alone
    def kv_snapshot(self) -> EventBatch:
        """Returns all KV blocks that are cached now, as one batch that clears all and stores them. Raises as
        drain_kv_events."""
        return self.core.kv_events.snapshot()

    @_alone
    def sleep(self, level: int = 1, tags: Sequence[str] | None = None, mode: str = "abort") -> MemoryReport:
        """Gives the device's memory back. Level 0 pauses scheduling only, 1 keeps the weights in host memory
        (or relies on their file: sleep_offload) and drops the KV cache, 2 drops both; 1 and 2 need
        enable_sleep_mode=True. `tags` ("weights", "kv_cache") restricts it to some regions. `mode`: running
        requests (of `stream`) end first ("wait"), are aborted ("abort"), or continue after the wake-up
        ("keep"). Returns the bytes of memory by region. Until every
        region is awake `generate` raises UnavailableError. Raises ConfigError for an unknown level, tag or
        mode, and UnavailableError where the host lacks memory to keep the weights in; then nothing has
        changed."""
        check_sleep(level, tags, mode)
        if mode == "wait" and self.core.sleeper.is_possible(level):
            self._finish_requests()
        return self.core.sleep(level, tags, mode)

    @_alone
    def wake_up(self, tags: Sequence[str] | None = None) -> MemoryReport:
        """Takes memory again, at the same addresses: of all regions, or of those in `tags`. Returns the bytes
        of memory by region. After level 2 weights are missing: until an update `generate` raises
        UnavailableError. Raises ConfigError for an unknown tag, and UnavailableError if another program has
        the memory now; then nothing has changed, and it can be tried again."""
        return self.core.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """True while a region sleeps or, at level 0, scheduling is paused."""
        return self.core.sleep_state().is_sleeping

    @_alone
    def memory_usage(self) -> dict[str, dict[str, int]]:
        """Returns by tag: {"device_bytes": mapped now, "reserved_bytes": of addresses, "host_bytes": kept on
        the host, "ready_bytes": host memory held ready for it}. On a GPU in sleep mode also "device":
        {"in_use_bytes", "region_bytes", "process_bytes"}, as in MemoryReport. Summed over ranks."""
        return self.core.memory_usage()

    @_alone
    def update_weights(self, source: str) -> int:
        """Loads the weights of another checkpoint (as the option `model` names one) in place of these, and
        returns their version.

        After `sleep(level=2)`, and before its KV cache is awake, the engine takes a checkpoint of another
        model too: other shapes, another architecture or quantization. Tokenizer, chat template and defaults
        become that model's. The weights are awake then; `wake_up` brings the KV cache. Requests that were
        kept are aborted. If this fails, the engine sleeps on with its old model. At any other time another
        model raises CheckpointError, with nothing changed.

        If loading weights in place breaks off, nothing is generated until a good update."""
        core = self.core.update_weights(str(source))
        if core is not self.core:
            self.core, self.config = core, core.config
            self._learn_text(core.config, core.files)
        return core.weights.version

    @_alone
    def update_weights_from_tensors(self, tensors: Mapping[str, Any] | Sequence[dict[str, Any]]) -> int:
        """Loads whole tensors by their Hugging Face names: a dict of this process's, or the handles of
        another process's (shoal.weights.transfer.SharedTensors). Some of a model's tensors will do; after
        level 2 all must have come before it generates. Returns the new version. Raises CheckpointError for
        tensors that do not fit the model, and ConfigError for anything else than tensors."""
        return self.core.weights.update_from_tensors(tensors)

    @_alone
    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "weight_update_group",
        backend: str = "nccl",
    ) -> None:
        """Joins the process group that a trainer opens as its rank 0: rank r of this engine is rank_offset +
        r of `world_size`. Returns when all members have joined. Raises ConfigError for impossible values, and
        UnavailableError if the members do not join in time."""
        self.core.weights.init_group(
            master_address, master_port, rank_offset, world_size, group_name, backend
        )

    @_alone
    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Sequence[int]],
        group_name: str = "weight_update_group",
    ) -> int:
        """Receives whole tensors that rank 0 of the group broadcasts in this order, by their Hugging Face
        names, torch dtypes and shapes. Returns the new version. Raises CheckpointError for tensors that do
        not fit the model, and ConfigError for an unknown group."""
        return self.core.weights.update_from_distributed(names, dtypes, shapes, group_name)

    @_alone
    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> None:
        """Leaves the group. Raises ConfigError if the engine is in no group of this name."""
        self.core.weights.destroy_group(group_name)

    @property
    def weights_version(self) -> int:
        """The number of weight updates so far."""
        return self.core.weights.version

    @_alone
    def check_weights(self) -> dict[str, str]:
        """Returns a checksum of each tensor under "rank{i}.{name}"; equal in engines of equal weights, dtype
        and tensor_parallel_size."""
        return self.core.check_weights()

    def _finish_requests(self) -> None:
        """Finishes the running requests and refuses new ones meanwhile."""
        self.core.refuse("the engine goes to sleep when its running requests have ended")
        try:
            while self.core.has_work:
                with self._late_interrupts:
                    self._step()
        finally:
            self.core.refuse(None)

    @_alone
    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Runs one of the ranks' public commands on every rank; returns the results in rank order. Raises
        ConfigError for any other name; its message lists the public ones (engine/runner/commands.py)."""
        return self.core.collective_rpc(method, *args)

    @_alone
    def start_profile(self, folder: str = "shoal-traces") -> None:
        """Traces what follows, until stop_profile. Raises ConfigError for a folder that can't be written, and
        if a trace is being made already."""
        self.core.start_profile(folder)

    @_alone
    def stop_profile(self) -> list[str]:
        """Writes the traces, one file a rank, for ui.perfetto.dev, and returns their paths. Raises
        ConfigError if none is being made."""
        return self.core.stop_profile()

    @_alone
    def stats(self) -> Stats:
        """Returns counts, rates and usage of this moment (shoal/stats.py)."""
        return self.core.stats()

    @_alone
    def exit(self) -> None:
        """Frees the device and ends the other ranks. Another engine can be built in the same process."""
        self.core.exit()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.exit()

    # Inside

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            given.check()
            return [given] * count
        if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
            raise RequestError(
                f"sampling_params {given!r:.80} is neither SamplingParams nor a list of them; build "
                "SamplingParams(...)"
            )
        if len(given) != count:
            raise RequestError(
                f"{len(given)} sampling_params for {count} prompts; give one for all or one each"
            )
        for params in given:
            params.check()
        return list(given)

    def _group(self, prompt: Prompt, params: SamplingParams, priority: int) -> AnswerGroup:
        text, ids, salt = self._tokenize(prompt)
        self._builder.check_grammar(params)
        number = next(self._ids)
        requests = self._builder.build(
            [ids],
            params,
            (f"{number}-{i}" for i in range(params.n)),
            arrival=float(number),
            priority=priority,
            cache_salt=salt,
        )
        metrics = RequestMetrics(time.time(), time.monotonic()) if self._keeps_times else None
        budget = self._budget(text, ids, params)
        answers = [
            SequenceAnswer(i, request, self.tokenizer, metrics if i == 0 else None)
            if budget is None
            else LimitedAnswer(i, request, self.tokenizer, metrics if i == 0 else None, budget)
            for i, request in enumerate(requests)
        ]
        return AnswerGroup(str(number), text, ids, answers)

    def _budget(self, text: str | None, ids: list[int], params: SamplingParams) -> ThinkingBudget | None:
        """Returns the bound of reasoning in the answers to a prompt; None for no bound."""
        limit = params.thinking_token_budget
        if limit is None or limit < 0:
            return None
        tokenizer = self.get_tokenizer()
        name = choose_thoughts(tokenizer.chat_template or "")
        if name == "none":
            raise RequestError(
                "thinking_token_budget needs a chat template with marks of reasoning that Shoal knows; leave "
                "it out, or give a chat_template with them",
                field="thinking_token_budget",
            )
        thoughts = THOUGHTS_BY_NAME[name]
        if text is None:
            text = tokenizer.decode(ids, skip_special_tokens=False)
        return ThinkingBudget.of(limit, thoughts, thoughts.start_of(text), tokenizer)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int], str | None]:
        """(text, ids, cache salt) of one prompt."""
        salt = None
        if isinstance(prompt, dict):
            if unknown := set(prompt) - PROMPT_KEYS:
                raise RequestError(
                    f"the prompt has unknown keys {sorted(unknown)}; there are {sorted(PROMPT_KEYS)}"
                )
            salt = prompt.get("cache_salt")
            if salt is not None and not (isinstance(salt, str) and salt):
                raise RequestError(
                    f"cache_salt {salt!r} is not a text of at least one character; leave it out for none"
                )
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is None and ids is None:
                raise RequestError(
                    f"the prompt {prompt!r:.80} has neither 'prompt' nor 'prompt_token_ids'; give one of them"
                )
        else:
            text, ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if ids is None:
            if not isinstance(text, str):
                raise RequestError(f"the prompt must be a string, got {text!r:.80}; give text or token ids")
            ids = self.get_tokenizer().encode(text)
        if hasattr(ids, "tolist"):  # numpy, torch
            ids = ids.tolist()
        if (own := _own_ids(ids)) is None:
            raise RequestError(f"the prompt {ids!r:.80} is not a list of token ids; give text or integers")
        return text, own, salt

    def _add(self, groups: list[Groups]) -> list[Groups]:
        """Adds all or none."""
        try:
            with self._late_interrupts, self._lock:
                self._drop_abandoned()
                for group in groups:
                    for answer in group.answers:
                        if not answer.finished:
                            self._start(answer)
        except BaseException:
            self._drop(groups)
            raise
        return groups

    def _start(self, answer: SequenceAnswer | EmbeddingAnswer) -> None:
        self.core.add(answer.request)
        self._answers[answer.request.request_id] = answer

    def _drop(self, groups: Sequence[AnswerGroup | EmbeddingAnswer]) -> None:
        """Forgets finished answers and aborts the others. A stream without a reference is closed wherever
        garbage is collected. If that happens in the middle of this thread's own turn, its request is dropped
        in the next turn."""
        self._abandoned += groups
        if not self._lock.is_mine:
            with self._late_interrupts, self._lock:
                self._drop_abandoned()

    def _drop_abandoned(self) -> None:
        while self._abandoned:
            for answer in self._abandoned.popleft().answers:
                if self._answers.pop(answer.request.request_id, None) is not None and not answer.finished:
                    self.core.abort(answer.request.request_id)

    def _step(self) -> None:
        """Runs one engine step and adds its outputs to their answers, which any thread may wait for."""
        self._drop_abandoned()
        # kept asleep, or without weights: waiting here would never end
        if self.core.error is None and not self.core.has_work:
            raise UnavailableError(
                self.core.paused or "an answer is awaited whose request is not in the engine"
            )
        for output in self.core.step():
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue
            if (stop := answer.push(output)) is not None:
                self.core.finish(output.request_id, stop)
            if isinstance(answer, SequenceAnswer) and answer.moves_on():
                self.core.abort(output.request_id)
                del self._answers[output.request_id]
                if not answer.finished:
                    self._start(answer)
        if not self.core.has_work:
            self.core.tick()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(
            f"prompts {prompts!r:.80} is neither a prompt nor a list of them; give text, token ids or a dict"
        )
    return [prompts] if prompts and isinstance(prompts[0], int) else list(prompts)  # type: ignore[list-item,arg-type]


def _own_ids(ids: object) -> list[int] | None:
    """Returns a new list, or None if `ids` is not a sequence of integers; bools do not count."""
    if not isinstance(ids, Sequence):
        return None
    try:
        # checks and copies in C, since the GPU waits: one by one, half a million take 40 ms
        return convert(ids, list[int])
    except (ValidationError, UnicodeEncodeError):  # it takes no ranges and bytes
        return list(ids) if all(isinstance(i, int) and not isinstance(i, bool) for i in ids) else None
