"""KV blocks between any two processes, also of two hosts, by NIXL over UCX: the reader's network card, or its
GPU, reads the owner's registered memory, and the owner's process does nothing for it.

Needs the `nixl` package (the extra `nixl`), which is imported when the first export or peer is opened.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from shoal.kernels.copy.block_copy import runs
from shoal.kv.block_map import check_ids, pieces_between
from shoal.kv.storage import Kind
from shoal.kv.transfer.mapped import RemoteMemory, check_fit, decode, one_piece
from shoal.kv.transfer.nixl_agents import MISSING, NixlAgents, descriptors, in_context
from shoal.kv.transfer.ticket import ExportAddress, Failure, TransferError
from shoal.kv.transfer.transport import CacheViews, Reach, TransportError
from shoal.kv.view import BlockView

# Each export of a peer gets a range of made-up addresses of its own, as exports of two processes may lie at
# equal addresses. The number of the export stands above these bits.
RANGE_BITS = 44
CANCEL_S = 10.0  # timeout of reads in flight when a pull is cancelled
POLL_S = 0.0005


class _NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    metadata: bytes
    segment: str  # DRAM or VRAM
    address: int
    device: int


class _Registered:
    """A cache, registered with an agent. Each view is contiguous, and most of them are one memory."""

    def __init__(self, agent: Any, views: CacheViews) -> None:
        pieces = list(dict.fromkeys(one_piece([view]) for view in views))
        self.address = pieces[0][0]
        storage = views[0].storage
        on_device = storage.kind is Kind.DEVICE
        self.segment = "VRAM" if on_device else "DRAM"
        self.device = storage.device.index or 0 if on_device else 0
        self.context = functools.partial(in_context, self.segment, self.device)
        with self.context():
            descriptors = [(address, num_bytes, self.device, "") for address, num_bytes in pieces]
            self.handle = agent.register_memory(descriptors, self.segment)


class NixlExport:
    """An export with an agent of its own, so that closing it revokes all access by its address."""

    def __init__(self, nixl: NixlAgents, views: CacheViews) -> None:
        self._nixl = nixl
        one_piece(views)
        with nixl.lock:
            try:
                name, self._agent = nixl.new_agent()
                self._memory = _Registered(self._agent, views)
                metadata = self._agent.get_agent_metadata()
            except nixl.errors as error:
                raise TransportError(
                    f"NIXL can't register a cache in {views[0].storage.kind} memory: {error}; is its UCX "
                    "built for it?"
                ) from None
        memory = self._memory
        address = _NixlAddress(name, metadata, memory.segment, memory.address, memory.device)
        specs = tuple(view.spec for view in views)
        self.address = ExportAddress(Nixl.name, specs, msgspec.msgpack.encode(address))

    def close(self) -> None:
        if self._agent is not None:
            with self._nixl.lock, self._memory.context():
                self._agent.deregister_memory(self._memory.handle)
                self._agent = None


class NixlPull:
    def __init__(self, peer: NixlPeer, num_bytes: int) -> None:
        self._peer, self.num_bytes = peer, num_bytes
        self.handles: list[Any] = []  # unfinished reads; under NIXL's lock

    def done(self) -> bool:
        peer = self._peer
        with peer.nixl.lock, peer.memory.context():
            while self.handles:
                try:
                    state = peer.agent.check_xfer_state(self.handles[-1])
                except peer.nixl.errors as error:
                    raise peer.lost(error) from None
                if state == "PROC":
                    return False
                if state != "DONE":
                    raise peer.lost(state)
                peer.agent.release_xfer_handle(self.handles.pop())
            if peer.agent is None:
                raise TransferError(Failure.LOST, "the connection to the owner of the blocks was broken off")
        return True

    def cancel(self) -> None:
        """Waits for the end of the read, because UCX still writes after NIXL has released it. If the
        owner takes longer than CANCEL_S, ends the agent."""
        until = time.monotonic() + CANCEL_S
        try:
            while not self.done():
                if time.monotonic() > until:
                    with self._peer.nixl.lock:
                        raise self._peer.lost(f"it did not answer for {CANCEL_S:g} s")
                time.sleep(POLL_S)
        except TransferError:  # the agent has ended, and nothing comes any more
            return


class NixlPeer:
    """A peer with an agent of its own, because UCX stops writing for certain only when the agent ends."""

    def __init__(self, nixl: NixlAgents, exports: Sequence[ExportAddress], into: CacheViews) -> None:
        if into[0].storage.kind is Kind.DIRECT:
            raise TransferError(
                Failure.UNREACHABLE, "NIXL reads into memory, and this cache is a direct-I/O file"
            )
        self._shares = check_fit(exports, into)
        self.nixl, self._into = nixl, list(into)
        self._pulls: weakref.WeakSet[NixlPull] = weakref.WeakSet()
        self._addresses = [_decode(export) for export in exports]
        self._views: list[list[BlockView]] = [[] for _ in into]  # by group of layers
        for number, export in enumerate(exports):
            base = number + 1 << RANGE_BITS
            for of_group, spec in zip(self._views, export.specs):
                storage = RemoteMemory(Kind.HOST, spec.num_bytes, into[0].storage.device, base)
                of_group.append(BlockView.over(spec, storage))
        with nixl.lock:
            try:
                _, self.agent = nixl.new_agent()
                self.memory = _Registered(self.agent, into)
                for address in self._addresses:
                    self.agent.add_remote_agent(address.metadata)
            except nixl.errors as error:
                raise TransferError(
                    Failure.UNREACHABLE, f"NIXL can't reach the owner of the blocks: {error}"
                ) from None

    def pull(self, src_ids: Sequence[int], dst_ids: Sequence[int], layers: range, group: int = 0) -> NixlPull:
        views, into = self._views[group], self._into[group]
        from_ids, to_ids = check_ids(src_ids, views, dst_ids, [into])
        pull = NixlPull(self, len(to_ids) * len(layers) * into.spec.block_layer_bytes)
        if not len(layers) or not len(to_ids):
            return pull
        with self.nixl.lock:
            self._pulls.add(pull)
        for pieces in pieces_between(views, [into], self._shares[group], layers):
            sources, targets = runs(pieces, from_ids, to_ids)
            exports = sources >> RANGE_BITS
            for number, address in enumerate(self._addresses):
                wanted = exports == number + 1
                if wanted.any():
                    offsets = sources[wanted] & ((1 << RANGE_BITS) - 1)
                    self._read(pull, address, offsets, targets[wanted], pieces.run)
        return pull

    def _read(
        self, pull: NixlPull, address: _NixlAddress, offsets: np.ndarray, targets: np.ndarray, run: int
    ) -> None:
        """Begins to read `run` bytes from each offset in the owner's cache, each to its target."""
        sources = descriptors(offsets + address.address, run, address.device)
        with self.nixl.lock, self.memory.context():
            if self.agent is None:
                raise TransferError(Failure.LOST, "the connection to the owner of the blocks was broken off")
            memory = self.memory
            try:
                remote = self.agent.get_xfer_descs(sources, address.segment)
                local = self.agent.get_xfer_descs(descriptors(targets, run, memory.device), memory.segment)
                handle = self.agent.initialize_xfer("READ", local, remote, address.agent)
                pull.handles.append(handle)
                state = self.agent.transfer(handle)
            except self.nixl.errors as error:
                raise self.lost(error) from None
            if state == "ERR":
                raise self.lost(state)

    def lost(self, why: object) -> TransferError:
        """Ends the agent, and with it all pulls of this peer: after an error it is unknown which bytes
        still come. With the lock held."""
        for pull in self._pulls:
            pull.handles.clear()
        self.agent = None
        return TransferError(Failure.LOST, f"NIXL can't read from the owner of the blocks: {why}")

    def close(self) -> None:
        with self.nixl.lock, self.memory.context():
            if self.agent is not None:
                for name in {address.agent for address in self._addresses}:
                    with contextlib.suppress(*self.nixl.errors):  # it is gone already
                        self.agent.remove_remote_agent(name)
                with contextlib.suppress(*self.nixl.errors):  # the agent's end takes it back, too
                    self.agent.deregister_memory(self.memory.handle)
                self.agent = None


class Nixl:
    name = "nixl"
    reach = Reach.NETWORK

    def __init__(self) -> None:
        self._nixl = NixlAgents()

    def export(self, views: CacheViews) -> NixlExport:
        try:
            self._nixl.load()
        except ImportError as error:
            raise TransportError(f"{MISSING} ({error})") from None
        return NixlExport(self._nixl, views)

    def connect(self, exports: Sequence[ExportAddress], into: CacheViews) -> NixlPeer:
        try:
            self._nixl.load()
        except ImportError as error:
            raise TransferError(Failure.UNREACHABLE, f"{MISSING} ({error})") from None
        return NixlPeer(self._nixl, exports, into)


def _decode(export: ExportAddress) -> _NixlAddress:
    address = decode(export, _NixlAddress)
    if not (0 <= address.address < 1 << 62 and 0 <= address.device < 1 << 16):
        raise TransferError(Failure.DAMAGED, f"not an address of NIXL: {address.address}")
    num_bytes = max(spec.num_bytes for spec in export.specs)
    if address.segment not in ("DRAM", "VRAM") or num_bytes >= 1 << RANGE_BITS:
        raise TransferError(
            Failure.DAMAGED, f"not an address of NIXL: {num_bytes} bytes of {address.segment}"
        )
    return address
