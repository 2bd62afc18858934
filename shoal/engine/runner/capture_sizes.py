"""Chooses the decode steps and mixed steps of which CUDA graphs (graphs.py) are captured."""

from __future__ import annotations

from shoal.attention.backend import AttentionBackend
from shoal.config import ResolvedConfig
from shoal.engine.runner.packed_step import MixedShape
from shoal.layers.experts import ExpertMatrix, Experts
from shoal.layers.matrix import MatrixLayer
from shoal.models.decoder import Decoder

FEW_DECODES, FEW_PREFILLS = 16, 8  # the places of a shape for few sequences
MANY = 256  # sequences of a shape for many, at most; a larger batch has shapes of its own
# Beyond MANY rows decode steps have sizes every 64 rows up to here, and then every 128.
FINE_ROWS = 384
# Rows up to which a decode step that shares prefixes has as many sizes as one that does not.
FINE_SHARING = 128
# From as many tokens on there are shapes for few sequences; smaller steps lose nothing by more.
FEW_FROM = 128
TOKENS_PER_PREFILL = 16  # A shape for many sequences has a place for a prompt for as many of its tokens.
# A mixed step is captured while launching a layer from Python (measured 500 µs, plus 50 %) takes longer than
# computing it at 600 TFLOP/s.
LAUNCH_S, FLOPS = 750e-6, 6e14


def decode_sizes(wanted: list[int] | None, max_num_seqs: int) -> list[int]:
    """The ladder of decode steps, small to large: `wanted`, or 1, 2, 4, 8, every 16 up to MANY, every
    64 up to FINE_ROWS and every 128 beyond. cuBLAS, which multiplies more rows than MANY, is as quick with
    the larger of these sizes as with most of those between them, and each graph lengthens the start.
    max_num_seqs itself is on the ladder, so that no batch falls off its end."""
    large = [*range(MANY + 64, FINE_ROWS, 64), *range(FINE_ROWS, max_num_seqs, 128)]
    sizes = wanted or [1, 2, 4, 8, *range(16, MANY + 1, 16), *large, max_num_seqs]
    return sorted({min(size, max_num_seqs) for size in sizes})


def decode_ladders(
    sizes: list[int], share_from: int | None, draft_rows: dict[int, list[int]]
) -> dict[tuple[int, bool], list[int]]:
    """The numbers of rows of captured decode steps, ascending, by queries and sharing. Sizes from
    `share_from` on are captured twice, without and with sharing, because looking for shared prefixes that are
    not there costs 2 % of a step. Beyond FINE_SHARING rows every other size is captured with it, counted down
    from MANY and from the largest, because a batch that shares prefixes gains more by that than it loses by
    padding, and each graph lengthens the start. `draft_rows`: by queries, for steps that verify drafts."""
    ladders = {(1, False): sorted(sizes)}
    if share_from is not None:
        shared = [size for size in sorted(sizes) if size >= share_from]
        fine = [size for size in shared if size <= FINE_SHARING]
        coarse = [size for size in shared if FINE_SHARING < size <= MANY]
        large = [size for size in shared if size > MANY]
        ladders[1, True] = fine + coarse[::-2][::-1] + large[::-2][::-1]
    return ladders | {(queries, False): rows for queries, rows in draft_rows.items()}


def most_captured_tokens(model: Decoder) -> int:
    """The most tokens of a mixed step that is worth a graph. For more, the GPU takes longer than Python does
    to launch the step."""
    active = 0  # weights that a token meets
    for layer in model.layers:
        mixture = next((module.kind for module in layer.modules() if isinstance(module, Experts)), None)
        for matrix in layer.modules():
            # By their sizes, as matrices of fewer bits have no memory yet.
            if isinstance(matrix, MatrixLayer):
                size = sum(matrix.parts) * matrix.num_columns
                if mixture is not None and isinstance(matrix, ExpertMatrix):
                    size = size * mixture.router.num_slots // mixture.num_matrices
                active += size
    return int(LAUNCH_S * len(model.layers) * FLOPS / (2 * active))


def captured_shapes(
    model: Decoder, backend: AttentionBackend, config: ResolvedConfig, share_from: int | None
) -> list[MixedShape]:
    """Returns the shapes of the mixed steps of which graphs are captured, small to large."""
    if config.enforce_eager or not backend.captures_mixed:
        return []
    most = min(config.max_num_batched_tokens, most_captured_tokens(model))
    return mixed_shapes(most, config.max_num_seqs, share_from)


def mixed_shapes(max_tokens: int, max_num_seqs: int, share_from: int | None) -> list[MixedShape]:
    """The ladder of mixed steps up to `max_tokens`, small to large. From 256 tokens on, rungs are at most a
    quarter apart, which costs 10 % of padding in the mean. Below, matmuls take the time of reading their
    weights, whatever the padding. From FEW_FROM on each rung exists twice: for few sequences, whose decodes
    are split finely, and for many, whose decodes may share prefixes. Where more than MANY sequences may run,
    every other rung beyond MANY tokens has a third shape, for all of them."""
    rungs = [32, 64, 128, 192, 256]
    rungs += [octave * quarters // 4 for octave in (256, 512, 1024, 2048) for quarters in (5, 6, 7, 8)]
    shapes = set()

    def add(tokens: int, decodes: int, prefills: int, most_seqs: int, may_share: bool) -> None:
        decodes, prefills = min(decodes, most_seqs), min(prefills, most_seqs)
        samples = min(decodes + prefills, most_seqs)
        sharing = may_share and share_from is not None and decodes >= share_from
        shapes.add(MixedShape(tokens, decodes, prefills, samples, sharing))

    for i, tokens in enumerate(rungs):
        if tokens > max_tokens:
            break
        prefills = max(FEW_PREFILLS, tokens // TOKENS_PER_PREFILL)
        add(tokens, tokens, prefills, min(MANY, max_num_seqs), may_share=True)
        if tokens >= FEW_FROM:
            add(tokens, FEW_DECODES, FEW_PREFILLS, max_num_seqs, may_share=False)
        if tokens > MANY and i % 2 == 0:
            add(tokens, tokens, prefills, max_num_seqs, may_share=True)
    return sorted(shapes)
