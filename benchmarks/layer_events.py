"""Cost of an event at the end of each layer of a prefill step, and how early the first one arrives.

    python benchmarks/layer_events.py [--model qwen3-8b] [--tokens 64,256,512,1024,3000] [--json PATH]

Each prompt is computed alone, with nothing cached. `ms` is the whole request of one output
token on the host's clock, the median of 30. `first` and `last` are when the first and the last layer ended on
the device, and `copied` when the last layer's blocks were in pinned host memory, all counted from the
request's start. Steps beyond the captured sizes are eager and have an event for each layer. Random weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from random import Random
from typing import Any

import torch
from msgspec.structs import replace
from report import write_json
from workloads import write_model

from shoal import LLM, SamplingParams
from shoal.kv.block_map import BlockMap
from shoal.kv.copy import CopyStream, StagedCopy
from shoal.kv.storage import pinned_memory
from shoal.kv.view import BlockView

TIMES = 30
MS = 1e3


class Watch:
    """Listens to steps of one engine."""

    def __init__(self, llm: LLM, num_blocks: int) -> None:
        runner = llm.core.ranks.runner
        self.ends = runner.layer_events
        self.copying = CopyStream(runner.device)
        [device] = runner.cache.views()
        spec = replace(device.spec, num_blocks=num_blocks)
        self.map = BlockMap(device, BlockView.over(spec, pinned_memory(spec.num_bytes)))

    def nobody(self, num_blocks: int) -> None:
        pass

    def events(self, num_blocks: int) -> None:
        """Somebody listens and does nothing."""
        self.ends.listen(lambda layer, event: None)

    def copies(self, num_blocks: int) -> StagedCopy:
        """Each layer goes to pinned memory as soon as it has ended."""
        copy = self.copying.stage(self.map, range(num_blocks), range(num_blocks))
        self.ends.listen(copy.trigger_layer)
        return copy


def request_ms(llm: LLM, watch: Watch, way: str, num_tokens: int) -> float:
    """The median time of a request whose step is listened to in a way."""
    random, times = Random(num_tokens), []
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    num_blocks = num_tokens // llm.core.config.block_size
    for _ in range(TIMES + 3):
        prompt = random.choices(range(10000), k=num_tokens)
        torch.cuda.synchronize()
        start = time.perf_counter()
        getattr(watch, way)(num_blocks)
        llm.generate([prompt], params, use_tqdm=False)
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:]) * MS


def times_of_layers(llm: LLM, watch: Watch, num_tokens: int) -> tuple[float, float, float]:
    """Returns when the first and the last layer ended, and when the last one had been copied."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    num_blocks = num_tokens // llm.core.config.block_size
    watching, ends = torch.cuda.Stream(), []
    begin, copied = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    copy = watch.copies(num_blocks)

    def note(layer: int, event: torch.cuda.Event | None) -> None:
        assert event is not None
        watching.wait_event(event)
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record(watching)

    watch.ends.listen(note)
    prompt = Random(num_tokens).choices(range(10000), k=num_tokens)
    llm.generate([prompt], params, use_tqdm=False)
    copy.trigger_all_layers()
    copied.record(watch.copying.stream)
    torch.cuda.synchronize()
    return begin.elapsed_time(ends[0]), begin.elapsed_time(ends[-1]), begin.elapsed_time(copied)


def measure(model: str, counts: list[int]) -> list[dict[str, Any]]:
    llm = LLM(
        model,
        load_format="dummy",
        max_model_len=max(counts) + 64,
        max_num_batched_tokens=max(counts) + 64,
        enable_prefix_caching=False,
        num_gpu_blocks_override=4096,
    )
    watch = Watch(llm, num_blocks=max(counts) // llm.core.config.block_size)
    captured = max((shape.tokens for shape in llm.core.ranks.runner.mixed_shapes), default=0)
    rows = []
    for num_tokens in counts:
        row: dict[str, Any] = dict(tokens=num_tokens, captured=num_tokens <= captured)
        for way in ("nobody", "events", "copies"):
            row[f"{way}_ms"] = round(request_ms(llm, watch, way, num_tokens), 3)
        times_of_layers(llm, watch, num_tokens)
        first, last, copied = times_of_layers(llm, watch, num_tokens)
        row |= dict(first_ms=round(first, 3), last_ms=round(last, 3), copied_ms=round(copied, 3))
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    del watch
    llm.exit()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--tokens", default="64,256,512,1024,3000")
    parser.add_argument("--json", metavar="PATH")
    args = parser.parse_args()
    model = write_model(tempfile.mkdtemp(), args.model)
    counts = [int(count) for count in args.tokens.split(",")]
    rows = measure(model, counts)
    if args.json:
        write_json(args.json, rows)


if __name__ == "__main__":
    main()
