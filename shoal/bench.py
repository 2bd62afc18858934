"""`shoal bench`: offline throughput and latency of one engine on made-up prompts of token ids."""

from __future__ import annotations

import json
import time
from random import Random
from typing import TYPE_CHECKING

from shoal.api import SamplingParams
from shoal.errors import RequestError

if TYPE_CHECKING:
    from shoal.engine.llm import LLM


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    random = Random(seed)
    return [[random.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def measure(llm: LLM, params: SamplingParams, batch: int, input_len: int, num_iters: int, output_json: str | None) -> dict[str, float]:
    """Runs `batch` requests at once, `num_iters` times after a warm-up, each time on new prompts (no prefix is cached). Prints the best."""
    vocab_size = llm.core.model_config.vocab_size
    output_len = params.max_tokens or 0
    limit = llm.config.max_model_len or 0
    if num_iters < 1 or batch < 1 or input_len < 1 or input_len + output_len > limit:
        raise RequestError(f"{num_iters} runs of {batch} requests of {input_len} + {output_len} tokens: each number must be at least 1, "
                           f"and input and output together at most max_model_len {limit}")
    seconds = []
    for i in range(num_iters + 1):
        prompts = random_prompts(batch, input_len, vocab_size, seed=i)
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if i:
            seconds.append(time.perf_counter() - start)
    best = min(seconds)
    figures = {
        "batch": batch, "input_len": input_len, "output_len": output_len, "seconds": best, "seconds_all": seconds,
        "requests_per_s": batch / best, "output_tokens_per_s": batch * output_len / best,
        "total_tokens_per_s": batch * (input_len + output_len) / best, "ms_per_token": best / output_len * 1e3,
    }
    print(f"{batch} requests of {input_len} + {output_len} tokens: {best:.3f} s (best of {num_iters}), "
          f"{figures['output_tokens_per_s']:.1f} output tokens/s, {figures['total_tokens_per_s']:.1f} in all, "
          f"{figures['ms_per_token']:.2f} ms a token")
    if output_json:
        with open(output_json, "w") as file:
            json.dump(figures, file, indent=1)
    return figures    # type: ignore[return-value]
