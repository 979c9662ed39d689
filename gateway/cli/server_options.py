"""The server's settings as command line options, shared by the commands that read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gateway.setting_layers import load
from gateway.settings import Settings, SettingsError

_MODEL_HELP = (
    "Built-in name, GGUF file, Hugging Face directory, hub id, or the name of a [[model]] entry; several allowed. "
    "[smollm2-135m]"
)
_REDIS_HELP = "Redis 7 or Valkey to use instead of the embedded one. A password belongs in RADIXGATE_REDIS_URL."
_OPTIONS = (
    click.option("--config", type=click.Path(path_type=Path), help="Settings file. [radixgate.toml, if there is one]"),
    click.option("--host", help="Address to listen on. [127.0.0.1]"),
    click.option("--port", help="Port to listen on. [8080]"),
    click.option("--data-dir", help="Keys, models, ledger and the embedded Valkey. [.radixgate]"),
    click.option("--model", multiple=True, metavar="SOURCE", help=_MODEL_HELP),
    click.option("--redis-url", metavar="URL", help=_REDIS_HELP),
    click.option("--kv-memory", metavar="SIZE", help="KV cache per model, such as 2GiB."),
    click.option("--kv-blocks", metavar="N", help="KV cache per model in blocks, instead of --kv-memory."),
    click.option("--block-size", metavar="TOKENS", help="Tokens in a block of the KV cache. [16]"),
    click.option("--max-batch-tokens", metavar="N", help="Tokens that a step computes at most. [512]"),
    click.option("--max-sequences", metavar="N", help="Sequences that run at the same time at most. [64]"),
    click.option("--dtype", help="auto, bfloat16, float16 or float32."),
    click.option("--device", help="auto, cpu or cuda."),
    click.option("--workers", metavar="N", help="Gateway processes. [1]"),
    click.option("--stall-s", metavar="SECONDS", help="Replace an engine whose work waited this long for a step. [60]"),
    click.option("--drain-s", metavar="SECONDS", help="How long requests may go on when the server is stopped. [30]"),
)


def server_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the options; their values come as keyword arguments for `read_settings`."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def read_settings(config: Path | None, **flags: Any) -> Settings:
    """Raises click.UsageError (exit code 2) naming the setting."""
    try:
        return load(flags, config_file=config)
    except SettingsError as error:
        raise click.UsageError(str(error)) from None
