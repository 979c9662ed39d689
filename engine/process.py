"""One model's engine process: `python -m engine.process`.

The main thread carries the sockets, a second one runs the steps, a third beats. Whoever started the process reads JSON
lines from --status-fd: progress while it loads, then `ready` and a beat a second, or `failed` with a code and a
message and exit code 3. SIGTERM drains and ends it, SIGUSR1 writes every thread's stack to stderr.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import StartError
from engine.lifeline import hold_lifeline
from engine.listener import listen
from engine.memory import default_kv_bytes, free_bytes
from engine.options import EngineOptions, parse_options, parse_status_fd
from engine.protocol import PROTOCOL_VERSION, Hello
from engine.status import Heart, StatusLine

if TYPE_CHECKING:
    import torch

    from engine.models import ModelSpec
    from engine.service import EngineService

EXIT_START_FAILED = 3
GPU_KV_SHARE = 0.85
"""Of what the weights leave free; the rest is for a step's activations."""
WEIGHT_SUFFIXES = (".safetensors", ".bin")
OPENMP = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "500", "KMP_BLOCKTIME": "0"}
"""Between two steps the workers of OpenMP sleep. They look for their next loop for some twenty microseconds before
that, which spans the gaps inside a step; much longer, and they take the cores from the gateway and from each other."""

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.umask(0o077)
    arguments = sys.argv[1:] if arguments is None else arguments
    status = StatusLine(parse_status_fd(arguments))
    heart = Heart(status)
    heart.start()
    try:
        options = parse_options(arguments)
        if options.lifeline_fd is not None:
            hold_lifeline(options.lifeline_fd, _end_with_parent)
        service = start(options, status)
    except StartError as error:
        log.error("cannot start: %s", error.message)
        status.failed(error.code, error.message)
        return EXIT_START_FAILED
    except Exception as error:
        traceback.print_exc()
        status.failed("internal_error", f"{type(error).__name__}: {error}")
        return EXIT_START_FAILED
    return serve(service, status, heart)


def start(options: EngineOptions, status: StatusLine) -> EngineService:
    """Everything up to the listening socket. Raises StartError."""
    for name, value in OPENMP.items():
        os.environ.setdefault(name, value)
    status.progress("importing torch", 0.0)
    from transformers.utils.logging import disable_progress_bar

    from engine import models
    from engine.loop import EngineLoop
    from engine.runner import ModelRunner, allocate_kv
    from engine.sampling import Sampler
    from engine.service import EngineService
    from engine.settings import SchedulerSettings
    from engine.sources import resolve
    from radix_cache.cache import PrefixCache

    disable_progress_bar()
    _check_device(options.device)
    _, folder = resolve(options.source, options.data_dir, status.progress)
    _check_weights_fit(options, folder)
    spec = models.load(
        str(folder),
        options.data_dir,
        progress=status.progress,
        dtype=options.dtype,
        device=options.device,
        max_model_len=options.max_model_len,
    )
    n_blocks = pool_blocks(options, spec)
    status.progress("allocating the KV pool", 0.0)
    kv = allocate_kv(spec.layers, n_blocks, options.block_size, spec.dtype, spec.device)
    status.progress("allocating the KV pool", 1.0)
    settings = SchedulerSettings(
        n_blocks=n_blocks,
        block_size=options.block_size,
        max_model_len=spec.max_model_len,
        eos_token_ids=frozenset(spec.eos_token_ids),
        revision=spec.revision,
        max_batch_tokens=options.max_batch_tokens,
        max_sequences=options.max_sequences,
    )
    loop = EngineLoop(
        PrefixCache(n_blocks, options.block_size),
        settings,
        ModelRunner(spec.module, kv),
        Sampler(spec.eos_token_ids, int.from_bytes(os.urandom(8), "little") >> 1),
    )
    service = EngineService(loop, _hello(options, spec, n_blocks), listen(options.socket_path), drain_s=options.drain_s)
    gc.collect()
    gc.freeze()
    gc.disable()  # the step thread collects between steps
    return service


def _check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise StartError(
            "device_not_available",
            f"--device cuda: torch {torch.__version__} finds no GPU here; take --device cpu, or a build of torch for "
            "this machine's GPU and driver",
        )


def _check_weights_fit(options: EngineOptions, folder: Path) -> None:
    """Raises StartError when the weights alone need more memory than is free: loading them would kill a neighbour."""
    weights = sum(file.stat().st_size for suffix in WEIGHT_SUFFIXES for file in folder.glob(f"*{suffix}"))
    free = free_bytes()
    if options.device == "cpu" and weights > free:
        raise StartError(
            "model_does_not_fit",
            f"the weights of {options.model} take {weights:,} bytes and {free:,} are free: serve a smaller model, or "
            "fewer of them",
        )


def pool_blocks(options: EngineOptions, spec: ModelSpec) -> int:
    """The size of the KV pool in blocks. Raises StartError when the machine does not have that much memory now."""
    from engine.model_errors import KVMemoryTooSmall
    from engine.runner import blocks_in
    from kernels.cache import block_bytes

    on_gpu = spec.device.type == "cuda"
    free = _free_gpu_bytes(spec.device) if on_gpu else free_bytes()
    if options.kv_blocks is not None:
        n_blocks = options.kv_blocks
    else:
        budget = options.kv_memory_bytes or (int(free * GPU_KV_SHARE) if on_gpu else default_kv_bytes())
        n_blocks = blocks_in(budget, spec.layers, options.block_size, spec.dtype)
    kv_bytes = n_blocks * block_bytes(spec.layers, options.block_size, spec.dtype)
    if kv_bytes > free:
        raise KVMemoryTooSmall(
            f"the KV pool of {options.model} takes {kv_bytes:,} bytes ({n_blocks:,} blocks) and, with the weights "
            f"loaded, {free:,} bytes are free: give a smaller --kv-memory or --kv-blocks, or serve fewer models"
        )
    return n_blocks


def _free_gpu_bytes(device: torch.device) -> int:
    import torch

    return torch.cuda.mem_get_info(device)[0]


def _hello(options: EngineOptions, spec: ModelSpec, n_blocks: int) -> Hello:
    return Hello(
        protocol_version=PROTOCOL_VERSION,
        model=options.model,
        model_dir=str(spec.folder),
        revision=spec.revision,
        boot_id=uuid.uuid4().hex,
        pid=os.getpid(),
        block_size=options.block_size,
        n_blocks=n_blocks,
        max_model_len=spec.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        dtype=str(spec.dtype).removeprefix("torch."),
        device=str(spec.device),
    )


def _end_with_parent() -> None:
    log.info("the parent process is gone: ending")
    os._exit(0)  # the socket stays: its next owner may have taken the path by now, and replaces a dead one anyway


def serve(service: EngineService, status: StatusLine, heart: Heart) -> int:
    """Until a signal or the end of the step loop. Returns the exit code."""
    signal.set_wakeup_fd(service.wake_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda *_: service.terminate())
    service.start()
    heart.follow(service.beat)
    status.ready()
    try:
        return service.run()
    finally:
        signal.set_wakeup_fd(-1)
        heart.stop()


if __name__ == "__main__":
    exit_code = main()
    logging.shutdown()
    os._exit(exit_code)  # all is said; taking the interpreter apart with torch's threads in it gains nothing
