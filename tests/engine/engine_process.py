"""A real engine process for tests, with the pipes a supervisor would give it."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VOCAB_SIZE = 128
PATIENCE_S = 60


def save_tiny_llama(folder, max_model_len=4096):
    """A random model that never ends a text by itself, so that lengths are what a test asks for."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_model_len,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


class EngineProcess:
    """Starts on entry; `status` lines arrive in a queue. Killed on exit if it still runs."""

    def __init__(self, source, *extra, env=None):
        self.source, self.extra, self.env = source, extra, env or {}
        self.lines = queue.Queue()

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="rg-")
        self.path = Path(self.folder.name) / "engine.sock"
        status_read, status_write = os.pipe()
        lifeline_read, self.lifeline = os.pipe()
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "engine.process", "--model", "tiny", "--source", str(self.source)),
                *("--data-dir", self.folder.name, "--socket", str(self.path), "--dtype", "float32"),
                *("--status-fd", str(status_write), "--lifeline-fd", str(lifeline_read), *map(str, self.extra)),
            ],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **self.env},
            pass_fds=(status_write, lifeline_read),
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(status_write)
        os.close(lifeline_read)
        self._stderr = []
        self._readers = [
            threading.Thread(target=self._read_status, args=(status_read,)),
            threading.Thread(target=lambda: self._stderr.extend(self.process.stderr)),
        ]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.stderr()
        self.cut_lifeline()
        self.folder.cleanup()

    def _read_status(self, fd):
        with open(fd) as pipe:
            for line in pipe:
                self.lines.put(json.loads(line))

    def wait_for(self, kind):
        """The next line of this type, skipping others."""
        while (line := self.lines.get(timeout=PATIENCE_S))["type"] != kind:
            assert line["type"] != "failed", line
        return line

    def signal(self, number):
        os.kill(self.process.pid, number)

    def terminate(self):
        self.signal(signal.SIGTERM)

    def exit_code(self):
        return self.process.wait(PATIENCE_S)

    def stderr(self):
        """All of it, once the process has ended."""
        self.exit_code()
        for reader in self._readers:
            reader.join(PATIENCE_S)
        return "".join(self._stderr)

    def cut_lifeline(self):
        if self.lifeline is not None:
            os.close(self.lifeline)
            self.lifeline = None
