"""The contract of Link: a fake worker, a native one over ZMQ and an external one over HTTP behave alike."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from shoal.errors import WorkerFailedError
from shoal.fake_engine import FakeEngine
from shoal.fleet.clock import LoopClock
from shoal.fleet.external.link import ExternalLink, new_session
from shoal.fleet.native.fake_worker import FakeWorker
from shoal.fleet.native.remote_engine import RemoteEngine
from shoal.fleet.native.worker_server import WorkerServer
from shoal.fleet.worker import WorkerInfo, WorkerLoad
from shoal.fleet.worker_spec import parse_worker
from shoal.model_card import ModelCard
from shoal.server.served.admission import Admission
from shoal.telemetry.metrics import ModelMetrics
from shoal.wire import ModelInfo
from tests.external_worker import ExternalWorker

MODEL_INFO = ModelInfo("fake", 1, 4096, 512, 64, (2,), {}, 1024, 16384, 16, 4, "cpu", "float32")
CARD = ModelCard(info=MODEL_INFO, names=["fake"], model="fake", eos_token_ids=(2,))
PATIENCE_S = 60


async def fake(worker, stack):
    """Returns a link to a worker that ends with `worker`."""
    link = FakeWorker(WorkerInfo(id="w", url="http://w", models=("m",)), LoopClock())
    worker.callback(link.kill)
    return link


async def native(worker, stack):
    metrics, clock = ModelMetrics("fake", 4096, {}), LoopClock()
    server = WorkerServer.open("w", FakeEngine(vocab_size=512), Admission(4, 4), metrics, clock)
    worker.push_async_callback(server.close)
    return RemoteEngine(WorkerInfo(id="w", url="http://w", models=("m",)), CARD, server.address, None)


async def external(worker, stack):
    server = await worker.enter_async_context(ExternalWorker())
    session = await stack.enter_async_context(new_session())
    return ExternalLink(parse_worker(f"{server.url},id=w"), session)


@pytest.fixture(params=[fake, native, external], ids=lambda make: make.__name__)
def make(request):
    return request.param


def with_link(test):
    def run(make):
        async def main():
            async with AsyncExitStack() as stack:
                worker = await stack.enter_async_context(AsyncExitStack())
                link = await make(worker, stack)
                try:
                    await test(link, worker.aclose)
                finally:
                    await link.close()

        asyncio.run(asyncio.wait_for(main(), PATIENCE_S))

    run.__name__ = test.__name__
    return run


@with_link
async def test_a_living_worker_answers_checks_and_canaries_again_and_again(link, kill):
    for _ in range(2):
        info = await link.check()
        assert info.id == "w" and info.models
        await link.canary()


@with_link
async def test_loads_have_the_ranks_of_the_worker(link, kill):
    await link.check()
    for load in await link.loads():
        assert isinstance(load, WorkerLoad) and load.rank == 0 and load.num_running >= 0


@with_link
async def test_a_dead_worker_fails_checks_and_canaries_as_absent(link, kill):
    await link.check()
    await kill()
    for call in (link.check, link.canary, link.check):
        with pytest.raises(WorkerFailedError) as failure:
            await call()
        assert failure.value.is_absent


@with_link
async def test_a_link_may_be_closed_after_its_worker_has_died(link, kill):
    await link.check()
    await kill()
