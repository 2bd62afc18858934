"""Cost of KV events for the thread that schedules: 256 decoding sequences, with and without events, in turns.

    python benchmarks/kv_events.py --steps 1500

Pure Python, no model: the host's work of a step (schedule, update, hand events over), with a pause after it
in which the publisher runs, as it does while a device computes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from shoal.api import Request
from shoal.config import KVEventsConfig
from shoal.engine.block_events import BlockEvents
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.step_part import Parts
from shoal.kv.events.publisher import KvEvents
from shoal.sampling_params import SamplingParams


def start(events: KvEvents | None) -> Scheduler:
    """All prompts computed."""
    r = random.Random(0)
    scheduler = Scheduler(
        num_blocks=40_000, block_size=16, max_num_seqs=256, max_num_batched_tokens=16384, max_model_len=8192
    )
    if events is not None:
        Parts(scheduler).add(BlockEvents(events, scheduler.blocks))
    for i in range(256):
        # a sixteenth of the sequences fill a block in each step
        prompt = [r.randrange(50_000) for _ in range(200 + i % 16)]
        scheduler.add(Request(str(i), prompt, SamplingParams(max_tokens=7000, ignore_eos=True)))
    while any(seq.num_computed < seq.num_prompt_tokens for seq in (*scheduler.waiting, *scheduler.running)):
        step(scheduler, events)
    return scheduler


def step(scheduler: Scheduler, events: KvEvents | None) -> float:
    """Returns its CPU seconds."""
    begin = time.thread_time()
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.update(plan, [[1]] * len(plan.scheduled))
    if events is not None:
        events.flush()
    return time.thread_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--pause", type=float, default=0.001, help="seconds after a step (default: 0.001)")
    arguments = parser.parse_args()
    events = KvEvents(KVEventsConfig(enable_kv_cache_events=True, endpoint="inproc://kv-events-benchmark"))
    schedulers = {"without events": start(None), "published": start(events)}
    seconds: dict[str, list[float]] = {name: [] for name in schedulers}
    for _ in range(arguments.steps):
        for name, scheduler in schedulers.items():
            seconds[name].append(step(scheduler, events if name == "published" else None))
            time.sleep(arguments.pause)
    events.close()
    for name, measured in seconds.items():
        print(
            f"{name:>15}: median {statistics.median(measured) * 1e6:.0f} us a step, mean "
            f"{statistics.mean(measured) * 1e6:.0f}"
        )


if __name__ == "__main__":
    main()
