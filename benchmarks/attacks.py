"""Attacks of one client beside an honest stream: its worst gap between tokens without and beside each.

    python benchmarks/attacks.py                                # all of them, about ten minutes
    python benchmarks/attacks.py --only ghosts,grammar --json attacks.json

Starts `shoal serve` with the default model and talks to 127.0.0.1 alone. Every attack is bounded in number
and time, and runs in a process of its own at a low priority, as a real one would not sit on the server's
cores. The stream is measured alone just before each attack: where others use the machine, both figures are
slow. Believe their difference, and the ratio. The first two rows show what well-behaved
clients add. Needs psutil.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import http.client
import itertools
import json
import multiprocessing
import os
import random
import re
import resource
import shlex
import socket
import statistics
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.http_shapes import ADMIN_PATHS, BODIES, LAST, raw_request, spoilt_json
from tests.serving import Serve
from tests.waiting import eventually

MODEL = "smollm2"
SECONDS = 20.0  # an attack's most
QUIET_SECONDS = 6.0  # that the stream is measured alone, at least
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the end is a reset
GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
GRAMMAR = "start: start start start | /./ | "
Attack = Callable[[int, Callable[[], None]], collections.Counter[str]]
ATTACKS: dict[str, tuple[str, Attack]] = {}


def attack(what: str) -> Callable[[Attack], Attack]:
    """Adds the function to the table. It gets the port, and a function to call when all is prepared and the
    attack begins; it returns how many answers of each status there were."""

    def add(function: Attack) -> Attack:
        ATTACKS[function.__name__] = (what, function)
        return function

    return add


def post(path: str, body: object) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (path.encode(), len(data)) + data


def completion(**more: Any) -> bytes:
    return post(
        "/v1/completions", {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True, **more}
    )


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def ask(port: int, data: bytes) -> str:
    """The status of the answer to one request."""
    with connect(port) as connection:
        try:
            connection.sendall(data)
            answer = connection.recv(65536)
        except ConnectionError:
            return "cut off"
        except TimeoutError:
            return "no answer"
    found = STATUS.search(answer)
    return found[1].decode() if found else "cut off"


def repeated(port: int, begin: Callable[[], None], data: bytes, times: int) -> collections.Counter[str]:
    begin()
    end = time.monotonic() + SECONDS
    return collections.Counter(ask(port, data) for _ in range(times) if time.monotonic() < end)


def proper_streams(port: int, begin: Callable[[], None], count: int) -> collections.Counter[str]:
    begin()
    held = [connect(port) for _ in range(count)]
    for one in held:
        one.sendall(completion())
    time.sleep(8)
    for one in held:
        one.close()
    return collections.Counter({"streams": count})


@attack("no attack: 8 proper streams")
def eight(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return proper_streams(port, begin, 8)


@attack("no attack: as many proper streams as run at once, 63")
def full(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return proper_streams(port, begin, 63)


@attack("300 pipelined ghosts: a completion, a GET in the same packet, gone")
def ghosts(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    begin()
    for _ in range(300):
        connection = connect(port)
        connection.sendall(completion() + GET)
        connection.close()
    return collections.Counter({"left": 300})


@attack("3 prompts of 31 MB of text")
def text(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return repeated(port, begin, completion(prompt="a word " * (31 << 20 >> 3), max_tokens=1), 3)


@attack("3 prompts of 8 MB of one letter")
def letter(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return repeated(port, begin, completion(prompt="a" * (8 << 20), max_tokens=1), 3)


@attack("20 prompts of 20 KB, which fit")
def fitting(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return repeated(port, begin, completion(prompt="a word " * 3000, max_tokens=1), 20)


@attack("3 conversations of 300,000 messages")
def messages(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    body = {"messages": [{"role": "user", "content": "a"}] * 300_000, "max_tokens": 1}
    return repeated(port, begin, post("/v1/chat/completions", body), 3)


@attack("2 conversations of 1,000,000 messages")
def more_messages(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    body = b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 1_000_000) + b"]}"
    return repeated(port, begin, post("/v1/chat/completions", body), 2)


@attack("trailers without end")
def trailers(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return flood(port, begin, CHUNKED + b"2\r\n{}\r\n0\r\n", b"X: y\r\n" * 20_000)


@attack("extensions of chunks without end")
def extensions(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return flood(port, begin, CHUNKED, b"1;" + b"x" * 1000 + b"\r\n \r\n")


def flood(
    port: int, begin: Callable[[], None], head: bytes, piece: bytes, most: int = 400 << 20
) -> collections.Counter[str]:
    """Sends `piece` again and again on one connection after the other."""
    begin()
    found: collections.Counter[str] = collections.Counter()
    end, sent = time.monotonic() + SECONDS / 2, 0
    while time.monotonic() < end and sent < most:
        with connect(port) as connection:
            try:
                connection.sendall(head)
                while time.monotonic() < end and sent < most:
                    connection.sendall(piece)
                    sent += len(piece)
            except OSError:
                found["cut off"] += 1
    found["MB taken"] = sent >> 20
    return found


@attack("a grammar whose masks are slow, n = 8")
def grammar(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return repeated(
        port, begin, completion(n=8, max_tokens=300, stream=False, structured_outputs={"grammar": GRAMMAR}), 1
    )


@attack("3 bodies of 11,000,000 []")
def brackets(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return repeated(port, begin, post("/v1/completions", b'{"prompt":[' + b"[]," * 10_999_999 + b"[]]}"), 3)


@attack("3 times allowed_token_ids of 16,000,000")
def token_ids(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    return repeated(
        port,
        begin,
        post("/v1/completions", b'{"prompt":"a","allowed_token_ids":[' + b"1," * 15_999_999 + b"1]}"),
        3,
    )


@attack("500 heads of 60 KB, 500 beyond the limit")
def heads(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    begin()
    found: collections.Counter[str] = collections.Counter()
    for _ in range(500):
        for count in (60, 70):
            found[
                ask(
                    port,
                    b"GET /version HTTP/1.1\r\nHost: x\r\n"
                    + (b"X-A: " + b"b" * 1017 + b"\r\n") * count
                    + b"\r\n",
                )
            ] += 1
    return found


@attack("2,000 idle connections")
def idle(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    begin()
    held = [connect(port) for _ in range(2000)]
    time.sleep(5)
    for one in held:
        one.close()
    return collections.Counter({"held": len(held)})


@attack("1,500 simultaneous requests")
def simultaneous(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    data = completion(max_tokens=1, stream=False)

    async def one() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        answer = await reader.read(12)
        writer.transport.abort()
        return answer[9:].decode() or "cut off"

    return together(begin, [one] * 1500)


@attack("more connections than descriptors (60 are left)")
def descriptors(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    begin()
    held = [connect(port) for _ in range(400)]
    time.sleep(5)
    for one in held:
        one.close()
    return collections.Counter({"held": len(held)})


@attack("6,000 clients that leave at any stage")
def disconnects(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    rng, data = random.Random(1), completion(max_tokens=200)

    async def one() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        stage = rng.random()
        writer.write(data[: rng.randrange(len(data))] if stage < 0.4 else data + GET * rng.randrange(3))
        try:
            await writer.drain()
            if stage > 0.7:
                await asyncio.wait_for(reader.read(rng.randrange(1, 2000)), rng.random() * 2)
        except (ConnectionError, TimeoutError):
            pass
        if rng.random() < 0.5 and not writer.transport.is_closing():
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        writer.transport.abort()
        return "left"

    return together(begin, [one] * 6000, at_once=100)


@attack("500 slow senders (a byte in half a second)")
def slowloris(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    data = completion()

    async def one() -> str:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            for at in range(20):
                writer.write(data[at : at + 1])
                await asyncio.sleep(0.5)
        except ConnectionError:
            return "cut off"
        writer.transport.abort()
        return "left"

    return together(begin, [one] * 500, at_once=500)


@attack("3,000 offers of another protocol on a connection")
def upgrades(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    begin()
    offer = b"GET /version HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    with connect(port) as connection:
        threading.Thread(target=connection.sendall, args=(offer * 3000 + LAST,), daemon=True).start()
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return collections.Counter(status.decode() for status in STATUS.findall(answer))


@attack("3,000 bodies of malformed JSON")
def malformed(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    rng = random.Random(2)
    paths = [path for path in BODIES if path not in ADMIN_PATHS]
    chosen = itertools.islice(itertools.cycle(paths), 3000)
    return one_each(port, begin, [post(path, spoilt_json(rng, BODIES[path])) for path in chosen])


@attack("3,000 raw HTTP shapes")
def raw(port: int, begin: Callable[[], None]) -> collections.Counter[str]:
    rng = random.Random(3)
    return one_each(port, begin, [raw_request(rng) + LAST for _ in range(3000)])


def one_each(port: int, begin: Callable[[], None], requests: list[bytes]) -> collections.Counter[str]:
    """Each on a connection of its own, 20 at once; a client without an answer in a second leaves."""
    left = iter(requests)

    async def one() -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(next(left))
            found = STATUS.search(await asyncio.wait_for(reader.read(65536), 1))
        except ConnectionError:
            return "cut off"
        except TimeoutError:
            return "left"
        finally:
            writer.transport.abort()
        return found[1].decode() if found else "closed"

    return together(begin, [one] * len(requests), at_once=20)


def together(
    begin: Callable[[], None], clients: list[Callable[[], Any]], at_once: int = 2000
) -> collections.Counter[str]:
    """Runs the clients, `at_once` of them side by side, and counts their results. Stops in time."""

    async def main() -> collections.Counter[str]:
        found: collections.Counter[str] = collections.Counter()
        left, end = iter(clients), time.monotonic() + SECONDS

        async def worker() -> None:
            for client in left:
                if time.monotonic() > end:
                    return
                try:
                    found[await client()] += 1
                except OSError as error:
                    found[type(error).__name__] += 1

        begin()
        await asyncio.gather(*(worker() for _ in range(min(at_once, len(clients)))))
        return found

    return asyncio.run(main())


# Measuring


class Stream:
    """An honest client that keeps its connection."""

    def __init__(self, port: int, tokens: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self._body = json.dumps(
            {
                "prompt": "Once upon a time",
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
                "temperature": 0,
            }
        )

    def gaps(self) -> list[float]:
        """Seconds between the tokens of one answer."""
        self._connection.request("POST", "/v1/completions", self._body)
        answer = self._connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"the honest stream was refused: {answer.status} {answer.read()!r:.200}")
        found: list[float] = []
        last = 0.0
        for line in answer:
            if line.startswith(b"data: {"):
                if b'"error"' in line:
                    raise RuntimeError(f"the honest stream failed: {line!r:.200}")
                now = time.perf_counter()
                if last:
                    found.append(now - last)
                last = now
        return found


class Memory:
    """The most memory that the front and the engine had while the block ran, bytes."""

    def __init__(self, server: Serve) -> None:
        self._front = psutil.Process(server.process.pid)
        self._engines = server.cores()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = self._now()
        self.peak = self.before

    def _now(self) -> tuple[int, int]:
        return self._front.memory_info().rss, sum(p.memory_info().rss for p in self._engines)

    def _watch(self) -> None:
        while not self._ended.wait(0.05):
            front, engine = self._now()
            self.peak = max(front, self.peak[0]), max(engine, self.peak[1])

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def in_own_process(name: str, port: int, began: Any, results: Any) -> None:
    os.nice(15)
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    try:
        results.put(dict(ATTACKS[name][1](port, began.set)))
    except Exception as error:  # noqa: BLE001 - the row says it
        results.put({f"{type(error).__name__}: {error}"[:100]: 1})
    finally:
        began.set()


@contextmanager
def few_descriptors(server: Serve, name: str) -> Iterator[None]:
    """For the attack that wants it, the server has but 60 descriptors left."""
    if name != "descriptors":
        yield
        return
    pid = server.process.pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (psutil.Process(pid).num_fds() + 60, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def measure(server: Serve, name: str, tokens: int) -> dict[str, Any]:
    stream = Stream(server.port, tokens)
    stream.gaps()
    quiet, end = list[float](), time.monotonic() + QUIET_SECONDS
    while time.monotonic() < end:
        quiet += stream.gaps()
    context = multiprocessing.get_context("spawn")
    began, results = context.Event(), context.Queue()
    attacker = context.Process(target=in_own_process, args=(name, server.port, began, results), daemon=True)
    log_before = server.log.stat().st_size
    beside, failure = list[float](), None
    with few_descriptors(server, name), Memory(server) as memory:
        attacker.start()
        began.wait(120)
        start = time.monotonic()
        try:
            beside += stream.gaps()
            while attacker.is_alive() and time.monotonic() < start + 3 * SECONDS:
                beside += stream.gaps()
        except (RuntimeError, OSError, http.client.HTTPException) as error:
            failure = f"{type(error).__name__}: {error}"[:200]
        statuses = results.get(timeout=120)
        seconds = time.monotonic() - start
        attacker.join(10)
    row: dict[str, Any] = {
        "attack": name,
        "what": ATTACKS[name][0],
        "statuses": statuses,
        "seconds": round(seconds, 1),
        "failure": failure,
        "quiet_ms": figures(quiet),
        "beside_ms": figures(beside),
        "front_before_mb": memory.before[0] >> 20,
        "front_peak_mb": memory.peak[0] >> 20,
        "engine_before_mb": memory.before[1] >> 20,
        "engine_peak_mb": memory.peak[1] >> 20,
        "log_bytes": server.log.stat().st_size - log_before,
        "answers_after": False,
    }
    try:
        eventually(
            lambda: sum(map(server.metric, ("vllm:num_requests_running", "vllm:num_requests_waiting"))) == 0
        )
        row["answers_after"] = server.ask("/health")[0] == 200 and bool(Stream(server.port, 5).gaps())
    except (AssertionError, OSError, RuntimeError):
        pass
    return row


def figures(gaps: list[float]) -> dict[str, float]:
    """Milliseconds."""
    if len(gaps) < 2:
        return {}
    return {
        "median": 1e3 * statistics.median(gaps),
        "p99": 1e3 * statistics.quantiles(gaps, n=100)[98],
        "worst": 1e3 * max(gaps),
        "count": len(gaps),
    }


def print_row(row: dict[str, Any]) -> None:
    statuses = ", ".join(f"{count} {status}" for status, count in row["statuses"].items())
    quiet, beside = (
        [f"{found[name]:.0f}" if found else "-" for name in ("median", "worst")]
        for found in (row["quiet_ms"], row["beside_ms"])
    )
    added = f"{row['beside_ms']['worst'] - row['quiet_ms']['worst']:+.0f}" if row["beside_ms"] else "-"
    well = " ".join(["yes" if row["answers_after"] else "NO", row["failure"] or ""]).strip()
    cells = [
        row["what"],
        statuses,
        ", ".join(quiet),
        ", ".join(beside),
        added,
        row["front_peak_mb"],
        row["engine_peak_mb"],
        well,
    ]
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"some of them: {','.join(ATTACKS)}")
    parser.add_argument("--tokens", type=int, default=150, help="of each honest answer (default: 150)")
    parser.add_argument(
        "--serve", default="", help='more of the server\'s flags, such as "--target-itl-ms 0"'
    )
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    names = arguments.only.split(",") if arguments.only else list(ATTACKS)
    rows = []
    print(
        "| attack | answers | gap alone, ms: median, worst | beside it | added to the worst | front's peak, "
        "MB "
        "| engine's peak, MB | well after |\n|---|---|---|---|---|---|---|---|",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        server = Serve(Path(folder), MODEL, *shlex.split(arguments.serve))
        try:
            server.ready()
            for name in names:
                rows.append(measure(server, name, arguments.tokens))
                print_row(rows[-1])
        finally:
            server.stop()
    if arguments.json:
        Path(arguments.json).write_text(
            json.dumps({"tokens": arguments.tokens, "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
