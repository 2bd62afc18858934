"""The Triton attention kernels in the interpreter, against attention_reference.

fp32 with ieee products differs from the oracle by the order of sums alone: 2e-5 is some hundred roundings of
values near 1. fp16 rounds the weights before the second product (2**-11 each) and the output once: 2e-3.
"""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from shoal.attention import hopper_prefill as hopper_module
from shoal.attention.splits import decode_splits, is_large, prefill_splits
from shoal.attention.step_input import HostView, StepInput
from shoal.attention.triton import TritonBackend
from shoal.attention.workspaces import share_workspaces
from shoal.engine.runner.packed_step import MixedShape
from shoal.kernels.attention.hopper_attention import heads_an_item, prefill_work
from shoal.kernels.attention.paged_attention import (
    AttentionTiles,
    DecodeWorkspace,
    PrefillWorkspace,
    decode_attention,
    prefill_attention,
    queries_per_tile,
)
from shoal.kernels.attention.reference import paged_attention
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.reference import to_fp8
from tests.head_shape import head_shape

# padded rows divide 0 by 0 and are not stored
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3}


class Case:
    """A step over a cache whose unused slots and unused output hold NaN: what must not be read or left
    shows."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
        num_decodes: int = 0,
        seed: int = 0,
        queries: int = 1,
    ) -> None:
        """`sequences`: (query tokens, kv_len); kv_len 0 is a padded row. Decodes have `queries` tokens, the
        first of which may be padding."""
        generator = torch.Generator().manual_seed(seed)
        rng = random.Random(seed)
        max_blocks = max(-(-kv_len // block_size) for _, kv_len in sequences) + 1
        num_blocks = len(sequences) * max_blocks
        num_rows = len(sequences) + 3
        cache = torch.full((num_blocks, 3, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
        self.kv_layer = cache[:, 1]  # a strided view, as a layer sees it
        # far outside: reading past the end would crash
        table = torch.full((num_rows, 16 + max_blocks), 2**30, dtype=torch.int32)
        self.block_tables_RM = table[:, 16:]
        free_blocks, free_rows = list(range(num_blocks)), list(range(num_rows))
        rng.shuffle(free_blocks)
        rng.shuffle(free_rows)
        rows = []
        num_tokens = sum(query_len for query_len, _ in sequences)
        self.qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, generator=generator).to(
            dtype
        )
        q, k, v = self.qkv.split(
            [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=1
        )
        self.q, self.k, self.v = (x.unflatten(1, (-1, head_dim)) for x in (q, k, v))
        token = 0
        for query_len, kv_len in sequences:
            if kv_len:
                row = free_rows.pop()
                keys, values = torch.randn(2, kv_len, num_kv_heads, head_dim, generator=generator).to(dtype)
                num_new = min(query_len, kv_len)
                new = slice(token + query_len - num_new, token + query_len)
                keys[kv_len - num_new :], values[kv_len - num_new :] = self.k[new], self.v[new]
                for first in range(0, kv_len, block_size):
                    block = free_blocks.pop()
                    self.block_tables_RM[row, first // block_size] = block
                    count = min(block_size, kv_len - first)
                    self.kv_layer[block, 0, :, :count] = keys[first : first + count].transpose(0, 1)
                    self.kv_layer[block, 1, :, :count] = values[first : first + count].transpose(0, 1)
            rows.append(row if kv_len else -1)
            token += query_len
        starts = [0]
        for query_len, _ in sequences:
            starts.append(starts[-1] + query_len)
        kv_lens = [kv_len for _, kv_len in sequences]
        prefills = sequences[num_decodes:]
        self.step = StepInput(
            token_ids_T=torch.zeros(num_tokens, dtype=torch.int32),
            positions_T=torch.zeros(num_tokens, dtype=torch.int32),
            rows_T=torch.zeros(num_tokens, dtype=torch.int32),
            rows_S=torch.tensor(rows, dtype=torch.int32),
            query_starts_S=torch.tensor(starts, dtype=torch.int32),
            kv_lens_S=torch.tensor(kv_lens, dtype=torch.int32),
            block_tables=(self.block_tables_RM,),
            num_decodes=num_decodes,
            max_kv_len=max(kv_lens),
            queries=queries,
            fresh_prefills=bool(prefills) and all(query_len == kv_len for query_len, kv_len in prefills),
            host=HostView(tuple(starts), tuple(kv_lens)),
        )
        self.scale = head_dim**-0.5
        self.scales_2G: torch.Tensor | None = None
        self.softcap: float | None = None
        self.sinks_H: torch.Tensor | None = None
        self.in_chunks = False
        self.tolerance = TOLERANCE[dtype]

    def give_back(self, window: int | None) -> None:
        """The blocks behind each sequence's window are other sequences' now. Reading one would crash."""
        step = self.step
        for row, kv_len, query_len in zip(
            step.rows_S.tolist(), step.kv_lens_S.tolist(), step.query_starts_S.diff().tolist(), strict=True
        ):
            if window is not None and row >= 0:
                first_seen = max(self.cache(window).first_key(kv_len - query_len), 0)
                self.block_tables_RM[row, : first_seen // self.kv_layer.shape[3]] = 2**30

    def in_fp8(self, seed: int = 0) -> Case:
        """The same step over a cache of fp8 numbers, with scales of each head's own. Its unused slots hold NaN
        too, and this step's k and v must be read from the cache, so they are poison."""
        self.scales_2G = (
            torch.rand(2, self.kv_layer.shape[2], generator=torch.Generator().manual_seed(seed)) + 0.1
        )
        shape = (self.kv_layer.shape[0], 3, *self.kv_layer.shape[1:])
        cache = torch.full(shape, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
        fp8 = to_fp8(self.kv_layer, self.scales_2G[:, :, None, None])
        cache.view(torch.uint8)[:, 1] = fp8.view(torch.uint8)
        self.kv_layer = cache[:, 1]
        self.k.fill_(float("nan"))
        self.v.fill_(float("nan"))
        return self

    def cache(self, window: int | None = None) -> LayerCache:
        return LayerCache(self.kv_layer, window=window, scales_2G=self.scales_2G, in_chunks=self.in_chunks)

    def expected(self, window: int | None = None) -> torch.Tensor:
        step, kv_layer = self.step, self.kv_layer
        if self.scales_2G is not None:
            kv_layer = kv_layer.float() * self.scales_2G[:, :, None, None]
        return paged_attention(
            self.q,
            kv_layer,
            step.query_starts_S,
            step.kv_lens_S,
            step.rows_S,
            self.block_tables_RM,
            self.scale,
            window,
            self.softcap,
            self.sinks_H,
            self.in_chunks,
        )

    def poisoned(self) -> torch.Tensor:
        return torch.full(self.q.shape, float("nan"), dtype=self.q.dtype)

    def check(self, out: torch.Tensor, window: int | None = None) -> None:
        torch.testing.assert_close(out, self.expected(window), atol=self.tolerance, rtol=self.tolerance)

    def check_padded(self, backend: TritonBackend, room: tuple[int, int, int]) -> None:
        """The step as a graph has captured it: more places for tokens, decodes and prefills (`room`) than it
        fills."""
        step, num_tokens = self.step, self.step.num_tokens
        shape, unused = MixedShape(*room, samples=0, sharing=step.prefixes is not None), np.zeros(0, np.int32)
        padded = {
            name: torch.from_numpy(values)
            for name, values in shape.pad(
                {
                    "token_ids": step.token_ids_T.numpy(),
                    "positions": step.positions_T.numpy(),
                    "token_rows": step.rows_T.numpy(),
                    "rows": step.rows_S.numpy(),
                    "query_starts": step.query_starts_S.numpy(),
                    "kv_lens": step.kv_lens_S.numpy(),
                    "sample_index": unused,
                    "sample_rows": unused,
                    "sample_positions": unused,
                },
                step.num_decodes,
            ).items()
        }
        captured = StepInput(
            token_ids_T=padded["token_ids"],
            positions_T=padded["positions"],
            rows_T=padded["token_rows"],
            rows_S=padded["rows"],
            query_starts_S=padded["query_starts"],
            kv_lens_S=padded["kv_lens"],
            block_tables=(self.block_tables_RM,),
            num_decodes=shape.decodes,
            max_kv_len=256,
            sparse_decodes=True,
            prefixes=step.prefixes,
        )
        q, k, v = (
            torch.cat((x, x.new_full((shape.tokens - num_tokens, *x.shape[1:]), float("nan"))))
            for x in (self.q, self.k, self.v)
        )
        out = backend.attend(q, k, v, self.cache(), captured)
        self.check(out[:num_tokens])
        assert not backend.workspace.arrived.any() and not backend.prefill_workspace.arrived.any()

    def decode(
        self,
        splits: int,
        window: int | None = None,
        workspace: DecodeWorkspace | None = None,
        num_cut: int | None = None,
    ) -> DecodeWorkspace:
        """Runs the decode kernel on small tiles, so that a few keys make several tiles and splits, and checks
        the output."""
        num_seqs, num_heads, head_dim = self.step.num_seqs, *self.q.shape[1:]
        num_rows = num_seqs * 2 * self.step.queries * num_heads  # the last tile may have fewer queries
        workspace = workspace or DecodeWorkspace.allocate(
            num_rows * splits, num_rows, head_dim, torch.device("cpu")
        )
        out = self.poisoned()
        self.give_back(window)
        decode_attention(
            self.q,
            self.cache(window),
            out,
            self.step.rows_S,
            self.step.kv_lens_S,
            self.block_tables_RM,
            workspace,
            num_seqs,
            splits,
            self.scale,
            AttentionTiles(16, 16, 4, 2),
            min_split=16,
            num_cut=num_cut,
            queries=self.step.queries,
            softcap=self.softcap,
            sinks_H=self.sinks_H,
        )
        self.check(out, window)
        return workspace

    def prefill(
        self,
        window: int | None = None,
        paged: bool = True,
        tiles: AttentionTiles | None = None,
        splits: int = 1,
        workspace: PrefillWorkspace | None = None,
    ) -> None:
        out, step = self.poisoned(), self.step
        self.give_back(window)
        prefill_attention(
            self.q,
            self.k,
            self.v,
            self.cache(window),
            out,
            step.query_starts_S,
            step.kv_lens_S,
            step.rows_S,
            self.block_tables_RM,
            0,
            step.num_tokens,
            self.scale,
            paged=paged,
            tiles=tiles or AttentionTiles(16, 16, 4, 2),
            splits=splits,
            min_split=16,
            workspace=workspace,
            softcap=self.softcap,
            sinks_H=self.sinks_H,
        )
        self.check(out, window)


def select(step: StepInput, tokens: np.ndarray) -> StepInput:
    """The same step, in which the results of these tokens alone are wanted."""
    return replace(step, host=replace(step.host, selected_tokens=tokens))


LENGTHS = [0, 1, 7, 8, 9, 16, 17, 40, 63, 64, 65, 100]


@pytest.mark.parametrize("splits", [1, 3, 7])
def test_decode_at_every_edge_of_blocks_tiles_and_splits(splits: int) -> None:
    Case([(1, n) for n in LENGTHS]).decode(splits)


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (9, 3), (4, 1), (8, 1), (7, 1), (20, 1)])
@pytest.mark.parametrize("splits", [1, 3])
def test_decode_with_any_ratio_of_heads(heads: tuple[int, int], splits: int) -> None:
    Case([(1, 50), (1, 0), (1, 5)], *heads).decode(splits)


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 1), (32, 32), (64, 16), (80, 16), (96, 256), (128, 16), (256, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_decode_with_any_head_size_block_size_and_dtype(
    head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    Case([(1, 37), (1, 18)], 4, 2, head_dim, block_size, dtype).decode(splits=2)


@pytest.mark.parametrize(
    ("lengths", "num_cut", "cut"),
    [
        ([96, 96, 96], 3, set()),
        ([96, 64, 32], 1, set()),
        ([160, 40, 40, 0, 0], 2, {0}),
        ([200, 200, 9, 9, 9, 9, 9], 1, {0}),
        ([200, 150, 100, 9, 9, 9, 9, 9, 9], 9, {0, 1, 2}),
        (LENGTHS, 12, {10, 11}),
        (LENGTHS[::-1], 1, {0}),
    ],
)
def test_of_a_large_batch_only_what_is_long_for_it_is_cut(
    lengths: list[int], num_cut: int, cut: set[int]
) -> None:
    case = Case([(1, n) for n in lengths])
    workspace = DecodeWorkspace.allocate(len(lengths) * 4 * 3, len(lengths) * 4, 16, torch.device("cpu"))
    workspace.lse.fill_(float("nan"))
    case.decode(3, workspace=workspace, num_cut=num_cut)
    results = workspace.lse.view(len(lengths), -1)
    assert {seq for seq, row in enumerate(results) if not row.isnan().all()} == cut
    assert not workspace.arrived.any()


@pytest.mark.parametrize("window", [5, 33, 1000])
def test_a_large_batch_is_cut_by_what_its_windows_hold(window: int) -> None:
    Case([(1, 200), (1, 70), (1, 33), (1, 4), (1, 0)]).decode(4, window, num_cut=3)


QUERIES = [2, 8, 25]


def decodes_of(queries: int, kv_lens: list[int]) -> list[tuple[int, int]]:
    return [(queries, kv_len) for kv_len in kv_lens]


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 2), (8, 1)], ids=str)
def test_decodes_of_several_tokens_are_causal_among_themselves(heads: tuple[int, int], queries: int) -> None:
    """A query sees the tokens up to its own; of (25, 9) the first 16 are padding."""
    for dtype, splits in ((torch.float32, 3), (torch.float16, 1)):
        case = Case(decodes_of(queries, [70, 0, 9]), *heads, dtype=dtype, queries=queries)
        assert not case.decode(splits).arrived.any()
    Case(decodes_of(queries, [70, 26]), *heads, queries=queries).in_fp8().decode(splits=2)


@pytest.mark.parametrize("queries", QUERIES)
@pytest.mark.parametrize("window", [1, 5, 33])
def test_decodes_of_several_tokens_see_their_windows_only(window: int, queries: int) -> None:
    case = Case(decodes_of(queries, [70, 33, 4, 0]), queries=queries)
    case.decode(splits=3, window=window)


@pytest.mark.parametrize(("group", "dtype", "tiles"), [(4, torch.float32, 7), (8, torch.float16, 4)])
def test_decodes_of_many_rows_take_several_tiles(group: int, dtype: torch.dtype, tiles: int) -> None:
    assert -(-25 // queries_per_tile(group, 25, 16, dtype)) == tiles
    case = Case(decodes_of(25, [90, 40]), group, 1, dtype=dtype, queries=25)
    assert not case.decode(splits=4).arrived.any()


@pytest.mark.parametrize("prefills", [[], [(9, 30), (12, 12)]])
def test_the_backend_answers_decodes_of_several_tokens(prefills: list[tuple[int, int]]) -> None:
    for queries in (2, 8):
        decodes = decodes_of(queries, [130, 7, 0, 17])
        case = Case(decodes + prefills, num_decodes=len(decodes), queries=queries)
        engine = TritonBackend(head_shape(4, 2, 16), 8, 8, 256, torch.device("cpu"), torch.float32, queries=8)
        engine.begin(case.step)
        for window in (None, 10):
            case.check(engine.attend(case.q, case.k, case.v, case.cache(window), case.step), window)
        assert not engine.workspace.arrived.any()


@pytest.mark.parametrize("window", [1, 5, 16, 33, 1000])
def test_decode_sees_its_window_only(window: int) -> None:
    Case([(1, 70), (1, 33), (1, 4), (1, 0)]).decode(splits=3, window=window)


def test_decode_leaves_its_counters_at_zero_for_the_next_layer() -> None:
    workspace = Case([(1, 90), (1, 20), (1, 0)]).decode(splits=4)
    assert not workspace.arrived.any()
    Case([(1, 17), (1, 100), (1, 64)], seed=1).decode(splits=4, workspace=workspace)


def test_sequences_may_share_blocks() -> None:
    case = Case([(1, 40), (1, 33)])
    rows = case.step.rows_S.tolist()
    case.block_tables_RM[rows[1], :4] = case.block_tables_RM[rows[0], :4]
    case.kv_layer[case.block_tables_RM[rows[1], 4].item()] = 1.0
    case.decode(splits=2)
    case.prefill()


@pytest.mark.parametrize("paged", [True, False])
def test_prefill_of_whole_sequences(paged: bool) -> None:
    Case([(n, n) for n in (1, 7, 8, 9, 33, 2)]).prefill(paged=paged)


def test_prefill_of_chunks_after_a_cached_prefix() -> None:
    Case([(1, 30), (5, 37), (16, 32), (20, 20), (3, 3), (33, 70)]).prefill()


@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (7, 1), (20, 1)])
@pytest.mark.parametrize("paged", [True, False])
def test_prefill_with_any_ratio_of_heads(heads: tuple[int, int], paged: bool) -> None:
    Case([(19, 19), (4, 4)], *heads).prefill(paged=paged)


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(32, 32), (64, 16), (80, 16), (96, 256), (128, 16), (256, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("paged", [True, False])
def test_prefill_with_any_head_size_block_size_and_dtype(
    head_dim: int, block_size: int, dtype: torch.dtype, paged: bool
) -> None:
    Case([(21, 21), (3, 3)], 4, 2, head_dim, block_size, dtype).prefill(paged=paged)


@pytest.mark.parametrize("window", [1, 3, 16, 30, 1000])
@pytest.mark.parametrize("paged", [True, False])
def test_prefill_sees_its_window_only(window: int, paged: bool) -> None:
    Case([(40, 40), (17, 17), (1, 1)]).prefill(window, paged)


@pytest.mark.parametrize("size", [1, 3, 16, 30, 50, 1000])
@pytest.mark.parametrize("tiles", [AttentionTiles(16, 16, 4, 2), AttentionTiles(64, 16, 4, 2)], ids=str)
def test_tokens_see_their_chunk_of_positions_only(size: int, tiles: AttentionTiles) -> None:
    """Prompts and parts of prompts that end before, at and behind a chunk's first position."""
    for sequences in ([(40, 40), (17, 17), (1, 1)], [(20, 70), (2, 50), (1, 31), (31, 61)]):
        case = Case(sequences)
        case.in_chunks = True
        case.prefill(size, tiles=tiles)
    case = Case([(1, 70), (1, 33), (1, 50), (1, 51), (1, 4), (1, 0)])
    case.in_chunks = True
    case.decode(splits=3, window=size)
    case.decode(splits=3, window=size, num_cut=2)
    case = Case([(5, 33), (5, 17), (5, 3), (5, 70), (5, 0)], queries=5)
    case.in_chunks = True
    case.decode(splits=3, window=size)


@pytest.mark.parametrize("window", [1, 3, 16, 30])
def test_a_chunk_sees_its_window_only(window: int) -> None:
    Case([(20, 70), (2, 50)]).prefill(window)
    Case([(20, 70), (2, 50)]).prefill(window, tiles=AttentionTiles(64, 16, 4, 2))


# (tokens, all tokens): chunks that begin and end at every edge of tiles of keys, some so short that nothing is split.
SHORT_CHUNKS = [(n, n + before) for n in (1, 5, 16, 20) for before in (0, 3, 15, 16, 31, 33, 100)]


SPLITS = pytest.mark.parametrize(("splits", "heads"), [(2, (4, 2)), (3, (9, 3)), (7, (5, 1))])


@SPLITS
def test_the_keys_of_short_chunks_are_split(splits: int, heads: tuple[int, int]) -> None:
    _check_splits(SHORT_CHUNKS[::4], splits, heads)


@pytest.mark.slow
@SPLITS
def test_the_keys_of_all_short_chunks_are_split(splits: int, heads: tuple[int, int]) -> None:
    _check_splits(SHORT_CHUNKS, splits, heads)


def _check_splits(chunks: list[tuple[int, int]], splits: int, heads: tuple[int, int]) -> None:
    case = Case(chunks, *heads)
    workspace = PrefillWorkspace.allocate(2000, heads[0] // heads[1], 16, torch.float32, torch.device("cpu"))
    for _ in range(2):
        case.prefill(splits=splits, workspace=workspace)
        assert not workspace.arrived.any()


def test_short_chunks_are_split_so_that_programs_fill_the_gpu_and_others_are_not() -> None:
    assert prefill_splits(96, 132) == 5  # 64 tokens and 8 sequences of a model with 8 kv heads
    assert prefill_splits(264, 132) == 2 and prefill_splits(265, 132) == 1
    assert all(num_tasks * prefill_splits(num_tasks, 132) <= 528 for num_tasks in range(1, 529))


def test_prefill_of_more_sequences_than_one_search_chunk() -> None:
    Case([(1 + i % 2, 1 + i % 2) for i in range(130)], 1, 1).prefill()


@pytest.mark.parametrize("prefills", [[], [(9, 9), (30, 30)], [(9, 30), (12, 12)]])
def test_the_backend_answers_mixed_steps(prefills: list[tuple[int, int]]) -> None:
    decodes = [(1, 1), (1, 130), (1, 0), (1, 17)]
    case = Case(decodes + prefills, num_decodes=len(decodes))
    backend = TritonBackend(
        head_shape(4, 2, 16),
        8,
        max_num_seqs=8,
        max_model_len=256,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    backend.begin(case.step)
    for window in (None, 10):
        case.check(backend.attend(case.q, case.k, case.v, case.cache(window), case.step), window)


def test_random_steps_equal_the_reference() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(3):
        decodes = [(1, rng.randint(0, 150)) for _ in range(rng.randint(0, 4))]
        chunks = [(n, n + rng.randint(0, 60)) for n in rng.choices(range(1, 40), k=rng.randint(1, 4))]
        case = Case(
            decodes + chunks,
            6,
            2,
            block_size=rng.choice([1, 4, 16]),
            num_decodes=len(decodes),
            seed=rng.randrange(1000),
        )
        backend = TritonBackend(
            head_shape(6, 2, 16),
            16,
            max_num_seqs=8,
            max_model_len=256,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        case.check(backend.attend(case.q, case.k, case.v, case.cache(), case.step))


@pytest.mark.parametrize("num_decodes", [0, 2, 3])
@pytest.mark.parametrize("room", [(40, 4, 5), (64, 3, 9)], ids=str)
def test_the_backend_answers_padded_mixed_steps(num_decodes: int, room: tuple[int, int, int]) -> None:
    case = Case(
        [(1, 40), (1, 9), (1, 17)][:num_decodes] + [(9, 30), (1, 12), (16, 16)], 6, 2, num_decodes=num_decodes
    )
    case.check_padded(
        TritonBackend(head_shape(6, 2, 16), 8, 8, 256, torch.device("cpu"), torch.float32), room
    )


@pytest.mark.parametrize("lengths", [[150, 90, 80] + [10] * 24 + [0] * 3, [10, 0, 7, 200] * 8], ids=len)
@pytest.mark.parametrize("window", [None, 30])
def test_the_backend_answers_large_batches(lengths: list[int], window: int | None) -> None:
    case = Case([(1, n) for n in lengths], num_decodes=len(lengths))
    backend = TritonBackend(head_shape(4, 2, 16), 8, len(lengths), 256, torch.device("cpu"), torch.float32)
    assert is_large(len(lengths), 2, backend.num_sms)
    case.check(backend.attend(case.q, case.k, case.v, case.cache(window), case.step), window)
    assert not backend.workspace.arrived.any()


def test_splits_fill_the_gpu_and_never_outrun_the_keys() -> None:
    for num_seqs in range(1, 513):
        for max_kv_len in (1, 64, 1000, 131072):
            splits = decode_splits(num_seqs, 8, max_kv_len, 132)
            assert 1 <= splits <= -(-max_kv_len // 64)
    assert decode_splits(1, 8, 131072, 132) * 8 > 200
    assert decode_splits(512, 8, 131072, 132) == 1
    assert [decode_splits(num_seqs, 8, 4608, 132) for num_seqs in (64, 66, 92, 93, 256)] == [4, 3, 3, 1, 1]
    assert [is_large(num_seqs, 8, 132) for num_seqs in (64, 92, 93, 256)] == [False, False, True, True]


def test_the_work_of_a_prefill_holds_every_query_once_and_the_longest_first() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for group, head_dim in ((1, 64), (2, 256), (3, 128), (4, 128), (6, 64), (64, 64), (8, 512)):
        lens = [1, 1, *(rng.randint(1, 400) for _ in range(9))]  # two decodes, which cost nothing here
        kv_lens = [n + rng.choice([0, rng.randint(1, 400)]) for n in lens]
        starts = [sum(lens[:i]) for i in range(len(lens) + 1)]
        work, selected = prefill_work(tuple(starts), tuple(kv_lens), 2, group, head_dim)
        assert selected == len(work)
        queries = [
            (token + i, position + i, seq)
            for token, count, position, seq in work.tolist()
            for i in range(count)
        ]
        expected = [
            (starts[seq] + i, kv_lens[seq] - n + i, seq)
            for seq, n in enumerate(lens)
            for i in range(n)
            if seq >= 2
        ]
        assert sorted(queries) == expected
        assert work[:, 1].max() * heads_an_item(group) <= (128 if head_dim < 512 else 64)
        ends = (work[:, 1] + work[:, 2]).tolist()
        assert ends == sorted(ends, reverse=True)

        select = np.array(sorted(rng.sample(range(starts[-1]), 5)))
        chosen, count = prefill_work(tuple(starts), tuple(kv_lens), 2, group, head_dim, select)
        assert sorted(chosen.tolist()) == sorted(work.tolist())
        holds = [bool(((token <= select) & (select < token + n)).any()) for token, n, _, _ in chosen.tolist()]
        assert holds == [True] * count + [False] * (len(work) - count)
        assert prefill_work(tuple(starts), tuple(kv_lens), 2, group, head_dim, select[:0])[1] == 0


def test_large_prefills_go_to_hoppers_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_plain_torch(
        q_THN, kv_layer, out_THN, work, taken, rows_S, block_tables_RM, scale, num_sms, sinks_H, window
    ) -> None:
        tiles.append(len(work))
        for token, count, position, seq in work.tolist():
            tile = slice(token, token + count)
            out_THN[tile] = paged_attention(
                q_THN[tile],
                kv_layer,
                torch.tensor([0, count]),
                torch.tensor([position + count]),
                rows_S[seq : seq + 1],
                block_tables_RM,
                scale,
                window,
            )

    tiles: list[int] = []  # per launch
    monkeypatch.setattr(hopper_module.hopper, "is_supported", lambda *_: True)
    monkeypatch.setattr(hopper_module.hopper, "hopper_prefill_attention", in_plain_torch)
    monkeypatch.setattr(hopper_module, "HOPPER_FROM", 100)
    monkeypatch.setattr(hopper_module, "WINDOW_TILES", 0)
    for prefills in ([(99, 120)], [(100, 100)], [(3, 3), (97, 200), (1, 9)]):
        case = Case([(1, 30), (1, 0), *prefills], num_decodes=2)
        backend = TritonBackend(
            head_shape(4, 2, 16),
            8,
            max_num_seqs=8,
            max_model_len=256,
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        backend.begin(case.step)
        assert (backend.hopper.work is not None) == (prefills[0][0] != 99)
        for window in (None, 10):
            launches = len(tiles)
            case.check(backend.attend(case.q, case.k, case.v, case.cache(window), case.step), window)
            assert (len(tiles) > launches) == (backend.hopper.work is not None)
        wanted = np.array([0, case.step.num_tokens - 1])
        step = select(case.step, wanted)
        backend.begin(step)
        everything, selected = (
            backend.attend(case.q, case.k, case.v, case.cache(), step, selected=s) for s in (False, True)
        )
        assert torch.equal(selected[wanted], everything[wanted])
        assert backend.hopper.work is None or tiles[-2:] == [
            len(backend.hopper.work),
            backend.hopper.selected_work,
        ]
    assert 0 < tiles[-1] < tiles[-2]
    # decodes alone are wanted: no tile, and no launch
    backend.begin(select(case.step, np.array([0, 1])))
    count = len(tiles)
    backend.attend(case.q, case.k, case.v, case.cache(), case.step, selected=True)
    assert len(tiles) == count


def test_narrow_windows_stay_with_the_kernel_of_any_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hopper_module.hopper, "is_supported", lambda *_: True)
    for head_dim, narrow, wide in ((64, 128, 1024), (256, 511, 512)):
        case = Case([(600, 600)], head_dim=head_dim)
        backend = TritonBackend(head_shape(4, 2, head_dim), 8, 8, 1024, torch.device("cpu"), torch.float32)
        backend.begin(case.step)
        taken = [backend.hopper.takes(case.cache(window)) for window in (narrow, wide, None)]
        assert taken == [False, True, True]


def test_backends_of_several_head_shapes_share_a_workspace() -> None:
    """Wide heads need more room for each result, and the others for more results."""
    shapes = head_shape(2, 1, 64), head_shape(8, 4, 16)
    backends = [TritonBackend(shape, 8, 8, 256, torch.device("cpu"), torch.float32) for shape in shapes]
    needs = [backend.workspace.partial.numel() for backend in backends]
    share_workspaces([object(), *backends])
    assert backends[0].workspace is backends[1].workspace
    assert backends[0].prefill_workspace is backends[1].prefill_workspace
    assert backends[0].workspace.partial.numel() == max(needs)
    for shape, backend in zip(shapes, backends, strict=True):
        case = Case(
            [(1, 200), (1, 40), (1, 0), (9, 150)],
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            num_decodes=3,
        )
        backend.begin(case.step)
        case.check(backend.attend(case.q, case.k, case.v, case.cache(), case.step))
        assert not backend.workspace.arrived.any()
