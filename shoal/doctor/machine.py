"""Checks of the machine itself: processor, memory, limits of processes, folders, compiler, clock."""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import platform
import resource
import shlex
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from shoal.config import KVTransferConfig
from shoal.doctor.finding import GIB, MIB, CheckTarget, Findings, fails, gpu_devices, in_units, limited, works
from shoal.doctor.programs import run
from shoal.errors import ConfigError
from shoal.files.open_files import connections_for
from shoal.files.user_dirs import cache_folder, state_folder
from shoal.memory.available import available_bytes, total_bytes

LITTLE_MEMORY = 2 * GIB
FEW_FILES, TOO_FEW_FILES = 4096, 512
SHARED_MEMORY = Path("/dev/shm")
SMALL_SHARED_MEMORY = GIB  # NCCL and Ray's object store want more; containers have 64 MiB if nobody says else
LITTLE_DISK = GIB
LOCKED_MEMORY = GIB
PROGRAM = "#include <pthread.h>\n#include <math.h>\nint main(void) { return 0; }\n"
STA_UNSYNC = 0x0040  # in `status` of the kernel's struct timex: nothing keeps the clock right
TIMEX_STATUS = 5  # longs before that field: modes (padded), offset, freq, maxerror, esterror
INFINIBAND = Path("/sys/class/infiniband")


def system(asked: CheckTarget) -> Findings:
    found = f"Python {platform.python_version()}, {platform.system()} {platform.release()}, "
    found += f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    if sys.platform == "linux":
        yield works("system", found)
    else:
        means = "Shoal is made for Linux: memfd, process groups and the CUDA driver's calls are missing here."
        yield fails("system", found, means, "Run it on Linux, or in a Linux container or virtual machine.")


def memory(asked: CheckTarget) -> Findings:
    free, total = available_bytes(), total_bytes()
    found = f"{in_units(free)} of {in_units(total)} can be had"
    wanted = sum(
        int(group.options.get("kv_host_bytes") or 0) * max(1, group.count)  # type: ignore[call-overload]
        for group in asked.own
    )
    if wanted > free:
        yield fails(
            "memory",
            found,
            f"The workers' kv_host_bytes are {in_units(wanted)} together, so they would not start.",
            "Lower kv_host_bytes, or the number of workers.",
        )
    elif free < LITTLE_MEMORY:
        means = "Only small models fit; a larger one ends its engine as it loads."
        yield limited("memory", found, means, "End other programs, or raise this container's limit.")
    else:
        yield works("memory", found)


def open_files(asked: CheckTarget) -> Findings:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = hard if hard != resource.RLIM_INFINITY else sys.maxsize
    found = "no limit" if files == sys.maxsize else f"at most {files} (ulimit -Hn)"
    room = connections_for(files)
    remedy = "Raise the limit: LimitNOFILE in a systemd unit, --ulimit nofile=65536 for a container."
    wanted = asked.server.max_connections
    if wanted is not None and wanted > room:
        yield fails("open files", found, f"max_connections {wanted} needs more: the server refuses.", remedy)
    elif files < TOO_FEW_FILES:
        yield fails(
            "open files", found, f"A port takes {room} connections, and engines may find none left.", remedy
        )
    elif files < FEW_FILES:
        yield limited("open files", found, f"A port takes {room} connections and no more.", remedy)
    else:
        yield works("open files", found)


def locked_memory(asked: CheckTarget) -> Findings:
    """CUDA's pinned memory does not count here; memory that a network card reads does."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY or soft >= LOCKED_MEMORY:
        limit = "no limit" if soft == resource.RLIM_INFINITY else in_units(soft)
        yield works("locked memory", limit, is_asked=False)
        return
    found = f"{in_units(soft)} (ulimit -l)"
    remedy = "Raise it: ulimit -l unlimited, LimitMEMLOCK=infinity in a unit, --ulimit memlock=-1."
    has_rdma = INFINIBAND.is_dir() and any(INFINIBAND.iterdir())
    if has_rdma and reaches_other_hosts(asked):
        means = (
            "The network cards here cannot register a KV cache, so NIXL cannot read or lend blocks by them."
        )
        yield fails("locked memory", found, means, remedy)
    else:
        means = "Network cards (RDMA) cannot register a KV cache; all else is as it should be."
        yield limited("locked memory", found, means, remedy, is_asked=False)


def reaches_other_hosts(asked: CheckTarget) -> bool:
    """Says if KV blocks are to travel to other hosts, which NIXL does."""
    for group in asked.own:
        transfer = KVTransferConfig.of(group.options.get("kv_transfer_config"))
        if transfer is not None and not transfer.is_local:
            return True
    return False


def shared_memory(asked: CheckTarget) -> Findings:
    """The engine's own is anonymous (memfd); NCCL between GPUs, and Ray, use the folder."""
    try:
        fd = os.memfd_create("shoal-doctor")
        try:
            os.ftruncate(fd, MIB)
            with mmap.mmap(fd, MIB) as view:
                view[0] = 1
        finally:
            os.close(fd)
        yield works("shared memory", "anonymous shared memory can be made and mapped")
    except OSError as error:
        means = "Ranks of one engine cannot be commanded, and workers of one host cannot exchange KV blocks."
        remedy = "Allow memfd_create and mmap: a container's seccomp profile forbids them."
        yield fails("shared memory", f"it cannot be made: {error}", means, remedy)
    about = str(SHARED_MEMORY)
    users = "NCCL (tensor_parallel_size above 1) and Ray"
    is_asked = asked.ranks > 1 or asked.planner.connector == "ray"
    try:
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
            file.write(bytes(4096))
            file.flush()
        size = shutil.disk_usage(SHARED_MEMORY)
    except OSError as error:
        found = f"not writable: {error.strerror}"
        remedy = f"Mount a tmpfs at {about}, or make it writable (mode 1777)."
        yield fails(about, found, f"{users} cannot share memory.", remedy, is_asked=is_asked)
        return
    found = f"{in_units(size.free)} of {in_units(size.total)} free"
    if size.free < SMALL_SHARED_MEMORY:
        means = f"{users} want {in_units(SMALL_SHARED_MEMORY)} or more; with less they fail or are slow."
        remedy = f"Give the container --ipc=host or --shm-size=8g, or enlarge the tmpfs at {about}."
        yield limited(about, found, means, remedy, is_asked=is_asked)
    else:
        yield works(about, found, is_asked=is_asked)


def folders(asked: CheckTarget) -> Findings:
    """Checks the folders of kernels, models and KV blocks."""
    try:
        cache, state = cache_folder(), state_folder()
    except ConfigError as error:
        yield fails("folders", str(error), "Kernels, models and fleets have no place.", "Set HOME.")
        return
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or cache / "triton")
    yield from _folder("cache", cache, "SHOAL_CACHE", "kernels and the default model")
    if cache not in triton.parents:
        yield from _folder("Triton's cache", triton, "TRITON_CACHE_DIR", "compiled kernels", asked.needs_gpu)
    yield from _temporary_files()
    yield from _folder("models", hub_cache(), "HF_HUB_CACHE", "models of the hub", asked.is_given("model"))
    if asked.path is not None:
        yield from _folder("state of fleets", state, "XDG_STATE_HOME", "what runs of a fleet")
    for group in asked.own:
        if (path := group.options.get("kv_disk_path")) is not None:
            wanted = int(group.options.get("kv_disk_bytes") or LITTLE_DISK)
            yield from _folder("disk tier", Path(str(path)), "kv_disk_path", "KV blocks", wanted=wanted)


def _temporary_files() -> Findings:
    """Python looks for the first folder of several that can be written, and raises where none can."""
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        means = "No engine starts: it is to hold their sockets."
        remedy = "Name a folder that can be written (TMPDIR), or make room."
        yield fails("temporary files", str(error.strerror), means, remedy)
    else:
        yield from _folder("temporary files", folder, "TMPDIR", "sockets of engines")


def hub_cache() -> Path:
    """Returns huggingface_hub's folder of models without importing it, which takes long."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder)
    home = os.environ.get("HF_HOME")
    base = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    return (Path(home) if home else base / "huggingface") / "hub"


def _folder(
    about: str, path: Path, option: str, holds: str, is_asked: bool = True, wanted: int = LITTLE_DISK
) -> Findings:
    """A folder that holds something: whether it can be written, and its disk has `wanted` bytes."""
    there = nearest(path)
    remedy = f"Name another folder ({option})"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(MIB))
            file.flush()
        free = shutil.disk_usage(there).free
    except OSError as error:
        means = f"It is to hold {holds}, and cannot."
        found = f"{path}: {error.strerror}" + (f" in {there}" if there != path else "")
        yield fails(about, found, means, f"{remedy}, or make room.", is_asked=is_asked)
        return
    found = f"{path}: {in_units(free)} free"
    if free < wanted:
        means = f"It holds {holds}; {in_units(wanted)} or more should be free."
        yield limited(about, found, means, f"{remedy}, or make room.", is_asked=is_asked)
    else:
        yield works(about, found, is_asked=is_asked)


def nearest(path: Path) -> Path:
    """Returns the path itself if it exists, else the nearest folder above it, in which it will be made."""
    return next(folder for folder in (path, *path.absolute().parents) if os.path.lexists(folder))


def compiler(asked: CheckTarget) -> Findings:
    """CPU kernels are C, and Triton compiles a small C module of its own before a GPU's first kernel."""
    is_asked = bool(asked.own)
    has_gpu = bool(gpu_devices()) and asked.may_use_gpu
    means = "A first start on a GPU fails." if has_gpu else "Models on the CPU are several times slower."
    path = next((found for name in ("gcc", "cc") if (found := shutil.which(name))), None)
    remedy = "Install one: apt-get install gcc libc6-dev."
    found = "neither gcc nor cc is on the PATH"
    if path is not None:
        said = run([path, "-x", "c", "-", "-fsyntax-only", "-pthread"], 10, PROGRAM)
        found = path if said.failure is None else f"{path} does not compile: {said.failure}"
        if said.failure is None:
            if has_gpu and not Path(sysconfig.get_paths()["include"], "Python.h").exists():
                found += ", without Python.h"
                remedy = "Install Python's headers: apt-get install python3-dev."
            else:
                yield works("C compiler", found, is_asked=is_asked)
                return
    verdict = fails if has_gpu else limited
    yield verdict("C compiler", found, means, remedy, is_asked=is_asked)


def compiled_python(asked: CheckTarget) -> Findings:
    """pip writes Python's compiled files beside a package's modules. Where they are missing, a process writes
    them as it imports, unless it may not. That only delays a start, so it never limits what was asked for."""
    specs = map(importlib.util.find_spec, ("torch", "triton", "shoal"))
    missing = [spec for spec in specs if spec and spec.cached and not Path(spec.cached).exists()]
    writes = not sys.dont_write_bytecode
    unwritten = [s for s in missing if not (writes and os.access(nearest(Path(str(s.cached))), os.W_OK))]
    if not unwritten:
        found = "the first start writes it" if missing else "there"
        yield works("compiled Python", found, is_asked=False)
        return
    folders = shlex.join(str(Path(str(spec.origin)).parent) for spec in unwritten)
    found = f"{folders}: no compiled files, and a start may not write them"
    means = "Each start compiles the modules that it imports; torch's and Shoal's take 2 seconds."
    remedy = (
        f"Run once, with the right to write there: {shlex.quote(sys.executable)} -m compileall -q {folders}"
    )
    yield limited("compiled Python", found, means, remedy, is_asked=False)


def clock(asked: CheckTarget) -> Findings:
    """Leases are measured by each process's own clock; times in logs, metrics and traces are compared."""
    timex = (ctypes.c_long * 64)()
    try:
        state = ctypes.CDLL(None, use_errno=True).adjtimex(timex)
    except (OSError, AttributeError):
        state = -1
    if state < 0:
        yield works("clock", "nobody says whether it is kept right", is_asked=False)
    elif timex[TIMEX_STATUS] & STA_UNSYNC:
        means = "Log lines and metrics of several hosts may be out of order; requests do not depend on it."
        remedy = "Run chrony or systemd-timesyncd on the host."
        yield limited("clock", "it is not synchronised", means, remedy, is_asked=False)
    else:
        yield works("clock", "synchronised", is_asked=False)
