"""The engine core: requests in, outputs out, one `step` at a time. Tokenizer and text are above
(engine/llm.py).

It builds the parts of an engine, gives each what it needs, and is their one front. Nothing below holds the
core. All its life a core has one model: when an engine takes another model, a new core takes the place of the
old one.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from shoal.api import KV_CACHE, FinishReason, Output, Request
from shoal.config import EngineConfig, ResolvedConfig
from shoal.engine.allocate_cache import allocate_cache
from shoal.engine.build_parts import build_parts
from shoal.engine.compile_cache import shared_kernels
from shoal.engine.grammar_admission import GrammarAdmission
from shoal.engine.lifecycle import another_model
from shoal.engine.lifecycle.sleep import Sleeper
from shoal.engine.lifecycle.weight_exports import WeightExports, accepted
from shoal.engine.lifecycle.weight_updates import Weights
from shoal.engine.offload.tiers import KvTiers
from shoal.engine.pause_state import PauseState
from shoal.engine.peers.peers import KvPeers
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.request_checks import check_possible
from shoal.engine.resolve import resolve_config
from shoal.engine.runner import commands
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.step_loop import StepLoop
from shoal.engine.step_part import PartBuilder, Parts
from shoal.errors import ConfigError, EngineDeadError, ShoalError, UnavailableError
from shoal.hashing import root_key
from shoal.kv.events.publisher import KvEvents
from shoal.models.parallel import check_parallel
from shoal.stats import MemoryReport, SleepState, Stats
from shoal.weights.check import verify_weights
from shoal.weights.loader import check_shapes
from shoal.weights.source import CheckpointFiles

logger = logging.getLogger(__name__)

# Engines of a process start one after the other. Each sets torch's default type, measures what memory is
# left, and captures its graphs on one stream. A builder of parts may start one more engine.
_starting = threading.RLock()


class EngineCore:
    """One engine. Raises UserError for impossible options or checkpoints, before any device work where
    possible."""

    def __init__(
        self,
        config: EngineConfig,
        files: CheckpointFiles,
        predecessor: EngineCore | None = None,
        peer_weights: bytes | None = None,
        more_parts: Sequence[PartBuilder] = (),
    ) -> None:
        """`predecessor`: the core that this one replaces. It sleeps, and so does the KV cache of this one at
        first. Its event listeners become this one's. `peer_weights`: another worker's export
        (WeightExports.export), from which the weights are read if possible. `more_parts` build parts in
        addition to Shoal's own."""
        if files.revision is not None:
            config = dataclasses.replace(config, revision=files.revision)  # other ranks take the same one
        files = files.with_head(config.speculative_config, config.download_dir)
        self.files, self._given, self._more_parts = files, config, more_parts
        self.model_config = files.config
        check_parallel(self.model_config, config.tensor_parallel_size)
        self.config: ResolvedConfig = resolve_config(config, self.model_config, files.quantized_bytes)
        if self.config.load_format != "dummy":
            check_shapes(files)
            if config.check_weights:
                verify_weights(files)
        with _starting, shared_kernels(self.config.compile_cache), ExitStack() as undo:
            if predecessor is None:
                self.events = self._open_events()
                if self.events is not None:
                    undo.callback(self.events.close)
            else:
                self.events = predecessor.events
            others = predecessor.ranks if predecessor is not None else None
            exports = [] if peer_weights is None else accepted(peer_weights, self.config, files)
            self.ranks: Ranks = Ranks(self.config, files, others, exports)
            undo.callback(self.ranks.close)
            self._start(files, undo)
            if predecessor is not None:
                self.sleep(2, [KV_CACHE])  # listeners get AllBlocksCleared by it
            undo.pop_all()

    def _open_events(self) -> KvEvents | None:
        options = self.config.kv_events_config
        return KvEvents(options) if options.enable_kv_cache_events else None

    def _start(self, files: CheckpointFiles, undo: ExitStack) -> None:
        config = self.config
        self.num_blocks, snapshots = allocate_cache(config, self.ranks)
        self.scheduler = Scheduler(
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            enable_prefix_caching=config.enable_prefix_caching,
            scheduling_policy=config.scheduling_policy,
            long_prefill_token_threshold=config.long_prefill_token_threshold,
            target_itl_s=config.target_itl_ms / 1e3 if config.target_itl_ms else None,
            step_sizes=sorted({shape.tokens for shape in self.ranks.runner.mixed_shapes}),
            groups=self.ranks.runner.cache.plan.groups,
            snapshots=snapshots,
        )
        self.refused: str | None = None  # why no request is taken
        self._paused = PauseState()
        self.parts = Parts(self.scheduler)
        undo.callback(self.parts.close)
        self.loop = StepLoop(config, self.ranks, self.scheduler, self.parts, self._paused)
        self.weights = Weights(config, files, self.ranks, self.loop, self.scheduler, self.parts, self._paused)
        self.sleeper = Sleeper(
            config, self.ranks, self.loop, self.scheduler, self.weights, self.parts, self._paused
        )
        for part in build_parts(
            config,
            files,
            self.ranks,
            self.scheduler,
            self.events,
            self._paused,
            lambda: self.weights.checkpoint,
            self._more_parts,
        ):
            self.parts.add(part)
        plan = self.ranks.runner.cache.plan.with_specs(num_blocks=self.num_blocks)
        sizes = (config.max_model_len, self.scheduler.blocks.chunk)
        # A cache that cannot hold max_model_len tokens holds one sequence, and windows need all their blocks
        # at any length.
        self.kv_cache_tokens = self.scheduler.blocks.room
        if self.kv_cache_tokens >= config.max_model_len:
            self.kv_cache_tokens = max(plan.num_tokens(*sizes), self.kv_cache_tokens)
        most, dtype, device = config.max_num_seqs, config.dtype, config.device
        logger.info("%s, %d sequences at once, %s on %s", plan.capacity(*sizes), most, dtype, device)
        if self.kv_cache_tokens < config.max_model_len:
            logger.warning(
                "conversations end at %d tokens, which fill the KV cache, before max_model_len %d; raise %s",
                *(self.kv_cache_tokens, config.max_model_len, config.cache_option),
            )

    # Requests

    def add(self, request: Request) -> None:
        """Takes a request. Raises RequestError if it is impossible for this model or cache, UnavailableError
        if no request is taken now: the engine sleeps, its weights are not whole, or it refuses them
        (`refuse`). A request that is not taken leaves no trace."""
        check_possible(request, self.config, self.model_config)
        if (why := self.paused or self.refused) is not None:
            raise UnavailableError(why)
        seq = self.scheduler.add(request)
        seq.added_at = time.monotonic()
        try:
            for part in self.parts:
                part.added(seq)
        except BaseException:
            self.scheduler.take_out(seq)
            raise

    def abort(self, request_id: str) -> None:
        if self.scheduler.abort(request_id) is None:
            for part in self.parts:
                part.aborted(request_id)

    def finish(self, request_id: str, stop_reason: str) -> None:
        """Ends a request whose stop string was found in its text."""
        self.scheduler.finish(request_id, FinishReason.STOP, stop_reason)

    @property
    def has_work(self) -> bool:
        """True if a step would do anything. Requests that are kept while the engine sleeps do not count."""
        return self.loop.has_work

    @property
    def paused(self) -> str | None:
        """The reason why nothing is scheduled now: the engine sleeps, or its weights are not whole."""
        return self._paused.reason

    def refuse(self, reason: str | None) -> None:
        """From now on `add` raises UnavailableError(reason); None: no longer. Requests that are there
        already continue."""
        self.refused = reason

    # Steps

    def step(self) -> list[Output]:
        """Schedules and launches one step, then returns the outputs of the oldest that is due. Raises
        EngineDeadError if the device or a rank fails."""
        return self.loop.step()

    def tick(self) -> bool:
        """To be called while there is no work: KV blocks go to lower tiers. Returns whether it should be
        called again soon."""
        return self.loop.tick()

    # Commands that belong to a part

    def prepare_grammars(self) -> None:
        """Loads what the first request with a grammar would have to wait for."""
        grammars = self.parts.find(GrammarAdmission)
        assert grammars is not None
        grammars.prepare()

    @property
    def peers(self) -> KvPeers | None:
        return self.parts.find(KvPeers)

    def lend_kv(
        self, token_ids: list[int], cache_salt: str | None = None, adapter: str | None = None
    ) -> bytes | None:
        """Offers other engines the blocks that the cache has of the beginning of these tokens. Returns a
        ticket for them, None where there is nothing to be had."""
        peers = self.peers
        if peers is None or self.paused is not None:
            return None
        self.loop.drain()  # blocks of a step in flight are findable already, and not computed yet
        return peers.lend(token_ids, root_key(adapter, cache_salt))

    def take_back_kv(self, ticket: bytes) -> None:
        """Ends a ticket that nobody will use; an ended one changes nothing. Raises TransferError for anything
        else than a ticket."""
        peers = self.peers
        if peers is not None:
            peers.take_back(ticket, "it is no longer needed")

    @property
    def exports(self) -> WeightExports:
        exports = self.parts.find(WeightExports)
        assert exports is not None
        return exports

    def flush_kv(self) -> None:
        """Writes KV blocks to disk or store, as far as kv_flush_timeout allows."""
        tiers = self.parts.find(KvTiers)
        if tiers is not None:
            tiers.flush()

    # Other commands

    @property
    def error(self) -> EngineDeadError | None:
        """The reason why the engine can do nothing any more. None: it works."""
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
        return self._paused.sleep

    def check_weights(self) -> dict[str, str]:
        return self.weights.check()

    def memory_usage(self) -> dict[str, dict[str, int]]:
        """Returns bytes by tag and kind, summed over ranks. control.py says what each figure counts."""
        ranks = self.ranks.call(commands.MEMORY_USAGE)
        return {
            tag: {name: sum(rank[tag][name] for rank in ranks) for name in ranks[0][tag]} for tag in ranks[0]
        }

    # Another model

    def update_weights(self, source: str) -> EngineCore:
        """Loads the weights of a checkpoint. Returns the core that continues with them.

        That is this one, where the weights fit into the memory of the old ones. Another model needs an engine
        that sleeps at level 2: a new core is built for it, takes this one's place, and this one is ended. The
        new one has its weights on the device; its KV cache sleeps until `wake_up`.

        Raises CheckpointError, ConfigError or UnavailableError. Then this core is as it was, and if it sleeps
        it may be woken, or updated with something else.
        """
        files = self.weights.find(source)
        why = self.weights.difference(files)
        if why is None:
            self.weights.update(files)
            return self
        another_model.check_possible(files, why, self.config, self.sleeper, self.weights)
        model = self._given.for_model(source), dataclasses.replace(files, overrides={})
        build = partial(EngineCore, *model, self, more_parts=self._more_parts)
        successor = another_model.built(build, model, self.config, self.ranks, self.sleeper, self.parts)
        self._hand_over(successor)
        return successor

    def _hand_over(self, successor: EngineCore) -> None:
        """Ends this core, whose requests are aborted: their tokens mean nothing to another model."""
        try:
            self.parts.close()
            successor.weights.version = self.weights.version + 1
            successor.refused = self.refused
            self.scheduler.abort_all()
            successor.loop.report(self.loop.step())
            self.events = None  # They are the successor's from now on.
            try:
                self.ranks.close()
            except (RuntimeError, OSError, ShoalError) as error:
                logger.warning("%s did not end in order: %s", self.config.model, error)
            successor.ranks.use_threads()
        except BaseException:  # An interrupt: neither of the two is whole.
            successor.exit()
            self.exit()
            raise
        logger.info("weights version %d: another model, %s", successor.weights.version, successor.files.path)

    # The cache

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; a shared store keeps its own. Returns False if running requests still
        hold some."""
        for part in self.parts:
            part.before_reset()
        idle = self.scheduler.reset_prefix_cache()
        for part in self.parts:
            part.after_reset()
        return idle

    @property
    def kv_events(self) -> KvEvents:
        """The events of cached blocks. Raises ConfigError if the engine was built without
        kv_events_config."""
        if self.events is None:
            raise ConfigError(
                "this engine keeps no KV events; build it with kv_events_config="
                "{'enable_kv_cache_events': True, 'publisher': 'null'} (or 'zmq', which publishes them too)"
            )
        return self.events

    def stats(self) -> Stats:
        stats = self.scheduler.stats()
        for part in self.parts:
            part.fill_in(stats)
        return stats

    def check(self) -> None:
        """Checks scheduler and parts by assertions. For tests and idle moments."""
        self.scheduler.check()
        for part in self.parts:
            part.check()
        self.scheduler.blocks.check_held([block for part in self.parts for block in part.held_blocks()])

    def exit(self) -> None:
        """Ends the other ranks and frees the device. KV blocks are written to disk or store first, as far as
        kv_flush_timeout allows. Safe to call twice."""
        try:
            if self.error is None:
                self.flush_kv()
        except (RuntimeError, ShoalError) as error:
            logger.warning("KV blocks were not written: %s", error)
        finally:  # also of an interrupt
            with ExitStack() as ends:  # It runs the last entry first, and all of them whatever one raises.
                ends.callback(self.ranks.close)
                if self.events is not None:
                    ends.callback(self.events.close)
                ends.callback(self.parts.close)
