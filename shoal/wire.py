"""Messages between the HTTP process and the core's process: msgpack by msgspec. Torch-free.

Messages are tagged arrays, with the vocabulary's dataclasses inside them as maps: arrays would save little
and need a second definition. Both sides have the same version, as the parent starts the child.
"""

from __future__ import annotations

import typing
from typing import Any

import msgspec

from shoal import errors
from shoal.api import Output, Request
from shoal.config import EngineConfig
from shoal.control import AnyCommand, Command, name_of
from shoal.errors import ConfigError, EngineDeadError, RequestError, ShoalError, UserError
from shoal.stats import Stats

BEAT_S = 0.5  # between two heartbeats of a core


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Anything below."""


# To the core


class Start(Message, frozen=True):
    """The first message: build the engine. `peer_weights`: from a worker that lends its weights."""

    config: EngineConfig
    peer_weights: bytes | None = None


class Add(Message, frozen=True):
    """Adds a request. `age_s`: seconds since its arrival on a host with another clock."""

    request: Request
    age_s: float | None = None


class Abort(Message, frozen=True):
    """Aborts a request. Unknown ids are ignored."""

    request_ids: list[str]


class ReadStats(Command[Stats], frozen=True, tag="stats"):
    is_quick = True


class FlushKv(Command[None], frozen=True, tag="flush_kv"):
    """Writes the KV blocks that lower tiers should keep, as an engine does before it ends."""


class CheckIntegrity(Command[None], frozen=True, tag="check"):
    """Checks the block counts of scheduler, tiers and peers, for tests."""

    is_quick = True


class LendKv(Command[bytes | None], frozen=True, tag="lend_kv"):
    """Offers other workers the cached KV blocks of a prefix of these tokens. Returns a ticket for them; None
    if no block is cached, or if this engine lends no blocks."""

    token_ids: list[int]
    cache_salt: str | None = None
    adapter: str | None = None

    is_quick = True


class TakeBackKv(Command[None], frozen=True, tag="take_back_kv"):
    """Ends a ticket that will not be used any more; has no effect on an ended one. Raises TransferError for a
    malformed ticket."""

    ticket: bytes

    is_quick = True


class LendWeights(Command[bytes], frozen=True, tag="lend_weights"):
    """Opens the weights of this name (weights/fingerprint.py) to a worker that starts with the same ones.
    Returns the description of the export. Raises UnavailableError if there are no such weights."""

    name: bytes
    borrower: str


class TakeBackWeights(Command[None], frozen=True, tag="take_back_weights"):
    """Ends an export: the worker has read the weights, or does not need them."""

    borrower: str


# Commands in addition to an operator's. Only the parent sends FlushKv; other processes of the fleet send the
# others, too.
CoreCommand = (
    AnyCommand | ReadStats | FlushKv | CheckIntegrity | LendKv | TakeBackKv | LendWeights | TakeBackWeights
)
QUICK_COMMANDS = frozenset(name_of(kind) for kind in typing.get_args(CoreCommand) if kind.is_quick)


class Call(Message, frozen=True):
    """Requests a command, which the core runs between two steps. The answer is a Reply with the same id."""

    call_id: int
    command: CoreCommand


ToCore = Start | Add | Abort | Call


# From the core


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error as data: the name of its class, its message, and the wrong field of a UserError."""

    kind: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        name = type(error).__name__
        message = str(error) if isinstance(error, ShoalError) else f"{name}: {error}"
        # A file's name may have bytes that are not UTF-8, which msgpack could not encode.
        field = error.field if isinstance(error, UserError) else None
        return cls(name, message.encode("utf-8", "backslashreplace").decode(), field)

    def build(self) -> ShoalError:
        """Returns the same error if it is one of Shoal's, else an EngineDeadError: an unexpected failure of
        the engine."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, ShoalError):
            error: ShoalError = kind(self.message)
            if isinstance(error, UserError):
                error.field = self.field
            return error
        return ShoalError(self.message)


class ModelInfo(msgspec.Struct, array_like=True, frozen=True):
    """Facts about the built engine and its model, for the HTTP process."""

    model: str
    pid: int  # process id of the core
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]  # from the checkpoint; the tokenizer may have more
    # the model's default sampling parameters; {} if the options exclude them
    generation_config: dict[str, Any]
    num_blocks: int
    kv_cache_tokens: int  # the most in the KV cache; below max_model_len also the most of one sequence
    block_size: int
    max_num_seqs: int
    device: str
    dtype: str
    kv_role: str = ""  # the role of kv_transfer_config; "" without one
    kv_block_bytes: int = 0  # bytes of block_size tokens in the KV cache, over all ranks
    kv_cache_dtype: str = ""  # the name of a torch.dtype
    most_new_tokens: int | None = None  # limit of every answer, from the generation config
    most_drafts: int = 0  # the most in one step of a sequence; 0: none are made
    generates: bool = True  # False: the model has no output head and only embeds
    state_bytes: int = 0  # bytes of a sequence's states of recurrent layers, over all ranks

    @property
    def lends_kv(self) -> bool:
        """True if other engines may read its KV blocks."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def reads_kv(self) -> bool:
        """True if it reads KV blocks of other engines."""
        return self.kv_role in ("kv_consumer", "kv_both")


class Ready(Message, frozen=True):
    """Reports that the engine is built. Sent again, before the reply to UpdateWeights, when the engine has
    changed its model."""

    info: ModelInfo


class Dead(Message, frozen=True):
    """The last message, with the reason why the engine did not start, or ended."""

    error: Failure


class Outputs(Message, frozen=True):
    """The outputs of one step."""

    outputs: list[Output]


class Refused(Message, frozen=True):
    """Reports a refused request."""

    request_id: str
    error: Failure


class Reply(Message, frozen=True):
    """The result of a Call, or its error."""

    call_id: int
    result: Any = None
    error: Failure | None = None


class Beat(Message, frozen=True):
    """A heartbeat. A separate thread sends it every BEAT_S seconds, so a core without heartbeats has stopped
    completely."""

    progress: int  # grows with every finished step and command
    doing: str  # "step", the name of the running command, or "" while idle
    cpu_seconds: float  # processor time of the process if the model runs on the CPU, else 0


FromCore = Ready | Dead | Outputs | Refused | Reply | Beat

_encoder = msgspec.msgpack.Encoder()
_to_core: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)  # type: ignore[arg-type]
_from_core: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)  # type: ignore[arg-type]


def encode(message: Message) -> bytes:
    """Encodes a message. Raises TypeError, ValueError or OverflowError for values that msgpack cannot
    encode."""
    return _encoder.encode(message)


def decode_to_core(data: bytes) -> ToCore:
    """Decodes a message. Raises msgspec.DecodeError for a value of a wrong type or outside the limits of its
    class."""
    return _to_core.decode(data)


def decode_from_core(data: bytes) -> FromCore:
    return _from_core.decode(data)


def refusal(data: bytes, why: Exception) -> Refused | Reply | None:
    """Returns the answer to a message that the core could not decode; None if the message needs no answer."""
    message = msgspec.msgpack.decode(data)
    if message[0] == "Add":
        error: ShoalError = RequestError(f"the engine cannot read this request: {why}")
        return Refused(message[1]["request_id"], Failure.of(error))
    if message[0] == "Call":
        error = ConfigError(f"the engine cannot read the command {message[2]!r:.200}: {why}")
        return Reply(message[1], error=Failure.of(error))
    return None


def dead(failure: Failure) -> EngineDeadError:
    """Returns the error of an ended engine in one line. Further lines, such as a rank's traceback, become a
    note of the error, which logs show and clients do not see."""
    first, _, rest = failure.message.partition("\n")
    error = EngineDeadError(first)
    if rest:
        error.add_note(rest)
    return error
