"""The engine's sockets: many peers, none of which can hold up another."""

import contextlib
import os
import socket
import struct
import tempfile
import threading
from array import array
from pathlib import Path

import pytest

from engine import protocol as p
from engine.connection import MAX_UNSENT_ANSWERS
from engine.errors import StartError
from engine.listener import MAX_SOCKET_PATH_BYTES, listen
from engine.null import null_hello
from engine.server import Server

IDS = array("i", [5, 6, 7]).tobytes()
RECORD = p.PromptRecord(written_unleased=3)


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(prefix="rg-") as path:
        yield Path(path)


class Recorder:
    """A handler that notes what it is asked, and lets the test wait for it."""

    def __init__(self):
        self.calls, self.changed, self.refusal = [], threading.Condition(), None

    def note(self, *call):
        with self.changed:
            self.calls.append(call)
            self.changed.notify_all()

    def wait_for(self, *call):
        with self.changed:
            assert self.changed.wait_for(lambda: call in self.calls, 10), (call, self.calls)

    def submit(self, submit):
        self.note("submit", submit.request_id)
        return self.refusal

    def stop(self, stop):
        self.note("stop", stop.request_id, stop.output_index, stop.n_tokens)

    def cancel(self, request_id):
        self.note("cancel", request_id)

    def probe(self, probe):
        return p.ProbeResult(probe.probe_id, 16)

    def query(self, query, reply):
        reply(p.Answer(query.query_id, {"kind": query.kind}))


class Peer:
    def __init__(self, path):
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(10)
        self.sock.connect(str(path))
        self.decoder, self.heard = p.Decoder(), []
        self.hello = self.hear()

    def say(self, *messages):
        self.sock.sendall(b"".join(map(p.encode, messages)))

    def hear(self):
        """The next message; None when the engine closed the connection."""
        while not self.heard:
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self.heard += self.decoder.feed(data)
        return self.heard.pop(0)

    def hear_streams(self, until):
        """Stream messages up to the first of type `until`."""
        messages = []
        while not (messages and isinstance(messages[-1], until)):
            message = self.hear()
            messages += message.messages if isinstance(message, p.Batch) else [message]
        return messages


@pytest.fixture
def engine(folder):
    class Running:
        path = folder / "run" / "engine.sock"

    handler = Running.handler = Recorder()
    server = Running.server = Server(listen(Running.path), null_hello(), handler, max_unsent_tokens=1000)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield Running
    server.stop()
    thread.join(10)
    assert not thread.is_alive()
    server.close(0.1)


def submit(request_id="r", n=1):
    return p.Submit(request_id, "acme", IDS, p.Sampling(max_tokens=9), n)


def delta(request_id, start, count, reason=None):
    return p.Delta(request_id, 0, tuple(range(start, start + count)), start + count, reason)


def finished(request_id, n_tokens, reason="stop"):
    return p.Finished(request_id, RECORD, (n_tokens,), (reason,))


def test_hello_comes_first_and_a_step_comes_as_one_batch(engine):
    peer = Peer(engine.path)
    assert peer.hello == null_hello()
    peer.say(submit("a"), submit("b"))
    engine.handler.wait_for("submit", "b")
    step = (p.Accepted("a", RECORD, 0.0), delta("a", 0, 1), delta("b", 0, 1))
    assert engine.server.deliver(step) == []
    assert peer.hear() == p.Batch(step)


def test_every_connection_hears_of_its_own_requests_alone(engine):
    one, two = Peer(engine.path), Peer(engine.path)
    one.say(submit("a"))
    two.say(submit("b"))
    engine.handler.wait_for("submit", "a")
    engine.handler.wait_for("submit", "b")
    engine.server.deliver([delta("a", 0, 1), delta("b", 0, 2)])
    assert (one.hear(), two.hear()) == (p.Batch((delta("a", 0, 1),)), p.Batch((delta("b", 0, 2),)))


def test_a_connection_that_closes_cancels_all_its_requests_and_no_others(engine):
    leaver, stayer = Peer(engine.path), Peer(engine.path)
    leaver.say(submit("a"), submit("b"), submit("done"))
    stayer.say(submit("c"))
    for request_id in ("done", "c"):
        engine.handler.wait_for("submit", request_id)
    engine.server.deliver([finished("done", 0)])
    leaver.sock.close()
    engine.handler.wait_for("cancel", "a")
    engine.handler.wait_for("cancel", "b")
    engine.server.deliver([finished("a", 1, "cancelled"), delta("c", 0, 1)])
    assert stayer.hear() == p.Batch((delta("c", 0, 1),))
    assert [call for call in engine.handler.calls if call[0] == "cancel" and call[1] in ("c", "done")] == []


def test_stop_and_cancel_reach_only_requests_of_the_same_connection(engine):
    owner, stranger = Peer(engine.path), Peer(engine.path)
    owner.say(submit("a"))
    engine.handler.wait_for("submit", "a")
    stranger.say(p.Cancel("a"), p.Stop("a", 0, 1), p.Probe(1, "acme", IDS))
    assert stranger.hear() == p.ProbeResult(1, 16)
    assert engine.handler.calls == [("submit", "a")]
    owner.say(p.Stop("a", 0, 3), p.Cancel("a"))
    engine.handler.wait_for("stop", "a", 0, 3)
    engine.handler.wait_for("cancel", "a")


def test_a_stop_that_crosses_finished_still_arrives(engine):
    peer = Peer(engine.path)
    peer.say(submit("a"))
    engine.handler.wait_for("submit", "a")
    engine.server.deliver([finished("a", 5)])
    peer.say(p.Stop("a", 0, 3), p.Cancel("a"))
    engine.handler.wait_for("stop", "a", 0, 3)
    assert ("cancel", "a") not in engine.handler.calls


def test_queries_are_answered(engine):
    peer = Peer(engine.path)
    peer.say(p.Query(4, "stats", {}))
    assert peer.hear() == p.Answer(4, {"kind": "stats"})


def test_a_refused_request_is_finished_with_the_error(engine):
    engine.handler.refusal = p.EngineError("draining", "later")
    peer = Peer(engine.path)
    peer.say(submit("a", n=2))
    expected = p.Finished("a", p.PromptRecord(), (0, 0), ("error", "error"), error=p.EngineError("draining", "later"))
    assert peer.hear() == p.Batch((expected,))
    engine.handler.refusal = None
    peer.say(submit("a"))
    engine.server.deliver([delta("a", 0, 1)])


def test_a_request_id_in_use_elsewhere_is_refused_and_the_first_goes_on(engine):
    one, two = Peer(engine.path), Peer(engine.path)
    one.say(submit("a"))
    engine.handler.wait_for("submit", "a")
    two.say(submit("a"))
    (refused,) = two.hear().messages
    assert (refused.error.code, refused.output_tokens) == ("invalid_request", (0,))
    engine.server.deliver([delta("a", 0, 1)])
    assert one.hear() == p.Batch((delta("a", 0, 1),))


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\n\r\n" * 8,
        p.encode(null_hello()),
        p.encode(submit("twice")) * 2,
        struct.pack("<II", 8, 100) + b"{}{}",
    ],
    ids=["bytes", "http", "an engine's message", "an id used twice", "a broken frame"],
)
def test_junk_closes_that_connection_and_no_other(engine, junk):
    good, bad = Peer(engine.path), Peer(engine.path)
    good.say(submit("a"))
    engine.handler.wait_for("submit", "a")
    bad.sock.sendall(junk + b"\xff" * 8)
    while bad.hear() is not None:
        pass
    engine.server.deliver([delta("a", 0, 1)])
    assert good.hear() == p.Batch((delta("a", 0, 1),))


def fill(engine, request_id, size=20_000):
    """Steps that say so much to a peer which does not read that the kernel takes no more. Returns tokens said."""
    said = 0
    while True:
        slow = engine.server.deliver([delta(request_id, said, size)])
        said += size
        if slow:
            return said


def test_a_stalled_peer_is_bounded_and_its_streams_end_as_slow_while_others_go_on(engine):
    stalled, reader = Peer(engine.path), Peer(engine.path)
    stalled.say(submit("slow"), submit("quiet"))
    reader.say(submit("b"))
    for request_id in ("quiet", "b"):
        engine.handler.wait_for("submit", request_id)
    said = fill(engine, "slow")
    assert engine.server.deliver([delta("slow", said, 1)]) == [], "asked for once"
    engine.server.deliver([delta("b", 0, 1), delta("quiet", 0, 1), finished("slow", said + 1, "cancelled")])
    assert reader.hear() == p.Batch((delta("b", 0, 1),))
    heard = []
    while not any(isinstance(message, p.Finished) for message in heard):
        heard += stalled.hear().messages
    deltas = [message for message in heard if isinstance(message, p.Delta) and message.request_id == "slow"]
    assert [i for message in deltas for i in message.token_ids] == list(range(said + 1)), "nothing lost, nothing twice"
    (end,) = [message for message in heard if isinstance(message, p.Finished)]
    assert (end.output_tokens, end.error.code) == ((said + 1,), "slow_client")
    assert delta("quiet", 0, 1) in heard
    engine.server.deliver([delta("quiet", 1, 1), finished("quiet", 2)])
    assert stalled.hear_streams(p.Finished)[-1] == finished("quiet", 2)


def test_a_slow_stream_is_told_so_even_when_its_peer_reads_again_before_the_end(engine):
    peer = Peer(engine.path)
    peer.say(submit("slow"))
    engine.handler.wait_for("submit", "slow")
    said = fill(engine, "slow")
    heard = 0
    while heard < said:
        heard += sum(len(message.token_ids) for message in peer.hear().messages)
    engine.server.deliver([finished("slow", said, "cancelled")])
    assert peer.hear_streams(p.Finished)[-1].error.code == "slow_client"


def test_a_peer_that_asks_and_never_reads_is_dropped(engine):
    peer, other = Peer(engine.path), Peer(engine.path)
    peer.say(submit("a"))
    engine.handler.wait_for("submit", "a")
    fill(engine, "a")
    probe = p.encode(p.Probe(1, "acme", IDS))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        peer.sock.sendall(probe * (MAX_UNSENT_ANSWERS + 2))
    engine.handler.wait_for("cancel", "a")
    other.say(p.Query(1, "stats", {}))
    assert other.hear() == p.Answer(1, {"kind": "stats"})


def test_a_peer_of_another_user_is_refused(engine, monkeypatch):
    monkeypatch.setattr("engine.server.peer_uid", lambda connection: os.geteuid() + 1)
    assert Peer(engine.path).hello is None


def test_the_socket_lies_in_a_private_directory(engine):
    assert engine.path.parent.stat().st_mode & 0o777 == 0o700
    assert engine.path.stat().st_mode & 0o077 == 0


def test_a_directory_that_others_can_enter_is_refused(folder):
    folder.chmod(0o755)
    with pytest.raises(StartError, match=r"mode 0755.*chmod 700") as caught:
        listen(folder / "engine.sock")
    assert caught.value.code == "socket_directory_not_private"


def test_a_dead_engines_socket_is_replaced_and_a_living_ones_is_not(folder):
    path = folder / "engine.sock"
    listen(path).close()
    assert path.exists()
    with contextlib.closing(listen(path)), pytest.raises(StartError, match="another engine listens") as caught:
        listen(path)
    assert caught.value.code == "socket_in_use"


def test_a_file_in_the_sockets_place_is_not_removed(folder):
    path = folder / "engine.sock"
    path.write_text("mine")
    with pytest.raises(StartError, match="not a socket"):
        listen(path)
    assert path.read_text() == "mine"


def test_a_path_too_long_for_a_socket_is_refused_by_name(folder):
    with pytest.raises(StartError, match="shorter path") as caught:
        listen(folder / ("x" * MAX_SOCKET_PATH_BYTES))
    assert caught.value.code == "socket_path_too_long"
