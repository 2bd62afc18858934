"""Why an engine computes nothing at the moment, if that is so. Sleep and weight updates write it; the core
and its step loop read it."""

from __future__ import annotations

from shoal.stats import SleepState


class Standstill:
    """An engine stands still while it sleeps, and while its weights are not whole."""

    def __init__(self) -> None:
        self.sleep = SleepState()  # written by Sleeper
        self.weights_lost: str | None = None  # written by Weights: why the weights are of no use

    @property
    def reason(self) -> str | None:
        """What a user is told whose request cannot run now. None: the engine runs."""
        if not self.sleep.is_sleeping:
            return self.weights_lost
        what = f": {' and '.join(sorted(self.sleep.asleep))}" if self.sleep.asleep else ""
        return f"the engine sleeps (level {self.sleep.level}{what}); wake it up first"
