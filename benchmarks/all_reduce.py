"""Microseconds of a sum over GPUs in a captured graph, by bytes and ranks: over peer memory in one and in two
shots, and by NCCL, each alone and with the residual sum and RMSNorm behind it.

    python benchmarks/all_reduce.py [--ranks 2,4] [--hidden 5120] [--rows 1,2,4,8,16,32,64,128,256]

Then of sums of large steps, by the copies of engine/ranks/peer_copies.py and by NCCL.

Each number is of a chain of 32 sums, the best of some replays. The smallest of a row says which way is right
for it (ONE_SHOT_BYTES in shoal/kernels/all_reduce.py), and from where on NCCL is.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

WAYS = "ONE_SHOT", "TWO_SHOT", "NCCL"
LARGE_ROWS = 2048, 4096, 8192, 16384


def large_sums(group: Any) -> list[dict[str, float]]:
    """Prints and returns the times of large sums."""
    found, sums = [], group.own.sums.large
    for rows in LARGE_ROWS:
        if sums is not None and sums.pieces(rows):
            row = {"ranks": group.tp.size, "rows": rows}
            for way in ("COPIES", "NCCL"):
                row[way] = max(group.call("large_microseconds", way, rows))
            print(
                f"{rows:5} rows with the norm: copies {row['COPIES']:.1f}, NCCL {row['NCCL']:.1f}", flush=True
            )
            found.append(row)
    return found


def main() -> None:
    import torch

    root = Path(__file__).parents[1]
    sys.path[:0] = [str(root), str(root / "tests/gpu")]
    from sums_worker import Group

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128,256")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    found = []
    print("ranks  rows    bytes |" + "".join(f"{way:>10}" for way in WAYS) + " | with the norm" + " " * 17)
    for size in map(int, arguments.ranks.split(",")):
        if size > torch.cuda.device_count():
            print(f"{size:5}  there are {torch.cuda.device_count()} GPUs")
            continue
        with Group(size, arguments.hidden) as group:
            for rows in map(int, arguments.rows.split(",")):
                row = {"ranks": size, "rows": rows, "bytes": 2 * rows * arguments.hidden}
                for with_norm in (False, True):
                    fits = with_norm or group.own.sums.peers.takes_plain(
                        torch.empty(rows, arguments.hidden, dtype=torch.bfloat16, device="meta")
                    )
                    for way in WAYS:
                        if way == "NCCL" or fits:
                            times = group.call("microseconds", way, rows, with_norm)
                            row[f"{way}{' norm' if with_norm else ''}"] = max(times)
                cells = [row.get(f"{way}{norm}") for norm in ("", " norm") for way in WAYS]
                texts = [f"{cell:10.1f}" if cell is not None else " " * 9 + "-" for cell in cells]
                print(
                    f"{size:5} {rows:5} {row['bytes']:8} |{''.join(texts[:3])} |{''.join(texts[3:])}",
                    flush=True,
                )
                found.append(row)
            found += large_sums(group)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
