"""The packed buffer of a step: a whole row at admission, then only changes; its sections are read as they were written."""

from contextlib import nullcontext

import numpy as np
import pytest

from shoal.api import Request
from shoal.engine.runner.batch import BatchBuilder, float_bits
from shoal.engine.runner.capture_sizes import decode_ladders, decode_sizes, mixed_shapes
from shoal.engine.runner.graphs import DecodeGraphs
from shoal.engine.runner.packed_step import MixedShape, StepHeader, section_spans, token_spans
from shoal.engine.runner.sampler_options import decode_count
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.kernels.sampling.row_options import Option
from shoal.kernels.state import FIELDS, Field, StateLayout
from shoal.sampling_params import SamplingParams

BLOCK = 4


class Device:
    """The flat state as the device holds it after each packed step."""

    def __init__(self, num_seqs=4, max_blocks=8, **options):
        self.layout = StateLayout(num_seqs, max_blocks)
        self.state = np.zeros(self.layout.size, np.int32)
        self.state[:num_seqs] = -1
        self.builder = BatchBuilder(self.layout, BLOCK, **options)

    def apply(self, plan, graph_size=None):
        packed, options = self.builder.build(plan, graph_size)
        header = StepHeader.of(packed)
        sections = {name: packed[a:b] for name, (a, b) in section_spans(header).items()}
        assert len(set(sections["addresses"].tolist())) == len(sections["addresses"]), (
            "an address comes twice"
        )
        self.state[sections["addresses"]] = sections["values"]
        return header, sections, options

    def row(self, row):
        base = self.layout.row_address(row)
        return self.state[base : base + self.layout.row_stride]

    def check(self, plan):
        for entry in plan.scheduled:
            blocks = entry.seq.block_ids
            assert self.row(entry.row)[FIELDS : FIELDS + len(blocks)].tolist() == blocks


def scheduler(**options):
    defaults = {
        "num_blocks": 32,
        "block_size": BLOCK,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 32,
    }
    return Scheduler(**defaults | options)


def request(name, length, **params):
    return Request(name, list(range(length)), SamplingParams(**{"max_tokens": 20, "seed": 5} | params))


def test_a_prefill_sends_the_row_and_the_flattened_tokens():
    device, queue = Device(), scheduler()
    queue.add(request("a", 6, temperature=0.5, top_k=7))
    queue.add(Request("b", [9, 8, 7], SamplingParams(max_tokens=4, seed=1)))
    plan = queue.schedule()
    header, sections, _ = device.apply(plan)
    device.check(plan)
    assert not header.decode_only and header.fresh_prefills
    assert header.num_tokens == 9
    assert sections["token_ids"].tolist() == [0, 1, 2, 3, 4, 5, 9, 8, 7]
    assert sections["positions"].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2]
    assert sections["query_starts"].tolist() == [0, 6, 9] and sections["sample_index"].tolist() == [5, 8]
    assert device.row(0)[Field.TOP_K] == 7 and device.row(0)[Field.TEMPERATURE] == float_bits(0.5)


def test_an_admitted_row_holds_every_field_where_the_kernels_read_it():
    device, queue = Device(), scheduler()
    sampling = dict(seed=(7 << 32) + 9, temperature=0.5, top_k=11, top_p=0.75, min_p=0.25)
    queue.add(request("a", 6, **sampling))
    device.apply(queue.schedule())
    assert {field: int(device.row(0)[field]) for field in Field} == {
        Field.TOKEN: 0,
        Field.POSITION: 0,
        Field.SEED_LOW: 9,
        Field.SEED_HIGH: 7,
        Field.TEMPERATURE: np.float32(0.5).view(np.int32),
        Field.TOP_K: 11,
        Field.TOP_P: np.float32(0.75).view(np.int32),
        Field.MIN_P: np.float32(0.25).view(np.int32),
        Field.MAX_TOKENS: 1,
        Field.NUM_DRAFTS: 0,
        Field.ROOM: 8,
        Field.PENDING: 0,
    }


def test_a_decode_step_sends_only_new_blocks():
    device, queue = Device(), scheduler()
    queue.add(request("a", 6))
    plan = queue.schedule()
    device.apply(plan)
    queue.update(plan, [[50]])
    sizes = []
    for token in range(8):
        plan = queue.schedule()
        header, sections, options = device.apply(plan, graph_size=2)
        assert header.decode_only and not options
        device.check(plan)
        sizes.append(len(sections["addresses"]))
        queue.update(plan, [[token]])
    assert sizes == [1, 0, 1, 0, 0, 0, 1, 0]  # first the active list, then a block at positions 8 and 12
    assert device.state[:3].tolist() == [0, -1, -1]


def test_a_row_that_changes_hands_is_sent_anew():
    device, queue = Device(), scheduler(max_num_seqs=1)
    for name, seed in (("a", 3), ("b", 4)):
        queue.add(request(name, 5, max_tokens=1, seed=seed))
        plan = queue.schedule()
        device.apply(plan)
        device.check(plan)
        assert device.row(plan.scheduled[0].row)[Field.SEED_LOW] == seed
        queue.update(plan, [[1]])


def test_whole_rows_name_the_samples_that_have_options():
    device, queue = Device(), scheduler()
    queue.add(request("plain", 5))
    queue.add(request("bias", 7, logit_bias={3: 2.0}, min_tokens=2, stop_token_ids=[9], logprobs=4))
    queue.add(request("penalty", 3, repetition_penalty=1.5))
    plan = queue.schedule()
    header, sections, options = device.apply(plan)
    rows = [entry.row for entry in plan.scheduled]
    assert header.num_whole_rows == 2
    assert sections["whole_rows"].reshape(2, 2).tolist() == [[1, 2], [1, 1]]
    assert decode_count(header.logprobs) == 4 and decode_count(header.prompt_logprobs) is None
    bias, penalty = options.starts
    assert (bias.row, bias.tokens, bias.block_ids) == (rows[1], [], []), "no option reads its tokens"
    at = bias.fields[Option.BIAS_START]
    assert bias.fields[Option.BIAS_COUNT] == 1
    assert bias.lists[at : at + 2].tolist() == [3, float_bits(2.0)]
    assert bias.fields[Option.MIN_END] == 7 + 2 and bias.lists[bias.fields[Option.STOPS_START]] == 9
    assert (penalty.row, penalty.tokens) == (rows[2], [0, 1, 2])
    assert penalty.block_ids == plan.scheduled[2].seq.block_ids[:1]
    assert penalty.fields[:4].tolist() == [float_bits(1.5), 0, 0, 3]
    assert not len(penalty.lists)


def test_whole_rows_come_in_chunks_of_the_sizes_there_are():
    device, queue = Device(num_seqs=8, whole_row_sizes=[1, 4]), scheduler(max_num_seqs=8)
    for i in range(6):
        queue.add(request(f"{i}", 3, presence_penalty=1.0))
    header, sections, _ = device.apply(queue.schedule())
    first, second = sections["whole_rows"].reshape(2, 2, 4).tolist()
    assert header.num_whole_rows == 6
    assert first[0] == [0, 1, 2, 3] and second[0] == [4, 5, -1, -1]
    assert [column[2:] for column in second] == [[-1, -1]] * 2


@pytest.mark.parametrize("several", [True, False])
def test_a_step_draws_from_whole_rows_where_one_of_its_samples_needs_them(several):
    device, queue = Device(splits_sampling=several), scheduler()
    queue.add(request("a", 5, temperature=1.0, top_k=20, top_p=0.9, max_tokens=3))
    queue.add(request("b", 6, temperature=1.0, top_p=0.9, max_tokens=1))
    found = []
    for _ in range(3):
        plan = queue.schedule()
        header, _, _ = device.apply(plan)
        found.append(header.num_whole_rows > 0)
        queue.update(plan, [[1]] * len(plan.scheduled))
    assert found == [several, False, False]  # b is gone then


@pytest.mark.parametrize("budget", [3, 4, 64])
def test_prompt_logprobs_ask_for_every_token_but_the_last(budget):
    device, queue = Device(), scheduler(max_num_batched_tokens=budget)
    queue.add(request("a", 10, prompt_logprobs=1))
    targets = []
    while len(targets) < 9:
        plan = queue.schedule()
        header, sections, _ = device.apply(plan)
        assert len(sections["prompt_logits"]) == len(sections["prompt_targets"])
        assert decode_count(header.prompt_logprobs) == (1 if len(sections["prompt_targets"]) else None)
        targets += sections["prompt_targets"].tolist()
    assert targets == list(range(1, 10))


def test_a_mixed_step_is_padded_to_the_smallest_captured_one_that_has_room():
    shapes = [MixedShape(8, 2, 2, 3, False), MixedShape(8, 2, 3, 4, False), MixedShape(16, 2, 2, 4, False)]
    device, queue = Device(mixed_shapes=shapes), scheduler()
    queue.add(request("a", 5))
    plan = queue.schedule()
    header, sections, _ = device.apply(plan)
    device.check(plan)
    assert header.shape == shapes[0] and header.num_samples == 1
    assert sections["token_ids"].tolist() == [0, 1, 2, 3, 4, 0, 0, 0] and sections["positions"].tolist() == [
        0,
        1,
        2,
        3,
        4,
        -1,
        -1,
        -1,
    ]
    assert sections["rows"].tolist() == [-1, -1, 0, -1] and sections["kv_lens"].tolist() == [0, 0, 5, 0]
    assert sections["query_starts"].tolist() == [0, 0, 0, 5, 5]
    assert sections["sample_index"].tolist() == [4, 0, 0] and sections["sample_rows"].tolist() == [0, -1, -1]
    queue.update(plan, [[50]])
    for name in "bcd":
        queue.add(request(name, 2))
    plan = queue.schedule()
    header, sections, _ = device.apply(plan)
    assert header.shape == shapes[1]
    assert sections["token_rows"].tolist() == [0, 1, 1, 2, 2, 3, 3, -1] and sections["token_ids"][0] == -1
    assert sections["rows"].tolist() == [0, -1, 1, 2, 3] and sections["kv_lens"].tolist() == [6, 0, 2, 2, 2]
    assert sections["query_starts"].tolist() == [0, 1, 1, 3, 5, 7]
    # a graph reads at fixed places, however many updates come before
    start = section_spans(header)["token_ids"][0]
    assert {name: (a - start, b - start) for name, (a, b) in section_spans(header).items() if a >= start} == {
        name: span for name, span in token_spans(shapes[1]).items() if span[1]
    } | {"prompt_logits": token_spans(shapes[1])["prompt_logits"]}


@pytest.mark.parametrize("ask", [dict(length=17), dict(length=5, prompt_logprobs=1)], ids=str)
def test_what_no_captured_step_has_room_for_runs_eagerly(ask):
    device, queue = Device(mixed_shapes=[MixedShape(16, 2, 2, 3, False)]), scheduler()
    queue.add(request("a", **ask))
    header, sections, _ = device.apply(queue.schedule())
    assert header.shape is None and len(sections["token_ids"]) == ask["length"]


@pytest.mark.parametrize(
    ("most", "max_num_seqs", "share_from"),
    [(4096, 256, 9), (16384, 256, None), (16384, 1024, 9), (1000, 4, 9), (40, 1, None), (8, 256, 9)],
)
def test_the_ladder_of_mixed_steps_has_little_padding_and_room_for_every_decode(
    most, max_num_seqs, share_from
):
    shapes = mixed_shapes(most, max_num_seqs, share_from)
    assert shapes == sorted(shapes) and len(shapes) <= (40 if max_num_seqs <= 256 else 48)
    assert all(s.tokens <= most and s.decodes <= s.tokens and s.samples <= max_num_seqs for s in shapes)
    for tokens in range(257, shapes[-1].tokens + 1 if shapes else 0):
        for decodes in {0, 1, min(tokens - 1, max_num_seqs - 1)}:
            padding = next(s for s in shapes if s.fits(tokens, decodes, 1, False)).tokens / tokens
            assert padding < (1.25 if decodes < 256 else 1.5)


def test_more_sequences_leave_the_shapes_of_256_and_fewer_as_they_are():
    few, many = mixed_shapes(4096, 256, 9), mixed_shapes(4096, 1024, 9)
    for tokens in range(2, 4097, 7):
        for decodes in {0, 1, 20, min(tokens - 1, 255)}:
            size = tokens, decodes, 1, False
            assert next(s for s in few if s.fits(*size)) == next(s for s in many if s.fits(*size))


def test_every_decode_step_has_a_graph_whether_it_shares_prefixes_or_not():
    for share_from in (9, None):
        drafts = {2: [1, 2, 4, 60], 9: [1, 2, 28]}
        ladders = decode_ladders(decode_sizes(None, 1024), share_from, drafts)
        graphs = DecodeGraphs(lambda _: None, ladders, nullcontext)
        sizes = [key.rows * key.queries for key in graphs.keys]
        assert sizes == sorted(sizes, reverse=True)
        graphs.graphs = {key: key for key in graphs.keys}
        for rows in range(1, 1025):
            for sharing in (False, True) if share_from and rows >= share_from else (False,):
                key, graph = graphs.fitting(rows, 1, sharing)
                assert graph == key == (key.rows, 1, sharing) and rows <= key.rows <= graphs.padded(rows, 1)
            for queries, most in ((2, 60), (9, 28)):
                found = graphs.fitting(rows, queries, rows % 2 == 0)  # these are captured without sharing
                if rows > most:
                    assert found is None and graphs.padded(rows, queries) == rows
                else:
                    assert rows <= found[0].rows == graphs.padded(rows, queries)
        assert graphs.fitting(1025, 1, False) is None and graphs.fitting(1, 3, False) is None


def test_decode_steps_have_little_padding_up_to_the_last_size():
    assert decode_sizes(None, 256) == [1, 2, 4, 8, *range(16, 257, 16)]
    assert decode_sizes(None, 40) == [1, 2, 4, 8, 16, 32, 40]
    sizes = decode_sizes(None, 1024)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 1024 and len(sizes) <= 27
    for rows in range(9, 1025):
        padding = next(size for size in sizes if size >= rows) - rows
        assert padding < (16 if rows <= 256 else 64 if rows <= 384 else 128)


def test_more_sequences_leave_the_sizes_of_256_and_fewer_as_they_are():
    few, many = (decode_ladders(decode_sizes(None, n), 9, {}) for n in (256, 1024))
    for kind in few.keys() | many.keys():
        assert few[kind] == [size for size in many[kind] if size <= 256]


def test_min_tokens_draws_again_only_while_a_stop_token_is_banned():
    """Regression: every sample of a request with min_tokens was drawn twice, for the whole answer, even where
    there was no token to ban."""
    for eos, min_tokens, expected in (((), 3, [0] * 6), ((9,), 3, [1, 1, 1, 0, 0, 0]), ((9,), 0, [0] * 6)):
        made = scheduler()
        builder = BatchBuilder(StateLayout(4, 8), 4)
        params = SamplingParams(max_tokens=6, min_tokens=min_tokens, ignore_eos=not eos)
        made.add(Request("a", [1, 2, 3, 4, 5], params, eos_token_ids=eos))
        found = []
        while (plan := made.schedule()) is not None:
            packed, _ = builder.build(plan)
            found.append(StepHeader.of(packed).num_whole_rows)
            made.update(plan, [[7] for entry in plan.scheduled if entry.samples])
        assert found == expected
