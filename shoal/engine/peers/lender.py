"""`KvLender`: lends the KV blocks of prompts to other workers: holds them, issues tickets, notifies readers
of each computed layer, and releases the blocks. kv/transfer serves the tickets; peers.py calls it."""

from __future__ import annotations

import time
from collections import Counter, abc
from dataclasses import dataclass

import torch

from shoal.api import FinishReason
from shoal.engine.runner.layer_events import LayerEvents
from shoal.engine.scheduling.scheduler import ScheduledSeq, StepPlan
from shoal.engine.scheduling.sequence import Sequence, SequenceStatus
from shoal.engine.scheduling.sequence_blocks import SequenceBlocks
from shoal.engine.scheduling.state_blocks import StateBlocks
from shoal.hashing import extend_keys, keys_with_tail, part_key
from shoal.kv.groups import NO_BLOCK
from shoal.kv.places import Place, key_of, longest_end, places
from shoal.kv.snapshots import StateSnapshot
from shoal.kv.transfer.advance import Advancer
from shoal.kv.transfer.offer_server import OfferServer
from shoal.kv.transfer.offers import Offers
from shoal.kv.transfer.ticket import ExportAddress, unseal
from shoal.stats import KvLoans

DONE = "done"  # the end of an offer whose reader has finished


@dataclass(slots=True)
class _Prompt:
    """A prompt that is offered and has no first token yet."""

    seq: Sequence
    ticket_id: bytes
    num_blocks: int  # that its tokens take, the last one maybe not full
    num_admissions: int  # the sequence's, when it was offered

    @property
    def is_lost(self) -> bool:
        """True if the prompt ended without a token that counts, or was preempted, so that its other blocks
        will be in other places."""
        seq = self.seq
        if seq.status is SequenceStatus.FINISHED:
            return seq.finish_reason is not FinishReason.LENGTH
        return seq.status is SequenceStatus.WAITING or seq.num_admissions != self.num_admissions


class KvLender:
    """The offers of one engine's KV blocks. All calls are made between steps, in the engine's thread."""

    def __init__(
        self,
        blocks: SequenceBlocks,
        layer_events: LayerEvents,
        exports: abc.Sequence[abc.Sequence[ExportAddress]],
        block_size: int,
        num_layers: int,
        host: str,
        port: int,
        lease_s: float,
    ) -> None:
        """`exports` are the addresses of each rank's cache; `num_layers`: of the model. Readers ask at `host`
        and `port`. Raises ConfigError if that address cannot be used."""
        self._blocks, self._block_size, self._num_layers = blocks, block_size, num_layers
        self._layer_events, self._num_ranks = layer_events, len(exports)
        groups = blocks.groups
        # With recurrent layers a ticket has a snapshot, too: the blocks of its parts come last.
        self._states = blocks if isinstance(blocks, StateBlocks) else None
        self._lent: dict[bytes, StateSnapshot] = {}  # by ticket id
        # With several groups of layers, a window or states, the blocks that a reader needs are known when the
        # last chunk of the prompt is planned, and they are reported whole.
        self._offers_late = self._states is not None or len(groups) > 1 or groups[0].window is not None
        self._prompts: dict[str, _Prompt] = {}  # by request id
        # tickets whose readers have not been notified of the last layer
        self._late: list[tuple[bytes, int]] = []
        self._block_bytes = sum(rank[0].specs[0].block_bytes for rank in exports)
        self.offers = Offers(b"", exports, self._generation, time.monotonic, lease_s)
        self._server = OfferServer(self.offers, host, port)
        self._advancer = Advancer(self.offers)
        self._ended = Counter[str]()
        self._blocks_out = 0

    def begin(self, plan: StepPlan) -> dict[str, bytes]:
        """Offers the prompts that begin with this step, which is launched next, and has readers notified of
        each of its layers. Returns a ticket for each request that is offered. Prompts of models with several
        groups of layers, with windows or with states are offered with their last step."""
        tickets, notified = {}, []
        for entry in plan.scheduled[plan.num_decodes :]:
            seq, request = entry.seq, entry.seq.request
            if not request.offers_kv:
                continue
            if self._ends_prompt(entry) if self._offers_late else entry.begins:
                ticket = self._offer(seq) if self._states is None else self._offer_states(seq, plan)
                if ticket is not None:
                    tickets[request.request_id] = ticket
            prompt = self._prompts.get(request.request_id)
            # A prompt that was preempted and started again since `settle` computes into other blocks.
            if prompt is not None and not prompt.is_lost:
                # Blocks found in the cache may be computed by this very step, so they are reported with it.
                # The last block, full or not, is complete when the last token is computed.
                end = (entry.start + entry.num_tokens) // self._block_size
                notified.append((prompt.ticket_id, prompt.num_blocks if entry.samples else end))
        if notified or self._late:
            self._listen(notified, any(entry.samples for entry in plan.scheduled))
        return tickets

    @staticmethod
    def _ends_prompt(entry: ScheduledSeq) -> bool:
        """Returns whether a step computes the last tokens of a request, and no step has sampled one."""
        request = entry.seq.request
        num_given = len(request.prompt_token_ids) + len(request.output_token_ids)
        return entry.samples and len(entry.seq.token_ids) == num_given

    def _offer(self, seq: Sequence) -> bytes:
        """Returns a ticket for the blocks of a prompt, with its tail, so that a reader computes no token of
        it."""
        extend_keys(seq.keys, seq.root, seq.token_ids, self._block_size)
        chain = keys_with_tail(seq.keys, seq.root, seq.token_ids, self._block_size)
        needed = self._places(len(seq.token_ids))
        blocks = [seq.tables[group][number] for group, number in needed]
        found = {place: block for place, block in zip(needed, blocks) if block != NO_BLOCK}
        return self._add_prompt(seq, self._hold(found, chain))

    def _offer_states(self, seq: Sequence, plan: StepPlan) -> bytes | None:
        """Returns a ticket for a prompt up to its last snapshot, so that a reader computes a block of it at
        most; None if there is no snapshot. Snapshots of the step itself are not offered, as they are taken
        after the last layer, with which readers are notified."""
        extend_keys(seq.keys, seq.root, seq.token_ids, self._block_size)
        saves = [] if plan.copies is None else plan.copies.saves
        found, snapshot = self._find(seq.keys, {blocks[0] for _, blocks in saves})
        return self._add_prompt(seq, self._hold(found, seq.keys, snapshot)) if found else None

    def _add_prompt(self, seq: Sequence, ticket: bytes) -> bytes:
        opened = unseal(ticket)
        self._prompts[seq.request.request_id] = _Prompt(
            seq, opened.id, len(opened.blocks), seq.num_admissions
        )
        return ticket

    def _places(self, end: int) -> list[Place]:
        """Returns the places that a reader needs after `end` tokens. If there are windows, also those for the
        last full blocks before the end: a request without the next token computes the last one itself."""
        largest = self._blocks.largest
        also = max(0, end - 1) // largest * largest
        return places(self._blocks.groups, end, also if self._states is None else None)

    def _find(
        self, chain: list[bytes], written: abc.Container[int] = ()
    ) -> tuple[dict[Place, int], StateSnapshot | None]:
        """Returns the findable blocks of the longest prefix with which a reader can continue, and with states
        the snapshot at its end. `written`: the first blocks of snapshots that can't be used yet."""
        groups, size, pool = self._blocks.groups, self._block_size, self._blocks.pool

        def find(place: Place) -> int | None:
            return pool.find(key_of(place, groups, chain, size))

        def longest(end: int) -> int:
            return longest_end(groups, end, lambda place: find(place) is not None)

        end, snapshot = longest(len(chain) * size), None
        while end and self._states is not None:
            snapshots = self._states.snapshots
            at = snapshots.longest(chain, end // size)
            snapshot = snapshots.find(chain[at - 1]) if at else None
            if snapshot is not None and snapshot.blocks[0] in written:
                end = longest((at - 1) * size)
            elif (end := longest(at * size)) == at * size:
                break
        found = {place: block for place in self._places(end) if (block := find(place)) is not None}
        return found, snapshot if end else None

    def _hold(
        self,
        found: dict[Place, int],
        chain: list[bytes],
        snapshot: StateSnapshot | None = None,
        are_computed: bool = False,
    ) -> bytes:
        """Holds the blocks at these places, and keeps the snapshot. Returns a ticket for them. `chain` has
        the keys of the prompt's tokens, maybe with a tail's."""
        groups, blocks = self._blocks.groups, list(found.values())
        self._blocks.hold(blocks)
        keys = [key_of(place, groups, chain, self._block_size) for place in found]
        numbers = [place.group for place in found] if len(groups) > 1 or snapshot is not None else []
        if snapshot is not None:
            keys += [part_key(snapshot.key, part) for part in range(len(snapshot.blocks))]
            numbers += [len(groups)] * len(snapshot.blocks)
            blocks += snapshot.blocks
        ticket = self.offers.offer(blocks, len(blocks) if are_computed else 0, keys, numbers)
        if snapshot is not None and self._states is not None:
            self._states.keep(snapshot)
            self._lent[unseal(ticket).id] = snapshot
        return ticket

    def _listen(self, notified: list[tuple[bytes, int]], samples: bool) -> None:
        """Has readers notified of the next step's layers. `samples`: whether the step samples a token.

        With several ranks a layer's event follows the layer's sum over the ranks, which no rank enters
        before it has written its keys. A step that samples nothing omits the last layer's sum, so this layer
        is reported after the first sum of a later step."""
        late, last = self._late, self._num_layers - 1
        per_layer = not self._offers_late
        has_all = samples or self._num_ranks == 1
        self._late = [] if has_all else notified

        def ended(layer: int, event: torch.cuda.Event | None) -> None:
            if layer == 0 and late:
                self._advancer.put(event, late, self._num_layers)
            if (per_layer and layer < last) or (layer == last and has_all):
                self._advancer.put(event, notified, layer + 1)

        self._layer_events.listen(ended)

    def completed(self, plan: StepPlan) -> None:
        """To be called when a step has run and the scheduler has applied its tokens."""
        for entry in plan.scheduled[plan.num_decodes :]:
            if entry.samples and entry.seq.request.offers_kv:
                prompt = self._prompts.pop(entry.seq.request.request_id, None)
                if prompt is not None and prompt.is_lost:
                    self.offers.withdraw("its request has ended", prompt.ticket_id)

    def lend(self, token_ids: list[int], root: bytes) -> bytes | None:
        """A ticket for the findable blocks of the beginning of these tokens, if there are any. `root`: what
        the first key is derived from. No step may be in flight, which might still compute some of them."""
        chain: list[bytes] = []
        extend_keys(chain, root, token_ids, self._block_size)
        found, snapshot = self._find(chain)
        return self._hold(found, chain, snapshot, are_computed=True) if found else None

    def withdraw(self, ticket: bytes, why: str) -> None:
        """Takes back the blocks of a ticket that will not be used. Raises TransferError for a malformed
        ticket."""
        self.offers.withdraw(why, unseal(ticket).id)

    def withdraw_all(self, why: str) -> None:
        self._prompts.clear()
        self._late = []
        self.offers.withdraw(why)
        self.release_ended()

    def release_ended(self) -> None:
        """Releases the blocks whose offers have ended."""
        for name, prompt in list(self._prompts.items()):
            if prompt.is_lost:
                del self._prompts[name]
                self.offers.withdraw("its prompt was abandoned", prompt.ticket_id)
        self.offers.expire()
        for ended in self.offers.take_ended():
            snapshot = self._lent.pop(ended.id, None)
            self._blocks.unhold(ended.blocks if snapshot is None else ended.blocks[: -len(snapshot.blocks)])
            if snapshot is not None and self._states is not None:
                self._states.unpin(snapshot)
            self._ended[ended.failure or DONE] += 1
            if ended.failure is None:
                self._blocks_out += len(ended.blocks)

    def held_blocks(self) -> list[int]:
        """Returns the KV blocks that are held, once for each offer."""
        held = Counter(self.offers.held())
        for snapshot in self._lent.values():
            held.subtract(snapshot.blocks)
        return [*held.elements()]

    def _generation(self, block: int) -> int:
        """Blocks for snapshots alone have none, as a snapshot is kept as long as it is lent."""
        pool = self._blocks.pool
        return pool.generation(block) if block < pool.num_blocks else 0

    def loans(self) -> KvLoans:
        self.release_ended()
        held = len(self.offers.held())
        blocks_out = self._blocks_out
        return KvLoans(
            self.offers.num_live, held, blocks_out, blocks_out * self._block_bytes, dict(self._ended)
        )

    def close(self) -> None:
        """Readers lose their connections. Safe to call twice."""
        self._server.close()
        self.withdraw_all("the engine was ended")
        self._advancer.close()
