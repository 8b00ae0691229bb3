"""Embeddings: the official client against a simulated model, and a real one's meaning."""

import base64
import math
import random
import struct

import openai
import pytest

from conftest import SMOLLM2
from endpoints import EMBEDDINGS
from malform import break_text, mutate, text_of
from test_sim import error

TEXTS = ["A load line", "A Plimsoll mark", "", "x" * 700]


@pytest.fixture(scope="module")
def embedder(start):
    """The simulated model, served for embeddings; prompts are computed in chunks."""
    flags = ["--runner", "pooling", "--pooler-config", '{"pooling_type": "MEAN"}']
    flags += ["--hf-overrides", '{"is_matryoshka": true}', "--max-num-batched-tokens", "64", "--max-num-seqs", "8"]
    with start("sim", *flags, "--max-queue", "8", "--served-model-name", "embedder") as server:
        yield server


def length(vector) -> float:
    return math.sqrt(sum(x * x for x in vector))


def cosine(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True)) / length(a) / length(b)


def test_float_and_base64_are_the_same_vectors(embedder):
    texts = [text for text in TEXTS if text]
    # What the client asks for by itself is base64, which it decodes.
    decoded = embedder.openai.embeddings.create(model="embedder", input=texts)
    plain = embedder.openai.embeddings.create(model="embedder", input=texts, encoding_format="float")
    raw = embedder.http.post("/v1/embeddings", json={"input": texts, "encoding_format": "base64"}).json()
    for index, (a, b, c) in enumerate(zip(decoded.data, plain.data, raw["data"], strict=True)):
        bits = base64.b64decode(c["embedding"])
        assert struct.pack(f"<{len(b.embedding)}f", *b.embedding) == bits
        assert struct.pack(f"<{len(a.embedding)}f", *a.embedding) == bits
        assert (a.index, b.index, c["index"]) == (index,) * 3
        assert length(b.embedding) == pytest.approx(1, abs=1e-6)
    assert plain.model == "embedder" and plain.object == "list"
    assert raw["id"].startswith("embd-") and raw["created"] > 0
    # The tokenizer's tokens are bytes.
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(map(len, texts))


def test_every_form_of_input(embedder):
    create = embedder.openai.embeddings.create
    text = create(model="embedder", input="ab").data[0].embedding
    for same in (["ab"], [97, 98], [[97, 98]]):
        assert create(model="embedder", input=same).data[0].embedding == text
    cut = create(model="embedder", input="abcdef", extra_body={"truncate_prompt_tokens": 2}).data[0].embedding
    assert cut == text


def test_a_vector_does_not_depend_on_its_neighbours(embedder):
    texts = [f"text {i} " + "y" * (37 * i % 200) for i in range(100)]
    # Six times more than there are places.
    together = embedder.openai.embeddings.create(model="embedder", input=texts).data
    for i in (0, 17, 99):
        alone = embedder.openai.embeddings.create(model="embedder", input=texts[i]).data[0]
        assert alone.embedding == together[i].embedding
    embedder.wait_until_empty()


def test_dimensions_cut_and_scale_again(embedder):
    whole = embedder.openai.embeddings.create(model="embedder", input="abc").data[0].embedding
    short = embedder.openai.embeddings.create(model="embedder", input="abc", dimensions=5).data[0].embedding
    assert len(whole) == 16 and len(short) == 5
    assert length(short) == pytest.approx(1, abs=1e-6)
    assert short == pytest.approx([x / length(whole[:5]) for x in whole[:5]], abs=1e-6)


def test_refusals(embedder, sim):
    def refused(server, **body) -> dict:
        return error(server.http.post("/v1/embeddings", json=body), 400)

    assert "input[2]" in refused(embedder, input=TEXTS)["message"]
    assert "input[1]" in refused(embedder, input=["a", "b" * 9000])["message"]
    assert refused(embedder, input="a", dimensions=17)["param"] == "dimensions"
    assert refused(embedder, input="a", encoding_format="int8")["param"] == "encoding_format"
    assert "--runner pooling" in refused(sim, input="a")["message"]
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        gone = error(sim.http.post(path, json={"query": "a", "documents": ["b"]}), 404)
        assert gone["code"] == "unknown_url" and "--runner pooling" in gone["message"]
    with pytest.raises(openai.BadRequestError, match="use /v1/embeddings"):
        embedder.openai.chat.completions.create(model="embedder", messages=[{"role": "user", "content": "Hello"}])
    with pytest.raises(openai.BadRequestError, match="use /v1/embeddings"):
        embedder.openai.completions.create(model="embedder", prompt="Hello")


def test_texts_are_ranked_by_their_vectors(embedder):
    texts = ["A Plimsoll mark", "A load line, too", "B"]
    data = embedder.openai.embeddings.create(model="embedder", input=["A load line", *texts]).data
    cosines = [cosine(data[0].embedding, other.embedding) for other in data[1:]]
    body = {"model": "embedder", "text_1": "A load line", "text_2": texts}
    scores = embedder.http.post("/v1/score", json=body).raise_for_status().json()
    assert [item["score"] for item in scores["data"]] == pytest.approx(cosines, abs=1e-6)
    body = {"model": "embedder", "query": "A load line", "documents": texts}
    ranking = embedder.http.post("/v2/rerank", json=body).raise_for_status().json()
    best = sorted(range(3), key=lambda index: -cosines[index])
    assert [result["index"] for result in ranking["results"]] == best
    assert [result["document"]["text"] for result in ranking["results"]] == [texts[index] for index in best]
    assert ranking["usage"]["total_tokens"] == scores["usage"]["total_tokens"] == len("A load line" + "".join(texts))


def test_bad_input_breaks_nothing(embedder):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for path, valid in EMBEDDINGS.items():
        for body in valid:
            assert embedder.http.post(path, json=body).status_code == 200, body
        for _ in range(600 if path == "/v1/embeddings" else 100):
            body = text_of(mutate(rng, rng.choice(valid))).encode(errors="surrogatepass")
            if rng.random() < 0.2:
                body = break_text(rng, body)
            answer = embedder.http.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 404, 413), (body, answer.text)
    embedder.wait_until_empty()


def test_an_embedder_is_a_model_like_others(embedder):
    assert [model.id for model in embedder.openai.models.list().data] == ["embedder"]
    assert embedder.http.post("/tokenize", json={"prompt": "ab"}).json()["tokens"] == [97, 98]
    before = embedder.metric("plimsoll_prompt_tokens_total")
    finished = embedder.metric("plimsoll_requests_finished_total", finished_reason="stop")
    embedder.openai.embeddings.create(model="embedder", input=["abc", "de"])
    assert embedder.metric("plimsoll_prompt_tokens_total") == before + 5
    assert embedder.metric("plimsoll_requests_finished_total", finished_reason="stop") == finished + 2
    report = embedder.http.get("/memory").json()
    assert report["device_allocs_after_ready"] == 0
    disabled = [line["path"] for line in report["profile"]["disabled"]]
    assert "text generation" in disabled and "prefix caching" in disabled


def test_meaning(start):
    """SmolLM2 was made for text, but its rows already know what texts are about."""
    flags = ["--runner", "pooling", "--pooler-config", '{"pooling_type": "MEAN"}', "--max-model-len", "512"]
    with start(str(SMOLLM2), *flags, "--max-num-batched-tokens", "64", "--max-num-seqs", "4") as server:
        texts = [
            "The cat sat on the warm windowsill and purred.",
            "A kitten was sleeping in the sun by the window.",
            "The central bank raised interest rates by half a point.",
            "Inflation made the bank increase its lending rate.",
        ]
        data = server.openai.embeddings.create(model=str(SMOLLM2), input=texts).data
        vectors = [item.embedding for item in data]
        assert len(vectors[0]) == 576
        # What transformers computes from the same file's weights, dequantised.
        expected = {(0, 1): 0.902, (0, 2): 0.522, (0, 3): 0.550, (1, 2): 0.571, (1, 3): 0.577, (2, 3): 0.936}
        for (a, b), cosine_of_both in expected.items():
            assert cosine(vectors[a], vectors[b]) == pytest.approx(cosine_of_both, abs=0.01), texts[a]
        ranking = server.http.post("/rerank", json={"query": texts[0], "documents": texts[1:], "top_n": 1}).json()
        [best] = ranking["results"]
        assert best["index"] == 0 and best["relevance_score"] == pytest.approx(expected[0, 1], abs=0.01)
        # To the bit, alone and among others, whole or in chunks.
        alone = server.openai.embeddings.create(model=str(SMOLLM2), input=texts[0]).data[0].embedding
        assert alone == vectors[0]
