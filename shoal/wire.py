"""What crosses between the HTTP process and the core's: msgpack by msgspec. Torch-free.

Messages are tagged arrays, and the vocabulary's dataclasses travel inside them as they are: arrays of their
own would save little and need a second definition. Both sides are of one version, as the parent starts the
child.
"""

from __future__ import annotations

import typing
from typing import Any

import msgspec

from shoal import errors
from shoal.api import Output, Request
from shoal.config import EngineConfig
from shoal.control import AnyCommand, Command, name_of
from shoal.errors import ConfigError, EngineDeadError, RequestError, ShoalError
from shoal.stats import Stats

BEAT_S = 0.5  # between two signs of life of a core


class Message(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Anything below."""


# To the core


class Start(Message, frozen=True):
    """The first message: build the engine. `peer_weights`: of a worker that lends it its weights."""

    config: EngineConfig
    peer_weights: bytes | None = None


class Add(Message, frozen=True):
    """`age_s`: how long ago the request arrived, where it comes from a host whose clock is another."""

    request: Request
    age_s: float | None = None


class Abort(Message, frozen=True):
    """Unknown ids are ignored."""

    request_ids: list[str]


class ReadStats(Command[Stats], frozen=True, tag="stats"):
    is_quick = True


class FlushKv(Command[None], frozen=True, tag="flush_kv"):
    """Writes the KV blocks that lower tiers should keep, as an engine does ahead of its end."""


class CheckIntegrity(Command[None], frozen=True, tag="check"):
    """Proves the books of scheduler, tiers and peers, for tests."""

    is_quick = True


class LendKv(Command[bytes | None], frozen=True, tag="lend_kv"):
    """Offers other workers the KV blocks that the cache has of the beginning of these tokens. The answer is a
    ticket for them; None if there are none, or if this engine lends nothing."""

    token_ids: list[int]
    cache_salt: str | None = None
    adapter: str | None = None

    is_quick = True


class TakeBackKv(Command[None], frozen=True, tag="take_back_kv"):
    """Nobody will use this ticket any more. One that has ended already changes nothing. Raises TransferError
    for what is no ticket."""

    ticket: bytes

    is_quick = True


class LendWeights(Command[bytes], frozen=True, tag="lend_weights"):
    """Opens the weights of this name (weights/fingerprint.py) to a worker that starts with the same. The
    answer is what it must know. Raises UnavailableError where there is nothing to lend."""

    name: bytes
    borrower: str


class TakeBackWeights(Command[None], frozen=True, tag="take_back_weights"):
    """This worker has read the weights, or does not want them."""

    borrower: str


# Beside an operator's commands. FlushKv is the parent's alone; the others come from other processes of the
# fleet, too.
CoreCommand = (
    AnyCommand | ReadStats | FlushKv | CheckIntegrity | LendKv | TakeBackKv | LendWeights | TakeBackWeights
)
QUICK_COMMANDS = frozenset(name_of(kind) for kind in typing.get_args(CoreCommand) if kind.is_quick)


class Call(Message, frozen=True):
    """Asks the core to run a command between two steps. The answer is a Reply of the same id."""

    call_id: int
    command: CoreCommand


ToCore = Start | Add | Abort | Call


# From the core


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """An error as it travels: the name of its class, and what it says."""

    kind: str
    message: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        name = type(error).__name__
        message = str(error) if isinstance(error, ShoalError) else f"{name}: {error}"
        # The name of a file may have bytes that are no text, and must not keep the error from travelling.
        return cls(name, message.encode("utf-8", "backslashreplace").decode())

    def build(self) -> ShoalError:
        """The same error where it is one of Shoal's; otherwise the engine failed in a way that nobody
        foresaw."""
        kind = getattr(errors, self.kind, None)
        if isinstance(kind, type) and issubclass(kind, ShoalError):
            return kind(self.message)
        return ShoalError(self.message)


class ModelInfo(msgspec.Struct, array_like=True, frozen=True):
    """What the HTTP process must know of the engine, as it was built for its model."""

    model: str
    pid: int  # the core's process
    max_model_len: int
    vocab_size: int
    hidden_size: int
    eos_token_ids: tuple[int, ...]  # those that the checkpoint names; the tokenizer may know more
    # the model's defaults of sampling parameters; {} where the options say so
    generation_config: dict[str, Any]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    device: str
    dtype: str
    kv_role: str = ""  # of kv_transfer_config: what it exchanges with other engines; "" without one
    kv_block_bytes: int = 0  # of one KV block, on all ranks together
    kv_cache_dtype: str = ""  # the name of a torch.dtype
    most_new_tokens: int | None = None  # that an answer may have, whatever its request says
    generates: bool = True  # False: it has no output head, and embeds alone

    @property
    def lends_kv(self) -> bool:
        """Whether other engines may read its KV blocks."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def reads_kv(self) -> bool:
        """Whether it reads KV blocks of other engines."""
        return self.kv_role in ("kv_consumer", "kv_both")


class Ready(Message, frozen=True):
    """The engine is built. It comes again, ahead of the reply to UpdateWeights, when the engine has become
    another model."""

    info: ModelInfo


class Dead(Message, frozen=True):
    """The last message: why the engine did not start, or ended."""

    error: Failure


class Outputs(Message, frozen=True):
    """What one step added."""

    outputs: list[Output]


class Refused(Message, frozen=True):
    """A request that was not taken; others don't notice."""

    request_id: str
    error: Failure


class Reply(Message, frozen=True):
    """The result of a Call, or the error that kept it from having one."""

    call_id: int
    result: Any = None
    error: Failure | None = None


class Beat(Message, frozen=True):
    """A sign of life. A thread that does nothing else sends it every BEAT_S seconds, so a core that sends
    none has stopped as a whole."""

    progress: int  # grows with every step and every command that ends
    doing: str  # "step", the name of the command that runs, or "" while there is nothing to do
    cpu_seconds: float  # the processor time of the process so far where the model runs on the CPU, else 0


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


def refusal(data: bytes, why: Exception) -> Refused | Reply | None:
    """The answer to a message that the core could not decode. None if nobody waits for an answer."""
    message = msgspec.msgpack.decode(data)
    if message[0] == "Add":
        error: ShoalError = RequestError(f"the engine cannot read this request: {why}")
        return Refused(message[1]["request_id"], Failure.of(error))
    if message[0] == "Call":
        error = ConfigError(f"the engine cannot read the command {message[2]!r:.200}: {why}")
        return Reply(message[1], error=Failure.of(error))
    return None


def dead(failure: Failure) -> EngineDeadError:
    """The engine's end as its users see it, in one line. Further lines, such as a rank's traceback, become a
    note of the error: logs show it, and clients do not see it."""
    first, _, rest = failure.message.partition("\n")
    error = EngineDeadError(first)
    if rest:
        error.add_note(rest)
    return error
