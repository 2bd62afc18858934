"""The `nixl` package (the extra `nixl`), which moves bytes between any two processes: its agents, and memory
as they name it. It is imported when it is first needed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from shoal.kv.cuda_driver import context

MISSING = "NIXL, which moves bytes between hosts, is not installed: pip install 'shoal[nixl]'"


class NixlAgents:
    """The package, once it is imported, and a lock: its agents are not thread-safe."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._api: Any = None
        self.errors: tuple[type[Exception], ...] = ()

    def load(self) -> None:
        """Raises ImportError."""
        if self._api is None:
            os.environ.setdefault("UCX_LOG_FILE", "stderr")  # its default is stdout
            import nixl._api as api
            import nixl._bindings as bindings

            found = [getattr(bindings, name) for name in dir(bindings) if name.endswith("Error")]
            self.errors = (*(kind for kind in found if isinstance(kind, type)), RuntimeError, ValueError)
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs each agent to stdout
            self._api = api

    def new_agent(self) -> tuple[str, Any]:
        """Returns a name and an agent. The name is random; only an export's address contains it."""
        name = secrets.token_hex(16)
        return name, self._api.nixl_agent(name, self._api.nixl_agent_config(backends=["UCX"]))


def in_context(segment: str, device: int) -> AbstractContextManager[None]:
    """UCX looks for the GPU of memory (VRAM) in the calling thread's context."""
    return context(device) if segment == "VRAM" else contextlib.nullcontext()


def descriptors(addresses: np.ndarray, run: int | np.ndarray, device: int) -> np.ndarray:
    """Returns NIXL's descriptors: [descriptors, 3] of address, bytes (`run`, one for each or for all),
    device."""
    rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, run, device
    return rows
