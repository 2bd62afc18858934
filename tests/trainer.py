"""A trainer in a process of its own: `python -m tests.trainer MODE CHECKPOINT DEVICE PORT WORLD_SIZE`. It sends
the checkpoint's tensors from DEVICE in the way that MODE names.

share: prints the handles of shared tensors, waits for a line, ends. shoal: broadcasts over a WeightsGroup.
torch: broadcasts over a group built as RL frameworks do for SGLang and vLLM. die: joins, sends one tensor and
ends. Groups are NCCL's on a GPU and Gloo's on the CPU.
"""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shoal.weights.transfer import Handle, SharedTensors, WeightsGroup

NAME = "weight_update_group"
ROOT = Path(__file__).parents[1]


# For tests


def start(
    mode: str, checkpoint: Path, device: str = "cpu", port: int = 0, world_size: int = 0
) -> subprocess.Popen[str]:
    arguments = [mode, str(checkpoint), device, str(port), str(world_size)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.trainer", *arguments],
        cwd=ROOT,
        env=env,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )


def shared_handles(process: subprocess.Popen[str]) -> list[Handle]:
    """Output of a trainer with the mode "share"."""
    assert process.stdout is not None
    return msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()))


def described(checkpoint: Path) -> tuple[list[str], list[torch.dtype], list[list[int]]]:
    """Names, dtypes and shapes of the tensors, in the order in which a trainer sends them."""
    weights = load_file(checkpoint / "model.safetensors")
    return list(weights), [w.dtype for w in weights.values()], [list(w.shape) for w in weights.values()]


# The process


def main() -> None:
    mode, checkpoint, name, port, world_size = sys.argv[1:]
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    weights = load_file(os.path.join(checkpoint, "model.safetensors"), device=name)
    if mode == "share":
        with SharedTensors(weights) as shared:
            print(msgspec.msgpack.encode(shared.handles).hex(), flush=True)
            sys.stdin.readline()
        return
    backend = "nccl" if device.type == "cuda" else "gloo"
    if mode == "torch":
        group = framework_group(backend, int(port), int(world_size))
        for tensor in weights.values():
            dist.broadcast(tensor, 0, group=group)
    else:
        trainer = WeightsGroup(
            "127.0.0.1", int(port), 0, int(world_size), NAME, backend, device, timeout_s=120
        )
        if mode == "die":
            trainer.send(dict(list(weights.items())[:1]))
            os._exit(1)
        trainer.send(weights)
    sys.stdin.readline()  # the store lives here: it must not go before the others have ended


def framework_group(backend: str, port: int, world_size: int) -> dist.ProcessGroup:
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous

    timeout = timedelta(seconds=120)
    store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size, rank, [], backend, PrefixStore(NAME, store), group_name=NAME, timeout=timeout
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


if __name__ == "__main__":
    main()
