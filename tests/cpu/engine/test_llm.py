"""The whole engine on tiny checkpoints: the oracle's tokens, however the engine runs them, and clear answers
to bad input."""

import enum
import gc
import math
import os
import random
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.api import Request
from shoal.engine import answers, llm, resolve
from shoal.engine.ranks.ranks import Ranks
from shoal.errors import ConfigError
from shoal.kernels.sampling import reference
from shoal.sampling_params import LISTS, StructuredOutputsParams
from shoal.text import request_builder
from shoal.text.request_builder import copy_params
from tests import tiny

COUNT = 16
SHARED = random.Random(5).choices(range(256), k=64)
PROMPTS = [
    SHARED[: random.Random(i).choice((0, 15, 16, 33, 64))] + random.Random(i + 50).choices(range(256), k=n)
    for i, n in enumerate((1, 3, 15, 16, 17, 40, 64, 100))
]


class Id(enum.IntEnum):
    ONE = 1


def greedy(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options)


def ids_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture(scope="module")
def expected(root):
    folder = tiny.write_model(root, "qwen3")
    return [tiny.greedy(folder, p, COUNT) for p in PROMPTS]


@pytest.mark.parametrize("name", tiny.MODELS)
def test_every_architecture_generates_the_oracles_tokens(name, root, build):
    folder = tiny.write_model(root, name)
    assert ids_of(build(name).generate(PROMPTS, greedy())) == [tiny.greedy(folder, p, COUNT) for p in PROMPTS]


@pytest.mark.parametrize(
    "options",
    [
        dict(async_scheduling=True),
        dict(enable_prefix_caching=False),
        dict(max_num_batched_tokens=24, max_num_seqs=8, async_scheduling=True),
        dict(max_num_batched_tokens=16, max_num_seqs=2),
        dict(block_size=4),
        dict(num_gpu_blocks_override=13, max_model_len=200),
        dict(num_gpu_blocks_override=13, max_model_len=200, async_scheduling=True, max_num_batched_tokens=40),
        dict(long_prefill_token_threshold=20, scheduling_policy="priority"),
        dict(target_itl_ms=0.001, max_num_seqs=3),
        dict(
            target_itl_ms=2,
            max_num_seqs=3,
            async_scheduling=True,
            num_gpu_blocks_override=13,
            max_model_len=200,
        ),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_the_engine_runs(options, build, expected):
    engine = build("qwen3", **options)
    for _ in range(2):  # the second time from the prefix cache
        assert ids_of(engine.generate(PROMPTS, greedy())) == expected
        engine.core.check()


def test_a_cache_that_small_does_preempt(build, expected):
    engine = build("qwen3", num_gpu_blocks_override=13, max_model_len=200)
    engine.generate(PROMPTS, greedy())
    assert engine.stats().num_preemptions > 0


def test_logprobs_are_the_oracles(build, root):
    engine = build("qwen3", max_num_batched_tokens=32, max_num_seqs=4)
    prompt = PROMPTS[5]
    output = engine.generate([prompt], greedy(logprobs=3, prompt_logprobs=2))[0]
    answer = output.outputs[0]
    want = tiny.logprobs(tiny.write_model(root, "qwen3"), prompt + answer.token_ids)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    for i in range(1, len(prompt)):
        assert output.prompt_logprobs[i][prompt[i]].logprob == pytest.approx(
            float(want[i - 1, prompt[i]]), abs=1e-3
        )
    for i, step in enumerate(answer.logprobs):
        row = want[len(prompt) - 1 + i]
        assert set(row.topk(3).indices.tolist()) <= set(step)
        assert step[answer.token_ids[i]].rank == 1
        assert all(entry.logprob == pytest.approx(float(row[t]), abs=1e-3) for t, entry in step.items())
    assert answer.cumulative_logprob == pytest.approx(
        sum(s[t].logprob for s, t in zip(answer.logprobs, answer.token_ids))
    )


PROCESSED = [
    dict(temperature=0.0),
    dict(temperature=0.7, seed=1),
    dict(temperature=1.3, seed=2, top_k=5),
    dict(temperature=0.9, seed=3, top_p=0.8, min_p=0.01),
    dict(temperature=1.1, seed=4, presence_penalty=1.5, top_k=9),
    dict(temperature=0.0, logit_bias={7: 50.0}, max_tokens=2),
]


def what_was_drawn_from(raw, token_ids, options):
    """The log-probabilities of the last draw, by the parameters' own definitions."""
    row = torch.tensor([raw[i].logprob for i in range(len(raw))])
    for token_id, bias in options.get("logit_bias", {}).items():
        row[token_id] += bias
    row[list(set(token_ids))] -= options.get("presence_penalty", 0.0)
    row /= options["temperature"] or 1.0
    kept = reference.survivors(
        row, 1.0, options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0)
    )
    return dict(zip(kept.tolist(), row[kept].log_softmax(0).tolist()))


@pytest.mark.parametrize("mode", [{}, {"async_scheduling": True, "max_num_batched_tokens": 24}], ids=str)
def test_processed_logprobs_are_of_what_tokens_are_drawn_from(mode, build):
    raw = build("qwen3", max_logprobs=-1)
    processed = build("qwen3", max_logprobs=-1, logprobs_mode="processed_logprobs", **mode)
    params = [greedy(**options, logprobs=-1) for options in PROCESSED]
    outputs = [engine.generate(PROMPTS[: len(params)], params) for engine in (raw, processed)]
    for own, found, options in zip(*outputs, PROCESSED):
        own, found = own.outputs[0], found.outputs[0]
        assert own.token_ids == found.token_ids, "the mode changes no token"
        for i, step in enumerate(found.logprobs):
            wanted = what_was_drawn_from(own.logprobs[i], own.token_ids[:i], options)
            assert {t for t, entry in step.items() if entry.logprob > -math.inf} == set(wanted)
            for token_id, logprob in wanted.items():
                assert step[token_id].logprob == pytest.approx(logprob, abs=1e-4)


def test_a_mode_of_logprobs_that_does_not_exist_is_refused(build):
    for mode in ("raw_logits", "processed_logits", "processed"):
        with pytest.raises(ConfigError, match=r"logprobs_mode.*raw_logprobs.*processed_logprobs"):
            build("qwen3", logprobs_mode=mode)


def test_a_seeded_draw_does_not_depend_on_neighbours_or_mode(build):
    mine = greedy(temperature=1.2, seed=11, top_p=0.9, top_k=40)
    alone = ids_of(build("qwen3").generate([PROMPTS[3]], mine))[0]
    others = [greedy(temperature=0.8)] * (len(PROMPTS) - 1)
    engine = build("qwen3", async_scheduling=True, max_num_batched_tokens=32, max_num_seqs=5)
    assert ids_of(engine.generate([PROMPTS[3], *PROMPTS[1:]], [mine, *others]))[0] == alone
    engine.reset_prefix_cache()
    # rows with extras: every row is drawn twice
    penalized = [greedy(temperature=0.8, repetition_penalty=1.3)] * (len(PROMPTS) - 1)
    assert ids_of(engine.generate([PROMPTS[3], *PROMPTS[1:]], [mine, *penalized]))[0] == alone


def test_answer_i_of_n_uses_seed_plus_i(build):
    engine = build("qwen3")
    together = engine.generate([PROMPTS[2]], greedy(n=3, temperature=1.5, seed=7))[0].outputs
    assert [o.index for o in together] == [0, 1, 2]
    apart = [
        engine.generate([PROMPTS[2]], greedy(temperature=1.5, seed=7 + i))[0].outputs[0].token_ids
        for i in range(3)
    ]
    assert [o.token_ids for o in together] == apart and len({tuple(a) for a in apart}) == 3


@pytest.mark.parametrize("mode", [dict(), dict(async_scheduling=True)], ids=str)
def test_penalties_survive_preemption(mode, build):
    params = greedy(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.3)
    roomy = ids_of(build("qwen3", **mode).generate(PROMPTS, params))
    tight = build("qwen3", num_gpu_blocks_override=13, max_model_len=200, **mode)
    assert ids_of(tight.generate(PROMPTS, params)) == roomy and tight.stats().num_preemptions > 0


def test_penalties_count_a_prompt_that_came_in_chunks(build):
    params = greedy(repetition_penalty=1.7, presence_penalty=0.5)
    whole = ids_of(build("qwen3").generate([PROMPTS[7]], params))
    assert whole != ids_of(build("qwen3").generate([PROMPTS[7]], greedy()))
    assert ids_of(build("qwen3", max_num_batched_tokens=16).generate([PROMPTS[7]], params)) == whole


@pytest.mark.parametrize("mode", [dict(), dict(async_scheduling=True)], ids=str)
def test_bad_words_of_several_tokens_never_appear(mode, build):
    engine = build("qwen3", **mode)
    free = engine.generate([PROMPTS[6]], greedy())[0].outputs[0]
    pair = next((i for i in range(1, COUNT - 1) if all(65 <= t < 256 for t in free.token_ids[i : i + 2])), 1)
    word = tuple(free.token_ids[pair : pair + 2])
    group = engine._group(PROMPTS[6], greedy(), 0)
    group.answers[0].request = replace(group.answers[0].request, bad_word_ids=(word,))
    engine._add([group])
    while not group.finished:
        engine._step()
    got = group.answers[0].completion.token_ids
    assert (
        all(tuple(got[i : i + 2]) != word for i in range(COUNT - 1))
        and got[: pair + 1] == free.token_ids[: pair + 1]
    )


def test_min_tokens_holds_back_the_end_of_text(build, root):
    engine = build("qwen3")
    biased = greedy(ignore_eos=False, logit_bias={257: 100.0}, min_tokens=5)
    answer = engine.generate([PROMPTS[0]], biased)[0].outputs[0]
    assert (
        len(answer.token_ids) == 6
        and answer.token_ids[-1] == 257
        and answer.finish_reason == "stop"
        and answer.stop_reason is None
    )


def test_prompt_and_answer_beyond_the_model_length_end_with_length(build):
    engine = build("qwen3", max_model_len=64)
    answer = engine.generate([[5] * 50], greedy(max_tokens=1000))[0].outputs[0]
    assert answer.finish_reason == "length" and 50 + len(answer.token_ids) == 64


def test_two_identical_prompts_compute_their_prefix_once(build):
    engine = build("qwen3")
    outputs = engine.generate([SHARED, SHARED, SHARED], greedy())
    assert sorted(o.num_cached_tokens for o in outputs) == [0, 48, 48]
    assert len({tuple(i) for i in ids_of(outputs)}) == 1


def test_a_stream_grows_and_equals_generate(build):
    engine = build("llama")
    whole = engine.generate("hello", greedy())[0].outputs[0]
    steps = [o.outputs[0] for o in engine.stream("hello", greedy())]
    assert [len(s.token_ids) for s in steps] == list(range(1, COUNT + 1)) and steps[-1].text == whole.text
    stream = engine.stream("hello", greedy())
    next(stream)
    stream.close()
    assert engine.stats().num_running == engine.stats().num_waiting == 0
    assert ids_of(engine.generate("hello", greedy())) == [whole.token_ids]


def test_an_answer_ends_behind_its_stop_string_however_steps_are_merged(build, monkeypatch):
    engine = build("llama")
    free = engine.generate("hello", greedy())[0].outputs[0].text
    params = greedy(stop=[next(free[i : i + 2] for i in range(2, len(free)) if free[i : i + 2].isascii())])
    apart = engine.generate("hello", params)[0].outputs[0]
    assert len(apart.token_ids) < COUNT and apart.finish_reason == "stop"
    step = engine.core.step

    def four_steps():
        outputs = [output for _ in range(4) for output in step()]
        whole = replace(outputs[-1], token_ids=[i for output in outputs for i in output.token_ids])
        return [whole] if outputs else []

    monkeypatch.setattr(engine.core, "step", four_steps)
    merged = engine.generate("hello", params)[0].outputs[0]
    assert (merged.token_ids, merged.text) == (apart.token_ids, apart.text)


def finish(engine, request):
    """The tokens that the engine adds to a request, and why it ended."""
    engine.core.add(request)
    ids = []
    while True:
        for output in engine.core.step():
            ids += output.token_ids
            if output.finish_reason is not None:
                return ids, output.finish_reason


@pytest.mark.parametrize("mode", [dict(), dict(async_scheduling=True)], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(temperature=1.3, seed=9, top_k=40),
        dict(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.3),
        dict(ignore_eos=False, logit_bias={257: 100.0}, min_tokens=10),
        dict(structured_outputs=StructuredOutputsParams(regex="[a-z ]{12,}"), ignore_eos=False),
    ],
    ids=lambda options: "-".join(options) or "greedy",
)
def test_a_request_that_began_elsewhere_goes_on_as_if_it_had_not(options, mode, build):
    engine = build("qwen3", **mode)
    params = greedy(seed=5) if not options else greedy(**options)

    def request(name, output):
        return Request(name, PROMPTS[5], params, eos_token_ids=(257,), output_token_ids=output)

    whole, reason = finish(engine, request("whole", []))
    assert len(whole) > 7
    for count in (1, 7):
        engine.reset_prefix_cache()
        assert finish(engine, request(f"moved-{count}", whole[:count])) == (whole[count:], reason)
    engine.core.check()


def test_a_bad_request_in_a_batch_adds_none_of_it(build):
    engine = build("llama")
    with pytest.raises(ValueError, match="must have token ids in"):
        engine.generate([[1, 2], [tiny.VOCAB]], greedy())
    assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_an_unknown_option_suggests_the_nearest():
    with pytest.raises(ValueError, match="max_model_len"):
        LLM("nowhere", max_modellen=3)


def test_known_options_of_vllm_without_meaning_are_accepted_with_a_warning(build, caplog):
    build("llama", swap_space=4)
    assert "swap_space" in caplog.text


def test_no_room_for_a_block_is_said(build):
    with pytest.raises(ValueError, match="single KV"):
        build("llama", kv_cache_memory_bytes=16)


@pytest.mark.parametrize("value", [10**10, 10**15, 2**63])
@pytest.mark.parametrize(
    "option",
    [
        "max_num_seqs",
        "num_gpu_blocks_override",
        "kv_cache_memory_bytes",
        "kv_host_bytes",
        "max_model_len",
        "block_size",
        "tensor_parallel_size",
        "max_num_batched_tokens",
    ],
)
def test_a_number_that_no_machine_has_memory_for_is_refused_with_a_limit(option, value, build, monkeypatch):
    monkeypatch.setattr(resolve, "available_bytes", lambda: 1 << 30)
    # as many as the sequences can have are no more than that
    if option == "max_num_batched_tokens" and value < 2**63:
        assert build("qwen3", **{option: value}).generate([[1]], greedy())
        return
    with pytest.raises(
        ConfigError, match=rf"^{option} .*\b{value}\b.*(lower it|16 is the default|choose)"
    ) as error:
        build("qwen3", **{option: value})
    assert "\n" not in str(error.value)


def test_more_tokens_of_a_step_than_memory_are_refused(build, monkeypatch):
    monkeypatch.setattr(resolve, "available_bytes", lambda: 64 << 20)
    with pytest.raises(ConfigError, match=r"^max_num_batched_tokens 1000000 .* lower it to \d+"):
        build("qwen3", max_num_batched_tokens=1_000_000, max_num_seqs=10_000)


def test_a_prompt_larger_than_the_whole_cache_is_refused(build):
    engine = build("llama", num_gpu_blocks_override=2)
    with pytest.raises(ValueError, match="whole KV cache"):
        engine.generate([[1] * 40], greedy())
    assert len(ids_of(engine.generate([[1] * 8], greedy()))[0]) == COUNT


def test_full_collections_wait_for_the_end_of_generate(build, monkeypatch):
    engine, before, within = build("qwen3"), gc.get_threshold(), []
    step = engine.core.step
    monkeypatch.setattr(engine.core, "step", lambda: within.append(gc.get_threshold()) or step())
    engine.generate(PROMPTS[0], greedy())
    assert {threshold[:2] for threshold in within} == {before[:2]} and min(
        threshold[2] for threshold in within
    ) >= 1000 * before[2]
    assert gc.get_threshold() == before


def test_no_full_collection_comes_while_requests_are_made_or_told(build, monkeypatch):
    """Thousands of requests are enough garbage for one, and so is the check of their parameters; after the
    last step the next is due for all that the steps have left."""
    engine, before, within, params = build("qwen3"), gc.get_threshold(), [], greedy()
    for module, name in ((SamplingParams, "check"), (request_builder, "Request"), (answers, "RequestOutput")):
        made = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, made=made, **named: within.append(gc.get_threshold()[2]) or made(*args, **named),
        )
    engine.generate(PROMPTS[:2], params)
    assert len(within) == 5 and min(within) >= 1000 * before[2]
    with pytest.raises(ValueError, match="not a list of token ids"):
        engine.generate([PROMPTS[0], [1.5]], greedy())
    assert gc.get_threshold() == before


@pytest.mark.parametrize("at", [0, 3])
def test_an_interrupt_in_a_step_leaves_a_usable_engine(at, build, expected, monkeypatch):
    """The interrupted step's blocks were registered when it was scheduled; they must not be found, as it
    never ran."""
    engine = build("qwen3", async_scheduling=True)
    launch, steps = Ranks.step, iter(range(100))

    def interrupted(self, packed, options):
        if next(steps) == at:
            raise KeyboardInterrupt
        return launch(self, packed, options)

    monkeypatch.setattr(Ranks, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS[:4], greedy())
    monkeypatch.undo()
    engine.core.check()
    assert engine.stats().num_running == 0 and ids_of(engine.generate(PROMPTS, greedy())) == expected


def test_a_request_may_skip_the_prefix_cache(build, expected):
    engine = build("qwen3")
    engine.generate(PROMPTS, greedy())
    outputs = engine.generate(PROMPTS, greedy(skip_reading_prefix_cache=True))
    assert ids_of(outputs) == expected and not any(o.num_cached_tokens for o in outputs)


def test_an_option_of_vllm_that_is_not_supported_is_refused_unless_it_asks_for_nothing(build):
    build("llama", quantization=None, cpu_offload_gb=0, pipeline_parallel_size=1)
    with pytest.raises(ValueError, match="cpu_offload_gb"):
        build("llama", cpu_offload_gb=4)


def test_no_memory_in_a_step_ends_its_requests_and_poisons_nothing(build, expected, monkeypatch):
    engine = build("qwen3")
    stream = engine.stream(PROMPTS[0], greedy())
    next(stream)

    def fail(self, packed, options):
        raise MemoryError("no memory for a step")

    monkeypatch.setattr(Ranks, "step", fail)
    with pytest.raises(MemoryError):
        engine.generate(PROMPTS, greedy())
    monkeypatch.undo()
    assert list(stream)[-1].outputs[0].finish_reason == "abort"
    assert ids_of(engine.generate(PROMPTS, greedy())) == expected


def test_streams_side_by_side_miss_nothing(build, expected):
    engine = build("qwen3")
    first, second = engine.stream(PROMPTS[0], greedy()), engine.stream(PROMPTS[1], greedy())
    next(first)
    assert ids_of(engine.generate(PROMPTS[2:4], greedy())) == expected[2:4]
    assert list(second)[-1].outputs[0].token_ids == expected[1]
    last = list(first)[-1]
    assert last.outputs[0].token_ids == expected[0] and last.finished


def test_threads_that_share_an_engine_get_the_answers_of_their_own_prompts(build, expected):
    engine, answers = build("qwen3"), {}

    def ask(number):
        stream = number % 3 == 2
        for _ in range(4):
            outputs = (
                engine.stream(PROMPTS[number], greedy())
                if stream
                else engine.generate([PROMPTS[number]], greedy(), use_tqdm=False)
            )
            answers.setdefault(number, []).append(list(outputs)[-1].outputs[0].token_ids)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [expected[number]] * 4 for number in range(len(PROMPTS))}
    engine.core.check()


def test_a_thread_that_waits_has_the_next_turn_also_if_its_holder_wants_it_again_at_once():
    turns, order = llm.TurnLock(), []

    def wait():
        with turns:
            order.append("who waited")

    with turns:
        with turns:  # its holder may
            waiting = threading.Thread(target=wait)
            waiting.start()
        while not turns._next.locked():
            time.sleep(0.001)
    with turns:
        order.append("who had it")
    waiting.join()
    assert order == ["who waited", "who had it"]


def test_an_interrupt_in_one_thread_costs_another_no_tokens_and_keeps_no_lock(build, expected):
    engine, answers, is_inside, is_over = build("qwen3"), [], threading.Event(), threading.Event()
    is_heeded = threading.Event()

    def interrupt(number, frame):
        is_heeded.set()
        if is_inside.is_set():
            raise KeyboardInterrupt

    def ask():
        while not is_over.is_set():
            [output] = engine.generate([PROMPTS[1]], greedy(), use_tqdm=False)
            answers.append(output.outputs[0].token_ids)

    def press():
        r = random.Random(7)
        while not is_over.is_set():
            time.sleep(r.random() * 0.02)
            is_heeded.clear()
            os.kill(os.getpid(), signal.SIGINT)
            is_heeded.wait(10)  # as a second one within a step interrupts it

    before = signal.signal(signal.SIGINT, interrupt)
    threads = [threading.Thread(target=target) for target in (ask, press)]
    for thread in threads:
        thread.start()
    num_interrupts = 0
    try:
        deadline = time.monotonic() + 60
        while (num_interrupts < 30 or len(answers) < 5) and time.monotonic() < deadline:
            try:
                is_inside.set()
                engine.generate([PROMPTS[2]], greedy(), use_tqdm=False)
                is_inside.clear()
            except KeyboardInterrupt:
                is_inside.clear()
                num_interrupts += 1
    finally:
        is_inside.clear()
        is_over.set()
        for thread in threads:
            thread.join(60)
        signal.signal(signal.SIGINT, before)
    assert num_interrupts >= 30 and not any(thread.is_alive() for thread in threads)
    assert answers == [expected[1]] * len(answers)
    assert ids_of(engine.generate([PROMPTS[2]], greedy(), use_tqdm=False)) == [expected[2]]
    engine.core.check()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_lost_stream_that_is_collected_within_a_step_is_dropped_behind_it(
    is_async, build, expected, monkeypatch
):
    """A stream in a cycle is closed wherever garbage is collected. Regression: in the middle of a step that dropped requests of the step, and ended the late interrupts of the running generate."""
    engine, handlers, num_lost = build("qwen3", async_scheduling=is_async, max_num_seqs=2), [], []
    grow, scheduler, step = engine.core.loop.scheduler._grow, engine.core.loop.scheduler, engine._step

    def growing(seq, num_tokens):
        if seq.request.prompt_token_ids == PROMPTS[0]:
            gc.collect()
            num_lost.append(len(engine._abandoned))
        return grow(seq, num_tokens)

    def stepping():
        handlers.append(signal.getsignal(signal.SIGINT))
        step()

    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.stream = holder, engine.stream(PROMPTS[0], greedy(max_tokens=40))
    next(holder.stream), next(holder.stream)
    monkeypatch.setattr(scheduler, "_grow", growing)
    monkeypatch.setattr(engine, "_step", stepping)
    gc.disable()  # so that it is the one in `growing` that finds it
    try:
        del holder
        assert ids_of(engine.generate([PROMPTS[1]], greedy(), use_tqdm=False)) == [expected[1]]
    finally:
        gc.enable()
    assert (
        num_lost[0] == 1
        and engine.stats().num_running == 0
        and set(handlers) == {engine._late_interrupts._wait}
    )
    engine.core.check()


def test_sampling_params_that_were_made_impossible_later_are_refused_with_the_whole_batch(build):
    engine, params = build("llama"), greedy()
    params.temperature = "warm"
    with pytest.raises(ValueError, match=r"temperature must be .*, got 'warm'"):
        engine.generate([[1, 2], [3, 4]], [greedy(), params], use_tqdm=False)
    assert not engine.core.has_work


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "allowed_token_ids"])
def test_what_is_no_list_and_was_given_later_is_one_or_refused(name, build):
    """Regression: a text was taken for the list of its characters, each a stop string."""
    engine, params = build("llama"), greedy()
    setattr(params, name, 5)
    with pytest.raises(ValueError, match=f"{name} must be {LISTS[name]}, got 5; give one"):
        engine.generate([[1, 2]], params, use_tqdm=False)
    with pytest.raises(ValueError, match=f"{name} must be {LISTS[name]}, got b'no'; give one"):
        SamplingParams(**{name: b"no"})
    setattr(params, name, (7,) if name.endswith("ids") else ("no such text",))
    [output] = engine.generate([[1, 2]], params, use_tqdm=False)
    assert output.finished and isinstance(getattr(params, name), list)
    if name == "stop":
        params.stop = "no such text"
        engine.generate([[1, 2]], params, use_tqdm=False)
        assert params.stop == ["no such text"]


def test_a_streams_outputs_are_snapshots(build):
    outputs = list(build("llama").stream([5, 6, 7], greedy(logprobs=1)))
    assert (
        [len(o.outputs[0].logprobs) for o in outputs]
        == [len(o.outputs[0].token_ids) for o in outputs]
        == list(range(1, COUNT + 1))
    )


@pytest.mark.parametrize(
    "ids",
    [
        [True, 2],
        [1, 5.0],
        [1, "2"],
        [1, None],
        [1, [2]],
        {1, 2},
        np.array([1.0]),
        [np.int64(1)],
        [1, "\ud800"],
    ],
)
def test_token_ids_are_integers(ids, build):
    with pytest.raises(ValueError, match="not a list of token ids"):
        build("llama").generate([{"prompt_token_ids": ids}], greedy())


@pytest.mark.parametrize("ids", [(1, 2), range(1, 3), bytes([1, 2]), np.array([1, 2]), [Id.ONE, 2]])
def test_any_sequence_of_integers_will_do_as_token_ids(ids, build):
    output = build("llama").generate([{"prompt_token_ids": ids}], greedy())[0]
    assert (
        output.prompt_token_ids == [1, 2]
        and output.outputs[0].token_ids == ids_of(build("llama").generate([[1, 2]], greedy()))[0]
    )


def test_the_callers_list_of_token_ids_is_not_kept(build):
    engine, ids = build("llama"), [1, 2]
    stream = engine.stream(ids, greedy())
    first = next(stream)
    ids.append(3)
    assert first.prompt_token_ids == next(stream).prompt_token_ids == [1, 2]
    stream.close()


def test_a_copy_of_sampling_params_has_all_of_their_fields():
    params = greedy(
        n=3, seed=4, stop=["a"], logit_bias={5: 1.0}, structured_outputs=StructuredOutputsParams(regex="a+")
    )
    own = copy_params(params)
    assert own == params and own is not params
    own.seed = 5
    assert params.seed == 4


def test_a_copy_of_a_subclass_of_sampling_params_keeps_what_it_adds():
    class Tagged(SamplingParams):
        pass

    params = Tagged(seed=4)
    params.tag = "x"
    own = copy_params(params)
    assert type(own) is Tagged and own.tag == "x" and own.seed == 4


@pytest.mark.parametrize(
    "call",
    [
        lambda e: e.generate(None),
        lambda e: e.generate(5),
        lambda e: e.generate([5.0]),
        lambda e: e.chat(None),
        lambda e: e.chat([]),
        lambda e: e.generate("a", {"temperature": 0}),
        lambda e: e.generate({"prompt": "a", "images": []}),
        lambda e: e.generate([[1, 2], {"prompt_token_ids": [1], "cache_salt": 5}]),
        lambda e: e.generate(["a", "b"], greedy(), priority=[1, "x"]),
        lambda e: e.chat([{"role": "user", "content": "a"}], tools="x"),
        lambda e: SamplingParams(stop=5),
        lambda e: SamplingParams(seed="x"),
        lambda e: SamplingParams(ignore_eos="no"),
        lambda e: SamplingParams(logit_bias={5: 10**400}),
        lambda e: SamplingParams(structured_outputs={"choice": ["a", "b"]}),
        lambda e: SamplingParams(bad_words="abc"),
        lambda e: SamplingParams(stop_token_ids=5),
    ],
)
def test_input_of_the_wrong_kind_is_a_value_error_and_leaves_nothing_behind(call, build):
    engine = build("llama", scheduling_policy="priority")
    with pytest.raises(ValueError):
        call(engine)
    engine.core.check()
    assert engine.stats().num_waiting == 0 and len(ids_of(engine.generate([[1, 2]], greedy()))[0]) == COUNT


def test_a_top_k_beyond_the_vocabulary_is_no_limit(build):
    engine = build("qwen3")
    free = ids_of(engine.generate([PROMPTS[3]], greedy(temperature=2.0, seed=3)))
    assert ids_of(engine.generate([PROMPTS[3]], greedy(temperature=2.0, seed=3, top_k=2**40))) == free


def test_an_end_of_text_id_that_the_model_has_not_is_passed_over(root, build):
    import json
    import shutil

    folder = root / "odd-eos"
    shutil.copytree(tiny.write_model(root, "llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [257, 5000]}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    with LLM(str(folder), dtype="float32", device="cpu", max_model_len=64) as engine:
        assert len(ids_of(engine.generate([[1, 2]], greedy(min_tokens=3, ignore_eos=False)))[0]) >= 3


@pytest.mark.parametrize("name", ["no_such_command", "release_memory", "exit", "__init__", "kv_poll", "step"])
def test_users_reach_only_public_commands_of_the_ranks(build, name):
    engine = build("qwen3")
    with pytest.raises(ConfigError, match=rf"got {name}; choose one of .*state_digest"):
        engine.collective_rpc(name)
    [digest] = engine.collective_rpc("state_digest")
    assert len(digest) == 64


def test_outputs_have_vllms_attributes_and_times_where_asked(build):
    """Regression: scripts that read them got an AttributeError after the whole batch was computed."""
    for keeps in (False, True):
        engine = build(disable_log_stats=not keeps)
        [output] = engine.generate([[5, 6, 7]], greedy(max_tokens=3), use_tqdm=False)
        for name in ("lora_request", "kv_transfer_params", "encoder_prompt", "encoder_prompt_token_ids"):
            assert getattr(output, name) is None
        assert output.outputs[0].lora_request is None and output.outputs[0].routed_experts is None
        metrics = output.metrics
        assert (metrics is not None) == keeps
    assert metrics.num_generation_tokens == 3 and metrics.arrival_time > 0 and not metrics.is_corrupted
    assert metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency > 0


def test_stop_strings_of_a_model_are_no_defaults_without_a_tokenizer(build):
    """Regression: a request without parameters was refused, as stop strings need text."""
    llm = build("qwen3", skip_tokenizer_init=True)
    llm.generation_config = {"stop_strings": ["x"], "max_new_tokens": 3}
    assert len(ids_of(llm.generate(PROMPTS[:1]))[0]) <= 3
