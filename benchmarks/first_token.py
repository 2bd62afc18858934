"""Time from the start of a process to its first token, as a timeline of the parts of that start.

    python benchmarks/first_token.py qwen3-0.6b [--starts 3] [--tree FOLDER] [--options '{"seed": 1}']

Each start is a new process. Its caches are empty for the first one, and what the first has left for the later
ones. Python's compiled files are there, as after an installation by pip, also where the environment has
PYTHONDONTWRITEBYTECODE: without them each start compiles torch and Shoal, which takes about 2 s. The model
has random weights of a published shape, or is a checkpoint by its path or name. `--tree` measures another
checkout of Shoal. A line of the timeline is a part's begin and duration in seconds. Times of compilers are
sums over all kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import importlib
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

BEGUN = "SHOAL_BENCHMARK_BEGUN"  # the time at which the parent started this process

# The parts of a start: a function's module and name. The table of commands copies the functions of start_up
# when it is imported, so these come first.
PARTS = (
    ("shoal.engine.runner.start_up", "compile_ahead"),
    ("shoal.engine.runner.start_up", "num_blocks_that_fit"),
    ("shoal.engine.runner.start_up", "rehearse_longest"),
    ("shoal.engine.runner.start_up", "allocate"),
    ("shoal.engine.llm", "LLM._learn_text"),
    ("shoal.engine.core", "resolve_config"),
    ("shoal.engine.ranks.ranks", "use_gpu"),
    ("shoal.engine.runner.runner", "ModelRunner.__init__"),
    ("shoal.engine.runner.runner", "GpuShare"),
    ("shoal.engine.build_model", "Decoder"),
    ("shoal.engine.runner.runner", "load_weights"),
    ("shoal.engine.runner.kv_cache", "KvCache.allocate"),
    ("shoal.engine.runner.graphs", "StepGraphs.measure"),
    ("shoal.engine.runner.graphs", "StepGraphs.rehearse"),
    ("shoal.engine.runner.graphs", "StepGraphs.capture"),
    ("shoal.engine.runner.start_up", "rehearse_eager"),
    ("shoal.engine.core", "build_parts"),
    ("shoal.engine.llm", "LLM.generate"),
)


class Timeline:
    """Writes down when parts of this process begin and end, in seconds since the process was started."""

    def __init__(self, begun: float) -> None:
        self.begun = begun
        self.lines: list[tuple[float, float, int, str]] = []  # begin, seconds, depth, name
        self._depth = 0

    def now(self) -> float:
        return time.time() - self.begun

    def mark(self, name: str, begun: float) -> None:
        self.lines.append((begun, self.now() - begun, self._depth, name))

    @contextlib.contextmanager
    def part(self, name: str) -> Any:
        begun, self._depth = self.now(), self._depth + 1
        try:
            yield
        finally:
            self._depth -= 1
            self.mark(name, begun)

    def wrap(self, module: str, path: str) -> None:
        """Makes a function's calls parts. A tree that has no such function has no such part."""
        owner = importlib.import_module(module)
        *classes, name = path.split(".")
        for each in classes:
            owner = getattr(owner, each)
        function = getattr(owner, name, None)
        if function is None:
            return
        if isinstance(function, type):
            function, owner, name = function.__init__, function, "__init__"

        @functools.wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            with self.part(path):
                return function(*arguments, **options)

        setattr(owner, name, timed)

    def print(self) -> None:
        for begun, seconds, depth, name in sorted(self.lines):
            if seconds >= 0.01:
                print(f"  {begun:7.2f} {seconds:7.2f}  {'  ' * depth}{name}")


class Compilations:
    """Adds up what Triton's compiler did, by its stages. Forked processes compile, too, so it is a file."""

    def __init__(self) -> None:
        import triton

        self.hits = 0
        self._file = tempfile.NamedTemporaryFile("a+", buffering=1, suffix=".jsonl")  # noqa: SIM115   until the end
        triton.knobs.compilation.listener = self._listen

    def _listen(self, *, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        if cache_hit:
            self.hits += 1
            return
        stages = {
            "python": times.ir_initialization,
            **dict(times.lowering_stages),
            "files": times.store_results,
        }
        self._file.write(json.dumps([src.name, {name: us / 1e6 for name, us in stages.items()}]) + "\n")

    def print(self, most: int) -> None:
        self._file.seek(0)
        kernels = [json.loads(line) for line in self._file]
        stages: Counter[str] = Counter()
        sums: Counter[str] = Counter()
        for name, spent in kernels:
            stages.update(spent)
            sums[name] += sum(spent.values())
        counts = Counter(name for name, _ in kernels)
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in stages.items())
        longest = max((sum(spent.values()) for _, spent in kernels), default=0.0)
        print(
            f"  {len(kernels)} variants compiled, {self.hits} loaded; longest {longest:.1f} s; sums: {parts}"
        )
        for name, seconds in sums.most_common(most):
            print(f"    {seconds:7.2f} {counts[name]:3} {name}")


def start(model: str, options: dict[str, Any], most_kernels: int, most_functions: int) -> None:
    """One start, in this process."""
    timeline = Timeline(float(os.environ[BEGUN]))
    timeline.mark("interpreter", 0.0)
    with timeline.part("import text and options"):
        from shoal import LLM, SamplingParams
        from shoal.engine import llm as front
    compilations = None

    def open_early(device: str) -> None:
        """Opens the GPU as an LLM does, which imports torch and the engine next, and then wraps the parts."""
        nonlocal compilations
        opens(device)
        with timeline.part("import torch and the engine's ranks"):
            import shoal.engine.runner.start_up  # noqa: F401
        with timeline.part("(measuring)"):
            import torch

            if torch.version.cuda is not None and device != "cpu":
                compilations = Compilations()
            for part in PARTS:
                timeline.wrap(*part)

    opens, front.open_device_early = front.open_device_early, open_early
    profile = cProfile.Profile() if most_functions else None
    with timeline.part("LLM"), profile or contextlib.nullcontext():
        llm = LLM(model, **options)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
    first = timeline.now()
    used = os.times()
    timeline.print()
    if compilations is not None:
        compilations.print(most_kernels)
    mine, children = used.user + used.system, used.children_user + used.children_system
    print(f"first token after {first:.2f} s; CPU {mine:.1f} s and {children:.1f} s in children")
    modules = {name.partition(".")[0] for name in sys.modules}
    print(f"  {len(sys.modules)} modules, {sorted(modules & {'sympy', 'transformers', 'triton', 'zmq'})}")
    if profile is not None:
        for order in ("tottime", "cumulative"):
            pstats.Stats(profile).sort_stats(order).print_stats(most_functions)
    llm.exit()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--tree", default=str(Path(__file__).parents[1]))
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--kernels", type=int, default=0, help="kernels listed of a start that compiles")
    parser.add_argument(
        "--functions", type=int, default=0, help="functions listed of a profile of each start"
    )
    parser.add_argument("--cache", help="the folder of caches; a new one by default")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        start(arguments.model, arguments.options, arguments.kernels, arguments.functions)
        return
    with tempfile.TemporaryDirectory() as folder:
        model, options = arguments.model, dict(arguments.options)
        from workloads import SHAPES, write_model

        if model in SHAPES:
            model, options = write_model(folder, model), {"load_format": "dummy"} | options
        cache = arguments.cache or str(Path(folder, "cache"))
        installed = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        installed["PYTHONPATH"] = os.pathsep.join((arguments.tree, os.environ.get("PYTHONPATH", "")))
        modules = "shoal.engine.core, shoal.kernels.triton_ops"
        subprocess.run([sys.executable, "-c", f"import {modules}"], env=installed, check=True)
        for number in range(arguments.starts):
            print(f"start {number + 1} of {arguments.model}, {arguments.tree}", flush=True)
            environment = installed | {
                "SHOAL_CACHE": cache,
                "TRITON_CACHE_DIR": str(Path(cache, "triton")),
                BEGUN: str(time.time()),
            }
            command = [sys.executable, __file__, model, "--child", "--options", json.dumps(options)]
            command += ["--kernels", str(arguments.kernels), "--functions", str(arguments.functions)]
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main()
