"""The scanner agrees with a JSON parser, whatever the cuts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.json_scanner import MAX_DEPTH, JsonScanner, NotJson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
CONTAINERS = st.lists(VALUES, max_size=4) | st.dictionaries(st.text(), VALUES, max_size=4)


def end_of(text: str, cuts: list[int]) -> int | None:
    """Where the value ends; None when it does not. Raises NotJson with `at` in the whole text."""
    scanner, read, at = JsonScanner(), 0, 0
    for cut in [*cuts, len(text)]:
        part = text[at : at + cut]
        try:
            read += scanner.feed(part)
        except NotJson as error:
            raise NotJson(at + error.at) from None
        at += cut
        if scanner.complete:
            return read
    return None


@given(value=CONTAINERS, indent=st.sampled_from([None, 2]), escaped=st.booleans(), cuts=st.lists(st.integers(1, 5)))
@settings(max_examples=300, deadline=None)
def test_every_value_is_followed_to_its_end(value, indent, escaped, cuts):
    text = json.dumps(value, indent=indent, ensure_ascii=escaped)
    assert end_of(text + "]} rest", cuts) == len(text)
    assert end_of(text[:-1], cuts) is None


@given(text=st.text('{}[]",:\\u0019-+.eEtrufalsn \n', max_size=24).map(lambda text: "{" + text), cut=st.integers(1, 4))
@settings(max_examples=1000, deadline=None)
def test_what_it_takes_for_json_is_json_and_the_reverse(text, cut):
    try:
        end = end_of(text, [cut] * len(text))
    except NotJson as error:
        end = None
        with pytest.raises(ValueError):
            json.JSONDecoder().raw_decode(text)
        assert 0 <= error.at < len(text)
    if end is not None:
        assert json.JSONDecoder().raw_decode(text)[1] == end


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("{a", 1),
        ('{"a" 1', 5),
        ('{"a":}', 5),
        ('{"a":1,}', 7),
        ("[1,]", 3),
        ('["\n"]', 2),
        ('["\\x"]', 3),
        ('["\\u12g4"]', 6),
        ("[01]", 1),
        ("[nul]", 1),
        ("[NaN]", 1),
        ("[1]", None),
        ("1", 0),
        ('"a"', 0),
        ("[" * (MAX_DEPTH + 1), MAX_DEPTH),
        ("[" + "1" * 1000, 1),
    ],
)
def test_where_it_stops_being_json(text, at):
    if at is None:
        assert end_of(text, []) == len(text)
    else:
        with pytest.raises(NotJson) as error:
            end_of(text, [])
        assert error.value.at == at
