"""`shoal plan --profile`: measures a worker's latencies for the planner
(shoal/fleet/planner/engine_profile.py).

Prompts are random tokens, so that none is cached. The time to a first token is measured with one request at a
time. For the time between tokens, requests of one context length generate together for a few steps, with as
many requests as fill the requested share of the cache.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from random import Random
from statistics import median
from typing import TYPE_CHECKING

from shoal.api import Request
from shoal.bench.offline import describe_machine
from shoal.bench.serving import import_figure, save_picture
from shoal.fleet.planner.engine_profile import (
    NOISE,
    DecodePoint,
    PrefillPoint,
    ProfileData,
    check_profile,
    with_room,
)
from shoal.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shoal.engine.llm import LLM

NUM_RUNS = 3  # runs of each prompt alone; the median counts
NUM_STEPS = 24  # steps of generation at each point
MOST_AGAIN = 5  # repetitions of a point that took longer than a point with more work


def measure_profile(
    llm: LLM, input_lengths: Sequence[int], context_lengths: Sequence[int], kv_usages: Sequence[float]
) -> ProfileData:
    """Measures all points, except contexts beyond the model's and usages beyond max_num_seqs. Raises
    ConfigError if too few points are left for a profile."""
    return _Measurement(llm).run(input_lengths, context_lengths, kv_usages)


class _Measurement:
    def __init__(self, llm: LLM) -> None:
        self._core, self._llm = llm.core, llm
        self._random, self._numbers = Random(0), itertools.count()
        self._max_kv_tokens = llm.core.kv_cache_tokens
        self._max_num_seqs = int(llm.core.config.max_num_seqs)

    def run(
        self, input_lengths: Sequence[int], context_lengths: Sequence[int], kv_usages: Sequence[float]
    ) -> ProfileData:
        longest = min(self._llm.config.max_model_len, self._max_kv_tokens) - NUM_STEPS - 2
        input_lengths, context_lengths = with_room(input_lengths, context_lengths, longest)
        self._first_token(input_lengths[0])  # warm-up
        times = [self._ttft(length) for length in input_lengths]
        _measure_again(times, lambda number: self._ttft(input_lengths[number]))
        prefill = [PrefillPoint(length, ttft_s) for length, ttft_s in zip(input_lengths, times)]
        decode = [point for length in context_lengths for point in self._decode(length, kv_usages)]
        data = ProfileData(
            model=self._llm.config.model,
            machine=describe_machine(self._llm),
            num_gpus=self._core.config.tensor_parallel_size,
            max_kv_tokens=self._max_kv_tokens,
            max_num_seqs=self._max_num_seqs,
            prefill=prefill,
            decode=decode,
        )
        check_profile(data, kv_usages)
        return data

    def _ttft(self, length: int) -> float:
        return median(self._first_token(length) for _ in range(NUM_RUNS))

    def _first_token(self, length: int) -> float:
        prompt = self._prompt(length)
        begun = time.perf_counter()
        request_id = self._add(prompt)
        while not any(output.request_id == request_id and output.token_ids for output in self._core.step()):
            pass
        seconds = time.perf_counter() - begun
        self._end([request_id])
        return seconds

    def _decode(self, length: int, kv_usages: Sequence[float]) -> list[DecodePoint]:
        """Yields the points of one context length, the emptiest cache first."""
        context = length + NUM_STEPS // 2
        block_size = self._core.config.block_size
        blocks = -(
            -(length + 2 * NUM_STEPS) // block_size
        )  # tokens of a request, which may begin before the others
        most = min(self._max_num_seqs, self._core.num_blocks // blocks)
        counts = sorted({max(1, round(usage * self._max_kv_tokens / context)) for usage in kv_usages})
        counts = [count for count in counts if count <= most]
        prompts: list[list[int]] = []  # prompts whose blocks stay cached from one point to the next
        times = []
        for count in counts:
            prompts += [self._prompt(length) for _ in range(count - len(prompts))]
            times.append(self._itl(prompts))
        _measure_again(times, lambda number: self._itl(prompts[: counts[number]]))
        self._core.reset_prefix_cache()
        return [
            DecodePoint(context, min(1.0, count * context / self._max_kv_tokens), itl_s, count / itl_s)
            for count, itl_s in zip(counts, times)
        ]

    def _itl(self, prompts: Sequence[list[int]]) -> float:
        """Returns the seconds from one token to the next while these requests run together."""
        running = [self._add(prompt) for prompt in prompts]
        self._until_all_have(running, 1)
        begun = time.perf_counter()
        self._until_all_have(running, NUM_STEPS)
        itl_s = (time.perf_counter() - begun) / NUM_STEPS
        self._end(running)
        return itl_s

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(self._core.model_config.vocab_size) for _ in range(length)]

    def _add(self, prompt: list[int]) -> str:
        request_id = f"profile-{next(self._numbers)}"
        most = self._llm.config.max_model_len - len(prompt)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=most, detokenize=False)
        self._core.add(Request(request_id, prompt, params))
        return request_id

    def _until_all_have(self, request_ids: Sequence[str], num_tokens: int) -> None:
        """Steps until each of these requests has `count` more tokens."""
        lacking = dict.fromkeys(request_ids, num_tokens)
        while lacking:
            for output in self._core.step():
                if output.request_id in lacking:
                    lacking[output.request_id] -= len(output.token_ids)
                    if lacking[output.request_id] <= 0:
                        del lacking[output.request_id]

    def _end(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._core.abort(request_id)
        while self._core.has_work:
            self._core.step()


def _measure_again(times: list[float], measure: Callable[[int], float]) -> None:
    """Repeats measurements that contradict. `times` are sorted by the work of their points. Other work on the
    machine makes times longer, never shorter, so a time above the next point's is measured again, and the
    least counts."""
    for number in reversed(range(len(times) - 1)):
        for _ in range(MOST_AGAIN):
            if times[number] <= NOISE * times[number + 1]:
                break
            times[number] = min(times[number], measure(number))


def table(data: ProfileData) -> str:
    """Returns the profile as text."""
    lines = [f"{data.model} on {data.machine}: {data.max_kv_tokens:,} tokens of KV cache"]
    lines += [
        f"  a prompt of {point.input_length:6,} tokens: the first token after {point.ttft_s * 1000:8.1f} ms"
        for point in data.prefill
    ]
    lines += [
        f"  contexts of {point.context_length:6,} tokens, KV usage {point.kv_usage:4.0%}: a token each "
        f"{point.itl_s * 1000:7.2f} ms, {point.tokens_per_s:9,.0f} tokens/s"
        for point in data.decode
    ]
    return "\n".join(lines)


def plot(data: ProfileData, path: str) -> None:
    """Draws the profile into a PNG file. Raises ConfigError without matplotlib."""
    figure = import_figure()(figsize=(12, 3.6), layout="constrained")
    prefill, itl, throughput = figure.subplots(1, 3)
    found = sorted(data.prefill, key=lambda point: point.input_length)
    prefill.plot([p.input_length for p in found], [p.ttft_s * 1000 for p in found], marker=".")
    prefill.set(xlabel="tokens of the prompt", ylabel="ms to the first token", title=data.model)
    for context in sorted({point.context_length for point in data.decode}):
        points = sorted((p for p in data.decode if p.context_length == context), key=lambda p: p.kv_usage)
        usages = [point.kv_usage for point in points]
        itl.plot(usages, [point.itl_s * 1000 for point in points], marker=".", label=f"{context:,}")
        throughput.plot(usages, [point.tokens_per_s for point in points], marker=".", label=f"{context:,}")
    itl.set(xlabel="KV usage", ylabel="ms from token to token")
    throughput.set(xlabel="KV usage", ylabel="tokens/s", title=data.machine)
    throughput.legend(title="context")
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path)
