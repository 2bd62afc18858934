"""The contract of every tier below host memory (kv/tiers/tier.py). A registered tier without an entry in
OPTIONS fails here."""

import random
from dataclasses import replace

import pytest

from shoal.config import EngineConfig
from shoal.errors import ConfigError
from shoal.kv.tiers.registry import TIERS, TierPlace, first_read_s, has_tiers, open_tiers
from tests.made_blocks import BYTES, MODEL, OTHER_MODEL, SPEC, chain, content, keys_of, read, settle, write

# The options that switch each tier on, with {path} for a folder of the test's own
OPTIONS = {
    "disk": dict(kv_disk_path="{path}/disk", kv_disk_bytes=1 << 20),
    "store": dict(kv_store="file://{path}/store"),
}
KINDS = pytest.mark.parametrize("kind", TIERS, ids=lambda kind: kind.name)


def config_of(kind, path):
    options = {
        name: value.format(path=path) if isinstance(value, str) else value
        for name, value in OPTIONS[kind.name].items()
    }
    return EngineConfig("model", **options)


def place(fingerprint=MODEL, record_events=False):
    return TierPlace(fingerprint, (SPEC,), record_events)


@pytest.fixture
def open_tier(tmp_path):
    opened = []

    def open_one(kind, **options):
        opened.append(kind.open(config_of(kind, tmp_path), place(**options)))
        return opened[-1]

    yield open_one
    for tier in opened:
        tier.close()


def test_every_tier_has_its_contract_tested():
    assert OPTIONS.keys() == {kind.name for kind in TIERS}


@KINDS
def test_blocks_come_back_as_they_were_written(kind, open_tier):
    tier, metas = open_tier(kind), chain(5)
    assert not any(tier.contains(key) for key in keys_of(metas))
    assert write(tier, metas) == [True] * 5
    assert all(tier.contains(key) for key in keys_of(metas))
    for meta in random.Random(1).sample(metas, 5):
        assert read(tier, meta) == content(meta)
    stats = tier.stats()
    assert stats.written == stats.read == stats.blocks == 5
    assert stats.num_bytes >= 5 * BYTES and stats.pending == 0


@KINDS
def test_a_look_up_counts_the_leading_blocks_that_are_there(kind, open_tier):
    tier, metas = open_tier(kind), chain(6)
    assert tier.look_up(keys_of(metas)).result(20) == 0
    tier.close()
    tier = open_tier(kind)
    write(tier, metas[:4])
    assert tier.look_up(keys_of(metas)).result(20) == 4


@KINDS
def test_what_another_instance_left_is_found_again(kind, open_tier):
    first, metas = open_tier(kind), chain(3)
    write(first, metas)
    settle(first)
    first.close()
    second = open_tier(kind)
    assert second.look_up(keys_of(metas)).result(20) == 3
    assert [read(second, meta) for meta in metas] == [content(meta) for meta in metas]


@KINDS
def test_blocks_of_other_weights_are_not_found(kind, open_tier):
    metas = chain(3)
    write(open_tier(kind), metas)
    other = open_tier(kind, fingerprint=OTHER_MODEL)
    assert other.look_up(keys_of(metas)).result(20) == 0 and read(other, metas[0]) is None


@KINDS
def test_forgotten_blocks_do_not_count_as_there(kind, open_tier):
    tier, metas = open_tier(kind), chain(4)
    write(tier, metas)
    tier.forget(keys_of(metas[1:2]))
    assert [tier.contains(key) for key in keys_of(metas)] == [True, False, True, True]


@KINDS
def test_a_reset_forgets_all_or_nothing(kind, open_tier):
    tier, metas = open_tier(kind), chain(4)
    write(tier, metas)
    tier.reset()
    assert len({tier.contains(key) for key in keys_of(metas)}) == 1


@KINDS
def test_a_closed_tier_says_no_and_raises_nothing(kind, open_tier):
    tier, (meta, other) = open_tier(kind), chain(2)
    write(tier, [meta])
    tier.close()
    assert tier.write(other, memoryview(content(other))).result(20) is False
    settle(tier)
    tier.close()


@KINDS
def test_events_are_taken_once(kind, open_tier):
    tier, metas = open_tier(kind, record_events=True), chain(2)
    write(tier, metas)
    assert tier.take_events() in (metas, [])
    assert tier.take_events() == []


@KINDS
def test_its_options_alone_switch_a_tier_on(kind, tmp_path):
    config = config_of(kind, tmp_path)
    assert has_tiers(config) and config.has_kv_tiers
    tiers = open_tiers(config, place())
    assert list(tiers) == [kind.name]
    tiers[kind.name].close()
    assert first_read_s(kind.name, 1 << 30) > 0
    assert not has_tiers(EngineConfig("model")) and open_tiers(EngineConfig("model"), place()) == {}


def test_where_one_tier_cannot_be_opened_none_is_left_open(tmp_path, monkeypatch):
    closed = []
    monkeypatch.setattr("shoal.kv.tiers.disk.DiskTier.close", lambda tier: closed.append(tier))
    [kind] = [kind for kind in TIERS if kind.name == "disk"]
    disk = config_of(kind, tmp_path)
    with pytest.raises(ConfigError, match="kv_store"):
        open_tiers(replace(disk, kv_store="nonsense://x"), place())
    assert len(closed) == 1
    monkeypatch.undo()
    closed[0].close()
