"""Structured output: JSON, schemas, regular expressions, choices, grammars, in chats and completions."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import openai
import pydantic
import pytest
from test_sim import CHAT, COMPLETIONS, HELLO, error, events

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMAS = [
    PERSON,
    {"type": "array", "items": {"type": ["number", "null"]}, "minItems": 2, "maxItems": 4},
    # A format whose expression is exact: that of dates has the 29th of every February.
    {"anyOf": [{"const": {"x": [1, 2.5, None]}}, {"type": "string", "format": "ipv4"}]},
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {"v": {"type": "boolean"}, "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
                "required": ["v"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "object", "patternProperties": {"^x[0-9]{1,2}$": {"type": "string", "pattern": "^[a-f]{2,5}$"}}, "additionalProperties": False},
    {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "number"}}, "required": ["kind", "r"],
             "additionalProperties": False},
            {"type": "object", "properties": {"kind": {"const": "square"}, "a": {"type": "number"}}, "required": ["kind", "a"],
             "additionalProperties": False},
        ]
    },
]
# One of the few shapes that a grammar of llama.cpp's documents has.
SUM = 'root ::= term ("+" term)*\nterm ::= [0-9]{1,3} | "(" root ")"\n'


def chat(server, model, **fields):
    """The one choice of a chat."""
    body = {"model": model, "messages": HELLO, "max_tokens": 400, **fields}
    response = server.http.post(CHAT, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def check(choice, schema):
    """The text is JSON that follows the schema, unless its tokens ran out."""
    assert choice["finish_reason"] in ("stop", "length"), choice
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), schema, format_checker=jsonschema.FormatChecker())
    return choice["finish_reason"] == "stop"


def response_format(schema, **fields):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


# --- many random texts, by a model that speaks in random bytes


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: next(iter(schema)))
def test_every_text_follows_its_schema(sim, schema):
    first = time.time_ns() % 1_000_000

    def one(seed):
        choice = chat(sim, "sim", response_format=response_format(schema, strict=True), temperature=1, seed=seed)
        return check(choice, schema)

    print(f"seeds from {first}")
    with ThreadPoolExecutor(16) as pool:
        whole = list(pool.map(one, range(first, first + 24)))
    assert sum(whole) > 12, "most texts end"


def test_all_ways_to_ask(sim):
    ways = [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json": {"type": "object"}},
        {"guided_json": json.dumps({"type": "object"})},
        {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": " ?"}},
        {"response_format": response_format({"type": "object"})},
        {"guided_json": {"type": "object"}, "guided_decoding_backend": "guidance", "guided_whitespace_pattern": "[ ]?"},
    ]
    for seed, way in enumerate(ways):
        assert check(chat(sim, "sim", seed=seed, temperature=1, **way), {"type": "object"}) in (True, False)
    # Not \d: that is any script's, and newer ones than this Python knows of.
    berth = "[a-c]{3}-[0-9]{2}"
    for way in [{"guided_regex": berth}, {"structured_outputs": {"regex": berth}}]:
        assert re.fullmatch(berth, chat(sim, "sim", **way)["message"]["content"])
    for way in [{"guided_choice": ["yes", "no"]}, {"structured_outputs": {"choice": ["yes", "no"]}}]:
        choice = chat(sim, "sim", **way)
        assert choice["message"]["content"] in ("yes", "no") and choice["finish_reason"] == "stop"
    lark = 'start: "x" ("," "y"){2}'
    for way in [{"guided_grammar": lark}, {"structured_outputs": {"grammar": lark}}]:
        assert chat(sim, "sim", **way)["message"]["content"] == "x,y,y"
    for seed in range(8):
        choice = chat(sim, "sim", guided_grammar=SUM, seed=seed, temperature=1)
        if choice["finish_reason"] == "stop":
            assert set(choice["message"]["content"]) <= set("0123456789()+")
            eval(choice["message"]["content"].replace("(0", "(").replace("+0", "+").lstrip("0") or "0")  # noqa: S307
    compact = chat(sim, "sim", structured_outputs={"json": PERSON, "disable_any_whitespace": True}, seed=3)
    if check(compact, PERSON):
        content = compact["message"]["content"]
        assert content == json.dumps(json.loads(content), separators=(",", ":"), ensure_ascii=False)


def test_completions_choices_and_streams(sim):
    body = {"model": "sim", "prompt": ["a", "b"], "n": 3, "guided_regex": "[0-9]{5}", "temperature": 1, "max_tokens": 50}
    choices = sim.http.post(COMPLETIONS, json=body).json()["choices"]
    assert all(re.fullmatch("[0-9]{5}", choice["text"]) for choice in choices)
    assert len({choice["text"] for choice in choices}) > 1, "each choice goes its own way"
    body = {"model": "sim", "messages": HELLO, "response_format": response_format(PERSON), "max_tokens": 300, "seed": 5}
    whole = chat(sim, "sim", **{key: body[key] for key in ("response_format", "max_tokens", "seed")})
    pieces = events(sim, CHAT, body)
    text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
    assert text == whole["message"]["content"]
    assert pieces[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]


def test_a_text_ends_with_its_grammar(sim):
    for fields in [{}, {"ignore_eos": True}]:
        choice = chat(sim, "sim", guided_regex="abc", **fields)
        assert (choice["message"]["content"], choice["finish_reason"]) == ("abc", "stop")
    # Where it may end and need not, it goes on without the token that ends it.
    open_end = chat(sim, "sim", guided_regex="[a-z]+", ignore_eos=True, max_tokens=50)
    assert re.fullmatch("[a-z]{50}", open_end["message"]["content"]) and open_end["finish_reason"] == "length"
    # Stop strings end it anywhere.
    stopped = chat(sim, "sim", guided_regex="abcdef", stop=["d"])
    assert (stopped["message"]["content"], stopped["finish_reason"]) == ("abc", "stop")


def test_logprobs_are_among_what_is_allowed(sim):
    choice = chat(sim, "sim", guided_regex="ab", logprobs=True, top_logprobs=2)
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b"]


# --- refusals


def test_refusals_name_what_is_wrong(sim):
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}, "b": {"not": {}}}}
    cases = [
        ({"response_format": response_format(unique, strict=True)}, "response_format.json_schema.schema", "`uniqueItems` at /properties/a"),
        ({"guided_json": unique}, "guided_json", "`not` at /properties/b"),
        ({"response_format": response_format({"type": "strin"})}, "response_format.json_schema.schema", "strin"),
        ({"response_format": {"type": "yaml"}}, "response_format", "yaml"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"guided_regex": "a("}, "guided_regex", "unclosed"),
        ({"guided_choice": []}, "guided_choice", "empty"),
        ({"guided_grammar": "root ::= missing"}, "guided_grammar", "missing"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json", "mutually exclusive"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend", "outlines"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", "JSON"),
    ]
    for fields, param, says in cases:
        answer = error(sim.http.post(CHAT, json={"model": "sim", "messages": HELLO, **fields}), 400)
        assert answer["param"].startswith(param) and says in answer["message"], (fields, answer)
    # What cannot be enforced is let through where the client says so.
    chat(sim, "sim", response_format=response_format(unique, strict=False), max_tokens=5)


HOSTILE = {
    "a deep schema": {"guided_json": json.loads('{"items":' * 60 + "{}" + "}" * 60)},
    "itself": {"guided_json": {"$ref": "#"}},
    "two that multiply": {
        "guided_json": {
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {name: {"properties": {"x": {"$ref": f"#/$defs/{name}"}}} for name in "ab"},
        }
    },
    "many choices": {"guided_choice": [f"{number:x}" * 7 for number in range(5000)]},
    "long repetitions": {"guided_regex": "(a{1,500}b{1,500}){1,500}"},
    "an exponential automaton": {"guided_regex": "(a|b)*a(a|b){40}"},
    "nested groups": {"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "long chains": {"guided_grammar": "start: r0\n" + "\n".join(f"r{n}: r{n + 1}" for n in range(9000)) + '\nr9000: "a"'},
    "chains of terminals": {"guided_grammar": "start: T0\n" + "\n".join(f"T{n}: T{n + 1}" for n in range(9000)) + '\nT9000: "a"'},
    "ambiguity": {"guided_grammar": 'start: e\ne: e e | e e e | "a" | ""'},
    "nothing at all": {"guided_grammar": 'start: "a" start'},
    "a huge array": {"guided_json": {"type": "array", "items": {"type": "integer"}, "minItems": 100000}},
    "a long string": {"guided_json": {"type": "string", "maxLength": 1000000}},
    "enormous numbers": {"guided_json": {"type": "number", "minimum": -1e308, "multipleOf": 1e-9}},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_hold_up_nobody(sim, name):
    def neighbour():
        began = time.monotonic()
        chat(sim, "sim", max_tokens=20)
        return time.monotonic() - began

    began = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        others = pool.submit(lambda: [neighbour() for _ in range(5)])
        response = sim.http.post(CHAT, json={"model": "sim", "messages": HELLO, "max_tokens": 30, **HOSTILE[name]})
        waits = others.result()
    assert response.status_code in (200, 400), response.text
    assert time.monotonic() - began < 60, "time is bounded"
    assert max(waits) < 20, waits
    sim.wait_until_empty()


# --- a real model


class Step(pydantic.BaseModel):
    explanation: str = pydantic.Field(max_length=60)
    output: str = pydantic.Field(max_length=30)


class Solution(pydantic.BaseModel):
    steps: list[Step] = pydantic.Field(max_length=2)
    answer: int = pydantic.Field(ge=-999, le=999)


def test_the_official_client_parses_what_it_asked_for(smollm2):
    messages = [{"role": "user", "content": "Solve 8x + 7 = 23 in JSON."}]
    parsed = smollm2.openai.chat.completions.parse(
        model="smollm2", messages=messages, response_format=Solution, max_tokens=600, temperature=1, seed=11
    )
    assert isinstance(parsed.choices[0].message.parsed, Solution)


def test_meaning_survives(smollm2):
    ask = [{"role": "user", "content": "Name the capital of France. Answer with one word."}]
    choice = smollm2.openai.chat.completions.create(
        model="smollm2", messages=ask, temperature=0, extra_body={"guided_choice": ["London", "Paris", "Berlin"]}
    ).choices[0]
    assert choice.message.content == "Paris" and choice.finish_reason == "stop"


def test_neighbours_say_what_they_would_alone(smollm2):
    """Constrained and free requests in one batch, at temperature 1: each has its own text."""
    story = [{"role": "user", "content": "Tell me about a person with a name, an age and hobbies."}]
    jobs = [
        {"seed": 1},
        {"seed": 2, "response_format": response_format(PERSON)},
        {"seed": 3, "extra_body": {"guided_regex": "[A-Z][a-z]{2,8}( [a-z]{2,8}){2,6}\\."}},
        {"seed": 4},
        {"seed": 5, "response_format": {"type": "json_object"}, "frequency_penalty": 0.5},
        {"seed": 6, "extra_body": {"guided_grammar": SUM}},
    ]

    def ask(job):
        return smollm2.openai.chat.completions.create(
            model="smollm2", messages=story, temperature=1, max_tokens=60, **job
        ).choices[0]

    alone = [ask(job) for job in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        together = list(pool.map(ask, jobs))
    assert [choice.message.content for choice in together] == [choice.message.content for choice in alone]
    for choice in together:
        assert choice.finish_reason in ("stop", "length")
    person, sentence = together[1], together[2]
    if person.finish_reason == "stop":
        jsonschema.validate(json.loads(person.message.content), PERSON)
    if sentence.finish_reason == "stop":
        assert re.fullmatch(r"[A-Z][a-z]{2,8}( [a-z]{2,8}){2,6}\.", sentence.message.content)


def test_a_bad_request_is_refused_before_it_costs_anything(smollm2):
    with pytest.raises(openai.BadRequestError) as info:
        smollm2.openai.chat.completions.create(
            model="smollm2", messages=HELLO, extra_body={"guided_json": {"uniqueItems": True}}
        )
    assert info.value.param == "guided_json"
    smollm2.wait_until_empty()
