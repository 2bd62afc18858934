"""Real workers with the default model on the CPU behind a real router: their reports, and answers when a
worker is killed."""

import asyncio
import os
import random
import signal
import subprocess
import time

import pytest

from shoal.api import Request
from shoal.fleet.index.event_feed import EventFeed
from shoal.fleet.index.indexer import KvIndexer, WorkerRank
from shoal.fleet.key import FleetKey
from shoal.fleet.native.membership import watch_workers
from shoal.fleet.registry.open import open_registry
from shoal.sampling_params import SamplingParams
from tests import nats_server
from tests.asynchronous import within
from tests.fleet_processes import PATIENCE_S, Processes
from tests.serving import free_port, listens
from tests.tiny import greedy, write_model
from tests.waiting import eventually

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TINY = ("--max-model-len", "256", "--kv-cache-memory-bytes", "8000000", "--max-num-seqs", "4")
BEFORE_KILL = 2  # events of each stream
asynchronous = within(PATIENCE_S)


def no_role(worker, role):
    raise AssertionError(f"{worker.id} takes the role {role}")


async def until(condition, say=lambda: ""):
    await asyncio.to_thread(eventually, condition, say)


# Reports


def request(name, prompt, max_tokens=8):
    return Request(name, list(prompt), SamplingParams(max_tokens=max_tokens, temperature=0.0, seed=0))


async def ids_of(engine, asked):
    found = []
    async for output in engine.generate(asked):
        found += output.token_ids
    return found


@asynchronous
async def test_a_worker_joins_answers_tells_of_its_blocks_and_leaves(tmp_path):
    key_file = tmp_path / "key"
    key_file.write_text("0123456789abcdef" * 2)
    key = FleetKey.read(str(key_file))
    workers, left = {}, []
    with Processes(tmp_path) as fleet:
        registry = open_registry(fleet.plane, may_host=True, key=key)
        watching = asyncio.create_task(
            watch_workers(
                registry, key, lambda worker: workers.update({worker.id: worker}), left.append, no_role
            )
        )
        fleet.serve("a", "--fleet-key-file", key_file)
        await until(lambda: "a" in workers or fleet.running["a"].poll() is not None)
        assert "a" in workers, fleet.log("a")
        worker = workers["a"]
        await worker.link.check()
        assert worker.info.models == ("smollm2",) and worker.info.pid == fleet.running["a"].pid
        assert worker.info.total_blocks > 0 and worker.info.url.startswith("http://127.0.0.1:")
        index, prompt, other = KvIndexer(block_size=16), list(range(100, 180)), list(range(300, 380))
        first = await ids_of(worker.link, request("1", prompt))
        # The router begins to listen late, so what is cached is asked for.
        following = asyncio.create_task(worker.link.follow_events(EventFeed(index, WorkerRank("a"))))
        await until(lambda: WorkerRank("a") in index.find_matches(prompt))
        assert index.find_matches(prompt)[WorkerRank("a")].device == 5
        again, _ = await asyncio.gather(
            ids_of(worker.link, request("2", prompt)), ids_of(worker.link, request("3", other))
        )
        assert first == again and len(first) == 8
        await until(lambda: WorkerRank("a") in index.find_matches(other))
        stream = worker.link.generate(request("4", other, 12))
        await anext(stream)
        fleet.running["a"].send_signal(signal.SIGTERM)
        await until(lambda: worker.is_draining)
        assert sum([len(output.token_ids) async for output in stream]) >= 8, "what runs is drained"
        await until(lambda: left == ["a"] and fleet.running["a"].poll() is not None)
        assert fleet.running["a"].returncode == 0 and "Traceback" not in fleet.log("a"), fleet.log("a")
        assert not list(tmp_path.glob("shoal-*"))
        following.cancel()
        watching.cancel()
        await worker.link.close()
        await registry.close()


@asynchronous
async def test_a_worker_that_becomes_another_model_leaves_and_joins_as_that_one(tmp_path):
    models = [write_model(tmp_path, name) for name in ("qwen3", "llama")]
    prompt, workers, left = list(range(40)), {}, []
    with Processes(tmp_path) as fleet:
        registry = open_registry(fleet.plane, may_host=True)
        watching = asyncio.create_task(
            watch_workers(
                registry, None, lambda worker: workers.update({worker.id: worker}), left.append, no_role
            )
        )
        fleet.serve("a", "--enable-sleep-mode", "--served-model-name", "m", *TINY, model=models[0])
        await until(lambda: "a" in workers or fleet.running["a"].poll() is not None)
        first = workers.pop("a")
        await first.link.check()
        assert await ids_of(first.link, request("1", prompt)) == greedy(models[0], prompt, 8)
        await first.link.sleep(2)
        assert await first.link.update_weights(str(models[1])) == 1
        await until(lambda: left == ["a"] and "a" in workers)
        second = workers["a"]
        await second.link.check()
        assert second.info.models == ("m",) and second.link.card.model == str(models[1])
        assert second.link.card.kind != first.link.card.kind
        await second.link.wake_up()
        assert await ids_of(second.link, request("2", prompt)) == greedy(models[1], prompt, 8)
        watching.cancel()
        await first.link.close()
        await second.link.close()
        await registry.close()


# What becomes of answers

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "minLength": 30}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
TELL = {"stream_options": {"include_usage": True}}
MODES = {
    "greedy": (COMPLETIONS, {"prompt": "The old harbour", "temperature": 0, "ignore_eos": True}),
    "seeded": (COMPLETIONS, {"prompt": "Once upon a time", "temperature": 0.9, "top_p": 0.95, "seed": 11}),
    "penalties": (
        COMPLETIONS,
        {
            "prompt": "Rain, rain, rain",
            "temperature": 0,
            "repetition_penalty": 1.2,
            "presence_penalty": 0.7,
            "min_tokens": 24,
        },
    ),
    "grammar": (
        COMPLETIONS,
        {
            "prompt": "Words:",
            "temperature": 0,
            "structured_outputs": {"regex": "([a-z]{2,6} ){8}end"},
            "max_tokens": 60,
        },
    ),
    "tools": (
        CHAT,
        {
            "messages": [{"role": "user", "content": "The weather in Paris for 3 days?"}],
            "tools": [TOOL],
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": 60,
        },
    ),
    "several": (COMPLETIONS, {"prompt": "My favourite", "n": 2, "temperature": 1.0, "seed": 5}),
    "logprobs": (COMPLETIONS, {"prompt": "The sea is", "temperature": 0, "logprobs": 3, "ignore_eos": True}),
}
GRAMMARS = ("grammar", "tools")  # they begin late, as their grammars are compiled first


def ask(fleet, name, **more):
    path, body = MODES[name]
    return fleet.stream(path, **{"max_tokens": 72, **TELL, **body, **more})


def settled(fleet):
    return all(worker["active_requests"] == 0 for worker in fleet.workers().values())


def test_a_kill_in_mid_stream_changes_nothing_in_any_sampling_mode(tmp_path):
    """One worker writes all answers whole. Then another begins them, dies, and the first one goes on."""
    with Processes(tmp_path).route() as fleet:
        fleet.serve("a")
        fleet.serve("b")
        for name in "ab":
            fleet.wait_state(name, "ready")
        fleet.operate("drain", "a")
        expected = {
            name: asked.answer() for name, asked in {name: ask(fleet, name) for name in MODES}.items()
        }
        assert all(answer["error"] is None for answer in expected.values()), expected
        # A stop string that is longer than what comes before the break: it lies across.
        text = expected["greedy"]["choices"][0]["text"]
        stop = text[6:-6]
        fleet.operate("drain", "b")
        fleet.operate("resume", "a")
        streams = {name: ask(fleet, name) for name in GRAMMARS}
        eventually(lambda: all(asked.events or asked.error for asked in streams.values()))
        streams |= {name: ask(fleet, name) for name in MODES if name not in GRAMMARS}
        stopped = ask(fleet, "greedy", stop=stop)
        eventually(lambda: all(len(asked.events) >= BEFORE_KILL or asked.error for asked in streams.values()))
        fleet.operate("resume", "b")
        unfinished = [name for name, asked in streams.items() if asked.is_alive()]
        fleet.kill("a")
        assert {name: asked.answer() for name, asked in streams.items()} == expected
        assert len(unfinished) >= 4 and stopped.headers["x-shoal-worker"] == "a"
        whole = stopped.answer()
        assert (whole["choices"][0]["text"], whole["choices"][0]["finish"]) == (text[:6], "stop")
        assert {asked.worker for asked in streams.values()} == {"a"}
        fleet.wait_state("a", "gone", None)
        eventually(lambda: settled(fleet))


def test_what_waits_at_a_worker_moves_to_one_that_has_nothing_to_do(tmp_path):
    """The KV cache of each holds two of these prompts. The second worker gets nothing until others wait."""
    chance, blocks = random.Random(1), ("--max-model-len", "256", "--num-gpu-blocks-override", "32")
    prompts = [chance.choices(range(1000, 40_000), k=170) for _ in range(10)]
    with Processes(tmp_path).route() as fleet:
        for name in "ab":
            fleet.serve(name, *blocks)
        for name in "ab":
            fleet.wait_state(name, "ready")
        fleet.operate("drain", "b")

        def begin(prompt):
            return fleet.stream(
                COMPLETIONS, prompt=prompt, max_tokens=80, temperature=0, ignore_eos=True, **TELL
            )

        streams = [begin(prompt) for prompt in prompts]
        eventually(lambda: fleet.workers()["a"]["waiting"] >= 2)
        fleet.operate("resume", "b")
        eventually(lambda: fleet.workers()["b"]["requests"] > 0, lambda: fleet.log("router"))
        answers = [stream.answer() for stream in streams]
        assert all(answer["error"] is None and answer["usage"] == (170, 80) for answer in answers)
        assert {stream.worker for stream in streams} == {"a", "b"}
        assert "leaves worker a after 0 tokens: it waits at worker a" in fleet.log("router")
        eventually(lambda: settled(fleet))
        assert begin(prompts[2]).answer() == answers[2], "the first that waited, and so moved"


@pytest.mark.slow
def test_a_restart_of_nats_under_load_is_not_seen(tmp_path):
    port = free_port()
    command = [nats_server.find(), "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", str(tmp_path / "nats")]
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        with Processes(tmp_path, f"nats://127.0.0.1:{port}").route() as fleet:
            fleet.serve("a")
            fleet.wait_state("a", "ready")
            expected = ask(fleet, "greedy").answer()
            assert expected["error"] is None
            stream = ask(fleet, "greedy")
            eventually(lambda: len(stream.events) > 2)
            server.kill()
            server.wait()
            while_away = ask(fleet, "greedy")
            eventually(lambda: len(while_away.events) > 2)
            server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            eventually(lambda: listens(port), lambda: f"nats-server: {server.poll()}")
            assert stream.answer() == while_away.answer() == expected
            assert ask(fleet, "greedy").answer() == expected
            fleet.wait_state("a", "ready")
            fleet.kill("a")
            fleet.wait_state("a", "gone", None)
    finally:
        server.kill()
        server.wait()


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_kills_under_load(tmp_path):
    """A soak: SHOAL_SOAK_KILLS workers are killed (3), with streams under way all the time; SHOAL_SOAK_SEED
    repeats one."""
    kills, seed = int(os.environ.get("SHOAL_SOAK_KILLS", 3)), int(os.environ.get("SHOAL_SOAK_SEED", 0))
    chance = random.Random(seed)
    with Processes(tmp_path).route("--migration-limit", "20") as fleet:
        for number in range(3):
            fleet.serve(f"w{number}")
        for number in range(3):
            fleet.wait_state(f"w{number}", "ready")
        names = [name for name in MODES if name != "several"]
        expected = {name: ask(fleet, name).answer() for name in names}
        moved = 0
        for number in range(3, 3 + kills):
            streams = {name: ask(fleet, name) for name in chance.sample(names, 3)}
            time.sleep(chance.uniform(0.5, 5))
            victim = chance.choice(sorted(fleet.running.keys() - {"router"}))
            moved += sum(asked.worker == victim and asked.is_alive() for asked in streams.values())
            fleet.kill(victim)
            fleet.serve(f"w{number}")
            for name, asked in streams.items():
                assert asked.answer() == expected[name], f"SHOAL_SOAK_SEED={seed}, kill {number - 2}, {name}"
            fleet.wait_state(f"w{number}", "ready")
            print(f"kill {number - 2}: {moved} streams moved so far", flush=True)
        assert moved >= kills / 10
        eventually(lambda: settled(fleet))
