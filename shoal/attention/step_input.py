"""The inputs that all layers of one forward pass share.

Shapes: T tokens of the step, S sequences, B decodes, R state rows, M blocks a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Decode groups, which share their first blocks. These are views into the batch state, whose layout
    kernels/state.py describes."""

    lens_S: torch.Tensor
    members_S: torch.Tensor
    decode_groups: torch.Tensor


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
    """One step on the device: a decode step, eager or captured (every sequence decodes), an eager mixed step
    (the host knows every length, and there is no padding) or a captured mixed step (`sparse_decodes`).

    The sequences that decode come first, then those whose prompts are computed (prefills). Tokens lie in the
    same order, without gaps: decode i has the `queries` tokens from i * queries on, then come the chunks of
    the prefills.

    The tokens of a sequence are the last of its kv_len positions, and each sees the tokens up to itself. A
    decode that has fewer than `queries` tokens is padded in front, so it needs no block after its last token.

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
    # int32 [R, M] each: block ids of the state rows, views into the batch state. rows_S and rows_T index
    # dimension R; LayerCache.table chooses one.
    block_tables: tuple[torch.Tensor, ...]
    num_decodes: int  # how many of the S sequences are places for decodes
    max_kv_len: int  # an upper bound of kv_lens_S
    queries: int = 1  # the tokens of each decode
    # Every prefill starts at position 0, so this step's own k and v are all that it may see.
    fresh_prefills: bool = False
    # A captured mixed step. Most places for decodes are empty as a rule, so a backend should cut the work of
    # the others finely. An empty place has no token, so query_starts_S[num_decodes], on the device, says
    # where the tokens of the prefills begin.
    sparse_decodes: bool = False
    host: HostView | None = None  # None: only the device knows the lengths
    prefixes: SharedPrefixes | None = None  # None: no decodes share a prefix

    @classmethod
    def rehearsal(
        cls, num_seqs: int, query_len: int, *, cached_len: int, block_tables: tuple[torch.Tensor, ...]
    ) -> StepInput:
        """A mixed step of made-up tokens: each of `num_seqs` prefills has `query_len` tokens, which follow
        `cached_len` others. No token has a state row, so nothing is written into the cache. State rows 0 to
        `num_seqs` - 1 are read."""
        num_tokens, kv_len = num_seqs * query_len, cached_len + query_len
        with block_tables[0].device:
            rows_S = torch.arange(num_seqs, dtype=torch.int32)
            query_starts_S = torch.arange(num_seqs + 1, dtype=torch.int32) * query_len
            positions_T = torch.arange(cached_len, kv_len, dtype=torch.int32).repeat(num_seqs)
            return cls(
                token_ids_T=torch.zeros(num_tokens, dtype=torch.int32),
                positions_T=positions_T,
                rows_T=torch.full((num_tokens,), -1, dtype=torch.int32),
                rows_S=rows_S,
                query_starts_S=query_starts_S,
                kv_lens_S=torch.full((num_seqs,), kv_len, dtype=torch.int32),
                block_tables=block_tables,
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

    @property
    def num_decode_tokens(self) -> int:
        """The tokens of all places for decodes together."""
        return self.num_decodes * self.queries

    @property
    def max_prefill_tokens(self) -> int:
        """An upper bound of the tokens of all prefills together."""
        return self.num_tokens if self.sparse_decodes else self.num_tokens - self.num_decode_tokens
