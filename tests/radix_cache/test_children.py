"""Exact and nearest first blocks, against a search through all of them."""

import random
from array import array
from typing import cast

from radix_cache.children import MAX_RUN, Children, SortedKeys, common_prefix
from radix_cache.tree import Node


def key(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def shared_tokens(a: bytes, b: bytes) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n : n + 4] == b[n : n + 4]:
        n += 4
    return n // 4


def test_common_prefix_counts_whole_tokens() -> None:
    edge = key(1, 2, 3, 4)
    assert common_prefix(edge, len(edge), key(1, 2, 9, 4), 0) == 8
    assert common_prefix(edge, len(edge), key(7, 1, 2, 3, 4, 5), 4) == 16
    assert common_prefix(edge, 8, key(1, 2, 3), 0) == 8
    assert common_prefix(edge, len(edge), key(), 0) == 0
    assert common_prefix(key(256), 4, key(512), 0) == 0  # three of the four bytes are equal


def test_the_nearest_child_shares_as_many_tokens_as_any() -> None:
    rng = random.Random(1)
    children, keys = Children(), set[bytes]()
    for _ in range(4000):
        probe = key(*(rng.randrange(-1, 3) for _ in range(6)))
        if probe in keys and rng.random() < 0.7:
            children.drop(probe)
            keys.remove(probe)
        elif len(keys) < 300:
            short = probe[: 4 * rng.randrange(1, 7)]
            children.add(short, cast(Node, short))
            keys.add(short)
        asked = key(*(rng.randrange(-1, 3) for _ in range(6)))
        best = max((shared_tokens(one, asked) for one in keys), default=0)
        near = children.nearest(asked) if keys else None
        if best == 0:
            assert near is None
        else:
            assert near is not None and near[1] == 4 * best == 4 * shared_tokens(cast(bytes, near[0]), asked)


def test_sorted_keys_stay_sorted_over_many_runs() -> None:
    rng = random.Random(2)
    names = [rng.randbytes(8) for _ in range(5 * MAX_RUN)]
    order, known = SortedKeys([]), list[bytes]()
    for name in names:
        order.add(name)
    for name in names[::3]:
        order.remove(name)
    known = sorted(set(names) - set(names[::3]))
    for i in range(1, len(known), 97):
        assert order.around(known[i]) == [known[i - 1], known[i]]
        assert order.before(known[i]) == known[i - 1]
    assert order.before(b"") is None and order.around(b"\xff" * 9) == [known[-1]]
