"""`RowOptions`: what a sequence asks of its logits beyond the fields of its state row, and the tokens it has.
Each option has a pair of files here, `penalties.py` and so on: the meaning in PyTorch, and a Triton kernel.

The fields of all rows are one int32 table with the columns of `Option`, where floats are stored as their
bits. The host writes a row of it when a sequence gets that row. A row's lists of token ids are an int32
tensor of their own, as few sequences have any, and of any length.

The tokens of such a row lie in `history`, one int32 for each token of the KV cache, under the sequence's own
block table. So they have room wherever the KV has, sequences that share blocks share their tokens, and
penalties need no counts, [rows, vocabulary], which would take hundreds of megabytes.

K rows that are sampled together · V vocabulary · R state rows · O columns of Option · M blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch


class Option(IntEnum):
    """Columns of the table of fields. A list is START, where it begins among the row's lists, and COUNT."""

    REPETITION = 0  # float32; 1: off
    PRESENCE = 1  # float32; 0: off
    FREQUENCY = 2  # float32; 0: off
    NUM_PROMPT = 3  # tokens of the prompt, with which `history` begins
    READS_HISTORY = 4  # whether any option needs the tokens
    MIN_END = 5  # no stop token may have a position below this one
    STOPS_START = 6
    STOPS_COUNT = 7
    ALLOWED_START = 8
    ALLOWED_COUNT = 9  # 0: all tokens are allowed
    BIAS_START = 10  # the biased token ids, then as many float32s
    BIAS_COUNT = 11
    WORDS_START = 12  # where each bad word ends in the list of their tokens, which follows
    WORDS_COUNT = 13


class SamplePlaces(NamedTuple):
    """The places of a step's samples, int32 each."""

    rows_S: torch.Tensor  # the state row of each sample; -1: padding
    positions_S: torch.Tensor  # the position of the last token before it,
    tokens_S: torch.Tensor  # and that token


class WholeRow(IntEnum):
    """A sample that needs a whole row of logits, as kernels take it: int32s."""

    SAMPLE = 0  # its index among the step's samples; -1: padding
    ROW = 1  # its state row; -1: padding
    POSITION = 2  # the position of the last token before it,
    TOKEN = 3  # and that token
    OPTIONS = 4  # the state row if that has options, else -1


def pack_options(
    *,
    penalties: tuple[float, float, float],
    num_prompt: int,
    min_end: int,
    stops: Sequence[int],
    allowed: Sequence[int],
    bias: Mapping[int, float],
    words: Sequence[Sequence[int]],
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the fields of these options, and their lists. `penalties`: repetition, presence, frequency."""
    fields = np.zeros(len(Option), np.int32)
    fields[: Option.NUM_PROMPT] = np.array(penalties, np.float32).view(np.int32)
    fields[Option.NUM_PROMPT], fields[Option.MIN_END] = num_prompt, min_end
    has_penalties = penalties != (1.0, 0.0, 0.0)
    fields[Option.READS_HISTORY] = has_penalties or any(len(word) > 1 for word in words)
    lists: dict[Option, list[Sequence[int] | np.ndarray]] = {
        Option.STOPS_START: [stops],
        Option.ALLOWED_START: [allowed],
        Option.BIAS_START: [[*bias], np.array([*bias.values()], np.float32).view(np.int32)],
        Option.WORDS_START: [np.cumsum([len(word) for word in words], dtype=np.int32), *words],
    }
    parts, at = [], 0
    for start, columns in lists.items():
        fields[start], fields[start + 1] = at, len(columns[0])
        parts += [np.asarray(column, np.int32) for column in columns]
        at += sum(map(len, columns))
    return fields, np.concatenate(parts)


@dataclass(slots=True)
class RowOptions:
    """The options of the rows and their tokens, on the device. The last row is nobody's."""

    fields_RO: torch.Tensor  # int32; may be of an earlier sequence where a row has no options
    addresses_R: torch.Tensor  # int64: where each row's lists are; 0: it has none
    block_tables_RM: torch.Tensor
    history: torch.Tensor  # int32 [blocks, block size]
    # int32: a kernel's counts of tokens in one call, and zero between calls. PyTorch needs none.
    counts_KV: torch.Tensor
    lists: dict[int, torch.Tensor] = field(default_factory=dict)  # by row

    def start(
        self,
        lists: Mapping[int, torch.Tensor],
        fields_NO: torch.Tensor,
        rows_N: torch.Tensor,
        addresses_N: torch.Tensor,
    ) -> None:
        """Gives rows their options. `lists`: by row, at `addresses_N`. Steps in flight may still read what
        these rows had."""
        self.lists |= lists
        self.fields_RO.index_copy_(0, rows_N, fields_NO)
        self.addresses_R.index_copy_(0, rows_N, addresses_N)

    def write_tokens(self, blocks: torch.Tensor, tokens: torch.Tensor) -> None:
        """Stores tokens of sequences, which fill these blocks but for the end of each sequence's last."""
        self.history.index_copy_(0, blocks, tokens.view(-1, self.history.shape[1]))

    def rows(self, rows_K: torch.Tensor) -> Iterator[tuple[int, int, OptionsOfRow]]:
        """Yields k, row and options of each of these rows but padding (-1)."""
        for k, row in enumerate(rows_K.tolist()):
            if row >= 0:
                yield k, row, OptionsOfRow(self.fields_RO[row], self.lists[row])

    def tokens(self, row: int, end: int) -> torch.Tensor:
        """Returns the row's first `end` tokens, int32."""
        size = self.history.shape[1]
        blocks = self.block_tables_RM[row, : -(-end // size)].long()
        return self.history.index_select(0, blocks).view(-1)[:end]


class OptionsOfRow:
    """Reads the options of one row."""

    def __init__(self, fields_O: torch.Tensor, lists: torch.Tensor) -> None:
        self.fields_O, self.lists = fields_O, lists
        self.fields = fields_O.tolist()

    @property
    def reads_history(self) -> bool:
        return bool(self.fields[Option.READS_HISTORY])

    @property
    def penalties(self) -> tuple[float, float, float]:
        repetition, presence, frequency = self.fields_O[: Option.NUM_PROMPT].view(torch.float32).tolist()
        return repetition, presence, frequency

    def ids(self, start: Option) -> torch.Tensor:
        """Returns a list of token ids, int64."""
        at = self.fields[start]
        return self.lists[at : at + self.fields[start + 1]].long()
