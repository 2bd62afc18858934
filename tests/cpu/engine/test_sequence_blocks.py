"""SequenceBlocks by itself, against a naive model that keeps the content of every block as a tuple of tokens and
searches all of them. A failing seed is in the test's output; `trace(seed)` repeats it."""

import random
from collections import Counter

import pytest

from shoal.api import Request
from shoal.engine.scheduling.sequence import Sequence
from shoal.engine.scheduling.sequence_blocks import NEVER, SequenceBlocks
from shoal.sampling_params import SamplingParams
from tests.seeded import prints_its_seed

TRACES_A_TEST = 40
LONGEST = 60


class Source:
    """Has the first blocks of some prompts."""

    def __init__(self, r: random.Random):
        self.r, self.begun = r, []

    def lookup(self, keys, start: int) -> int:
        return min(len(keys) - start, self.r.choice((0, 0, 1, 2, 5)))

    def begin(self, fetch) -> None:
        self.begun.append(fetch)

    def registered(self, seq, start: int, blocks, group: int) -> None:
        assert len(seq.keys) >= start + len(blocks)

    def released(self, blocks) -> None:
        pass


class Model:
    """The expected state, by a search of everything: `computed[block]` is the content of a full block whose
    computation is planned, together with everything before it; None: nothing is known of it."""

    def __init__(self, num_blocks: int, block_size: int):
        self.size = block_size
        self.computed: list[tuple | None] = [None] * num_blocks
        self.holders: dict[int, list[int]] = {}  # id of a holder -> its blocks

    def held(self) -> Counter[int]:
        return Counter(block for blocks in self.holders.values() for block in blocks)

    def content(self, seq: Sequence, index: int) -> tuple:
        return (seq.request.cache_salt, *seq.token_ids[: (index + 1) * self.size])

    def longest_prefix(self, seq: Sequence) -> int:
        """The number of leading blocks whose content some block has, the last token's left out."""
        known = set(self.computed)
        num = 0
        while num < (seq.num_tokens - 1) // self.size and self.content(seq, num) in known:
            num += 1
        return num


class Trace:
    def __init__(self, seed: int):
        self.r = r = random.Random(seed)
        self.size = r.choice((1, 2, 4))
        self.num_blocks = r.randint(4, 3 * LONGEST // self.size)
        self.blocks = SequenceBlocks(self.num_blocks, self.size)
        self.source = Source(r)
        if r.random() < 0.5:
            self.blocks.fetches.sources.append(self.source)
        self.model = Model(self.num_blocks, self.size)
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.lent: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.seen = Counter[str]()

    def run(self, num_actions: int) -> Counter[str]:
        actions = (self.arrive, self.start, self.start, self.compute, self.compute, self.end, self.lend)
        for _ in range(num_actions):
            self.r.choice((*actions, self.take_back, self.arrive_blocks, self.preempt, self.reset))()
            self.blocks.check(self.running)
            self.compare()
        return self.seen

    def compare(self) -> None:
        """Holders and findable contents are those of the model."""
        held = self.model.held()
        for block in range(self.num_blocks):
            assert self.blocks.pool.num_holders(block) == held[block]
        for seq in self.waiting:
            if self.blocks.pool.num_free == self.num_blocks:
                assert not self.blocks.lacks_room(seq) or self.blocks.room < seq.num_tokens
        for seq in self.running:
            frees = any(held[block] == 1 for block in seq.block_ids)
            assert self.blocks.would_free(seq) == frees

    # Actions

    def arrive(self) -> None:
        r = self.r
        base = r.choice(self.prompts)[: r.randint(0, LONGEST)] if self.prompts and r.random() < 0.8 else []
        prompt = (base + [r.randrange(5) for _ in range(r.randint(1, 12))])[:LONGEST]
        if len(self.waiting) > 4 or len(prompt) > self.blocks.room:
            return
        self.prompts.append(prompt)
        params = SamplingParams(prompt_logprobs=0 if r.random() < 0.05 else None)
        salt = r.choice((None, None, "a"))
        request = Request(f"r{len(self.prompts)}", prompt, params, cache_salt=salt)
        self.waiting.append(Sequence(request, (len(self.prompts),), LONGEST + 20))

    def start(self) -> None:
        if not self.waiting:
            return
        seq = self.r.choice(self.waiting)
        blocks, pool = self.blocks, self.blocks.pool
        looks_up = seq.request.params.prompt_logprobs is None
        lacks_room = blocks.lacks_room(seq)
        tables, num_cached = blocks.find(seq)
        [found] = tables
        assert num_cached == len(found) * self.size
        expected = self.model.longest_prefix(seq) if looks_up else 0
        assert len(found) <= expected, "found what was never computed, or has been overwritten"
        for i, block in enumerate(found):
            assert self.model.computed[block] == self.model.content(seq, i), "another prompt's block"
        if blocks.is_coming(seq, len(found)):
            self.seen["waits for another"] += 1
            return
        num_new = -(-seq.num_tokens // self.size) - len(found)
        fits = num_new + sum(not self.model.held()[block] for block in found) <= pool.num_free
        assert lacks_room == (not fits), "room is misjudged"
        assert blocks.start(seq, tables, num_cached) == fits
        self.seen["no room"] += not fits
        if not fits:
            return
        self.waiting.remove(seq)
        self.running.append(seq)
        self.seen["hits"] += len(found)
        self.took(seq, len(found))
        assert seq.block_ids[: len(found)] == found and seq.num_computed == len(found) * self.size
        if blocks.fetch(seq):
            fetch = seq.fetch
            assert fetch is not None and fetch.start == len(found)
            self.model.holders[id(fetch)] = list(fetch.held_blocks)
            self.seen["fetches"] += 1

    def took(self, seq: Sequence, start: int) -> None:
        """New blocks have no content any more."""
        for block in seq.block_ids[start:]:
            assert not self.model.held()[block], "a block of another sequence"
            self.model.computed[block] = None
        self.model.holders[id(seq)] = list(seq.block_ids)

    def compute(self) -> None:
        """A step computes some tokens of a sequence; a decode's next token is known or not."""
        able = [seq for seq in self.running if seq.fetch is None]
        if not able:
            return
        seq = self.r.choice(able)
        if seq.num_computed < seq.num_tokens:
            seq.num_computed += self.r.randint(1, seq.num_tokens - seq.num_computed)
        else:
            if len(seq.token_ids) >= LONGEST + 10:
                return
            seq.token_ids.append(self.r.randrange(5))
            seq.num_tokens += 1
            if seq.num_computed % self.size == 0:
                before = len(seq.block_ids)
                if not self.blocks.grow(seq, seq.num_computed + 1):
                    assert self.blocks.pool.num_free == 0
                    seq.token_ids.pop()
                    seq.num_tokens -= 1
                    self.seen["cannot grow"] += 1
                    return
                assert len(seq.block_ids) == before + 1
                self.took(seq, before)
            seq.num_computed += 1
        if seq.num_computed == seq.num_tokens:
            self.blocks.prompt_ends(seq)
        self.registers(seq)
        self.blocks.computed(seq)

    def registers(self, seq: Sequence) -> None:
        if seq.register_at == NEVER:
            return
        for i in range(seq.num_computed // self.size):
            self.model.computed[seq.block_ids[i]] = self.model.content(seq, i)

    def arrive_blocks(self) -> None:
        if not self.source.begun:
            return
        fetch = self.source.begun.pop(self.r.randrange(len(self.source.begun)))
        num_blocks = self.r.randint(0, len(fetch.keys))
        seq, findable, is_wanted = fetch.seq, fetch.findable, fetch.seq.fetch is fetch
        for i in range(min(num_blocks, len(fetch.chain))):
            content = (seq.request.cache_salt, *seq.token_ids[: (fetch.start + i + 1) * self.size])
            if findable:
                self.model.computed[fetch.blocks[i]] = content
        self.blocks.fetches.arrived(fetch, num_blocks)
        del self.model.holders[id(fetch)]
        if is_wanted:
            end = min((fetch.start + num_blocks) * self.size, seq.num_tokens - 1)
            assert seq.num_computed == end and seq.fetch is None
            self.seen["arrived"] += num_blocks

    def end(self) -> None:
        if not self.running:
            return
        seq = self.running.pop(self.r.randrange(len(self.running)))
        self.blocks.release(seq)
        del self.model.holders[id(seq)]
        assert not seq.block_ids and seq.fetch is None and not seq.promised

    def preempt(self) -> None:
        able = [seq for seq in self.running if len(seq.token_ids) <= self.blocks.room]
        if not able or self.r.random() < 0.5:
            return
        seq = self.r.choice(able)
        self.running.remove(seq)
        self.blocks.release(seq)
        del self.model.holders[id(seq)]
        seq.num_computed = 0
        self.waiting.append(seq)
        self.seen["preempted"] += 1

    def lend(self) -> None:
        if not self.running or len(self.lent) > 2:
            return
        seq = self.r.choice(self.running)
        lent = list(seq.block_ids[: self.r.randint(1, len(seq.block_ids))])
        self.blocks.hold(lent)
        self.lent.append(lent)
        self.model.holders[id(lent)] = lent
        self.blocks.check_held([block for one in self.lent for block in one])

    def take_back(self) -> None:
        if self.lent:
            lent = self.lent.pop(self.r.randrange(len(self.lent)))
            self.blocks.unhold(lent)
            del self.model.holders[id(lent)]

    def reset(self) -> None:
        if self.r.random() < 0.9:
            return
        idle = self.blocks.reset(self.running)
        assert idle == (not self.model.held())
        self.model.computed = [None] * self.num_blocks
        self.seen["resets"] += 1


@prints_its_seed
def trace(seed: int) -> Counter[str]:
    return Trace(seed).run(400)


@pytest.mark.parametrize("first_seed", [0, pytest.param(TRACES_A_TEST, marks=pytest.mark.slow)])
def test_any_order_of_calls_agrees_with_a_search_of_all_blocks(first_seed):
    print(f"seeds {first_seed}..{first_seed + TRACES_A_TEST - 1}")
    seen = sum((trace(seed) for seed in range(first_seed, first_seed + TRACES_A_TEST)), Counter[str]())
    names = (
        "hits",
        "no room",
        "waits for another",
        "fetches",
        "arrived",
        "cannot grow",
        "preempted",
        "resets",
    )
    for name in names:
        assert seen[name] > 10, f"the traces are too tame: {name} {seen[name]}"


def test_what_was_computed_is_found_as_long_as_nothing_took_its_place():
    """The other half of the oracle: nothing is forgotten without need."""
    for seed in range(30):
        r = random.Random(seed)
        blocks = SequenceBlocks(40, 4)
        known: list[list[int]] = []
        for i in range(4):
            prompt = [r.randrange(5) for _ in range(r.randint(1, 30))]
            seq = Sequence(Request(f"r{i}", prompt, SamplingParams()), (i,), 64)
            assert blocks.start(seq, *blocks.find(seq))
            seq.num_computed = seq.num_tokens
            blocks.computed(seq)
            blocks.release(seq)
            known.append(prompt)
        for i, prompt in enumerate(known):
            again = Sequence(Request(f"s{i}", [*prompt, 9], SamplingParams()), (9 + i,), 64)
            assert len(blocks.find(again)[0][0]) == len(prompt) // 4, f"seed {seed}"
        blocks.check([])
