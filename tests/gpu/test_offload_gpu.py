"""Tiers below a GPU: blocks large enough for the copy engines and small ones, beside graphs and asynchronous
steps; two ranks; sleep."""

import random
import time

import pytest
import torch

from shoal import SamplingParams
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LARGE = ("qwen3-tied", dict(block_size=256, num_gpu_blocks_override=5))  # 384 KiB a block
SMALL = ("qwen3", dict(block_size=16, num_gpu_blocks_override=44))  # 12 KiB
PROMPTS = [[random.Random(i).randrange(256) for _ in range(290)] for i in range(10)]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def greedy():
    return SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


@pytest.fixture
def engine_options():
    return {
        "dtype": "float32",
        "max_model_len": 320,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 256 << 20,  # whatever other processes take of the card
        "max_num_seqs": 16,
        "kv_load_policy": "always",
    }


def one_by_one(llm):
    outputs = [llm.generate([prompt], greedy())[0] for prompt in PROMPTS]
    return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]


def settle(llm):
    while llm.core.tick():
        time.sleep(0.001)


def expected(root, name):
    return [tiny.greedy(tiny.write_model(root, name), prompt, 10) for prompt in PROMPTS]


@pytest.mark.parametrize("policy", ["evict", "register"])
@pytest.mark.parametrize("name, options", [LARGE, SMALL], ids=["large", "small"])
def test_what_comes_back_from_host_memory_is_what_left(name, options, policy, root, build):
    llm = build(name, **options, kv_host_bytes=256 << 20, kv_offload_policy=policy)
    settle(llm)
    assert one_by_one(llm)[0] == expected(root, name)
    tokens, cached = one_by_one(llm)
    full = 289 // options["block_size"] * options["block_size"]
    assert tokens == expected(root, name) and cached.count(full) >= 9, cached
    for _ in range(3):
        assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, greedy())] == tokens
        llm.core.check()
    settle(llm)


def test_a_disk_and_a_sleep(root, build, tmp_path):
    name, options = LARGE
    disk = dict(kv_disk_path=str(tmp_path / "kv"), kv_disk_bytes=1 << 28)
    first = build(name, **options, **disk)
    assert one_by_one(first)[0] == expected(root, name)
    first.exit()
    llm = build(name, **options, **disk, kv_host_bytes=64 << 20, enable_sleep_mode=True)
    tokens, cached = one_by_one(llm)
    assert tokens == expected(root, name) and cached == [256] * 10
    llm.sleep()
    llm.wake_up()
    tokens, cached = one_by_one(llm)
    assert tokens == expected(root, name) and cached == [256] * 10


@two_gpus
def test_two_ranks(root, build):
    name, options = SMALL
    llm = build(name, **options, kv_host_bytes=64 << 20, tensor_parallel_size=2)
    settle(llm)
    assert one_by_one(llm)[0] == expected(root, name)
    tokens, cached = one_by_one(llm)
    assert tokens == expected(root, name) and cached.count(288) >= 9, cached
