"""`shoal doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Iterable
from typing import Any

from shoal.config import DEFAULT_MODEL, ServerConfig
from shoal.doctor.examine import examine
from shoal.doctor.finding import CheckTarget, Finding, Verdict
from shoal.errors import ConfigError
from shoal.fleet.config import FleetConfig
from shoal.fleet.file.fleet_file import FleetFile, NativeWorkers, read_fleet_file
from shoal.fleet.planner.config import PlannerConfig

WIDTH = 80
VERDICT_WIDTH = 13
WORDS = {Verdict.WORKS: "works", Verdict.LIMITED: "limited", Verdict.FAILS: "will not work"}


def doctor(file: str | None, given: dict[str, Any], as_json: bool, shows_all: bool = False) -> int:
    """Examines this machine and prints the findings; returns 1 if a requested thing will not work. `file`: a
    fleet's; else `given` has the options of one worker: model, device, port, plane, fleet_key_file.
    shows_all: also explain missing things that were not requested. Raises ConfigError for invalid options."""
    if file is not None and given:
        names = ", ".join(sorted(given))
        raise ConfigError(f"{names}: {file} says that; leave it out, or leave out the file")
    findings: list[Finding] = []
    asked = what_is_asked(file, given)
    for finding in examine(asked):
        findings.append(finding)
        if not as_json and (shows_all or not is_idle(finding)):
            print(shown(finding), flush=True)
    failed = [finding for finding in findings if finding.is_asked and finding.verdict is Verdict.FAILS]
    if as_json:
        report = {"works": not failed, "findings": [dataclasses.asdict(finding) for finding in findings]}
        print(json.dumps(report, indent=2))
    else:
        idle = [finding.about for finding in findings if is_idle(finding)]
        if idle and not shows_all:
            print(
                "\n".join(
                    _wrapped(f"not there, and not asked for (--all explains): {', '.join(idle)}", "", 0)
                )
            )
        print("\n" + summary(failed, findings))
    return 1 if failed else 0


def is_idle(finding: Finding) -> bool:
    """True if the thing does not work and no request needs it."""
    return finding.verdict is Verdict.FAILS and not finding.is_asked


def what_is_asked(file: str | None, given: dict[str, Any]) -> CheckTarget:
    """Returns the target of the checks. A file that cannot be read becomes a finding. Raises ConfigError."""
    if file is not None:
        try:
            return CheckTarget(read_fleet_file(file), file)
        except ConfigError as error:
            return CheckTarget(_one_worker({}), file, str(error))
    return CheckTarget(_one_worker(given), given=frozenset(given))


def _one_worker(given: dict[str, Any]) -> FleetFile:
    """Returns a fleet of one worker, as `shoal serve` with these options. Raises ConfigError."""
    options = {name: given[name] for name in ("device",) if name in given}
    worker = NativeWorkers(given.get("model", DEFAULT_MODEL), options=options)
    server = ServerConfig(**{name: given[name] for name in ("port",) if name in given})
    router = FleetConfig(**{name: given[name] for name in ("plane", "fleet_key_file") if name in given})
    return FleetFile([worker], server, router, PlannerConfig())


def shown(finding: Finding) -> str:
    """Returns a finding as lines for a terminal of WIDTH columns, without colours."""
    word = WORDS[finding.verdict]
    if is_idle(finding):
        word = "no"
    lines = _wrapped(f"{finding.about}: {finding.found}", f"{word:<{VERDICT_WIDTH}} ", VERDICT_WIDTH + 1)
    for text, mark in ((finding.means, ""), (finding.remedy, "-> ")):
        if text:
            lines += _wrapped(text, " " * (VERDICT_WIDTH + 1) + mark, VERDICT_WIDTH + 1 + len(mark))
    return "\n".join(lines)


def _wrapped(text: str, first: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def summary(failed: Iterable[Finding], findings: Iterable[Finding]) -> str:
    names = ", ".join(dict.fromkeys(finding.about for finding in failed))
    num_limited = sum(finding.is_asked and finding.verdict is Verdict.LIMITED for finding in findings)
    if names:
        lines = _wrapped(f"This will not work: {names}.", "", 0)
    else:
        lines = [
            "What you asked for works" + (f"; {num_limited} limits are named above." if num_limited else ".")
        ]
    return "\n".join(lines)
