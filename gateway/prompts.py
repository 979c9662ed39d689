"""Messages or text to token ids, with the tokenizer and the chat template among the model's files."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from engine.protocol import Breakpoint
from gateway.conversation import Conversation
from gateway.errors import ApiError, invalid
from gateway.markers import TextMarker
from gateway.output_format import PLAIN, OutputFormat
from gateway.rendering import ConversationRenderer
from gateway.segments import Segment, SegmentCache
from gateway.templates import ChatTemplate, TemplateFailed
from gateway.tokenizer import Tokenizer

# What takes longer than a few milliseconds leaves the event loop. Tokenizing takes about 1 ms per 2,000 characters,
# cutting a text and looking its pieces up 1 ms per 500,000, a template 5 us a message.
INLINE_CHARACTERS = 4_000
INLINE_KNOWN_CHARACTERS = 1_000_000
_MESSAGE_CHARACTERS = 500

_Result = TypeVar("_Result")

_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    ids: array[int]
    breakpoints: tuple[Breakpoint, ...] = ()
    """Of the conversation's markers, ascending."""
    output_format: OutputFormat = PLAIN
    """How the answer's text is to be read: hand it to the GenerationRequest."""


class Prompts:
    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, segments: SegmentCache | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.segments = segments or SegmentCache()
        self._renderer = None if template is None else ConversationRenderer(template, tokenizer)

    @classmethod
    async def load(cls, model_dir: Path) -> Prompts:
        """Reads the files in a thread. Raises TokenizerMissing and TemplateFailed."""

        def read() -> Prompts:
            return cls(Tokenizer.load(model_dir), ChatTemplate.load(model_dir))

        return await asyncio.get_running_loop().run_in_executor(_threads, read)

    @property
    def can_think(self) -> bool:
        """Whether answers may begin with reasoning."""
        return self._renderer is not None and self._renderer.can_think

    async def render(
        self,
        conversation: Conversation,
        *,
        tenant_id: str,
        salt: str = "",
        param: str = "messages",
        max_model_len: int | None = None,
    ) -> RenderedPrompt:
        """The prompt that the model is to continue. Tokenization is cached for this tenant and salt.

        With `max_model_len`, what is certainly too long for the model is refused before it is tokenized. Raises
        ApiError (400), naming `param` when the model's template refuses the conversation.
        """
        renderer = self._renderer
        if renderer is None:
            raise ApiError(400, "no_chat_template", "This model has no chat template: use /v1/completions.", param)
        try:
            rendered = await _run(lambda: renderer.render(conversation), _size(conversation) <= INLINE_KNOWN_CHARACTERS)
        except TemplateFailed as error:
            raise invalid(f"The model's chat template: {error}", param, "template_error") from error
        self._refuse_hopeless(rendered.text, max_model_len, param)
        # The template wrote the special tokens already.
        pieces, segments = await self._segments(rendered.text, tenant_id, salt)
        breakpoints = await self._breakpoints(rendered.markers, pieces, segments)
        return RenderedPrompt(_joined(segments), breakpoints, rendered.output_format)

    async def text(
        self, text: str, *, tenant_id: str, salt: str = "", param: str = "prompt", max_model_len: int | None = None
    ) -> array[int]:
        """The ids of a bare text, with the special tokens that the tokenizer puts around one. As render otherwise."""
        self._refuse_hopeless(text, max_model_len, param)
        before, after = self.tokenizer.around
        _, segments = await self._segments(text, tenant_id, salt)
        return before + _joined(segments) + after

    def _refuse_hopeless(self, text: str, max_model_len: int | None, param: str) -> None:
        if max_model_len is not None:
            check_length(self.tokenizer.min_tokens(text), max_model_len, param, n_is_exact=False)

    async def _segments(self, text: str, tenant_id: str, salt: str) -> tuple[list[str], list[Segment]]:
        """The pieces of a text, and what they are made of."""
        tenant = self.segments.of(tenant_id)

        def look_up() -> tuple[list[str], list[Segment | None]]:
            pieces = self.tokenizer.splitter.split(text)
            return pieces, tenant.find(salt, pieces)

        pieces, known = await _run(look_up, len(text) <= INLINE_KNOWN_CHARACTERS)
        new = list(dict.fromkeys(piece for piece, segment in zip(pieces, known, strict=True) if segment is None))
        found: dict[str, Segment] = {}
        if new:
            found = await _run(lambda: self.tokenizer.segments(new), sum(map(len, new)) <= INLINE_CHARACTERS)
            tenant.keep(salt, found)
        return pieces, [found[p] if segment is None else segment for p, segment in zip(pieces, known, strict=True)]

    async def _breakpoints(
        self, markers: Sequence[TextMarker], pieces: Sequence[str], segments: Sequence[Segment]
    ) -> tuple[Breakpoint, ...]:
        """Markers at characters as breakpoints at tokens: the last token that ends there or before. None at 0."""
        lasting: dict[int, int] = {}
        ends = list(accumulate(map(len, pieces))) if markers else []
        for offset, ttl_s in markers:
            index = bisect_right(ends, offset)
            at = sum(segment.n_tokens for segment in segments[:index])
            rest = offset - (ends[index - 1] if index else 0)
            if rest:
                at += await self._tokens_within(pieces[index], segments[index], rest)
            if at:
                lasting[at] = max(ttl_s, lasting.get(at, 0))
        return tuple(Breakpoint(at, ttl_s) for at, ttl_s in sorted(lasting.items()))

    async def _tokens_within(self, piece: str, segment: Segment, n_characters: int) -> int:
        def count() -> int:
            return segment.tokens_within(n_characters, lambda n: self.tokenizer.tokens_within(piece, n))

        return await _run(count, len(piece) <= INLINE_CHARACTERS or n_characters in segment.cuts)


def check_length(n_prompt: int, max_model_len: int, param: str, *, n_is_exact: bool = True) -> None:
    """Raises ApiError unless the prompt has a token and leaves room for one."""
    shown = n_prompt if n_is_exact else f"at least {n_prompt}"
    if n_prompt + 1 > max_model_len:
        raise ApiError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {max_model_len} tokens, and the prompt has {shown} tokens; "
            "it must leave room for at least one more. Shorten the prompt.",
            param=param,
        )
    if n_prompt == 0 and n_is_exact:
        raise ApiError(400, "invalid_value", "The prompt is empty: it needs at least one token.", param)


def _joined(segments: Sequence[Segment]) -> array[int]:
    ids = array("i")
    ids.frombytes(b"".join(segment.ids for segment in segments))
    return ids


def _size(conversation: Conversation) -> int:
    """About how many characters a template has to do with."""
    n_characters = sum(len(part.text) for message in conversation.messages for part in message.parts)
    n_renderings = 1 + sum(1 for message in conversation.messages for part in message.parts if part.marker)
    n_steps = len(conversation.messages) + 10 * len(conversation.tools)
    return n_renderings * (n_characters + n_steps * _MESSAGE_CHARACTERS)


async def _run(work: Callable[[], _Result], inline: bool) -> _Result:
    if inline:
        return work()
    return await asyncio.get_running_loop().run_in_executor(_threads, work)
