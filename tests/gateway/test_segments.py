"""Cutting a prompt at its special tokens never changes its ids, and what was cut once is not tokenized again."""

from __future__ import annotations

import gzip
import os
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend

from gateway.segments import Segment, SegmentCache, Splitter, TenantSegments
from gateway.tokenizer import Tokenizer
from tests.gateway.support import CORPUS, byte_level_tokenizer, sentencepiece_tokenizer

TEXTS = Path(os.environ.get("RADIXGATE_SHARED", Path(__file__).parents[3] / "shared")) / "data" / "text"


def awkward_tokenizer() -> Backend:
    """Added tokens of every kind: special and not, that take spaces, stand alone, overlap, begin alike."""
    backend = byte_level_tokenizer()
    backend.add_special_tokens(
        [
            AddedToken("<left>", lstrip=True),
            AddedToken("<right>", rstrip=True),
            AddedToken("<word>", single_word=True),
            AddedToken("<|start|>x", normalized=False),
            AddedToken("t|><|en", normalized=False),
        ]
    )
    backend.add_tokens([AddedToken("plain", special=False, normalized=True), AddedToken("raw", normalized=False)])
    return backend


def metaspace_tokenizer() -> Backend:
    """Puts a space before the very first word of a text only."""
    backend = sentencepiece_tokenizer()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    return backend


TOKENIZERS = {
    make.__name__: Tokenizer(make())
    for make in (byte_level_tokenizer, sentencepiece_tokenizer, awkward_tokenizer, metaspace_tokenizer)
}
if model_dir := os.environ.get("RADIXGATE_MODEL_DIR"):
    TOKENIZERS["model"] = Tokenizer.load(Path(model_dir))
TOKENS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|end|>", "<s>", "</s>"]
TOKENS += ["<tool>", "<left>", "<right>", "<word>", "plain", "raw", "<|start|>x"]
SCRAPS = [" ", "  ", "\n", "a", "The", "<", "<|", "<|en", "|>", "st", "x", "é", "🙂", "\u2028", *TOKENS, *CORPUS]


def ids_by_pieces(tokenizer: Tokenizer, text: str) -> array[int]:
    pieces = tokenizer.splitter.split(text)
    assert "".join(pieces) == text and all(pieces)
    segments = tokenizer.segments(pieces)
    return array("i", b"".join(segments[piece].ids for piece in pieces))


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=st.lists(st.sampled_from(SCRAPS) | st.text(max_size=8), max_size=12).map("".join))
@settings(max_examples=300, deadline=None)
def test_the_ids_of_the_pieces_are_the_ids_of_the_whole(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]
    assert ids_by_pieces(tokenizer, text) == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.skipif(not TEXTS.is_dir(), reason=f"the shared data is not at {TEXTS}")
def test_real_texts() -> None:
    tokenizer = TOKENIZERS.get("model", TOKENIZERS["byte_level_tokenizer"])
    names = [name for i in sorted(tokenizer.special_ids) if (name := tokenizer.shown_bytes(i).decode())]
    for path in sorted(TEXTS.iterdir()):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode()[:100_000]
        # A chat of it: every part between two special tokens, in turn.
        parts = [text[at : at + 700] for at in range(0, len(text), 700)]
        chat = "".join(names[i % len(names)] + part for i, part in enumerate(parts))
        assert ids_by_pieces(tokenizer, chat) == tokenizer.encode(chat, add_special_tokens=False), path.name


def test_a_cut_is_made_before_each_special_token() -> None:
    splitter = TOKENIZERS["byte_level_tokenizer"].splitter
    assert splitter.split("a<|start|>b<|end|><|start|>") == ["a", "<|start|>b", "<|end|>", "<|start|>"]
    assert splitter.split("no token <| at all") == ["no token <| at all"]
    assert splitter.split("") == []


def test_no_cut_is_made_where_a_token_takes_the_spaces_before_it_or_hides_in_another() -> None:
    splitter = TOKENIZERS["awkward_tokenizer"].splitter
    assert splitter.split("a  <left>b") == ["a  <left>b"]
    assert splitter.split("a<|start|>xb") == ["a", "<|start|>xb"]
    assert Splitter([]).split("a<|start|>") == ["a<|start|>"]


def test_tokens_within_counts_whole_tokens() -> None:
    tokenizer = TOKENIZERS["byte_level_tokenizer"]
    piece = "<|start|>user\nThe quick 🙂 fox"
    ids = tokenizer.encode(piece, add_special_tokens=False)
    for n_characters in range(len(piece) + 1):
        n_tokens = tokenizer.tokens_within(piece, n_characters)
        spelled = b"".join(tokenizer.shown_bytes(i) for i in ids[:n_tokens]).decode(errors="strict")
        assert piece[:n_characters].startswith(spelled)
    assert tokenizer.tokens_within(piece, len(piece)) == len(ids)


# --- the cache --------------------------------------------------------------------------------------------------------


def segment(n_tokens: int) -> Segment:
    return Segment(bytes(4 * n_tokens))


def test_tenants_and_salts_are_apart() -> None:
    cache = SegmentCache()
    cache.of("acme").keep("", {"x": segment(1)})
    assert cache.of("acme").find("", ["x"]) == [segment(1)]
    assert cache.of("acme").find("salt", ["x"]) == [None]
    assert cache.of("globex").find("", ["x"]) == [None]


def test_memory_is_bounded_and_the_least_recently_used_go_first() -> None:
    tenant = TenantSegments(max_bytes=10_000)
    for index in range(100):
        tenant.keep("", {f"piece {index}": segment(100)})
        tenant.find("", ["piece 0"])
        assert tenant.n_bytes <= 10_000
    found = tenant.find("", ["piece 0", "piece 99", "piece 1", "piece 50"])
    assert [one is not None for one in found] == [True, True, False, False]
    assert (tenant.hits, tenant.misses) == (102, 2)


def test_a_piece_that_would_push_out_everything_is_not_kept() -> None:
    tenant = TenantSegments(max_bytes=10_000)
    tenant.keep("", {"small": segment(1), "x" * 6_000: segment(10)})
    assert len(tenant) == 1


def test_when_all_tenants_are_too_many_the_least_recently_active_is_forgotten() -> None:
    cache = SegmentCache(max_tenant_bytes=10_000, max_bytes=20_000)
    for name in "abc":
        cache.of(name).keep("", {f"{i}": segment(100) for i in range(20)})
        cache.of("a")
    assert cache.of("a").find("", ["19"]) != [None]
    assert cache.of("b").find("", ["19"]) == [None]


def test_where_a_cut_lies_is_counted_once() -> None:
    one, asked = segment(5), []
    for _ in range(2):
        assert one.tokens_within(7, lambda n: asked.append(n) or 3) == 3
    assert asked == [7]
