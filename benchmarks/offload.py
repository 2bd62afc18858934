"""Gains and costs of the tiers below the device on one GPU, with random weights of a published shape.

    python benchmarks/offload.py conversations [--conversations 64] [--turns 8] [--prefix 8000] [--json FILE]
    python benchmarks/offload.py second-turn   ten engines just started: is the host tier used at once?
    python benchmarks/offload.py decode        what offloading costs a decode batch of 256
    python benchmarks/offload.py restart       a disk tier: what a second engine finds, against none

conversations: 8 at a time, in turn, so that each comes back when 64 others have passed through a cache of a
third of what they need. A turn adds 32 tokens of the user's and 64 of the model's. Time to first token from
the second turn on, with a host tier and without any.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from random import Random
from typing import Any

AT_ONCE, ANSWER, QUESTION = 8, 64, 32
VOCABULARY = 100_000


def tokens(r: Random, count: int) -> list[int]:
    return [r.randrange(VOCABULARY) for _ in range(count)]


def ask(
    core: Any, prompts: list[list[int]], max_tokens: int, name: str
) -> tuple[list[list[int]], list[float], list[int]]:
    """All at once: answers, seconds to each one's first token, cached tokens of each."""
    from shoal import SamplingParams
    from shoal.api import Request

    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    answers: dict[str, list[int]] = {}
    first: dict[str, float] = {}
    cached: dict[str, int] = {}
    start = time.perf_counter()
    for i, prompt in enumerate(prompts):
        core.add(Request(f"{name}-{i}", prompt, params, arrival=float(i)))
        answers[f"{name}-{i}"] = []
    while core.has_work:
        for output in core.step():
            answers[output.request_id] += output.token_ids
            first.setdefault(output.request_id, time.perf_counter() - start)
            cached[output.request_id] = output.num_cached_tokens
    return list(answers.values()), [first[key] for key in answers], [cached[key] for key in answers]


def build(model: str, **options: Any) -> Any:
    from shoal import LLM

    start = time.perf_counter()
    llm = LLM(model, load_format="dummy", max_model_len=16384, max_num_seqs=256, **options)
    print(f"start-up {time.perf_counter() - start:.1f} s, {llm.stats().num_blocks} blocks on the device")
    return llm


def wait_until_pinned(core: Any) -> float:
    from shoal.engine.offload.tiers import KvTiers

    start = time.perf_counter()
    while not core.parts.find(KvTiers).is_pinned:
        core.tick()
        time.sleep(0.01)
    return time.perf_counter() - start


def talk(core: Any, args: argparse.Namespace, turns: int, name: str) -> list[dict[str, Any]]:
    r = Random(7)
    histories = [tokens(r, args.prefix) for _ in range(args.conversations)]
    rows = []
    for turn in range(turns):
        ttft: list[float] = []
        cached = asked = 0
        start = time.perf_counter()
        for at in range(0, len(histories), AT_ONCE):
            group = histories[at : at + AT_ONCE]
            for history in group:
                history += tokens(r, QUESTION)
            answers, times, found = ask(core, group, ANSWER, f"{name}-{turn}-{at}")
            for history, answer in zip(group, answers):
                history += answer
            ttft += times
            cached += sum(found)
            asked += sum(map(len, group))
        rows.append(
            dict(
                tiers=name,
                turn=turn + 1,
                mean_ttft_s=statistics.mean(ttft),
                median_ttft_s=statistics.median(ttft),
                max_ttft_s=max(ttft),
                seconds=time.perf_counter() - start,
                cached=cached / asked,
            )
        )
        print(
            "{tiers:>6} turn {turn}: first token after {mean_ttft_s:.3f} s on average, {median_ttft_s:.3f} "
            "median, {max_ttft_s:.3f} at "
            "worst; {cached:.0%} cached; {seconds:.1f} s".format(**rows[-1]),
            flush=True,
        )
    return rows


def conversations(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    longest = args.prefix + args.turns * (QUESTION + ANSWER)
    num_blocks = args.conversations * -(-longest // 16)
    block_bytes = args.block_bytes
    llm = build(model, num_gpu_blocks_override=num_blocks // 3)
    rows = talk(llm.core, args, min(args.turns, args.turns_without), "none")
    llm.exit()
    llm = build(
        model, num_gpu_blocks_override=num_blocks // 3, kv_host_bytes=int(num_blocks * 1.03) * block_bytes
    )
    print(
        f"{num_blocks} blocks in all, {num_blocks * block_bytes / 2**30:.1f} GiB; pinned after "
        f"{wait_until_pinned(llm.core):.1f} s more"
    )
    rows += talk(llm.core, args, args.turns, "host")
    later = {
        name: [row["mean_ttft_s"] for row in rows if row["tiers"] == name and row["turn"] > 1]
        for name in ("none", "host")
    }
    gain = statistics.mean(later["none"]) / statistics.mean(later["host"])
    stats = llm.stats()
    print(
        f"from the second turn on {gain:.1f} times sooner; {stats.kv_tiers}; dropped "
        f"{stats.kv_dropped_blocks}; "
        f"a block is computed in {stats.kv_compute_seconds_per_block * 1e3:.3f} ms, fetched in "
        f"{stats.kv_tiers['host'].fetch_seconds_per_block * 1e3:.3f} ms"
    )
    rows.append(
        dict(
            gain=gain,
            fetched_blocks=stats.kv_tiers["host"].fetched_blocks,
            dropped_blocks=stats.kv_dropped_blocks,
        )
    )
    llm.exit()
    return rows


class FetchTimes:
    """Begin and end of a core's fetches, by request."""

    def __init__(self, core: Any) -> None:
        from shoal.engine.offload.tiers import KvTiers

        self.begun: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        offloader = core.parts.find(KvTiers).offloader
        begin, fetched = offloader.begin, core.scheduler.fetched

        def timed_begin(fetch: Any) -> None:
            self.begun[fetch.seq.request.request_id] = time.perf_counter()
            begin(fetch)

        def timed_fetched(fetch: Any, num_blocks: int) -> None:
            self.ended[fetch.seq.request.request_id] = time.perf_counter()
            fetched(fetch, num_blocks)

        offloader.begin, core.scheduler.fetched = timed_begin, timed_fetched


def second_turn(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ten engines, or `runs`, one after the other, each asked at once, while its host memory is still being
    pinned: 24 conversations of 9,000 tokens, then the second turn of each, one at a time. Where does the time
    of a second turn go: before its fetch begins, while it runs, or after it?"""
    length, conversations = 9000, 24
    num_blocks = conversations * -(-(length + 200) // 16)
    rows = []
    for run in range(args.runs):
        llm = build(
            model,
            num_gpu_blocks_override=num_blocks // 3,
            kv_host_bytes=int(1.1 * num_blocks) * args.block_bytes,
        )
        core, r = llm.core, Random(run)
        times = FetchTimes(core)
        first_rates = llm.stats()
        histories = [tokens(r, length) for _ in range(conversations)]
        for i, history in enumerate(histories):
            [answer], _, _ = ask(core, [history], 8, f"first-{i}")
            history += answer + tokens(r, QUESTION)
            core.tick()
        ttft, before, fetching, after = [], [], [], []
        for i, history in enumerate(histories):
            start = time.perf_counter()
            _, [seconds], _ = ask(core, [history], 1, f"second-{i}")
            ttft.append(seconds)
            name = f"second-{i}-0"
            if name in times.ended:
                before.append(times.begun[name] - start)
                fetching.append(times.ended[name] - times.begun[name])
                after.append(start + seconds - times.ended[name])
            core.tick()
        stats = llm.stats()
        parts = {"before_s": before, "fetching_s": fetching, "after_s": after}
        rows.append(
            dict(
                run=run,
                median_ttft_s=statistics.median(ttft),
                max_ttft_s=max(ttft),
                fetched=len(fetching),
                trials=stats.kv_tiers["host"].trial_fetches,
                first_fetch_s=first_rates.kv_tiers["host"].fetch_seconds_per_block,
                fetch_s=stats.kv_tiers["host"].fetch_seconds_per_block,
                compute_s=stats.kv_compute_seconds_per_block,
            )
            | {part: statistics.median(values) for part, values in parts.items() if values}
        )
        print(rows[-1], flush=True)
        llm.exit()
    return rows


def decode(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """256 sequences from 256 to 496 tokens, on an engine for each way, twice in turn. Without tiers ("none")
    nothing is copied. Under "evict" the sequences take the blocks of a cache full of others' prefixes, which
    are copied out ahead of them; under "register" every block that they fill is copied out at once. Either is
    36 MiB a step."""
    num_blocks, r, rows = 256 * 34, Random(3), []
    fill = [tokens(r, 4080) for _ in range(num_blocks * 16 // 4080)]
    host = dict(kv_host_bytes=num_blocks * args.block_bytes)
    ways = {"none": {}, "evict": host, "register": host | dict(kv_offload_policy="register")}
    for repeat in range(2):
        for name, options in ways.items():
            llm = build(model, num_gpu_blocks_override=num_blocks, **options)
            core = llm.core
            if options:
                wait_until_pinned(core)
            ask(core, fill, 1, "fill")
            seconds = time_decode(core, [tokens(r, 256) for _ in range(256)], "decode")
            core.tick()
            tiers = llm.stats().kv_tiers
            copied = tiers["host"].stored_blocks if tiers else 0
            llm.exit()
            rows.append(dict(tiers=name, repeat=repeat, step_s=seconds, copied_blocks=copied))
            print(f"{name:>8}: {seconds * 1e3:.3f} ms a step of 256, {copied} blocks copied out", flush=True)
    best = {
        name: min(row["step_s"] for row in rows if row["tiers"] == name)
        for name in ("none", "evict", "register")
    }
    rows.append(
        dict(cost_evict=best["evict"] / best["none"] - 1, cost_register=best["register"] / best["none"] - 1)
    )
    print(
        "cost: " + ", ".join(f"{name} {best[name] / best['none'] - 1:+.2%}" for name in ("evict", "register"))
    )
    return rows


def time_decode(core: Any, prompts: list[list[int]], name: str) -> float:
    """Seconds a step, of the steps in which all sequences decode."""
    from shoal import SamplingParams
    from shoal.api import Request

    params = SamplingParams(temperature=0.0, max_tokens=240, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        core.add(Request(f"{name}-{i}", prompt, params, arrival=float(i)))
    marks = []
    while core.has_work:
        if sum(len(output.token_ids) for output in core.step()) == len(prompts):
            marks.append(time.perf_counter())
    marks = marks[8:-8]
    return (marks[-1] - marks[0]) / (len(marks) - 1)


def restart(model: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    longest = args.prefix + ANSWER
    num_blocks = AT_ONCE * -(-longest // 16)
    rows = []
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        options = dict(
            num_gpu_blocks_override=num_blocks + 64,
            kv_host_bytes=num_blocks * args.block_bytes,
            kv_disk_path=folder,
            kv_disk_bytes=2 * num_blocks * args.block_bytes,
            kv_flush_timeout=60.0,
            kv_load_policy="always",
        )
        for name in ("first", "second"):
            llm = build(model, **options)
            wait_until_pinned(llm.core)
            r = Random(11)
            ask(llm.core, [tokens(r, 600)], 4, "warm-up")
            _, ttft, cached = ask(llm.core, [tokens(r, args.prefix) for _ in range(AT_ONCE)], ANSWER, name)
            disk = llm.stats().kv_tiers["disk"]
            start = time.perf_counter()
            llm.exit()
            rows.append(
                dict(
                    engine=name,
                    mean_ttft_s=statistics.mean(ttft),
                    max_ttft_s=max(ttft),
                    cached_tokens=sum(cached),
                    fetched_blocks=disk.fetched_blocks,
                    stored_blocks=disk.stored_blocks,
                    exit_s=time.perf_counter() - start,
                )
            )
            print(rows[-1], flush=True)
    rows.append(dict(gain=rows[0]["mean_ttft_s"] / rows[1]["mean_ttft_s"]))
    print(
        f"{num_blocks * args.block_bytes / 2**30:.1f} GiB; a second engine's first tokens come "
        f"{rows[-1]['gain']:.1f} times sooner"
    )
    return rows


PARTS = {"conversations": conversations, "second-turn": second_turn, "decode": decode, "restart": restart}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument(
        "--turns-without", type=int, default=2, help="of the run without tiers: they are all alike, and slow"
    )
    parser.add_argument("--prefix", type=int, default=8000)
    parser.add_argument("--runs", type=int, default=10, help="engines of second-turn")
    parser.add_argument("--disk", help="folder of the disk that is measured; default: the temporary one")
    parser.add_argument("--json")
    args = parser.parse_args()

    from report import write_json
    from workloads import SHAPES, write_model

    shape = SHAPES[args.model]
    args.block_bytes = (
        2 * 2 * 16 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"]
    )
    with tempfile.TemporaryDirectory() as root:
        rows = PARTS[args.part](write_model(root, args.model), args)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
