"""`KvPeers`: KV transfer with other workers over one engine's life (vLLM's KV connector): opened, kept in
step with the weights, closed. lender.py gives blocks, reader.py gets them; engine/runner/rank_peers.py copies
them."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable
from dataclasses import replace

from shoal.api import KV_CACHE, Output
from shoal.config import ResolvedConfig
from shoal.engine.peers.lender import KvLender
from shoal.engine.peers.reader import POLL_S, KvReader
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import commands
from shoal.engine.runner.rank_peers import decode_address
from shoal.engine.runner.state_rows import plan_states_of_size
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.step_part import StepPart
from shoal.kv.transfer.transport import Reach
from shoal.stats import Stats
from shoal.weights.fingerprint import checkpoint_fingerprint, weights_fingerprint
from shoal.weights.source import CheckpointFiles


class KvPeers(StepPart):
    """Raises ConfigError where an option can't be met. `checkpoint()` is what the weights were read from;
    None if they are not a checkpoint's."""

    def __init__(
        self,
        config: ResolvedConfig,
        ranks: Ranks,
        scheduler: Scheduler,
        checkpoint: Callable[[], CheckpointFiles | None],
    ) -> None:
        options = config.kv_transfer_config
        assert options is not None
        self._config, self._ranks, self._scheduler = config, ranks, scheduler
        self._checkpoint = checkpoint
        self._is_stale = True  # the ranks do not know yet which weights the blocks are of
        ranks.call(commands.PEERS_OPEN)
        self.lender: KvLender | None = None
        self.reader: KvReader | None = None
        if options.lends:
            reach = Reach.HOST if options.is_local else Reach.NETWORK
            exports = ranks.call(commands.PEERS_EXPORT_CACHE, int(reach))
            self.lender = KvLender(
                scheduler.blocks,
                ranks.runner.layer_events,
                [[decode_address(address) for address in rank] for rank in exports],
                config.block_size,
                len(ranks.runner.model_config.cached_layers),
                options.kv_ip,
                options.kv_port,
                options.lease_s,
            )
        if options.reads:
            self.reader = KvReader(scheduler, ranks, options.lends)
            scheduler.blocks.fetches.sources.append(self.reader)

    # Requests and steps

    def added(self, seq: Sequence) -> None:
        """A ticket that this engine does not read is left alone."""
        if self.reader is not None:
            self.reader.ask(seq)

    def may_start(self, seq: Sequence) -> bool:
        return self.reader is None or not self.reader.is_opening(seq)

    def before_schedule(self) -> None:
        if self._is_stale:
            self.name_model()
        if self.lender is not None:
            self.lender.release_ended()
        if self.reader is not None:
            self.reader.before_schedule()

    def after_schedule(self, plan: StepPlan | None) -> list[Output]:
        """Begins the fetches of this step, after the tiers have ordered their copies. Returns the tickets of
        the requests whose prompts begin and which offer theirs."""
        if self.reader is not None:
            self.reader.begin_fetches(plan is not None)
        if self.lender is None or plan is None:
            return []
        return [Output(name, [], kv_ticket=ticket) for name, ticket in self.lender.begin(plan).items()]

    def after_step(self, waits: bool) -> None:
        if waits and self._scheduler.has_work:
            time.sleep(POLL_S)

    def tick(self) -> bool:
        """Returns True if a read of an aborted request has not ended, or a lease is to be renewed or
        released."""
        if self.lender is not None:
            self.lender.release_ended()
        if self.reader is not None:
            self.reader.before_schedule()
        return self.reader is not None and self.reader.is_busy

    def completed(self, plan: StepPlan, seconds: float) -> None:
        if self.lender is not None:
            self.lender.completed(plan)

    def lend(self, token_ids: list[int], root: bytes) -> bytes | None:
        """A ticket for the blocks that the cache has of the beginning of these tokens, if there are any.
        `root`: what the first key is derived from. No step may be in flight."""
        if self.lender is None:
            return None
        # Rank 0 waits for no other where a step samples no token; a block is whole when all have written it.
        self._ranks.call(commands.PEERS_FINISH)
        return self.lender.lend(token_ids, root)

    def take_back(self, ticket: bytes, why: str) -> None:
        """Withdraws a ticket that will not be used. Raises TransferError for a malformed ticket."""
        if self.lender is not None:
            self.lender.withdraw(ticket, why)

    def withdraw_all(self, why: str) -> None:
        """Takes back all blocks that others may read."""
        if self.lender is not None:
            self.lender.withdraw_all(why)

    def before_reset(self) -> None:
        self.withdraw_all("the prefix cache was reset")

    # Sleep and weights

    def before_sleep(self, tags: abc.Sequence[str]) -> None:
        if KV_CACHE in tags:
            self._cache_changes("the engine went to sleep")

    def weights_change(self) -> None:
        self._cache_changes("the weights changed")
        self._is_stale = True

    def _cache_changes(self, why: str) -> None:
        """The cache will be lost, or get another meaning. Afterwards nothing is read into it, and other
        workers find that their reads from it are stale."""
        if self.reader is not None:
            self.reader.quiesce()
        self.withdraw_all(why)

    def name_model(self) -> None:
        """Sends readers and ranks the name of the model and weights of the blocks. Engines of other
        tensor-parallel sizes have the same name for a checkpoint."""
        self._is_stale = False
        runner, files, length = self._ranks.runner, self._checkpoint(), self._config.max_model_len
        if files is not None:
            name = checkpoint_fingerprint(files, self._config.keep_quantized, length)
        else:
            checksums = self._ranks.call(commands.CHECKSUMS)
            name = weights_fingerprint(checksums, runner.model_config, length)
        name = plan_states_of_size(self._config, runner.model_config, 1).add_to(name)
        self._ranks.call(commands.PEERS_NAME_MODEL, name)
        if self.lender is not None:
            self.lender.offers.model = name

    # The rest of an engine's life

    def fill_in(self, stats: Stats) -> None:
        if self.lender is not None:
            stats.kv_loans = self.lender.loans()
        if self.reader is not None:
            stats.kv_transfers = {name: replace(one) for name, one in self.reader.transfers.items()}
            stats.kv_transfer_failures = dict(self.reader.failures)

    def start_anew(self) -> None:
        if self.reader is not None:
            self.reader.abandon()

    def held_blocks(self) -> abc.Sequence[int]:
        return () if self.lender is None else self.lender.held_blocks()

    def check(self) -> None:
        if self.lender is not None:
            self.lender.release_ended()
        if self.reader is not None:
            self.reader.check()

    def close(self) -> None:
        """Ends all offers and leases."""
        if self.reader is not None:
            self._scheduler.blocks.fetches.sources.remove(self.reader)
            self.reader.close()
        if self.lender is not None:
            self.lender.close()
