"""`HeadDrafter`: drafts by a head, at the end of a step, on the device alone.

First the head runs all slots of the step, in prompts too, so that its cache is as long as the target's. The
slot before a row's TOKEN gives the first draft. Each further one takes one more slot, which begins with the
draft before it and with the head's own output. The next step computes these slots again, with the target's
hidden states, so slots of rejected drafts need no end.

A draft is sampled as the target samples a token: by the request's own parameters, with the noise of the
position. So it is right as often as the head's distribution allows, at any temperature.

S sequences that the step sampled from · T its tokens · K drafts · L tokens of a history · R state rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.attention.step_input import StepInput
from shoal.engine.drafting.rank_head import RankHead
from shoal.kernels.drafting.draft_rows import DraftRows
from shoal.kernels.ops import Ops
from shoal.kernels.state import FIELDS, Field
from shoal.layers.attention import Attention
from shoal.layers.latent import LatentAttention


class HeadDrafter:
    """Drafts up to `num_drafts` tokens a sequence. Rows are the batch state's. Row -1, which is padding,
    reads and writes its spare row."""

    def __init__(
        self,
        head: RankHead,
        ops: Ops,
        table: torch.Tensor,
        caches: Callable[[], Sequence[Any]],
        num_drafts: int,
    ) -> None:
        """`caches` returns all layers' caches, the head's last."""
        self.head, self.ops, self.table, self.caches = head, ops, table, caches
        self.num_drafts = num_drafts
        layers = head.module.modules()
        self.backends = {layer.backend for layer in layers if isinstance(layer, Attention | LatentAttention)}

    def resume(self, step: StepInput, states_TX: torch.Tensor) -> None:
        """Takes the hidden states of a replayed graph, which has captured `step`."""
        self.head.states.resume(step, states_TX)
        for backend in self.backends:
            backend.begin(step)

    def propose(self, rows_S: torch.Tensor, drafts: DraftRows, most: int | None = None) -> torch.Tensor:
        """Writes drafts after each row's TOKEN, which the step has sampled and the history has. Returns how
        many there are, int32 [S].

        A row that lacks blocks for further slots gets fewer drafts. `most`: drafts of a row; with 0 the
        head's cache alone is filled. None: `num_drafts`."""
        most = self.num_drafts if most is None else most
        module, caches, step = self.head.module, self.head.caches_of(self.caches()), self.head.states.step
        length, rows = drafts.history_RL.shape[1], rows_S.long()
        # `sample` writes into the rows that it samples for: these are copies.
        fields_SF = self.table[rows, :FIELDS]
        positions_S = fields_SF[:, Field.POSITION].clone()
        # Blocks may reach beyond the longest sequence, which the history and the rope have room for.
        rooms_S = fields_SF[:, Field.ROOM].clamp(max=length)
        # The spare row's history is whatever padding and rehearsals have left there, maybe no token at all.
        following_T = drafts.history_RL[step.rows_T.long(), (step.positions_T.long() + 1) % length]
        following_T = torch.where(step.rows_T >= 0, following_T, 0)
        hidden_TD = module.fuse(self.head.states.states_TX)
        before_S = _slots_before(step, rows_S, positions_S)
        normed_SD, hidden_SD = module(following_T, hidden_TD, step, caches, before_S)
        if len(rows_S) == 0 or not most:
            return torch.zeros_like(rows_S)
        is_row_S = rows_S >= 0
        own_S = torch.arange(len(rows_S), dtype=torch.int32, device=rows_S.device)
        copies_S = torch.where(is_row_S, own_S, -1)
        drafted_S = torch.zeros_like(rows_S)
        for i in range(most):
            if i:
                slots_S = positions_S + (i - 1)
                exists_S = is_row_S & (slots_S < rooms_S)
                step_of_one = self._step(step, rows_S, slots_S, exists_S)
                last_drafts_S = torch.where(exists_S, drafted_S, 0)
                normed_SD, hidden_SD = module(last_drafts_S, hidden_SD, step_of_one, caches)
            self.ops.sample(module.logits(normed_SD), copies_S, positions_S + i, fields_SF, drafted_S)
            drafts.drafts_RK[rows, i] = drafted_S
        num_slots_S = (rooms_S - positions_S).clamp(min=0, max=most - 1)
        return torch.where(is_row_S, num_slots_S + 1, 0).int()

    def _step(
        self, step: StepInput, rows_S: torch.Tensor, slots_S: torch.Tensor, exists_S: torch.Tensor
    ) -> StepInput:
        """Returns a step of one slot for each sequence, with padding for a sequence without that slot."""
        positions_S = torch.where(exists_S, slots_S, -1)
        one = StepInput(
            token_ids_T=slots_S,  # not read: the head gets its tokens as an argument
            positions_T=positions_S,
            rows_T=torch.where(exists_S, rows_S, -1),
            rows_S=torch.where(exists_S, rows_S, -1),
            query_starts_S=torch.arange(len(rows_S) + 1, dtype=torch.int32, device=rows_S.device),
            kv_lens_S=positions_S + 1,
            block_tables=step.block_tables,
            num_decodes=len(rows_S),
            max_kv_len=min(step.max_kv_len + self.num_drafts, self.head.max_position),
        )
        for backend in self.backends:
            backend.begin(one)
        return one


def _slots_before(step: StepInput, rows_S: torch.Tensor, positions_S: torch.Tensor) -> torch.Tensor:
    """Returns for each row the index in T of the token before its TOKEN, which is at `positions_S`, and for
    padding any. int64 [S]

    A rehearsal that compiles kernels ahead does not run them, so rows may hold any position then."""
    found_S = (rows_S[:, None] == step.rows_S[None]).int().argmax(dim=1)
    last_S, lens_S = step.query_starts_S[found_S + 1] - 1, step.kv_lens_S[found_S]
    before_S = torch.where(rows_S >= 0, last_S - (lens_S - positions_S), 0)
    return before_S.clamp(min=0, max=step.num_tokens - 1).long()
