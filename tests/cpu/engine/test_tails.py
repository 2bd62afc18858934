"""Prompts whose length is not a whole number of blocks, computed by another worker: the tail, the tokens after the last full block, is fetched too, so that the first step here is a decode of one token."""

from collections import Counter

import pytest

from shoal.api import KV_CACHE, WEIGHTS, FinishReason, Request
from shoal.engine.peers.prefetches import HOLD_S, Prefetches
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.scheduling.sequence import Sequence
from shoal.errors import RequestError
from shoal.hashing import keys_with_tail
from shoal.sampling_params import SamplingParams
from tests.cpu.engine.test_scheduler_fuzz import Device, History, Row, Trace, uninterrupted

SIZE = 4
PROMPT = list(range(100, 118))  # four blocks and two tokens
FIRST = 7  # the first token, which was drawn elsewhere


class Elsewhere:
    """Other workers, with all requested blocks but the last `lacks`."""

    def __init__(self):
        self.begun, self.lacks = [], 0

    def lookup(self, keys, start):
        return max(0, len(keys) - self.lacks - start)

    def begin(self, fetch):
        self.begun.append(fetch)


class PrefetchingScheduler(Scheduler):
    """A scheduler with the part that holds the blocks of prefetch requests."""

    def __init__(self, **options):
        super().__init__(**options)
        self.now = 0.0
        self.prefetches = Prefetches(self, lambda: self.now)
        self.gates.append(self.prefetches)
        self.reserves.append(self.prefetches)

    def add(self, request):
        seq = super().add(request)
        self.prefetches.added(seq)
        return seq

    def abort(self, request_id):
        if (seq := super().abort(request_id)) is None:
            self.prefetches.aborted(request_id)
        return seq

    def schedule(self):
        self.prefetches.before_schedule()
        plan = super().schedule()
        self.prefetches.after_schedule(plan)
        return plan

    def check(self):
        super().check()
        self.blocks.check_held(self.prefetches.held_blocks())

    @property
    def held(self):
        """Ids of the prefetch requests whose blocks are held."""
        return list(self.prefetches._held)


@pytest.fixture
def scheduler():
    made = PrefetchingScheduler(
        num_blocks=20, block_size=SIZE, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64
    )
    made.blocks.fetches.sources.append(Elsewhere())
    return made


def request(name, prompt=PROMPT, first=(FIRST,), continues=None, salt=None, **options):
    params = SamplingParams(**{"max_tokens": 30, "ignore_eos": True} | options)
    return Request(
        name, list(prompt), params, output_token_ids=list(first), continues=continues, cache_salt=salt
    )


def ahead(name, prompt=PROMPT, salt=None):
    return Request(
        name, list(prompt), SamplingParams(max_tokens=1), fetches_only=True, kv_ticket=b"x", cache_salt=salt
    )


def holding(scheduler, **options):
    """A prefetch request whose blocks have come."""
    seq = scheduler.add(ahead("f", **options))
    assert scheduler.schedule() is None
    [fetch] = scheduler.blocks.fetches.under_way
    scheduler.fetched(fetch, len(fetch.keys))
    assert scheduler.schedule() is None and scheduler.held == ["f"] and seq.row == -1
    scheduler.check()
    return seq


def planned(scheduler):
    """(request id, start, number of tokens) of the next step's decodes, and of its prefills."""
    plan = scheduler.schedule()
    scheduler.check()
    entries = [(entry.seq.request.request_id, entry.start, entry.num_tokens) for entry in plan.scheduled]
    scheduler.update(plan, [[1] for entry in plan.scheduled if entry.samples])
    scheduler.check()
    return entries[: plan.num_decodes], entries[plan.num_decodes :]


def test_the_first_step_is_a_decode_of_one_token(scheduler):
    seq = scheduler.add(request("d"))
    assert scheduler.schedule() is None
    [fetch] = scheduler.blocks.fetches.under_way
    assert fetch.keys == keys_with_tail(seq.keys, seq.root, PROMPT, SIZE) and len(fetch.chain) == 4
    scheduler.fetched(fetch, 5)
    scheduler.check()
    assert planned(scheduler) == ([("d", 18, 1)], [])
    assert seq.num_cached_tokens == scheduler.stats().external_prefix_cache_hits == 18


def test_so_is_that_of_a_prefetch_requests_continuation_which_gets_its_block(scheduler):
    holding(scheduler)
    tail = scheduler.prefetches.held_blocks()[4]
    seq = scheduler.add(request("d", continues="f"))
    assert planned(scheduler) == ([("d", 18, 1)], [])
    assert seq.block_ids[4] == tail and seq.num_cached_tokens == 18
    assert planned(scheduler) == ([("d", 19, 1)], [])


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8])
def test_prompts_around_the_ends_of_blocks_leave_one_token_to_compute(scheduler, num_tokens):
    holding(scheduler, prompt=PROMPT[:num_tokens])
    scheduler.add(request("d", PROMPT[:num_tokens], continues="f"))
    assert planned(scheduler) == ([("d", num_tokens, 1)], [])


def test_it_joins_the_decodes_of_a_step_with_prefills(scheduler):
    scheduler.add(request("runs", range(6), first=()))
    scheduler.blocks.fetches.sources[-1].lacks = 99
    planned(scheduler)
    scheduler.blocks.fetches.sources[-1].lacks = 0
    scheduler.add(ahead("f"))
    assert planned(scheduler) == ([("runs", 6, 1)], [])
    scheduler.fetched(scheduler.blocks.fetches.under_way[0], 5)
    scheduler.blocks.fetches.sources[-1].lacks = 99
    scheduler.add(request("d", continues="f"))
    scheduler.add(request("new", range(50, 55), first=()))
    assert planned(scheduler) == ([("d", 18, 1), ("runs", 7, 1)], [("new", 0, 5)])


def test_a_tail_is_found_by_nobody_else_until_its_block_is_full(scheduler):
    holding(scheduler)
    scheduler.add(request("d", continues="f"))
    scheduler.blocks.fetches.sources[-1].lacks = 99
    [seq] = scheduler.waiting
    planned(scheduler)
    full, tail = seq.block_ids[:4], seq.block_ids[4]
    assert scheduler.blocks.pool.match(seq.keys) == full and scheduler.blocks.pool.key_of(tail) is None
    planned(scheduler)  # Position 19, the block's last, is computed; its key is known when its token is.
    planned(scheduler)
    assert scheduler.blocks.pool.match(seq.keys) == [*full, tail]
    again = scheduler.add(request("again", [*PROMPT, FIRST, 1, 1], first=()))
    assert planned(scheduler)[0][-1] == ("again", 20, 1) and again.block_ids[:5] == seq.block_ids[:5]


def test_a_first_token_that_fills_the_block_makes_it_findable_with_that_token(scheduler):
    prompt = PROMPT[:15]
    seq = scheduler.add(request("d", prompt))
    scheduler.schedule()
    scheduler.fetched(scheduler.blocks.fetches.under_way[0], 4)
    assert scheduler.blocks.pool.match(seq.keys) == seq.block_ids[:3], "its last token has not been computed"
    planned(scheduler)
    assert scheduler.blocks.pool.match(seq.keys) == seq.block_ids[:4] and len(seq.keys) == 4


@pytest.mark.parametrize(
    "other",
    [
        {"prompt": [*PROMPT[:17], 1]},
        {"prompt": [1, *PROMPT[1:]]},
        {"prompt": PROMPT[:17]},
        {"prompt": PROMPT[:3]},
        {"salt": "another"},
        {"prompt_logprobs": 1},
        {"skip_reading_prefix_cache": True},
    ],
    ids=str,
)
def test_a_prefetch_request_of_something_else_gives_no_wrong_token(scheduler, other):
    holding(scheduler)
    tail = scheduler.prefetches.held_blocks()[4]
    scheduler.blocks.fetches.sources[-1].lacks = 99
    scheduler.add(request("d", continues="f", **other))
    (seq,) = scheduler.waiting
    decodes, [(_, start, num_tokens)] = planned(scheduler)
    assert not decodes and start % SIZE == 0 and start + num_tokens == len(seq.token_ids) - 1
    assert tail not in seq.block_ids[: start // SIZE]


def test_a_prefetch_request_has_one_continuation(scheduler):
    holding(scheduler)
    scheduler.blocks.fetches.sources[-1].lacks = 99
    scheduler.add(request("d", continues="f"))
    scheduler.add(request("e", continues="f"))
    decodes, prefills = planned(scheduler)
    assert decodes == [("d", 18, 1)] and prefills == [("e", 16, 3)]
    d, e = scheduler.running
    assert not set(d.block_ids[4:]) & set(e.block_ids[4:])


def test_a_continuation_that_lost_its_first_token_computes_the_prompts_last_one_again(scheduler):
    holding(scheduler)
    scheduler.add(request("d", first=(), continues="f"))
    assert planned(scheduler) == ([("d", 17, 1)], [])


def test_a_continuation_that_has_more_tokens_computes_those(scheduler):
    holding(scheduler)
    scheduler.add(request("d", first=(7, 8, 9), continues="f"))
    assert planned(scheduler) == ([], [("d", 18, 3)])


@pytest.mark.parametrize("num_tokens", [3, 18])
def test_a_reset_cache_takes_the_tail_with_it(scheduler, num_tokens):
    holding(scheduler, prompt=PROMPT[:num_tokens])
    scheduler.blocks.fetches.sources[-1].lacks = 99
    assert not scheduler.reset_prefix_cache()
    scheduler.add(request("d", PROMPT[:num_tokens], continues="f"))
    assert planned(scheduler) == ([], [("d", 0, num_tokens + 1)])


def test_a_tail_behind_a_block_that_is_forgotten_is_computed(scheduler):
    prefetch = holding(scheduler)
    scheduler.blocks.fetches.sources[-1].lacks = 99
    scheduler.blocks.pool.reset(prefetch.keys[2:3])
    scheduler.add(request("d", continues="f"))
    assert planned(scheduler) == ([], [("d", 8, 11)])


@pytest.mark.parametrize("way", ["aborted", "given back", "asleep", "late"])
def test_a_prefetch_request_that_is_gone_leaves_its_full_blocks_alone(scheduler, way):
    holding(scheduler)
    scheduler.blocks.fetches.sources[-1].lacks = 99
    if way == "aborted":
        scheduler.abort("f")
    elif way == "given back":
        assert scheduler.prefetches.give_back() and not scheduler.prefetches.give_back()
    elif way == "asleep":
        scheduler.prefetches.before_sleep([KV_CACHE])
    else:
        scheduler.now += HOLD_S + 1
        assert scheduler.schedule() is None
    assert scheduler.blocks.pool.num_free == 20
    [ended] = scheduler.take_finished_outside()
    assert ended.finish_reason is (FinishReason.ABORT if way == "aborted" else FinishReason.LENGTH)
    scheduler.add(request("d", continues="f"))
    assert planned(scheduler) == ([], [("d", 16, 3)])


def test_a_sequence_that_is_preempted_before_its_first_step_computes_its_tail(scheduler):
    seq = scheduler.add(request("d"))
    scheduler.schedule()
    scheduler.fetched(scheduler.blocks.fetches.under_way[0], 5)
    scheduler.preempt_all()
    scheduler.blocks.fetches.sources[-1].lacks = 99
    assert planned(scheduler) == ([], [("d", 16, 3)]) and seq.num_admissions == 2


def test_a_tail_that_comes_too_late_is_not_taken_for_a_full_block(scheduler):
    """Its sequence was preempted, started again, and has filled the block by itself."""
    scheduler.blocks.fetches.sources[-1].lacks = 99
    scheduler.add(request("before", PROMPT, first=(), max_tokens=1))
    planned(scheduler)
    scheduler.blocks.fetches.sources[-1].lacks = 0
    seq = scheduler.add(request("d"))
    assert scheduler.schedule() is None
    [late] = scheduler.blocks.fetches.under_way
    assert (late.start, len(late.keys), len(late.chain)) == (4, 1, 0), "only the tail is missing"
    scheduler.preempt_all()
    scheduler.blocks.fetches.sources[-1].lacks = 99
    for _ in range(4):
        planned(scheduler)
    found = scheduler.blocks.pool.match(seq.keys)
    assert len(found) == 5 and late.blocks[0] not in found
    scheduler.fetched(late, 1)
    scheduler.check()
    assert (
        scheduler.blocks.pool.match(seq.keys) == found
        and scheduler.blocks.pool.key_of(late.blocks[0]) is None
    )


def test_what_lends_its_prompt_and_what_is_embedded_are_prefills(scheduler):
    """A prefill notifies readers of its layers, and gives a hidden state."""
    scheduler.blocks.fetches.sources[-1].lacks = 99
    scheduler.add(request("before", PROMPT[:17], first=(), max_tokens=1))
    planned(scheduler)
    lends = request("lends", PROMPT[:17], first=())
    lends.offers_kv = True
    scheduler.add(lends)
    assert planned(scheduler) == ([], [("lends", 16, 1)])
    scheduler.abort("lends")
    embeds = request("embeds", PROMPT[:17], first=())
    embeds.embed = True
    scheduler.add(embeds)
    assert planned(scheduler) == ([], [("embeds", 16, 1)])
    scheduler.add(request("draws", PROMPT[:17], first=()))
    assert planned(scheduler) == ([("draws", 16, 1)], [])


@pytest.mark.parametrize("threshold", [0, 3])
def test_a_continuation_has_one_part_of_a_step(threshold):
    """Regression: a continuation with more left to compute than a step takes of one prompt was planned twice in a step."""
    scheduler = PrefetchingScheduler(
        num_blocks=20,
        block_size=SIZE,
        max_num_seqs=4,
        max_num_batched_tokens=6,
        max_model_len=64,
        long_prefill_token_threshold=threshold,
    )
    scheduler.blocks.fetches.sources.append(Elsewhere())
    scheduler.add(ahead("f"))
    scheduler.schedule()
    scheduler.fetched(scheduler.blocks.fetches.under_way[0], 0)
    scheduler.blocks.fetches.sources[-1].lacks = 99
    scheduler.add(request("other", range(40, 52), first=()))
    scheduler.add(request("d", continues="f"))
    for _ in range(3):
        _, prefills = planned(scheduler)
        names = [name for name, *_ in prefills]
        assert len(set(names)) == len(names)


# Everything at once


class LentDevice(Device):
    """Remembers when an admission began: a fetch may bring what was valid then."""

    def __init__(self, *args):
        super().__init__(*args)
        self.began = {}

    def _row(self, entry):
        owner = (entry.seq, entry.seq.num_admissions)
        if entry.row not in self.rows or self.rows[entry.row].owner != owner:
            self.rows[entry.row] = Row(owner, entry, self.began.get(owner, self.epoch))
        return self.rows[entry.row]


class LentTrace(Trace):
    """Other workers have what is asked for, or some of it. Requests come with a prefetch request, which may be of
    another prompt, or with a first token alone."""

    patience = 60
    scheduler_class = PrefetchingScheduler

    def __init__(self, seed: int):
        super().__init__(seed)
        scheduler = self.scheduler
        scheduler.blocks.pool.enable_caching = True
        scheduler.blocks.fetches.sources.append(self)
        self.device = LentDevice(scheduler.blocks.pool.num_blocks, self.block_size)
        self.under_way = []
        self.num_requests = 0
        self.later: list[Request] = []  # continuations that have not come
        self.prefetches: dict[str, str] = {}  # by the name of the continuation

    # Other workers

    def lookup(self, keys, start):
        num_blocks = len(keys) - start
        return self.r.choice((0, num_blocks, num_blocks, num_blocks, self.r.randint(0, num_blocks)))

    def begin(self, fetch):
        seq = fetch.seq
        self.device.began[seq, seq.num_admissions] = self.device.epoch
        history = History(seq.request, seq.token_ids[: seq.num_tokens - 1])
        self.under_way.append((fetch, history, self.device.epoch))
        self.seen["tails fetched"] += len(fetch.chain) < len(fetch.keys)

    def arrive_at(self, fetch, history, epoch, num_blocks):
        size = self.block_size
        for i, block in enumerate(fetch.blocks):
            for p in range(size):
                at = (fetch.start + i) * size + p
                is_there = i < num_blocks and at < len(history.hashes)
                self.device.slots[block * size + p] = (history.hashes[at], epoch) if is_there else None
        self.scheduler.fetched(fetch, num_blocks)

    # Requests

    def new_request(self):
        """One that was begun elsewhere has its first token, or has lost it."""
        self.num_requests += 1
        request = super().new_request()
        request.request_id = f"r{self.num_requests}"
        tokens, *_ = uninterrupted(request, self.limit)
        if len(tokens) > 1 and request.params.structured_outputs is None and self.r.random() < 0.8:
            request.output_token_ids = tokens[:1]
        return request

    def arrive(self, request):
        if request.embed or self.r.random() < 0.3:
            return super().arrive(request)
        name, prompt = f"f{request.request_id}", request.prompt_token_ids
        if self.r.random() < 0.1:
            prompt = prompt[:-1] + [(prompt[-1] + 1) % 40]
        salt = request.cache_salt if self.r.random() < 0.95 else "b"
        prefetch = ahead(name, prompt, salt)
        prefetch.adapter = request.adapter
        prefetch.priority, prefetch.arrival = request.priority, request.arrival
        self.scheduler.add(prefetch)
        request.continues = name
        self.prefetches[request.request_id] = name
        self.later.append(request)
        return None

    @property
    def holds(self):
        return bool(self.scheduler.held)

    @property
    def waits(self):
        return super().waits or bool(self.later or self.scheduler.prefetches._arriving)

    def step(self):
        for item in list(self.under_way):
            if self.r.random() < 0.4:
                self.under_way.remove(item)
                num_blocks = len(item[0].keys)
                self.arrive_at(*item, self.r.choice((num_blocks, num_blocks, num_blocks, 0)))
        for request in list(self.later):
            if self.r.random() < 0.3:
                self.later.remove(request)
                self.seen["holding"] += request.continues in self.scheduler.held
                super().arrive(request)
        for name, prefetch in list(self.prefetches.items()):
            if name in self.finished:  # What the router does with a prefetch request that nobody needs.
                self.scheduler.abort(prefetch)
                del self.prefetches[name]
        super().step()

    def launch(self, plan):
        for entry in plan.scheduled[: plan.num_decodes]:
            self.seen["began as decodes"] += entry.begins_as_decode
        return super().launch(plan)

    def disturb(self):
        super().disturb()
        r = self.r
        if self.prefetches and r.random() < 0.02:
            self.scheduler.abort(r.choice(list(self.prefetches.values())))
        if r.random() < 0.01:
            while self.in_flight:
                self.see(*self.in_flight.popleft())
            while self.under_way:
                self.arrive_at(*self.under_way.pop(), 0)
            self.seen["sleeps"] += 1
            self.scheduler.prefetches.before_sleep([KV_CACHE])
            self.scheduler.preempt_all()
            self.scheduler.reset_prefix_cache()
            self.device.slots = [None] * len(self.device.slots)

    def compare(self):
        while self.under_way:
            self.arrive_at(*self.under_way.pop(), 0)
        self.scheduler.now += HOLD_S + 1
        self.scheduler.schedule()
        self.scheduler.check()
        super().compare()


def test_whatever_others_lend_each_request_gets_the_tokens_of_an_undisturbed_run():
    seen = Counter()
    for seed in range(40):
        trace = LentTrace(seed)
        try:
            trace.run(num_requests=25)
        except BaseException:
            print(f"failed: LentTrace({seed})")
            raise
        seen += trace.seen
    for name in ("tails fetched", "began as decodes", "holding", "preemptions", "sleeps", "dropped"):
        assert seen[name] > 10, f"the traces are too tame: {name} {seen[name]}"


def test_a_continuation_without_use_for_its_tail_lets_others_start(scheduler):
    """Regression: a continuation that may not read the prefix cache counted on its tail's block, did not fit, and
    kept all behind it waiting until the blocks were no longer held."""
    scheduler = PrefetchingScheduler(
        num_blocks=7, block_size=4, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=24
    )
    scheduler.blocks.fetches.sources.append(Elsewhere())
    prompt = PROMPT[:13]
    holding(scheduler, prompt=prompt)
    scheduler.blocks.fetches.sources[-1].lacks = 99
    scheduler.add(request("d", prompt, continues="f", skip_reading_prefix_cache=True))
    scheduler.add(request("small", [1], first=()))
    started = set()
    for _ in range(3):
        started |= {name for names in planned(scheduler) for name, *_ in names}
    assert "small" in started and "d" in started


def test_the_id_of_a_prefetch_request_is_in_use_while_its_blocks_are_held(scheduler):
    """Regression: a second request of that id was taken, and both ended under it."""
    holding(scheduler)
    with pytest.raises(RequestError, match="in use"):
        scheduler.prefetches.added(Sequence(ahead("f"), (9,), 64))


def test_blocks_that_are_held_for_too_long_are_given_back_in_an_idle_engine(scheduler):
    """Regression: only steps looked at the time, and an idle engine makes none."""
    holding(scheduler)
    assert scheduler.prefetches.tick() and scheduler.held == ["f"]
    scheduler.now += HOLD_S + 1
    assert not scheduler.prefetches.tick() and not scheduler.held
    [ended] = scheduler.take_finished_outside()
    assert ended.request.request_id == "f" and scheduler.blocks.pool.num_free == 20


def test_a_pause_keeps_the_blocks_of_prefetch_requests(scheduler):
    """Regression: a sleep at level 0, or of the weights alone, ended them."""
    holding(scheduler)
    for tags in ([], [WEIGHTS]):
        scheduler.prefetches.before_sleep(tags)
        assert scheduler.held == ["f"]
    scheduler.prefetches.before_sleep([KV_CACHE])
    assert not scheduler.held
