"""Errors as clients see them: a status and OpenAI's error object, and never a stack trace."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping

import msgspec

from shoal.errors import (
    BusyError,
    EngineDeadError,
    ShoalError,
    UnavailableError,
    UnknownWorkerError,
    UserError,
)

logger = logging.getLogger(__name__)

ROOT = re.compile(r"([a-z_]*)((?:\[\d+\])?)")
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code
NO_NAMES: Mapping[str, str] = {}

RETRY_SECONDS = 1  # for Retry-After: queues here move on within that time
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(ShoalError):
    """An error as the answer to a request. param: the wrong field of the request. code: OpenAI's code for
    the error, if there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", str(RETRY_SECONDS))

    @property
    def kind(self) -> str:
        return TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")

    def body(self) -> bytes:
        return msgspec.json.encode(
            {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}
        )


def context_overflow(
    limit: int, num_tokens: int, max_tokens: int | None = None, *, embeds: bool = False
) -> ApiError:
    """Returns the error of a prompt of `num_tokens` tokens or more that leaves no room in the model's context
    of `limit` tokens: for any output, or for the `max_tokens` that are asked for if the prompt itself fits.
    embeds: the request asks for no output. Agents shorten their conversation when they read these words,
    which are vLLM's and OpenAI's."""
    message = f"This model's maximum context length is {limit} tokens. However, you requested "
    if embeds:
        message += (
            f"{num_tokens} tokens in the input for embedding generation. Please reduce the length of the "
            "input, or set truncate_prompt_tokens."
        )
    else:
        output = 1 if max_tokens is None else max_tokens
        message += (
            f"{output} output tokens and your prompt contains at least {num_tokens} input tokens, for a "
            f"total of at least {num_tokens + output} tokens. Please reduce the length of the input prompt "
            "or the number of requested output tokens."
        )
    field = "prompt" if num_tokens >= limit else "max_tokens"
    return ApiError(400, message, param=field, code=CONTEXT_EXCEEDED)


def to_api_error(error: BaseException, names: Mapping[str, str] = NO_NAMES) -> ApiError:
    """Returns the error that a client gets for an exception of a handler. An unforeseen exception is
    logged with its stack, which the client does not get. names: see Exchange."""
    if isinstance(error, ApiError):
        error.param = names.get(error.param or "", error.param)
        return error
    if isinstance(error, UnknownWorkerError):
        return ApiError(404, str(error), param="id")
    if isinstance(error, UserError):
        message, field = str(error), error.field
        if field is not None:
            root, index = ROOT.match(field).groups()  # type: ignore[union-attr]
            if root in names:
                renamed = names[root] + index
                if message.startswith(field):
                    message = renamed + message.removeprefix(field)
                field = renamed
        return ApiError(400, message, param=field)
    if isinstance(error, RecursionError):
        return ApiError(400, "something in the request is nested too deeply; flatten it")
    if isinstance(error, BusyError):
        return ApiError(429, str(error), headers={"retry-after": str(math.ceil(error.retry_after_s))})
    if isinstance(error, UnavailableError):
        return ApiError(503, str(error))
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead")
    logger.error("a request failed", exc_info=error)
    return ApiError(500, "an internal error; the server's log has the details")
