"""`Trace`: requests of a simulation with their times, lengths and prefixes, read from a file or generated.

A file has one JSON object per line, in the Mooncake project's format:

    {"timestamp": ms, "input_length": n, "output_length": m, "hash_ids": [0, 1, 2],
     "session": "optional", "model": "optional"}

A hash id identifies a block of tokens and all tokens before it, so equal ids mean equal prefixes. The last
block of a prompt may be partial; such a block is never shared.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from shoal.errors import ConfigError

TRACE_BLOCK_SIZE = 512  # tokens of a block in Mooncake's traces


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`hash_ids`: ids of the prompt's full blocks; `session`: the client's session, for affinity."""

    timestamp_s: float
    input_length: int
    output_length: int
    hash_ids: Sequence[int]
    session: str | None = None
    model: str | None = None  # None: the fleet's first model


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their times. A hash id stands for `block_size` tokens."""

    requests: Sequence[TraceRequest]
    block_size: int

    @property
    def ideal_hit_rate(self) -> float:
        """Returns the share of prompt tokens that a single unlimited cache would find."""
        seen: set[int] = set()
        hits = total = 0
        for request in self.requests:
            total += request.input_length
            hits += sum(self.block_size for block in request.hash_ids if block in seen)
            seen.update(request.hash_ids)
        return hits / total if total else 0.0


def read_trace(path: str | Path, block_size: int = TRACE_BLOCK_SIZE) -> Trace:
    """Reads a trace; times count from its first request. Raises ConfigError with file and line for a
    malformed trace."""
    requests = []
    try:
        with open(path, encoding="utf-8-sig") as file:  # Windows programs write a byte order mark
            for number, line in enumerate(file, 1):
                if line.strip():
                    try:
                        requests.append(_parse(json.loads(line), block_size))
                    except ValueError as error:
                        raise ConfigError(f"{path}, line {number}: {error}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {str(path)!r} cannot be read: {error}") from None
    if not requests:
        raise ConfigError(f"trace {str(path)!r} must have a request, got an empty file")
    begin_s = min(request.timestamp_s for request in requests)
    requests = [dataclasses.replace(each, timestamp_s=each.timestamp_s - begin_s) for each in requests]
    return Trace(sorted(requests, key=lambda request: request.timestamp_s), block_size)


def make_customers(
    num_requests: int,
    requests_per_s: float,
    *,
    num_customers: int = 150,
    context_tokens: int = 6000,
    question_tokens: int = 1200,
    output_tokens: int = 200,
    seed: int = 0,
    block_size: int = 240,
) -> Trace:
    """Generates requests that each append a new question to one customer's context; customers and times are
    random (Poisson). Raises ValueError unless context and question are whole blocks."""
    if context_tokens % block_size or question_tokens % block_size:
        raise ValueError(f"context and question must be multiples of block_size {block_size}")
    rng = Random(seed)
    num_context, num_question = context_tokens // block_size, question_tokens // block_size
    fresh = num_customers * num_context
    now, requests = 0.0, []
    for _ in range(num_requests):
        now += rng.expovariate(requests_per_s)
        customer = rng.randrange(num_customers)
        context = range(customer * num_context, (customer + 1) * num_context)
        chain = [*context, *range(fresh, fresh + num_question)]
        fresh += num_question
        requests.append(
            TraceRequest(
                now, context_tokens + question_tokens, output_tokens, chain, session=f"customer {customer}"
            )
        )
    return Trace(requests, block_size)


def make_random(
    num_requests: int,
    requests_per_s: float,
    *,
    input_tokens: tuple[int, int] = (100, 1024),
    output_tokens: tuple[int, int] = (100, 1024),
    seed: int = 0,
    block_size: int = TRACE_BLOCK_SIZE,
) -> Trace:
    """Generates requests without shared prefixes, with lengths drawn uniformly from two inclusive ranges."""
    rng = Random(seed)
    now, fresh, requests = 0.0, 0, []
    for _ in range(num_requests):
        now += rng.expovariate(requests_per_s)
        length = rng.randint(*input_tokens)
        chain = range(fresh, fresh + length // block_size)
        fresh += len(chain)
        requests.append(TraceRequest(now, length, rng.randint(*output_tokens), chain))
    return Trace(requests, block_size)


def make_sine(
    seconds: float,
    *,
    low_rate: float = 5.0,
    high_rate: float = 20.0,
    period_s: float = 150.0,
    input_tokens: int = 3000,
    output_tokens: int = 150,
    seed: int = 0,
    block_size: int = TRACE_BLOCK_SIZE,
    model: str | None = None,
) -> Trace:
    """Generates requests without shared prefixes, with a sinusoidal rate (Poisson) that starts at its
    minimum: the load of NVIDIA Dynamo's planner benchmark (sin_synth.py)."""
    rng = Random(seed)
    now, fresh, requests = 0.0, 0, []
    while (now := now + rng.expovariate(high_rate)) < seconds:
        height = (1 - math.cos(2 * math.pi * now / period_s)) / 2
        if rng.random() * high_rate < low_rate + (high_rate - low_rate) * height:
            chain = range(fresh, fresh + input_tokens // block_size)
            fresh += len(chain)
            requests.append(TraceRequest(now, input_tokens, output_tokens, chain, model=model))
    return Trace(requests, block_size)


def merge_traces(*traces: Trace) -> Trace:
    """Merges the traces by time. Blocks of different traces stay different."""
    requests: list[TraceRequest] = []
    first = 0
    for trace in traces:
        for each in trace.requests:
            chain = [block + first for block in each.hash_ids]
            requests.append(dataclasses.replace(each, hash_ids=chain))
        first += 1 + max((max(each.hash_ids, default=0) for each in trace.requests), default=0)
    return Trace(sorted(requests, key=lambda each: each.timestamp_s), traces[0].block_size)


def write_trace(path: str | Path, requests: Iterable[TraceRequest]) -> None:
    """Writes a file for `read_trace`."""
    with open(path, "w", encoding="utf-8") as file:
        for request in requests:
            line = {
                "timestamp": request.timestamp_s * 1000,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": list(request.hash_ids),
            }
            for name in ("session", "model"):
                if getattr(request, name) is not None:
                    line[name] = getattr(request, name)
            file.write(json.dumps(line) + "\n")


def _parse(line: Any, block_size: int) -> TraceRequest:
    if not isinstance(line, dict):
        raise ValueError(f"a line must be one request as a JSON object, got {str(line)[:60]!r}")
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        if name not in line:
            raise ValueError(f"{name!r} is missing")
    timestamp, ids = line["timestamp"], line["hash_ids"]
    if isinstance(timestamp, bool) or not isinstance(timestamp, int | float) or not 0 <= timestamp < 1e15:
        raise ValueError(f"timestamp must be milliseconds from 0 to 1e15, got {timestamp!r}")
    for name in ("input_length", "output_length"):
        value = line[name]
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive number of tokens, got {value!r}")
    if not isinstance(ids, list) or not all(type(block) is int and 0 <= block < 1 << 64 for block in ids):
        raise ValueError("hash_ids must be a list of integers from 0 to 2**64 - 1")
    num_full, num_ids = line["input_length"] // block_size, -(-line["input_length"] // block_size)
    if not num_full <= len(ids) <= num_ids:
        raise ValueError(
            f"input_length {line['input_length']} must have {num_ids} hash_ids with blocks of {block_size} "
            f"tokens, got {len(ids)}; check [sim] block_size"
        )
    for name in ("session", "model"):
        if not isinstance(line.get(name), str | None):
            raise ValueError(f"{name} must be text, got {line[name]!r}")
    return TraceRequest(
        timestamp / 1000,
        line["input_length"],
        line["output_length"],
        ids[:num_full],
        line.get("session"),
        line.get("model"),
    )
