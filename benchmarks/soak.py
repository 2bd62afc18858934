"""Load beyond capacity for long, with memory, descriptors and counters watched.

    python benchmarks/soak.py --minutes 30 --json soak.json

Starts `shoal serve` with the default model and a short queue, and keeps more clients at it than it takes:
streams, whole answers, chats, constrained texts, prompts that share a beginning and prompts that don't,
clients that leave, and requests that are wrong. A line each half minute; at its end it waits until all is
quiet and says what is left. Exits with 1 where something is: requests, descriptors, threads, KV blocks, or
memory that grew by more than a tenth and 64 MB over the second half. Needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.http_shapes import ADMIN_PATHS, BODIES, LAST, raw_request, spoilt_json
from tests.serving import Serve
from tests.waiting import eventually

STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
LINE_S, SAMPLE_S = 30.0, 1.0
# Pools begin their threads when they are first needed: two for text and one for grammars in the front, one
# for grammars and two for slow masks in the engine; and one a processor for the tokenizers of each and for
# the masks of steps.
LATE_THREADS = 6 + 3 * (os.cpu_count() or 1)
WORDS = (
    "the",
    "sea",
    "is",
    "wide",
    "and",
    "deep",
    "its",
    "tides",
    "come",
    "go",
    "day",
    "after",
    "under",
    "moon",
)
PATHS = [path for path in BODIES if path not in ADMIN_PATHS]


def request_of(rng: random.Random) -> tuple[bytes, float | None]:
    """(a request, after how many seconds its client leaves, if it does)."""
    kind, leaves = rng.random(), rng.random() * 5 if rng.random() < 0.2 else None
    if kind < 0.05:
        return raw_request(rng) + LAST, 5.0
    if kind < 0.15:
        path = rng.choice(PATHS)
        return http_post(path, spoilt_json(rng, BODIES[path])), 5.0
    length = rng.choice((5, 50, 300, 1500))
    text = (
        " ".join(rng.choices(WORDS, k=length)) if rng.random() < 0.5 else "Once upon a time " * (length // 4)
    )
    common: dict[str, Any] = {
        "max_tokens": rng.choice((1, 8, 40, 120)),
        "stream": rng.random() < 0.6,
        "temperature": rng.random(),
    }
    if rng.random() < 0.1:
        common["structured_outputs"] = {"regex": "[a-z]{5,20}"}
    if rng.random() < 0.1:
        common |= (
            {"logprobs": 3, "frequency_penalty": 0.5} if kind < 0.6 else {"logprobs": True, "top_logprobs": 3}
        )
    if rng.random() < 0.05:
        common["n"] = 4
    if kind < 0.6:
        return http_post("/v1/completions", json.dumps({"prompt": text, **common}).encode()), leaves
    messages = [{"role": "user", "content": text}]
    return http_post("/v1/chat/completions", json.dumps({"messages": messages, **common}).encode()), leaves


def http_post(path: str, data: bytes) -> bytes:
    return (
        b"POST %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % (path.encode(), len(data))
        + data
    )


async def client(port: int, seed: int, end: float, statuses: collections.Counter[str]) -> None:
    """One after the other until `end`."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        data, leaves = request_of(rng)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            statuses[type(error).__name__] += 1
            await asyncio.sleep(1)
            continue
        try:
            writer.write(data)
            answer = await asyncio.wait_for(reader.read(64), leaves or 120)
            found = STATUS.search(answer)
            statuses[found[1].decode() if found else "closed"] += 1
            while await asyncio.wait_for(reader.read(1 << 16), leaves or 120):
                pass
            if found and found[1] == b"429":
                await asyncio.sleep(rng.random())
        except TimeoutError:
            statuses["left" if leaves else "TIMED OUT"] += 1
        except ConnectionError:
            statuses["reset"] += 1
        finally:
            writer.transport.abort()


def sample(server: Serve) -> dict[str, float]:
    front, engines = psutil.Process(server.process.pid), server.cores()
    return {
        "front_mb": front.memory_info().rss / 2**20,
        "engine_mb": sum(p.memory_info().rss for p in engines) / 2**20,
        "fds": front.num_fds() + sum(p.num_fds() for p in engines),
        "threads": front.num_threads() + sum(p.num_threads() for p in engines),
        "processes": len(engines),
        "log_mb": server.log.stat().st_size / 2**20,
    }


async def watch(
    server: Serve, end: float, statuses: collections.Counter[str], samples: list[dict[str, float]]
) -> None:
    start, told = time.monotonic(), 0.0
    while (now := time.monotonic()) < end:
        samples.append({"s": now - start, **sample(server)})
        if now - told >= LINE_S:
            told, last = now, samples[-1]
            cells = [
                f"{last['s'] / 60:.1f}",
                *(f"{last[name]:.0f}" for name in ("front_mb", "engine_mb", "fds", "threads", "log_mb")),
                ", ".join(f"{count} {status}" for status, count in sorted(statuses.items())),
            ]
            print(f"| {' | '.join(cells)} |", flush=True)
        await asyncio.sleep(SAMPLE_S)


async def soak(
    server: Serve, minutes: float, clients: int
) -> tuple[collections.Counter[str], list[dict[str, float]]]:
    end, statuses = time.monotonic() + 60 * minutes, collections.Counter[str]()
    samples: list[dict[str, float]] = []
    await asyncio.gather(
        watch(server, end, statuses, samples),
        *(client(server.port, i, end, statuses) for i in range(clients)),
    )
    return statuses, samples


def what_is_left(server: Serve, before: dict[str, float], samples: list[dict[str, float]]) -> list[str]:
    metrics = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    try:
        eventually(lambda: sum(map(server.metric, metrics)) == 0)
    except AssertionError:
        return [f"{name} is {server.metric(name)}" for name in metrics]
    time.sleep(3)
    after, found = sample(server), []
    half, last = samples[len(samples) // 2 : len(samples) * 5 // 8], samples[-len(samples) // 8 :]
    most_threads = before["threads"] + LATE_THREADS
    for name, limit in (
        ("fds", before["fds"] + 2),
        ("threads", most_threads),
        ("processes", before["processes"]),
    ):
        if after[name] > limit:
            found.append(f"{name} grew from {before[name]:.0f} to {after[name]:.0f}")
    for name in ("front_mb", "engine_mb"):
        first, then = (max(one[name] for one in part) for part in (half, last))
        if then > first * 1.1 + 64:
            found.append(f"{name} grew from {first:.0f} to {then:.0f} over the second half")
    if server.ask("/health")[0] != 200:
        found.append("/health is not 200")
    if "Traceback" in server.text():
        found.append("a traceback in the log")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--clients",
        type=int,
        default=200,
        help="at once; 64 run and 64 wait, the rest is refused (default: 200)",
    )
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Serve(Path(folder), "smollm2", "--max-queued-requests", "64", "--request-timeout", "60")
        try:
            server.ready()
            server.ask("/v1/completions", {"prompt": "a", "max_tokens": 8})
            before = sample(server)
            print(
                "| minute | front, MB | engine, MB | descriptors | threads | log, MB | answers |", flush=True
            )
            print("|---|---|---|---|---|---|---|", flush=True)
            statuses, samples = asyncio.run(soak(server, arguments.minutes, arguments.clients))
            left = what_is_left(server, before, samples)
        finally:
            server.stop()
    wrong = [
        f"{count} answers of {status}"
        for status, count in statuses.items()
        if status[0] == "5" and status not in ("503", "504")
    ]
    wrong += [f"{statuses['TIMED OUT']} timed out"] if statuses["TIMED OUT"] else []
    print("\n".join([*left, *wrong]) or "nothing is left behind")
    if arguments.json:
        result = {
            "minutes": arguments.minutes,
            "clients": arguments.clients,
            "statuses": statuses,
            "before": before,
            "left": left + wrong,
            "samples": samples[::10],
        }
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 1 if left or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
