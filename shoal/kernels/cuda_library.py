"""Functions in CUDA C++. They are compiled on first use by NVRTC, a library that comes with torch, kept in
the user's cache folder beside our C libraries (c_library.py), and launched by the driver."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from shoal.errors import ConfigError
from shoal.files.user_dirs import kernel_folder
from shoal.kernels.c_library import BuildError
from shoal.kernels.launching import is_only_prepared

SUFFIX = ".cubin"
HEADER = Path(__file__).with_name("hopper.cuh")  # Sources may include it.
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute, as is the next
NON_PORTABLE_CLUSTER_SIZE_ALLOWED = 14
CLUSTER_DIMENSION = 4  # CUlaunchAttributeID, as is the next
PROGRAMMATIC_STREAM_SERIALIZATION = 6
TENSOR_MAP_TYPES = {torch.int32: 3, torch.bfloat16: 9}  # CUtensorMapDataType
SWIZZLE_128B = 3  # CUtensorMapSwizzle
L2_256B = 3  # CUtensorMapL2promotion


class TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = (("bytes", ctypes.c_ubyte * 128),)


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaFunction:
    """The function `name` of machine code, loaded on the current device. Raises RuntimeError with the code of
    a call of the driver that fails."""

    def __init__(self, binary: bytes, name: str, shared_bytes: int) -> None:
        """`shared_bytes`: of each program."""
        self.shared_bytes, self._driver = shared_bytes, ctypes.CDLL("libcuda.so.1")
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), binary)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        for attribute, value in (
            (MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes),
            (NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        ):
            self._call("cuFuncSetAttribute", self._function, ctypes.c_int(attribute), ctypes.c_int(value))

    def clusters_at_once(self, programs: tuple[int, int, int], threads: int) -> int:
        """Returns how many clusters of such a launch run at once. 0: the GPU, or the part of it that this
        process has, cannot run one."""
        count, launch = ctypes.c_int(), self._launch(programs, threads)
        self._call("cuOccupancyMaxActiveClusters", ctypes.byref(count), self._function, ctypes.byref(launch))
        return count.value

    def launch(self, programs: tuple[int, int, int], threads: int, arguments: ctypes.Structure) -> None:
        """Launches it on the current stream with programmatic dependent launch (pdl.py). Its one parameter
        is `arguments`. Programs whose first number differs alone are a cluster. Where Triton's launches
        only get kernels ready (compilation.py), it runs nothing: what it would read was not written."""
        if is_only_prepared():
            return
        launch = self._launch(programs, threads)
        launch.stream = torch.cuda.current_stream().cuda_stream
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self._call("cuLaunchKernelEx", ctypes.byref(launch), self._function, parameters, None)

    def _launch(self, programs: tuple[int, int, int], threads: int) -> _Launch:
        attributes = (_Attribute * 2)()
        attributes[0].id, attributes[0].value[:3] = CLUSTER_DIMENSION, (programs[0], 1, 1)
        attributes[1].id, attributes[1].value[:1] = PROGRAMMATIC_STREAM_SERIALIZATION, (1,)
        launch = _Launch(programs, (threads, 1, 1), self.shared_bytes)
        launch.attributes, launch.num_attributes = attributes, len(attributes)
        return launch

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._driver, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} failed: the CUDA driver's error {code}")


def tensor_map(
    pointer: int, dtype: torch.dtype, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> TensorMap:
    """Describes a tensor to TMA (CUtensorMap), which reads boxes of it: sizes of dimensions and of a box, the
    innermost first, and strides in bytes of all but that one. Numbers of 16 bits are swizzled as tensor cores
    want rows of 64 of them."""
    return _tensor_map(pointer, dtype, tuple(sizes), tuple(strides), tuple(box))


@functools.lru_cache(maxsize=8192)
def _tensor_map(
    pointer: int, dtype: torch.dtype, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> TensorMap:
    count, kind = len(sizes), TENSOR_MAP_TYPES[dtype]
    memory = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    aligned = -ctypes.addressof(memory) % 64  # as the driver wants it
    code = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled(
        *(ctypes.c_void_p(ctypes.addressof(memory) + aligned), kind, count, ctypes.c_void_p(pointer)),
        (ctypes.c_uint64 * count)(*sizes),
        (ctypes.c_uint64 * (count - 1))(*strides),
        (ctypes.c_uint32 * count)(*box),
        (ctypes.c_uint32 * count)(*[1] * count),
        *(0, SWIZZLE_128B if dtype.itemsize == 2 else 0, L2_256B, 0),
    )
    if code:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed: the CUDA driver's error {code}")
    return TensorMap.from_buffer_copy(memory, aligned)


def compiled(source: Path, constants: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    """Returns the machine code of a source for GPUs of this capability, from the cache folder if that has
    it. It needs no GPU. `constants`: what the source expects to be defined. Raises BuildError."""
    major, minor = capability
    defines = [f"-D{key}={value}" for key, value in constants.items()]
    options = [f"--gpu-architecture=sm_{major}{minor}a", "--std=c++17", *defines]
    text, header = source.read_bytes(), HEADER.read_bytes()
    key = hashlib.sha256("\0".join((*options, str(torch.version.cuda))).encode() + header + text)
    try:
        folder = kernel_folder()
        target = folder / f"{source.stem}-{key.hexdigest()[:16]}{SUFFIX}"
        if target.exists():
            return target.read_bytes()
        binary = compile_cuda(text, source.name, header, options)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            made = Path(work, target.name)
            made.write_bytes(binary)
            os.replace(made, target)  # Processes may do so at the same time: all files are alike.
    except (ConfigError, OSError) as error:
        raise BuildError(f"{source.name} could not be compiled and kept: {error}") from None
    return binary


@functools.cache
def _compiling(
    source: Path, constants: tuple[tuple[str, int], ...], capability: tuple[int, int]
) -> Future[bytes]:
    result: Future[bytes] = Future()

    def work() -> None:
        try:
            result.set_result(compiled(source, dict(constants), capability))
        except BaseException as error:  # noqa: BLE001   `result` raises it
            result.set_exception(error)

    threading.Thread(target=work, name="compile-cuda", daemon=True).start()
    return result


def compiling(source: Path, constants: Mapping[str, int], capability: tuple[int, int]) -> Future[bytes]:
    """Returns the future result of `compiled`, which a thread reads or compiles, once a process."""
    return _compiling(source, tuple(sorted(constants.items())), capability)


def has_compiler() -> bool:
    """Says if there is an NVRTC."""
    try:
        _nvrtc()
    except OSError:
        return False
    return True


def compile_cuda(source: bytes, name: str, header: bytes, options: list[str]) -> bytes:
    """Returns machine code of `source`, which may include `header` by the name of HEADER. Raises BuildError
    with the compiler's log, OSError if there is no NVRTC."""
    nvrtc = _nvrtc()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    headers, names = (ctypes.c_char_p * 1)(header), (ctypes.c_char_p * 1)(HEADER.name.encode())
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, name.encode(), 1, headers, names):
        raise BuildError("NVRTC could not be started")
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), encoded):
            nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise BuildError(f"NVRTC failed: {log.value.decode(errors='replace').strip()[-500:]}")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        binary = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, binary)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return binary.raw


def _nvrtc() -> ctypes.CDLL:
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:  # It lies in a package of its own, beside torch.
        for path in Path(torch.__file__).parents[1].glob(f"nvidia/**/{name}"):
            return ctypes.CDLL(str(path))
        raise
