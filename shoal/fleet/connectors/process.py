"""Workers as processes of this host, which end with the process that starts them."""

from __future__ import annotations

from shoal.fleet.connectors.connector import ConnectorContext
from shoal.fleet.connectors.local import LocalConnector
from shoal.fleet.connectors.processes import Processes


def process_connector(context: ConnectorContext) -> LocalConnector:
    return LocalConnector(context, Processes(context.log))
