"""What crosses between the HTTP process and the core's: msgpack by msgspec. Torch-free.

Messages are tagged arrays; the vocabulary's dataclasses travel inside them as they are (256 outputs of a
step: 42 KB, 0.09 ms to encode, 0.17 ms to decode; as arrays of their own they would save 30 us and cost a
second definition). Both sides are of one version: the parent starts the child.
"""

from __future__ import annotations

from typing import Any

import msgspec

from shoal import errors
from shoal.api import Output, Request
from shoal.config import EngineConfig
from shoal.errors import EngineDeadError, ShoalError

BEAT_S = 0.5  # between two signs of life of a core


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Anything below."""


# To the core


class Start(Message, frozen=True):
    """The first message: build the engine."""

    config: EngineConfig


class Add(Message, frozen=True):
    request: Request


class Abort(Message, frozen=True):
    """Unknown ids are ignored."""

    request_ids: list[str]


class Call(Message, frozen=True):
    """A method of api.Control, `stats` or `check`; answered by Reply. Runs between two steps."""

    call_id: int
    method: str
    args: list[Any] = []


ToCore = Start | Add | Abort | Call


# From the core


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error as it travels: the name of its class, and what it says."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        name = type(error).__name__
        return cls(name, str(error) if isinstance(error, ShoalError) else f"{name}: {error}")

    def build(self) -> ShoalError:
        """The same error where it is one of Shoal's; otherwise the engine failed in a way that nobody
        foresaw."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, ShoalError):
            return kind(self.message)
        return ShoalError(self.message)


class ModelInfo(msgspec.Struct, array_like=True, frozen=True):
    """What the HTTP process must know of the engine, as it was built."""

    model: str
    pid: int  # of the core's process
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]  # of the checkpoint; the tokenizer may know more
    # the model's defaults of sampling parameters; {} where the options say so
    generation_config: dict[str, Any]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    device: str
    dtype: str


class Ready(Message, frozen=True):
    info: ModelInfo


class Dead(Message, frozen=True):
    """The last message: why the engine did not start, or ended."""

    error: Failure


class Outputs(Message, frozen=True):
    """Of one step."""

    outputs: list[Output]


class Refused(Message, frozen=True):
    """A request that was not taken; others don't notice."""

    request_id: str
    error: Failure


class Reply(Message, frozen=True):
    call_id: int
    result: Any = None
    error: Failure | None = None


class Beat(Message, frozen=True):
    """Sent every BEAT_S seconds by a thread that does nothing else, so that a core which says nothing has
    stopped as a whole."""

    progress: int  # grows with every step that ends
    doing: str  # "step", the name of the call that runs, or "" while there is nothing to do
    cpu_seconds: float  # that the process has used so far, where the model runs on the CPU; else 0


FromCore = Ready | Dead | Outputs | Refused | Reply | Beat

_encoder = msgspec.msgpack.Encoder()
_to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)  # type: ignore[arg-type]
_from_core: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)  # type: ignore[arg-type]


def encode(message: Message) -> bytes:
    """Raises TypeError, ValueError or OverflowError for what msgpack cannot say."""
    return _encoder.encode(message)


def decode_to_core(data: bytes) -> ToCore:
    """Raises msgspec.DecodeError where a value has another type, or breaks a rule of its class."""
    return _to_core.decode(data)


def decode_from_core(data: bytes) -> FromCore:
    return _from_core.decode(data)


def request_id_of(data: bytes) -> str | None:
    """Whose Add it is that could not be decoded; None if it is none."""
    message = msgspec.msgpack.decode(data)
    return message[1]["request_id"] if message[0] == "Add" else None


def dead(failure: Failure) -> EngineDeadError:
    """The engine's end as its users see it: one line. What else there is to say, a rank's traceback perhaps,
    is a note of the error, which logs show and clients don't."""
    first, _, rest = failure.message.partition("\n")
    error = EngineDeadError(first)
    if rest:
        error.add_note(rest)
    return error
