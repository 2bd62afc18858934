"""Writes what a benchmark measured, with what it takes to repeat it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any


def write_json(path: str, rows: Any) -> None:
    import torch

    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    with open(path, "w") as file:
        json.dump(
            dict(
                gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
                torch=torch.__version__,
                commit=commit,
                date=time.strftime("%Y-%m-%d"),
                command=" ".join(sys.argv),
                rows=rows,
            ),
            file,
            indent=1,
        )
