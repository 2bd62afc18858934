"""Warnings about what clients send in vain: each once a client, and a limited number in all."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MAX_TOLD = 1000  # warnings of one server: a client that makes up names fills neither memory nor log


class ClientWarnings:
    def __init__(self) -> None:
        self._told: set[tuple[str, str]] = set()

    def tell(self, client: str, what: str, message: str) -> None:
        """Logs `message`, unless this client was told of `what` before."""
        if self.is_new(client, what):
            logger.warning("%s (client %.100r, told once)", message, client)

    def is_new(self, client: str, what: str) -> bool:
        """Whether this is asked for the first time. Never, once there were MAX_TOLD."""
        if (client, what) in self._told or len(self._told) >= MAX_TOLD:
            return False
        self._told.add((client, what))
        if len(self._told) == MAX_TOLD:
            logger.warning(
                "this is the last of %d warnings of what clients send in vain; more are not shown", MAX_TOLD
            )
        return True
