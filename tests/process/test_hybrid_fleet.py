"""A fleet of workers with a model of recurrent layers: the next turn goes to the worker that can resume it, streams
go on elsewhere with equal tokens when their worker drains or is killed, and a prefill worker computes prompts."""

import json

import pytest

from tests.forked_workers import ForkedProcesses
from tests.process.test_fleet_workers import settled
from tests.tiny_families import write_family
from tests.waiting import eventually

PREFILL = "x-shoal-prefill-worker"
BOTH = json.dumps({"kv_role": "kv_both"})
BLOCK = 16
NUM = 4  # conversations


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A router and two workers that do both. Reading counts as quicker than computing, whatever the model."""
    folder = tmp_path_factory.mktemp("hybrid")
    with ForkedProcesses(folder) as running:
        running.settings = {"shoal.fleet.native.kv_transfers": {"OVERHEAD_S": -1.0}}
        # It is deep, so that a stream takes seconds, and does not end before it moves.
        deep = dict(num_hidden_layers=24, layer_types=None, full_attention_interval=3)
        running.model = write_family(folder, "qwen3.5", **deep)
        running.route("--policy", "kv", "--max-local-prefill-length", 64)
        for name in "ab":
            serve(running, name, "both", "--kv-transfer-config", BOTH)
        for name in "ab":
            running.wait_state(name, "ready")
        yield running


def serve(fleet, name, role, *options):
    sizes = ("--max-num-seqs", 8, "--max-model-len", 512, "--kv-cache-memory-bytes", 100_000_000)
    names = ("--role", role, "--served-model-name", "tiny")
    fleet.serve(name, *names, *sizes, *options, model=fleet.model)


def first_prompt(number):
    return [(number * 37 + i * i) % 250 for i in range(100 + 9 * (number % 10))]


def ask(fleet, prompt, max_tokens=20):
    options = {"stream_options": {"include_usage": True}, "return_token_ids": True, "temperature": 0}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return fleet.stream("/v1/completions", **body, **options)


def tokens_of(stream):
    assert stream.answer()["error"] is None, stream.answer()
    return [token for event in stream.events for choice in event["choices"] for token in choice["token_ids"]]


def wait_for_events(fleet, streams, num):
    """Waits until each stream has that many chunks."""

    def said():
        each = [(stream.worker, stream.status, len(stream.events), stream.error) for stream in streams]
        return f"{each}\n{fleet.workers()}\n{fleet.log('router')[-3000:]}"

    eventually(lambda: all(len(stream.events) >= num for stream in streams), said)


def cached_of(stream):
    [usage] = [event["usage"] for event in stream.events if event.get("usage")]
    return usage["prompt_tokens_details"]["cached_tokens"]


def alone(fleet, prompts, **options):
    """The answers of one worker that has cached nothing."""
    eventually(lambda: fleet.ask("/reset_prefix_cache", {}, admin=True)[0] == 200)
    fleet.operate("drain", "b")
    found = [tokens_of(ask(fleet, prompt, **options)) for prompt in prompts]
    fleet.operate("resume", "b")
    eventually(lambda: settled(fleet))
    eventually(lambda: fleet.ask("/reset_prefix_cache", {}, admin=True)[0] == 200)
    return found


def test_a_turn_goes_to_the_worker_that_can_resume_it(fleet):
    prompts = [first_prompt(number) for number in range(NUM)]
    expected = alone(fleet, prompts)
    streams = [ask(fleet, prompt) for prompt in prompts]  # at once, so that both workers get some
    assert [tokens_of(stream) for stream in streams] == expected
    homes = [stream.worker for stream in streams]
    assert set(homes) == {"a", "b"}
    for turn in range(2):
        for number, home in enumerate(homes):
            old = prompts[number] + expected[number]
            prompts[number] = old + [(turn * 91 + number * 7 + i) % 250 for i in range(11)]
            eventually(lambda: settled(fleet))
            stream = ask(fleet, prompts[number])
            expected[number] = tokens_of(stream)
            assert stream.worker == home and len(old) - BLOCK - 1 <= cached_of(stream) <= len(old)


def test_streams_leave_a_worker_that_drains_with_their_states(fleet):
    prompts = [first_prompt(number + 10) for number in range(2)]
    expected = alone(fleet, prompts, max_tokens=200)
    for _ in range(5):  # a fast machine may end them before they move
        before = fleet.workers()["b"]["blocks_in"]
        fleet.operate("drain", "b")
        streams = [ask(fleet, prompt, 200) for prompt in prompts]
        wait_for_events(fleet, streams, 4)
        fleet.operate("resume", "b")
        fleet.operate("drain", "a")
        assert [tokens_of(stream) for stream in streams] == expected
        fleet.operate("resume", "a")
        if fleet.workers()["b"]["blocks_in"] > before:
            return
    raise AssertionError("nothing moves")


def test_a_decode_worker_reads_the_states_of_a_prefill_worker(fleet):
    serve(fleet, "p", "prefill")
    serve(fleet, "d", "decode")
    for name in "pd":
        fleet.wait_state(name, "ready")
    prompts = [first_prompt(number + 20) for number in range(3)]
    expected = alone(fleet, prompts)
    for name in "ab":
        fleet.operate("drain", name)
    for prompt, tokens in zip(prompts, expected):
        stream = ask(fleet, prompt)
        assert tokens_of(stream) == tokens and stream.worker == "d" and stream.headers[PREFILL] == "p"
    eventually(lambda: fleet.workers()["d"]["blocks_in"] > 3 * 6, lambda: str(fleet.workers()))
    for name in "ab":
        fleet.operate("resume", name)
    for name in "pd":
        fleet.kill(name)
    eventually(lambda: not {"p", "d"} & fleet.workers().keys())


def test_the_conversations_of_a_killed_worker_resume_elsewhere(fleet):
    prompts = [first_prompt(number + 30) for number in range(NUM)]
    expected = alone(fleet, prompts, max_tokens=300)
    for _ in range(5):  # One that ended before the worker is killed would not go on elsewhere.
        streams = [ask(fleet, prompt, 300) for prompt in prompts]
        wait_for_events(fleet, streams, 1)
        assert {stream.worker for stream in streams} == {"a", "b"}
        if all(stream.is_alive() for stream in streams if stream.worker == "b"):
            break
        assert [tokens_of(stream) for stream in streams] == expected
        eventually(lambda: settled(fleet))
    else:
        raise AssertionError("not all streams of b live long enough")
    fleet.kill("b")
    assert [tokens_of(stream) for stream in streams] == expected
    eventually(lambda: settled(fleet))
    turns = [prompt + tokens + [7] * 11 for prompt, tokens in zip(prompts, expected)]
    for turn, old in zip(turns, prompts):
        stream = ask(fleet, turn)
        assert tokens_of(stream) and stream.worker == "a"
        assert len(old) + 300 - BLOCK - 1 <= cached_of(stream) <= len(old) + 300
