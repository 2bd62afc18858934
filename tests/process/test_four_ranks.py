"""Four ranks on the CPU (Gloo), two for each kv head: one rank's tokens and log-probabilities for
every kind of request, sleep, and new weights."""

import random

import pytest

from shoal import LLM, SamplingParams, StructuredOutputsParams
from tests import tiny
from tests.ranks import pids_of_ranks

pytestmark = pytest.mark.usefixtures("quick_starts")

PROMPTS = [random.Random(i).choices(range(94), k=n) for i, n in enumerate((1, 7, 33, 80))]
REGEX = StructuredOutputsParams(regex="[a-f]{3,20}!")

# A step whose rows are all of one of the first kinds is drawn from parts of the ranks' logits; one other row
# has all rows drawn from whole logits.
KINDS = {
    "greedy": [dict(temperature=0.0)] * 4,
    "plain": [dict(temperature=1.2)] * 4,
    "top_k": [
        dict(temperature=1.1, top_k=k, top_p=p, min_p=m)
        for k, p, m in ((1, 1, 0), (5, 0.8, 0), (20, 1, 0.1), (50, 0.9, 0.02))
    ],
    "top_p": [
        dict(temperature=1.4, top_p=p, min_p=m) for p, m in ((0.5, 0), (0.95, 0), (1, 0.1), (0.999, 0))
    ],
    "penalties": [
        dict(temperature=0.9, repetition_penalty=1.3),
        dict(presence_penalty=1.0),
        dict(frequency_penalty=0.5),
        {},
    ],
    "bans": [
        dict(logit_bias={3: 5.0}),
        dict(allowed_token_ids=list(range(40))),
        dict(bad_words=["a"]),
        dict(min_tokens=9),
    ],
    "grammars": [
        dict(structured_outputs=REGEX),
        {},
        dict(structured_outputs=REGEX, temperature=0.0),
        dict(top_k=9),
    ],
    "mixed": [dict(temperature=0.0), dict(top_k=7), dict(top_p=0.7), dict(repetition_penalty=1.2)],
}


def params(kind):
    return [
        SamplingParams(**{"temperature": 1.0, "seed": i, "max_tokens": 12, "ignore_eos": True} | options)
        for i, options in enumerate(KINDS[kind])
    ]


def build(folder, size, **options):
    defaults = {"dtype": "float32", "max_model_len": 256, "device": "cpu", "enable_sleep_mode": True}
    return LLM(str(folder), tensor_parallel_size=size, kv_cache_memory_bytes=32 << 20, **defaults | options)


@pytest.fixture(scope="module")
def model(root):
    return tiny.write_model(root, "qwen3-four")


@pytest.fixture(scope="module")
def one(model):
    with build(model, 1) as llm:
        yield llm


@pytest.fixture(scope="module")
def four(model):
    with build(model, 4) as llm:
        assert len(pids_of_ranks()) == 3
        yield llm


def tokens(llm, asked):
    return [o.outputs[0].token_ids for o in llm.generate(PROMPTS, asked, use_tqdm=False)]


def check_ranks(llm):
    assert len(set(llm.collective_rpc("state_digest"))) == 1, "ranks differ in what was drawn"


@pytest.mark.parametrize("kind", KINDS)
def test_four_ranks_draw_one_ranks_tokens(kind, one, four):
    assert tokens(four, params(kind)) == tokens(one, params(kind))
    check_ranks(four)


def test_four_ranks_with_drafts_draw_one_ranks_tokens(model, one):
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    drafts["enable_adaptive_verification"] = False
    with build(model, 4, speculative_config=drafts) as drafting:
        for kind in KINDS:
            assert tokens(drafting, params(kind)) == tokens(one, params(kind)), kind
            check_ranks(drafting)


def test_four_ranks_give_the_oracles_tokens(model, four):
    assert tokens(four, params("greedy")) == [tiny.greedy(model, p, 12) for p in PROMPTS]


def test_log_probabilities_are_those_of_one_rank(one, four):
    asked = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=5, ignore_eos=True, logprobs=n, prompt_logprobs=m)
        for i, (n, m) in enumerate(((0, None), (3, 2), (20, 0), (None, 1)))
    ]
    for mine, theirs in zip(four.generate(PROMPTS, asked), one.generate(PROMPTS, asked)):
        assert mine.outputs[0].token_ids == theirs.outputs[0].token_ids
        for found, expected in (
            (mine.outputs[0].logprobs, theirs.outputs[0].logprobs),
            (mine.prompt_logprobs, theirs.prompt_logprobs),
        ):
            assert (found is None) == (expected is None)
            for a, b in zip(found or [], expected or []):
                assert (a is None) == (b is None)
                if a is not None:
                    assert {t: x.rank for t, x in a.items()} == {t: x.rank for t, x in b.items()}
                    assert [x.logprob for x in a.values()] == pytest.approx(
                        [x.logprob for x in b.values()], abs=1e-4
                    )
    check_ranks(four)


def test_four_ranks_sleep_wake_and_take_new_weights(model, root, four):
    expected = [tiny.greedy(model, p, 12) for p in PROMPTS]
    awake = four.memory_usage()
    four.sleep(level=1)
    four.wake_up()
    assert tokens(four, params("greedy")) == expected
    other = tiny.write_changed(model, root / "changed-four")
    four.sleep(level=2)
    four.wake_up(tags=["weights"])
    four.update_weights(str(other))
    four.wake_up(tags=["kv_cache"])
    assert tokens(four, params("greedy")) == [tiny.greedy(other, p, 12) for p in PROMPTS]
    four.update_weights(str(model))
    assert tokens(four, params("greedy")) == expected and four.memory_usage() == awake
    check_ranks(four)
