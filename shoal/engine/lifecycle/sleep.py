"""Sleep mode: what of an engine sleeps, and how it gets there and back. The memory itself is
engine/runner/rank_memory.py's, on each rank.

Level 0 pauses scheduling and needs no sleep mode. Level 1 drops the KV cache and keeps the weights: in host
memory, or (sleep_offload="file") in the checkpoint they were read from. Level 2 drops both; weights then have
to come back by an update before anything runs. `tags` restricts a sleep to some regions, and a wake-up. The
engine sleeps until every region is awake. To sleep deeper is possible, to sleep twice harmless: level 2 after
level 1 drops the copy on the host as well; level 1 after level 2 changes nothing, as what was dropped is
gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shoal.api import MemoryReport, SleepState, check_sleep, check_tags
from shoal.engine.runner import commands
from shoal.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from shoal.engine.core import EngineCore

logger = logging.getLogger(__name__)

WEIGHTS, KV_CACHE = "weights", "kv_cache"
GIB = 2**30


class Sleeper:
    """An EngineCore's sleep. Every call is made between steps. What fails changes nothing: a sleep that finds
    no host memory fails before anything is unmapped or aborted, a wake-up that fails on one rank is undone on
    all and can be tried again."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.state = SleepState()

    def sleep(self, level: int, tags: Sequence[str] | None, mode: str) -> MemoryReport:
        """`mode` "wait" is for a core without work: whoever drives it lets the requests end first."""
        chosen = check_sleep(level, tags, mode)
        core, state, start = self.core, self.state, time.perf_counter()
        if level and not core.config.enable_sleep_mode:
            raise ConfigError(
                f"sleep level {level} needs memory that can be given back; start the engine "
                "with the option enable_sleep_mode, or pause it with level 0"
            )
        if mode == "wait" and core.has_work:
            raise UnavailableError(
                "requests are still running, and mode 'wait' sleeps when they have ended; step the engine "
                "until then"
            )
        going = [tag for tag in chosen if tag not in state.asleep] if level else []
        deeper = level == 2 and WEIGHTS in chosen and WEIGHTS in state.asleep and state.kept != ""
        kept = (
            self._where_kept()
            if level == 1 and WEIGHTS in going
            else ""
            if WEIGHTS in going or deeper
            else state.kept
        )
        core.drain()
        if core.tiers is not None and KV_CACHE in going:
            core.tiers.offloader.quiesce()
        reports = self._release([*going, WEIGHTS] if deeper else going, kept) if going or deeper else []
        self._settle(mode, KV_CACHE in going)
        state.level = max(level, state.level or 0)
        state.asleep |= set(going)
        state.kept = kept
        if (WEIGHTS in going or deeper) and level == 2:
            core.weights.lose("sleep level 2 dropped them")
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

    def why(self) -> str:
        """Why nothing is scheduled."""
        what = f": {' and '.join(sorted(self.state.asleep))}" if self.state.asleep else ""
        return f"the engine sleeps (level {self.state.level}{what}); wake it up first"

    def wake_up(self, tags: Sequence[str] | None) -> MemoryReport:
        chosen = check_tags(tags)
        core, state, start = self.core, self.state, time.perf_counter()
        coming = [tag for tag in chosen if tag in state.asleep]
        reread = WEIGHTS in coming and state.kept == "file"
        reports: list[dict[str, int]] = []
        if coming:
            reports, errors = core.ranks.each(commands.TAKE_MEMORY, coming)
            if not errors and reread:
                errors = core.weights.reread()
            if errors:
                kept = [WEIGHTS] if state.kept == "host" and WEIGHTS in coming else []
                core.ranks.each(commands.RELEASE_MEMORY, coming, kept)
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
        """With no step in flight. Requests are aborted, or kept: preempted if their KV is gone, else frozen
        as they are. Under "wait" there are none but those that an earlier call kept."""
        if mode == "abort":
            self.core.scheduler.abort_all()
        if cache_went:
            self.core.scheduler.preempt_all()
            # lower tiers keep what they have: it is of these weights
            self.core.scheduler.reset_prefix_cache()

    def _release(self, tags: list[str], kept: str) -> list[dict[str, int]]:
        """The ranks' reports. A rank that fails has changed nothing; the others are woken again."""
        core = self.core
        reports, errors = core.ranks.each(commands.RELEASE_MEMORY, tags, [WEIGHTS] if kept == "host" else [])
        if not errors:
            return reports
        if reports:
            core.ranks.each(commands.TAKE_MEMORY, [tag for tag in tags if tag not in self.state.asleep])
            self._settle("keep", KV_CACHE in tags)  # what the others' caches held is gone
            if WEIGHTS in tags and kept != "host":
                core.weights.lose("a sleep broke off")
        raise errors[0]

    def _where_kept(self) -> str:
        return (
            "file" if self.core.config.sleep_offload == "file" and self.core.weights.unchanged() else "host"
        )


def total(reports: Sequence[dict[str, int]], seconds: float) -> MemoryReport:
    """The ranks' figures as one."""
    names = reports[0] if reports else ()
    return MemoryReport(seconds, **{name: sum(report[name] for report in reports) for name in names})


def in_use(report: MemoryReport) -> str:
    """In words, with whose it is where more than regions is known of."""
    text = f"{report.in_use_bytes / GIB:.2f} GiB in use"
    if report.in_use_bytes == report.region_bytes:
        return text
    others = max(0, report.in_use_bytes - report.region_bytes - report.process_bytes)
    regions, process = report.region_bytes / GIB, report.process_bytes / GIB
    return (
        f"{text} ({regions:.2f} in regions, {process:.2f} elsewhere in PyTorch, {others / GIB:.2f} by "
        "contexts and other processes)"
    )
