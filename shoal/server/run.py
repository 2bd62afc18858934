"""The application under uvicorn: sockets, clients that dawdle, signals, the end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import functools
import ipaddress
import logging
import resource
import signal
import socket
import ssl
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.config import ServerConfig
from shoal.errors import ConfigError
from shoal.server.app import Server
from shoal.server.errors import ApiError
from shoal.server.request_log import log_refusal
from shoal.server.throughput import report_throughput

logger = logging.getLogger(__name__)

MAX_HEADER_BYTES = 64 << 10
KEEP_ALIVE_SECONDS = 75    # longer than clients and proxies keep theirs, so that they close and never meet a closing socket
LAST_WORDS_SECONDS = 5     # for answers that are whole and not yet read when the server ends
Ready = Callable[[int, int | None], None]
FORCED_SECONDS = 0.5       # to tell so those who are cut off
BACKLOG = 2048             # connections that wait to be accepted
MAX_FILES = 65536          # connections are files, and the usual limit of 1024 is soon reached
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(app: Server, admin: Server | None, config: ServerConfig, ports: Sequence[socket.socket], *,
                ready: Ready | None = None) -> bool:
    """Serves until SIGTERM or SIGINT, then drains. A second signal ends at once: False, True otherwise. Else as serve_until."""
    loop = asyncio.get_running_loop()
    drain, force = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (force if drain.is_set() else drain).set()

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        await serve_until(drain, force, app, admin, config, ports, ready=ready)
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
    return not force.is_set()


async def serve_until(drain: asyncio.Event, force: asyncio.Event, app: Server, admin: Server | None, config: ServerConfig,
                      ports: Sequence[socket.socket], *, ready: Ready | None = None) -> None:
    """Serves until `drain` is set, then lets running requests finish within shutdown_timeout; until `force` is set, at once.

    ports: open_ports' sockets, closed at the end. ready: called with the numbers of both once they listen.
    """
    _allow_many_files()
    listeners = list(zip([app] if admin is None else [app, admin], ports, strict=True))
    for port in ports:
        try:
            port.listen(BACKLOG)
        except OSError as error:    # two may bind one address; the second to listen has lost
            raise ConfigError(f"port {port.getsockname()[1]} was taken by another server meanwhile: {error}; choose another") from None
    servers = [_Uvicorn(_settings(one, config)) for one, _ in listeners]
    tasks = [asyncio.create_task(server.serve(sockets=[listener])) for server, (_, listener) in zip(servers, listeners)]
    reports: asyncio.Task[None] | None = None
    try:
        while not all(server.started for server in servers):
            if failed := next((t for t in tasks if t.done()), None):
                failed.result()
                raise ConfigError("the HTTP server ended before it began; the log says why")
            await asyncio.sleep(0.01)
        reports = asyncio.create_task(report_throughput(app.models))
        if ready is not None:
            numbers = [port.getsockname()[1] for port in ports]
            ready(numbers[0], numbers[1] if admin is not None else None)
        await _first(drain.wait(), force.wait(), *tasks)
        # The ports stay open meanwhile: who still comes is told 503 and when to try again, where a closed one tells nothing.
        await _first(app.drain(config.shutdown_timeout), force.wait())
        for server in servers:
            server.should_exit = True
        await _first(asyncio.wait(tasks), force.wait())
        if force.is_set():
            for one, _ in listeners:
                one.stop("the server ends at once")
            await asyncio.wait(tasks, timeout=FORCED_SECONDS)
    finally:
        if reports is not None:
            tasks.append(reports)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in app.models:
            model.close()


def open_ports(config: ServerConfig) -> list[socket.socket]:
    """The public port and, where there is one, the admin port. They are ours from now on, and refuse connections until they are served.

    Raises ConfigError for an address that cannot be had.
    """
    ports = [_bound(config.host, config.port, "port")]
    if config.admin_port is not None:
        try:
            ports.append(_bound(config.admin_host, config.admin_port, "admin_port"))
        except ConfigError:
            ports[0].close()
            raise
    return ports


def _bound(host: str, port: int, option: str) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)    # a server that ended just now leaves connections behind
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise ConfigError(f"{option} {port} on host {host!r} cannot be opened: {error}; choose another") from None
    return found


def check_tls(config: ServerConfig) -> None:
    """Raises ConfigError if the key and the certificate cannot be used."""
    if config.ssl_certfile is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            raise ConfigError(f"ssl_certfile {config.ssl_certfile!r} and ssl_keyfile {config.ssl_keyfile!r} cannot be used: {error}; give "
                              "a PEM certificate and its key") from None


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_of(config: ServerConfig, port: int, reachable: bool = False) -> str:
    """reachable: an address to open on this machine, where the server listens on all."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host) if reachable else config.host
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{host}:{port}"


def _settings(app: Server, config: ServerConfig) -> uvicorn.Config:
    connection = functools.partial(_Connection, limits=config)
    return uvicorn.Config(app, http=connection, ws="none", lifespan="off", interface="asgi3", log_config=None, access_log=False,    # type: ignore[arg-type]
                          proxy_headers=False, server_header=False, timeout_keep_alive=KEEP_ALIVE_SECONDS, backlog=BACKLOG,
                          timeout_graceful_shutdown=LAST_WORDS_SECONDS, ssl_keyfile=config.ssl_keyfile, ssl_certfile=config.ssl_certfile)


def _allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _first(*awaitables: Any) -> None:
    """Waits for one of them, and lets a failure of it out. Tasks among them go on, the rest is cancelled."""
    futures = [asyncio.ensure_future(a) for a in awaitables]
    try:
        done, _ = await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            future.result()
    finally:
        for future, given in zip(futures, awaitables):
            if future is not given:
                future.cancel()


class _Uvicorn(uvicorn.Server):
    """Signals are ours: uvicorn's own would end the process while answers run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(HttpToolsProtocol):
    """uvicorn's connection, with limits that it lacks: on a request's head, in time and size, and on an answer that nobody reads."""

    def __init__(self, *args: Any, limits: ServerConfig, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._in_head, self._head_bytes = True, 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_told_again = False    # what the parser reads is no news

    def connection_made(self, transport: asyncio.Transport) -> None:    # type: ignore[override]
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self._limits.read_timeout, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        if self._is_told_again:
            return
        super().on_message_begin()
        self._in_head, self._head_bytes = True, 0
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.read_timeout, self._head_is_late)

    def on_url(self, url: bytes) -> None:
        if not self._is_told_again:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_told_again:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_told_again:
            return
        self._in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._decline(data[offer.args[0]:])
        except httptools.HttpParserError:
            self.send_400_response("what came is no HTTP")
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADER_BYTES:
                self._refuse(ApiError(431, f"the request's head has more than {MAX_HEADER_BYTES} bytes"))

    def _decline(self, rest: bytes) -> None:
        """The client offers another protocol (HTTP/2, as Java's does each time), and the parser ends the request with its head. Nobody need
        take the offer: another parser is told of the body, which begins with `rest`."""
        framing = [b"%b: %b\r\n" % header for header in self.headers if header[0] in (b"content-length", b"transfer-encoding")]
        self.parser = httptools.HttpRequestParser(self)
        self.cycle.more_body = True
        self._is_told_again = True
        self.parser.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
        self._is_told_again = False
        if rest:
            self.data_received(rest)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _await_reader(self) -> None:
        self._write_timer = self.loop.call_later(self._limits.write_timeout, self._check_reader, self._num_unread())

    def _check_reader(self, before: int) -> None:
        """A big answer takes a slow line long: only whoever took nothing at all is given up."""
        if self._num_unread() < before:
            self._await_reader()
        else:
            self.transport.abort()

    def _num_unread(self) -> int:
        """Bytes that the client's side has not acknowledged: those in our buffer, and those in the kernel's, which may be megabytes."""
        in_kernel = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(in_kernel, sys.byteorder)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, msg))

    def _head_is_late(self) -> None:
        self._refuse(ApiError(408, f"the request's head did not arrive within {self._limits.read_timeout:g} s"))

    def _refuse(self, error: ApiError) -> None:
        """Answers what never became a request."""
        self._stop_timers()
        if self.transport.is_closing():
            return
        if self._limits.log_requests != "off":
            log_refusal(self.client[0] if self.client else "-", error)
        body = error.body()
        self.transport.write(b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (
            error.status, REASONS[error.status], len(body), body))
        self.transport.close()

    def _stop_timers(self) -> None:
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()


REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
