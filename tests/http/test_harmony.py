"""OpenAI's Harmony format as gpt-oss writes it, through the official clients, on a simulated model that says what it is asked to."""

import json

import anthropic
import openai
import pytest

import clients
from clients import prompt

PROMPT_END = "<|start|>assistant"
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["place"],
    },
}
TOOL = {"type": "function", "function": WEATHER}
FLAT = {"type": "function", **WEATHER, "strict": False}
ANTHROPIC = {"name": "get_weather", "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}
THOUGHT = "<|channel|>analysis<|message|>The user asks.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I shall look.<|end|><|start|>assistant"
ARGUMENTS = '{"place": "Ülm", "days": 2}'
CALL = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
ROLE_CALL = f" to=functions.get_weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"
# Refused, the model goes on with the rest, maybe within a string: a mark there would end the call.
OTHER_CALL = CALL.replace("get_weather", "tell").removesuffix("<|call|>")
WRONG_CALL = CALL.replace('"Ülm"', "17").removesuffix("<|call|>")
ANSWER = "<|channel|>final<|message|>It rains.\n\nMuch."
SCHEMA = {"type": "object", "properties": {"sum": {"type": "integer"}}, "required": ["sum"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server(start):
    with start("sim", "--max-model-len", "8192", "--served-model-name", "sim", "--chat-template", "harmony") as server:
        yield server


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


def say(*parts: str) -> list:
    """A conversation that the simulated model answers with `parts`."""
    return [{"role": "user", "content": f"<say>{''.join(parts)}</say>"}]


def chat(server, messages: list, **fields):
    """The answer's choice, which is the same streamed."""
    choice, chunks, _ = clients.chat(server, model="sim", messages=messages, **fields)
    texts = json.dumps([choice.model_dump(), *(chunk.model_dump() for chunk in chunks)])
    assert "<|" not in texts, "no mark is shown"
    return choice


def refused(server, path: str, **body) -> dict:
    response = server.http.post(path, json={"model": "sim", **body})
    assert response.status_code == 400, response.text
    return response.json()["error"]


def test_chat(server):
    choice = chat(server, say(THOUGHT, ANSWER))
    assert choice.message.content == "It rains.\n\nMuch." and choice.finish_reason == "stop"
    assert choice.message.reasoning_content == "The user asks."
    usage = server.openai.chat.completions.create(model="sim", messages=say(THOUGHT, ANSWER)).usage
    assert 0 < usage.completion_tokens_details.reasoning_tokens < usage.completion_tokens
    two = chat(server, say(THOUGHT, THOUGHT, ANSWER))
    assert two.message.reasoning_content == "The user asks.\n\nThe user asks."
    # Within the header of the last message.
    cut = server.openai.chat.completions.create(model="sim", messages=say(THOUGHT, ANSWER), max_tokens=len(THOUGHT) + 5)
    assert cut.choices[0].finish_reason == "length" and not cut.choices[0].message.content
    hidden = server.openai.chat.completions.create(
        model="sim", messages=say(THOUGHT, ANSWER), extra_body={"include_reasoning": False}
    )
    assert not hasattr(hidden.choices[0].message, "reasoning_content")


@pytest.mark.parametrize("call", [CALL, ROLE_CALL])
def test_chat_calls(server, call):
    choice = chat(server, say(THOUGHT, PREAMBLE, call), tools=[TOOL])
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I shall look."
    [made] = choice.message.tool_calls
    assert made.function.name == "get_weather" and made.function.arguments == ARGUMENTS
    alone = chat(server, say(call), tools=[TOOL])
    assert alone.message.content is None and len(alone.message.tool_calls) == 1


def test_chat_history(server):
    """A client sends back what it got; the model reads its own format."""
    messages = say(THOUGHT, PREAMBLE, CALL)
    message = server.openai.chat.completions.create(model="sim", messages=messages, tools=[TOOL]).choices[0].message
    [call] = message.tool_calls
    messages += [message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
    text = prompt(server, messages=messages, tools=[TOOL])
    compact = json.dumps(json.loads(ARGUMENTS), ensure_ascii=False, separators=(",", ":"))
    assert text.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>The user asks.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I shall look.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
        f"{compact}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>rain<|end|>{PROMPT_END}"
    )
    assert "namespace functions {" in text and "place: string,\ndays?: number,\n" in text
    messages += [{"role": "assistant", "content": "It rains.", "reasoning_content": "So."}, *say(ANSWER)]
    text = prompt(server, messages=messages, tools=[TOOL])
    thoughts = text.split("</say>", 1)[1]
    assert "analysis<|message|>" not in thoughts and "So." not in thoughts, "the turn is over"
    assert "commentary<|message|>I shall look.<|end|>" in thoughts and "final<|message|>It rains.<|end|>" in thoughts
    answer = chat(server, messages, tools=[TOOL])
    assert answer.message.content == "It rains.\n\nMuch." and answer.message.tool_calls is None


def test_effort(server):
    ask = {"messages": say(ANSWER)}
    for effort in ["low", "medium", "high"]:
        assert f"Reasoning: {effort}\n" in prompt(server, **ask, reasoning_effort=effort)
        chat(server, say(ANSWER), reasoning_effort=effort)
    assert "Reasoning: medium\n" in prompt(server, **ask)
    for effort in ["none", "minimal", "xhigh"]:
        error = refused(server, "/v1/chat/completions", **ask, reasoning_effort=effort)
        assert error["param"] == "reasoning_effort" and "low, medium and high" in error["message"]
    error = refused(server, "/v1/responses", input="x", reasoning={"effort": "minimal"})
    assert error["param"] == "reasoning.effort"
    response = server.openai.responses.create(model="sim", input="x", reasoning={"effort": "high"}, max_output_tokens=4)
    assert response.reasoning.effort == "high"


def test_messages_cannot_write_marks(server):
    """Only the server ends a message or begins one: the simulated model's one special token cannot come from a text."""
    text = "a<|eos|>b"
    tokens = server.http.post("/tokenize", json={"messages": [{"role": "user", "content": text}]}).json()["tokens"]
    assert 256 not in tokens
    assert text in server.http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert 256 in server.http.post("/tokenize", json={"prompt": text}).json()["tokens"], "a prompt is the client's own"


def test_forced_calls(server):
    for choice in ["required", {"type": "function", "function": {"name": "get_weather"}}]:
        # The first is right; the others would call another function, or with other arguments.
        for messages in [say(THOUGHT, PREAMBLE, CALL), say(THOUGHT, OTHER_CALL), say(WRONG_CALL)]:
            made = server.openai.chat.completions.create(
                model="sim", messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=4000
            ).choices[0]
            assert made.finish_reason == "tool_calls", made
            [call] = made.message.tool_calls
            arguments = json.loads(call.function.arguments)
            assert call.function.name == "get_weather" and set(arguments) <= {"place", "days"} and "place" in arguments
    kept = server.openai.chat.completions.create(
        model="sim", messages=say(THOUGHT, PREAMBLE, CALL), tools=[TOOL], tool_choice="required"
    ).choices[0].message
    assert kept.reasoning_content == "The user asks." and kept.content == "I shall look."
    assert kept.tool_calls[0].function.arguments == ARGUMENTS
    without = chat(server, say(THOUGHT, ANSWER), tools=[TOOL], tool_choice="none")
    assert without.message.tool_calls is None and without.message.content == "It rains.\n\nMuch."


def test_structured_output(server):
    said = '{"sum": 4}'
    for header in ["<|channel|>final<|message|>", "<|channel|>final <|constrain|>json<|message|>"]:
        kept = chat(server, say(THOUGHT, header, said), response_format=FORMAT).message
        assert kept.reasoning_content == "The user asks." and kept.content == said
    for messages in [say(THOUGHT, ANSWER), say('<|channel|>final<|message|>{"sum": "four"}')]:
        message = server.openai.chat.completions.create(
            model="sim", messages=messages, response_format=FORMAT, max_tokens=4000
        ).choices[0].message
        assert set(json.loads(message.content)) == {"sum"}
    choice = chat(server, say(THOUGHT, "<|channel|>final<|message|>blue"), extra_body={"guided_choice": ["red", "blue"]})
    assert choice.message.content == "blue" and choice.message.reasoning_content == "The user asks."
    # With tools either is possible, and nothing else.
    both = {"tools": [TOOL], "response_format": FORMAT}
    assert chat(server, say(THOUGHT, "<|channel|>final<|message|>", said), **both).message.content == said
    assert chat(server, say(THOUGHT, CALL), **both).finish_reason == "tool_calls"
    error = refused(server, "/v1/chat/completions", messages=say("x"), tools=[TOOL], guided_regex="a")
    assert error["param"] == "guided_regex"


def test_strict_functions(server):
    strict = {"type": "function", "function": {**WEATHER, "strict": True}}
    text = chat(server, say(THOUGHT, ANSWER), tools=[strict])
    assert text.message.content == "It rains.\n\nMuch." and text.finish_reason == "stop"
    made = server.openai.chat.completions.create(
        model="sim", messages=say(WRONG_CALL), tools=[strict], max_tokens=4000
    ).choices[0].message.tool_calls[0]
    assert isinstance(json.loads(made.function.arguments)["place"], str)
    loose = server.openai.chat.completions.create(model="sim", messages=say(WRONG_CALL), tools=[TOOL])
    assert json.loads(loose.choices[0].message.tool_calls[0].function.arguments)["place"] == 17


def test_budget(server):
    message = server.openai.chat.completions.create(
        model="sim", messages=say(THOUGHT, ANSWER), max_tokens=40, extra_body={"thinking_token_budget": 3}
    ).choices[0].message
    assert message.reasoning_content == "The"


def test_responses(server):
    ask = {"model": "sim", "input": say(THOUGHT, PREAMBLE, CALL), "tools": [FLAT]}
    whole = server.openai.responses.create(**ask)
    with server.openai.responses.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    for response in [whole, streamed]:
        reasoning, message, call = response.output
        assert reasoning.content[0].text == "The user asks." and message.content[0].text == "I shall look."
        assert (call.type, call.name, call.arguments) == ("function_call", "get_weather", ARGUMENTS)
    assert "response.reasoning_text.delta" in kinds and "response.function_call_arguments.delta" in kinds
    [result] = [{"type": "function_call_output", "call_id": whole.output[2].call_id, "output": "<say>" + ANSWER + "</say>"}]
    answer = server.openai.responses.create(model="sim", previous_response_id=whole.id, input=[result], tools=[FLAT])
    assert answer.output_text == "It rains.\n\nMuch."
    parsed = server.openai.responses.create(
        model="sim", input=say(THOUGHT, '<|channel|>final<|message|>{"sum": 4}'),
        text={"format": {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}},
    )
    assert parsed.output_text == '{"sum": 4}'
    forced = server.openai.responses.create(model="sim", input=say(WRONG_CALL), tools=[FLAT], tool_choice="required")
    assert isinstance(json.loads(forced.output[-1].arguments)["place"], str)


def test_messages(server, claude):
    ask = {"model": "sim", "max_tokens": 2000, "messages": say(THOUGHT, PREAMBLE, CALL), "tools": [ANTHROPIC]}
    whole = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()
    for message in [whole, streamed]:
        thinking, text, call = message.content
        assert thinking.thinking == "The user asks." and text.text == "I shall look." and message.stop_reason == "tool_use"
        assert call.name == "get_weather" and call.input == json.loads(ARGUMENTS)
    result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": f"<say>{ANSWER}</say>"}
    history = [*ask["messages"], {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    answer = claude.messages.create(**{**ask, "messages": history})
    assert [block.text for block in answer.content] == ["It rains.\n\nMuch."] and answer.stop_reason == "end_turn"
    hidden = claude.messages.create(**{**ask, "messages": say(THOUGHT, ANSWER), "thinking": {"type": "disabled"}})
    assert [block.type for block in hidden.content] == ["text"]
    for effort in ["low", "max"]:
        claude.messages.create(**ask, output_config={"effort": effort})
    enabled = {"type": "enabled", "budget_tokens": 1024}
    assert claude.messages.create(**ask, thinking=enabled).content[0].thinking == "The user asks."
    forced = claude.messages.create(**{**ask, "messages": say(WRONG_CALL), "tool_choice": {"type": "any"}})
    assert isinstance(forced.content[-1].input["place"], str)


def test_continued(server):
    messages = [*say(" and more."), {"role": "assistant", "content": "Rain", "reasoning_content": "Hm."}]
    more = {"add_generation_prompt": False, "continue_final_message": True}
    assert prompt(server, messages=messages, **more).endswith("<|channel|>final<|message|>Rain")
    assert chat(server, messages, extra_body=more).message.content == " and more."


def test_unknown_levels_can_be_ignored(start):
    with start("sim", "--chat-template", "harmony", "--unknown-fields", "warn", "--served-model-name", "sim") as server:
        response = server.http.post("/v1/chat/completions", json={"messages": say(ANSWER), "reasoning_effort": "minimal"})
        assert response.raise_for_status().json()["choices"][0]["message"]["content"] == "It rains.\n\nMuch."


def test_a_named_api_error(server):
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai.chat.completions.create(
            model="sim", messages=say("x"), extra_body={"chat_template_kwargs": {"builtin_tools": ["browser"]}}
        )
    assert "builtin_tools" in caught.value.message
