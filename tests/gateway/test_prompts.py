"""Chat templates and what becomes of them."""

from __future__ import annotations

import json
import threading

import pytest
from tokenizers import processors

from gateway.conversation import Conversation, Message, Part
from gateway.errors import ApiError
from gateway.prompts import INLINE_CHARACTERS, Prompts
from gateway.templates import ChatTemplate, TemplateFailed
from gateway.tokenizer import Tokenizer, TokenizerMissing
from tests.gateway.support import byte_level_tokenizer, sentencepiece_tokenizer, write_model_dir

HI = [{"role": "user", "content": "hi"}]


def chat(*texts: str) -> Conversation:
    return Conversation(messages=tuple(Message(role="user", parts=(Part(text),)) for text in texts))


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
            await Prompts(Tokenizer(byte_level_tokenizer()), None).render(chat("hi"), tenant_id="t")
        return refusal.value.code

    assert run(main) == "no_chat_template"


def test_long_prompts_are_tokenized_off_the_event_loop(run, tmp_path):
    async def main():
        prompts = await Prompts.load(write_model_dir(tmp_path))
        seen = []
        segments = prompts.tokenizer.segments

        def noting(pieces):
            seen.append(threading.current_thread() is threading.main_thread())
            return segments(pieces)

        prompts.tokenizer.segments = noting
        short, long = "a" * 10, "fox " * INLINE_CHARACTERS
        ids = [
            await prompts.text(short, tenant_id="t"),
            await prompts.text(long, tenant_id="t"),
            (await prompts.render(chat(long), tenant_id="t")).ids,
        ]
        assert ids[1] == prompts.tokenizer.encode(long, add_special_tokens=True)
        return seen

    assert run(main) == [True, False, False]


def test_only_what_is_new_is_tokenized(run, tmp_path):
    async def main():
        prompts = await Prompts.load(write_model_dir(tmp_path))
        first = await prompts.render(chat("one", "two"), tenant_id="t")
        cache, new = prompts.segments.of("t"), []
        segments = prompts.tokenizer.segments
        prompts.tokenizer.segments = lambda pieces: new.extend(pieces) or segments(pieces)
        second = await prompts.render(chat("one", "two", "three"), tenant_id="t")
        assert new == ["<|start|>user\nthree"] and cache.hits > 0
        again = await prompts.render(chat("one", "two"), tenant_id="u")
        assert len(new) > 1, "what one tenant sent is new to another"
        n_same = len(first.ids) - len(prompts.tokenizer.encode("<|start|>assistant\n", add_special_tokens=False))
        return first.ids == again.ids, second.ids[:n_same] == first.ids[:n_same]

    assert run(main) == (True, True)


def test_a_bare_text_keeps_the_special_tokens_around_it(run):
    backend = byte_level_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|start|> $A <|end|>", special_tokens=[("<|start|>", 0), ("<|end|>", 1)]
    )
    tokenizer = Tokenizer(backend)

    async def main():
        prompts = Prompts(tokenizer, None)
        texts = ("", "fox", "a<|end|>b")
        return [await prompts.text(text, tenant_id="t") for text in texts] == [
            tokenizer.encode(text, add_special_tokens=True) for text in texts
        ]

    assert run(main)


def test_what_is_certainly_too_long_is_refused_before_it_is_tokenized(run, tmp_path):
    async def main():
        prompts = await Prompts.load(write_model_dir(tmp_path))
        prompts.tokenizer.segments = lambda pieces: pytest.fail("was tokenized")
        texts = []
        for attempt in (
            prompts.text("fox " * 100_000, tenant_id="t", max_model_len=1000),
            prompts.render(chat("fox " * 100_000), tenant_id="t", max_model_len=1000),
        ):
            with pytest.raises(ApiError, match=r"the prompt has at least [0-9]{4,} tokens") as refusal:
                await attempt
            texts.append((refusal.value.code, refusal.value.param))
        return texts

    assert run(main) == [("context_length_exceeded", "prompt"), ("context_length_exceeded", "messages")]


def test_the_least_number_of_tokens_is_never_too_large():
    tokenizer = Tokenizer(byte_level_tokenizer())
    for text in ("", "a", " " * 100, "The quick brown fox " * 50, "🙂" * 30, "<|start|>" * 40):
        assert tokenizer.min_tokens(text) <= len(tokenizer.encode(text, add_special_tokens=False))
    assert Tokenizer(sentencepiece_tokenizer()).min_tokens("x" * 1000) == 0
