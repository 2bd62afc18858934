"""Commands of an operator to an engine: each as a message, and `Control` with the same commands as methods.

A message is plain data: msgpack between processes, and JSON over a network, where arguments with defaults may
be left out: `{"verb": "sleep", "level": 1}`. Torch-free.

A new command is a Command and a method of Control in this file, a case in `CoreLoop` and in `FakeEngine`
(mypy reports them as missing until they exist), and a method of EngineCore that does the work.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import msgspec

from shoal.api import Engine, check_sleep, check_tags
from shoal.stats import MemoryReport, SleepState

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """The route of a command on the admin port. The command's fields are query parameters."""

    method: str
    path: str
    summary: str  # for the list of routes
    answer: str = ""  # key of the result in the JSON answer; "": the answer is the result


class Command(msgspec.Struct, Generic[Result], frozen=True, tag_field="verb"):
    """A command with its arguments; `Result` is the type of its result. An engine's core runs it between two
    steps."""

    # True if the command takes about as long as a step, so that a core that does not finish it counts as
    # hung. Other commands move weights, write files or wait for requests, and may take any time.
    is_quick: ClassVar[bool] = False
    # None: the admin port does not have the command, or has a separate handler for it.
    route: ClassVar[AdminRoute | None] = None


class Sleep(Command[MemoryReport], frozen=True, tag="sleep"):
    """Raises ConfigError for an unknown level, tag or mode."""

    level: int = 1
    tags: list[str] | None = None
    mode: str = "abort"

    route = AdminRoute("POST", "/sleep", "Give memory back")

    def __post_init__(self) -> None:
        check_sleep(self.level, self.tags, self.mode)


class WakeUp(Command[MemoryReport], frozen=True, tag="wake_up"):
    """Raises ConfigError for an unknown tag."""

    tags: list[str] | None = None

    route = AdminRoute("POST", "/wake_up", "Take it again")

    def __post_init__(self) -> None:
        check_tags(self.tags)


class ReadSleepState(Command[SleepState], frozen=True, tag="sleep_state"):
    is_quick = True


class ResetPrefixCache(Command[bool], frozen=True, tag="reset_prefix_cache"):
    route = AdminRoute("POST", "/reset_prefix_cache", "Forget all cached prefixes", answer="reset")


class UpdateWeights(Command[int], frozen=True, tag="update_weights"):
    source: str


class CheckWeights(Command[dict[str, str]], frozen=True, tag="check_weights"):
    route = AdminRoute("GET", "/check_weights", "Checksums of the weights", answer="checksums")


class MemoryUsage(Command[dict[str, dict[str, int]]], frozen=True, tag="memory_usage"):
    is_quick = True
    route = AdminRoute("GET", "/memory_usage", "Memory by tag")


class StartProfile(Command[None], frozen=True, tag="start_profile"):
    folder: str


class StopProfile(Command[list[str]], frozen=True, tag="stop_profile"):
    route = AdminRoute("POST", "/stop_profile", "Write the traces", answer="files")


# A decoder of this type reads every command.
AnyCommand = (
    Sleep
    | WakeUp
    | ReadSleepState
    | ResetPrefixCache
    | UpdateWeights
    | CheckWeights
    | MemoryUsage
    | StartProfile
    | StopProfile
)
COMMANDS: tuple[type[Command[Any]], ...] = typing.get_args(AnyCommand)


def name_of(command: Command[Any] | type[Command[Any]]) -> str:
    """Returns the name of a command in messages and logs, such as "sleep"."""
    return str(command.__struct_config__.tag)


def result_type(command: Command[Any]) -> Any:
    """Returns the type for msgspec.convert of a command's result from another process or host."""
    [base] = type(command).__orig_bases__  # type: ignore[attr-defined]
    [result] = typing.get_args(base)
    return result


class Control(Protocol):
    """An operator's commands as methods. Tags are names of memory regions: "weights", "kv_cache".

    A subclass defines `control` only: an engine runs the command, and a client of a remote engine forwards
    it.
    """

    async def control(self, command: Command[Result]) -> Result:
        """Runs one command and returns its result. Raises the exceptions of the methods below, and
        EngineDeadError if the engine has ended."""
        ...

    async def sleep(self, level: int = 1, tags: list[str] | None = None, mode: str = "abort") -> MemoryReport:
        """Puts the engine to sleep. Level 0 only pauses scheduling, 1 keeps the weights in host memory and
        drops the KV cache, 2 drops both. `tags` restricts it to some regions. `mode`, for running requests:
        "wait" for their end, "abort" them, or "keep" them for after the wake-up. Raises ConfigError for
        unknown levels, tags and modes, and for levels 1 and 2 without sleep mode; UnavailableError if the
        host lacks memory for the weights, or if wake_up is called meanwhile."""
        return await self.control(Sleep(level, tags, mode))

    async def wake_up(self, tags: list[str] | None = None) -> MemoryReport:
        """Takes the memory of all regions, or of the ones in `tags`, again. Raises ConfigError for unknown
        tags, and UnavailableError, with nothing changed, if there is not enough memory."""
        return await self.control(WakeUp(tags))

    async def sleep_state(self) -> SleepState:
        """Returns the parts that are asleep."""
        return await self.control(ReadSleepState())

    async def reset_prefix_cache(self) -> bool:
        """Drops all cached prefixes. Returns False if some blocks were still in use; they are dropped,
        too."""
        return await self.control(ResetPrefixCache())

    async def update_weights(self, source: str) -> int:
        """Loads the weights of the checkpoint `source` (as EngineConfig.model). Returns the new version,
        counted from 1. An engine that sleeps at level 2 may also load another model; its KV cache stays
        asleep. Raises CheckpointError, ConfigError or UnavailableError, with nothing changed, for weights
        that do not fit."""
        return await self.control(UpdateWeights(source))

    async def check_weights(self) -> dict[str, str]:
        """Returns a checksum of each tensor, by rank and name."""
        return await self.control(CheckWeights())

    async def memory_usage(self) -> dict[str, dict[str, int]]:
        """Returns memory by tag: {"device_bytes": mapped now, "reserved_bytes": of addresses, "host_bytes":
        kept on the host, "ready_bytes": host memory reserved for it}. On a GPU in sleep mode also "device":
        {"in_use_bytes", "region_bytes", "process_bytes"}, as in MemoryReport. Summed over ranks."""
        return await self.control(MemoryUsage())

    async def start_profile(self, folder: str) -> None:
        """Traces every rank into files in `folder`, until stop_profile. Raises ConfigError for a folder that
        cannot be written, or if a trace is already running."""
        await self.control(StartProfile(folder))

    async def stop_profile(self) -> list[str]:
        """Writes the traces (for ui.perfetto.dev) and returns their paths. Raises ConfigError without a
        running trace."""
        return await self.control(StopProfile())


class ServedEngine(Engine, Control, Protocol):
    """The engine of a served model: a worker's engine, a fleet, a fake."""
