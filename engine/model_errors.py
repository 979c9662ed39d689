"""What can be wrong with a model at start. Every message says what was wrong, what was expected and what to do."""

from __future__ import annotations

from typing import ClassVar

from engine.errors import StartError


class ModelError(StartError):
    """A model that cannot be served. `code` names the kind for programs."""

    kind: ClassVar[str] = "model_error"

    def __init__(self, message: str) -> None:
        super().__init__(self.kind, message)


class ModelNotFound(ModelError):
    """The source names nothing that is here or that could be fetched."""

    kind = "model_not_found"


class UnsupportedModel(ModelError):
    """A real model that this engine would serve wrongly, so it does not serve it."""

    kind = "unsupported_model"


class BrokenModel(ModelError):
    """Files that are missing, cut short or contradict each other."""

    kind = "broken_model"


class DiskFull(ModelError):
    """No room for the converted model."""

    kind = "disk_full"


class KVMemoryTooSmall(ModelError):
    """The KV pool does not fit, or fits not one block."""

    kind = "kv_memory_too_small"


class ConflictingPackage(ModelError):
    """The environment holds a package that takes the place of one of ours."""

    kind = "conflicting_package"
