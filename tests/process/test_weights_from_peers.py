"""Workers that take their weights out of the memory of others: the search in the registry, and real workers."""

import asyncio
import json
import urllib.request
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from shoal.errors import UnavailableError
from shoal.fake_engine import FakeEngine
from shoal.fleet.clock import LoopClock
from shoal.fleet.native import weight_peers
from shoal.fleet.native.membership import member_of
from shoal.fleet.native.weight_peers import borrowed_weights
from shoal.fleet.native.worker_server import WorkerServer
from shoal.fleet.registry.open import open_registry
from shoal.model_card import ModelCard
from shoal.server.served.admission import Admission
from shoal.telemetry.metrics import ModelMetrics
from shoal.wire import LendWeights, ModelInfo, TakeBackWeights
from tests.asynchronous import within
from tests.fleet_processes import Processes
from tests.serving import free_port
from tests.tiny import greedy, write_changed, write_model
from tests.waiting import eventually

PATIENCE_S = 60
asynchronous = within(PATIENCE_S)
INFO = ModelInfo("fake", 1, 4096, 512, 64, (2,), {}, 1024, 16384, 16, 4, "cpu", "float32")
TINY = ("--max-model-len", "256", "--kv-cache-memory-bytes", "8000000", "--max-num-seqs", "4")
PROMPT = list(range(30, 60))


# The search


class Lender(FakeEngine):
    """Lends weights of one name, and remembers who has them."""

    def __init__(self, name=b"name"):
        super().__init__(vocab_size=512)
        self.weights_name, self.borrowers, self.pauses_s = name, [], 0.0
        self.turns = asyncio.Lock()
        self.asked, self.given_back = asyncio.Event(), asyncio.Event()

    async def control(self, command):
        async with self.turns:  # as a core does
            return await self.run(command)

    async def run(self, command):
        if isinstance(command, LendWeights):
            self.asked.set()
            await asyncio.sleep(self.pauses_s)
            if command.name != self.weights_name:
                raise UnavailableError("which are others")
            self.borrowers.append(command.borrower)
            return b"loan"
        if isinstance(command, TakeBackWeights):
            if command.borrower in self.borrowers:
                self.borrowers.remove(command.borrower)
                self.given_back.set()
            return None
        return await super().control(command)


@asynccontextmanager
async def in_a_registry(**lenders):
    """Opens a registry with these workers. Yields a function that opens it again."""
    url = f"tcp://127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:

        def registry(may_host=False):
            opened = open_registry(url, may_host=may_host)
            stack.push_async_callback(opened.close)
            return opened

        own = registry(may_host=True)
        for name, lender in lenders.items():
            port = WorkerServer.open(
                name, lender, Admission(4, 4), ModelMetrics("fake", 4096, {}), LoopClock()
            )
            stack.push_async_callback(port.close)
            model = "other" if name == "other" else "fake"
            card = ModelCard(info=INFO, names=[model], model=model, eos_token_ids=(2,))
            await own.register(member_of(name, "both", "http://127.0.0.1:1", port.address, card))
        yield registry


def searching(registry, name=lambda: b"name"):
    return borrowed_weights(registry, None, "fake", name, "me")


@asynchronous
async def test_the_first_worker_that_has_the_weights_lends_them_until_the_block_ends():
    other, wrong, lender = Lender(), Lender(b"its own"), Lender()
    async with in_a_registry(other=other, wrong=wrong, lender=lender) as registry:
        async with searching(registry()) as asking:
            assert await asking == b"loan"
            assert lender.borrowers == ["me"] and not other.borrowers
        await lender.given_back.wait()


@asynchronous
async def test_where_nobody_has_the_weights_the_search_ends_by_itself(monkeypatch):
    monkeypatch.setattr(weight_peers, "SEARCH_S", 0.3)
    async with in_a_registry(other=Lender()) as registry, searching(registry()) as asking:
        assert await asking is None
    nowhere = open_registry(f"tcp://127.0.0.1:{free_port()}")
    async with searching(nowhere) as asking:
        assert await asking is None
    await nowhere.close()


@asynchronous
async def test_files_that_cannot_be_read_are_the_engines_business():
    def name():
        raise OSError("no such file")

    async with in_a_registry(lender=Lender()) as registry, searching(registry(), name) as asking:
        assert await asking is None


@pytest.mark.parametrize("end", ["patience", "the block"])
@asynchronous
async def test_what_a_slow_worker_lends_too_late_is_given_back(monkeypatch, end):
    slow = Lender()
    slow.pauses_s = 1.0
    if end == "patience":
        monkeypatch.setattr(weight_peers, "ANSWER_S", 0.5)
    async with in_a_registry(slow=slow) as registry:
        async with searching(registry()) as asking:
            if end == "patience":
                assert await asking is None
            else:
                await slow.asked.wait()
        await slow.given_back.wait()
        assert not slow.borrowers


# Real workers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models"), "qwen3")


def answer(processes, name):
    """Returns the worker's own answer to a prompt."""
    url = processes.workers()[name]["url"]
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as found:
        return json.load(found)["choices"][0]["token_ids"]


def test_a_worker_begins_with_the_weights_of_another_and_says_the_same(folder, tmp_path):
    options = (*TINY, "--served-model-name", "tiny", "--weights-from-peers")
    with Processes(tmp_path) as processes:
        processes.route()
        processes.serve("a", *options, model=folder)
        processes.wait_state("a", "ready")
        assert "no worker of the fleet lends its weights" in processes.log("a")
        processes.serve("b", *options, model=folder)
        processes.serve("c", *options, model=write_changed(folder, tmp_path / "changed"))
        for name in "bc":
            eventually(lambda name=name: "ready after" in processes.log(name), lambda: processes.log("b"))
        assert "rank 0 has its weights from another worker, by shared memory" in processes.log("b")
        # c has the same model name and other weights, so it reads its files.
        assert "this engine has other weights" in processes.log(
            "c"
        ) and "from another worker" not in processes.log("c")
        processes.wait_state("b", "ready")
        expected = greedy(folder, PROMPT, 8)
        assert answer(processes, "a") == answer(processes, "b") == expected
