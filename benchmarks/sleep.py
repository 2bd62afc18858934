"""Costs and gains of sleep mode on one GPU (or several), with random weights of a published shape; and a
swap between two models.

    python benchmarks/sleep.py [--model qwen3-8b] [--tp 1] [--cycles 5] [--swap] [--json out.json]

Seconds of the first sleep, of later ones, of waking, at levels 1 and 2; bytes that stay on the card; the same
tokens before and after.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time

GIB = 2**30
# vLLM 0.24 on one H200, qwen3-8b, gpu_memory_utilization 0.9
VLLM = {
    "first sleep, level 1": 9.42,
    "sleep, level 1": 0.36,
    "wake, level 1": 0.88,
    "sleep, level 2": 0.055,
    "wake, level 2": 0.64,
    "GiB left, level 1": 2.33,
}


def timed(call) -> float:
    import torch

    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def used_gib() -> float:
    import torch

    free, total = torch.cuda.mem_get_info()
    return (total - free) / GIB


def run(path: str, tp: int, cycles: int, options: dict) -> dict[str, float]:
    import torch

    from shoal import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)
    prompts = [list(range(1, 200)), [7] * 300]

    def tokens() -> list[list[int]]:
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]

    torch.cuda.init()
    torch.cuda.synchronize()
    rows = {"GiB before the engine (CUDA context)": used_gib()}
    start = time.perf_counter()
    llm = LLM(
        path,
        load_format="dummy",
        max_model_len=4608,
        tensor_parallel_size=tp,
        enable_sleep_mode=True,
        **options,
    )
    rows["start-up"] = time.perf_counter() - start
    before, sums = tokens(), llm.check_weights()
    rows["checksums"] = timed(llm.check_weights)
    rows["GiB awake"] = used_gib()
    rows["host buffers, in the background"] = max(llm.collective_rpc("wait_for_host"))
    rows["first sleep, level 1"] = timed(llm.sleep)
    rows["GiB left, level 1"] = used_gib()
    times: dict[str, list[float]] = {}
    for i in range(cycles):
        for level in (1, 2):
            if i or level == 2:
                times.setdefault(f"sleep, level {level}", []).append(timed(lambda: llm.sleep(level=level)))  # noqa: B023
            if level == 2:
                rows["GiB left, level 2"] = used_gib()
            if i == cycles - 1:
                time.sleep(6)  # the driver scrubs what was freed
                rows[f"wake, level {level}, after 6 s"] = timed(llm.wake_up)
            else:
                times.setdefault(f"wake, level {level}", []).append(timed(llm.wake_up))
            if level == 2:
                times.setdefault("dummy weights again", []).append(timed(lambda: llm.update_weights(path)))
            elif not i:
                rows["first token after waking"] = timed(
                    lambda: llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1), use_tqdm=False)
                )
            assert tokens() == before and llm.check_weights() == sums
    rows |= {name: statistics.median(values) for name, values in times.items()}
    rows["GiB awake at the end"] = used_gib()
    llm.exit()
    return rows


def swap(path: str, options: dict) -> dict[str, float]:
    """Two engines of one shape take turns: from the request for the sleeping one to its first token."""
    from shoal import LLM, SamplingParams

    one = SamplingParams(max_tokens=1, temperature=0.0)
    engines = []
    for _ in range(2):
        for engine in engines:
            engine.sleep()
        engines.append(LLM(path, load_format="dummy", max_model_len=4608, enable_sleep_mode=True, **options))
        engines[-1].collective_rpc("wait_for_host")
    parts: dict[str, list[float]] = {}
    for i in range(6):
        to, away = engines[i % 2], engines[1 - i % 2]
        took = [
            timed(away.sleep),
            timed(to.wake_up),
            timed(lambda to=to: to.generate([[1, 2, 3, 4]], one, use_tqdm=False)),
        ]
        if i >= 2:
            for name, seconds in zip(
                ("swap: sleep", "swap: wake", "swap: first token", "swap: in all"), [*took, sum(took)]
            ):
                parts.setdefault(name, []).append(seconds)
    for engine in engines:
        engine.exit()
    return {name: statistics.median(values) for name, values in parts.items()}


def main() -> None:
    from report import write_json
    from workloads import write_model

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--cycles", type=int, default=5)
    parser.add_argument("--swap", action="store_true", help="two engines take turns as well")
    parser.add_argument("--json")
    parser.add_argument("--options", default="{}", help="more engine options, as JSON")
    arguments = parser.parse_args()
    path, options = write_model(tempfile.mkdtemp(), arguments.model), json.loads(arguments.options)
    rows = run(path, arguments.tp, arguments.cycles, options)
    if arguments.swap:
        rows |= swap(path, options)
    peers = VLLM if arguments.model == "qwen3-8b" and arguments.tp == 1 else {}
    for name, value in rows.items():
        print(
            f"{name:38} {value:8.3f}" + (f"   vLLM 0.24: {peers[name]:g}" if name in peers else ""),
            flush=True,
        )
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
