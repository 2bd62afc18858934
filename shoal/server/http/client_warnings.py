"""Warnings about fields and parts of requests without effect: each once a client, a limited number in all."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

MAX_WARNINGS = 1000  # per server: a client that makes up names fills neither memory nor log


class ClientWarnings:
    def __init__(self) -> None:
        self._given: set[tuple[str, str]] = set()

    def warn(self, client: str, what: str, message: str) -> None:
        """Logs `message`, once for each client and `what`."""
        if self.is_new(client, what):
            logger.warning("%s (client %.100r, logged once)", message, client)

    def is_new(self, client: str, what: str) -> bool:
        """Returns whether this is the first call for a client and `what`. False after MAX_WARNINGS."""
        if (client, what) in self._given or len(self._given) >= MAX_WARNINGS:
            return False
        self._given.add((client, what))
        if len(self._given) == MAX_WARNINGS:
            logger.warning(
                "this is the last of %d warnings about requests; further ones are not shown", MAX_WARNINGS
            )
        return True
