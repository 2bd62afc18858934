"""The tree of errors.

ShoalError
    UserError (also a ValueError)   an error of the caller: names the value, the limit and the way out
        ConfigError                 an option of the engine
        RequestError                a prompt or a sampling parameter
        CheckpointError             a model folder, a file in it, a tensor in that
        UnknownWorkerError          no worker of the fleet has this id
    UnavailableError                not now: asleep, paused, full, ending; says when to try again
        BusyError                   every worker and the queue are full
        WorkerFailedError           a worker of the fleet failed; another may take the request
    EngineDeadError                 the engine has ended: a rank died, the device failed
    NoFreeBlocksError               a pool of KV blocks has too few free blocks; none was taken
"""

MAX_MESSAGE = 2000  # most characters of a CheckpointError


class ShoalError(Exception):
    """Base of all exceptions that Shoal raises on purpose."""


class UserError(ShoalError, ValueError):
    """An error that the caller can correct. The message names the value, the limit and the way out. `field`:
    the path of the wrong field of a request, such as `messages[0].role`; None if no field is wrong."""

    field: str | None = None

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ConfigError(UserError):
    """Raised for an option that is unknown, impossible, or in conflict with the model or the machine."""


class RequestError(UserError):
    """Raised for an impossible prompt, sampling parameter or other field. Other requests are not affected."""


class CheckpointError(UserError):
    """Raised for a checkpoint that is missing, damaged, or of an unsupported architecture.

    The message may quote an untrusted file, so it is made safe for a terminal, a log and UTF-8: unprintable
    characters are escaped, and the middle of a long message is left out.
    """

    def __init__(self, message: str) -> None:
        shown = "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in message])
        half = MAX_MESSAGE // 2 - 3
        super().__init__(shown if len(shown) <= MAX_MESSAGE else f"{shown[:half]} ... {shown[-half:]}")


class UnavailableError(ShoalError, RuntimeError):
    """Raised if the engine is alive but takes no such request now: it is asleep, paused, full or ending."""


class UnknownWorkerError(UserError):
    """Raised for an id that no worker of the fleet has."""


class BusyError(UnavailableError):
    """Raised if all workers for the request and the queue are full. The client may retry in `retry_after_s`
    seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerFailedError(UnavailableError):
    """Raised if a worker of the fleet closed the stream, died or sent an invalid answer. Another worker may
    take the request. `is_absent`: its address refuses connections, so other requests need not try it."""

    def __init__(self, message: str, is_absent: bool = False) -> None:
        super().__init__(message)
        self.is_absent = is_absent


class EngineDeadError(ShoalError, RuntimeError):
    """Raised once the engine has ended: a rank died or the device failed. Build a new one."""


class NoFreeBlocksError(ShoalError):
    """Raised if a pool of KV blocks has too few free blocks. None was taken; the caller may retry after
    others have released blocks."""
