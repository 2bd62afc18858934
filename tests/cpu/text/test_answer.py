"""From outputs to text, however an engine merged them: what belongs to an answer and what ended it."""

import asyncio
import copy
import random

import pytest

from shoal.api import FinishReason, Logprob, Output, Request
from shoal.fake_engine import FakeEngine
from shoal.outputs import CompletionOutput
from shoal.sampling_params import SamplingParams
from shoal.text.answer import Answer, add_to
from shoal.text.tokenizer import Tokenizer
from tests import texts

TOKENIZER = Tokenizer(texts.byte_level_backend(("<s>", "</s>")), {"bos_token": "<s>", "eos_token": "</s>"})


def ids_of(text):
    """Returns a token for each byte."""
    return [TOKENIZER.encode(character)[0] for character in text]


def request(prompt="", output="", **params):
    params = SamplingParams(**{"max_tokens": None} | params)
    return Request("r", ids_of(prompt), params, output_token_ids=ids_of(output))


def outputs_of(ids, sizes, logprobs=False, **last):
    """Returns the ids in outputs of these sizes; `last`: the fields of the last output."""
    found, at = [], 0
    for size in sizes:
        part = ids[at : at + size]
        steps = [{i: Logprob(-0.5, 1)} for i in part] if logprobs else None
        found.append(Output("r", part, steps))
        at += size
    found.append(
        Output("r", ids[at:], [{i: Logprob(-0.5, 1)} for i in ids[at:]] if logprobs else None, **last)
    )
    return found


def run(asked, outputs, tokenizer=TOKENIZER):
    """Returns the whole answer, from the outputs up to its end."""
    answer = Answer(asked, tokenizer)
    logprobs = asked.params.logprobs is not None
    whole = CompletionOutput(0, "", [], 0.0 if logprobs else None, [] if logprobs else None)
    for output in outputs:
        add_to(whole, output, answer.push(output))
        if answer.finish_reason is not None:
            break
    return whole


@pytest.mark.parametrize("sizes", [[1] * 16, [16], [9], [8, 2], [3, 3, 3, 3]], ids=str)
def test_tokens_behind_a_stop_string_belong_to_nobody_however_outputs_were_merged(sizes):
    ids = ids_of("hello world, more")
    outputs = outputs_of(ids, sizes, logprobs=True, finish_reason=FinishReason.LENGTH)
    whole = run(request(stop=["wor"], logprobs=1), outputs)
    assert whole.text == "hello " and whole.token_ids == ids_of("hello wor")
    assert (whole.finish_reason, whole.stop_reason) == ("stop", "wor")
    assert [list(step) for step in whole.logprobs] == [[i] for i in whole.token_ids]
    assert whole.cumulative_logprob == pytest.approx(-0.5 * 9)


def test_what_was_held_back_for_a_stop_string_is_shown_when_an_answer_is_taken_back():
    outputs = [Output("r", ids_of("say STO")), Output("r", [], finish_reason=FinishReason.ABORT)]
    whole = run(request(stop=["STOP"]), outputs)
    assert (whole.text, whole.finish_reason) == ("say STO", "abort")


def test_a_stop_token_is_no_text_and_a_later_output_without_cached_tokens_changes_nothing():
    answer = Answer(request(), TOKENIZER)
    first = Output("r", ids_of("ab"), num_cached_tokens=5, prompt_logprobs=[None, {65: Logprob(-1.0)}])
    last = Output("r", ids_of("c!"), finish_reason=FinishReason.STOP, stop_reason=33)
    assert answer.push(first) + answer.push(last) == "abc"
    assert answer.num_cached_tokens == 5
    assert answer.prompt_logprobs[1][65].decoded_token == TOKENIZER.token_text(65)


@pytest.mark.parametrize("tokenizer", [None, TOKENIZER])
def test_an_answer_without_text_has_tokens_and_figures_alone(tokenizer):
    asked = request(logprobs=1, detokenize=False)
    whole = run(asked, outputs_of(ids_of("abc"), [1], True, finish_reason=FinishReason.LENGTH), tokenizer)
    assert (whole.text, whole.token_ids) == ("", ids_of("abc"))
    assert all(entry.decoded_token is None for step in whole.logprobs for entry in step.values())


def test_an_answer_that_began_elsewhere_goes_on_as_if_it_had_not():
    """Cut anywhere, in characters and in stop strings, too."""
    r = random.Random(3)
    print("seed 3")
    for _ in range(300):
        text = "".join(r.choices("ab🚀 é", k=r.randint(2, 20)))
        ids = TOKENIZER.encode(text)
        stops = ["".join(r.choices("ab é", k=r.randint(2, 4)))]
        options = dict(stop=stops, min_tokens=r.choice((0, 3)), include_stop_str_in_output=r.random() < 0.5)
        outputs = outputs_of(ids, [1] * (len(ids) - 1), finish_reason=FinishReason.LENGTH)
        whole = run(request("p", **options), copy.deepcopy(outputs))
        if len(whole.token_ids) < 2:
            continue
        # Moved while it runs: the parts of the text that each place gives are the text.
        at = r.randint(1, len(whole.token_ids) - 1)
        before = Answer(request("p", **options), TOKENIZER)
        shown = "".join(before.push(output) for output in copy.deepcopy(outputs[:at]))
        moved = request("p", **options)
        moved.output_token_ids = ids[:at]
        rest = run(moved, outputs[at:])
        assert (shown + rest.text, rest.finish_reason, rest.stop_reason) == (
            whole.text,
            whole.finish_reason,
            whole.stop_reason,
        )
        assert ids[:at] + rest.token_ids == whole.token_ids


@pytest.mark.parametrize("seconds", [0.0, 1e-4])
def test_a_fake_engine_goes_on_behind_tokens_drawn_elsewhere_as_a_real_one_does(seconds):
    engine = FakeEngine(300, reply=ids_of("hello "), ends=True, token_seconds=seconds)

    async def tokens(output):
        asked = request("p", output, max_tokens=20)
        asked.eos_token_ids = (257,)
        return [i async for part in engine.generate(asked) for i in part.token_ids]

    whole = asyncio.run(tokens(""))
    assert whole == [*ids_of("hello "), 257] and asyncio.run(tokens("hel")) == whole[3:]
