"""Checks of torch, the GPUs and their driver."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any

from shoal.doctor.finding import CheckTarget, Finding, Findings, fails, gpu_devices, in_units, limited, works
from shoal.doctor.programs import run

SMI_LIMIT_S = 10
PROBE_LIMIT_S = 60  # a cold import of torch takes 20, a first CUDA context a few, a first kernel as much
# Names of `nvidia-smi --help-query-gpu`, which are the columns of what it prints.
COLUMNS = (
    "index",
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "compute_mode",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "ecc.errors.uncorrected.volatile.total",
)
SLOW_COPY = 10e9  # bytes a second; PCIe 4 with 16 lanes has 25e9
LEAST_CAPABILITY = (8, 0)  # Shoal needs bfloat16 and asynchronous copies.
INSTALL_TORCH = "Install it: pip install torch (for CPUs: --index-url https://download.pytorch.org/whl/cpu)."


def driver(asked: CheckTarget) -> Findings:
    """Checks the driver with nvidia-smi."""
    is_asked = asked.needs_gpu
    devices = gpu_devices()
    if shutil.which("nvidia-smi") is None:
        if devices:
            means = "The GPUs' state is not known here; torch may use them nevertheless."
            remedy = "Give the container the driver's utilities: NVIDIA_DRIVER_CAPABILITIES=compute,utility."
            yield limited("NVIDIA driver", "no nvidia-smi", means, remedy, is_asked=is_asked)
        else:
            means = "Models run on the CPU, so small ones only."
            remedy = "Use a machine with an NVIDIA GPU and its driver, or ask for device = cpu."
            verdict = fails if is_asked else limited
            yield verdict("NVIDIA driver", "no driver and no GPU", means, remedy, is_asked=is_asked)
        return
    words = ["nvidia-smi", f"--query-gpu={','.join(COLUMNS)}", "--format=csv,noheader,nounits"]
    said = run(words, SMI_LIMIT_S)
    rows = [[value.strip() for value in line.split(",")] for line in said.out.splitlines()]
    rows = [row for row in rows if len(row) == len(COLUMNS)]
    if said.failure is not None or not rows:
        why = said.failure or said.out.strip()[:200] or "it names no GPU"
        lines = said.out.strip().splitlines()
        if said.failure is not None and lines and not rows:  # it explains itself on standard output
            why = f"{lines[0][:200]}"
        remedy = "Load the driver (modprobe nvidia), or reinstall it; after an update of it, start again."
        verdict = fails if is_asked or devices else limited
        means = "The GPUs here cannot be used."
        yield verdict("NVIDIA driver", f"nvidia-smi: {why}", means, remedy, is_asked=is_asked)
        return
    yield works("NVIDIA driver", f"{rows[0][COLUMNS.index('driver_version')]}, {len(rows)} GPUs")
    for row in rows:
        yield from _state(dict(zip(COLUMNS, row)), is_asked)


def _state(gpu: dict[str, str], is_asked: bool) -> Findings:
    about = f"GPU {gpu['index']}'s state"
    if gpu["ecc.errors.uncorrected.volatile.total"] not in ("0", "[N/A]", "[Not Supported]", "N/A"):
        found = f"{gpu['ecc.errors.uncorrected.volatile.total']} memory errors that could not be corrected"
        means = "Answers may be wrong, and engines may die."
        yield fails(about, found, means, "Reset or replace the GPU.", is_asked=is_asked)
    elif gpu["compute_mode"] in ("Prohibited", "Exclusive_Process"):
        means = "A second process cannot use it." if gpu["compute_mode"][0] == "E" else "None can use it."
        remedy = f"nvidia-smi -i {gpu['index']} -c DEFAULT"
        verdict = limited if gpu["compute_mode"][0] == "E" else fails
        yield verdict(about, f"compute mode {gpu['compute_mode']}", means, remedy, is_asked=is_asked)
    elif _is_narrow(gpu):
        lanes = f"{gpu['pcie.link.width.current']} of {gpu['pcie.link.width.max']} PCIe lanes"
        means = "Copies between host and GPU are slow: KV tiers, sleep, loading."
        yield limited(about, lanes, means, "Put the card into a wider slot.", is_asked=is_asked)
    else:
        used = f"{gpu['memory.used']} of {gpu['memory.total']} MiB in use"
        yield works(about, f"{gpu['name']}, {used}", is_asked=is_asked)


def _is_narrow(gpu: dict[str, str]) -> bool:
    current, most = gpu["pcie.link.width.current"], gpu["pcie.link.width.max"]
    return current.isdigit() and most.isdigit() and int(current) < min(8, int(most))


def torch(asked: CheckTarget) -> Findings:
    """torch and what it sees, asked in a process of its own."""
    is_asked = bool(asked.own)
    said = run([sys.executable, "-m", "shoal.doctor.torch_probe"], PROBE_LIMIT_S)
    lines = [json.loads(line) for line in said.out.splitlines() if line.startswith("{")]
    if not lines or "torch" not in lines[0]:
        means = "No model runs here. Routers, simulations and clients do, as they need no torch."
        yield fails("torch", f"its import failed: {said.failure}", means, INSTALL_TORCH, is_asked=is_asked)
        return
    base = lines[0]
    yield works("torch", f"{base['torch']} in {os.path.dirname(base['path'])}", is_asked=is_asked)
    yield from _cuda(base, _line(lines, "is_available"), asked.needs_gpu)
    yield from _gpus(lines, asked.needs_gpu)
    if said.failure is not None:
        means = "An engine on a GPU would end the same way."
        remedy = "Look at dmesg for Xid errors; try another torch or driver."
        yield fails("GPU probe", f"it broke off: {said.failure}", means, remedy, is_asked=asked.may_use_gpu)


def _line(lines: Iterable[dict[str, Any]], key: str) -> dict[str, Any]:
    return next((line for line in lines if key in line), {})


def _cuda(base: dict[str, Any], seen: dict[str, Any], is_asked: bool) -> Findings:
    """Checks that this torch fits this driver."""
    about = "CUDA"
    if base["cuda"] is None:
        if not gpu_devices() and base["driver"] is None:
            yield works(about, "none, as fits a machine without a GPU: this torch is a build for CPUs")
            return
        means = "The GPUs here are not used: models run on the CPU."
        remedy = "Install a build for CUDA: pip install torch, or from download.pytorch.org/whl/cu130."
        verdict = fails if is_asked else limited
        yield verdict(about, "this torch is a build for CPUs", means, remedy, is_asked=is_asked)
        return
    if base["driver"] is None:
        yield works(
            about, f"torch is built for CUDA {base['cuda']}, and there is no driver to fit", is_asked=False
        )
        return
    runs = f"{base['driver'] // 1000}.{base['driver'] % 1000 // 10}"
    if base["driver"] // 1000 < int(base["cuda"].split(".")[0]):
        found = f"torch is built for CUDA {base['cuda']}, and the driver runs CUDA {runs} at most"
        remedy = f"Update NVIDIA's driver, or install a torch for CUDA {runs.split('.')[0]}."
        yield fails(about, found, "torch sees no GPU.", remedy, is_asked=is_asked)
    elif not seen.get("is_available"):
        found = seen.get("warning") or "torch sees no GPU"
        remedy = "Is CUDA_VISIBLE_DEVICES empty, or the container without GPUs (docker run --gpus all)?"
        yield fails(about, found, "Models run on the CPU.", remedy, is_asked=is_asked)
    else:
        yield works(about, f"{base['cuda']} in torch, the driver runs {runs}", is_asked=is_asked)


def _gpus(lines: Iterable[dict[str, Any]], is_asked: bool) -> Findings:
    for line in lines:
        if "gpu" in line:
            yield _gpu(line, is_asked)
        elif "computes" in line and not line["is_right"]:
            means = "Its answers are wrong."
            yield fails(f"GPU {line['computes']}", "a matmul came out wrong", means, "Replace the GPU.")
        elif "host" in line:
            yield _rate(f"GPU {line['host']} and host", line["to_gpu"], line["to_host"], is_asked)
        elif "pair" in line:
            yield _pair(line, is_asked)
        elif "triton" in line:
            yield _triton(line, is_asked)


def _gpu(line: dict[str, Any], is_asked: bool) -> Finding:
    about, capability = f"GPU {line['gpu']}", tuple(line["capability"])
    shown = ".".join(map(str, capability))
    memory = f"{in_units(line['free'])} of {in_units(line['total'])} free"
    found = f"{line['name']}, {memory}, compute capability {shown}"
    if not _has_code(capability, line["archs"]):
        means = f"This torch has code for {', '.join(line['archs'])} only: its kernels do not run here."
        return fails(about, found, means, "Install a build of torch for this GPU.", is_asked=is_asked)
    if capability < LEAST_CAPABILITY:
        means = "Shoal's kernels are made for compute capability 8.0 (Ampere) and later; bfloat16 is slow."
        return limited(about, found, means, "Take --dtype float16, or a newer GPU.", is_asked=is_asked)
    if line["free"] < line["total"] // 2:
        means = "Another program has more than half of its memory; gpu_memory_utilization is of the whole."
        remedy = "End what nvidia-smi lists, or lower --gpu-memory-utilization."
        return limited(about, found, means, remedy, is_asked=is_asked)
    return works(about, found, is_asked=is_asked)


def _has_code(capability: tuple[int, ...], archs: list[str]) -> bool:
    """Says if binaries of these architectures ("sm_90", "sm_100a", "compute_80") run there. A binary runs on
    its major version from its minor version on; code for later compilation (compute_*) on later GPUs, too."""
    for arch in archs:
        kind, _, text = arch.partition("_")
        digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
        if not digits.isdigit():
            continue
        version = (int(digits[:-1]), int(digits[-1]))
        if kind == "sm" and version[0] == capability[0] and version <= capability:
            return True
        if kind == "compute" and version <= capability:
            return True
    return False


def _rate(about: str, to_gpu: float, to_host: float, is_asked: bool) -> Finding:
    found = f"{to_gpu / 1e9:.1f} GB/s to the GPU, {to_host / 1e9:.1f} GB/s back"
    if min(to_gpu, to_host) < SLOW_COPY:
        means = "KV tiers, sleep and wake-up, and loading are slow."
        remedy = "Look at lanes (nvidia-smi -q), the NUMA node, and virtualisation (IOMMU)."
        return limited(about, found, means, remedy, is_asked=is_asked)
    return works(about, found, is_asked=is_asked)


def _pair(line: dict[str, Any], is_asked: bool) -> Finding:
    one, other = line["pair"]
    about = f"GPU {one} to GPU {other}"
    rate = "busy, not measured" if line["rate"] is None else f"{line['rate'] / 1e9:.1f} GB/s"
    if not line["is_direct"]:
        means = "Tensor parallelism and KV blocks between them go through the host."
        remedy = "Take GPUs that NVLink or one PCIe switch joins (nvidia-smi topo -m)."
        return limited(about, f"{rate}, not directly", means, remedy, is_asked=is_asked)
    return works(about, f"{rate}, directly", is_asked=is_asked)


def _triton(line: dict[str, Any], is_asked: bool) -> Finding:
    means = "Models cannot run on the GPU."
    if line["triton"] is None:
        remedy = "Install what it lacks: pip install triton, a C compiler, Python's headers (python3-dev)."
        return fails("Triton", line["error"], means, remedy, is_asked=is_asked)
    if not line["is_right"]:
        remedy = "Install the version of Triton that this torch was released with."
        return fails("Triton", f"{line['triton']}: a kernel came out wrong", means, remedy, is_asked=is_asked)
    return works("Triton", f"{line['triton']}, a kernel was compiled and is right", is_asked=is_asked)


def nvcc(asked: CheckTarget) -> Findings:
    """Shoal's own kernels need none; FlashInfer compiles with it."""
    is_asked = "flashinfer" in asked.options("attention_backend")
    path = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        means = "attention_backend flashinfer cannot compile its kernels; nothing else needs it."
        remedy = "Install the CUDA toolkit, if you want FlashInfer."
        yield fails("nvcc", "not on the PATH", means, remedy, is_asked=is_asked)
        return
    said = run([path, "--version"], SMI_LIMIT_S)
    release = next((line for line in said.out.splitlines() if "release" in line), said.failure or "")
    yield works("nvcc", f"{path}: {release.strip()}", is_asked=is_asked)
