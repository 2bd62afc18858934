"""The oracles of these tests run on the CPU, and are tiny."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")    # read when torch is first imported: 32 threads a process only wait for each other
