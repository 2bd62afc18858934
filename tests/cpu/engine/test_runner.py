"""One rank on its own: packed steps in, tokens and the batch state out. `transformers` says which tokens."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from shoal.api import Request
from shoal.attention.triton import TritonBackend
from shoal.config import EngineConfig
from shoal.engine import build_model as build_module
from shoal.engine.resolve import resolve_config
from shoal.engine.runner import start_up
from shoal.engine.runner.batch import BatchBuilder
from shoal.engine.runner.packed_step import MixedShape, StepHeader
from shoal.engine.runner.runner import ModelRunner
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.kernels.state import Field
from shoal.kv.block_map import BlockMap
from shoal.kv.copy import CopyStream
from shoal.kv.storage import host_memory
from shoal.kv.view import BlockView
from shoal.layers.parallel import TensorParallel
from shoal.models.decoder import rehearsed_layers
from shoal.sampling_params import SamplingParams
from shoal.weights.source import resolve
from shoal.weights.update import weight_tensors
from tests import kv_cases, tiny
from tests.cpu.weights.test_weights_gguf import write_gguf

PROMPTS = [[5, 9, 200, 31, 7], list(range(40, 75)), [250, 3], list(range(100, 121))]
BLOCKS = 40


class Rank:
    """A runner with the scheduler and the builder that feed it, as an engine has them."""

    def __init__(self, folder, num_blocks=BLOCKS, **options):
        defaults = dict(device="cpu", dtype="float32", max_model_len=128, max_num_seqs=8)
        config = EngineConfig(model=str(folder), **defaults | options)
        files = resolve(str(folder)).with_head(config.speculative_config)
        self.config = resolve_config(config, files.config, files.quantized_bytes)
        self.runner = ModelRunner(self.config, files, TensorParallel.single())
        start_up.allocate(self.runner, num_blocks)
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=self.config.block_size,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
            max_model_len=self.config.max_model_len,
            groups=self.runner.cache.plan.groups,
        )
        runner = self.runner
        self.builder = BatchBuilder(
            runner.layout,
            runner.cache.plan.groups[0].block_size,
            runner.share_from,
            runner.mixed_shapes,
            runner.whole_row_sizes,
        )
        self.kinds = []  # kinds of the steps so far

    def add(self, prompt, **params):
        options = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | params
        return self.scheduler.add(Request(f"{id(prompt)}", prompt, SamplingParams(**options)))

    def step(self):
        """The step's plan and result."""
        plan = self.scheduler.schedule()
        packed, options = self.builder.build(plan, self.runner.padded_decodes(plan))
        result = self.runner.step(packed, options or None)
        header = StepHeader.of(packed)
        kind = "mixed" if header.shape is None else "captured mixed"
        self.kinds.append("decode" if header.decode_only else kind)
        self.scheduler.update(plan, result.wait())
        return plan, result

    def run(self):
        while self.scheduler.has_work:
            self.step()


@pytest.fixture
def start(root):
    """Starts a rank. After the test its scheduler is checked, and it is ended."""
    ranks = []

    def make(name="qwen3", path=None, **options):
        ranks.append(Rank(path or tiny.write_model(root, name), **options))
        return ranks[-1]

    yield make
    for rank in ranks:
        rank.scheduler.check()
        rank.runner.exit()


@pytest.fixture
def rank(start):
    return start()


def by_layer(cache):
    """The cache of a model whose layers share all blocks, [blocks, layers, ...]."""
    return cache.blocks.view(cache.plan.specs[0].shape)


def answer(seq):
    return seq.token_ids[seq.num_prompt_tokens :]


@pytest.mark.parametrize("name", ["qwen3", "mistral-window", "qwen3-windows", "qwen3-moe"])
def test_tokens_are_those_of_transformers(name, root, start):
    folder, rank = tiny.write_model(root, name), start(name)
    seqs = [rank.add(prompt) for prompt in PROMPTS]
    rank.run()
    assert [answer(seq) for seq in seqs] == [tiny.greedy(folder, prompt, 8) for prompt in PROMPTS]
    assert rank.kinds == ["mixed"] + ["decode"] * 7


def test_prompts_in_chunks_beside_decodes_change_no_token(folder, start):
    rank = start(max_num_batched_tokens=12)
    seqs = [rank.add(prompt) for prompt in PROMPTS]
    rank.run()
    assert [answer(seq) for seq in seqs] == [tiny.greedy(folder, prompt, 8) for prompt in PROMPTS]
    assert rank.kinds.count("mixed") > 3


def test_a_decode_finds_what_its_prompt_computed_anew_finds(folder, rank):
    seq = rank.add(PROMPTS[1], logprobs=5)
    for _ in range(4):
        _, result = rank.step()
        found = result.logprobs.to_lists()
        oracle = tiny.logprobs(folder, seq.token_ids[:-1])[-1]
        assert found.top_ids[0] == oracle.topk(5).indices.tolist()
        torch.testing.assert_close(torch.tensor(found.top[0]), oracle.topk(5).values, rtol=1e-4, atol=1e-4)
        assert found.chosen[0] == pytest.approx(float(oracle[seq.token_ids[-1]]), abs=1e-4)
        assert found.ranks == [1]


def test_a_prompts_own_log_probabilities_come_with_its_step(folder, rank):
    rank.add(PROMPTS[3], prompt_logprobs=0)
    _, result = rank.step()
    oracle = tiny.logprobs(folder, PROMPTS[3])
    expected = [float(oracle[i, token]) for i, token in enumerate(PROMPTS[3][1:])]
    assert result.prompt_logprobs.to_lists().chosen == pytest.approx(expected, abs=1e-4)


def test_an_embedding_is_the_last_hidden_state(folder, rank):
    rank.scheduler.add(Request("e", PROMPTS[0], SamplingParams(max_tokens=1), embed=True))
    _, result = rank.step()
    torch.testing.assert_close(result.embeddings[0], tiny.embedding(folder, PROMPTS[0]), rtol=1e-4, atol=1e-5)


def test_after_each_step_a_row_holds_the_next_input_and_where_it_stands(rank):
    seqs = [rank.add(prompt) for prompt in PROMPTS[:2]]
    for _ in range(3):
        plan, result = rank.step()
        for entry in plan.scheduled:
            row = rank.runner.state.table[entry.row]
            assert row[Field.TOKEN] == entry.seq.token_ids[-1]
            assert row[Field.POSITION] == len(entry.seq.token_ids) - 1
            blocks = entry.seq.block_ids
            assert rank.runner.state.block_tables[0][entry.row, : len(blocks)].tolist() == blocks
        assert result.wait() == [entry.seq.token_ids[-1:] for entry in plan.scheduled]
    assert [len(answer(seq)) for seq in seqs] == [3, 3]


def test_rows_behind_the_last_decode_change_nothing(folder, rank):
    seq = rank.add(PROMPTS[0])
    plan, _ = rank.step()
    rank.step()
    state, steps = rank.runner.state, rank.runner.steps
    others = [row for row in range(rank.config.max_num_seqs) if row != plan.scheduled[0].row]
    table, blocks = state.table[others].clone(), rank.runner.cache.blocks.clone()
    steps.decode(4, rank.config.max_model_len, sharing=False)  # as a graph for four rows does
    assert torch.equal(state.table[others], table)
    assert state.sampled_S[0] == tiny.greedy(folder, PROMPTS[0], 3)[2]
    changed = (rank.runner.cache.blocks != blocks).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == [seq.block_ids[0]]


@torch.inference_mode()
def test_a_rehearsal_leaves_an_empty_batch_and_an_untouched_cache(folder, rank):
    rank.runner.cache.blocks.fill_(7.0)
    assert start_up.seconds_per_prompt_token(rank.runner) > 0
    start_up.rehearse_eager(rank.runner.steps, rank.config.max_num_seqs, rank.config.max_num_batched_tokens)
    rank.runner.state.reset()
    assert (rank.runner.cache.blocks == 7.0).all()
    assert (rank.runner.state.active_B == -1).all() and not rank.runner.state.table.any()
    rank.runner.cache.blocks.zero_()
    seq = rank.add(PROMPTS[2])
    rank.run()
    assert answer(seq) == tiny.greedy(folder, PROMPTS[2], 8)


def test_a_rehearsal_runs_the_first_layer_of_each_kind_and_the_last(start):
    for kinds, rehearsed in (
        ("d", [0]),
        ("ds", [0, 1]),
        ("dso", [0, 1, 2]),
        ("ddo", [0, 2]),
        ("ddsds", [0, 2, 4]),
    ):
        assert rehearsed_layers(kinds) == rehearsed
    model = start("qwen3-moe").runner.model
    every = list(model.running)
    with model.one_layer_of_each_kind(), model.one_layer_of_each_kind():
        assert len(model.running) <= len(every) and model.running[-1] == every[-1]
    assert model.running == every


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_the_last_layer_gives_selected_tokens_what_it_gives_them_among_all(name, start, monkeypatch):
    rank = start(name, max_num_batched_tokens=24)
    model = rank.runner.model
    forward, counts = model.forward, set()

    def forward_twice(step, kv, select_S=None, after_layer=None):
        hidden_SD = forward(step, kv, select_S, after_layer)
        if select_S is not None:
            counts.add(len(select_S))
            torch.testing.assert_close(hidden_SD, forward(step, kv)[select_S], rtol=1e-5, atol=1e-5)
        return hidden_SD

    monkeypatch.setattr(model, "forward", forward_twice)
    for prompt in sorted(PROMPTS, key=len, reverse=True):  # no prompt ends in the first step
        rank.add(prompt)
    rank.run()
    assert 0 in counts and max(counts) > 1


@pytest.fixture
def captured(start, monkeypatch, request):
    """A rank whose mixed steps are all captured. What a graph captures is run in its place, with the GPU's
    attention in Triton's interpreter: padded shapes, inputs from the static buffer."""

    class Graph:
        def __init__(self, steps, shape):
            self.steps, self.shape = steps, shape
            self.outputs, self.replays = (), 0

        def replay(self):
            self.outputs = self.steps.captured_mixed(self.shape)
            self.replays += 1

    def select(config, device, dtype, shapes, holding):
        sizes = config.block_size, config.max_num_seqs, config.max_model_len
        return {shape: TritonBackend(shape, *sizes, device, dtype, holding=holding) for shape in shapes}

    monkeypatch.setattr(build_module, "select_backends", select)
    rank = start(getattr(request, "param", "qwen3"), max_num_batched_tokens=20, max_num_seqs=4)
    shapes = [MixedShape(20, 3, 4, 4, False), MixedShape(32, 4, 4, 4, False)]
    rank.builder.mixed_shapes = shapes
    steps = rank.runner.steps
    steps.mixed_inputs = torch.zeros(1024, dtype=torch.int32)
    steps.mixed_graphs = SimpleNamespace(graphs={shape: Graph(steps, shape) for shape in shapes})
    return rank


@pytest.mark.parametrize("captured", ["qwen3", "qwen3-windows"], indirect=True)
def test_captured_mixed_steps_change_no_token(captured):
    folder = Path(captured.config.model)
    seqs = [captured.add(prompt, max_tokens=5) for prompt in PROMPTS]
    captured.run()
    assert [answer(seq) for seq in seqs] == [tiny.greedy(folder, prompt, 5) for prompt in PROMPTS]
    assert captured.kinds.count("captured mixed") >= 4 and "mixed" not in captured.kinds


# The ends of layers


def listen(rank):
    """To the next step: which layer has ended, its event, and the cache at that time."""
    heard = []
    rank.runner.layer_events.listen(
        lambda layer, event: heard.append((layer, event, by_layer(rank.runner.cache).clone()))
    )
    return heard


@pytest.mark.parametrize("packed", [False, True])
def test_a_listener_hears_of_each_layer_when_its_keys_and_values_are_there(start, tmp_path, packed):
    options = {}
    if packed:  # all layers are then one call, unless somebody listens
        write_gguf(tmp_path / "model.gguf", "qwen3", "Q8_0", 1)
        options = dict(path=tmp_path / "model.gguf", dtype="auto")
    unheard = start(**options)
    vocab_size = unheard.runner.model_config.vocab_size
    prompts = [[token % vocab_size for token in prompt] for prompt in PROMPTS]
    expected = [unheard.add(prompt) for prompt in prompts]
    unheard.run()
    rank = start(**options)
    assert (rank.runner.model.fused is not None) == packed
    seqs = [rank.add(prompt) for prompt in prompts]
    heard = listen(rank)
    rank.step()
    final = by_layer(rank.runner.cache)
    assert [(layer, event) for layer, event, _ in heard] == [(i, None) for i in range(final.shape[1])]
    for layer, _, blocks in heard:
        assert torch.equal(blocks[:, : layer + 1], final[:, : layer + 1]) and blocks[:, layer].any()
        assert not blocks[:, layer + 1 :].any()
    rank.run()
    assert len(heard) == final.shape[1], "it listens to one step"
    assert [answer(seq) for seq in seqs] == [answer(seq) for seq in expected]


def test_layers_leave_for_another_cache_while_their_step_runs(rank):
    """As from a prefill worker to a decode worker of two ranks."""
    cache = rank.runner.cache
    [ours] = cache.views()
    shards = [replace(ours.spec, num_blocks=9, tp_size=2, tp_rank=i) for i in range(2)]
    theirs = [BlockView.over(shard, host_memory(shard.num_bytes)) for shard in shards]
    seq = rank.add(PROMPTS[1])
    plan = rank.scheduler.schedule()
    packed, _ = rank.builder.build(plan, None)
    copy = CopyStream("cpu").stage(BlockMap(ours, theirs), seq.block_ids, [8, 0, 4])
    rank.runner.layer_events.listen(copy.trigger_layer)
    rank.runner.step(packed)
    for layer in range(ours.spec.num_layers):
        copy.wait_layer(layer)
    arrived = kv_cases.merged(theirs)[:, [8, 0, 4]]
    assert torch.equal(arrived, kv_cases.contents(ours)[:, seq.block_ids])
    assert all(layer.any() for layer in arrived)


def test_a_captured_step_tells_its_layers_behind_its_graph(folder, captured):
    runner = captured.runner
    seqs = [captured.add(prompt, max_tokens=5) for prompt in PROMPTS]
    while captured.scheduler.has_work:
        heard = listen(captured)
        captured.step()
        assert [layer for layer, *_ in heard] == list(range(runner.model_config.num_layers))
    assert [answer(seq) for seq in seqs] == [tiny.greedy(folder, prompt, 5) for prompt in PROMPTS]
    assert any(graph.replays for graph in runner.steps.mixed_graphs.graphs.values())


def test_a_start_runs_the_end_of_the_longest_sequence(start, monkeypatch):
    rank = start(max_num_batched_tokens=20, max_model_len=128)
    steps, seen = rank.runner.steps, []
    [backend] = steps.model.backends
    begin = backend.begin
    monkeypatch.setattr(
        backend, "begin", lambda step: (seen.append((step.num_tokens, step.max_kv_len)), begin(step))
    )
    start_up.rehearse_eager(steps, 8, 20)
    assert (20, 128) in seen


# Memory and weights


def addresses(runner):
    tensors = [tensor for _, tensor in weight_tensors(runner.model)]
    return [tensor.data_ptr() for tensor in [*tensors, runner.cache.blocks]]


def sleep_and_wake(runner, kept=()):
    runner.memory.release(["weights", "kv_cache"], kept)
    runner.memory.take(["weights", "kv_cache"])


def test_weights_and_cache_stay_where_they_are_through_sleeps_and_new_weights(folder, start):
    rank = start(enable_sleep_mode=True)
    before = addresses(rank.runner)
    sleep_and_wake(rank.runner)
    rank.runner.weights.load_checkpoint(str(folder), False)
    sleep_and_wake(rank.runner, kept=["weights"])
    assert addresses(rank.runner) == before
    seq = rank.add(PROMPTS[1])
    rank.run()
    assert answer(seq) == tiny.greedy(folder, PROMPTS[1], 8)


class OnAnotherCard:
    """A tensor that says it lies on a GPU that is not the engine's."""

    is_cuda, device = True, torch.device("cuda", 7)

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device):
        assert device.type == "cpu"
        return self.tensor


def test_weights_that_lie_on_another_card_are_copied_to_the_engines_own_first(start, folder):
    rank = start(load_format="dummy")
    tensors = load_file(folder / "model.safetensors")
    rank.runner.weights.load_tensors({name: OnAnotherCard(tensor) for name, tensor in tensors.items()})
    seq = rank.add(PROMPTS[1])
    rank.run()
    assert answer(seq) == tiny.greedy(folder, PROMPTS[1], 8)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_packed_weights_stay_where_they_are_too(start, tmp_path, kind):
    for seed, name in enumerate(("old", "new")):
        write_gguf(tmp_path / f"{name}.gguf", "qwen3", kind, seed)
    runner = start(path=tmp_path / "old.gguf", dtype="auto", enable_sleep_mode=True).runner
    packed = [name for name, _ in weight_tensors(runner.model) if name.endswith(".packed")]
    assert packed
    before, sums = addresses(runner), runner.weights.checksums()
    sleep_and_wake(runner)
    runner.weights.load_checkpoint(str(tmp_path / "new.gguf"), False)
    after = runner.weights.checksums()
    assert addresses(runner) == before and all(after[name] != sums[name] for name in packed)


@torch.inference_mode()
def test_what_is_released_and_not_kept_is_zeros(start):
    runner = start(enable_sleep_mode=True).runner
    runner.cache.blocks.fill_(1.0)
    sleep_and_wake(runner)
    assert not runner.cache.blocks.any()
    assert not any(tensor.any() for _, tensor in weight_tensors(runner.model))


@torch.inference_mode()
def test_what_lies_in_unused_slots_of_the_cache_reaches_no_answer(folder, rank):
    """The content of a woken cache is undefined on a GPU: NaN at worst."""
    rank.runner.cache.blocks.fill_(float("nan"))
    seqs = [rank.add(prompt) for prompt in PROMPTS]
    rank.run()
    assert [answer(seq) for seq in seqs] == [tiny.greedy(folder, prompt, 8) for prompt in PROMPTS]


# The end


def test_an_end_that_fails_in_one_part_ends_the_others(folder, tmp_path, monkeypatch):
    """A tier's disk may hang, or be gone."""
    kv_options = dict(kv_disk_path=str(tmp_path / "kv"), kv_disk_bytes=1 << 20)
    runner = Rank(folder, **kv_options).runner
    runner.open_kv(num_host_blocks=4)
    runner.kv.open_tiers(bytes(16), False)
    slab, ended = runner.kv.slab, []
    monkeypatch.setattr(runner.weights, "close", lambda: ended.append("weights"))
    monkeypatch.setattr(runner.regions, "close", lambda: ended.append("regions"))

    def fails():
        raise OSError("the disk is gone")

    monkeypatch.setattr(runner.kv.tiers["disk"], "close", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        runner.exit()
    assert ended == ["weights", "regions"] and not len(slab.rows) and not hasattr(runner, "model")


# KV blocks below the device


def test_what_a_closed_tier_lacks_is_forgotten_by_nobody(start, tmp_path):
    """Reads that new weights interrupted have failed, which is reported when the tier has been closed."""
    kv_options = dict(kv_disk_path=str(tmp_path / "kv"), kv_disk_bytes=1 << 20)
    runner = start(**kv_options).runner
    runner.open_kv(num_host_blocks=4)
    runner.kv.open_tiers(bytes(16), False)
    assert list(runner.kv.tiers) == ["disk"]
    runner.kv.close_tiers()
    runner.kv.forget("disk", [bytes(16)])
    assert not runner.kv.tiers


@torch.inference_mode()
def test_blocks_leave_for_the_hosts_slab_and_come_back(rank):
    rank.runner.open_kv(num_host_blocks=4)
    blocks = by_layer(rank.runner.cache)
    blocks.copy_(torch.arange(BLOCKS, dtype=torch.float32).view(-1, 1, 1, 1, 1, 1).expand(blocks.shape))
    kv = rank.runner.kv
    kv.copy_out(1, [7, 3], [0, 2], wait=True)
    blocks.zero_()
    kv.copy_in(2, [2, 0], [5, 6], wait=True, after=1)
    done = kv.poll()["done"]
    assert [(ticket, intact) for ticket, intact, _ in done] == [(1, [True, True]), (2, [True, True])]
    assert (blocks[5] == 3).all() and (blocks[6] == 7).all() and not blocks[7].any()
    assert kv.poll()["done"] == [] and kv.measure_block() > 0
