"""A fleet with a planner, and the simulation of it by a measured profile: how far they are apart.

    python benchmarks/sim_against_real.py [CASE ...] [--json benchmarks/results/sim-against-real.json]

A worker of a tiny random model on the CPU is measured (`shoal plan --profile`), then a fleet of one or two of
them answers requests whose rate rises and falls, while its planner follows by load. The same requests, the
same planner and the profile go through the simulator; its only other input is how long the added worker
took to start.

In the cases with steps of 20 ms and more the workers are the same, but each step of their engines sleeps for
as long as SLOW_STEPS says, before it ends: so long do steps of a large model take on a GPU, and the two cores
of a small machine are not what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.simulator.config import SimConfig, SimWorkers
from shoal.fleet.simulator.simulator import Simulation
from shoal.fleet.simulator.trace import Trace, make_sine
from tests.serving import PYTHON, ROOT, free_port
from tests.tiny import VOCAB, write_model

BLOCKS, LONGEST = 140, 512
INPUT, PERIOD_S = 96, 60.0
TRIES = 5


@dataclass(frozen=True, slots=True)
class Case:
    """A sine of `low` to `high` requests a second, for `num_periods` periods."""

    low: float
    high: float
    num_output: int  # tokens of each request
    is_slow: bool = False  # its steps sleep
    num_periods: int = 1


CASES = {
    "1 to 6 requests/s": Case(1.0, 6.0, 200),
    "2 to 20 requests/s": Case(2.0, 20.0, 200),
    "0.5 to 3 requests/s, steps of 20 ms and more": Case(0.5, 3.0, 100, is_slow=True, num_periods=2),
}
# Python imports this at its start. A step sleeps for 20 ms, 0.5 ms for each sequence that decodes, and 0.2 ms
# for each token of a prompt.
SLOW_STEPS = """
import importlib.abc, importlib.util, sys, time

class SlowSteps(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != "shoal.engine.step_loop":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_slow(module):
            load(module)
            launch = module.StepLoop._launch

            def slow_launch(loop, plan):
                step = launch(loop, plan)
                time.sleep(0.02 + 0.0005 * plan.num_decodes + 0.0002 * (plan.num_tokens - plan.num_decodes))
                return step

            module.StepLoop._launch = slow_launch

        spec.loader.exec_module = load_slow
        return spec

sys.meta_path.insert(0, SlowSteps())
"""
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": LONGEST, "num_gpu_blocks_override": BLOCKS}
PLANNER: dict[str, Any] = {
    "enabled": True,
    "metric_pulling_interval": 0.2,
    "adjustment_interval": 2.0,
    "decode_kv_scale_up_threshold": 0.25,
    "decode_kv_scale_down_threshold": 0.02,
    "max_gpu_budget": 2,
}


def environment(folder: Path, case: Case) -> dict[str, str]:
    """`folder`: for what Python is to import."""
    paths = [str(ROOT)]
    if case.is_slow:
        (folder / "sitecustomize.py").write_text(SLOW_STEPS)
        paths.append(str(folder))
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def measure(model: Path, file: Path, environment: dict[str, str]) -> None:
    words = [PYTHON, "-m", "shoal", "plan", "--profile", model, "--output", file]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    words += ["--input-lengths", "96", "320", "--context-lengths", "96", "288"]
    words += ["--kv-usages", "0.05", "0.1", "0.2", "0.4", "0.8"]
    for _ in range(TRIES):  # a machine with other work has figures that contradict each other
        if not subprocess.run(list(map(str, words)), env=environment, cwd=ROOT).returncode:
            return
    sys.exit("no profile could be measured; is this machine busy?")


class Real:
    """`shoal fleet up`, and clients of it. `sizes`: seconds of the load, and workers that were ready then."""

    def __init__(self, folder: Path, model: Path, environment: dict[str, str], num_output: int) -> None:
        self.port = free_port()
        self.environment, self.num_output = environment, num_output
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.sizes: list[tuple[float, int, bool]] = []
        planner = "\n".join(f"{name} = {json.dumps(value)}" for name, value in PLANNER.items())
        options = ", ".join(f"{name} = {json.dumps(value)}" for name, value in OPTIONS.items())
        self.file = folder / "fleet.toml"
        self.file.write_text(
            f'port = {self.port}\n[[workers]]\nmodel = "{model}"\nname = "tiny"\noptions = {{ {options} }}\n'
            f"[planner]\n{planner}\n"
        )
        self.state = folder / "state"

    async def run(self, trace: Trace) -> None:
        command = ["-m", "shoal", "fleet", "up", str(self.file), "--state-dir", str(self.state)]
        fleet = await asyncio.create_subprocess_exec(PYTHON, *command, env=self.environment, cwd=ROOT)
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{self.port}") as self.session:
                while await self._ready() < 1:
                    await asyncio.sleep(0.2)
                await self._ask(random.Random(0))
                self.first_s, self.gaps_s = [], []
                began = time.monotonic()
                looking = asyncio.create_task(self._look(began))
                async with asyncio.TaskGroup() as group:
                    for request in trace.requests:
                        await asyncio.sleep(began + request.timestamp_s - time.monotonic())
                        group.create_task(self._ask(random.Random(request.timestamp_s)))
                self.seconds = time.monotonic() - began
                looking.cancel()
        finally:
            fleet.terminate()
            await fleet.wait()

    async def _ready(self) -> int:
        try:
            async with self.session.get("/fleet") as answer:
                view = await answer.json()
        except aiohttp.ClientError:
            return 0
        self.changing = view.get("planner", {}).get("changing", False)
        return sum(worker["state"] == "ready" for worker in view["workers"])

    async def _look(self, began: float) -> None:
        while True:
            count = await self._ready()
            self.sizes.append((time.monotonic() - began, count, self.changing))
            await asyncio.sleep(0.1)

    async def _ask(self, chance: random.Random) -> None:
        tokens = [chance.randrange(VOCAB - 50) for _ in range(INPUT)]
        body = {"model": "tiny", "prompt": tokens, "max_tokens": self.num_output}
        body |= {"ignore_eos": True, "stream": True}
        began, times = time.monotonic(), []
        async with self.session.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
        self.first_s.append(times[0] - began)
        self.gaps_s.append((times[-1] - times[0]) / (self.num_output - 1))


def mean_size(sizes: list[tuple[float, int]], end_s: float) -> float:
    """Over time."""
    ends = [at for at, _ in sizes[1:]] + [end_s]
    return sum((end - at) * count for (at, count), end in zip(sizes, ends)) / (end_s - sizes[0][0])


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """Returns measured and simulated figures by name, and the number of requests."""
    trace = make_sine(
        case.num_periods * PERIOD_S,
        low_rate=case.low,
        high_rate=case.high,
        period_s=PERIOD_S,
        input_tokens=INPUT,
        output_tokens=case.num_output,
    )
    profile = folder / "profile.json"
    model, variables = write_model(folder, "qwen3"), environment(folder, case)
    measure(model, profile, variables)
    real = Real(folder, model, variables, case.num_output)
    asyncio.run(real.run(trace))
    added = [at for at, count, _ in real.sizes if count == 2]
    asked = [at for at, _, changing in real.sizes if changing]
    start_s = added[0] - asked[0] if added else 0.0
    config = SimConfig(
        "tiny",
        profile=str(profile),
        workers=[SimWorkers(1)],
        worker_start_s=start_s,
        planner=PlannerConfig(**PLANNER),
    )
    simulation = Simulation(config, trace)
    result = simulation.run()
    # Workers that are starting count as well.
    sizes = [(at, max(count, 1 + changing)) for at, count, changing in real.sizes]
    begun = [(at, sum(found.values())) for at, found in simulation.sizes if at <= simulation.now]
    grown = [at for at, count in begun if count == 2]
    gaps = [(each.end_s - each.first_token_s) / (case.num_output - 1) for each in simulation.finished]
    pairs = {
        "first token, median, s": (median(real.first_s), result.ttft_p50),
        "time between tokens, mean, s": (fmean(real.gaps_s), fmean(gaps)),
        "the planner adds a worker at, s": (asked[0] if asked else 0.0, grown[0] if grown else 0.0),
        "mean number of workers, starting ones included": (
            mean_size(sizes, real.seconds),
            mean_size(begun, simulation.now),
        ),
        "until the last token, s": (real.seconds, simulation.now),
    }
    return {
        "requests": len(trace.requests),
        "start_s": start_s,
        **{what: {"real": pair[0], "simulated": pair[1]} for what, pair in pairs.items()},
    }


def table(figures: dict[str, Any]) -> str:
    lines = ["| | real | simulated | simulated / real |", "|---|---|---|---|"]
    for what, pair in figures.items():
        if isinstance(pair, dict):
            measured, simulated = pair["real"], pair["simulated"]
            share = simulated / measured if measured else 0.0
            lines.append(f"| {what} | {measured:.4g} | {simulated:.4g} | {share:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)} (default: all)")
    parser.add_argument("--json", type=Path, help="write the figures of these cases into this file")
    arguments = parser.parse_args()
    for name in arguments.cases:
        if name not in CASES:
            parser.error(f"case must be one of {', '.join(CASES)}, got {name!r}")
    for name in arguments.cases or CASES:
        with tempfile.TemporaryDirectory() as folder:
            figures = compare(CASES[name], Path(folder))
        print(f"{name}: {figures['requests']} requests; a worker started within {figures['start_s']:.1f} s")
        print(table(figures))
        if arguments.json is not None:
            known = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
            arguments.json.write_text(json.dumps({**known, name: figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
