"""Stands in for an engine's core where only its death matters: it answers each request with one token."""

import os
import sys
import threading

import zmq

from shoal import wire
from shoal.api import FinishReason, Output
from shoal.wire import Add, ModelInfo, Outputs, Ready


def end_with_parent():
    while os.read(0, 1):
        pass
    os._exit(0)


def main():
    threading.Thread(target=end_with_parent, daemon=True).start()
    context = zmq.Context()
    inbox, outbox = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket, name in ((inbox, "in"), (outbox, "out")):
        socket.connect(f"ipc://{sys.argv[1]}/{name}")
    inbox.recv()  # Start
    limits = {name: 1 for name in ("max_model_len", "vocab_size", "hidden_size", "num_blocks", "block_size")}
    model = {
        "model": "toy",
        "eos_token_ids": (),
        "generation_config": {},
        "device": "cpu",
        "dtype": "float32",
    }
    counts = {"max_num_seqs": 1, "kv_cache_tokens": 1, "kv_role": "", "kv_block_bytes": 1}
    outbox.send(wire.encode(Ready(ModelInfo(pid=os.getpid(), **limits, **model, **counts))))
    while True:
        message = wire.decode_to_core(inbox.recv())
        if isinstance(message, Add):
            output = Output(message.request.request_id, [1], finish_reason=FinishReason.LENGTH)
            outbox.send(wire.encode(Outputs([output])))


if __name__ == "__main__":
    main()
