"""Everything mixed at random: models, drafters, options of engines and of requests, and how requests come to an
engine. Each must answer as a plain engine does.

SHOAL_SPECULATION_REQUESTS=10000 SHOAL_SPECULATION_SEED=1 pytest tests/cpu/engine/test_mixed_speculation.py runs many.
"""

import dataclasses
import itertools
import os
import random

import pytest

from shoal import LLM, BeamSearchParams
from shoal.text.request_builder import RequestBuilder
from tests import eagle3_heads, mtp_chains
from tests.chain import broken_runs, write_chain
from tests.cpu.engine.test_speculation import RING, close, random_params, run, seen, tokens_of

NUM_REQUESTS = int(os.environ.get("SHOAL_SPECULATION_REQUESTS", "240"))
SEED = os.environ.get("SHOAL_SPECULATION_SEED")
AT_ONCE = 16  # requests of a round
SALTS = (None, None, "a", "b")
MARGIN = 4.0  # sampled answers go on as expected two times of three
LOOK_UPS = [
    {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
    {"method": "suffix"},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 3},
    {"method": "suffix", "suffix_decoding_max_cached_requests": 100},
]
EXACT = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 25}


class Models:
    """Chains, each with the drafters that it may have, and the plain engine's answers."""

    def __init__(self, root):
        self.folders = {"llama": write_chain(root, "llama", RING, margin=MARGIN)}
        self.folders["eagle3"] = eagle3_heads.write_chain(root / "eagle3", RING, MARGIN)
        head = eagle3_heads.write_right_head(root / "head", RING, "hidden", MARGIN, drafts_all=True)
        self.folders["recurrent"] = mtp_chains.write_chain(root / "recurrent", RING, "hidden", MARGIN)
        self.drafters = {name: LOOK_UPS for name in self.folders}
        self.drafters["eagle3"] = [{"method": "eagle3", "model": str(head)}]
        self.drafters["recurrent"] = [*LOOK_UPS, *[{"method": "mtp"}] * 3]
        self.plain = {name: LLM(str(folder), **EXACT) for name, folder in self.folders.items()}

    def random_engine(self, rng, name, **more):
        speculation = rng.choice(self.drafters[name]) | {"num_speculative_tokens": rng.randint(1, 7)}
        speculation["enable_adaptive_verification"] = rng.random() < 0.3
        options = EXACT | {"speculative_config": speculation, "async_scheduling": rng.random() < 0.5}
        if "kv_transfer_config" not in more and rng.random() < 0.3:
            options["enable_prefix_caching"] = False
        if rng.random() < 0.4:
            options["max_num_batched_tokens"] = rng.choice((48, 64, 200))
        if rng.random() < 0.4:
            options["max_num_seqs"] = rng.choice((1, 5, 16))
        if rng.random() < 0.5:
            options["num_gpu_blocks_override"] = rng.choice((24, 30))
        if "enable_prefix_caching" not in options and rng.random() < 0.3:
            options |= {"kv_host_bytes": 1 << 24, "kv_load_policy": "always"}
        if rng.random() < 0.3:
            options |= {"scheduling_policy": "priority"}
        if "kv_transfer_config" not in more and rng.random() < 0.2:
            options |= {"enable_sleep_mode": True}
        if rng.random() < 0.03:
            options |= {"tensor_parallel_size": 2}
        options |= more
        print(name, {key: value for key, value in options.items() if EXACT.get(key) != value}, flush=True)
        return LLM(str(self.folders[name]), **options)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = Models(tmp_path_factory.mktemp("chains"))
    yield made
    for llm in made.plain.values():
        llm.exit()


def random_prompts(rng, count):
    """Prompts, of which some begin like others, with salts."""
    prompts = []
    for _ in range(count):
        base = rng.choice(prompts)["prompt_token_ids"] if prompts and rng.random() < 0.5 else []
        tokens = (base[: rng.randint(0, 90)] + broken_runs(rng, RING))[:150]
        prompts.append({"prompt_token_ids": tokens, "cache_salt": rng.choice(SALTS)})
    return prompts


def together(rng, models, name):
    """All at once, two times, as the second time finds what the first one has cached."""
    prompts = random_prompts(rng, AT_ONCE)
    params = [random_params(rng) for _ in prompts]
    want = models.plain[name].generate(prompts, params, use_tqdm=False)
    llm = models.random_engine(rng, name)
    more = {}
    if llm.core.config.scheduling_policy == "priority":
        more["priority"] = [rng.randrange(4) for _ in prompts]
    for again in range(2):
        got = llm.generate(prompts, params, use_tqdm=False, **more)
        for i, (a, b) in enumerate(zip(seen(want), seen(got))):
            assert a == b, (again, prompts[i], params[i])
        for a, b in zip(want, got):
            close(a, b)
        if llm.core.config.enable_sleep_mode:
            llm.sleep(1)
            llm.wake_up()
    llm.exit()
    return 2 * AT_ONCE


def one_after_the_other(rng, models, name):
    """Some clients leave in the middle; later requests may look up what they got."""
    prompts = random_prompts(rng, 4)
    llm = models.random_engine(rng, name)
    for _ in range(AT_ONCE):
        prompt, params = rng.choice(prompts), random_params(rng)
        [want] = models.plain[name].generate([prompt], params, use_tqdm=False)
        stream, got, most = llm.stream(prompt, params), None, rng.choice((3, 1000))
        for got in stream:
            if len(got.outputs[0].token_ids) >= most:
                stream.close()
                break
        for one, other in zip(want.outputs, got.outputs):
            tokens = list(other.token_ids)
            assert tokens == list(one.token_ids)[: len(tokens)], (prompt, params)
            assert most < 1000 or (len(tokens), other.text) == (len(one.token_ids), one.text)
    llm.exit()
    return AT_ONCE


def random_requests(rng, llm, count):
    """Requests for a core, which knows no stop strings, with at least two tokens each."""
    builder = RequestBuilder(llm.tokenizer, llm.core.files.config.vocab_size, llm.eos_token_ids)
    ids, found = (f"r{i}" for i in itertools.count()), []
    for prompt in random_prompts(rng, count):
        params = random_params(rng)
        params = dataclasses.replace(
            params,
            n=1,
            stop=None,
            include_stop_str_in_output=False,
            prompt_logprobs=None,
            max_tokens=max(2, params.max_tokens),
            min_tokens=min(2, params.min_tokens),
        )
        found += builder.build(
            [prompt["prompt_token_ids"]], params, ids, arrival=0.0, cache_salt=prompt["cache_salt"]
        )
    return found


def moved(rng, models, name):
    """A request begins in one engine and goes on in another."""
    plain = models.plain[name].core
    first, second = (models.random_engine(rng, name) for _ in range(2))
    requests = random_requests(rng, first, AT_ONCE)
    wanted = run(plain, *requests)
    begun = run(first.core, *requests, until=rng.randint(1, 20))
    rest = []
    for request in requests:
        want, tokens = tokens_of(wanted[request.request_id]), tokens_of(begun[request.request_id])
        assert tokens == want[: len(tokens)], request
        if len(tokens) < len(want):
            rest.append(dataclasses.replace(request, output_token_ids=tokens))
    ended = run(second.core, *rest)
    for request in rest:
        want = wanted[request.request_id]
        assert request.output_token_ids + tokens_of(ended[request.request_id]) == tokens_of(want), request
        assert ended[request.request_id][-1].finish_reason == want[-1].finish_reason
    for llm in (first, second):
        llm.core.step()
        llm.core.check()
        llm.exit()
    return AT_ONCE


def apart(rng, models, name):
    """One engine computes the prompt and the first token, another one the rest."""
    plain = models.plain[name].core
    lender = models.random_engine(rng, name, kv_transfer_config={"kv_role": "kv_producer"})
    reader = models.random_engine(rng, name, kv_transfer_config={"kv_role": "kv_consumer"})
    requests = random_requests(rng, reader, AT_ONCE // 2)
    for request in requests:
        want = run(plain, request)[request.request_id]
        own = dataclasses.replace(request.params, max_tokens=1, min_tokens=min(1, request.params.min_tokens))
        outputs = run(lender.core, dataclasses.replace(request, params=own, offers_kv=True))
        outputs = outputs[request.request_id]
        # None: a short prompt of a recurrent model, which no snapshot holds
        ticket = next((one.kv_ticket for one in outputs if one.kv_ticket is not None), None)
        tokens = tokens_of(outputs)
        assert tokens == tokens_of(want)[:1], request
        if len(tokens_of(want)) > 1:
            rest = dataclasses.replace(request, output_token_ids=tokens, kv_ticket=ticket)
            outputs = run(reader.core, rest)[request.request_id]
            assert tokens + tokens_of(outputs) == tokens_of(want), request
            assert outputs[-1].finish_reason == want[-1].finish_reason
    lender.exit()
    reader.exit()
    return AT_ONCE // 2


def beams(rng, models, name):
    prompts = [{"prompt_token_ids": p["prompt_token_ids"]} for p in random_prompts(rng, 4)]
    params = BeamSearchParams(beam_width=rng.randint(2, 4), max_tokens=rng.randint(2, 9))
    llm = models.random_engine(rng, name)
    found = []
    for engine in (models.plain[name], llm):
        beams = engine.beam_search(prompts, params)
        found.append([[beam.tokens for beam in one.sequences] for one in beams])
    assert found[0] == found[1], (prompts, params)
    llm.exit()
    return len(prompts)


def test_random_requests_are_answered_as_without_drafts(models):
    seed = random.randrange(1 << 30) if SEED is None else int(SEED)
    print(f"seed {seed}", flush=True)
    rng = random.Random(seed)
    count = 0
    ways = [together, together, one_after_the_other, moved, apart, beams]
    for i in itertools.count():
        if count >= NUM_REQUESTS and i >= len(ways):
            break
        way, name = ways[i % len(ways)], rng.choice(list(models.folders))
        print(f"{count} requests; now {way.__name__}", flush=True)
        count += way(rng, models, name)
