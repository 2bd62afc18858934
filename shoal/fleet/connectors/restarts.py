"""When a worker that has died is started again: after 1, 2, 4 and 8 seconds, and then no more."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MAX_DEATHS = 5  # in succession, after which a worker is not started again
LONG_LIFE_S = 60.0  # a worker that lived so long starts anew with these counts
FIRST_DELAY_S = 1.0  # before the second start; each further delay is twice as long


class Restarts:
    """The deaths of one worker."""

    def __init__(self, worker_id: str) -> None:
        self._id, self._num_deaths = worker_id, 0

    def delay_after(self, lived_s: float, how: str) -> float | None:
        """Returns the seconds until it may start again; None if it is given up. The log says either. `how`:
        it ended, in words."""
        self._num_deaths = 1 if lived_s >= LONG_LIFE_S else self._num_deaths + 1
        if self._num_deaths == MAX_DEATHS:
            logger.error(
                "%s has ended %d times in succession (%s) and is not started again; its lines above say why",
                self._id,
                self._num_deaths,
                how,
            )
            return None
        delay_s = FIRST_DELAY_S * 2.0 ** (self._num_deaths - 1)
        logger.error(
            "%s ended after %.1f s (%s); it is started again in %g s (%d of %d)",
            self._id,
            lived_s,
            how,
            delay_s,
            self._num_deaths,
            MAX_DEATHS - 1,
        )
        return delay_s
