"""What OpenAI's clients say about caching, as markers of a conversation.

Caching is always on; a breakpoint adds a promise of residency. In implicit mode the end of the prompt is one, promised
only when the client asks for a lifetime; a request keeps its latest explicit ones, four less the implicit one. In
explicit mode without a breakpoint the request neither reads nor writes the cache.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec

from gateway.conversation import Conversation, Marker, Message
from gateway.errors import invalid

TTL_S = {"30m": 30 * 60, "12h": 12 * 3600}
DEFAULT_TTL_S = TTL_S["30m"]
MAX_BREAKPOINTS = 4


class PromptCacheOptions(msgspec.Struct, forbid_unknown_fields=True):
    mode: Literal["implicit", "explicit"] = "implicit"
    ttl: Literal["30m"] | None = None


def marker_of(given: Any, path: str, default_ttl_s: int = DEFAULT_TTL_S) -> Marker | None:
    """A content part's `prompt_cache_breakpoint`. Raises ApiError."""
    if given is None:
        return None
    if not isinstance(given, dict):
        raise invalid(f"Invalid '{path}': expected an object.", path, "invalid_type")
    if given.get("mode") != "explicit":
        raise invalid(f"Invalid '{path}.mode': expected 'explicit'.", f"{path}.mode")
    for name in given:
        if name not in ("mode", "ttl"):
            raise invalid(f"Unknown parameter: '{path}.{name[:64]}'.", f"{path}.{name[:64]}", "unknown_parameter")
    ttl = given.get("ttl")
    if ttl is None:
        return Marker(default_ttl_s)
    if not isinstance(ttl, str) or ttl not in TTL_S:
        raise invalid(f"Invalid '{path}.ttl': expected '30m' or '12h'.", f"{path}.ttl")
    return Marker(TTL_S[ttl])


def apply(conversation: Conversation, options: PromptCacheOptions | None) -> tuple[Conversation, bool]:
    """The conversation with the markers that count, and whether the request uses the cache."""
    options = options or PromptCacheOptions()
    explicit = options.mode == "explicit"
    allowed = MAX_BREAKPOINTS if explicit else MAX_BREAKPOINTS - 1
    messages, n_markers = _with_latest(conversation.messages, allowed)
    end = None if explicit or options.ttl is None else Marker(TTL_S[options.ttl])
    return replace(conversation, messages=messages, marker=end), not explicit or n_markers > 0


def _with_latest(messages: tuple[Message, ...], allowed: int) -> tuple[tuple[Message, ...], int]:
    """The messages with their last `allowed` markers, and how many there were."""
    n_seen = 0
    kept: list[Message] = []
    for message in reversed(messages):
        parts = []
        for part in reversed(message.parts):
            n_seen += part.marker is not None
            parts.append(replace(part, marker=None) if part.marker and n_seen > allowed else part)
        kept.append(message if n_seen <= allowed else replace(message, parts=tuple(reversed(parts))))
    return tuple(reversed(kept)), n_seen
