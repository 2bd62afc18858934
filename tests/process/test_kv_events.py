"""KV events of real engines, read by a listener that knows only vLLM's schema, in every way that a listener
can miss some."""

import json
import random
import subprocess
import sys

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal import kv_events as kv_events
from shoal.errors import ConfigError
from tests.kv_listener import Follower, View
from tests.serving import ROOT, TINY, Serve, free_port
from tests.tiny import write_model
from tests.waiting import eventually

SIZE = 16
SMALL = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 192,
    "block_size": SIZE,
    "num_gpu_blocks_override": 20,
    "max_num_seqs": 4,
}


@pytest.fixture(autouse=True)
def one_thread():
    """Two threads on tiny tensors wait for each other, on a busy machine longer than the time limit of a test."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def ends(tmp_path):
    return {
        "endpoint": f"ipc://{tmp_path}/events",
        "replay_endpoint": f"ipc://{tmp_path}/replay",
        "topic": "kv-events",
    }


@pytest.fixture
def followers(ends):
    made = []

    def follow(**options):
        made.append(Follower(ends["endpoint"], ends["replay_endpoint"], SIZE, b"kv-events", **options))
        made[-1].follow(0.5)  # until the subscription has arrived
        return made[-1]

    yield follow
    for follower in made:
        follower.close()


@pytest.fixture
def start(root, ends):
    engines = []

    def make(name="qwen3", more=None, **options):
        config = {"enable_kv_cache_events": True} | ends | (more or {})
        engines.append(LLM(str(write_model(root, name)), kv_events_config=config, **SMALL | options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.exit()


def held(llm):
    """The truth: what the snapshot says, which the engine proves to be what its pool holds."""
    llm.core.check()
    return View(SIZE, reachable=False).apply(kv_events.encode(llm.kv_snapshot())).names()


def settle(llm, follower, hears=lambda: True):
    """Waits until the follower has all events of the engine, live or replayed."""
    llm.kv_snapshot()  # when it is there, all is published
    follower.follow(0.1, hears)
    if follower.next < follower.newest() + 1:
        follower.catch_up()
    assert follower.next == follower.newest() + 1
    return follower.view


class Traffic:
    """Random requests: conversations that go on, equal prompts, salts, ends from outside, resets."""

    def __init__(self, llm, seed):
        print(f"seed {seed}")
        self.llm, self.r, self.prompts = llm, random.Random(seed), [[]]

    def go(self, rounds):
        llm, r = self.llm, self.r
        for _ in range(rounds):
            batch = []
            for _ in range(r.randint(1, 4)):
                base = r.choice(self.prompts)
                base = base[: r.choice((len(base), r.randint(0, len(base))))]
                ids = (base + [r.randrange(256) for _ in range(r.randint(1, 60))])[:150]
                self.prompts = [*self.prompts[-6:], ids]
                batch.append(
                    {"prompt_token_ids": ids} | ({"cache_salt": r.choice("ab")} if r.random() < 0.2 else {})
                )
            params = [
                SamplingParams(
                    temperature=0,
                    max_tokens=r.randint(1, 30),
                    ignore_eos=True,
                    n=r.choice((1, 1, 2)),
                    prompt_logprobs=0 if r.random() < 0.1 else None,
                )
                for _ in batch
            ]
            if r.random() < 0.2:
                stream = llm.stream(batch[0], params[0])
                next(stream)
                stream.close()
            else:
                llm.generate(batch, params, use_tqdm=False)
            if r.random() < 0.05:
                llm.reset_prefix_cache()


def test_a_listener_knows_the_exact_set_of_cached_blocks(start, followers):
    seed = random.randrange(2**32)
    llm = start()
    follower = followers()
    assert follower.catch_up().next == 0, "start-up and warm-up make no events"
    traffic = Traffic(llm, seed)
    for _ in range(6):
        traffic.go(5)
        assert settle(llm, follower).names() == held(llm)
    assert follower.next > 20
    llm.reset_prefix_cache()
    assert settle(llm, follower).blocks == {}, "a reset waits for no step"
    view = View(SIZE)
    for number, payload in follower.listener.replay(0):
        assert number < follower.next
        view.apply(payload)
    assert view.blocks == {}


def test_a_listener_that_misses_events_asks_for_them(start, followers):
    seed = random.randrange(2**32)
    llm = start()
    follower, r = followers(), random.Random(seed)
    traffic = Traffic(llm, seed)
    for _ in range(6):
        traffic.go(5)
        assert settle(llm, follower, lambda: r.random() < 0.5).names() == held(llm)
    assert follower.num_replayed and not follower.num_snapshots


def test_a_listener_that_misses_too_much_gets_a_snapshot(start, followers):
    seed = random.randrange(2**32)
    llm = start(more={"buffer_steps": 4})
    follower, r = followers(), random.Random(seed)
    traffic = Traffic(llm, seed)
    for _ in range(10):
        traffic.go(4)
        assert settle(llm, follower, lambda: r.random() < 0.2).names() == held(llm)
    assert follower.num_snapshots
    late = followers()
    late.next = 2**64 - 1  # it knows no number
    [(number, payload)] = late.listener.replay(late.next)
    assert number == follower.next - 1 and View(SIZE).apply(payload).blocks == follower.view.blocks


def test_events_are_drained_in_the_same_process(start):
    llm = start(more={"publisher": "null"})
    traffic, view = Traffic(llm, 1), View(SIZE)
    for _ in range(5):
        traffic.go(3)
        for batch in llm.drain_kv_events():
            view.apply(kv_events.encode(batch))
        assert view.names() == held(llm)
        assert View(SIZE).apply(kv_events.encode(llm.kv_snapshot())).blocks == view.blocks
    assert llm.drain_kv_events() == []


def test_an_engine_without_events_says_so(root):
    with LLM(str(write_model(root, "qwen3")), **SMALL) as llm:
        for call in (llm.drain_kv_events, llm.kv_snapshot):
            with pytest.raises(
                ConfigError, match="this engine keeps no KV events; build it with kv_events_config="
            ):
                call()


def test_sleep_and_new_weights_clear_what_listeners_know(start, followers, root):
    llm = start(enable_sleep_mode=True)
    follower = followers()
    for forget in (
        lambda: (llm.sleep(1), llm.wake_up()),
        lambda: llm.update_weights(str(write_model(root, "qwen3"))),
    ):
        llm.generate([list(range(40))], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert len(settle(llm, follower).names()) == 2
        forget()
        assert settle(llm, follower).blocks == {} and held(llm) == set()


def test_an_end_from_outside_forgets_nothing(start):
    llm = start(more={"publisher": "null"})
    stream = llm.stream(list(range(100)), SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    assert len(llm.drain_kv_events()) == 1
    stream.close()
    assert llm.drain_kv_events() == [] and len(held(llm)) == 6


def test_tiers_below_are_told_apart(start, followers):
    seed = random.randrange(2**32)
    llm = start(kv_host_bytes=4 << 20)
    follower = followers(reachable=False)
    traffic = Traffic(llm, seed)
    for _ in range(8):
        traffic.go(4)
    for i in range(6):  # three times what the device holds, as the last round may have been a reset
        llm.generate([[i] * 150], SamplingParams(max_tokens=1), use_tqdm=False)
    assert settle(llm, follower).names("GPU") == held(llm)
    assert follower.view.names("CPU") - follower.view.names("GPU"), "blocks that only the host has"


@pytest.mark.slow
def test_an_endpoint_that_is_taken_is_refused_at_start(start, ends, root):
    start()
    with pytest.raises(
        ConfigError,
        match=r"kv_events_config.endpoint 'ipc://.*events' cannot be opened: another process listens there",
    ):
        start()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "shoal",
            "serve",
            str(write_model(root, "qwen3")),
            *TINY,
            "--port",
            "0",
            "--kv-events-config",
            json.dumps({"enable_kv_cache_events": True, **ends}),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1 and "another process listens there" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "shoal", "serve", *TINY, "--kv-events-config", '{"topics": 1}'],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (
        done.returncode == 1
        and "kv_events_config has no field 'topics'; did you mean 'topic'?" in done.stderr
    )


def test_a_server_publishes_and_a_reset_over_http_is_heard_at_once(tmp_path, root):
    port, replay = free_port(), free_port()
    config = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{replay}",
        "topic": "kv-events",
    }
    server = Serve(
        tmp_path,
        write_model(root, "qwen3"),
        *TINY,
        "--enable-sleep-mode",
        "--kv-events-config",
        json.dumps(config),
    )
    follower = Follower(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{replay}", SIZE, b"kv-events")
    try:
        server.ready()
        assert follower.follow(1.0).catch_up().next == 0
        client, model = server.client(), str(root / "qwen3")

        def complete(first):
            client.completions.create(
                model=model,
                prompt=list(range(first, first + 40)),
                max_tokens=10,
                extra_body={"ignore_eos": True},
            )

        for i in range(3):
            complete(i)
        eventually(lambda: len(follower.follow(0.1).catch_up().view.names()) == 9)
        for path in ("/reset_prefix_cache", "/sleep?level=1"):
            assert server.ask(path, {}, server.admin)[0] == 200
            eventually(lambda: follower.follow(0.1).catch_up().view.blocks == {})
            server.ask("/wake_up", {}, server.admin)
            complete(0)
            eventually(lambda: len(follower.follow(0.1).catch_up().view.names()) == 3)
    finally:
        follower.close()
        server.stop()
