"""KV blocks that go along with requests between real workers: from one that drains or stops, between workers
that do both, and of a prefix that another one has."""

import json
import signal

import pytest

from tests.forked_workers import ForkedProcesses
from tests.process.test_disagg_soak import MODES
from tests.process.test_fleet_workers import settled
from tests.tiny import write_model
from tests.waiting import eventually

PREFILL = "x-shoal-prefill-worker"
BOTH = json.dumps({"kv_role": "kv_both"})


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A router. Reading counts as quicker than computing, whatever the model."""
    folder = tmp_path_factory.mktemp("moves")
    with ForkedProcesses(folder) as running:
        running.settings = {"shoal.fleet.native.kv_transfers": {"OVERHEAD_S": -1.0}}
        # It is deep, so that a stream takes seconds, and does not end before it moves.
        running.model = write_model(folder, "qwen3", num_hidden_layers=32)
        running.route("--policy", "round_robin", "--max-local-prefill-length", 16, "--enable-p2p")
        yield running


def serve(fleet, name, role, *options):
    sizes = ("--max-num-seqs", 16, "--max-model-len", 512, "--kv-cache-memory-bytes", 100_000_000)
    names = ("--role", role, "--served-model-name", "tiny")
    fleet.serve(name, *names, *sizes, *options, model=fleet.model)


def ask(fleet, mode, prompt, max_tokens=160):
    options = {"include_usage": True}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **MODES[mode]}
    return fleet.stream("/v1/completions", **body, stream_options=options)


def loans(fleet, reason):
    name = f'shoal:router_kv_loans_total{{model_name="tiny",reason="{reason}"}} '
    lines = fleet.ask("/metrics")[1].splitlines()
    return sum(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def blocks_in(fleet, name):
    return fleet.workers()[name]["blocks_in"]


def answers(streams):
    return {mode: stream.answer() for mode, stream in streams.items()}


def prompt(number):
    return [(number * 37 + i * i) % 256 for i in range(300)]


def begun_at(fleet, name, other, number):
    """A stream in every mode, which this worker has begun. The other one gets requests again."""
    fleet.operate("resume", name)
    fleet.operate("drain", other)
    streams = {mode: ask(fleet, mode, prompt(number)) for mode in MODES}
    eventually(lambda: all(stream.events or stream.error for stream in streams.values()))
    fleet.operate("resume", other)
    return streams


@pytest.fixture(scope="module")
def pair(fleet):
    """Two workers that do both, with the answers of one of them to prompt 0."""
    for name in "ab":
        serve(fleet, name, "both", "--kv-transfer-config", BOTH)
    for name in "ab":
        fleet.wait_state(name, "ready")
    fleet.operate("drain", "b")
    fleet.expected = answers({mode: ask(fleet, mode, prompt(0)) for mode in MODES})
    assert all(found["error"] is None for found in fleet.expected.values()), fleet.expected
    fleet.operate("resume", "b")
    return fleet


def test_a_drain_moves_streams_with_their_blocks_in_every_mode(pair):
    before = blocks_in(pair, "b")
    for _ in range(5):  # a fast machine may end them before they move
        pair.ask("/reset_prefix_cache", {}, admin=True)
        streams = begun_at(pair, "a", "b", 0)
        pair.operate("drain", "a")
        assert answers(streams) == pair.expected
        if loans(pair, "migration") >= len(MODES):
            break
    else:
        raise AssertionError("nothing moves")
    eventually(lambda: blocks_in(pair, "b") >= before + 18, lambda: str(pair.workers()))
    assert pair.workers()["b"]["transfer_GB_s"] > 0
    pair.operate("resume", "a")
    eventually(lambda: settled(pair))


def test_a_prefix_comes_from_the_worker_that_has_it(pair):
    [(_, stream)] = {"greedy": ask(pair, "greedy", prompt(1))}.items()
    expected, first = stream.answer(), stream.worker
    [other] = {"a", "b"} - {first}
    before = blocks_in(pair, other)
    pair.operate("drain", first)  # it may be asked for blocks all the same
    again = ask(pair, "greedy", prompt(1))
    assert again.answer() == expected and again.worker == other
    assert loans(pair, "prefix") >= 1
    eventually(lambda: blocks_in(pair, other) >= before + 18)
    pair.operate("resume", first)


def test_a_worker_that_does_both_prefills_for_a_decode_worker(pair):
    serve(pair, "d", "decode")
    pair.wait_state("d", "ready")
    for name in "ab":
        pair.operate("drain", name)
    expected = ask(pair, "seeded", prompt(2))
    assert expected.answer()["error"] is None and PREFILL not in expected.headers
    pair.ask("/reset_prefix_cache", {}, admin=True)
    pair.operate("resume", "a")
    while (stream := ask(pair, "seeded", prompt(2))).answer() and stream.worker != "d":
        pair.ask("/reset_prefix_cache", {}, admin=True)
    assert stream.headers[PREFILL] == "a" and stream.answer() == expected.answer()
    assert pair.workers()["a"]["prefills_done"] == 1
    pair.operate("resume", "b")
    pair.kill("d")


def test_a_worker_that_stops_ends_when_its_streams_have_left_with_their_blocks(pair):
    moved = loans(pair, "migration")
    for attempt in range(5):  # a machine may end the streams before they move
        if attempt:
            serve(pair, "a", "both", "--kv-transfer-config", BOTH)
            pair.wait_state("a", "ready")
        streams = begun_at(pair, "a", "b", 0)
        process = pair.running["a"]
        process.send_signal(signal.SIGTERM)
        assert answers(streams) == pair.expected
        process.wait()
        assert "Traceback" not in pair.log("a")
        eventually(lambda: "a" not in pair.workers() and settled(pair))
        if loans(pair, "migration") > moved:
            break
    else:
        raise AssertionError("nothing moves")
