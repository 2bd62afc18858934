"""`Sleeper`: sleep mode: puts regions of an engine's memory to sleep and wakes them, as vLLM's levels 1 and
2. engine/runner/rank_memory.py releases and takes the memory on each rank.

Level 0 pauses scheduling and needs no sleep mode. Level 1 drops the KV cache and keeps the weights: in host
memory, or (sleep_offload="file") in the checkpoint they were read from. Level 2 drops both; an update has to
bring the weights back before anything runs. `tags` restricts a sleep or a wake-up to some regions. The engine
sleeps until every region is awake.

A sleeping engine can sleep deeper: level 2 after level 1 drops the copy on the host as well. To sleep again
at the same level changes nothing. Level 1 after level 2 changes nothing either, as what was dropped is gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shoal.api import KV_CACHE, MEMORY_TAGS, WEIGHTS, check_sleep, check_tags
from shoal.config import ResolvedConfig
from shoal.engine.lifecycle.weight_updates import Weights
from shoal.engine.pause_state import PauseState
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner import commands
from shoal.engine.scheduling.scheduler import Scheduler
from shoal.engine.step_loop import StepLoop
from shoal.engine.step_part import Parts
from shoal.errors import ConfigError, UnavailableError
from shoal.stats import MemoryReport

logger = logging.getLogger(__name__)

GIB = 2**30


class Sleeper:
    """Puts one engine to sleep and wakes it. Every call is made between steps. What fails changes nothing: a
    sleep that finds no host memory fails before anything is unmapped or aborted, and a wake-up that fails on
    one rank is undone on all and can be tried again. An interrupt leaves an engine that knows which of its
    regions sleep, so that the call can be repeated, or undone by the other one."""

    def __init__(
        self,
        config: ResolvedConfig,
        ranks: Ranks,
        loop: StepLoop,
        scheduler: Scheduler,
        weights: Weights,
        parts: Parts,
        paused: PauseState,
    ) -> None:
        self._config, self._ranks, self._loop = config, ranks, loop
        self._scheduler, self._weights, self._parts = scheduler, weights, parts
        self._paused, self._state = paused, paused.sleep

    @property
    def is_emptied(self) -> bool:
        """True if the engine's model has been dropped: its weights are gone, and the KV cache sleeps."""
        return KV_CACHE in self._state.asleep and self._paused.weights_lost is not None

    def is_possible(self, level: int) -> bool:
        """True if this engine can sleep at that level; without sleep mode it can only be paused."""
        return not level or self._config.enable_sleep_mode

    def sleep(self, level: int, tags: Sequence[str] | None, mode: str) -> MemoryReport:
        """Puts the regions `tags` (None: all) to sleep.

        `mode`, for running requests: "abort", "keep" (they continue after waking), or "wait",
        which needs an engine without work: its driver lets the requests end first. Raises ConfigError for
        impossible values, UnavailableError if requests are running or host memory is short.
        """
        chosen = check_sleep(level, tags, mode)
        state, start = self._state, time.perf_counter()
        if not self.is_possible(level):
            raise ConfigError(
                f"sleep level {level} needs memory that can be released; start the engine "
                "with the option enable_sleep_mode, or pause it with level 0"
            )
        if mode == "wait" and self._loop.has_work:
            raise UnavailableError(
                "requests are still running, and mode 'wait' sleeps when they have ended; step the engine "
                "until then"
            )
        going = [tag for tag in chosen if tag not in state.asleep] if level else []
        # the weights sleep already, and their kept copy is to be dropped
        deeper = level == 2 and WEIGHTS in chosen and WEIGHTS in state.asleep and state.kept != ""
        kept = state.kept
        if level == 1 and WEIGHTS in going:
            kept = self._where_kept()
        elif WEIGHTS in going or deeper:
            kept = ""
        self._loop.drain()
        for part in self._parts:
            part.before_sleep(going)
        reports: list[dict[str, int]] = []
        with self._knowing(level, kept):
            if going or deeper:
                reports = self._release([*going, WEIGHTS] if deeper else going, kept)
            self._settle(mode, KV_CACHE in going)
            if (WEIGHTS in going or deeper) and level == 2:
                self._weights.lose("sleep level 2 dropped them")
            state.level = max(level, state.level or 0)
            state.kept = kept
            state.asleep |= set(going)
        report = total(reports, time.perf_counter() - start)
        what = ", ".join(sorted(state.asleep)) or "scheduling alone"
        if reports:
            reset = "; the prefix cache is reset" if KV_CACHE in going else ""
            logger.info(
                "asleep at level %d (%s): %.2f GiB given back, %.2f kept on the host, %s, %.3f s%s",
                state.level,
                what,
                report.freed_bytes / GIB,
                report.host_bytes / GIB,
                in_use(report),
                report.seconds,
                reset,
            )
        else:
            logger.info("asleep at level %d (%s)", state.level, what)
        return report

    def wake_up(self, tags: Sequence[str] | None) -> MemoryReport:
        """Wakes the regions `tags` (None: all). Raises UnavailableError if there is no memory for them, and
        CheckpointError if the weights were kept in a checkpoint that cannot be read."""
        chosen = check_tags(tags)
        state, start = self._state, time.perf_counter()
        coming = [tag for tag in chosen if tag in state.asleep]
        reread = WEIGHTS in coming and state.kept == "file"
        reports: list[dict[str, int]] = []
        with self._knowing(0, state.kept):
            if coming:
                reports, errors = self._ranks.each(commands.TAKE_MEMORY, coming)
                if not errors and reread:
                    errors = self._weights.reread()
                if errors:
                    kept = [WEIGHTS] if state.kept == "host" and WEIGHTS in coming else []
                    self._ranks.each(commands.RELEASE_MEMORY, coming, kept)
                    raise errors[0]
            state.asleep -= set(coming)
            if WEIGHTS in coming:
                state.kept = ""
            if not state.asleep:
                state.level = None
        report = total(reports, time.perf_counter() - start)
        if reports:
            still = f"; {' and '.join(sorted(state.asleep))} still asleep" if state.asleep else ""
            logger.info(
                "awake (%s%s): %.2f GiB taken, %s, %.3f s",
                ", ".join(coming),
                still,
                report.taken_bytes / GIB,
                in_use(report),
                report.seconds,
            )
        else:
            logger.info("nothing to wake" if state.asleep else "awake (scheduling)")
        return report

    def _settle(self, mode: str, cache_went: bool) -> None:
        """Aborts or keeps the requests; no step is in flight. A kept request is preempted if its KV is gone,
        and otherwise frozen. Under "wait" only requests that an earlier call kept are left."""
        if mode == "abort":
            self._scheduler.abort_all()
            pool = self._scheduler.blocks.pool
            if pool.num_free < pool.num_blocks:  # parts hold blocks, maybe of requests that they took over
                for part in self._parts:
                    part.all_aborted()
        if cache_went:
            self._scheduler.preempt_all()
            self._scheduler.reset_prefix_cache()

    def _release(self, tags: list[str], kept: str) -> list[dict[str, int]]:
        """Has the ranks give their memory back; returns their reports. A rank that fails has changed nothing,
        and the others are woken again."""
        reports, errors = self._ranks.each(commands.RELEASE_MEMORY, tags, [WEIGHTS] if kept == "host" else [])
        if not errors:
            return reports
        if reports:
            self._ranks.each(commands.TAKE_MEMORY, [tag for tag in tags if tag not in self._state.asleep])
            self._settle("keep", KV_CACHE in tags)  # the content of the other ranks' caches is lost
            if WEIGHTS in tags and kept != "host":
                self._weights.lose("a sleep broke off")
        raise errors[0]

    @contextmanager
    def _knowing(self, level: int, kept: str) -> Iterator[None]:
        """Reads the state from the memory if an interrupt ends a call inside. `level`: the wanted one, 0 for
        a wake-up. `kept`: where sleeping weights would be kept."""
        try:
            yield
        except Exception:  # The failed call has changed nothing, or has undone its changes.
            raise
        except BaseException:
            if self._ranks.error is None:  # With several ranks an interrupt ends the engine.
                self._read_off(level, kept)
            raise

    def _read_off(self, level: int, kept: str) -> None:
        state = self._state
        usage = self._ranks.call(commands.MEMORY_USAGE)[0]  # Between two commands all ranks agree.
        asleep = {tag for tag in MEMORY_TAGS if not usage[tag]["device_bytes"]}
        went, came = asleep - state.asleep, state.asleep - asleep
        on_host = usage[WEIGHTS]["host_bytes"] > 0
        if KV_CACHE in went:
            self._settle("keep", cache_went=True)
        if WEIGHTS in came and state.kept == "file":
            self._weights.lose("a wake-up was interrupted before it had read them again")
        elif WEIGHTS in asleep and not on_host and kept != "file":
            self._weights.lose("a sleep was interrupted after it had dropped them")
        if WEIGHTS not in asleep:
            state.kept = ""
        elif on_host:
            state.kept = "host"
        else:
            state.kept = "file" if kept == "file" else ""
        if went:
            state.level = max(level, state.level or 0)
        elif came and not asleep:
            state.level = None
        state.asleep = asleep

    def _where_kept(self) -> str:
        """The place where weights are kept during a level 1 sleep: "file" or "host"."""
        return "file" if self._config.sleep_offload == "file" and self._weights.unchanged() else "host"


def total(reports: Sequence[dict[str, int]], seconds: float) -> MemoryReport:
    """The ranks' figures added up."""
    names = reports[0] if reports else ()
    return MemoryReport(seconds, **{name: sum(report[name] for report in reports) for name in names})


def in_use(report: MemoryReport) -> str:
    """Describes the device memory in use, by owner if more than the regions is known."""
    text = f"{report.in_use_bytes / GIB:.2f} GiB in use"
    if report.in_use_bytes == report.region_bytes:
        return text
    others = max(0, report.in_use_bytes - report.region_bytes - report.process_bytes)
    regions, process = report.region_bytes / GIB, report.process_bytes / GIB
    return (
        f"{text} ({regions:.2f} in regions, {process:.2f} in the rest of PyTorch, {others / GIB:.2f} by "
        "contexts and other processes)"
    )
