"""Time until `shoal serve` is ready: with nothing compiled, with kernels that another machine has
compiled, and a second time; with weights from files in memory, from the disk, and from another worker.

    python benchmarks/starts.py [--shape qwen3-8b] [--rounds 3]

The checkpoint has random weights, which are written first. Each start is a process of its own, and a cache
folder of its own makes it a machine's first. Files are dropped from the page cache by posix_fadvise, so
that reading them takes this machine's disk. Prints a line for each start with its log's line about the
weights, and then the median of each kind.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from random_checkpoint import write_checkpoint

from tests.serving import Route, Serve, free_port

OPTIONS = ("--max-model-len", "4096", "--skip-tokenizer-init", "--kv-cache-memory-bytes", str(4 << 30))
HALF = ("--gpu-memory-utilization", "0.45")  # for two workers on one card


class Starts:
    """Starts servers of one checkpoint, and remembers what they took."""

    def __init__(self, folder: Path, checkpoint: str) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.plane = f"tcp://127.0.0.1:{free_port()}"
        self.seconds: dict[str, list[float]] = {}

    def start(self, kind: str, cache: Path, *options: str) -> Serve:
        os.environ["SHOAL_CACHE"] = str(cache)
        begun = time.perf_counter()
        serve = Serve(self.folder, self.checkpoint, *OPTIONS, *options).ready()
        seconds = time.perf_counter() - begun
        self.seconds.setdefault(kind, []).append(seconds)
        told = [line for line in serve.text().splitlines() if "weights" in line or "kernels" in line]
        print(f"{kind}: {seconds:.2f} s", *told, sep="\n    ", flush=True)
        return serve

    def forget_files(self) -> None:
        """The next start reads them from the disk."""
        for path in Path(self.checkpoint).glob("*.safetensors"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def join(self, kind: str, cache: Path, *options: str) -> Serve:
        return self.start(kind, cache, "--plane", self.plane, *HALF, *options)


def settled(count: Callable[[], int]) -> None:
    """Waits until nothing has come for some seconds."""
    last, since = count(), time.monotonic()
    while time.monotonic() - since < 5:
        time.sleep(0.2)
        if count() != last:
            last, since = count(), time.monotonic()


def measure(starts: Starts, folder: Path, rounds: int) -> None:
    store = folder / "store"
    first = folder / "first"
    share = ("--compile-cache", f"file://{store}")
    compiling = starts.start("first start, nothing compiled", first, *share)
    settled(lambda: sum(1 for _ in store.rglob("*.tar")))  # It is offered once the server is ready.
    compiling.stop()
    for number in range(rounds):
        starts.start("first start, kernels fetched", folder / f"fetched-{number}", *share).stop()
        starts.start("second start, files in memory", first).stop()
        starts.forget_files()
        starts.start("second start, files on disk", first).stop()
    router = Route(folder, "--plane", starts.plane)
    owner = starts.join("joins a fleet, files on disk or in memory", first)
    for _ in range(rounds):
        starts.join("joins a fleet, files in memory", first).stop()
        starts.join("joins a fleet, weights from a peer", first, "--weights-from-peers").stop()
    owner.stop()
    router.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen3-8b")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        begun = time.perf_counter()
        starts = Starts(Path(temporary), write_checkpoint(Path(temporary), arguments.shape))
        print(f"written in {time.perf_counter() - begun:.1f} s", flush=True)
        measure(starts, Path(temporary), arguments.rounds)
    for kind, seconds in starts.seconds.items():
        print(f"{kind}: {statistics.median(seconds):.2f} s, {[round(one, 2) for one in seconds]}")


if __name__ == "__main__":
    main()
