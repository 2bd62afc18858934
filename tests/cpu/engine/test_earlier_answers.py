"""Drafts looked up in earlier answers: which answers are kept and chosen, and that engines with them give the same
tokens in fewer steps."""

import random

import numpy as np
import pytest

from shoal import LLM, SamplingParams
from shoal.engine.drafting import earlier_answers
from shoal.engine.drafting.earlier_answers import FEWEST, LEAD, MOST_EARLIER, EarlierAnswers
from shoal.hashing import root_key
from tests.chain import follow, ring, write_chain

ROOT, OTHER = root_key(), root_key(cache_salt="other")
ROUND = ring(94)  # nothing comes again within 94 tokens
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4, "enable_adaptive_verification": False}
EARLIER = SUFFIX | {"suffix_decoding_max_cached_requests": 4}


def words(rng, count):
    return [rng.randrange(50_000) for _ in range(count)]


def test_answers_to_similar_prompts_are_chosen_and_the_most_similar_comes_last():
    rng = random.Random(1)
    answers = EarlierAnswers(20)
    task, other_task = words(rng, 60), words(rng, 60)
    kept = []
    for i in range(10):
        prompt = (task if i % 2 else other_task) + words(rng, 30)
        kept.append((prompt, words(rng, 20)))
        answers.add(ROOT, *kept[-1])
    found = answers.tokens_for(ROOT, task + words(rng, 30))
    wanted = {tuple(prompt[-LEAD:] + answer) for prompt, answer in kept[1::2]}
    size = LEAD + 20
    assert {tuple(found[i : i + size]) for i in range(0, len(found), size)} == wanted
    again, answer = kept[3]
    assert answers.tokens_for(ROOT, again)[-size:] == again[-LEAD:] + answer
    assert answers.tokens_for(ROOT, words(rng, 90)) == []


def test_of_equally_similar_prompts_the_newest_answer_comes_last():
    rng = random.Random(2)
    answers, prompt = EarlierAnswers(3), words(rng, 30)
    texts = [words(rng, 9) for _ in range(5)]
    for text in texts:
        answers.add(ROOT, prompt, text)
    lead = prompt[-LEAD:]
    assert answers.tokens_for(ROOT, prompt) == lead + texts[2] + lead + texts[3] + lead + texts[4]


def test_no_answer_crosses_a_salt():
    rng = random.Random(3)
    answers, prompt, answer = EarlierAnswers(3), words(rng, 30), words(rng, 9)
    answers.add(ROOT, prompt, answer)
    assert answers.tokens_for(OTHER, prompt) == []
    answers.add(OTHER, prompt, answer[::-1])
    assert answers.tokens_for(OTHER, prompt) == prompt[-LEAD:] + answer[::-1]
    assert answers.tokens_for(ROOT, prompt) == prompt[-LEAD:] + answer


def test_answers_and_their_tokens_are_bounded(monkeypatch):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    monkeypatch.setattr(earlier_answers, "MOST_KEPT", 9000)
    answers, all_tokens = EarlierAnswers(5), set()
    prompts = [words(rng, n) for n in (0, 2, 9, 300, 600, 2000)]
    for _ in range(200):
        root, prompt = rng.choice((ROOT, OTHER)), rng.choice(prompts)
        answer = words(rng, rng.choice((1, FEWEST - 1, FEWEST, 100, 3000, MOST_EARLIER, 6000)))
        before = len(answers)
        answers.add(root, prompt, answer)
        assert len(answers) <= 5 and answers.num_tokens <= 9000
        assert len(answer) >= FEWEST or len(answers) == before
        all_tokens |= set(prompt) | set(answer)
        found = answers.tokens_for(root, prompt)
        assert len(found) <= MOST_EARLIER and set(found) <= all_tokens
        if len(answer) >= FEWEST and len(prompt) >= earlier_answers.RUN:
            text = (prompt[-LEAD:] + answer)[:MOST_EARLIER]
            assert found[-len(text) :] == text
    assert answers.num_tokens == sum(len(kept.tokens) for kept in answers._answers)


def test_tokens_are_those_of_any_vocabulary():
    answers = EarlierAnswers(1)
    prompt = [2**31 - 1] * 40 + [0] * 40
    answers.add(ROOT, prompt, [2**31 - 1] * 9)
    found = answers.tokens_for(ROOT, prompt)
    assert found == [0] * LEAD + [2**31 - 1] * 9 and np.array(found).max() < 2**31


# Engines


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    return write_chain(tmp_path_factory.mktemp("chains"), "steady", ROUND)


@pytest.fixture
def build(steady):
    made = []

    def make(folder=steady, **options):
        defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 256}
        defaults |= {"kv_cache_memory_bytes": 1 << 25, "speculative_config": EARLIER}
        made.append(LLM(str(folder), **defaults | options))
        return made[-1]

    yield make
    for llm in made:
        llm.exit()


PROMPT = [200, 210, 220, 230, 240, 40]


def steps_of(llm, prompt=PROMPT, **request):
    """Returns the tokens of an answer, and the number of steps that brought them."""
    options = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | request.pop("params", {})
    tokens, steps = [], 0
    for output in llm.stream(
        {"prompt_token_ids": prompt, **request}, SamplingParams(**options), every_step=True
    ):
        steps += len(output.outputs[0].token_ids) > len(tokens)
        tokens = list(output.outputs[0].token_ids)
    return tokens, steps


QUICK, SLOW = 10, 40  # steps of an answer whose drafts all hold, and of one without drafts


def test_an_answer_is_drafted_from_the_one_before_from_its_first_token_on(build):
    llm, want = build(), follow(ROUND, 40, 40)
    assert steps_of(llm) == (want, SLOW)
    assert steps_of(llm) == (want, QUICK - 1)
    # another prompt for the same task, and an answer that goes on where the ones before ended
    tokens, steps = steps_of(llm, PROMPT[:-1] + [50])
    assert tokens == follow(ROUND, 50, 40) and steps < SLOW / 2
    assert steps_of(build(speculative_config=SUFFIX)) == (want, SLOW)


def test_a_salt_or_an_engine_without_the_option_sees_none(build):
    llm, want = build(), follow(ROUND, 40, 40)
    steps_of(llm)
    assert steps_of(llm, cache_salt="a") == (want, SLOW)
    assert steps_of(llm, cache_salt="b") == (want, SLOW)
    assert steps_of(llm, cache_salt="a")[1] < QUICK
    none = build(speculative_config=SUFFIX)
    steps_of(none)
    assert steps_of(none) == (want, SLOW)
    assert none.core.ranks.runner.drafting.earlier is None


@pytest.mark.parametrize("options", [{}, {"async_scheduling": True}], ids=str)
def test_an_answer_is_kept_once_however_it_ends(options, build):
    llm = build(**options)
    kept = llm.core.ranks.runner.drafting.earlier
    for params in ({}, {"stop_token_ids": [60]}, {"stop": ["]"]}):
        before = len(kept)
        steps_of(llm, params=params)
        llm.core.step()  # an end from outside is seen by the next one
        assert len(kept) == before + 1, params
    stream = llm.stream({"prompt_token_ids": PROMPT}, SamplingParams(temperature=0.0, max_tokens=60))
    for output in stream:
        if len(output.outputs[0].token_ids) > 20:
            stream.close()
            break
    llm.core.step()
    assert len(kept) == 4
    llm.embed([{"prompt_token_ids": PROMPT}])
    steps_of(llm, params={"max_tokens": FEWEST - 1})
    assert [answer.number for answer in kept._answers] == [0, 1, 2, 3]


def test_n_answers_of_a_request_are_kept(build):
    llm = build()
    params = SamplingParams(n=3, temperature=0.0, max_tokens=40, ignore_eos=True)
    llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert len(llm.core.ranks.runner.drafting.earlier) == 3
    assert steps_of(llm)[1] < QUICK


def test_they_stay_through_sleep_and_new_weights(build, tmp_path):
    llm = build(enable_sleep_mode=True)
    steps_of(llm)
    for level in (1, 2):
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            other = ring(47)  # the same up to the token 79
            llm.update_weights(str(write_chain(tmp_path, "other", other)))
            assert steps_of(llm)[0] == follow(other, 40, 40)
        assert steps_of(llm)[1] < QUICK + 5


def test_a_long_prompt_pushes_earlier_answers_out(build, monkeypatch):
    """The device keeps a row's last tokens, wherever they come from."""
    monkeypatch.setattr("shoal.engine.drafting.device.MOST_HISTORY", 64)
    monkeypatch.setattr("shoal.engine.drafting.device.MOST_EARLIER", 16)
    llm = build(max_model_len=512)
    assert llm.core.ranks.runner.drafting.rows.history_RL.shape[1] == 80
    rng = random.Random(4)
    for _ in range(6):
        prompt = PROMPT[:-1] + [rng.randrange(128, 256) for _ in range(rng.randrange(150))] + [40]
        assert steps_of(llm, prompt)[0] == follow(ROUND, 40, 40)


def test_rows_that_begin_anew_have_them_too(build):
    """Few blocks: sequences are preempted and get other rows."""
    llm = build(num_gpu_blocks_override=14, max_num_seqs=6, enable_prefix_caching=False)
    starts = [33 + 9 * i for i in range(9)]
    params = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate([PROMPT[:-1] + [start] for start in starts], params, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == [follow(ROUND, s, 70) for s in starts]
    assert llm.stats().num_preemptions


def test_two_ranks(build):
    llm = build(tensor_parallel_size=2)
    want = follow(ROUND, 40, 40)
    assert steps_of(llm) == (want, SLOW)
    assert steps_of(llm) == (want, QUICK - 1)
