"""The first module of the core's process: `python -m shoal.engine.process.core_entry FOLDER LOG_LEVEL
LOG_STYLE DEVICE`. It opens the GPU while core_main.py imports torch, and postpones full garbage collections.
"""

from __future__ import annotations

import sys

from shoal.engine.early_device import open_device_early
from shoal.engine.turns import only_young_garbage


def main() -> None:
    with only_young_garbage:
        open_device_early(sys.argv.pop())
        from shoal.engine.process import core_main
    core_main.main()


if __name__ == "__main__":
    main()
