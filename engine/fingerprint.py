"""Short digests of model files, without reading all of them.

A digest takes the names, sizes and headers of the files and one page of every tensor. That tells apart any two models
that anyone trained, tuned, merged or quantized: each of these changes the sizes, the header or nearly every number of
the tensors it touches, and no tensor goes unsampled. It is no seal against a forger; whoever may write to the model's
folder already decides what is served.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from engine.model_errors import BrokenModel

PAGE_BYTES = 4096
EVEN_PAGES = 512
MAX_HEADER_BYTES = 100 * 1024 * 1024


def revision(folder: Path, *parts: str) -> str:
    """16 hex digits for the weights and configuration in `folder` and for `parts` (dtypes): two revisions never share
    KV blocks. Raises BrokenModel for a weights file without a readable header."""
    digest = hashlib.sha256(json.dumps(parts).encode())
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for path in weight_files(folder):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(_sampled(path, _tensor_pages(path) if path.suffix == ".safetensors" else None))
    return digest.hexdigest()[:16]


def file_digest(path: Path, *parts: str) -> str:
    """16 hex digits for one large file: its size, its first megabyte and evenly spaced pages."""
    digest = hashlib.sha256(json.dumps([path.stat().st_size, *parts]).encode())
    with path.open("rb") as file:
        digest.update(file.read(1024 * 1024))
    digest.update(_sampled(path, None))
    return digest.hexdigest()[:16]


def weight_files(folder: Path) -> list[Path]:
    """The weights in the format that is loaded: safetensors where there are any."""
    return sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin"))


def _sampled(path: Path, offsets: Iterable[int] | None) -> bytes:
    """Digest of a page at every offset; evenly spaced pages, the last one among them, when none are given."""
    size = path.stat().st_size
    if offsets is None:
        last = max(size - PAGE_BYTES, 0)
        offsets = sorted({last * i // (EVEN_PAGES - 1) for i in range(EVEN_PAGES)})
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            digest.update(file.read(PAGE_BYTES))
    return digest.digest()


def _tensor_pages(path: Path) -> list[int]:
    """Where the header lies, page by page, and the middle of every tensor."""
    with path.open("rb") as file:
        header_bytes, header = _read_header(file, path)
    data_start = 8 + header_bytes
    offsets = list(range(0, data_start, PAGE_BYTES))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = tensor["data_offsets"]
            offsets.append(data_start + begin + max(end - begin - PAGE_BYTES, 0) // 2)
    return sorted(offsets)


def _read_header(file: BinaryIO, path: Path) -> tuple[int, dict]:
    try:
        n_bytes = int.from_bytes(file.read(8), "little")
        if n_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {n_bytes} bytes")
        header = json.loads(file.read(n_bytes))
        ends = [tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise BrokenModel(f"{path} is not a safetensors file: {error}; fetch it again") from error
    expected = 8 + n_bytes + max(ends, default=0)
    if path.stat().st_size < expected:
        raise BrokenModel(f"{path} has {path.stat().st_size} bytes of {expected}: it was cut short; fetch it again")
    return n_bytes, header
