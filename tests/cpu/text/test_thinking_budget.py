"""A budget ends reasoning after that many tokens, however outputs are merged; the answer continues after it."""

from __future__ import annotations

import asyncio
import random

import pytest

from shoal.api import FinishReason, Logprob, Output, Request, Span
from shoal.sampling_params import SamplingParams
from shoal.server.apis.tools import AnswerFormat, ToolPlan, whole
from shoal.text.formats.registry import BY_NAME, FORMATS
from shoal.text.reading.thoughts import THOUGHTS as MARKS
from shoal.text.reading.thoughts import Start, Thoughts
from shoal.text.thinking_budget import ThinkingBudget, ThoughtCounter

THINK = Thoughts("qwen3", "<think>", "</think>", ())
ANYWHERE = Thoughts("gemma4", "<think>", "</think>", (), anywhere=True)
CLOSE = 9000  # a single token; all others are characters
BYTES = {**{i: bytes([i]) for i in range(256)}, CLOSE: b"</think>"}
THOUGHTS = "abcdefghij"


class Engine:
    """Writes `thinks` until its reasoning is closed, and `then` afterwards; merges random numbers of tokens."""

    def __init__(self, thinks: str, then: str, seed: int = 0) -> None:
        self.thinks, self.then, self.random = list(thinks.encode()), list(then.encode()), random.Random(seed)
        self.requests: list[Request] = []
        self.num_closed = 0

    async def generate(self, request: Request):
        self.requests.append(request)
        given, most = request.output_token_ids, request.params.max_tokens
        assert len(given) < most
        forced = len(given) - given[::-1].index(CLOSE) if CLOSE in given else None
        script = self.thinks if forced is None else given[:forced] + self.then
        ids, reason = script[len(given) : most], FinishReason.STOP
        if len(script) > most:
            reason = FinishReason.LENGTH
        is_first, logprobs = True, request.params.logprobs
        try:
            while ids or is_first:
                count = self.random.randint(1, 5)
                part, ids = ids[:count], ids[count:]
                found = None if logprobs is None else [{i: Logprob(-1.0, 1)} for i in part]
                output = Output(request.request_id, part, found, finish_reason=None if ids else reason)
                if is_first:
                    output.num_cached_tokens, output.spans = 16, [Span("queue", 1.0, 1.0)]
                    output.prompt_logprobs = None if request.params.prompt_logprobs is None else [None]
                is_first = False
                yield output
        finally:
            self.num_closed += 1


def run(engine, limit, *, start=Start.UNKNOWN, thoughts=THINK, **params):
    """Returns the answer's text and all outputs."""
    budget = ThinkingBudget(limit, thoughts, start, (CLOSE,), BYTES)
    request = Request("r", [1, 2], SamplingParams(**{"max_tokens": 1000, **params}))

    async def read():
        return [output async for output in budget.generate(engine.generate, request)]

    outputs = asyncio.run(read())
    assert [output.finish_reason is not None for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert {output.request_id for output in outputs} == {"r"}
    ids = [i for output in outputs for i in output.token_ids]
    return b"".join(BYTES[i] for i in ids).decode(), outputs


@pytest.mark.parametrize("limit", range(14))
@pytest.mark.parametrize("opens", ["<think>", "\n<think>", ""])
def test_reasoning_ends_after_the_tokens_of_the_budget(limit, opens):
    """The model or the prompt opens it; outputs are merged at random."""
    start = Start.UNKNOWN if opens else Start.INSIDE
    for seed in range(20):
        engine = Engine(f"{opens}{THOUGHTS}</think>Hi.", "Yes.", seed)
        text, outputs = run(engine, limit, start=start)
        # the model's own mark is eight tokens here, and counts as reasoning until it is whole
        if limit >= len(THOUGHTS) + len("</think>"):
            assert text == f"{opens}{THOUGHTS}</think>Hi." and len(engine.requests) == 1
        else:
            assert text == f"{opens}{(THOUGHTS + '</think>')[:limit]}</think>Yes."
            assert [request.request_id for request in engine.requests][-1] == "r-1"
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert engine.num_closed == len(engine.requests)


@pytest.mark.parametrize("limit, thoughts", [*zip(range(1, 10), ["é"] * 2 + ["é日"] * 3 + ["é日😀"] * 4)])
def test_a_budget_does_not_end_within_a_character(limit, thoughts):
    """Regression: a grammar refused the end of reasoning after half a character, so the answer was an error."""
    assert run(Engine("<think>é日😀!", "Yes."), limit)[0] == f"<think>{thoughts}</think>Yes."


def test_a_model_that_begins_characters_without_end_has_three_more_tokens():
    counter = ThoughtCounter(ThinkingBudget(5, THINK, Start.INSIDE, (CLOSE,), BYTES))
    assert counter.push([0xE6] * 20) == 8 and counter.is_spent


def test_an_answer_without_reasoning_is_left_alone():
    for start, text in ((Start.UNKNOWN, "Hi <think> there"), (Start.AFTER, "<think>no"), (Start.UNKNOWN, "")):
        assert run(Engine(text, "Yes."), 0, start=start)[0] == text


def test_reasoning_that_begins_again_has_what_is_left_of_the_budget():
    script = "<think>abc</think>One.<think>defgh</think>Two."
    assert (
        run(Engine(script, "Yes."), 15, thoughts=ANYWHERE)[0]
        == "<think>abc</think>One.<think>defg</think>Yes."
    )
    assert run(Engine(script, "Yes."), 99, thoughts=ANYWHERE)[0] == script
    text = run(Engine("<think>abc", "x<think>y", 3), 2, thoughts=ANYWHERE, max_tokens=30)[0]
    assert text.startswith("<think>ab</think>x<think></think>x<think></think>")


@pytest.mark.parametrize("most", range(8, 24))
def test_the_end_of_reasoning_counts_as_generated(most):
    for seed in range(5):
        text, outputs = run(Engine(f"<think>{THOUGHTS}", "Yes.", seed), 4, max_tokens=most)
        whole = [*"<think>abcd", "</think>", *"Yes."]
        assert text == "".join(whole[:most])
        is_cut = most < len(whole)
        assert outputs[-1].finish_reason is (FinishReason.LENGTH if is_cut else FinishReason.STOP)


def test_log_probabilities_and_the_prompts_figures_come_once():
    engine = Engine(f"<think>{THOUGHTS}", "Yes.")
    _, outputs = run(engine, 4, logprobs=1, prompt_logprobs=1)
    assert all([*map(next, map(iter, o.logprobs))] == o.token_ids for o in outputs)
    assert [o.logprobs for o in outputs if o.token_ids == [CLOSE]] == [[{CLOSE: Logprob(0.0, 1)}]]
    assert [bool(output.spans) for output in outputs] == [True] + [False] * (len(outputs) - 1)
    assert sum(output.num_cached_tokens for output in outputs) == 16
    assert sum(output.prompt_logprobs is not None for output in outputs) == 1
    # at once: the first request that runs is the continuation
    _, outputs = run(Engine("", "Yes."), 0, start=Start.INSIDE, prompt_logprobs=1)
    assert outputs[0].token_ids[:2] == [CLOSE, ord("Y")] and outputs[0].prompt_logprobs == [None]
    assert outputs[0].num_cached_tokens == 16 and outputs[0].spans


def test_an_aborted_request_is_not_continued():
    async def generate(request):
        yield Output("r", list(b"<think>abc"), finish_reason=FinishReason.ABORT)

    engine = Engine("", "")
    engine.generate = generate
    text, [output] = run(engine, 1)
    assert text == "<think>a" and output.finish_reason is FinishReason.ABORT


def test_an_answer_that_is_left_early_aborts_what_runs():
    engine = Engine(f"<think>{THOUGHTS}", "Yes." * 9)
    budget = ThinkingBudget(2, THINK, Start.UNKNOWN, (CLOSE,), BYTES)
    request = Request("r", [1, 2], SamplingParams(max_tokens=100))

    async def read(count):
        outputs = budget.generate(engine.generate, request)
        for _ in range(count):
            await anext(outputs)
        await outputs.aclose()

    for count in range(1, 9):
        asyncio.run(read(count))
        assert engine.num_closed == len(engine.requests)


# What follows the opening mark, and what begins the answer after reasoning, where it is more than nothing.
FAMILIES = {"muse_glimmer": ("", " to=user<|message|>"), "gemma4": ("\n", ""), "qwen3": ("\n", "\n\n")}


@pytest.mark.parametrize("thoughts", MARKS, ids=lambda thoughts: thoughts.name)
def test_the_answer_of_each_family_is_content_after_the_budget(thoughts):
    space, begins = FAMILIES.get(thoughts.name, ("", ""))
    form = next((form for form in FORMATS if form.thoughts == thoughts), BY_NAME["hermes"])
    forced = dict(BYTES) | {CLOSE: (thoughts.forced or thoughts.close).encode()}
    for seed in range(5):
        engine = Engine(thoughts.open + space + THOUGHTS, f"{begins}Yes.", seed)
        budget = ThinkingBudget(5, thoughts, thoughts.start_of("Hi"), (CLOSE,), forced)
        request = Request("r", [1, 2], SamplingParams(max_tokens=1000))

        async def read(outputs):
            return [i async for output in outputs for i in output.token_ids]

        ids = asyncio.run(read(budget.generate(engine.generate, request)))
        text = b"".join(forced[i] for i in ids).decode()
        answer_format = AnswerFormat(ToolPlan(), form.name, thoughts.name, "Hi", SamplingParams())
        answer = whole(answer_format.parser(is_whole=True).push(text, "stop"))
        # the line break is a token of reasoning
        assert (answer.reasoning, answer.content) == (THOUGHTS[: 5 - len(space)], "Yes."), text
