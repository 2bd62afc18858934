"""All transports, in the order in which readers try them, and the choice among them.

Nothing else names a transport: a new one is an entry here, and its file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shoal.kv.transfer.cuda_ipc import CudaIpc
from shoal.kv.transfer.in_process import InProcess
from shoal.kv.transfer.mapped import check_fit
from shoal.kv.transfer.nixl import Nixl
from shoal.kv.transfer.shared_memory import SharedMemory
from shoal.kv.transfer.ticket import ExportAddress, Failure, TransferError
from shoal.kv.transfer.transport import CacheViews, Export, Peer, Reach, Transport, TransportError

WHERE = {Reach.PROCESS: "in this process", Reach.HOST: "on this host", Reach.NETWORK: "on other hosts"}
TRANSPORTS: tuple[Callable[[], Transport], ...] = (InProcess, CudaIpc, SharedMemory, Nixl)


class Exports:
    """A cache's exports, one for each transport that can read it. `reasons` has the other transports'
    errors by name."""

    def __init__(self, exports: Sequence[Export], reasons: dict[str, str]) -> None:
        self._exports, self.reasons = exports, reasons
        self.addresses: tuple[ExportAddress, ...] = tuple(export.address for export in exports)

    def close(self) -> None:
        """Ends all exports: no reader can connect any more. Safe to call twice."""
        for export in self._exports:
            export.close()


class Transports:
    """All transports, for the owners and the readers of one process. Thread-safe."""

    def __init__(self, kinds: Sequence[Callable[[], Transport]] = TRANSPORTS) -> None:
        self._transports = [make() for make in kinds]

    def export_cache(self, views: CacheViews, reach: Reach = Reach.HOST) -> Exports:
        """Exports a cache by each transport that can read it. Raises TransportError, with each transport's
        reason, unless one of them reaches as far as `reach`."""
        exports: list[Export] = []
        reasons: dict[str, str] = {}
        reached = 0
        for transport in self._transports:
            try:
                exports.append(transport.export(views))
                reached = max(reached, transport.reach)
            except TransportError as error:
                reasons[transport.name] = str(error)
        if reached < reach:
            for export in exports:
                export.close()
            causes = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
            raise TransportError(f"no worker {WHERE[reach]} could read this cache's blocks: {causes}")
        return Exports(exports, reasons)

    def connect(self, ranks: Sequence[Sequence[ExportAddress]], into: CacheViews) -> tuple[str, Peer]:
        """Connects a cache here to the ranks of another worker that have its heads, by the first transport
        that leads there; returns the transport's name, too. Raises TransferError: INCOMPATIBLE, or
        UNREACHABLE with each transport's reason."""
        needed = _with_heads_of(ranks, into)
        reasons = []
        for transport in self._transports:
            exports = [export for rank in needed for export in rank if export.transport == transport.name]
            if len(exports) < len(needed):
                reasons.append(f"{transport.name}: the owner has no such export")
                continue
            try:
                return transport.name, transport.connect(exports, into)
            except TransportError as error:  # this transport can't write into the cache here
                reasons.append(f"{transport.name}: {error}")
            except TransferError as error:
                if error.failure is not Failure.UNREACHABLE:
                    raise
                reasons.append(f"{transport.name}: {error}")
        raise TransferError(
            Failure.UNREACHABLE, f"no transport leads to the owner of the blocks: {'; '.join(reasons)}"
        )


def _with_heads_of(
    ranks: Sequence[Sequence[ExportAddress]], into: CacheViews
) -> list[Sequence[ExportAddress]]:
    """Returns the ranks whose heads a cache needs."""
    shares = check_fit([rank[0] for rank in ranks], into)
    return [ranks[rank] for rank in sorted({share.src_rank for group in shares for share in group})]
