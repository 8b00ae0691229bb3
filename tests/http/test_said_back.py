"""What official clients send back: whatever one made of an answer belongs into the next request as it is, as an object or as
a dump, however it was asked for, and also where the answer was cut or its call was broken."""

import json

import anthropic
import openai
import pytest

PARAMETERS = {
    "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"], "additionalProperties": False,
}
# With strict functions alone the clients parse arguments.
FUNCTION = {"name": "weather", "description": "Weather of a city.", "parameters": PARAMETERS, "strict": True}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
# What the model says, and after how many tokens (here: characters) it is cut off.
ANSWERS = {
    "text": ("Fine.", None),
    "thought": ("<think>\nHm.\n</think>\n\nFine.", None),
    "call": ("<think>\nHm.\n</think>\n\nLet me see.\n" + CALL, None),
    "calls": (CALL + "\n" + CALL.replace("Paris", "Ely"), None),
    "cut text": ("Fine weather.", 4),
    "cut thought": ("<think>\nHm.\n</think>\n\nFine.", 9),
    "cut mark": (CALL, 6),
    "cut name": (CALL, CALL.index("ther")),
    "cut arguments": (CALL, CALL.index("is")),
}
ENOUGH = 400


def say(text: str) -> str:
    """Makes the simulated model say `text`."""
    return f"<say>{text}</say>"


def has_markup(text: str | None) -> bool:
    """Whole marks and what stands behind them; half a mark may be text."""
    return "<tool_call>" in (text or "") or '"name"' in (text or "")


def as_object(answer):
    return answer


def as_dump(answer):
    return answer.model_dump()


def as_short_dump(answer):
    return answer.model_dump(exclude_none=True)


def as_json(answer):
    return json.loads(answer.model_dump_json())


DUMPS = [as_object, as_dump, as_short_dump, as_json]


def cases(*ways, left_out=lambda way, answer: False) -> list:
    """Every way to get an answer, every answer, but for those that the client's own code refuses."""
    named = [(way, name) for way in ways for name in ANSWERS if not left_out(way, name)]
    return [pytest.param(way, name, id=f"{way.__name__}-{name.replace(' ', '_')}") for way, name in named]


# --- chat


def chat_create(client, **ask):
    return client.chat.completions.create(**ask).choices[0].message


def chat_parse(client, **ask):
    return client.chat.completions.parse(**ask).choices[0].message


def chat_stream(client, **ask):
    with client.chat.completions.stream(**ask) as stream:
        try:
            return stream.get_final_completion().choices[0].message
        except openai.LengthFinishReasonError as cut:
            return cut.completion.choices[0].message


def is_cut(way, answer) -> bool:
    """Its parse() raises where an answer is cut."""
    return way is chat_parse and ANSWERS[answer][1] is not None


@pytest.mark.parametrize(("way", "answer"), cases(chat_create, chat_parse, chat_stream, left_out=is_cut))
def test_chat(agent, way, answer):
    text, cut = ANSWERS[answer]
    messages = [{"role": "user", "content": say(text)}]
    ask = {"model": "sim", "tools": [{"type": "function", "function": FUNCTION}]}
    message = way(agent.openai, **ask, messages=messages, max_tokens=cut or ENOUGH)
    assert not has_markup(message.content)
    rest = [{"role": "tool", "tool_call_id": call.id, "content": "20 °C"} for call in message.tool_calls or []]
    rest.append({"role": "user", "content": say("Thanks.")})
    for dump in DUMPS:
        again = chat_create(agent.openai, **ask, messages=[*messages, dump(message), *rest], max_tokens=ENOUGH)
        assert again.content == "Thanks.", dump


def test_a_chat_with_a_broken_call(agent):
    """What the model wrote may be no JSON: it reads what it wrote."""
    broken = CALL.replace('"Paris"', "Paris")
    messages = [{"role": "user", "content": say(broken)}]
    ask = {"model": "sim", "tools": [{"type": "function", "function": {**FUNCTION, "strict": False}}]}
    message = chat_create(agent.openai, **ask, messages=messages)
    [call] = message.tool_calls
    with pytest.raises(json.JSONDecodeError):
        json.loads(call.function.arguments)
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "no JSON"}]
    messages.append({"role": "user", "content": say("I see.")})
    assert chat_create(agent.openai, **ask, messages=messages).content == "I see."
    told = agent.http.post("/tokenize", json={"messages": [{"role": "user", "content": "?"}, as_json(message)]}).json()
    assert "INVALID_JSON" in bytes(told["tokens"]).decode()


@pytest.mark.parametrize("extra", [
    {"parsed": None, "provider_specific_fields": {"a": 1}, "thinking_blocks": [], "reasoning_details": [], "annotations": []},
    {"audio": None, "function_call": None, "name": None, "tool_calls": None, "refusal": None},
])
def test_what_clients_add_to_an_answer(agent, extra):
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", **extra}, {"role": "user", "content": say("Hi")}]
    assert chat_create(agent.openai, model="sim", messages=messages).content == "Hi"
    # Elsewhere only what is known to be harmless.
    harmless = {"role": "user", "content": say("Hi"), "cache_control": {"type": "ephemeral"}, "id": "1"}
    assert chat_create(agent.openai, model="sim", messages=[harmless]).content == "Hi"
    wrong = agent.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "?", "parsed": 1}]})
    error = wrong.json()["error"]
    assert (wrong.status_code, error["param"], error["code"]) == (400, "messages[0].parsed", "unknown_parameter")


def test_a_refusal_sent_back(agent):
    parts = [{"type": "text", "text": "Well."}, {"type": "refusal", "refusal": "No."}]
    told = agent.http.post("/tokenize", json={"messages": [{"role": "assistant", "content": parts}]}).raise_for_status().json()
    assert "Well.\nNo." in bytes(told["tokens"]).decode()


# --- responses


def responses_create(client, **ask):
    return client.responses.create(**ask)


def responses_parse(client, **ask):
    return client.responses.parse(**ask)


def responses_stream(client, **ask):
    with client.responses.stream(**ask) as stream:
        for event in stream:
            if event.type in ("response.completed", "response.incomplete"):
                return event.response
    raise AssertionError("the stream has no end")


def has_cut_json(way, answer) -> bool:
    """Its parse() reads arguments as JSON."""
    return way is responses_parse and answer == "cut arguments"


@pytest.mark.parametrize(("way", "answer"), cases(responses_create, responses_parse, responses_stream, left_out=has_cut_json))
def test_responses(agent, way, answer):
    text, cut = ANSWERS[answer]
    items = [{"role": "user", "content": say(text)}]
    ask = {"model": "sim", "tools": [{"type": "function", **FUNCTION}]}
    response = way(agent.openai, **ask, input=items, max_output_tokens=cut or ENOUGH)
    assert not has_markup(response.output_text)
    calls = [item for item in response.output if item.type == "function_call"]
    rest = [{"type": "function_call_output", "call_id": call.call_id, "output": "20 °C"} for call in calls]
    rest.append({"role": "user", "content": say("Thanks.")})
    for dump in DUMPS:
        told = [*items, *map(dump, response.output), *rest]
        assert agent.openai.responses.create(**ask, input=told).output_text == "Thanks.", dump
        counted = agent.openai.responses.input_tokens.count(**ask, input=told)
        assert counted.object == "response.input_tokens" and counted.input_tokens > response.usage.input_tokens


def test_an_item_that_a_client_added_to(agent):
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{", "async": False, "provider_data": {"a": 1}}
    items = [{"role": "user", "content": "?"}, call, {"type": "function_call_output", "call_id": "c", "output": say("Hi")}]
    assert agent.openai.responses.create(model="sim", input=items).output_text == "Hi"


# --- messages


def messages_create(client, **ask):
    return client.messages.create(**ask)


def messages_stream(client, **ask):
    with client.messages.stream(**ask) as stream:
        return stream.get_final_message()


def beta_create(client, **ask):
    return client.beta.messages.create(**ask)


def beta_stream(client, **ask):
    with client.beta.messages.stream(**ask) as stream:
        return stream.get_final_message()


@pytest.fixture(scope="module")
def client(agent):
    with anthropic.Anthropic(base_url=agent.url, api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.mark.parametrize(("way", "answer"), cases(messages_create, messages_stream, beta_create, beta_stream))
def test_messages(client, way, answer):
    text, cut = ANSWERS[answer]
    messages = [{"role": "user", "content": say(text)}]
    tool = {"name": "weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}
    ask = {"model": "sim", "tools": [tool]}
    message = way(client, **ask, messages=messages, max_tokens=cut or ENOUGH)
    assert not any(has_markup(block.text) for block in message.content if block.type == "text")
    results = [{"type": "tool_result", "tool_use_id": block.id, "content": "20 °C"}
               for block in message.content if block.type == "tool_use"]
    rest = {"role": "user", "content": [*results, {"type": "text", "text": say("Thanks.")}]}
    for dump in DUMPS:
        told = [*messages, {"role": "assistant", "content": [dump(block) for block in message.content]}, rest]
        again = client.messages.create(**ask, messages=told, max_tokens=ENOUGH)
        assert again.content[0].text == "Thanks.", dump


def test_tool_runner(client):
    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Weather of a city.

        Args:
            city: Its name.
        """
        return say(f"Rain in {city}.")

    runner = client.beta.messages.tool_runner(
        model="sim", max_tokens=ENOUGH, tools=[weather], messages=[{"role": "user", "content": say(CALL)}]
    )
    assert [block.text for block in runner.until_done().content] == ["Rain in Paris."]
