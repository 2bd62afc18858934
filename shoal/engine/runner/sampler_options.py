"""Packs options of sampling that state rows lack (penalties, grammars, embeddings, log-probabilities), for
the rare steps with such a request. batch.py calls it."""

from __future__ import annotations

import sys
from collections import abc
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from shoal.engine.scheduling.part_state import GrammarRow
from shoal.engine.scheduling.scheduler import ScheduledSeq
from shoal.engine.scheduling.sequence import Sequence
from shoal.kernels.sampling.row_options import Option, pack_options
from shoal.kernels.sampling.split_sample import needs_whole_row
from shoal.kernels.state import MIN_TEMPERATURE


class WantedRow(IntEnum):
    """A sample that needs a whole row of logits, as the host sends it: int32s, -1 for padding. The device
    makes a WholeRow of it (kernels/sampling/row_options.py)."""

    SAMPLE = 0  # its index among the step's samples
    SHAPED = 1  # 1 if its row has options, else 0


# Whole rows are sampled in chunks of at most this number, so that they need little memory.
MOST_WHOLE_ROWS = 64


def whole_row_chunks(num_rows: int, sizes: abc.Sequence[int]) -> list[int]:
    """Returns the sizes of the chunks of a step with `num_rows` whole rows, padding included. `sizes`: what a
    chunk may have, small to large."""
    chunks = [sizes[-1]] * (num_rows // sizes[-1])
    if rest := num_rows % sizes[-1]:
        chunks.append(next(size for size in sizes if size >= rest))
    return chunks


def pack_whole_rows(rows: list[tuple[int, int]], sizes: abc.Sequence[int]) -> np.ndarray:
    """The section of these whole rows: chunk after chunk, the columns of WantedRow one after the other."""
    if not rows:
        return np.zeros(0, np.int32)
    chunks = whole_row_chunks(len(rows), sizes)
    padded = np.full((sum(chunks), len(WantedRow)), -1, np.int32)
    padded[: len(rows)] = rows
    parts = np.split(padded, np.cumsum(chunks)[:-1])
    return np.concatenate([part.T.ravel() for part in parts])


@dataclass(slots=True)
class RowStart:
    """The options of a sequence that has just got its state row. `tokens` is empty if no option reads
    them."""

    row: int
    fields: np.ndarray  # kernels/sampling/row_options.py
    lists: np.ndarray
    tokens: list[int]
    block_ids: list[int]  # the blocks that the tokens fill


@dataclass(slots=True)
class SamplerOptions:
    """Options of rank 0's sampler beyond the state rows, for the rare sequences that need them. A sample is
    an index into the step's samples. Tokens banned or allowed for a sample with a grammar are in its mask
    alone."""

    starts: list[RowStart] = field(default_factory=list)
    grammars: list[GrammarRow] = field(default_factory=list)
    # int32 [grammars, words]: a bit for each token, set if it may be sampled (engine/scheduling/grammar.py)
    masks: np.ndarray | None = None
    embeds: list[int] = field(default_factory=list)  # samples whose hidden state is requested
    # samples with log-probabilities whose tokens are restricted by top_k, top_p or min_p
    filtered: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.starts or self.grammars or self.embeds or self.filtered)


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """The needs of a state row's samples beyond the row's fields."""

    whole_row: bool  # they are sampled from whole rows of logits in any case
    # They are changed by options up to the sample of this token, counted in the sequence. 0: there are none.
    options_end: int

    def whole_rows(self, seq: Sequence, samples: range) -> list[tuple[int, int]]:
        """Returns the fields of WantedRow for a sequence's samples in a step, if these need whole rows. The
        host does not know how many drafts the steps in flight accept, so options count as long as they would
        apply right after the last token that it has seen."""
        is_shaped = len(seq.token_ids) < self.options_end
        return [(sample, int(is_shaped)) for sample in samples] if self.whole_row or is_shaped else []


def start_options(
    seq: Sequence, row: int, options: SamplerOptions, block_size: int, splits_sampling: bool
) -> RowNeeds:
    """Sends the options of a sequence that has just got its row."""
    params = seq.request.params
    if seq.request.embed:
        return RowNeeds(False, 0)
    needs_whole = params.structured_outputs is not None or (
        splits_sampling and needs_whole_row(params.temperature, params.top_k, params.top_p, params.min_p)
    )
    if (found := _options_of(seq)) is None:
        return RowNeeds(needs_whole, 0)
    tokens = seq.token_ids if found[0][Option.READS_HISTORY] else []
    blocks = seq.block_ids[: -(-len(tokens) // block_size)]
    options.starts.append(RowStart(row, *found, list(tokens), list(blocks)))
    return RowNeeds(needs_whole, sys.maxsize if _has_lasting(seq) else _min_end(seq))


def sample_options(entry: ScheduledSeq, samples: range, options: SamplerOptions) -> None:
    """Adds the options of a sequence's samples in the step."""
    request = entry.seq.request
    params = request.params
    if request.embed:
        options.embeds += samples
        return
    has_filter = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    if params.logprobs is not None and params.temperature >= MIN_TEMPERATURE and has_filter:
        options.filtered += samples
    if entry.seq.grammar is not None:
        drafts = entry.seq.drafts.drafts if entry.seq.drafts is not None else []
        for i, sample in enumerate(samples):
            banned, allowed = _banned_after(entry.seq, drafts[:i]), params.allowed_token_ids
            options.grammars.append(GrammarRow(sample, entry.seq.grammar, banned, allowed, drafts[:i]))


def _options_of(seq: Sequence) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns a sequence's options, fields and lists. None: it has none. The mask of a grammar holds what is
    banned and allowed, too, so that tokens remain that fit all of them."""
    request, params = seq.request, seq.request.params
    in_mask, min_end = seq.grammar is not None, _min_end(seq)
    if not (min_end or _has_lasting(seq)):
        return None
    return pack_options(
        penalties=(params.repetition_penalty, params.presence_penalty, params.frequency_penalty),
        num_prompt=seq.num_prompt_tokens,
        min_end=min_end,
        stops=sorted(seq.stop_ids) if min_end else [],
        allowed=[] if in_mask else params.allowed_token_ids or [],
        bias=params.logit_bias or {},
        words=() if in_mask else request.bad_word_ids,
    )


def _has_lasting(seq: Sequence) -> bool:
    """Returns whether options change all samples of the sequence."""
    params, in_mask = seq.request.params, seq.grammar is not None
    has_limits = seq.request.bad_word_ids or params.allowed_token_ids is not None
    return bool(params.has_penalties or params.logit_bias or (has_limits and not in_mask))


def _min_end(seq: Sequence) -> int:
    """Returns the number of tokens up to which min_tokens bans stop tokens. 0: it bans none."""
    end = seq.num_prompt_tokens + seq.request.params.min_tokens
    has_some = seq.stop_ids and seq.grammar is None and len(seq.token_ids) < end
    return end if has_some else 0


def _banned_after(seq: Sequence, drafts: list[int]) -> list[int]:
    """Returns the tokens that min_tokens and bad words ban from the sample after these drafts."""
    request, banned = seq.request, list[int]()
    num_outputs = len(seq.token_ids) + len(drafts) - seq.num_prompt_tokens
    if num_outputs < request.params.min_tokens:
        banned.extend(seq.stop_ids)
    if request.bad_word_ids:  # the answer's last tokens decide, never the prompt's
        most = min(num_outputs, max(map(len, request.bad_word_ids)))
        last = (*seq.token_ids[-most:], *drafts)[-most:] if most else ()
        for word in request.bad_word_ids:
            before = len(word) - 1
            if before <= len(last) and last[len(last) - before :] == word[:-1]:
                banned.append(word[-1])
    return banned


def encode_count(count: int | None) -> int:
    """Encodes a number of log-probabilities for the header: None (not requested) is 0, -1 (all) is 1."""
    return 0 if count is None else count + 2


def decode_count(field: int) -> int | None:
    """Decodes the number that `encode_count` encoded."""
    return None if field == 0 else int(field) - 2


def more(a: int | None, b: int | None) -> int | None:
    """Returns the larger of two numbers of log-probabilities, where None means none and -1 means all."""
    if a is None or b is None:
        return b if a is None else a
    return -1 if -1 in (a, b) else max(a, b)


def num_prompt_targets(entry: ScheduledSeq) -> int:
    """Returns the number of a prefill's tokens that are followed by a token of the prompt, whose
    log-probability they give."""
    return max(0, min(entry.num_tokens, entry.seq.num_prompt_tokens - 1 - entry.start))


def prompt_sections(entries: abc.Sequence[ScheduledSeq], query_starts: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the prompt tokens whose logits are requested, as indices among the step's tokens, and the token
    after each."""
    prompt_logits, targets = [np.zeros(0, np.int32)], list[int]()
    for i, entry in enumerate(entries):
        if entry.seq.request.params.prompt_logprobs is not None:
            count, after = num_prompt_targets(entry), entry.start + 1
            prompt_logits.append(query_starts[i] + np.arange(count, dtype=np.int32))
            targets.extend(entry.seq.token_ids[after : after + count])
    return {"prompt_logits": np.concatenate(prompt_logits), "prompt_targets": np.array(targets, np.int32)}
