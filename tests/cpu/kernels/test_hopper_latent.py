"""Hopper's latent attention of decodes: run as numbers (gluon_numbers.py) against a plain softmax, and compiled for
sm_90 in the sizes that published models bring. tests/gpu/test_latent_gpu.py runs it on a GPU."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from gluon_numbers import Machine, load
from triton_compile import check_kernels

from shoal.kernels.latent.attention import LatentParts, LatentWorkspace
from shoal.kernels.latent.hopper_decode import hopper_latent_attention
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.rounding import cdiv

BF16, FP16 = torch.bfloat16, torch.float16
CAPABILITIES = (90,)
BLOCK_SIZE = 16


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Case:
    """Sequences of these lengths. Every place of their cache without a key has NaN."""

    def __init__(self, lens: list[int], heads: int, queries: int) -> None:
        torch.manual_seed(0)
        self.lens, self.queries, self.size = lens, queries, 128
        counts, rng = [-(-length // BLOCK_SIZE) for length in lens], random.Random(0)
        blocks = torch.full((sum(counts) + 1, 2, 1, 1, BLOCK_SIZE, self.size + 64), float("nan"))
        self.cache = LayerCache(blocks[:, 1])
        order = rng.sample(range(1, sum(counts) + 1), sum(counts))
        self.tables = torch.full((len(lens), max(counts) + 1), 10**6, dtype=torch.int32)
        self.keys = [torch.randn(length, self.size + 64) for length in lens]
        for row, (count, keys) in enumerate(zip(counts, self.keys)):
            own = [order.pop() for _ in range(count)]
            self.tables[row, :count] = ints(own)
            for i, key in enumerate(keys):
                self.cache.blocks[own[i // BLOCK_SIZE], 0, 0, i % BLOCK_SIZE] = key
        self.q_THN = torch.randn(len(lens) * queries, heads, self.size + 64)

    def attend(
        self,
        turns: tuple[int, ...],
        out_THC: torch.Tensor | None,
        workspace: LatentWorkspace,
        sms: int,
        **cut: int,
    ) -> LatentParts | None:
        kernels = load(Machine(turns), "hopper_decode", {}, folder="latent")
        return kernels.hopper_latent_attention(
            self.q_THN,
            self.cache,
            out_THC,
            ints(self.lens),
            ints([-1 if length == 0 else row for row, length in enumerate(self.lens)]),
            self.tables,
            workspace,
            0.1,
            num_seqs=len(self.lens),
            queries=self.queries,
            num_sms=sms,
            **cut,
        )

    def expected(self) -> torch.Tensor:
        sums = []
        for seq, length in enumerate(self.lens):
            for query in range(self.queries):
                seen = self.keys[seq][: max(0, length - self.queries + query + 1)]
                scores = self.q_THN[seq * self.queries + query] @ seen.T * 0.1
                sums.append(scores.softmax(1) @ seen[:, : self.size])
        return torch.stack(sums)


@pytest.mark.parametrize("turns", [*itertools.permutations(range(3))])
@pytest.mark.parametrize(
    ("lens", "heads", "queries", "sms"),
    [
        ([1, 64, 65, 200, 0, 130], 3, 1, 3),
        ([700], 5, 1, 4),
        ([300, 5, 0, 129], 20, 2, 7),
        ([90] * 9, 40, 1, 2),
        ([random.Random(0).randrange(150) for _ in range(300)], 1, 1, 16),
    ],
    ids=["few lengths", "one sequence", "two queries", "two tiles of heads", "many sequences"],
)
def test_decodes_as_numbers(
    lens: list[int], heads: int, queries: int, sms: int, turns: tuple[int, ...]
) -> None:
    case = Case(lens, heads, queries)
    out_THC = torch.full((len(lens) * queries, heads, case.size), float("nan"))
    workspace = LatentWorkspace.allocate(4 * sms * 32, 2 * sms, case.size, torch.device("cpu"))
    assert case.attend(turns, out_THC, workspace, sms) is None
    torch.testing.assert_close(out_THC, case.expected(), atol=1e-5, rtol=1e-5)
    assert not workspace.arrived.any()


@pytest.mark.parametrize(("lens", "queries"), [([700], 1), ([1], 1), ([130, 0, 300], 3)])
def test_parts_that_are_left(lens: list[int], queries: int) -> None:
    case, splits, heads = Case(lens, 20, queries), 4, 20
    workspace = LatentWorkspace.allocate(512 * len(lens), 1, case.size, torch.device("cpu"))
    parts = case.attend((0, 1, 2), None, workspace, 8, splits=splits, min_split=64)
    assert parts is not None and (parts.splits, parts.keys, parts.queries) == (splits, 64, queries)
    rows = len(lens) * queries * heads
    for seq, length in enumerate(lens):
        share = cdiv(max(cdiv(length, splits), 64), 64) * 64
        active = max(1, cdiv(length, share))
        mine = slice(seq * queries * heads, (seq + 1) * queries * heads)
        lse = parts.lse[: splits * rows].view(splits, rows)[:active, mine]
        sums = parts.partial[: splits * rows * case.size].view(splits, rows, case.size)[:active, mine]
        shares = (lse * math.log(2)).softmax(0)
        found = (shares.unsqueeze(-1) * sums).sum(0).view(queries, heads, -1)
        expected = case.expected()[seq * queries : (seq + 1) * queries]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


LAUNCHES: dict[str, Callable[[], object]] = {}


def launch(heads: int, size: int, queries: int, dtype: torch.dtype, leaves: bool = False) -> None:
    cache = LayerCache(torch.zeros(2, 3, 1, 1, BLOCK_SIZE, size + 64, dtype=dtype)[:, 1])
    hopper_latent_attention(
        torch.zeros(8 * queries, heads, size + 64, dtype=dtype),
        cache,
        None if leaves else torch.zeros(8 * queries, heads, size, dtype=dtype),
        ints([0] * 8),
        ints([0] * 8),
        torch.zeros(4, 20, dtype=torch.int32),
        LatentWorkspace.allocate(4 * 132 * 32, 264, size, torch.device("meta")),
        0.1,
        num_seqs=8,
        queries=queries,
        num_sms=132,
    )


for name, *sizes in (
    ("glm-4.7-flash", 20, 512, 1, BF16),
    ("glm-4.7-flash in fp16, with drafts", 20, 512, 3, FP16),
    ("deepseek-v2-lite", 16, 512, 1, BF16),
    ("deepseek-v3", 128, 512, 1, BF16),
    ("mistral-small-4", 32, 256, 1, BF16),
    ("glm-4.7-flash, whose parts are left", 20, 512, 1, BF16, True),
):
    LAUNCHES[name] = lambda sizes=sizes: launch(*sizes)


@pytest.mark.parametrize("case", LAUNCHES)
def test_compiles(compiled, case):
    check_kernels(compiled[case], max_spilled=512)
