"""Many conversations at once with a model of recurrent layers, which do not fit on the device together: with host
memory below it, a turn computes its own tokens and at most a block."""

import time

import pytest

from shoal import SamplingParams
from shoal.api import Request
from tests.family_cores import family_cores, numbers

NUM = 64
FIRST, OWN, ANSWER = 60, 12, 10  # tokens of a first prompt at least, of a further turn, and of an answer
BLOCK = 16
DEADLINE_S = 300


@pytest.fixture
def build(root):
    with family_cores(root, max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes=64 << 20) as make:
        yield make


def answer_all(core, prompts):
    """Asks all prompts at once. Returns each one's answer, and how many of its tokens were not computed."""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    for i, prompt in enumerate(prompts):
        core.add(Request(str(i), list(prompt), params))
    answers, cached = [[] for _ in prompts], [0] * len(prompts)
    until = time.monotonic() + DEADLINE_S
    while core.has_work:
        assert time.monotonic() < until, "the work does not end"
        for output in core.step():
            i = int(output.request_id)
            answers[i] += output.token_ids
            cached[i] = max(cached[i], output.num_cached_tokens)
    return answers, cached


def converse(core, turns, plain=None):
    """Checks each turn of all conversations. `plain`: an engine that gives the same answers and keeps nothing."""
    prompts = [numbers(FIRST + i % 40, i) for i in range(NUM)]
    for turn in range(turns):
        old = [len(prompt) - OWN for prompt in prompts]
        answers, cached = answer_all(core, prompts)
        if turn:
            num_computed = [len(prompt) - found for prompt, found in zip(prompts, cached)]
            assert max(num_computed) <= OWN + BLOCK, (turn, num_computed)
            assert all(found <= was for found, was in zip(cached, old))
        if plain is not None:
            assert answers == answer_all(plain, prompts)[0]
        prompts = [
            prompt + answer + numbers(OWN, NUM * turn + i)
            for i, (prompt, answer) in enumerate(zip(prompts, answers))
        ]


def small(build, name, num_kept, **options):
    """Returns an engine whose device has room for the running conversations and this many others."""
    runner = build(name).ranks.runner
    plan = runner.cache.plan
    # its keys and values, two snapshots of its prompt, two of its answer
    conversation = 11 * plan.block_bytes + 4 * runner.states.plan.row_bytes
    size = runner.states.nbytes + (8 + num_kept) * conversation
    below = {"kv_host_bytes": 256 << 20, "kv_load_policy": "always"}
    return build(name, kv_cache_memory_bytes=size, **below | options)


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next", "granite4-mamba", "lfm2", "nemotron-h"])
def test_no_turn_computes_more_than_its_own_tokens_and_a_block(name, build):
    core = small(build, name, num_kept=8)
    converse(core, 3)
    stats, blocks = core.stats(), core.scheduler.blocks
    needed = FIRST // BLOCK * len(blocks.groups) + blocks.snapshots.size  # one conversation
    assert stats.num_blocks < NUM * needed and stats.kv_tiers["host"].fetched_blocks > NUM * needed


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("name", ["qwen3.5", "granite4-mamba"])
def test_so_it_is_with_no_room_to_spare(name, is_async, build):
    """Regression: the snapshots of running conversations made room for other conversations' keys and values, and the
    last ones of a turn were not copied out before a next turn that came at once."""
    converse(small(build, name, num_kept=0, async_scheduling=is_async), 3)


@pytest.mark.slow
def test_long_conversations_have_the_answers_of_an_engine_that_keeps_nothing(build):
    converse(small(build, "qwen3.5", num_kept=16), 8, build("qwen3.5", enable_prefix_caching=False))
