"""Blocks of an fp8 cache as plain numbers, for Hopper's prefill kernel, which reads no fp8."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from shoal.attention.step_input import HostView, StepInput


@dataclass(frozen=True, slots=True)
class UnpackedBlocks:
    """Blocks of an fp8 cache that become plain numbers for Hopper's kernel, sequence after sequence."""

    blocks_B: tuple[torch.Tensor, ...]  # their ids in the cache, by each of StepInput.block_tables
    firsts_S: torch.Tensor  # where each sequence's blocks begin among them
    table_B1: torch.Tensor  # counts them: from its row firsts_S[s] on it is the block table of sequence s


def plan_blocks(
    step: StepInput, host: HostView, block_size: int, max_model_len: int
) -> UnpackedBlocks | None:
    """Returns the blocks that the prefills read. None: as plain numbers they would take more memory than
    in any step that the engine rehearses."""
    lens = np.array(host.kv_lens)
    lens[: step.num_decodes] = 0
    if lens.sum() > max(step.max_prefill_tokens, max_model_len):
        return None
    counts = -(-lens // block_size)
    firsts = np.cumsum(counts) - counts
    seqs = np.repeat(np.arange(len(counts)), counts)
    plan = np.concatenate((firsts, seqs, np.arange(len(seqs)) - firsts[seqs])).astype(np.int32)
    on_device = host.upload(plan).to(step.rows_S.device, non_blocking=True)
    firsts_S, seqs_B, index_B = on_device.split((len(firsts), len(seqs), len(seqs)))
    rows_B, index_B = step.rows_S[seqs_B].long(), index_B.long()
    blocks_B = tuple(tables_RM[rows_B, index_B] for tables_RM in step.block_tables)
    numbers_B = torch.arange(len(seqs), dtype=torch.int32, device=step.rows_S.device)
    return UnpackedBlocks(blocks_B, firsts_S, numbers_B.as_strided((len(seqs), 1), (1, 1)))
