"""The sampler's work outside of the captured step, and the buffers of a step."""

import types

import numpy as np
import pytest
import torch

from shoal.engine import step_loop
from shoal.engine.runner import whole_rows
from shoal.engine.runner.batch_state import BatchState
from shoal.engine.runner.logprobs import logprobs
from shoal.engine.runner.sampler_options import RowStart, SamplerOptions
from shoal.engine.runner.small_ops import FEW_ELEMENTS, few_threads
from shoal.engine.runner.step_buffers import RING, StepBuffers, queue_copy
from shoal.engine.runner.whole_rows import StepWholeRows, WholeRowSampler
from shoal.engine.scheduling.part_state import GrammarRow
from shoal.engine.step_loop import StepLoop
from shoal.kernels.cpu import ops as cpu_ops
from shoal.kernels.sampling import logprobs as rows_of_logits
from shoal.kernels.sampling import reference
from shoal.kernels.sampling.row_options import SamplePlaces, pack_options
from shoal.kernels.state import Field, StateLayout
from shoal.layers.parallel import TensorParallel

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def sampler_of(num_rows, vocab_size, ops=cpu_ops, tp=None):
    """A sampler of whole rows, with blocks of 4 tokens."""
    state = BatchState(StateLayout(num_rows, 8), CPU)
    head = types.SimpleNamespace(vocab_size=vocab_size, whole=lambda x: x)
    made = WholeRowSampler(
        ops, tp or TensorParallel.single(), state, head, range(1, num_rows + 1), block_size=4
    )
    made.allocate(20)
    return made


def step_rows(*rows, options=None):
    """A step's whole rows of these samples, rows, positions and options, in one chunk."""
    size = 1 + max(sample for sample, *_ in rows)
    places = SamplePlaces(*torch.full((3, size), -1, dtype=torch.int32))
    for sample, row, position, _ in rows:
        places.rows_S[sample], places.positions_S[sample] = row, position
    wanted = [(sample, int(shaped >= 0)) for sample, _, _, shaped in rows]
    section = np.array(wanted, np.int32).T.ravel().copy()
    return StepWholeRows(torch.from_numpy(section), section, len(rows), places, options)


def packed(**changes):
    neutral = dict(penalties=(1.0, 0.0, 0.0), num_prompt=0, min_end=0, stops=(), allowed=())
    return pack_options(**neutral | dict(bias={}, words=()) | changes)


def test_few_logits_are_shaped_on_one_thread_and_the_others_are_there_again_afterwards(monkeypatch):
    seen = []

    def keep_bits(*args):
        seen.append(torch.get_num_threads())
        cpu_ops.keep_bits(*args)

    ops = types.SimpleNamespace(**vars(cpu_ops))
    ops.keep_bits = keep_bits
    sampler = sampler_of(4, 100, ops)
    masks = np.zeros((1, 4), np.int32)
    masks[0, 3] = 1  # token 96 alone
    options = SamplerOptions(grammars=[GrammarRow(1, object(), [], None)], masks=masks)
    [(samples, shaped)] = sampler.shaped(torch.zeros(2, 100), step_rows((1, 3, 0, -1), options=options))
    assert seen == [1] and torch.get_num_threads() == 3
    assert samples.tolist() == [1] and torch.isfinite(shaped).nonzero().tolist() == [[0, 96]]

    def figures(*args):
        seen.append(torch.get_num_threads())
        return (torch.zeros(1),) * 4

    monkeypatch.setattr("shoal.kernels.sampling.logprobs.logprobs", figures)
    head = types.SimpleNamespace(vocab_size=100, columns=lambda: None)
    logprobs(torch.zeros(2, 100), torch.zeros(2, dtype=torch.int32), 1, head)
    assert seen == [1, 1] and torch.get_num_threads() == 3


def test_many_elements_and_other_devices_keep_the_threads_and_an_error_gives_them_back():
    with few_threads(CPU, FEW_ELEMENTS + 1):
        assert torch.get_num_threads() == 3
    with few_threads(torch.device("cuda"), 1):
        assert torch.get_num_threads() == 3
    with pytest.raises(MemoryError), few_threads(CPU, 1):
        raise MemoryError
    assert torch.get_num_threads() == 3


def test_what_filters_leave_is_what_a_draw_leaves():
    """Many rows at once keep the tokens that `survivors` keeps of each."""
    generator = torch.Generator().manual_seed(3)
    logits_SV = torch.randn(200, 41, generator=generator).mul(3).round(decimals=1)  # some are equal
    top_k_S = torch.randint(0, 50, (200,), generator=generator, dtype=torch.int32)
    top_p_S = torch.rand(200, generator=generator).mul(1.5).clamp(0.01, 1.0)
    min_p_S = torch.rand(200, generator=generator).sub(0.6).clamp(min=0.0)
    best_S = logits_SV.argmax(dim=-1).int()
    found_SV = rows_of_logits.keep_survivors(logits_SV, best_S, top_k_S, top_p_S, min_p_S)
    for s in range(200):
        kept = reference.survivors(logits_SV[s], 1.0, int(top_k_S[s]), float(top_p_S[s]), float(min_p_S[s]))
        assert torch.equal(found_SV[s].isfinite().nonzero().squeeze(1), kept)
        assert torch.equal(found_SV[s, kept], logits_SV[s, kept])
    least_S = logits_SV.argmin(dim=-1).int()
    drawn_SV = rows_of_logits.keep_survivors(logits_SV, least_S, top_k_S, top_p_S, min_p_S)
    assert drawn_SV.gather(1, least_S.long().unsqueeze(1)).isfinite().all(), "a drawn token stays possible"


def test_the_tokens_of_a_new_row_are_sent_without_waiting_for_the_device(monkeypatch):
    """Regression: torch.bincount, which waits for the device, ran in the step that admitted a request with a
    penalty."""

    def wait(*args, **options):
        raise AssertionError("waits for the device")

    sampler = sampler_of(3, 10)
    sampler.state.block_tables[0][1, :2] = torch.tensor([7, 2])
    starts = [
        RowStart(1, *packed(num_prompt=2, stops=[i] * i), tokens, [7, 2][: -(-len(tokens) // 4)])
        for i, tokens in enumerate(([2, 3, 4, 7, 4], [2, 3, 9], [2, 3]))  # each admission sends them again
    ]
    for start in starts:
        with monkeypatch.context() as patched:
            for name in ("item", "tolist", "nonzero", "numpy", "__bool__", "__int__"):
                patched.setattr(torch.Tensor, name, wait)
            patched.setattr(torch, "bincount", wait)
            sampler.start_rows(SamplerOptions(starts=[start]))
        assert sampler.options.tokens(1, len(start.tokens)).tolist() == start.tokens
        assert sampler.options.fields_RO[1].tolist() == start.fields.tolist()
        assert sampler.options.lists[1].tolist() == start.lists.tolist()
    history = sampler.options.history
    assert not history[[block for block in range(20) if block not in (7, 2)]].any()


def test_the_options_of_all_rows_that_a_step_admits_are_sent_in_one_copy(monkeypatch):
    sizes = []

    def upload(values, device):
        sizes.append(len(values))
        return values

    monkeypatch.setattr(whole_rows, "upload", upload)
    sampler = sampler_of(6, 10)
    sampler.state.block_tables[0][:4, :2] = torch.tensor([[3, 5], [3, 6], [1, 0], [9, 2]])
    tokens = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6, 7], [8], [0] * 8]  # the first two share a block
    starts = [
        RowStart(row, *packed(penalties=(1.0, row, 0.5)), ids, blocks)
        for row, (ids, blocks) in enumerate(zip(tokens, ([3, 5], [3, 6], [1], [9, 2])))
    ]
    starts.append(RowStart(5, *packed(bias={3: 1.5}), [], []))
    sampler.start_rows(SamplerOptions(starts=starts))
    assert len(sizes) == 2, "lists are sent on their own"
    for start, ids in zip(starts, tokens):
        assert sampler.options.tokens(start.row, len(ids)).tolist() == ids
        assert sampler.options.fields_RO[start.row].tolist() == start.fields.tolist()
    assert sampler.options.lists[5].tolist() == starts[-1].lists.tolist()


def test_only_the_rows_concerned_are_copied_and_drawn_again():
    """Regression: one row with a penalty copied the logits of all rows, and drew all of them again."""
    taken, drawn = [], []
    ops = types.SimpleNamespace(**vars(cpu_ops))

    def take_rows(logits_SV, samples_K, out_KV):
        taken.append(samples_K.tolist())
        cpu_ops.take_rows(logits_SV, samples_K, out_KV)

    def sample(logits_KV, rows_K, *rest):
        drawn.append(rows_K.tolist())
        cpu_ops.sample(logits_KV, rows_K, *rest)

    ops.take_rows, ops.sample = take_rows, sample
    sampler = sampler_of(8, 50, ops)
    state = sampler.state
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2))
    before, best = logits.clone(), int(logits[4].argmax())
    state.sampled_S.fill_(-7)
    sampler.start_rows(SamplerOptions(starts=[RowStart(5, *packed(bias={best: -100.0}), [], [])]))
    sampler.sample(logits, step_rows((4, 5, 9, 5), (1, 2, 3, -1)))
    assert taken == [[4, 1]] and drawn == [[5, 2]]
    assert torch.equal(logits, before), "raw log-probabilities still read them"
    second = int(logits[4].topk(2).indices[1])
    assert state.sampled_S.tolist() == [-7, int(logits[1].argmax()), -7, -7, second, -7, -7, -7, -7]
    assert state.table[[2, 5], Field.POSITION].tolist() == [4, 10]
    assert state.table[[2, 5], Field.TOKEN].tolist() == [int(logits[1].argmax()), second]
    others = [row for row in range(9) if row not in (2, 5)]
    assert not state.table[others].any()


def test_whole_rows_beyond_one_chunk_are_all_drawn():
    sampler = sampler_of(3, 20)
    logits = torch.randn(9, 20, generator=torch.Generator().manual_seed(3))
    rows = [(sample, 0) for sample in range(7)]
    packed = np.concatenate([np.array(rows[i : i + 3], np.int32).T.ravel() for i in range(0, 7, 3)])
    samples = torch.arange(7, dtype=torch.int32)
    places = SamplePlaces(samples % 3, samples, samples)
    sampler.state.sampled_S = torch.full((10,), -7, dtype=torch.int32)
    sampler.sample(logits, StepWholeRows(torch.from_numpy(packed), packed, 7, places, None))
    assert sampler.state.sampled_S.tolist() == [*logits[:7].argmax(1).tolist(), -7, -7, -7]


def test_a_step_with_more_uploads_than_buffers_is_refused():
    """Regression: nothing held that the uploads of a step fit into the ring, whose first buffer the next one
    would have overwritten."""
    buffers = StepBuffers(4, 8, CPU, queue_copy, queue_copy)
    for _ in range(3):
        buffers.begin_step()
        for _ in range(RING):
            buffers.upload(np.zeros(4, np.int32))
    with pytest.raises(AssertionError, match="uploads"):
        buffers.upload(np.zeros(4, np.int32))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_no_more_steps_are_in_flight_than_there_are_buffers(asynchronous, monkeypatch):
    """Regression: nothing held that the tokens of a step are read before a later step overwrites them."""
    monkeypatch.setattr(step_loop, "RING", 1)
    config = types.SimpleNamespace(block_size=4, async_scheduling=asynchronous)
    with pytest.raises(AssertionError, match="overwritten"):
        StepLoop(config, *[None] * 4)
