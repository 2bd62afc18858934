"""The tiers of one engine over its life, without a model and without a device: fake ranks that obey commands, and fake tiers whose answers a test sets."""

import ast
import logging
from collections import deque
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import shoal
from shoal.api import Request
from shoal.config import EngineConfig
from shoal.engine.offload.tiers import KvTiers
from shoal.engine.resolve import resolve_config
from shoal.engine.runner import commands
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.step_part import Parts
from shoal.errors import ConfigError
from shoal.files.io_threads import done
from shoal.kv.tiers.block_file import BlockMeta
from shoal.kv.tiers.registry import TIERS, first_read_s
from shoal.kv.tiers.tier import TierStats
from shoal.kv_events import CPU, STORAGE
from shoal.models.config_json import config_from_json
from shoal.sampling_params import SamplingParams
from shoal.stats import Stats

BLOCK_BYTES = 1 << 16
MODEL = config_from_json(
    dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
    ),
    "config.json",
)


class FakeTier:
    """A tier with the blocks `keys`. With `must_be_asked`, lookups end when the test says so."""

    def __init__(self, must_be_asked=False):
        self.must_be_asked, self.keys, self.events = must_be_asked, set(), []
        self.asked: deque[Future[int]] = deque()

    def contains(self, key):
        return key in self.keys

    def look_up(self, keys):
        self.asked.append(Future())
        return self.asked[-1] if self.must_be_asked else done(0)

    def take_events(self):
        events, self.events = self.events, []
        return events

    def stats(self):
        return TierStats(
            blocks=3,
            num_bytes=300,
            capacity_bytes=1000,
            capacity_blocks=10,
            pending=0,
            written=0,
            read=0,
            evicted=0,
            refused=0,
            problems={},
        )


class FakeRanks:
    """Notes what it is asked for. `measured` has each rank's figures."""

    def __init__(self, measured, tiers):
        self.size, self.measured, self.tiers = len(measured), measured, tiers
        self.error = None  # raised by the next opening of tiers
        self.asked = []
        self.ready = [(0, 16)]  # host blocks, reported once
        self.runner = SimpleNamespace(
            cache=SimpleNamespace(plan=SimpleNamespace(block_bytes=BLOCK_BYTES)),
            states=SimpleNamespace(plan=SimpleNamespace(add_to=lambda fingerprint: fingerprint)),
            model_config=MODEL,
            kv=SimpleNamespace(
                tiers={},
                poll=lambda: dict(ready=[self.ready.pop()] if self.ready else [], done=[]),
                abandon=lambda: None,
            ),
        )

    def call(self, command, *args):
        self.asked.append((command, *args))
        if command is commands.KV_CLOSE_TIERS:
            self.runner.kv.tiers.clear()
        if command is commands.KV_OPEN_TIERS:
            if self.error is not None:
                raise self.error
            self.runner.kv.tiers.update(self.tiers)
        answers = {commands.KV_MEASURE: self.measured, commands.CHECKSUMS: [{}] * self.size}
        return answers.get(command, [None] * self.size)

    send = call

    def ask_others(self, command, *args):
        return None

    def commands(self):
        return [command for command, *_ in self.asked]


class Listener:
    """KV events as they are published."""

    def __init__(self):
        self.told = []

    def stored(self, keys, parent, token_ids, adapter, cache_salt, tier, group, window):
        self.told.append(("stored", *keys, tier))

    def removed_below(self, key, tier, group):
        self.told.append(("removed", key, tier))

    def cleared(self, tier):
        self.told.append(("cleared", tier))

    def flush(self):
        pass


def open_tiers(measured=((0.001, 0.0001),), tiers=None, events=None, **options):
    """KvTiers over fake ranks, by default with a tier below the host."""
    options = (
        dict(kv_host_bytes=16 * len(measured) * BLOCK_BYTES, kv_disk_path="/kv", kv_disk_bytes=1) | options
    )
    config = EngineConfig("model", device="cpu", dtype="float32", max_num_batched_tokens=64, **options)
    config = resolve_config(config, MODEL)
    config = replace(config, tensor_parallel_size=len(measured))
    ranks = FakeRanks(list(measured), {"disk": FakeTier()} if tiers is None else tiers)
    scheduler = Scheduler(
        num_blocks=32, block_size=16, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256
    )
    tiers = KvTiers(config, ranks, scheduler, events)
    Parts(scheduler).add(tiers)
    return tiers, ranks, scheduler


def request(name="a", **options):
    return Request(name, list(range(100)), SamplingParams(**options))


def stats_of(tiers):
    stats = Stats()
    tiers.fill_in(stats)
    return stats


def test_costs_are_measured_before_anything_else_runs_on_the_device():
    _, ranks, _ = open_tiers()
    assert ranks.commands()[:2] == [commands.KV_OPEN, commands.KV_MEASURE]


def test_the_slowest_rank_sets_the_first_rates():
    tiers, _, _ = open_tiers(measured=((0.002, 1e-5), (0.001, 3e-5)))
    stats = stats_of(tiers)
    assert stats.kv_compute_seconds_per_block == 16 * 0.002
    assert stats.kv_tiers["host"].fetch_seconds_per_block == 3e-5
    assert stats.kv_tiers["disk"].fetch_seconds_per_block == 3e-5 + first_read_s("disk", BLOCK_BYTES)


def test_a_first_measurement_that_no_machine_would_give_is_bounded_and_logged(caplog):
    tiers, _, _ = open_tiers(measured=((0.001, 5.0),))
    assert stats_of(tiers).kv_tiers["host"].fetch_seconds_per_block < 0.001
    assert "more than is plausible" in caplog.text


def test_figures_of_a_tier_are_those_of_all_ranks():
    tiers, _, _ = open_tiers(measured=((0.001, 1e-5),) * 2)
    stats = stats_of(tiers).kv_tiers
    assert (stats["disk"].used_bytes, stats["disk"].capacity_bytes) == (600, 2000)
    assert stats["disk"].used_blocks == 3
    assert (stats["host"].used_bytes, stats["host"].capacity_bytes) == (0, 16 * 2 * BLOCK_BYTES)


def test_a_staging_area_is_no_tier():
    tiers, _, _ = open_tiers(kv_host_bytes=0)
    assert list(stats_of(tiers).kv_tiers) == ["disk"]


def test_host_memory_for_less_than_a_block_is_refused():
    with pytest.raises(ConfigError, match="kv_host_bytes 100 is less than one KV block"):
        open_tiers(kv_host_bytes=100)


def test_a_prompt_waits_for_tiers_that_must_be_asked_and_for_no_others():
    quick, slow = FakeTier(), FakeTier(must_be_asked=True)
    tiers, _, scheduler = open_tiers(tiers={"disk": quick, "store": slow})
    seq = scheduler.add(request())
    tiers.added(seq)
    assert not tiers.may_start(seq) and len(slow.asked) == 1 and not quick.asked
    tiers.before_schedule()
    assert scheduler.schedule() is None, "no answer yet"
    slow.asked[0].set_result(0)
    tiers.before_schedule()
    assert tiers.may_start(seq) and scheduler.schedule() is not None


@pytest.mark.parametrize("options", [dict(prompt_logprobs=1), dict(skip_reading_prefix_cache=True)], ids=str)
def test_a_prompt_that_is_computed_in_any_case_waits_for_no_tier(options):
    slow = FakeTier(must_be_asked=True)
    tiers, _, scheduler = open_tiers(tiers={"store": slow})
    seq = scheduler.add(request(**options))
    tiers.added(seq)
    assert tiers.may_start(seq) and not slow.asked


def test_new_weights_close_the_tiers_at_once_and_open_those_of_the_new_content_before_the_next_step():
    tiers, ranks, _ = open_tiers(events=(listener := Listener()))
    ranks.asked.clear()
    tiers.weights_change()
    tiers.weights_change()
    assert ranks.commands() == [commands.KV_CLOSE_TIERS] and not ranks.runner.kv.tiers
    assert listener.told == [("cleared", STORAGE)]
    tiers.before_schedule()
    tiers.before_schedule()
    assert ranks.commands()[1:] == [commands.CHECKSUMS, commands.KV_OPEN_TIERS]
    assert list(ranks.runner.kv.tiers) == ["disk"]


def test_an_engine_goes_on_without_tiers_that_cannot_be_opened_for_new_weights(caplog):
    tiers, ranks, scheduler = open_tiers()
    ranks.error = ConfigError("the folder is gone")
    tiers.weights_change()
    tiers.before_schedule()
    assert "no longer kept" in caplog.text and not ranks.runner.kv.tiers
    scheduler.add(request())
    assert scheduler.schedule() is not None
    assert stats_of(tiers).kv_tiers["disk"].used_bytes == 0


def test_a_reset_reaches_every_tier():
    tiers, ranks, _ = open_tiers(tiers={"disk": FakeTier(), "store": FakeTier()})
    ranks.asked.clear()
    tiers.after_reset()
    assert ranks.asked == [(commands.KV_FORGET, "disk", None), (commands.KV_FORGET, "store", None)]


def test_listeners_hear_what_the_host_and_the_tiers_below_have_stored_and_removed():
    tier = FakeTier()
    tiers, _, _ = open_tiers(tiers={"disk": tier}, events=(listener := Listener()))
    meta = BlockMeta(b"k" * 16, None, range(16))
    tiers.before_schedule()
    host = tiers.offloader.host
    host.release([host.put(host_block, meta) for host_block in host.take(1)])
    tier.events = [meta, b"g" * 16]
    tiers.before_schedule()
    tiers.before_schedule()
    assert listener.told == [
        ("stored", meta.key, CPU),
        ("stored", meta.key, STORAGE),
        ("removed", b"g" * 16, STORAGE),
    ]


def test_a_step_with_a_long_prompt_tells_how_quickly_prompts_are_computed():
    tiers, _, scheduler = open_tiers()
    scheduler.add(request())
    for _ in range(3):
        plan = SimpleNamespace(scheduled=[SimpleNamespace(num_tokens=64)], num_decodes=0)
        tiers.after_schedule(plan)
        tiers.completed(plan, seconds=0.064)
    assert stats_of(tiers).kv_compute_seconds_per_block == pytest.approx(16 * 0.001)
    before = stats_of(tiers).kv_compute_seconds_per_block
    for _ in range(9):
        plan = SimpleNamespace(scheduled=[SimpleNamespace(num_tokens=1)] * 4, num_decodes=4)
        tiers.after_schedule(plan)
        tiers.completed(plan, seconds=50.0)
    assert stats_of(tiers).kv_compute_seconds_per_block == before, "decodes say nothing about prompts"


def test_after_an_interrupt_the_scheduler_knows_of_the_new_offloader_alone():
    tiers, _, scheduler = open_tiers(events=(listener := Listener()))
    first = tiers.offloader
    tiers.start_anew()
    assert scheduler.blocks.fetches.sources == [tiers.offloader] and tiers.offloader is not first
    assert first not in scheduler.blocks.pool.listeners and tiers.offloader in scheduler.blocks.pool.listeners
    assert listener.told == [("cleared", CPU)]
    tiers.check()


def test_an_end_without_tiers_to_write_to_writes_nothing(caplog):
    caplog.set_level(logging.INFO)
    tiers, _, _ = open_tiers(tiers={}, kv_disk_path=None, kv_disk_bytes=None)
    tiers.flush()
    assert "wrote KV blocks" not in caplog.text


def test_no_tier_is_named_or_imported_outside_of_its_file_and_the_registry():
    """Else a new tier would have to be known in many places."""
    names, files = {kind.name for kind in TIERS}, {f"kv/tiers/{kind.name}.py" for kind in TIERS}
    package = Path(shoal.__file__).parent
    for path in [*package.glob("engine/**/*.py"), *package.glob("kv/**/*.py")]:
        relative = path.relative_to(package).as_posix()
        if relative in files | {"kv/tiers/registry.py"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant):
                assert node.value not in names, f"{relative}:{node.lineno} names the tier {node.value!r}"
            if isinstance(node, ast.ImportFrom):
                assert node.module not in {f"shoal.kv.tiers.{name}" for name in names}, (
                    f"{relative}:{node.lineno}"
                )
