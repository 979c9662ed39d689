"""Messages survive the wire unchanged, whole or in pieces, and junk is refused."""

import struct
from array import array

import pytest

from engine import protocol as p

IDS = array("i", [1, -1, 2**31 - 1]).tobytes()
MESSAGES = [
    p.Submit("r", "acme", IDS, p.Sampling(max_tokens=4, logit_bias=((3, -1.5),)), breakpoints=(p.Breakpoint(2, 300),)),
    p.Stop("r", 0, 3),
    p.Cancel("r"),
    p.Probe(7, "acme", IDS, "salt"),
    p.Query(1, "stats", {"a": [1, None]}),
    p.Hello(p.PROTOCOL_VERSION, "m", "/m", "rev", "boot", 1, 16, 100, 2048, 49152, (2,), "float32", "cpu"),
    p.Accepted("r", p.PromptRecord(1, 2, 3, ((300, 4),), 5), 0.5),
    p.Delta("r", 0, (5, 6), 2, "stop", 6, (p.TokenLogprob(5, -0.1, ((5, -0.1),)), p.TokenLogprob(6, -2.0))),
    p.Finished("r", p.PromptRecord(uncached=3), (2,), ("stop",), error=p.EngineError("step_failed", "why")),
    p.ProbeResult(7, 16),
    p.Answer(1, {"steps": 3}, None),
    p.Batch((p.Delta("r", 0, (1,), 1), p.Finished("r", p.PromptRecord(), (1,), ("length",)))),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_round_trip(message):
    assert list(p.Decoder().feed(p.encode(message))) == [message]


def test_messages_arrive_in_pieces_of_one_byte():
    decoder, stream = p.Decoder(), b"".join(map(p.encode, MESSAGES))
    assert [m for i in range(len(stream)) for m in decoder.feed(stream[i : i + 1])] == MESSAGES


def test_prompt_record_adds_up():
    record = p.PromptRecord(1, 2, 3, ((300, 4), (3600, 6)), 5)
    assert (record.cached, record.leased, record.written, record.prompt) == (3, 10, 13, 21)


def frame(text: bytes) -> bytes:
    return struct.pack("<II", 4 + len(text), len(text)) + text


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", p.MAX_FRAME_BYTES + 1),
        frame(b"not json"),
        frame(b'[["Nope"],[]]'),
        frame(b'[["Sampling",1],[]]'),
        frame(b'[["Cancel"],[]]'),
        frame(b'[["Cancel",5],[]]'),
        frame(b'[["Cancel","r"],[9]]'),
        frame(b'[["Submit","r","o",3,["Sampling"]],[]]'),
        frame(b"[[],[]]"),
        struct.pack("<I", 2) + b"xx",
    ],
)
def test_junk_is_refused(data):
    with pytest.raises(p.ProtocolError):
        list(p.Decoder().feed(data))
