"""The oracles of these tests run on the CPU, and are tiny."""

import os

import pytest

# read when torch is first imported: 32 threads a process only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")


def others_on_the_card(uuid):
    """Returns the number of other processes with memory on this GPU, or None without NVML."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        pids = {process.pid for process in pynvml.nvmlDeviceGetComputeRunningProcesses(card)}
    except pynvml.NVMLError:
        return None
    # In a container the numbers may be another machine's, so they are counted, with this process as one.
    return max(0, len(pids) - 1)


@pytest.fixture
def alone_on_the_card():
    """For tests that compare the card's free memory before and after, which anybody else's engine changes.
    They are skipped where another process holds memory of the card when they begin."""
    import torch

    torch.zeros(1, device="cuda")  # from now on this process is counted
    if others := others_on_the_card(torch.cuda.get_device_properties(0).uuid):
        pytest.skip(
            f"compares the card's free memory, and {others} other processes use the card: run it alone"
        )
