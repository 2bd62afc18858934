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
    overwritten: int = 0  # registers of a wgmma's left operand that are written before the wait for it
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


def _matmul_loops(cubin: bytes) -> list[list[str]]:
    """The machine code of each loop, from a label to a jump back to it, that has matmuls of tensor cores."""
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
        lines = subprocess.run(
            [str(tool), file.name], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    labels = {line.partition(":")[0]: i for i, line in enumerate(lines) if line.startswith(".L_")}
    loops = []
    for end, line in enumerate(lines):
        jump = re.search(r"\bBRA.*`\((\.L_\w+)\)", line)
        start = end if jump is None else labels.get(jump[1], end)
        if start < end and any("MMA" in inner for inner in lines[start:end]):
            loops.append(lines[start:end])
    return loops


def _overwritten(loop: list[str]) -> int:
    """Counts registers of a wgmma's left operand that an instruction of the same round or of the next one writes
    before a wait for that wgmma. What the wgmma reads then depends on timing."""
    found: set[tuple[int, int]] = set()
    under_way: list[range] = []
    for turn in range(2):
        for i, line in enumerate(loop):
            parts = re.search(r"\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*) (?:P\w+, )?(.*?) ?;", line)
            if parts is None:
                continue
            name, operands = parts[1], parts[2]
            if name.startswith("HGMMA"):
                left = re.match(r"R\d+, R(\d+),", operands)
                first = int(left[1]) if left else 0  # a left operand in shared memory has no registers
                under_way.append(range(first, first + 4) if left else range(0))
            elif name.startswith("WARPGROUP.DEPBAR"):
                most = int(operands.rpartition(" ")[2], 16)
                under_way = under_way[len(under_way) - most :] if most else []
            elif turn and (written := re.match(r"R(\d+)\b", operands)) and not name.startswith(("ST", "RED")):
                count = (
                    4 if "128" in name or name.endswith(".4") else 2 if "64" in name or "WIDE" in name else 1
                )
                ours = range(int(written[1]), int(written[1]) + count)
                found |= {(i, at) for regs in under_way for at in regs if at in ours}
    return len(found)


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
    examined: dict[str, Compiled] = {}
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
        if kernel.hash not in examined:
            cubin = kernel.asm["cubin"]
            registers, spilled = _resources(cubin)
            # It takes a third of a second, and the other kernels have nothing to look for.
            loops = _matmul_loops(cubin) if spilled or "wgmma" in kernel.asm["ptx"] else []
            examined[kernel.hash] = Compiled(
                self.__name__,
                driver.capability,
                kernel.metadata.num_warps,
                registers,
                spilled,
                kernel.metadata.shared,
                len({line for loop in loops for line in loop if re.search(r"\b(LDL|STL)\b", line)}),
                sum(_overwritten(loop) for loop in loops),
            )
        launched.append(examined[kernel.hash])
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
