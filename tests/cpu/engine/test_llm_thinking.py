"""LLM with a bound of reasoning: what is written after it is what the engine writes after these tokens."""

import pytest

from shoal import SamplingParams
from shoal.errors import RequestError

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>{% if enable_thinking is false %}</think>{% endif %}"
ASCII = [*range(94)]  # whole characters, which a budget does not have to complete
TEXTS = ["Hello.<think>", "A longer question, then?<think>", "x<think>"]


def params(**more):
    usual = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "allowed_token_ids": ASCII}
    return SamplingParams(**usual | more)


@pytest.fixture
def engine(build):
    built = build("qwen3", max_num_seqs=4)
    own, built.tokenizer.chat_templates = built.tokenizer.chat_templates, {"default": TEMPLATE}
    yield built
    built.tokenizer.chat_templates = own
    built.generate([TEXTS[1]], params(), use_tqdm=False)  # steps that aborted requests had begun are over
    built.core.check()
    assert not built.core.has_work and not built._answers


def expected(engine, text, limit, count=40):
    """Returns the tokens of an answer by generations without a budget."""
    prompt = engine.tokenizer.encode(text)
    close = engine.tokenizer.encode("</think>", add_special_tokens=False)
    begun = []
    if limit:
        [output] = engine.generate([prompt], params(max_tokens=limit), use_tqdm=False)
        begun = output.outputs[0].token_ids
    begun += close
    left = count - len(begun)
    if left > 0:
        [output] = engine.generate([prompt + begun], params(max_tokens=left), use_tqdm=False)
        begun += output.outputs[0].token_ids
    return begun[:count]


@pytest.mark.parametrize("limit", [0, 1, 5, 17])
def test_reasoning_ends_after_the_budget_and_the_answer_follows(engine, limit):
    wanted = [expected(engine, text, limit) for text in TEXTS]
    outputs = engine.generate(TEXTS, params(thinking_token_budget=limit), use_tqdm=False)
    for output, tokens in zip(outputs, wanted):
        [answer] = output.outputs
        assert answer.token_ids == tokens and answer.finish_reason == "length"
        assert answer.text == engine.tokenizer.decode(tokens)
        assert output.prompt_token_ids and output.finished


def test_no_budget_and_no_reasoning_change_nothing(engine):
    plain = engine.generate(TEXTS, params(), use_tqdm=False)
    for limit in (-1, None, 500):
        outputs = engine.generate(TEXTS, params(thinking_token_budget=limit), use_tqdm=False)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    [free] = engine.generate(["a<think>b</think>"], params(), use_tqdm=False)
    [bound] = engine.generate(["a<think>b</think>"], params(thinking_token_budget=3), use_tqdm=False)
    assert bound.outputs[0].token_ids == free.outputs[0].token_ids


@pytest.mark.parametrize("most", range(1, 16))
def test_the_end_of_reasoning_is_cut_by_the_token_limit(engine, most):
    tokens = expected(engine, TEXTS[0], 4, most)
    for limit, wanted in ((4, tokens), (0, expected(engine, TEXTS[0], 0, most))):
        given = params(thinking_token_budget=limit, max_tokens=most)
        [output] = engine.generate([TEXTS[0]], given, use_tqdm=False)
        assert output.outputs[0].token_ids == wanted and output.outputs[0].finish_reason == "length"


def test_a_chat_a_stream_and_several_answers_have_the_budget(engine):
    wanted = expected(engine, TEXTS[0], 5)
    given = params(thinking_token_budget=5)
    [chat] = engine.chat([{"role": "user", "content": "Hello."}], given, use_tqdm=False)
    assert chat.outputs[0].token_ids == wanted
    *_, last = engine.stream(TEXTS[0], given)
    assert last.outputs[0].token_ids == wanted and last.finished
    sampled = params(thinking_token_budget=5, n=3, temperature=1.0, seed=3, logprobs=1, prompt_logprobs=1)
    [output] = engine.generate([TEXTS[0]], sampled, use_tqdm=False)
    close = engine.tokenizer.encode("</think>", add_special_tokens=False)
    for answer in output.outputs:
        assert answer.token_ids[5 : 5 + len(close)] == close and len(answer.token_ids) == 40
        assert len(answer.logprobs) == 40
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_a_stream_that_is_left_early_leaves_nothing_behind(engine):
    for count in (1, 6, 9):
        outputs = engine.stream(TEXTS[0], params(thinking_token_budget=5))
        for _ in range(count):
            next(outputs)
        outputs.close()


def test_a_model_that_does_not_think_aloud_and_bad_values_are_refused_by_name(engine):
    engine.tokenizer.chat_templates = {"default": "{{ messages[0].content }}"}
    with pytest.raises(RequestError, match="thinking_token_budget needs"):
        engine.generate(["a"], params(thinking_token_budget=3), use_tqdm=False)
    for value in (-2, 1.5, "many"):
        with pytest.raises(RequestError, match="thinking_token_budget"):
            SamplingParams(thinking_token_budget=value)
