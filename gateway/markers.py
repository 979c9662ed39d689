"""Where a conversation's markers lie in the text that a template makes of it.

A template tells nothing of the places of what it is given. So it is asked again: with a sign at the end of each marked
part, with the messages up to a marked one, with the tools up to a marked one. Only a conversation with markers pays.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from gateway.conversation import Conversation, Marker, Part, Tool
from gateway.errors import invalid
from gateway.templates import TemplateFailed


class TextMarker(NamedTuple):
    offset: int
    """In characters of the prompt's text."""
    ttl_s: int


class MarkedRendering:
    """Renders one conversation, and variants of it that show where its markers lie."""

    def __init__(self, render: Callable[[Conversation], str], conversation: Conversation) -> None:
        """`render` is the template's part: it raises TemplateFailed."""
        self._render = render
        self._conversation = conversation
        # Private-use characters and chance: no template touches them and no text holds them.
        self._sign = f"\ue0a7{secrets.token_hex(8)}\ue0a7"

    def text(self) -> str:
        """Raises TemplateFailed and ApiError."""
        return self._text_of(self._conversation)

    def markers(self, text: str) -> list[TextMarker]:
        """Where the markers lie in `text`, which text() has returned, but for the one at the prompt's end."""
        found = self._part_markers(text)
        found += self._from_variants(text, self._message_variants())
        found += self._from_variants(text, self._tool_variants())
        return found

    def _text_of(self, conversation: Conversation) -> str:
        if conversation.continue_final_message:
            return self._up_to_the_end_of_the_last_message(conversation)
        return self._render(conversation)

    def _up_to_the_end_of_the_last_message(self, conversation: Conversation) -> str:
        *before, last = conversation.messages
        if last.role != "assistant" or last.tool_calls:
            message = "'continue_final_message' needs a last message that is the assistant's, and text alone."
            raise invalid(message, "continue_final_message")
        end = self._sign + "-end"
        signed = replace(last, parts=(Part(last.text + end),))
        text = self._render(replace(conversation, messages=(*before, signed), add_generation_prompt=False))
        head, found, _ = text.rpartition(end)
        if not found:
            raise TemplateFailed("it does not show the last message, so it cannot be continued")
        return head

    def _part_markers(self, text: str) -> list[TextMarker]:
        """Parts are rendered once more with a sign at their ends; the signs' places are the markers'."""
        messages = self._conversation.messages
        places = [
            (index, at, part.marker.ttl_s)
            for index, message in enumerate(messages)
            for at, part in enumerate(message.parts)
            if part.marker is not None
        ]
        if not places:
            return []
        head, *tails = self._variant(self._signed([(index, at) for index, at, _ in places])).split(self._sign)
        if len(tails) == len(places) and head + "".join(tails) == text:
            offsets = accumulate(map(len, (head, *tails[:-1])))
            return [TextMarker(offset, ttl_s) for offset, (_, _, ttl_s) in zip(offsets, places, strict=True)]
        # The template changes the texts it is given. One by one, what follows a sign tells its place: a template that
        # strips a text has not done so before the sign.
        found = []
        for index, at, ttl_s in places:
            before, seen, after = self._variant(self._signed([(index, at)])).partition(self._sign)
            if seen:
                offset = len(text) - len(after) if text.endswith(after) else _common(text, before)
                found.append(TextMarker(offset, ttl_s))
        return found

    def _signed(self, places: Sequence[tuple[int, int]]) -> Conversation:
        messages = list(self._conversation.messages)
        for index, at in places:
            parts = list(messages[index].parts)
            parts[at] = replace(parts[at], text=parts[at].text + self._sign)
            messages[index] = replace(messages[index], parts=tuple(parts))
        return replace(self._conversation, messages=tuple(messages))

    def _message_variants(self) -> Iterator[tuple[Marker, Conversation]]:
        """The conversation up to the message."""
        conversation = self._conversation
        for index, message in enumerate(conversation.messages):
            if message.marker is not None:
                yield (
                    message.marker,
                    replace(
                        conversation,
                        messages=conversation.messages[: index + 1],
                        add_generation_prompt=False,
                        continue_final_message=False,
                    ),
                )

    def _tool_variants(self) -> Iterator[tuple[Marker, Conversation]]:
        """The conversation without the tools behind this one, or with one more behind the last."""
        tools = self._conversation.tools
        for index, tool in enumerate(tools):
            if tool.marker is not None:
                others = tools[: index + 1] if index + 1 < len(tools) else (*tools, Tool("another"))
                yield tool.marker, replace(self._conversation, tools=others)

    def _from_variants(self, text: str, variants: Iterable[tuple[Marker, Conversation]]) -> list[TextMarker]:
        """A marker lies where its variant of the prompt begins to differ."""
        return [TextMarker(_common(text, self._variant(other)), marker.ttl_s) for marker, other in variants]

    def _variant(self, conversation: Conversation) -> str:
        """Empty where the template refuses the variant: its marker is void then."""
        try:
            return self._text_of(conversation)
        except TemplateFailed:
            return ""


def _common(left: str, right: str) -> int:
    """Length of the longest common beginning."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
