"""Sinks, soft caps and large heads in the Triton attention kernels, in the interpreter, against the reference.
Tolerances: test_attention_kernels.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shoal.attention.backend import AttentionShape
from shoal.attention.triton import TritonBackend
from shoal.kernels.attention.paged_attention import AttentionTiles, PrefillWorkspace
from tests.cpu.attention.test_attention_kernels import Case
from tests.cpu.attention.test_prefix_attention import MIXED, cascade, share, small_parts

# padded rows divide 0 by 0 and are not stored
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")

__all__ = ["small_parts"]  # a fixture
VARIANTS = pytest.mark.parametrize(("softcap", "sinks"), [(None, True), (0.7, False), (3.0, True)])


def vary(case: Case, softcap: float | None, sinks: bool) -> Case:
    """The same step with a cap that bends most scores, and with sinks of some weight."""
    case.softcap = softcap
    if sinks:
        case.sinks_H = 2 * torch.randn(case.q.shape[1], generator=torch.Generator().manual_seed(7))
    return case


@VARIANTS
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("window", [None, 5, 33])
def test_decodes(softcap: float | None, sinks: bool, splits: int, window: int | None) -> None:
    sequences = [(1, n) for n in (70, 33, 4, 0, 17)]
    vary(Case(sequences, 9, 3), softcap, sinks).decode(splits, window)


@VARIANTS
def test_decodes_of_a_large_batch(softcap: float | None, sinks: bool) -> None:
    vary(Case([(1, 200), (1, 70), (1, 33), (1, 4), (1, 0)]), softcap, sinks).decode(4, num_cut=3)


@VARIANTS
@pytest.mark.parametrize("window", [None, 5])
def test_decodes_of_several_tokens(softcap: float | None, sinks: bool, window: int | None) -> None:
    """The first 5 tokens of (8, 3) are padding, and get zeros."""
    vary(Case([(8, n) for n in (70, 3, 0)], 8, 2, queries=8), softcap, sinks).decode(3, window)


@VARIANTS
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("window", [None, 3, 30])
def test_prefills_of_whole_sequences(
    softcap: float | None, sinks: bool, paged: bool, window: int | None
) -> None:
    vary(Case([(40, 40), (17, 17), (1, 1)], 6, 2), softcap, sinks).prefill(window, paged)


@VARIANTS
@pytest.mark.parametrize("window", [None, 1, 30])
def test_prefills_of_chunks(softcap: float | None, sinks: bool, window: int | None) -> None:
    vary(Case([(20, 70), (2, 50), (3, 3)]), softcap, sinks).prefill(window)


@VARIANTS
def test_prefills_whose_keys_are_split(softcap: float | None, sinks: bool) -> None:
    case = vary(Case([(5, 120), (16, 40), (1, 9)], 9, 3), softcap, sinks)
    workspace = PrefillWorkspace.allocate(500, 3, 16, torch.float32, torch.device("cpu"))
    case.prefill(splits=3, workspace=workspace)


@VARIANTS
@pytest.mark.parametrize("splits", [1, 3])
def test_shared_prefixes(softcap: float | None, sinks: bool, splits: int) -> None:
    cascade(vary(Case(MIXED), softcap, sinks), [([0, 3, 5], 7), ([8, 1, 4, 7], 8)], splits)


@VARIANTS
def test_an_fp8_cache(softcap: float | None, sinks: bool) -> None:
    case = vary(Case([(1, 40), (1, 17)], dtype=torch.float16).in_fp8(), softcap, sinks)
    case.decode(2)
    case.prefill(10)


@VARIANTS
@pytest.mark.parametrize("window", [None, 10])
def test_the_backend_answers_mixed_steps(softcap: float | None, sinks: bool, window: int | None) -> None:
    """Its keys and values are another layer's: they are in the cache alone."""
    sequences = [(1, 1), (1, 130), (1, 0), (1, 17), (9, 9), (30, 30)]
    case = vary(Case(sequences, num_decodes=4), softcap, sinks)
    case.give_back(window)
    backend = TritonBackend(
        AttentionShape(4, 2, 16, case.scale, softcap), 8, 8, 256, torch.device("cpu"), torch.float32
    )
    backend.begin(case.step)
    for k, v in ((case.k, case.v), (None, None)):
        out = backend.attend(case.q, k, v, case.cache(window), case.step, sinks_H=case.sinks_H)
        case.check(out, window)


@pytest.mark.parametrize(("head_dim", "block_size"), [(12, 8), (24, 16), (192, 16), (256, 64), (512, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 9])
def test_head_sizes_that_are_large_or_no_power_of_two(
    head_dim: int, block_size: int, dtype: torch.dtype, window: int | None
) -> None:
    case = vary(Case([(1, 37), (1, 18)], 4, 2, head_dim, block_size, dtype), 3.0, True)
    case.decode(2, window)
    case = vary(Case([(21, 21), (3, 3), (2, 30)], 4, 2, head_dim, block_size, dtype), 3.0, True)
    case.prefill(window)


@pytest.mark.parametrize("block_size", [24, 48])
def test_blocks_that_are_no_power_of_two(block_size: int) -> None:
    case = Case([(1, 100), (1, 49), (1, 0)], block_size=block_size)
    case.decode(2)
    case.decode(2, window=30)
    Case([(20, 100), (3, 3)], block_size=block_size).prefill(window=30, tiles=AttentionTiles(16, 32, 4, 2))


def test_the_backend_weighs_a_shared_prefix_with_sinks() -> None:
    case = vary(Case([(1, 40)] * 10, num_decodes=10), None, True)
    case.step = replace(case.step, prefixes=share(case, [(list(range(10)), 4)]))
    backend = TritonBackend(
        AttentionShape(4, 2, 16, case.scale), 8, 16, 256, torch.device("cpu"), torch.float32
    )
    case.check(backend.attend(case.q, case.k, case.v, case.cache(), case.step, sinks_H=case.sinks_H))
