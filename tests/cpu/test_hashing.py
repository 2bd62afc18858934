"""Block keys: chained, salted, and the same in every process."""

import subprocess
import sys

from shoal.hashing import KEY_SIZE, extend_keys, root_key


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


def test_equal_blocks_at_different_places_have_different_keys():
    assert len(set(keys_of([7] * 40))) == 10


def test_a_chain_extended_token_by_token_equals_the_one_made_at_once():
    tokens, keys = list(range(100, 130)), []
    for n in range(len(tokens) + 1):
        extend_keys(keys, root_key(), tokens[:n], 4)
    assert keys == keys_of(tokens)


def test_adapter_and_salt_part_the_keys_and_are_not_mixed_up():
    extras = [{}, {"cache_salt": "a"}, {"adapter": "a"}, {"adapter": "a", "cache_salt": "a"}, {"cache_salt": ""}, {"adapter": ""},
              {"adapter": "ab", "cache_salt": "c"}, {"adapter": "a", "cache_salt": "bc"}, {"cache_salt": "\0"}, {"cache_salt": "\ud800"}]
    chains = [keys_of(list(range(8)), **extra) for extra in extras]
    assert len({chain[0] for chain in chains}) == len({chain[1] for chain in chains}) == len(extras)
    assert keys_of(list(range(8)), cache_salt="a") == chains[1]


def test_block_size_is_part_of_a_key():
    assert not set(keys_of(list(range(16)), 4)) & set(keys_of(list(range(16)), 8))


def test_keys_are_the_same_in_every_process_and_forever():
    tokens = [0, 1, 49151, 2**32 - 1]
    code = f"from shoal.hashing import *; k = []; extend_keys(k, root_key('lora', 'salt'), {tokens}, 2); print(b''.join(k).hex())"
    fresh = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert fresh == b"".join(keys_of(tokens, 2, adapter="lora", cache_salt="salt")).hex()
    assert fresh == "8bd91e11a58a8632bc57bf8ae4ff64b00514eb09d7abfcae6e062b431945e510"
