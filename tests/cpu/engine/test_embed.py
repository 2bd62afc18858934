"""Embeddings: the oracle's hidden states, however the engine computes them and whatever runs beside."""

import random

import pytest
import torch

from shoal import SamplingParams
from shoal.api import FinishReason, Request
from shoal.errors import RequestError
from tests import tiny

SHARED = random.Random(5).choices(range(256), k=64)
PROMPTS = [
    SHARED[: random.Random(i).choice((0, 16, 33, 64))] + random.Random(i).choices(range(256), k=n)
    for i, n in enumerate((1, 3, 16, 17, 40, 100))
]


def assert_oracles(engine, folder, prompts):
    outputs = engine.embed(prompts)
    for prompt, output in zip(prompts, outputs):
        assert output.prompt_token_ids == prompt and output.finished
        found = torch.tensor(output.outputs.embedding)
        torch.testing.assert_close(found, tiny.embedding(folder, prompt), atol=2e-5, rtol=1e-4)
    return outputs


@pytest.mark.parametrize("name", ["qwen3", "llama-tied-llama3-rope", "qwen3-moe", "granite", "olmo2"])
def test_embeddings_are_the_oracles_last_hidden_states(name, root, build):
    assert_oracles(build(name), tiny.write_model(root, name), PROMPTS)


@pytest.mark.parametrize(
    "options",
    [
        dict(async_scheduling=True),
        dict(max_num_batched_tokens=16, max_num_seqs=2),
        dict(enable_prefix_caching=False),
        dict(num_gpu_blocks_override=13, max_model_len=200, async_scheduling=True, max_num_batched_tokens=40),
    ],
    ids=str,
)
def test_embeddings_do_not_depend_on_how_the_engine_runs(options, root, build):
    engine, folder = build(**options), tiny.write_model(root, "qwen3")
    assert_oracles(engine, folder, PROMPTS)
    hits = [o.num_cached_tokens for o in assert_oracles(engine, folder, PROMPTS)]
    assert max(hits) >= (16 if options.get("enable_prefix_caching", True) else 0)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_embedding_and_generation_run_side_by_side(async_scheduling, root, build):
    engine, folder = (
        build(async_scheduling=async_scheduling, max_num_batched_tokens=48),
        tiny.write_model(root, "qwen3"),
    )
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, logprobs=1 if i == 2 else None)
        for i in range(len(PROMPTS))
    ]
    core, embeddings, tokens = engine.core, {}, {}
    for i, prompt in enumerate(PROMPTS):
        core.add(Request(f"g{i}", prompt, params[i]))
    for _ in range(6):
        take(core, embeddings, tokens)
    for i, prompt in enumerate(PROMPTS):
        core.add(Request(f"e{i}", prompt, SamplingParams(), embed=True))
    while core.has_work:
        take(core, embeddings, tokens)
    for i, prompt in enumerate(PROMPTS):
        assert tokens[f"g{i}"] == tiny.greedy(folder, prompt, 20)
        torch.testing.assert_close(
            torch.tensor(embeddings[f"e{i}"]), tiny.embedding(folder, prompt), atol=2e-5, rtol=1e-4
        )


def take(core, embeddings, tokens):
    for output in core.step():
        if output.embedding is not None:
            assert (
                output.request_id not in embeddings
                and not output.token_ids
                and output.finish_reason is FinishReason.STOP
            )
            embeddings[output.request_id] = output.embedding
        else:
            tokens.setdefault(output.request_id, []).extend(output.token_ids)


def test_a_prompt_may_fill_the_model_and_no_more(root, build):
    engine, folder = build(max_model_len=64), tiny.write_model(root, "qwen3")
    assert_oracles(engine, folder, [SHARED])
    with pytest.raises(RequestError, match="max_model_len 64"):
        engine.embed([[*SHARED, 1]])
    with pytest.raises(RequestError, match="empty"):
        engine.embed([[]])
    assert not engine.core.has_work


def test_text_and_salted_prompts_are_taken(build):
    engine = build()
    one, other = engine.embed(["some text", {"prompt": "some text", "cache_salt": "s"}])
    assert one.outputs.embedding == pytest.approx(other.outputs.embedding, abs=1e-5)
    assert len(one.outputs.embedding) == 48 and sum(x * x for x in one.outputs.embedding) == pytest.approx(
        1.0, abs=1e-5
    )
