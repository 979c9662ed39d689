"""What the gateway's tests share: a small tokenizer on disk, and a live server over an engine without a model."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import uvicorn
from redis import Redis as SyncRedis
from starlette.applications import Starlette
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.null import NullEngine, null_hello
from gateway.app import application
from gateway.served import Models, ServedModel
from gateway.services import Services
from gateway.tokenizer import Tokenizer as GatewayTokenizer
from tenants import store

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox, being quick, does not stop.",
    "naïve café, 你好世界, こんにちは, 👩‍👩‍👧‍👦 🙂🙂 Ünïcödé ٣٤٥",
    "def main():\n    return {'a': 1, \"b\": [2, 3]}\n\n\tdone",
]
TEMPLATE = """{%- for message in messages -%}
{%- if message['content'] == 'refuse me' %}{{ raise_exception('no such words here') }}{% endif -%}
<|start|>{{ message['role'] }}
{{ message['content'] }}<|end|>
{% endfor -%}
{%- if add_generation_prompt %}<|start|>assistant
{% endif -%}
"""
END = "<|end|>"
PROMPT = [{"role": "user", "content": "The quick brown fox"}]


def byte_level_tokenizer() -> Tokenizer:
    """A small byte-level BPE: every text can be encoded, and most characters outside ASCII take several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def sentencepiece_tokenizer() -> Tokenizer:
    """A small BPE with byte fallback and a metaspace decoder, as Llama 2's."""
    alphabet = sorted({character for text in CORPUS for character in text if character.isascii() and character != " "})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *alphabet]
    pieces += ["▁T", "he", "▁The", "▁q", "ui"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    merges = [("▁", "T"), ("h", "e"), ("▁T", "he"), ("▁", "q"), ("u", "i")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def write_model_dir(path: Path, template: str = TEMPLATE, added_tokens: Sequence[AddedToken] = ()) -> Path:
    """A model's folder as far as a gateway reads one."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(list(added_tokens))
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": END}, "bos_token": "<|start|>"}))
    (path / "chat_template.jinja").write_text(template)
    return path


@dataclass
class LiveGateway:
    """A gateway on a loopback port, its loop in a thread of its own."""

    url: str
    key: str
    tenant_id: str
    engine: NullEngine
    tokenizer: GatewayTokenizer
    services: Services
    app: Starlette = field(repr=False)
    redis: SyncRedis = field(repr=False)
    loop: asyncio.AbstractEventLoop = field(repr=False)
    other_key: str = ""
    admin_key: str = ""

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**{"base_url": self.url + "/v1", "api_key": self.key, "max_retries": 0, **options})

    def http(self, key: str | None = None) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"authorization": f"Bearer {key or self.key}"}, timeout=30)

    def post(self, body: Any, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        with self.http() as client:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            return client.post(path, content=raw, headers={k.replace("_", "-"): v for k, v in headers.items()})

    def chat(self, **parameters: Any) -> httpx.Response:
        return self.post({"model": "tiny", "messages": PROMPT, **parameters})

    def run(self, coroutine: Any) -> Any:
        """Run on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def reply(self, text: str) -> list[int]:
        """From now on the engine answers with this text's tokens."""
        ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        self.engine._reply = ids
        return ids

    def booked(self, tenant_id: str | None = None) -> list[dict[str, Any]]:
        """The tenant's events in Redis, once everything durable is there."""
        assert self.run(self.services.ledger.shipped(10))
        return [json.loads(f[b"event"]) for _, f in self.redis.xrange(store.ledger(tenant_id or self.tenant_id))]


async def _people(services: Services) -> dict[str, str]:
    await services.prices.ensure_demo_plan()
    acme, _, key = await services.registry.create_tenant("acme")
    _, _, other = await services.registry.create_tenant("globex")
    _, admin = await services.registry.create_admin_key()
    return {"tenant_id": acme.id, "key": key.reveal(), "other_key": other.reveal(), "admin_key": admin.reveal()}


@contextmanager
def live_gateway(
    directory: Path,
    redis_url: str,
    *,
    template: str = TEMPLATE,
    added_tokens: Sequence[AddedToken] = (),
    max_model_len: int = 256,
    **options: Any,
) -> Iterator[LiveGateway]:
    """A server that serves the model `tiny` (alias `small`) by a NullEngine made with `options`."""
    model_dir = write_model_dir(directory / "model", template, added_tokens)
    tokenizer = GatewayTokenizer.load(model_dir)
    hello = null_hello(
        model_dir=str(model_dir), max_model_len=max_model_len, vocab_size=tokenizer.vocab_size, revision="rev"
    )
    engine = NullEngine(hello=hello, **options)
    services = Services(
        directory / "data", store.connect(redis_url), Models([ServedModel("tiny", engine, aliases=["small"])])
    )
    app: Starlette = application(services, max_body_bytes=100_000)
    # The protocol must be named: asyncio sends small writes at once only where it sees TCP.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    ready, loops = threading.Event(), []

    async def serve() -> None:
        loops.append(asyncio.get_running_loop())
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        ready.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert ready.wait(30) and server.started, "the server did not start"
    people = asyncio.run_coroutine_threadsafe(_people(services), loops[0]).result(30)
    with SyncRedis.from_url(redis_url) as redis:
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            yield LiveGateway(
                url,
                engine=engine,
                tokenizer=tokenizer,
                services=services,
                app=app,
                redis=redis,
                loop=loops[0],
                **people,
            )
        finally:
            server.should_exit = True
            thread.join(30)
            listener.close()
