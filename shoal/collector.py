"""Collector: one request's outputs, between who receives them and the reader of its stream. Torch-free."""

from __future__ import annotations

import asyncio

from shoal.api import Output
from shoal.errors import ShoalError


class Collector:
    """One request's outputs on their way to a reader. Outputs that a slow reader leaves waiting are merged,
    so there is one at most."""

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
        """Outputs that were put before are still delivered."""
        self.error = error
        self._wake()

    async def get(self) -> Output:
        """All that has come since the last call. Waits if nothing has. Raises the error that `fail` was
        given, once all outputs are delivered."""
        while self.output is None:
            if self.error is not None:
                # Many share this error. Without this each raise would add its frames to it, for ever.
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
    """Makes `first` what both say."""
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
