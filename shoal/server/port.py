"""One port as its requests see it: limits, models, keys, and what is counted over all requests."""

from __future__ import annotations

from shoal.config import ServerConfig
from shoal.metrics import HttpMetrics
from shoal.server.catalog import Catalog
from shoal.server.keys import Keys
from shoal.server.notices import Notices


class Port:
    """It knows neither the routes nor the requests that run."""

    def __init__(self, models: Catalog, config: ServerConfig) -> None:
        """Raises ConfigError for keys that cannot be read."""
        self.models, self.config = models, config
        self.keys = Keys(config)
        self.metrics = HttpMetrics()
        self.notices = Notices()
        self.body_bytes = 0  # the bodies of all requests under way
