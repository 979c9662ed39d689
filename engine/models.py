"""Loads a model that this engine can serve rightly, and refuses by name what it cannot.

Models are transformers' own modules with our attention registered (engine.attention). Three nets catch what would be
served wrongly: the configuration (kinds of layers, of rotary embedding, of input), what every layer asks of the
attention in a dry run, and a comparison of its logits with transformers' own on a short text.
"""

from __future__ import annotations

import importlib.metadata
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from engine.fingerprint import revision
from engine.gguf import Progress
from engine.model_check import check_layers, compare_with_eager
from engine.model_errors import BrokenModel, ConflictingPackage, ModelError, UnsupportedModel
from engine.sources import resolve
from kernels.cache import LayerShape

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})


class ModelSpec(NamedTuple):
    """A loaded model and all that the rest of the engine has to know of it."""

    name: str
    folder: Path
    """With tokenizer and chat template, for the gateway."""
    module: torch.nn.Module
    """Called on [1, T] with position_ids, use_cache=False, logits_to_keep and batch=StepInput(...)."""
    dtype: torch.dtype
    """Of weights, activations and KV."""
    device: torch.device
    layers: tuple[LayerShape, ...]
    """KV heads and head size, one a layer."""
    max_model_len: int
    """Prompt and output together, in tokens."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    revision: str
    """Digest of weights, configuration and dtypes."""


def load(
    source: str,
    data_dir: Path,
    *,
    progress: Progress = lambda stage, fraction: None,
    dtype: str = "auto",
    device: str = "cpu",
    max_model_len: int | None = None,
) -> ModelSpec:
    """`dtype` "auto" is the checkpoint's own; on a CPU half precision is bfloat16. Raises ModelError."""
    check_environment()
    check_device(device)
    transformers_logging.disable_progress_bar()
    name, folder = resolve(source, data_dir, progress)
    config = read_config(folder)
    check_config(config)
    longest = context_length(config)
    if max_model_len is not None and max_model_len > longest:
        raise ModelError(f"--max-model-len {max_model_len} is over the {longest} tokens that {name} can read")
    torch_dtype = _dtype(dtype, config, device)
    progress("loading the weights", 0.0)
    module = _load_module(folder, config, torch_dtype, device)
    progress("loading the weights", 1.0)
    shapes = check_layers(module)
    compare_with_eager(module, shapes)
    return ModelSpec(
        name,
        folder,
        module,
        torch_dtype,
        torch.device(device),
        shapes,
        max_model_len or longest,
        int(config.vocab_size),
        _eos_token_ids(folder, config),
        revision(folder, str(torch_dtype), f"kv {torch_dtype}"),
    )


def check_environment() -> None:
    """Raises ConflictingPackage where Hugging Face's package `kernels` is installed: it takes our folder's name."""
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise ConflictingPackage(
        f"the package `kernels` {version} is installed here and takes the name of a part of Radixgate; "
        "run: pip uninstall kernels"
    )


def check_device(device: str) -> None:
    """Raises ModelError when torch cannot compute there."""
    try:
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(f"--device {device} cannot be used here ({_first_line(error)}); use --device cpu") from error


def read_config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder)
    except Exception as error:
        if "model type" in str(error) or "model_type" in str(error) or "trust_remote_code" in str(error):
            raise UnsupportedModel(
                f"{folder / 'config.json'} names an architecture that this version of transformers does not have, or "
                f"code of its own, which is never run: {_first_line(error)}"
            ) from error
        raise BrokenModel(f"{folder / 'config.json'} cannot be read: {_first_line(error)}") from error


def check_config(config: Any) -> None:
    """Raises UnsupportedModel for what the configuration alone gives away."""
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind} is an encoder with a decoder; only decoders can be served")
    if inputs := [part for part in ("vision_config", "audio_config") if getattr(config, part, None) is not None]:
        raise UnsupportedModel(
            f"{kind} reads more than text ({', '.join(inputs)}); take the text-only checkpoint of this model"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{kind} is no causal language model; take one that generates text")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if others:
        raise UnsupportedModel(
            f"{kind} has layers of the kinds {', '.join(others)}, whose state is not a KV cache of blocks; only "
            f"{' and '.join(sorted(ATTENTION_LAYERS))} can be served"
        )
    if not model_class._supports_attention_backend or not model_class._can_set_attn_implementation():
        raise UnsupportedModel(
            f"{model_class.__name__} has an attention of its own instead of transformers' attention interface, so its "
            "KV cannot be paged; take a model of a newer architecture"
        )


def context_length(config: Any) -> int:
    """The tokens that prompt and output may have together. Raises UnsupportedModel when the model does not say."""
    longest = getattr(config, "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 2:
        raise UnsupportedModel(
            f"{config.model_type} does not say how long a text it can read (max_position_embeddings)"
        )
    # A "longrope" turns every position another way once a text grows past its original length, and keys that are cached
    # cannot be turned again. (A "dynamic" one does so only past max_position_embeddings.)
    for rope in _rope_parameters(config):
        if rope.get("rope_type") == "longrope" and rope["original_max_position_embeddings"] < longest:
            original = int(rope["original_max_position_embeddings"])
            log.warning(
                "%s: served up to %d of its %d tokens, as its rotary embedding changes beyond",
                *(config.model_type, original, longest),
            )
            longest = original
    return longest


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The one set, or one per kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    yield from [parameters] if "rope_type" in parameters else [p for p in parameters.values() if isinstance(p, dict)]


def _dtype(name: str, config: Any, device: str) -> torch.dtype:
    if name != "auto":
        if name not in DTYPES:
            raise ModelError(f"dtype {name!r} is not known; expected auto, {', '.join(DTYPES)}")
        return DTYPES[name]
    own = getattr(config, "dtype", None)
    own = getattr(torch, own, None) if isinstance(own, str) else own
    if own not in DTYPES.values() or (own == torch.float16 and device == "cpu"):
        return torch.bfloat16
    return own


def _load_module(folder: Path, config: Any, dtype: torch.dtype, device: str) -> torch.nn.Module:
    """Loaded with transformers' own attention; our check compares with it before ours takes its place."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None and not isinstance(quantization, dict):
        quantization = quantization.to_dict()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
        module = module.to(device).eval().requires_grad_(False)
    except Exception as error:
        if quantization is not None:
            raise UnsupportedModel(
                f"the weights in {folder} are quantized as {quantization.get('quant_method', 'unknown')!r}, which "
                f"cannot be loaded here ({_first_line(error)}); take its bf16 weights, or a GGUF file"
            ) from error
        raise BrokenModel(f"the weights in {folder} cannot be loaded: {_first_line(error)}") from error
    wrong = sorted(report["missing_keys"]) or sorted(str(key) for key in report.get("mismatched_keys") or ())
    if wrong:
        raise BrokenModel(
            f"the weights in {folder} do not fit its config.json: {', '.join(wrong[:3])} "
            f"({len(wrong)} in all) are missing or of another shape; fetch the model again"
        )
    if report.get("unexpected_keys"):
        log.warning(
            "%s: %d tensors in the files belong to no part of the model", folder, len(report["unexpected_keys"])
        )
    return module


def _eos_token_ids(folder: Path, config: Any) -> tuple[int, ...]:
    """The model's end tokens, from its generation settings and its configuration."""
    found: set[int] = set()
    try:
        settings = [GenerationConfig.from_pretrained(folder), config]
    except (OSError, ValueError):
        settings = [config]
    for setting in settings:
        ids = getattr(setting, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return tuple(sorted(token for token in found if not math.isnan(token) and token >= 0))


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
