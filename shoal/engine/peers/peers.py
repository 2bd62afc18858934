"""`KvPeers`: KV transfer with other workers over one engine's life (vLLM's KV connector): opened, kept in
step with the weights, closed. lender.py gives blocks, reader.py gets them; engine/runner/rank_peers.py copies
them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from shoal.api import Output
from shoal.config import ResolvedConfig
from shoal.engine.peers.lender import KvLender
from shoal.engine.peers.reader import POLL_S, KvReader
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import commands
from shoal.engine.runner.rank_peers import decode_address
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.sequence import Sequence
from shoal.kv.transfer.transport import Reach
from shoal.stats import Stats
from shoal.weights.fingerprint import checkpoint_fingerprint, weights_fingerprint
from shoal.weights.source import CheckpointFiles


class KvPeers:
    """Raises ConfigError where an option can't be met. `checkpoint()` is what the weights were read from;
    None if they are not a checkpoint's.

    Around a step: `before_schedule`, Scheduler.schedule, `before_step`, `begin` if there is a plan, the step,
    `after_step`. When a step has run: Scheduler.update, `completed`.
    """

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
                options.kv_ip,
                options.kv_port,
                options.lease_s,
            )
        if options.reads:
            self.reader = scheduler.blocks.peers = KvReader(scheduler, ranks)

    # Requests and steps

    def ask(self, seq: Sequence) -> None:
        """For a new sequence. A ticket that this engine does not read is left alone."""
        if self.reader is not None:
            self.reader.ask(seq)

    def before_schedule(self) -> None:
        if self._is_stale:
            self.name_model()
        if self.lender is not None:
            self.lender.settle()
        if self.reader is not None:
            self.reader.before_schedule()

    def before_step(self) -> None:
        """The tiers' part of the step has been prepared."""
        if self.reader is not None:
            self.reader.before_step()

    def after_step(self, waits: bool) -> None:
        """`waits`: the step had nothing to do."""
        if waits and self._scheduler.has_work:
            time.sleep(POLL_S)

    def tick(self) -> bool:
        """Instead of a step. Whether it should be called again soon: a read of an aborted request has not
        ended, or a lease is to be renewed or released."""
        if self.lender is not None:
            self.lender.settle()
        if self.reader is not None:
            self.reader.before_schedule()
        return self.reader is not None and self.reader.is_busy

    def begin(self, plan: StepPlan) -> list[Output]:
        """To be called before the step is launched. Returns the tickets of the requests whose prompts begin
        and which offer theirs."""
        if self.lender is None:
            return []
        return [Output(name, [], kv_ticket=ticket) for name, ticket in self.lender.begin(plan).items()]

    def completed(self, plan: StepPlan) -> None:
        if self.lender is not None:
            self.lender.completed(plan)

    def lend(self, token_ids: list[int], root: bytes) -> bytes | None:
        """A ticket for the blocks that the cache has of the beginning of these tokens, if there are any.
        `root`: what the first key is derived from. No step may be in flight."""
        if self.lender is None:
            return None
        # Rank 0 waits for no other where a step draws no token; a block is whole when all have written it.
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

    # The weights

    def cache_changes(self, why: str) -> None:
        """To be called before the cache is lost, or gets another meaning. Afterwards nothing is read into it,
        and other workers find that their reads from it are stale."""
        if self.reader is not None:
            self.reader.quiesce()
        self.withdraw_all(why)

    def weights_change(self) -> None:
        """The weights are about to change."""
        self.cache_changes("the weights changed")
        self._is_stale = True

    def name_model(self) -> None:
        """Sends readers and ranks the name of the model and weights of the blocks. Engines of other
        tensor-parallel sizes have the same name for a checkpoint."""
        self._is_stale = False
        model, files = self._ranks.runner.model_config, self._checkpoint()
        if files is not None:
            name = checkpoint_fingerprint(files, is_packed=self._config.keep_quantized)
        else:
            checksums = self._ranks.call(commands.CHECKSUMS)
            name = weights_fingerprint(checksums, model)
        self._ranks.call(commands.PEERS_NAME_MODEL, name)
        if self.lender is not None:
            self.lender.offers.model = name

    # The rest of an engine's life

    def fill_in(self, stats: Stats) -> Stats:
        """Adds the figures of the exchange to the scheduler's."""
        if self.lender is not None:
            stats.kv_loans = self.lender.loans()
        if self.reader is not None:
            stats.kv_transfers = {name: replace(one) for name, one in self.reader.transfers.items()}
            stats.kv_transfer_failures = dict(self.reader.failures)
        return stats

    def abandon(self) -> None:
        """After an interrupt: afterwards nothing is read into the cache. Somebody else ends the fetches."""
        if self.reader is not None:
            self.reader.abandon()

    def check(self) -> None:
        """Checks its state by assertions."""
        if self.lender is not None:
            self.lender.settle()
        held = [] if self.lender is None else self.lender.offers.held()
        self._scheduler.blocks.check_lent(held)
        if self.reader is not None:
            self.reader.check()

    def close(self) -> None:
        """Ends all offers and leases. The ranks still live."""
        if self.reader is not None:
            self._scheduler.blocks.peers = None
            self.reader.close()
        if self.lender is not None:
            self.lender.close()
