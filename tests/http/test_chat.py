"""Tools, reasoning and template options, as the official client sees them, on a simulated model that says what it is asked to."""

import json

import openai
import pytest

CHAT = "/v1/chat/completions"
# Qwen3's in small: how calls are written and reasoning is marked is found out from it.
TEMPLATE = """\
{%- if tools %}{{ '<|system|>Tools: ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{{- ' Answer within <tool_call>\\n{"name": .., "arguments": ..}\\n</tool_call>' }}{% endif %}
{%- for message in messages %}{{ '<|' + message.role + '|>' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% if enable_thinking is false %}{{ '<think>\\n\\n</think>' }}{% endif %}{% endif %}
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
CALLS = (
    'I shall ask.\n<tool_call>\n{"name": "get_weather", "arguments": {"place": "Ülm <\\"x\\">", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Ely"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def server(start):
    with start("sim", "--max-model-len", "4096", "--served-model-name", "sim", "--chat-template", TEMPLATE) as server:
        yield server


def say(text: str) -> list:
    """A conversation that the simulated model answers with `text`."""
    return [{"role": "user", "content": f"<say>{text}</say>"}]


def error(server, **body) -> dict:
    response = server.http.post(CHAT, json={"messages": say("x"), **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_calls(server):
    completion = server.openai.chat.completions.create(model="sim", messages=say(CALLS), tools=[WEATHER])
    choice = completion.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I shall ask."
    first, second = choice.message.tool_calls
    assert first.type == "function" and first.id != second.id
    assert json.loads(first.function.arguments) == {"place": 'Ülm <"x">', "days": 2}
    assert json.loads(second.function.arguments) == {"place": "Ely"}


def test_streams_of_calls_are_what_the_client_accumulates(server):
    ask = {"model": "sim", "messages": say(CALLS), "tools": [WEATHER], "n": 2}
    whole = server.openai.chat.completions.create(**ask)
    kinds = []
    with server.openai.chat.completions.stream(**ask) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    for streamed, expected in zip(final.choices, whole.choices, strict=True):
        assert streamed.finish_reason == expected.finish_reason == "tool_calls"
        assert streamed.message.content == expected.message.content
        functions = [[(call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls]
                     for choice in (streamed, expected)]
        assert functions[0] == functions[1]
        assert all(call.id.startswith("call_") for call in streamed.message.tool_calls)


def test_all_choices_begin_in_order_before_any_speaks(server):
    """The official client's stream() fails where the first chunk is of another choice than 0."""
    chunks = list(server.openai.chat.completions.create(model="sim", messages=say("Hello."), n=8, stream=True))
    assert [(chunk.choices[0].index, chunk.choices[0].delta.role) for chunk in chunks[:8]] == [(i, "assistant") for i in range(8)]
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[8:])


def test_calls_that_answer_each_other(server):
    messages = say(CALLS)
    for _ in range(2):
        message = server.openai.chat.completions.create(model="sim", messages=messages, tools=[WEATHER]).choices[0].message
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    messages += say("It rains.")
    answer = server.openai.chat.completions.create(model="sim", messages=messages, tools=[WEATHER])
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.tool_calls is None


def test_what_is_cut_behind_a_mark_is_no_text(server):
    for cut in ['{"name": "get_wea', "<tool_call>"]:
        ask = {"model": "sim", "messages": say(CALLS), "tools": [WEATHER], "max_tokens": CALLS.index(cut) + len(cut)}
        choice = server.openai.chat.completions.create(**ask).choices[0]
        assert choice.finish_reason == "length" and choice.message.content == "I shall ask."
    # Among calls that must be made there is no text at all.
    call = '{"name": "get_weather", "arguments": {"place": "x"}}'
    ask = {"messages": say("x"), "tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}
    for cut in range(1, 3 * len(call), 7):
        message = server.http.post(CHAT, json={**ask, "max_tokens": cut, "seed": cut}).raise_for_status().json()["choices"][0]["message"]
        assert not message["content"], message


def test_stop_reason(server):
    def stop(**fields) -> list:
        ask = {"messages": say("one two"), "max_tokens": 50, **fields}
        whole = server.http.post(CHAT, json=ask).raise_for_status().json()["choices"][0]["stop_reason"]
        lines = server.http.post(CHAT, json={**ask, "stream": True}).raise_for_status().text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        ended = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
        text = {"prompt": say("one two")[0]["content"], "max_tokens": 50, **fields}
        plain = server.http.post("/v1/completions", json=text).raise_for_status().json()["choices"][0]["stop_reason"]
        return [whole, *(choice["stop_reason"] for choice in ended), plain]

    assert stop() == [None] * 3
    assert stop(max_tokens=2) == [None] * 3
    assert stop(stop=["x", "e t"]) == ["e t"] * 3
    assert stop(stop_token_ids=[ord("t")]) == [ord("t")] * 3


def test_request_id(server):
    ask = {"messages": say("x"), "request_id": "mine-7"}
    named = server.http.post(CHAT, json=ask)
    assert named.json()["id"] == "chatcmpl-mine-7" and named.headers["x-request-id"] == "mine-7"
    # The header comes first, as in vLLM.
    both = server.http.post(CHAT, json=ask, headers={"x-request-id": "other"})
    assert both.json()["id"] == "chatcmpl-other" and both.headers["x-request-id"] == "other"
    assert error(server, request_id="a b")["param"] == "request_id"


def test_choices_of_tools(server):
    create = server.openai.chat.completions.create
    none = create(model="sim", messages=say(CALLS), tools=[WEATHER], tool_choice="none").choices[0]
    assert none.message.content == CALLS and none.finish_reason == "stop"
    one = create(model="sim", messages=say(CALLS), tools=[WEATHER], parallel_tool_calls=False).choices[0]
    assert len(one.message.tool_calls) == 1 and one.finish_reason == "tool_calls"


def test_reasoning(server):
    text = "<think>\nRain falls.\n</think>\n\nIt rains."
    completion = server.openai.chat.completions.create(model="sim", messages=say(text))
    message = completion.choices[0].message
    assert message.content == "It rains."
    assert message.reasoning_content == message.reasoning == "Rain falls."
    assert completion.usage.completion_tokens_details.reasoning_tokens == text.index("\n\nIt") - len("<think>") + 1
    chunks = list(server.openai.chat.completions.create(model="sim", messages=say(text), stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == "Rain falls."
    assert "".join(delta.content or "" for delta in deltas) == "It rains."
    without = server.openai.chat.completions.create(
        model="sim", messages=say(text), extra_body={"include_reasoning": False}
    )
    assert without.choices[0].message.content == "It rains." and not hasattr(without.choices[0].message, "reasoning")


def test_template_options(server):
    def prompt(**body) -> str:
        tokens = server.http.post("/tokenize", json=body).raise_for_status().json()["tokens"]
        return bytes(tokens).decode()

    user = {"role": "user", "content": "x"}
    assert prompt(messages=[user], chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>")
    assert prompt(messages=[user], reasoning_effort="none").endswith("<think>\n\n</think>")
    for effort in ["minimal", "high", "max"]:
        assert prompt(messages=[user], reasoning_effort=effort).endswith("<|assistant|>")
    assert prompt(messages=[user], add_generation_prompt=False) == "<|user|>x"
    answer = {"role": "assistant", "content": "Once "}
    assert prompt(messages=[user, answer], continue_final_message=True) == "<|user|>x<|assistant|>Once "
    assert '"get_weather"' in prompt(messages=[user], tools=[WEATHER])


def test_what_is_not_supported_is_named(server):
    assert error(server, functions=[WEATHER["function"]])["param"] == "functions"
    assert error(server, tools=[WEATHER, WEATHER])["param"] == "tools"
    assert error(server, tools=[{"type": "web_search"}])["param"] == "tools[0].type"
    assert error(server, tool_choice="required")["param"] == "tool_choice"
    assert error(server, documents=[{"text": "x"}])["param"] == "documents"
    assert error(server, prompt_cache_options={"mode": "implicit"})["code"] == "unsupported_parameter"
    custom = error(server, tools=[{"type": "custom", "custom": {"name": "patch"}}])
    assert custom["param"] == "tools[0].type" and custom["code"] == "unsupported_parameter" and "custom" in custom["message"]
    for name in ["messages", "tools", "documents", "add_generation_prompt"]:
        assert error(server, chat_template_kwargs={name: []})["param"] == f"chat_template_kwargs.{name}"
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]
    assert "image_url" in error(server, messages=image)["message"]
    with pytest.raises(openai.BadRequestError) as info:
        server.openai.chat.completions.create(
            model="sim", messages=say("x"), tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "other"}}
        )
    assert info.value.param == "tool_choice"


def test_a_template_without_tools_gets_them_as_text(sim):
    text = '{"name": "get_weather", "arguments": {"place": "Ely"}}'
    tokens = sim.http.post("/tokenize", json={"messages": say(text), "tools": [WEATHER]}).json()["tokens"]
    assert "get_weather" in bytes(tokens).decode().split("<say>")[0]
    choice = sim.openai.chat.completions.create(model="sim", messages=say(text), tools=[WEATHER]).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"place": "Ely"}


def test_sim_says_what_it_is_asked_to(sim):
    for text in ["Rain.", "", "a <b> é"]:
        choice = sim.openai.chat.completions.create(model="sim", messages=say(text), n=2).choices[1]
        assert (choice.message.content, choice.finish_reason) == (text, "stop")
