"""`EngineProfile`: measured TTFT of one worker by prompt length, and ITL by KV cache usage and context
length. bench/worker_profile.py measures it, and sla_sizing.py extends it to many workers.

A profile is a JSON file, which `shoal plan --profile MODEL` writes:

    {"model": "qwen3-8b", "machine": "NVIDIA H200", "num_gpus": 1,
     "max_kv_tokens": 790000, "max_num_seqs": 1024,
     "prefill": [{"input_length": 1024, "ttft_s": 0.031}, ...],
     "decode": [{"context_length": 1024, "kv_usage": 0.1, "itl_s": 0.009, "tokens_per_s": 8500.0}, ...]}

Values between the measured points are interpolated linearly. Times are in seconds and have the suffix _s:
NVIDIA Dynamo's first SLA planner compared seconds with a profile's milliseconds.
"""

from __future__ import annotations

import bisect
import codecs
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from shoal.errors import ConfigError

# Measured points, as far as the cache has room.
PROFILE_LENGTHS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PROFILE_USAGES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
NOISE = 2.0  # factor above which two measurements contradict each other


class PrefillPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    input_length: int
    ttft_s: float  # on an idle worker, without the network


class DecodePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`kv_usage`: share of the cache used by running requests with contexts of `context_length` tokens each.
    `tokens_per_s`: sum over these requests."""

    context_length: int
    kv_usage: float
    itl_s: float
    tokens_per_s: float


class ProfileData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a profile's file."""

    model: str
    machine: str
    num_gpus: int  # per worker
    max_kv_tokens: int  # size of its KV cache
    max_num_seqs: int  # its limit of running requests
    prefill: list[PrefillPoint]
    decode: list[DecodePoint]


Points = list[tuple[float, float]]


class EngineProfile:
    """Raises ConfigError for impossible or contradictory figures."""

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
        """Returns the time to the first token on an idle worker. Beyond the longest measured prompt it
        extrapolates the last segment; Dynamo returns the last value there."""
        return max(0.0, _on_line(self._prefill, input_length, extrapolates=True))

    def itl_s(self, kv_usage: float, context_length: float) -> float:
        """Returns the time between tokens at this cache usage. Outside the measured range the nearest point
        counts."""
        above = bisect.bisect_left(self._contexts, context_length)
        near = range(max(0, above - 1), min(len(self._contexts), above + 1))
        ends = [(float(self._contexts[i]), _on_line(self._decode[i], kv_usage)) for i in near]
        return _on_line(ends, context_length)

    def num_running(self, kv_usage: float, context_length: float) -> float:
        """Returns the number of requests with contexts of this length that fill that share of the cache."""
        return kv_usage * self.data.max_kv_tokens / context_length


def read_profile(path: str | Path) -> EngineProfile:
    """Reads a profile. Raises ConfigError with the file's name and the error."""
    try:
        data = msgspec.json.decode(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8), type=ProfileData)
        return EngineProfile(data)
    except OSError as error:
        raise ConfigError(
            f"profile {str(path)!r} cannot be read: {error.strerror}; measure one with shoal plan --profile "
            f"MODEL --output {path}"
        ) from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"profile {str(path)!r} must be a profile's JSON: {error}") from None
    except ConfigError as error:
        raise ConfigError(f"profile {str(path)!r}: {error}") from None


def write_profile(path: str | Path, data: ProfileData) -> None:
    """Returns the JSON for `read_profile`, one point per line."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=1) + b"\n")


def with_room(
    input_lengths: Iterable[int], context_lengths: Iterable[int], longest: int
) -> tuple[list[int], list[int]]:
    """Returns the lengths for which a worker has room, sorted and unique. Raises ConfigError if too few are
    left."""
    inputs, contexts = (
        sorted({length for length in lengths if 1 <= length <= longest})
        for lengths in (input_lengths, context_lengths)
    )
    if len(inputs) < 2 or not contexts:
        found = [", ".join(map(str, lengths)) or "none" for lengths in (inputs, contexts)]
        raise ConfigError(
            "--input-lengths must have two and --context-lengths one value up to the limit of "
            f"{longest} tokens (max_model_len, KV cache), got {found[0]} and {found[1]}; give shorter ones, "
            "or raise the limit"
        )
    return inputs, contexts


def check_profile(data: ProfileData, kv_usages: Iterable[float]) -> None:
    """Raises ConfigError if a worker has room for no usage, and if the profile contradicts itself."""
    if not data.decode:
        shown = ", ".join(f"{usage:g}" for usage in kv_usages)
        raise ConfigError(
            f"--kv-usages must have a value between one and {data.max_num_seqs} requests (max_num_seqs) in a "
            f"KV cache of {data.max_kv_tokens} tokens, got {shown}; give others, or shorter --context-lengths"
        )
    EngineProfile(data)


def _on_line(points: Sequence[tuple[float, float]], x: float, extrapolates: bool = False) -> float:
    """Interpolates at `x` between the sorted points. `extrapolates`: also beyond the last one."""
    if len(points) == 1 or x <= points[0][0]:
        return points[0][1]
    if x >= points[-1][0] and not extrapolates:
        return points[-1][1]
    right = min(bisect.bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _check(data: ProfileData) -> None:
    for name in ("num_gpus", "max_kv_tokens", "max_num_seqs"):
        if getattr(data, name) < 1:
            raise ConfigError(f"{name} must be at least 1, got {getattr(data, name)}; measure again")
    if len(data.prefill) < 2 or not data.decode:
        raise ConfigError(
            f"a profile must have two prefill points and one decode point, got {len(data.prefill)} and "
            f"{len(data.decode)}; measure again"
        )
    for prefill in data.prefill:
        if prefill.input_length < 1 or not 0 < prefill.ttft_s < float("inf"):
            raise ConfigError(
                f"both numbers of a prefill point must be above 0, got {prefill}; measure again"
            )
    for point in data.decode:
        least = min(point.context_length, point.itl_s, point.tokens_per_s)
        if not 0 <= point.kv_usage <= 1 or not 0 < least < float("inf"):
            raise ConfigError(
                f"kv_usage must be from 0 to 1 and the other numbers above 0, got {point}; measure again"
            )
        running = point.kv_usage * data.max_kv_tokens / point.context_length
        if not 1 / NOISE < running / point.itl_s / point.tokens_per_s < NOISE:
            raise ConfigError(
                f"{point} contradicts itself: at this usage a cache of {data.max_kv_tokens} tokens "
                f"(max_kv_tokens) has {running:.1f} requests, which with one token each {point.itl_s:g} s "
                f"generate {running / point.itl_s:.1f} tokens/s; measure again"
            )
    _check_order("input_length", [(point.input_length, point.ttft_s) for point in data.prefill], "ttft_s")
    for context, points in itertools.groupby(
        sorted(data.decode, key=lambda point: point.context_length), lambda point: point.context_length
    ):
        found = [(point.kv_usage, point.itl_s) for point in points]
        _check_order(f"context_length {context}: kv_usage", found, "itl_s")


def _check_order(name: str, points: list[tuple[float, float]], value: str) -> None:
    """Raises ConfigError if more work takes less time, beyond noise."""
    for (x0, y0), (x1, y1) in itertools.pairwise(sorted(points)):
        if x0 == x1:
            raise ConfigError(f"{name} {x0:g} must appear once, got {value} {y0:g} and {y1:g}; keep one")
        if y1 * NOISE < y0:
            raise ConfigError(
                f"{name} {x0:g} has {value} {y0:g} and {x1:g} only {y1:g}: more work in less than half of "
                "the time; measure again"
            )
