"""One server with the real model for the whole run: starting it converts the model once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Server
from tests.end_to_end.tiny import save_tiny_llama


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """float32, so that greedy texts are equal bit for bit on a hit and on a miss."""
    data_dir: Path = tmp_path_factory.mktemp("radixgate") / "data"
    server = Server(data_dir, flags=("--dtype", "float32", "--kv-memory", "256MiB"))
    try:
        yield server.start().wait_ready()
    finally:
        assert server.stop() == 0, server.log[-4000:]


@pytest.fixture(scope="session")
def tiny_model(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    (converted,) = (path for path in (server.data_dir / "models").iterdir() if (path / "tokenizer.json").exists())
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny-llama", converted)
