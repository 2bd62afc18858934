"""Counts for another orchestrator: one decision at a time, and nothing is lost when either side starts again."""

import asyncio
import json

import pytest

from shoal.errors import ConfigError, UnavailableError
from shoal.fleet.clock import LoopClock
from shoal.fleet.connectors.connector import Component, ConnectorContext
from shoal.fleet.connectors.virtual import VirtualClient, VirtualConnector
from shoal.fleet_views import WorkerState

COMPONENTS = (
    Component("m-decode", (), "m", role="decode", count=2),
    Component("m-prefill", (), "m", role="prefill", count=1),
)

TWO_MODELS = (COMPONENTS[0], Component("n", (), "n"))


class Cluster:
    """A RouterView whose workers are there as soon as the orchestrator has said so."""

    def __init__(self):
        self.counts = {"decode": 0, "prefill": 0}

    def ready(self, model, role):
        return [f"{role}-{number}" for number in range(1, self.counts[role] + 1)]

    def state_of(self, worker_id):
        role, _, number = worker_id.rpartition("-")
        return WorkerState.READY if int(number) <= self.counts[role] else None


def connector(folder, cluster, timeout_s=5.0, components=COMPONENTS):
    return VirtualConnector(ConnectorContext(components, cluster, LoopClock(), timeout_s, None, folder))


async def obey(folder, cluster, seen, times):
    client = VirtualClient(folder)
    for _ in range(times):
        decision = await client.wait()
        seen.append((decision.decision_id, decision.workers["m"]))
        cluster.counts = dict(decision.workers["m"])
        client.complete(decision)


def test_changes_side_by_side_are_decisions_one_after_the_other(tmp_path):
    async def run():
        cluster, seen = Cluster(), []
        virtual = connector(tmp_path, cluster)
        await virtual.start()
        obeying = asyncio.create_task(obey(tmp_path, cluster, seen, 5))
        while virtual.pending("m"):
            await asyncio.sleep(0.01)
        added = await asyncio.gather(
            virtual.add("m", "decode"), virtual.add("m", "decode"), virtual.add("m", "prefill")
        )
        assert sorted(added) == ["decode-3", "decode-4", "prefill-2"]
        assert await virtual.remove("m", "decode") == "decode-4"
        await obeying
        assert [number for number, _ in seen] == [1, 2, 3, 4, 5]
        assert seen[0][1] == {"decode": 2, "prefill": 1} and seen[-1][1] == {"decode": 3, "prefill": 2}

    asyncio.run(run())


def test_no_decision_is_made_while_one_is_not_confirmed(tmp_path):
    async def run():
        virtual = connector(tmp_path, Cluster(), timeout_s=0.3)
        await virtual.start()
        before = (tmp_path / "decision.json").read_text()
        with pytest.raises(
            UnavailableError,
            match=r"decision 1: it is not confirmed .*check that the orchestrator is running",
        ):
            await virtual.add("m", "decode")
        assert (tmp_path / "decision.json").read_text() == before

    asyncio.run(run())


def test_an_orchestrator_that_confirms_and_brings_no_worker_gets_the_count_of_before(tmp_path):
    async def run():
        cluster = Cluster()
        virtual = connector(tmp_path, cluster, timeout_s=0.5)
        await virtual.start()
        await obey(tmp_path, cluster, [], 1)
        adding, client = asyncio.create_task(virtual.add("m", "decode")), VirtualClient(tmp_path)
        client.complete(await client.wait())
        with pytest.raises(UnavailableError, match="is taken back; it is confirmed"):
            await adding
        assert (await client.wait()).workers["m"] == {"decode": 2, "prefill": 1}

    asyncio.run(run())


def test_numbers_and_counts_go_on_when_the_planner_starts_again(tmp_path):
    async def run():
        cluster, seen = Cluster(), []
        first = connector(tmp_path, cluster)
        await first.start()
        obeying = asyncio.create_task(obey(tmp_path, cluster, seen, 3))
        while first.pending("m"):
            await asyncio.sleep(0.01)
        await first.add("m", "decode")
        await first.close(0.0)
        second = connector(tmp_path, cluster)
        await second.start()
        assert await second.add("m", "decode") == "decode-4"
        await obeying
        assert seen[-1] == (3, {"decode": 4, "prefill": 1})
        more = Component("m-decode", (), "m", role="decode", count=5)
        await connector(tmp_path, cluster, components=(more, COMPONENTS[1])).start()
        assert (await VirtualClient(tmp_path).wait()).workers["m"]["decode"] == 5, (
            "a person has changed the file"
        )

    asyncio.run(run())


def test_workers_that_a_person_has_added_are_taken_as_they_are(tmp_path):
    async def run():
        cluster, seen = Cluster(), []
        virtual = connector(tmp_path, cluster)
        await virtual.start()
        await obey(tmp_path, cluster, seen, 1)
        cluster.counts["decode"] = 4
        obeying = asyncio.create_task(obey(tmp_path, cluster, seen, 1))
        assert await virtual.add("m", "decode") == "decode-5"
        await obeying
        assert seen[-1] == (2, {"decode": 5, "prefill": 1})

    asyncio.run(run())


def test_they_are_taken_so_while_another_model_changes(tmp_path):
    async def run():
        cluster = Cluster()
        cluster.counts = {"decode": 2, "both": 1}
        virtual, client = connector(tmp_path, cluster, components=TWO_MODELS), VirtualClient(tmp_path)
        await virtual.start()
        client.complete(await client.wait())
        adding = asyncio.create_task(virtual.add("n", "both"))
        client.complete(await client.wait())  # and the worker takes long to start
        cluster.counts["decode"] = 4
        other = asyncio.create_task(virtual.add("m", "decode"))
        decision = await client.wait()
        assert decision.workers == {"m": {"decode": 5}, "n": {"both": 2}}
        cluster.counts = {"decode": 5, "both": 2}
        client.complete(decision)
        assert [await adding, await other] == ["both-2", "decode-5"]

    asyncio.run(run())


def test_one_models_decisions_keep_no_other_waiting_for_workers_that_do_not_come(tmp_path):
    async def run():
        cluster = Cluster()
        cluster.counts = {"decode": 1, "both": 1}
        virtual, client = connector(tmp_path, cluster, 0.3, TWO_MODELS), VirtualClient(tmp_path)
        await virtual.start()
        client.complete(await client.wait())
        assert virtual.pending("m") == 1
        for count in (2, 3, 4):
            await asyncio.sleep(0.15)
            adding = asyncio.create_task(virtual.add("n", "both"))
            decision = await client.wait()
            cluster.counts["both"] = count
            client.complete(decision)
            await adding
        assert virtual.pending("m") == 0

    asyncio.run(run())


def test_the_files_are_for_any_language(tmp_path):
    async def run():
        await connector(tmp_path, Cluster()).start()
        written = json.loads((tmp_path / "decision.json").read_text())
        assert written["decision_id"] == 1 and written["workers"] == {"m": {"decode": 2, "prefill": 1}}
        waiting = asyncio.create_task(VirtualClient(tmp_path).wait())
        assert (await waiting).decision_id == 1
        (tmp_path / "scaled.json").write_text('{"scaled_decision_id": 1}\n')
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(VirtualClient(tmp_path).wait(), 0.3)
        (tmp_path / "scaled.json").write_text('{"scaled_dec')  # being written
        assert (await VirtualClient(tmp_path).wait()).decision_id == 1

    asyncio.run(run())


def test_a_decision_after_the_file_was_removed_is_one_that_nobody_has_confirmed(tmp_path):
    """Regression: numbers began at 1 again, which had all been confirmed, so the orchestrator waited for ever."""

    async def run():
        (tmp_path / "scaled.json").write_text('{"scaled_decision_id": 7}\n')
        await connector(tmp_path, Cluster()).start()
        decision = await asyncio.wait_for(VirtualClient(tmp_path).wait(), 60)
        assert decision.decision_id == 8

    asyncio.run(run())


def test_a_confirmation_that_cannot_be_read_is_named(tmp_path):
    async def run():
        virtual = connector(tmp_path, Cluster(), timeout_s=0.3)
        await virtual.start()
        (tmp_path / "scaled.json").write_text('{"scaled": 1}\n')
        with pytest.raises(UnavailableError, match=r'cannot be read in .*scaled_decision_id": N'):
            await virtual.add("m", "decode")

    asyncio.run(run())


def test_a_file_that_is_no_decision_is_not_overwritten(tmp_path):
    (tmp_path / "decision.json").write_text("important")
    with pytest.raises(ConfigError, match=r"decision\.json must hold a planner's decision; remove the file"):
        asyncio.run(connector(tmp_path, Cluster()).start())
    assert (tmp_path / "decision.json").read_text() == "important"


async def started(folder, cluster, timeout_s=5.0):
    """A connector whose first decision is confirmed, and the orchestrator's side."""
    virtual, client = connector(folder, cluster, timeout_s), VirtualClient(folder)
    await virtual.start()
    await obey(folder, cluster, [], 1)
    return virtual, client


def test_a_confirmation_that_a_disk_does_not_give_for_a_while_is_awaited(tmp_path, caplog):
    """Regression: the change failed at once, and the orchestrator started a worker that nobody awaited."""

    async def run():
        cluster = Cluster()
        virtual, client = await started(tmp_path, cluster)
        adding = asyncio.create_task(virtual.add("m", "decode"))
        decision = await client.wait()
        (tmp_path / "scaled.json").unlink()
        (tmp_path / "scaled.json").mkdir()
        cluster.counts = dict(decision.workers["m"])
        await asyncio.sleep(0.5)
        assert not adding.done()
        assert caplog.text.count("confirmations cannot be read, retrying: [Errno 21]") == 1
        (tmp_path / "scaled.json").rmdir()
        client.complete(decision)
        assert await adding == "decode-3"

    asyncio.run(run())


def test_a_confirmation_that_a_disk_never_gives_is_named_and_the_counts_are_those_of_before(tmp_path):
    async def run():
        cluster = Cluster()
        virtual, client = await started(tmp_path, cluster, timeout_s=0.5)
        adding = asyncio.create_task(virtual.add("m", "decode"))
        await client.wait()
        (tmp_path / "scaled.json").unlink()
        (tmp_path / "scaled.json").mkdir()
        with pytest.raises(UnavailableError, match=r"is taken back; .*cannot be read: \[Errno 21\]"):
            await adding
        (tmp_path / "scaled.json").rmdir()
        decision = await client.wait()
        assert decision.decision_id == 3 and decision.workers["m"] == {"decode": 2, "prefill": 1}

    asyncio.run(run())


@pytest.mark.parametrize("failure", [asyncio.CancelledError, OSError, ZeroDivisionError])
def test_an_addition_that_fails_in_any_way_gives_the_count_of_before(tmp_path, failure):
    async def run():
        cluster = Cluster()
        virtual, client = await started(tmp_path, cluster)
        adding = asyncio.create_task(virtual.add("m", "decode"))
        assert (await client.wait()).workers["m"]["decode"] == 3

        def fails(*_):
            raise failure

        cluster.ready, ready = fails, cluster.ready
        with pytest.raises(failure):
            await adding
        cluster.ready = ready
        assert (await client.wait()).workers["m"] == {"decode": 2, "prefill": 1}

    asyncio.run(run())


def test_a_decision_that_cannot_be_written_is_none_that_others_wait_for(tmp_path):
    """Regression: no further decision was made until the planner started again."""

    async def run():
        cluster = Cluster()
        virtual, _ = await started(tmp_path, cluster)
        (tmp_path / "decision.new").mkdir()
        with pytest.raises(IsADirectoryError):
            await virtual.add("m", "decode")
        (tmp_path / "decision.new").rmdir()
        obeying = asyncio.create_task(obey(tmp_path, cluster, [], 1))
        assert await virtual.add("m", "decode") == "decode-3"
        await obeying

    asyncio.run(run())


def test_an_addition_whose_taking_back_cannot_be_written_says_so(tmp_path, caplog):
    async def run():
        virtual, client = await started(tmp_path, Cluster())
        adding = asyncio.create_task(virtual.add("m", "decode"))
        await client.wait()
        (tmp_path / "decision.new").mkdir()
        adding.cancel()
        with pytest.raises(asyncio.CancelledError):
            await adding
        assert "a surplus decode worker of m stays decided: [Errno 21]" in caplog.text

    asyncio.run(run())
