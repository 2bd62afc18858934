"""Tiers below the device in real processes: two ranks, a server and its drain, a killed engine, a store that
engines share."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from shoal import LLM, SamplingParams
from tests import tiny

SMALL = dict(
    num_gpu_blocks_override=14, max_model_len=192, kv_load_policy="always", dtype="float32", device="cpu"
)


def params(**options):
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True} | options)


def prompts(count=8, length=100, seed=6):
    r = random.Random(seed)
    return [[r.randrange(256) for _ in range(length)] for _ in range(count)]


def one_by_one(llm):
    outputs = [llm.generate([prompt], params())[0] for prompt in prompts()]
    return [o.outputs[0].token_ids for o in outputs], [o.num_cached_tokens for o in outputs]


@pytest.fixture(scope="module")
def expected(folder):
    return [tiny.greedy(folder, prompt, 8) for prompt in prompts()]


def files(path):
    return list(Path(path).rglob("*.kv"))


@pytest.mark.slow
def test_two_ranks_offload_and_fetch_their_shards(folder, expected, tmp_path):
    options = dict(
        **SMALL,
        tensor_parallel_size=2,
        kv_host_bytes=8 << 20,
        kv_disk_path=str(tmp_path / "kv"),
        kv_disk_bytes=64 << 20,
    )
    with LLM(str(folder), **options) as llm:
        assert one_by_one(llm) == (expected, [0] * 8)
        tokens, cached = one_by_one(llm)
        assert tokens == expected and sum(c == 96 for c in cached) >= 7, cached
        assert [o.outputs[0].token_ids for o in llm.generate(prompts(), params())] == expected
        llm.core.check()
    written = files(tmp_path)
    assert len(written) == 2 * 48 and len({path.parents[1].name for path in written}) == 2, "a file a rank"
    random.Random(4).choice(written).write_bytes(b"torn")
    with LLM(str(folder), **options) as llm:
        tokens, cached = one_by_one(llm)
        assert tokens == expected and sum(c == 96 for c in cached) >= 7, cached


def test_engines_share_a_store(folder, expected, tmp_path):
    pytest.importorskip("fsspec")
    options = dict(**SMALL, kv_store=f"file://{tmp_path}/store")
    with LLM(str(folder), **options) as first, LLM(str(folder), **options) as second:
        assert one_by_one(first)[0] == expected
        first.core.flush_kv()
        tokens, cached = one_by_one(second)
        assert tokens == expected and sum(c == 96 for c in cached) >= 7, cached
        assert second.stats().kv_tiers["store"].fetched_blocks >= 40


def serve(folder, tmp_path, *flags):
    command = [
        sys.executable,
        "-m",
        "shoal",
        "serve",
        str(folder),
        "--port",
        "0",
        "--dtype",
        "float32",
        "--device",
        "cpu",
        "--max-model-len",
        "192",
        "--num-gpu-blocks-override",
        "14",
        "--kv-load-policy",
        "always",
        "--served-model-name",
        "m",
        *flags,
    ]
    log = open(tmp_path / "log", "ab")  # noqa: SIM115
    process = subprocess.Popen([*command, *flags], stdout=log, stderr=log)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        text = (tmp_path / "log").read_text()
        if " at http" in text.rpartition("serving ")[2] and "ready after" in text:
            return process, text.rpartition(" at ")[2].split(",")[0].split()[0]
        assert process.poll() is None, text
        time.sleep(0.1)
    raise AssertionError("not ready: " + (tmp_path / "log").read_text())


def complete(url, prompt):
    body = json.dumps(dict(model="m", prompt=prompt, max_tokens=8, temperature=0, ignore_eos=True)).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"content-type": "application/json"})
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    return answer["choices"][0]["text"], (answer["usage"].get("prompt_tokens_details") or {}).get(
        "cached_tokens", 0
    )


def test_a_server_writes_its_blocks_when_it_drains_and_finds_them_when_it_is_back(folder, tmp_path):
    flags = [
        "--kv-host-bytes",
        str(8 << 20),
        "--kv-disk-path",
        str(tmp_path / "kv"),
        "--kv-disk-bytes",
        str(64 << 20),
    ]
    process, url = serve(folder, tmp_path, *flags)
    first = [complete(url, prompt)[0] for prompt in prompts()]
    metrics = urllib.request.urlopen(url + "/metrics").read().decode()
    for name in (
        "shoal:kv_tier_stored_blocks_total{",
        'tier="host"',
        "shoal:kv_tier_fetch_seconds_per_block{",
        "shoal:kv_tier_store_seconds_per_block{",
        "shoal:kv_tier_trial_fetches_total{",
        "shoal:kv_compute_seconds_per_block{",
        "vllm:external_prefix_cache_hits_total",
    ):
        assert name in metrics
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert len(files(tmp_path)) == 48
    (tmp_path / "log").unlink()
    process, url = serve(folder, tmp_path, *flags)
    again = [complete(url, prompt) for prompt in prompts()]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert [text for text, _ in again] == first and sum(cached == 96 for _, cached in again) >= 7, again


@pytest.mark.slow
def test_an_idle_server_offloads_what_its_last_request_left(folder, tmp_path):
    process, url = serve(
        folder, tmp_path, "--kv-disk-path", str(tmp_path / "kv"), "--kv-disk-bytes", str(64 << 20)
    )
    complete(url, prompts()[0])
    deadline = time.monotonic() + 30
    while len(files(tmp_path)) < 6 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(files(tmp_path)) == 6
    process.kill()
    process.wait()


KILLED = """
import sys
from shoal import LLM
from tests.process.test_kv_tiers import SMALL, params, prompts
llm = LLM(sys.argv[1], **SMALL, kv_disk_path=sys.argv[2], kv_disk_bytes=64 << 20, kv_offload_policy="register")
while True:
    for prompt in prompts(200, seed=int(sys.argv[3])):
        llm.generate([prompt], params())
        print("x", flush=True)
"""


@pytest.mark.slow
def test_a_killed_engine_leaves_nothing_wrong_behind(folder, expected, tmp_path):
    root = Path(__file__).parents[2]
    path = str(tmp_path / "kv")
    for seed in (6, 7):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(folder), path, str(seed)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(root)},
            cwd=root,
        )
        for _ in range(random.Random(seed).randint(5, 9)):
            assert process.stdout.readline()
        process.kill()
        process.wait()
    with LLM(str(folder), **SMALL, kv_disk_path=path, kv_disk_bytes=64 << 20) as llm:
        assert one_by_one(llm)[0] == expected
        assert llm.stats().kv_tiers["disk"].fetched_blocks > 0
