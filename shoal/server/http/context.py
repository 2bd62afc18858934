"""The state that all requests of one port share: limits, models, keys, the monitor, and counts."""

from __future__ import annotations

from shoal.config import ServerConfig
from shoal.server.http.client_warnings import ClientWarnings
from shoal.server.http.keys import Keys
from shoal.server.served.catalog import Catalog
from shoal.server.served.monitoring import Monitor
from shoal.server.served.response_store import ResponseStore
from shoal.telemetry.metrics import HttpMetrics
from shoal.telemetry.timeline import Timelines
from shoal.telemetry.tracing import Tracing


class ServerContext:
    """Holds neither the routes nor the running requests."""

    def __init__(
        self, models: Catalog, config: ServerConfig, monitor: Monitor, tracing: Tracing | None
    ) -> None:
        """tracing: where traces go; None: nowhere. Raises ConfigError for keys that cannot be read."""
        self.models, self.config, self.monitor = models, config, monitor
        self.keys = Keys(config)
        self.metrics = HttpMetrics()
        self.client_warnings = ClientWarnings()
        self.timelines = Timelines()
        self.responses = ResponseStore(config.responses_store_bytes)
        self.tracing = tracing
        self.body_bytes = 0  # the bodies of all requests under way
