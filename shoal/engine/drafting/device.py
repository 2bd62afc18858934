"""Speculation on one rank: `Drafting` has the drafts of all rows, lets a step verify them, and looks up those
of the next step. sender.py is its counterpart on the host, and scheduling/draft_lengths.py chooses how many
drafts a step verifies.

A sample depends on (seed, position) alone. So a step samples at the position of each draft as well, and a
draft is accepted if it is what was sampled there: the tokens are the same as without drafts.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.attention.step_input import SharedPrefixes, StepInput
from shoal.config import ResolvedConfig, SpeculativeConfig
from shoal.engine.drafting.earlier_answers import MOST_EARLIER, EarlierAnswers
from shoal.engine.drafting.head_clock import HeadClock
from shoal.engine.drafting.head_drafter import HeadDrafter
from shoal.engine.drafting.rank_head import RankHead
from shoal.engine.drafting.sender import DraftSender
from shoal.engine.drafting.step_sizes import draft_sizes
from shoal.engine.scheduling.draft_lengths import DraftReport
from shoal.kernels.draft_spans import DraftSpans
from shoal.kernels.drafting.draft_rows import (
    MOST_DECODES,
    REPORT_SIZE,
    DraftRows,
    LookUp,
    Report,
    SuffixLookUp,
)
from shoal.kernels.ops import Ops
from shoal.kernels.sampling.row_options import SamplePlaces
from shoal.kernels.state import Field, StateLayout

# Tokens of a sequence, its last ones, in which drafts are looked up. A look-up reads 4 bytes of each, where
# attention reads kilobytes.
MOST_HISTORY = 1 << 16
MOST_PARTS = 64  # numbers of decodes and of their tokens whose parts of the step's tensors are kept
HELD = {0: None, 1: False, 2: True}  # Report.FIRST
OPS = {"cuda": "shoal.kernels.drafting.triton_ops", "cpu": "shoal.kernels.cpu.drafting"}


def history_length(options: SpeculativeConfig, max_model_len: int) -> int:
    """Returns the number of a row's last tokens that the device keeps. A head reads a whole prompt there,
    chunk by chunk. Earlier answers come before them."""
    if options.has_head:
        return max_model_len
    return min(max_model_len, MOST_HISTORY) + (
        MOST_EARLIER if options.suffix_decoding_max_cached_requests else 0
    )


def bytes_of_row(options: SpeculativeConfig, max_model_len: int) -> int:
    """Returns the bytes of a row's tokens and drafts on the device."""
    num_tokens = options.num_speculative_tokens + history_length(options, max_model_len)
    return num_tokens * torch.int32.itemsize


def _parameters_of(options: SpeculativeConfig, most: int) -> LookUp | SuffixLookUp:
    if options.method != "suffix":
        return LookUp(most, options.prompt_lookup_min, options.prompt_lookup_max)
    return SuffixLookUp(
        most,
        options.suffix_decoding_max_tree_depth,
        options.suffix_decoding_max_spec_factor,
        options.suffix_decoding_min_token_prob,
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of a step's tensors that belong to its decodes."""

    token_ids_T: torch.Tensor
    positions_T: torch.Tensor
    rows_T: torch.Tensor
    sampled_T: torch.Tensor
    query_starts_S: torch.Tensor
    active_B: torch.Tensor
    kv_lens_B: torch.Tensor
    starts_B: torch.Tensor
    verified_B: torch.Tensor
    unverified_B: torch.Tensor
    pending_B: torch.Tensor
    report_BX: torch.Tensor


class Drafting:
    """Everything stays where it is as long as the engine lives, as graphs have captured it."""

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
        sizes: Iterable[int] = (),
    ) -> None:
        """`table`, `active_B`, `sampled_S` and `block_tables`: parts of the rank's BatchState. `drafter`:
        None: drafts are looked up. `sizes`: the numbers of tokens that decodes may have, where these are
        few."""
        self._drafter, self._sizes = drafter, [1, *sizes]
        self._on_gpu = device.type == "cuda"
        # The host's, which rank 0 alone fills. None: drafts are looked up in a sequence's own tokens alone.
        num_answers = options.suffix_decoding_max_cached_requests
        self.earlier = EarlierAnswers(num_answers) if num_answers else None
        self.clock = HeadClock(runs=drafter is not None and not self._on_gpu)
        # A GPU's process must not compile the C library, and a CPU's must not import Triton.
        self._ops: Any = importlib.import_module(OPS[device.type])
        self.queries = options.queries
        self.table, self._active_B, self._sampled_S = table, active_B, sampled_S
        self._has_spans = False  # recurrent layers need them
        self._block_tables = block_tables
        num_rows, size = table.shape[0], active_B.shape[0]
        most = options.num_speculative_tokens
        self._parameters = _parameters_of(options, most)
        with torch.device(device):
            self.rows = DraftRows(
                torch.zeros(num_rows, most, dtype=torch.int32),
                torch.zeros(num_rows, history_length(options, max_model_len), dtype=torch.int32),
                torch.zeros(num_rows, dtype=torch.int32),
            )
            self._tokens = torch.zeros(3, size * self.queries, dtype=torch.int32)
            self._kv_lens_B = torch.zeros(size, dtype=torch.int32)
            # For each of the step's decodes: the position of TOKEN, the number of drafts that the step
            # verifies, and the first draft if it verifies none.
            self._starts_B, self._verified_B, self._unverified_B = torch.zeros(3, size, dtype=torch.int32)
            self._pending_B = torch.zeros(size, dtype=torch.int32)
            self._report_SX = torch.zeros(size, REPORT_SIZE + self.queries + most, dtype=torch.int32)
            self._query_starts = {
                n: torch.arange(0, size * n + 1, n, dtype=torch.int32) for n in range(1, self.queries + 1)
            }
        self._known_parts: dict[tuple[int, int], _Parts] = {}
        self._step: StepInput  # the last decode step that was made
        self._captured: dict[Hashable, StepInput] = {}  # steps of graphs whose hidden states a head reads

    def new_sender(self, layout: StateLayout) -> DraftSender:
        """Returns its counterpart on the host, for rows as they are at the start."""
        return DraftSender(layout, self.rows.history_RL.shape[1], self.earlier)

    def spans(self) -> DraftSpans:
        """Returns the spans of the step's decodes, which `decode_step` and `begin_mixed` fill in from now
        on."""
        self._has_spans = True
        return DraftSpans(self._starts_B, self._verified_B, self._pending_B, self.queries)

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
        own = self._parts(len(rows_B), queries)
        self._begin(rows_B, own, own.token_ids_T, own.positions_T, own.rows_T, own.kv_lens_B)
        self._step = StepInput(
            token_ids_T=own.token_ids_T,
            positions_T=own.positions_T,
            rows_T=own.rows_T,
            rows_S=rows_B,
            query_starts_S=own.query_starts_S,
            kv_lens_S=own.kv_lens_B,
            block_tables=self._block_tables,
            num_decodes=len(own.kv_lens_B),
            max_kv_len=max_kv_len,
            queries=queries,
            prefixes=prefixes,
        )
        return self._step

    def places(self, num_decodes: int, queries: int) -> SamplePlaces:
        """Returns the places of the last decode step."""
        own = self._parts(num_decodes, queries)
        return SamplePlaces(own.rows_T, own.positions_T, own.token_ids_T)

    def begin_mixed(self, num_decodes: int, queries: int, sections: dict[str, torch.Tensor]) -> None:
        """Fills in the tokens of the decodes in a mixed step's sections."""
        own, parts = slice(num_decodes * queries), self._parts(num_decodes, queries)
        tokens = (sections[name][own] for name in ("token_ids", "positions", "token_rows"))
        self._begin(sections["rows"][:num_decodes], parts, *tokens, sections["kv_lens"][:num_decodes])
        sections["sample_rows"][own] = sections["token_rows"][own]
        sections["sample_positions"][own] = sections["positions"][own]
        if self._has_spans:
            self._pending_B[num_decodes:] = 0  # a captured step may have further places

    def _begin(self, rows_B: torch.Tensor, own: _Parts, *outs: torch.Tensor) -> None:
        begun = own.starts_B, own.verified_B, own.unverified_B, own.pending_B
        self._ops.begin_verification(rows_B, self.table, self.rows, *outs, *begun)

    def _parts(self, num_decodes: int, queries: int) -> _Parts:
        """The parts of this many decodes with this many tokens each. They are kept, as slicing takes longer
        than the work on a CPU."""
        found = self._known_parts.get((num_decodes, queries))
        if found is None:
            if len(self._known_parts) == MOST_PARTS:
                self._known_parts.clear()
            found = self._known_parts[num_decodes, queries] = self._make_parts(num_decodes, queries)
        return found

    def _make_parts(self, num_decodes: int, queries: int) -> _Parts:
        token_ids_T, positions_T, rows_T = self._tokens[:, : num_decodes * queries]
        of_decodes = (
            self._active_B,
            self._kv_lens_B,
            self._starts_B,
            self._verified_B,
            self._unverified_B,
            self._pending_B,
            self._report_SX,
        )
        return _Parts(
            token_ids_T,
            positions_T,
            rows_T,
            self._sampled_S[: num_decodes * queries],
            self._query_starts[queries][: num_decodes + 1],
            *(tensor[:num_decodes] for tensor in of_decodes),
        )

    def report(
        self,
        sizes: tuple[int, int, int],
        sections: dict[str, torch.Tensor],
        ended: bool,
        after_layer: Callable[[int], None] | None,
        head_rests: bool,
    ) -> torch.Tensor | None:
        """Ends a step of `sizes` (decodes, queries, samples), unless its graph has `ended` it already.
        `sections`: a mixed step's. `after_layer` is notified of a head's layers.

        Returns the report, int32 [sequences that are sampled from, X] (draft_rows.py). None: there are so
        many sequences that none gets drafts, and each has the one token that was sampled."""
        num_decodes, queries, num_samples = sizes
        if not ended:
            self.end(num_decodes, queries, num_samples, sections, head_rests)
        if after_layer is not None and self._drafter is not None:
            for layer in self._drafter.head.layers:
                after_layer(layer)
        num_seqs = num_decodes + num_samples - num_decodes * queries
        return self._report_SX[:num_seqs] if self._looks_up(num_seqs) else None

    def _looks_up(self, num_seqs: int) -> bool:
        return not self._on_gpu or num_seqs <= MOST_DECODES

    def end(
        self,
        num_decodes: int,
        queries: int,
        num_samples: int,
        sections: dict[str, torch.Tensor],
        head_rests: bool = False,
    ) -> None:
        """Accepts drafts by the step's samples, and looks up the next ones, or has the head make them unless
        it rests."""
        own = self._parts(num_decodes, queries)
        token_ids, samples, report_SX, table = own.token_ids_T, own.sampled_T, own.report_BX, self.table
        rows, starts, own_samples = own.active_B, own.starts_B, num_decodes * queries
        if "rows" in sections:  # a mixed step
            token_ids, rows = sections["token_ids"], sections["rows"][:num_decodes]
        if num_samples > own_samples:  # after the decodes come prefills
            others = slice(own_samples, num_samples)
            rows = torch.cat((rows, sections["sample_rows"][others]))
            starts = torch.cat((starts, sections["sample_positions"][others]))
            samples, report_SX = self._sampled_S[:num_samples], self._report_SX[: len(rows)]
        self._ops.accept(
            samples,
            token_ids,
            rows,
            starts,
            own.verified_B,
            own.unverified_B,
            num_decodes,
            queries,
            table,
            self.rows,
            report_SX,
        )
        looks_up = self._looks_up(len(rows))
        if self._drafter is not None:
            with self.clock.measure():
                most = None if looks_up else 0
                counts_S = 0 if head_rests else self._drafter.propose(rows, self.rows, most)
            report_SX[:, Report.NUM_DRAFTS] = table[rows.long(), Field.NUM_DRAFTS] = counts_S
            report_SX[:, -self.rows.drafts_RK.shape[1] :] = self.rows.drafts_RK[rows.long()]
        elif looks_up:
            self._ops.look_up(rows, table, self.rows, self._parameters, report_SX)

    # Graphs

    def capture_end(self, key: Hashable, rows: int, queries: int) -> tuple[torch.Tensor, ...]:
        """Ends the decode step that has just been made, inside of its graph. Returns as `captured`."""
        outputs = self.captured(key, self._step)
        self.end(rows, queries, rows * queries, {})
        return outputs

    def captured(self, key: Hashable, step: StepInput) -> tuple[torch.Tensor, ...]:
        """Returns the further outputs of a graph of `step`, which `replayed` needs."""
        if self._drafter is None:
            return ()
        states = self._drafter.head.states
        states.begin_without_layers(step)
        self._captured[key] = step
        return (states.states_TX,)

    def replayed(self, key: Hashable, outputs: Sequence[torch.Tensor]) -> None:
        """Prepares an `end` after a graph, whose outputs these are."""
        if self._drafter is not None:
            self._drafter.resume(self._captured[key], outputs[-1])

    # The start

    def rehearse(self) -> None:
        """Launches the kernels of an eager step, for padding."""
        entry = torch.tensor([self.rows.history_RL.shape[0] - 1, 0, 1, 0], dtype=torch.int32)
        self._ops.write_histories(entry.to(self.table.device), self.rows)
        rows_B = torch.full_like(self._kv_lens_B[:1], -1)
        for queries in self._sizes:
            own = self._parts(1, queries)
            self._begin(rows_B, own, own.token_ids_T, own.positions_T, own.rows_T, own.kv_lens_B)
            ins = own.sampled_T, own.token_ids_T, rows_B, own.starts_B, own.verified_B, own.unverified_B
            self._ops.accept(*ins, 1, queries, self.table, self.rows, own.report_BX)
        if self._drafter is None:
            self._ops.look_up(rows_B, self.table, self.rows, self._parameters, own.report_BX)

    def rehearse_head(self, step: StepInput) -> None:
        """Runs a head, if there is one, after a rehearsal's step: it takes memory and time as the model
        does."""
        if self._drafter is not None:
            self._drafter.head.states.begin_without_layers(step)
            self._drafter.propose(step.rows_S, self.rows)


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


def build_drafting(
    config: ResolvedConfig,
    head: RankHead | None,
    ops: Ops,
    caches: Callable[[], Sequence[Any]],
    state: tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]],
) -> Drafting | None:
    """Returns the speculation of a rank, as `config` says. `caches` returns all layers' caches; `state`: the
    parts of the BatchState that Drafting takes. None: without speculation."""
    options = config.speculative
    if options is None:
        return None
    table, drafter = state[0], None
    if head is not None:
        drafter = HeadDrafter(head, ops, table, caches, options.num_speculative_tokens)
    sizes = draft_sizes(config) or ()
    return Drafting(options, *state, config.max_model_len, table.device, drafter, sizes)
