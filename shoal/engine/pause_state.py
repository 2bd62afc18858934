"""`PauseState`: the reasons why an engine computes nothing now."""

from __future__ import annotations

from shoal.api import WEIGHTS
from shoal.errors import UnavailableError
from shoal.stats import SleepState


class PauseState:
    """The reasons why an engine computes nothing: it sleeps, or its weights are incomplete. Sleeper and
    Weights write it; the core, its step loop and parts read it."""

    def __init__(self) -> None:
        self.sleep = SleepState()  # written by Sleeper
        self.weights_lost: str | None = None  # written by Weights: why the weights cannot be used

    @property
    def reason(self) -> str | None:
        """The error text for requests that cannot run now. None: the engine runs."""
        if not self.sleep.is_sleeping:
            return self.weights_lost
        what = " and ".join(sorted(self.sleep.asleep)) or "paused"
        way = "wake it up" if self.sleep.asleep else "resume it (/resume, or wake_up)"
        return f"the engine sleeps (level {self.sleep.level}: {what}); {way} first"

    def check_awake(self) -> None:
        """Raises UnavailableError while the weights are asleep."""
        if WEIGHTS in self.sleep.asleep:
            raise UnavailableError(
                "the weights are asleep; wake them up first (wake_up with the tag weights)"
            )
