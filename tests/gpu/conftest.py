"""The oracles of these tests run on the CPU, and are tiny."""

import os

# read when torch is first imported: 32 threads a process only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
