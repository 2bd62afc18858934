"""The messages between a router (remote_engine.py) and a native worker (worker_server.py): msgpack by
msgspec, one message per ZMQ frame.

Requests and outputs travel as they do between `shoal serve` and its engine's core (shoal/wire.py).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.stats import SleepState, Stats
from shoal.telemetry.served import ServedTotals
from shoal.wire import Abort, Add, Call, Message, Outputs, Refused, Reply

HEARTBEAT_MS = 2000  # libzmq's heartbeats, both ways
SILENCE_MS = 6000  # without a heartbeat for this long the connection is broken
REPORT_S = 1.0  # between two reports of a worker

# To the worker


class Hello(Message, frozen=True):
    """The first message of a connection. `worker_id`: the addressee, as another process may have the port
    now."""

    worker_id: str


class AskEvents(Message, frozen=True):
    """Requests all batches of KV events from this number on, and then each new one."""

    start: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class ChangeRole(Message, frozen=True):
    """Gives the worker another role, which it registers; its requests continue. It answers with a Reply."""

    call_id: int
    role: str


ToWorker = Hello | Add | Abort | Call | AskEvents | ChangeRole

# From the worker; in addition: Outputs (of one step), Refused (a request ended with an error), Reply


class Report(Message, frozen=True):
    """The worker's state, sent every REPORT_S seconds and after commands."""

    stats: Stats
    sleep: SleepState
    weights_version: int
    served: ServedTotals | None = None


class KvBatch(Message, frozen=True):
    """A batch of KV events, as the engine has encoded it."""

    number: int
    payload: bytes


class KvReplayed(Message, frozen=True):
    """A batch of a replay."""

    number: int
    payload: bytes


class KvReplayEnded(Message, frozen=True):
    """The end of a replay."""


FromWorker = Outputs | Refused | Reply | Report | KvBatch | KvReplayed | KvReplayEnded

encode = msgspec.msgpack.Encoder().encode
_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)  # type: ignore[arg-type]
# type: ignore[arg-type]
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def decode_to_worker(data: bytes) -> ToWorker:
    """Raises msgspec.DecodeError where a value has another type, or breaks a rule of its class."""
    return _to_worker.decode(data)


def decode_from_worker(data: bytes) -> FromWorker:
    return _from_worker.decode(data)
