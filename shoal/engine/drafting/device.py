"""Speculation on one rank: `Drafting` has the drafts of all rows, lets a step verify them, and looks up those
of the next step. sender.py is its counterpart on the host, and scheduling/draft_lengths.py chooses how many
drafts a step verifies.

A draw depends on (seed, position) alone. So a step draws at the position of each draft as well, and a draft
is accepted if it is what was drawn there: the tokens are the same as without drafts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shoal.attention.step_input import SharedPrefixes, StepInput
from shoal.config import SpeculativeConfig
from shoal.engine.drafting.head_drafter import HeadDrafter
from shoal.engine.scheduling.draft_lengths import DraftReport
from shoal.kernels.drafting.draft_rows import REPORT_SIZE, DraftRows, LookUp, Report, SuffixLookUp
from shoal.kernels.sampling.row_options import SamplePlaces
from shoal.kernels.state import Field

# Tokens of a sequence, its last ones, in which drafts are looked up. A look-up reads 4 bytes of each, where
# attention reads kilobytes.
MOST_HISTORY = 1 << 16
HELD = {0: None, 1: False, 2: True}  # Report.FIRST


def history_length(options: SpeculativeConfig, max_model_len: int) -> int:
    """Returns the number of a row's last tokens that the device keeps. A head reads a whole prompt there,
    chunk by chunk."""
    return max_model_len if options.has_head else min(max_model_len, MOST_HISTORY)


def _parameters_of(options: SpeculativeConfig, most: int) -> LookUp | SuffixLookUp:
    if options.method != "suffix":
        return LookUp(most, options.prompt_lookup_min, options.prompt_lookup_max)
    return SuffixLookUp(
        most,
        options.suffix_decoding_max_tree_depth,
        options.suffix_decoding_max_spec_factor,
        options.suffix_decoding_min_token_prob,
    )


class Drafting:
    """Everything stays where it is as long as the engine lives."""

    def __init__(
        self,
        options: SpeculativeConfig,
        table: torch.Tensor,
        active_B: torch.Tensor,
        sampled_S: torch.Tensor,
        block_tables: tuple[torch.Tensor, ...],
        max_model_len: int,
        device: torch.device,
        drafter: HeadDrafter | None = None,
    ) -> None:
        """`table`, `active_B`, `sampled_S` and `block_tables`: parts of the rank's BatchState. `drafter`:
        None: drafts are looked up."""
        self._drafter = drafter
        # Speculation runs on CPUs alone so far. A GPU's process must not compile the C library.
        from shoal.kernels.cpu import drafting as ops

        self._ops, self.queries = ops, options.queries
        self._table, self._active_B, self._sampled_S = table, active_B, sampled_S
        self._block_tables = block_tables
        num_rows, size = table.shape[0], active_B.shape[0]
        most = options.num_speculative_tokens
        self._parameters = _parameters_of(options, most)
        with torch.device(device):
            self.rows = DraftRows(
                torch.zeros(num_rows, most, dtype=torch.int32),
                torch.zeros(num_rows, history_length(options, max_model_len), dtype=torch.int32),
            )
            self._tokens = torch.zeros(3, size * self.queries, dtype=torch.int32)
            self._kv_lens_B = torch.zeros(size, dtype=torch.int32)
            # The position of TOKEN of each of the step's decodes, and how many drafts the step verifies.
            self._starts_B = torch.zeros(size, dtype=torch.int32)
            self._verified_B = torch.zeros(size, dtype=torch.int32)
            self._report_SX = torch.zeros(size, REPORT_SIZE + self.queries + most, dtype=torch.int32)
            self._query_starts = {
                n: torch.arange(0, size * n + 1, n, dtype=torch.int32) for n in range(1, self.queries + 1)
            }

    @property
    def history_length(self) -> int:
        """The number of a row's last tokens that the device keeps."""
        return self.rows.history_RL.shape[1]

    @property
    def report_size(self) -> int:
        """The int32s that a step reports of a sequence."""
        return self._report_SX.shape[1]

    def start_rows(self, entries: torch.Tensor) -> None:
        """Takes the tokens of sequences that have just got their rows (DraftSender)."""
        self._ops.write_histories(entries, self.rows)

    def decode_step(
        self, rows_B: torch.Tensor, queries: int, max_kv_len: int, prefixes: SharedPrefixes | None
    ) -> StepInput:
        """Returns the inputs of a decode step with `queries` places for tokens of each row."""
        size = len(rows_B)
        token_ids_T, positions_T, rows_T = self._tokens[:, : size * queries]
        kv_lens_B = self._kv_lens_B[:size]
        self._begin(rows_B, token_ids_T, positions_T, rows_T, kv_lens_B)
        return StepInput(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            rows_T=rows_T,
            rows_S=rows_B,
            query_starts_S=self._query_starts[queries][: size + 1],
            kv_lens_S=kv_lens_B,
            block_tables=self._block_tables,
            num_decodes=size,
            max_kv_len=max_kv_len,
            queries=queries,
            prefixes=prefixes,
        )

    def places(self, num_decodes: int, queries: int) -> SamplePlaces:
        """Returns the places of the last decode step."""
        token_ids_T, positions_T, rows_T = self._tokens[:, : num_decodes * queries]
        return SamplePlaces(rows_T, positions_T, token_ids_T)

    def begin_mixed(self, num_decodes: int, queries: int, sections: dict[str, torch.Tensor]) -> None:
        """Fills in the tokens of the decodes in an eager mixed step's sections."""
        own = slice(num_decodes * queries)
        tokens = (sections[name][own] for name in ("token_ids", "positions", "token_rows"))
        self._begin(sections["rows"][:num_decodes], *tokens, sections["kv_lens"][:num_decodes])
        sections["sample_rows"][own] = sections["token_rows"][own]
        sections["sample_positions"][own] = sections["positions"][own]

    def _begin(self, rows_B: torch.Tensor, *outs: torch.Tensor) -> None:
        token_ids_T, positions_T, rows_T, kv_lens_B = outs
        self._ops.begin_verification(
            rows_B,
            self._table,
            self.rows,
            token_ids_T,
            positions_T,
            rows_T,
            kv_lens_B,
            self._starts_B[: len(rows_B)],
            self._verified_B[: len(rows_B)],
        )

    def end(self, num_decodes: int, queries: int, sections: dict[str, torch.Tensor]) -> torch.Tensor:
        """Accepts drafts by the step's samples, and looks up the next ones. `sections`: a mixed step's.
        Returns the report, int32 [sequences that are sampled from, X] (draft_rows.py)."""
        rows, starts = self._active_B[:num_decodes], self._starts_B[:num_decodes]
        num_samples = num_decodes * queries
        if "sample_rows" in sections:  # after the decodes come prefills
            own, num_samples = slice(num_samples, None), len(sections["sample_rows"])
            rows = torch.cat((sections["rows"][:num_decodes], sections["sample_rows"][own]))
            starts = torch.cat((starts, sections["sample_positions"][own]))
        report_SX = self._report_SX[: len(rows)]
        table, sampled_N = self._table, self._sampled_S[:num_samples]
        verified_B = self._verified_B[:num_decodes]
        self._ops.accept(
            sampled_N, rows, starts, verified_B, num_decodes, queries, table, self.rows, report_SX
        )
        if self._drafter is None:
            self._ops.look_up(rows, table, self.rows, self._parameters, report_SX)
        else:
            counts_S = self._drafter.propose(rows, self.rows)
            report_SX[:, Report.NUM_DRAFTS] = table[rows.long(), Field.NUM_DRAFTS] = counts_S
        report_SX[:, REPORT_SIZE + self.queries :] = self.rows.drafts_RK[rows.long()]
        return report_SX

    def end_layers(self, after_layer: Callable[[int], None]) -> None:
        """Reports a head's layers, which run in `end`."""
        for layer in () if self._drafter is None else self._drafter.head.layers:
            after_layer(layer)


def read_reports(report: torch.Tensor) -> tuple[list[list[int]], list[DraftReport]]:
    """Returns the tokens of each sample of a step that has run, and what became of drafts."""
    lists = report.tolist()
    tokens = [ints[REPORT_SIZE : REPORT_SIZE + ints[Report.NUM_TOKENS]] for ints in lists]
    most = (report.shape[1] - REPORT_SIZE - 1) // 2  # tokens are one more than drafts
    return tokens, [
        DraftReport(
            ints[Report.NUM_VERIFIED],
            ints[Report.NUM_DRAFTS],
            HELD[ints[Report.FIRST]],
            ints[REPORT_SIZE + 1 + most :][: ints[Report.NUM_DRAFTS]],
        )
        for ints in lists
    ]
