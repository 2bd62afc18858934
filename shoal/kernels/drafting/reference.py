"""Speculation's operations on the batch state in plain PyTorch: the oracle of this room's kernels, and the
CPU's path where there is no compiler.

S sequences that are sampled from · B decode batch · T tokens of the decodes · N samples · K drafts · L tokens
of a history · R state rows · X int32s of a report.
"""

from __future__ import annotations

from collections import Counter

import torch

from shoal.kernels.drafting.draft_rows import (
    DRAFTS,
    EARLIER,
    MOST_PLACES,
    REPORT_SIZE,
    DraftRows,
    LookUp,
    Report,
    SuffixLookUp,
)
from shoal.kernels.state import Field


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
    """Fills in the inputs of decodes of T / B tokens from the state rows: a row's TOKEN, and as many of its
    drafts as its MAX_TOKENS and T / B allow. They are the last of the row's tokens; those before them are
    padding (row and position -1, token 0). `starts_B` gets the position of TOKEN, `verified_B` the number of
    drafts, `unverified_B` the first draft if none of them is verified, else -1, and `pending_B` the row's
    PENDING. A padded sequence (row -1) has padding alone, position -1, length 0, and nothing pending."""
    queries = token_ids_T.shape[0] // max(1, rows_B.shape[0])
    for b, row in enumerate(rows_B.tolist()):
        place = slice(b * queries, (b + 1) * queries)
        token_ids_T[place], positions_T[place], rows_T[place] = 0, -1, -1
        start, num_drafts, unverified, pending = -1, 0, -1, 0
        if row >= 0:
            fields = table[row]
            most = min(int(fields[Field.MAX_TOKENS]), queries) - 1
            pending = int(fields[Field.PENDING])
            start, num_drafts = int(fields[Field.POSITION]), max(0, min(int(fields[Field.NUM_DRAFTS]), most))
            if fields[Field.NUM_DRAFTS] and not num_drafts:
                unverified = int(drafts.drafts_RK[row, 0])
            place = slice((b + 1) * queries - 1 - num_drafts, (b + 1) * queries)
            token_ids_T[place.start] = fields[Field.TOKEN]
            token_ids_T[place.start + 1 : place.stop] = drafts.drafts_RK[row, :num_drafts]
            positions_T[place] = torch.arange(start, start + num_drafts + 1, dtype=torch.int32)
            rows_T[place] = row
        kv_lens_B[b], starts_B[b] = start + 1 + num_drafts, start
        verified_B[b], unverified_B[b], pending_B[b] = num_drafts, unverified, pending


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
    """Accepts drafts as long as each equals the token that was sampled in its place.

    The first `num_decodes` sequences have `queries` samples each, of which the last verified_B[s] + 1 count;
    the others have one. The first sample of a sequence follows the token at starts_S[s]. Its tokens are the
    samples up to the first that differs from its draft. They go into the report and the history, and the last
    of them, with its position and how many came before it, into the row, which has no drafts then.
    `token_ids_T`, `verified_B` and `unverified_B` are as begin_verification made them, so accepting once
    more, after other samples, is possible even if drafts were looked up meanwhile."""
    length = drafts.history_RL.shape[1]
    sampled = sampled_N.tolist()
    for s, (row, start) in enumerate(zip(rows_S.tolist(), starts_S.tolist())):
        if row < 0:
            continue
        is_decode = s < num_decodes
        verified = int(verified_B[s]) if is_decode else 0
        end = (s + 1) * queries if is_decode else num_decodes * queries + s - num_decodes + 1
        tokens = sampled[end - 1 - verified : end]
        drafted = token_ids_T[end - verified : end].tolist()
        count = 1
        while count <= verified and tokens[count - 1] == drafted[count - 1]:
            count += 1
        at = int(drafts.earlier_R[row]) + start + 1
        for i, token in enumerate(tokens[:count]):
            drafts.history_RL[row, (at + i) % length] = token
        first = 0
        if is_decode and unverified_B[s] >= 0:
            first = 2 if tokens[0] == unverified_B[s] else 1
        table[row, Field.TOKEN] = tokens[count - 1]
        table[row, Field.POSITION] = start + count
        table[row, Field.NUM_DRAFTS] = report_SX[s, Report.NUM_DRAFTS] = 0
        table[row, Field.PENDING] = count - 1
        report_SX[s, Report.NUM_TOKENS] = count
        report_SX[s, Report.NUM_VERIFIED] = verified
        report_SX[s, Report.FIRST] = first
        report_SX[s, REPORT_SIZE : REPORT_SIZE + count] = torch.tensor(tokens[:count], dtype=torch.int32)


def look_up(
    rows_S: torch.Tensor,
    table: torch.Tensor,
    drafts: DraftRows,
    parameters: LookUp | SuffixLookUp,
    report_SX: torch.Tensor,
) -> None:
    """Drafts the tokens after each row's TOKEN from what followed the same tokens before, in the sequence or
    the earlier tokens of its row, into the row and its NUM_DRAFTS, and into the report."""
    length, first = drafts.history_RL.shape[1], report_SX.shape[1] - drafts.drafts_RK.shape[1]
    for s, row in enumerate(rows_S.tolist()):
        if row < 0:
            continue
        end = int(drafts.earlier_R[row]) + int(table[row, Field.POSITION]) + 1
        positions = torch.arange(max(0, end - length), end) % length
        tokens = drafts.history_RL[row, positions].tolist()
        if isinstance(parameters, SuffixLookUp):
            found = look_up_suffix(tokens, parameters)
        else:
            found = look_up_tokens(tokens, parameters)
        found_K = torch.tensor(found, dtype=torch.int32)
        drafts.drafts_RK[row, : len(found)] = report_SX[s, first : first + len(found)] = found_K
        table[row, Field.NUM_DRAFTS] = report_SX[s, Report.NUM_DRAFTS] = len(found)


def look_up_tokens(tokens: list[int], parameters: LookUp) -> list[int]:
    """Returns the drafts after these tokens."""
    for size in range(min(parameters.max_match, len(tokens) - 1), parameters.min_match - 1, -1):
        suffix = tokens[-size:]
        for start in range(len(tokens) - size):
            if tokens[start : start + size] == suffix:
                return tokens[start + size : start + size + parameters.max_drafts]
    return []


def look_up_suffix(tokens: list[int], parameters: SuffixLookUp) -> list[int]:
    """Returns the drafts after these tokens. Of equally frequent tokens the one with the smallest id counts,
    of equally good suffixes the longest."""
    best: tuple[float, list[int]] = (0.0, [])
    size, ends = 0, list(range(1, len(tokens)))  # where the suffix of `size` tokens ended before
    while size < parameters.depth:
        size += 1
        ends = [end for end in ends if end >= size and tokens[end - size] == tokens[-size]][-MOST_PLACES:]
        if not ends:
            break
        limit = min(parameters.max_drafts, int(size * parameters.factor), parameters.depth - size)
        found, score, probability, alive = list[int](), 0.0, 1.0, ends
        while len(found) < limit:
            followers = Counter(tokens[end + len(found)] for end in alive if end + len(found) < len(tokens))
            if not followers:
                break
            token, count = min(followers.items(), key=lambda item: (-item[1], item[0]))
            probability *= count / followers.total()
            if probability < parameters.min_probability:
                break
            at = len(found)
            alive = [end for end in alive if end + at < len(tokens) and tokens[end + at] == token]
            found.append(token)
            score += probability
        if found and score >= best[0]:
            best = score, found
    return best[1]


def write_histories(entries: torch.Tensor, drafts: DraftRows) -> None:
    """Writes tokens of sequences that have just got their rows, and drafts that the host has made. An entry
    is a row, the place of its first token in the row's history, the number of its tokens, and the tokens.
    The place counts from the first earlier token; DRAFTS or EARLIER stand for something else. Entries lie one
    after the other, int32."""
    length, at = drafts.history_RL.shape[1], 0
    while at < len(entries):
        row, first, size = entries[at : at + 3].tolist()
        tokens = entries[at + 3 : at + 3 + size]
        if first == DRAFTS:
            drafts.drafts_RK[row, :size] = tokens
        elif first == EARLIER:
            drafts.earlier_R[row] = tokens[0]
        else:
            places = torch.arange(first, first + size, device=entries.device) % length
            drafts.history_RL[row, places] = tokens
        at += 3 + size
