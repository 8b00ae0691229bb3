"""A hybrid model with the tokenizer and the chat template of Qwen3.5 and random weights: chats, agents and their prefix hits."""

import json
import random

import anthropic
import openai
import pytest

import tiny_models
from browser import CHAT, answered, browser, open_page, send
from playwright.sync_api import expect
from tiny_models import WEATHER, words

MODEL = "qwen3.5"


@pytest.fixture(scope="module")
def server(start, tmp_path_factory):
    with start(*tiny_models.write(tmp_path_factory.mktemp("hybrid"), MODEL), "--max-num-seqs", "8") as server:
        yield server


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client:
        yield client


def tokens(server, messages: list, **more) -> list[int]:
    return server.http.post("/tokenize", json={"messages": messages, **more}).raise_for_status().json()["tokens"]


def common(one: list[int], other: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))


@pytest.mark.parametrize("thinks", [True, False])
def test_ten_turns_find_nine_tenths_of_what_was_computed(server, thinks):
    # The template leaves the thoughts of past turns out, and with them the marks around them.
    seed = random.randrange(2**32)
    print(f"{seed=}")
    rng = random.Random(seed)
    more = {"chat_template_kwargs": {"enable_thinking": thinks}}
    messages, computed, known, found = [{"role": "system", "content": words(rng, 300)}], [], 0, 0
    hits = server.metric("vllm:prefix_cache_hits_total")
    for turn in range(10):
        messages.append({"role": "user", "content": words(rng, 20 + 5 * turn)})
        prompt = tokens(server, messages, **more)
        answer = server.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=30, temperature=0,
                                                       extra_body={**more, "ignore_eos": True})
        assert answer.usage.prompt_tokens == len(prompt)
        known += max((common(earlier, prompt[:-1]) for earlier in computed), default=0)
        found += answer.usage.prompt_tokens_details.cached_tokens
        computed.append(prompt)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or words(rng, 10)})
    assert known > 3000 and found >= 0.9 * known, (found, known)
    assert server.metric("vllm:prefix_cache_hits_total") - hits == found
    assert server.metric("plimsoll_state_slots", state="cached") > 0
    states = server.http.get("/memory").raise_for_status().json()["kv"]["states"]
    assert states["slots_cached"] > 0


def test_conversations_share_what_an_agent_begins_with(server, claude):
    # As Claude Code asks: a long system prompt and tools, then what the user says.
    rng = random.Random(5)
    tools = [{"name": WEATHER["name"], "description": WEATHER["description"], "input_schema": WEATHER["parameters"]}]
    system = [{"type": "text", "text": words(rng, 2000), "cache_control": {"type": "ephemeral"}}]

    def ask(text: str):
        usage = claude.messages.create(model=MODEL, max_tokens=8, extra_body={"temperature": 0}, system=system, tools=tools,
                                       messages=[{"role": "user", "content": text}]).usage
        return usage.cache_read_input_tokens or 0, usage.input_tokens

    assert ask("First: " + words(rng, 30))[0] == 0
    # The second shows where conversations part; from then on the beginning is there for all.
    ask("Next, " + words(rng, 30))
    for number in range(3):
        cached, rest = ask(f"{number}. " + words(rng, 30))
        assert cached > 2000 and rest < 100, (cached, rest)


def test_a_coding_agent_reads_only_what_is_new(server):
    # As Codex asks: long instructions and tools, the whole conversation each time, calls and what they gave.
    rng = random.Random(6)
    shell = {"type": "function", "name": "shell", "strict": False, "description": "Runs a command.",
             "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string", "enum": ["ls", "pwd"]},
                                                                         "minItems": 1, "maxItems": 2}},
                            "required": ["command"], "additionalProperties": False}}
    ask = {"model": MODEL, "instructions": words(rng, 2000), "tools": [shell, {"type": "function", **WEATHER, "strict": False}],
           "parallel_tool_calls": False, "reasoning": {"effort": "none", "summary": "auto"}, "store": False, "temperature": 0,
           "include": ["reasoning.encrypted_content"], "prompt_cache_key": "0199", "max_output_tokens": 400}
    items = [{"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "No network."}]},
             {"type": "message", "role": "user", "content": [{"type": "input_text", "text": words(rng, 30)}]}]

    def counters():
        return [server.metric(f"vllm:prefix_cache_{what}_total") for what in ("queries", "hits")]

    def turn(choice):
        before = counters()
        with server.openai.responses.stream(**ask, input=items, tool_choice=choice) as stream:
            answer = [event.response for event in stream if event.type in ("response.completed", "response.incomplete")][-1]
        cached, whole = answer.usage.input_tokens_details.cached_tokens, answer.usage.input_tokens
        assert [after - old for after, old in zip(counters(), before)] == [whole, cached]
        return answer, cached, whole

    results, lengths = [], []
    for choice in ["required", {"type": "function", "name": "shell"}, "required", "required"]:
        answer, cached, whole = turn(choice)
        [call] = [item for item in answer.output if item.type == "function_call"]
        assert call.name in ("shell", "get_weather") and isinstance(json.loads(call.arguments), dict), call
        items += [{"type": "function_call", "name": call.name, "arguments": call.arguments, "call_id": call.call_id},
                  {"type": "function_call_output", "call_id": call.call_id, "output": words(rng, 20)}]
        results.append(cached)
        lengths.append(whole)
    # The next question of the user.
    answer, cached, whole = turn("auto")
    assert answer.output
    items.append({"type": "message", "role": "user", "content": [{"type": "input_text", "text": words(rng, 30)}]})
    _, last, longest = turn("auto")
    results, lengths = [*results, cached, last], [*lengths, whole, longest]
    assert results[0] == 0 and lengths[0] > 2000 and sorted(set(lengths)) == lengths
    # What was computed for the turn before, but for its last blocks. Behind a new question the template shows past calls without the marks
    # of thoughts: there the conversation begins anew.
    assert all(cached >= 0.95 * known for cached, known in zip(results[1:-1], lengths)), (results, lengths)
    assert min(results[1:]) > 2000, (results, lengths)


def test_the_page_chats(server, open_page):
    hits = server.metric("vllm:prefix_cache_hits_total")
    page = open_page(server.url)
    expect(page.locator("#greeting")).to_have_text("Ready.")
    page.locator("#system").fill(words(random.Random(7), 300))
    page.locator("#max_tokens").fill("40")
    page.locator("#temperature").fill("0")
    asked = []

    def ends_thoughts(route):
        """Random weights would think until the answer is cut off."""
        asked.append(route.request.post_data_json)
        route.continue_(post_data={**asked[-1], "thinking_token_budget": 10, "ignore_eos": True})

    page.route(CHAT, ends_thoughts)
    for turn in range(1, 4):
        send(page, f"Question {turn}?")
        answered(page, turn)
        answer = page.locator(".assistant").last
        assert answer.locator(".text").inner_text().strip()
        answer.locator("details.reasoning summary").click()
        assert answer.locator(".thought").inner_text().strip()
    expect(page.locator(".error")).to_have_count(0)
    assert [message["role"] for message in asked[-1]["messages"]] == ["system", *2 * ["user", "assistant"], "user"]
    assert page.locator("#context").inner_text().endswith("of 16,384")
    assert server.metric("vllm:prefix_cache_hits_total") - hits > 300
    assert server.metric("plimsoll_state_slots", state="cached") > 0
    page.close()


def test_a_call_is_made_and_its_result_is_read(server, claude):
    tool = {"type": "function", "function": WEATHER}
    messages = [{"role": "user", "content": "The weather of Ulm?"}]
    ask = dict(model=MODEL, tools=[tool], tool_choice="required", max_tokens=400, temperature=0)
    message = server.openai.chat.completions.create(messages=messages, **ask,
                                                    extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert [call.function.name for call in message.tool_calls][0] == "get_weather"
    assert json.loads(message.tool_calls[0].function.arguments)["place"] in ("Ulm", "Aachen")
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Rain."} for call in message.tool_calls]
    messages += [message.model_dump(exclude_none=True), *results]
    prompt = server.http.post("/detokenize", json={"tokens": tokens(server, messages, tools=[tool])}).raise_for_status().json()["prompt"]
    assert "<tool_call>\n<function=get_weather>" in prompt and "<tool_response>\nRain.\n</tool_response>" in prompt
    # As Codex asks.
    flat = {"type": "function", **WEATHER, "strict": True}
    answer = server.openai.responses.create(model=MODEL, input="The weather of Ulm?", tools=[flat], tool_choice="required",
                                            max_output_tokens=400, temperature=0, reasoning={"effort": "none"})
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and json.loads(calls[0].arguments)["place"] in ("Ulm", "Aachen"), answer.output
    answer = claude.messages.create(model=MODEL, max_tokens=400, extra_body={"temperature": 0}, tool_choice={"type": "any"}, thinking={"type": "disabled"},
                                      tools=[{"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}],
                                      messages=[{"role": "user", "content": "The weather of Ulm?"}])
    assert any(block.type == "tool_use" and block.input["place"] in ("Ulm", "Aachen") for block in answer.content), answer.content


def test_thoughts_are_told_from_answers(server):
    ask = dict(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=20, temperature=0)
    message = server.openai.chat.completions.create(**ask).choices[0].message
    assert message.reasoning_content and not message.content, "random weights do not end their thoughts"
    message = server.openai.chat.completions.create(**ask, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
    assert message.content and not getattr(message, "reasoning_content", None)


def test_structured_output(server):
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 9}}, "required": ["sum"], "additionalProperties": False}
    with pytest.raises(openai.BadRequestError):
        server.openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "?"}],
                                              response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": 7}}})
    answer = server.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "3 + 4?"}], max_tokens=200, temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "sum", "schema": schema, "strict": True}},
        extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert answer.choices[0].finish_reason == "length" or isinstance(json.loads(answer.choices[0].message.content)["sum"], int)
