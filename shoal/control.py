"""What an operator asks of an engine: each verb as a message, and `Control`, which has them as methods.

A message is plain data. It crosses a process as msgpack, and a network as JSON, where arguments may be left
out that have defaults: `{"verb": "sleep", "level": 1}`. Torch-free.

A new verb is a Command and a method of Control in this file, a case in `CoreLoop` and in `FakeEngine` (mypy
misses them until they are there), and the method of EngineCore that does the work.
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
    """Where the admin port offers a verb. The verb's fields are the parameters of the URL's query."""

    method: str
    path: str
    summary: str  # for a reader of the list of routes
    answer: str = ""  # the key under which the JSON answer has the result; "": the answer is the result


class Command(msgspec.Struct, Generic[Result], frozen=True, tag_field="verb"):
    """One verb with its arguments; `Result` is its answer. An engine's core runs it between two steps."""

    # It ends about as soon as a step does, so a core that does not end it has stopped. Other verbs move
    # weights, write files or wait for requests, and may take as long as they like.
    is_quick: ClassVar[bool] = False
    # None: the admin port does not offer it, or has a handler of its own for it.
    route: ClassVar[AdminRoute | None] = None


class Sleep(Command[MemoryReport], frozen=True, tag="sleep"):
    """Raises ConfigError when it is built with an unknown level, tag or mode."""

    level: int = 1
    tags: list[str] | None = None
    mode: str = "abort"

    route = AdminRoute("POST", "/sleep", "Give memory back")

    def __post_init__(self) -> None:
        check_sleep(self.level, self.tags, self.mode)


class WakeUp(Command[MemoryReport], frozen=True, tag="wake_up"):
    """Raises ConfigError when it is built with an unknown tag."""

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


# The table: a decoder of this type reads any of them.
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
    """The verb, as messages and logs name it: "sleep"."""
    return str(command.__struct_config__.tag)


def result_type(command: Command[Any]) -> Any:
    """What msgspec.convert makes of the command's answer, after that has crossed a process or a network."""
    [base] = type(command).__orig_bases__  # type: ignore[attr-defined]
    [result] = typing.get_args(base)
    return result


class Control(Protocol):
    """What whoever operates a worker asks of it. Tags are names of memory regions: "weights", "kv_cache".

    Whoever derives from this class writes `control` alone: an engine carries a command out, and a stand-in
    for engines elsewhere passes it on. The other methods are the verbs by name.
    """

    async def control(self, command: Command[Result]) -> Result:
        """Carries out one command and returns its result. Raises what the methods below name, and
        EngineDeadError if the engine is gone."""
        ...

    async def sleep(self, level: int = 1, tags: list[str] | None = None, mode: str = "abort") -> MemoryReport:
        """Level 0 pauses scheduling only, 1 keeps the weights in host memory and drops the KV cache, 2 drops
        both. `tags` restricts it to some regions. `mode` says what happens to running requests: "wait" for
        their end, "abort" them, "keep" them for after the wake-up. Raises ConfigError for unknown levels,
        tags and modes, and for levels 1 and 2 without sleep mode; UnavailableError where the host lacks
        memory for the weights, or when wake_up is called while it waits."""
        return await self.control(Sleep(level, tags, mode))

    async def wake_up(self, tags: list[str] | None = None) -> MemoryReport:
        """Takes the memory of all regions, or of those in `tags`, again. Raises ConfigError for unknown tags,
        and UnavailableError, with nothing changed, if there is not enough memory."""
        return await self.control(WakeUp(tags))

    async def sleep_state(self) -> SleepState:
        """What sleeps now."""
        return await self.control(ReadSleepState())

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes. Returns False if some blocks were still in use; they are forgotten
        too."""
        return await self.control(ResetPrefixCache())

    async def update_weights(self, source: str) -> int:
        """Loads the weights of the checkpoint `source` (as EngineConfig.model). Returns the new version,
        counted from 1. An engine that sleeps at level 2 takes another model too, and its KV cache sleeps on.
        Raises CheckpointError, ConfigError or UnavailableError, with nothing changed, for weights that do not
        fit."""
        return await self.control(UpdateWeights(source))

    async def check_weights(self) -> dict[str, str]:
        """A checksum of each tensor, by rank and name."""
        return await self.control(CheckWeights())

    async def memory_usage(self) -> dict[str, dict[str, int]]:
        """By tag: {"device_bytes": mapped now, "reserved_bytes": of addresses, "host_bytes": kept on the
        host, "ready_bytes": host memory held ready for it}. On a GPU in sleep mode also "device":
        {"in_use_bytes", "region_bytes", "process_bytes"}, as in MemoryReport. Summed over ranks."""
        return await self.control(MemoryUsage())

    async def start_profile(self, folder: str) -> None:
        """Traces every rank into files in `folder`, until stop_profile. Raises ConfigError for a folder that
        cannot be written, or if a trace is being made already."""
        await self.control(StartProfile(folder))

    async def stop_profile(self) -> list[str]:
        """Writes the traces (for ui.perfetto.dev) and returns their paths. Raises ConfigError if none is
        being made."""
        return await self.control(StopProfile())


class ServedEngine(Engine, Control, Protocol):
    """What stands behind a model that is served: a worker's engine, a fleet, a fake."""
