"""`is_remote`: decides whether a prefill worker computes a prompt, by its uncached tokens and the queue.
Pure. native/disagg.py and the simulator apply it and send the prompt; the prefill workers' dispatcher chooses
one."""

from __future__ import annotations

# A prefill worker gets another prompt while it has at most this many tokens in flight. It then never idles
# between two prompts, and waiting prompts can still go to the worker that is free first.
TOKENS_AHEAD = 8192


def is_remote(
    num_tokens: int,
    num_cached: int,
    num_waiting: int,
    *,
    max_local_prefill_length: int,
    max_prefill_queue_size: int,
) -> bool:
    """Returns whether a prompt goes to a prefill worker. num_cached: tokens of it that the decode worker has.
    num_waiting: prompts that wait for a prefill worker."""
    is_long = num_tokens - num_cached > max_local_prefill_length
    return is_long and num_waiting < max_prefill_queue_size
