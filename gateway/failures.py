"""Why `radixgate serve` cannot start or go on. Each has an exit code of its own, so a script can tell them apart."""

from __future__ import annotations


class ServeError(Exception):
    """Ends the server. The message says what is wrong, what was expected and what to do."""

    exit_code = 1


class AddressUnavailable(ServeError):
    """The host and port cannot be listened on."""

    exit_code = 2


class DataDirUnusable(ServeError):
    """The data directory cannot be written, is locked, full, or of another version."""

    exit_code = 3


class ChildFailed(ServeError):
    """A model cannot be served, or a process will not start."""

    exit_code = 4


class DoesNotFit(ServeError):
    """A model, or the models together, need more memory than there is."""

    exit_code = 5


class RedisUnusable(ServeError):
    """Redis does not answer, is too old, or does not start."""

    exit_code = 6


_BY_CODE: dict[str, type[ServeError]] = {
    "kv_memory_too_small": DoesNotFit,
    "model_does_not_fit": DoesNotFit,
    "disk_full": DataDirUnusable,
}


def child_failure(code: str, message: str) -> ServeError:
    """The error for a child's own word that it cannot start; `code` is its `failed` line's."""
    return _BY_CODE.get(code, ChildFailed)(message)
