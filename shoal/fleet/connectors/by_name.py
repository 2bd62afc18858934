"""`connector_named`: chooses the connector that `[planner] connector` names, and checks that its package is
there. connector.py has the protocol; a fleet on Ray (ray.py) is chosen by `--on ray` instead."""

from __future__ import annotations

from collections.abc import Callable

from shoal.errors import ConfigError
from shoal.fleet.connectors.connector import Connector, ConnectorContext
from shoal.fleet.connectors.processes import process_connector
from shoal.fleet.connectors.virtual import VirtualConnector


def connector_named(name: str) -> Callable[[ConnectorContext], Connector]:
    """Returns the constructor of a connector. Raises ConfigError for an unknown name, and for a missing
    package before anything starts."""
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
            raise ConfigError(
                "connector 'ray' needs a fleet on Ray; start it with shoal fleet up FILE --on ray"
            )
        case "kubernetes":
            try:
                from shoal.fleet.connectors.kubernetes import KubernetesConnector
            except ModuleNotFoundError as error:
                raise _missing(name, error) from None

            return KubernetesConnector
        case "virtual":
            return VirtualConnector
        case _:
            raise ConfigError(
                f"unknown connector {name!r}; choose process, circus, ray, kubernetes or virtual"
            )


def _missing(name: str, error: ModuleNotFoundError) -> ConfigError:
    return ConfigError(f"connector {name!r} needs a package ({error}); pip install 'shoal[{name}]'")
