"""What every layer of one forward pass shares, and the seam between the model and an attention backend.

Shapes: T tokens of the step, S sequences, R state rows, M blocks a sequence, H query heads, G kv heads, N
head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of decodes that share their first blocks: views into the batch state (kernels/state.py says what
    is in them)."""

    lens_S: torch.Tensor
    members_S: torch.Tensor
    groups: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInput:
    """One step on the device. Sequences come decodes first: `num_decodes` of them have one query token, the
    rest are prefill chunks.

    In a captured decode step all sizes are those of the capture (S == T == num_decodes); padding has row -1,
    position -1, length 0. In a captured mixed step (`captured_mixed`) likewise, but the decodes' tokens are
    as many as there are decodes, not num_decodes, which are their places among the sequences:
    query_starts_S[num_decodes] says on the device where the prefills' tokens begin.
    """

    token_ids_T: torch.Tensor  # int32
    positions_T: torch.Tensor  # int32
    rows_T: torch.Tensor  # int32: the state row of each token's sequence, -1 for padding
    rows_S: torch.Tensor  # int32
    query_starts_S: torch.Tensor  # int32 [S + 1]: where each sequence's query tokens start in T
    kv_lens_S: torch.Tensor  # int32: cached tokens of each sequence, this step's included
    # int32 view into the batch state; rows_S and rows_T index its first dimension
    block_tables_RM: torch.Tensor
    num_decodes: int
    max_query_len: int  # over the prefill chunks; 1 if there are none
    max_kv_len: int  # upper bound over all sequences (max_model_len in a captured step)
    # every prefill chunk starts at position 0: k and v of the step are all there is to see
    fresh_prefills: bool = False
    # query_starts_S on the host, for backends that loop over prefills (empty in a captured step)
    host_query_starts: tuple[int, ...] = ()
    host_kv_lens: tuple[int, ...] = ()  # kv_lens_S on the host (likewise)
    # tokens whose hidden states are wanted, ascending; None: of all, or unknown
    host_select: np.ndarray | None = None
    # takes int32s that a backend plans [N] to the device
    upload: Callable[[np.ndarray], torch.Tensor] = torch.from_numpy
    captured_mixed: bool = False
    # None: nothing is shared; else there may be no group, in a captured step
    prefixes: SharedPrefixes | None = None

    @property
    def num_seqs(self) -> int:
        return self.rows_S.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.token_ids_T.shape[0]


class AttentionBackend(Protocol):
    """Causal attention of a step's queries over the paged cache. Built once an engine; `begin` may plan for a
    step's shape."""

    scale: float
    captures_mixed: bool  # a mixed step may be captured: nothing but StepInput's tensors tells its lengths
    share_from: int | None  # from how many decodes on it makes use of StepInput.prefixes; None: never

    def begin(self, step: StepInput) -> None:
        """Called once before the layers of an eager step, or before capture."""

    def reads_k(self, window: int | None) -> bool:
        """Whether `attend` may read this step's k as it is passed, not from the cache alone."""
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
    ) -> torch.Tensor:
        """[T, H, N] for [T, H, N] queries. The step's own k and v are in `kv_layer` already; they are passed
        for fresh prefills.
        `selected`: only step.host_select's tokens are going to be read."""
        ...
