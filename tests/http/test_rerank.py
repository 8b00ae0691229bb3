"""Cross-encoders behind /rerank and /score: what sentence-transformers makes of the same pairs (scripts/make-reranker-goldens)."""

import json

import pytest

from conftest import ROOT

GOLDEN = ROOT / "tests/golden"
KINDS = ["qwen3-reranker", "qwen3-seq-cls"]
# As the reference computes; keys and values of 16 bits would move scores by 3e-4.
FLAGS = ["--served-model-name", "scorer", "--max-num-seqs", "4", "--kv-cache-dtype", "float32"]


def cases(name: str) -> list[dict]:
    return json.loads((GOLDEN / name / "pairs.json").read_text())["cases"]


@pytest.fixture(scope="module", params=KINDS)
def scorer(request, start):
    with start(str(GOLDEN / request.param), *FLAGS) as server:
        server.cases = cases(request.param)
        yield server


def test_scores_equal_sentence_transformers(scorer):
    for case in scorer.cases:
        body = {"text_1": case["query"], "text_2": case["document"]}
        answer = scorer.http.post("/score", json=body).raise_for_status().json()
        assert answer["data"][0]["score"] == pytest.approx(case["score"], abs=1e-5)
        assert answer["usage"]["prompt_tokens"] == len(case["tokens"])


def test_documents_are_ranked(scorer):
    query = scorer.cases[0]["query"]
    same = [case for case in scorer.cases if case["query"] == query]
    documents = [case["document"] for case in same]
    answer = scorer.http.post("/v1/rerank", json={"query": query, "documents": documents}).raise_for_status().json()
    expected = sorted(((case["score"], index) for index, case in enumerate(same)), reverse=True)
    assert [result["index"] for result in answer["results"]] == [index for _, index in expected]
    for result, (score, index) in zip(answer["results"], expected):
        assert result["relevance_score"] == pytest.approx(score, abs=1e-5)
        assert result["document"]["text"] == documents[index]


def test_lists_are_compared_in_pairs(scorer):
    body = {"text_1": [case["query"] for case in scorer.cases], "text_2": [case["document"] for case in scorer.cases]}
    answer = scorer.http.post("/v1/score", json=body).raise_for_status().json()
    scores = [item["score"] for item in answer["data"]]
    assert scores == pytest.approx([case["score"] for case in scorer.cases], abs=1e-5)


def score(server, query: str, document: str, **fields) -> tuple[float, int]:
    body = {"query": query, "documents": [document]} | fields
    answer = server.http.post("/rerank", json=body).raise_for_status().json()
    return answer["results"][0]["relevance_score"], answer["usage"]["prompt_tokens"]


def test_documents_are_cut_and_not_what_is_around_them(scorer):
    *_, long = scorer.cases
    query, document = long["query"], long["document"]
    whole = len(long["tokens"])
    # A character is a token here.
    assert score(scorer, query, document, max_tokens_per_doc=20) == score(scorer, query, document[:20])
    assert score(scorer, query, document, max_tokens_per_doc=0) == score(scorer, query, document)
    assert score(scorer, query, document, truncate_prompt_tokens=whole - 5) == score(scorer, query, document[:-5])
    left = score(scorer, query, document, truncate_prompt_tokens=whole - 5, truncation_side="left")
    assert left == score(scorer, query, document[5:])
    around = whole - len(document)
    refused = scorer.http.post("/score", json={"text_1": query, "text_2": [document], "truncate_prompt_tokens": around})
    assert refused.status_code == 400 and f"text_2[0]: what stands around the text takes {around}" in refused.text


def test_special_tokens_in_texts_do_not_end_a_turn(start):
    with start(str(GOLDEN / KINDS[0]), *FLAGS) as server:
        _, plain = score(server, "a", "b")
        # Four characters, and not one token.
        assert score(server, "a", "b</s>")[1] == plain + 4


def test_a_cross_encoder_does_nothing_else(scorer):
    for path, body in {
        "/v1/embeddings": {"input": "x"},
        "/v1/completions": {"prompt": "x"},
    }.items():
        answer = scorer.http.post(path, json=body)
        assert answer.status_code == 400 and "/v1/rerank" in answer.text, answer.text
    for body, field in [
        ({"query": "x", "documents": []}, "documents"),
        ({"query": "x" * 6000, "documents": ["y"]}, "query: "),
        ({"query": "x", "documents": ["y", "y" * 600]}, "documents[1]: "),
    ]:
        answer = scorer.http.post("/rerank", json=body)
        assert answer.status_code == 400 and field in answer.text, answer.text
