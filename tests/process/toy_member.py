"""A process of the registry, for test_registry.py: toy_member.py URL LEASE_S WHAT [NAME]. It prints "ready" when it has
done WHAT, and then lives until it is killed."""

import asyncio
import sys
from contextlib import AsyncExitStack

from shoal.fleet.registry.open import open_registry
from shoal.fleet.registry.registry import Member
from tests.process.registry_messages import Note


async def never(note: Note) -> Note:
    await asyncio.Event().wait()
    return note


async def main(url: str, lease_s: str, what: str, name: str = "") -> None:
    registry = open_registry(url, lease_s=float(lease_s), may_host=what == "host")
    async with AsyncExitStack() as stack:
        if what == "serve":
            await stack.enter_async_context(registry.serving(name, Note, never))
        if what in ("register", "serve"):
            await registry.register(Member(id=name, role="both", address="http://127.0.0.1:1"))
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
