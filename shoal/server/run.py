"""The application under uvicorn: its sockets, signals, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import uvicorn

from shoal.config import ServerConfig
from shoal.errors import ConfigError
from shoal.files.open_files import connections_for
from shoal.hosts import is_loopback
from shoal.server.app import Server
from shoal.server.http.connection import Connection, Connections
from shoal.server.http.keys import read_keys
from shoal.server.http.request_log import RefusalLog
from shoal.server.served.throughput import report_throughput
from shoal.tasks import first_of

logger = logging.getLogger(__name__)

# Longer than clients and proxies keep a connection, so that they close it and never meet a closing one.
KEEP_ALIVE_SECONDS = 75
LAST_WORDS_SECONDS = 5  # for clients to read answers that are whole when the server ends
Ready = Callable[[int, int | None], None]
FORCED_SECONDS = 0.5  # for clients that are cut off to get their error
BACKLOG = 2048  # connections that wait to be accepted
# The most connections that asyncio accepts in one pass of its loop. Running answers wait for each pass.
ACCEPTED_AT_ONCE = 16
MAX_FILES = 65536  # connections are files, and the usual limit of 1024 is soon reached
ACCEPT_LOG_SECONDS = 10.0  # between two lines that say that files have run out
SIGNALS = (signal.SIGTERM, signal.SIGINT)


async def serve(
    app: Server,
    admin: Server | None,
    config: ServerConfig,
    ports: Sequence[socket.socket],
    *,
    drain: asyncio.Event | None = None,
    ready: Ready | None = None,
) -> bool:
    """Serves until SIGTERM, SIGINT or SIGHUP, or until `drain` is set, then drains; one more signal ends it
    at once. Returns whether it has drained. The rest is as in serve_until."""
    drain, force = drain or asyncio.Event(), asyncio.Event()
    with heeding_signals(drain, force):
        await serve_until(drain, force, app, admin, config, ports, ready=ready)
    return not force.is_set()


@contextlib.contextmanager
def heeding_signals(drain: asyncio.Event, force: asyncio.Event) -> Iterator[None]:
    """Inside the block, SIGTERM and SIGINT set `drain`, and `force` the second time. SIGHUP sets `drain`:
    a terminal that is closed sends it more than once. Under nohup it is ignored."""
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        (force if drain.is_set() else drain).set()

    handlers = dict.fromkeys(SIGNALS, on_signal)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        handlers[signal.SIGHUP] = drain.set
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)


async def serve_until(
    drain: asyncio.Event,
    force: asyncio.Event,
    app: Server,
    admin: Server | None,
    config: ServerConfig,
    ports: Sequence[socket.socket],
    *,
    ready: Ready | None = None,
) -> None:
    """Serves until `drain` is set, then lets running requests finish within shutdown_timeout; until `force`
    is set, at once.

    ports: the sockets of open_ports; they are closed at the end. ready: called with the numbers of both ports
    once they listen; the number of a Unix socket is 0. Raises ConfigError if a port was taken meanwhile.
    """
    most = max_connections(config)
    listeners = list(zip([app] if admin is None else [app, admin], ports, strict=True))
    for port in ports:
        try:
            port.listen(BACKLOG)
        except OSError as error:  # two may bind one address; the second to listen has lost
            raise ConfigError(
                f"port {port.getsockname()[1]} was taken by another server meanwhile: {error}; choose another"
            ) from None
    asyncio.get_running_loop().set_exception_handler(_LoopErrors())
    servers = [
        _Uvicorn(_settings(one, config, Connections(most, RefusalLog(config.log_requests))))
        for one, _ in listeners
    ]
    tasks = [
        asyncio.create_task(server.serve(sockets=[listener]))
        for server, (_, listener) in zip(servers, listeners)
    ]
    reports: list[asyncio.Task[None]] = []
    try:
        while not all(server.started for server in servers):
            if failed := next((t for t in tasks if t.done()), None):
                failed.result()
                raise ConfigError("the HTTP server ended before it began; the log says why")
            await asyncio.sleep(0.01)
        for port in ports:
            # Again: asyncio has one number for the backlog and for the connections that it accepts at once.
            port.listen(BACKLOG)
        monitor = app.context.monitor
        for report in (monitor.run(), report_throughput(app.context.models, monitor)):
            reports.append(asyncio.create_task(report))
            reports[-1].add_done_callback(_log_failure)
        if ready is not None:
            numbers = [0 if port.family == socket.AF_UNIX else port.getsockname()[1] for port in ports]
            ready(numbers[0], numbers[1] if admin is not None else None)
        await first_of(drain.wait(), force.wait(), *tasks)
        if drain.is_set():
            num_active = sum(admission.active for admission in app.context.models.admissions)
            waits = f": requests that run get up to {config.shutdown_timeout:g} s" if num_active else ""
            logger.info("stopping%s", waits)
        # The ports stay open meanwhile: a new client gets a 503 with Retry-After, which is more than a closed
        # port would say.
        await first_of(app.drain(config.shutdown_timeout), force.wait())
        for server in servers:
            server.should_exit = True
        await first_of(asyncio.wait(tasks), force.wait())
        if force.is_set():
            for one, _ in listeners:
                one.stop("the server ends at once")
            await asyncio.wait(tasks, timeout=FORCED_SECONDS)
    finally:
        tasks += reports
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for model in app.context.models:
            model.close()


def open_ports(config: ServerConfig) -> list[socket.socket]:
    """Binds the public port and, if configured, the admin port. They refuse connections until they are
    served.

    Raises ConfigError for an address that cannot be had.
    """
    ports = [_bound(config.host, config.port, "port") if config.uds is None else _bound_file(config.uds)]
    if config.admin_port is not None:
        try:
            ports.append(_bound(config.admin_host, config.admin_port, "admin_port"))
        except ConfigError:
            ports[0].close()
            raise
    return ports


def _bound(host: str, port: int, option: str) -> socket.socket:
    # asyncio sets TCP_NODELAY on what it accepts if the protocol is named here. Without that an answer waits
    # for the acknowledgement of its head.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        # a server that ended just now leaves connections behind
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise ConfigError(
            f"{option} {port} on host {host!r} cannot be opened: {error}; choose another"
        ) from None
    return found


class _UnixPort(socket.socket):
    """A Unix socket that removes its file when it is closed."""

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it was closed before
            os.unlink(self.getsockname())
        super().close()


def _bound_file(path: str) -> socket.socket:
    found = _UnixPort(socket.AF_UNIX)
    try:
        _remove_stale(path)
        found.bind(path)
        os.chmod(path, 0o600)  # nobody can connect before it listens
    except (OSError, ValueError) as error:
        found.close()
        raise ConfigError(f"uds {path!r} cannot be opened: {error}; choose another path") from None
    return found


def _remove_stale(path: str) -> None:
    """Removes the socket's file of a killed server. Raises OSError if the path is anything else, or in
    use."""
    if not os.path.lexists(path):
        return
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        raise FileExistsError("the path exists and is not a socket")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise FileExistsError("another server listens there")


def check_tls(config: ServerConfig) -> None:
    """Raises ConfigError if the key, certificates or ciphers cannot be used."""
    if config.ssl_certfile is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
        except OSError as error:
            raise ConfigError(
                f"ssl_certfile {config.ssl_certfile!r} and ssl_keyfile {config.ssl_keyfile!r} cannot be "
                f"used: {error}; give a PEM certificate and its key"
            ) from None
        try:
            if config.ssl_ca_certs is not None:
                context.load_verify_locations(config.ssl_ca_certs)
            if config.ssl_ciphers is not None:
                context.set_ciphers(config.ssl_ciphers)
        except OSError as error:
            raise ConfigError(
                f"ssl_ca_certs {config.ssl_ca_certs!r} or ssl_ciphers {config.ssl_ciphers!r} cannot be used: "
                f"{error}; give PEM certificates, and ciphers that OpenSSL has"
            ) from None


def url_of(config: ServerConfig, port: int, reachable: bool = False) -> str:
    """Returns the URL of the server. reachable: for a server on all addresses, a URL that this machine can
    open."""
    if config.uds is not None:
        return f"unix:{config.uds}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host) if reachable else config.host
    host = f"[{host}]" if ":" in host else host
    return f"{'https' if config.ssl_certfile else 'http'}://{host}:{port}"


def warn_of_open_port(config: ServerConfig, port: int) -> None:
    """Warns if users of other machines may use the server without a key."""
    if not is_loopback(config.host) and not read_keys(config):
        logger.warning(
            "anybody who reaches port %d on %s may use this server, as it has no key; set one with "
            "--api-key or SHOAL_API_KEY, or leave --host at 127.0.0.1",
            port,
            config.host,
        )


def max_connections(config: ServerConfig) -> int:
    """Returns the most connections of a port: the configured number, else a share of the limit of open
    files. Raises that limit as far as possible. Raises ConfigError for more connections than
    files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    files = wanted if soft == resource.RLIM_INFINITY else max(soft, wanted)
    room = connections_for(files)
    if config.max_connections is not None and config.max_connections > room:
        raise ConfigError(
            f"max_connections {config.max_connections} is more than {room}, which this process's limit of "
            f"{files} open files leaves; raise that limit (ulimit -n, LimitNOFILE in a systemd unit) or "
            "choose fewer"
        )
    return config.max_connections or room


def _settings(app: Server, config: ServerConfig, all_connections: Connections) -> uvicorn.Config:
    connection = functools.partial(Connection, limits=config, all_connections=all_connections)
    return uvicorn.Config(
        app,
        http=connection,  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        backlog=ACCEPTED_AT_ONCE,
        timeout_graceful_shutdown=LAST_WORDS_SECONDS,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_cert_reqs=config.ssl_cert_reqs,
        ssl_ciphers=config.ssl_ciphers,
    )


def _log_failure(report: asyncio.Task[None]) -> None:
    """Logs the failure of a monitoring task. Requests do not need it, so the server continues."""
    if not report.cancelled() and (error := report.exception()) is not None:
        logger.error("a bug in monitoring: rates and history are not updated any more", exc_info=error)


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process while answers run."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _LoopErrors:
    """Logs failed callbacks of asyncio. When files have run out, every waiting connection is such a
    failure, thousands of times a second: these are logged once in a while."""

    def __init__(self) -> None:
        self._said = -ACCEPT_LOG_SECONDS

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
        elif (now := time.monotonic()) - self._said >= ACCEPT_LOG_SECONDS:
            self._said = now
            logger.error(
                "a connection cannot be accepted: %s; raise the limit of open files, or lower "
                "--max-connections",
                context.get("exception"),
            )
