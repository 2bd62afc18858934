"""Checks and room for another model, before a new core with it is built. How one core takes the place of the
other: `EngineCore.update_weights`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

from shoal.config import EngineConfig, ResolvedConfig
from shoal.engine.lifecycle.sleep import Sleeper
from shoal.engine.lifecycle.weight_updates import Weights
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.step_part import Parts, StepPart
from shoal.errors import CheckpointError, ConfigError, ShoalError, UnavailableError, UserError
from shoal.text.tokenizer import load_tokenizer
from shoal.weights.source import CheckpointFiles

Core = TypeVar("Core")


def check_possible(
    files: CheckpointFiles, why: str, config: ResolvedConfig, sleeper: Sleeper, weights: Weights
) -> None:
    """Raises CheckpointError or ConfigError if another model cannot take the place of an engine's own now.
    `why`: what differs (Weights.difference)."""
    another = f"{files.path} is of another model: {why}"
    if not config.enable_sleep_mode:
        raise CheckpointError(
            f"{another}; build a new engine for it, or build this one with enable_sleep_mode, and put it "
            "to sleep at level 2 before it takes another model"
        )
    if not sleeper.is_emptied:
        raise CheckpointError(
            f"{another}; the engine must give its own up first: put it to sleep at level 2, update its "
            "weights, and wake it up"
        )
    if weights.groups:
        raise ConfigError(
            f"{another}, and the engine is in the weights update groups {weights.groups}; destroy "
            "them first, and join again with the other model"
        )


def check_text(config: EngineConfig, files: CheckpointFiles) -> None:
    """Raises CheckpointError if the model's tokenizer or chat template cannot be loaded."""
    if not config.skip_tokenizer_init:
        load_tokenizer(files, config.tokenizer, config.chat_template)
    if config.generation_config == "auto":
        files.generation_config  # noqa: B018 - reading it checks it


@contextmanager
def room_made(ranks: Ranks, sleeper: Sleeper, parts: Parts) -> Iterator[None]:
    """Inside, the engine holds no memory that another one needs. If what runs in here fails, the engine has
    its host memory again, and it sleeps."""
    sleeper.sleep(2, None, "keep")
    given: list[StepPart] = []
    try:
        for part in parts:
            part.give_memory_back()
            given.append(part)
        yield
    except BaseException:
        ranks.use_threads()
        try:
            for part in given:
                part.take_memory()
        except (ShoalError, RuntimeError) as error:
            raise ranks.failed(error) from None
        raise


def built(
    build: Callable[[], Core],
    model: tuple[EngineConfig, CheckpointFiles],
    own: ResolvedConfig,
    ranks: Ranks,
    sleeper: Sleeper,
    parts: Parts,
) -> Core:
    """Returns what `build` makes of another model while this engine holds no memory. `own`: the options of
    this engine, with its ranks, sleeper and parts. Raises UserError or UnavailableError if that fails; this
    engine then sleeps on."""
    config, files = model
    refusal: ShoalError | None = None
    try:
        check_text(config, files)
        with room_made(ranks, sleeper, parts):
            return build()
    except (ShoalError, RuntimeError, MemoryError, OSError) as error:
        kind = type(error) if isinstance(error, UserError) else UnavailableError
        refusal = kind(
            f"the engine cannot take {files.path}: {error}. It sleeps on with {own.model}: name another "
            "checkpoint, or wake it up and load weights of its own"
        )
    if ranks.error is not None:
        raise ranks.error
    # The error itself is gone by now, with its frames, so nothing holds what was built by half.
    gc.collect()
    if own.device == "cuda":
        torch.cuda.empty_cache()
    raise refusal
