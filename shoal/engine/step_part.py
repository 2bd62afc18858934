"""`StepPart`: what an engine may have in addition to its core, such as lower tiers or grammars; `Parts`: the
parts of one engine, in order. engine/step_loop.py calls them around steps, engine/lifecycle around sleep and
new weights; engine/build_parts.py builds them. How to add one: docs/howto/step-part.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

from shoal.api import Output
from shoal.config import ResolvedConfig
from shoal.engine.ranks.ranks import Ranks
from shoal.engine.runner.sampler_options import SamplerOptions
from shoal.engine.scheduling.scheduler import Scheduler, StepPlan
from shoal.engine.scheduling.sequence import Sequence as EngineSequence
from shoal.stats import Stats

AnyPart = TypeVar("AnyPart", bound="StepPart")
PartBuilder = Callable[[ResolvedConfig, Ranks, Scheduler], "StepPart"]


class StepPart:
    """One part of an engine. It overrides the methods that it needs; the others do nothing and are not
    called. All calls come from the engine's thread. An exception within a step or a tick ends the engine;
    elsewhere the caller of the engine gets it.
    """

    # Requests

    def added(self, seq: EngineSequence) -> None:
        """A request was added; its sequence waits. Lookups for it begin here."""

    def may_start(self, seq: EngineSequence) -> bool:
        """Returns whether a waiting sequence may start as far as this part is concerned. It is asked in each
        step and for statistics, any number of times, so it changes nothing and is quick."""
        return True

    def aborted(self, request_id: str) -> None:
        """A request was aborted that the scheduler does not have. The part may have taken it over."""

    def all_aborted(self) -> None:
        """All requests were aborted, and so must be the ones that the part has taken over."""

    # A step, while the engine is not paused

    def before_schedule(self) -> None:
        """A step begins. What has ended in the background is applied here; sequences may be finished."""

    def after_schedule(self, plan: StepPlan | None) -> list[Output]:
        """The plan is made and blocks have changed hands; None: no step is launched now. Returns outputs that
        requests get before their tokens."""
        return []

    def before_launch(self, options: SamplerOptions) -> None:
        """The step is packed and will be launched with these options, which may be completed here."""

    def completed(self, plan: StepPlan, seconds: float) -> None:
        """The oldest step in flight has run, for `seconds`, and the scheduler has applied its tokens."""

    def after_step(self, waits: bool) -> None:
        """The step's work on the host is done. `waits`: there was none and no step is in flight, so sleeping
        for a moment delays nothing."""

    def tick(self) -> bool:
        """There is no work; the engine may be paused. Called in place of steps. Returns whether it should be
        called again soon."""
        return False

    # KV blocks (scheduling/seams.py: Gate, Reserve and BlockWatcher, which every part satisfies)

    def give_back(self) -> bool:
        """The scheduler needs blocks and would have to preempt a sequence. Gives some blocks back that the
        part can do without; returns False if it holds none."""
        return False

    def held_blocks(self) -> Sequence[int]:
        """Returns the blocks that the part holds (SequenceBlocks.hold), each as often as it does. For
        checks."""
        return ()

    def registered(self, seq: EngineSequence, start: int, blocks: Sequence[int], group: int) -> None:
        """The sequence's full blocks from the one at `start` on in the table of a group, which are `blocks`,
        are findable now. Blocks whose content was findable already, in other blocks, are among them."""

    def kept(self, seq: EngineSequence, end: int) -> None:
        """A snapshot of the sequence's states after `end` tokens is findable now."""

    def released(self, blocks: Sequence[int]) -> None:
        """A sequence, a fetch or a reader gives these blocks back. Steps in flight may still use them."""

    def before_reset(self) -> None:
        """The prefix cache is about to be reset by a user. The weights stay."""

    def after_reset(self) -> None:
        """The prefix cache was reset by a user."""

    # Sleep, weights and failures; no step is in flight

    def before_sleep(self, tags: Sequence[str]) -> None:
        """These regions of device memory are about to be released (api.MEMORY_TAGS). Afterwards nothing reads
        or writes there."""

    def weights_change(self) -> None:
        """The weights are about to change. All sequences were preempted and the prefix cache was reset."""

    def give_memory_back(self) -> None:
        """Another model is built while this engine, whose weights and cache are gone, sleeps: other memory
        is released too. Followed by `close`, or by `take_memory` if the other model was not built."""

    def take_memory(self) -> None:
        """The opposite of `give_memory_back`. Raises UserError or RuntimeError if there is no memory."""

    def start_anew(self) -> None:
        """An interrupt lost the steps in flight, and it is unknown what reached the device. All requests were
        aborted and the prefix cache was reset. Afterwards nothing of earlier steps is under way. Raises
        TimeoutError if something does not end."""

    # Everything else

    def fill_in(self, stats: Stats) -> None:
        """Adds the part's figures."""

    def check(self) -> None:
        """Checks the part's state by assertions. For tests and idle moments."""

    def close(self) -> None:
        """The engine ends; the ranks still live. The part is not called any more."""


class Parts:
    """The parts of one engine: the one place that has them. Each method of StepPart is called for them in the
    order in which they were added, but `tick`, which is called in the opposite order. A step calls the parts
    that override a method, in the tuple of its name.

    The order, and why (engine/build_parts.py):

        grammars     first: a request that its grammar ends is known to be ended by the parts below
        step costs   needs no other part
        drafts       needs no other part
        answers      needs no other part
        tiers        before peers: copies out of blocks are ordered before peers write into these blocks. In
                     `tick` peers come first, so that the blocks that they release are offloaded
        peers        before weight exports: both only withdraw, so either order would do
        prefetches   after peers: a fetch that has just ended lets its continuation start in this step
        exports      before the user's: a user's part adds to what Shoal's own have done
        user's       before events: changes that they make belong to the step's batch
        events       last: a batch has the changes of all parts
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._set(())

    def _set(self, parts: tuple[StepPart, ...]) -> None:
        self._parts = parts
        self.before_schedule = _overriding(parts, StepPart.before_schedule)
        self.after_schedule = _overriding(parts, StepPart.after_schedule)
        self.before_launch = _overriding(parts, StepPart.before_launch)
        self.completed = _overriding(parts, StepPart.completed)
        self.after_step = _overriding(parts, StepPart.after_step)
        self._scheduler.gates[:] = _overriding(parts, StepPart.may_start)
        self._scheduler.reserves[:] = _overriding(parts, StepPart.give_back)
        self._scheduler.blocks.watchers[:] = _overriding(parts, StepPart.registered, StepPart.released)

    def add(self, part: StepPart) -> None:
        self._set((*self._parts, part))

    def __iter__(self) -> Iterator[StepPart]:
        return iter(self._parts)

    def __reversed__(self) -> Iterator[StepPart]:
        return reversed(self._parts)

    def find(self, kind: type[AnyPart]) -> AnyPart | None:
        """Returns the part of this class; None if the engine has none. For commands that belong to a part."""
        return next((part for part in self._parts if isinstance(part, kind)), None)

    def close(self) -> None:
        """Closes all parts, even if one raises. None is called any more."""
        parts = self._parts
        self._set(())
        with ExitStack() as ends:
            for part in reversed(parts):  # the stack runs the last entry first
                ends.callback(part.close)


def _overriding(parts: tuple[StepPart, ...], *methods: Any) -> tuple[StepPart, ...]:
    """Returns the parts whose class overrides one of StepPart's methods."""
    return tuple(part for part in parts if any(getattr(type(part), m.__name__) is not m for m in methods))
