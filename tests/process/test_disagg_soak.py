"""A soak of disaggregated prefill: workers and routers are killed at random moments, and nothing is lost,
sent twice or left behind.

    SHOAL_SOAK_KILLS=500 SHOAL_SOAK_SEED=7 python -m pytest tests/process/test_disagg_soak.py
"""

import asyncio
import json
import os
import random
import time

import pytest

from shoal.fleet.native.membership import watch_workers
from shoal.fleet.registry.open import open_registry
from shoal.wire import CheckIntegrity
from tests import shared_memory
from tests.forked_workers import ForkedProcesses
from tests.process.test_fleet_workers import settled
from tests.tiny import write_model
from tests.waiting import eventually

KILLS = int(os.environ.get("SHOAL_SOAK_KILLS", 12))
SEED = int(os.environ.get("SHOAL_SOAK_SEED", time.time_ns() % 100_000))
LEASE_S = 5
CHECK_EVERY = 50  # kills
MODES = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 0.9, "seed": 5, "top_p": 0.95},
    "penalties": {"temperature": 1.1, "seed": 6, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    "logprobs": {"temperature": 0, "logprobs": 2},
    "several": {"temperature": 0.9, "seed": 7, "n": 2},
    "grammar": {"temperature": 0.9, "seed": 8, "structured_outputs": {"regex": "[a-f0-9]{200}"}},
}
# What happens, and how often beside the others. "before": a prefill worker dies as requests come, "in":
# shortly after, "after": when first tokens are there; "decode": in mid-stream; "stop": a decode worker gets
# SIGTERM.
EVENTS = {"before": 3, "in": 4, "after": 4, "decode": 5, "drained": 2, "stop": 2, "router": 1}


class Soak:
    def __init__(self, fleet, model, chance):
        self.fleet, self.model, self.chance = fleet, model, chance
        self.numbers = {"p": 0, "d": 0}
        self.count = 0
        prompts = random.Random(1)
        self.prompts = {
            f"{mode} {number}": prompts.choices(range(256), k=prompts.randint(100, 420))
            for mode in MODES
            for number in range(3)
        }

    def start_router(self):
        options = ("--policy", "kv", "--max-local-prefill-length", 16, "--max-prefill-queue-size", 100)
        self.fleet.route(*options)

    def start(self, role):
        name = f"{role}{self.numbers[role]}"
        self.numbers[role] += 1
        transfer = {"kv_role": "kv_producer" if role == "p" else "kv_both", "lease_s": LEASE_S}
        self.fleet.serve(
            name,
            *("--role", "prefill" if role == "p" else "decode", "--served-model-name", "tiny"),
            *("--max-num-seqs", 16, "--max-model-len", 512, "--kv-cache-memory-bytes", 8_000_000),
            *("--kv-transfer-config", json.dumps(transfer)),
            model=self.model,
        )
        return name

    def ask(self, name):
        mode = name.split()[0]
        body = {"model": "tiny", "prompt": self.prompts[name], "max_tokens": 60, "ignore_eos": True}
        return self.fleet.stream(
            "/v1/completions", **body, stream_options={"include_usage": True}, **MODES[mode]
        )

    def configure(self, **settings):
        status, text = self.fleet.ask("/fleet/config", settings, admin=True)
        assert status == 200, text

    def victims(self, role):
        return sorted(name for name in self.fleet.running if name[0] == role)

    def expect(self):
        """The answers of decode workers that compute all themselves."""
        self.configure(max_local_prefill_length=100_000)
        asked = {name: self.ask(name) for name in self.prompts}
        self.expected = {name: stream.answer() for name, stream in asked.items()}
        assert all(answer["error"] is None for answer in self.expected.values()), self.expected
        self.configure(max_local_prefill_length=16)

    def round(self, event):
        fleet, chance = self.fleet, self.chance
        fleet.ask("/reset_prefix_cache", {}, admin=True)
        streams = {name: self.ask(name) for name in chance.sample(sorted(self.prompts), 4)}
        if event == "in":
            time.sleep(chance.uniform(0, 0.06))
        elif event == "after":
            eventually(lambda: any(stream.events for stream in streams.values()))
            time.sleep(chance.uniform(0, 0.02))
        elif event != "before":
            eventually(lambda: any(len(stream.events) > 1 for stream in streams.values()))
            time.sleep(chance.uniform(0, 0.15))
        role = "p" if event in ("before", "in", "after") else "d"
        victim = "router" if event == "router" else chance.choice(self.victims(role))
        if event == "drained":
            fleet.operate("drain", victim)
            time.sleep(chance.uniform(0, 0.05))
        if event == "stop":
            process = fleet.running.pop(victim)
            process.terminate()
            process.wait()
        else:
            fleet.kill(victim)
        if event == "router":
            self.answers_of_a_dead_router(streams)
            self.start_router()
        else:
            for name, stream in streams.items():
                assert stream.answer() == self.expected[name], self.says(event, name)
            self.start(role)
        self.all_are_ready()

    def answers_of_a_dead_router(self, streams):
        """Checks that answers are whole, or a beginning of the right answer with an error for the client."""
        for name, stream in streams.items():
            found, expected = stream.answer(), self.expected[name]
            if found == expected:
                continue
            for index, choice in found["choices"].items():
                whole = expected["choices"][index]
                assert whole["text"].startswith(choice["text"].rstrip("\ufffd")), self.says("router", name)
            assert found["usage"] is None, self.says("router", name)

    def all_are_ready(self):
        def ready():
            states = {name: worker["state"] for name, worker in self.fleet.workers().items()}
            return all(states.get(name) == "ready" for name in self.fleet.running if name != "router")

        eventually(ready, lambda: f"{self.fleet.workers()}")

    def says(self, event, name):
        return f"SHOAL_SOAK_SEED={SEED}, kill {self.count}, {event}, {name}"

    def check(self):
        """Checks that nothing runs, and that all engines pass CheckIntegrity."""
        eventually(lambda: settled(self.fleet))
        asyncio.run(self.check_engines())

    async def check_engines(self):
        workers = {}
        registry = open_registry(self.fleet.plane)
        watching = asyncio.create_task(
            watch_workers(
                registry,
                None,
                lambda worker: workers.update({worker.id: worker}),
                workers.pop,
                lambda worker, role: None,
            )
        )
        names = self.fleet.running.keys() - {"router"}
        async with asyncio.timeout(60):
            while not names <= workers.keys():
                await asyncio.sleep(0.02)
            for name in names:
                link = workers[name].link
                await link.check()
                while not is_idle(stats := await link.stats()):
                    print(name, stats.num_blocks - stats.num_free_blocks, "blocks are held", stats.kv_loans)
                    await asyncio.sleep(0.5)
                await link.control(CheckIntegrity())
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        for worker in workers.values():
            await worker.link.close()
        await registry.close()


def is_idle(stats):
    """Returns whether nothing runs and nothing holds a block. A read of an aborted request may continue for a
    while."""
    loans, is_free = stats.kv_loans, stats.num_free_blocks == stats.num_blocks > 0
    return is_free and not (
        stats.num_running or stats.num_waiting or (loans and (loans.offers or loans.held_blocks))
    )


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_nothing_leaks_after_many_kills(tmp_path):
    print(f"SHOAL_SOAK_SEED={SEED}")
    chance, left_by_others = random.Random(SEED), shared_memory.names()
    happened = dict.fromkeys(EVENTS, 0)
    with ForkedProcesses(tmp_path) as fleet:
        fleet.settings = {
            "shoal.fleet.native.kv_transfers": {"OVERHEAD_S": -1.0}
        }  # so small a model computes sooner
        soak = Soak(fleet, write_model(tmp_path, "qwen3"), chance)
        soak.start_router()
        for role in "ppdd":
            soak.start(role)
        soak.all_are_ready()
        soak.expect()
        for soak.count in range(1, KILLS + 1):
            [event] = chance.choices(list(EVENTS), EVENTS.values())
            soak.round(event)
            happened[event] += 1
            if soak.count % CHECK_EVERY == 0:
                soak.check()
                print(time.strftime("%X"), happened, flush=True)
        soak.check()
        print(happened)
        for name in list(fleet.running):
            fleet.kill(name)
    shared_memory.assert_nothing_left(left_by_others)
    left = [path.name for path in tmp_path.iterdir() if path.name.startswith("shoal-")]
    assert not [name for name in left if not name.startswith("shoal-events-")], left
