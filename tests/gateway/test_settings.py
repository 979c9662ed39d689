"""Settings: flags over environment over file over defaults, each with its origin, and errors that name the nearest."""

from pathlib import Path

import pytest

from gateway.setting_layers import describe, load, model_name
from gateway.setting_values import format_size, parse_size, redact_url
from gateway.settings import ModelSettings, Settings, SettingsError


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(text: str, name: str = "radixgate.toml") -> Path:
    Path(name).write_text(text)
    return Path(name)


def refused(**arguments: object) -> str:
    with pytest.raises(SettingsError) as error:
        load(**{"environment": {}, **arguments})
    return str(error.value)


# --- precedence -------------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    settings = load(environment={})
    assert settings == Settings()
    assert settings.port == 8080
    assert settings.models == (ModelSettings(name="smollm2-135m", source="smollm2-135m"),)
    assert "port" not in settings.origins


def test_flags_over_environment_over_file_over_defaults() -> None:
    write("host = '10.0.0.1'\nport = 1\nworkers = 3\nblock_size = 32\n")
    environment = {"RADIXGATE_PORT": "2", "RADIXGATE_WORKERS": "4", "HOME": "/"}
    settings = load({"port": "3", "stall_s": None}, environment)
    assert (settings.port, settings.workers, settings.block_size, settings.host) == (3, 4, 32, "10.0.0.1")
    assert settings.origins["port"] == "flag --port"
    assert settings.origins["workers"] == "environment RADIXGATE_WORKERS"
    assert settings.origins["block_size"] == "radixgate.toml: block_size"


def test_the_file_may_be_named_by_flag_or_environment() -> None:
    write("port = 5", "other.toml")
    assert load(environment={"RADIXGATE_CONFIG": "other.toml"}).port == 5
    write("port = 6", "third.toml")
    assert load(environment={"RADIXGATE_CONFIG": "other.toml"}, config_file=Path("third.toml")).port == 6
    assert refused(config_file=Path("absent.toml")) == "absent.toml: there is no such file"


def test_an_empty_variable_counts_as_not_given() -> None:
    assert load(environment={"RADIXGATE_PORT": ""}).port == 8080


# --- models -----------------------------------------------------------------------------------------------------------


def test_several_models_in_the_file() -> None:
    write("""
        dtype = "float32"
        kv_memory = "1GiB"
        [[model]]
        name = "small"
        source = "smollm2-135m"
        aliases = ["tiny"]
        kv_blocks = 512
        [[model]]
        source = "/models/Big-7B.gguf"
        dtype = "bfloat16"
        device = "cuda"
        max_model_len = 4096
    """)
    settings = load(environment={})
    assert settings.models == (
        ModelSettings("small", "smollm2-135m", ("tiny",), None, "float32", None, 512, None),
        ModelSettings("Big-7B", "/models/Big-7B.gguf", (), "cuda", "bfloat16", 2**30, None, 4096),
    )
    assert settings.origins["model.small.kv_blocks"] == "radixgate.toml: [[model]] 1 kv_blocks"
    assert settings.origins["model.small.dtype"] == "radixgate.toml: dtype"


def test_what_is_given_for_this_run_holds_for_every_model() -> None:
    write("[[model]]\nname='a'\nsource='x'\nkv_blocks=7\ndtype='float32'\n[[model]]\nname='b'\nsource='y'\n")
    settings = load({"kv_memory": "2GiB"}, {"RADIXGATE_DTYPE": "bfloat16"})
    assert [(m.kv_memory, m.kv_blocks, m.dtype) for m in settings.models] == [(2**31, None, "bfloat16")] * 2


def test_the_model_flag_picks_entries_by_name_or_adds_a_source() -> None:
    write("[[model]]\nname='a'\nsource='x.gguf'\n[[model]]\nname='b'\nsource='y.gguf'\n")
    models = load({"model": ("b", "z.gguf")}, {}).models
    assert [(model.name, model.source) for model in models] == [("b", "y.gguf"), ("z", "z.gguf")]


def test_several_models_in_one_variable() -> None:
    models = load(environment={"RADIXGATE_MODEL": "smollm2-135m, /m/other.gguf"}).models
    assert [model.name for model in models] == ["smollm2-135m", "other"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("smollm2-135m", "smollm2-135m"),
        ("/models/Qwen2.5-0.5B.Q8_0.gguf", "Qwen2.5-0.5B.Q8_0"),
        ("/models/Llama-3/", "Llama-3"),
        ("./Llama-3", "Llama-3"),
        ("meta-llama/Llama-3.2-1B@main", "llama-3.2-1b"),
        ("no/such/model", "model"),
    ],
)
def test_a_model_without_a_name_gets_one(source: str, name: str) -> None:
    assert model_name(source) == name


def test_a_hub_id_answers_to_its_full_name_too() -> None:
    (model,) = load({"model": ("Qwen/Qwen3-0.6B",)}, {}).models
    assert (model.name, model.aliases) == ("qwen3-0.6b", ("Qwen/Qwen3-0.6B",))


def test_a_model_with_neither_name_nor_source_is_refused() -> None:
    write("[[model]]\ndtype='float32'\n")
    assert refused().startswith("radixgate.toml: [[model]] 1: has no source")


def test_a_name_given_twice_is_refused() -> None:
    write("[[model]]\nname='a'\nsource='x'\n[[model]]\nname='b'\nsource='y'\naliases=['a']\n")
    assert refused() == "the model name 'a' is given twice: to x and to y"


# --- errors -----------------------------------------------------------------------------------------------------------


def test_unknown_keys_are_refused_with_the_nearest_name() -> None:
    write("prot = 80")
    assert refused() == "radixgate.toml: prot: there is no such setting; did you mean port?"
    write("[[model]]\nsource='x'\nalias=['y']\n")
    assert refused() == "radixgate.toml: [[model]] 1 alias: there is no such setting; did you mean aliases?"
    Path("radixgate.toml").unlink()
    message = refused(environment={"RADIXGATE_KV_MEMROY": "1GiB"})
    assert message == "RADIXGATE_KV_MEMROY: there is no such setting; did you mean RADIXGATE_KV_MEMORY?"


def test_variables_of_others_are_left_alone() -> None:
    others = {"RADIXGATE_URL": "http://x", "RADIXGATE_ADMIN_KEY": "k", "RADIXGATE_SERVICE_HOST": "10.0.0.1"}
    assert load(environment=others) == Settings()


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("port", "http", "expected a whole number from 0 to 65535"),
        ("port", "65536", "expected a whole number from 0 to 65535"),
        ("port", "-1", "expected a whole number from 0 to 65535"),
        ("workers", "0", "expected a whole number from 1 to 64"),
        ("block_size", "512", "expected a whole number from 1 to 256"),
        ("kv_memory", "2 GB of it", "expected a size such as 2GiB, 512MiB or a number of bytes"),
        ("kv_memory", "0", "expected a size such as 2GiB, 512MiB or a number of bytes"),
        ("kv_blocks", "1e6", "expected a whole number from 1 to 1000000000"),
        ("stall_s", "0", "expected a number of seconds above zero"),
        ("stall_s", "nan", "expected a number of seconds above zero"),
        ("dtype", "int4", "expected one of auto, bfloat16, float16, float32"),
        ("device", "tpu", "expected one of auto, cpu, cuda"),
        ("host", " ", "expected a text that is not empty"),
        ("redis_url", "localhost:6379", "expected redis://HOST:PORT/DB, rediss://... or unix:///PATH"),
    ],
)
def test_a_wrong_value_is_refused_with_what_was_expected(key: str, value: str, expected: str) -> None:
    flag = key.replace("_", "-")
    assert refused(flags={key: value}) == f"flag --{flag}: {value!r} cannot be used: {expected}"
    variable = f"RADIXGATE_{key.upper()}"
    assert refused(environment={variable: value}) == f"environment {variable}: {value!r} cannot be used: {expected}"


@pytest.mark.parametrize("value", ["true", "[1]", "'x'", "1.5"])
def test_a_value_of_a_wrong_type_in_the_file_is_refused(value: str) -> None:
    write(f"port = {value}")
    assert "expected a whole number from 0 to 65535" in refused()


def test_a_file_that_is_not_toml_is_refused() -> None:
    write("port: 80")
    assert refused().startswith("radixgate.toml: is not TOML: ")
    Path("radixgate.toml").write_bytes(b"\xff")
    assert refused().startswith("radixgate.toml: is not TOML: ")
    write("model = 'x'")
    assert "write each model under a line [[model]]" in refused()


def test_kv_memory_and_kv_blocks_exclude_each_other_within_a_layer_and_override_between_layers() -> None:
    assert (
        refused(flags={"kv_memory": "1GiB", "kv_blocks": "5"})
        == "flag --kv-memory and flag --kv-blocks exclude each other"
    )
    (model,) = load({"kv_blocks": "5"}, {"RADIXGATE_KV_MEMORY": "1GiB"}).models
    assert (model.kv_memory, model.kv_blocks) == (None, 5)


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [("2GiB", 2**31), ("512 MiB", 2**29), ("1.5g", 3 * 2**29), ("2GB", 2 * 10**9), ("4096", 4096), (4096, 4096)],
)
def test_sizes(text: object, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


def test_sizes_for_people() -> None:
    assert [format_size(n) for n in (17, 2048, 3 * 2**29, 2**41)] == ["17 B", "2.0 KiB", "1.5 GiB", "2048.0 GiB"]


def test_a_password_is_never_shown() -> None:
    assert redact_url("redis://user:p%40ss@host:6379/0") == "redis://user:***@host:6379/0"
    assert redact_url("unix:///run/x.sock") == "unix:///run/x.sock"
    settings = load(environment={"RADIXGATE_REDIS_URL": "redis://:hunter2@h/0"})
    assert settings.redis_url == "redis://:hunter2@h/0"
    assert ("redis_url", "redis://:***@h/0", "environment RADIXGATE_REDIS_URL") in describe(settings)


def test_a_worker_reads_the_same_settings() -> None:
    write("redis_url = 'redis://h/0'\n[[model]]\nname='a'\nsource='x'\naliases=['b']\nkv_memory='1GiB'\n")
    settings = load({"port": "9"}, {})
    copy = Settings.from_json(settings.to_json())
    assert copy == settings
    assert copy.origins == settings.origins


def test_a_hub_name_is_a_safe_file_name() -> None:
    assert ModelSettings("owner/a model", "x").file_name == "owner_a_model"
