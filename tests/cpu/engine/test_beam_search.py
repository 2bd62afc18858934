"""Beam search finds what `transformers` finds with num_beams, and says what it can't do."""

import pytest

from shoal import BeamSearchParams, TextPrompt, TokensPrompt
from shoal.errors import RequestError
from tests import tiny

PROMPTS = [[11, 200, 35, 7], list(range(60, 100)), [5]]


def check(engine, folder, params, eos):
    """Returns why the beams ended."""
    reasons = set()
    prompts = [TokensPrompt(prompt_token_ids=p) for p in PROMPTS]
    for prompt, output in zip(PROMPTS, engine.beam_search(prompts, params)):
        expected = tiny.beams(
            folder,
            prompt,
            eos,
            num_beams=params.beam_width,
            max_new_tokens=params.max_tokens,
            length_penalty=params.length_penalty,
        )
        assert [beam.tokens for beam in output.sequences] == [prompt + ids for ids, _ in expected]
        for beam, (ids, score) in zip(output.sequences, expected):
            assert beam.cum_logprob / len(ids) ** params.length_penalty == pytest.approx(
                score, rel=1e-5, abs=2e-4
            )
            assert beam.cum_logprob == pytest.approx(
                sum(step[i].logprob for step, i in zip(beam.logprobs, ids)), abs=1e-4
            )
            assert beam.finish_reason == ("stop" if ids[-1] in (eos or ()) else "length")
            reasons.add(beam.finish_reason)
    return reasons


@pytest.mark.parametrize("width", [2, 3, 5])
def test_the_oracles_beams_are_found(width, folder, build):
    check(build(), folder, BeamSearchParams(beam_width=width, max_tokens=12, ignore_eos=True), None)


@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0, -1.0])
def test_finished_beams_are_weighed_as_by_the_oracle(penalty, folder, build):
    """A model of 300 tokens, twelve of them end-of-text ids, samples one soon."""
    engine, eos = build(max_logprobs=40), list(range(0, 300, 25))
    engine.eos_token_ids = tuple(eos)
    reasons = check(
        engine, folder, BeamSearchParams(beam_width=4, max_tokens=20, length_penalty=penalty), eos
    )
    assert "stop" in reasons or penalty == 2.0  # which prefers what is long
    check(engine, folder, BeamSearchParams(beam_width=4, max_tokens=1, length_penalty=penalty), eos)


def test_one_beam_is_greedy(folder, build):
    [output] = build().beam_search(
        TokensPrompt(prompt_token_ids=PROMPTS[0]), BeamSearchParams(1, max_tokens=8, ignore_eos=True)
    )
    assert output.sequences[0].tokens == PROMPTS[0] + tiny.greedy(folder, PROMPTS[0], 8)


def test_text_is_that_of_prompt_and_answer(build):
    engine = build()
    [output] = engine.beam_search([TextPrompt(prompt="abc")], BeamSearchParams(beam_width=3, max_tokens=4))
    assert len(output.sequences) == 3
    for beam in output.sequences:
        assert beam.text == engine.get_tokenizer().decode(beam.tokens) and beam.text.startswith("abc")


def test_a_search_ends_at_the_models_length(build):
    engine = build(max_model_len=16)
    [output] = engine.beam_search([[1] * 10], BeamSearchParams(beam_width=2, max_tokens=50, ignore_eos=True))
    assert [(len(b.tokens), b.finish_reason) for b in output.sequences] == [(16, "length")] * 2
    with pytest.raises(RequestError, match="16"):
        engine.beam_search([[1] * 16], BeamSearchParams(beam_width=2, max_tokens=5))


def test_mistakes_are_explained(build):
    engine = build()
    with pytest.raises(RequestError, match="max_logprobs 20"):
        engine.beam_search(["a"], BeamSearchParams(beam_width=30, max_tokens=5))
    mistakes = {"beam_width": 0, "max_tokens": 0, "temperature": -1.0, "length_penalty": float("nan")}
    for name, value in mistakes.items():
        with pytest.raises(RequestError, match=name):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 4, name: value})
    assert engine.beam_search([], BeamSearchParams(beam_width=2, max_tokens=4)) == []
