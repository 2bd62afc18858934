"""Blocks of an fp8 cache as plain numbers, for Hopper's prefill kernel, which reads no fp8."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shoal.attention.step_input import HostView, StepInput


@dataclass(frozen=True, slots=True)
class UnpackedBlocks:
    """Blocks of an fp8 cache that become plain numbers for Hopper's kernel, sequence after sequence."""

    blocks_B: torch.Tensor  # their ids in the cache
    firsts_S: torch.Tensor  # where each sequence's blocks begin among them
    table_B1: torch.Tensor  # counts them: from its row firsts_S[s] on it is the block table of sequence s


def fit_unpacked(step: StepInput, host: HostView, max_model_len: int) -> bool:
    """Says if the keys that the prefills read take, as plain numbers, at most the memory of a step that the
    engine rehearses."""
    return sum(host.kv_lens[step.num_decodes :]) <= max(step.max_prefill_tokens, max_model_len)


def plan_blocks(step: StepInput, host: HostView, table: int, block_size: int) -> UnpackedBlocks:
    """Returns the blocks that the prefills read by the step's block table of this number."""
    lens = np.array(host.kv_lens)
    lens[: step.num_decodes] = 0
    counts = -(-lens // block_size)
    firsts = np.cumsum(counts) - counts
    seqs = np.repeat(np.arange(len(counts)), counts)
    plan = np.concatenate((firsts, seqs, np.arange(len(seqs)) - firsts[seqs])).astype(np.int32)
    on_device = host.upload(plan).to(step.rows_S.device, non_blocking=True)
    firsts_S, seqs_B, index_B = on_device.split((len(firsts), len(seqs), len(seqs)))
    rows_B, index_B = step.rows_S[seqs_B].long(), index_B.long()
    numbers_B = torch.arange(len(seqs), dtype=torch.int32, device=step.rows_S.device)
    return UnpackedBlocks(
        step.block_tables[table][rows_B, index_B], firsts_S, numbers_B.as_strided((len(seqs), 1), (1, 1))
    )
