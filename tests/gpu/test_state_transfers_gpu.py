"""Engines with recurrent layers on a GPU: conversations come back from host memory, and prompts and conversations go
from one engine to another, with the tokens of an engine alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import EngineConfig
from shoal.engine.core import EngineCore
from shoal.weights.source import resolve
from tests.cpu.engine.test_family_tiers import one_by_one, run
from tests.cpu.engine.test_state_transfers import LENDS, READS, prompts
from tests.tiny_families import write_family

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

Build = Callable[..., EngineCore]


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    made = []

    def make(name: str, role: dict[str, str] | None = None, **options: Any) -> EngineCore:
        defaults = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4, "enforce_eager": True}
        defaults["kv_cache_memory_bytes"] = 64 << 20
        transfer = {} if role is None else {"kv_transfer_config": role}
        config = EngineConfig(model=str(write_family(tmp_path, name)), **defaults | transfer | options)
        made.append(EngineCore(config, resolve(config.model, None, None)))
        return made[-1]

    yield make
    for core in made:
        core.check()
        core.exit()


@pytest.mark.parametrize("name", ["qwen3.5", "granite4-mamba"])
def test_prompts_and_conversations_go_to_another_engine(name: str, build: Build) -> None:
    [prompt] = prompts(1, 150)
    [expected], _, _ = run(build(name), [(prompt, {})], max_tokens=40)
    lender, reader = build(name, LENDS), build(name, READS)
    [first], [ticket], _ = run(lender, [(prompt, {"offers_kv": True})], max_tokens=1)
    fields = {"output_token_ids": first, "kv_ticket": ticket}
    [rest], _, [cached] = run(reader, [(prompt, fields)], max_tokens=40)
    assert first + rest == expected and cached == 144
    [begun], _, _ = run(lender, [(prompt, {})], max_tokens=30)
    ticket, other = lender.lend_kv(prompt + begun), build(name, READS)
    fields = {"output_token_ids": begun, "kv_ticket": ticket}
    [rest], _, [cached] = run(other, [(prompt, fields)], max_tokens=40)
    assert begun + rest == expected and cached == 176
    assert not reader.stats().kv_transfer_failures and not other.stats().kv_transfer_failures


def test_conversations_come_back_from_host_memory(build: Build) -> None:
    runner = build("qwen3.5").ranks.runner
    size = runner.states.nbytes + 30 * runner.cache.plan.block_bytes + 8 * runner.states.plan.row_bytes
    below = {"kv_host_bytes": 64 << 20, "kv_load_policy": "always"}
    core = build("qwen3.5", kv_cache_memory_bytes=size, **below)
    plain = build("qwen3.5", enable_prefix_caching=False)
    asked = prompts(8)
    for turn in range(3):
        answers, cached = one_by_one(core, asked)
        assert answers == one_by_one(plain, asked)[0]
        assert not turn or all(len(prompt) - 9 - 16 <= found for prompt, found in zip(asked, cached))
        asked = [prompt + answer + [7] * 9 for prompt, answer in zip(asked, answers)]
    assert core.stats().kv_tiers["host"].fetched_blocks > 8
