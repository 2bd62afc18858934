"""The Triton attention kernels on a GPU at real sizes, against attention_reference in fp32.

bf16: weights and output are rounded to 8 bits (2**-9 relative, each); outputs are averages of values near 1,
so 1e-2 holds them.
fp32: ieee products, sums in another order over up to 131072 terms: 5e-5.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shoal.attention import hopper_prefill as hopper_module
from shoal.attention.step_input import HostView, SharedPrefixes, StepInput
from shoal.attention.triton import TritonBackend
from shoal.kernels.attention.paged_attention import DecodeWorkspace, decode_attention
from shoal.kernels.attention.reference import gather_kv, paged_attention
from shoal.kernels.drafting.draft_rows import most_decodes
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.state import MAX_DECODE_GROUPS, DecodeGroupField
from tests.head_shape import head_shape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 1e-2, FP16: 2e-3, FP32: 5e-5}
DEVICE = torch.device("cuda")


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and workspaces start as NaN: what a kernel leaves unwritten, or reads unwritten, shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)


class Case:
    """A step over a cache laid out as the engine's. Slots that no sequence owns hold NaN, unused table
    entries point far outside."""

    def __init__(
        self,
        sequences: list[tuple[int, int]],
        num_heads: int = 32,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        block_size: int = 16,
        dtype: torch.dtype = BF16,
        num_decodes: int = 0,
        seed: int = 0,
        max_kv_len: int | None = None,
        queries: int = 1,
    ) -> None:
        """`sequences`: (query tokens, kv_len); kv_len 0 is a padded row. Decodes have `queries` tokens, the
        first of which may be padding."""
        torch.manual_seed(seed)
        self.heads, self.dtype, self.block_size = (
            head_shape(num_heads, num_kv_heads, head_dim),
            dtype,
            block_size,
        )
        self.scales_2G: torch.Tensor | None = None
        self.in_chunks = False
        self.max_kv_len = max_kv_len or max(kv_len for _, kv_len in sequences)
        counts = [-(-kv_len // block_size) for _, kv_len in sequences]
        cache = torch.full(
            (sum(counts), 2, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype, device=DEVICE
        )
        self.kv_layer = cache[:, 1]
        table = torch.full(
            (len(sequences) + 2, 16 + -(-self.max_kv_len // block_size)), 2**30, dtype=torch.int32
        )
        order = torch.randperm(sum(counts), dtype=torch.int32).split(counts)
        rows = [len(sequences) - s if kv_len else -1 for s, (_, kv_len) in enumerate(sequences)]
        num_tokens = sum(query_len for query_len, _ in sequences)
        qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(dtype)
        q, k, v = qkv.split([n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)], dim=1)
        self.q, self.k, self.v = (x.unflatten(1, (-1, head_dim)) for x in (q, k, v))
        starts = [0]
        for (query_len, kv_len), row, blocks in zip(sequences, rows, order, strict=True):
            if kv_len:
                table[row, 16 : 16 + len(blocks)] = blocks
                where = blocks.long().to(DEVICE)
                self.kv_layer[where] = torch.randn(
                    len(blocks), 2, num_kv_heads, block_size, head_dim, device=DEVICE
                ).to(dtype)
                self.kv_layer[where[-1], :, :, (kv_len - 1) % block_size + 1 :] = float("nan")
                num_new, end = min(query_len, kv_len), starts[-1] + query_len
                new = gather_kv(self.kv_layer, blocks.to(DEVICE), kv_len)[:, :, kv_len - num_new :]
                self.k[end - num_new : end], self.v[end - num_new : end] = new.transpose(1, 2)
            starts.append(starts[-1] + query_len)
        self.table = table.to(DEVICE)
        prefills = sequences[num_decodes:]
        unused = torch.zeros(num_tokens, dtype=torch.int32, device=DEVICE)
        self.step = StepInput(
            token_ids_T=unused,
            positions_T=unused,
            rows_T=unused,
            rows_S=self.ints(rows),
            query_starts_S=self.ints(starts),
            kv_lens_S=self.ints([kv_len for _, kv_len in sequences]),
            block_tables=(self.table[:, 16:],),
            num_decodes=num_decodes,
            max_kv_len=self.max_kv_len,
            queries=queries,
            fresh_prefills=bool(prefills) and all(query_len == kv_len for query_len, kv_len in prefills),
            host=HostView(tuple(starts), tuple(kv_len for _, kv_len in sequences)),
        )
        self.backend = TritonBackend(
            self.heads, block_size, len(sequences), self.max_kv_len, DEVICE, dtype, queries=queries
        )

    @staticmethod
    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    def attend(self, window: int | None = None) -> torch.Tensor:
        self.backend.begin(self.step)
        # A backend that does not read k gives the same results without it.
        cache = self.cache(window)
        k = self.k
        if not self.backend.reads_k(cache):
            k = k.new_empty_strided(k.shape, k.stride()).fill_(float("nan"))
        return self.backend.attend(self.q, k, self.v, cache, self.step)

    def cache(self, window: int | None = None) -> LayerCache:
        return LayerCache(self.kv_layer, window=window, scales_2G=self.scales_2G, in_chunks=self.in_chunks)

    def expected(self, window: int | None = None) -> torch.Tensor:
        step = self.step
        return paged_attention(
            self.q,
            self.kv_layer,
            step.query_starts_S,
            step.kv_lens_S,
            step.rows_S,
            step.block_tables[0],
            self.backend.scale,
            window,
            in_chunks=self.in_chunks,
        )

    def check(self, out: torch.Tensor, window: int | None = None) -> None:
        torch.testing.assert_close(
            out, self.expected(window), atol=TOLERANCE[self.dtype], rtol=TOLERANCE[self.dtype]
        )


def decodes(lengths: list[int], queries: int = 1) -> list[tuple[int, int]]:
    return [(queries, n) for n in lengths]


@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 64), (32, 32, 96), (8, 1, 80), (8, 2, 256)]
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_decode_with_any_heads(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    case = Case(decodes([1, 15, 16, 17, 1000, 0, 2049, 63, 64, 65]), *heads, dtype=dtype, num_decodes=10)
    case.check(case.attend())


@pytest.mark.parametrize("lengths", [[1024], [32768], [4096] * 32, [1024] * 256, [5] * 512])
def test_decode_at_the_sizes_that_are_measured(lengths: list[int]) -> None:
    case = Case(decodes(lengths), num_decodes=len(lengths))
    case.check(case.attend())


@pytest.mark.parametrize(
    "lengths",
    [[9000, 7000, 2000] + [300] * 120, [300] * 120 + [9000, 7000], [20_000] * 20 + [64] * 200 + [0] * 36],
    ids=len,
)
@pytest.mark.parametrize("window", [None, 128, 4096])
def test_a_large_batch_with_some_long_contexts(lengths: list[int], window: int | None) -> None:
    case = Case(decodes(lengths), num_decodes=len(lengths))
    case.check(case.attend(window), window)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_decode_of_a_very_long_context(dtype: torch.dtype) -> None:
    case = Case(decodes([131072, 1, 100_001]), dtype=dtype, num_decodes=3)
    case.check(case.attend())


@pytest.mark.parametrize("block_size", [1, 8, 32, 256])
def test_any_block_size(block_size: int) -> None:
    case = Case(
        [*decodes([1, 255, 256, 257, 700]), (40, 100), (300, 300)], block_size=block_size, num_decodes=5
    )
    case.check(case.attend())


@pytest.mark.parametrize("window", [1, 100, 4096])
def test_windows(window: int) -> None:
    case = Case([*decodes([1, 5000, 99, 0]), (700, 700), (150, 6000)], num_decodes=4)
    case.check(case.attend(window), window)


@pytest.mark.parametrize(
    ("num_heads", "dtype", "size"),
    [(8, FP32, 100), (40, BF16, 1), (40, BF16, 64), (40, BF16, 4096), (40, BF16, 8192)],
)
def test_chunks_of_positions(num_heads: int, dtype: torch.dtype, size: int) -> None:
    """Llama 4's layers with rope: a token sees its own chunk, up to itself."""
    lengths = [1, 5000, 99, 0, 4096, 4097, 8193, 20_000]
    sequences = [*decodes(lengths), (700, 700), (150, 6000), (4200, 4200), (200, 8300)]
    heads = num_heads, 8, 128
    case = Case(sequences, *heads, dtype=dtype, num_decodes=len(lengths))
    case.in_chunks = True
    case.check(case.attend(size), size)
    case = Case([*decodes(lengths, 3), (50, 8200)], *heads, dtype=dtype, num_decodes=len(lengths), queries=3)
    case.in_chunks = True
    case.check(case.attend(size), size)
    case = Case(decodes([*range(1, 4500, 30)]), *heads, dtype=dtype, num_decodes=150)
    case.in_chunks = True
    case.check(case.attend(size), size)


@pytest.mark.parametrize("queries", [1, 2, 8, 25])
@pytest.mark.parametrize("heads", [(8, 8, 128), (16, 8, 128), (32, 8, 128), (64, 8, 64)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_decodes_of_several_tokens(heads: tuple[int, int, int], queries: int, dtype: torch.dtype) -> None:
    """A query sees the tokens up to its own. Of a decode with fewer tokens than queries the first are
    padding."""
    lengths = [3000, 0, 9, 64, 40, 1025]
    sequences = [*decodes(lengths, queries), (queries + 1, 100), (300, 300)]
    case = Case(sequences, *heads, dtype=dtype, num_decodes=len(lengths), queries=queries)
    for window in (None, 1, 5, 700):
        case.check(case.attend(window), window)
    assert not case.backend.workspace.arrived.any()


@pytest.mark.parametrize("queries", [2, 8, 25])
@pytest.mark.parametrize(
    "lengths", [[131072], [32768] * 2, [4096] * 32, [1024] * 256, [9000] + [300] * 120], ids=len
)
def test_decodes_of_several_tokens_at_real_sizes(lengths: list[int], queries: int) -> None:
    lengths = lengths[: most_decodes(queries)]
    case = Case(decodes(lengths, queries), num_decodes=len(lengths), queries=queries)
    first = case.attend()
    case.check(first)
    for _ in range(30):
        assert torch.equal(case.attend(), first)


@pytest.mark.parametrize("heads", [(9, 3, 64), (14, 2, 96), (8, 1, 80), (8, 2, 256), (71, 1, 64)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_decodes_of_several_tokens_with_any_heads(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths = [9, 15, 16, 17, 1000, 0, 2049, 63, 64, 65]
    case = Case(decodes(lengths, 9), *heads, dtype=dtype, num_decodes=len(lengths), queries=9)
    case.check(case.attend())


@pytest.mark.parametrize("queries", [2, 25])
def test_a_captured_step_of_several_tokens_follows_the_lengths_on_the_device(queries: int) -> None:
    lengths = [9000, 8000, 3000, 50, 2000, 25, 27, 128]
    case = Case(decodes(lengths, queries), num_decodes=8, max_kv_len=40_960, queries=queries)
    case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [case.backend.attend(case.q, case.k, case.v, case.cache(), case.step) for _ in range(3)]
    rows = case.step.rows_S.clone()
    for shorter in (lengths, [25] * 8, [8999, 0, 64, 0, 25, 0, 0, 127], [0] * 8):
        kv_lens = case.ints(shorter)
        case.step.kv_lens_S.copy_(kv_lens)
        case.step.rows_S.copy_(torch.where(kv_lens > 0, rows, -1))
        for layer in layers:
            layer.fill_(float("nan"))
        graph.replay()
        for layer in layers:
            case.check(layer)


def test_splits_answer_the_same_bits_in_any_order_of_arrival() -> None:
    case = Case(decodes([4096, 10_000, 333]), num_decodes=3)
    first = case.attend()
    for _ in range(300):
        assert torch.equal(case.attend(), first)
    assert not case.backend.workspace.arrived.any()


def test_every_number_of_splits_gives_the_same_answer() -> None:
    case = Case(decodes([3000, 64, 65]), num_decodes=3)
    for splits in (1, 2, 3, 16, 64, 300):
        workspace = DecodeWorkspace.allocate(3 * 32 * splits, 3 * 8, 128, DEVICE)
        out = torch.full_like(case.q, float("nan"), memory_format=torch.contiguous_format)
        decode_attention(
            case.q,
            case.cache(),
            out,
            case.step.rows_S,
            case.step.kv_lens_S,
            case.step.block_tables[0],
            workspace,
            3,
            splits,
            case.backend.scale,
        )
        case.check(out)


def test_a_captured_step_follows_the_lengths_on_the_device() -> None:
    case = Case(decodes([9000, 8000, 3000, 50, 2000, 1, 17, 128]), num_decodes=8, max_kv_len=40_960)
    case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [case.backend.attend(case.q, case.k, case.v, case.cache(), case.step) for _ in range(3)]
    rows = case.step.rows_S.clone()
    for lengths in (
        [9000, 8000, 3000, 50, 2000, 1, 17, 128],
        [1] * 8,
        [8999, 0, 64, 0, 1, 0, 0, 127],
        [0] * 8,
    ):
        kv_lens = case.ints(lengths)
        case.step.kv_lens_S.copy_(kv_lens)
        case.step.rows_S.copy_(torch.where(kv_lens > 0, rows, -1))
        for layer in layers:
            layer.fill_(float("nan"))
        graph.replay()
        for layer in layers:
            case.check(layer)


@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 96), (8, 2, 256)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_prefills_fresh_and_after_a_prefix(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths = [1, 16, 100, 1000, 31] if dtype == FP32 else [1, 16, 100, 1500, 31, 512]
    for sequences in ([(n, n) for n in lengths], [(n, n + 77 * i) for i, n in enumerate(lengths)]):
        case = Case(sequences, *heads, dtype=dtype)
        assert case.step.fresh_prefills == (sequences[1][0] == sequences[1][1])
        case.check(case.attend())


@pytest.mark.parametrize("kernel", ["Hopper's", "any GPU's"])
@pytest.mark.parametrize(
    ("heads", "block_size", "dtype"),
    [
        ((16, 8, 128), 16, BF16),
        ((32, 8, 128), 16, BF16),
        ((8, 8, 64), 16, BF16),
        ((9, 3, 64), 8, BF16),
        ((8, 1, 128), 32, FP16),
        ((12, 2, 128), 256, BF16),
        ((16, 8, 256), 16, BF16),
        ((16, 2, 256), 32, FP16),
        ((9, 3, 256), 8, BF16),
        ((16, 2, 512), 16, BF16),
        ((8, 1, 512), 8, FP16),
    ],
)
def test_large_prefills(
    kernel: str,
    heads: tuple[int, int, int],
    block_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kernel == "any GPU's":
        monkeypatch.setattr(hopper_module, "HOPPER_FROM", 1 << 30)
    prefills = [
        (4096, 4096),
        (1, 5),
        (129, 129),
        (63, 64),
        (64, 700),
        (700, 777),
        (31, 1031),
        (333, 2000),
        (128, 2176),
        (5, 5),
    ]
    case = Case([*decodes([300, 40]), *prefills], *heads, block_size=block_size, dtype=dtype, num_decodes=2)
    case.check(case.attend())
    assert (case.backend.hopper.work is None) == (
        kernel == "any GPU's" or not case.backend.hopper.is_supported
    )


@pytest.mark.parametrize("heads", [(16, 8, 128), (16, 8, 256)], ids=str)
@pytest.mark.parametrize("window", [None, 200])
def test_large_prefills_answer_the_same_bits_every_time(
    heads: tuple[int, int, int], window: int | None
) -> None:
    case = Case([(n, n + 37 * n % 1000) for n in range(1, 900, 13)], *heads)
    first = case.attend(window)
    for _ in range(50):
        assert torch.equal(case.attend(window), first)
    assert not case.backend.hopper.taken.any()


@pytest.mark.parametrize("heads", [(32, 8, 128), (16, 8, 128), (7, 1, 80), (8, 2, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_short_chunks_after_long_prefixes(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Several programs share the keys of a tile, and the last one to end combines their results."""
    for sequences in ([(48, 9040)], [(1, 1)] * 3 + [(33, 5000), (2, 3000), (20, 20), (9, 600)]):
        case = Case(sequences, *heads, dtype=dtype, num_decodes=3 if len(sequences) > 1 else 0)
        first = case.attend()
        case.check(first)
        assert all(torch.equal(case.attend(), first) for _ in range(20))
        assert not case.backend.prefill_workspace.arrived.any()


def test_a_chunk_of_a_very_long_prompt() -> None:
    for sequences in ([(256, 131072), (33, 100_000)], [(600, 131072)]):
        case = Case(sequences)
        case.check(case.attend())


def test_random_mixed_steps() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(8):
        decoding = decodes([rng.choice([0, rng.randint(1, 3000)]) for _ in range(rng.randint(0, 40))])
        chunks = [
            (n, n + rng.choice([0, rng.randint(1, 2000)]))
            for n in (rng.randint(1, 700) for _ in range(rng.randint(1, 12)))
        ]
        case = Case(
            [*decoding, *chunks],
            *rng.choice([(32, 8, 128), (9, 3, 64)]),
            num_decodes=len(decoding),
            seed=rng.randrange(1000),
        )
        case.check(case.attend())


Groups = list[tuple[list[int], int]]  # (sequences, tokens they share)


def set_groups(case: Case, groups: Groups) -> None:
    """Lets the sequences of each group begin with the first one's blocks. Once set, groups change in place,
    as under a captured graph."""
    rows = case.step.rows_S.tolist()
    lens = torch.zeros(len(rows), dtype=torch.int32)
    table = torch.zeros(MAX_DECODE_GROUPS, len(DecodeGroupField), dtype=torch.int32)
    members: list[int] = []
    for group, (seqs, length) in enumerate(groups):
        first, num_blocks = rows[seqs[0]], length // case.block_size
        where = torch.tensor([rows[seq] for seq in seqs], device=DEVICE)
        case.table[where, 16 : 16 + num_blocks] = case.table[first, 16 : 16 + num_blocks].clone()
        lens[seqs] = num_blocks * case.block_size
        table[group] = torch.tensor([len(members), len(seqs), num_blocks * case.block_size, first])
        members += seqs
    padded = torch.full((len(rows),), -1, dtype=torch.int32)
    padded[: len(members)] = torch.tensor(members, dtype=torch.int32)
    if case.step.prefixes is None:
        case.step = replace(
            case.step, prefixes=SharedPrefixes(lens.to(DEVICE), padded.to(DEVICE), table.to(DEVICE))
        )
    else:
        for there, new in zip(
            (case.step.prefixes.lens_S, case.step.prefixes.members_S, case.step.prefixes.decode_groups),
            (lens, padded, table),
        ):
            there.copy_(new)


@pytest.mark.parametrize(
    "heads", [(32, 8, 128), (16, 8, 128), (9, 3, 64), (14, 2, 64), (32, 32, 96), (8, 1, 80), (8, 2, 256)]
)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_shared_prefixes_with_any_heads(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    lengths = [1000, 15, 993, 1500, 0, 1001, 2049, 63, 2000, 1700, 1024, 1060, 0, 3000]
    case = Case(decodes(lengths), *heads, dtype=dtype, num_decodes=len(lengths))
    set_groups(case, [([0, 2, 10, 5], 992), ([3, 13, 8, 6], 1488)])
    case.check(case.attend())


@pytest.mark.parametrize("shared", [2048, 2000, 16])
@pytest.mark.parametrize("heads", [16, 32])
def test_one_prefix_of_a_whole_batch(heads: int, shared: int) -> None:
    case = Case(decodes([2176 + i % 64 for i in range(256)]), heads, num_decodes=256, max_kv_len=4608)
    set_groups(case, [(list(range(256)), shared)])
    case.check(case.attend())


@pytest.mark.parametrize("queries", [2, 8, 18])
@pytest.mark.parametrize("heads", [(8, 8, 128), (32, 8, 128), (64, 8, 64), (8, 2, 256)], ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_shared_prefixes_of_decodes_of_several_tokens(
    heads: tuple[int, int, int], queries: int, dtype: torch.dtype
) -> None:
    lengths = [1030, 15, 1017, 1530, 0, 1040, 2049, 63, 2000, 1700, 1024, 1060, 0, 3000]
    sequences = decodes(lengths, queries)
    case = Case(sequences, *heads, dtype=dtype, num_decodes=len(lengths), queries=queries)
    set_groups(case, [([0, 2, 11, 5], 992), ([3, 13, 8, 6], 1488)])
    first = case.attend()
    case.check(first)
    assert all(torch.equal(case.attend(), first) for _ in range(20))
    assert not case.backend.workspace.arrived.any()


def test_many_groups_answer_the_same_bits_every_time() -> None:
    case = Case(decodes([1030 + 7 * i for i in range(128)]), num_decodes=128)
    set_groups(case, [(list(range(i, 128, 16)), 64 * (i + 1)) for i in range(16)])
    first = case.attend()
    case.check(first)
    for _ in range(300):
        assert torch.equal(case.attend(), first)
    assert not case.backend.workspace.arrived.any()


def test_groups_change_between_replays_of_a_captured_step() -> None:
    lengths = [9000, 8000, 3000, 500, 2000, 1, 17, 1280] * 3
    case = Case(decodes(lengths), num_decodes=24, max_kv_len=40_960)
    set_groups(case, [])
    case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [case.backend.attend(case.q, case.k, case.v, case.cache(), case.step) for _ in range(3)]
    for groups in (
        [],
        [([0, 1, 8, 9, 16], 7984), ([4, 12, 20], 16)],
        [([23, 15, 7, 4, 2], 1264)],
        [(list(range(24)), 0)],
        [([3, 11, 19], 496), ([1, 9, 17], 7984), ([0, 8, 16], 8992)],
        [],
    ):
        set_groups(case, [group for group in groups if group[1]])
        for layer in layers:
            layer.fill_(float("nan"))
        graph.replay()
        for layer in layers:
            case.check(layer)
