"""Engines in processes of their own that take their weights out of another one's GPU memory."""

import asyncio

import pytest
import torch

from shoal.config import EngineConfig
from shoal.engine.process.async_llm import AsyncLLM
from shoal.errors import UnavailableError
from shoal.weights.fingerprint import tensors_fingerprint
from shoal.weights.source import resolve
from shoal.wire import LendWeights, TakeBackWeights
from tests import quantized, tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")

BORROWED = "has its weights from another worker, by"


def lend_and_borrow(folder, own=None, **options):
    """The checksums of an engine, and of one that begins with its weights. `own`: the owner's own options."""

    def config(options):
        sizes = {"max_model_len": 128, "max_num_seqs": 4, "kv_cache_memory_bytes": 16 << 20}
        return EngineConfig(
            model=str(folder), enforce_eager=True, skip_tokenizer_init=True, **sizes | options
        )

    async def run():
        owner = await AsyncLLM.start(config(options | (own or {})))
        try:
            asked = asyncio.ensure_future(
                owner.control(LendWeights(tensors_fingerprint(resolve(str(folder))), "b"))
            )
            borrower = await AsyncLLM.start(config(options), loan=asked)
            try:
                await owner.control(TakeBackWeights("b"))
                return await owner.check_weights(), await borrower.check_weights()
            finally:
                await borrower.close()
        finally:
            await owner.close()

    return asyncio.run(run())


@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}, {"quantization": "fp8"}], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_weights_come_from_the_same_card_by_cuda_ipc(name, options, tmp_path, capfd):
    lent, borrowed = lend_and_borrow(tiny.write_model(tmp_path, name), **options)
    assert lent == borrowed
    assert f"{BORROWED} CUDA IPC" in capfd.readouterr().err


@pytest.mark.parametrize("kind", ["fp8-blocks", "fp8-channel", "fp8-tensor"])
def test_checkpoints_in_fp8_come_as_they_lie(kind, tmp_path, capfd):
    quantized.write(tmp_path, kind)
    lent, borrowed = lend_and_borrow(tmp_path)
    assert lent == borrowed
    assert BORROWED in capfd.readouterr().err


def test_weights_that_can_sleep_take_those_of_an_owner_that_cannot(tmp_path, capfd):
    folder = tiny.write_model(tmp_path, "qwen3")
    lent, borrowed = lend_and_borrow(folder, {"enable_sleep_mode": False}, enable_sleep_mode=True)
    assert lent == borrowed
    assert BORROWED in capfd.readouterr().err


def test_an_owner_that_can_sleep_lends_by_nixl_or_says_why_not(tmp_path, capfd):
    folder = tiny.write_model(tmp_path, "qwen3")
    try:
        lent, borrowed = lend_and_borrow(folder, enable_sleep_mode=True)
    except UnavailableError as error:
        assert "enable_sleep_mode" in str(error) and "NIXL" in str(error)
    else:
        assert lent == borrowed and f"{BORROWED} NIXL" in capfd.readouterr().err


@two
def test_each_rank_has_its_shard_from_the_owners_rank(tmp_path, capfd):
    lent, borrowed = lend_and_borrow(tiny.write_model(tmp_path, "qwen3"), tensor_parallel_size=2)
    assert lent == borrowed
    told = capfd.readouterr().err
    assert f"rank 0 {BORROWED}" in told and f"rank 1 {BORROWED}" in told
