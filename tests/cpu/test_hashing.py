"""Block keys: chained, salted, and the same in every process."""

import subprocess
import sys

import pytest
from xxhash import xxh3_64_intdigest

from shoal.hashing import (
    KEY_SIZE,
    WIRE_SEED,
    block_hashes,
    block_name,
    common_length,
    extend_keys,
    keys_with_tail,
    root_key,
    sequence_hashes,
    wire_seed,
)


def keys_of(token_ids, block_size=4, **extra):
    keys: list[bytes] = []
    extend_keys(keys, root_key(**extra), token_ids, block_size)
    return keys


def test_only_full_blocks_have_keys():
    assert [len(keys_of(list(range(n)))) for n in (0, 3, 4, 7, 8, 9)] == [0, 0, 1, 1, 2, 2]
    assert all(len(key) == KEY_SIZE == 16 for key in keys_of(list(range(8))))


def test_a_key_names_everything_before_its_block():
    a, b = keys_of([1, 2, 3, 4, 5, 6, 7, 8]), keys_of([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0] and a[1] != b[1]
    assert keys_of([1, 2, 3, 4, 9, 6, 7, 8])[0] == a[0]
    assert keys_of([5, 6, 7, 8])[0] != a[1]


def test_a_tail_is_named_by_its_tokens_and_all_before_them():
    tokens, root = list(range(1, 12)), root_key()
    keys = keys_of(tokens)
    *full, tail = keys_with_tail(keys, root, tokens, 4)
    assert full == keys and len(keys) == 2 and len(tail) == KEY_SIZE
    others = [tokens[:10], [*tokens[:10], 99], [99, *tokens[1:]], tokens[8:]]
    tails = [keys_with_tail(keys_of(other), root, other, 4)[-1] for other in others]
    assert len({tail, *tails}) == 5
    assert keys_with_tail([], root_key(cache_salt="a"), [1, 2], 4) != keys_with_tail([], root, [1, 2], 4)
    assert keys_with_tail(keys, root, tokens[:8], 4) == keys, "without a tail"


def test_a_tail_is_no_full_block_of_a_smaller_block_size():
    assert keys_with_tail([], root_key(), [1, 2], 4) != keys_of([1, 2], block_size=2)


def test_equal_blocks_at_different_places_have_different_keys():
    assert len(set(keys_of([7] * 40))) == 10


def test_a_chain_extended_token_by_token_equals_the_one_made_at_once():
    tokens, keys = list(range(100, 130)), []
    for n in range(len(tokens) + 1):
        extend_keys(keys, root_key(), tokens[:n], 4)
    assert keys == keys_of(tokens)


def test_adapter_and_salt_part_the_keys_and_are_not_mixed_up():
    extras = [
        {},
        {"cache_salt": "a"},
        {"adapter": "a"},
        {"adapter": "a", "cache_salt": "a"},
        {"cache_salt": ""},
        {"adapter": ""},
        {"adapter": "ab", "cache_salt": "c"},
        {"adapter": "a", "cache_salt": "bc"},
        {"cache_salt": "\0"},
        {"cache_salt": "\ud800"},
    ]
    chains = [keys_of(list(range(8)), **extra) for extra in extras]
    assert len({chain[0] for chain in chains}) == len({chain[1] for chain in chains}) == len(extras)
    assert keys_of(list(range(8)), cache_salt="a") == chains[1]


@pytest.mark.parametrize(
    ("length", "other"),
    [(0, 0), (1, 1), (1, 40), (16, 16), (17, 300), (47, 48), (48, 90), (300, 300), (300, 1000)],
)
def test_the_first_difference_of_two_lists_is_found_wherever_it_is(length, other):
    a = list(range(length))
    assert common_length(a, list(range(other))) == common_length(list(range(other)), a) == min(length, other)
    for first in range(length):
        assert common_length(a, [*a[:first], -1, *a[first + 1 :]]) == first


def test_block_size_is_part_of_a_key():
    assert not set(keys_of(list(range(16)), 4)) & set(keys_of(list(range(16)), 8))


def test_keys_are_the_same_in_every_process_and_forever():
    tokens = [0, 1, 49151, 2**32 - 1]
    code = (
        f"from shoal.hashing import *; k = []; extend_keys(k, root_key('lora', 'salt'), {tokens}, 2); "
        "print(b''.join(k).hex())"
    )
    fresh = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()
    assert fresh == b"".join(keys_of(tokens, 2, adapter="lora", cache_salt="salt")).hex()
    assert fresh == "8bd91e11a58a8632bc57bf8ae4ff64b00514eb09d7abfcae6e062b431945e510"


def test_wire_hashes_are_dynamos():
    """Its own check values (lib/llm/src/tokens.rs, test_validate_hash_constants)."""
    assert xxh3_64_intdigest(b"test data", WIRE_SEED) == 13226331709069118873
    hashes = block_hashes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], 4)
    assert hashes == [14643705804678351452, 16777012769546811212, 483935686894639516]
    assert sequence_hashes(hashes) == [14643705804678351452, 4945711292740353085, 12583592247330656132]
    assert block_hashes([1, 2, 3], 4) == [] == sequence_hashes([])


def test_wire_hashes_of_another_adapter_or_salt_differ():
    extras = [
        {},
        {"adapter": "a"},
        {"cache_salt": "a"},
        {"adapter": "a", "cache_salt": "a"},
        {"adapter": "b"},
    ]
    assert len({wire_seed(**extra) for extra in extras}) == len(extras)
    assert wire_seed("", "") == wire_seed() == WIRE_SEED
    assert wire_seed("a", "b") == (1337 + xxh3_64_intdigest(b"a", 0) + xxh3_64_intdigest(b"b", 1)) % 2**64
    first, second = block_hashes([7, 7], 1, wire_seed("a"))
    assert first == second == xxh3_64_intdigest((7).to_bytes(4, "little"), wire_seed("a"))
    assert sequence_hashes([first, second])[1] == xxh3_64_intdigest(2 * first.to_bytes(8, "little"), 1337), (
        "the chain itself is not salted"
    )


def test_an_event_names_a_block_by_the_end_of_its_key():
    key = keys_of([1, 2, 3, 4])[0]
    assert block_name(key) == int.from_bytes(key, "big") & (2**64 - 1)
