"""`BatchState`: the batch state on one rank's device: block tables, positions, last tokens, sampling fields.
Its layout is in kernels/state.py, the host's mirror of it in batch.py."""

from __future__ import annotations

import hashlib

import torch

from shoal.attention.step_input import SharedPrefixes
from shoal.kernels.state import StateLayout


class BatchState:
    """The flat state with its parts as views, and the tensors that steps make from it. All are int32, and
    stay where they are as long as the engine lives, because graphs have captured their addresses."""

    def __init__(self, layout: StateLayout, device: torch.device, queries: int = 1) -> None:
        """`queries`: the most tokens of a decode in one step."""
        size = layout.num_rows
        self.flat = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self.active_B = layout.active(self.flat)
        self.table = layout.table(self.flat)
        self.block_tables = layout.block_tables(self.flat)
        self.prefixes = SharedPrefixes(*layout.prefixes(self.flat))
        # A decode step's inputs, which begin_decode fills in from the rows of active_B.
        self.tokens_B = torch.zeros(size, dtype=torch.int32, device=device)
        self.positions_B = torch.zeros(size, dtype=torch.int32, device=device)
        self.kv_lens_B = torch.zeros(size, dtype=torch.int32, device=device)
        # The tokens of the last step, and one that is nobody's: what is written at index -1 ends up there.
        self.sampled_S = torch.zeros(size * queries + 1, dtype=torch.int32, device=device)
        # In a decode step sequence i has token i.
        self.query_starts_B = torch.arange(size + 1, dtype=torch.int32, device=device)

    def reset(self) -> None:
        """Makes the batch empty: no row is active."""
        self.flat.zero_()
        self.active_B.fill_(-1)

    def digest(self) -> str:
        """A hash of all rows. It is the same on all ranks between steps."""
        rows = self.table[:-1]  # the last row is nobody's
        return hashlib.sha256(rows.cpu().numpy().tobytes()).hexdigest()
