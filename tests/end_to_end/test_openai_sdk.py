"""The official openai client against the real model."""

import openai
import pytest

from tests.end_to_end.server import Server

MESSAGES = [{"role": "user", "content": "Name three colours and say one sentence about each."}]


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=server.key("acme"), max_retries=0)


def test_streamed_and_unstreamed_chat_give_the_same_text_and_bill(client: openai.OpenAI) -> None:
    arguments = {"model": "smollm2-135m", "messages": MESSAGES, "temperature": 0, "max_tokens": 40}
    client.chat.completions.create(**arguments)  # warm, so that both below are hits
    whole = client.chat.completions.create(**arguments)
    chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "length"


def test_no_usage_chunk_unless_asked_for(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="smollm2-135m", messages=MESSAGES, max_tokens=3, stream=True)
    assert all(chunk.choices for chunk in stream)


def test_text_completion_streamed_and_not(client: openai.OpenAI) -> None:
    arguments = {"model": "smollm2-135m", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**arguments)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True))
    assert streamed == whole.choices[0].text and "Paris" in streamed


def test_parallel_samples_count_the_prompt_once(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, max_tokens=6, n=3, seed=7, temperature=1.0
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in answer.choices}) == 3
    assert answer.usage.prompt_tokens < 80 and answer.usage.completion_tokens == 18


def test_the_same_seed_gives_the_same_text(client: openai.OpenAI) -> None:
    arguments = {"model": "smollm2-135m", "messages": MESSAGES, "max_tokens": 12, "seed": 11, "temperature": 0.9}
    texts = {client.chat.completions.create(**arguments).choices[0].message.content for _ in range(2)}
    assert len(texts) == 1


def test_stop_string_is_not_part_of_the_text(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="smollm2-135m", prompt="1, 2, 3, 4,", temperature=0, max_tokens=40, stop=" 8"
    )
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == " 5, 6, 7,"


def test_logprobs_name_the_chosen_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="smollm2-135m", messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=2
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == 4
    assert all(entry.token == entry.top_logprobs[0].token and entry.logprob <= 0 for entry in content)
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert "smollm2-135m" in [model.id for model in client.models.list()]
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_wrong_key_and_unknown_model_are_typed(client: openai.OpenAI, server: Server) -> None:
    with pytest.raises(openai.AuthenticationError) as wrong_key:
        openai.OpenAI(base_url=server.url + "/v1", api_key="rg-wrong").models.list()
    assert wrong_key.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
