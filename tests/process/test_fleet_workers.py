"""Real workers of a fleet: processes of `shoal serve --plane` with the default model on the CPU, and what a
router makes of them."""

import asyncio
import functools
import os
import signal
import subprocess
from contextlib import asynccontextmanager

import pytest

from shoal.api import Request, SamplingParams
from shoal.fleet.event_feed import EventFeed
from shoal.fleet.fleet_key import FleetKey
from shoal.fleet.indexer import KvIndexer, WorkerRank
from shoal.fleet.plane_workers import watch_plane
from shoal.fleet.planes import open_plane
from tests.serving import PYTHON, ROOT, free_port

PATIENCE_S = 240
LEASE_S = 6.0
OPTIONS = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-memory-bytes", "200000000")


def asynchronous(test):
    """Runs an async test; what hangs fails."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        return asyncio.run(asyncio.wait_for(test(*args, **kwargs), PATIENCE_S))

    return run


async def eventually(condition, say=lambda: ""):
    for _ in range(PATIENCE_S * 10):
        if condition():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(say())


class Site:
    """A plane with a router's view of it, and workers as processes."""

    def __init__(self, folder, plane, key):
        self.folder, self.plane, self.key = folder, plane, key
        self.workers, self.left, self.processes, self.closing = {}, [], {}, []

    def start(self, name, *more, model="smollm2", url=None):
        log = (self.folder / f"{name}.log").open("w")
        command = [PYTHON, "-m", "shoal", "serve", model, "--plane", url or self.url, "--worker-id", name]
        path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(ROOT)])
        self.processes[name] = subprocess.Popen(
            [*command, *OPTIONS, *more],
            env=os.environ | {"PYTHONPATH": path, "TMPDIR": str(self.folder)},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def log(self, name):
        return (self.folder / f"{name}.log").read_text()

    async def worker(self, name):
        await eventually(lambda: name in self.workers or self.processes[name].poll() is not None)
        assert name in self.workers, self.log(name)
        await self.workers[name].link.check()
        return self.workers[name]

    def on_join(self, worker):
        self.workers[worker.id] = worker

    def on_leave(self, name):
        self.left.append(name)
        self.closing.append(asyncio.create_task(self.workers.pop(name).link.close()))

    def kill(self, name):
        os.kill(self.processes[name].pid, signal.SIGKILL)
        self.processes[name].wait()


@asynccontextmanager
async def fleet(folder, key_file=None):
    key = FleetKey.read(key_file)
    url = f"tcp://127.0.0.1:{free_port()}"
    plane = open_plane(url, may_host=True, lease_s=LEASE_S, key=key)
    site = Site(folder, plane, key)
    site.url = url
    watching = asyncio.create_task(watch_plane(plane, key, site.on_join, site.on_leave))
    try:
        yield site
    finally:
        watching.cancel()
        for worker in site.workers.values():
            await worker.link.close()
        for process in site.processes.values():
            process.kill()
            process.wait()
        await plane.close()


def request(name, prompt, max_tokens=8, **params):
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "seed": 0, **params})
    return Request(name, list(prompt), params)


async def ids_of(engine, asked):
    found = []
    async for output in engine.generate(asked):
        found += output.token_ids
    return found


@pytest.mark.parametrize("has_key", [False, True], ids=["open", "with the key"])
@asynchronous
async def test_a_worker_joins_answers_tells_of_its_blocks_and_leaves(tmp_path, has_key):
    key_file = tmp_path / "key"
    key_file.write_text("0123456789abcdef" * 2)
    options = ("--fleet-key-file", str(key_file)) if has_key else ()
    async with fleet(tmp_path, str(key_file) if has_key else None) as site:
        site.start("a", *options)
        worker = await site.worker("a")
        assert worker.info.models == ("smollm2",) and worker.info.pid == site.processes["a"].pid
        assert worker.info.total_blocks > 0 and worker.info.url.startswith("http://127.0.0.1:")
        index = KvIndexer(block_size=16)
        prompt = list(range(100, 180))
        first = await ids_of(worker.link, request("1", prompt))
        # it begins late, so what is cached is asked for
        following = asyncio.create_task(worker.link.follow_events(EventFeed(index, WorkerRank("a"))))
        await eventually(lambda: index.find_matches(prompt).get(WorkerRank("a")) is not None)
        assert index.find_matches(prompt)[WorkerRank("a")].device == 5
        other = list(range(300, 380))
        again, _ = await asyncio.gather(
            ids_of(worker.link, request("2", prompt)), ids_of(worker.link, request("3", other))
        )
        assert first == again and len(first) == 8
        await eventually(lambda: index.find_matches(other).get(WorkerRank("a")) is not None)
        stream = worker.link.generate(request("4", other, 12))
        await anext(stream)
        site.processes["a"].send_signal(signal.SIGTERM)
        await eventually(lambda: worker.is_draining)
        assert sum([len(output.token_ids) async for output in stream]) >= 8, "what runs is drained"
        await eventually(lambda: site.left == ["a"])
        await eventually(lambda: site.processes["a"].poll() is not None)
        assert site.processes["a"].returncode == 0 and "Traceback" not in site.log("a"), site.log("a")
        assert not list(tmp_path.glob("shoal-*"))
        following.cancel()
