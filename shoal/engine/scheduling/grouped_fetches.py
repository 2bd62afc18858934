"""`GroupedFetches`: `Fetches` of a model with several groups of layers, or with windows in all layers.
grouped_blocks.py has the blocks.

To continue after n tokens, a sequence needs all blocks of the groups that see everything, and the last ones
of each group with a window. So a fetch has one aim, the largest n for which the device has the first of the
blocks that a group needs and a source has the others. All of them must arrive, as they are of no use without
each other."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

from shoal.engine.scheduling.fetches import Fetch, Fetches, Source
from shoal.engine.scheduling.sequence import Sequence
from shoal.hashing import keys_with_tail
from shoal.kv.blocks import BlockPool
from shoal.kv.groups import NO_BLOCK, LayerGroup
from shoal.kv.places import Place, key_of, longest_end, places


class GroupedFetches(Fetches):
    """`blocks_of(seq)` returns all blocks of a sequence, in the order of its tokens. `take_again(seq, tables,
    end)` exchanges the blocks of a sequence that has computed nothing: the first of each table are `tables`,
    for `end` tokens, and the others new. It returns False if there is no room for them."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        groups: abc.Sequence[LayerGroup],
        register: Callable[..., None],
        release: Callable[[abc.Sequence[int]], None],
        blocks_of: Callable[[Sequence], list[int]],
        take_again: Callable[[Sequence, list[list[int]], int], bool],
    ) -> None:
        super().__init__(pool, block_size, register, release)
        self._groups, self._blocks_of, self._take_again = groups, blocks_of, take_again

    def _begin(self, seq: Sequence, start: int, num_asked: int) -> bool:
        groups, size, computed = self._groups, self._block_size, seq.num_computed
        chain = keys_with_tail(seq.keys, seq.root, seq.token_ids[: seq.num_tokens - 1], size)
        for i, source in enumerate(self.sources[num_asked:], num_asked + 1):
            end = self._furthest(seq, chain, source)
            if end <= computed:
                continue
            own_chain = keys_with_tail(seq.keys, seq.root, seq.token_ids[:end], size)
            needed = {place: key_of(place, groups, own_chain, size) for place in places(groups, end)}
            tables = self._first_blocks(needed, end)
            missing = [place for place in needed if place.number >= len(tables[place.group])]
            found = [key for place, key in needed.items() if place.number < len(tables[place.group])]
            keys = [needed[place] for place in missing]
            keys += self._more_keys(seq, end)
            if not keys or source.lookup([*found, *keys], len(found), end - computed) < len(keys):
                continue
            num_found = [len(table) for table in tables]
            more = self._take_more(seq, end, tables, len(keys) - len(missing))
            if more is None:
                continue
            if not self._take_again(seq, tables, end):
                self._give_more_back()
                continue
            seq.num_computed = end  # when the blocks have arrived; if they do not, the sequence starts again
            self._add(
                source,
                Fetch(
                    seq,
                    start,
                    end,
                    seq.keys[start : end // size],
                    [*missing, *(Place(len(groups), part) for part in range(len(more)))],
                    keys,
                    [*(seq.tables[place.group][place.number] for place in missing), *more],
                    self._blocks_of(seq),
                    [block for table, num in zip(seq.tables, num_found) for block in table[num:]],
                    i,
                    needs_all=True,
                ),
            )
            return True
        return False

    def _more_keys(self, seq: Sequence, end: int) -> list[bytes]:
        """Returns the keys of the blocks that the device lacks and that the sequence needs, in addition to
        the tables' blocks, to continue after `end` tokens."""
        return []

    def _take_more(
        self, seq: Sequence, end: int, tables: list[list[int]], num_blocks: int
    ) -> list[int] | None:
        """Returns blocks for them, of which `num_blocks` are lacking; None: there is no room. `tables` must
        stay findable."""
        return []

    def _give_more_back(self) -> None:
        """Undoes `_take_more`."""

    def _furthest(self, seq: Sequence, chain: list[bytes], source: Source) -> int:
        """Returns the most tokens of the sequence, without its last, for which the device or this source has
        the blocks that are needed after them. `chain` has the keys of these tokens."""
        has, num_tokens = self._holder(chain, source), seq.num_tokens - 1
        # Only other workers have blocks that are not full, and then all that come before, mostly.
        if all(has(place) for place in reversed(places(self._groups, num_tokens))):
            return num_tokens
        return longest_end(self._groups, num_tokens, has)

    def _holder(self, chain: list[bytes], source: Source) -> Callable[[Place], bool]:
        """Returns a function that says if the device or this source has the block of a place."""

        def has(place: Place) -> bool:
            key = key_of(place, self._groups, chain, self._block_size)
            return self._pool.find(key) is not None or source.has(key)

        return has

    def _first_blocks(self, needed: dict[Place, bytes], end: int) -> list[list[int]]:
        """Returns a table for each group: the first of the blocks that it needs, as far as the device has
        them."""
        tables = [[NO_BLOCK] * min(group.first_block(end), group.num_blocks(end)) for group in self._groups]
        for place, key in needed.items():
            block = self._pool.find(key)
            if block is not None and len(tables[place.group]) == place.number:
                tables[place.group].append(block)
        return tables

    def _make_findable(self, fetch: Fetch, num_blocks: int) -> None:
        for place, key, block in list(zip(fetch.places, fetch.keys, fetch.blocks))[:num_blocks]:
            if place.group == len(self._groups):
                break  # parts of a snapshot
            if (place.number + 1) * self._groups[place.group].block_size <= fetch.end:
                self._register(fetch.seq, [key], place.number, [block], place.group)
