"""Held blocks as objects: shared by reference, given back when dropped, registered once."""

import gc
import threading

import pytest

from shoal.errors import NoFreeBlocksError
from shoal.hashing import extend_keys, root_key
from shoal.kv.blocks import BlockPool
from shoal.kv.library.handles import BlockManager


def keys_of(num_tokens, block_size=2):
    keys: list[bytes] = []
    extend_keys(keys, root_key(), list(range(1, num_tokens + 1)), block_size)
    return keys


@pytest.fixture
def manager():
    return BlockManager(BlockPool(4))


def test_blocks_come_back_when_nobody_has_them(manager):
    held = manager.take(3)
    assert manager.num_free == 1 and len(held) == 3
    shared = held.share()
    del held
    assert manager.num_free == 1
    del shared
    assert manager.num_free == 4
    manager.pool.check([])


def test_blocks_come_back_at_the_end_of_a_with_and_only_once(manager):
    with manager.take(2) as held, held.share():
        assert manager.num_free == 2
    held.close()
    del held
    assert manager.num_free == 4


def test_what_was_dropped_is_back_after_a_fence_in_the_order_of_the_drops(manager):
    first, second = manager.take(2), manager.take(2)
    first.register(keys_of(4))
    second.register(keys_of(8)[2:])
    del second
    del first
    assert manager.pool.num_free == 0
    manager.fence()
    assert manager.pool.free_blocks() == [3, 2, 1, 0], "tail first, and the first that was dropped first"


def test_the_blocks_of_a_dropped_sequence_are_matched_again():
    """Two blocks: 2 of 2 are free, matched 0 of 2, dropped 2 of 2."""
    manager, keys = BlockManager(BlockPool(2)), keys_of(4)
    with manager.take(2) as held:
        held.register(keys)
        blocks = list(held.blocks)
    assert (manager.pool.num_blocks, manager.num_free) == (2, 2)
    matched = manager.match(keys)
    assert matched.blocks == blocks and (matched.num_in_flight, matched.num_matched) == (0, 2)
    assert (manager.pool.num_blocks, manager.num_free) == (2, 0)
    del matched
    assert (manager.pool.num_blocks, manager.num_free) == (2, 2)
    manager.pool.check([])


def test_a_content_that_is_in_flight_is_registered_once(manager):
    first, second = manager.take(1), manager.take(2)
    first.register(keys_of(2))
    second.register(keys_of(4))
    assert second.blocks[0] == first.blocks[0] and manager.num_free == 2
    second.register(keys_of(4))
    manager.pool.check([*first.blocks, *second.blocks])
    del first
    assert manager.match(keys_of(4)).blocks == second.blocks


def test_a_prefill_knows_what_is_in_flight_what_was_matched_and_what_remains(manager):
    keys = keys_of(4)
    with manager.take(2) as held:
        held.register(keys)
    in_flight = manager.match(keys[:1])
    prefill = manager.prepare_prefill(keys, 3)
    assert (prefill.num_in_flight, prefill.num_matched, len(prefill)) == (1, 1, 3) and prefill.blocks[
        :1
    ] == in_flight.blocks
    with pytest.raises(NoFreeBlocksError):
        manager.prepare_prefill(keys, 4)
    assert manager.num_free == 1
    manager.pool.check([*in_flight.blocks, *prefill.blocks])


def test_blocks_may_be_dropped_by_the_garbage_collector_of_another_thread(manager):
    def drop():
        held = manager.take(2)
        held.itself = held
        del held
        gc.collect()

    thread = threading.Thread(target=drop)
    thread.start()
    thread.join()
    assert manager.num_free == 4
