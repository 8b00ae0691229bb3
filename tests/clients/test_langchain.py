"""LangChain's ChatOpenAI."""

import openai
import pytest
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

CAPITAL = "What is the capital of France?"


@pytest.fixture
def model(smollm2):
    return ChatOpenAI(base_url=f"{smollm2.url}/v1", api_key="none", model="smollm2", temperature=0, max_tokens=24, max_retries=0)


@pytest.fixture
def simulated(sim):
    return ChatOpenAI(base_url=f"{sim.url}/v1", api_key="none", model="sim", max_tokens=24, seed=3, max_retries=0)


def test_invoke(model):
    answer = model.invoke([SystemMessage("Answer in one sentence."), HumanMessage(CAPITAL)])
    assert "Paris" in answer.content
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata["total_tokens"] > answer.usage_metadata["output_tokens"] > 0


def test_a_conversation_goes_on(model):
    turns = [HumanMessage(CAPITAL), AIMessage("The capital of France is Paris."), HumanMessage("And of which country is it the capital?")]
    assert "France" in model.invoke(turns).content


def test_stream(simulated):
    chunks = list(simulated.stream("Hello", stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == simulated.invoke("Hello").content
    assert sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks) > 0


def test_batch(simulated):
    assert len({answer.content for answer in simulated.batch(["a", "b", "c"])}) == 3


def test_errors(simulated):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        simulated.invoke("Hello", temperature=-1)


@tool
def get_weather(place: str) -> str:
    """The weather of a place."""
    return f"rain in {place}"


class Capital(BaseModel):
    """The capital of a country."""

    capital: str = Field(max_length=20)


def test_tools(simulated):
    # The simulated model says what it is asked to.
    ask = '<say>{"name": "get_weather", "arguments": {"place": "Ely"}}</say>'
    answer = simulated.bind_tools([get_weather]).invoke(ask, max_tokens=100)
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("get_weather", {"place": "Ely"})]
    whole = sum(list(simulated.bind_tools([get_weather]).stream(ask, max_tokens=100))[1:], AIMessageChunk(""))
    assert whole.tool_calls[0]["args"] == {"place": "Ely"}
    # Answers go back as they are, whole or put together.
    for said in [answer, whole]:
        result = ToolMessage("<say>Rain.</say>", tool_call_id=said.tool_calls[0]["id"])
        after = simulated.bind_tools([get_weather]).invoke([HumanMessage("?"), said, result], max_tokens=100)
        assert after.content == "Rain."


def test_a_tool_that_is_required_is_called(model):
    bound = model.bind_tools([get_weather], tool_choice="get_weather")
    call = bound.invoke("What is the weather in Ely?", max_tokens=100).tool_calls[0]
    assert isinstance(call["args"]["place"], str)


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(model, method):
    answer = model.with_structured_output(Capital, method=method).invoke(CAPITAL, max_tokens=100)
    assert isinstance(answer, Capital)


def test_embeddings(embedder):
    # By itself it would fetch OpenAI's tokenizer.
    vectors = OpenAIEmbeddings(base_url=f"{embedder.url}/v1", api_key="none", model="embedder", check_embedding_ctx_length=False)
    first, second = vectors.embed_documents(["a load line", "a mark"])
    assert len(first) == len(second) and first != second
    assert vectors.embed_query("a load line") == pytest.approx(first)
