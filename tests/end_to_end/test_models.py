"""Several models behind one address, each an engine process of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Answer, Server


@pytest.fixture(scope="module")
def two_models(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("two")
    (folder / "radixgate.toml").write_text(
        f"""
[[model]]
name = "left"
aliases = ["gpt-small", "team/left"]
source = "{tiny_model}"
dtype = "float32"
kv_blocks = 64

[[model]]
name = "right"
source = "{tiny_model}"
dtype = "bfloat16"
kv_blocks = 32
"""
    )
    server = Server(folder / "data", ("--config", str(folder / "radixgate.toml")))
    try:
        yield server.start().wait_ready(90)
    finally:
        assert server.stop() == 0


def complete(server: Server, model: str, prompt: str = "one two three four five six seven eight nine") -> Answer:
    body = {"model": model, "prompt": prompt * 4, "max_tokens": 3, "temperature": 0}
    return server.post("/v1/completions", body, server.key("acme"))


def cached(answer: Answer) -> int:
    return answer.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_each_model_is_an_engine_with_its_own_memory(two_models: Server) -> None:
    engines = two_models.get("/admin/engines", two_models.admin_key).json["engines"]
    hellos = {engine["name"]: engine["hello"] for engine in engines}
    assert {name: (hello["dtype"], hello["n_blocks"]) for name, hello in hellos.items()} == {
        "left": ("float32", 64),
        "right": ("bfloat16", 32),
    }
    assert hellos["left"]["pid"] != hellos["right"]["pid"]


def test_requests_go_where_the_name_or_the_alias_says(two_models: Server) -> None:
    assert cached(complete(two_models, "left")) == 0
    assert cached(complete(two_models, "gpt-small")) > 0
    assert cached(complete(two_models, "team/left")) > 0
    assert cached(complete(two_models, "right")) == 0
    assert complete(two_models, "middle").status == 404


def test_the_list_of_models_names_both(two_models: Server) -> None:
    listed = two_models.get("/v1/models", two_models.key("acme")).json["data"]
    assert {"left", "right"} <= {model["id"] for model in listed}


def test_a_prompt_that_fits_the_model_and_not_its_memory_is_refused(two_models: Server) -> None:
    answer = complete(two_models, "right", "word " * 200)
    assert answer.status == 400 and answer.json["error"]["code"] == "context_length_exceeded"
    assert "512" in answer.json["error"]["message"]
    assert complete(two_models, "right").status == 200


def test_models_that_do_not_fit_in_memory_are_refused_at_start(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "radixgate.toml").write_text(
        "".join(f'[[model]]\nname = "m{i}"\nsource = "{tiny_model}"\nkv_memory = "900GiB"\n' for i in range(2))
    )
    server = Server(tmp_path / "data", ("--config", str(tmp_path / "radixgate.toml")))
    server.start()
    assert server.process is not None and server.process.wait(60) == 5
    assert "900" in server.log and "Traceback" not in server.log
