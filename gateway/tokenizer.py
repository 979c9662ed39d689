"""A model's tokenizer, as far as a gateway needs one: text to ids, ids to text, and what a single id looks like."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from gateway.detokenize import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer, byte_of_character
from gateway.segments import Segment, Splitter

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


class TokenizerMissing(Exception):
    """The model's folder holds no tokenizer that can be read."""


class Tokenizer:
    def __init__(self, backend: Any) -> None:
        """`backend` is a tokenizers.Tokenizer."""
        # A tokenizer file may ask to cut or pad; a prompt is served as it is or refused.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        added: dict[int, Any] = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.splitter = Splitter(added.values())
        self._is_byte_level = _is_byte_level(json.loads(backend.to_str())["decoder"])
        self._bytes: dict[int, bytes] = dict.fromkeys(self.special_ids, b"")

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Raises TokenizerMissing. Takes 0.1 s and more: call it off the event loop."""
        from tokenizers import Tokenizer as Backend

        path = model_dir / "tokenizer.json"
        try:
            return cls(Backend.from_file(str(path)))
        except Exception as error:  # the library raises bare Exceptions
            raise TokenizerMissing(f"cannot read {path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        return int(self._backend.get_vocab_size())

    def encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        """The ids of `text`, as an array('i'). The library lets other threads run meanwhile."""
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return array("i", encoding.ids)

    def segments(self, pieces: list[str]) -> dict[str, Segment]:
        """The ids of each piece, no special tokens added. Other threads run meanwhile."""
        encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        return {
            piece: Segment(array("i", encoding.ids).tobytes())
            for piece, encoding in zip(pieces, encodings, strict=True)
        }

    def tokens_within(self, piece: str, n_characters: int) -> int:
        """How many of the piece's tokens lie whole in its first characters."""
        offsets = self._backend.encode(piece, add_special_tokens=False).offsets
        return next((index for index, (_, end) in enumerate(offsets) if end > n_characters), len(offsets))

    def min_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least; O(1). 0 where the vocabulary tells nothing of that."""
        return -(-len(text) // self._longest_token_bytes) if self._longest_token_bytes else 0

    @cached_property
    def _longest_token_bytes(self) -> int:
        """0 for a tokenizer whose tokens may stand for more text than they show."""
        if not self._is_byte_level or self._backend.normalizer is not None:
            return 0
        return max(map(len, self._backend.get_vocab()), default=0)

    @cached_property
    def around(self) -> tuple[array[int], array[int]]:
        """The special tokens that are put before and after a bare text."""
        inner = self.encode("a", add_special_tokens=False)
        outer = self.encode("a", add_special_tokens=True)
        at = next((i for i in range(len(outer)) if outer[i : i + len(inner)] == inner), None)
        if at is None:
            raise TokenizerMissing("the tokenizer changes a text's own ids when it adds special tokens")
        return outer[:at], outer[at + len(inner) :]

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name; None where the vocabulary has none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=True))

    def detokenizer(self, named_ids: frozenset[int] = frozenset()) -> Detokenizer:
        """`named_ids`: special tokens that are to appear in the text by their names."""
        table = _NamedTokens(self, named_ids) if named_ids else self
        return ByteLevelDetokenizer(table) if self._is_byte_level else WindowDetokenizer(table)

    def decode_with_names(self, token_ids: Sequence[int]) -> str:
        """As decode, but special tokens are shown."""
        return str(self._backend.decode(token_ids, skip_special_tokens=False))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id adds to the text: none for a special token or an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._piece_bytes(self._backend.id_to_token(token_id) or "")
        return known

    def fallback_byte(self, token_id: int) -> int | None:
        """The byte that a byte-fallback token such as `<0xE4>` stands for; None for any other token."""
        return self._fallback_bytes.get(token_id)

    def shown_bytes(self, token_id: int) -> bytes:
        """As token_bytes, but a special token is shown by its name: for log probabilities."""
        if token_id in self.special_ids:
            return str(self._backend.id_to_token(token_id)).encode()
        return self.token_bytes(token_id)

    def _piece_bytes(self, piece: str) -> bytes:
        if self._is_byte_level:
            # An added token may hold characters outside the byte alphabet: it stands for itself then.
            values = [self._byte_of.get(character) for character in piece]
            return piece.encode() if None in values else bytes(value for value in values if value is not None)
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SENTENCEPIECE_SPACE, " ").encode()

    @cached_property
    def _fallback_bytes(self) -> dict[int, int]:
        names = {byte: self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        return {token_id: byte for byte, token_id in names.items() if token_id is not None}

    @cached_property
    def _byte_of(self) -> dict[str, int]:
        return byte_of_character()


class _NamedTokens:
    """A tokenizer, for a detokenizer, that shows some of its special tokens."""

    def __init__(self, tokenizer: Tokenizer, named_ids: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._named_ids = named_ids
        self.special_ids = tokenizer.special_ids - named_ids
        self.fallback_byte = tokenizer.fallback_byte
        self.decode = tokenizer.decode_with_names

    def token_bytes(self, token_id: int) -> bytes:
        named = token_id in self._named_ids
        return self._tokenizer.shown_bytes(token_id) if named else self._tokenizer.token_bytes(token_id)


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    if decoder["type"] == "Sequence":
        return len(decoder["decoders"]) == 1 and _is_byte_level(decoder["decoders"][0])
    return bool(decoder["type"] == "ByteLevel")
