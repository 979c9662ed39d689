"""Chat templates and what becomes of them."""

from __future__ import annotations

import json
import threading

import pytest

from gateway.errors import ApiError
from gateway.prompts import INLINE_CHARACTERS, Prompts
from gateway.templates import ChatTemplate, TemplateFailed
from gateway.tokenizer import Tokenizer, TokenizerMissing
from tests.gateway.support import byte_level_tokenizer, write_model_dir

HI = [{"role": "user", "content": "hi"}]


def render(source: str, messages=HI, **variables) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **variables)


def test_blocks_are_trimmed_as_in_training():
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n") == "hi\n"


def test_special_tokens_and_the_generation_prompt_are_variables():
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render(source) == "<s>hi>"
    assert render(source, add_generation_prompt=False) == "<s>hi"


def test_what_is_not_given_is_none():
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"


def test_json_is_not_escaped_for_html():
    assert (
        render("{{ messages | tojson }}", [{"role": "user", "content": "<é&>"}])
        == '[{"role": "user", "content": "<é&>"}]'
    )


def test_a_template_may_break_loops_and_mark_generations():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert render(source, HI * 2) == "hi"


def test_a_templates_own_refusal_is_its_message():
    with pytest.raises(TemplateFailed, match=r"^roles must alternate$"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_misbehaves_fails_alone(source):
    with pytest.raises(TemplateFailed):
        render(source)


def test_a_template_that_is_none_is_refused_when_read():
    with pytest.raises(TemplateFailed, match="line 1"):
        ChatTemplate("{% if %}")


def test_developer_becomes_system_where_the_template_does_not_know_it():
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{# developer #}{{ messages[0].role }}", messages) == "developer"


def test_the_template_may_lie_in_the_tokenizers_config(tmp_path):
    for form in ("T", [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "T"}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": form}))
        template = ChatTemplate.load(tmp_path)
        assert template is not None and template.render(HI) == "T"


def test_a_folder_without_a_template_or_a_tokenizer(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    with pytest.raises(TokenizerMissing, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_a_model_without_a_template_refuses_chats(run):
    async def main():
        with pytest.raises(ApiError) as refusal:
            await Prompts(Tokenizer(byte_level_tokenizer()), None).chat(HI)
        return refusal.value.code

    assert run(main) == "no_chat_template"


def test_long_prompts_are_tokenized_off_the_event_loop(run, tmp_path):
    async def main():
        prompts = await Prompts.load(write_model_dir(tmp_path))
        seen = []
        encode = prompts.tokenizer.encode

        def noting(text, **options):
            seen.append(threading.current_thread() is threading.main_thread())
            return encode(text, **options)

        prompts.tokenizer.encode = noting
        short, long = "a" * 10, "fox " * INLINE_CHARACTERS
        ids = [
            await prompts.text(short),
            await prompts.text(long),
            await prompts.chat([{"role": "user", "content": long}]),
        ]
        assert list(ids[1]) == list(encode(long, add_special_tokens=True))
        return seen

    assert run(main) == [True, False, False]
