"""A router follows the members of a registry: workers that join, change and leave, and unreadable ones."""

import asyncio
import logging
import random
from contextlib import asynccontextmanager
from types import SimpleNamespace

import msgspec

from shoal.apps import join
from shoal.config import ServerConfig
from shoal.fake_engine import FakeEngine
from shoal.fleet.clock import LoopClock
from shoal.fleet.native.membership import member_of, watch_workers
from shoal.fleet.registry.embedded import EmbeddedRegistry, Host
from shoal.fleet.registry.registry import Member
from shoal.model_card import ModelCard
from shoal.server.served.admission import Admission
from shoal.telemetry.metrics import ModelMetrics
from shoal.wire import ModelInfo
from tests.asynchronous import within
from tests.serving import free_port
from tests.waiting import until

PATIENCE_S = 60
asynchronous = within(PATIENCE_S)
INFO = ModelInfo("fake", 1, 4096, 512, 64, (2,), {}, 1024, 16384, 16, 4, "cpu", "float32")
CARD = ModelCard(info=INFO, names=["fake", "alias"], model="fake", eos_token_ids=(2,))


class Router:
    def __init__(self):
        self.workers, self.left, self.roles = {}, [], []

    def on_join(self, worker):
        assert worker.id not in self.workers
        self.workers[worker.id] = worker

    def on_leave(self, name):
        worker = self.workers.pop(name)
        self.left.append(name)
        asyncio.get_running_loop().create_task(worker.link.close())

    def on_role(self, worker, role):
        worker.info = msgspec.structs.replace(worker.info, role=role)
        self.roles.append(role)


@asynccontextmanager
async def watched():
    clock, router = LoopClock(), Router()
    host = Host(clock)
    registries = [EmbeddedRegistry.of_host(host, clock, random.Random(i)) for i in range(2)]
    watching = asyncio.create_task(
        watch_workers(registries[0], None, router.on_join, router.on_leave, router.on_role)
    )
    try:
        yield registries[1], router
        assert not watching.done(), "whatever members say, the watch goes on"
    finally:
        watching.cancel()
        for name in list(router.workers):
            router.on_leave(name)
        for registry in registries:
            await registry.close()
        host.close()
        await asyncio.sleep(0)


def worker(name="w", port=None, role="both", **changes):
    return member_of(
        name, role, "http://127.0.0.1:9001", port or f"tcp://127.0.0.1:{free_port()}", CARD, **changes
    )


@asynchronous
async def test_a_worker_has_the_fields_of_its_member_and_leaves_with_it(caplog):
    caplog.set_level(logging.INFO, "shoal.fleet.native.membership")
    async with watched() as (registry, router):
        await registry.register(worker(role="decode", tags=["x", "y"]))
        await until(lambda: router.workers)
        info, link = router.workers["w"].info, router.workers["w"].link
        assert info.models == ("fake", "alias") and info.role == "decode" and info.pid is not None
        assert info.tags == {"x", "y"}
        assert (info.block_size, info.total_blocks, info.max_running) == (16, 1024, 4)
        assert link.card == CARD and info.identity["vocabulary size"] == 512
        await registry.close()
        await until(lambda: router.left == ["w"])
        assert "worker w has left the plane" in caplog.messages


@asynchronous
async def test_a_worker_that_drains_stays_and_one_that_changes_joins_again():
    async with watched() as (registry, router):
        port = f"tcp://127.0.0.1:{free_port()}"
        await registry.register(worker(port=port))
        await until(lambda: router.workers)
        first = router.workers["w"]
        await registry.register(worker(port=port, is_draining=True))
        await until(lambda: first.is_draining)
        assert router.workers["w"] is first and not router.left
        changes = []
        first.on_change.add(lambda: changes.append(first.is_draining))
        await registry.register(worker(port=port))
        await until(lambda: changes)
        assert changes == [False], "watchers of the worker are notified"
        await registry.register(worker())
        await until(lambda: router.left == ["w"] and "w" in router.workers)
        second = router.workers["w"]
        assert second is not first and not second.is_draining


@asynchronous
async def test_a_worker_that_changes_its_role_stays_and_keeps_an_operators_draining():
    async with watched() as (registry, router):
        port = f"tcp://127.0.0.1:{free_port()}"
        await registry.register(worker(port=port))
        await until(lambda: router.workers)
        there = router.workers["w"]
        there.drain(True)
        await registry.register(worker(port=port, role="prefill"))
        await until(lambda: router.roles == ["prefill"])
        assert router.workers["w"] is there and not router.left
        assert there.is_draining, "the operator's choice holds until the worker itself changes it"
        await registry.register(worker(port=port, role="decode", is_draining=True))
        await until(lambda: router.roles == ["prefill", "decode"])
        await registry.register(worker(port=port, role="decode"))
        await until(lambda: not there.is_draining)


@asynchronous
async def test_a_worker_that_ends_keeps_draining_when_its_role_changes(monkeypatch):
    async with watched() as (registry, router):
        monkeypatch.setattr(join, "open_registry", lambda *_, **__: registry)
        model = SimpleNamespace(
            engine=FakeEngine(vocab_size=512),
            admission=Admission(4, 4),
            metrics=ModelMetrics("fake", 4096, {}),
            loaded=SimpleNamespace(card=CARD),
            changed=asyncio.Event(),
        )
        config = ServerConfig(plane="tcp://127.0.0.1:5600")
        async with join.joined(model, None, "http://127.0.0.1:9001", config, "w", None):
            await until(lambda: router.workers)
            there = router.workers["w"]
            await there.link.check()
            model.admission.drain()
            await until(lambda: there.is_draining)
            await there.link.change_role("decode")
            await until(lambda: router.roles == ["decode"])
            assert there.is_draining


@asynchronous
async def test_members_that_are_not_native_workers_are_ignored(caplog):
    async with watched() as (registry, router):
        good = worker("good")
        await registry.register(Member(id="router", role="router", address="http://127.0.0.1:1"))
        await registry.register(Member(id="empty", role="both", address="http://127.0.0.1:1", model="fake"))
        wrong = msgspec.structs.replace(good, id="wrong", details={**good.details, "card": 3})
        await registry.register(wrong)
        await registry.register(worker("nowhere", port="garbage"))
        await registry.register(good)
        await until(lambda: router.workers)
        assert set(router.workers) == {"good"}
        for name in ("empty", "wrong", "nowhere"):
            assert f"worker {name} is ignored" in caplog.text
        assert "router" not in caplog.text
        await registry.register(msgspec.structs.replace(good, id="wrong"))
        await until(lambda: set(router.workers) == {"good", "wrong"})
