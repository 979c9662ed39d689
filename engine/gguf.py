"""A GGUF file becomes a Hugging Face folder: bf16 safetensors, configuration, tokenizer and chat template.

Done once per file and kept in the data directory. The folder appears by one rename, so it is whole or not there; a lock
makes a second process wait for the first, and what a killed conversion left behind goes when the next one starts.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from engine.fingerprint import file_digest
from engine.model_errors import BrokenModel, DiskFull, ModelError, UnsupportedModel

Progress = Callable[[str, float], None]
"""progress(stage, fraction of this stage)"""

CONVERTER_VERSION = "1"
"""Part of the folder's name: another version converts again."""

_BPE_OF_GPT2 = frozenset({"gpt-2", "gpt2", "olmo", "phi-2", "mpt", "jais", "dbrx-gpt2"})
_BPE_WITH_SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Pre-tokenizers (llama.cpp's names) that cut every digit off before they split as GPT-2 does."""


def convert(gguf_file: Path, name: str, models_dir: Path, progress: Progress) -> Path:
    """The folder with the converted model, which may have been there before.

    Raises BrokenModel, UnsupportedModel or DiskFull; nothing is left in `models_dir` then.
    """
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-") or "model"
    folder = models_dir / f"{label}-{file_digest(gguf_file, CONVERTER_VERSION)}"
    if folder.is_dir():
        return folder
    _check_magic(gguf_file)
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f".{folder.name}.lock", progress):
            if folder.is_dir():
                return folder
            _remove_leftovers(models_dir, folder.name)
            with tempfile.TemporaryDirectory(prefix=f".{folder.name}.part-", dir=models_dir) as part:
                converted = Path(part) / "model"
                converted.mkdir()
                _write(gguf_file, converted, progress)
                _sync(converted)
                converted.rename(folder)
            _sync_folder(models_dir)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise _disk_full(models_dir, error) from error
        raise ModelError(f"cannot write the converted model to {models_dir}: {error}") from error
    return folder


def _check_magic(gguf_file: Path) -> None:
    with gguf_file.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise BrokenModel(f"{gguf_file} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'")


def _write(gguf_file: Path, folder: Path, progress: Progress) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    stage = "converting the GGUF file"
    progress(stage, 0.0)
    try:
        config = AutoConfig.from_pretrained(**source)
        progress(stage, 0.15)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        repair_tokenizer(tokenizer, gguf_file)
        progress(stage, 0.3)
        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        _check_room(sum(parameter.numel() for parameter in skeleton.parameters()) * 2, folder)
        # Straight to plain tensors: from_pretrained(gguf_file=...) may keep GGUF's blocks, which cannot be saved.
        weights = load_gguf_checkpoint(
            str(gguf_file), return_tensors=True, model_to_load=skeleton, torch_dtype=torch.bfloat16
        )["tensors"]
        progress(stage, 0.8)
        model, report = type(skeleton).from_pretrained(
            None, config=config, state_dict=weights, dtype=torch.bfloat16, output_loading_info=True
        )
    except ModelError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:  # the system's; transformers raises bare ones
            raise
        raise UnsupportedModel(
            f"{gguf_file} cannot be converted: {_first_line(error)}; take the model's Hugging Face folder instead"
        ) from error
    if report["missing_keys"]:
        missing = ", ".join(sorted(report["missing_keys"])[:3])
        raise BrokenModel(f"{gguf_file} lacks weights that its architecture needs: {missing}; fetch it again")
    with _as_os_error():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    progress(stage, 1.0)


def repair_tokenizer(tokenizer: Any, gguf_file: Path) -> None:
    """A GGUF names its pre-tokenizer and leaves its rules to the reader. Set the one that transformers leaves out.

    Raises UnsupportedModel for a name whose rules nobody here knows: a wrong split gives wrong ids, silently.
    """
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf import get_gguf_tokenizer

    description = get_gguf_tokenizer(str(gguf_file))[1]
    if description.get("tokenizer_type") != "gpt2":
        return
    rules = description.get("pre_tokenizer_type")
    if rules in _BPE_WITH_SINGLE_DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif rules not in _BPE_OF_GPT2 and rules not in _splits_known_to_transformers():
        raise UnsupportedModel(
            f"{gguf_file} splits text by the rules named {rules!r}, which are not known here; take the model's "
            "Hugging Face folder, which has them in its tokenizer.json"
        )


def _splits_known_to_transformers() -> frozenset[str]:
    from transformers.integrations.gguf import gguf_tokenizer_mapping

    return frozenset(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS)


def _check_room(needed_bytes: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise OSError(errno.ENOSPC, f"{needed_bytes:,} bytes are needed and {free:,} are free")


def _disk_full(models_dir: Path, error: OSError) -> DiskFull:
    return DiskFull(
        f"the disk of {models_dir} has no room for the converted model ({error.strerror}); free some space or choose "
        "another --data-dir"
    )


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """safetensors reports a failed write as an error of its own, with the system's number in the text."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Held by one process at a time; the system lets go of it when that process dies."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another process that converts the same file", 0.0)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_leftovers(models_dir: Path, folder_name: str) -> None:
    for part in models_dir.glob(f".{folder_name}.part-*"):
        shutil.rmtree(part, ignore_errors=True)


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
