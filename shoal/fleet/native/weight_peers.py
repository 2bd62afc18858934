"""`borrowed_weights`: finds a worker of the fleet that exports its weights to this process, which is about to
become a worker. The copy of the weights is engine/runner/rank_export.py's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from shoal.errors import ShoalError
from shoal.fleet.key import FleetKey
from shoal.fleet.native.membership import link_to, read_details
from shoal.fleet.native.remote_engine import RemoteEngine
from shoal.fleet.registry.registry import ROLES, Member, Registry
from shoal.wire import LendWeights, TakeBackWeights

logger = logging.getLogger(__name__)

SEARCH_S = 5.0  # limit for a possible lender to appear in the registry; the engine's process starts meanwhile
CONNECT_S = 5.0  # limit for connecting to it, and for returning the loan
ANSWER_S = 60.0  # limit for the answers of all: a lender computes checksums of its weights first


@contextlib.asynccontextmanager
async def borrowed_weights(
    registry: Registry, key: FleetKey | None, model: str, name: Callable[[], bytes], borrower: str
) -> AsyncIterator[Awaitable[bytes | None]]:
    """Searches the workers that serve `model` for weights while the block runs. The block awaits what it gets
    for the loan; None without a worker that lends them. `name()` returns the name of the weights
    (weights/fingerprint.py); it reads files, and runs in a thread once a worker is found. `borrower`: this
    process's id. The loan ends with the block."""
    search = _Search(registry, key, model, name, borrower)
    asking = asyncio.create_task(search.run())
    try:
        yield asking
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await search.end()


class _Search:
    def __init__(
        self, registry: Registry, key: FleetKey | None, model: str, name: Callable[[], bytes], borrower: str
    ) -> None:
        self._registry, self._key, self._model = registry, key, model
        self._name, self._borrower = name, borrower
        self._lender: RemoteEngine | None = None

    async def run(self) -> bytes | None:
        """Asks one worker after the other, workers of this host first."""
        try:
            async with asyncio.timeout(SEARCH_S):
                found = await self._candidates()
            async with asyncio.timeout(ANSWER_S):
                name = await asyncio.to_thread(self._name)
                for member in found:
                    if (loan := await self._ask(member, name)) is not None:
                        return loan
        except TimeoutError:
            pass
        except ShoalError as error:
            logger.warning("no worker is asked for its weights any more: %s", error)
        except Exception:  # weights can be read from files in any case
            logger.exception("no worker is asked for its weights any more")
        logger.info("no worker of the fleet lends its weights; they are read from files")
        return None

    async def _candidates(self) -> list[Member]:
        """Waits for the first candidate; returns all of that moment, workers of this host first."""
        host = socket.gethostname()
        async with aclosing(self._registry.watch()) as views:
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
        await self.end()
        self._lender = lender  # it may still lend after the timeout
        try:
            async with asyncio.timeout(CONNECT_S):
                await lender.wait_connected()
            return await lender.control(LendWeights(name, self._borrower))
        except (ShoalError, TimeoutError) as error:
            logger.info("worker %s lends no weights: %s", member.id, str(error) or "it is not reached")
            return None

    async def end(self) -> None:
        """Returns the loan of the last worker that was asked."""
        lender, self._lender = self._lender, None
        if lender is not None:
            # A lost message does no harm: the loan also ends by itself.
            with contextlib.suppress(ShoalError, TimeoutError):
                async with asyncio.timeout(CONNECT_S):
                    await lender.control(TakeBackWeights(self._borrower))
            await lender.close()
