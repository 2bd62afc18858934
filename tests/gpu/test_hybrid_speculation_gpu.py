"""Recurrent layers with drafts on a GPU: kernels leave no trace of rejected drafts, and engines answer what they
answer without drafts."""

import random

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.kernels import triton_ops
from tests.cpu.engine.test_hybrid_speculation import FIXED, answers, repetitive, traffic
from tests.recurrent_drafts import draft_cases, follow_drafts
from tests.recurrent_steps import Heads
from tests.tiny_families import write_family

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOLERANCES = {torch.bfloat16: 4e-2, torch.float32: 1e-3}


@pytest.mark.parametrize("op", ["causal_conv", "gated_delta", "mamba2"])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("state_dtype", TOLERANCES, ids=str)
def test_rejected_drafts_leave_no_trace(op, dtype, state_dtype):
    allowed = max(TOLERANCES[dtype], TOLERANCES[state_dtype])
    for seed, heads in enumerate((Heads(2, 4, 128, 128), Heads(1, 8, 128, 64), Heads(2, 4, 20, 37))):
        torch.manual_seed(seed)
        state, make = draft_cases(dtype, state_dtype, heads)[op]
        function = getattr(triton_ops, op)
        follow_drafts(function, function, make, state, seed, device="cuda", rtol=allowed, atol=allowed)


@pytest.fixture
def build(root):
    made = []

    def make(name, **options):
        defaults = {"device": "cuda", "dtype": "float32", "max_model_len": 256, "max_num_seqs": 8}
        defaults["kv_cache_memory_bytes"] = 64 << 20
        made.append(LLM(str(write_family(root, name)), **defaults | options))
        return made[-1]

    yield make
    for llm in made:
        llm.exit()


@pytest.mark.parametrize("name", ["qwen3.5", "granite4-mamba", "lfm2"])
def test_answers_are_those_without_drafts(name, build):
    rng = random.Random(5)
    prompts, params = traffic(rng, 12)
    plain = build(name, enable_prefix_caching=False)
    want = answers(plain, prompts, params)
    turns = [p + tokens + repetitive(rng, 7) for p, tokens in zip(prompts, want)]
    want_turns = answers(plain, turns, params)
    for options in ({}, {"enforce_eager": True, "num_gpu_blocks_override": 24}):
        llm = build(name, speculative_config=FIXED, **options)
        for _ in range(2):
            assert answers(llm, prompts, params) == want, options
            assert answers(llm, turns, params) == want_turns, options
        llm.core.check()


def test_repetition_takes_few_steps(build):
    """A short text again and again: some drafts hold, others do not."""
    llm = build("qwen3.5", speculative_config=FIXED)
    plain = build("qwen3.5")
    prompt = repetitive(random.Random(1), 80)
    params = SamplingParams(temperature=0.0, max_tokens=120, ignore_eos=True)
    assert answers(llm, [prompt], [params]) == answers(plain, [prompt], [params])
