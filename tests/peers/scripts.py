"""Chat templates with which the simulated model answers the conversations of tests/tool_use, in the format of a tool parser.

The simulated model says what stands in the last `<say>` of its prompt. So what is tested is everything around the model: that tools and
results reach the template, that calls are recognised, whole and in streams, and that answers without calls stay as they are.
"""

import json

# A token of the simulated model is a byte, and the tests allow 100 for a call.
DALLAS = {"city": "Dallas", "state": "TX"}
ORLANDO = {"city": "Orlando", "state": "FL"}
NAME = "get_current_weather"


def python(arguments):
    return f"{NAME}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def compact(value):
    return json.dumps(value, separators=(",", ":"))


def named(key):
    return lambda arguments: compact({"name": NAME, key: arguments})


FORMATS = {
    "hermes": lambda calls: "".join(f"<tool_call>{call}</tool_call>" for call in map(named("arguments"), calls)),
    "llama3_json": lambda calls: "; ".join(map(named("parameters"), calls)),
    "llama4_json": lambda calls: "; ".join(map(named("parameters"), calls)),
    "llama4_pythonic": lambda calls: f"[{', '.join(map(python, calls))}]",
    "mistral": lambda calls: f"[TOOL_CALLS] [{','.join(map(named('arguments'), calls))}]",
    "pythonic": lambda calls: f"[{', '.join(map(python, calls))}]",
}
TEMPLATE = """\
{%- if tools %}{{ tools | tojson }}
{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}{% for call in message.tool_calls or [] %} {{ call.function | tojson }}{% endfor %}
{% endfor %}
{%- set asked = messages[-1].content or "" %}
{%- if messages[-1].role == "tool" %}<say>It is 98 degrees in Dallas, and 78 degrees in Orlando.</say>
{%- elif tools and "Orlando" in asked %}<say>BOTH</say>
{%- elif tools and "Dallas" in asked %}<say>ONE</say>
{%- else %}<say>Why did the ship cross its load line? To get to the other tide.</say>
{%- endif %}"""


def arguments(given):
    """The flags, with the template for their tool parser in place of theirs, and a context that is long enough."""
    result = []
    words = iter(given)
    for word in words:
        # Its tokens are bytes, of which there are more.
        if word in ("--chat-template", "--max-model-len"):
            next(words)
            continue
        result.append(word)
    parser = result[result.index("--tool-call-parser") + 1] if "--tool-call-parser" in result else "hermes"
    form = FORMATS.get(parser, FORMATS["hermes"])
    template = TEMPLATE.replace("BOTH", form([DALLAS, ORLANDO])).replace("ONE", form([DALLAS]))
    return [*result, "--max-model-len", "32768", "--chat-template", template]
