"""What an engine tells whoever started it never holds the engine up."""

import contextlib
import json
import os

import pytest

from engine.status import Beat, Heart, StatusLine


@pytest.fixture
def pipe():
    read, write = os.pipe()
    yield read, write
    for fd in (read, write):
        with contextlib.suppress(OSError):
            os.close(fd)


def lines(read):
    return [json.loads(line) for line in os.read(read, 1 << 20).splitlines()]


def test_the_lines(pipe):
    read, write = pipe
    status = StatusLine(write)
    status.progress("loading", 0.123456)
    status.ready()
    status.beat(Beat(7, 1.23456, 2, 3))
    status.failed("model_not_found", "no such\nmodel")
    assert lines(read) == [
        {"type": "progress", "stage": "loading", "fraction": 0.1235},
        {"type": "ready"},
        {"type": "beat", "steps": 7, "waiting_s": 1.235, "queue": 2, "running": 3},
        {"type": "failed", "code": "model_not_found", "message": "no such\nmodel"},
    ]


def test_beats_are_dropped_while_nobody_reads_and_whole_when_somebody_does_again(pipe):
    read, write = pipe
    status = StatusLine(write)
    for step in range(5000):
        status.beat(Beat(step, 0.0, 0, 0))
    seen = [line["steps"] for line in lines(read)]
    assert seen == list(range(len(seen)))
    assert len(seen) < 5000
    status.beat(Beat(5000, 0.0, 0, 0))
    assert lines(read)[0]["steps"] == 5000


def test_a_reader_that_is_gone_is_no_error(pipe):
    read, write = pipe
    status = StatusLine(write)
    os.close(read)
    status.beat(Beat(1, 0.0, 0, 0))
    status.ready()


def test_the_heart_beats_from_the_start_and_follows_the_work_once_there_is_some(pipe):
    read, write = pipe
    heart = Heart(StatusLine(write))
    heart.beat()
    heart.follow(lambda: Beat(9, 1.5, 2, 1))
    heart.beat()
    assert [(line["steps"], line["waiting_s"]) for line in lines(read)] == [(0, 0.0), (9, 1.5)]
