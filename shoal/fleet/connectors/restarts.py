"""`Restarts`: restarts a dead worker after 1, 2, 4 and 8 seconds; then it counts as crash-looping. The
supervisors (processes.py, circus.py, ray.py) start the process again."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MAX_DEATHS = 5  # consecutive deaths after which a worker is not restarted
LONG_LIFE_S = 60.0  # running time after which the count of deaths starts anew
FIRST_DELAY_S = 1.0  # delay before the first restart; each further one is twice as long


class Restarts:
    """Counts the deaths of one worker."""

    def __init__(self, worker_id: str) -> None:
        self._id, self._num_deaths = worker_id, 0

    def delay_after(self, lived_s: float, how: str) -> float | None:
        """Returns the delay in seconds until the restart; None if the worker crash-loops. Logs both. `how`:
        the kind of its end, in words."""
        self._num_deaths = 1 if lived_s >= LONG_LIFE_S else self._num_deaths + 1
        if self._num_deaths == MAX_DEATHS:
            logger.error(
                "%s has ended %d times in a row (%s) and is not restarted; its lines above say why",
                self._id,
                self._num_deaths,
                how,
            )
            return None
        delay_s = FIRST_DELAY_S * 2.0 ** (self._num_deaths - 1)
        logger.error(
            "%s ended after %.1f s (%s); it is restarted in %g s (%d of %d)",
            self._id,
            lived_s,
            how,
            delay_s,
            self._num_deaths,
            MAX_DEATHS - 1,
        )
        return delay_s
