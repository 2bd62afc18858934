"""A supervisor of a fleet of small programs, for test_connectors.py: toy_supervisor.py CONNECTOR FOLDER MODEL... It adds one
worker of each MODEL to the workers that the components count, says "ready", and lives until it is killed."""

import asyncio
import sys
from pathlib import Path

from shoal.fleet.clock import LoopClock
from shoal.fleet.connectors.by_name import connector_named
from shoal.fleet.connectors.connector import ConnectorContext
from shoal.fleet.connectors.process_log import ProcessLog
from tests.connector_cases import START_TIMEOUT_S, Folder, two_components


async def main(name: str, path: str, *models: str) -> None:
    folder = Path(path)
    log = ProcessLog(sys.stderr, "text")
    context = ConnectorContext(
        two_components(folder), Folder(folder), LoopClock(), START_TIMEOUT_S, log, folder
    )
    connector = connector_named(name)(context)
    await connector.start()
    for model in models:
        await connector.add(model, "both")
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
