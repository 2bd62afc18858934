"""`Watchdog`: judges by an engine core's beats whether it hangs. Pure: time is an argument. async_llm.py
passes the beats on, and ends a core that hangs."""

from __future__ import annotations

from shoal.wire import BEAT_S, QUICK_COMMANDS, Beat

CPU_PATIENCE = 10.0  # factor on the patience with a step that computes on the CPU
BUSY_SHARE = 0.1  # share of a processor core above which a process computes
MUST_END = {"step", *QUICK_COMMANDS}  # a core that works completes these soon
MOST_TICK_S = 1.0  # a longer time without a tick means that the watcher stood still, not the watched


class Watchdog:
    """Watches one core. It is silent if no beat arrives, or if beats report a step or a quick command that
    does not end.

    Other commands (waking, new weights, a profile) may take as long as they like, and so may a core without
    work. A step on the CPU may take minutes. The processor time that it uses distinguishes it from a hung
    one.
    """

    def __init__(self, timeout_s: float) -> None:
        """timeout_s: the silence after which a core counts as hung; 0: it never does."""
        self.timeout_s = timeout_s
        self.unheard_s = 0.0  # since the last beat
        # How long the step or command has run. On the CPU, time in which it computes counts less.
        self.stuck_s = 0.0
        self._last = Beat(-1, "", 0.0)

    def beat(self, beat: Beat) -> None:
        last, self._last = self._last, beat
        used = beat.cpu_seconds - last.cpu_seconds
        self.unheard_s = 0.0
        if beat.doing not in MUST_END or beat.progress != last.progress:
            self.stuck_s = 0.0
        elif used > BUSY_SHARE * BEAT_S:
            self.stuck_s += BEAT_S / CPU_PATIENCE
        else:
            self.stuck_s += BEAT_S

    def tick(self, elapsed_s: float) -> str | None:
        """Called about every BEAT_S with the seconds since the last call. Returns what is wrong, or None."""
        self.unheard_s += min(elapsed_s, MOST_TICK_S)
        if not self.timeout_s:
            return None
        if self.unheard_s >= self.timeout_s:
            return f"has shown no sign of life for {self.timeout_s:g} s"
        if self.stuck_s >= self.timeout_s:
            if self._last.doing == "step":
                return f"has completed no step for {self.timeout_s:g} s while requests wait"
            return f"has been busy with {self._last.doing} for {self.timeout_s:g} s"
        return None
