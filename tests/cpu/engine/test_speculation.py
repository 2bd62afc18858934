"""Engines with and without drafts give equal answers, whatever a request asks for and however engines run."""

import concurrent.futures
import dataclasses
import itertools
import os
import random
import re
from types import SimpleNamespace

import pytest

from shoal import LLM, BeamSearchParams, SamplingParams
from shoal.api import FinishReason, Request
from shoal.config import EngineConfig
from shoal.engine import step_loop
from shoal.engine.core import EngineCore
from shoal.engine.scheduling import grammar as grammars
from shoal.kernels.cpu import build as cpu_build
from shoal.sampling_params import StructuredOutputsParams
from shoal.weights.source import resolve
from tests import tiny
from tests.chain import LETTERS, broken_runs, follow, ring, write_chain

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
FIXED = NGRAM | {"enable_adaptive_verification": False}
EARLIER = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_cached_requests": 50}
RING = ring(12)
NUM_REQUESTS = int(os.environ.get("SHOAL_SPECULATION_REQUESTS", "400"))  # 10,000 by hand


@pytest.fixture(scope="module")
def wavering(tmp_path_factory):
    """A chain that goes on as expected two times of three, if it is sampled."""
    return write_chain(tmp_path_factory.mktemp("chains"), "wavering", RING, margin=4.0)


@pytest.fixture(scope="module")
def steady(tmp_path_factory):
    return write_chain(tmp_path_factory.mktemp("chains"), "steady", RING)


@pytest.fixture
def build():
    made = []

    def make(folder, **options):
        defaults = {
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 256,
            "kv_cache_memory_bytes": 1 << 25,
        }
        made.append(LLM(str(folder), **defaults | options))
        return made[-1]

    yield make
    for llm in made:
        llm.exit()


def text_of(tokens):
    return bytes(tokens).decode("ascii")


def spelled(tokens):
    """Returns the text that the tokenizer writes for tokens below 94."""
    return "".join(chr(33 + token) for token in tokens)


def random_params(rng):
    """Parameters with any mix of options."""
    options = {"max_tokens": rng.choice((1, 2, 7, 20, 40)), "ignore_eos": rng.random() < 0.7}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice((0.5, 1.0, 1.8)), "seed": rng.randrange(1 << 30)}
    else:
        options["temperature"] = 0.0
    some = lambda chance: rng.random() < chance  # noqa: E731
    letters = [33 + rng.randrange(LETTERS) for _ in range(4)]
    start = letters[0]
    if some(0.2):
        options["top_p"] = rng.choice((0.5, 0.9))
    if some(0.2):
        options["top_k"] = rng.choice((1, 5, 50))
    if some(0.1):
        options["min_p"] = 0.02
    if some(0.1):
        options["repetition_penalty"] = 1.4
    if some(0.1):
        options["presence_penalty"] = 1.9
    if some(0.1):
        options["frequency_penalty"] = 1.3
    if some(0.1):
        options["logit_bias"] = {letters[0]: 2.5, letters[1]: -100.0}
    if some(0.05):
        options["allowed_token_ids"] = [*range(33, 45), *letters]
    if some(0.1):
        options["bad_words"] = [text_of(follow(RING, start, 2)), text_of(letters[1:2])]
    if some(0.15):
        options["logprobs"] = rng.choice((0, 3))
    if some(0.05):
        options["prompt_logprobs"] = 1
    if some(0.2):
        options["stop_token_ids"] = letters
    if some(0.2):
        options["stop"] = [text_of(follow(RING, start, rng.randint(1, 3))) for start in letters]
        options["include_stop_str_in_output"] = some(0.5)
    if some(0.15):
        options["min_tokens"] = rng.randint(0, options["max_tokens"])
    if some(0.05):
        options["detokenize"] = "stop" in options
    if some(0.15) and not options.keys() & {"allowed_token_ids", "bad_words", "logit_bias", "min_tokens"}:
        starts = [33 + rng.randrange(48) for _ in range(4)]
        choice = [spelled(follow(RING, start, rng.randint(2, 20))) for start in starts]
        forms = [
            {"choice": choice},
            {"regex": r"([A-M]{3}-){2,9}[N-Q]+"},
            {"regex": f"([A-q]{{1,9}}{re.escape(choice[0])}){{1,3}}(!!|~)"},
            {"json": {"type": "array", "items": {"enum": choice}, "minItems": 2, "maxItems": 4}},
        ]
        options["structured_outputs"] = StructuredOutputsParams(**rng.choice(forms))
    if some(0.1):
        options["n"] = rng.choice((2, 3))
    return SamplingParams(**options)


def seen(outputs):
    """All that a caller sees, but for the numbers of log-probabilities."""
    return [
        [(list(o.token_ids), o.text, o.finish_reason, o.stop_reason, o.index) for o in output.outputs]
        for output in outputs
    ]


def close(one, other):
    for a, b in zip(one.outputs, other.outputs):
        assert (a.logprobs is None) == (b.logprobs is None)
        for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert {t: (pytest.approx(e.logprob, abs=1e-4), e.rank) for t, e in x.items()} == {
                t: (e.logprob, e.rank) for t, e in y.items()
            }


OPTIONS = [
    {},
    {"enable_prefix_caching": False, "max_num_batched_tokens": 48, "max_num_seqs": 16},
    {"num_gpu_blocks_override": 24, "max_num_seqs": 8},
    {"async_scheduling": True},
    {"num_gpu_blocks_override": 24, "kv_host_bytes": 1 << 24, "kv_load_policy": "always"},
    {"scheduling_policy": "priority", "num_gpu_blocks_override": 24, "async_scheduling": True},
]


@pytest.mark.parametrize(
    "speculation",
    [FIXED, NGRAM, EARLIER | {"enable_adaptive_verification": False}],
    ids=["fixed", "adaptive", "earlier"],
)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_random_requests_are_answered_as_without_drafts(options, speculation, wavering, build):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    count = max(1, NUM_REQUESTS // (3 * len(OPTIONS)))
    prompts = [broken_runs(rng, RING) for _ in range(count)]
    params = [random_params(rng) for _ in range(count)]
    more = {}
    if "scheduling_policy" in options:
        more["priority"] = [rng.randrange(4) for _ in range(count)]
    want = build(wavering).generate(prompts, params, use_tqdm=False)
    llm = build(wavering, speculative_config=speculation, **options)
    for _ in range(2):  # the second time with what the first one has cached
        got = llm.generate(prompts, params, use_tqdm=False, **more)
        for i, (a, b) in enumerate(zip(seen(want), seen(got))):
            assert a == b, (i, params[i])
        for a, b in zip(want, got):
            close(a, b)


OPTIONS_OF_ROWS = {
    "bias": {"logit_bias": {34: 1.5}},
    "allowed": {"allowed_token_ids": [*range(33, 80)]},
    "a bad word": {"bad_words": [text_of([60])]},
    "bad words": {"bad_words": [text_of([60, 61]), text_of([90, 91, 92])]},
    "min_tokens": {"min_tokens": 30, "stop_token_ids": [100]},
    "penalties": {"frequency_penalty": 0.01, "presence_penalty": 0.01, "repetition_penalty": 1.01},
    "log-probabilities": {"logprobs": 2},
}


@pytest.mark.parametrize("options", OPTIONS_OF_ROWS.values(), ids=OPTIONS_OF_ROWS)
def test_a_request_with_any_option_drafts(options, steady, build):
    """Regression: such a request got one token in each step."""
    llm = build(steady, speculative_config=FIXED)
    prompt = [40, *follow(RING, 40, 30)]
    tokens, sizes = steps_of(llm, prompt, **options)
    assert tokens == follow(RING, prompt[-1], 40)
    assert max(sizes) == 5 and len(sizes) <= 12


def test_forced_tokens_are_drafts(steady, build, monkeypatch):
    """A look-up finds none of them: the model would say other letters."""
    monkeypatch.setattr(grammars, "SLOW_S", 60.0)  # a busy machine's grammars are slow, and get no drafts
    llm = build(steady, speculative_config=FIXED)
    text = "~one-way~to-go!~"
    grammar = StructuredOutputsParams(regex=f"[a-c]{text}[a-c]")
    for sampled in ({}, {"temperature": 1.0, "seed": 3}):
        tokens, sizes = steps_of(llm, [40], structured_outputs=grammar, ignore_eos=False, **sampled)
        assert spelled(tokens[1:17]) == text and len(tokens) == 19
        assert sizes[1:4] == [5, 5, 5]


def test_a_grammar_cuts_drafts_and_their_text_goes_on_in_what_is_looked_up(steady, build, monkeypatch):
    monkeypatch.setattr(grammars, "SLOW_S", 60.0)
    llm = build(steady, speculative_config=FIXED)
    prompt = [40, *follow(RING, 40, 30)]
    said = spelled(follow(RING, prompt[-1], 20))
    grammar = StructuredOutputsParams(regex=re.escape(said[:7]) + "[A-M]{4}0" + re.escape(said[12:]))
    tokens, sizes = steps_of(llm, prompt, structured_outputs=grammar, ignore_eos=False)
    want = build(steady).generate(
        [{"prompt_token_ids": prompt}],
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=grammar),
        use_tqdm=False,
    )
    assert tokens == list(want[0].outputs[0].token_ids)
    assert max(sizes) == 5 and len(sizes) <= 8


def test_a_slow_grammar_gets_no_drafts_and_loses_no_token(steady, build, monkeypatch):
    """Regression: the next mask was begun in the background for each of the tokens that a step brought."""
    llm = build(steady, speculative_config=FIXED)
    grammar = StructuredOutputsParams(regex="[a-c]~one-way~to-go![a-c]{20}")
    want, sizes = steps_of(llm, [40], structured_outputs=grammar, ignore_eos=False)
    assert max(sizes) == 5
    for seconds in (-1.0, 0.0):  # every mask is slow; those after the first are
        monkeypatch.setattr(grammars, "SLOW_S", seconds)
        monkeypatch.setattr(grammars, "SLOW_ROW_S", 0.0)
        tokens, _ = steps_of(llm, [40], structured_outputs=grammar, ignore_eos=False)
        assert tokens == want


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_log_probabilities_of_drafts_follow_all_options_and_the_drafts_before(mode, wavering, build):
    rng = random.Random(12)
    prompts = [broken_runs(rng, RING) for _ in range(24)]
    params = [
        SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.0)),
            seed=i,
            top_p=rng.choice((0.8, 1.0)),
            top_k=rng.choice((0, 8)),
            frequency_penalty=rng.choice((0.0, 0.6)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            logit_bias=rng.choice((None, {50: 1.5})),
            bad_words=rng.choice(([], [text_of(follow(RING, 50, 2))])),
            logprobs=rng.choice((None, 0, 4)),
            max_tokens=30,
            ignore_eos=True,
        )
        for i in range(24)
    ]
    want = build(wavering, logprobs_mode=mode).generate(prompts, params, use_tqdm=False)
    llm = build(wavering, logprobs_mode=mode, speculative_config=FIXED)
    got = llm.generate(prompts, params, use_tqdm=False)
    assert seen(want) == seen(got)
    for a, b in zip(want, got):
        close(a, b)


def test_greedy_answers_are_those_of_transformers(root, build):
    folder = tiny.write_model(root, "qwen3")
    rng = random.Random(3)
    prompts = [rng.choices(range(256), k=rng.randint(3, 40)) * rng.choice((1, 2)) for _ in range(8)]
    expected = [tiny.greedy(folder, prompt, 20) for prompt in prompts]
    llm = build(folder, speculative_config=FIXED)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [list(o.outputs[0].token_ids) for o in outputs] == expected


def steps_of(llm, prompt, **options):
    """Returns the tokens of a request, and how many of them each step brought."""
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | options)
    sizes, tokens = [], []
    for output in llm.stream({"prompt_token_ids": prompt}, params, every_step=True):
        tokens = list(output.outputs[0].token_ids)
        sizes.append(len(tokens) - sum(sizes))
    return tokens, [size for size in sizes if size]


def test_repetition_takes_few_steps_and_each_step_as_many_tokens_as_hold(steady, build):
    llm = build(steady, speculative_config=FIXED)
    prompt = [40, *follow(RING, 40, 30)]
    for count in (1, 2, 3, 5, 6, 40):
        tokens, sizes = steps_of(llm, prompt, max_tokens=count)
        assert tokens == follow(RING, prompt[-1], count)
        assert max(sizes) <= 5 and len(sizes) <= 2 + -(-count // 5)


def test_where_all_steps_cost_the_same_repetition_is_found_by_measured_lengths_too(
    steady, build, monkeypatch
):
    ticks = itertools.count()
    monkeypatch.setattr(step_loop, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    llm = build(steady, speculative_config=NGRAM | {"num_speculative_tokens": 8}, max_model_len=1024)
    for _ in range(3):
        tokens, sizes = steps_of(llm, [40], max_tokens=400)
        assert tokens == follow(RING, 40, 400)
    assert len(sizes) <= 240


def test_threads_that_come_and_go(wavering, build):
    rng = random.Random(6)
    prompts = [broken_runs(rng, RING) for _ in range(24)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=5 + i, ignore_eos=True) for i in range(24)]
    want = [list(o.outputs[0].token_ids) for o in build(wavering).generate(prompts, params, use_tqdm=False)]
    llm = build(wavering, speculative_config=NGRAM, max_num_seqs=5, num_gpu_blocks_override=30)

    def run(i):
        stream = llm.stream({"prompt_token_ids": prompts[i]}, params[i])
        tokens = []
        for output in stream:
            tokens = list(output.outputs[0].token_ids)
            assert tokens == want[i][: len(tokens)]
            if i % 5 == 0 and len(tokens) > 2:
                stream.close()
                return
        assert tokens == want[i]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        list(pool.map(run, range(24)))
    assert [list(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)] == want


def test_sleep_and_new_weights(tmp_path, steady, build):
    llm = build(steady, speculative_config=FIXED, enable_sleep_mode=True)
    prompt = [40, *follow(RING, 40, 30)]
    assert steps_of(llm, prompt)[0] == follow(RING, prompt[-1], 40)
    llm.sleep(1)
    llm.wake_up()
    assert steps_of(llm, prompt)[0] == follow(RING, prompt[-1], 40)
    other = ring(7)
    llm.update_weights(str(write_chain(tmp_path, "other", other)))
    llm.reset_prefix_cache()
    assert steps_of(llm, prompt)[0] == follow(other, prompt[-1], 40)


def test_beams_and_embeddings_are_those_without(wavering, build):
    plain, drafting = build(wavering), build(wavering, speculative_config=FIXED)
    rng = random.Random(2)
    prompts = [{"prompt_token_ids": broken_runs(rng, RING)} for _ in range(3)]
    beams, vectors = [], []
    for llm in (plain, drafting):
        found = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=8))
        beams.append([[beam.tokens for beam in one.sequences] for one in found])
        vectors.append([one.outputs.embedding for one in llm.embed(prompts)])
    assert beams[0] == beams[1]
    for a, b in zip(*vectors):
        assert a == pytest.approx(b, abs=1e-5)


# One core hands its requests to another


def core_of(folder, **options):
    defaults = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 22}
    config = EngineConfig(model=str(folder), **defaults | options)
    return EngineCore(config, resolve(config.model, None, None))


@pytest.fixture
def cores(wavering):
    made = []

    def make(**options):
        made.append(core_of(wavering, **options))
        return made[-1]

    yield make
    for core in made:
        core.exit()


def request(name, prompt, seed, **options):
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True)
    return Request(name, prompt, params, **options)


def run(core, *requests, until=None):
    """Returns each request's outputs up to its end, or until it has at least `until` tokens."""
    for one in requests:
        core.add(one)
    outputs = {one.request_id: [] for one in requests}
    open_ = set(outputs)
    while open_:
        for output in core.step():
            if output.request_id not in open_:
                continue  # the end of an aborted request
            outputs[output.request_id].append(output)
            tokens = [t for one in outputs[output.request_id] for t in one.token_ids]
            if output.finish_reason is not None:
                open_.discard(output.request_id)
            elif until is not None and len(tokens) >= until and output.request_id in open_:
                core.abort(output.request_id)
                open_.discard(output.request_id)
    return outputs


def tokens_of(outputs):
    return [token for output in outputs for token in output.token_ids]


def test_a_request_moves_between_engines_in_the_middle_of_its_answer(cores):
    plain, first, second = cores(), cores(speculative_config=FIXED), cores(speculative_config=NGRAM)
    rng = random.Random(9)
    for i in range(12):
        prompt, name = broken_runs(rng, RING), f"r{i}"
        want = tokens_of(run(plain, request(name, prompt, i))[name])
        begun = tokens_of(run(first, request(name, prompt, i), until=1 + 3 * i)[name])
        assert begun == want[: len(begun)]
        if len(begun) < len(want):
            rest = run(second, request(name, prompt, i, output_token_ids=begun))[name]
            assert begun + tokens_of(rest) == want
    for core in (plain, first, second):
        core.step()
        core.check()
        assert core.stats().num_free_blocks == core.stats().num_blocks


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_prefill_and_decode_apart(role, cores):
    rng = random.Random(10)
    drafts = {"speculative_config": FIXED}
    plain = cores()
    lender = cores(
        kv_transfer_config={"kv_role": "kv_producer"}, **drafts if role in ("prefill", "both") else {}
    )
    reader = cores(
        kv_transfer_config={"kv_role": "kv_consumer"}, **drafts if role in ("decode", "both") else {}
    )
    for i in range(4):
        prompt, name = broken_runs(rng, RING) + broken_runs(rng, RING), f"r{i}"
        want = tokens_of(run(plain, request(name, prompt, i))[name])
        offer = request(name, prompt, i, offers_kv=True)
        offer.params = dataclasses.replace(offer.params, max_tokens=1)
        outputs = run(lender, offer)[name]
        [ticket] = [one.kv_ticket for one in outputs if one.kv_ticket is not None]
        first = tokens_of(outputs)
        assert first == want[:1]
        rest = run(reader, request(name, prompt, i, output_token_ids=first, kv_ticket=ticket))[name]
        assert first + tokens_of(rest) == want
        assert rest[-1].finish_reason is FinishReason.LENGTH


def test_what_became_of_drafts_is_reported_with_their_tokens(cores, steady):
    core = core_of(steady, speculative_config=FIXED)
    prompt = [40, *follow(RING, 40, 30)]
    outputs = run(core, request("a", prompt, 1))["a"]
    drafted = [one.drafted for one in outputs if one.drafted is not None]
    assert all(len(one.drafted.places) == len(one.token_ids) for one in outputs if one.drafted is not None)
    accepted, verified = sum(d.num_accepted for d in drafted), sum(d.num_verified for d in drafted)
    assert 28 <= accepted <= verified <= 40
    stopped = request("b", prompt, 1)
    stopped.params = dataclasses.replace(stopped.params, stop_token_ids=follow(RING, prompt[-1], 2)[1:])
    outputs = run(core, stopped)["b"]
    assert len(tokens_of(outputs)) == 2
    assert sum(one.drafted.num_accepted for one in outputs if one.drafted is not None) <= 1
    core.exit()


def test_the_tokens_of_steps_are_counted_and_not_the_places_for_drafts(cores):
    """Regression: a step counted a place for each draft that might have been there."""
    core = cores(speculative_config=FIXED)
    prompt = [200, 201, 202]  # nothing in it is repeated
    outputs = run(core, request("a", prompt, 1))["a"]
    verified = sum(one.drafted.num_verified for one in outputs if one.drafted is not None)
    steps = sum(bool(one.token_ids) for one in outputs)
    assert core.stats().step_tokens == len(prompt) + (steps - 1) + verified
    assert sum(core.stats().steps_by_tokens) == steps


def test_auto_makes_no_drafts_without_a_compiler(steady, build, monkeypatch):
    """Regression: it looked drafts up in Python."""
    monkeypatch.setattr(cpu_build, "load", lambda: None)
    llm = build(steady, speculative_config={"method": "auto"})
    assert llm.core.config.speculative is None
