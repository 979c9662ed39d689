"""An engine without a model: it answers at once with given token ids.

For the gateway's tests, and for benches that measure the gateway alone. It keeps the same protocol as EngineClient,
down to the order of messages and the truncation by Stop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.client import MAX_UNREAD_TOKENS, EngineUnavailable
from engine.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Delta,
    EngineError,
    Finished,
    Hello,
    PromptRecord,
    Stop,
    Submit,
)
from engine.stream import Stream

Reply = Sequence[int] | Callable[[Submit], Sequence[int]]
Bill = PromptRecord | Callable[[Submit], PromptRecord]


def null_hello(**changes: Any) -> Hello:
    """A plausible introduction; `changes` name fields of Hello."""
    fields: dict[str, Any] = {
        "protocol_version": PROTOCOL_VERSION,
        "model": "null",
        "model_dir": "",
        "revision": "null",
        "boot_id": "null",
        "pid": os.getpid(),
        "block_size": 16,
        "n_blocks": 1024,
        "max_model_len": 8192,
        "vocab_size": 49152,
        "eos_token_ids": (2,),
        "dtype": "float32",
        "device": "cpu",
    }
    return Hello(**(fields | changes))


@dataclass
class _Running:
    stream: Stream
    limits: dict[int, int] = field(default_factory=dict)
    """Tokens per stopped output."""
    cancelled: bool = False


class NullEngine:
    """Answers every request with `reply` (token ids, or a function of the request), cut at max_tokens.

    `tokens_per_delta` and `delay_s` (before each Delta) shape the stream. `bill` is the prompt record to report, by
    default the whole prompt as written and unleased. `error` ends every request with that error and no Accepted.
    """

    def __init__(
        self,
        reply: Reply = (1,),
        *,
        hello: Hello | None = None,
        bill: Bill | None = None,
        tokens_per_delta: int = 1,
        delay_s: float = 0.0,
        error: EngineError | None = None,
        max_unread_tokens: int = MAX_UNREAD_TOKENS,
    ) -> None:
        self.hello: Hello | None = hello or null_hello()
        """Set to None to play an engine that is away."""
        self.submitted: list[Submit] = []
        self.error = error
        self._reply = reply
        self._bill = bill
        self._tokens_per_delta = tokens_per_delta
        self._delay_s = delay_s
        self._max_unread_tokens = max_unread_tokens
        self._running: dict[str, _Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def submit(self, submit: Submit) -> Stream:
        if self.hello is None:
            raise EngineUnavailable("the null engine is away")
        if submit.request_id in self._running:
            raise ValueError(f"request id {submit.request_id!r} is in use")
        self.submitted.append(submit)
        stream = Stream(submit, self._obey, max_unread_tokens=self._max_unread_tokens)
        running = self._running[submit.request_id] = _Running(stream)
        task = asyncio.get_running_loop().create_task(self._serve(running))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return stream

    async def probe(self, owner: str, prompt_ids: bytes, salt: str = "") -> int:
        if self.hello is None:
            raise EngineUnavailable("the null engine is away")
        return 0

    async def query(self, kind: str, argument: dict[str, Any] | None = None) -> dict[str, Any]:
        if self.hello is None:
            raise EngineUnavailable("the null engine is away")
        answers: dict[str, dict[str, Any]] = {
            "stats": {"running": len(self._running), "queue": 0, "boot_id": self.hello.boot_id},
            "invariants": {"ok": True, "error": None},
            "flush": {"blocks": 0},
        }
        return answers[kind]

    def die(self, message: str = "killed by the test") -> None:
        """Play an engine that is lost: every open stream ends with `engine_died`."""
        self.hello = None
        for running in list(self._running.values()):
            running.stream.fail(EngineError("engine_died", message))
        self._running.clear()

    async def close(self) -> None:
        self.die("the client was closed")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _obey(self, message: Stop | Cancel) -> None:
        running = self._running.get(message.request_id)
        if running is None:
            return
        if isinstance(message, Stop):
            running.limits[message.output_index] = message.n_tokens
        else:
            running.cancelled = True

    async def _serve(self, running: _Running) -> None:
        stream, submit = running.stream, running.stream.submit
        prompt = self._prompt_record(submit)
        if self.error is not None:
            none = (0,) * submit.n
            self._finish(
                running, Finished(submit.request_id, PromptRecord(), none, ("error",) * submit.n, error=self.error)
            )
            return
        stream.receive(Accepted(submit.request_id, prompt, 0.0))
        reply = self._reply(submit) if callable(self._reply) else self._reply
        ids = tuple(reply[: submit.sampling.max_tokens])
        whole_reply_reason = "stop" if len(ids) == len(reply) else "length"
        counts, ends = [0] * submit.n, ["" if ids else whole_reply_reason] * submit.n
        for start in range(0, len(ids), self._tokens_per_delta):
            await asyncio.sleep(self._delay_s)
            if running.cancelled or stream.finished:
                break
            for output in range(submit.n):
                if output in running.limits:
                    continue
                part = ids[start : start + self._tokens_per_delta]
                counts[output] = start + len(part)
                ends[output] = whole_reply_reason if counts[output] == len(ids) else ""
                reason = ends[output] or None
                stream.receive(Delta(submit.request_id, output, part, counts[output], reason))
            if len(running.limits) == submit.n:
                break
        for output, limit in running.limits.items():
            counts[output], ends[output] = min(counts[output], limit), "stop"
        final = tuple(reason or "cancelled" for reason in ends)
        self._finish(running, Finished(submit.request_id, prompt, tuple(counts), final))

    def _finish(self, running: _Running, finished: Finished) -> None:
        self._running.pop(finished.request_id, None)
        running.stream.receive(finished)

    def _prompt_record(self, submit: Submit) -> PromptRecord:
        if self._bill is None:
            return PromptRecord(written_unleased=len(submit.prompt_ids) // 4)
        return self._bill(submit) if callable(self._bill) else self._bill
