"""Steps with drafts as a GPU runs them: few sizes, padded, no drafts beside prompts, the step after next planned
while the host knows bounds of positions alone. What a graph captures is run in its place."""

import random
from types import SimpleNamespace

import pytest
import torch

from shoal import LLM, SamplingParams
from shoal.attention.triton import TritonBackend
from shoal.config import EngineConfig, SpeculativeConfig
from shoal.engine import build_model as build_module
from shoal.engine import draft_learner, resolve
from shoal.engine.drafting import device, step_sizes
from shoal.engine.runner import start_up
from shoal.engine.runner.capture_sizes import decode_ladders
from shoal.engine.runner.graphs import DecodeGraphs
from shoal.engine.runner.packed_step import MixedShape
from shoal.errors import ConfigError
from shoal.kernels.state import Field
from shoal.kinds.recurrent import ShortConvKind
from tests import eagle3_heads, tiny
from tests.chain import broken_runs, follow, ring, write_chain
from tests.cpu.engine.test_speculation import close, random_params, seen
from tests.mtp_heads import write_mtp
from tests.tiny_families import write_family

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
FIXED = NGRAM | {"enable_adaptive_verification": False}
RING = ring(12)


class Graph:
    """A graph that has captured `launch`."""

    def __init__(self, launch, key):
        self.launch, self.key, self.outputs = launch, key, ()

    @torch.inference_mode()
    def replay(self):
        self.outputs = self.launch(self.key)


class Graphs(dict):
    def __init__(self, launch, counts):
        self.launch, self.counts = launch, counts

    def __missing__(self, key):
        self.counts[key] = self.counts.get(key, 0) + 1
        return Graph(self.launch, key)


@pytest.fixture
def build(monkeypatch):
    made = []
    gpu_sizes, gpu_rows = step_sizes.draft_sizes, step_sizes.draft_rows

    def on_gpu(config):
        names = "speculative", "max_num_seqs", "max_num_batched_tokens"
        fields = {name: getattr(config, name) for name in names}
        return SimpleNamespace(device="cuda", **fields)

    def make(folder, captured=True, **options):
        """`captured`: as on a GPU. The engine's `counts` are the replays of each decode graph."""
        sizes = (lambda config: gpu_sizes(on_gpu(config))) if captured else gpu_sizes
        monkeypatch.setattr(draft_learner, "draft_sizes", sizes)
        monkeypatch.setattr(device, "draft_sizes", sizes)
        defaults = dict(device="cpu", dtype="float32", max_model_len=256, kv_cache_memory_bytes=1 << 25)
        llm = LLM(str(folder), **defaults | {"async_scheduling": True} | options)
        made.append(llm)
        if not captured:
            return llm
        runner, llm.counts = llm.core.ranks.runner, {}
        steps, config = runner.steps, on_gpu(runner.config)
        runner.drafting._on_gpu = True
        monkeypatch.setattr(step_sizes, "draft_sizes", gpu_sizes)
        ladders = decode_ladders([1, 2, 4, 8, 16, runner.config.max_num_seqs], None, gpu_rows(config))
        graphs, _, _ = start_up.graphs_of(steps, ladders)
        assert isinstance(graphs, DecodeGraphs)
        graphs.graphs = Graphs(graphs.launch, llm.counts)
        steps.decode_graphs = graphs
        with torch.inference_mode():
            start_up.rehearse_eager(steps, runner.config.max_num_seqs, runner.config.max_num_batched_tokens)
        runner.state.reset()
        return llm

    yield make
    for llm in made:
        llm.core.check()
        llm.exit()


@pytest.fixture(scope="module")
def wavering(tmp_path_factory):
    return write_chain(tmp_path_factory.mktemp("chains"), "wavering", RING, margin=4.0)


@pytest.mark.parametrize("speculation", [FIXED, NGRAM], ids=["fixed", "adaptive"])
@pytest.mark.parametrize("options", [{}, {"num_gpu_blocks_override": 24, "max_num_seqs": 8}], ids=str)
def test_random_requests_are_answered_as_without_drafts(options, speculation, wavering, build):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompts = [broken_runs(rng, RING) for _ in range(60)]
    params = [random_params(rng) for _ in range(60)]
    want = build(wavering, captured=False).generate(prompts, params, use_tqdm=False)
    llm = build(wavering, speculative_config=speculation, **options)
    for _ in range(2):
        got = llm.generate(prompts, params, use_tqdm=False)
        for i, (a, b) in enumerate(zip(seen(want), seen(got))):
            assert a == b, (i, params[i])
        for a, b in zip(want, got):
            close(a, b)
    assert any(key.queries > 1 for key in llm.counts)


def test_sizes_are_few_and_steps_have_room_for_them():
    def sizes(most, adaptive=True, num_seqs=256, num_tokens=16384):
        options = SpeculativeConfig(
            method="ngram", num_speculative_tokens=most, enable_adaptive_verification=adaptive
        )
        config = SimpleNamespace(
            device="cuda", speculative=options, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens
        )
        return step_sizes.draft_sizes(config), step_sizes.draft_rows(config)

    assert sizes(8) == (
        {2: 64, 4: 64, 9: 28},
        {2: [1, 2, 4, 8, 16, 32, 64], 4: [1, 2, 4, 8, 16, 32, 64], 9: [1, 2, 4, 8, 16, 28]},
    )
    assert sizes(1) == ({2: 64}, {2: [1, 2, 4, 8, 16, 32, 64]})
    assert sizes(3, adaptive=False, num_seqs=3) == ({4: 3}, {4: [1, 2, 3]})
    assert sizes(64)[0] == {2: 64, 4: 64, 8: 32, 16: 16, 32: 8, 65: 3}
    assert sizes(64, num_tokens=40)[0] == {2: 20, 4: 10, 8: 5, 16: 2, 32: 1}
    on_cpu = SimpleNamespace(device="cpu", speculative=SpeculativeConfig(method="suffix"))
    assert step_sizes.draft_sizes(on_cpu) is None and step_sizes.draft_rows(on_cpu) == {}


def test_by_default_a_gpu_drafts_unless_its_attention_is_another_librarys():
    attention = SimpleNamespace(head_drafts=None, layers=())
    recurrent = SimpleNamespace(head_drafts=None, layers=[SimpleNamespace(mixer=ShortConvKind(8, 3))])

    def speculation(model=attention, **options):
        return resolve._speculation(EngineConfig(model="m", **options), model, gpu=True)

    assert speculation() is None
    assert speculation(speculative_config={"method": "auto"}).method == "ngram"
    assert speculation(recurrent, speculative_config={"method": "auto"}).method == "ngram"
    other = dict(attention_backend="flashinfer")
    assert speculation(speculative_config={"method": "auto"}, **other) is None
    with pytest.raises(
        ConfigError, match=r"attention_backend must be 'auto' .* 'flashinfer' and method 'ngram'"
    ):
        speculation(speculative_config=NGRAM, **other)


def test_drafts_that_no_step_has_room_for_are_refused():
    """Regression: an engine that was to verify nine tokens in steps of eight made no drafts, and did not say so."""

    def check(**options):
        speculative = SpeculativeConfig(**NGRAM | {"num_speculative_tokens": 8} | options)
        resolve._check_drafts(
            SimpleNamespace(device="cuda", max_num_seqs=4, max_num_batched_tokens=8, speculative=speculative)
        )

    check()  # steps of two and four tokens
    with pytest.raises(ConfigError, match="max_num_batched_tokens, which is 8, got 8"):
        check(enable_adaptive_verification=False)


def test_repetition_takes_few_steps(wavering, build):
    llm = build(wavering, speculative_config=FIXED)
    prompt = [40, *follow(RING, 40, 30)]
    sizes = []
    for out in llm.stream(prompt, SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)):
        sizes.append(len(out.outputs[0].token_ids) - sum(sizes))
    assert list(out.outputs[0].token_ids) == follow(RING, prompt[-1], 41)
    assert [size for size in sizes if size] == [1, *[5] * 8]
    assert llm.counts == {(1, 5, False): 8}


@pytest.mark.parametrize("max_tokens", [38, 39, 40])
def test_the_last_step_of_an_answer_is_captured_too(max_tokens, wavering, build):
    """Regression: a step whose sequences all had room for fewer tokens than a size ran eagerly, and compiled
    kernels."""
    llm = build(wavering, speculative_config=FIXED)
    prompt = [40, *follow(RING, 40, 30)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    [out] = llm.generate([prompt], [params], use_tqdm=False)
    assert list(out.outputs[0].token_ids) == follow(RING, prompt[-1], max_tokens)
    assert llm.counts == {(1, 5, False): 8}


def test_a_batch_too_large_for_drafts_looks_nothing_up_and_drafts_again_when_few_are_left(wavering, build):
    llm = build(wavering, speculative_config=FIXED, max_num_seqs=80)
    prompts = [[33 + i, *follow(RING, 33 + i, 20)] for i in range(75)]
    params = [
        SamplingParams(temperature=0.0, max_tokens=9 if i < 60 else 60, ignore_eos=True) for i in range(75)
    ]
    for prompt, one, out in zip(prompts, params, llm.generate(prompts, params, use_tqdm=False)):
        assert list(out.outputs[0].token_ids) == follow(RING, prompt[-1], one.max_tokens)
    assert llm.counts[80, 1, False] >= 5 and llm.counts[16, 5, False] >= 8
    assert not any(key.rows > 51 for key in llm.counts if key.queries > 1)


@pytest.mark.parametrize("kind, k", [("hidden", 3), ("attention", 1)])
def test_a_head_drafts_inside_of_graphs(kind, k, tmp_path, build):
    rings = eagle3_heads.ring(7)
    chain = eagle3_heads.write_chain(tmp_path / "chain", rings)
    head = eagle3_heads.write_right_head(tmp_path / kind, rings, kind)
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": k}
    llm = build(chain, speculative_config=speculation | {"enable_adaptive_verification": False})
    prompt = [3, *eagle3_heads.follow(rings, 3, 39)]
    for options in ({}, {"logit_bias": {5: 0.001}}):  # with whole rows the head runs again after the graph
        params = SamplingParams(temperature=0.0, max_tokens=1 + 6 * (k + 1), ignore_eos=True, **options)
        for _ in range(2):
            sizes = []
            for out in llm.stream(prompt, params):
                sizes.append(len(out.outputs[0].token_ids) - sum(sizes))
            assert list(out.outputs[0].token_ids) == eagle3_heads.follow(rings, prompt[-1], params.max_tokens)
            assert [size for size in sizes if size] == [1, *[k + 1] * 6]


def test_a_models_own_head_drafts_inside_of_graphs(tmp_path, build):
    """The head reads the final hidden states of all tokens."""
    folder = write_mtp(tmp_path, "glm4-moe")
    speculation = {"method": "mtp", "num_speculative_tokens": 3, "enable_adaptive_verification": False}
    llm = build(folder, speculative_config=speculation)
    prompts = [[*range(40 + i, 60 + 2 * i)] for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    for prompt, out in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
        assert list(out.outputs[0].token_ids) == tiny.greedy(folder, prompt, 20)
    assert any(key.queries == 4 for key in llm.counts)


def test_a_head_is_rehearsed_while_kernels_are_compiled_and_do_not_run(tmp_path, build, monkeypatch):
    """Regression: the position that the sampler should have written decided which slot a head began with, which
    was out of bounds in a step of fewer tokens than the longest sequence has."""
    rings = eagle3_heads.ring(7)
    chain = eagle3_heads.write_chain(tmp_path / "chain", rings)
    head = eagle3_heads.write_right_head(tmp_path / "head", rings, "hidden")
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 1}
    steps = build(chain, speculative_config=speculation, max_num_batched_tokens=16).core.ranks.runner.steps
    monkeypatch.setattr(steps.sampler, "sample", lambda *_: None)
    steps.state.flat.zero_()
    with torch.inference_mode():
        start_up.rehearse_longest(steps, 16)
        steps.state.table[0, Field.POSITION] = 200
        start_up.rehearse(steps, 1, 1)
    steps.state.reset()


@pytest.mark.parametrize("name", ["qwen3.5", "lfm2", "nemotron-h"])
def test_states_take_drafts_back_inside_of_graphs(name, tmp_path, build):
    folder = write_family(tmp_path, name)
    llm = build(folder, speculative_config=FIXED, max_num_seqs=3)
    prompts = [[*random.Random(i).choices(range(256), k=7 + i)] * 3 for i in range(5)]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for _ in range(2):
        for prompt, out in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
            assert list(out.outputs[0].token_ids) == tiny.greedy(folder, prompt, 30)
    assert any(key.queries > 1 for key in llm.counts)


@pytest.mark.parametrize("has_head", [False, True], ids=["look-up", "head"])
def test_prompts_beside_decodes_are_captured_and_positions_are_the_devices(
    has_head, tmp_path, build, monkeypatch
):
    """With the GPU's attention in Triton's interpreter. An answer's position is unknown to the host when a
    prompt joins."""

    def select(config, device, dtype, shapes, holding):
        sizes = config.block_size, config.max_num_seqs, config.max_model_len, device, dtype
        return {shape: TritonBackend(shape, *sizes, queries=config.queries) for shape in shapes}

    monkeypatch.setattr(build_module, "select_backends", select)
    rings, speculation = RING, FIXED
    if has_head:
        rings = eagle3_heads.ring(7)
        chain = eagle3_heads.write_chain(tmp_path / "chain", rings)
        head = eagle3_heads.write_right_head(tmp_path / "head", rings, "attention")
        speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 1}
        speculation |= {"enable_adaptive_verification": False}
    else:
        chain = write_chain(tmp_path, "chain", rings)
    options = dict(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    llm = build(chain, speculative_config=speculation, **options)
    runner, counts = llm.core.ranks.runner, {}
    shapes = [MixedShape(16, 2, 2, 2, False)]
    llm.core.loop.builder.mixed_shapes = shapes
    runner.steps.mixed_inputs = torch.zeros(1024, dtype=torch.int32)
    runner.steps.mixed_graphs = SimpleNamespace(graphs=Graphs(runner.steps.captured_mixed, counts))
    prompts = [[33 + i, *follow(rings, 33 + i, 14 - i)] for i in range(3)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (4, 12, 6)]
    for prompt, one, out in zip(prompts, params, llm.generate(prompts, params, use_tqdm=False)):
        assert list(out.outputs[0].token_ids) == follow(rings, prompt[-1], one.max_tokens)
    assert counts[shapes[0]] >= 2 and any(key.queries > 1 for key in llm.counts)
