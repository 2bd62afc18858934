"""Speculation on the CPU, in C. Without a compiler the functions of kernels/drafting/reference.py run."""

from __future__ import annotations

import ctypes

import torch

from shoal.kernels.cpu import build as cpu_build
from shoal.kernels.drafting import reference
from shoal.kernels.drafting.draft_rows import DraftRows, LookUp, SuffixLookUp

__all__ = ["accept", "begin_verification", "look_up", "write_histories"]

LIBRARY = cpu_build.load()
write_histories = reference.write_histories


def begin_verification(
    rows_B: torch.Tensor,
    table: torch.Tensor,
    drafts: DraftRows,
    token_ids_T: torch.Tensor,
    positions_T: torch.Tensor,
    rows_T: torch.Tensor,
    kv_lens_B: torch.Tensor,
    starts_B: torch.Tensor,
    verified_B: torch.Tensor,
    unverified_B: torch.Tensor,
    pending_B: torch.Tensor,
) -> None:
    outs = token_ids_T, positions_T, rows_T, kv_lens_B, starts_B, verified_B, unverified_B, pending_B
    if LIBRARY is None:
        reference.begin_verification(rows_B, table, drafts, *outs)
        return
    _check_ints(rows_B, *outs)
    size = rows_B.shape[0]
    queries = token_ids_T.shape[0] // max(1, size)
    described = _described(table, drafts)
    LIBRARY.shoal_begin_verification(
        ctypes.addressof(described), rows_B.data_ptr(), size, queries, *(out.data_ptr() for out in outs)
    )


def accept(
    sampled_N: torch.Tensor,
    token_ids_T: torch.Tensor,
    rows_S: torch.Tensor,
    starts_S: torch.Tensor,
    verified_B: torch.Tensor,
    unverified_B: torch.Tensor,
    num_decodes: int,
    queries: int,
    table: torch.Tensor,
    drafts: DraftRows,
    report_SX: torch.Tensor,
) -> None:
    ins = sampled_N, token_ids_T, rows_S, starts_S, verified_B, unverified_B
    if LIBRARY is None:
        reference.accept(*ins, num_decodes, queries, table, drafts, report_SX)
        return
    _check_ints(*ins, report_SX)
    described = _described(table, drafts)
    LIBRARY.shoal_accept(
        ctypes.addressof(described),
        *(tensor.data_ptr() for tensor in ins),
        rows_S.shape[0],
        num_decodes,
        queries,
        report_SX.data_ptr(),
        report_SX.stride(0),
    )


def look_up(
    rows_S: torch.Tensor,
    table: torch.Tensor,
    drafts: DraftRows,
    parameters: LookUp | SuffixLookUp,
    report_SX: torch.Tensor,
) -> None:
    if LIBRARY is None:
        reference.look_up(rows_S, table, drafts, parameters, report_SX)
        return
    _check_ints(rows_S, report_SX)
    described = _described(table, drafts)
    rows = ctypes.addressof(described), rows_S.data_ptr(), rows_S.shape[0], parameters.max_drafts
    report = report_SX.data_ptr(), report_SX.stride(0)
    if isinstance(parameters, LookUp):
        LIBRARY.shoal_look_up(*rows, parameters.min_match, parameters.max_match, *report)
    elif LIBRARY.shoal_look_up_suffix(
        *rows, parameters.depth, parameters.factor, parameters.min_probability, *report
    ):
        raise MemoryError(f"no memory to look up drafts of {rows_S.shape[0]} sequences")


def _described(table: torch.Tensor, drafts: DraftRows) -> cpu_build.DraftRowsStruct:
    _check_ints(table, drafts.drafts_RK, drafts.history_RL, drafts.earlier_R)
    return cpu_build.DraftRowsStruct(
        table.data_ptr(),
        drafts.drafts_RK.data_ptr(),
        drafts.history_RL.data_ptr(),
        drafts.earlier_R.data_ptr(),
        table.stride(0),
        drafts.drafts_RK.shape[1],
        drafts.history_RL.shape[1],
    )


def _check_ints(*tensors: torch.Tensor) -> None:
    for tensor in tensors:
        assert tensor.dtype == torch.int32 and tensor.stride(-1) == 1
