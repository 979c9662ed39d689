"""What an engine process is told when it is started."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.errors import StartError

DTYPES = ("auto", "float32", "bfloat16", "float16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Raises StartError naming the option that cannot be."""

    model: str
    """The name under which the gateway serves this model."""
    source: str
    """Where the weights come from: a known name, a GGUF file, a directory or a hub id."""
    data_dir: Path
    socket_path: Path
    status_fd: int | None = None
    """JSON lines for whoever started the process."""
    lifeline_fd: int | None = None
    """The read end of a pipe whose write end the parent holds: at its end the process ends."""
    kv_memory_bytes: int | None = None
    kv_blocks: int | None = None
    block_size: int = 16
    max_batch_tokens: int = 512
    max_sequences: int = 64
    dtype: str = "auto"
    device: str = "cpu"
    max_model_len: int | None = None
    drain_s: float = 30.0
    """How long requests that run may go on after SIGTERM."""

    def __post_init__(self) -> None:
        for name, floor, ceiling in (
            ("kv_memory_bytes", 1, None),
            ("kv_blocks", 1, None),
            ("block_size", 1, 256),
            ("max_batch_tokens", 1, None),
            ("max_sequences", 1, None),
            ("max_model_len", 2, None),
            ("drain_s", 0, None),
        ):
            value = getattr(self, name)
            if value is not None and (value < floor or (ceiling is not None and value > ceiling)):
                expected = f"{floor} or more" if ceiling is None else f"{floor} to {ceiling}"
                raise StartError("invalid_option", f"{_flag(name)} is {value}; expected {expected}")
        if self.kv_memory_bytes is not None and self.kv_blocks is not None:
            raise StartError("invalid_option", "give --kv-memory or --kv-blocks, not both")
        if self.max_batch_tokens < self.max_sequences:
            raise StartError(
                "invalid_option",
                f"--max-batch-tokens {self.max_batch_tokens} is below --max-sequences {self.max_sequences}: "
                "a step must hold a token of every running sequence",
            )


def parse_options(arguments: Sequence[str]) -> EngineOptions:
    """From a command line. Raises StartError; exits with the usage when the line itself cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m engine.process", description="One model's engine process.")
    defaults = EngineOptions("", "", Path(), Path())
    parser.add_argument("--model", required=True, help="name of the model")
    parser.add_argument("--source", required=True, help="known name, GGUF file, directory or hub id")
    parser.add_argument("--data-dir", required=True, type=Path)
    parser.add_argument("--socket", required=True, type=Path, dest="socket_path", help="Unix socket to listen on")
    parser.add_argument("--status-fd", type=int, help="write progress and heartbeats here, as JSON lines")
    parser.add_argument("--lifeline-fd", type=int, help="end when this pipe does")
    parser.add_argument("--kv-memory", type=int, dest="kv_memory_bytes", metavar="BYTES", help="size of the KV pool")
    parser.add_argument("--kv-blocks", type=int, metavar="N", help="size of the KV pool in blocks")
    parser.add_argument("--block-size", type=int, default=defaults.block_size, metavar="TOKENS")
    parser.add_argument("--max-batch-tokens", type=int, default=defaults.max_batch_tokens, metavar="N")
    parser.add_argument("--max-sequences", type=int, default=defaults.max_sequences, metavar="N")
    parser.add_argument("--dtype", choices=DTYPES, default=defaults.dtype)
    parser.add_argument("--device", choices=DEVICES, default=defaults.device)
    parser.add_argument("--max-model-len", type=int, metavar="TOKENS")
    parser.add_argument("--drain-s", type=float, default=defaults.drain_s, metavar="SECONDS")
    return EngineOptions(**vars(parser.parse_args(arguments)))


def parse_status_fd(arguments: Sequence[str]) -> int | None:
    """That option alone, so that whatever is wrong with the others can be reported there."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--status-fd", type=int)
    return parser.parse_known_args(arguments)[0].status_fd


def _flag(name: str) -> str:
    return "--" + name.removesuffix("_bytes").replace("_", "-")
