"""The table of commands: everything that rank 0 may ask of the ranks, and nothing else.

A command is a function of the ranks' ModelRunner. Between processes it travels as its name and its arguments,
and each rank looks the name up in this table. `Ranks` (engine/ranks/ranks.py) gives the commands; as each
entry carries its function's types, mypy checks the arguments where a command is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, TypeVarTuple

import numpy as np

from shoal.engine.runner.runner import ModelRunner
from shoal.errors import ConfigError

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Command(Generic[Result, *Arguments]):
    """An entry of the table. Arguments and result are plain data, numpy arrays or CPU tensors, as they cross
    between processes (engine/ranks/channel.py)."""

    name: str
    run: Callable[[ModelRunner, *Arguments], Result]
    is_public: bool  # whether users reach it by its name (LLM.collective_rpc)


AnyCommand = Command[Any, *tuple[Any, ...]]
COMMANDS: dict[str, AnyCommand] = {}


def _entry(
    run: Callable[[ModelRunner, *Arguments], Result], is_public: bool = False
) -> Command[Result, *Arguments]:
    """Enters a function of ModelRunner under its own name."""
    command = Command(run.__name__, run, is_public)
    assert command.name not in COMMANDS, command.name
    COMMANDS[command.name] = command
    return command


def find_public(name: str) -> AnyCommand:
    """The command that a user names. Raises ConfigError if there is none, or if it is the engine's own."""
    command = COMMANDS.get(name)
    if command is None or not command.is_public:
        public = ", ".join(sorted(name for name, command in COMMANDS.items() if command.is_public))
        raise ConfigError(f"{name!s:.80} is no command for the ranks; there are {public}")
    return command


def bound_to(runner: ModelRunner) -> dict[str, Callable[..., Any]]:
    """The table as one rank serves it: what each name runs on `runner`."""

    def bind(command: AnyCommand) -> Callable[..., Any]:
        return lambda *args: command.run(runner, *args)

    return {name: bind(command) for name, command in COMMANDS.items()}


# The start

COMPILE_AHEAD = _entry(ModelRunner.compile_ahead)
MEASURE = _entry(ModelRunner.measure)
ALLOCATE = _entry(ModelRunner.allocate)

# Steps


def step(runner: ModelRunner, packed: np.ndarray) -> None:
    """A rank other than 0 launches a packed step. It has no extras, and nobody asks it for tokens."""
    runner.step(packed)


STEP = _entry(step)

# Sleep

RELEASE_MEMORY = _entry(ModelRunner.release_memory)
TAKE_MEMORY = _entry(ModelRunner.take_memory)
WAIT_FOR_HOST = _entry(ModelRunner.wait_for_host, is_public=True)
MEMORY_USAGE = _entry(ModelRunner.memory_usage, is_public=True)

# Weights

LOAD_CHECKPOINT = _entry(ModelRunner.load_checkpoint)
LOAD_BROADCAST = _entry(ModelRunner.load_broadcast)
LOAD_SHARED = _entry(ModelRunner.load_shared)
JOIN_WEIGHTS_GROUP = _entry(ModelRunner.join_weights_group)
LEAVE_WEIGHTS_GROUP = _entry(ModelRunner.leave_weights_group)
RECEIVE_WEIGHTS = _entry(ModelRunner.receive_weights)
CHECKSUMS = _entry(ModelRunner.checksums, is_public=True)

# KV blocks below the device

KV_OPEN = _entry(ModelRunner.kv_open)
KV_OPEN_TIERS = _entry(ModelRunner.kv_open_tiers)
KV_CLOSE_TIERS = _entry(ModelRunner.kv_close_tiers)
KV_MEASURE = _entry(ModelRunner.kv_measure)
KV_COPY_OUT = _entry(ModelRunner.kv_copy_out)
KV_COPY_IN = _entry(ModelRunner.kv_copy_in)
KV_ORDER_BEHIND = _entry(ModelRunner.kv_order_behind)
KV_WRITE = _entry(ModelRunner.kv_write)
KV_READ = _entry(ModelRunner.kv_read)
KV_FORGET = _entry(ModelRunner.kv_forget)
KV_POLL = _entry(ModelRunner.kv_poll)

# Measurements and traces

STATE_DIGEST = _entry(ModelRunner.state_digest, is_public=True)
START_PROFILE = _entry(ModelRunner.start_profile)
STOP_PROFILE = _entry(ModelRunner.stop_profile)
START_CLOCK = _entry(ModelRunner.start_clock, is_public=True)
STOP_CLOCK = _entry(ModelRunner.stop_clock, is_public=True)
