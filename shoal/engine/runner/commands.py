"""The table of commands: every method of a rank that rank 0 may call, with its types, and nothing else.
engine/ranks/ranks.py gives the commands; ModelRunner (runner.py) and its parts run them.

A command is a method of each rank's ModelRunner, or of one of its parts. Between processes it travels as its
name and its arguments, and each rank looks the name up in this table. Each entry carries its method's types,
so mypy checks the arguments where a command is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, TypeVarTuple

import numpy as np

from shoal.engine.profile import RankProfile
from shoal.engine.runner import start_up
from shoal.engine.runner.batch_state import BatchState
from shoal.engine.runner.rank_kv import RankKv
from shoal.engine.runner.rank_memory import RankMemory
from shoal.engine.runner.rank_peers import RankPeers
from shoal.engine.runner.rank_weights import RankWeights
from shoal.engine.runner.runner import ModelRunner
from shoal.errors import ConfigError

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
Part = TypeVar("Part")


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
    name: str,
    part_of: Callable[[ModelRunner], Part],
    run: Callable[[Part, *Arguments], Result],
    is_public: bool = False,
) -> Command[Result, *Arguments]:
    """Enters a method of a part of ModelRunner, or of itself."""

    def run_on(runner: ModelRunner, *args: *Arguments) -> Result:
        return run(part_of(runner), *args)

    assert name not in COMMANDS, name
    COMMANDS[name] = command = Command(name, run_on, is_public)
    return command


def _itself(runner: ModelRunner) -> ModelRunner:
    return runner


def _memory(runner: ModelRunner) -> RankMemory:
    return runner.memory


def _weights(runner: ModelRunner) -> RankWeights:
    return runner.weights


def _kv(runner: ModelRunner) -> RankKv:
    return runner.kv


def _peers(runner: ModelRunner) -> RankPeers:
    return runner.peers


def _state(runner: ModelRunner) -> BatchState:
    return runner.state


def _profile(runner: ModelRunner) -> RankProfile:
    return runner.profile


def find_public(name: str) -> AnyCommand:
    """Returns the public command of this name. Raises ConfigError for an unknown or internal one."""
    command = COMMANDS.get(name)
    if command is None or not command.is_public:
        public = ", ".join(sorted(name for name, command in COMMANDS.items() if command.is_public))
        raise ConfigError(
            f"method must be one of the ranks' commands, got {name!s:.80}; choose one of {public}"
        )
    return command


def bound_to(runner: ModelRunner) -> dict[str, Callable[..., Any]]:
    """The table as one rank serves it: what each name runs on `runner`."""

    def bind(command: AnyCommand) -> Callable[..., Any]:
        return lambda *args: command.run(runner, *args)

    return {name: bind(command) for name, command in COMMANDS.items()}


# The start

COMPILE_AHEAD = _entry("compile_ahead", _itself, start_up.compile_ahead)
NUM_BLOCKS_THAT_FIT = _entry("num_blocks_that_fit", _itself, start_up.num_blocks_that_fit)
ALLOCATE = _entry("allocate", _itself, start_up.allocate)

# Steps


def step(runner: ModelRunner, packed: np.ndarray) -> None:
    """A rank other than 0 launches a packed step. It has no sampler options, and its tokens are not read."""
    runner.step(packed)


STEP = _entry("step", _itself, step)

# Sleep

RELEASE_MEMORY = _entry("release_memory", _memory, RankMemory.release)
TAKE_MEMORY = _entry("take_memory", _memory, RankMemory.take)
WAIT_FOR_HOST = _entry("wait_for_host", _memory, RankMemory.wait_for_host, is_public=True)
MEMORY_USAGE = _entry("memory_usage", _memory, RankMemory.usage, is_public=True)

# Weights

LOAD_CHECKPOINT = _entry("load_checkpoint", _weights, RankWeights.load_checkpoint)
LOAD_BROADCAST = _entry("load_broadcast", _weights, RankWeights.load_broadcast)
LOAD_SHARED = _entry("load_shared", _weights, RankWeights.load_shared)
JOIN_WEIGHTS_GROUP = _entry("join_weights_group", _weights, RankWeights.join_group)
LEAVE_WEIGHTS_GROUP = _entry("leave_weights_group", _weights, RankWeights.leave_group)
RECEIVE_WEIGHTS = _entry("receive_weights", _weights, RankWeights.receive)
EXPORT_WEIGHTS = _entry("export_weights", _weights, RankWeights.export)
END_WEIGHT_EXPORT = _entry("end_weight_export", _weights, RankWeights.end_export)
CHECKSUMS = _entry("checksums", _weights, RankWeights.checksums, is_public=True)

# KV blocks below the device

KV_OPEN = _entry("kv_open", _itself, ModelRunner.open_kv)
KV_CLOSE = _entry("kv_close", _itself, ModelRunner.close_kv)


def reopen_kv(runner: ModelRunner, num_host_blocks: int) -> None:
    """`open_kv` on a rank that has measured its copies already."""
    runner.open_kv(num_host_blocks)
    runner.kv.slab.pin_rest()


KV_REOPEN = _entry("kv_reopen", _itself, reopen_kv)
KV_OPEN_TIERS = _entry("kv_open_tiers", _kv, RankKv.open_tiers)
KV_CLOSE_TIERS = _entry("kv_close_tiers", _kv, RankKv.close_tiers)
KV_COPY_OUT = _entry("kv_copy_out", _kv, RankKv.copy_out)
KV_COPY_IN = _entry("kv_copy_in", _kv, RankKv.copy_in)
KV_ORDER_AFTER = _entry("kv_order_after", _kv, RankKv.order_after)
KV_WRITE = _entry("kv_write", _kv, RankKv.write)
KV_READ = _entry("kv_read", _kv, RankKv.read)
KV_FORGET = _entry("kv_forget", _kv, RankKv.forget)
KV_POLL = _entry("kv_poll", _kv, RankKv.poll)


def measure_speed(runner: ModelRunner) -> tuple[float, float]:
    """Seconds to compute a token of a prompt, and to copy a KV block in."""
    return start_up.seconds_per_prompt_token(runner), runner.kv.measure_block()


KV_MEASURE = _entry("kv_measure", _itself, measure_speed)

# KV blocks of other workers

PEERS_OPEN = _entry("peers_open", _itself, ModelRunner.open_peers)
PEERS_EXPORT_CACHE = _entry("peers_export_cache", _peers, RankPeers.export_cache)
PEERS_NAME_MODEL = _entry("peers_name_model", _peers, RankPeers.name_model)
PEERS_FETCH = _entry("peers_fetch", _peers, RankPeers.fetch)
PEERS_CANCEL = _entry("peers_cancel", _peers, RankPeers.cancel)
PEERS_POLL = _entry("peers_poll", _peers, RankPeers.poll)
PEERS_FINISH = _entry("peers_finish", _peers, RankPeers.finish)

# Measurements and traces

STATE_DIGEST = _entry("state_digest", _state, BatchState.digest, is_public=True)
START_PROFILE = _entry("start_profile", _profile, RankProfile.start)
STOP_PROFILE = _entry("stop_profile", _profile, RankProfile.stop)
START_CLOCK = _entry("start_clock", _profile, RankProfile.start_clock, is_public=True)
STOP_CLOCK = _entry("stop_clock", _profile, RankProfile.stop_clock, is_public=True)
