"""The layout of a packed step: a header, then sections of int32s. batch.py writes it, steps.py reads it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.engine.scheduling.part_state import StateCopies

# Sections start at multiples of as many int32s, 16 bytes, so that Triton sees one alignment and compiles one
# variant.
ALIGNMENT = 4
HEADER_SIZE = 32


class MixedShape(NamedTuple):
    """The capacity of a captured mixed step: `decodes` slots for sequences that decode, then `prefills` slots
    for the others; an empty slot has row -1 and length 0. At most `samples` sequences sample. Tokens are
    contiguous: decodes first, padding last."""

    tokens: int
    decodes: int
    prefills: int
    samples: int
    sharing: bool  # whether decodes may share prefixes

    def fits(self, num_tokens: int, num_decodes: int, num_prefills: int, sharing: bool) -> bool:
        return (
            num_tokens <= self.tokens
            and num_decodes <= self.decodes
            and num_prefills <= self.prefills
            and num_decodes + num_prefills <= self.samples
            and sharing <= self.sharing
        )

    def pad(self, sections: dict[str, np.ndarray], num_decodes: int) -> dict[str, np.ndarray]:
        """The token sections of a step that fits, in this shape."""

        def seqs(values: np.ndarray, decodes_padding: int, padding: int) -> np.ndarray:
            return np.concatenate(
                (
                    _fill(values[:num_decodes], self.decodes, decodes_padding),
                    _fill(values[num_decodes:], self.prefills, padding),
                )
            )

        sizes = {
            "token_ids": (self.tokens, 0),
            "positions": (self.tokens, -1),
            "token_rows": (self.tokens, -1),
            "sample_index": (self.samples, 0),
            "sample_rows": (self.samples, -1),
            "sample_positions": (self.samples, -1),
        }
        starts = sections["query_starts"]
        return {name: _fill(sections[name], *size) for name, size in sizes.items()} | {
            "rows": seqs(sections["rows"], -1, -1),
            "kv_lens": seqs(sections["kv_lens"], 0, 0),
            # each place ends where the next one begins, so that an empty one has no token
            "query_starts": np.append(seqs(starts[:-1], starts[num_decodes], starts[-1]), starts[-1]),
        }


class StepHeader(NamedTuple):
    """The first ints of a packed step, in their order. Flags are 0 or 1."""

    num_updates: int = 0  # (address, value) pairs
    num_seqs: int = 0
    num_decodes: int = 0
    num_tokens: int = 0
    num_samples: int = 0
    max_kv_len: int = 0
    decode_only: int = 0  # Every sequence decodes. There are no token sections: the device knows everything.
    fresh_prefills: int = 0  # Every prefill starts at position 0.
    # Tokens that are sampled once more, from whole rows of logits: a request needs options that state rows
    # lack, or more than ranks exchange (kernels/sampling/split_sample.py).
    num_whole_rows: int = 0
    num_prompt_logits: int = 0  # prompt tokens whose logits are requested
    num_decode_groups: int = 0  # groups of decodes that share a prefix
    # The most log-probabilities that a sample, or a prompt, of the step asks for, as `encode_count` writes
    # it.
    logprobs: int = 0
    prompt_logprobs: int = 0
    whole_rows_size: int = 0  # the ints that describe whole rows, padding included
    states_size: int = 0  # the ints that describe copies of states (`pack_copies`)
    restores_size: int = 0  # how many of them describe restores
    queries: int = 0  # the places of each decode for tokens
    histories_size: int = 0  # the ints of tokens in which drafts are looked up
    head_rests: int = 0  # A draft head makes no drafts in this step.
    # The fields of the MixedShape that this step is padded to. 0 tokens: it runs eagerly.
    shape_tokens: int = 0
    shape_decodes: int = 0
    shape_prefills: int = 0
    shape_samples: int = 0
    shape_sharing: int = 0

    @classmethod
    def of(cls, packed: np.ndarray) -> StepHeader:
        return cls._make(packed[: len(cls._fields)].tolist())

    @property
    def shape(self) -> MixedShape | None:
        """The captured mixed step to replay. None: the step runs eagerly, or decodes alone."""
        return MixedShape._make(self[-len(MixedShape._fields) :]) if self.shape_tokens else None

    def with_shape(self, shape: MixedShape) -> StepHeader:
        return StepHeader._make((*self[: -len(shape)], *shape))

    @property
    def samples_parts(self) -> bool:
        """False if all tokens are sampled from whole rows, and sampling before that would be for nothing."""
        return self.num_whole_rows < self.num_samples


def section_spans(header: StepHeader) -> dict[str, tuple[int, int]]:
    """Returns the place of each section after the header, in order: name -> (start, end). Each starts at a
    multiple of ALIGNMENT."""
    seqs, tokens, samples = header.num_seqs, header.num_tokens, header.num_samples
    if (shape := header.shape) is not None:
        seqs, tokens, samples = shape.decodes + shape.prefills, shape.tokens, shape.samples
    sizes = {
        "whole_rows": header.whole_rows_size,
        "states": header.states_size,
        "histories": header.histories_size,
        "addresses": header.num_updates,
        "values": header.num_updates,
    }
    if not header.decode_only:
        sizes |= {
            "token_ids": tokens,
            "positions": tokens,
            "token_rows": tokens,
            "rows": seqs,
            "query_starts": seqs + 1,
            "kv_lens": seqs,
            "sample_index": samples,
            "sample_rows": samples,
            "sample_positions": samples,
            "prompt_logits": header.num_prompt_logits,
            "prompt_targets": header.num_prompt_logits,
        }
    spans, at = {}, HEADER_SIZE
    for name, size in sizes.items():
        spans[name] = (at, at + size)
        at += padded_size(size)
    return spans


def pack(header: StepHeader, sections: dict[str, np.ndarray]) -> np.ndarray:
    """The buffer of a step: the header, then the sections."""
    spans = section_spans(header)
    packed = np.zeros(padded_size(max(end for _, end in spans.values())), np.int32)
    packed[: len(header)] = header
    for name, (start, end) in spans.items():
        packed[start:end] = sections[name]
    return packed


def token_spans(shape: MixedShape) -> dict[str, tuple[int, int]]:
    """Returns the place of each token section in a step of this shape, relative to the first."""
    spans = section_spans(StepHeader().with_shape(shape))
    return {name: (start - HEADER_SIZE, end - HEADER_SIZE) for name, (start, end) in spans.items()}


def pack_copies(copies: StateCopies) -> tuple[np.ndarray, int]:
    """Returns the ints of a step's copies, and how many of them, the first ones, are for restores. Restores,
    and then saves, have the places written to and the places read from; with drafts, saves also have the ends
    at which they are due. The place of a row's part, which has a block's bytes, is its number among the parts
    of all rows."""
    restores, saves = _pairs(copies.restores), _pairs(copies.saves)
    ends = []
    if copies.ends is not None:
        size = len(copies.saves[0][1]) if copies.saves else 0
        ends = [np.zeros(len(saves[0]), np.int32)]
        ends[0][: size * len(copies.ends)] = np.repeat(np.array(copies.ends, np.int32), size)
    packed = np.concatenate((*restores, *saves[::-1], *ends))
    return packed, 2 * len(restores[0])


def _pairs(copies: list[tuple[int, list[int]]]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the parts of rows, and the block that belongs to each. Padding has -1 in both."""
    size = len(copies[0][1]) if copies else 0
    padded = padded_size(size * len(copies))
    parts, blocks = np.full((2, padded), -1, np.int32)
    for i, (row, own) in enumerate(copies):
        parts[i * size : (i + 1) * size] = np.arange(row * size, (row + 1) * size)
        blocks[i * size : (i + 1) * size] = own
    return parts, blocks


def padded_size(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _fill(values: np.ndarray, size: int, padding: int) -> np.ndarray:
    return np.concatenate((values, np.full(size - len(values), padding, np.int32)))
