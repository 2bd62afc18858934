"""The engine on a GPU: the oracle's tokens with graphs and without, asynchronous or not, on one card or two;
memory given back."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shoal import SamplingParams
from shoal.engine.runner import decode_groups, start_up
from shoal.engine.runner.steps import Steps
from tests import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

COUNT = 24
PROMPTS = [
    random.Random(i).choices(range(256), k=n) for i, n in enumerate((1, 5, 16, 17, 31, 64, 100, 150, 3, 90))
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def greedy(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": COUNT, "ignore_eos": True} | options)


def ids_of(outputs):
    return [o.outputs[0].token_ids for o in outputs]


@pytest.fixture
def engine_options():
    # A cache of a given size: what other processes take of the card does not matter.
    return {
        "dtype": "float32",
        "max_model_len": 256,
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 512 << 20,
        "max_num_seqs": 16,
    }


@pytest.mark.parametrize("name", tiny.MODELS)
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_every_architecture_generates_the_oracles_tokens(name, eager, root, build):
    folder = tiny.write_model(root, name)
    assert ids_of(build(name, enforce_eager=eager).generate(PROMPTS, greedy())) == [
        tiny.greedy(folder, p, COUNT) for p in PROMPTS
    ]


@pytest.mark.parametrize(
    "options",
    [
        dict(async_scheduling=False),
        dict(max_num_seqs=5),
        dict(max_num_batched_tokens=40),
        dict(enable_prefix_caching=False),
        dict(num_gpu_blocks_override=14, max_model_len=200),
        dict(cudagraph_capture_sizes=[3, 7]),
        dict(block_size=64),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_how_the_engine_runs(options, root, build):
    expected = [tiny.greedy(tiny.write_model(root, "qwen3"), p, COUNT) for p in PROMPTS]
    engine = build("qwen3", **options)
    for _ in range(2):
        assert ids_of(engine.generate(PROMPTS, greedy())) == expected
        engine.core.check()


@pytest.mark.parametrize("name", ["qwen3-windows", "mistral-window"])
@pytest.mark.parametrize(
    "options",
    [
        dict(async_scheduling=False),
        dict(max_num_batched_tokens=40),
        dict(kv_cache_memory_bytes=3 << 16, max_model_len=200),
        dict(enable_prefix_caching=False),
        dict(block_size=64),
        dict(enable_sleep_mode=True),
    ],
    ids=str,
)
def test_tokens_of_layers_with_windows_do_not_depend_on_how_the_engine_runs(name, options, root, build):
    expected = [tiny.greedy(tiny.write_model(root, name), p, COUNT) for p in PROMPTS]
    engine = build(name, **options)
    for _ in range(2):
        assert ids_of(engine.generate(PROMPTS, greedy())) == expected
        engine.core.check()
        if "enable_sleep_mode" in options:
            engine.sleep(level=1)
            engine.wake_up()


def test_a_seeded_draw_does_not_depend_on_graphs_neighbours_or_extras(build):
    mine = greedy(temperature=1.2, seed=11, top_p=0.9, top_k=40)
    alone = ids_of(build("qwen3", enforce_eager=True).generate([PROMPTS[3]], mine))[0]
    engine = build("qwen3")
    for others in (
        greedy(temperature=0.7),
        greedy(temperature=0.7, repetition_penalty=1.2),
        greedy(logprobs=2),
    ):
        assert ids_of(engine.generate(PROMPTS[3:], [mine] + [others] * 6))[0] == alone


def test_a_wide_model_in_bf16_stays_at_the_oracles_log_probabilities(root, build, monkeypatch):
    """Wide enough for the products that Hopper's own kernels make, in batches of 1 to 90 rows, captured and
    eager."""
    monkeypatch.setitem(
        tiny.MODELS,
        "wide",
        ("Qwen3Config", dict(hidden_size=1024, intermediate_size=1536, head_dim=128, num_hidden_layers=2)),
    )
    prompts = [random.Random(i).choices(range(256), k=5 + i % 60) for i in range(90)]
    params = [greedy(max_tokens=1 + i % 12, logprobs=0) for i in range(90)]
    folder = tiny.write_model(root, "wide")
    for eager in (False, True):
        engine = build("wide", dtype="bfloat16", enforce_eager=eager, max_num_seqs=96)
        for batch in (slice(0, 90), slice(11, 12)):
            errors = []
            for prompt, output in zip(prompts[batch], engine.generate(prompts[batch], params[batch])):
                answer = output.outputs[0]
                expected = tiny.logprobs(folder, prompt + answer.token_ids)[len(prompt) - 1 : -1]
                errors += [
                    abs(found[token].logprob - row[token].item())
                    for token, found, row in zip(answer.token_ids, answer.logprobs, expected)
                ]
            # in bf16 on a CPU 0.05 and 1.0: these logits are large
            assert sum(errors) / len(errors) < 0.15 and max(errors) < 3.0


def test_captured_steps_equal_eager_ones_in_bf16(build):
    graphs = ids_of(build("qwen3", dtype="bfloat16").generate(PROMPTS, greedy()))
    eager = ids_of(build("qwen3", dtype="bfloat16", enforce_eager=True).generate(PROMPTS, greedy()))
    # a near tie may flip: splits differ
    assert sum(a == b for a, b in zip(graphs, eager)) >= len(PROMPTS) - 1


@pytest.mark.parametrize(
    "options",
    [{}, dict(enforce_eager=True), dict(max_num_batched_tokens=300), dict(num_gpu_blocks_override=60)],
    ids=str,
)
def test_shared_prefixes_change_no_token(options, build, monkeypatch):
    monkeypatch.setattr(decode_groups, "MIN_SAVED", 256)
    shared = [random.Random(i).choices(range(256), k=150) for i in range(2)]
    prompts = [shared[i % 2] + random.Random(100 + i).choices(range(256), k=i) for i in range(16)]
    params = [greedy(max_tokens=10 + 3 * i) for i in range(16)]
    expected = ids_of(build("qwen3", disable_cascade_attn=True).generate(prompts, params))
    placed, place = [], decode_groups.DecodeGroups.place
    monkeypatch.setattr(
        decode_groups.DecodeGroups, "place", lambda self, *args: placed.append(1) or place(self, *args)
    )
    assert ids_of(build("qwen3", **options).generate(prompts, params)) == expected
    assert placed, "nobody looked for shared prefixes"


def count_replays(monkeypatch):
    """The number of mixed steps that are replayed from now on, as it grows."""
    replayed, replay = [], Steps._run_captured_mixed
    monkeypatch.setattr(Steps, "_run_captured_mixed", lambda *args: replayed.append(1) or replay(*args))
    return replayed


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(max_num_batched_tokens=64),
        dict(num_gpu_blocks_override=14, max_model_len=200),
        dict(max_num_seqs=3),
        dict(async_scheduling=False),
    ],
    ids=str,
)
def test_captured_mixed_steps_change_no_token(options, build, monkeypatch):
    """Chunks, prefix hits, preemption, decodes beside prefills, requests that end early or are aborted."""
    params = [greedy(max_tokens=4 + 5 * (i % 4)) for i in range(len(PROMPTS))]
    outputs = []
    for eager in (True, False):
        engine = build("qwen3", enforce_eager=eager, **options)
        replayed = count_replays(monkeypatch)
        stream = engine.stream(PROMPTS[7], greedy(max_tokens=100, ignore_eos=True))
        next(stream)
        stream.close()
        outputs.append(
            [
                ids_of(engine.generate(prompts, params))
                for prompts in (PROMPTS, PROMPTS[::-1], [p + [7] * 9 for p in PROMPTS])
            ]
        )
        assert bool(replayed) != eager
    assert outputs[0] == outputs[1]


def test_what_is_asked_beside_tokens_is_the_same_from_captured_mixed_steps(build, monkeypatch):
    asked = [
        greedy(logprobs=3),
        greedy(repetition_penalty=1.3, presence_penalty=0.5),
        greedy(logit_bias={5: 4.0}),
        greedy(prompt_logprobs=2),
        greedy(temperature=1.1, seed=4, min_p=0.1),
        greedy(),
    ]
    outputs = []
    for eager in (True, False):
        engine = build("qwen3", enforce_eager=eager, max_num_seqs=4)
        replayed = count_replays(monkeypatch)
        outputs.append([o.outputs[0] for o in engine.generate(PROMPTS[:6], asked)])
        assert bool(replayed) != eager
    assert [o.token_ids for o in outputs[0]] == [o.token_ids for o in outputs[1]]
    for eager, captured in zip(*(o[0].logprobs for o in outputs)):
        assert list(eager) == list(captured)
        assert [x.logprob for x in eager.values()] == pytest.approx(
            [x.logprob for x in captured.values()], abs=1e-4
        )


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_hundreds_of_sequences_at_once_get_the_oracles_tokens(eager, root, build):
    """Batches beyond 256 rows have graphs of their own, and products of their own."""
    folder = tiny.write_model(root, "qwen3")
    prompts = [random.Random(i).choices(range(256), k=8 + i % 33) for i in range(900)]
    params = [greedy(max_tokens=1 + i % 12) for i in range(900)]
    engine = build("qwen3", max_num_seqs=700, enforce_eager=eager)
    for _ in range(2):
        engine.reset_prefix_cache()
        found = ids_of(engine.generate(prompts, params))
        for i in range(0, 900, 37):
            assert found[i] == tiny.greedy(folder, prompts[i], 1 + i % 12)
        assert [len(ids) for ids in found] == [1 + i % 12 for i in range(900)]


def test_engines_start_at_once_and_beside_a_running_one(root, build):
    """Regression: engines that started in threads shared the stream of captures, and any allocation by
    another thread ended a capture."""
    folder = tiny.write_model(root, "qwen3")
    expected, is_over, outputs = [tiny.greedy(folder, p, COUNT) for p in PROMPTS], threading.Event(), []

    def run(engine):
        while not is_over.is_set():
            engine.reset_prefix_cache()
            outputs.append(ids_of(engine.generate(PROMPTS, greedy(), use_tqdm=False)))
            torch.empty(random.randrange(1 << 25), device="cuda")
            torch.cuda.empty_cache()  # the next tensor is allocated by the driver

    with ThreadPoolExecutor() as pool:
        running = pool.submit(run, build("qwen3"))
        try:
            engines = [*pool.map(lambda _: build("qwen3", max_num_seqs=64), range(3))]
        finally:
            is_over.set()
        running.result()
    outputs += [ids_of(engine.generate(PROMPTS, greedy(), use_tqdm=False)) for engine in engines]
    assert len(outputs) > 4
    assert all(found == expected for found in outputs)


def test_graphs_keep_no_memory_for_their_outputs(build):
    """Each decode graph has logits, which together would be a tenth of a large card."""
    runner = build("qwen3", max_num_seqs=512).core.ranks.runner
    sizes = [graph.outputs[0].nbytes for graph in runner.steps.decode_graphs.graphs.values()]
    runner.drop_graphs()
    before = torch.cuda.memory_allocated()
    with torch.inference_mode():
        start_up.prepare_steps(runner)
    assert torch.cuda.memory_allocated() - before < max(sizes) < sum(sizes) / 4


@pytest.mark.usefixtures("alone_on_the_card")
def test_exit_gives_the_memory_back(build):
    torch.cuda.synchronize()
    build("qwen3").exit()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for _ in range(3):
        engine = build("qwen3")
        engine.generate(PROMPTS, greedy())
        engine.exit()
    assert torch.cuda.mem_get_info()[0] > before - (64 << 20)


@pytest.mark.usefixtures("alone_on_the_card")
def test_a_share_larger_than_what_is_free_is_refused_unless_the_cache_has_a_size(build):
    free, total = torch.cuda.mem_get_info()
    hog = torch.empty(int(free - 0.3 * total), dtype=torch.uint8, device="cuda")
    with pytest.raises(ValueError, match="gpu_memory_utilization"):
        build("qwen3", gpu_memory_utilization=0.5, kv_cache_memory_bytes=None)
    for size in ({"kv_cache_memory_bytes": 16 << 20}, {"num_gpu_blocks_override": 64}):
        engine = build("qwen3", gpu_memory_utilization=0.5, **size)
        assert engine.generate([PROMPTS[0]], greedy())[0].outputs[0].token_ids
        engine.exit()
    del hog
    torch.cuda.empty_cache()


@two_gpus
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen3-moe", "llama-one-kv-head", *tiny.UNLIKE_LLAMA])
def test_two_gpus_give_the_tokens_of_one(name, root, build):
    expected = [tiny.greedy(tiny.write_model(root, name), p, COUNT) for p in PROMPTS]
    assert ids_of(build(name, tensor_parallel_size=2).generate(PROMPTS, greedy())) == expected


@two_gpus
def test_seeded_draws_agree_on_two_gpus(build):
    params = [
        greedy(temperature=1.1, seed=i, repetition_penalty=1.1 if i % 2 else 1.0) for i in range(len(PROMPTS))
    ]
    assert ids_of(build("qwen3", tensor_parallel_size=2).generate(PROMPTS, params)) == ids_of(
        build("qwen3").generate(PROMPTS, params)
    )


@two_gpus
def test_no_rank_ever_differs_in_what_was_drawn(build):
    engine = build("qwen3", tensor_parallel_size=2, num_gpu_blocks_override=14, max_model_len=200)
    params = [
        greedy(temperature=1.2, seed=i, top_p=0.9, repetition_penalty=1.1 if i % 2 else 1.0)
        for i in range(len(PROMPTS))
    ]
    engine.generate(PROMPTS, params)
    first, second = engine.collective_rpc("state_digest")
    assert first == second


@two_gpus
def test_an_engine_ends_at_once_with_a_step_in_flight(build):
    engine = build("qwen3", tensor_parallel_size=2)
    stream = engine.stream(PROMPTS[0], greedy(max_tokens=100))
    next(stream)
    stream.close()
    start = time.monotonic()
    engine.exit()
    assert time.monotonic() - start < 20
