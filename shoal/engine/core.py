"""The engine core: requests in, outputs out, one `step` at a time. Owns scheduler, runner and the other
ranks.

With asynchronous scheduling step n+1 is scheduled and launched before the tokens of step n are looked at
(`depth` steps in flight). Tokenizer and text are above (engine/llm.py).
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.api import FinishReason, Logprob, MemoryReport, Output, Request, SleepState, Stats, TokenLogprobs
from shoal.config import EngineConfig, ResolvedConfig
from shoal.engine.lifecycle.sleep import Sleeper
from shoal.engine.lifecycle.weight_updates import Weights
from shoal.engine.offload.tiers import KvTiers
from shoal.engine.profile import span
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.resolve import resolve_config
from shoal.engine.runner import commands
from shoal.engine.runner.batch import BatchBuilder, num_prompt_targets
from shoal.engine.runner.runner import StepResult
from shoal.engine.runner.sampling import LogprobLists
from shoal.engine.scheduling.grammar import Grammar, Grammars
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.sequence import Sequence as QueuedSequence
from shoal.engine.scheduling.sequence import SequenceStatus
from shoal.errors import ConfigError, EngineDeadError, RequestError, ShoalError, UnavailableError
from shoal.kv.event_publisher import KvEvents
from shoal.models.decoder import check_parallel
from shoal.tokenizer import load_tokenizer
from shoal.weights.check import verify_weights
from shoal.weights.loader import check_shapes
from shoal.weights.source import CheckpointFiles

logger = logging.getLogger(__name__)

COMPILE_WAIT_S = 0.001  # of an idle step, for a grammar: other requests may come meanwhile


@dataclass(slots=True)
class InFlight:
    plan: StepPlan
    result: StepResult
    embeds: list[int]  # samples, in the order of result.embeddings
    launched_at: float


class EngineCore:
    """Raises UserError for impossible options or checkpoints, before any device work where possible."""

    def __init__(self, config: EngineConfig, files: CheckpointFiles) -> None:
        self.model_config = files.config
        check_parallel(self.model_config, config.tensor_parallel_size)
        quantized_bytes = files.tensor_bytes if files.kind == "gguf" else None
        self.config: ResolvedConfig = resolve_config(config, self.model_config, quantized_bytes)
        if self.config.load_format != "dummy":
            check_shapes(files)
            if config.check_weights:
                verify_weights(files)
        with ExitStack() as undo:
            self.events = self._open_events()
            if self.events is not None:
                undo.callback(self.events.close)
            self.ranks = Ranks(self.config, files)
            undo.callback(self.ranks.close)
            self._start(files)
            undo.pop_all()

    def _open_events(self) -> KvEvents | None:
        options = self.config.kv_events_config
        return KvEvents(options, self.config.block_size) if options.enable_kv_cache_events else None

    def _start(self, files: CheckpointFiles) -> None:
        config = self.config
        self.num_blocks = num_blocks = self._allocate()
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.scheduling_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            events=self.events,
        )
        self.builder = self._new_builder()
        self.grammars = Grammars(
            lambda: load_tokenizer(files, config.tokenizer),
            self.model_config.vocab_size,
            files.eos_token_ids,
            config.closes_objects,
        )
        self.compiling: list[tuple[QueuedSequence, Future[Grammar]]] = []  # held until their grammar is there
        self.sleeper = Sleeper(self)
        self.weights = Weights(self, files)
        self.refused: str | None = None  # why no request is taken
        self.late: list[Output] = []  # of steps completed outside of step()
        self.in_flight: deque[InFlight] = deque()
        self.depth = 1 if config.async_scheduling else 0
        self.tiers: KvTiers | None = None
        if config.has_kv_tiers:
            self.tiers = KvTiers(config, self.ranks, self.scheduler, self.events)
        logger.info(
            "%d KV blocks of %d tokens, %d sequences at once, %s on %s",
            num_blocks,
            config.block_size,
            config.max_num_seqs,
            config.dtype,
            config.device,
        )

    def _allocate(self) -> int:
        """Has every rank make its KV cache, as large as the smallest room allows. Returns the number of
        blocks."""
        config, ranks = self.config, self.ranks
        block_bytes = ranks.runner.block_bytes
        if config.device == "cuda":
            ranks.call(commands.COMPILE_AHEAD)
        num_blocks = config.num_gpu_blocks_override or min(ranks.call(commands.MEASURE))
        if num_blocks < 1:
            raise ConfigError(
                f"gpu_memory_utilization {config.gpu_memory_utilization} (or kv_cache_memory_bytes) leaves "
                f"no room for a single KV block of {block_bytes} bytes; raise it or lower "
                "max_num_batched_tokens"
            )
        try:
            ranks.call(commands.ALLOCATE, num_blocks)
        except (MemoryError, torch.OutOfMemoryError):
            raise ConfigError(
                f"{num_blocks} KV blocks of {block_bytes} bytes don't fit in memory; lower "
                "num_gpu_blocks_override, kv_cache_memory_bytes or gpu_memory_utilization"
            ) from None
        return num_blocks

    # Requests

    def add(self, request: Request) -> None:
        """Raises RequestError if the request is impossible for this model or cache, UnavailableError if
        nothing is taken now: asleep, without weights, refused. Nothing else notices."""
        if (why := self.standstill or self.refused) is not None:
            raise UnavailableError(why)
        self.scheduler.check_request(request)
        self._check_ids(request)
        structured = request.params.structured_outputs
        if structured is not None and (request.embed or self.config.skip_tokenizer_init):
            without = "this engine runs without a tokenizer (skip_tokenizer_init)"
            why = "an embedding has no text" if request.embed else without
            raise RequestError(f"structured_outputs needs tokens of text, and {why}; leave it out")
        seq = self.scheduler.add(request)
        seq.added_at = time.monotonic()
        if self.tiers is not None:
            self.tiers.ask(seq)
        if structured is not None:
            seq.held = True
            self.compiling.append((seq, self.grammars.start(structured)))

    def _check_ids(self, request: Request) -> None:
        params, vocab_size = request.params, self.model_config.vocab_size
        ids = request.prompt_token_ids
        try:
            # min and max of a list take six times as long
            valid = np.frombuffer(array("I", ids), np.uint32).max() < vocab_size
        except OverflowError:  # negative, or beyond 32 bits
            valid = False
        if not valid:
            bad = next(i for i in ids if not 0 <= i < vocab_size)
            raise RequestError(
                f"token id {bad} in the prompt is outside the vocabulary [0, {vocab_size}); check the "
                "tokenizer"
            )
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            for token_id in getattr(params, name) or ():
                if not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name} names token id {token_id}, outside the vocabulary [0, {vocab_size}); drop it"
                    )
        for name, asked in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            most = self.config.max_logprobs
            if asked is not None and most >= 0 and not 0 <= asked <= most:
                raise RequestError(
                    f"{name} {asked} is more than max_logprobs {most}; ask for fewer or raise max_logprobs "
                    "of the engine"
                )

    def abort(self, request_id: str) -> None:
        self.scheduler.abort(request_id)

    def finish(self, request_id: str, stop_reason: str) -> None:
        """Ends a request whose stop string was found in its text."""
        self.scheduler.finish(request_id, FinishReason.STOP, stop_reason)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything. Requests that are kept while the engine sleeps are no work."""
        told = self.in_flight or self.scheduler.ended or self.late
        return bool(told) or (self.standstill is None and self.scheduler.has_work)

    @property
    def standstill(self) -> str | None:
        """Why nothing is scheduled."""
        return self.sleeper.why() if self.sleeper.state.is_sleeping else self.weights.lost

    def refuse(self, reason: str | None) -> None:
        """From now on `add` raises UnavailableError(reason); None: no longer. What is there already goes
        on."""
        self.refused = reason

    # Steps

    def step(self) -> list[Output]:
        """Schedules and launches one step, then returns the outputs of the oldest that is due.
        EngineDeadError if the device fails."""
        self.ranks.check_usable()
        self._take_grammars()
        outputs = [
            Output(
                seq.request.request_id,
                [],
                finish_reason=seq.finish_reason,
                stop_reason=seq.stop_reason,
                error=seq.error,
            )
            for seq in self.scheduler.take_ended()
        ]
        outputs, self.late = self.late + outputs, []
        with self._guarded():
            tiers = self.tiers if self.standstill is None else None
            if tiers is not None:
                tiers.before_schedule()
            with span("schedule"):
                plan = self.scheduler.schedule() if self.standstill is None else None
            if tiers is not None:
                tiers.before_step(launches=plan is not None)
            if plan is not None:
                with span("launch"):
                    self.in_flight.append(self._launch(plan))
            if self.in_flight and (plan is None or len(self.in_flight) > self.depth):
                with span("complete"):
                    outputs += self._complete(self.in_flight.popleft())
            elif (self.compiling or self.grammars.under_way) and not outputs:
                futures: list[Future[Any]] = [future for _, future in self.compiling]
                wait(futures + list(self.grammars.under_way), COMPILE_WAIT_S, FIRST_COMPLETED)
            if tiers is not None:
                tiers.after_step(waits=plan is None and not (self.in_flight or outputs))
        self.flush_events()
        return outputs

    def tick(self) -> bool:
        """To be called while there is no work: KV blocks go to lower tiers. Whether it should be called again
        soon."""
        if self.tiers is None or self.error is not None:
            return False
        with self._guarded():
            return self.tiers.tick()

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """What fails in here ends the engine; what merely interrupts it loses the steps in flight."""
        try:
            yield
        except (RuntimeError, ShoalError) as error:
            raise self.ranks.failed(error) from error
        except BaseException:
            self._forget_everything()
            raise

    def _take_grammars(self) -> None:
        """Lets sequences go whose grammar is ready, and ends those whose grammar failed."""
        for item in [
            item for item in self.compiling if item[1].done() or item[0].status is SequenceStatus.FINISHED
        ]:
            self.compiling.remove(item)
            seq, future = item
            if seq.status is SequenceStatus.FINISHED:
                future.cancel()
            elif (error := future.exception()) is not None:
                self.scheduler.finish(
                    seq.request.request_id, FinishReason.ERROR, "grammar", str(error) or repr(error)
                )
            else:
                seq.grammar, seq.held = future.result(), False

    def _forget_everything(self) -> None:
        """After an interrupt, or no memory, in the middle of a step nobody knows what of it reached the
        device: every request is aborted, and no block that the step should have filled may be found later.
        Other ranks cannot be brought back in line: the engine ends."""
        if self.ranks.size > 1:
            self.ranks.error = EngineDeadError(
                "interrupted in the middle of a tensor-parallel step; build a new engine"
            )
            return
        self.ranks.error = EngineDeadError(
            "interrupted in the middle of a step, and what was under way did not end; build a new engine"
        )
        self.scheduler.abort_all()
        self.scheduler.reset_prefix_cache()
        if self.tiers is not None:
            try:
                self.tiers.start_anew()
            except TimeoutError:  # a disk that hangs
                return
        self.flush_events()
        self.in_flight.clear()
        self.late.clear()
        self.builder = self._new_builder()
        self.ranks.runner.reset_state()
        self.ranks.error = None

    def _new_builder(self) -> BatchBuilder:
        runner = self.ranks.runner
        return BatchBuilder(runner.layout, self.config.block_size, runner.share_from, runner.mixed_shapes)

    def _launch(self, plan: StepPlan) -> InFlight:
        decode_only = plan.num_decodes == len(plan.scheduled)
        graphs = self.ranks.runner.graphs
        packed, extras = self.builder.build(
            plan, graphs.padded(plan.num_decodes) if graphs is not None and decode_only else None
        )
        for entry in plan.scheduled[plan.num_decodes :]:
            if entry.seq.started_at is None:
                entry.seq.started_at = time.monotonic()
        if extras.grammars:
            extras.masks = self.grammars.masks(extras.grammars)
        launched_at = time.monotonic()
        return InFlight(plan, self.ranks.step(packed, extras or None), extras.embeds, launched_at)

    def _complete(self, step: InFlight) -> list[Output]:
        tokens = self.ranks.wait(step.result)
        if self.tiers is not None:
            self.tiers.completed(step.plan, step.launched_at)
        logprobs = step.result.logprobs.to_lists() if step.result.logprobs is not None else None
        if step.result.prompt_logprobs is not None:
            self._keep_prompt_logprobs(step.plan, step.result.prompt_logprobs.to_lists())
        embeddings = (
            dict(zip(step.embeds, step.result.embeddings.tolist()))
            if step.result.embeddings is not None
            else {}
        )
        outputs = []
        for result in self.scheduler.update(step.plan, tokens):
            seq = result.seq
            is_first = len(seq.token_ids) == seq.num_prompt_tokens + 1
            queued = seq.started_at - seq.added_at if is_first and seq.started_at is not None else 0.0
            if seq.request.embed:
                outputs.append(
                    Output(
                        seq.request.request_id,
                        [],
                        finish_reason=result.finish_reason,
                        embedding=embeddings[result.sample],
                        num_cached_tokens=seq.num_cached_tokens,
                        queued_seconds=queued,
                    )
                )
                continue
            params = seq.request.params
            figures = None
            if logprobs is not None and params.logprobs is not None:
                figures = [token_logprobs(logprobs, result.sample, result.token_id, params.logprobs)]
            prompt_logprobs = None
            if params.prompt_logprobs is not None and is_first:
                prompt_logprobs = seq.prompt_logprobs or [None]
            outputs.append(
                Output(
                    seq.request.request_id,
                    [result.token_id],
                    finish_reason=result.finish_reason,
                    stop_reason=seq.stop_reason,
                    logprobs=figures,
                    prompt_logprobs=prompt_logprobs,
                    num_cached_tokens=seq.num_cached_tokens,
                    queued_seconds=queued,
                )
            )
        return outputs

    @staticmethod
    def _keep_prompt_logprobs(plan: StepPlan, found: LogprobLists) -> None:
        at = 0
        for entry in plan.scheduled:
            seq, k = entry.seq, entry.seq.request.params.prompt_logprobs
            if k is None:
                continue
            if entry.start == 0 or seq.prompt_logprobs is None:
                seq.prompt_logprobs = [None]
            for i in range(at, at + num_prompt_targets(entry)):
                target = seq.token_ids[entry.start + 1 + i - at]
                seq.prompt_logprobs.append(token_logprobs(found, i, target, k))
            at += num_prompt_targets(entry)

    def drain(self) -> None:
        """Completes the steps in flight; the next step() returns their outputs."""
        self.ranks.check_usable()
        with self._guarded():
            while self.in_flight:
                self.late += self._complete(self.in_flight.popleft())

    # Commands

    @property
    def error(self) -> EngineDeadError | None:
        """Why the engine can do nothing any more, once that is so."""
        return self.ranks.error

    def collective_rpc(self, name: str, *args: Any) -> list[Any]:
        """Runs a public command (engine/runner/commands.py) on every rank; returns the results in rank order.
        Raises ConfigError for any other name."""
        return self.ranks.call(commands.find_public(name), *args)

    def start_profile(self, folder: str) -> None:
        """Traces every rank until stop_profile. Raises ConfigError for a folder that can't be written."""
        self.ranks.call(commands.START_PROFILE, folder)

    def stop_profile(self) -> list[str]:
        """Returns the traces' files, in rank order. Raises ConfigError if none is being made."""
        return self.ranks.call(commands.STOP_PROFILE)

    # Sleep and weights. What each does and raises: engine/lifecycle/sleep.py,
    # engine/lifecycle/weight_updates.py

    def sleep(self, level: int = 1, tags: Sequence[str] | None = None, mode: str = "abort") -> MemoryReport:
        return self.sleeper.sleep(level, tags, mode)

    def wake_up(self, tags: Sequence[str] | None = None) -> MemoryReport:
        return self.sleeper.wake_up(tags)

    def sleep_state(self) -> SleepState:
        return self.sleeper.state

    def update_weights(self, source: str) -> int:
        return self.weights.update(source)

    def check_weights(self) -> dict[str, str]:
        return self.weights.check()

    def memory_usage(self) -> dict[str, dict[str, int]]:
        """As Control says (api.py)."""
        ranks = self.ranks.call(commands.MEMORY_USAGE)
        return {
            tag: {name: sum(rank[tag][name] for rank in ranks) for name in ranks[0][tag]} for tag in ranks[0]
        }

    def reset_prefix_cache(self) -> bool:
        idle = self.scheduler.reset_prefix_cache()
        if self.tiers is not None:
            self.tiers.reset()
        self.flush_events()
        return idle

    def flush_events(self) -> None:
        """Publishes what KV events there are; every step does."""
        if self.events is not None:
            self.events.flush()

    @property
    def kv_events(self) -> KvEvents:
        """Raises ConfigError if the engine was built without."""
        if self.events is None:
            raise ConfigError(
                "this engine keeps no KV events; build it with kv_events_config={'enable_kv_cache_events': "
                "True, "
                "'publisher': 'null'} (or 'zmq', which publishes them too)"
            )
        return self.events

    def stats(self) -> Stats:
        stats = self.scheduler.stats()
        return stats if self.tiers is None else self.tiers.fill_in(stats)

    def exit(self) -> None:
        """Ends the other ranks and frees the device. KV blocks are written to disk or store first, as far as
        kv_flush_timeout allows. Safe to call twice."""
        try:
            if self.tiers is not None and self.error is None:
                self.tiers.flush()
        except (RuntimeError, ShoalError) as error:
            logger.warning("KV blocks were not written: %s", error)
        finally:  # also of an interrupt
            self.tiers = None
            if self.events is not None:
                self.events.close()
            self.ranks.close()


def token_logprobs(found: LogprobLists, i: int, token_id: int, k: int) -> TokenLogprobs:
    """vLLM's map for one token: itself with its rank, and the k best (all of them for k = -1)."""
    best_ids, best = (found.top_ids[i], found.top[i]) if k < 0 else (found.top_ids[i][:k], found.top[i][:k])
    ranked = {
        token: Logprob(logprob, rank) for rank, (token, logprob) in enumerate(zip(best_ids, best), start=1)
    }
    return {token_id: Logprob(found.chosen[i], found.ranks[i])} | ranked
