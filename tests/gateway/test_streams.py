"""Stop strings, the tail that is held for them, and which token's probability goes with which text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import TokenLogprob
from gateway.streams import OutputText, StopFinder
from gateway.tokenizer import Tokenizer
from tests.gateway.support import byte_level_tokenizer

TOKENIZER = Tokenizer(byte_level_tokenizer())


def ids_of(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def output(*stops: str, **options: int) -> OutputText:
    return OutputText(TOKENIZER.detokenizer(), stops, **options)


def test_a_stop_string_spread_over_three_pieces_is_never_shown():
    finder = StopFinder(["<END>"])
    assert [finder.push("a<"), finder.push("EN"), finder.push("D>b")] == ["a", "", ""]
    assert finder.found == "<END>"


def test_what_only_looked_like_a_stop_string_is_shown():
    finder = StopFinder(["<END>"])
    assert [finder.push("a<EN"), finder.push("Q"), finder.push("<E"), finder.flush()] == ["a", "<ENQ", "", "<E"]
    assert finder.found is None


def test_the_stop_string_that_begins_first_wins():
    finder = StopFinder(["cd", "bcde"])
    assert finder.push("abcde") == "a"
    assert finder.found == "bcde"


def test_overlapping_beginnings_are_held_at_their_longest():
    finder = StopFinder(["aab"])
    assert [finder.push("aa"), finder.push("a"), finder.push("b")] == ["", "a", ""]
    assert finder.found == "aab"


@given(
    text=st.text("ab<", max_size=30),
    stops=st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3),
    cut=st.lists(st.integers(1, 3), min_size=30, max_size=30),
)
@settings(deadline=None, max_examples=500)
def test_whatever_the_pieces_the_text_ends_where_the_first_completed_stop_string_begins(text, stops, cut):
    finder, shown, at = StopFinder(stops), [], 0
    for size in cut:
        if finder.found or at >= len(text):
            break
        shown.append(finder.push(text[at : at + size]))
        at += size
    if not finder.found:
        shown.append(finder.flush())
        assert "".join(shown) == text and not any(stop in text for stop in stops)
    else:
        seen = text[:at]
        assert "".join(shown) == seen[: min(i for stop in stops if (i := seen.find(stop)) >= 0)]


def test_the_token_that_completes_the_stop_string_is_counted():
    ids = ids_of("quick brown STOP and more")
    n_tokens = next(n for n in range(1, len(ids) + 1) if "STOP" in TOKENIZER.decode(ids[:n]))
    piece = output("STOP").push(ids, len(ids))
    assert (piece.text, piece.stopped_at) == ("quick brown ", n_tokens)


def test_the_count_is_the_same_when_tokens_come_one_by_one():
    ids, text = ids_of("quick brown STOP and more"), output("STOP")
    whole = output("STOP").push(ids, len(ids))
    pieces = []
    for n_tokens, token_id in enumerate(ids, 1):
        pieces.append(text.push((token_id,), n_tokens))
        if text.stop_sequence:
            break
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].stopped_at == whole.stopped_at


def test_a_held_tail_is_shown_when_the_output_ends():
    ids, text = ids_of("the fox<E"), output("<END>")
    assert text.push(ids, len(ids)).text == "the fox"
    assert text.push((), len(ids), last=True).text == "<E"


def test_no_stop_string_ends_an_output_before_min_tokens():
    ids = ids_of("a. b. c.")
    second = next(n for n in range(1, len(ids) + 1) if TOKENIZER.decode(ids[:n]).count(".") == 2)
    piece = output(".", min_tokens=second).push(ids, len(ids))
    assert (piece.text, piece.stopped_at) == ("a. b", second)


def test_logprobs_go_with_their_text_and_stop_with_it():
    ids = ids_of("fox 🦊 dog END more")
    logprobs = [TokenLogprob(token_id, -0.5) for token_id in ids]
    text, shown, pieces = output("END"), "", []
    for n_tokens, (token_id, logprob) in enumerate(zip(ids, logprobs, strict=True), 1):
        piece = text.push((token_id,), n_tokens, (logprob,))
        shown += piece.text
        pieces += piece.logprobs
        if text.stop_sequence:
            break
    assert shown == "fox 🦊 dog "
    assert b"".join(TOKENIZER.shown_bytes(one.logprob.token_id) for one in pieces).decode() == shown
    assert [one.offset for one in pieces] == sorted(one.offset for one in pieces)
