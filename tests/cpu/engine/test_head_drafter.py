"""Drafts of an EAGLE-3 head on the device: what it drafts after prompts, in chunks too, and after decodes of
several tokens of which some are rejected, compared with the head that the test computes."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from shoal.attention.step_input import HostView, StepInput
from shoal.engine.drafting.head_drafter import HeadDrafter
from shoal.engine.drafting.rank_head import RankHead
from shoal.kernels.cpu import ops
from shoal.kernels.drafting.draft_rows import DraftRows
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.state import FIELDS, Field, seed_words
from tests import tiny
from tests.cpu.models.test_eagle3 import built, layer_config, tensors_of
from tests.eagle3_oracle import HeadOracle, TargetOracle, write_head

ROWS, BLOCK, BLOCKS, K = 4, 4, 20, 3


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return tiny.write_model(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)


@dataclass
class Seq:
    row: int
    ids: list[int]  # all tokens that are known
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


class Device:
    """A target and its head with the batch state of some rows, and steps as an engine makes them."""

    def __init__(self, target, folder, drafts=K):
        self.model, module, states = built(target, folder)
        head = RankHead.__new__(RankHead)
        first = self.model.config.num_layers
        head.module, head.states, head.layers = module, states, range(first, first + 1)
        head.max_position = 64
        kinds = (*self.model.config.layers, *module.kinds)
        mixer = kinds[0].mixer
        shape = (ROWS * BLOCKS, 2, mixer.num_kv_heads, BLOCK, mixer.head_dim)
        self.caches = [LayerCache(torch.zeros(shape)) for _ in kinds]
        self.table = torch.zeros(ROWS + 1, FIELDS, dtype=torch.int32)
        self.history = torch.zeros(ROWS + 1, 64, dtype=torch.int32)
        self.drafts = torch.zeros(ROWS + 1, drafts, dtype=torch.int32)
        self.earlier = torch.zeros(ROWS + 1, dtype=torch.int32)
        self.table[:, Field.ROOM] = BLOCKS * BLOCK
        order = torch.randperm(ROWS * BLOCKS, generator=torch.Generator().manual_seed(3))
        self.blocks = order.view(ROWS, BLOCKS).int()
        self.drafter = HeadDrafter(head, ops, self.table, lambda: self.caches, drafts)

    def admit(self, seq, temperature=0.0, seed=0, top_k=0):
        fields = self.table[seq.row]
        fields[Field.SEED_LOW], fields[Field.SEED_HIGH] = seed_words(seed)
        fields[Field.TOP_K] = top_k
        floats = fields.view(torch.float32)
        floats[Field.TEMPERATURE], floats[Field.TOP_P], floats[Field.MIN_P] = temperature, 1.0, 0.0
        self.history[seq.row, : len(seq.ids)] = torch.tensor(seq.ids)

    def _step(self, tokens, positions, rows_T, rows, starts, lens, decodes, queries, host):
        def ints(values):
            return torch.tensor(values, dtype=torch.int32)

        return StepInput(
            token_ids_T=ints(tokens),
            positions_T=ints(positions),
            rows_T=ints(rows_T),
            rows_S=ints(rows),
            query_starts_S=ints(starts),
            kv_lens_S=ints(lens),
            block_tables=(self.blocks,),
            num_decodes=decodes,
            max_kv_len=max(lens),
            queries=queries,
            host=HostView(tuple(starts), tuple(lens)) if host else None,
        )

    def _end(self, rows):
        """Drafts for the rows that were sampled from; returns how many there are."""
        rows_S = torch.tensor(rows, dtype=torch.int32)
        return self.drafter.propose(rows_S, DraftRows(self.drafts, self.history, self.earlier)).tolist()

    def prefill(self, parts):
        """Chunks (sequence, tokens) of prompts. A sequence whose prompt ends samples."""
        tokens, positions, rows_T, starts, lens = [], [], [], [0], []
        for seq, size in parts:
            at = seq.computed
            tokens += seq.ids[at : at + size]
            positions += range(at, at + size)
            rows_T += [seq.row] * size
            starts.append(starts[-1] + size)
            lens.append(at + size)
            seq.computed += size
        step = self._step(tokens, positions, rows_T, [s.row for s, _ in parts], starts, lens, 0, 1, True)
        ends = [i for i, (seq, _) in enumerate(parts) if seq.computed == len(seq.ids)]
        last = [starts[i + 1] - 1 for i in ends]
        hidden = self.model(step, self.caches, torch.tensor(last, dtype=torch.int64))
        for i, token in zip(ends, self.model.logits(hidden).argmax(-1).tolist()):
            self._sampled(parts[i][0], [token])
        counts = self._end([parts[i][0].row for i in ends])
        for i, count in zip(ends, counts):
            parts[i][0].drafts = self.drafts[parts[i][0].row, :count].tolist()

    def _sampled(self, seq, tokens):
        for token in tokens:
            self.history[seq.row, len(seq.ids)] = token
            seq.ids.append(token)
        seq.computed = len(seq.ids) - 1
        self.table[seq.row, Field.TOKEN] = seq.ids[-1]
        self.table[seq.row, Field.POSITION] = len(seq.ids) - 1

    def decode(self, seqs):
        """A step that verifies what each sequence has drafted; the last place is padding."""
        queries, tokens, positions, rows_T, lens = K + 1, [], [], [], []
        for seq in seqs:
            own = [seq.ids[-1], *seq.drafts]
            pad, at = queries - len(own), seq.computed
            tokens += [0] * pad + own
            positions += [-1] * pad + [*range(at, at + len(own))]
            rows_T += [-1] * pad + [seq.row] * len(own)
            lens.append(at + len(own))
        places, rows = len(seqs) + 1, [seq.row for seq in seqs] + [-1]
        tokens, positions, rows_T = (
            values + [padding] * queries for values, padding in ((tokens, 0), (positions, -1), (rows_T, -1))
        )
        starts = [i * queries for i in range(places + 1)]
        step = self._step(tokens, positions, rows_T, rows, starts, [*lens, 0], places, queries, False)
        sampled = self.model.logits(self.model(step, self.caches)).argmax(-1).view(places, queries)
        for i, seq in enumerate(seqs):
            drawn = sampled[i, queries - 1 - len(seq.drafts) :].tolist()
            right = 0
            while right < len(seq.drafts) and seq.drafts[right] == drawn[right]:
                right += 1
            self._sampled(seq, drawn[: right + 1])
        counts = self._end(rows)
        assert counts[-1] == 0
        for seq, count in zip(seqs, counts):
            seq.drafts = self.drafts[seq.row, :count].tolist()


@pytest.mark.parametrize("flags", [{}, dict(norm_before_residual=True, norm_output=True)], ids=str)
def test_drafts_are_those_of_the_plain_head(flags, target, tmp_path):
    layer, tensors = layer_config(target), tensors_of(target)
    device = Device(target, write_head(tmp_path, layer, tensors, **flags))
    oracle = TargetOracle(target)
    plain = HeadOracle(layer, tensors, oracle.embedding, **flags)
    seqs = [Seq(row, random.Random(row).choices(range(256), k=n)) for row, n in enumerate((9, 14, 5))]
    prompts = [list(seq.ids) for seq in seqs]
    for seq in seqs:
        device.admit(seq)
    device.prefill([(seqs[0], 9), (seqs[1], 6)])  # a whole prompt, and a chunk of another
    device.prefill([(seqs[1], 3)])
    device.prefill([(seqs[1], 5), (seqs[2], 5)])
    num_drafted = num_right = 0
    shuffle = random.Random(7)
    for _ in range(8):
        for seq in seqs:
            assert seq.drafts == plain.drafts(seq.ids, oracle.states(seq.ids), K)
            num_drafted += len(seq.drafts)
            seq.drafts = seq.drafts[: shuffle.randint(0, K)]  # a step may verify fewer
        before = [len(seq.ids) for seq in seqs]
        device.decode(seqs)
        num_right += sum(len(seq.ids) - b - 1 for seq, b in zip(seqs, before))
    for prompt, seq in zip(prompts, seqs):
        assert seq.ids[len(prompt) :] == tiny.greedy(target, prompt, len(seq.ids) - len(prompt))
    assert num_drafted == 8 * 3 * K


def test_a_row_without_room_drafts_less_and_leaves_the_blocks_of_others(target, tmp_path):
    """Three rows end with their blocks: no slot is written where a row has no block."""
    layer, tensors = layer_config(target), tensors_of(target)
    device = Device(target, write_head(tmp_path, layer, tensors))
    oracle = TargetOracle(target)
    plain = HeadOracle(layer, tensors, oracle.embedding)
    seqs = [Seq(row, random.Random(row).choices(range(256), k=n)) for row, n in enumerate((8, 7, 6))]
    for seq in seqs:
        device.admit(seq)
    device.table[:, Field.ROOM] = 8
    device.blocks[:, 2:] = 10_000  # an index that no cache has
    device.prefill([(seq, len(seq.ids)) for seq in seqs])
    assert [len(seq.drafts) for seq in seqs] == [1, 2, 3]
    for seq in seqs:
        assert seq.drafts == plain.drafts(seq.ids, oracle.states(seq.ids), K)[: len(seq.drafts)]


def test_drafts_of_sampled_requests_are_drawn_with_the_noise_of_their_position(target, tmp_path):
    """A head whose logits are the target's drafts what the target draws, at any temperature and with filters."""
    layer, tensors = layer_config(target), tensors_of(target)
    device = Device(target, write_head(tmp_path, layer, tensors), drafts=2)
    oracle = TargetOracle(target)
    plain = HeadOracle(layer, tensors, oracle.embedding)
    found = []
    for seed in range(12):
        seq = Seq(seed % ROWS, random.Random(seed).choices(range(256), k=6))
        device.admit(seq, temperature=0.9, seed=seed, top_k=20 * (seed % 2))
        device.prefill([(seq, 6)])
        fields = device.table[seq.row].clone().view(1, -1)
        following, hidden = seq.ids[1:], plain.fuse(oracle.states(seq.ids[:-1]))
        for i, draft in enumerate(seq.drafts):
            normed, back = plain.run(following, hidden)
            drawn, position = torch.zeros(1, dtype=torch.int32), len(seq.ids) - 1 + i
            ops.sample(
                plain.logits(normed[-1:]),
                torch.zeros(1, dtype=torch.int32),
                torch.tensor([position], dtype=torch.int32),
                fields.clone(),
                drawn,
            )
            assert draft == drawn.item()
            found.append(draft == int(plain.logits(normed[-1]).argmax()))
            following = [*following, draft]
            hidden = torch.cat((hidden, back[-1:]))
    assert len(found) == 24 and not all(found)
