"""A process on the plane, for test_plane.py: toy_member.py URL LEASE_S WHAT [NAME]. It says "ready" when it has
done WHAT, and then lives until it is killed."""

import asyncio
import sys

from shoal.fleet.registry.open import open_plane
from shoal.fleet.registry.registry import Member
from tests.process.plane_messages import Note


async def main(url: str, lease_s: str, what: str, name: str = "") -> None:
    plane = open_plane(url, lease_s=float(lease_s), may_host=what == "host")
    if what == "register":
        await plane.register(Member(id=name, role="both", address="http://127.0.0.1:1"))
    elif what == "serve":

        async def answer(request: Note):
            for n in range(request.n):
                yield Note(n)
            await asyncio.Event().wait()

        await plane.serve(name, Note, answer)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
