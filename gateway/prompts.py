"""Messages or text to token ids, with the tokenizer and the chat template among the model's files."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gateway.errors import ApiError, invalid
from gateway.templates import ChatTemplate, Message, TemplateFailed
from gateway.tokenizer import Tokenizer

# Rendering and tokenizing take about 1 ms per 2,000 characters: longer ones leave the event loop.
INLINE_CHARACTERS = 4_000

Encode = Callable[[], "array[int]"]

_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")


class Prompts:
    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self._template = template

    @classmethod
    async def load(cls, model_dir: Path) -> Prompts:
        """Reads the files in a thread. Raises TokenizerMissing and TemplateFailed."""
        loop = asyncio.get_running_loop()
        tokenizer = await loop.run_in_executor(_threads, Tokenizer.load, model_dir)
        return cls(tokenizer, ChatTemplate.load(model_dir))

    async def chat(self, messages: Sequence[Message]) -> array[int]:
        """The ids of a chat that the assistant is to continue. Raises ApiError when the template refuses it."""
        template = self._template
        if template is None:
            raise ApiError(
                400, "no_chat_template", "This model has no chat template: use /v1/completions.", param="messages"
            )

        def encode() -> array[int]:
            try:
                text = template.render(messages)
            except TemplateFailed as error:
                raise invalid(f"The model's chat template: {error}", "messages", "template_error") from error
            # The template wrote the special tokens already.
            return self.tokenizer.encode(text, add_special_tokens=False)

        return await _run(encode, sum(_size(message) for message in messages))

    async def text(self, text: str) -> array[int]:
        """The ids of a bare text, with the special tokens that the tokenizer puts around one."""
        return await _run(lambda: self.tokenizer.encode(text, add_special_tokens=True), len(text))


def _size(message: Message) -> int:
    content = message.get("content")
    tool_calls = message.get("tool_calls")
    return (len(content) if isinstance(content, str) else 0) + (len(str(tool_calls)) if tool_calls else 0)


async def _run(encode: Encode, n_characters: int) -> array[int]:
    if n_characters <= INLINE_CHARACTERS:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(_threads, encode)
