"""What a model thinks before it answers, set apart by a pair of tags at the beginning of its output."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.output_reader import Grammar, Reader


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    open: str
    close: str


TAGS = (ReasoningTags("<think>", "</think>"), ReasoningTags("[THINK]", "[/THINK]"))


def tags_of(template: str) -> ReasoningTags | None:
    """The tags that a chat template knows; None for a model that does not think."""
    return next((tags for tags in TAGS if tags.open in template or tags.close in template), None)


def thinking(reader: Reader, tags: ReasoningTags, *, inside: bool) -> Grammar:
    """Reads the thinking, if the output begins with any. White space around it belongs to the tags."""
    if not inside:
        yield from reader.spaces()
        if not (yield from reader.literal(tags.open)):
            reader.rewind()
            return
        reader.drop()
    yield from reader.spaces()
    reader.drop()
    if (yield from reader.show_until("reasoning", tags.close)):
        yield from reader.literal(tags.close)
        yield from reader.spaces()
        reader.drop()
