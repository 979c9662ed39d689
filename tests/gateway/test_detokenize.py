"""Text arrives in whole characters, and all of it: the joined pieces are the whole decode."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenize import ByteLevelDetokenizer, WindowDetokenizer
from gateway.tokenizer import Tokenizer
from tests.gateway.support import byte_level_tokenizer, sentencepiece_tokenizer

SHARED = Path(os.environ.get("RADIXGATE_SHARED", Path(__file__).parents[3] / "shared"))
BYTE_LEVEL = Tokenizer(byte_level_tokenizer())
METASPACE = Tokenizer(sentencepiece_tokenizer())
TEXTS = st.text(max_size=40)
UNCUT = "\N{REPLACEMENT CHARACTER}"


def pieces(detokenizer, ids, sizes=(1,)):
    """The pieces that come of pushing the ids in groups of these sizes, over and over, and then flushing."""
    result, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        result.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*result, detokenizer.flush()]


def test_the_decoder_chooses_the_way():
    assert isinstance(BYTE_LEVEL.detokenizer(), ByteLevelDetokenizer)
    assert isinstance(METASPACE.detokenizer(), WindowDetokenizer)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte level", "metaspace"])
@given(text=TEXTS, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(deadline=None, max_examples=200)
def test_joined_pieces_are_the_text(tokenizer, text, sizes):
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    assert "".join(pieces(tokenizer.detokenizer(), ids, sizes)) == tokenizer.decode(ids)


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte level", "metaspace"])
@given(text=TEXTS.filter(lambda text: UNCUT not in text))
@settings(deadline=None, max_examples=200)
def test_no_piece_shows_half_a_character(tokenizer, text):
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    assert all(UNCUT not in piece for piece in pieces(tokenizer.detokenizer(), ids))


@given(ids=st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=60), size=st.integers(1, 4))
@settings(deadline=None, max_examples=400)
def test_any_ids_even_broken_characters_give_the_whole_decode(ids, size):
    assert "".join(pieces(BYTE_LEVEL.detokenizer(), ids, (size,))) == BYTE_LEVEL.decode(ids)


def test_an_emoji_of_many_tokens_comes_in_one_piece():
    ids = list(BYTE_LEVEL.encode("🦊!", add_special_tokens=False))
    assert len(ids) == 4
    assert pieces(BYTE_LEVEL.detokenizer(), ids) == ["", "", "🦊", "!", ""]


def test_an_unfinished_character_is_shown_at_the_end():
    ids = list(BYTE_LEVEL.encode("a🦊", add_special_tokens=False))[:-1]
    assert pieces(BYTE_LEVEL.detokenizer(), ids) == ["a", "", "", UNCUT]


def test_special_tokens_have_no_text_and_leave_the_next_word_its_space():
    the, end = list(METASPACE.encode("The", add_special_tokens=False)), 2
    assert METASPACE.token_bytes(end) == b"" and METASPACE.shown_bytes(end) == b"</s>"
    assert "".join(pieces(METASPACE.detokenizer(), [*the, end, *the])) == "The The"


def test_an_added_token_stands_for_itself():
    ids = list(BYTE_LEVEL.encode("a<tool>b", add_special_tokens=False))
    assert pieces(BYTE_LEVEL.detokenizer(), ids) == ["a", "<tool>", "b", ""]


def test_a_run_of_stray_bytes_is_not_held_back_forever():
    byte = METASPACE.encode("你", add_special_tokens=False)[1]
    detokenizer = METASPACE.detokenizer()
    shown = [detokenizer.push([byte]) for _ in range(100)]
    assert sum(map(len, shown)) > 80 and max(map(len, shown)) < 20


def real_tokenizer() -> Tokenizer:
    """The SmolLM2 tokenizer, where a converted model is at hand."""
    roots = [os.environ.get("RADIXGATE_MODEL_DIR"), Path(__file__).parents[2] / ".radixgate/models"]
    for root in roots:
        for file in sorted(Path(root).rglob("tokenizer.json")) if root else []:
            return Tokenizer.load(file.parent)
    pytest.skip("no converted model: run `make run` once, or name one in RADIXGATE_MODEL_DIR")


def test_the_real_tokenizer_streams_the_texts_of_the_shared_folder():
    file = SHARED / "data/smollm2_token_ids.json"
    if not file.is_file():
        pytest.skip(f"no shared data at {file}")
    tokenizer = real_tokenizer()
    for case in json.loads(file.read_text()):
        for size in (1, 3):
            assert "".join(pieces(tokenizer.detokenizer(), case["ids"], (size,))) == tokenizer.decode(case["ids"])
