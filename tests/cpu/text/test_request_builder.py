"""From prompts to requests, and what an engine requires of one."""

import itertools

import pytest

from shoal.api import Request
from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams, StructuredOutputsParams
from shoal.text.request_builder import RequestBuilder, check_request
from shoal.text.tokenizer import Tokenizer
from tests import texts

TOKENIZER = Tokenizer(texts.byte_level_backend(()), {})
VOCAB = 300


def builder(tokenizer=TOKENIZER, **options):
    return RequestBuilder(tokenizer, VOCAB, (257,), **options)


def build(prompts, params, maker=None, **options):
    ids = (f"r{i}" for i in itertools.count())
    return (maker or builder()).build(prompts, params, ids, arrival=1.0, **options)


def test_each_prompt_has_n_answers_with_seeds_in_a_row_and_params_of_their_own():
    params = SamplingParams(n=3, seed=2**64 - 1, max_tokens=5)
    requests = build([[1], [2, 3]], params, priority=4, cache_salt="s")
    assert [r.request_id for r in requests] == [f"r{i}" for i in range(6)]
    assert [r.prompt_token_ids for r in requests] == [[1]] * 3 + [[2, 3]] * 3
    assert [r.params.seed for r in requests] == [2**64 - 1, 0, 1] * 2
    assert {(r.params.n, r.priority, r.cache_salt, r.arrival) for r in requests} == {(1, 4, "s", 1.0)}
    assert {r.eos_token_ids for r in requests} == {(257,)}
    requests[0].params.max_tokens = 9
    assert params.max_tokens == requests[1].params.max_tokens == 5 and params.n == 3


def test_seeds_that_nobody_gave_follow_from_the_builders():
    def seeds(seed):
        maker = builder(seed=seed)
        return [r.params.seed for _ in range(2) for r in build([[1], [2]], SamplingParams(n=2), maker)]

    first = seeds(1)
    assert first == seeds(1) != seeds(2)
    assert len({*first[::2]}) == 4 and first[1] == first[0] + 1


def test_a_limit_of_a_prompt_goes_before_that_of_the_params_and_lowers_min_tokens():
    params = SamplingParams(max_tokens=50, min_tokens=20)
    one, other = build([[1], [2]], params, max_tokens=[10, 30])
    assert (one.params.max_tokens, one.params.min_tokens) == (10, 10)
    assert (other.params.max_tokens, other.params.min_tokens) == (30, 20)


def test_bad_words_are_tokenized_once_for_all_prompts():
    class Counting:
        calls = 0

        def bad_word_ids(self, words, vocab_size):
            self.calls += 1
            return TOKENIZER.bad_word_ids(words, vocab_size)

    tokenizer = Counting()
    requests = build([[1], [2]], SamplingParams(bad_words=["ab"], n=2), builder(tokenizer))
    assert {r.bad_word_ids for r in requests} == {TOKENIZER.bad_word_ids(["ab"], VOCAB)}
    assert tokenizer.calls == 1


@pytest.mark.parametrize("params", [SamplingParams(stop="x"), SamplingParams(bad_words=["x"])])
def test_what_needs_a_tokenizer_is_refused_without_one(params):
    with pytest.raises(RequestError, match="skip_tokenizer_init"):
        build([[1]], params, builder(None))


def test_a_grammar_that_cannot_be_used_is_refused():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="(a"))
    with pytest.raises(RequestError, match=r"structured_outputs\.regex"):
        builder().check_grammar(params)
    builder().check_grammar(SamplingParams())


@pytest.mark.parametrize(
    ("prompt", "options", "output", "said"),
    [
        ([], {}, [], "prompt is empty"),
        ([1, VOCAB], {}, [], rf"prompt must have token ids in \[0, {VOCAB}\), the vocabulary, got {VOCAB}"),
        ([1, -1], {}, [], r"prompt must have token ids in \[0, .*, got -1;"),
        ([2**40], {}, [], r"prompt must have token ids in \[0, .*, got 1099511627776;"),
        ([1], dict(logit_bias={VOCAB: 1.0}), [], r"logit_bias must have token ids in \[0, .*, got 300;"),
        ([1], dict(allowed_token_ids=[VOCAB]), [], "allowed_token_ids must have token ids in"),
        ([1], dict(stop_token_ids=[VOCAB]), [], "stop_token_ids must have token ids in"),
        ([1], dict(allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1), [], "min_tokens forbid all of"),
        ([1], dict(logprobs=21), [], "logprobs must be <= max_logprobs 20, got 21"),
        ([1], dict(logprobs=-1), [], r"logprobs must be <= max_logprobs 20, got -1 \(all\)"),
        ([1], dict(prompt_logprobs=-1), [], r"prompt_logprobs must be <= max_logprobs 20, got -1 \(all\)"),
        ([1], {}, [VOCAB], r"output_token_ids must have token ids in \[0, .*, got 300;"),
        ([1], dict(max_tokens=2), [5, 6], "max_tokens 2 allows no more"),
    ],
)
def test_a_request_that_a_model_cannot_do_is_refused_by_name(prompt, options, output, said):
    request = Request("r", prompt, SamplingParams(**options), output_token_ids=output)
    with pytest.raises(RequestError, match=said):
        check_request(request, VOCAB, 20)


def test_bad_words_that_forbid_every_allowed_token_are_refused():
    """Regression: all logits were -inf, and token 0 was sampled."""

    def asked(*words):
        return Request("r", [1], SamplingParams(allowed_token_ids=[7, 8]), bad_word_ids=words)

    for possible in (asked((7,)), asked((7,), (8, 8))):
        check_request(possible, VOCAB, 20)
    with pytest.raises(RequestError, match=r"forbid all of allowed_token_ids \[7, 8\]"):
        check_request(asked((7,), (8,)), VOCAB, 20)


def test_a_request_at_the_limits_passes():
    params = SamplingParams(logprobs=20, stop_token_ids=[VOCAB - 1], max_tokens=3)
    check_request(Request("r", [0, VOCAB - 1], params, output_token_ids=[5, 6]), VOCAB, 20)
    check_request(Request("r", [0], SamplingParams(logprobs=-1)), VOCAB, -1)


@pytest.mark.parametrize("options", [{"offers_kv": True}, {"kv_ticket": b"a ticket"}])
def test_an_embedding_exchanges_no_kv_blocks(options):
    with pytest.raises(RequestError, match="neither offers nor reads KV blocks"):
        check_request(Request("r", [1, 2], SamplingParams(), embed=True, **options), 10, 5)


def test_all_log_probabilities_are_as_many_as_the_vocabulary_has_tokens():
    """Regression: -1 was refused although max_logprobs was as large as the vocabulary."""
    [request] = RequestBuilder(None, 50, (), seed=0).build(
        [[1]], SamplingParams(logprobs=-1, prompt_logprobs=-1), iter("a"), arrival=0.0
    )
    check_request(request, 50, 50)
    with pytest.raises(RequestError, match="must be <= max_logprobs 49"):
        check_request(request, 50, 49)
