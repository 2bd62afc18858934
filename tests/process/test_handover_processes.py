"""Prefill and decode apart, in real processes: KV blocks through shared memory, between ranks, and from an
owner that is killed."""

import asyncio
import contextlib
import os
import random
import signal
import time

import pytest

from shoal.api import Request
from shoal.config import EngineConfig
from shoal.engine.process.async_llm import AsyncLLM
from shoal.errors import EngineDeadError
from shoal.kv.transfer.ticket import unseal
from shoal.sampling_params import SamplingParams
from tests import shared_memory, tiny
from tests.tiny_families import write_family

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("quick_starts")]

COUNT = 8
DEADLINE_S = 240


@pytest.fixture(autouse=True)
def nothing_in_dev_shm():
    before = shared_memory.names()
    yield
    shared_memory.assert_nothing_left(before)


def config(folder, role, lease_s=300.0, **options):
    defaults = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": 8 << 20, "max_model_len": 512}
    transfer = {"kv_role": role, "lease_s": lease_s}
    return EngineConfig(model=str(folder), kv_transfer_config=transfer, **defaults | options)


def prompts(count, length=100, seed=3):
    rng = random.Random(seed)
    return [rng.choices(range(256), k=length) for _ in range(count)]


def request(name, prompt, first=(), **options):
    fields = {key: options.pop(key) for key in ("offers_kv", "kv_ticket", "fetches_only") if key in options}
    params = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options
    return Request(name, prompt, SamplingParams(**params), output_token_ids=list(first), **fields)


async def answer(llm, asked):
    """The tokens, and the ticket if there is one."""
    tokens, ticket = [], None
    async for output in llm.generate(asked):
        tokens += output.token_ids
        ticket = ticket or output.kv_ticket
    return tokens, ticket


async def handed_over(lender, reader, name, prompt):
    first, ticket = await answer(lender, request(f"p{name}", prompt, max_tokens=1, offers_kv=True))
    rest, _ = await answer(reader, request(f"d{name}", prompt, first, kv_ticket=ticket))
    return first + rest


async def apart(lender, reader, name, prompt):
    """The same, with a prefetch request: blocks travel while later ones are computed."""
    first, prefetch = [], None
    async for output in lender.generate(request(f"p{name}", prompt, offers_kv=True, max_tokens=1)):
        if output.kv_ticket is not None:
            ahead = request(f"f{name}", prompt, kv_ticket=output.kv_ticket, fetches_only=True)
            prefetch = asyncio.create_task(answer(reader, ahead))
            await asyncio.sleep(0)
        first += output.token_ids
    behind = request(f"d{name}", prompt, first)
    behind.continues = f"f{name}" if prefetch is not None else None
    rest, _ = await answer(reader, behind)
    if prefetch is not None:
        assert await prefetch == ([], None)
    return first + rest


async def in_time(engine, awaited):
    try:
        return await asyncio.wait_for(awaited, DEADLINE_S)
    except TimeoutError:
        raise AssertionError(f"nothing comes: {await engine.stats()}") from None


async def all_is_given_back(*engines):
    until = time.monotonic() + DEADLINE_S
    while True:
        stats = [await llm.stats() for llm in engines]
        if all(s.num_free_blocks == s.num_blocks for s in stats):
            break
        assert time.monotonic() < until, f"blocks are held: {stats}"
        await asyncio.sleep(0.01)
    for llm in engines:
        await llm.check()
    return stats


async def start(*configs):
    return await asyncio.gather(*map(AsyncLLM.start, configs))


def test_blocks_go_from_process_to_process(folder):
    async def check():
        lender, reader = await start(config(folder, "kv_producer"), config(folder, "kv_consumer"))
        asked = prompts(12)
        found = await asyncio.gather(*(handed_over(lender, reader, i, p) for i, p in enumerate(asked)))
        assert found == [tiny.greedy(folder, prompt, COUNT) for prompt in asked]
        lent, read = await all_is_given_back(lender, reader)
        [(name, transfers)] = read.kv_transfers.items()
        assert (name, transfers.blocks, read.kv_transfer_failures) == ("shared_memory", 12 * 7, {})
        assert lent.kv_loans.blocks_out == 12 * 7 and lent.kv_loans.bytes_out == transfers.num_bytes
        await reader.close()
        await lender.close()

    asyncio.run(check())


@pytest.mark.parametrize(
    "length, options",
    [
        (100, {}),
        (100, {"block_size": 32}),
        (100, {"kv_cache_dtype": "fp8"}),
        (100, {"kv_host_bytes": 4 << 20, "num_gpu_blocks_override": 20, "kv_load_policy": "always"}),
        (96, {}),
        (5, {}),
    ],
    ids=str,
)
def test_the_decode_workers_first_step_computes_one_token(folder, length, options):
    """Whatever part of the prompt's last block it fills: this step and those behind it are decodes."""

    async def check():
        lender, reader = await start(
            config(folder, "kv_producer", **options), config(folder, "kv_consumer", **options)
        )
        for i, prompt in enumerate(prompts(4, length)):
            before = await reader.stats()
            found = await apart(lender, reader, i, prompt)
            after = await reader.stats()
            if "kv_cache_dtype" in options:  # one worker's tokens, not the oracle's
                assert found == (await answer(lender, request(f"one{i}", prompt)))[0]
            else:
                assert found == tiny.greedy(folder, prompt, COUNT)
            assert after.step_tokens - before.step_tokens == COUNT - 1
            assert after.steps_by_tokens[0] - before.steps_by_tokens[0] == COUNT - 1
        assert (await all_is_given_back(lender, reader))[1].kv_transfer_failures == {}
        await reader.close()
        await lender.close()

    asyncio.run(check())


@pytest.mark.slow
@pytest.mark.parametrize("lender_tp, reader_tp", [(2, 1), (1, 2)])
def test_blocks_go_between_tensor_parallel_sizes(folder, lender_tp, reader_tp):
    """While the prompts are computed, in chunks that end within blocks; one has a prefix that the reader knows."""

    async def check():
        lender, reader = await start(
            config(folder, "kv_producer", tensor_parallel_size=lender_tp, max_num_batched_tokens=40),
            config(folder, "kv_consumer", tensor_parallel_size=reader_tp),
        )
        asked = prompts(4, 120)
        found = await asyncio.gather(*(apart(lender, reader, i, p) for i, p in enumerate(asked)))
        asked.append(asked[0][:100] + asked[1][:20])
        found.append(await apart(lender, reader, 4, asked[4]))
        assert found == [tiny.greedy(folder, prompt, COUNT) for prompt in asked]
        _, read = await all_is_given_back(lender, reader)
        assert read.kv_transfers["shared_memory"].blocks == 4 * 8 + 2 and not read.kv_transfer_failures
        # a ticket that is of no use to any rank, and an abort
        first, ticket = await answer(lender, request("p", asked[0][::-1], max_tokens=1, offers_kv=True))
        assert await lender.reset_prefix_cache()
        rest, _ = await answer(reader, request("d", asked[0][::-1], first, kv_ticket=ticket))
        assert first + rest == tiny.greedy(folder, asked[0][::-1], COUNT)
        _, read = await all_is_given_back(lender, reader)
        assert read.kv_transfer_failures == {"ended": 1}
        await reader.close()
        await lender.close()

    asyncio.run(check())


@pytest.mark.slow
@pytest.mark.parametrize("lender_tp, reader_tp", [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["gemma3", "gpt-oss-plain", "deepseek-v3"])
def test_blocks_of_several_groups_go_between_tensor_parallel_sizes(name, root, lender_tp, reader_tp):
    """By heads, group by group; a latent is the same on every rank."""
    folder = write_family(root, name)

    async def check():
        lender, reader = await start(
            config(folder, "kv_producer", tensor_parallel_size=lender_tp, max_num_batched_tokens=40),
            config(folder, "kv_consumer", tensor_parallel_size=reader_tp),
        )
        asked = prompts(2, 120)
        found = await asyncio.gather(*(apart(lender, reader, i, p) for i, p in enumerate(asked)))
        assert found == [tiny.greedy(folder, prompt, COUNT) for prompt in asked]
        _, read = await all_is_given_back(lender, reader)
        assert read.kv_transfers["shared_memory"].blocks >= 2 * 8 and not read.kv_transfer_failures
        await reader.close()
        await lender.close()

    asyncio.run(check())


def test_an_owner_that_is_killed_between_layers_costs_time_and_no_token(folder):
    async def check():
        [reader] = await start(config(folder, "kv_consumer"))
        for attempt, delay in enumerate((0.01, 0.03)):
            [lender] = await start(config(folder, "kv_producer", max_num_batched_tokens=32))
            prompt = prompts(1, 480, seed=attempt)[0]
            ahead, pid = [], lender._core.pid
            asked = request(f"p{attempt}", prompt, max_tokens=1, offers_kv=True)
            with contextlib.suppress(EngineDeadError):
                async for output in lender.generate(asked):
                    if output.kv_ticket is not None:
                        fetching = request(
                            f"f{attempt}", prompt, kv_ticket=output.kv_ticket, fetches_only=True
                        )
                        ahead.append(asyncio.create_task(answer(reader, fetching)))
                        await asyncio.sleep(delay)
                        os.kill(pid, signal.SIGKILL)
            assert ahead, "it gave a ticket before it was killed"
            behind = request(f"d{attempt}", prompt)
            behind.continues = f"f{attempt}"
            tokens, _ = await in_time(reader, answer(reader, behind))
            assert tokens == tiny.greedy(folder, prompt, COUNT)
            assert await in_time(reader, ahead[0]) == ([], None)
            await all_is_given_back(reader)
            await lender.close()
        assert (await reader.stats()).kv_transfer_failures.keys() <= {"lost", "unreachable"}
        await reader.close()

    asyncio.run(check())


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_owner_that_is_killed_costs_time_and_no_token(folder, seed):
    """At any moment: before its blocks are asked for, while they travel, afterwards."""

    async def check():
        rng = random.Random(seed)
        [reader] = await start(config(folder, "kv_consumer"))
        for attempt in range(3):
            [lender] = await start(config(folder, "kv_producer"))
            asked = prompts(8, 300, seed=10 * seed + attempt)
            firsts = [
                await answer(lender, request(f"p{attempt}.{i}", prompt, max_tokens=1, offers_kv=True))
                for i, prompt in enumerate(asked)
            ]
            reading = [
                asyncio.create_task(
                    answer(reader, request(f"d{attempt}.{i}", prompt, first, kv_ticket=ticket))
                )
                for i, (prompt, (first, ticket)) in enumerate(zip(asked, firsts))
            ]
            await asyncio.sleep(rng.choice((0, 0.005, 0.02, 0.05)))
            os.kill(lender._core.pid, signal.SIGKILL)
            for prompt, (first, _), task in zip(asked, firsts, reading):
                assert first + (await task)[0] == tiny.greedy(folder, prompt, COUNT)
            await all_is_given_back(reader)
            with pytest.raises(EngineDeadError):
                await lender.stats()
            await lender.close()
        await reader.close()

    asyncio.run(check())


def test_a_reader_that_is_killed_or_goes_away_lets_the_owner_go(folder):
    async def check():
        # Blocks whose reader never asked for them are held for the lease.
        lender, reader = await start(
            config(folder, "kv_producer", lease_s=30.0), config(folder, "kv_consumer")
        )
        for attempt in range(3):
            asked = prompts(8, 300, seed=attempt)
            tickets = []
            for i, prompt in enumerate(asked):
                name = f"p{attempt}.{i}"
                tickets.append(await answer(lender, request(name, prompt, max_tokens=1, offers_kv=True)))
            reading = [
                asyncio.create_task(
                    answer(reader, request(f"d{attempt}.{i}", prompt, first, kv_ticket=ticket))
                )
                for i, (prompt, (first, ticket)) in enumerate(zip(asked, tickets))
            ]
            await asyncio.sleep(0.02)
            for task in reading[::2]:  # their clients leave
                task.cancel()
            if attempt == 2:
                os.kill(reader._core.pid, signal.SIGKILL)
            await asyncio.gather(*reading, return_exceptions=True)
            live = [lender] if attempt == 2 else [lender, reader]
            if attempt == 2:  # those whose readers never came are held until their lease ends
                held = {block for _, ticket in tickets for block in unseal(ticket).blocks}
                assert (await lender.stats()).kv_loans.held_blocks <= len(held)
                await lender.reset_prefix_cache()
            await all_is_given_back(*live)
        await reader.close()
        await lender.close()

    asyncio.run(check())
