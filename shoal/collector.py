"""Collector: one request's outputs, between the receiving loop and the reader of the stream. Torch-free."""

from __future__ import annotations

import asyncio

from shoal.api import Drafted, Output
from shoal.errors import ShoalError


class Collector:
    """Holds one request's outputs for a reader. Outputs that a slow reader has not read yet are merged, so it
    holds one at most."""

    def __init__(self) -> None:
        self.output: Output | None = None
        self.error: ShoalError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        if self.output is None:
            self.output = output
        else:
            merge(self.output, output)
        self._wake()

    def fail(self, error: ShoalError) -> None:
        """Fails the stream after the outputs that were put before."""
        self.error = error
        self._wake()

    async def get(self) -> Output:
        """Returns all outputs since the last call, merged. Waits without outputs. Raises the error of
        `fail`, once all outputs are delivered."""
        while self.output is None:
            if self.error is not None:
                # Many requests share this error, and each raise would add its frames to the traceback.
                raise self.error.with_traceback(None)
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self.output = self.output, None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(first: Output, then: Output) -> None:
    """Merges `then` into `first`."""
    if first.drafted is not None or then.drafted is not None:
        a, b = (one.drafted or Drafted(0, 0, [0] * len(one.token_ids)) for one in (first, then))
        steps, verified = a.num_steps + b.num_steps, a.num_verified + b.num_verified
        first.drafted = Drafted(steps, verified, a.places + b.places)
    first.token_ids += then.token_ids
    if then.logprobs is not None:
        first.logprobs = (first.logprobs or []) + then.logprobs
    first.prompt_logprobs = then.prompt_logprobs if first.prompt_logprobs is None else first.prompt_logprobs
    first.finish_reason, first.stop_reason, first.error = then.finish_reason, then.stop_reason, then.error
    if then.spans is not None:
        first.spans = (first.spans or []) + then.spans
    first.num_cached_tokens = max(first.num_cached_tokens, then.num_cached_tokens)
    first.embedding = then.embedding if first.embedding is None else first.embedding
    first.kv_ticket = then.kv_ticket if first.kv_ticket is None else first.kv_ticket
