"""A trainer's process: `python trainer.py MODE CHECKPOINT PORT [WORLD_SIZE]`. Sends the checkpoint's tensors
in the way that MODE names.

share: prints the handles of shared tensors as JSON, waits for a line, ends. shoal: broadcasts over a
WeightsGroup. torch: broadcasts over a group built as RL frameworks do for SGLang and vLLM. die: joins, sends
one tensor and ends.
"""

import json
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from shoal.weights.transfer import SharedTensors, WeightsGroup

NAME = "weight_update_group"


def main() -> None:
    mode, checkpoint, port = sys.argv[1:4]
    weights = load_file(os.path.join(checkpoint, "model.safetensors"))
    if mode == "share":
        with SharedTensors(weights) as shared:
            print(json.dumps(shared.handles), flush=True)
            sys.stdin.readline()
        return
    world_size = int(sys.argv[4])
    if mode == "torch":
        group = framework_group(int(port), world_size)
        for tensor in weights.values():
            dist.broadcast(tensor, 0, group=group)
    else:
        trainer = WeightsGroup(
            "127.0.0.1", int(port), 0, world_size, NAME, "gloo", torch.device("cpu"), timeout_s=120
        )
        if mode == "die":
            trainer.send(dict(list(weights.items())[:1]))
            os._exit(1)
        trainer.send(weights)
    sys.stdin.readline()  # the store lives here: it must not go before the others have ended


def framework_group(port: int, world_size: int) -> dist.ProcessGroup:
    from torch.distributed.distributed_c10d import PrefixStore, _new_process_group_helper, _world, rendezvous

    timeout = timedelta(seconds=120)
    store, rank, world_size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    store.set_timeout(timeout)
    group, _ = _new_process_group_helper(
        world_size, rank, [], "gloo", PrefixStore(NAME, store), group_name=NAME, timeout=timeout
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


main()
