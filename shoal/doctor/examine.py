"""The list of checks, and a run of all of them that ends whatever they meet.

A check that breaks, or has no end, counts as asked for: what it would have looked at may well have been, and
a good verdict must not stand on what nobody has seen.

A check is a function that gets what the user asked for and yields findings. A new one is a function in the
file of its topic, and its entry in CHECKS.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from shoal.doctor import fleet_file, gpu, libraries, machine, network
from shoal.doctor.finding import CheckTarget, Finding, Findings, fails

LIMIT_S = 15.0


@dataclass(frozen=True, slots=True)
class Check:
    """`limit_s`: seconds after which the check is abandoned, which is a finding."""

    look: Callable[[CheckTarget], Findings]
    limit_s: float = LIMIT_S

    @property
    def name(self) -> str:
        return self.look.__name__.replace("_", " ")


CHECKS: tuple[Check, ...] = (
    Check(fleet_file.tables),
    Check(machine.system),
    Check(machine.memory),
    Check(machine.open_files),
    Check(machine.locked_memory),
    Check(machine.shared_memory),
    Check(machine.folders),
    Check(machine.compiler),
    Check(machine.compiled_python),
    Check(machine.clock),
    Check(gpu.driver),
    Check(gpu.torch, gpu.PROBE_LIMIT_S + 5),
    Check(gpu.nvcc),
    Check(libraries.required),
    Check(libraries.extras, 2 * libraries.TRIAL_LIMIT_S),
    Check(network.ports),
    Check(network.plane),
    Check(network.workers),
    Check(network.kubernetes),
    Check(network.ray),
    Check(fleet_file.gpus_of_workers),
    Check(fleet_file.programs),
    Check(fleet_file.models, 30),
)


@dataclass
class _Run:
    """One check in a thread of its own. A thread that hangs is left behind; it does not keep the process."""

    check: Check
    found: list[Finding] = field(default_factory=list)

    def start(self, asked: CheckTarget) -> threading.Thread:
        thread = threading.Thread(target=self._look, args=(asked,), name=self.check.name, daemon=True)
        thread.start()
        return thread

    def _look(self, asked: CheckTarget) -> None:
        try:
            for finding in self.check.look(asked):
                self.found.append(finding)
        except Exception as error:  # noqa: BLE001   a check that breaks is a finding, and the others continue
            what = f"the check broke: {type(error).__name__}: {error}"
            means = "Nothing is known of this."
            self.found.append(fails(self.check.name, what, means, "Please report it."))


def examine(asked: CheckTarget, checks: Sequence[Check] = CHECKS) -> Iterator[Finding]:
    """Runs all checks side by side and yields what they find, in their order, as soon as it is there. Returns
    within the longest of their limits."""
    began = time.monotonic()
    runs = [_Run(check) for check in checks]
    threads = [run.start(asked) for run in runs]
    for run, thread in zip(runs, threads):
        thread.join(max(0.0, began + run.check.limit_s - time.monotonic()))
        yield from tuple(run.found)
        if thread.is_alive():
            what = f"no answer within {run.check.limit_s:g} s"
            means = "Something that it looks at hangs: a disk, a server, a driver."
            yield fails(run.check.name, what, means, "Look at that by hand.")
