"""How one setting's value is read, whatever layer it comes from, and shown.

So `--kv-memory 2GiB`, `RADIXGATE_KV_MEMORY=2GiB` and `kv_memory = "2GiB"` mean the same and fail with the same words.
Every reader raises ValueError with what it expected.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "bfloat16", "float16", "float32")
_BINARY_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_UNITS = _BINARY_UNITS | {
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}

Reader = Callable[[object], Any]


def parse_size(value: object) -> int:
    """Bytes of `2GiB`, `1.5 GB`, `512m` or a whole number. Raises ValueError."""
    if type(value) is int and value > 0:
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(value).lower())
    if type(value) is bool or match is None or match[2] not in _UNITS or float(match[1]) == 0:
        raise ValueError("expected a size such as 2GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def format_size(n_bytes: int) -> str:
    """`2.0 GiB`, `512.0 MiB`: for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024 or unit == "GiB":
            return f"{n_bytes} B" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes = n_bytes / 1024  # type: ignore[assignment]
    raise AssertionError("unreachable")


def has_password(url: str) -> bool:
    return urlsplit(url).password is not None


def redact_url(url: str) -> str:
    """The URL without its password."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    return urlunsplit(parts._replace(netloc=f"{parts.username or ''}:***@{parts.netloc.rpartition('@')[2]}"))


def _whole(low: int, high: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        text = str(value).strip()
        if type(value) is bool or not re.fullmatch(r"\d{1,12}", text) or not low <= int(text) <= high:
            raise ValueError(f"expected a whole number from {low} to {high}")
        return int(text)

    return read


def _seconds(value: object) -> float:
    if type(value) is bool or not re.fullmatch(r"\d{1,7}(\.\d+)?", str(value).strip()) or float(str(value)) <= 0:
        raise ValueError("expected a number of seconds above zero")
    return float(str(value))


def _text(value: object) -> str:
    if not isinstance(value, str) or not value.strip() or "\0" in value or "\n" in value:
        raise ValueError("expected a text that is not empty")
    return value.strip()


def _device(value: object) -> str | None:
    device = _text(value)
    if device not in DEVICES:
        raise ValueError(f"expected one of {', '.join(DEVICES)}")
    return None if device == "auto" else device


def _dtype(value: object) -> str | None:
    if value not in DTYPES:
        raise ValueError(f"expected one of {', '.join(DTYPES)}")
    return None if value == "auto" else str(value)


def _redis_url(value: object) -> str:
    url = _text(value)
    if not re.match(r"(rediss?|valkeys?|unix)://.", url):
        raise ValueError("expected redis://HOST:PORT/DB, rediss://... or unix:///PATH")
    return re.sub(r"^valkey", "redis", url)


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise ValueError("expected a list of names")
    return tuple(_text(name) for name in value)


def read_sources(value: object) -> tuple[str, ...]:
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise ValueError("expected model names, files or hub ids")
    return tuple(_text(item) for item in items)


SERVER_KEYS: dict[str, Reader] = {
    "host": _text,
    "port": _whole(0, 65535),
    "data_dir": lambda value: Path(_text(value)).expanduser(),
    "redis_url": _redis_url,
    "block_size": _whole(1, 256),
    "max_batch_tokens": _whole(1, 10**7),
    "max_sequences": _whole(1, 10**6),
    "workers": _whole(1, 64),
    "stall_s": _seconds,
    "drain_s": _seconds,
}
SHARED_KEYS: dict[str, Reader] = {
    "kv_memory": parse_size,
    "kv_blocks": _whole(1, 10**9),
    "dtype": _dtype,
    "device": _device,
}
"""May stand at the top, for every model, or in one [[model]] entry."""
ENTRY_KEYS: dict[str, Reader] = {
    "name": _text,
    "source": _text,
    "aliases": _names,
    "max_model_len": _whole(1, 10**8),
    **SHARED_KEYS,
}
