"""Answers through the official clients, which are the same streamed, and what a model reads of a question."""

import openai


def chat(server, **ask):
    """The only choice of a chat through OpenAI's client, the chunks in which it comes, and its usage."""
    whole = server.openai.chat.completions.create(**ask)
    with server.openai.chat.completions.stream(**ask, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        try:
            final = stream.get_final_completion()
        except openai.LengthFinishReasonError as error:
            final = error.completion
    choice, streamed = whole.choices[0], final.choices[0]
    for count in ("prompt_tokens", "completion_tokens"):
        assert getattr(final.usage, count) == getattr(whole.usage, count)
    assert streamed.finish_reason == choice.finish_reason
    assert (streamed.message.content or None) == (choice.message.content or None)

    def functions(message):
        return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]

    assert functions(streamed.message) == functions(choice.message)
    chunks = [event.chunk for event in events if event.type == "chunk"]
    thought = [getattr(choice.delta, "reasoning_content", "") for chunk in chunks for choice in chunk.choices]
    assert "".join(thought) == getattr(choice.message, "reasoning_content", "")
    return choice, chunks, whole.usage


def message(claude, **ask):
    """The message that Anthropic's client gets."""
    whole = claude.messages.create(**ask)
    with claude.messages.stream(**ask) as stream:
        streamed = stream.get_final_message()

    def said(message):
        blocks = [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        return blocks, message.stop_reason, message.usage.output_tokens

    assert said(streamed) == said(whole)
    return whole


def prompt(server, **fields) -> str:
    """The prompt of a conversation."""
    tokens = server.http.post("/tokenize", json=fields).raise_for_status().json()["tokens"]
    return server.http.post("/detokenize", json={"tokens": tokens}).raise_for_status().json()["prompt"]
