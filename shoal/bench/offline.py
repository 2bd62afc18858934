"""`shoal bench` measures offline throughput and latency of one engine, on random prompts of token ids, and
compares them with the roofline. `shoal profile` traces the same work."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from random import Random
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from shoal.errors import RequestError
from shoal.sampling_params import SamplingParams

if TYPE_CHECKING:
    from shoal.bench.floor import Ceilings, Floor
    from shoal.engine.llm import LLM

MANY_ROWS = 8192  # A long prompt: it multiplies in fp8 where a matrix can.


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Returns `count` prompts of `length` random token ids, the same for the same seed."""
    random = Random(seed)
    return [[random.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


def measure(
    llm: LLM, params: SamplingParams, batch: int, input_len: int, num_iters: int, output_json: str | None
) -> dict[str, Any]:
    """Runs `batch` requests at once, `num_iters` times after a warm-up.

    Each run has new prompts, so that no prefix is cached. Prints the best run's figures and returns them.
    """
    output_len = params.max_tokens or 0
    if num_iters < 1:
        raise RequestError(f"num_iters must be >= 1, got {num_iters}; time at least one run")
    prompts = [_prompts(llm, batch, input_len, output_len, seed) for seed in range(num_iters + 2)]
    dtype, machine = str(llm.config.dtype), describe_machine(llm)
    print(
        f"{llm.config.model} ({dtype}) on {machine}\n"
        f"{_plural(batch, 'request')} at once, each with {input_len} random prompt tokens and {output_len} "
        f"generated ones; the best of {_plural(num_iters, 'run')} after a warm-up",
        flush=True,
    )
    seconds = []
    with tqdm(total=num_iters + 2, unit="run", leave=False, disable=None) as bar:
        for i in range(num_iters + 1):
            bar.set_description(f"run {i} of {num_iters}" if i else "warm-up")
            start = time.perf_counter()
            llm.generate(prompts[i], params, use_tqdm=False)
            if i:
                seconds.append(time.perf_counter() - start)
            bar.update()
        bar.set_description("measuring the machine's limits")
        ceilings = measure_ceilings(llm)
        idle = idle_share(llm, prompts[-1], params)
        bar.update()
    best = min(seconds)
    floor = floor_of(llm, ceilings)
    least = floor.run([input_len] * batch, [output_len] * batch, llm.core.config.max_num_seqs).seconds
    figures = {
        "model": llm.config.model,
        "dtype": dtype,
        "machine": machine,
        "batch": batch,
        "input_len": input_len,
        "output_len": output_len,
        "seconds": best,
        "seconds_all": seconds,
        "requests_per_s": batch / best,
        "prompt_tokens_per_s": batch * input_len / best,
        "output_tokens_per_s": batch * output_len / best,
        "total_tokens_per_s": batch * (input_len + output_len) / best,
        "ms_per_token": best / output_len * 1e3,
        "floor_seconds": least,
        "fraction_of_floor": least / best,
        "gpu_idle_share": idle,
        "bytes_per_s": ceilings.bytes_per_s,
        "flops_per_s": ceilings.flops_per_s,
    }
    print(table(figures))
    if output_json:
        with open(output_json, "w") as file:
            json.dump(figures, file, indent=1)
    return figures


def table(figures: dict[str, Any]) -> str:
    """Returns the figures in words, one per line."""
    gigabytes, gigaflops = figures["bytes_per_s"] / 1e9, figures["flops_per_s"] / 1e9
    rows = [
        ("Time of the run", f"{figures['seconds']:.3f} s"),
        ("Requests answered", f"{figures['requests_per_s']:.2f} requests/s"),
        ("Prompts read", f"{figures['prompt_tokens_per_s']:.1f} prompt tokens/s"),
        ("Text generated", f"{figures['output_tokens_per_s']:.1f} output tokens/s"),
        ("Both together", f"{figures['total_tokens_per_s']:.1f} tokens/s"),
        (
            "Each request's next token",
            f"every {figures['ms_per_token']:.2f} ms, its share of the prompt included",
        ),
        (
            "Hardware limit",
            f"{figures['fraction_of_floor']:.0%} of the estimate for {gigabytes:.0f} GB/s and "
            f"{gigaflops:.0f} GFLOP/s"
            + (" (above 100%: the estimate is too low)" if figures["fraction_of_floor"] > 1 else ""),
        ),
    ]
    if figures["gpu_idle_share"] is not None:
        rows.append(("GPU idle between steps", f"{figures['gpu_idle_share']:.1%} of the time"))
    return "\n".join(f"  {name:27} {value}" for name, value in rows)


def describe_machine(llm: LLM) -> str:
    """Returns the name of the engine's machine: its GPUs, or the processor with its number of threads."""
    import torch

    if llm.core.ranks.runner.device.type == "cuda":
        count = llm.core.config.tensor_parallel_size
        return (f"{count} x " if count > 1 else "") + torch.cuda.get_device_name(llm.core.ranks.runner.device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    return f"{name}, {_plural(torch.get_num_threads(), 'thread')}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def trace(llm: LLM, params: SamplingParams, batch: int, input_len: int, folder: str) -> list[str]:
    """Traces `batch` requests into `folder`, after a warm-up with the same number. Prints and returns the
    files, one per rank."""
    prompts = [_prompts(llm, batch, input_len, params.max_tokens or 0, seed) for seed in range(2)]
    llm.generate(prompts[0], params, use_tqdm=False)
    llm.start_profile(folder)
    llm.generate(prompts[1], params, use_tqdm=False)
    files = llm.stop_profile()
    for file in files:
        print(f"{file}: open it at https://ui.perfetto.dev")
    return files


def _prompts(llm: LLM, batch: int, input_len: int, output_len: int, seed: int) -> list[list[int]]:
    limit = llm.config.max_model_len
    if batch < 1 or input_len < 1 or input_len + output_len > limit:
        raise RequestError(
            "batch, input_len and output_len must be >= 1, and input_len + output_len <= max_model_len "
            f"{limit}, got {batch}, {input_len} and {output_len}"
        )
    return random_prompts(batch, input_len, llm.core.model_config.vocab_size, seed)


def idle_share(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> float | None:
    """Runs the requests once and returns the share of the GPU's time between steps; None on the CPU."""
    llm.collective_rpc("start_clock")
    llm.generate(prompts, params, use_tqdm=False)
    times = llm.collective_rpc("stop_clock")[0]
    return None if times is None or not times[0] else times[1] / times[0]


def floor_of(llm: LLM, ceilings: Ceilings) -> Floor:
    """Returns the least times of all devices of the engine, each with its share of the weights and the
    cache."""
    import torch

    from shoal.bench.floor import Ceilings, Floor
    from shoal.layers.experts import Experts
    from shoal.layers.matrix import MatrixLayer
    from shoal.weights.update import weight_tensors

    core, tp = llm.core, llm.core.config.tensor_parallel_size
    model = core.ranks.runner.model

    def held(module: torch.nn.Module) -> int:
        return tp * sum(tensor.numel() * tensor.element_size() for _, tensor in weight_tensors(module))

    # A shared expert that is the last of the experts is read with each token, too.
    experts = sum(
        held(module) * module.kind.num_experts // module.kind.num_matrices
        for module in model.modules()
        if isinstance(module, Experts)
    )
    dense = held(model) - experts
    if not core.model_config.tie_word_embeddings:
        dense -= held(model.embed_tokens)
    matrices = [module for module in model.modules() if isinstance(module, MatrixLayer)]
    in_fp8 = any(matrix.format.fp8_group(MANY_ROWS) is not None for matrix in matrices)
    together = Ceilings(ceilings.bytes_per_s * tp, ceilings.flops_per_s * tp)
    return Floor(
        core.model_config,
        together,
        dense,
        experts,
        torch.empty((), dtype=core.ranks.runner.dtype).element_size(),
        matmul_rate=2.0 if in_fp8 else 1.0,
    )


def measure_ceilings(llm: LLM) -> Ceilings:
    """Measures the limits of the engine's device in its dtype: a plain copy and a large GEMM, each the best
    of a few runs."""
    import torch

    from shoal.bench.floor import Ceilings

    device, dtype = llm.core.ranks.runner.device, llm.core.ranks.runner.dtype
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 768
    count = (256 << 20 if on_gpu else 64 << 20) // dtype.itemsize
    with torch.inference_mode():
        source = torch.ones(count, dtype=dtype, device=device)
        target = torch.empty(count, dtype=dtype, device=device)
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        copy, product = _best(lambda: target.copy_(source), on_gpu), _best(lambda: a @ b, on_gpu)
    return Ceilings(2 * count * dtype.itemsize / copy, 2 * size**3 / product)


def _best(call: Any, on_gpu: bool) -> float:
    """Returns the seconds of the fastest of ten calls."""
    import torch

    seconds = []
    for _ in range(10):
        start = time.perf_counter()
        call()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return min(seconds)
