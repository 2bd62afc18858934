"""`BatchBuilder`: packs a StepPlan into the one int32 buffer that a step sends to the device (and to every
rank). scheduler.py makes the plan, steps.py reads the buffer, kernels/state.py says what its addresses mean.

The batch state lives on the device, in rows that stay put while a sequence runs. `BatchBuilder` keeps the
host's mirror of what the device holds, and sends differences: (address, value) pairs for the flat state. If
any sequence computes its prompt, the step's tokens follow. There is no torch here.
"""

from __future__ import annotations

import functools
from collections import abc
from collections.abc import Iterable

import numpy as np

from shoal.engine.drafting.sender import DraftSender
from shoal.engine.runner.decode_groups import DecodePrefixes
from shoal.engine.runner.packed_step import MixedShape, StepHeader, pack, pack_copies
from shoal.engine.runner.sampler_options import (
    MOST_WHOLE_ROWS,
    RowNeeds,
    SamplerOptions,
    encode_count,
    more,
    num_prompt_targets,
    pack_whole_rows,
    prompt_sections,
    sample_options,
    start_options,
)
from shoal.engine.scheduling.scheduler import ScheduledSeq, StepPlan
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.state import FIELDS, Field, StateLayout, seed_words
from shoal.kv.groups import NO_BLOCK

INT32_MAX = 2**31 - 1


@functools.lru_cache(maxsize=4096)  # Most requests ask for one of a few values.
def float_bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


class BatchBuilder:
    """The host's mirror of the device's batch state. `build` must see every plan, in order."""

    def __init__(
        self,
        layout: StateLayout,
        block_size: int,
        share_from: int | None = None,
        mixed_shapes: Iterable[MixedShape] = (),
        whole_row_sizes: abc.Sequence[int] = range(1, MOST_WHOLE_ROWS + 1),
        splits_sampling: bool = False,
        drafts: DraftSender | None = None,
    ) -> None:
        """`block_size`: the tokens of a block of the first table. `share_from`: the fewest decodes for which
        prefix groups are formed; None: never. `mixed_shapes`: shapes of the captured mixed steps, small to
        large. `whole_row_sizes`: sizes of the chunks in which whole rows are sampled, small to large.
        `splits_sampling`: several ranks sample together. `drafts`: None without speculation."""
        self.whole_row_sizes = whole_row_sizes
        self.splits_sampling, self.drafts = splits_sampling, drafts
        self.mixed_shapes = mixed_shapes
        self.layout, self.block_size = layout, block_size
        self.prefixes = None if share_from is None else DecodePrefixes(layout, block_size, share_from)
        self.active = np.full(layout.num_rows, -1, np.int32)  # the device's numbers at active_address
        # The sequence whose fields each row holds, and at which of its admissions they were sent.
        self.owner: list[tuple[Sequence, int] | None] = [None] * layout.num_rows
        self.row_addresses = [layout.row_address(row) for row in range(layout.num_rows)]
        # For each row, the tokens for which the device has blocks, and how many entries of each table it has.
        self.rooms = [0] * layout.num_rows
        self.num_sent = [[0] * layout.num_tables for _ in range(layout.num_rows)]
        self.needs = [RowNeeds(False, 0)] * layout.num_rows

    def build(self, plan: StepPlan, graph_size: int | None = None) -> tuple[np.ndarray, SamplerOptions]:
        """The packed step, and the sampler's options. `graph_size`: how many rows the step is padded to if
        every sequence decodes; rows after the last decode become -1."""
        addresses: list[int] = []
        values: list[int] = []
        options = SamplerOptions()
        sample = -1
        whole: list[tuple[int, int]] = []  # the fields of WantedRow
        num_logprobs: int | None = None
        num_prompt_logprobs: int | None = None
        for i, entry in enumerate(plan.scheduled):
            if self.rooms[entry.row] != entry.seq.room or self.owner[entry.row] != (
                entry.seq,
                entry.seq.num_admissions,
            ):
                self._update_row(entry, addresses, values, options)
            wanted = entry.seq.request.params.prompt_logprobs
            if wanted is not None and num_prompt_targets(entry):
                num_prompt_logprobs = more(num_prompt_logprobs, wanted)
            if entry.samples:
                sample += plan.queries if i < plan.num_decodes else 1
                num_samples = entry.num_tokens if i < plan.num_decodes else 1
                samples = range(sample + 1 - num_samples, sample + 1)  # the last places of a decode
                if entry.seq.special:
                    sample_options(entry, samples, options)
                    num_logprobs = more(num_logprobs, entry.seq.request.params.logprobs)
                whole += self.needs[entry.row].whole_rows(entry.seq, samples)
        decode_only = plan.num_decodes == len(plan.scheduled)
        decode_rows = np.array([entry.row for entry in plan.scheduled[: plan.num_decodes]], np.int32)
        if decode_only:
            self._update_active(decode_rows, graph_size or plan.num_decodes, addresses, values)
        if self.prefixes is not None:
            self.prefixes.update(decode_rows, addresses, values)
        none = np.zeros(0, np.int32)
        histories = none if self.drafts is None else self.drafts.finish(plan, addresses, values)
        states, restores_size = (none, 0) if plan.copies is None else pack_copies(plan.copies)
        sections = {
            "addresses": np.array(addresses, np.int32),
            "values": np.array(values, np.int64).astype(np.int32),
            "whole_rows": pack_whole_rows(whole, self.whole_row_sizes),
            "states": states,
            "histories": histories,
        }
        if not decode_only:
            sections |= self._token_sections(plan)
        header = StepHeader(
            num_updates=len(addresses),
            num_seqs=len(plan.scheduled),
            num_decodes=plan.num_decodes,
            num_tokens=plan.num_tokens if decode_only else len(sections["token_ids"]),
            num_samples=sample + 1,
            max_kv_len=max(entry.start + entry.num_tokens for entry in plan.scheduled),
            decode_only=decode_only,
            fresh_prefills=all(entry.start == 0 for entry in plan.scheduled[plan.num_decodes :]),
            num_whole_rows=len(whole),
            num_prompt_logits=0 if decode_only else len(sections["prompt_targets"]),
            num_decode_groups=0 if self.prefixes is None else self.prefixes.num_groups,
            logprobs=encode_count(num_logprobs),
            prompt_logprobs=encode_count(num_prompt_logprobs),
            whole_rows_size=len(sections["whole_rows"]),
            states_size=len(states),
            restores_size=restores_size,
            queries=plan.queries,
            histories_size=len(histories),
            head_rests=plan.head_rests,
        )
        if not decode_only:
            sharing = header.num_decode_groups > 0
            if (shape := self._captured_shape(plan, sharing, num_prompt_logprobs is not None)) is not None:
                sections |= shape.pad(sections, plan.num_decodes)
                header = header.with_shape(shape)
        return pack(header, sections), options

    def _captured_shape(self, plan: StepPlan, sharing: bool, wants_prompts: bool) -> MixedShape | None:
        """The smallest shape that has room for this step. None: it must run eagerly."""
        if wants_prompts or plan.queries > 1:
            return None
        size = plan.num_tokens, plan.num_decodes, len(plan.scheduled) - plan.num_decodes, sharing
        return next((shape for shape in self.mixed_shapes if shape.fits(*size)), None)

    def _update_row(
        self, entry: ScheduledSeq, addresses: list[int], values: list[int], options: SamplerOptions
    ) -> None:
        """Sends the differences of one sequence's state row: everything at its admission, later only the
        blocks that were added."""
        seq, row = entry.seq, entry.row
        base = self.row_addresses[row]
        is_new = self.owner[row] != (seq, seq.num_admissions)
        if self.drafts is not None:
            self.drafts.row_changed(seq, row, is_new, addresses, values)
        if is_new:
            self.owner[row] = (seq, seq.num_admissions)
            self.num_sent[row] = [0] * self.layout.num_tables
            if self.prefixes is not None:
                self.prefixes.place(row, seq.block_ids)
            params = seq.request.params
            self.needs[row] = start_options(seq, row, options, self.block_size, self.splits_sampling)
            low, high = seed_words(params.seed or 0)
            addresses.extend(range(base, base + len(Field)))  # The values are in the order of Field.
            values.extend(
                (
                    seq.token_ids[entry.start],
                    entry.start,
                    low,
                    high,
                    float_bits(params.temperature),
                    min(max(params.top_k, 0), INT32_MAX),
                    float_bits(params.top_p),
                    float_bits(params.min_p),
                    1,
                    0,
                    seq.room,
                    0,
                )
            )
        self.rooms[row] = seq.room
        for t, (table, sent) in enumerate(zip(seq.tables, self.num_sent[row])):
            blocks, at = table[sent:], base + FIELDS + t * self.layout.table_stride
            self.num_sent[row][t] = len(table)
            num_gone = blocks.count(NO_BLOCK)  # the first ones, which lie before a window
            addresses.extend(range(at + sent + num_gone, at + len(table)))
            values.extend(blocks[num_gone:])

    def _update_active(
        self, decode_rows: np.ndarray, size: int, addresses: list[int], values: list[int]
    ) -> None:
        wanted = np.full(size, -1, np.int32)
        wanted[: len(decode_rows)] = decode_rows
        changed = np.flatnonzero(self.active[:size] != wanted)
        self.active[:size] = wanted
        addresses.extend((changed + self.layout.active_address).tolist())
        values.extend(wanted[changed].tolist())

    @staticmethod
    def _token_sections(plan: StepPlan) -> dict[str, np.ndarray]:
        """The sections that describe tokens. A decode's tokens are -1: the device takes them from the
        sequence's row."""
        entries, decodes = plan.scheduled, plan.num_decodes
        rows = np.array([e.row for e in entries], np.int32)
        lens = np.array([e.num_tokens for e in entries], np.int32)
        kv_lens = np.array([e.start for e in entries], np.int32) + lens
        lens[:decodes] = plan.queries
        query_starts = np.zeros(len(entries) + 1, np.int32)
        np.cumsum(lens, out=query_starts[1:])
        token_ids = np.full(query_starts[-1], -1, np.int32)
        for i in range(decodes, len(entries)):
            first, end = entries[i].start, entries[i].start + entries[i].num_tokens
            token_ids[query_starts[i] : query_starts[i + 1]] = entries[i].seq.token_ids[first:end]
        positions = np.arange(len(token_ids), dtype=np.int32) + np.repeat(kv_lens - query_starts[1:], lens)
        samples = np.array([e.samples for e in entries[decodes:]], bool)
        last = (query_starts[decodes + 1 :] - 1)[samples]
        last = np.concatenate((np.arange(decodes * plan.queries, dtype=np.int32), last))
        token_rows = np.repeat(rows, lens)
        return {
            "token_ids": token_ids,
            "positions": positions,
            "token_rows": token_rows,
            "rows": rows,
            "query_starts": query_starts,
            "kv_lens": kv_lens,
            "sample_index": last,
            "sample_rows": token_rows[last],
            "sample_positions": positions[last],
        } | prompt_sections(entries, query_starts)
