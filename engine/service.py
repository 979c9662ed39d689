"""What an engine does with the messages of its gateways: the glue between the socket thread and the step loop."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from engine.backlog import StreamMessage
from engine.errors import Refused
from engine.loop import EngineLoop
from engine.protocol import (
    Answer,
    EngineError,
    Hello,
    Probe,
    ProbeResult,
    ProtocolError,
    Query,
    Stop,
    Submit,
)
from engine.sequence import TOKEN_BYTES
from engine.server import Server, rejection
from engine.status import Beat
from engine.stepper import StepThread
from engine.validation import refusal
from radix_cache.blocks import InvariantError

CUT_OFF_GRACE_S = 5.0
LAST_SEND_S = 2.0

CUT_OFF = EngineError("draining", "the engine shut down before the request had ended")

log = logging.getLogger(__name__)


class EngineService:
    """Answers the gateways until it is told to end: `start`, then `run`, which takes the calling thread.

    Ending: `terminate` (safe in a signal handler) lets running requests finish, for `drain_s` at most, and refuses new
    ones; called again it ends what runs at once.
    """

    def __init__(
        self,
        loop: EngineLoop,
        hello: Hello,
        listener: socket.socket,
        *,
        drain_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._loop = loop
        self._hello = hello
        self._drain_s = drain_s
        self._clock = clock
        self._started_s = clock()
        self._server = Server(listener, hello, self)
        self._steps = StepThread(loop, self._deliver, self._crash, clock=clock)
        self._terminations = 0
        self._draining = False
        self._cut_off = False
        self._deadlines: list[threading.Timer] = []
        """Of a drain: they end with the service."""
        self._exit_code = 0

    @property
    def wake_fd(self) -> int:
        """For signal.set_wakeup_fd: a signal wakes the thread in `run`."""
        return self._server.wake_fd

    def start(self) -> None:
        """Start the step thread: from here on what `run` takes in is served."""
        self._steps.start()

    def run(self) -> int:
        """Carry messages. Returns the process's exit code: 0 after `terminate`, 1 when the step loop broke."""
        self._server.run(self._attend)
        self._steps.stop()
        self._steps.join(CUT_OFF_GRACE_S)
        self._server.close(LAST_SEND_S)
        for timer in self._deadlines:
            timer.cancel()
        return self._exit_code

    def terminate(self) -> None:
        self._terminations += 1
        self._server.wake()

    def beat(self) -> Beat:
        return Beat(self._loop.counters.steps, self._steps.waiting_s(), self._loop.n_waiting, self._loop.n_running)

    # --- socket thread ------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> EngineError | None:
        if self._terminations:
            return EngineError("draining", "the engine is shutting down; send the request again in a moment")
        error = refusal(submit, self._hello.vocab_size)
        if error is None:
            self._steps.between_steps(lambda: self._admit(submit))
        return error

    def stop(self, stop: Stop) -> None:
        self._steps.between_steps(lambda: self._loop.stop(stop.request_id, stop.output_index, stop.n_tokens))

    def cancel(self, request_id: str) -> None:
        self._steps.between_steps(lambda: self._loop.cancel(request_id))

    def probe(self, probe: Probe) -> ProbeResult:
        if len(probe.prompt_ids) % TOKEN_BYTES:
            raise ProtocolError(f"a probe of {len(probe.prompt_ids)} bytes, which are no int32 token ids")
        return ProbeResult(probe.probe_id, self._loop.probe(probe.owner, probe.prompt_ids, probe.salt))

    def query(self, query: Query, reply: Callable[[Answer], None]) -> None:
        """`stats` while a step runs; `invariants` and `flush`, which need the tree to stand still, between two."""
        match query.kind:
            case "stats":
                reply(self._answer(query, self._stats))
            case "invariants":
                self._steps.between_steps(lambda: reply(self._answer(query, self._invariants)))
            case "flush":
                self._steps.between_steps(lambda: reply(self._answer(query, lambda: self._flush(query.argument))))
            case _:
                reply(Answer(query.query_id, {}, f"no query {query.kind!r}; expected stats, invariants or flush"))

    def _attend(self) -> None:
        """Something woke the thread: perhaps a signal, or the last request of a drain ended."""
        if self._terminations and not self._draining:
            self._begin_drain()
        if self._terminations > 1:
            self._cut_off_rest()
        if self._draining and not self._server.live():
            self._server.stop()

    def _begin_drain(self) -> None:
        self._draining = True
        self._server.stop_listening()
        live = self._server.live()
        log.info("shutting down: %d requests may go on for %g s", len(live), self._drain_s)
        for delay_s, action in ((self._drain_s, self.terminate), (self._drain_s + CUT_OFF_GRACE_S, self._give_up)):
            timer = threading.Timer(delay_s, action)
            timer.daemon = True
            timer.start()
            self._deadlines.append(timer)

    def _cut_off_rest(self) -> None:
        if not self._cut_off:
            self._cut_off = True
            for request_id in self._server.live():
                self._steps.between_steps(partial(self._loop.cancel, request_id, CUT_OFF))

    def _give_up(self) -> None:
        """A step hangs: it will never be between two."""
        log.error("the step loop did not end; all stacks:")
        faulthandler.dump_traceback(all_threads=True)
        os._exit(1)

    def _stats(self) -> dict[str, Any]:
        beat = self.beat()
        return {
            "boot_id": self._hello.boot_id,
            "uptime_s": self._clock() - self._started_s,
            "steps": beat.steps,
            "waiting_s": beat.waiting_s,
            "queue": beat.queue,
            "running": beat.running,
            "connections": self._server.n_connections,
            **self._loop.stats(),
        }

    def _invariants(self) -> dict[str, Any]:
        try:
            return {"ok": True, "error": None, **self._loop.check_invariants()}
        except InvariantError as error:
            log.critical("the prefix store is inconsistent: %s", error)
            return {"ok": False, "error": str(error)}

    def _flush(self, argument: dict[str, Any]) -> dict[str, Any]:
        owner = argument.get("owner")
        if owner is not None and not isinstance(owner, str):
            raise ValueError(f"owner is {owner!r}; expected a tenant's id, or nothing for all")
        return {"blocks": self._loop.flush(owner)}

    def _answer(self, query: Query, ask: Callable[[], dict[str, Any]]) -> Answer:
        try:
            return Answer(query.query_id, ask())
        except Exception as error:
            log.exception("query %s failed", query.kind)
            return Answer(query.query_id, {}, str(error) or type(error).__name__)

    # --- step thread --------------------------------------------------------------------------------------------------

    def _admit(self, submit: Submit) -> None:
        try:
            self._loop.submit(submit)
        except Refused as refused:
            self._deliver([rejection(submit, EngineError(refused.code, refused.message))])

    def _deliver(self, messages: Sequence[StreamMessage]) -> list[str]:
        too_slow = self._server.deliver(messages)
        if self._draining:
            self._server.wake()
        return too_slow

    def _crash(self, error: BaseException) -> None:
        log.critical("the step loop broke", exc_info=error)
        self._exit_code = 1
        self._server.stop()
