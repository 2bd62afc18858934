"""The attention kernels on one GPU, against the ceilings of the peers, with a sweep of how they may be cut.

    python benchmarks/attention.py [--quick] [decode] [shared] [prefill] [launch]

Prints for each case the default and, of the kernel that any GPU runs, the best three cuts: microseconds, and
TB/s of keys and values (decode) or TFLOP/s (prefill). --quick leaves the sweep out. Decodes run in a CUDA
graph over as many layers as it takes to keep the L2 cache cold, as in a model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial

import torch
import triton

from shoal.attention.backend import AttentionShape
from shoal.attention.splits import PREFIX_PROGRAMS_PER_SM, decode_splits, prefix_parts
from shoal.attention.step_input import HostView, SharedPrefixes, StepInput
from shoal.attention.triton import MIN_SPLIT, TritonBackend
from shoal.kernels.attention.paged_attention import (
    AttentionTiles,
    DecodeWorkspace,
    chunk_tiles,
    decode_attention,
    decode_tiles,
    prefill_attention,
    prefill_tiles,
)
from shoal.kernels.attention.prefix_attention import prefix_attention
from shoal.kernels.layer_cache import LayerCache
from shoal.kernels.state import MAX_DECODE_GROUPS, DecodeGroupField

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
COLD_BYTES = 300 << 20  # between two visits to a layer: six times an H200's L2

# name: (query heads, lengths, longest sequence the graph allows, what FlashAttention 3 reaches on an H200)
DECODES = {
    "256 x 1024": (32, [1024] * 256, 1024, "3.76 to 3.87 TB/s"),
    "256 x 1024 in a graph for 4608": (32, [1024] * 256, 4608, ""),
    "256 x 100..2048 in a graph for 4608": (32, [100 + i * 1948 // 255 for i in range(256)], 4608, ""),
    "32 x 4096": (32, [4096] * 32, 4096, "3.7 to 3.8 TB/s"),
    "1 x 32768": (32, [32768], 32768, "2.5 TB/s, 54 us"),
    "1 x 131072": (32, [131072], 131072, ""),
    "1 x 1024 in a graph for 4608": (32, [1024], 4608, "17 us"),
    "4 x 1024 in a graph for 40960": (32, [1024] * 4, 40960, ""),
    "16 heads: 1 x 1024 in a graph for 4608": (16, [1024], 4608, ""),
    "16 heads: 256 x 640 in a graph for 4608": (16, [640] * 256, 4608, ""),
}
DECODE_TILES = [
    AttentionTiles(16, 64, 4, 2),
    AttentionTiles(16, 64, 4, 3),
    AttentionTiles(16, 64, 4, 4),
    AttentionTiles(16, 128, 4, 2),
    AttentionTiles(16, 128, 8, 2),
    AttentionTiles(16, 128, 8, 3),
    AttentionTiles(16, 32, 4, 4),
    AttentionTiles(16, 32, 2, 4),
    AttentionTiles(16, 64, 2, 3),
]

# name: (query heads, sequences, groups of equal size that they form, tokens that a group shares, tokens of
# each one's own)
SHARED = {
    "16 heads: 256 x (2048 + 160)": (16, 256, 1, 2048, 160),
    "256 x (2048 + 160)": (32, 256, 1, 2048, 160),
    "4 groups of 64 x (2048 + 160)": (32, 256, 4, 2048, 160),
    "16 heads: 4 groups of 8 x (4096 + 500)": (16, 32, 4, 4096, 500),
    "16 x (8192 + 500)": (32, 16, 1, 8192, 500),
    "16 heads: 256 x 640, nothing shared": (16, 256, 0, 0, 640),
    "16 heads: 16 x 640, nothing shared": (16, 16, 0, 0, 640),
}
PREFIX_TILES = [
    AttentionTiles(64, 64, 4, 2),
    AttentionTiles(64, 64, 4, 3),
    AttentionTiles(128, 64, 8, 2),
    AttentionTiles(128, 64, 8, 3),
    AttentionTiles(128, 128, 8, 2),
]

# name: (query heads, (query tokens, kv_len) of each sequence, paged)
PREFILLS = {
    "8 x 4096 fresh": (32, [(4096, 4096)] * 8, False),
    "8 x 4096 from the cache": (32, [(4096, 4096)] * 8, True),
    "16 heads: 8 x 4096 from the cache": (16, [(4096, 4096)] * 8, True),
    "16 x 1024 fresh": (32, [(1024, 1024)] * 16, False),
    "29 x 100..1024 fresh": (32, [(100 + i * 33, 100 + i * 33) for i in range(29)], False),
    "64 x 128 after 2048 cached": (32, [(128, 2176)] * 64, True),
    "1 x 2048 after 30720 cached": (32, [(2048, 32768)], True),
    "1 x 8192 after 24000 cached": (32, [(8192, 32192)], True),
    "16 heads: 1 x 8192 after 24000 cached": (16, [(8192, 32192)], True),
    "16 heads: 4 x 4096 fresh": (16, [(4096, 4096)] * 4, False),
}
PREFILL_TILES = [
    AttentionTiles(128, 64, 8, 2),
    AttentionTiles(128, 64, 8, 3),
    AttentionTiles(128, 64, 8, 2, 128),
    AttentionTiles(128, 128, 8, 2),
    AttentionTiles(128, 32, 8, 4),
    AttentionTiles(128, 32, 8, 3, 128),
    AttentionTiles(64, 64, 4, 2),
    AttentionTiles(64, 64, 4, 2, 168),
    AttentionTiles(64, 32, 4, 4),
]


class Step:
    """A step of decodes, or of prefills, over `num_layers` layers of an engine's cache, blocks in random
    order."""

    def __init__(
        self,
        num_heads: int,
        sequences: list[tuple[int, int]],
        num_layers: int,
        max_kv_len: int,
        fresh: bool = False,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        block_size: int = 16,
    ) -> None:
        counts = [triton.cdiv(kv_len, block_size) for _, kv_len in sequences]
        decoding = all(query_len == 1 for query_len, _ in sequences)
        self.num_tokens = sum(query_len for query_len, _ in sequences)
        self.cache = torch.empty(
            sum(counts), num_layers, 2, num_kv_heads, block_size, head_dim, dtype=BF16, device=DEVICE
        ).normal_()
        table = torch.zeros(len(sequences), 16 + triton.cdiv(max_kv_len, block_size), dtype=torch.int32)
        for row, blocks in enumerate(torch.randperm(sum(counts), dtype=torch.int32).split(counts)):
            table[row, 16 : 16 + len(blocks)] = blocks
        qkv = torch.randn(self.num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=DEVICE).to(BF16)
        q, k, v = qkv.split([n * head_dim for n in (num_heads, num_kv_heads, num_kv_heads)], dim=1)
        self.q, self.k, self.v = (x.unflatten(1, (-1, head_dim)) for x in (q, k, v))
        self.out = torch.empty(self.num_tokens, num_heads, head_dim, dtype=BF16, device=DEVICE)
        starts = [0]
        for query_len, _ in sequences:
            starts.append(starts[-1] + query_len)
        unused = torch.zeros(self.num_tokens, dtype=torch.int32, device=DEVICE)
        rows, kv_lens = list(range(len(sequences))), [kv_len for _, kv_len in sequences]
        rows_S, starts_S, kv_lens_S = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (rows, starts, kv_lens)
        )
        self.step = StepInput(
            token_ids_T=unused,
            positions_T=unused,
            rows_T=unused,
            rows_S=rows_S,
            query_starts_S=starts_S,
            kv_lens_S=kv_lens_S,
            block_tables=(table.to(DEVICE)[:, 16:],),
            num_decodes=len(sequences) if decoding else 0,
            max_kv_len=max_kv_len,
            fresh_prefills=fresh,
            host=HostView(tuple(starts), tuple(kv_lens)),
        )
        self.backend = TritonBackend(
            AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5),
            block_size,
            len(sequences),
            max_kv_len,
            DEVICE,
            BF16,
        )
        self.caches = [LayerCache(layer) for layer in self.cache.unbind(1)]
        self.backend.begin(self.step)
        self.layer_bytes = sum(kv_lens) * 2 * num_kv_heads * head_dim * 2
        self.flops = sum(
            4 * num_heads * head_dim * (n * (kv_len - n) + n * (n + 1) // 2) for n, kv_len in sequences
        )

    def share(self, num_groups: int, shared: int) -> None:
        """Every num_groups-th sequence begins with the same blocks."""
        num_seqs, table = (
            self.step.num_seqs,
            torch.zeros(MAX_DECODE_GROUPS, len(DecodeGroupField), dtype=torch.int32, device=DEVICE),
        )
        members: list[int] = []
        for group in range(num_groups):
            seqs = list(range(group, num_seqs, num_groups))
            self.step.block_tables[0][seqs, : shared // 16] = self.step.block_tables[0][
                group, : shared // 16
            ].clone()
            table[group] = torch.tensor([len(members), len(seqs), shared, group])
            members += seqs
        lens_S, members_S = (
            torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([shared] * num_seqs, members or [0])
        )
        self.step = replace(self.step, prefixes=SharedPrefixes(lens_S, members_S, table))

    def cascade(
        self, tiles: AttentionTiles, programs: int, parts: int, layer: int, only_prefix: bool = False
    ) -> None:
        step, prefixes = self.step, self.step.prefixes
        splits = decode_splits(step.num_seqs, 8, step.max_kv_len, self.backend.num_sms)
        prefix_attention(
            self.q,
            self.caches[layer],
            prefixes.decode_groups,
            prefixes.members_S,
            step.block_tables[0],
            self.workspace,
            step.num_seqs,
            programs,
            splits,
            parts,
            self.backend.scale,
            tiles,
        )
        if not only_prefix:
            decode_attention(
                self.q,
                self.caches[layer],
                self.out,
                step.rows_S,
                step.kv_lens_S,
                step.block_tables[0],
                self.workspace,
                step.num_seqs,
                splits,
                self.backend.scale,
                min_split=MIN_SPLIT,
                prefix_lens_S=prefixes.lens_S,
                max_parts=parts,
            )

    def attend(self, layer: int = 0) -> torch.Tensor:
        return self.backend.attend(self.q, self.k, self.v, self.caches[layer], self.step)

    def decode(
        self, splits: int, tiles: AttentionTiles, min_split: int, workspace: DecodeWorkspace, layer: int
    ) -> None:
        step = self.step
        decode_attention(
            self.q,
            self.caches[layer],
            self.out,
            step.rows_S,
            step.kv_lens_S,
            step.block_tables[0],
            workspace,
            step.num_decodes,
            splits,
            self.backend.scale,
            tiles,
            min_split,
        )

    def prefill(self, tiles: AttentionTiles, paged: bool) -> None:
        step = self.step
        prefill_attention(
            self.q,
            self.k,
            self.v,
            self.caches[0],
            self.out,
            step.query_starts_S,
            step.kv_lens_S,
            step.rows_S,
            step.block_tables[0],
            0,
            self.num_tokens,
            self.backend.scale,
            paged=paged,
            tiles=tiles,
        )


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """The best of five timings of `repeats` runs in a row, each."""
    run()
    best = float("inf")
    for _ in range(5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) * 1000 / repeats)
    return best


def graphed_microseconds(run_layer: Callable[[int], object], num_layers: int) -> float:
    """Per layer, in a graph of at least 32 launches."""
    run_layer(0)
    torch.cuda.synchronize()
    launches = max(32, num_layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            run_layer(i % num_layers)
    return microseconds(graph.replay, 3) / launches


def show(name: str, results: list[tuple[float, str]], rate: Callable[[float], str], note: str = "") -> None:
    default = results[0]
    print(
        f"{name:40s} {default[0]:9.1f} us  {rate(default[0]):>14s}  default: "
        f"{default[1]}{'   FA3: ' + note if note else ''}",
        flush=True,
    )
    for us, cut in sorted(results[1:])[:3]:
        print(f"{'':40s} {us:9.1f} us  {rate(us):>14s}  {cut}", flush=True)


def decode_case(
    name: str, num_heads: int, lengths: list[int], max_kv_len: int, note: str, quick: bool
) -> None:
    layer_bytes = sum(lengths) * 4096
    num_layers = max(1, min(64, triton.cdiv(COLD_BYTES, layer_bytes)))
    step = Step(num_heads, [(1, n) for n in lengths], num_layers, max_kv_len)
    default_splits = decode_splits(len(lengths), 8, max_kv_len, step.backend.num_sms)
    cuts = [(default_splits, decode_tiles(128, BF16), MIN_SPLIT)]
    if not quick:
        few = {max(1, round(default_splits * x)) for x in (0.33, 0.5, 0.67, 1, 1.33, 2)}
        cuts += [(splits, tiles, MIN_SPLIT) for tiles in DECODE_TILES for splits in sorted(few)]
        if max(lengths) <= 1024 and len(lengths) <= 4:
            cuts += [(default_splits, tiles, least) for tiles in DECODE_TILES for least in (32, 128, 256)]
    workspace = DecodeWorkspace.allocate(
        len(lengths) * num_heads * 2 * default_splits, len(lengths) * 8, 128, DEVICE
    )
    results = []
    for splits, tiles, least in cuts:
        us = graphed_microseconds(partial(step.decode, splits, tiles, least, workspace), num_layers)
        results.append((us, f"{splits} splits of {least} or more, tiles {astuple(tiles)}"))
    show(name, results, lambda us: f"{layer_bytes / us / 1e6:.2f} TB/s", note)


def shared_case(
    name: str, num_heads: int, num_seqs: int, num_groups: int, shared: int, own: int, quick: bool
) -> None:
    """Beside it each for itself, and the prefix kernel alone."""
    num_layers = 3
    step = Step(num_heads, [(1, shared + own)] * num_seqs, num_layers, 4608 if shared + own < 4608 else 16384)
    plain = graphed_microseconds(step.attend, num_layers)  # random blocks of its own for each
    step.share(num_groups, shared)
    kernel_input, step.step = step.step, replace(step.step, prefixes=None)
    same_blocks, step.step = graphed_microseconds(step.attend, num_layers), kernel_input
    sms, parts = step.backend.num_sms, prefix_parts(num_seqs, 8, step.backend.num_sms)
    step.workspace = DecodeWorkspace.allocate(num_seqs * num_heads * (64 + 64), num_seqs * 8, 128, DEVICE)
    cuts = [(chunk_tiles(128, BF16), PREFIX_PROGRAMS_PER_SM * sms, parts)]
    if not quick:
        cuts += [
            (tiles, waves * sms, max(1, int(x * parts)))
            for tiles in PREFIX_TILES
            for waves in (1, 2)
            for x in (0.5, 1, 2)
        ]
    results = []
    for cut in cuts:
        alone = graphed_microseconds(partial(step.cascade, *cut, only_prefix=True), num_layers)
        us = graphed_microseconds(partial(step.cascade, *cut), num_layers)
        results.append(
            (us, f"{cut[1]} programs, {cut[2]} parts, tiles {astuple(cut[0])}, prefix alone {alone:.1f} us")
        )
    flops = 4 * num_heads * 128 * num_seqs * shared
    print(
        f"{name:40s} each for itself {plain:.1f} us, from the same blocks {same_blocks:.1f} us; "
        f"{num_seqs * own * 4096 / 4.28e6:.1f} us for its own keys and {flops / 6e8:.1f} us for the "
        "products would be ideal",
        flush=True,
    )
    show(name, results, lambda us: f"{same_blocks / us:.2f} times")


def prefill_case(
    name: str, num_heads: int, sequences: list[tuple[int, int]], paged: bool, quick: bool
) -> None:
    step = Step(num_heads, sequences, 1, max(kv_len for _, kv_len in sequences), fresh=not paged)
    results = [
        (microseconds(step.attend, 5), "Triton" if step.backend.hopper.work is None else "Hopper's kernel")
    ]
    cuts = [prefill_tiles(128, BF16)] + ([] if quick else PREFILL_TILES)
    results += [
        (microseconds(partial(step.prefill, tiles, paged), 5), f"Triton, tiles {astuple(tiles)}")
        for tiles in cuts
    ]
    show(
        name,
        results,
        lambda us: f"{step.flops / us / 1e6:.0f} TFLOP/s",
        "581 TFLOP/s" if "8 x" in name else "",
    )


def bench_decode(quick: bool) -> None:
    for name, case in DECODES.items():
        decode_case(name, *case, quick)
        torch.cuda.empty_cache()


def bench_shared(quick: bool) -> None:
    for name, case in SHARED.items():
        shared_case(name, *case, quick)
        torch.cuda.empty_cache()


def bench_prefill(quick: bool) -> None:
    for name, case in PREFILLS.items():
        prefill_case(name, *case, quick)
        torch.cuda.empty_cache()


def bench_launch(_: bool) -> None:
    """Host time of a launch, which eager steps wait for."""
    for name, sequences in (("decode", [(1, 20)]), ("prefill", [(20, 20)]), ("large prefill", [(600, 600)])):
        step = Step(16, sequences, 1, 4608, fresh=True)
        step.attend()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            step.attend()
        print(f"launch of a {name}: {(time.perf_counter() - start) * 2000:.1f} us of host time", flush=True)
        torch.cuda.synchronize()


def main() -> None:
    parts = {"decode": bench_decode, "shared": bench_shared, "prefill": bench_prefill, "launch": bench_launch}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", choices=[*parts, []], help="default: all")
    parser.add_argument("--quick", action="store_true", help="no sweep")
    args = parser.parse_args()
    torch.manual_seed(0)
    for part in args.parts or parts:
        parts[part](args.quick)


if __name__ == "__main__":
    main()
