"""A model's chat template: messages to the one text that the model was trained on.

Templates come with the model and are written for the Jinja environment of the transformers library; this is the same
environment: sandboxed, with its filter, functions and extensions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = dict[str, Any]


class TemplateFailed(Exception):
    """The template refused these messages, or cannot render them; the words are its own where it has any."""


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training: here it only wraps text."""

    tags = {"generation"}  # noqa: RUF012, Jinja declares it as an instance variable

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: dict[str, str] | None = None) -> None:
        """Raises TemplateFailed when the source is not a template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._special_tokens = special_tokens or {}
        self._knows_developer = "developer" in source
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
            """The names that it reads: `messages`, perhaps `tools`, `enable_thinking`, ..."""
        except TemplateSyntaxError as error:
            raise TemplateFailed(f"line {error.lineno} of the model's chat template: {error.message}") from error

    @cached_property
    def takes_system(self) -> bool:
        """Whether it renders a system message; some refuse the role, others pass it over."""
        probe = [{"role": "system", "content": "probe-4711"}, {"role": "user", "content": "hi"}]
        try:
            return "probe-4711" in self.render(probe)
        except TemplateFailed:
            return False

    @classmethod
    def load(cls, model_dir: Path) -> ChatTemplate | None:
        """The template among a model's files: chat_template.jinja, or the one inside tokenizer_config.json."""
        config = _read_json(model_dir / "tokenizer_config.json")
        file = model_dir / "chat_template.jinja"
        source = file.read_text("utf-8") if file.is_file() else _template_in(config)
        if source is None:
            return None
        special = _special_tokens(_read_json(model_dir / "special_tokens_map.json") | config)
        return cls(source, special)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt's text. Raises TemplateFailed."""
        if not self._knows_developer:
            messages = [m | {"role": "system"} if m.get("role") == "developer" else m for m in messages]
        # As transformers does: what is not given is None and not undefined.
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **context
            )
        except TemplateError as error:
            raise TemplateFailed(error.message or type(error).__name__) from error
        except RecursionError:
            raise TemplateFailed("the messages are nested too deeply") from None
        except Exception as error:  # a template may do anything with what it is given
            raise TemplateFailed(f"{type(error).__name__}: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which is not what the model saw in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text("utf-8"))
    return value if isinstance(value, dict) else {}


def _template_in(config: dict[str, Any]) -> str | None:
    """A config holds one template, or several by name."""
    given = config.get("chat_template")
    if isinstance(given, list):
        by_name: dict[str, str] = {entry["name"]: entry["template"] for entry in given}
        return by_name.get("default")
    return given


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and its like: plain strings, or objects with the string as `content`."""
    text: Callable[[Any], Any] = lambda value: value.get("content") if isinstance(value, dict) else value  # noqa: E731
    tokens = {name: text(value) for name, value in config.items() if name.endswith("_token")}
    return {name: value for name, value in tokens.items() if isinstance(value, str)}
