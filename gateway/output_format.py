"""How the text of a model's outputs is to be read: as plain text, or with thinking and calls in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.harmony import SPECIAL_TOKENS, harmony
from gateway.output_reader import Grammar, OutputParser, Reader
from gateway.reasoning import ReasoningTags, thinking
from gateway.tool_calls import CallGrammar, Offered, bare_json, hermes, mistral
from gateway.tool_xml import qwen_xml


@dataclass(frozen=True, slots=True)
class CallFamily:
    """How the models of one family call functions."""

    name: str
    grammar: CallGrammar = field(repr=False)
    special_tokens: tuple[str, ...] = ()
    """Tokens of the grammar that may be special in the vocabulary: they must be seen in the text."""
    opening: str | None = None
    """A token that no call can do without."""
    any_call: str | None = None
    """Text that makes the model begin a call when its prompt ends with it; None: there is none."""
    call_of: str = ""
    """As any_call, for a function whose name replaces NAME, up to its arguments."""
    thinks: bool = False
    """The grammar reads the thinking too."""

    def forcing(self, name: str | None) -> str | None:
        """What the prompt must end with to get a call, of the function `name` or of any."""
        return self.any_call if name is None else self.call_of.replace("NAME", name)


HERMES = CallFamily(
    "hermes",
    hermes,
    ("<tool_call>", "</tool_call>"),
    "<tool_call>",
    '<tool_call>\n{"name":',
    '<tool_call>\n{"name": "NAME", "arguments":',
)
QWEN_XML = CallFamily(
    "qwen_xml",
    qwen_xml,
    ("<tool_call>", "</tool_call>"),
    "<tool_call>",
    "<tool_call>\n<function=",
    "<tool_call>\n<function=NAME>\n",
)
LLAMA = CallFamily(
    "llama", bare_json, ("<|python_tag|>",), None, '{"name":', '{"name": "NAME", "parameters":'
)  # fmt: skip
BARE_JSON = CallFamily("json", bare_json, (), None, '{"name":', '{"name": "NAME", "arguments":')
MISTRAL = CallFamily(
    "mistral",
    mistral,
    ("[TOOL_CALLS]",),
    "[TOOL_CALLS]",
    '[TOOL_CALLS] [{"name":',
    '[TOOL_CALLS] [{"name": "NAME", "arguments":',
)
MISTRAL_NAMED = CallFamily(
    "mistral",
    mistral,
    ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "[TOOL_CALLS]",
    "[TOOL_CALLS]",
    "[TOOL_CALLS]NAME[ARGS]",
)
HARMONY = CallFamily(
    "harmony",
    harmony,
    SPECIAL_TOKENS,
    call_of="<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>",
    thinks=True,
)


def family_of(template: str, *, renders_tools: bool, has_python_tag: bool) -> CallFamily:
    """By what a model's chat template writes itself; a template without tools leaves us the choice."""
    if "<|channel|>" in template:
        return HARMONY
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and "<function=" in template:
        return QWEN_XML
    if "<tool_call>" in template or not renders_tools:
        return HERMES
    return LLAMA if has_python_tag or "python_tag" in template else BARE_JSON


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What may be in an output. The default: nothing but text."""

    calls: CallFamily | None = None
    offered: Offered = field(default_factory=dict)
    """The functions that may be called."""
    most_calls: int | None = None
    """The output ends after so many."""
    tags: ReasoningTags | None = None
    is_thinking: bool = False
    """The prompt ends within the thinking."""
    begun: str = ""
    """The end of the prompt that belongs to the answer."""
    named_ids: frozenset[int] = frozenset()
    """Special tokens that the grammars look for."""
    forbidden_ids: frozenset[int] = frozenset()
    """Tokens that must not be drawn."""

    def parser(self) -> OutputParser | None:
        """For one output; None when there is nothing to look for."""
        if self.tags is None and self.calls is None:
            return None
        reader = Reader(self.begun)
        return OutputParser(reader, self._grammar(reader))

    def _grammar(self, reader: Reader) -> Grammar:
        if self.tags is not None and not self.begun:
            yield from thinking(reader, self.tags, inside=self.is_thinking)
        if self.calls is not None:
            yield from self.calls.grammar(reader, self.offered, self.most_calls)
        else:
            yield from reader.show_until("text")


PLAIN = OutputFormat()
