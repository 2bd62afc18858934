"""Giving a GPU's memory back and taking it again: python benchmarks/sleep_memory.py [kept GB] [dropped GB]

Weights as an 8B model has them and a large KV cache, without an engine. Prints seconds; the bound is the copy
alone.
"""

import sys
import time

import torch

from shoal.memory.regions import Regions

GIB = 2**30
kept_bytes, dropped_bytes = (int(float(a) * 1e9) for a in (sys.argv[1:] + ["16", "110"][len(sys.argv) - 1 :]))
# elements of a layer's weights, bf16
LAYER = [6144 * 4096, 4096 * 4096, 24576 * 4096, 12288 * 4096, 4096, 4096, 128, 128]


def free():
    return torch.cuda.mem_get_info()[0]


def fill(regions):
    weights, used = [], 0
    with regions.region("weights", offload=True):
        while used < kept_bytes:
            for n in LAYER:
                weights.append(torch.empty(n, dtype=torch.bfloat16, device="cuda").random_(0, 100))
                used += 2 * n
    with regions.region("kv_cache", offload=False):
        cache = torch.empty(dropped_bytes, dtype=torch.uint8, device="cuda")
    return weights, cache


def measure(regions, name, waits=(0.0,)):
    out = []
    for keep in (["weights"], []):
        pauses, resumes = [], {w: [] for w in waits}
        for wait in waits:
            for _ in range(3):
                pauses.append(regions.pause(keep=keep).seconds)
                time.sleep(wait)
                resumes[wait].append(regions.resume().seconds)
        out += [
            f"pause {min(pauses):.3f}-{max(pauses):.3f}",
            *(
                f"resume{f' after {w:g} s' if w else ''} {min(r):.3f}-{max(r):.3f}"
                for w, r in resumes.items()
            ),
        ]
    print(
        f"{name:44s} level 1: {', '.join(out[: len(out) // 2])}; level 2: {', '.join(out[len(out) // 2 :])}",
        flush=True,
    )


def main():
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    total = torch.cuda.mem_get_info()[1]
    print(f"{torch.cuda.get_device_name()}, context {(total - free()) / GIB:.2f} GiB")
    regions = Regions()
    start = time.perf_counter()
    weights, cache = fill(regions)
    torch.cuda.synchronize()
    print(
        f"filled {len(weights)} weights in {time.perf_counter() - start:.2f} s; usage {regions.usage()}; "
        "pieces "
        f"{[regions._usage(r).pieces for r in regions._regions.values()]}"
    )
    sums, addresses = [int(w.long().sum()) for w in weights], [w.data_ptr() for w in weights]

    host = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    for _ in range(2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(4):
            host.copy_(cache[:GIB], non_blocking=True)
        torch.cuda.synchronize()
        out = 4 * GIB / (time.perf_counter() - start)
    start = time.perf_counter()
    for _ in range(4):
        cache[:GIB].copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    back = 4 * GIB / (time.perf_counter() - start)
    print(
        f"bounds: out {kept_bytes / out:.3f} s ({out / 1e9:.1f} GB/s), back {kept_bytes / back:.3f} s "
        f"({back / 1e9:.1f} GB/s)"
    )

    print(
        f"first pause, nothing pinned before: {regions.pause()}; {(total - free()) / GIB:.2f} GiB in use on "
        "the device"
    )
    print(f"resume: {regions.resume()}", flush=True)
    assert [int(w.long().sum()) for w in weights] == sums and [w.data_ptr() for w in weights] == addresses
    measure(regions, "as it is", waits=(0.0, 6.0))
    for threads in (1, 2, 4, 8):
        for streams in (1, 2, 4):
            if streams == 2 or threads == 4:
                regions._map_threads, regions._streams = threads, streams
                measure(regions, f"{threads} threads that map, {streams} streams")
    for pieces in ((64, 64), (64, 128), (64, 256), (256, 512), (64, 2048)):
        weights = cache = None
        torch.cuda.synchronize()
        other = Regions(piece_bytes=(pieces[0] << 20, pieces[1] << 20))
        other._host, regions._host = regions._host, None
        regions.close()
        torch.cuda.empty_cache()
        regions = other
        weights, cache = fill(regions)
        measure(regions, f"pieces of {pieces[0]} to {pieces[1]} MiB")
    weights = cache = None
    regions.close()
    torch.cuda.empty_cache()
    regions = Regions()
    weights, cache = fill(regions)
    start = time.perf_counter()
    regions.prepare_host(wait=True)
    print(f"pinned {regions.host_usage()['pinned'] / GIB:.1f} GiB in {time.perf_counter() - start:.2f} s")
    print(
        f"first pause, pinned before: {regions.pause()}; {(total - free()) / GIB:.2f} GiB in use on the "
        "device"
    )
    regions.resume()


if __name__ == "__main__":
    main()
