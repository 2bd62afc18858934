"""Streams over messages that this test holds back, on virtual time."""

import asyncio

import msgspec
import pytest

from shoal.fleet.clock import LoopClock, run_virtual
from shoal.fleet.registry.streams import Alive, InboxMessage, PeerGone, Streams
from shoal.fleet.registry.subscription import Reader

LEASE_S = 6.0


class Note(msgspec.Struct):
    n: int


class Wire:
    """Messages of this process. Who is in `held` has said that its streams live, and nobody has heard it yet."""

    def __init__(self):
        self.takers, self.held, self.has_said = {}, set(), asyncio.Event()
        self.released = asyncio.Event()

    async def send(self, subject, payload):
        if subject.startswith("inbox."):
            message = msgspec.msgpack.decode(payload, type=InboxMessage)
            if isinstance(message, Alive) and message.sender in self.held:
                self.has_said.set()
                await self.released.wait()
        for take in self.takers.get(subject, []):
            take(payload)

    async def listen(self, subject, take):
        self.takers.setdefault(subject, []).append(take)
        return lambda: None


async def count(asked):
    """A number each second."""
    for number in range(asked.n):
        await asyncio.sleep(1.0)
        yield Note(number)


def run(test):
    async def main():
        wire = Wire()
        caller, server = [
            Streams(wire, name, LoopClock(), LEASE_S, Reader()) for name in ("caller", "server")
        ]
        await server.serve("count", Note, count)
        await test(wire, caller, server)
        await caller.close()
        await server.close()

    run_virtual(main())


@pytest.mark.parametrize("late", ["inbox.caller", "inbox.server"])
def test_a_sign_of_life_that_is_older_than_a_stream_does_not_end_it(late):
    """It names the streams of its time, and arrives behind the opening of another one."""

    async def test(wire, caller, server):
        old = await caller.call("count", Note(30), Note)
        await anext(old)
        wire.held = {late}
        await wire.has_said.wait()
        young = await caller.call("count", Note(30), Note)
        await anext(young)
        wire.released.set()
        assert [note.n async for note in young] == list(range(1, 30))
        assert [note.n async for note in old] == list(range(1, 30))

    run(test)


def test_a_stream_that_nobody_reads_ends_by_the_next_sign_of_life():
    async def test(wire, caller, server):
        left, read = [await caller.call("count", Note(30), Note) for _ in range(2)]
        await anext(read)
        caller.forget(left.stream_id)  # its Stop was lost
        await asyncio.sleep(LEASE_S / 3 + 0.1)
        assert set(server._served) == {read.stream_id}
        assert [note.n async for note in read] == list(range(1, 30))

    run(test)


def test_a_stream_whose_end_was_lost_ends_by_the_next_sign_of_life():
    async def test(wire, caller, server):
        lost, read = [await caller.call("count", Note(30), Note) for _ in range(2)]
        await anext(read)
        del server._served[lost.stream_id]
        with pytest.raises(PeerGone, match="its end was lost"):
            async for _ in lost:
                pass

    run(test)
