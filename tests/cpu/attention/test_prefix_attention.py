"""Cascade attention in the interpreter, against attention_reference, which knows of no groups. Tolerances:
test_attention_kernels.py."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from shoal.attention.splits import SHARE_FROM, prefix_parts
from shoal.attention.step_input import SharedPrefixes
from shoal.attention.triton import TritonBackend
from shoal.kernels.attention.paged_attention import AttentionTiles, DecodeWorkspace, decode_attention
from shoal.kernels.attention.prefix_attention import prefix_attention
from shoal.kernels.state import MAX_DECODE_GROUPS, DecodeGroupField
from tests.cpu.attention.test_attention_kernels import Case
from tests.head_shape import head_shape

# padded rows divide 0 by 0 and are not stored
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

Groups = list[tuple[list[int], int]]  # (sequences, blocks they share)


def share(case: Case, groups: Groups) -> SharedPrefixes:
    """Lets the sequences of a group begin with the first one's blocks."""
    rows, block_size = case.step.rows_S.tolist(), case.kv_layer.shape[3]
    lens = torch.zeros(len(rows), dtype=torch.int32)
    table = torch.zeros(MAX_DECODE_GROUPS, len(DecodeGroupField), dtype=torch.int32)
    members: list[int] = []
    for group, (seqs, num_blocks) in enumerate(groups):
        first = rows[seqs[0]]
        for seq in seqs:
            case.block_tables_RM[rows[seq], :num_blocks] = case.block_tables_RM[first, :num_blocks]
        lens[seqs] = num_blocks * block_size
        table[group] = torch.tensor([len(members), len(seqs), num_blocks * block_size, first])
        members += seqs
    padded = torch.full((len(rows),), -1, dtype=torch.int32)
    padded[: len(members)] = torch.tensor(members, dtype=torch.int32)
    return SharedPrefixes(lens, padded, table)


def cascade(
    case: Case,
    groups: Groups,
    splits: int = 2,
    max_parts: int = 3,
    programs: int = 5,
    block_m: int = 16,
    workspace: DecodeWorkspace | None = None,
    num_cut: int | None = None,
) -> DecodeWorkspace:
    """Both kernels on small tiles, so that a few keys make several parts."""
    prefixes = share(case, groups)
    num_seqs, num_heads, head_dim = case.step.num_seqs, *case.q.shape[1:]
    num_rows = num_seqs * 2 * case.step.queries * num_heads  # the last tile may have fewer queries
    workspace = workspace or DecodeWorkspace.allocate(
        num_rows * (splits + max_parts), num_rows, head_dim, torch.device("cpu")
    )
    out, tiles = case.poisoned(), AttentionTiles(block_m, 16, 4, 2)
    prefix_attention(
        case.q,
        case.cache(),
        prefixes.decode_groups,
        prefixes.members_S,
        case.block_tables_RM,
        workspace,
        num_seqs,
        programs,
        splits,
        max_parts,
        case.scale,
        tiles,
        queries=case.step.queries,
        softcap=case.softcap,
    )
    decode_attention(
        case.q,
        case.cache(),
        out,
        case.step.rows_S,
        case.step.kv_lens_S,
        case.block_tables_RM,
        workspace,
        num_seqs,
        splits,
        case.scale,
        AttentionTiles(16, 16, 4, 2),
        min_split=16,
        prefix_lens_S=prefixes.lens_S,
        max_parts=max_parts,
        num_cut=num_cut,
        queries=case.step.queries,
        softcap=case.softcap,
        sinks_H=case.sinks_H,
    )
    case.check(out)
    assert not workspace.arrived.any()
    return workspace


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.kernels.attention.prefix_attention.MIN_PART", 16)


MIXED = [(1, n) for n in (70, 65, 0, 101, 90, 64, 7, 66, 200, 0)]


@pytest.mark.parametrize("num_cut", [1, 4, 10])
def test_a_large_batch_is_cut_by_keys_of_its_own(num_cut: int) -> None:
    cascade(
        Case([MIXED[i] for i in (8, 3, 4, 0, 7, 1, 5, 6, 2, 9)]),
        [([0, 2, 6], 7), ([1, 3, 4], 8)],
        splits=3,
        num_cut=num_cut,
    )


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("max_parts", [1, 5])
@pytest.mark.parametrize("programs", [1, 7])
def test_groups_beside_loners_and_padding(splits: int, max_parts: int, programs: int) -> None:
    cascade(Case(MIXED), [([0, 3, 5], 7), ([8, 1, 4, 7], 8)], splits, max_parts, programs)


@pytest.mark.parametrize("queries", [2, 8, 25])
@pytest.mark.parametrize("heads", [(2, 1), (8, 1)], ids=str)
def test_groups_of_decodes_of_several_tokens(heads: tuple[int, int], queries: int) -> None:
    lengths = [100, 0, 90, 101, 30, 95]
    case = Case([(queries, n) for n in lengths], *heads, queries=queries)
    cascade(case, [([0, 2, 5], 8)])
    case = Case([(queries, n) for n in lengths], *heads, dtype=torch.float16, queries=queries)
    cascade(case, [([5, 0, 3], 7)], splits=1, block_m=32)


def test_no_group_at_all() -> None:
    cascade(Case(MIXED), [])


def test_a_group_of_more_than_a_tile() -> None:
    cascade(Case([(1, 49 + i) for i in range(19)]), [(list(range(19)), 6)])


def test_a_group_whose_own_keys_are_one() -> None:
    cascade(Case([(1, 17)] * 5), [([4, 2, 0, 1, 3], 2)])


def test_as_many_groups_as_there_can_be() -> None:
    cascade(
        Case([(1, 20)] * 2 * MAX_DECODE_GROUPS, 1, 1),
        [([2 * i, 2 * i + 1], 1 + i % 2) for i in range(MAX_DECODE_GROUPS)],
    )


@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (9, 3), (4, 1), (8, 1), (7, 1), (20, 1)])
def test_any_ratio_of_heads(heads: tuple[int, int]) -> None:
    cascade(Case([(1, 50), (1, 0), (1, 60), (1, 70), (1, 5)], *heads), [([0, 2, 3], 5)])


@pytest.mark.parametrize(
    ("head_dim", "block_size"), [(16, 1), (32, 32), (64, 16), (80, 16), (96, 64), (128, 16), (256, 4)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_head_size_block_size_and_dtype(head_dim: int, block_size: int, dtype: torch.dtype) -> None:
    cascade(
        Case([(1, 67), (1, 98)], 4, 2, head_dim, block_size, dtype), [([1, 0], 64 // block_size)], block_m=32
    )


def test_the_workspace_serves_the_next_layer_and_other_groups() -> None:
    workspace = cascade(Case(MIXED), [([0, 3, 5], 7), ([8, 1, 4, 7], 8)])
    workspace = cascade(Case(MIXED, seed=1), [([8, 3, 4], 11)], workspace=workspace)
    cascade(Case(MIXED, seed=2), [], workspace=workspace)


def backend(num_heads: int, num_kv_heads: int) -> TritonBackend:
    return TritonBackend(
        head_shape(num_heads, num_kv_heads, 16), 8, 40, 512, torch.device("cpu"), torch.float32, queries=2
    )


@pytest.mark.parametrize("prefills", [[], [(9, 30), (12, 12)]])
@pytest.mark.parametrize("queries", [1, 2])
def test_the_backend_shares_prefixes_of_mixed_steps_too(
    prefills: list[tuple[int, int]], queries: int
) -> None:
    decodes = [(queries, n) for n in (130, 190, 0, 140, 17, 150, 133, 131, 129, 0, 200, 160)]
    case = Case(decodes + prefills, num_decodes=len(decodes), queries=queries)
    case.step = replace(case.step, prefixes=share(case, [([0, 3, 6, 5], 16), ([1, 10, 11], 13)]))
    engine = backend(4, 2)
    for window in (None, 10):  # a window sees no prefix: it is left alone
        case.check(engine.attend(case.q, case.k, case.v, case.cache(window), case.step), window)


def test_decodes_share_prefixes_in_padded_mixed_steps() -> None:
    decodes = [(1, n) for n in (70, 65, 90, 101, 91, 64, 70, 66, 200, 33)]
    case = Case(decodes + [(9, 30), (12, 12)], num_decodes=len(decodes))
    prefixes = share(case, [([0, 3, 6, 5], 7), ([1, 4, 8], 8)])
    lens, members = (
        torch.cat((x[: len(decodes)], torch.zeros(6, dtype=torch.int32)))
        for x in (prefixes.lens_S, prefixes.members_S)
    )
    case.step = replace(case.step, prefixes=SharedPrefixes(lens, members, prefixes.decode_groups))
    case.check_padded(backend(4, 2), (40, 16, 4))


def test_a_small_batch_launches_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.attention.triton.prefix_attention", None)
    case = Case([(1, 130)] * (SHARE_FROM - 1), num_decodes=SHARE_FROM - 1)
    case.step = replace(case.step, prefixes=share(case, [(list(range(SHARE_FROM - 1)), 16)]))
    case.check(backend(4, 2).attend(case.q, case.k, case.v, case.cache(), case.step))


def test_random_groups_equal_the_reference() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    engine = backend(6, 2)
    for _ in range(4):
        lengths = [rng.choice([0, rng.randint(1, 250)]) for _ in range(rng.randint(SHARE_FROM, 16))]
        case = Case([(1, n) for n in lengths], 6, 2, num_decodes=len(lengths), seed=rng.randrange(1000))
        free = [seq for seq, n in enumerate(lengths) if n > 8]
        rng.shuffle(free)
        groups: Groups = []
        while len(free) > 1:
            seqs, free = free[: rng.randint(2, 9)], free[9:]
            groups.append((seqs, rng.randint(1, (min(lengths[seq] for seq in seqs) - 1) // 8)))
        case.step = replace(case.step, prefixes=share(case, groups))
        case.check(engine.attend(case.q, case.k, case.v, case.cache(), case.step))


def test_parts_fill_the_gpu_and_bound_the_workspace() -> None:
    assert prefix_parts(SHARE_FROM - 1, 8, 132) == 0
    for num_seqs in range(SHARE_FROM, 513):
        parts = prefix_parts(num_seqs, 8, 132)
        assert 8 <= parts <= 16 and parts * num_seqs <= max(132 * 16, 8 * num_seqs)
