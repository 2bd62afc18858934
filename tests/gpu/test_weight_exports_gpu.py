"""Engines that take their weights out of the GPU memory of one in another process."""

import asyncio
import logging

import pytest
import torch

from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.engine.process.async_llm import AsyncLLM
from shoal.errors import UnavailableError
from shoal.weights.fingerprint import tensors_fingerprint
from shoal.weights.source import resolve
from shoal.wire import LendWeights, TakeBackWeights
from tests import quantized, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

BORROWED, FROM_FILES = "has its weights from another worker, by", "reads the weights from files"


@pytest.fixture
def said(caplog, capfd):
    """Returns the log of this process and its ranks."""
    caplog.set_level(logging.INFO)
    return lambda: caplog.text + capfd.readouterr().err


def lend_and_borrow(folder, own=None, **options):
    """The checksums of an engine in a process of its own, and of one here that begins with its weights.
    `own`: the owner's own options."""

    def config(options):
        sizes = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
        return EngineConfig(
            model=str(folder), enforce_eager=True, skip_tokenizer_init=True, **sizes | options
        )

    def read_export(data):
        core = EngineCore(config(options), resolve(str(folder)), peer_weights=data)
        try:
            return core.check_weights()
        finally:
            core.exit()

    async def run():
        owner = await AsyncLLM.start(config(options | (own or {})))
        try:
            data = await owner.control(LendWeights(tensors_fingerprint(resolve(str(folder))), "b"))
            borrowed = await asyncio.to_thread(read_export, data)
            await owner.control(TakeBackWeights("b"))
            return await owner.check_weights(), borrowed
        finally:
            await owner.close()

    return asyncio.run(run())


@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}, {"quantization": "fp8"}], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_weights_come_from_the_same_card_by_cuda_ipc(name, options, tmp_path, said):
    lent, borrowed = lend_and_borrow(tiny.write_model(tmp_path, name), **options)
    assert lent == borrowed
    assert f"{BORROWED} CUDA IPC" in said()


@pytest.mark.parametrize("kind", ["fp8-blocks", "fp8-channel", "fp8-tensor"])
def test_checkpoints_in_fp8_come_as_they_lie(kind, tmp_path, said):
    quantized.write(tmp_path, kind)
    lent, borrowed = lend_and_borrow(tmp_path)
    assert lent == borrowed
    assert BORROWED in said()


def test_weights_that_can_sleep_take_those_of_an_owner_that_cannot(tmp_path, said):
    folder = tiny.write_model(tmp_path, "qwen3")
    lent, borrowed = lend_and_borrow(folder, {"enable_sleep_mode": False}, enable_sleep_mode=True)
    assert lent == borrowed
    assert BORROWED in said()


def test_an_owner_that_can_sleep_lends_by_nixl_or_says_why_not(tmp_path, said):
    folder = tiny.write_model(tmp_path, "qwen3")
    try:
        lent, borrowed = lend_and_borrow(folder, enable_sleep_mode=True)
    except UnavailableError as error:
        assert "enable_sleep_mode" in str(error) and "NIXL" in str(error)
    else:
        assert lent == borrowed and f"{BORROWED} NIXL" in said()


@two
def test_each_rank_has_its_shard_from_the_owners_rank(tmp_path, said):
    lent, borrowed = lend_and_borrow(tiny.write_model(tmp_path, "qwen3"), tensor_parallel_size=2)
    assert lent == borrowed
    told = said()
    assert f"rank 0 {BORROWED}" in told and FROM_FILES not in told  # which rank 1 would say aloud
