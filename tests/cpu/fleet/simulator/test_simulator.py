"""The simulated fleet: every request is answered once, the same input gives the same result, more is not worse,
and the router finds prefixes."""

import dataclasses
import itertools
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from shoal.cli.main import main
from shoal.errors import ConfigError
from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.planner.engine_profile import (
    DecodePoint,
    EngineProfile,
    PrefillPoint,
    ProfileData,
    write_profile,
)
from shoal.fleet.routing.policy import POLICIES, RouterWeights
from shoal.fleet.simulator.config import SimConfig, SimWorkers, read_sim_config
from shoal.fleet.simulator.simulator import Simulation
from shoal.fleet.simulator.timing import ProfileTiming, StepWork, find_timing, profile_of
from shoal.fleet.simulator.trace import (
    Trace,
    TraceRequest,
    make_customers,
    make_random,
    make_sine,
    merge_traces,
    read_trace,
    write_trace,
)

CUSTOMERS = make_customers(400, 30.0, num_customers=40, output_tokens=50, seed=2)
FILE = 'model = "qwen3-8b"\n[[workers]]\nrole = "both"\ncount = 2\n[sim]\ngpu = "h200"\n'
LINE = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}


def simulation(trace=CUSTOMERS, policy="kv", count=4, **options):
    options = {"cache_tokens": 100_000} | options
    return Simulation(SimConfig("qwen3-8b", workers=[SimWorkers(count)], policy=policy, **options), trace)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_policy_answers_every_request_once(policy):
    s = simulation(policy=policy)
    result = s.run()
    assert result.requests == result.completed == 400
    assert Counter(r.id for r in s.finished) == Counter(str(n) for n in range(400))
    for r in s.finished:
        asked = CUSTOMERS.requests[int(r.id)]
        assert r.num_generated == asked.output_length
        assert asked.timestamp_s == r.arrival_s < r.first_token_s <= r.end_s <= result.simulated_s + 1e-5
        assert 0 <= r.cached_tokens < asked.input_length
    assert all(s.router.active_requests.load(rank).active_requests == 0 for rank in s.workers)
    assert all(s.router.active_requests.load(rank).active_tokens == 0 for rank in s.workers)
    assert 0 < result.ttft_p50 <= result.ttft_p90 and 0 <= result.hit_rate <= CUSTOMERS.ideal_hit_rate
    assert result.throughput == pytest.approx(400 * 50 / result.simulated_s, rel=1e-4)
    assert result.gpu_hours == pytest.approx(4 * result.simulated_s / 3600, rel=1e-4)


def assert_known(index, rank, worker):
    """The index has each block of the worker's device and host memory, and no other."""
    device, host = worker.cache.blocks(), set() if worker.host is None else worker.host.blocks()
    assert index.num_blocks(rank) == len(device) + len(host)
    assert all(index.block_of(rank, block) is not None for block in device | host)


def test_the_index_knows_exactly_what_the_workers_have():
    s = simulation(cache_tokens=60_000)
    s.run()
    for rank, worker in s.workers.items():
        assert_known(s.router.indexer, rank, worker)


@pytest.mark.parametrize("policy", ["kv", "random", "power_of_two"])
def test_a_seed_repeats_a_run(policy):
    one, two = (simulation(policy=policy, seed=1) for _ in range(2))
    assert one.run() == two.run()
    assert [(r.id, r.end_s) for r in one.finished] == [(r.id, r.end_s) for r in two.finished]


def test_another_seed_draws_otherwise():
    assert simulation(policy="random", seed=1).run() != simulation(policy="random", seed=2).run()


def test_the_order_of_hashes_and_dictionaries_has_no_part_in_the_result(tmp_path):
    """Python draws the order of sets of texts anew in each process, unless it has a seed."""
    write_trace(tmp_path / "trace.jsonl", make_customers(150, 20.0, block_size=240).requests)
    (tmp_path / "sim.toml").write_text(FILE + "block_size = 240\n")
    command = [sys.executable, "-m", "shoal", "sim", "sim.toml", "--trace", "trace.jsonl", "--json"]
    root = str(Path(__file__).parents[4])
    results = {
        subprocess.run(
            command,
            cwd=tmp_path,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": root},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(results) == 1


@pytest.mark.parametrize("policy", ["kv", "round_robin", "least_loaded"])
def test_more_workers_are_not_slower(policy):
    results = [simulation(policy=policy, count=count).run() for count in (2, 4, 8)]
    for fewer, more in itertools.pairwise(results):
        assert more.ttft_p90 <= fewer.ttft_p90 and more.simulated_s <= fewer.simulated_s


def test_more_load_is_not_quicker():
    results = [simulation(make_random(300, rate)).run() for rate in (2.0, 20.0, 200.0)]
    assert results[0].ttft_p90 <= results[1].ttft_p90 <= results[2].ttft_p90
    assert results[0].itl_p99 <= results[1].itl_p99 <= results[2].itl_p99


def test_a_larger_cache_finds_more():
    hits = [simulation(cache_tokens=tokens).run().hit_rate for tokens in (30_000, 60_000, 400_000)]
    assert hits[0] < hits[1] < hits[2]


def test_one_worker_with_endless_cache_finds_all_that_there_is_but_what_is_still_computed():
    trace = make_customers(300, 1.0, num_customers=20, output_tokens=5)
    result = simulation(trace, count=1, cache_tokens=10_000_000).run()
    assert result.hit_rate == pytest.approx(trace.ideal_hit_rate, abs=0.01)


def test_routing_by_prefix_finds_more_and_answers_sooner_than_routing_by_chance():
    results = {policy: simulation(policy=policy).run() for policy in ("kv", "kv_approx", "random")}
    for policy in ("kv", "kv_approx"):
        assert results[policy].hit_rate > 1.2 * results["random"].hit_rate
        assert results[policy].ttft_p90 < results["random"].ttft_p90


def test_sessions_stay_with_their_workers():
    s = simulation(policy="affinity", count=8, cache_tokens=1_000_000)
    s.run()
    misses = sum(r.cached_tokens == 0 for r in s.finished)
    assert 40 <= misses < 60  # each of 40 customers' contexts is computed once, or twice at the same time


def test_late_events_cost_little_as_decisions_stand_for_them():
    # A customer comes back after some 13 s on average, when the decision is no longer remembered.
    trace = make_customers(400, 3.0, num_customers=40, output_tokens=50, seed=2)
    delays = (0.0, 500.0, 60_000.0)
    at_once, late, too_late = (simulation(trace, event_delay_ms=delay).run() for delay in delays)
    assert at_once.completed == late.completed == too_late.completed == 400
    assert late.hit_rate > 0.9 * at_once.hit_rate
    assert too_late.hit_rate < 0.9 * at_once.hit_rate


def test_requests_of_one_instant_are_all_answered():
    requests = [TraceRequest(1.0, 700, 1, [n]) for n in range(50)]
    assert simulation(Trace(requests, 512)).run().completed == 50


def test_what_a_trace_generator_makes_is_read_back(tmp_path):
    write_trace(tmp_path / "t.jsonl", CUSTOMERS.requests)
    read = read_trace(tmp_path / "t.jsonl", CUSTOMERS.block_size)
    begin_s = CUSTOMERS.requests[0].timestamp_s
    for one, two in zip(read.requests, CUSTOMERS.requests, strict=True):
        assert one.timestamp_s == pytest.approx(two.timestamp_s - begin_s)
        assert (one.input_length, list(one.hash_ids), one.session) == (
            two.input_length,
            list(two.hash_ids),
            two.session,
        )


def test_made_customers_share_their_contexts_and_nothing_else():
    uses = Counter(block for r in CUSTOMERS.requests for block in r.hash_ids)
    shared = [block for block, count in uses.items() if count > 1]
    assert len(shared) == 40 * 6000 // 240
    assert {len(r.hash_ids) * 240 for r in CUSTOMERS.requests} == {7200}
    assert CUSTOMERS.requests[-1].timestamp_s == pytest.approx(400 / 30.0, rel=0.15)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "Expecting property name"),
        ("[1]", "must be one request as a JSON object"),
        (json.dumps({k: v for k, v in LINE.items() if k != "hash_ids"}), "'hash_ids' is missing"),
        (json.dumps(LINE | {"timestamp": -1}), "timestamp must be milliseconds from 0 to 1e15, got -1"),
        (
            json.dumps(LINE | {"timestamp": float("nan")}),
            "timestamp must be milliseconds from 0 to 1e15, got nan",
        ),
        (json.dumps(LINE | {"output_length": 0}), "output_length must be a positive number of tokens, got 0"),
        (
            json.dumps(LINE | {"input_length": 1.5}),
            "input_length must be a positive number of tokens, got 1.5",
        ),
        (json.dumps(LINE | {"hash_ids": ["a", 2]}), "hash_ids must be a list of integers"),
        (
            json.dumps(LINE | {"hash_ids": []}),
            "input_length 600 must have 2 hash_ids with blocks of 512 tokens, got 0",
        ),
        (json.dumps(LINE | {"hash_ids": [1, 2, 3]}), "must have 2 hash_ids with blocks of 512 tokens, got 3"),
        (json.dumps(LINE | {"session": 7}), "session must be text, got 7"),
    ],
)
def test_a_broken_line_of_a_trace_is_named(tmp_path, line, wrong):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n\n{line}\n")
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert f"{path}, line 3: " in str(error.value) and wrong in str(error.value)


def test_a_trace_without_requests_or_without_a_file_is_a_mistake(tmp_path):
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "nowhere"):
        with pytest.raises(ConfigError, match=name):
            read_trace(tmp_path / name)


def test_a_trace_out_of_order_is_put_into_order(tmp_path):
    rng = random.Random(0)
    times = [rng.randrange(10_000) for _ in range(50)]
    (tmp_path / "t").write_text("".join(json.dumps(LINE | {"timestamp": t}) + "\n" for t in times))
    read = read_trace(tmp_path / "t")
    assert [r.timestamp_s * 1000 for r in read.requests] == pytest.approx(
        [time - min(times) for time in sorted(times)]
    )
    assert read.requests[0].hash_ids == [1]  # the second block of 600 tokens is not full


def test_times_count_from_the_first_request_of_a_trace(tmp_path):
    """Regression: with times of a clock, a planner first observed an idle fleet for fifty years."""
    for name, begin in (("early", 0), ("late", 1_700_000_000_000)):
        lines = [json.dumps(LINE | {"timestamp": begin + time}) for time in (2000, 0, 500)]
        (tmp_path / name).write_text("\n".join(lines))
    config = SimConfig("qwen3-8b", planner=PlannerConfig(enabled=True))
    early, late = (Simulation(config, read_trace(tmp_path / name)).run() for name in ("early", "late"))
    assert dataclasses.asdict(late) == pytest.approx(dataclasses.asdict(early), rel=1e-4)
    assert late.simulated_s < 10


def test_a_trace_and_a_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps(LINE) + "\n", encoding="utf-8-sig")
    (tmp_path / "sim.toml").write_text(FILE, encoding="utf-8-sig")
    assert len(read_trace(tmp_path / "t.jsonl").requests) == 1
    assert read_sim_config(tmp_path / "sim.toml").model == "qwen3-8b"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("model = ", "cannot be read"),
        ("[sim]", '"model" is missing'),
        (FILE.replace("qwen3-8b", "qwen9"), "cannot simulate model 'qwen9'; supported: qwen3-0.6b, "),
        (FILE.replace("h200", "tpu"), "cannot simulate gpu 'tpu'; supported: h200"),
        (FILE.replace("gpu", "gpus"), "unknown key 'gpus' in [sim]; did you mean 'gpu'?"),
        (FILE.replace("count", "number"), "unknown key 'number' in [[workers]]; choose one of count, "),
        (FILE.replace("model", "modell"), "unknown key 'modell' in the file; did you mean 'model'?"),
        (FILE.replace("2", '"2"', 1), "count must be of the type int, got '2'"),
        (FILE.replace('"both"', '"prefill"'), "has prefill workers and no decode workers"),
        (FILE.replace('"both"', '"all"'), "role must be one of both, prefill, decode, got 'all'"),
        (FILE + "transfer_GB_s = 0\n", "transfer_GB_s must be above 0, got 0"),
        (FILE + "[[workers]]\nrole = 'decode'\n", "has workers with the roles both and decode"),
        (FILE + "[[workers]]\nmodel = 'qwen3-32b'\ncount = 0\n", "'qwen3-32b' must have a worker"),
        (
            FILE.replace("count = 2", "options = {kv_host_bytes = -1}"),
            "kv_host_bytes must be at least 0, got -1",
        ),
        (FILE + "cache_tokens = 3\n", "cache_tokens must hold one block of 512 tokens, got 3"),
        (FILE + "block_size = 20\n", "block_size must be a multiple of 16 tokens, got 20"),
        (FILE + "event_delay_ms = -1\n", "event_delay_ms must be >= 0, got -1"),
        (FILE.replace("count = 2", "count = 0"), "must have a worker"),
        (FILE.replace("count = 2", "options = {max_num_seqs = 0}"), "max_num_seqs must be from 1"),
        (FILE.replace("count = 2", "options = {swap = 0}"), "unknown key 'swap' in options of [[workers]]"),
        (FILE + "[router]\npolicy = 'best'\n", "policy must be one of kv, kv_approx"),
        (FILE + "[router]\nweight = 1\n", "unknown key 'weight' in [router]"),
        (
            FILE + "[router]\nprefill_load_scale = 'x'\n",
            "prefill_load_scale must be of the type float, got 'x'",
        ),
        ("model = 'qwen3-8b'\nworkers = 3\n", "workers must be a list of tables"),
        ("model = 'qwen3-8b'\nsim = 3\n", "sim must be a table, got 3"),
    ],
)
def test_a_mistake_in_the_file_is_told_with_what_there_is(tmp_path, text, wrong):
    path = tmp_path / "sim.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        read_sim_config(path)
    assert str(path) in str(error.value) and wrong in str(error.value)


def test_what_the_command_says_goes_before_the_file(tmp_path):
    path = tmp_path / "sim.toml"
    path.write_text(FILE + "[router]\npolicy = 'random'\nseed = 3\nprefill_load_scale = 2\n")
    read = read_sim_config(path)
    assert (read.policy, read.seed, read.workers) == ("random", 3, [SimWorkers(2)])
    assert read.weights == RouterWeights(prefill_load_scale=2)
    given = read_sim_config(path, policy="kv", num_workers=5, seed=0)
    assert given == dataclasses.replace(read, policy="kv", workers=[SimWorkers(5)], seed=0)
    path.write_text(FILE + "[[workers]]\n")
    with pytest.raises(ConfigError, match="--workers needs a file with one"):
        read_sim_config(path, num_workers=5)


def test_the_command_prints_a_table_or_one_json_object(tmp_path, capsys):
    (tmp_path / "sim.toml").write_text(FILE)
    (tmp_path / "t.jsonl").write_text(json.dumps(LINE) + "\n")
    words = ["sim", str(tmp_path / "sim.toml"), "--trace", str(tmp_path / "t.jsonl")]
    assert main([*words, "--json", "--workers", "3", "--policy", "round_robin", "--seed", "4"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown) == [
        "requests",
        "completed",
        "throughput",
        "ttft_p50",
        "ttft_p90",
        "itl_p99",
        "hit_rate",
        "gpu_hours",
        "simulated_s",
        "goodput",
        "good_share",
        "host_hit_rate",
        "remote_share",
        "workers",
    ]
    assert main(words) == 0
    assert "first token, p90" in capsys.readouterr().out
    assert main([*words, "--policy", "best"]) == 1
    assert "best" in capsys.readouterr().err


def test_the_command_draws_load_workers_and_waits(tmp_path, capsys):
    """Also of a fleet that no planner sizes."""
    pytest.importorskip("matplotlib")
    (tmp_path / "sim.toml").write_text(FILE)
    (tmp_path / "t.jsonl").write_text(json.dumps(LINE) + "\n")
    words = ["sim", str(tmp_path / "sim.toml"), "--trace", str(tmp_path / "t.jsonl")]
    for name, more in (("x.png", []), ("x.jpg", ["--planner", "load"]), ("x.none", []), ("x", [])):
        file = tmp_path / name
        assert main([*words, *more, "--plot", str(file)]) == 0
        assert file.read_bytes().startswith(b"\x89PNG")
    assert main([*words, "--plot", str(tmp_path / "none" / "x.png")]) == 1
    assert "x.png" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text, words, wrong",
    [
        ("", ["--max-gpu-budget", "4"], "--max-gpu-budget 4 is for a planner, and none is enabled"),
        ("", ["--planner", "load", "--max-gpu-budget", "1"], "at first have 2 GPUs, and max_gpu_budget is 1"),
        (
            "[[workers]]\noptions = { tensor_parallel_size = 2 }",
            [],
            "tensor_parallel_size 2 is not simulated",
        ),
        ("[planner]\ndecode_engine_num_gpu = 2", ["--planner", "load"], "counts 2 GPUs"),
    ],
)
def test_gpus_that_would_be_miscounted_are_named(tmp_path, capsys, text, words, wrong):
    (tmp_path / "sim.toml").write_text(FILE + text + "\n")
    (tmp_path / "t.jsonl").write_text(json.dumps(LINE) + "\n")
    assert main(["sim", str(tmp_path / "sim.toml"), "--trace", str(tmp_path / "t.jsonl"), *words]) == 1
    assert wrong in capsys.readouterr().err


def test_a_request_beyond_every_cache_is_a_mistake_that_names_it():
    with pytest.raises(ConfigError, match="request 0 needs"):
        simulation(Trace([TraceRequest(0.0, 200_000, 1, [])], 512)).run()


def planned(trace, count=1, **planner):
    config = SimConfig(
        "qwen3-8b",
        workers=[SimWorkers(count)],
        cache_tokens=100_000,
        worker_start_s=5.0,
        planner=PlannerConfig(enabled=True, **planner),
    )
    return Simulation(config, trace)


def test_a_planner_follows_the_load_within_its_budget():
    rush = make_customers(600, 40.0, num_customers=40, output_tokens=150, seed=3).requests
    calm = make_customers(100, 0.3, num_customers=40, output_tokens=20, seed=4).requests
    later = [dataclasses.replace(each, timestamp_s=each.timestamp_s + 120.0) for each in calm]
    trace = Trace([*rush, *later], CUSTOMERS.block_size)
    s = planned(trace, decode_kv_scale_up_threshold=0.5, decode_kv_scale_down_threshold=0.1, max_gpu_budget=3)
    result = s.run()
    assert result.completed == 700
    wanted = [decision.desired["both"] for decision in s.decisions]
    assert max(wanted) == 3 and wanted[-1] == 1 and len(s.workers) == 1
    assert result.gpu_hours < 3 * result.simulated_s / 3600


def test_an_adviser_changes_nothing():
    advised, alone = (
        planned(CUSTOMERS, no_operation=True, decode_kv_scale_up_threshold=0.6),
        simulation(count=1),
    )
    assert advised.run() == alone.run()
    assert any(decision.changes for decision in advised.decisions)


def test_a_planner_without_a_least_number_keeps_one_worker_that_answers():
    """Such a setting was refused here and taken by a fleet, which then had no worker left."""
    late = [dataclasses.replace(each, timestamp_s=each.timestamp_s + 60.0) for each in CUSTOMERS.requests]
    s = planned(Trace(late, CUSTOMERS.block_size), count=2, min_endpoint=0)
    assert s.run().completed == len(late)
    assert min(sum(sizes.values()) for _, sizes in s.sizes) == 1


# Prefill and decode apart


LONG = make_sine(30, low_rate=4, high_rate=12, period_s=30, output_tokens=100, seed=1)


def apart(trace=LONG, prefill=2, decode=1, **options):
    groups = [SimWorkers(prefill, role="prefill"), SimWorkers(decode, role="decode")]
    return Simulation(SimConfig("qwen3-8b", workers=groups, **options), trace)


def test_prompts_are_computed_apart_and_every_request_is_answered_once():
    s = apart()
    result = s.run()
    assert result.completed == len(LONG.requests) and result.remote_share > 0.9
    assert Counter(r.id for r in s.finished) == Counter(str(n) for n in range(len(LONG.requests)))
    for r in s.finished:
        asked = LONG.requests[int(r.id)]
        assert r.num_generated == asked.output_length
        assert asked.timestamp_s == r.arrival_s < r.first_token_s < r.end_s
    for rank, worker in s.workers.items():
        assert worker.is_idle and worker.cache.used_pages == 0
        assert (
            s.router.active_requests.load(rank).active_requests
            == s.router.active_requests.load(rank).active_tokens
            == 0
        )


def test_the_index_knows_what_workers_of_both_roles_have():
    s = apart(cache_tokens=40_000)
    s.run()
    for rank, worker in s.workers.items():
        assert_known(s.router.indexer, rank, worker)


def test_tokens_come_more_evenly_where_prompts_are_computed_apart():
    together = Simulation(SimConfig("qwen3-8b", workers=[SimWorkers(3)]), LONG).run()
    assert apart().run().itl_p99 < 0.5 * together.itl_p99


def test_prompts_that_wait_for_a_prefill_worker_are_computed_where_they_decode_when_the_last_one_goes():
    """They waited for ever."""
    planner = PlannerConfig(
        enabled=True,
        min_endpoint=0,
        checks_remaining_load=False,
        prefill_queue_scale_down_threshold=100.0,
        prefill_queue_scale_up_threshold=1000.0,
    )
    rush = make_sine(12, low_rate=30, high_rate=31, period_s=30, output_tokens=100, seed=1)
    s = apart(rush, prefill=1, planner=planner, max_prefill_queue_size=1000)
    assert s.run().completed == len(rush.requests)
    assert s.decisions[0].desired["prefill"] == 0
    for rank, worker in s.workers.items():
        assert worker.is_idle and s.router.active_requests.load(rank).active_requests == 0


def test_a_slow_link_costs_time_between_the_first_two_tokens():
    quick, slow = (apart(transfer_GB_s=speed) for speed in (100.0, 1.0))
    assert quick.run().ttft_p50 == pytest.approx(slow.run().ttft_p50, rel=0.2)
    mean = lambda s: sum(r.end_s - r.first_token_s for r in s.finished) / len(s.finished)  # noqa: E731
    bytes_per_prompt = 3000 * 147_456
    assert mean(slow) - mean(quick) > 0.8 * (bytes_per_prompt / 1e9 - bytes_per_prompt / 100e9)


def test_short_prompts_and_those_before_a_full_queue_stay_where_they_decode():
    assert apart(max_local_prefill_length=3000).run().remote_share == 0.0
    assert apart(max_prefill_queue_size=0).run().remote_share == 0.0
    some = apart(
        prefill=1, decode=2, max_prefill_queue_size=1, trace=make_sine(20, low_rate=30, high_rate=40)
    )
    assert 0.05 < some.run().remote_share < 0.95


def test_what_the_decode_worker_has_cached_is_not_computed_apart():
    turns = [TraceRequest(float(n), 3000, 20, range(5)) for n in range(10)]
    s = apart(Trace(turns, 512))
    assert s.run().remote_share == 0.1


def test_a_request_of_one_token_ends_where_its_prompt_is_computed():
    trace = Trace([TraceRequest(0.1 * n, 3000, 1, [n]) for n in range(20)], 512)
    result = apart(trace).run()
    assert result.completed == 20 and result.remote_share == 1.0


# Host memory


def test_what_left_the_device_is_found_in_host_memory():
    trace = make_customers(400, 4.0, num_customers=40, output_tokens=20, seed=2)
    none, some, much = (
        Simulation(
            SimConfig("qwen3-8b", workers=[SimWorkers(1, kv_host_bytes=size)], cache_tokens=60_000), trace
        )
        for size in (0, 10 << 30, 100 << 30)
    )
    results = [s.run() for s in (none, some, much)]
    assert results[0].host_hit_rate == 0.0 < results[1].host_hit_rate < results[2].host_hit_rate
    assert results[0].hit_rate < results[1].hit_rate < results[2].hit_rate
    assert results[2].ttft_p90 < results[0].ttft_p90
    for s in (none, some, much):
        [(rank, worker)] = s.workers.items()
        assert worker.is_idle and worker.cache.used_pages == 0
        assert_known(s.router.indexer, rank, worker)


def test_a_host_tier_of_several_workers_repeats_itself():
    trace = make_customers(200, 10.0, num_customers=40, output_tokens=20, seed=2)

    def once():
        config = SimConfig("qwen3-8b", workers=[SimWorkers(3, kv_host_bytes=20 << 30)], cache_tokens=60_000)
        return Simulation(config, trace).run()

    assert once() == once()


# Several models


TWO = [SimWorkers(1, model="qwen3-8b", name="a"), SimWorkers(1, model="qwen3-0.6b", name="b")]


def test_models_have_workers_of_their_own():
    traces = [make_random(50, 5.0, seed=seed) for seed in range(2)]
    named = [
        Trace([dataclasses.replace(each, model=name) for each in trace.requests], trace.block_size)
        for name, trace in zip("ab", traces)
    ]
    s = Simulation(SimConfig("qwen3-8b", workers=TWO), merge_traces(*named))
    assert s.run().completed == 100
    [first], [second] = (model.roles["both"].workers for model in s.models.values())
    assert first != second and all(s.models[name].traffic.num_ended == 50 for name in "ab")


def test_a_request_for_no_model_is_a_mistake_and_without_one_is_for_the_first():
    s = Simulation(SimConfig("qwen3-8b", workers=TWO), Trace([TraceRequest(0.0, 100, 5, [])], 512))
    s.run()
    assert s.models["a"].traffic.num_ended == 1
    with pytest.raises(ConfigError, match="must be for one of a, b, got model 'c'"):
        trace = Trace([TraceRequest(0.0, 100, 5, [], model="c")], 512)
        Simulation(SimConfig("qwen3-8b", workers=TWO), trace).run()


def test_a_trace_names_models(tmp_path):
    asked = TraceRequest(0.0, 600, 5, [1], model="b")
    write_trace(tmp_path / "t", [dataclasses.replace(asked, hash_ids=[1, 2])])
    assert read_trace(tmp_path / "t").requests == [asked]


# Planners


SLA = PlannerConfig(enabled=True, mode="sla", startup_time=5.0, max_gpu_budget=8)
SINE = make_sine(120, low_rate=5, high_rate=40, period_s=60, output_tokens=40, seed=2)


@pytest.mark.parametrize("mode", ["load", "sla"])
@pytest.mark.parametrize("is_apart", [False, True])
def test_a_planner_sizes_roles_and_never_exceeds_its_budget(mode, is_apart):
    roles = ("prefill", "decode") if is_apart else ("both",)
    planner = dataclasses.replace(SLA, mode=mode, max_gpu_budget=5, prefill_queue_scale_up_threshold=1.0)
    config = SimConfig(
        "qwen3-8b",
        workers=[SimWorkers(1, role=role) for role in roles],
        worker_start_s=5.0,
        max_prefill_queue_size=100,
        planner=planner,
    )
    s = Simulation(config, SINE)
    result = s.run()
    assert result.completed == len(SINE.requests)
    totals = [sum(sizes.values()) for _, sizes in s.sizes]
    assert len(roles) == min(totals) < max(totals) <= 5
    assert result.workers == pytest.approx(result.gpu_hours * 3600 / result.simulated_s, rel=1e-3)


def test_a_planner_for_latency_serves_more_within_its_targets_than_a_fixed_fleet_of_its_mean_size():
    trace = make_sine(180, low_rate=2, high_rate=45, period_s=180, output_tokens=30, seed=2)

    def fleet(count, enabled):
        planner = dataclasses.replace(SLA, enabled=enabled, startup_time=2.0)
        config = SimConfig("qwen3-8b", workers=[SimWorkers(count)], worker_start_s=2.0, planner=planner)
        return Simulation(config, trace).run()

    planned = fleet(1, True)
    assert planned.good_share > 1.5 * fleet(round(planned.workers), False).good_share


def test_simulated_workers_change_their_role_and_every_request_is_answered_once():
    """Prompts are short, so prefill workers have nothing to do, and decode caches are full."""
    trace = make_sine(120, low_rate=4, high_rate=4, input_tokens=512, output_tokens=400, seed=1)

    def run(change_roles):
        planner = PlannerConfig(
            enabled=True,
            max_gpu_budget=4,
            change_roles=change_roles,
            decode_kv_scale_up_threshold=0.3,
            decode_kv_scale_down_threshold=0.01,
        )
        config = SimConfig(
            "qwen3-8b",
            workers=[SimWorkers(3, role="prefill"), SimWorkers(1, role="decode")],
            worker_start_s=60.0,
            cache_tokens=5_120,
            max_local_prefill_length=10_000,
            planner=planner,
        )
        s = Simulation(config, trace)
        return s, s.run()

    simulation, result = run(change_roles=True)
    assert result.completed == len(trace.requests)
    assert any(decision.moves for decision in simulation.decisions)
    assert simulation.sizes[-1][1] == {("qwen3-8b", "prefill"): 1, ("qwen3-8b", "decode"): 3}
    assert {sum(sizes.values()) for _, sizes in simulation.sizes} == {4}, "nobody starts"
    plain, restarted = run(change_roles=False)
    assert not any(decision.moves for decision in plain.decisions)
    assert result.ttft_p90 < restarted.ttft_p90


def test_models_share_a_budget():
    traces = [
        make_sine(60, low_rate=20, high_rate=40, output_tokens=40, seed=seed, model=name)
        for seed, name in enumerate("ab")
    ]
    groups = [SimWorkers(1, model="qwen3-8b", name=name) for name in "ab"]
    config = SimConfig(
        "qwen3-8b", workers=groups, worker_start_s=2.0, planner=dataclasses.replace(SLA, max_gpu_budget=5)
    )
    s = Simulation(config, merge_traces(*traces))
    assert s.run().completed == sum(len(trace.requests) for trace in traces)
    assert max(sum(sizes.values()) for _, sizes in s.sizes) == 5
    assert all(max(sizes[name, "both"] for _, sizes in s.sizes) >= 2 for name in "ab")


# Times of a measured profile


def test_a_profile_of_simulated_times_simulates_the_same(tmp_path):
    file = tmp_path / "p.json"
    tokens = find_timing("h200", "qwen3-8b").cache_tokens(0.9)
    lengths = [64 * 2**number for number in range(9)]
    usages = [0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.9]
    data = profile_of(
        "h200", "qwen3-8b", 1024, tokens, input_lengths=lengths, context_lengths=lengths, kv_usages=usages
    )
    write_profile(file, data)
    trace = make_sine(60, low_rate=4, high_rate=12, input_tokens=2000, output_tokens=100, seed=3)
    for policy in ("kv", "round_robin"):
        by_gpu = SimConfig("qwen3-8b", workers=[SimWorkers(2)], policy=policy)
        by_profile = dataclasses.replace(by_gpu, model="mine", profile=str(file))
        known, found = (Simulation(config, trace).run() for config in (by_gpu, by_profile))
        assert found.completed == known.completed == len(trace.requests)
        assert found.ttft_p50 == pytest.approx(known.ttft_p50, rel=0.1)
        assert found.itl_p99 == pytest.approx(known.itl_p99, rel=0.1)
        assert found.throughput == pytest.approx(known.throughput, rel=0.02)


def test_a_worker_that_was_measured_on_two_gpus_has_two(tmp_path):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    data = profile_of("h200", "qwen3-8b", 1024, 700_000)
    write_profile(one, data)
    write_profile(two, msgspec.structs.replace(data, num_gpus=2))
    small, large = (
        Simulation(SimConfig("mine", profile=str(file)), LONG).run().gpu_hours for file in (one, two)
    )
    assert large == pytest.approx(2 * small, rel=1e-4)
    with pytest.raises(ConfigError, match=r"counts 1 GPUs for a worker of the role both, and .* have 2"):
        SimConfig("mine", profile=str(two), planner=PlannerConfig(enabled=True))


def chunks_of(*chunks):
    """A step of nothing but these: tokens of the prompt before it, and its own."""
    return StepWork(
        num_chunks=len(chunks),
        chunk_tokens=sum(size for _, size in chunks),
        chunk_pairs=sum(size * before + size * (size + 1) // 2 for before, size in chunks),
    )


def test_a_prompt_in_chunks_takes_what_the_profile_says_of_the_whole():
    data = profile_of("h200", "qwen3-8b", 1024, 700_000)
    timing, whole = ProfileTiming(EngineProfile(data)), EngineProfile(data).ttft_s(8192)
    chunks, before = [], 0
    for _ in range(4):
        chunks.append(timing.step(chunks_of((before, 2048))).first_s)
        before += 2048
    idle = timing.step(StepWork(1, 2048, 2048)).first_s
    assert sum(chunks) == pytest.approx(whole + 3 * idle, rel=0.02)  # each is a step


@pytest.mark.parametrize("lengths", [(300, 100), (100, 50), (50, 30), (900, 20)])
def test_prompts_of_different_lengths_take_together_about_what_they_take_apart(lengths):
    """Prompts that are shorter than the shortest that was measured had cost as much as that, or nothing."""
    data = ProfileData(
        model="m",
        machine="here",
        num_gpus=1,
        max_kv_tokens=10_000,
        max_num_seqs=100,
        prefill=[PrefillPoint(100, 0.03), PrefillPoint(1000, 0.21)],
        decode=[DecodePoint(100, 0.1, 0.02, 500.0)],
    )
    timing, idle = ProfileTiming(EngineProfile(data)), 0.02
    together = timing.step(chunks_of(*((0, length) for length in lengths))).first_s - idle
    apart = sum(timing.step(chunks_of((0, length))).first_s - idle for length in lengths)
    assert 0 < together == pytest.approx(apart, rel=0.25)


def test_a_profile_says_nothing_of_blocks_that_move(tmp_path):
    file = tmp_path / "p.json"
    write_profile(file, profile_of("h200", "qwen3-8b", 1024, 700_000))
    for workers in ([SimWorkers(1), SimWorkers(1, role="prefill")], [SimWorkers(1, kv_host_bytes=1 << 30)]):
        with pytest.raises(ConfigError, match="has no times of KV blocks"):
            SimConfig("mine", profile=str(file), workers=workers)
    with pytest.raises(ConfigError, match="profile needs a fleet with one model, got several"):
        SimConfig("mine", profile=str(file), workers=[SimWorkers(1, name="a"), SimWorkers(1, name="b")])
