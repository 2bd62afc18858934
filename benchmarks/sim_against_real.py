"""A fleet with a planner, and the simulation of it by a measured profile: how far they are apart.

    python benchmarks/sim_against_real.py [--json benchmarks/results/sim-against-real.json]

A worker of a tiny random model on the CPU is measured (`shoal plan --profile`), then a fleet of one or two of
them answers requests whose rate rises and falls, while its planner follows by load. The same requests, the
same planner and the profile go through the simulator; what it is told beside them is how long the worker that
was added took to start.
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
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.fleet.planner_config import PlannerConfig
from shoal.fleet.sim_config import SimConfig, SimWorkers
from shoal.fleet.sim_trace import Trace, make_sine
from shoal.fleet.simulator import Simulation
from tests.serving import PYTHON, ROOT, free_port
from tests.tiny import VOCAB, write_model

BLOCKS, LONGEST = 140, 512
INPUT, OUTPUT, SECONDS = 96, 200, 60.0
TRIES = 5
OPTIONS = {"dtype": "float32", "device": "cpu", "max_model_len": LONGEST, "num_gpu_blocks_override": BLOCKS}
PLANNER: dict[str, Any] = {
    "enabled": True,
    "metric_pulling_interval": 0.2,
    "adjustment_interval": 2.0,
    "decode_kv_scale_up_threshold": 0.25,
    "decode_kv_scale_down_threshold": 0.02,
    "max_gpu_budget": 2,
}


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def measure(model: Path, file: Path) -> None:
    words = [PYTHON, "-m", "shoal", "plan", "--profile", model, "--output", file]
    words += [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    words += ["--input-lengths", "96", "320", "--context-lengths", "96", "288"]
    words += ["--kv-usages", "0.05", "0.1", "0.2", "0.4", "0.8"]
    for _ in range(TRIES):  # a machine with other work has figures that contradict each other
        if not subprocess.run(list(map(str, words)), env=environment(), cwd=ROOT).returncode:
            return
    sys.exit("no profile could be measured; is this machine busy?")


class Real:
    """`shoal fleet up`, and clients of it. `sizes`: seconds of the load, and workers that were ready then."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.port = free_port()
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
        fleet = await asyncio.create_subprocess_exec(PYTHON, *command, env=environment(), cwd=ROOT)
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
        body = {"model": "tiny", "prompt": tokens, "max_tokens": OUTPUT, "ignore_eos": True, "stream": True}
        began, times = time.monotonic(), []
        async with self.session.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    times.append(time.monotonic())
        self.first_s.append(times[0] - began)
        self.gaps_s.append((times[-1] - times[0]) / (OUTPUT - 1))


def mean_size(sizes: list[tuple[float, int]], end_s: float) -> float:
    """Over time."""
    ends = [at for at, _ in sizes[1:]] + [end_s]
    return sum((end - at) * count for (at, count), end in zip(sizes, ends)) / (end_s - sizes[0][0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--low", type=float, default=1.0, help="requests a second, at least (default: 1)")
    parser.add_argument("--high", type=float, default=6.0, help="and at most (default: 6)")
    arguments = parser.parse_args()
    trace = make_sine(
        SECONDS,
        low_rate=arguments.low,
        high_rate=arguments.high,
        period_s=SECONDS,
        input_tokens=INPUT,
        output_tokens=OUTPUT,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "profile.json"
        model = write_model(folder, "qwen3")
        measure(model, profile)
        real = Real(folder, model)
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
    begun = [
        (at, sum(sizes.values())) for at, sizes in simulation.sizes if at <= simulation.now
    ]  # with those that start
    grown = [at for at, count in begun if count == 2]
    gaps = [(request.end_s - request.first_token_s) / (OUTPUT - 1) for request in simulation.finished]
    figures = {
        "first token, median, s": (median(real.first_s), result.ttft_p50),
        "time between tokens, mean, s": (fmean(real.gaps_s), fmean(gaps)),
        "the planner adds a worker at, s": (asked[0] if asked else 0.0, grown[0] if grown else 0.0),
        "workers in the mean, with those that start": (
            mean_size([(at, max(count, 1 + changing)) for at, count, changing in real.sizes], real.seconds),
            mean_size(begun, simulation.now),
        ),
        "until the last token, s": (real.seconds, simulation.now),
    }
    print(f"{len(trace.requests)} requests; the worker that was added started within {start_s:.1f} s")
    print("| | real | simulated | simulated / real |\n|---|---|---|---|")
    for what, (measured, simulated) in figures.items():
        print(
            f"| {what} | {measured:.4g} | {simulated:.4g} | {simulated / measured if measured else 0:.2f} |"
        )
    if arguments.json is not None:
        figures_json = {what: {"real": pair[0], "simulated": pair[1]} for what, pair in figures.items()}
        text = json.dumps({"requests": len(trace.requests), "start_s": start_s, **figures_json}, indent=1)
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
