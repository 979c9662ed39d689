"""Traces are read with care, and replaying them gives the published hit rates."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from radix_cache.replay import replay
from radix_cache.trace import Trace, TraceError, read_trace
from tests.shared_data import shared_file

# Leaf LRU, by block and by token; measured with an independent flat simulator. None: never evict.
PUBLISHED = {
    "conversation": {
        1000: (0.0445, 0.0454),
        10_000: (0.2116, 0.2157),
        30_000: (0.3257, 0.3322),
        50_000: (0.3546, 0.3615),
        100_000: (0.3637, 0.3708),
        None: (0.3664, 0.3736),
    },
    "synthetic": {
        1000: (0.0841, 0.0857),
        10_000: (0.4239, 0.4318),
        30_000: (0.6242, 0.6356),
        50_000: (0.6396, 0.6512),
        100_000: (0.6396, 0.6512),
        None: (0.6396, 0.6512),
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_lru_equals_the_published_table(name: str) -> None:
    trace = read_trace(shared_file(f"traces/mooncake_{name}_trace.jsonl.gz"), block_tokens=512)
    measured = {blocks: replay(trace, blocks, block_tokens=512) for blocks in PUBLISHED[name]}
    rates = {blocks: (round(r.block_hit_rate, 4), round(r.token_hit_rate, 4)) for blocks, r in measured.items()}
    assert rates == PUBLISHED[name]


def write(path: Path, *records: object) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in records))
    return path


def hashed(ids: list[int], tokens: int | None = None) -> dict[str, object]:
    return {"timestamp": 0, "hash_ids": ids, "input_length": len(ids) * 4 if tokens is None else tokens}


def read(path: Path) -> Trace:
    return read_trace(path, block_tokens=4)


def test_the_last_block_weighs_what_it_holds(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "t", hashed([1, 2, 3], 9), hashed([1, 2, 3], 9)))
    result = replay(trace, 10, block_tokens=4)
    assert (result.n_blocks, result.hit_blocks, result.n_tokens, result.hit_tokens) == (6, 3, 18, 9)


def test_only_the_unbroken_prefix_counts(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "t", hashed([1, 2]), hashed([1, 3]), hashed([1, 2, 4])))
    assert replay(trace, 10, block_tokens=4).hit_blocks == 0 + 1 + 2


def test_the_least_recently_used_leaf_goes_first(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "t", hashed([1, 2]), hashed([3]), hashed([1, 2]), hashed([4]), hashed([3])))
    assert replay(trace, 3, block_tokens=4).hit_blocks == 2
    assert replay(trace, 4, block_tokens=4).hit_blocks == 3


def test_a_prompt_longer_than_the_store_is_looked_up_and_not_kept(tmp_path: Path) -> None:
    trace = read(write(tmp_path / "t", hashed([1, 2]), hashed([1, 2, 3, 4, 5]), hashed([1, 2])))
    assert replay(trace, 3, block_tokens=4).hit_blocks == 0 + 2 + 2


def test_an_empty_prompt_and_an_empty_trace(tmp_path: Path) -> None:
    assert replay(read(write(tmp_path / "t", hashed([], 0))), 3, block_tokens=4).n_blocks == 0
    assert replay(read(write(tmp_path / "e")), 3, block_tokens=4).block_hit_rate == 0.0


def test_texts_and_messages_are_encoded(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": None}]
    trace = read(write(tmp_path / "t", {"messages": messages}, {"messages": messages}, {"text": "12345678"}))
    result = replay(trace, 100, block_tokens=4)
    n_tokens = len("user\nhello\nassistant\n\n")
    assert (result.n_tokens, result.hit_tokens) == (2 * n_tokens + 8, n_tokens)


def test_gzip_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(json.dumps(hashed([1, 2])).encode()))
    assert len(read(path).requests) == 1


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([hashed([1]), "{"], "t:2: not JSON"),
        (["[]"], "t:1: expected an object"),
        ([hashed([1, 2]), "", hashed([1, 2, 1])], "t:3: block 1 stands twice"),
        ([hashed([1, 2]), hashed([3, 2])], "t:2: block 2 follows 3 here and 1 before"),
        ([hashed([1, 2]), hashed([2])], "t:2: block 2 follows -1 here and 1 before"),
        ([hashed([-1])], "integers from 0"),
        ([hashed([2**31])], "integers from 0"),
        ([hashed([1], 5)], "does not fit 1 blocks of 4 tokens"),
        ([{"hash_ids": "1"}], "list of integers"),
        ([{"answer": 1}], "expected hash_ids, text, prompt or messages; got answer"),
        ([{"text": 3}], "expected hash_ids"),
        ([{"messages": ["x"]}], "list of objects"),
        ([{"text": "x", "timestamp": "noon"}], "not a number of milliseconds"),
        ([hashed([1]), {"text": "x"}], "holds both"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, records: list[object], message: str) -> None:
    with pytest.raises(TraceError, match=message.replace("[", r"\[")):
        read(write(tmp_path / "t", *records))


def test_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(json.dumps(hashed([1, 2])).encode())[:-9])
    with pytest.raises(TraceError, match="damaged gzip"):
        read(path)
