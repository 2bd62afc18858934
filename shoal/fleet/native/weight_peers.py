"""Finds a worker of the fleet that lends its weights to this process, which is about to become one too."""

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

SEARCH_S = 5.0  # for a worker that could lend to be seen on the plane; the engine's process starts meanwhile
CONNECT_S = 5.0  # for the way to it, and for a word at the end
ANSWER_S = 60.0  # for all their answers: one that lends computes checksums of its weights first


@contextlib.asynccontextmanager
async def borrowed_weights(
    registry: Registry, key: FleetKey | None, model: str, name: Callable[[], bytes], borrower: str
) -> AsyncIterator[Awaitable[bytes | None]]:
    """Looks for weights among the workers that serve `model`, while the block runs: what the block gets is
    awaited for their loan, None where nobody has any. `name()`: the weights' (weights/fingerprint.py); it
    reads files, and is called in a thread if anybody is there. `borrower`: this process's id. The loan ends
    with the block."""
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
        """Asks one worker after the other, those of this host first."""
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
        except Exception:  # The files are there, whatever it is.
            logger.exception("no worker is asked for its weights any more")
        logger.info("no worker of the fleet lends its weights; they are read from files")
        return None

    async def _candidates(self) -> list[Member]:
        """As soon as there is one."""
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
        self._lender = lender  # It may lend after this process has lost patience.
        try:
            async with asyncio.timeout(CONNECT_S):
                await lender.wait_connected()
            return await lender.control(LendWeights(name, self._borrower))
        except (ShoalError, TimeoutError) as error:
            logger.info("worker %s lends no weights: %s", member.id, str(error) or "it is not reached")
            return None

    async def end(self) -> None:
        """Gives back what the last worker that was asked has lent."""
        lender, self._lender = self._lender, None
        if lender is not None:
            with contextlib.suppress(
                ShoalError, TimeoutError
            ):  # It hears it late, or the loan ends by itself.
                async with asyncio.timeout(CONNECT_S):
                    await lender.control(TakeBackWeights(self._borrower))
            await lender.close()
