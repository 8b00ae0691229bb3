"""/v1/responses as OpenAI's own client uses it, against a simulated model that says what it is told to."""

import json

import openai
import pytest
from pydantic import BaseModel

RESPONSES = "/v1/responses"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture(scope="module")
def agent(start):
    """A simulated model that reasons and calls tools, and a small store."""
    with start(
        "sim", "--max-model-len", "4096", "--served-model-name", "sim", "--tool-call-parser", "hermes",
        "--reasoning-parser", "qwen3", "--response-store-max-count", "20",
    ) as server:
        yield server


def say(text: str) -> str:
    """Makes the simulated model say `text`."""
    return f"<say>{text}</say>"


def call(city: str) -> str:
    """A call of the function `weather`, as the model writes it."""
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


def create(server, **fields):
    return server.openai.responses.create(**{"model": "sim", **fields})


def refused(server, body: dict, status: int = 400) -> dict:
    """The error of a request that is refused."""
    response = server.http.post(RESPONSES, json=body)
    assert response.status_code == status, response.text
    assert list(response.json()) == ["error"]
    return response.json()["error"]


def raw(server, **fields) -> list:
    """Names and data of a raw event stream."""
    events = []
    with server.http.stream("POST", RESPONSES, json={**fields, "stream": True}) as response:
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        for line in response.iter_lines():
            if line.startswith("event: "):
                events.append([line.removeprefix("event: ")])
            elif line.startswith("data: "):
                events[-1].append(json.loads(line.removeprefix("data: ")))
    assert all(len(event) == 2 and event[0] == event[1]["type"] for event in events)
    assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
    return events


def order(events: list) -> list:
    """The events' names, repeated deltas as one."""
    names = [name.removeprefix("response.") for name, _ in events]
    return [name for i, name in enumerate(names) if not (i and name == names[i - 1] and name.endswith("delta"))]


# --- text


def test_text(agent):
    response = create(agent, input=say("Hello there."), instructions="Be kind.", metadata={"run": "7"})
    assert response.output_text == "Hello there."
    assert response.id.startswith("resp_") and response.object == "response"
    assert response.status == "completed" and response.error is None and response.incomplete_details is None
    assert response.completed_at >= response.created_at
    assert response.instructions == "Be kind." and response.metadata == {"run": "7"}
    assert response.tools == [] and response.tool_choice == "auto" and response.parallel_tool_calls is True
    assert response.text.format.type == "text" and response.truncation == "disabled"
    [message] = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")
    assert message.id.startswith("msg_")
    usage = response.usage
    assert usage.output_tokens == len("Hello there.") + 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert usage.output_tokens_details.reasoning_tokens == 0


def test_streamed_is_the_same(agent):
    ask = {"model": "sim", "input": say("Hello, naïve world."), "store": False}
    whole = agent.openai.responses.create(**ask)
    with agent.openai.responses.stream(**ask) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text == "Hello, naïve world."
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert set(final.model_dump()) == set(whole.model_dump())


def test_events_of_text(agent):
    events = raw(agent, input=say("Hi"))
    assert order(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done", "completed",
    ]
    created, added, part, done = events[0][1], events[2][1], events[3][1], events[-1][1]
    assert created["response"]["status"] == "in_progress" and created["response"]["usage"] is None
    assert added["item"]["content"] == [] and added["item"]["status"] == "in_progress"
    assert part["part"] == {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    assert {data["item_id"] for _, data in events if "item_id" in data} == {added["item"]["id"]}
    assert done["response"]["output"] == [events[-2][1]["item"]]
    assert done["response"]["id"] == created["response"]["id"]


def test_incomplete(agent):
    response = create(agent, input=say("one two three"), max_output_tokens=5)
    assert response.output_text == "one t" and response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert order(raw(agent, input=say("one two three"), max_output_tokens=5))[-1] == "incomplete"


def test_logprobs(agent):
    logprobs = ["message.output_text.logprobs"]
    response = create(agent, input=say("Hi"), include=logprobs, top_logprobs=2)
    tokens = response.output[0].content[0].logprobs
    assert [token.token for token in tokens] == ["H", "i"]
    assert all(len(token.top_logprobs) == 2 and token.logprob <= 0 for token in tokens)
    events = raw(agent, input=say("Hi"), include=logprobs)
    streamed = [token for name, data in events if name.endswith("text.delta") for token in data["logprobs"]]
    assert "".join(token["token"] for token in streamed) == "Hi"
    assert create(agent, input=say("Hi")).output[0].content[0].logprobs == []


# --- reasoning and tools


def test_reasoning(agent):
    said = say("<think>\nTwo and two.\n</think>\n\nFour.")
    response = create(agent, input=said, include=["reasoning.encrypted_content"])
    reasoning, message = response.output
    assert reasoning.type == "reasoning" and reasoning.summary == []
    assert reasoning.content[0].text == "Two and two." and reasoning.encrypted_content
    assert response.output_text == "Four." and message.type == "message"
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens
    events = raw(agent, input=said)
    assert order(events)[2:8] == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
    ]
    assert [data["output_index"] for name, data in events if name.endswith("item.added")] == [0, 1]


def test_tool_calls(agent):
    response = create(agent, input=say("Looking." + call("Paris")), tools=[WEATHER])
    message, tool = response.output
    assert message.content[0].text == "Looking."
    assert (tool.type, tool.name, tool.status) == ("function_call", "weather", "completed")
    assert json.loads(tool.arguments) == {"city": "Paris"}
    assert tool.id.startswith("fc_") and tool.call_id and tool.call_id != tool.id
    events = raw(agent, input=say(call("Paris")), tools=[WEATHER])
    assert order(events) == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done", "completed",
    ]
    added, done = events[2][1]["item"], events[-2][1]["item"]
    assert added["arguments"] == "" and added["name"] == "weather"
    streamed = "".join(data["delta"] for name, data in events if name.endswith("arguments.delta"))
    assert streamed == done["arguments"] == events[-3][1]["arguments"]


def test_a_conversation_with_tools(agent):
    """As the client's documentation has it: append the output, append what the tool gave."""
    items = [{"role": "user", "content": say(call("Paris"))}]
    response = create(agent, input=items, tools=[WEATHER], store=False)
    items += [item.model_dump(exclude_none=True) for item in response.output]
    result = {"type": "function_call_output", "call_id": response.output[0].call_id, "output": say("20 °C")}
    assert create(agent, input=[*items, result], tools=[WEATHER], store=False).output_text == "20 °C"
    wrong = {**result, "call_id": "call_none"}
    assert "call_none" in refused(agent, {"input": [*items, wrong]})["message"]


def test_namespaces(agent):
    namespace = {"type": "namespace", "name": "city", "description": "About cities.", "tools": [WEATHER]}
    text = call("Paris").replace('"weather"', '"city__weather"')
    response = create(agent, input=say(text), tools=[namespace])
    assert (response.output[0].namespace, response.output[0].name) == ("city", "weather")
    again = [{"role": "user", "content": "?"}, response.output[0].model_dump(exclude_none=True)]
    result = {"type": "function_call_output", "call_id": response.output[0].call_id, "output": say("fine")}
    assert create(agent, input=[*again, result], tools=[namespace]).output_text == "fine"


def test_structured_output(agent):
    class Answer(BaseModel):
        city: str
        degrees: int

    said = '{"city": "Paris", "degrees": 20}'
    parsed = agent.openai.responses.parse(model="sim", input=say(said), text_format=Answer)
    assert parsed.output_parsed == Answer(city="Paris", degrees=20)
    assert parsed.text.format.type == "json_schema"
    # The schema is enforced, whatever the model would say.
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "integer", "minimum": 0, "maximum": 9}}
    # Once it has thought it may not think again: what it makes up is a digit.
    response = create(agent, input=say("<think>No.</think>no"), text={"format": schema})
    reasoning, _ = response.output
    assert reasoning.content[0].text == "No." and response.status == "completed"
    assert 0 <= json.loads(response.output_text) <= 9


# --- the store


def test_previous_response(agent):
    first = create(agent, input=say("one"), instructions="Be brief.")
    second = create(agent, input="And then?", previous_response_id=first.id)
    # The model still hears what it was told first, but no instructions.
    assert second.output_text == "one" and second.instructions is None
    third = create(agent, input=say("three"), previous_response_id=second.id)
    items = agent.openai.responses.input_items.list(third.id, order="asc").data
    said = [item.content[0].text for item in items]
    assert said == [say("one"), "one", "And then?", "one", say("three")]
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
    # Retelling the conversation is the same conversation.
    told = [{"role": item.role, "content": item.content[0].text} for item in items]
    retold = create(agent, input=told)
    assert retold.usage.input_tokens == third.usage.input_tokens


def test_retrieve_and_delete(agent):
    events = raw(agent, input=say("keep me"))
    made = events[-1][1]["response"]
    assert agent.http.get(f"{RESPONSES}/{made['id']}").json() == made
    assert agent.openai.responses.retrieve(made["id"]).output_text == "keep me"
    with pytest.raises(openai.BadRequestError, match="background"):
        agent.openai.responses.cancel(made["id"])
    assert agent.http.get(f"{RESPONSES}/{made['id']}?stream=true").status_code == 400
    agent.openai.responses.delete(made["id"])
    for attempt in [agent.openai.responses.retrieve, agent.openai.responses.delete, agent.openai.responses.cancel]:
        with pytest.raises(openai.NotFoundError, match="is not stored"):
            attempt(made["id"])


def test_input_items_are_paged(agent):
    texts = [f"message {i}" for i in range(5)]
    made = create(agent, input=[*({"role": "user", "content": text} for text in texts), {"role": "user", "content": say("x")}])
    page = agent.openai.responses.input_items.list(made.id, limit=2)
    assert page.has_more and len(page.data) == 2
    everything = [item.content[0].text for item in page]
    assert everything == [say("x"), *reversed(texts)]
    listed = agent.openai.responses.input_items.list(
        made.id, limit=2, include=["message.output_text.logprobs", "reasoning.encrypted_content"]
    )
    assert listed.data == page.data
    for wrong in ["limit=0", "limit=101", "order=up", "after=msg_none", "colour=red"]:
        assert agent.http.get(f"{RESPONSES}/{made.id}/input_items?{wrong}").status_code == 400


def test_what_is_not_stored(agent):
    gone = create(agent, input=say("x"), store=False)
    assert gone.store is False
    error = refused(agent, {"input": "?", "previous_response_id": gone.id}, 404)
    assert error["param"] == "previous_response_id" and "store = false" in error["message"]
    reference = {"type": "item_reference", "id": gone.output[0].id}
    assert refused(agent, {"input": [reference]}, 404)["param"] == "input"


def test_item_reference(agent):
    made = create(agent, input=say("referred"))
    reference = {"type": "item_reference", "id": made.output[0].id}
    told = create(agent, input=[reference, {"role": "user", "content": say("x")}])
    items = agent.openai.responses.input_items.list(told.id, order="asc").data
    assert items[0].content[0].text == "referred"


def test_the_store_is_bounded(agent):
    first = create(agent, input=say("oldest"))
    last = create(agent, input="?", previous_response_id=first.id)
    for _ in range(19):
        create(agent, input=say("x"), max_output_tokens=1)
    with pytest.raises(openai.NotFoundError, match="keeps the last 20 responses"):
        agent.openai.responses.retrieve(first.id)
    # Its conversation goes on.
    assert create(agent, input="!", previous_response_id=last.id).output_text == "oldest"


# --- agents


def test_what_codex_sends(agent):
    """Codex keeps the conversation itself, and sends back what it was given, without plain reasoning."""
    ask = {
        "model": "sim",
        "instructions": "You are a coding agent.",
        "tools": [{"type": "function", "name": "shell", "strict": False, "description": "Runs a command.",
                   "parameters": {"type": "object", "properties": {"command": {"type": "array"}}}}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199",
        "client_metadata": {"x-codex-installation-id": "0199"},
    }
    shell = '<think>\nList.\n</think>\n\n<tool_call>\n{"name": "shell", "arguments": {"command": ["ls"]}}\n</tool_call>'
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No network."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": say(shell)}]},
    ]
    events = raw(agent, **ask, input=items)
    reasoning, tool = (data["item"] for name, data in events if name == "response.output_item.done")
    items += [
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": reasoning["encrypted_content"]},
        {key: tool[key] for key in ["type", "name", "arguments", "call_id"]},
        {"type": "function_call_output", "call_id": tool["call_id"], "output": say("Done.")},
    ]
    done = raw(agent, **ask, input=items)[-1][1]["response"]
    assert done["status"] == "completed" and done["output"][0]["content"][0]["text"] == "Done."


def test_vllms_parameters(agent):
    more = {"min_tokens": 3, "cache_salt": "s", "seed": 1, "stop": ["n"], "request_id": "mine-1"}
    made = agent.http.post(RESPONSES, json={"input": say("one two"), **more})
    assert made.json()["output"][0]["content"][0]["text"] == "one two" and made.headers["x-request-id"] == "mine-1"


def test_tokens_are_counted_as_they_are_read(agent):
    ask = {"model": "sim", "input": say("x"), "instructions": "Be brief.", "tools": [WEATHER]}
    counted = agent.openai.responses.input_tokens.count(**ask)
    assert counted.input_tokens == create(agent, **ask).usage.input_tokens
    # More than the server could read is counted all the same.
    assert agent.openai.responses.input_tokens.count(model="sim", input="x" * 5000).input_tokens > 5000
    wrong = agent.http.post(f"{RESPONSES}/input_tokens", json={"input": "x", "colour": 1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "colour"


# --- refusals


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "local_shell"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "now"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"include": ["everything"]}, "include[0]"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"metadata": {"key": 1}}, "metadata"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"return_token_ids": True}, "return_token_ids"),
        ({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs.documents"),
        ({"personality": "friendly"}, "personality"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "some"}, "truncation"),
        ({"temprature": 1}, "temprature"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].image_url"),
    ],
)
def test_refusals_name_the_field(agent, fields, param):
    assert refused(agent, {"input": "Hello", **fields})["param"] == param


def test_too_long(agent):
    error = refused(agent, {"input": "x" * 5000})
    assert error["code"] == "context_length_exceeded" and error["param"] == "input"


def test_truncation(agent):
    items = [{"role": "user", "content": "x" * 1500} for _ in range(3)] + [{"role": "user", "content": say("short")}]
    assert refused(agent, {"input": items, "max_output_tokens": 100})["code"] == "context_length_exceeded"
    response = create(agent, input=items, max_output_tokens=100, truncation="auto")
    assert response.output_text == "short" and response.truncation == "auto"
    assert 3000 < response.usage.input_tokens < 4000
