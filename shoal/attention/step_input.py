"""The inputs that all layers of one forward pass share, and the seam between the model and an attention
backend.

Shapes: T tokens of the step, S sequences, B decodes, R state rows, M blocks a sequence, H query heads, G kv
heads, N head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decodes that share their first blocks. These are views into the batch state, whose layout
    kernels/state.py describes."""

    lens_S: torch.Tensor
    members_S: torch.Tensor
    groups: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostView:
    """An eager step as the host knows it. A backend that plans its prefills on the host reads it."""

    query_starts: tuple[int, ...]  # the numbers in query_starts_S
    kv_lens: tuple[int, ...]  # the numbers in kv_lens_S
    # The tokens whose hidden states are wanted, in ascending order. None: all tokens are wanted.
    selected_tokens: np.ndarray | None = None
    # Brings a backend's plan, int32 [N], to the device without waiting for the device.
    upload: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step on the device. A constructor below makes each kind of step, and says what is special about it.

    The sequences that decode come first, then those whose prompts are computed (prefills). Tokens lie in the
    same order, without gaps: token i belongs to decode i, then come the chunks of the prefills.

    A captured step always has the sizes of its capture. Where the batch is smaller there is padding, which
    the device recognizes: a padded token has row -1 and position -1, a padded sequence has row -1 and length
    0.
    """

    token_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int32
    rows_T: torch.Tensor  # int32: the state row of each token's sequence; -1: its k and v are not stored
    rows_S: torch.Tensor  # int32: the state row of each sequence
    query_starts_S: torch.Tensor  # int32 [S + 1]: where each sequence's tokens begin in T
    kv_lens_S: torch.Tensor  # int32: the tokens of each sequence in the cache, this step's included
    # int32: the block ids of each state row, a view into the batch state. rows_S and rows_T index dimension
    # R.
    block_tables_RM: torch.Tensor
    num_decodes: int  # how many of the S sequences are places for decodes
    max_prefill_tokens: int  # an upper bound of the tokens of all prefills together
    max_kv_len: int  # an upper bound of kv_lens_S
    # Every prefill starts at position 0, so this step's own k and v are all that it may see.
    fresh_prefills: bool
    # Most places for decodes are empty as a rule, so a backend should cut the work of the others finely.
    sparse_decodes: bool
    host: HostView | None  # None: only the device knows the lengths
    prefixes: SharedPrefixes | None  # None: no decodes share a prefix

    @classmethod
    def decode(
        cls,
        *,
        token_ids_B: torch.Tensor,
        positions_B: torch.Tensor,
        rows_B: torch.Tensor,
        query_starts_B: torch.Tensor,
        kv_lens_B: torch.Tensor,
        block_tables_RM: torch.Tensor,
        max_kv_len: int,
        prefixes: SharedPrefixes | None = None,
    ) -> StepInput:
        """Every sequence decodes, so there is one token for each. The step is the same whether it runs
        eagerly or is captured: the host knows no lengths, and some rows may be padding."""
        return cls(
            token_ids_T=token_ids_B,
            positions_T=positions_B,
            rows_T=rows_B,
            rows_S=rows_B,
            query_starts_S=query_starts_B,
            kv_lens_S=kv_lens_B,
            block_tables_RM=block_tables_RM,
            num_decodes=rows_B.shape[0],
            max_prefill_tokens=0,
            max_kv_len=max_kv_len,
            fresh_prefills=False,
            sparse_decodes=False,
            host=None,
            prefixes=prefixes,
        )

    @classmethod
    def mixed(
        cls,
        *,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        rows_T: torch.Tensor,
        rows_S: torch.Tensor,
        query_starts_S: torch.Tensor,
        kv_lens_S: torch.Tensor,
        block_tables_RM: torch.Tensor,
        num_decodes: int,
        max_kv_len: int,
        fresh_prefills: bool,
        host: HostView,
        prefixes: SharedPrefixes | None = None,
    ) -> StepInput:
        """An eager step with prefills. The first `num_decodes` sequences decode. There is no padding, and the
        host knows every length."""
        return cls(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            rows_T=rows_T,
            rows_S=rows_S,
            query_starts_S=query_starts_S,
            kv_lens_S=kv_lens_S,
            block_tables_RM=block_tables_RM,
            num_decodes=num_decodes,
            max_prefill_tokens=token_ids_T.shape[0] - num_decodes,
            max_kv_len=max_kv_len,
            fresh_prefills=fresh_prefills,
            sparse_decodes=False,
            host=host,
            prefixes=prefixes,
        )

    @classmethod
    def captured_mixed(
        cls,
        *,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        rows_T: torch.Tensor,
        rows_S: torch.Tensor,
        query_starts_S: torch.Tensor,
        kv_lens_S: torch.Tensor,
        block_tables_RM: torch.Tensor,
        num_decodes: int,
        max_kv_len: int,
        prefixes: SharedPrefixes | None = None,
    ) -> StepInput:
        """A step with prefills as a graph captures it: it has places for `num_decodes` decodes, then for
        prefills, and room for T tokens. The host knows nothing but these sizes.

        An empty place among the decodes has no token. So query_starts_S[num_decodes], on the device, says
        where the prefills' tokens begin, and the prefills may have as many as T.
        """
        return cls(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            rows_T=rows_T,
            rows_S=rows_S,
            query_starts_S=query_starts_S,
            kv_lens_S=kv_lens_S,
            block_tables_RM=block_tables_RM,
            num_decodes=num_decodes,
            max_prefill_tokens=token_ids_T.shape[0],
            max_kv_len=max_kv_len,
            fresh_prefills=False,
            sparse_decodes=True,
            host=None,
            prefixes=prefixes,
        )

    @classmethod
    def rehearsal(
        cls, num_seqs: int, query_len: int, *, cached_len: int, block_tables_RM: torch.Tensor
    ) -> StepInput:
        """A mixed step of made-up tokens: each of `num_seqs` prefills has `query_len` tokens, which follow
        `cached_len` others. No token has a state row, so nothing is written into the cache. State rows 0 to
        `num_seqs` - 1 are read."""
        num_tokens, kv_len = num_seqs * query_len, cached_len + query_len
        with block_tables_RM.device:
            rows_S = torch.arange(num_seqs, dtype=torch.int32)
            query_starts_S = torch.arange(num_seqs + 1, dtype=torch.int32) * query_len
            positions_T = torch.arange(cached_len, kv_len, dtype=torch.int32).repeat(num_seqs)
            return cls.mixed(
                token_ids_T=torch.zeros(num_tokens, dtype=torch.int32),
                positions_T=positions_T,
                rows_T=torch.full((num_tokens,), -1, dtype=torch.int32),
                rows_S=rows_S,
                query_starts_S=query_starts_S,
                kv_lens_S=torch.full((num_seqs,), kv_len, dtype=torch.int32),
                block_tables_RM=block_tables_RM,
                num_decodes=0,
                max_kv_len=kv_len,
                fresh_prefills=cached_len == 0,
                host=HostView(tuple(range(0, num_tokens + 1, query_len)), (kv_len,) * num_seqs),
            )

    @property
    def num_seqs(self) -> int:
        return self.rows_S.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]


class AttentionBackend(Protocol):
    """Causal attention of a step's queries over the paged cache. An engine builds one. Steps that share it
    must run one after the other."""

    scale: float
    captures_mixed: bool  # a mixed step may be captured, because `attend` needs no StepInput.host
    share_from: int | None  # from this many decodes on it makes use of StepInput.prefixes; None: never

    def begin(self, step: StepInput) -> None:
        """Plans what the layers of the step have in common. It is called once before the layers of an eager
        step, and once before the layers of a step that is captured, but not before a replay."""

    def reads_k(self, window: int | None) -> bool:
        """Says if `attend` may read this step's k as it is passed, not from the cache alone."""
        ...

    def attend(
        self,
        q_THN: torch.Tensor,
        k_TGN: torch.Tensor,
        v_TGN: torch.Tensor,
        kv_layer: torch.Tensor,
        step: StepInput,
        window: int | None,
        selected: bool = False,
        scales_2G: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """[T, H, N] for [T, H, N] queries. `kv_layer` holds the step's own k and v already; they are passed
        for fresh prefills. With `selected`, nobody reads the results of other tokens than
        step.host.selected_tokens.

        `scales_2G`: the cache has fp8 numbers (kernels/reference.py: `to_fp8`), kv head g's to be
        multiplied by scales_2G[0, g] (keys) and scales_2G[1, g] (values). Then this step's keys and values
        are read from the cache alone, so that a token sees the same ones in whatever step it is computed."""
        ...
