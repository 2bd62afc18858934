"""Compiles what a test module launches for GPUs that are not there, and reports registers, spills and shared
memory.

A test module names its launches, `LAUNCHES = {"case": function}`: each calls the real wrappers with CPU
tensors. Every Triton kernel launched under them is compiled with the argument types, constants and warps of
that very call, for sm_80 and sm_90, or for what the module names as its `CAPABILITIES`; none runs. The fixture `compiled` (conftest.py) does so once for a module.

    @pytest.mark.parametrize("case", LAUNCHES)
    def test_compiles(compiled, case): check_kernels(compiled[case])
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

CAPABILITIES = (80, 90)
SHARED_LIMIT = {80: 163 * 1024, 90: 227 * 1024}  # bytes a block may have on A100 and H100/H200


@dataclass(frozen=True)
class Compiled:
    name: str
    capability: int
    num_warps: int
    registers: int
    spilled: int  # bytes of stack a thread
    shared: int  # bytes a block
    spills_in_loops: int = 0  # instructions in loops with matmuls of tensor cores that load or store spills
    error: str = ""  # what the compiler said, if it failed


def compile_launches(path: str) -> dict[str, list[Compiled]]:
    """Case -> its kernels, for all of `LAUNCHES` in the test module at `path`. One new process: this one
    interprets."""
    root = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join((str(root), str(Path(__file__).parent)))
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, __file__, path], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"compiling the launches of {path} failed:\n{done.stderr[-4000:]}")
    cases = json.loads(done.stdout.splitlines()[-1])
    return {case: [Compiled(**kernel) for kernel in kernels] for case, kernels in cases.items()}


def check_kernels(kernels: list[Compiled], max_spilled: int = 0) -> None:
    assert kernels, "nothing was launched"
    for kernel in kernels:
        assert not kernel.error, f"{kernel.name} on sm_{kernel.capability}: {kernel.error}"
        assert kernel.shared <= SHARED_LIMIT[kernel.capability], kernel
        assert kernel.spilled <= max_spilled, kernel


class _NoDriver:
    """Stands where Triton's CUDA driver would: names the target, launches nothing."""

    capability = 90

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps compiled kernels by device: one "device" a target

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)


def _resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack) a thread."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run(
            [str(tool), "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return int(re.findall(r"REG:(\d+)", text)[-1]), int(re.findall(r"STACK:(\d+)", text)[-1])


def _spills_in_loops(cubin: bytes) -> int:
    """Counts loads and stores of local memory between a label and a jump back to it."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        lines = subprocess.run(
            [str(tool), file.name], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    labels = {line.partition(":")[0]: i for i, line in enumerate(lines) if line.startswith(".L_")}
    spills: set[int] = set()
    for end, line in enumerate(lines):
        jump = re.search(r"\bBRA.*`\((\.L_\w+)\)", line)
        start = end if jump is None else labels.get(jump[1], end)
        if start < end and any("MMA" in inner for inner in lines[start:end]):
            spills |= {i for i in range(start, end) if re.search(r"\b(LDL|STL)\b", lines[i])}
    return len(spills)


def _compile_all(path: str) -> dict[str, list[dict]]:
    import importlib.util

    import triton
    from triton.runtime.jit import JITFunction

    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    driver = _NoDriver()
    triton.runtime.driver.set_active(driver)
    spec.loader.exec_module(module)
    launched: list[Compiled] = []
    compile_only = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        try:
            kernel = compile_only(self, *args, grid=grid, warmup=True, **kwargs)
        except Exception as error:  # noqa: BLE001 -- whatever the compiler raises is the finding
            launched.append(
                Compiled(
                    self.__name__, driver.capability, 0, 0, 0, 0, error=f"{type(error).__name__}: {error}"
                )
            )
            return None
        cubin = kernel.asm["cubin"]
        registers, spilled = _resources(cubin)
        launched.append(
            Compiled(
                self.__name__,
                driver.capability,
                kernel.metadata.num_warps,
                registers,
                spilled,
                kernel.metadata.shared,
                _spills_in_loops(cubin) if spilled else 0,
            )
        )
        return kernel

    JITFunction.run = run
    cases = {}
    for case, launch in module.LAUNCHES.items():
        for driver.capability in getattr(module, "CAPABILITIES", CAPABILITIES):
            launch()
        cases[case] = [asdict(kernel) for kernel in launched]
        launched.clear()
    return cases


if __name__ == "__main__":
    print(json.dumps(_compile_all(sys.argv[1])))
