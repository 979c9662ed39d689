"""Where settings come from: flags over environment over radixgate.toml over defaults, each value with its origin."""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from gateway.setting_values import ENTRY_KEYS, SERVER_KEYS, SHARED_KEYS, Reader, format_size, read_sources, redact_url
from gateway.settings import DEFAULT_MODEL, ModelSettings, Settings, SettingsError

ENVIRONMENT_PREFIX = "RADIXGATE_"
DEFAULT_CONFIG_FILE = "radixgate.toml"
_OTHER_VARIABLES = ("URL", "ADMIN_KEY", "ADMIN_KEY_FILE", "CONFIG", "COMPLETE")
"""RADIXGATE_* variables that are not settings of the server."""
_RUN_KEYS: dict[str, Reader] = {**SERVER_KEYS, **SHARED_KEYS, "model": read_sources}
"""What a flag or a variable may set."""


class _Value(NamedTuple):
    value: Any
    origin: str


_Layer = dict[str, _Value]


def load(
    flags: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    config_file: Path | None = None,
) -> Settings:
    """The settings that hold for these flags (None: not given; `model` is a list), environment and file.

    `config_file` None takes RADIXGATE_CONFIG, or radixgate.toml in the current directory when there is one.
    Raises SettingsError.
    """
    environment = os.environ if environment is None else environment
    given = {key: value for key, value in (flags or {}).items() if value is not None and value != ()}
    flag_layer = _read(given, lambda key: f"flag --{key.replace('_', '-')}", _RUN_KEYS)
    environment_layer = _read_environment(environment)
    file_layer, entries = _read_file(config_file, environment)
    for_this_run = _overlay(environment_layer, flag_layer)
    everything = _overlay(file_layer, for_this_run)
    models, model_origins = _models(everything, for_this_run, entries)
    server = {key: everything[key] for key in SERVER_KEYS if key in everything}
    origins = {key: value.origin for key, value in server.items()} | model_origins
    return Settings(**{key: value.value for key, value in server.items()}, models=models, origins=origins)


def _overlay(*layers: _Layer) -> _Layer:
    """Each layer over those before it. kv_memory and kv_blocks say the same thing: the stronger layer's wins."""
    result: _Layer = {}
    for layer in layers:
        if "kv_memory" in layer and "kv_blocks" in layer:
            raise SettingsError(f"{layer['kv_memory'].origin} and {layer['kv_blocks'].origin} exclude each other")
        for key, other in (("kv_memory", "kv_blocks"), ("kv_blocks", "kv_memory")):
            if key in layer:
                result.pop(other, None)
        result |= layer
    return result


def _read(given: Mapping[str, Any], origin: Callable[[str], str], keys: Mapping[str, Reader]) -> _Layer:
    layer = {}
    for key, value in given.items():
        if key not in keys:
            raise SettingsError(f"{origin(key)}: there is no such setting{_nearest(key, keys)}")
        try:
            layer[key] = _Value(keys[key](value), origin(key))
        except ValueError as error:
            shown = redact_url(str(value)) if key == "redis_url" else str(value)
            raise SettingsError(f"{origin(key)}: {shown[:100]!r} cannot be used: {error}") from None
    return layer


def _nearest(key: str, keys: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(keys), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else f"; there are: {', '.join(sorted(keys))}"


def _read_environment(environment: Mapping[str, str]) -> _Layer:
    """Unknown variables are refused when they look like a slip of the pen; others may belong to somebody else."""
    given = {}
    for variable, value in environment.items():
        suffix = variable.removeprefix(ENVIRONMENT_PREFIX)
        if suffix == variable or suffix in _OTHER_VARIABLES or not value:
            continue
        key = suffix.lower()
        if key in _RUN_KEYS:
            given[key] = value
        elif near := difflib.get_close_matches(key, list(_RUN_KEYS), n=1, cutoff=0.8):
            meant = ENVIRONMENT_PREFIX + near[0].upper()
            raise SettingsError(f"{variable}: there is no such setting; did you mean {meant}?")
    return _read(given, lambda key: f"environment {ENVIRONMENT_PREFIX}{key.upper()}", _RUN_KEYS)


class _Entry(NamedTuple):
    layer: _Layer
    place: str


def _read_file(config_file: Path | None, environment: Mapping[str, str]) -> tuple[_Layer, list[_Entry]]:
    named = config_file or (Path(environment["RADIXGATE_CONFIG"]) if environment.get("RADIXGATE_CONFIG") else None)
    path = named or Path(DEFAULT_CONFIG_FILE)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if named is not None:
            raise SettingsError(f"{path}: there is no such file") from None
        return {}, []
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is not TOML: {error}") from None
    raw_entries = content.pop("model", [])
    if not isinstance(raw_entries, list) or not all(isinstance(entry, dict) for entry in raw_entries):
        raise SettingsError(f"{path}: `model` is not a list of tables; write each model under a line [[model]]")
    layer = _read(content, lambda key: f"{path}: {key}", {**SERVER_KEYS, **SHARED_KEYS})
    entries = []
    for number, raw in enumerate(raw_entries, 1):
        place = f"{path}: [[model]] {number}"
        entries.append(_Entry(_read(raw, lambda key, place=place: f"{place} {key}", ENTRY_KEYS), place))  # type: ignore[misc]
    return layer, entries


# --- models -----------------------------------------------------------------------------------------------------------


def _models(
    everything: _Layer, for_this_run: _Layer, entries: list[_Entry]
) -> tuple[tuple[ModelSettings, ...], dict[str, str]]:
    models: list[ModelSettings] = []
    origins: dict[str, str] = {}
    for entry in _wanted(everything, entries):
        # The file's top holds where an entry is silent; what was given for this run holds for every model.
        layer = _overlay(_shared(everything), entry.layer, _shared(for_this_run))
        model = ModelSettings(**{key: value.value for key, value in layer.items()})
        models.append(model)
        origins |= {f"model.{model.name}.{key}": value.origin for key, value in layer.items()}
    _check_names(models)
    return tuple(models), origins


def _shared(layer: _Layer) -> _Layer:
    return {key: value for key, value in layer.items() if key in SHARED_KEYS}


def _wanted(merged: _Layer, entries: list[_Entry]) -> list[_Entry]:
    """The entries to serve, each with a name and a source: those that --model names, or all of the file's."""
    complete = [_completed(entry) for entry in entries]
    if "model" not in merged:
        default = _Value(DEFAULT_MODEL, "default")
        return complete or [_Entry({"name": default, "source": default}, "default")]
    by_name = {entry.layer["name"].value: entry for entry in complete}
    origin = merged["model"].origin
    return [
        by_name.get(source) or _completed(_Entry({"source": _Value(source, origin)}, origin))
        for source in dict.fromkeys(merged["model"].value)
    ]


def _completed(entry: _Entry) -> _Entry:
    layer = dict(entry.layer)
    if "source" not in layer and "name" not in layer:
        raise SettingsError(f"{entry.place}: has no source; give a built-in name, a GGUF file, a directory or a hub id")
    layer.setdefault("source", layer.get("name", _Value("", "")))
    source = layer["source"]
    if "name" not in layer:
        layer["name"] = source._replace(value=model_name(source.value))
        if _is_hub_id(source.value):
            layer.setdefault("aliases", source._replace(value=(source.value,)))
    return _Entry(layer, entry.place)


def model_name(source: str) -> str:
    """The name a model goes by when none is given: its file's or folder's, a hub id's last part, or a built-in name."""
    if _is_hub_id(source):
        return source.partition("@")[0].rpartition("/")[2].lower()
    if "/" in source or source.endswith(".gguf") or Path(source).exists():
        return Path(source).expanduser().absolute().name.removesuffix(".gguf")
    return source


def _is_hub_id(source: str) -> bool:
    """owner/name or owner/name@revision, and no such thing on this disk."""
    owner, slash, name = source.partition("/")
    return (
        bool(slash and owner.strip(".~") and name and "/" not in name.partition("@")[0]) and not Path(source).exists()
    )


def _check_names(models: list[ModelSettings]) -> None:
    taken: dict[str, str] = {}
    files: dict[str, str] = {}
    for model in models:
        for name in (model.name, *model.aliases):
            if name in taken:
                raise SettingsError(f"the model name {name!r} is given twice: to {taken[name]} and to {model.source}")
            taken[name] = model.source
        if model.file_name in files:
            other = files[model.file_name]
            raise SettingsError(
                f"the model names {other!r} and {model.name!r} are the same once written as a file name"
            )
        files[model.file_name] = model.name


def describe(settings: Settings) -> list[tuple[str, str, str]]:
    """(setting, value, origin) of everything, secrets hidden: what `radixgate config show` prints."""
    rows = []
    for key in (item.name for item in fields(settings)):
        if key not in ("models", "origins"):
            rows.append((key, _shown(key, getattr(settings, key)), settings.origins.get(key, "default")))
    for model in settings.models:
        for key in ENTRY_KEYS:
            name = f"model.{model.name}.{key}"
            rows.append((name, _shown(key, getattr(model, key)), settings.origins.get(name, "default")))
    return rows


def _shown(key: str, value: object) -> str:
    if value is None:
        return "embedded Valkey" if key == "redis_url" else "automatic"
    if key == "redis_url":
        return redact_url(str(value))
    if key == "kv_memory" and isinstance(value, int):
        return format_size(value)
    return ", ".join(value) if isinstance(value, tuple) else str(value)
