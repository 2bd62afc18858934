"""Workers as processes of this host, which end with the process that starts them."""

from __future__ import annotations

from shoal.fleet.connector import Setting
from shoal.fleet.connector_local import LocalConnector
from shoal.fleet.processes import Processes


def process_connector(setting: Setting) -> LocalConnector:
    return LocalConnector(setting, Processes(setting.log))
