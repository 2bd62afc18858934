"""What one worker can do, as measured: the time to a first token by the prompt's length, and the time between
tokens by how full the KV cache is and how long the contexts are.

A profile is a JSON file, which `shoal plan --profile MODEL` writes:

    {"model": "qwen3-8b", "machine": "NVIDIA H200", "num_gpus": 1,
     "max_kv_tokens": 790000, "max_num_seqs": 1024,
     "prefill": [{"input_length": 1024, "ttft_s": 0.031}, ...],
     "decode": [{"context_length": 1024, "kv_usage": 0.1, "itl_s": 0.009, "tokens_per_s": 8500.0}, ...]}

Between the measured points lines are drawn. Times are in seconds, and say so in their names: NVIDIA Dynamo's
first planner for latency compared seconds with a profile's milliseconds.
"""

from __future__ import annotations

import bisect
import codecs
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from shoal.errors import ConfigError

# What is measured, as far as there is room.
PROFILE_LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PROFILE_USAGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
NOISE = 2.0  # two measurements that differ by more than this factor where they cannot contradict each other


class PrefillPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_length: int
    ttft_s: float  # of an idle worker, without the network


class DecodePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_usage`: the share of the cache that running requests take, whose contexts have `context_length`
    tokens each. `tokens_per_s`: of all of them together."""

    context_length: int
    kv_usage: float
    itl_s: float
    tokens_per_s: float


class ProfileData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A profile's file."""

    model: str
    machine: str
    num_gpus: int  # of the worker
    max_kv_tokens: int  # that its KV cache has room for
    max_num_seqs: int  # that it runs at once
    prefill: list[PrefillPoint]
    decode: list[DecodePoint]


Points = list[tuple[float, float]]


class EngineProfile:
    """Raises ConfigError for figures that contradict each other or cannot be."""

    def __init__(self, data: ProfileData) -> None:
        self.data = data
        _check(data)
        self._prefill: Points = sorted((point.input_length, point.ttft_s) for point in data.prefill)
        lines: dict[int, Points] = {}
        for point in data.decode:
            lines.setdefault(point.context_length, []).append((point.kv_usage, point.itl_s))
        self._contexts = sorted(lines)
        self._decode = [sorted(lines[context]) for context in self._contexts]

    def ttft_s(self, input_length: float) -> float:
        """How long an idle worker takes to a first token. Beyond the longest prompt that was measured the
        last line goes on; the reference stops there."""
        return max(0.0, _on_line(self._prefill, input_length, goes_on=True))

    def itl_s(self, kv_usage: float, context_length: float) -> float:
        """How long a token takes while the cache is so full. Outside of what was measured the nearest point
        counts."""
        above = bisect.bisect_left(self._contexts, context_length)
        near = range(max(0, above - 1), min(len(self._contexts), above + 1))
        ends = [(float(self._contexts[i]), _on_line(self._decode[i], kv_usage)) for i in near]
        return _on_line(ends, context_length)

    def num_running(self, kv_usage: float, context_length: float) -> float:
        """How many requests with contexts of this length fill that share of the cache."""
        return kv_usage * self.data.max_kv_tokens / context_length


def read_profile(path: str | Path) -> EngineProfile:
    """Raises ConfigError that names the file and what is wrong with it."""
    try:
        data = msgspec.json.decode(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8), type=ProfileData)
        return EngineProfile(data)
    except OSError as error:
        raise ConfigError(
            f"profile {str(path)!r} cannot be read: {error.strerror}; measure one with shoal plan --profile "
            f"MODEL --output {path}"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"profile {str(path)!r} is none: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"profile {str(path)!r}: {error}") from None


def write_profile(path: str | Path, data: ProfileData) -> None:
    """As `read_profile` reads it, a point a line."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def with_room(
    input_lengths: Iterable[int], context_lengths: Iterable[int], longest: int
) -> tuple[list[int], list[int]]:
    """Those that a worker has room for, each once and in order. Raises ConfigError if too few are left."""
    inputs, contexts = (
        sorted({length for length in lengths if 1 <= length <= longest})
        for lengths in (input_lengths, context_lengths)
    )
    if len(inputs) < 2 or not contexts:
        found = [", ".join(map(str, lengths)) or "none" for lengths in (inputs, contexts)]
        raise ConfigError(
            f"prompts may have up to {longest} tokens here (max_model_len, KV cache); two --input-lengths "
            f"and one of --context-lengths are needed up to there, and these are {found[0]} and {found[1]}; "
            "give others, or more room"
        )
    return inputs, contexts


def check_profile(data: ProfileData, kv_usages: Iterable[float]) -> None:
    """Raises ConfigError if a worker had room for none of these, and if the profile contradicts itself."""
    if not data.decode:
        shown = ", ".join(f"{usage:g}" for usage in kv_usages)
        raise ConfigError(
            f"--kv-usages {shown}: none of them is between one request and "
            f"{data.max_num_seqs} (max_num_seqs) in a KV cache of {data.max_kv_tokens} tokens; give "
            "others, or shorter --context-lengths"
        )
    EngineProfile(data)


def _on_line(points: Sequence[tuple[float, float]], x: float, goes_on: bool = False) -> float:
    """The height at `x` of the line through the points, which are in order. `goes_on`: beyond the last of
    them, too."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0] and not goes_on:
        return points[-1][1]
    right = min(bisect.bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _check(data: ProfileData) -> None:
    for name in ("num_gpus", "max_kv_tokens", "max_num_seqs"):
        if getattr(data, name) < 1:
            raise ConfigError(f"{name} {getattr(data, name)} is not 1 or more")
    if len(data.prefill) < 2 or not data.decode:
        raise ConfigError(
            f"there are {len(data.prefill)} prefill and {len(data.decode)} decode points; at least two "
            "and one are needed"
        )
    for prefill in data.prefill:
        if prefill.input_length < 1 or not 0 < prefill.ttft_s < float("inf"):
            raise ConfigError(f"{prefill} is no measurement; both numbers are above 0")
    for point in data.decode:
        least = min(point.context_length, point.itl_s, point.tokens_per_s)
        if not 0 <= point.kv_usage <= 1 or not 0 < least < float("inf"):
            raise ConfigError(f"{point} is no measurement; kv_usage is from 0 to 1, the others are above 0")
        running = point.kv_usage * data.max_kv_tokens / point.context_length
        if not 1 / NOISE < running / point.itl_s / point.tokens_per_s < NOISE:
            raise ConfigError(
                f"{point} contradicts itself: so full, a cache of {data.max_kv_tokens} tokens "
                f"(max_kv_tokens) has {running:.1f} requests; with a token each {point.itl_s:g} s that is "
                f"{running / point.itl_s:.1f} tokens/s"
            )
    _check_order("input_length", [(point.input_length, point.ttft_s) for point in data.prefill], "ttft_s")
    for context, points in itertools.groupby(
        sorted(data.decode, key=lambda point: point.context_length), lambda point: point.context_length
    ):
        found = [(point.kv_usage, point.itl_s) for point in points]
        _check_order(f"context_length {context}: kv_usage", found, "itl_s")


def _check_order(name: str, points: list[tuple[float, float]], value: str) -> None:
    """More work takes no less time, but for noise."""
    for (x0, y0), (x1, y1) in itertools.pairwise(sorted(points)):
        if x0 == x1:
            raise ConfigError(f"{name} {x0:g} is there twice, with {value} {y0:g} and {y1:g}; keep one")
        if y1 * NOISE < y0:
            raise ConfigError(
                f"{name} {x0:g} has {value} {y0:g} and {x1:g} only {y1:g}: more work in less than half of "
                "the time; measure again"
            )
