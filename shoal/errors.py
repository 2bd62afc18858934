"""The tree of errors.

ShoalError
    UserError (also a ValueError)   the caller's mistake: names the value, the limit and the way out
        ConfigError                 an option of the engine
        RequestError                a prompt or a sampling parameter
        CheckpointError             a model folder, a file in it, a tensor in that
        UnknownWorkerError          no worker of the fleet has this id
    UnavailableError                not now: asleep, paused, full, ending; says when to try again
        BusyError                   all that could take it are full
        WorkerFailedError           a worker of the fleet broke off; another may take the request
    EngineDeadError                 the engine cannot go on: a rank died, the device failed
    NoFreeBlocksError               a pool of KV blocks has too few that are free; nothing was taken
"""

MAX_MESSAGE = 2000  # characters of a CheckpointError


class ShoalError(Exception):
    """Base of everything Shoal raises on purpose."""


class UserError(ShoalError, ValueError):
    """The caller can mend it. The message names the value, the limit and the way out."""


class ConfigError(UserError):
    """An option of the engine is unknown, impossible, or at odds with the model or the machine."""


class RequestError(UserError):
    """A prompt or a sampling parameter is impossible. Other requests don't notice."""


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or of an architecture that is not supported.

    What it says may quote a stranger's file, so it is made fit for a terminal, a log and UTF-8: what cannot
    be printed is escaped, and the middle of a long message left out.
    """

    def __init__(self, message: str) -> None:
        shown = "".join([c if c.isprintable() else c.encode("unicode_escape").decode() for c in message])
        half = MAX_MESSAGE // 2 - 3
        super().__init__(shown if len(shown) <= MAX_MESSAGE else f"{shown[:half]} ... {shown[-half:]}")


class UnavailableError(ShoalError, RuntimeError):
    """The engine lives but takes no such request now: it sleeps, is paused, its queue is full, or it is
    ending."""


class UnknownWorkerError(UserError):
    """No worker of the fleet has this id."""


class BusyError(UnavailableError):
    """Whoever could take the request is full, and so is the queue. It may be sent again in `retry_after_s`
    seconds."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerFailedError(UnavailableError):
    """A worker of the fleet broke off, died or answered nonsense. Another one may take the request.
    `is_absent`: its address takes no connection, so nobody else need try."""

    def __init__(self, message: str, is_absent: bool = False) -> None:
        super().__init__(message)
        self.is_absent = is_absent


class EngineDeadError(ShoalError, RuntimeError):
    """The engine ended: a rank died or the device failed. Build a new one."""


class NoFreeBlocksError(ShoalError):
    """A pool of KV blocks has too few that are free. Nothing was taken; it may be tried again when others
    have released some."""
