"""The owner's port and the reader's lease, with well-behaved readers and others; sockets on loopback."""

import random
import socket
import threading
import time

import msgspec
import pytest

from shoal.errors import ConfigError
from shoal.kv.blocks import BlockPool
from shoal.kv.layout import CacheSpec, Layout
from shoal.kv.transfer import offer_server
from shoal.kv.transfer.lease import (
    MAX_FRAME_BYTES,
    Current,
    Intact,
    Lease,
    Open,
    Opened,
    Refused,
    Renew,
    Verify,
    frame,
)
from shoal.kv.transfer.offer_server import OfferServer
from shoal.kv.transfer.offers import Offers
from shoal.kv.transfer.ticket import ExportAddress, Failure, Progress, TransferError, digest_of, seal, unseal

SPEC = CacheSpec(Layout.WHOLE_BLOCKS, 3, 4, 8, "bfloat16", 4, num_blocks=32)


class Owner:
    def __init__(self, lease_s=30.0):
        self.now = 0.0
        self.pool = BlockPool(32)
        ranks = [[ExportAddress("in_process", (SPEC,), b"")]]
        self.offers = Offers(b"m", ranks, self.pool.generation, lambda: self.now, lease_s)
        self.server = OfferServer(self.offers)

    def offer(self, num_blocks=4):
        sealed = self.offers.offer(self.pool.try_allocate(num_blocks))
        return sealed, unseal(sealed).id

    def ended(self, timeout_s=10):
        """Waits for the end of one offer or more."""
        until = time.monotonic() + timeout_s
        while not (ended := self.offers.take_ended()):
            assert time.monotonic() < until, "no offer has ended"
            time.sleep(0.002)
        return [one.failure for one in ended]


@pytest.fixture
def owner():
    made = Owner()
    yield made
    made.server.close()
    made.server.close()


def failure(call, *arguments):
    with pytest.raises(TransferError) as caught:
        call(*arguments)
    return caught.value.failure


def raw(owner):
    host, port = owner.server.address.split(":")
    connection = socket.create_connection((host, int(port)), 10)
    connection.settimeout(10)
    return connection


def test_a_reader_sees_progress_verifies_and_releases(owner):
    sealed, ticket_id = owner.offer()
    with Lease(sealed) as lease:
        assert lease.progress == Progress()
        owner.offers.advance(ticket_id, 4, 1)
        assert lease.watch(5) == Progress(0, 4, 1)
        assert lease.watch(0) == Progress(0, 4, 1)
        lease.renew()
        owner.offers.advance(ticket_id, 4, 3)
        assert lease.watch(5) == Progress(4, 4, 0)
        lease.verify()
        lease.release()
        assert owner.ended() == [None]


def test_a_watching_reader_is_notified_at_once(owner):
    sealed, ticket_id = owner.offer()
    with Lease(sealed) as lease:
        timer = threading.Timer(0.1, owner.offers.advance, (ticket_id, 2, 3))
        timer.start()
        start = time.monotonic()
        assert lease.watch(60) == Progress(2, 2, 0)
        assert time.monotonic() - start < 30
        timer.join()


def test_a_watching_reader_is_notified_of_the_end(owner):
    sealed, _ = owner.offer()
    with Lease(sealed) as lease:
        timer = threading.Timer(0.05, owner.offers.withdraw, ("the request was aborted",))
        timer.start()
        with pytest.raises(TransferError, match="the request was aborted"):
            lease.watch(60)
        timer.join()


def test_a_connection_that_ends_gives_the_blocks_back(owner):
    sealed, _ = owner.offer()
    lease, other = Lease(sealed), Lease(sealed)
    lease.close()
    other.verify()
    assert owner.offers.take_ended() == []
    other.close()
    assert owner.ended() == [Failure.LOST]


def test_a_lease_lives_as_long_as_it_is_renewed(owner):
    sealed, _ = owner.offer()
    with Lease(sealed) as lease:
        for _ in range(3):
            owner.now += 20
            lease.renew()
            lease.verify()  # what was sent before has been taken in when this is answered
        owner.now += 31
        assert failure(lease.verify) is Failure.EXPIRED
    assert failure(Lease, sealed) is Failure.EXPIRED


def test_forged_and_unknown_tickets_are_refused(owner):
    sealed, _ = owner.offer()
    ticket = unseal(sealed)
    replace = msgspec.structs.replace
    for change in (
        dict(blocks=ticket.blocks[:-1], generations=ticket.generations[:-1]),
        dict(blocks=(9, *ticket.blocks[1:])),
        dict(generations=(7, *ticket.generations[1:])),
        dict(lease_s=1e9),
        dict(ranks=((ExportAddress("nixl", (SPEC,), b"metadata of another"),),)),
        dict(ranks=((ExportAddress("in_process", (replace(SPEC, num_blocks=99),), b""),),)),
    ):
        assert failure(Lease, seal(replace(ticket, **change))) is Failure.FORGED
    assert failure(Lease, seal(replace(ticket, id=bytes(16)))) is Failure.UNKNOWN
    for server in ("127.0.0.1:1", "127.0.0.1", "127.0.0.1:99999", ":", "[::1]:x"):
        assert failure(Lease, seal(replace(ticket, server=server))) is Failure.UNREACHABLE
    with Lease(sealed) as lease:
        lease.verify()


def test_a_port_beyond_the_last_is_not_taken_for_another(owner):
    ticket = unseal(owner.offer()[0])
    host, port = owner.server.address.split(":")
    beyond = msgspec.structs.replace(ticket, server=f"{host}:{int(port) + 65536}")
    assert failure(Lease, seal(beyond)) is Failure.UNREACHABLE


def test_an_owner_that_goes_away_is_noticed(owner):
    sealed, _ = owner.offer()
    lease = Lease(sealed)
    timer = threading.Timer(0.05, owner.server.close)
    timer.start()
    assert failure(lease.watch, 60) is Failure.LOST
    timer.join()
    assert failure(lease.verify) is Failure.LOST
    assert failure(Lease, sealed) is Failure.UNREACHABLE
    lease.release()


@pytest.mark.parametrize("seed", range(3))
def test_garbage_closes_its_connection_and_no_other(owner, seed):
    print(f"seed {seed}")
    rng = random.Random(seed)
    sealed, _ = owner.offer()
    with Lease(sealed) as lease:
        for _ in range(40):
            kind = rng.randrange(4)
            if kind == 0:
                garbage = rng.randbytes(rng.randint(1, 200))
            elif kind == 1:
                garbage = (MAX_FRAME_BYTES + rng.randint(1, 1 << 31)).to_bytes(4, "little")
            elif kind == 2:
                body = rng.randbytes(rng.randint(1, 60))
                garbage = len(body).to_bytes(4, "little") + body
            else:
                garbage = frame(rng.choice((Verify(), Renew(), Intact(), Opened(Progress()))))
            with raw(owner) as connection:
                connection.sendall(garbage)
                connection.shutdown(socket.SHUT_WR)
                assert connection.recv(100) == b""
        lease.verify()
    assert owner.ended() == [Failure.LOST]


def test_a_message_may_come_in_any_pieces(owner):
    sealed, _ = owner.offer()
    ticket = unseal(sealed)
    message = frame(Open(ticket.id, digest_of(sealed))) + frame(Verify()) + frame(Verify())
    with raw(owner) as connection:
        for i in range(len(message)):
            connection.sendall(message[i : i + 1])
        answers = frame(Opened(Progress())) + frame(Intact()) + frame(Intact())
        got = b""
        while len(got) < len(answers):
            got += connection.recv(1000)
        assert got == answers


def test_a_connection_that_shows_no_ticket_is_closed(owner, monkeypatch):
    monkeypatch.setattr(offer_server, "SILENT_S", 0.05)
    with raw(owner) as connection:
        assert connection.recv(1) == b""


def test_the_number_of_connections_has_a_bound(owner, monkeypatch):
    monkeypatch.setattr(offer_server, "MAX_CONNECTIONS", 2)
    sealed, _ = owner.offer()
    with Lease(sealed), Lease(sealed):
        assert failure(Lease, sealed) is Failure.LOST


def test_an_address_of_another_host_is_refused(owner):
    with pytest.raises(ConfigError, match=r"203\.0\.113\.1"):
        OfferServer(owner.offers, "203.0.113.1")


class FalseOwner:
    """An owner that answers each connection with fixed bytes."""

    def __init__(self, *answers, then_close=True):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.answers, self.then_close = answers, then_close
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        connection, _ = self.listener.accept()
        for answer in self.answers:
            connection.recv(1000)
            connection.sendall(answer)
        connection.recv(1000)
        if self.then_close:
            connection.close()
        else:
            connection.recv(1000)

    def close(self):
        self.listener.close()


def false_ticket(owner, false):
    return seal(msgspec.structs.replace(unseal(owner.offer()[0]), server=false.address))


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        frame(Current(Progress())),
        frame(Verify()),
        b"\x03\x00\x00\x00\xc1\xc1\xc1",
        b"\xff\xff\xff\x7f",
        len(b"\x92\xa6Opened\x93\xff\x00\x00").to_bytes(4, "little") + b"\x92\xa6Opened\x93\xff\x00\x00",
    ],
)
def test_an_invalid_answer_of_the_owner_is_reported(owner, answer):
    false = FalseOwner(answer)
    with pytest.raises(TransferError, match=false.address) as caught:
        Lease(false_ticket(owner, false))
    assert caught.value.failure is Failure.NONSENSE
    false.close()


def test_an_owner_that_does_not_answer_is_given_up(owner):
    false = FalseOwner(frame(Opened(Progress())), then_close=False)
    lease = Lease(false_ticket(owner, false), timeout_s=0.1)
    assert failure(lease.verify) is Failure.LATE
    lease.close()
    false.close()


def test_a_refusal_says_why(owner):
    false = FalseOwner(frame(Refused(Failure.STALE, "block 7 is another's")))
    with pytest.raises(TransferError, match="block 7 is another's"):
        Lease(false_ticket(owner, false))
    false.close()
