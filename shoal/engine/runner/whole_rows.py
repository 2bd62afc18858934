"""`WholeRowSampler`: samples once more where whole rows of logits are needed: for sequences with options
(penalties, bias, allowed and banned tokens) or a grammar, and with tensor parallelism where a filter may keep
any number of tokens.

The step itself samples for every row, and is the same graph whether a row has options or not. Whole rows are
then copied, changed and sampled in chunks of a few sizes. Each size has a graph, so that a chunk costs the
host one launch. Masks of grammars come from the host and are applied before it. A sample depends on logits,
seed and position alone, so rows that are not changed keep their tokens.

K rows of a chunk · S sampled sequences · V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from shoal.engine.runner.batch_state import BatchState
from shoal.engine.runner.graphs import StepGraphs
from shoal.engine.runner.sampler_options import (
    MOST_WHOLE_ROWS,
    RowStart,
    SamplerOptions,
    WantedRow,
    whole_row_chunks,
)
from shoal.engine.runner.small_ops import few_threads, upload
from shoal.kernels.ops import Ops
from shoal.kernels.sampling.row_options import Option, RowOptions, SamplePlaces, WholeRow
from shoal.kernels.state import Field
from shoal.layers.embedding import Vocabulary
from shoal.layers.parallel import TensorParallel

CAPTURED_SIZES = 1, 8, MOST_WHOLE_ROWS


def whole_row_sizes(max_num_seqs: int, captures: bool) -> Sequence[int]:
    """Returns the sizes that a chunk may have, small to large. On a GPU (`captures`) they are few, as each is
    a graph, and a variant of kernels."""
    most = min(MOST_WHOLE_ROWS, max_num_seqs)
    return sorted({min(size, most) for size in CAPTURED_SIZES}) if captures else range(1, most + 1)


def decode_places(state: BatchState, num_rows: int) -> SamplePlaces:
    """Returns the places of a decode step without drafts."""
    return SamplePlaces(state.active_B[:num_rows], state.positions_B[:num_rows], state.tokens_B[:num_rows])


@dataclass(frozen=True, slots=True)
class StepWholeRows:
    """The tokens of a step that are sampled from whole rows."""

    on_device: torch.Tensor  # the step's section `whole_rows`
    on_host: np.ndarray  # the same
    num_rows: int  # without padding
    places: SamplePlaces  # for all samples
    options: SamplerOptions | None  # rank 0 alone has them


class WholeRowSampler:
    """One rank's part. Rank 0 alone changes logits and samples; the other ranks send it their columns, and
    receive its tokens."""

    def __init__(
        self,
        ops: Ops,
        tp: TensorParallel,
        state: BatchState,
        head: Vocabulary,
        sizes: Sequence[int],
        block_size: int,
        keeps_blocks: bool = True,
    ) -> None:
        """`sizes`: the sizes of chunks, small to large. `block_size`: of the first block table, by which the
        tokens of rows are stored. `keeps_blocks` False: that table does not keep all blocks of a sequence, so
        tokens have a table of their own, in which each row has as many blocks as the longest sequence."""
        self.ops, self.tp, self.state, self.head, self.sizes = ops, tp, state, head, sizes
        self.device = state.flat.device
        num_rows, most = state.table.shape[0], sizes[-1]
        with torch.device(self.device):
            fields_RO = torch.zeros(num_rows, len(Option), dtype=torch.int32)
            addresses_R = torch.zeros(num_rows, dtype=torch.int64)
            tables_RM, num_blocks = state.block_tables[0], 1
            if not keeps_blocks:
                num_blocks = tables_RM.numel() if tp.rank == 0 else 1
                tables_RM = torch.arange(tables_RM.numel(), dtype=torch.int32).view(tables_RM.shape)
            history = torch.zeros(num_blocks, block_size, dtype=torch.int32)
            most_counted = most if tp.rank == 0 and self.device.type == "cuda" else 0
            counts_KV = torch.zeros(most_counted, head.vocab_size, dtype=torch.int32)
            self.options = RowOptions(fields_RO, addresses_R, tables_RM, history, counts_KV)
            # A captured chunk reads and writes this memory; -1: no step has brought a chunk yet.
            self.inputs = torch.full((len(WholeRow) * most,), -1, dtype=torch.int32)
            self._no_lists = torch.zeros(0, dtype=torch.int32)
            self.tokens_K = torch.zeros(most, dtype=torch.int32)
            self.logits_KV = torch.empty(most if tp.rank == 0 else 0, head.vocab_size, dtype=torch.float32)
        self.graphs: StepGraphs[int] | None = None
        self._shares_blocks = keeps_blocks

    # The start

    def allocate(self, num_blocks: int) -> None:
        """Makes room for the tokens of a cache of `num_blocks` blocks."""
        if self.tp.rank == 0 and self._shares_blocks:
            _, block_size = self.options.history.shape
            self.options.history = torch.zeros(num_blocks, block_size, dtype=torch.int32, device=self.device)

    @property
    def bytes_of_block(self) -> int:
        """Bytes that the tokens of one block of the cache take."""
        return torch.int32.itemsize * self.options.history.shape[1] if self._shares_blocks else 0

    def new_graphs(self) -> StepGraphs[int]:
        """The graphs of the chunks, which are not captured yet. Ranks that only take tokens have none."""
        sizes = [] if self.tp.rank else list(self.sizes)
        return StepGraphs(self.draw_chunk, sizes[::-1], nullcontext)

    def capture(self, graphs: StepGraphs[int]) -> None:
        """Captures these graphs, which `sample` uses from then on. Their memory pool is their own, because a
        step's logits, which log-probabilities still read, lie in the pool of the other graphs unowned."""
        self.graphs = graphs
        graphs.capture(torch.cuda.graph_pool_handle())

    def rehearse(self, logits_SV: torch.Tensor) -> None:
        """Launches what `sample` launches outside of graphs."""
        for size in (self.sizes[0], self.sizes[-1]):
            none_K = torch.full((size,), -1, dtype=torch.int32, device=self.device)
            inputs_XK = self._inputs_of(size)
            self.ops.locate_rows(none_K, none_K, none_K, none_K, none_K, inputs_XK)
            self._take(logits_SV, inputs_XK[WholeRow.SAMPLE])
            if self.tp.rank == 0:
                self.draw_chunk(size)

    # Sequences

    def start_rows(self, options: SamplerOptions) -> None:
        """Sends the options, and tokens, of all sequences that have just got their rows: in one copy, and one
        more for each sequence with lists."""
        starts = options.starts
        if not starts:
            return
        lists, addresses = {}, []
        for one in starts:
            lists[one.row] = self._no_lists
            if len(one.lists):
                lists[one.row] = upload(torch.from_numpy(one.lists), self.device)
            addresses.append(lists[one.row].data_ptr())
        block_size = self.options.history.shape[1]
        blocks = [self._blocks_of(one) for one in starts]
        tokens = [_padded(one.tokens, len(own) * block_size) for one, own in zip(starts, blocks)]
        parts = [
            np.array(addresses, np.int64).view(np.int32),
            np.array([one.row for one in starts], np.int32),
            np.concatenate([one.fields for one in starts]),
            np.concatenate(blocks),
            np.concatenate(tokens),
        ]
        on_device = upload(torch.from_numpy(np.concatenate(parts)), self.device)
        addresses_N, rows_N, fields_NO, blocks_M, tokens_M = on_device.split([len(part) for part in parts])
        fields_NO = fields_NO.view(len(starts), len(Option))
        self.options.start(lists, fields_NO, rows_N.long(), addresses_N.view(torch.int64))
        if len(blocks_M):
            self.options.write_tokens(blocks_M.long(), tokens_M)

    def _blocks_of(self, start: RowStart) -> np.ndarray:
        """Returns the blocks of the tokens of a sequence, int32."""
        if self._shares_blocks:
            return np.array(start.block_ids, np.int32)
        num_blocks = -(-len(start.tokens) // self.options.history.shape[1])
        return start.row * self.options.block_tables_RM.shape[1] + np.arange(num_blocks, dtype=np.int32)

    def memory_is_new(self) -> None:
        """To be called when the memory of the region has been released and taken again, or when a step was
        interrupted between two kernels."""
        self.options.counts_KV.zero_()

    def forget(self) -> None:
        """Drops all options. This is for when no sequence has a row: each one that gets a row again brings
        them."""
        self.options.lists.clear()

    # Steps

    def sample(self, logits_SV: torch.Tensor, rows: StepWholeRows) -> None:
        """Draws for a step's whole rows, with the results where `Sampler.sample` writes them."""
        for inputs_XK, samples in self._chunks(rows):
            size = inputs_XK.shape[1]
            self._take(logits_SV, inputs_XK[WholeRow.SAMPLE])
            if self.tp.rank == 0:
                self._mask(rows.options, samples)
                if self.graphs is None:
                    self.draw_chunk(size)
                else:
                    self.graphs.graphs[size].replay()
            if self.tp.size > 1:
                self._share(inputs_XK)

    def draw_chunk(self, size: int) -> tuple[torch.Tensor, ...]:
        """Changes the first `size` rows of `logits_KV` by their options and samples from them, as `inputs`
        says. A graph captures this."""
        samples_K, rows_K, positions_K, before_K, options_K = self._inputs_of(size)
        logits_KV, tokens_K = self.logits_KV[:size], self.tokens_K[:size]
        self.ops.store_tokens(options_K, positions_K, before_K, self.options)
        self._shape(logits_KV, options_K, positions_K)
        self.ops.sample(logits_KV, rows_K, positions_K, self.state.table, tokens_K)
        self.ops.put_samples(samples_K, tokens_K, self.state.sampled_S)
        return ()

    def shaped(
        self, logits_SV: torch.Tensor, rows: StepWholeRows
    ) -> Iterator[tuple[np.ndarray, torch.Tensor]]:
        """Yields samples and the logits from which `sample` took them, chunk after chunk. The logits are
        float32, and valid until the next chunk. Rank 0 alone may call this, with whole logits."""
        for inputs_XK, samples in self._chunks(rows):
            samples_K, _, positions_K, _, options_K = inputs_XK
            logits_KV = self.logits_KV[: len(samples_K)]
            self.ops.take_rows(logits_SV, samples_K, logits_KV)
            self._mask(rows.options, samples)
            self._shape(logits_KV, options_K, positions_K)
            yield samples, logits_KV[: len(samples)]

    def _inputs_of(self, size: int) -> torch.Tensor:
        """Returns the inputs of a chunk, [WholeRow, size]."""
        return self.inputs[: len(WholeRow) * size].view(-1, size)

    def _chunks(self, rows: StepWholeRows) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
        """Yields the inputs of each chunk, which the next one overwrites, and its samples, without
        padding."""
        start, rest = 0, rows.num_rows
        for size in whole_row_chunks(rows.num_rows, self.sizes):
            end = start + len(WantedRow) * size
            samples_K, shaped_K = rows.on_device[start:end].view(-1, size)
            inputs_XK = self._inputs_of(size)
            self.ops.locate_rows(samples_K, shaped_K, *rows.places, inputs_XK)
            yield inputs_XK, rows.on_host[start : start + min(size, rest)]
            start, rest = end, rest - size

    def _take(self, logits_SV: torch.Tensor, samples_K: torch.Tensor) -> None:
        """Copies a chunk's rows into rank 0's `logits_KV`."""
        size = len(samples_K)
        if self.tp.size == 1:
            with self._few_threads(size):
                self.ops.take_rows(logits_SV, samples_K, self.logits_KV[:size])
            return
        own_KV = logits_SV.new_empty(size, logits_SV.shape[1])
        self.ops.take_rows(logits_SV, samples_K, own_KV)
        whole_KV = self.head.whole(own_KV)
        if self.tp.rank == 0:
            self.logits_KV[:size].copy_(whole_KV)

    def _share(self, inputs_XK: torch.Tensor) -> None:
        """Gives rank 0's tokens to the other ranks."""
        tokens_K = self.tokens_K[: inputs_XK.shape[1]]
        self.tp.broadcast(tokens_K)
        if self.tp.rank:  # Padding of -1 lands in the last row and the last sample, which are nobody's.
            samples_K, rows_K, positions_K, _, _ = inputs_XK.long()
            self.state.sampled_S[samples_K] = tokens_K
            self.state.table[rows_K, Field.TOKEN] = tokens_K
            self.state.table[rows_K, Field.POSITION] = positions_K.int() + 1

    def _mask(self, options: SamplerOptions | None, samples: np.ndarray) -> None:
        """Bans the tokens that the grammars of a chunk's samples do not allow. One asynchronous copy is
        enough, as each mask follows its row's place."""
        if options is None or options.masks is None:
            return
        place = {sample: k for k, sample in enumerate(samples.tolist())}
        chosen = [i for i, row in enumerate(options.grammars) if row.sample in place]
        if not chosen:
            return
        places = np.array([[place[options.grammars[i].sample]] for i in chosen], np.int32)
        packed = upload(
            torch.from_numpy(np.concatenate([places, options.masks[chosen]], axis=1)), self.device
        )
        with self._few_threads(len(samples)):
            self.ops.keep_bits(self.logits_KV, packed[:, 0].long(), packed[:, 1:])

    def _shape(self, logits_KV: torch.Tensor, options_K: torch.Tensor, positions_K: torch.Tensor) -> None:
        """Applies the options in vLLM's order: allowed ids, bias, penalties, and bans last, because nothing
        may lift them."""
        with self._few_threads(len(logits_KV)):
            self.ops.keep_allowed(logits_KV, options_K, self.options)
            self.ops.add_bias(logits_KV, options_K, self.options)
            self.ops.penalize(logits_KV, options_K, positions_K, self.options)
            self.ops.ban_stops(logits_KV, options_K, positions_K, self.options)
            self.ops.ban_words(logits_KV, options_K, positions_K, self.options)

    def _few_threads(self, num_rows: int) -> AbstractContextManager[None]:
        return few_threads(self.device, num_rows * self.logits_KV.shape[1])


def _padded(tokens: list[int], size: int) -> np.ndarray:
    padded = np.zeros(size, np.int32)
    padded[: len(tokens)] = tokens
    return padded
