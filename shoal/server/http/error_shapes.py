"""Bodies of errors, in OpenAI's shape."""

from __future__ import annotations

from msgspec import Struct


class Error(Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(Struct):
    error: Error
