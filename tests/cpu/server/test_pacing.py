"""Requests that arrive at once begin a few at a time, in order, and none of them is lost."""

import asyncio

import pytest
from uvicorn.server import ServerState

from shoal.config import ServerConfig
from shoal.server.http.connection import Connections
from shoal.server.http.pacing import TURNS_A_PASS
from shoal.server.http.request_log import RefusalLog
from shoal.server.run import _settings

COUNT = 100


class Transport(asyncio.Transport):
    """The connection of a client that has sent what it had."""

    def __init__(self):
        super().__init__()
        self.written, self.is_paused = b"", False

    def write(self, data):
        self.written += data

    def is_closing(self):
        return False

    def pause_reading(self):
        self.is_paused = True

    def resume_reading(self):
        self.is_paused = False


def whole(number):
    return [b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % number]


def in_parts(number):
    [request] = whole(number)
    return [request[:5], request[5:20], request[20:]]


@pytest.mark.parametrize("pieces", [whole, in_parts])
def test_requests_that_arrive_at_once_begin_a_few_in_each_pass_of_the_event_loop(pieces):
    begun, begun_a_pass = [], []

    async def app(scope, receive, send):
        begun.append(scope["path"])
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main():
        settings = _settings(app, ServerConfig(), Connections(COUNT, RefusalLog("all")))
        settings.load()
        transports = [Transport() for _ in range(COUNT)]
        for number, transport in enumerate(transports):
            client = settings.http_protocol_class(config=settings, server_state=ServerState(), app_state={})
            client.connection_made(transport)
            for piece in pieces(number):
                client.data_received(piece)
        for _ in range(COUNT):
            before = len(begun)
            await asyncio.sleep(0)
            begun_a_pass.append(len(begun) - before)
        return transports

    transports = asyncio.run(main())
    assert 0 < max(begun_a_pass) <= TURNS_A_PASS
    assert begun == [f"/{number}" for number in range(COUNT)]
    assert all(one.written.startswith(b"HTTP/1.1 204 ") for one in transports)
    assert not any(one.is_paused for one in transports)
