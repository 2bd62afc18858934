"""The index of KV blocks against a naive oracle, in random storms of events, and what its users rely on."""

import random

import pytest

from shoal.fleet.index import prefix_tree
from shoal.fleet.index.indexer import KvIndexer, Overlap, WorkerRank
from shoal.hashing import block_hashes, sequence_hashes, wire_seed
from shoal.kv_events import CPU, GPU, STORAGE, AllBlocksCleared, BlockRemoved, BlockStored

A, B = WorkerRank("a"), WorkerRank("b")
MEDIA = (GPU, CPU, STORAGE)


class Oracle:
    """For each worker and medium its names, and the whole prefix of tokens that each name means."""

    def __init__(self, with_states=()):
        self.names = {}
        self.with_states, self.snapshots = with_states, {}  # (rank, medium) -> prefixes

    def stored(self, rank, medium, name, prefix, has_snapshot):
        self.names.setdefault((rank, medium), {})[name] = prefix
        kept = self.snapshots.setdefault((rank, medium), set())
        kept.add(prefix) if has_snapshot else kept.discard(prefix)

    def removed(self, rank, medium, name):
        names = self.names.get((rank, medium), {})
        prefix = names.pop(name, None)
        if prefix is not None and prefix not in names.values():
            self.snapshots[rank, medium].discard(prefix)

    def cleared(self, rank):
        for medium in MEDIA:
            self.names.pop((rank, medium), None)
            self.snapshots.pop((rank, medium), None)

    def find(self, rank, tokens, size):
        found, seen, kept = [], set(), set()
        for medium in MEDIA:
            seen |= set(self.names.get((rank, medium), {}).values())
            kept |= self.snapshots.get((rank, medium), set())
            depth = 0
            while (depth + 1) * size <= len(tokens) and tuple(tokens[: (depth + 1) * size]) in seen:
                depth += 1
            while rank in self.with_states and depth and tuple(tokens[: depth * size]) not in kept:
                depth -= 1
            found.append(depth)
        return Overlap(found[0], found[1] - found[0], found[2] - found[1])


def stored(tokens, names, parent=None, size=4, medium=GPU, salt=None, lora=None, extra=None, kept=None):
    keys = extra or ([[{"type": "cache_salt", "salt": salt}]] + [None] * (len(names) - 1) if salt else None)
    return BlockStored(names, parent, tokens, size, None, medium, lora, keys, kept)


@pytest.mark.parametrize("media", [MEDIA[:1], MEDIA])
def test_a_storm_of_events_leaves_what_a_naive_oracle_has(media):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    r = random.Random(seed)
    ranks = [WorkerRank(name, rank) for name in "abc" for rank in range(2)]
    index, oracle = KvIndexer(block_size=4), Oracle(ranks[::3])  # some have recurrent layers
    sizes = {rank: r.choice((2, 4)) for rank in ranks}
    # Few tokens, so that prefixes meet.
    prompts = [[r.randrange(2) for _ in range(48)] for _ in range(12)]
    known = {rank: {} for rank in ranks}  # name -> the prefix that it ends, as the worker has it anywhere

    def a_prompt():
        prompt = list(r.choice(prompts))
        return prompt[: r.randrange(len(prompt) + 1)] + [r.randrange(2) for _ in range(r.randrange(9))]

    for step in range(3000):
        rank, medium = r.choice(ranks), r.choice(media)
        size, names = sizes[rank], known[rank]
        kind = r.random()
        if kind < 0.55:
            tokens = a_prompt()
            full = len(tokens) // size
            first = r.randrange(full + 1)
            if not full - first:
                continue
            parent = None
            if first:
                parent = next(
                    (n for n, prefix in names.items() if prefix == tuple(tokens[: first * size])), None
                )
                if parent is None:
                    continue
            new = []
            for number in range(first, full):
                prefix = tuple(tokens[: (number + 1) * size])
                again = next((n for n, p in names.items() if p == prefix), None)
                new.append(again if again is not None and r.random() < 0.8 else r.randrange(2**64))
            kept = [name for name in new if r.random() < 0.4] if rank in oracle.with_states else None
            index.apply(
                rank, stored(tokens[first * size : full * size], new, parent, size, medium, kept=kept)
            )
            for number, name in zip(range(first, full), new):
                names[name] = tuple(tokens[: (number + 1) * size])
                oracle.stored(rank, medium, name, names[name], name in (kept or ()))
        elif kind < 0.95 and names:
            gone = r.sample(list(names), min(len(names), r.randrange(1, 4)))
            index.apply(rank, BlockRemoved([*gone, r.randrange(2**64)], medium))
            for name in gone:
                oracle.removed(rank, medium, name)
                if not any(name in oracle.names.get((rank, m), {}) for m in MEDIA):
                    del names[name]
        elif r.random() < 0.2:
            index.apply(rank, AllBlocksCleared())
            oracle.cleared(rank)
            names.clear()
        tokens = a_prompt()
        found = index.find_matches(tokens)
        for other in ranks:
            wanted = oracle.find(other, tokens, sizes[other])
            assert found.get(other, Overlap()) == wanted, (step, other)
    for rank in ranks:
        index.remove_worker(rank)
    assert index.num_blocks() == 0 and len(index._tree) == 0


def test_a_block_taken_from_the_middle_ends_the_prefix_until_it_is_back():
    index, tokens = KvIndexer(4), list(range(40))
    index.apply(A, stored(tokens, list(range(10))))
    index.apply(B, stored(tokens[:20], list(range(50, 55))))
    index.apply(A, BlockRemoved([3], GPU))
    assert index.find_matches(tokens) == {A: Overlap(3), B: Overlap(5)}
    index.apply(A, stored(tokens[12:16], [99], parent=2))
    assert index.find_matches(tokens) == {A: Overlap(10), B: Overlap(5)}


def test_blocks_count_to_the_tier_that_has_to_be_passed():
    index, tokens = KvIndexer(4), list(range(24))
    index.apply(A, stored(tokens, list(range(6))))
    index.apply(A, stored(tokens[8:16], [2, 3], parent=1, medium=CPU))
    index.apply(A, stored(tokens[16:20], [4], parent=3, medium=STORAGE))
    index.apply(A, BlockRemoved([2, 3, 4], GPU))
    assert index.find_matches(tokens) == {A: Overlap(2, 2, 2)}


def test_adapters_salts_and_images_keep_prefixes_apart():
    index, tokens = KvIndexer(4), list(range(12))
    index.apply(A, stored(tokens[:8], [1, 2], salt="s", lora="x"))
    index.apply(A, stored(tokens[8:], [3], parent=2, lora="x"))  # only the first event carries the salt
    image = [None, [{"type": "mm", "hash": "h"}], None]
    index.apply(B, stored(tokens, [1, 2, 3], extra=image))
    assert index.find_matches(tokens, lora_name="x", cache_salt="s") == {A: Overlap(3)}
    assert index.find_matches(tokens) == {B: Overlap(1)}
    assert index.find_matches(tokens, lora_name="x") == {}
    chain = sequence_hashes(block_hashes(tokens, 4, wire_seed("x", "s")))
    assert index.find_chain(chain) == {A: Overlap(3)}


def test_a_block_after_an_unknown_one_is_left_out():
    index = KvIndexer(4)
    index.apply(A, stored([1, 2, 3, 4], [7], parent=6))
    assert index.find_matches([1, 2, 3, 4]) == {} and index.num_blocks() == 0


def test_a_name_may_be_its_own_parent_or_come_twice():
    index = KvIndexer(4)
    index.apply(A, stored([1, 2, 3, 4], [7]))
    index.apply(A, stored([5, 6, 7, 8], [7], parent=7))
    assert index.find_matches([1, 2, 3, 4, 5, 6, 7, 8]) == {}  # the name means the second block now
    index.apply(A, stored([1, 2, 3, 4], [8]))
    assert index.find_matches([1, 2, 3, 4, 5, 6, 7, 8]) == {A: Overlap(2)}
    index.apply(A, stored([1, 2, 3, 4], [9]))
    index.apply(A, BlockRemoved([8], GPU))
    assert index.find_matches([1, 2, 3, 4, 5, 6, 7, 8]) == {A: Overlap(2)}
    index.apply(A, BlockRemoved([9], GPU))
    assert index.find_matches([1, 2, 3, 4, 5, 6, 7, 8]) == {}


def test_the_index_has_a_bound_and_chains_go_from_their_ends():
    index, tokens = KvIndexer(4, max_blocks=8), list(range(400))
    index.apply(A, stored(tokens[:24], list(range(6))))
    index.apply(B, stored(tokens[100:116], list(range(4))))
    assert index.num_blocks() == 8
    assert index.find_matches(tokens) == {A: Overlap(4)}
    assert index.find_matches(tokens[100:]) == {B: Overlap(4)}


def test_a_worker_with_another_block_size_under_the_same_name_starts_anew():
    index, tokens = KvIndexer(4), list(range(16))
    index.apply(A, stored(tokens, [1, 2, 3, 4]))
    index.apply(A, stored(tokens, [1, 2], size=8))
    assert index.find_matches(tokens) == {A: Overlap(2)} and index.block_size_of(A) == 8


def test_the_bound_holds_where_the_end_of_a_chain_lies_in_another_tier():
    """All blocks on the device have one behind them then, and it is not on the device."""
    index, tokens = KvIndexer(4, max_blocks=5), list(range(24))
    index.apply(A, stored(tokens[:20], list(range(5))))
    index.apply(A, stored(tokens[20:], [5], parent=4, medium=CPU))
    assert index.num_blocks() == 5 and index.find_matches(tokens) == {A: Overlap(4)}


def test_the_bound_holds_where_another_worker_holds_the_end_of_a_chain():
    index, tokens = KvIndexer(4, max_blocks=5), list(range(24))
    index.apply(B, stored(tokens, list(range(6))))  # one too many: its last goes
    index.apply(B, BlockRemoved([0, 1, 2, 3], GPU))
    index.apply(B, stored(tokens[20:], [5], parent=4))
    index.apply(A, stored(tokens[:20], list(range(5))))
    assert index.num_blocks() == 5 and index.find_matches(tokens) == {A: Overlap(3)}


def test_blocks_without_tokens_are_not_counted():
    index = KvIndexer(4)
    index.apply(A, stored([1, 2, 3, 4], [1, 2, 3]))
    assert index.num_blocks() == 1 == index.num_blocks(A)


def test_a_worker_with_more_orphans_than_the_prompt_has_blocks():
    index, tokens = KvIndexer(4), list(range(400))
    index.apply(A, stored(tokens, list(range(100))))
    index.apply(A, BlockRemoved(list(range(3, 100, 2)), GPU))
    assert index.find_matches(tokens[:24]) == {A: Overlap(3)} == index.find_matches(tokens)
    assert index.find_matches(tokens[:8]) == {A: Overlap(2)}


def test_masks_that_are_kept_once_are_bounded_and_counts_stay_right(monkeypatch):
    monkeypatch.setattr(prefix_tree, "MAX_MASKS", 3)
    index, hashes = KvIndexer(4), list(range(1, 13))
    chain = sequence_hashes(hashes)
    ranks = [WorkerRank(f"w{n}") for n in range(12)]
    for number, rank in enumerate(ranks):
        index.store(rank, prefix_tree.DEVICE, chain[: number + 1], hashes[: number + 1], None)
    assert len(index._tree._masks) <= 3
    assert index.find_chain(chain) == {rank: Overlap(n + 1) for n, rank in enumerate(ranks)}
    for rank in ranks[:6]:
        index.remove_worker(rank)
    assert len(index._tree._masks) <= 3
    assert index.find_chain(chain) == {rank: Overlap(n + 7) for n, rank in enumerate(ranks[6:])}


def test_blocks_count_up_to_the_last_snapshot_of_a_worker_with_states():
    """Regression: a block counted whose snapshot was evicted before it."""
    index, tokens = KvIndexer(4), list(range(24))
    index.apply(A, stored(tokens, list(range(6)), kept=[1, 4]))
    index.apply(B, stored(tokens, list(range(6))))
    assert index.find_matches(tokens) == {A: Overlap(5), B: Overlap(6)}
    assert index.find_matches(tokens[:16] + [99] * 8) == {A: Overlap(2), B: Overlap(4)}
    index.apply(A, stored(tokens[16:20], [4], parent=3, kept=[]))
    assert index.find_matches(tokens)[A] == Overlap(2)
    index.apply(A, stored(tokens[12:16], [3], parent=2, medium=CPU, kept=[3]))
    assert index.find_matches(tokens)[A] == Overlap(2, 2)
    index.apply(A, BlockRemoved([1], GPU))
    assert index.find_matches(tokens)[B] == Overlap(6) and A not in index.find_matches(tokens)
