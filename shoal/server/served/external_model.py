"""ExternalModel: a model whose workers serve OpenAI's HTTP API. Its requests are passed on unchanged."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.fleet_api import Forwarder
from shoal.server.served.admission import Admission

UNBOUNDED = 1 << 40  # the workers and the fleet's queue set the limit


class ExternalModel:
    """`names` and `max_model_len` are reported by its workers, and may change while it is served."""

    def __init__(
        self,
        names: Sequence[str],
        forwarder: Forwarder,
        *,
        max_model_len: int | None = None,
        request_timeout: float | None = None,
    ) -> None:
        """names: clients may use any; adapters are further names. max_model_len None: not known.
        request_timeout: seconds that a request may take at most."""
        self.names = list(names)
        self.forwarder = forwarder
        self.max_model_len = max_model_len
        self.request_timeout = request_timeout
        self.admission = Admission(UNBOUNDED, 0)

    @property
    def name(self) -> str:
        return self.names[0]
