"""An engine's command line."""

from pathlib import Path

import pytest

from engine.errors import StartError
from engine.options import EngineOptions, parse_options

LINE = ["--model", "m", "--source", "s", "--data-dir", "/d", "--socket", "/d/run/e.sock"]


def test_defaults():
    assert parse_options(LINE) == EngineOptions("m", "s", Path("/d"), Path("/d/run/e.sock"))


def test_every_option_arrives():
    line = [
        *LINE,
        *("--status-fd", "5", "--lifeline-fd", "6", "--kv-memory", "1000", "--block-size", "8"),
        *("--max-batch-tokens", "256", "--max-sequences", "4", "--dtype", "float32", "--device", "cuda"),
        *("--max-model-len", "128", "--drain-s", "2.5"),
    ]
    assert parse_options(line) == EngineOptions(
        model="m",
        source="s",
        data_dir=Path("/d"),
        socket_path=Path("/d/run/e.sock"),
        status_fd=5,
        lifeline_fd=6,
        kv_memory_bytes=1000,
        block_size=8,
        max_batch_tokens=256,
        max_sequences=4,
        dtype="float32",
        device="cuda",
        max_model_len=128,
        drain_s=2.5,
    )


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--kv-blocks", "0"], "--kv-blocks is 0; expected 1 or more"),
        (["--kv-memory", "-1"], "--kv-memory is -1; expected 1 or more"),
        (["--block-size", "257"], "--block-size is 257; expected 1 to 256"),
        (["--kv-memory", "1000", "--kv-blocks", "10"], "not both"),
        (["--max-batch-tokens", "8", "--max-sequences", "16"], "--max-batch-tokens 8 is below --max-sequences 16"),
        (["--max-model-len", "1"], "--max-model-len is 1; expected 2 or more"),
    ],
)
def test_what_cannot_be_is_refused_by_name(extra, message):
    with pytest.raises(StartError, match=message) as caught:
        parse_options(LINE + extra)
    assert caught.value.code == "invalid_option"
