"""Two ranks on the CPU (Gloo): one rank's tokens, greedy and seeded; errors and deaths reach the caller;
nothing stays behind."""

import os
import random
import shutil
import signal
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from shoal import LLM, SamplingParams
from shoal.engine.runner import rank_weights
from shoal.engine.runner.rank_memory import CpuRegions
from shoal.errors import EngineDeadError
from tests import tiny
from tests.cpu.models.test_families import assert_greedy, prompts_of
from tests.ranks import pids_of_ranks
from tests.tiny_families import FAMILIES, write_family

pytestmark = pytest.mark.usefixtures("quick_starts")

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 7, 33, 80))]


def params(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | options)


def ids_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


def build(folder, **options):
    return LLM(
        str(folder),
        **{"dtype": "float32", "max_model_len": 256, "device": "cpu", "tensor_parallel_size": 2} | options,
    )


MORE = [pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2-yarn", "mistral-window")]


@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3-windows", "llama-one-kv-head", "qwen3-moe", *tiny.UNLIKE_LLAMA, *MORE]
)
def test_two_ranks_give_the_oracles_tokens(name, root):
    folder = tiny.write_model(root, name)
    with build(folder) as llm:
        assert ids_of(llm.generate(PROMPTS, params())) == [tiny.greedy(folder, p, 12) for p in PROMPTS]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_ranks_give_the_tokens_of_each_family(name, root):
    folder = write_family(root, name)
    with build(folder) as llm:
        assert_greedy(llm.generate(prompts_of(name), params()), folder)


def test_each_rank_has_the_scales_of_its_own_heads_in_an_fp8_cache(root, tmp_path):
    folder = shutil.copytree(tiny.write_model(root, "qwen3"), tmp_path / "scaled")
    names = [f"model.layers.{i}.self_attn.{kind}_scale" for i in range(3) for kind in "kv"]
    # 2^-4 and 2^-11: the second head's numbers are cut off, which shows where the scales of one are the other's
    scales = {name: torch.tensor([2.0**-4, 2.0**-11]) for name in names}
    file = folder / "model.safetensors"
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    answers = []
    for ranks in (1, 2):
        with build(folder, tensor_parallel_size=ranks, kv_cache_dtype="fp8") as llm:
            answers.append(ids_of(llm.generate(PROMPTS, params())))
    with build(folder, tensor_parallel_size=1) as llm:
        plain = ids_of(llm.generate(PROMPTS, params()))
    assert answers[0] == answers[1] != plain


def test_no_rank_ever_differs_in_what_was_drawn(root):
    """Sampled runs with penalties and a cache so small that sequences are preempted: every rank's state rows
    equal rank 0's."""
    folder = tiny.write_model(root, "qwen3")
    seeded = [
        params(
            temperature=1.3,
            seed=i,
            top_p=0.9,
            repetition_penalty=1.2 if i % 2 else 1.0,
            prompt_logprobs=1 if i == 2 else None,
        )
        for i in range(len(PROMPTS))
    ]
    with build(folder, tensor_parallel_size=1) as llm:
        alone = ids_of(llm.generate(PROMPTS, seeded))
    with build(folder, num_gpu_blocks_override=8, max_model_len=112, async_scheduling=True) as llm:
        assert ids_of(llm.generate(PROMPTS, seeded)) == alone
        first, second = llm.collective_rpc("state_digest")
        assert first == second


def test_processed_logprobs_of_two_ranks_are_one_ranks(root):
    folder, answers = tiny.write_model(root, "qwen3"), []
    ways = [dict(top_p=0.9), dict(top_k=5), dict(presence_penalty=1.0), dict(logit_bias={3: 5.0})]
    asked = [params(temperature=0.8, seed=i, logprobs=4, **way) for i, way in enumerate(ways)]
    for ranks in (1, 2):
        with build(folder, tensor_parallel_size=ranks, logprobs_mode="processed_logprobs") as llm:
            answers.append([output.outputs[0] for output in llm.generate(PROMPTS, asked)])
    for one, two in zip(*answers):
        assert one.token_ids == two.token_ids
        for token_id, step, other in zip(one.token_ids, one.logprobs, two.logprobs):
            assert step[token_id].logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


def test_a_rank_that_dies_ends_the_engine_with_its_name(root, capfd):
    llm = build(tiny.write_model(root, "qwen3"))
    try:
        [victim] = pids_of_ranks()
        llm.generate(PROMPTS, params())
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineDeadError, match=r"rank 1.*SIGKILL"):
            while time.monotonic() - start < 60:
                llm.generate(PROMPTS, params())
    finally:
        llm.exit()


@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_that_dies_in_a_command_ends_the_engine_at_once(root, monkeypatch, answers):
    """Rank 0 does its part of the command, or fails too, as it does in a collective that the death broke."""
    llm = build(tiny.write_model(root, "qwen3"))
    try:
        [victim] = pids_of_ranks()
        os.kill(victim, signal.SIGSTOP)  # it cannot answer before it dies

        def checksums(model):
            os.kill(victim, signal.SIGKILL)
            if not answers:
                raise RuntimeError("connection closed by peer")
            return {}

        monkeypatch.setattr(rank_weights, "checksums", checksums)
        with pytest.raises(EngineDeadError, match=r"rank 1.*SIGKILL"):
            llm.check_weights()
        assert isinstance(llm.core.error, EngineDeadError)
    finally:
        llm.exit()


def test_an_interrupt_in_a_command_ends_the_engine_because_ranks_may_be_out_of_line(root, monkeypatch):
    llm = build(tiny.write_model(root, "qwen3"), enable_sleep_mode=True)
    try:

        def interrupted(self, tags, kept):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(CpuRegions, "release", interrupted)
            llm.sleep(level=1)  # rank 1 sleeps now
        with pytest.raises(EngineDeadError, match="interrupted in the middle of a command"):
            llm.generate(PROMPTS, params())
    finally:
        llm.exit()
    assert pids_of_ranks() == []


def test_a_size_that_does_not_divide_the_heads_is_refused_before_any_rank_starts(root):
    with pytest.raises(ValueError, match="tensor_parallel_size 4"):
        build(tiny.write_model(root, "qwen3"), tensor_parallel_size=4)
