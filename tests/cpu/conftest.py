"""Kernels run in Triton's interpreter here: there is no GPU. triton_compile.py compiles them for one, in a process of its own."""

import os

os.environ["TRITON_INTERPRET"] = "1"              # read when triton is first imported, so before any test module is
os.environ.setdefault("OMP_NUM_THREADS", "1")     # tiny tensors: threads would only wait for each other
