"""`ChannelWriter`, `ChannelReader`: the shared-memory ring that carries commands from rank 0 to all others,
without pickle. workers.py says which side sends what, and what happens when a side dies.

A message is plain data with numpy arrays and CPU tensors anywhere in it. Plain data is what msgpack knows:
None, bool, int, float, str, bytes, lists, dicts; tuples arrive as lists. Arrays travel as raw bytes after
the msgpack head, with one copy in and one copy out.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shoal.errors import EngineDeadError

if TYPE_CHECKING:  # a process that sends no tensors does not pay for the import
    import torch

PREFIX = struct.Struct("<QQ")  # bytes of the head, bytes of the body
ALIGNMENT = 64  # bytes; each array in the body begins at a multiple
NDARRAY, TENSOR = 1, 2  # msgpack extension types: [offset in the body, dtype, shape]
RING_BYTES = 4 << 20


# Packing


def pack(message: Any) -> list[memoryview]:
    """The message as pieces that are to be written one after the other. Raises TypeError for a value that is
    not plain data."""
    pieces: list[memoryview] = []
    size = 0

    def place(value: Any) -> Any:
        nonlocal size
        if isinstance(value, np.generic):
            return value.item()
        if _is_tensor(value):
            code, dtype, array = TENSOR, str(value.dtype).removeprefix("torch."), _tensor_bytes(value)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject and value.dtype.names is None:
            code, dtype, array = NDARRAY, value.dtype.str, _array_bytes(value)
        else:
            raise TypeError(
                f"{type(value).__name__} {value!r:.100} is not plain data, a numpy array or a CPU tensor"
            )
        offset, size = size, size + -(-len(array) // ALIGNMENT) * ALIGNMENT
        pieces.extend((array.data, memoryview(bytes(-len(array) % ALIGNMENT))))
        return msgspec.msgpack.Ext(code, msgspec.msgpack.encode((offset, dtype, tuple(value.shape))))

    head = msgspec.msgpack.encode(message, enc_hook=place)
    return [memoryview(PREFIX.pack(len(head), size) + head), *pieces]


def unpack(head: bytes | memoryview, body: np.ndarray) -> Any:
    """The message. Its arrays are views into `body`, which must not be written."""

    def find(code: int, data: memoryview) -> np.ndarray | torch.Tensor:
        offset, dtype, shape = msgspec.msgpack.decode(data)
        if code == NDARRAY:
            kind, count = np.dtype(dtype), int(np.prod(shape, dtype=np.int64))
            return body[offset : offset + count * kind.itemsize].view(kind).reshape(shape)
        assert code == TENSOR, code
        import torch

        kind, count = getattr(torch, dtype), int(np.prod(shape, dtype=np.int64))
        return torch.from_numpy(body[offset : offset + count * kind.itemsize]).view(kind).reshape(shape)

    return msgspec.msgpack.decode(head, ext_hook=find)


def _is_tensor(value: Any) -> bool:
    torch = sys.modules.get("torch")  # if it was never imported, there are no tensors
    return torch is not None and isinstance(value, torch.Tensor)


def _array_bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _tensor_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes. numpy has no bfloat16 or fp8, so tensors travel under torch's names of dtypes."""
    import torch

    if tensor.device.type != "cpu":
        raise TypeError(f"a tensor on {tensor.device} cannot be sent; call .cpu() first")
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


# The ring
#
#   positions in the stream of bytes, stored in the ring modulo its size:
#   [.., freed)              every reader has copied it out: the writer may overwrite it
#   [freed, announced)       some reader may still be reading it
#   [announced, written)     copied in, the readers don't know of it yet
#
# The ring holds bytes and nothing else. Eventfds, which the kernel keeps as 64-bit counters, count them: the
# writer announces bytes by adding to a reader's counter, and the reader takes the whole counter, sleeping
# while it is 0. So there is no shared counter to tear and no wake-up to lose. There is no memory order to
# argue about from Python either: both system calls take the counter's spinlock, so bytes stored before the
# write() are visible after the read() that returns their number, on x86 and on ARM. Readers give room back in
# the same manner.
#
# Neither side spins. A rank that sleeps takes a moment to wake, but with asynchronous scheduling the command
# for step n+1 leaves while the GPU is in step n, so no step waits for it. Spinning long enough to help takes
# a core per rank (benchmarks/results/steps.md).


class ChannelWriter:
    """Rank 0's end. To be used by one thread at a time.

    `put` returns when the last piece of the message is in the ring. It waits for the slowest reader to make
    room. If `interrupt_fd` becomes readable meanwhile, it calls `on_interrupt`, which must raise.
    """

    def __init__(
        self,
        num_readers: int,
        interrupt_fd: int,
        on_interrupt: Callable[[], None],
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self.memory_fd = os.memfd_create("shoal-commands")  # anonymous: the name is only for /proc/*/maps
        os.ftruncate(self.memory_fd, ring_bytes)
        self.ring = mmap.mmap(self.memory_fd, ring_bytes)
        self.size = ring_bytes
        self.data_fds = [os.eventfd(0) for _ in range(num_readers)]
        self.room_fds = [os.eventfd(0) for _ in range(num_readers)]
        self.interrupt_fd, self.on_interrupt = interrupt_fd, on_interrupt
        self.written = self.announced = 0
        self.freed = [0] * num_readers
        self.whole = True  # False while a message is half written

    def reader_fds(self, reader: int) -> tuple[int, int, int]:
        """The file descriptors that ChannelReader needs; the reader's process inherits them."""
        return self.memory_fd, self.data_fds[reader], self.room_fds[reader]

    def put(self, pieces: list[memoryview]) -> None:
        """Writes what `pack` returned. An exception that ends it half way (Ctrl-C while it waits) leaves the
        channel unusable: every later call raises EngineDeadError."""
        if not self.whole:
            raise EngineDeadError(
                "an earlier command to the ranks was interrupted half way; build a new engine"
            )
        self.whole = False
        for piece in pieces:
            self._write(piece)
        self._announce()
        self.whole = True

    def _write(self, data: memoryview) -> None:
        at = 0
        while at < len(data):
            room = self.size - (self.written - min(self.freed))
            if room == 0:
                self._announce()
                self._wait_for_room()
                continue
            start = self.written % self.size
            # Pieces are at most a quarter of the ring, so that readers copy the first ones out while we copy
            # the next ones in.
            count = min(len(data) - at, room, self.size - start, self.size // 4)
            self.ring[start : start + count] = data[at : at + count]
            at += count
            self.written += count
            if self.written - self.announced >= self.size // 4:
                self._announce()

    def _announce(self) -> None:
        count, self.announced = self.written - self.announced, self.written
        if count:
            for fd in self.data_fds:
                os.eventfd_write(fd, count)

    def _wait_for_room(self) -> None:
        slowest = self.freed.index(min(self.freed))
        poll = select.poll()
        poll.register(self.room_fds[slowest], select.POLLIN)
        poll.register(self.interrupt_fd, select.POLLIN)
        ready = [fd for fd, _ in poll.poll()]
        if self.interrupt_fd in ready:
            self.on_interrupt()
        if self.room_fds[slowest] in ready:
            self.freed[slowest] += os.eventfd_read(self.room_fds[slowest])

    def close(self) -> None:
        self.ring.close()
        for fd in (self.memory_fd, *self.data_fds, *self.room_fds):
            os.close(fd)


class ChannelReader:
    """One other rank's end, from inherited file descriptors."""

    def __init__(self, memory_fd: int, data_fd: int, room_fd: int) -> None:
        self.ring = mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)
        self.view = memoryview(self.ring)
        self.size = len(self.ring)
        self.data_fd, self.room_fd = data_fd, room_fd
        self.position = 0  # in the stream: all before it is copied out
        self.available = 0  # announced bytes that are not read yet
        self.returned = 0  # the position that the writer knows of

    def get(self) -> Any:
        """The next message; sleeps until there is one. The caller owns what it returns: the ring's bytes are
        free again already."""
        head_size, body_size = PREFIX.unpack(self._read(PREFIX.size).data)
        head, body = self._read(head_size), self._read(body_size)
        self._return_room()
        return unpack(head.data, body)

    def _read(self, count: int) -> np.ndarray:
        data = np.empty(count, np.uint8)  # unlike bytearray, not cleared first
        target, at = data.data, 0
        while at < count:
            if self.available == 0:
                self._return_room()
                self.available = self._wait_for_data()
            start = self.position % self.size
            n = min(count - at, self.available, self.size - start)
            target[at : at + n] = self.view[start : start + n]
            at += n
            self.position += n
            self.available -= n
        return data

    def _wait_for_data(self) -> int:
        """Returns the number of newly announced bytes; sleeps while it is 0."""
        return os.eventfd_read(self.data_fd)

    def _return_room(self) -> None:
        count, self.returned = self.position - self.returned, self.position
        if count:
            os.eventfd_write(self.room_fd, count)

    def close(self) -> None:
        """Unmaps the ring; the file descriptors stay the caller's."""
        self.view.release()
        self.ring.close()
