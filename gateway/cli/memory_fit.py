"""Do all models fit in memory together? Each engine checks itself when it starts, but knows nothing of the others."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, NamedTuple

from engine.memory import allowed_bytes, default_kv_bytes
from engine.sources import PACKAGED
from gateway.cli.gguf_header import count_elements
from gateway.failures import DoesNotFit
from gateway.setting_values import format_size
from gateway.settings import ModelSettings, Settings

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class Need(NamedTuple):
    """What one model takes; 0 where that is not known before it is loaded."""

    name: str
    weight_bytes: int
    kv_bytes: int


def check_fit(settings: Settings, allowed: int | None = None) -> None:
    """Raises DoesNotFit when the models on the CPU need more than this process may use. A single one checks itself."""
    models = [model for model in settings.models if model.device != "cuda"]
    if len(models) < 2:
        return
    allowed = allowed_bytes() if allowed is None else allowed
    needs = [need_of(model, settings.block_size) for model in models]
    total = sum(need.weight_bytes + need.kv_bytes for need in needs)
    if total > allowed:
        parts = "; ".join(
            f"{need.name}: weights {format_size(need.weight_bytes)}, KV cache {format_size(need.kv_bytes)}"
            for need in needs
        )
        raise DoesNotFit(
            f"the models together need {format_size(total)} and {format_size(allowed)} may be used ({parts}); "
            "serve fewer models, or give less with kv_memory"
        )


def need_of(model: ModelSettings, block_size: int) -> Need:
    folder = Path(model.source).expanduser()
    config = _config(folder)
    if model.kv_memory is not None:
        kv_bytes = model.kv_memory
    elif model.kv_blocks is not None:
        kv_bytes = model.kv_blocks * block_size * _kv_bytes_per_token(config, model.dtype)
    else:
        kv_bytes = default_kv_bytes()
    return Need(model.name, _weight_bytes(model, folder, config), kv_bytes)


def _weight_bytes(model: ModelSettings, folder: Path, config: dict[str, Any]) -> int:
    width = _BYTES.get(model.dtype or "", 0)
    if folder.is_dir():
        stored = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        stored_width = _BYTES.get(str(config.get("dtype") or config.get("torch_dtype")), 4)
        return stored * (width or stored_width) // stored_width
    files = _packaged_files(model.source) if model.source in PACKAGED else [folder]
    return sum(_gguf_elements(file) for file in files if file.suffix == ".gguf" and file.is_file()) * (width or 2)


def _packaged_files(name: str) -> list[Path]:
    spec = importlib.util.find_spec(PACKAGED[name])
    places = (spec.submodule_search_locations or []) if spec else []
    return [file for place in places for file in Path(place).glob("*.gguf")]


def _gguf_elements(file: Path) -> int:
    try:
        return count_elements(file)
    except (ValueError, OSError):
        return 0  # the engine says what is wrong with it


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def _kv_bytes_per_token(config: dict[str, Any], dtype: str | None) -> int:
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        width = _BYTES.get(dtype or str(config.get("dtype") or config.get("torch_dtype")), 4)
        return int(2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim * width)
    except (KeyError, TypeError, ZeroDivisionError):
        return 0
