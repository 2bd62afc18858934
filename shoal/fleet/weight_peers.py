"""Finds a worker of the fleet that lends its weights to this process, which is about to become one too."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from shoal.errors import ShoalError
from shoal.fleet.fleet_key import FleetKey
from shoal.fleet.plane import ROLES, Member, Plane
from shoal.fleet.plane_workers import link_to, read_details
from shoal.fleet.remote_engine import RemoteEngine
from shoal.wire import LendWeights, TakeBackWeights

logger = logging.getLogger(__name__)

SEARCH_S = 2.0  # for a worker that could lend to be seen on the plane; the engine's process starts meanwhile
ANSWER_S = 30.0  # for its answer: it computes checksums of its weights first


@contextlib.asynccontextmanager
async def borrowed_weights(
    plane: Plane, key: FleetKey | None, model: str, name: Callable[[], bytes], borrower: str
) -> AsyncIterator[Awaitable[bytes | None]]:
    """Looks for weights among the workers that serve `model`, while the block runs: what the block gets is
    awaited for their loan, None where nobody has any. `name()`: the weights' (weights/loan.py); it reads
    files, and is called in a thread if anybody is there. `borrower`: this process's id. The loan ends with
    the block."""
    search = _Search(plane, key, model, name, borrower)
    asking = asyncio.create_task(search.run())
    try:
        yield asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await search.end()


class _Search:
    def __init__(
        self, plane: Plane, key: FleetKey | None, model: str, name: Callable[[], bytes], borrower: str
    ) -> None:
        self._plane, self._key, self._model = plane, key, model
        self._name, self._borrower = name, borrower
        self._lender: RemoteEngine | None = None

    async def run(self) -> bytes | None:
        """Asks one worker after the other, those of this host first."""
        try:
            async with asyncio.timeout(SEARCH_S):
                found = await self._candidates()
        except TimeoutError:
            found = []
        try:
            name = await asyncio.to_thread(self._name) if found else b""
        except (ShoalError, OSError) as error:
            logger.warning("no weights are borrowed, as the files cannot be read: %s", error)
            return None
        for member in found:
            if (loan := await self._ask(member, name)) is not None:
                return loan
        logger.info("no worker of the fleet lends its weights; they are read from files")
        return None

    async def _candidates(self) -> list[Member]:
        """As soon as there is one."""
        host = socket.gethostname()
        async with aclosing(self._plane.watch()) as views:
            async for members in views:
                found = [
                    member
                    for member in members.values()
                    if member.role in ROLES and member.model == self._model and member.id != self._borrower
                ]
                if found:
                    return sorted(found, key=lambda member: member.details.get("host") != host)
        return []

    async def _ask(self, member: Member, name: bytes) -> bytes | None:
        details = read_details(member)
        lender = None if details is None else link_to(member, details, self._key)
        if lender is None:
            return None
        try:
            async with asyncio.timeout(ANSWER_S):
                await lender.check()
                loan = await lender.control(LendWeights(name, self._borrower))
        except (ShoalError, TimeoutError) as error:
            logger.info("worker %s lends no weights: %s", member.id, error or f"no answer in {ANSWER_S:g} s")
            await lender.close()
            return None
        except asyncio.CancelledError:
            await lender.close()
            raise
        self._lender = lender
        return loan

    async def end(self) -> None:
        if self._lender is not None:
            with contextlib.suppress(ShoalError, TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await self._lender.control(TakeBackWeights(self._borrower))
            await self._lender.close()
