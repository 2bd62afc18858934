"""`RankExporter`, `read_export`: one rank's weights, read by the same rank of a worker that starts with the
same weights. engine/lifecycle/weight_exports.py commands the owner's side.

Weights travel like KV blocks (kv/transfer/transport.py), but as tensors of any size: by shared memory or CUDA
IPC on one host, by NIXL between hosts. The reader pulls whole tensors as they lie in the owner's memory
(sharded, merged, packed), and the owner does nothing meanwhile. So both need the same layout
(`WeightsExport.layout`), and a reader trusts only its own checksums: an owner that dies, sleeps or takes new
weights meanwhile makes a failed read, never wrong weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from shoal.errors import CheckpointError
from shoal.kv.cuda_driver import (
    DriverError,
    allocation_of,
    call,
    close_memory,
    context,
    export_memory,
    open_memory,
)
from shoal.kv.transfer.mapped import boot_id
from shoal.kv.transfer.nixl_agents import MISSING, NixlAgents, descriptors, in_context
from shoal.memory.available import available_bytes
from shoal.models.decoder import Decoder
from shoal.weights.loader import load_hollow_weights
from shoal.weights.source import CheckpointFiles
from shoal.weights.transfer import SharedTensors, open_tensor
from shoal.weights.update import checksums, weight_tensors

logger = logging.getLogger(__name__)

PATIENCE_S = 30.0  # for the first byte, and beyond it for a read at
SLOWEST = 50e6  # bytes a second; below, a disk is quicker
POLL_S = 0.001

Close = Callable[[], None]


T = TypeVar("T", "WeightsExport", "RankExport")


class ExportedTensor(msgspec.Struct, array_like=True, frozen=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str


class RankExport(msgspec.Struct, array_like=True, frozen=True):
    """The tensors of one rank. `ways`: by a way's name, the address at which it reads them."""

    tensors: list[ExportedTensor]
    ways: dict[str, bytes]


class WeightsExport(msgspec.Struct, array_like=True, frozen=True):
    layout: str  # everything that decides the memory layout of weights
    ranks: list[bytes]  # a RankExport each


def encode(export: WeightsExport | RankExport) -> bytes:
    return msgspec.msgpack.encode(export)


def decode(data: bytes, kind: type[T]) -> T:
    """Raises CheckpointError for anything else."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"cannot decode the other worker's weights export: {error}; does it run another version of Shoal?"
        ) from None


class ExportError(Exception):
    """The owner's memory cannot be read in this way."""


class WeightsRead(NamedTuple):
    way: str
    num_bytes: int
    seconds: float


class Way(Protocol):
    """A way to copy tensors of equal shapes from one process to another. All of them are on one device."""

    name: str

    def offer(self, tensors: Sequence[torch.Tensor]) -> tuple[bytes, Close]:
        """Returns the address for readers, and a function that ends the offer. Raises ExportError."""
        ...

    def read(self, address: bytes, into: Sequence[torch.Tensor]) -> None:
        """Fills the tensors with the owner's values, and returns when they have arrived. Raises
        ExportError."""
        ...


class RankExporter:
    """The owner's side: one offer, which any number of readers may use. `export` is sent to them."""

    def __init__(self, model: Decoder) -> None:
        """Raises CheckpointError if the weights cannot be exported in any way."""
        named = dict(weight_tensors(model))
        tensors, sums = _with_data(named.values()), checksums(named)
        ways, reasons = {}, []
        self._closes: list[Close] = []
        try:
            for way in _ways(tensors[0].device):
                try:
                    ways[way.name], close = way.offer(tensors)
                    self._closes.append(close)
                except ExportError as error:
                    reasons.append(f"{way.name}: {error}")
        except BaseException:
            self.close()
            raise
        if not ways:
            raise CheckpointError(f"the weights cannot be exported: {'; '.join(reasons)}")
        lent = [
            ExportedTensor(name, str(tensor.dtype), tuple(tensor.shape), sums[name])
            for name, tensor in named.items()
        ]
        self.export = RankExport(lent, ways)

    def close(self) -> None:
        """Ends the offer. A read under way fails, or finds wrong checksums. Safe to call twice."""
        while self._closes:
            self._closes.pop()()


def take_export(
    model: Decoder, files: CheckpointFiles, sealed: bytes, device: torch.device, rank: int
) -> bool:
    """Fills a new model with the weights of a RankExport, encoded. Returns False, and logs why, if that
    fails."""
    try:
        done = read_export(model, files, decode(sealed, RankExport), device)
    except CheckpointError as error:
        logger.warning("rank %d reads the weights from files: %s", rank, error)
        return False
    except Exception:  # The files are there, whatever it is.
        logger.exception("rank %d reads the weights from files", rank)
        return False
    rate = done.num_bytes / 1e9 / done.seconds
    logger.info(
        "rank %d has its weights from another worker, by %s: %.2f GB in %.2f s (%.1f GB/s)",
        *(rank, done.way, done.num_bytes / 1e9, done.seconds, rate),
    )
    return True


def read_export(
    model: Decoder, files: CheckpointFiles, export: RankExport, device: torch.device
) -> WeightsRead:
    """Fills a new model with another worker's weights, which equal `files`. Raises CheckpointError; the model
    then has undefined weights and may be loaded from files."""
    began = time.perf_counter()
    load_hollow_weights(model, files, device)
    own = dict(weight_tensors(model))
    lent = {tensor.name: tensor for tensor in export.tensors}
    for name in own | lent:
        mine = (str(own[name].dtype), tuple(own[name].shape)) if name in own else "nothing"
        its = (lent[name].dtype, lent[name].shape) if name in lent else "nothing"
        if mine != its:
            raise CheckpointError(f"the other worker has {its} for {name}, and this one {mine}")
    tensors, reasons = _with_data(own[name] for name in lent), []
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the reads are not ordered after the zeros
    for way in _ways(device):
        if way.name not in export.ways:
            reasons.append(f"{way.name}: the other worker does not offer it")
            continue
        try:
            way.read(export.ways[way.name], tensors)
        except ExportError as error:
            reasons.append(f"{way.name}: {error}")
            continue
        found = checksums(own)
        if wrong := [name for name, tensor in lent.items() if found[name] != tensor.checksum]:
            raise CheckpointError(
                f"{len(wrong)} tensors changed while they were read from the other worker, the first is "
                f"{wrong[0]}"
            )
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        return WeightsRead(way.name, num_bytes, time.perf_counter() - began)
    raise CheckpointError(f"the other worker's weights cannot be read: {'; '.join(reasons)}")


def _with_data(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    found = [tensor for tensor in tensors if tensor.nbytes]
    assert all(tensor.is_contiguous() for tensor in found)
    return found


def _ways(device: torch.device) -> list[Way]:
    """In the order in which readers try them."""
    return [CudaIpcWay(device) if device.type == "cuda" else SharedMemoryWay(), NixlWay(device)]


class SharedMemoryWay:
    """On one host, from memory to memory. The owner makes a copy that others can map, and keeps it until the
    offer ends."""

    name = "shared memory"

    def offer(self, tensors: Sequence[torch.Tensor]) -> tuple[bytes, Close]:
        # Shared memory is taken as it is written. Without this, the kernel would end a process for it.
        num_bytes, free = sum(tensor.nbytes for tensor in tensors), available_bytes()
        if num_bytes > free:
            raise ExportError(f"a copy of {num_bytes} bytes of weights has no room in {free} bytes of memory")
        try:
            shared = SharedTensors({str(i): tensor for i, tensor in enumerate(tensors)})
        except OSError as error:
            raise ExportError(f"no memory for a copy of the weights: {error}") from None
        return msgspec.msgpack.encode((boot_id(), shared.handles)), shared.close

    def read(self, address: bytes, into: Sequence[torch.Tensor]) -> None:
        host, handles = _decode(address, tuple[str, list[dict[str, Any]]])
        if host != boot_id():
            raise ExportError("the other worker is on another host")
        try:
            for tensor, handle in zip(into, handles, strict=True):
                tensor.copy_(open_tensor(handle))
        except (CheckpointError, RuntimeError, ValueError) as error:
            raise ExportError(str(error)) from None


class _IpcAddress(msgspec.Struct, frozen=True, array_like=True):
    host: str
    handles: list[bytes]  # one for each whole allocation
    places: list[tuple[int, int]]  # for each tensor: the index of its allocation, and its offset there


class CudaIpcWay:
    """On one host, from GPU to GPU: the reader maps the owner's memory, which must come from cudaMalloc."""

    name = "CUDA IPC"

    def __init__(self, device: torch.device) -> None:
        self._device = device.index or 0

    def offer(self, tensors: Sequence[torch.Tensor]) -> tuple[bytes, Close]:
        handles: dict[int, bytes] = {}
        places = []
        try:
            for tensor in tensors:
                start = allocation_of(self._device, tensor.data_ptr())[0]
                if start not in handles:
                    handles[start] = export_memory(self._device, start)
                places.append((list(handles).index(start), tensor.data_ptr() - start))
        except DriverError as error:
            raise ExportError(
                f"this GPU memory can't be shared ({error}); leave out enable_sleep_mode, or install NIXL"
            ) from None
        return msgspec.msgpack.encode(_IpcAddress(boot_id(), list(handles.values()), places)), lambda: None

    def read(self, address: bytes, into: Sequence[torch.Tensor]) -> None:
        owner = _decode(address, _IpcAddress)
        if owner.host != boot_id():
            raise ExportError("the other worker is on another host")
        opened: list[int] = []
        try:
            for handle in owner.handles:
                opened.append(open_memory(self._device, handle))
            with context(self._device):
                for tensor, (number, offset) in zip(into, owner.places, strict=True):
                    if not 0 <= offset <= allocation_of(self._device, opened[number])[1] - tensor.nbytes:
                        raise ExportError("a tensor's address is outside of its memory")
                    call(
                        "cuMemcpyDtoD_v2",
                        ctypes.c_uint64(tensor.data_ptr()),
                        ctypes.c_uint64(opened[number] + offset),
                        ctypes.c_size_t(tensor.nbytes),
                    )
                call("cuCtxSynchronize")
        except (DriverError, ValueError, IndexError) as error:
            raise ExportError(f"GPU {self._device} can't read the other worker's memory ({error})") from None
        finally:
            close_memory(self._device, opened)


class _NixlAddress(msgspec.Struct, frozen=True, array_like=True):
    agent: str
    metadata: bytes
    segment: str  # DRAM or VRAM
    device: int
    addresses: list[int]  # one for each tensor


class NixlWay:
    """Between any two processes, also of two hosts: the reader's network card or GPU reads the owner's
    memory."""

    name = "NIXL"
    _nixl = NixlAgents()

    def __init__(self, device: torch.device) -> None:
        self._segment = "VRAM" if device.type == "cuda" else "DRAM"
        self._device = device.index or 0

    def offer(self, tensors: Sequence[torch.Tensor]) -> tuple[bytes, Close]:
        with self._using("register the weights") as nixl:
            name, agent = nixl.new_agent()
            memory = agent.register_memory(self._memory_of(tensors), self._segment)
            metadata = agent.get_agent_metadata()
        addresses = [tensor.data_ptr() for tensor in tensors]

        def close() -> None:
            with nixl.lock, in_context(self._segment, self._device):
                agent.deregister_memory(memory)

        address = _NixlAddress(name, metadata, self._segment, self._device, addresses)
        return msgspec.msgpack.encode(address), close

    def read(self, address: bytes, into: Sequence[torch.Tensor]) -> None:
        owner = _decode(address, _NixlAddress)
        if len(owner.addresses) != len(into) or not all(0 < start < 1 << 63 for start in owner.addresses):
            raise ExportError(f"the addresses of {len(into)} tensors are malformed")
        sizes = np.array([tensor.nbytes for tensor in into], np.uint64)
        targets = np.array([tensor.data_ptr() for tensor in into], np.uint64)
        with self._using("read the other worker's weights") as nixl:
            _, agent = nixl.new_agent()
            memory = agent.register_memory(self._memory_of(into), self._segment)
            agent.add_remote_agent(owner.metadata)
            sources = descriptors(np.array(owner.addresses, np.uint64), sizes, owner.device)
            remote = agent.get_xfer_descs(sources, owner.segment)
            local = agent.get_xfer_descs(descriptors(targets, sizes, self._device), self._segment)
            handle = agent.initialize_xfer("READ", local, remote, owner.agent)
            self._wait(agent, handle, PATIENCE_S + int(sizes.sum()) / SLOWEST)
            agent.release_xfer_handle(handle)
            agent.remove_remote_agent(owner.agent)
            agent.deregister_memory(memory)

    @contextlib.contextmanager
    def _using(self, what: str) -> Iterator[NixlAgents]:
        try:
            self._nixl.load()
        except ImportError as error:
            raise ExportError(f"{MISSING} ({error})") from None
        try:
            with self._nixl.lock, in_context(self._segment, self._device):
                yield self._nixl
        except self._nixl.errors as error:
            raise ExportError(f"NIXL can't {what}: {error}") from None
        except DriverError as error:
            raise ExportError(f"NIXL can't {what}: {error}") from None

    def _wait(self, agent: Any, handle: Any, patience_s: float) -> None:
        """The end of the agent, which an error brings, is the end of what would still write."""
        until, state = time.monotonic() + patience_s, agent.transfer(handle)
        while state == "PROC":
            if time.monotonic() > until:
                raise ExportError(f"the other worker's weights did not arrive within {patience_s:.0f} s")
            time.sleep(POLL_S)
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise ExportError(f"NIXL broke off: {state}")

    def _memory_of(self, tensors: Sequence[torch.Tensor]) -> list[tuple[int, int, int, str]]:
        return [(tensor.data_ptr(), tensor.nbytes, self._device, "") for tensor in tensors]


def _decode(address: bytes, kind: Any) -> Any:
    try:
        return msgspec.msgpack.decode(address, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ExportError(f"an address cannot be read: {error}") from None
