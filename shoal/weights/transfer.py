"""Tensors from another process, through shared memory or CUDA IPC (`SharedTensors`) or through a trainer's
process group (`WeightsGroup`).

A trainer imports this file too. A shared tensor is described by plain data, which any message can carry.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.errors import CheckpointError, ConfigError

T = TypeVar("T")

ALIGNMENT = 64
TIMEOUT_S = 600.0
# torch has the same timeout; this one is longer, so that torch's error is reported
MEET_GRACE_S = 5.0
Handle = dict[str, Any]  # one tensor: "name", "dtype", "shape", and its address
Listed = tuple[str, str, Sequence[int]]  # name, dtype, shape


class SharedTensors:
    """The sender's side. Keep it, and the tensors unchanged, until the receiver has answered; then close it.

    CPU tensors are copied into anonymous shared memory. CUDA tensors are shared in place, by CUDA IPC: the
    receiver must be another process on the host of the same GPU, and a tensor must come from torch's own
    allocator."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._kept = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
        on_host = [(name, tensor) for name, tensor in self._kept.items() if tensor.device.type == "cpu"]
        self._fd = -1
        offsets, size = {}, 0
        for name, tensor in on_host:
            offsets[name] = size
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        if size:
            self._fd = os.memfd_create("shoal-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            try:
                with mmap.mmap(self._fd, size) as memory:
                    for name, tensor in on_host:
                        memory[offsets[name] : offsets[name] + tensor.nbytes] = (
                            tensor.reshape(-1).view(torch.uint8).numpy().data
                        )
            except BaseException:
                self.close()
                raise
        self.handles: list[Handle] = []
        for name, tensor in self._kept.items():
            handle: Handle = {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
            }
            if name in offsets:
                handle |= {"pid": os.getpid(), "fd": self._fd, "offset": offsets[name]}
            else:
                handle |= {
                    "cuda": list(tensor.untyped_storage()._share_cuda_()),
                    "offset": tensor.storage_offset(),
                }
            self.handles.append(handle)

    def close(self) -> None:
        """Safe to call twice."""
        self._kept = {}
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> SharedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_tensor(handle: Handle) -> torch.Tensor:
    """Opens the sender's tensor on the receiver's side. Read it and drop it. Raises CheckpointError if it
    cannot be opened."""
    try:
        name, dtype, shape = handle["name"], getattr(torch, handle["dtype"]), tuple(handle["shape"])
        if "cuda" in handle:
            if not torch.cuda.is_available():
                raise ValueError("it is on a GPU, and this process has no GPU")
            torch.cuda.init()
            storage = torch.UntypedStorage._new_shared_cuda(*handle["cuda"])
            return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, handle["offset"], shape)  # type: ignore[call-overload]
        count = int(torch.Size(shape).numel())
        pid, number = int(handle["pid"]), int(handle["fd"])
        # The flags keep the opening without side effects, whatever the file is. Then it must be memory that
        # its sender cannot shrink, as a read of missing pages would end this process.
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("its memory is not sealed against shrinking")
            memory = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=handle["offset"]).view(shape)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        name = handle.get("name") if isinstance(handle, dict) else handle
        raise CheckpointError(
            f"the shared tensor {name!r} cannot be opened ({type(error).__name__}: {error}); its sender "
            "must keep it, on this machine and under this user, until the update has ended"
        ) from None


class WeightsGroup:
    """A process group of a trainer, which is rank 0, and an engine's ranks. The trainer broadcasts weights
    over it.

    It meets the groups that RL frameworks build for SGLang and vLLM with torch's `_new_process_group_helper`,
    as ranks meet under the same keys."""

    def __init__(
        self,
        address: str,
        port: int,
        rank: int,
        world_size: int,
        group_name: str,
        backend: str,
        device: torch.device,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Returns when all ranks have joined. Raises ConfigError for an unknown backend, and RuntimeError or
        TimeoutError if they don't join in time. All ranks are trusted: a message of an unexpected size makes
        Gloo end the process."""
        check_group(port, rank, world_size, backend, device)
        limit = timedelta(seconds=timeout_s)
        self.device, self.world_size = device, world_size
        is_master = rank == 0
        store: dist.Store = _within(
            timeout_s, lambda: dist.TCPStore(address, port, world_size, is_master, limit)
        )
        for prefix in (group_name, f"{group_name}/", f"{'cuda' if backend == 'nccl' else 'cpu'}/"):
            store = dist.PrefixStore(prefix, store)
        self._group: Any
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = dist.ProcessGroupNCCL(store, rank, world_size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, world_size, limit)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrites the tensor with rank 0's. Raises RuntimeError if another rank has died."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()
        return tensor

    def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The trainer's side of `update_weights_from_distributed`. The tensors are sent in the order of the
        names that the engine was given."""
        for tensor in tensors.values():
            self.broadcast(tensor.detach().to(self.device).contiguous())

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            group.abort()


def _within(seconds: float, work: Callable[[], T]) -> T:
    """Returns `work()`. Raises TimeoutError if that takes longer, and abandons the waiting thread: a TCPStore
    waits for ever on a peer that accepts the connection and sends nothing."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)

    thread = threading.Thread(target=run, name="shoal-meet", daemon=True)
    thread.start()
    thread.join(seconds + MEET_GRACE_S)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"the other ranks did not answer for {seconds:g} s")
    return results[0]


def check_group(port: int, rank: int, world_size: int, backend: str, device: torch.device) -> None:
    """Raises ConfigError for values that can't form a process group."""
    if backend not in ("nccl", "gloo"):
        raise ConfigError(f"backend must be nccl or gloo, got {backend!r}; choose one")
    if backend == "nccl" and device.type != "cuda":
        raise ConfigError(
            f"backend 'nccl' moves tensors between GPUs, but this engine runs on the {device.type}; use "
            "'gloo'"
        )
    if not isinstance(port, int) or not 0 < port < 65536:
        raise ConfigError(f"master_port must be from 1 to 65535, got {port!r}; give the trainer's port")
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} is outside the group's world_size {world_size}; rank_offset is the first rank of "
            "this engine"
        )


def parse_tensors(
    names: Sequence[str], dtypes: Sequence[str | torch.dtype], shapes: Sequence[Sequence[int]]
) -> list[Listed]:
    """Returns the lists of update_weights_from_distributed as one list of (name, dtype, shape). Raises
    ConfigError unless they have the same length and dtypes are torch's."""
    if not len(names) == len(dtypes) == len(shapes):
        raise ConfigError(
            f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes; give one of each a tensor"
        )
    kinds = [str(dtype).removeprefix("torch.") for dtype in dtypes]
    for kind in kinds:
        if not isinstance(getattr(torch, kind, None), torch.dtype):
            raise ConfigError(f"dtype must be a torch dtype, got {kind!r}; give 'bfloat16', 'float32', ...")
    return [(str(name), kind, [int(n) for n in shape]) for name, kind, shape in zip(names, kinds, shapes)]
