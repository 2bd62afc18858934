"""Random traces with tiers below the device, on the simulated device of test_scheduler_fuzz.py: whatever
copies, files and disks do, every KV slot that is read holds the history it should.

Steps run at any moment between their launch and the moment when their tokens are seen, in order. Copies move
half a block at a time, at any moment between their beginning (if they wait: behind the steps launched before) and the poll that reports their end, and see the content of that moment: a slot or a block released too early is read, or written, by another owner. `trace(seed)` repeats a failing seed.
"""

import dataclasses
import random
from collections import Counter, deque
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from shoal.engine.offload.costs import Costs
from shoal.engine.offload.offloader import Offloader, OffloadPolicy
from shoal.engine.offload.transfers import Done
from shoal.engine.scheduling.scheduler import ScheduledSeq, StepPlan
from shoal.kv.tiers.host import HostTier
from tests.cpu.engine.test_scheduler_fuzz import Device, Row, Trace
from tests.seeded import prints_its_seed

TRACES_A_TEST = 25
FIRST_SEEDS = [
    0,
    *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(TRACES_A_TEST, 100, TRACES_A_TEST)),
]


@dataclass
class Transfer:
    ticket: int
    kind: str
    moves: list  # what is still to be done, in any order
    intact: list


class FakeDisk:
    """Blocks by key: what was written under it, right or wrong. It outlives engines."""

    def __init__(self, room: int):
        self.blocks, self.room = {}, room

    def contains(self, key):
        return key in self.blocks


class FakeTransfers:
    def __init__(
        self, r: random.Random, device: Device, num_slots: int, disks, failing: float, seen: Counter
    ):
        self.r, self.device, self.disks, self.failing, self.seen = r, device, disks, failing, seen
        self.size = device.block_size
        self.slots = [[None] * self.size for _ in range(num_slots)]
        self.unready = list(range(num_slots))
        self.out, self.into, self.files = deque(), deque(), []
        self.last = 0

    def copy_out(self, blocks, slots, wait):
        self._wait(wait)
        content = list(self.device.slots)

        def move(i, half):
            block, slot = blocks[i], slots[i]
            for p in half:
                assert self.device.slots[block * self.size + p] == content[block * self.size + p], (
                    "rewritten before it was copied out"
                )
                self.slots[slot][p] = self.device.slots[block * self.size + p]

        return self._begin(self.out, "copy out", move, len(blocks))

    def copy_in(self, slots, blocks, wait, after):
        self._wait(wait)
        self.seen["after a copy out"] += any(
            transfer.ticket == after and transfer.moves for transfer in self.out
        )

        def move(i, half):
            if after:
                self._move_out(after)
            block, slot = blocks[i], slots[i]
            for p in half:
                self.device.slots[block * self.size + p] = self.slots[slot][p] if transfer.intact[i] else None

        ticket = self._begin(self.into, "copy in", move, len(blocks))
        transfer = self.into[-1]
        return ticket

    def write(self, tier, metas, slots):
        disk = self.disks[tier]
        written = [[None] * self.size for _ in metas]

        def move(i, half):
            for p in half:
                written[i][p] = self.slots[slots[i]][p]

        def finish(transfer):
            for i, meta in enumerate(metas):
                if transfer.intact[i] and len(disk.blocks) < disk.room:
                    disk.blocks[meta.key] = (meta, written[i])
                else:  # full, or killed before the rename
                    transfer.intact[i] = False

        return self._begin(self.files, "write", move, len(metas), finish)

    def read(self, tier, metas, slots):
        disk = self.disks[tier]

        def move(i, half):
            found = disk.blocks.get(metas[i].key)
            for p in half:
                self.slots[slots[i]][p] = found[1][p] if found is not None else ("garbage", -1)
            transfer.intact[i] &= found is not None and found[0] == metas[i]

        ticket = self._begin(self.files, "read", move, len(metas))
        transfer = self.files[-1]
        return ticket

    def order_after(self, ticket):
        self.seen["ordered"] += self._move_out(ticket)

    def _move_out(self, ticket):
        """All up to this one. Whether it has not ended yet."""
        if all(transfer.ticket != ticket for transfer in self.out):
            return False
        for transfer in self.out:
            self._move(transfer, len(transfer.moves))
            if transfer.ticket == ticket:
                break
        return True

    def disown(self, tier, keys):
        for key in keys:
            self.disks[tier].blocks.pop(key, None)

    def poll(self):
        for transfer in [*self.out, *self.into, *self.files]:
            self._move(
                transfer, self.r.choice((0, 0, 0, 1) if transfer.kind == "copy out" else (0, 1, 3, 100))
            )
        ended = []
        for queue in (self.out, self.into):
            while queue and not queue[0].moves and self.r.random() < 0.7:
                ended.append(queue.popleft())
        ended += [transfer for transfer in self.files if not transfer.moves and self.r.random() < 0.7]
        self.files = [transfer for transfer in self.files if transfer not in ended]
        for transfer in ended:
            if transfer.finish is not None:
                transfer.finish(transfer)
            self.seen[transfer.kind] += 1
            self.seen["failed"] += not all(transfer.intact)
        return [Done(transfer.ticket, transfer.intact, self.r.choice((0.0, 0.001))) for transfer in ended]

    def take_ready(self):
        count = self.r.randint(0, len(self.unready))
        ready, self.unready = self.unready[:count], self.unready[count:]
        return ready

    def _wait(self, wait):
        """Steps that run now, rather than copies that run later, are one of the orders there can be."""
        if wait:
            self.device.run_pending()
        else:
            self.seen["beside a step"] += bool(self.device.pending)

    def _begin(self, queue, kind, move, count, finish=None):
        self.last += 1
        size = self.size
        moves = [(move, i, half) for i in range(count) for half in (range(size // 2), range(size // 2, size))]
        self.r.shuffle(moves)
        transfer = Transfer(self.last, kind, moves, [self.r.random() >= self.failing for _ in range(count)])
        transfer.finish = finish
        queue.append(transfer)
        return self.last

    def _move(self, transfer, count):
        while transfer.moves and count:
            count -= 1
            move, i, half = transfer.moves.pop()
            move(i, half)


class TieredDevice(Device):
    """Runs steps some time after their launch. Remembers when an admission began: a fetch may bring what was
    valid then."""

    def __init__(self, r, *args):
        super().__init__(*args)
        self.r, self.began, self.pending = r, {}, deque()

    def launch(self, plan):
        """The list that will have the step's tokens once it has run."""
        entries = []
        for entry in plan.scheduled:
            seq = entry.seq
            key = (seq, seq.num_admissions)
            frozen = SimpleNamespace(
                key=key,
                epoch=self.began.get(key, self.epoch),
                token_ids=list(seq.token_ids),
                block_ids=list(seq.block_ids),
                lockstep=seq.lockstep,
                grammar=None,
                request=seq.request,
            )
            entries.append(ScheduledSeq(frozen, entry.row, entry.start, entry.num_tokens, entry.samples))
        tokens = []
        self.pending.append((StepPlan(tuple(entries), plan.num_decodes, plan.num_tokens), tokens))
        return tokens

    def run_pending(self, until=None):
        while self.pending:
            plan, tokens = self.pending.popleft()
            tokens += self.run(plan)
            if tokens is until:
                return

    def _row(self, entry):
        owner = entry.seq.key
        if entry.row not in self.rows or self.rows[entry.row].owner != owner:
            self.rows[entry.row] = Row(owner, entry, entry.seq.epoch)
        return self.rows[entry.row]


class TieredTrace(Trace):
    patience = 60

    def __init__(self, seed: int, disks=None, past: Trace | None = None, queries: int = 1):
        super().__init__(seed, queries)
        self.past = (
            [(request, past.outputs[name]) for name, request in past.requests.items()]
            if past is not None
            else []
        )
        if past is not None:
            self.r.seed(-seed)
        r, scheduler = self.r, self.scheduler
        if not scheduler.blocks.pool.enable_caching:
            scheduler.blocks.pool.enable_caching = True
        num_blocks = scheduler.blocks.pool.num_blocks
        self.device = TieredDevice(r, num_blocks, self.block_size)
        self.fetching = r.choice((1.0, 1.0, 0.5))
        self.disks = {} if disks is None else disks
        keeps = not self.disks or r.random() < 0.4
        num_slots = r.randint(2, r.choice((8, 2 * num_blocks + 2)))
        self.transfers = FakeTransfers(
            r, self.device, num_slots, self.disks, r.choice((0.0, 0.05, 0.3)), self.seen
        )
        policy = OffloadPolicy(
            block_size=self.block_size,
            block_bytes=10,
            has_host_tier=keeps,
            watermark=r.randint(1, num_blocks),
            host_watermark=r.randint(1, num_slots),
            max_leaving=r.choice((1, 3, 100)),
            copy_blocks=r.choice((1, 2, 100)),
            on_registration=r.random() < 0.3,
            min_uses=r.choice((1, 1, 1, 2)),
            always_fetch=r.random() < 0.8,
            bytes_per_s=r.choice((None, None, 50.0)),
        )
        self.time = 0.0
        self.offloader = Offloader(
            scheduler,
            HostTier(num_slots, r.choice(("lru", "lfu"))),
            self.transfers,
            self.disks,
            policy,
            Costs(self.block_size, r.choice((0.01, 0.001)), {"host": 0.001, "disk": 0.02 * r.random()}),
            clock=self.clock,
        )
        scheduler.blocks.fetches.sources.append(self)
        scheduler.blocks.watchers.append(self)
        scheduler.blocks.pool.listeners.append(self.offloader)

    def clock(self):
        self.time += 0.001
        return self.time

    def new_request(self):
        """Now and then one of an earlier engine's conversations continues."""
        request = super().new_request()
        if not self.past or self.r.random() < 0.5:
            return request
        earlier, outputs = self.r.choice(self.past)
        prompt = (earlier.prompt_token_ids + outputs + request.prompt_token_ids)[: self.limit - 1]
        return dataclasses.replace(
            request, prompt_token_ids=prompt, cache_salt=earlier.cache_salt, adapter=earlier.adapter
        )

    # The scheduler's tiers

    def lookup(self, keys, start):
        # others compute what lies below
        return self.offloader.lookup(keys, start) if self.r.random() < self.fetching else 0

    def begin(self, fetch):
        self.seen["fetches"] += 1
        self.device.began[fetch.seq, fetch.seq.num_admissions] = self.device.epoch
        self.offloader.begin(fetch)

    def registered(self, seq, start, blocks, group):
        self.offloader.registered(seq, start, blocks, group)

    def released(self, blocks):
        self.offloader.released(blocks)

    # Around steps

    def step(self):
        offloader = self.offloader
        offloader.poll()
        super().step()
        offloader.before_step()
        if self.r.random() < 0.3:
            self.device.run_pending()
        if self.r.random() < 0.8:
            offloader.offload(idle=self.r.random() < 0.5)
        if self.r.random() < 0.2:
            offloader.tick()
        if self.r.random() < 0.3:
            offloader.check()

    def launch(self, plan):
        self.offloader.before_step(launches=True)
        return self.device.launch(plan)

    def see(self, plan, tokens):
        if any(tokens is of_step for _, of_step in self.device.pending):
            self.device.run_pending(until=tokens)
        self.offloader.step_completed()
        super().see(plan, tokens)

    def disturb(self):
        epoch = self.device.epoch
        super().disturb()
        if self.device.epoch != epoch:  # the prefix cache was reset
            self.forget_below()
        r = self.r
        for disk in self.disks.values():
            if disk.blocks and r.random() < 0.05:  # evicted, or its file is damaged
                key = r.choice(list(disk.blocks))
                del disk.blocks[key]
        if r.random() < 0.01:
            while self.in_flight:
                self.see(*self.in_flight.popleft())
            self.seen["sleeps"] += 1
            self.offloader.quiesce()
            assert (
                not self.scheduler.blocks.fetches.under_way
                and not self.transfers.out
                and not self.transfers.into
            )
            self.scheduler.preempt_all()
            self.scheduler.reset_prefix_cache()
            self.device.slots = [None] * len(self.device.slots)
        if r.random() < 0.005:
            self.time += 100.0  # fetches lose patience

    def forget_below(self):
        self.offloader.forget_host()
        for disk in self.disks.values():
            disk.blocks.clear()
        self.transfers.files = [t for t in self.transfers.files if t.kind == "read"] + [
            t for t in self.transfers.files if t.kind == "write" and not self._fail(t)
        ]

    @staticmethod
    def _fail(transfer):
        """A write that a reset overtook leaves nothing."""
        transfer.intact = [False] * len(transfer.intact)
        return False

    def compare(self):
        for _ in range(2000):
            self.offloader.tick()
            if not self.scheduler.blocks.fetches.under_way:
                break
        self.offloader.check()
        self.scheduler.check()
        self.seen["fetched tokens"] += self.scheduler.stats().external_prefix_cache_hits
        self.seen["dropped"] += self.offloader.num_dropped
        if self.r.random() < 0.5:
            self.offloader.flush(1.0)
            self.offloader.check()
        super().compare()


@prints_its_seed
def trace(seed: int, queries: int = 1) -> Counter:
    """Most of them with a disk, which the second of two engines finds as the first has left it."""
    room = random.Random(seed).choice((5, 1000))
    disks = {"disk": FakeDisk(room)} if seed % 3 else None
    seen, one = Counter(), None
    for _ in range(2 if disks else 1):
        one = TieredTrace(seed, disks, one, queries)
        one.run(num_requests=25)
        seen += one.seen
    return seen


@pytest.mark.parametrize("first_seed", FIRST_SEEDS)
def test_whatever_transfers_do_each_request_gets_the_tokens_of_an_undisturbed_run(first_seed, monkeypatch):
    monkeypatch.setattr("shoal.engine.offload.offloader.POLL_S", 0.0)
    print(f"seeds {first_seed}..{first_seed + TRACES_A_TEST - 1}")
    seen = sum((trace(seed) for seed in range(first_seed, first_seed + TRACES_A_TEST)), Counter())
    for name in (
        "fetches",
        "fetched tokens",
        "copy out",
        "copy in",
        "read",
        "write",
        "failed",
        "ordered",
        "preemptions",
        "sleeps",
        "dropped",
        "beside a step",
    ):
        assert seen[name] > 5, f"the traces are too tame: {name} {seen[name]}"
    assert seen["after a copy out"], "no fetch took the place of what was nowhere else"


def test_decodes_of_several_tokens_give_each_request_the_tokens_of_an_undisturbed_run(monkeypatch):
    monkeypatch.setattr("shoal.engine.offload.offloader.POLL_S", 0.0)
    print(f"seeds 5000..{4999 + TRACES_A_TEST}, decodes of up to 4 tokens")
    seen = sum((trace(seed, queries=4) for seed in range(5000, 5000 + TRACES_A_TEST)), Counter())
    for name in ("fetched tokens", "copy out", "copy in", "preemptions", "fewer than there may be"):
        assert seen[name] > 5, f"the traces are too tame: {name} {seen[name]}"
