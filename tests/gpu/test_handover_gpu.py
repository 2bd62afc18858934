"""Prefill and decode apart on GPUs: KV blocks by CUDA IPC, beside steps in flight, tiers and small caches."""

import asyncio
import os
import random
import signal

import pytest
import torch

from shoal.api import Request
from shoal.config import EngineConfig
from shoal.engine.process.async_llm import AsyncLLM
from shoal.sampling_params import SamplingParams
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

COUNT = 16


def config(folder, role, **options):
    defaults = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": 32,
        "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.3,
    }
    return EngineConfig(model=str(folder), kv_transfer_config={"kv_role": role}, **defaults | options)


def request(name, prompt, first=(), **options):
    fields = {key: options.pop(key) for key in ("offers_kv", "kv_ticket", "fetches_only") if key in options}
    params = {"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options
    return Request(name, prompt, SamplingParams(**params), output_token_ids=list(first), **fields)


async def answer(llm, asked):
    tokens, ticket = [], None
    async for output in llm.generate(asked):
        tokens += output.token_ids
        ticket = ticket or output.kv_ticket
    return tokens, ticket


async def handed_over(lender, reader, name, prompt):
    """The prefetch request reads each layer behind its event, while the prompt is computed."""
    first, prefetch = [], None
    async for output in lender.generate(request(f"p{name}", prompt, max_tokens=1, offers_kv=True)):
        if output.kv_ticket is not None:
            ahead = request(f"f{name}", prompt, kv_ticket=output.kv_ticket, fetches_only=True)
            prefetch = asyncio.create_task(answer(reader, ahead))
            await asyncio.sleep(0)  # It is sent before its continuation.
        first += output.token_ids
    behind = request(f"d{name}", prompt, first)
    behind.continues = f"f{name}"
    rest, _ = await answer(reader, behind)
    assert await prefetch == ([], None)
    return first + rest


@pytest.mark.parametrize(
    "lender_options, reader_options",
    [
        ({}, {}),
        ({"enforce_eager": True}, {}),
        ({"max_num_batched_tokens": 100}, {}),
        ({}, {"num_gpu_blocks_override": 120, "kv_host_bytes": 64 << 20}),
        ({"num_gpu_blocks_override": 120}, {"num_gpu_blocks_override": 60}),
        pytest.param({"tensor_parallel_size": 2}, {}, marks=two),
        pytest.param({}, {"tensor_parallel_size": 2}, marks=two),
    ],
    ids=str,
)
def test_two_engines_give_the_oracles_tokens(folder, lender_options, reader_options):
    """Many at once, so that blocks arrive while steps of other sequences are in flight, and take the place of
    blocks that are being copied out."""

    async def check():
        lender = await AsyncLLM.start(config(folder, "kv_producer", **lender_options))
        reader = await AsyncLLM.start(config(folder, "kv_consumer", **reader_options))
        prompts = [random.Random(i).choices(range(256), k=40 + 5 * i) for i in range(40)]
        expected = [tiny.greedy(folder, prompt, COUNT) for prompt in prompts]
        for turn in range(3):
            tasks = (handed_over(lender, reader, f"{turn}.{i}", p) for i, p in enumerate(prompts))
            assert await asyncio.gather(*tasks) == expected
        stats = await reader.stats()
        assert stats.kv_transfers["cuda_ipc"].blocks > 0 and not stats.kv_transfer_failures
        await reader.check()
        await lender.check()
        await reader.close()
        await lender.close()

    asyncio.run(check())


@pytest.mark.parametrize("length", [96, 100, 111], ids=lambda length: f"{length % 16} of 16")
def test_the_decode_workers_first_step_is_a_decode_of_one_token(folder, length):
    """Also if the prompt is not a whole number of blocks, and the first token fills its last one. With graphs,
    a decode of one token is a captured one."""

    async def check():
        lender = await AsyncLLM.start(config(folder, "kv_producer"))
        reader = await AsyncLLM.start(config(folder, "kv_consumer"))
        for i in range(4):
            prompt = random.Random(i).choices(range(256), k=length)
            before = await reader.stats()
            found = await handed_over(lender, reader, str(i), prompt)
            after = await reader.stats()
            assert found == tiny.greedy(folder, prompt, COUNT)
            assert after.step_tokens - before.step_tokens == COUNT - 1
            assert after.steps_by_tokens[0] - before.steps_by_tokens[0] == COUNT - 1
            assert after.kv_transfers["cuda_ipc"].blocks == (i + 1) * -(-length // 16)
        assert not after.kv_transfer_failures
        await reader.check()
        await lender.check()
        await reader.close()
        await lender.close()

    asyncio.run(check())


def test_an_owner_that_is_killed_costs_time_and_no_token(folder):
    async def check():
        lender = await AsyncLLM.start(config(folder, "kv_producer"))
        reader = await AsyncLLM.start(config(folder, "kv_consumer"))
        prompts = [random.Random(i).choices(range(256), k=400) for i in range(16)]
        firsts = [
            await answer(lender, request(f"p{i}", prompt, max_tokens=1, offers_kv=True))
            for i, prompt in enumerate(prompts)
        ]
        reading = [
            asyncio.create_task(answer(reader, request(f"d{i}", prompt, first, kv_ticket=ticket)))
            for i, (prompt, (first, ticket)) in enumerate(zip(prompts, firsts))
        ]
        await asyncio.sleep(0.005)
        os.kill(lender._core.pid, signal.SIGKILL)
        for prompt, (first, _), task in zip(prompts, firsts, reading):
            assert first + (await task)[0] == tiny.greedy(folder, prompt, COUNT)
        await reader.check()
        await reader.close()
        await lender.close()

    asyncio.run(check())
