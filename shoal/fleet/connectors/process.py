"""Workers as processes of this host, which end with the process that starts them."""

from __future__ import annotations

from shoal.fleet.connectors.connector import Setting
from shoal.fleet.connectors.local import LocalConnector
from shoal.fleet.connectors.processes import Processes


def process_connector(setting: Setting) -> LocalConnector:
    return LocalConnector(setting, Processes(setting.log))
