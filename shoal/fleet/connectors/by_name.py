"""Chooses the connector that `[planner] connector` names."""

from __future__ import annotations

from collections.abc import Callable

from shoal.errors import ConfigError
from shoal.fleet.connectors.connector import Connector, ConnectorContext
from shoal.fleet.connectors.processes import process_connector
from shoal.fleet.connectors.virtual import VirtualConnector


def connector_named(name: str) -> Callable[[ConnectorContext], Connector]:
    """How to make it. What is chosen never depends on what happens to be installed: raises ConfigError if a
    package is missing, before anything starts."""
    match name:
        case "process":
            return process_connector
        case "circus":
            try:
                from shoal.fleet.connectors.circus import circus_connector
            except ModuleNotFoundError as error:
                raise _missing(name, error) from None

            return circus_connector
        case "ray":
            raise ConfigError("connector 'ray' is of a fleet that runs on Ray: shoal fleet up FILE --on ray")
        case "kubernetes":
            try:
                from shoal.fleet.connectors.kubernetes import KubernetesConnector
            except ModuleNotFoundError as error:
                raise _missing(name, error) from None

            return KubernetesConnector
        case "virtual":
            return VirtualConnector
        case _:
            raise ConfigError(f"connector {name!r} is none that there is")


def _missing(name: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"connector {name!r} needs a package ({error}): pip install 'shoal[{name}]'")
