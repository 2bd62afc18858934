"""A prefill worker and decode workers as processes, with the default model on the CPU: answers equal the
answers of a lone decode worker, whichever worker is killed and whenever."""

import json
import os
import random
import time

import pytest

from tests import shared_memory
from tests.fleet_processes import Processes
from tests.process.test_fleet_workers import CHAT, MODES, TELL, settled
from tests.waiting import eventually

PREFILL = "x-shoal-prefill-worker"
STORY = "The fishermen went down to the harbour and talked about wind, rain, nets and the price of salt. " * 4


def ask(fleet, mode, **more):
    """A request whose prompt is long; `name` makes it one that nobody has cached."""
    path, body = MODES[mode]
    name = more.pop("name", mode)
    body = {"max_tokens": 24, **TELL, **body, **more}
    begin = f"{name}: {STORY}"
    if path == CHAT:
        [message] = body["messages"]
        body["messages"] = [{**message, "content": begin + message["content"]}]
    else:
        body["prompt"] = begin + body["prompt"]
    return fleet.stream(path, **body)


def answers(streams):
    return {name: asked.answer() for name, asked in streams.items()}


def computed_by_one(fleet, **names):
    """The answers of a decode worker that has computed every token of the prompt."""
    configure(fleet, max_local_prefill_length=100_000)
    status, text = fleet.ask("/reset_prefix_cache", {}, admin=True)
    assert status == 200, text
    streams = {name: ask(fleet, mode, name=name) for name, mode in names.items()}
    found = answers(streams)
    assert all(PREFILL not in asked.headers for asked in streams.values())
    assert all(answer["error"] is None for answer in found.values()), found
    configure(fleet, max_local_prefill_length=16)
    return found


def configure(fleet, **settings):
    status, text = fleet.ask("/fleet/config", settings, admin=True)
    assert status == 200 and json.loads(text).items() >= settings.items(), text


def apart(folder):
    options = ("--policy", "kv", "--max-local-prefill-length", 16, "--max-prefill-queue-size", 100)
    return Processes(folder).route(*options)


def start(fleet, *names):
    """p... prefill, d... decode."""
    for name in names:
        fleet.serve(name, "--role", "prefill" if name.startswith("p") else "decode")
    for name in names:
        fleet.wait_state(name, "ready")


def test_answers_in_every_sampling_mode_are_those_of_one_worker(tmp_path):
    left_by_others = shared_memory.names()
    with apart(tmp_path) as fleet:
        start(fleet, "p", "d")
        streams = {name: ask(fleet, name) for name in MODES}
        found = answers(streams)
        by = {name: asked.headers.get(PREFILL) for name, asked in streams.items()}
        assert by == dict.fromkeys(MODES, "p"), (fleet.workers(), fleet.ask("/metrics")[1])
        assert {asked.worker for asked in streams.values()} == {"d"}
        workers = fleet.workers()
        assert workers["p"]["prefills_done"] == len(MODES) + 1, "n = 2 is two of them"
        assert workers["d"]["prefills_done"] == 0
        eventually(lambda: fleet.workers()["d"]["blocks_in"] > 0 and fleet.workers()["p"]["blocks_out"] > 0)
        assert fleet.workers()["d"]["transfer_GB_s"] > 0
        assert found == computed_by_one(fleet, **{name: name for name in MODES})
        eventually(lambda: settled(fleet))
        status, text = fleet.ask("/metrics")
        assert (
            status == 200
            and f'shoal:router_remote_prefills_total{{model_name="smollm2"}} {len(MODES) + 1}' in text
        )
        for process in fleet.running.values():
            process.terminate()
        for process in fleet.running.values():
            process.wait(60)
    shared_memory.assert_nothing_left(left_by_others)


@pytest.mark.slow
def test_killed_workers_change_no_answer(tmp_path):
    """The prefill worker before, in and after a transfer, then the decode worker in mid-stream."""
    seed = int(os.environ.get("SHOAL_SOAK_SEED", time.time_ns() % 10_000))
    print(f"SHOAL_SOAK_SEED={seed}")
    chance = random.Random(seed)
    with apart(tmp_path) as fleet:
        start(fleet, "p0", "d0")
        names = {
            f"{mode} {number}": mode for number in range(2) for mode in ("greedy", "seeded", "penalties")
        }
        expected = computed_by_one(fleet, **names)
        for number in range(3):
            # until the lease of the worker that was killed has run out
            eventually(lambda: fleet.ask("/reset_prefix_cache", {}, admin=True)[0] == 200)
            streams = {name: ask(fleet, mode, name=name) for name, mode in names.items()}
            time.sleep(chance.uniform(0, 3))
            fleet.kill(f"p{number}")
            assert answers(streams) == expected
            start(fleet, f"p{number + 1}")
        start(fleet, "d1")
        fleet.operate("drain", "d1")
        streams = {name: ask(fleet, mode, name=name) for name, mode in names.items()}
        eventually(lambda: all(asked.events for asked in streams.values()))
        fleet.operate("resume", "d1")
        fleet.kill("d0")
        assert answers(streams) == expected
        eventually(lambda: settled(fleet))


def test_a_worker_takes_another_role_while_it_answers(tmp_path):
    with apart(tmp_path) as fleet:
        for name in ("a", "b"):
            fleet.serve(name, "--role", "both", "--kv-transfer-config", json.dumps({"kv_role": "kv_both"}))
        fleet.serve(
            "reader", "--role", "decode", "--kv-transfer-config", json.dumps({"kv_role": "kv_consumer"})
        )
        for name in ("a", "b", "reader"):
            fleet.wait_state(name, "ready")

        def give(name, role, status=200):
            found, text = fleet.ask(f"/fleet/role/{name}", {"role": role}, admin=True)
            assert found == status, text
            if found == 200:
                eventually(lambda: fleet.workers()[name]["role"] == role)
            return text

        give("b", "prefill")
        give("reader", "both")
        assert "needs a worker that lends its KV blocks" in give("reader", "prefill", 400)
        assert "must be one of both, prefill, decode" in give("a", "trainer", 400)
        running = fleet.stream("/v1/completions", prompt=STORY, max_tokens=60, ignore_eos=True, **TELL)
        eventually(lambda: running.worker)
        give("a", "prefill")  # whether it answers or not
        give("reader", "decode")
        asked = ask(fleet, "greedy", name="later")
        found = asked.answer()
        assert asked.worker == "reader" and asked.headers[PREFILL] in ("a", "b") and found["error"] is None
        assert running.answer()["error"] is None
        give("a", "decode")
        give("b", "decode")
        alone = ask(fleet, "greedy", name="later")  # nobody computes prompts for others any more
        assert alone.answer() == found and PREFILL not in alone.headers
