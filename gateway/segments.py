"""A rendered prompt cut into pieces whose token ids do not depend on each other, and the ids of pieces seen before.

A tokenizer takes its added tokens (`<|im_end|>` and the like) out of the text before anything else and treats what lies
between them separately. So the text may be cut before any such token: the ids of the whole are the ids of the pieces,
one after the other. A piece begins with its token because some tokenizers treat the beginning of a text differently.
Added tokens that look at their surroundings (those that take the spaces beside them, or stand only between other words)
or are searched for in the normalized text are no place to cut.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

MAX_TENANT_BYTES = 32 * 1024 * 1024
MAX_BYTES = 256 * 1024 * 1024
# What an entry costs beside its text and its ids: its key, the links of the order of use, the objects' heads, its cuts.
_ENTRY_BYTES = 800
_MAX_CUTS = 16


@dataclass(slots=True)
class Segment:
    """A piece's ids, little-endian int32."""

    ids: bytes
    cuts: dict[int, int] = field(default_factory=dict)
    """How many of the tokens lie whole in so many of the piece's first characters, where that was asked for."""

    @property
    def n_tokens(self) -> int:
        return len(self.ids) // 4

    def tokens_within(self, n_characters: int, count: Callable[[int], int]) -> int:
        known = self.cuts.get(n_characters)
        if known is None:
            if len(self.cuts) >= _MAX_CUTS:
                self.cuts.clear()
            known = self.cuts[n_characters] = count(n_characters)
        return known


class Splitter:
    """Cuts texts for one tokenizer, whose added tokens these are (tokenizers.AddedToken)."""

    def __init__(self, added_tokens: Iterable[Any]) -> None:
        # The tokenizer finds the leftmost token, of several that begin there the longest: so does this alternation.
        raw = sorted((token for token in added_tokens if not token.normalized), key=lambda token: -len(token.content))
        self._simple = frozenset(token.content for token in raw if not (token.lstrip or token.single_word))
        self._find = re.compile("|".join(re.escape(token.content) for token in raw)).finditer if raw else None
        self._all_simple = len(self._simple) == len(raw)

    def split(self, text: str) -> list[str]:
        """Pieces that make up `text`; O(len(text))."""
        if self._find is None or not text:
            return [text] if text else []
        if self._all_simple:
            cuts = [match.start() for match in self._find(text)]
        else:
            cuts = [match.start() for match in self._find(text) if match[0] in self._simple]
        bounds = [*cuts, len(text)] if cuts and cuts[0] == 0 else [0, *cuts, len(text)]
        return [text[start:end] for start, end in pairwise(bounds)]


class TenantSegments:
    """One tenant's pieces. Least recently used ones go first; any thread may call.

    Each piece lies under its salt, a client's own narrowing of its namespace: pieces of different salts never meet.
    """

    def __init__(self, max_bytes: int) -> None:
        self.n_bytes = 0
        self.hits = 0
        self.misses = 0
        self._max_bytes = max_bytes
        self._segments: OrderedDict[tuple[str, str], Segment] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._segments)

    def find(self, salt: str, pieces: Sequence[str]) -> list[Segment | None]:
        """What is known of each piece."""
        found: list[Segment | None] = []
        with self._lock:
            for piece in pieces:
                key = (salt, piece)
                segment = self._segments.get(key)
                if segment is not None:
                    self._segments.move_to_end(key)
                found.append(segment)
            unknown = found.count(None)
            self.misses += unknown
            self.hits += len(found) - unknown
        return found

    def keep(self, salt: str, segments: Mapping[str, Segment]) -> None:
        """By piece. One that would take half of the cache is not kept."""
        with self._lock:
            for piece, segment in segments.items():
                key, n_bytes = (salt, piece), _bytes_of(piece, segment)
                if n_bytes <= self._max_bytes // 2 and key not in self._segments:
                    self._segments[key] = segment
                    self.n_bytes += n_bytes
            while self.n_bytes > self._max_bytes:
                (_, piece), segment = self._segments.popitem(last=False)
                self.n_bytes -= _bytes_of(piece, segment)


class SegmentCache:
    """The pieces of all tenants, each tenant's apart; when they are too many, the least recently active tenant's go."""

    def __init__(self, max_tenant_bytes: int = MAX_TENANT_BYTES, max_bytes: int = MAX_BYTES) -> None:
        self._max_tenant_bytes = max_tenant_bytes
        self._max_tenants = max(1, max_bytes // max_tenant_bytes)
        self._tenants: OrderedDict[str, TenantSegments] = OrderedDict()

    def of(self, tenant_id: str) -> TenantSegments:
        """On the event loop's thread only."""
        segments = self._tenants.get(tenant_id)
        if segments is None:
            segments = self._tenants[tenant_id] = TenantSegments(self._max_tenant_bytes)
            if len(self._tenants) > self._max_tenants:
                self._trim()
        self._tenants.move_to_end(tenant_id)
        return segments

    def _trim(self) -> None:
        """Small tenants do not fill their share, so there is room for more of them than shares."""
        n_bytes = sum(tenant.n_bytes for tenant in self._tenants.values())
        while len(self._tenants) > 1 and n_bytes > (self._max_tenants - 1) * self._max_tenant_bytes:
            n_bytes -= self._tenants.popitem(last=False)[1].n_bytes


def _bytes_of(piece: str, segment: Segment) -> int:
    return sys.getsizeof(piece) + sys.getsizeof(segment.ids) + _ENTRY_BYTES
