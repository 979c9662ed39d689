"""Every setting of the server in one typed record. `gateway.setting_layers.load` makes it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

DEFAULT_MODEL = "smollm2-135m"


class SettingsError(Exception):
    """A setting that cannot be used: which one, where it came from, what was expected."""


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model, served by an engine process of its own. None leaves a choice to the engine."""

    name: str
    """What a request says in `model`."""
    source: str
    """A built-in name, a GGUF file, a Hugging Face directory or a hub id."""
    aliases: tuple[str, ...] = ()
    device: str | None = None
    dtype: str | None = None
    kv_memory: int | None = None
    """Bytes of KV cache; excludes kv_blocks."""
    kv_blocks: int | None = None
    max_model_len: int | None = None

    @property
    def file_name(self) -> str:
        """The name as part of a file's name: hub ids hold a slash."""
        return re.sub(r"[^A-Za-z0-9._-]", "_", self.name)


@dataclass(frozen=True)
class Settings:
    """The server's settings. Sizes are in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8080
    data_dir: Path = Path(".radixgate")
    redis_url: str | None = None
    """None runs an embedded Valkey in the data directory."""
    models: tuple[ModelSettings, ...] = (ModelSettings(DEFAULT_MODEL, DEFAULT_MODEL),)
    block_size: int = 16
    """Tokens in one block of the KV cache."""
    max_batch_tokens: int = 512
    """Tokens that one step computes at most."""
    max_sequences: int = 64
    """Sequences that run at the same time at most, per model."""
    workers: int = 1
    stall_s: float = 60.0
    """An engine whose work has waited this long without a finished step is replaced."""
    drain_s: float = 30.0
    """How long requests in flight may take to end when the server is stopped."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Setting -> where its value came from; what is not here is a default. Models' are `model.NAME.setting`."""

    @property
    def run_dir(self) -> Path:
        return self.data_dir / "run"

    @property
    def status_path(self) -> Path:
        return self.run_dir / "status.json"

    def to_json(self) -> str:
        """All of it, secrets included: for a private file that a worker reads."""
        return json.dumps({**asdict(self), "data_dir": str(self.data_dir), "origins": dict(self.origins)})

    @classmethod
    def from_json(cls, text: str) -> Settings:
        record = json.loads(text)
        models = tuple(ModelSettings(**{**model, "aliases": tuple(model["aliases"])}) for model in record.pop("models"))
        return cls(**{**record, "data_dir": Path(record["data_dir"]), "models": models})
