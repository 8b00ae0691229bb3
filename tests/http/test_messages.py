"""/v1/messages as Anthropic's own client and Claude Code use it, against a simulated model that says what it is told to."""

import json

import anthropic
import pytest
from pydantic import BaseModel

MESSAGES = "/v1/messages"
WEATHER = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture(scope="module")
def client(agent):
    with anthropic.Anthropic(base_url=agent.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


def say(text: str) -> str:
    """Makes the simulated model say `text`."""
    return f"<say>{text}</say>"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def ask(text: str, **fields) -> dict:
    return {"model": "sim", "max_tokens": 200, "messages": [user(text)], **fields}


def raw(agent, body: dict) -> list:
    """Data of a raw event stream, whose names are checked."""
    events = []
    with agent.http.stream("POST", MESSAGES, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("event: "):
                events.append(line.removeprefix("event: "))
            elif line.startswith("data: "):
                data = json.loads(line.removeprefix("data: "))
                assert data["type"] == events[-1]
                events[-1] = data
    return events


def order(events: list) -> list:
    """The events' types, repeated deltas as one."""
    types = [event.get("delta", {}).get("type", event["type"]) for event in events]
    return [kind for i, kind in enumerate(types) if not (i and kind == types[i - 1] and kind.endswith("_delta"))]


def refused(agent, body: dict, status: int = 400, path: str = MESSAGES) -> dict:
    """The error of a request that is refused, whose shape is checked."""
    response = agent.http.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()
    assert error["type"] == "error" and set(error) == {"type", "error", "request_id"}
    assert error["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert set(error["error"]) == {"type", "message"}
    return error["error"]


# --- text


def test_text(client):
    message = client.messages.create(**ask(say("Hello there."), system="Be kind."))
    assert [block.text for block in message.content] == ["Hello there."]
    assert message.id.startswith("msg_") and message.type == "message" and message.role == "assistant"
    assert message.model == "sim"
    assert message.stop_reason == "end_turn" and message.stop_sequence is None
    assert message.usage.output_tokens == len("Hello there.") + 1


def test_streamed_is_the_same(client):
    with client.messages.stream(**ask(say("Hello, naïve world."))) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == "Hello, naïve world."
    whole = client.messages.create(**ask(say("Hello, naïve world.")))
    assert final.content[0].text == whole.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_events_of_text(agent):
    events = raw(agent, ask(say("Hi")))
    assert order(events) == [
        "message_start", "ping", "content_block_start", "text_delta", "content_block_stop", "message_delta", "message_stop",
    ]
    start, delta = events[0]["message"], events[-2]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["input_tokens"] > 0
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 3


def test_cached_tokens_are_counted_apart(client):
    long = ask("All work and no play makes Jack a dull boy. " * 10 + say("x"))
    first, second = (client.messages.create(**long).usage for _ in range(2))
    assert first.cache_read_input_tokens == 0 < second.cache_read_input_tokens
    assert first.input_tokens == second.input_tokens + second.cache_read_input_tokens
    assert client.messages.count_tokens(model="sim", messages=long["messages"]).input_tokens == first.input_tokens


def test_ends(client):
    def end(**fields):
        message = client.messages.create(**{**ask(say("one two three")), **fields})
        return message.content[0].text, message.stop_reason, message.stop_sequence

    assert end(max_tokens=5) == ("one t", "max_tokens", None)
    assert end(stop_sequences=["four", " two"]) == ("one", "stop_sequence", " two")
    # More than fits is no error: the answer ends with the context.
    assert end(max_tokens=1_000_000) == ("one two three", "end_turn", None)
    tight = client.messages.create(**ask("x" * 3900 + say("y" * 90), max_tokens=1_000_000))
    assert tight.stop_reason == "model_context_window_exceeded"
    assert 0 < len(tight.content[0].text) < 90


def test_prefill_is_continued(client):
    messages = [user(say("Hello there.")), {"role": "assistant", "content": "Once"}]
    counted = client.messages.count_tokens(model="sim", messages=messages).input_tokens
    plain = client.messages.count_tokens(model="sim", messages=messages[:1]).input_tokens
    assert counted == plain + len("Once")
    usage = client.messages.create(model="sim", max_tokens=50, messages=messages).usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted


# --- thinking and tools


def test_thinking(agent, client):
    said = say("<think>\nTwo and two.\n</think>\n\nFour.")
    thinking, text = client.messages.create(**ask(said)).content
    assert thinking.type == "thinking" and thinking.thinking == "Two and two." and thinking.signature
    assert text.text == "Four."
    assert order(raw(agent, ask(said))) == [
        "message_start", "ping", "content_block_start", "thinking_delta", "signature_delta", "content_block_stop",
        "content_block_start", "text_delta", "content_block_stop", "message_delta", "message_stop",
    ]
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert client.messages.create(**ask(said, thinking=enabled)).content[0].thinking == "Two and two."
    omitted = client.messages.create(**ask(said, thinking={"type": "adaptive", "display": "omitted"})).content[0]
    assert omitted.thinking == "" and len(omitted.signature) > len(thinking.signature)
    assert [block.type for block in client.messages.create(**ask(said, thinking={"type": "disabled"})).content] == ["text"]


def test_tools(agent, client):
    body = ask(say("Looking." + CALL), tools=[WEATHER])
    message = client.messages.create(**body)
    text, use = message.content
    assert text.text == "Looking." and message.stop_reason == "tool_use"
    assert use.type == "tool_use" and use.name == "weather" and use.input == {"city": "Paris"}
    events = raw(agent, body)
    assert order(events)[4:] == [
        "content_block_stop", "content_block_start", "input_json_delta", "content_block_stop", "message_delta", "message_stop",
    ]
    partial = "".join(event["delta"].get("partial_json", "") for event in events if "delta" in event)
    assert json.loads(partial) == {"city": "Paris"}
    with client.messages.stream(**body) as stream:
        assert stream.get_final_message().content[1].input == {"city": "Paris"}

    # As the client's documentation has it: append the message, append what the tool gave.
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": say("20 °C")}]}
    conversation = [*body["messages"], {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(**{**body, "messages": conversation})
    assert answer.content[0].text == "20 °C"


def test_tool_choice(client):
    for choice in [{"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}]:
        # It may think first, but not end there. What it makes up then has an end, at some length.
        message = client.messages.create(**ask(say("<think>No.</think>"), tools=[WEATHER], tool_choice=choice, max_tokens=3500))
        assert message.content[0].thinking == "No." and message.stop_reason == "tool_use"
        assert message.content[-1].type == "tool_use" and message.content[-1].name == "weather"
        assert isinstance(message.content[-1].input["city"], str)
    none = client.messages.create(**ask(say("no"), tools=[WEATHER], tool_choice={"type": "none"}))
    assert none.content[0].text == "no"


def test_structured_output(client):
    class Answer(BaseModel):
        city: str
        degrees: int

    said = say('{"city": "Paris", "degrees": 20}')
    message = client.messages.parse(**ask(said), output_format=Answer)
    assert message.parsed_output == Answer(city="Paris", degrees=20)
    digit = {"type": "json_schema", "schema": {"type": "integer", "minimum": 0, "maximum": 9}}
    # Once it has thought it may not think again: what it makes up is a digit.
    message = client.messages.create(**ask(say("<think>No.</think>no"), output_config={"format": digit}))
    assert message.content[0].thinking == "No." and message.stop_reason == "end_turn"
    assert 0 <= json.loads(message.content[1].text) <= 9


# --- agents


def test_what_claude_code_sends(agent):
    body = {
        "model": "sim",
        "max_tokens": 32000,
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.177; cc_entrypoint=cli; cch=fa690;"},
            {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [{"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
            {"type": "text", "text": say("Hi"), "cache_control": {"type": "ephemeral"}},
        ]}],
        "tools": [{**WEATHER, "eager_input_streaming": True, "cache_control": {"type": "ephemeral"}}] * 1,
        "metadata": {"user_id": "user_1_account__session_2"},
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
        "stream": True,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14"}

    def send(cch: str) -> list:
        body["system"][0]["text"] = f"x-anthropic-billing-header: cc_version=2.1.177; cch={cch};"
        response = agent.http.post(f"{MESSAGES}?beta=true", json=body, headers=headers).raise_for_status()
        return [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]

    first, second = send("11111"), send("22222")
    assert first[-2]["delta"]["stop_reason"] == "end_turn"
    # What changes with each request is not in the way of the prefix cache.
    assert second[-2]["usage"]["cache_read_input_tokens"] > 0.8 * first[0]["message"]["usage"]["input_tokens"]
    counted = agent.http.post(f"{MESSAGES}/count_tokens?beta=true", json={**body, "stream": False}, headers=headers)
    assert counted.json() == {"input_tokens": first[0]["message"]["usage"]["input_tokens"]}


# --- refusals


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "missing field `max_tokens`"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "`messages[0].role`: unknown variant `tool`"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].source"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type = web_search_20250305"),
        ({"tools": [{"name": "f"}]}, "`tools[0].input_schema`"),
        ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice"),
        ({"tool_choice": {"type": "some"}}, "`tool_choice"),
        ({"thinking": {"type": "sometimes"}}, "`thinking"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
        ({"mcp_servers": [{"name": "x"}]}, "`mcp_servers` is not supported"),
        ({"container": "c"}, "`container` is not supported"),
        ({"speed": "fast"}, "`speed` is not supported"),
        ({"stop": ["x"]}, "unknown field `stop`"),
        ({"stop_sequences": [""]}, "stop string must not be empty"),
        ({"temperature": -1}, "temperature"),
        ({"compaction": {"type": "auto"}}, "`compaction` is not supported"),
        ({"fallbacks": [{"model": "x"}]}, "`fallbacks` is not supported"),
        ({"billing_policy": {}}, "`billing_policy` is not supported"),
        ({"user_profile_id": "u"}, "`user_profile_id` is not supported"),
        ({"workspace_id": "w"}, "`workspace_id` is not supported"),
        ({"return_token_ids": True}, "`return_token_ids` is not supported"),
        ({"prompt_logprobs": 1}, "`prompt_logprobs` is not supported"),
        ({"chat_template_kwargs": {"messages": []}}, "`messages` cannot be set in chat_template_kwargs"),
        ({"temprature": 1}, "unknown field `temprature`"),
    ],
)
def test_refusals_say_what_is_wrong(agent, fields, words):
    error = refused(agent, {**ask("Hello"), **fields})
    assert error["type"] == "invalid_request_error" and words in error["message"]


def test_threads_are_refused_as_the_client_expects(agent):
    """It then sends the whole conversation by itself."""
    response = agent.http.post(MESSAGES, json=ask("Hello", thread={"type": "create"}))
    error = response.json()["error"]
    assert response.status_code == 400 and "`thread` is not supported" in error["message"]
    assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def test_vllms_parameters(agent, client):
    more = {"min_tokens": 3, "cache_salt": "s", "seed": 1, "top_k": 5, "return_token_ids": False, "request_id": "mine-1"}
    response = agent.http.post(MESSAGES, json={**ask(say("one two three"), stop_sequences=["n"]), **more})
    assert response.json()["content"][0]["text"] == "one two three" and response.headers["request-id"] == "mine-1"
    # Clients count what they are about to send.
    assert agent.http.post(f"{MESSAGES}/count_tokens", json={**ask(say("x"), stop_sequences=["n"]), **more}).status_code == 200


def test_errors_are_anthropics_wherever_they_come_from(agent, client):
    assert refused(agent, ask("Hello", model="gpt-4o"), 404)["type"] == "not_found_error"
    assert refused(agent, {}, 404, f"{MESSAGES}/batches")["type"] == "not_found_error"
    response = agent.http.get(MESSAGES)
    assert response.status_code == 405 and response.json()["type"] == "error"
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 4096 maximum"):
        client.messages.create(**ask("x" * 5000))
    # Elsewhere they are OpenAI's.
    assert list(agent.http.post("/v1/messages_of_others", json={}).json()) == ["error"]
