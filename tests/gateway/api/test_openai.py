"""The OpenAI routes as the official client and a raw socket see them."""

from __future__ import annotations

import json
from array import array

import openai
import pytest

from engine.client import Stream
from engine.protocol import Accepted, Delta, EngineError, Finished, PromptRecord, Submit, TokenLogprob
from gateway.sse import EventStream
from tests.gateway.conftest import REPLY
from tests.gateway.support import PROMPT, TEMPLATE, LiveGateway

N_PROMPT = 23
"""Tokens of PROMPT in the template."""


def events(text: str) -> list[dict | str]:
    """The data of each server-sent event; only data lines and blank lines are allowed."""
    lines = [line for line in text.split("\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_through_the_official_client_streamed_and_not_is_the_same(gateway: LiveGateway):
    client = gateway.client()
    arguments = {"model": "tiny", "messages": PROMPT, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == REPLY
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk.model_dump_json() for chunk in chunks)


def test_async_client(gateway: LiveGateway, run):
    async def main():
        async with openai.AsyncOpenAI(base_url=gateway.url + "/v1", api_key=gateway.key) as client:
            stream = await client.chat.completions.create(model="tiny", messages=PROMPT, stream=True)
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert run(main) == REPLY


def test_the_prompt_is_the_template_and_its_special_tokens_come_once(gateway: LiveGateway):
    gateway.chat(max_tokens=1)
    ids = array("i", gateway.engine.submitted[-1].prompt_ids)
    backend = gateway.tokenizer._backend
    assert backend.decode(list(ids), skip_special_tokens=False) == (
        "<|start|>user\nThe quick brown fox<|end|>\n<|start|>assistant\n"
    )
    assert list(ids).count(backend.token_to_id("<|start|>")) == 2 and TEMPLATE.count("<|start|>") == 2


def test_golden_order_of_chunks(gateway: LiveGateway):
    gateway.reply("quick")
    answer = gateway.chat(stream=True)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(answer.text)
    assert done == "[DONE]"
    assert {(c["id"], c["created"], c["model"], c["object"]) for c in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "tiny", "chat.completion.chunk")
    }
    assert [c["choices"][0]["delta"] for c in chunks] == [
        {"role": "assistant", "content": "", "refusal": None},
        {"content": "quick"},
        {},
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "stop"]
    assert all("usage" not in c for c in chunks)


def test_include_usage_puts_null_everywhere_and_one_chunk_without_choices(gateway: LiveGateway):
    gateway.reply("quick")
    *chunks, last, done = events(gateway.chat(stream=True, stream_options={"include_usage": True}).text)
    assert done == "[DONE]"
    assert all(c["usage"] is None and c["choices"] for c in chunks)
    assert last["choices"] == [] and last["usage"]["prompt_tokens"] == N_PROMPT


def test_usage_tells_cached_and_leased_tokens_and_the_cost(gateway: LiveGateway):
    gateway.reply("quick")
    answer = gateway.chat()
    usage = answer.json()["usage"]
    n_output = len(gateway.tokenizer.encode("quick", add_special_tokens=False))
    # The demo plan, in nano-USD per token: 150 uncached, 15 read, 187.5 written for 5 minutes, 600 out.
    nano_usd = round((N_PROMPT - 12) * 150 + 8 * 15 + 4 * 187.5 + n_output * 600)
    assert usage == {
        "prompt_tokens": N_PROMPT,
        "completion_tokens": n_output,
        "total_tokens": N_PROMPT + n_output,
        "prompt_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "cost": nano_usd / 1e9,
        "cost_nano_usd": nano_usd,
    }
    assert answer.headers["x-radixgate-cost-nano-usd"] == str(nano_usd)


def test_parallel_samples_count_the_prompt_once(gateway: LiveGateway):
    answer = gateway.chat(n=3).json()
    n_output = len(gateway.tokenizer.encode(REPLY, add_special_tokens=False))
    assert [(c["index"], c["message"]["content"]) for c in answer["choices"]] == [(i, REPLY) for i in range(3)]
    assert answer["usage"]["prompt_tokens"] == N_PROMPT and answer["usage"]["completion_tokens"] == 3 * n_output


def test_parallel_samples_streamed(gateway: LiveGateway):
    *chunks, _ = events(gateway.chat(n=2, stream=True).text)
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and mine[-1]["finish_reason"] == "stop"
        assert "".join(choice["delta"].get("content", "") for choice in mine) == REPLY


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_is_cut_off_and_billed_to_its_last_token(gateway: LiveGateway, stream: bool):
    ids = gateway.reply("The quick fox STOP and much more text after it")
    n_tokens = next(n for n in range(1, len(ids) + 1) if "STOP" in gateway.tokenizer.decode(ids[:n]))
    answer = gateway.chat(
        stop=["STOP"], stream=stream, **({"stream_options": {"include_usage": True}} if stream else {})
    )
    if stream:
        *chunks, last, _ = events(answer.text)
        text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
        reason, usage = chunks[-1]["choices"][0]["finish_reason"], last["usage"]
    else:
        choice, usage = answer.json()["choices"][0], answer.json()["usage"]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    assert (text, reason, usage["completion_tokens"]) == ("The quick fox ", "stop", n_tokens)


def test_length_is_the_reason_at_max_tokens(gateway: LiveGateway):
    ids = gateway.reply("The quick brown fox jumps")
    choice = gateway.chat(max_completion_tokens=2).json()["choices"][0]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] == gateway.tokenizer.decode(ids[:2])


def test_max_tokens_defaults_to_what_the_model_has_left(gateway: LiveGateway):
    gateway.chat()
    gateway.chat(max_tokens=100_000)
    assert [s.sampling.max_tokens for s in gateway.engine.submitted] == [256 - N_PROMPT] * 2


def test_every_sampling_parameter_reaches_the_engine(gateway: LiveGateway):
    gateway.chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=-1, frequency_penalty=1.5,
        repetition_penalty=1.1, seed=-3, logit_bias={"5": -100, "4": 1}, stop_token_ids=[9], min_tokens=2, max_tokens=9,
        ignore_eos=True, logprobs=True, top_logprobs=3, n=2, cache_salt="s", use_cache=False,
    )  # fmt: skip
    submit = gateway.engine.submitted[-1]
    s = submit.sampling
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.presence_penalty, s.frequency_penalty) == (
        0.5,
        0.9,
        7,
        0.1,
        -1,
        1.5,
    )
    assert (s.repetition_penalty, s.seed, s.logit_bias, s.stop_token_ids) == (1.1, -3, ((4, 1.0), (5, -100.0)), (9,))
    assert (s.min_tokens, s.max_tokens, s.ignore_eos, s.logprobs) == (2, 9, True, 3)
    assert (submit.n, submit.salt, submit.use_cache, submit.owner) == (2, "s", False, gateway.tenant_id)


def test_salt_by_header(gateway: LiveGateway):
    gateway.post({"model": "tiny", "messages": PROMPT, "max_tokens": 1}, x_cache_salt="pepper")
    assert gateway.engine.submitted[-1].salt == "pepper"


def test_harmless_vendor_fields_are_accepted_and_named(gateway: LiveGateway):
    answer = gateway.chat(
        store=True, user="u", prompt_cache_key="k", metadata={"a": "b"}, tools=[], response_format=None
    )
    assert answer.status_code == 200
    assert answer.headers["x-radixgate-ignored"] == "metadata, prompt_cache_key, store, user"


def test_an_alias_names_the_same_model(gateway: LiveGateway):
    assert gateway.chat(model="small").json()["model"] == "tiny"


def test_empty_contents_and_text_parts_are_served_and_no_content_is_refused(gateway: LiveGateway):
    for content in (None, []):
        answer = gateway.chat(messages=[{"role": "user", "content": content}])
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].content")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content in ("", parts):
        assert gateway.chat(messages=[{"role": "user", "content": content}]).status_code == 200
    assert (
        b"user\na\nb<"
        in gateway.tokenizer._backend.decode(
            list(memoryview(gateway.engine.submitted[-1].prompt_ids).cast("i")), skip_special_tokens=False
        ).encode()
    )


def test_an_answer_sent_back_as_the_client_dumps_it_is_a_message(gateway: LiveGateway):
    client = gateway.client()
    message = client.chat.completions.create(model="tiny", messages=PROMPT).choices[0].message
    again = client.chat.completions.create(
        model="tiny", messages=[*PROMPT, message.model_dump(), {"role": "user", "content": "more"}]
    )
    assert again.choices[0].message.content == REPLY


def test_chat_logprobs_spell_the_text(gateway: LiveGateway):
    with_logprobs(gateway, REPLY)
    content = gateway.chat(logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == REPLY
    assert all(entry["logprob"] == -9999.0 for entry in content)
    assert content[0]["top_logprobs"][0]["token"] == content[0]["token"]


def with_logprobs(gateway: LiveGateway, text: str) -> None:
    """Make the engine's next streams report -inf for each token, which JSON cannot say."""
    engine, submit = gateway.engine, type(gateway.engine).submit
    gateway.reply(text)

    def submit_with_logprobs(request):
        stream = submit(engine, request)
        receive = stream.receive

        def receive_with_logprobs(message):
            if isinstance(message, Delta):
                minus = float("-inf")
                logprobs = tuple(TokenLogprob(i, minus, ((i, minus),)) for i in message.token_ids)
                message = Delta(message.request_id, message.output_index, message.token_ids, message.n_tokens,
                                message.finish_reason, None, logprobs)  # fmt: skip
            receive(message)

        stream.receive = receive_with_logprobs
        engine.submit = submit.__get__(engine)
        return stream

    engine.submit = submit_with_logprobs


# --- completions ------------------------------------------------------------------------------------------------------


def test_completions_through_the_official_client(gateway: LiveGateway):
    client = gateway.client()
    arguments = {"model": "tiny", "prompt": "The quick", "max_tokens": 200}
    whole = client.completions.create(**arguments)
    streamed = list(client.completions.create(**arguments, stream=True))
    assert whole.object == streamed[0].object == "text_completion"
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text == REPLY
    assert streamed[-1].choices[0].finish_reason == "stop"


def test_prompts_may_be_texts_or_ids_or_lists_of_them(gateway: LiveGateway):
    ids = list(gateway.tokenizer.encode("The quick brown fox jumps over", add_special_tokens=True))
    for prompt, expected in (
        ("The quick brown fox jumps over", [ids]),
        (ids, [ids]),
        (["The quick brown fox jumps over"] * 2, [ids, ids]),
        ([ids, ids], [ids, ids]),
    ):
        gateway.engine.submitted.clear()
        answer = gateway.post({"model": "tiny", "prompt": prompt, "n": 2}, "/v1/completions").json()
        assert [list(memoryview(s.prompt_ids).cast("i")) for s in gateway.engine.submitted] == expected
        assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(expected)))
        assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_several_prompts_streamed_keep_their_places(gateway: LiveGateway):
    body = {"model": "tiny", "prompt": ["The quick brown fox jumps"] * 3, "max_tokens": 200, "stream": True}
    *chunks, _ = events(gateway.post(body, "/v1/completions").text)
    for index in range(3):
        assert "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index) == REPLY


def test_completions_default_to_16_tokens(gateway: LiveGateway):
    gateway.post({"model": "tiny", "prompt": "The quick brown fox"}, "/v1/completions")
    assert gateway.engine.submitted[-1].sampling.max_tokens == 16


def test_completion_logprobs(gateway: LiveGateway):
    with_logprobs(gateway, "The 🦊")
    body = {"model": "tiny", "prompt": "The quick brown fox", "logprobs": 1}
    logprobs = gateway.post(body, "/v1/completions").json()["choices"][0]["logprobs"]
    lengths = {len(logprobs[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")}
    assert lengths == {len(gateway.tokenizer.encode("The 🦊", add_special_tokens=False))}
    assert logprobs["text_offset"][0] == 0 and logprobs["text_offset"][-1] == 4


# --- errors of the engine ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        ("context_length_exceeded", 400, "context_length_exceeded"),
        ("prompt_exceeds_pool", 400, "context_length_exceeded"),
        ("queue_full", 503, "overloaded"),
        ("queue_timeout", 503, "overloaded"),
        ("draining", 503, "draining"),
        ("step_failed", 500, "engine_error"),
        ("engine_died", 503, "engine_died"),
        ("quarantined", 400, "request_quarantined"),
        ("invalid_request", 400, "invalid_request"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_has_its_status_even_for_a_stream(gateway, code, status, shown, stream):
    gateway.engine.error = EngineError(code, "the words of the engine")
    answer = gateway.chat(stream=stream)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == shown
    assert ("retry-after" in answer.headers) == (status == 503)
    gateway.redis.delete(*gateway.redis.keys("radixgate:quarantine:*") or ["none"])


# --- models -----------------------------------------------------------------------------------------------------------


def test_models(gateway: LiveGateway):
    client = gateway.client()
    assert [model.id for model in client.models.list()] == ["tiny", "small"]
    assert client.models.retrieve("small").id == "small"
    with pytest.raises(openai.NotFoundError) as missing:
        client.models.retrieve("nope")
    assert missing.value.code == "model_not_found"


def test_an_output_that_fails_in_mid_stream_has_no_finish_reason_but_an_error(gateway: LiveGateway, monkeypatch):
    def submit(request: Submit) -> Stream:
        stream = Stream(request, lambda message: None, max_unread_tokens=1000)
        stream.receive(Accepted(request.request_id, PromptRecord(uncached=N_PROMPT), 0.0))
        stream.receive(Delta(request.request_id, 0, (40, 41), 2, "error"))
        failed = EngineError("step_failed", "secret words of the engine")
        stream.receive(Finished(request.request_id, PromptRecord(uncached=N_PROMPT), (2,), ("error",), error=failed))
        return stream

    monkeypatch.setattr(gateway.engine, "submit", submit)
    answer = gateway.chat(stream=True)
    *chunks, error = events(answer.text)
    assert answer.status_code == 200 and "secret" not in answer.text
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert error["error"]["code"] == "engine_error" and set(error) == {"error"}


def test_tools_are_explained_where_the_template_does_not(gateway: LiveGateway):
    tool = {"type": "function", "function": {"name": "f"}}
    # The explanation is longer than this model's context.
    assert gateway.chat(tools=[tool]).json()["error"]["code"] == "context_length_exceeded"
    assert gateway.chat(tools=[tool], tool_choice="none").status_code == 200


def test_a_model_that_does_not_think_shows_tags_as_text(gateway: LiveGateway):
    gateway.reply("<think>x</think>y")
    message = gateway.chat().json()["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "<think>x</think>y", "refusal": None}


def test_the_client_reads_on_through_keep_alives(gateway: LiveGateway, monkeypatch):
    monkeypatch.setitem(EventStream.__init__.__kwdefaults__, "keep_alive_s", 0.01)
    gateway.engine._delay_s = 0.05
    gateway.reply("The fox")
    assert ": keep-alive" in gateway.chat(stream=True).text.partition("data:")[0]
    chunks = gateway.client().chat.completions.create(model="tiny", messages=PROMPT, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "The fox"


def test_a_held_tail_is_flushed_and_nothing_of_a_stop_string_is_shown(gateway: LiveGateway):
    def streamed(**parameters):
        *chunks, _ = events(gateway.chat(stream=True, **parameters).text)
        return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

    n_tokens = len(gateway.reply("The fox <STO"))
    assert n_tokens > 6 and streamed(stop=["<STOP>"]) == "The fox <STO"
    gateway.reply("The fox <STOP> more")
    assert streamed(stop=["<STOP>"]) == "The fox "
