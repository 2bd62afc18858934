"""Prefill and decode apart on two devices, beside two plain workers behind `kv`.

    python benchmarks/disagg.py --json disagg.json                        # SmolLM2 on the CPU: a rehearsal
    python benchmarks/disagg.py --model qwen3-8b --device cuda --parts idle,load --rates 2,4,6,8,10,12 \\
        --json disagg.json                                                # two GPUs, random weights

`idle`: requests one after the other, prefilled remotely and locally by turns. `first` is the first token,
`second` the time from there to the second one, `step` the median gap between later ones; `alone` is a remote
prefill whose blocks nobody reads (max_tokens 1), so the difference to `first` is what the transfer costs the
prefill. `p2p`: a prompt that one plain worker has, at the other one: read from there, and computed. `load`:
rising rates of Poisson arrivals, the same for both fleets. Milliseconds; medians, and p99 where it says so.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from report import write_json
from target_itl import write_served_model
from workloads import SHAPES

from tests.serving import PYTHON, ROOT, free_port

START_S = 240
ALL_LOCAL = 1 << 20


class Fleet:
    """`shoal fleet up` with two workers. `roles`: of each."""

    def __init__(
        self, folder: Path, model: str, roles: tuple[str, str], arguments: argparse.Namespace
    ) -> None:
        self.port, self.admin, self.log = free_port(), free_port(), folder / f"{'-'.join(roles)}.log"
        options = {"device": "cpu", "kv_cache_memory_bytes": 500_000_000}
        if arguments.device == "cuda":
            options = {"load_format": "dummy"}
        options |= {"max_model_len": arguments.input_len + arguments.output_len + 64}
        if roles[0] == "both" and "p2p" in arguments.parts.split(","):
            options["kv_transfer_config"] = json.dumps({"kv_role": "kv_both"})
        lines = [f'model = "{model}"', f"port = {self.port}", f"admin_port = {self.admin}"]
        for i, role in enumerate(roles):
            lines += ["[[workers]]", f'role = "{role}"']
            if arguments.device == "cuda":
                lines.append(f"devices = [{i}]")
            inside = ", ".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
            lines.append(f"options = {{ {inside} }}")
        lines += ["[router]", 'policy = "kv"', f"max_local_prefill_length = {arguments.max_local}"]
        lines += ["max_prefill_queue_size = 1000", "enable_p2p = true"]
        file = folder / "fleet.toml"
        file.write_text("\n".join(lines))
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        env = os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder)}
        started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [PYTHON, "-m", "shoal", "fleet", "up", str(file)], env=env, stdout=log, stderr=log
            )
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() - started > START_S:
                print(self.log.read_text()[-6000:], flush=True)
                raise SystemExit("the fleet has not started")
            time.sleep(0.2)
        print(f"{' and '.join(roles)}: ready after {time.monotonic() - started:.0f} s", flush=True)

    def _is_ready(self) -> bool:
        try:
            workers = self.ask("/fleet")["workers"]
            return [one["state"] for one in workers].count("ready") == 2 and bool(
                self.ask("/v1/models")["data"]
            )
        except (OSError, ValueError, KeyError):
            return False

    def ask(self, path: str, body: object = None, admin: bool = False) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.admin if admin else self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, data)
        answer = connection.getresponse().read().decode()
        connection.close()
        return json.loads(answer) if answer else None

    def stream(self, prompt: list[int], max_tokens: int) -> tuple[list[float], str, str]:
        """Returns the arrival of each token in ms since the request was sent, the worker and the prefill
        worker."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        model = self.ask("/v1/models")["data"][0]["id"]
        sent = time.perf_counter()
        connection.request("POST", "/v1/completions", json.dumps(body | {"model": model}))
        answer, times = connection.getresponse(), []
        for line in answer:
            if line.startswith(b"data: {"):
                times.append((time.perf_counter() - sent) * 1e3)
        connection.close()
        return times, answer.headers["x-shoal-worker"], answer.headers.get("x-shoal-prefill-worker", "")

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def median(values: list[float]) -> float:
    return round(statistics.median(values), 2)


def measure_idle(fleet: Fleet, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rng, rows = random.Random(1), []
    found: dict[str, list[list[float]]] = {"remote": [], "local": [], "alone": []}
    for turn in range(arguments.turns + 2):
        for way in rng.sample(sorted(found), len(found)):
            time.sleep(0.15)  # a GPU that has just worked is slower
            limit = ALL_LOCAL if way == "local" else arguments.max_local
            fleet.ask("/fleet/config", {"max_local_prefill_length": limit}, admin=True)
            prompt = rng.choices(range(10_000), k=arguments.input_len)
            times, _, prefilled = fleet.stream(prompt, 1 if way == "alone" else 16)
            assert bool(prefilled) == (way != "local"), (way, prefilled)
            if turn >= 2:
                found[way].append(times)
    for way, runs in found.items():
        row: dict[str, Any] = {"prefill": way, "first": median([times[0] for times in runs])}
        row["first_p90"] = round(sorted(times[0] for times in runs)[int(0.9 * len(runs))], 2)
        if way != "alone":
            row["second"] = median([times[1] - times[0] for times in runs])
            row["step"] = median([b - a for times in runs for a, b in pairwise(times[2:])])
        rows.append(row)
    rows[0]["of_local"] = round(rows[0]["first"] / rows[1]["first"], 3)
    rows[0]["of_alone"] = round(rows[0]["first"] / rows[2]["first"], 3)
    decode = next(one for one in fleet.ask("/fleet")["workers"] if one["role"] == "decode")
    rows[0] |= {"blocks_in": decode["blocks_in"], "transfer_GB_s": decode["transfer_GB_s"]}
    return rows


def measure_p2p(fleet: Fleet, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One worker computes a prompt, and takes nothing new, so that the other one gets it again."""
    rng, found = random.Random(2), {"fetched": [], "computed": []}
    for turn in range(arguments.turns + 2):
        for way, runs in found.items():
            prompt = rng.choices(range(10_000), k=arguments.input_len)
            if way == "fetched":
                _, worker, _ = fleet.stream(prompt, 2)
                time.sleep(0.1)  # its KV events arrive
                fleet.ask(f"/fleet/drain/{worker}", {}, admin=True)
            times, other, _ = fleet.stream(prompt + rng.choices(range(10_000), k=20), 8)
            if way == "fetched":
                assert other != worker
                fleet.ask(f"/fleet/resume/{worker}", {}, admin=True)
            if turn >= 2:
                runs.append(times[0])
    return [{"prefix": way, "first": median(runs)} for way, runs in found.items()]


def measure_load(fleet: Fleet, arguments: argparse.Namespace, name: str) -> list[dict[str, Any]]:
    from shoal.bench.serving import ServeBench, run

    rows = []
    for rate in map(float, arguments.rates.split(",")):
        bench = ServeBench(
            base_url=f"http://127.0.0.1:{fleet.port}",
            num_prompts=max(8, int(rate * arguments.seconds)),
            request_rate=rate,
            random_input_len=arguments.input_len,
            random_output_len=arguments.output_len,
            ignore_eos=True,
            temperature=0.0,
            seed=int(rate * 1000),
            metric_percentiles="50,90,99",
        )
        result = asyncio.run(run(bench))
        row = {"fleet": name, "rate": rate, "completed": result["completed"]}
        for key in ("request_throughput", "output_throughput"):
            row[key] = round(result[key], 2)
        for key in (
            "median_ttft_ms",
            "p90_ttft_ms",
            "p99_ttft_ms",
            "median_itl_ms",
            "p99_itl_ms",
            "p99_tpot_ms",
        ):
            row[key] = round(result[key], 1)
        rows.append(row)
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--parts", default="idle,p2p,load")
    parser.add_argument("--input-len", type=int, default=3000)
    parser.add_argument("--output-len", type=int, default=150)
    parser.add_argument("--max-local", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--rates", default="2,4,8")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals at each rate")
    parser.add_argument("--json", metavar="PATH")
    arguments = parser.parse_args()
    parts, rows = arguments.parts.split(","), []
    with tempfile.TemporaryDirectory() as folder:
        model = write_served_model(folder, arguments.model) if arguments.model in SHAPES else arguments.model
        for roles, its in ((("prefill", "decode"), "idle"), (("both", "both"), "p2p")):
            if not {its, "load"} & set(parts):
                continue
            fleet = Fleet(Path(folder), model, roles, arguments)
            try:
                if its in parts:
                    rows += measure_idle(fleet, arguments) if its == "idle" else measure_p2p(fleet, arguments)
                    print(*rows[-3:], sep="\n", flush=True)
                if "load" in parts:
                    rows += measure_load(fleet, arguments, " + ".join(roles))
            except BaseException:
                print(fleet.log.read_text()[-4000:], flush=True)
                raise
            finally:
                fleet.close()
    if arguments.json:
        write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
