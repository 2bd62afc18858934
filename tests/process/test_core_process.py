"""The engine's core in a process of its own: requests at once, every kind of death, nothing left behind."""

import asyncio
import logging
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from shoal.api import FinishReason, Request
from shoal.config import EngineConfig
from shoal.engine.process import async_llm, core_process
from shoal.engine.process.async_llm import AsyncLLM
from shoal.engine.process.swap import Swapper
from shoal.errors import CheckpointError, ConfigError, EngineDeadError, RequestError, UnavailableError
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.stats import SleepState
from tests.tiny import greedy, write_model
from tests.waiting import until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models"), "qwen3")


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Sockets lie here, so that a test sees what is left of them."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(logging.getLogger(), "level", logging.INFO)  # the core's log level too
    monkeypatch.setattr(async_llm, "RESTART_PAUSES_S", (0.0, 0.0, 0.0))
    yield tmp_path
    assert not list(tmp_path.glob("shoal-*"))


def config(checkpoint, **options):
    return EngineConfig(
        **{
            "model": str(checkpoint),
            "device": "cpu",
            "dtype": "float32",
            "kv_cache_memory_bytes": 1 << 22,
            "max_num_seqs": 16,
            **options,
        }
    )


def request(name, length=8, prompt=(1, 2, 3), **options):
    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, **options)
    return Request(str(name), list(prompt), params, eos_token_ids=(257,))


async def run(llm, asked):
    ids, last = [], None
    async for last in llm.generate(asked):
        ids += last.token_ids
    return ids, last.finish_reason


def with_engine(layers=None, **options):
    """The test gets an engine of its own, and has to end in time. With 32 layers, 400 tokens take seconds."""

    def decorate(function):
        def test(checkpoint):
            if layers is not None:
                root = checkpoint.parent / f"{layers}-layers"
                checkpoint = write_model(root, "qwen3", num_hidden_layers=layers)
                options["engine"] = {"kv_cache_memory_bytes": 1 << 27} | options.get("engine", {})

            async def bounded():
                async with asyncio.timeout(DEADLINE_S):
                    llm = await AsyncLLM.start(
                        config(checkpoint, **options.get("engine", {})),
                        restart=options.get("restart", False),
                        engine_timeout=options.get("engine_timeout", 60.0),
                    )
                    try:
                        await function(llm)
                    finally:
                        await llm.close()
                    assert not psutil.pid_exists(llm.info.pid)

            asyncio.run(bounded())

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return decorate


@pytest.fixture(scope="module")
def lasting(checkpoint):
    """Runs a test's function on an engine that all tests share which leave it as it was."""
    with asyncio.Runner() as runner:
        llm = runner.run(AsyncLLM.start(config(checkpoint)))

        async def use(function):
            async with asyncio.timeout(DEADLINE_S):
                await function(llm)
                stats = await llm.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            assert stats.num_free_blocks == stats.num_blocks

        yield lambda function: runner.run(use(function))
        runner.run(llm.close())


def with_lasting_engine(function):
    def test(lasting):
        lasting(function)

    test.__name__, test.__doc__ = function.__name__, function.__doc__
    return test


@with_lasting_engine
async def test_requests_at_once_get_what_they_would_get_alone(llm):
    asked = [request(i, 5 + i % 20, prompt=[1 + i] * (1 + i % 30)) for i in range(40)]
    alone = [await run(llm, r) for r in asked[:5]]
    together = await asyncio.gather(*[run(llm, r) for r in asked])
    assert together[:5] == alone and all(
        len(ids) == r.params.max_tokens for (ids, _), r in zip(together, asked)
    )
    await llm.check()


@with_lasting_engine
async def test_a_bad_request_is_refused_alone(llm):
    good = asyncio.create_task(run(llm, request("good", 450)))
    bad = [
        request("a", prompt=[300]),
        request("b", prompt=[]),
        request("d", logprobs=21),
        request("e", prompt=[1] * 600),
    ]
    for asked in bad:
        with pytest.raises(RequestError):
            await run(llm, asked)
    with pytest.raises(RequestError, match="request_id"):
        await run(llm, request("good"))
    wrong = request("f")
    wrong.priority = "high"  # what no decoder takes
    with pytest.raises(RequestError):
        await run(llm, wrong)
    assert await good == ((await run(llm, request("again", 450)))[0], FinishReason.LENGTH)


@with_lasting_engine
async def test_a_command_that_cannot_be_read_is_refused_alone(llm):
    with pytest.raises(ConfigError, match="update_weights"):
        await llm.update_weights(5)
    assert await llm.reset_prefix_cache() and len((await run(llm, request(0)))[0]) == 8


@with_lasting_engine
async def test_a_trace_of_what_runs(llm):
    with pytest.raises(ConfigError, match="start_profile"):
        await llm.stop_profile()
    folder = Path(tempfile.mkdtemp())
    await llm.start_profile(str(folder))
    await run(llm, request(0))
    [path] = await llm.stop_profile()
    assert Path(path).parent == folder and Path(path).stat().st_size


@with_lasting_engine
async def test_readers_that_leave_free_their_blocks(llm):
    async def leave(i):
        stream = llm.generate(request(i, 400))
        async for _ in stream:
            break
        await stream.aclose()

    async def be_cancelled(i):
        task = asyncio.create_task(run(llm, request(f"c{i}", 400)))
        await asyncio.sleep(0.01 * i)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    await asyncio.gather(*[leave(i) for i in range(10)], *[be_cancelled(i) for i in range(10)])
    while (stats := await llm.stats()).num_running + stats.num_waiting:
        await asyncio.sleep(0.02)
    assert stats.num_free_blocks == stats.num_blocks
    await llm.check()


@with_lasting_engine
async def test_an_aborted_request_says_so(llm):
    task = asyncio.create_task(run(llm, request("r", 400)))
    while not (await llm.stats()).num_running:
        await asyncio.sleep(0.01)
    await llm.abort("r")
    await llm.abort("nobody")
    assert (await task)[1] is FinishReason.ABORT


@with_lasting_engine
async def test_a_reader_that_takes_its_time_gets_everything_at_once(llm):
    stream = llm.generate(request("slow", 300, logprobs=20))
    first = await anext(stream)
    while (await llm.stats()).num_running:
        await asyncio.sleep(0.02)
    rest = [output async for output in stream]
    assert len(rest) == 1 and rest[0].finish_reason is FinishReason.LENGTH
    assert len(first.token_ids + rest[0].token_ids) == len(first.logprobs + rest[0].logprobs) == 300


@pytest.mark.slow
@with_engine(engine={"max_logprobs": -1})
async def test_huge_answers_beside_others(llm):
    """256 tokens with the log-probabilities of the whole vocabulary."""
    heavy = asyncio.create_task(run(llm, request("heavy", 256, logprobs=-1, prompt_logprobs=-1)))
    others = await asyncio.gather(*[run(llm, request(i, 50)) for i in range(8)])
    assert len({tuple(ids) for ids, _ in others}) == 1 and len((await heavy)[0]) == 256


@with_lasting_engine
async def test_a_grammar_holds(llm):
    params = SamplingParams(
        temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(choice=["yes", "no"])
    )
    ids, reason = await run(llm, Request("r", [1, 2, 3], params, eos_token_ids=(257,)))
    assert reason is FinishReason.STOP and len(ids) in (3, 4)


@with_engine(engine={"enable_sleep_mode": True})
async def test_sleep_in_its_three_modes(llm):
    whole = (await run(llm, request("whole", 300)))[0]

    async def begin(name):
        task = asyncio.create_task(run(llm, request(name, 300)))
        while not (await llm.stats()).num_running:
            assert not task.done(), "the request ended before it was seen running"
            await asyncio.sleep(0.01)
        return task

    running = await begin("aborted")
    assert (await llm.sleep(1)).freed_bytes > 0
    assert await llm.sleep_state() == SleepState(1, {"weights", "kv_cache"}, "host")
    assert (await running)[1] is FinishReason.ABORT
    with pytest.raises(UnavailableError, match="sleep"):
        await run(llm, request("refused"))
    await llm.wake_up()

    running = await begin("kept")
    await llm.sleep(1, mode="keep")
    assert not running.done()
    await llm.wake_up()
    assert await running == (whole, FinishReason.LENGTH)

    running = await begin("called off")
    sleeping = asyncio.create_task(llm.sleep(1, mode="wait"))
    await asyncio.sleep(0)
    await llm.wake_up()
    with pytest.raises(UnavailableError, match="wake_up was called before"):
        await sleeping
    assert not (await llm.sleep_state()).is_sleeping and len((await run(llm, request("new")))[0]) == 8
    assert await running == (whole, FinishReason.LENGTH)

    running = await begin("awaited")
    sleeping = asyncio.create_task(llm.sleep(2, mode="wait"))
    await asyncio.sleep(0)
    assert (await llm.stats()).num_running in (0, 1)  # answered meanwhile
    await sleeping
    assert await running == (whole, FinishReason.LENGTH)
    await llm.wake_up()
    with pytest.raises(UnavailableError, match="weights"):
        await run(llm, request("lost"))
    assert await llm.update_weights(llm.info.model) == 1
    assert (await run(llm, request("back", 300)))[0] == whole
    assert set(await llm.memory_usage()) >= {"weights", "kv_cache"} and await llm.check_weights()
    with pytest.raises(ConfigError, match=r"level must be .*, got 9"):
        await llm.sleep(9)
    with pytest.raises(CheckpointError):
        await llm.update_weights("/nowhere")
    await llm.check()


@with_engine(engine={"enable_sleep_mode": True}, restart=True)
async def test_another_model_takes_the_place_of_the_first_and_comes_again_after_a_death(llm):
    first = llm.info
    other = write_model(Path(first.model).parent, "llama")
    prompt = list(range(40))
    alone = await run(llm, request(0, prompt=prompt))
    kept = asyncio.create_task(run(llm, request("kept", 300)))
    while not (await llm.stats()).num_running:
        await asyncio.sleep(0.01)
    with pytest.raises(CheckpointError, match="of another model"):
        await llm.update_weights(str(other))
    assert llm.info is first
    await llm.sleep(2, mode="keep")
    with pytest.raises(CheckpointError, match="it is not the folder"):
        await llm.update_weights(str(Path(first.model).parent))
    assert await llm.update_weights(str(other)) == 1
    assert (await kept)[1] is FinishReason.ABORT
    assert (llm.info.model, llm.info.pid) == (str(other), first.pid)
    await llm.wake_up()
    wanted = greedy(other, prompt, 8)
    assert await run(llm, request(1, prompt=prompt)) == (wanted, FinishReason.LENGTH)
    await llm.check()

    os.kill(llm.info.pid, signal.SIGKILL)
    await until(lambda: llm.dead is None and llm.info.pid != first.pid)
    assert llm.info.model == str(other)
    assert await run(llm, request(2, prompt=prompt)) == (wanted, FinishReason.LENGTH)

    await llm.sleep(2)
    await llm.update_weights(first.model)
    await llm.wake_up()
    assert await run(llm, request(3, prompt=prompt)) == alone


@pytest.mark.slow
def test_models_that_take_turns_without_host_memory_come_back_from_their_files(checkpoint):
    other = write_model(checkpoint.parent, "llama")

    async def take_turns():
        swapper, models, engines = Swapper(0.1, available=lambda: 0), {}, []
        try:
            for path in (checkpoint, other):
                engines.append(await AsyncLLM.start(config(path, enable_sleep_mode=True)))
                models[path] = await swapper.add(
                    path.name, engines[-1], str(path), engines[-1].info.vocab_size
                )
            first = [await run(models[path], request(0)) for path in models]
            again = [await run(models[path], request(0)) for path in models]
            assert first == again and first[0] != first[1]
            assert all(model.level in (2, None) for model in swapper.models.values())
        finally:
            for engine in engines:
                await engine.close()

    asyncio.run(asyncio.wait_for(take_turns(), DEADLINE_S))


@with_lasting_engine
async def test_a_pause_needs_no_sleep_mode(llm):
    with pytest.raises(ConfigError, match="enable_sleep_mode"):
        await llm.sleep(1)
    running = asyncio.create_task(run(llm, request("running", 300)))
    while not (await llm.stats()).num_running:
        await asyncio.sleep(0.01)
    with pytest.raises(ConfigError, match="enable_sleep_mode"):  # at once, and nothing was refused meanwhile
        await llm.sleep(1, mode="wait")
    assert not running.done() and len((await run(llm, request("beside")))[0]) == 8
    await running
    await llm.sleep(0, mode="wait")
    assert await llm.sleep_state() == SleepState(0)
    await llm.wake_up()
    assert len((await run(llm, request(1)))[0]) == 8


@with_engine(layers=32)
async def test_a_killed_core_is_told_to_everybody(llm):
    running = [asyncio.create_task(run(llm, request(i, 400))) for i in range(4)]
    await asyncio.sleep(0.1)
    os.kill(llm.info.pid, signal.SIGKILL)
    for task in running:
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await task
    assert "SIGKILL" in str(llm.dead) and "KV blocks" in llm.dead.__notes__[0]  # the end of its log, for ours
    for call in (run(llm, request("new")), llm.stats(), llm.sleep(1)):
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await call
    await llm.abort("new")


@pytest.mark.slow
@with_engine(restart=True)
async def test_a_killed_core_is_started_again_but_not_for_ever(llm):
    want = await run(llm, request(0))
    for _ in range(async_llm.MOST_RESTARTS):
        pid = llm.info.pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda: llm.dead is not None)
        await until(lambda: llm.dead is None)
        assert llm.info.pid != pid and await run(llm, request(0)) == want
    os.kill(llm.info.pid, signal.SIGKILL)
    await until(lambda: "left alone" in str(llm.dead))


@with_engine(layers=32, engine_timeout=2.0)
async def test_a_core_that_stops_is_noticed_and_well_again_when_it_goes_on(llm):
    want = await run(llm, request(0))
    running = asyncio.create_task(run(llm, request(1, 500)))
    await asyncio.sleep(0.1)
    os.kill(llm.info.pid, signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"no sign of life for 2 s.*--engine-timeout"):
        await running
    for call in (run(llm, request("new")), llm.stats()):
        with pytest.raises(EngineDeadError, match="no sign of life"):
            await call
    os.kill(llm.info.pid, signal.SIGCONT)
    await until(lambda: llm.dead is None)
    assert await run(llm, request(0)) == want
    await llm.check()
    assert (await llm.stats()).num_running == 0, "what failed goes on"


@pytest.mark.slow
@with_engine(engine_timeout=2.0, restart=True)
async def test_a_core_that_stops_is_killed_and_started_again_with_restart(llm):
    pid, want = llm.info.pid, await run(llm, request(0))
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: llm.info.pid != pid and llm.dead is None)
    assert not psutil.pid_exists(pid) and await run(llm, request(0)) == want


async def run_until_a_rank_is_lost(llm, number):
    """Three requests run when a rank gets the signal. Each of them must end with one error, which names the
    rank; the engine starts again, and nobody of the old one is left."""
    core = psutil.Process(llm.info.pid)
    [rank] = core.children()
    asked = [request(i, 200) for i in range(3)]
    tasks = [asyncio.create_task(run(llm, one)) for one in asked]
    await asyncio.sleep(0.5)
    begun = time.monotonic()
    rank.send_signal(number)
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert time.monotonic() - begun < 20
    await until(lambda: llm.dead is None)
    assert not core.is_running() and not rank.is_running()
    assert len((await run(llm, request(0)))[0]) == 8
    return [f"{type(error).__name__}: {error}" for error in errors], rank.pid


@with_engine(layers=6, restart=True, engine={"tensor_parallel_size": 2})
async def test_requests_end_with_one_error_each_when_a_rank_is_killed(llm):
    errors, pid = await run_until_a_rank_is_lost(llm, signal.SIGKILL)
    assert all(re.match(rf"EngineDeadError: .*rank 1 \(pid {pid}\) was killed by SIGKILL", e) for e in errors)


@with_engine(layers=6, restart=True, engine={"tensor_parallel_size": 2})
async def test_requests_end_with_one_error_each_when_a_rank_is_stopped(llm):
    """The core itself lives, and waits for a rank that does nothing."""
    errors, pid = await run_until_a_rank_is_lost(llm, signal.SIGSTOP)
    assert all(
        re.match(rf"EngineDeadError: .*rank 1 \(pid {pid}\) is stopped .* in 'step'", e) for e in errors
    )


@with_engine(engine_timeout=2.0)
async def test_an_idle_core_and_a_closed_one_are_not_hung(llm):
    await asyncio.sleep(3)
    assert llm.dead is None and len((await run(llm, request(0)))[0]) == 8


@pytest.mark.slow
@with_engine(restart=True)
async def test_a_core_comes_back_as_soon_as_there_are_descriptors(llm):
    """However many tries fail for want of them."""
    want = await run(llm, request(0))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_llm, "SHORTAGE_PAUSE_S", 0.1)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() - 5, hard))
            os.kill(llm.info.pid, signal.SIGKILL)
            await until(lambda: llm.dead is not None)
            await asyncio.sleep(2)
            assert llm.dead is not None
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await until(lambda: llm.dead is None)
    assert await run(llm, request(0)) == want


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"model": "/nowhere"}, CheckpointError, "/nowhere"),
        ({"tensor_parallel_size": 4}, ConfigError, "tensor_parallel_size"),
        ({"max_model_len": 100000}, ConfigError, "max_model_len"),
    ],
    ids=str,
)
def test_what_keeps_the_engine_from_starting_is_raised_here(options, kind, words, checkpoint):
    with pytest.raises(kind, match=words):
        asyncio.run(AsyncLLM.start(config(checkpoint, **options)))


def test_a_core_that_dies_while_it_starts(checkpoint, new_children):
    async def start():
        starting = asyncio.create_task(AsyncLLM.start(config(checkpoint)))
        await until(new_children)
        new_children()[0].kill()
        with pytest.raises(EngineDeadError, match="SIGKILL while it was starting"):
            await starting

    asyncio.run(start())


@pytest.mark.slow
def test_cores_that_are_killed_in_mid_word_hold_nobody_up(monkeypatch):
    """Regression: the socket library waited for ever for the end of a connection with an unread message."""

    def spawn(folder, device):
        command = [sys.executable, "-m", "tests.process.toy_core", str(folder)]
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
        )

    async def check():
        for number in range(50):
            llm = await AsyncLLM.start(EngineConfig(model="toy", device="cpu"))
            assert await run(llm, request("before"))
            os.kill(llm._core.pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(run(llm, request(f"behind {number}", prompt=[1] * 480)), 20)
            await llm.close()

    monkeypatch.setattr(core_process, "_spawn", spawn)
    asyncio.run(check())


def test_a_start_that_is_cancelled_leaves_no_process(checkpoint, new_children):
    async def start():
        starting = asyncio.create_task(AsyncLLM.start(config(checkpoint)))
        await until(new_children)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(start())
    assert not new_children()


@pytest.mark.parametrize("ready", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_core_and_its_ranks_die_with_the_parent(ready, checkpoint, temporary):
    script = textwrap.dedent(f"""
        import asyncio, tempfile
        tempfile.tempdir = {str(temporary)!r}
        from shoal.config import EngineConfig
        from shoal.engine.process.async_llm import AsyncLLM
        async def main():
            llm = AsyncLLM.start(EngineConfig(model={str(checkpoint)!r}, device="cpu", dtype="float32",
                                              kv_cache_memory_bytes=1 << 22, tensor_parallel_size=2))
            if {ready}:
                await llm
                print("ready", flush=True)
            else:
                task = asyncio.create_task(llm)
                await asyncio.sleep(1)
                print("starting", flush=True)
            await asyncio.sleep(600)
        asyncio.run(main())""")
    parent = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert parent.stdout.readline()
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) >= (2 if ready else 1)
    parent.kill()
    parent.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
