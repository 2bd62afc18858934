"""Shared parts of the simulator's benchmarks: the load that planners are tried on, tables and plots."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from shoal.fleet.planner.config import PlannerConfig
from shoal.fleet.simulator.config import SimConfig, SimWorkers

TARGETS: dict[str, Any] = {"ttft": 1.0, "itl": 0.1}
BUDGET = 12  # GPUs


def sized_fleet(count: int, start_s: float, planner: dict[str, Any]) -> SimConfig:
    """Returns a fleet of `count` H200s with qwen3-32b, which a planner with these options scales."""
    return SimConfig(
        "qwen3-32b",
        workers=[SimWorkers(count)],
        worker_start_s=start_s,
        planner=PlannerConfig(**TARGETS, **planner),
    )


def parser_of(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--images", type=Path, help="draw the plots into this folder")
    return parser


def write(file: Path | None, figures: Any) -> None:
    """Writes the figures if a file is given."""
    if file is not None:
        file.write_text(json.dumps(figures, indent=1) + "\n")


def note(row: dict[str, Any]) -> None:
    """A run that has ended, for a person who waits."""
    print(row, file=sys.stderr, flush=True)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def subplots(columns: int, width: float, height: float, **more: Any) -> tuple[Any, Any]:
    """A figure without a screen, and its axis or axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(1, columns, figsize=(width, height), **more)


def save(figure: Any, file: Path) -> None:
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(file, dpi=110, metadata={"Software": None})
