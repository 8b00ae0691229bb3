"""Files and batches, as the official client sees them."""

import json
import signal
import time

import conftest
import openai
import pytest

CHAT = "/v1/chat/completions"
FLAGS = ["--max-model-len", "4096", "--served-model-name", "sim"]


def line(number, text, url=CHAT, **body) -> str:
    body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 50} | body
    return json.dumps({"custom_id": f"id-{number}", "method": "POST", "url": url, "body": body})


def upload(client, *lines: str):
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")


def ended(client, batch, timeout=conftest.PATIENCE):
    end = time.monotonic() + timeout
    while True:
        batch = client.batches.retrieve(batch.id)
        if batch.status in ("completed", "failed", "cancelled", "expired"):
            return batch
        assert time.monotonic() < end, batch
        time.sleep(0.05)


def results(client, file_id) -> dict:
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    return {one["custom_id"]: one for one in lines}


def test_a_batch_with_bad_lines(sim):
    client = sim.openai
    good = [line(i, f"<say>answer {i}</say>") for i in range(20)]
    bad = ["no json", json.dumps({"custom_id": "half"}), line(90, "x", url="/v1/completions"), line(91, "x", stream=True),
           line(92, "x", temprature=1), json.dumps(json.loads(line(93, "x")) | {"priority": 1}), line(0, "again")]
    file = upload(client, *good[:10], *bad, "", *good[10:])
    assert (file.purpose, file.filename, file.bytes) == ("batch", "in.jsonl", len(client.files.content(file.id).content))
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})
    assert batch.metadata == {"a": "b"}
    batch = ended(client, batch)
    assert batch.status == "completed" and batch.errors is None, batch
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (27, 20, 7)
    answers = results(client, batch.output_file_id)
    assert len(answers) == 20
    for i in range(20):
        response = answers[f"id-{i}"]["response"]
        assert response["status_code"] == 200 and answers[f"id-{i}"]["error"] is None
        assert response["body"]["choices"][0]["message"]["content"] == f"answer {i}"
    errors = [json.loads(text) for text in client.files.content(batch.error_file_id).text.splitlines()]
    by_id = {one["custom_id"]: one for one in errors}
    assert len(errors) == 7 and set(by_id) == {None, "half", "id-90", "id-91", "id-92", "id-93", "id-0"}
    # What the endpoint refuses comes with its own error.
    assert by_id["id-92"]["response"]["status_code"] == 400
    assert by_id["id-92"]["response"]["body"]["error"]["code"] == "unknown_parameter"
    assert "unknown field `priority`" in by_id["id-93"]["error"]["message"]
    assert "not unique" in by_id["id-0"]["error"]["message"]
    assert client.batches.list(limit=1).data[0].id == batch.id
    assert {one.purpose for one in client.files.list()} == {"batch", "batch_output"}
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(batch.output_file_id)
    with pytest.raises(openai.BadRequestError, match="over"):
        client.batches.cancel(batch.id)


def test_what_is_refused(sim):
    client = sim.openai
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.files.create(file=b"x", purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="between 3600"):
        client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 5})
    kept = client.files.create(file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600})
    assert kept.expires_at == kept.created_at + 3600
    file = upload(client)
    for wrong in [{"endpoint": "/v1/models"}, {"completion_window": "soon"}]:
        with pytest.raises(openai.BadRequestError, match=next(iter(wrong))):
            client.batches.create(**{"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | wrong)
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")
    batch = ended(client, client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="1h"))
    assert (batch.status, batch.errors.data[0].code) == ("failed", "empty_file")
    assert sim.http.post("/v1/files", json={}).status_code == 415


def test_it_yields_stops_and_goes_on_after_a_restart(start, tmp_path):
    flags = ["sim:0.03", *FLAGS, "--max-num-seqs", "2", "--max-queue", "6", "--file-store-dir", str(tmp_path), "--file-store-max-bytes", "64KiB"]
    lines = [line(i, f"<say>{'answer ' * 6}{i}</say>") for i in range(12)]
    with start(*flags, expected_code=-signal.SIGKILL) as server:
        client = server.openai
        file = upload(client, *lines)
        first = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        # A request of a client does not wait for the rest of the batch.
        answer = client.chat.completions.create(model="sim", messages=[{"role": "user", "content": "<say>now</say>"}])
        assert answer.choices[0].message.content == "now"
        assert client.batches.retrieve(first.id).status in ("validating", "in_progress")
        second = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        assert client.batches.cancel(second.id).status == "cancelling"
        second = ended(client, second)
        assert second.status == "cancelled" and second.request_counts.completed < 12
        with pytest.raises(openai.BadRequestError, match="at most 65536 bytes"):
            upload(client, "x" * 70_000)
        server.wait_for("a result", lambda: client.batches.retrieve(first.id).request_counts.completed >= 2)
        server.process.kill()
    with start(*flags) as server:
        client = server.openai
        assert client.batches.retrieve(second.id).status == "cancelled"
        first = ended(client, first)
        assert (first.status, first.request_counts.completed) == ("completed", 12)
        answers = [json.loads(text)["custom_id"] for text in client.files.content(first.output_file_id).text.splitlines()]
        assert sorted(answers) == sorted(f"id-{i}" for i in range(12))


def test_each_key_sees_its_own(start):
    with start("sim", *FLAGS, "--api-key", "key-of-one", "--api-key", "key-of-two") as server:
        one, two = (server.openai.with_options(api_key=key) for key in ["key-of-one", "key-of-two"])
        file = upload(one, line(1, "<say>mine</say>"))
        assert [page.id for page in one.files.list()] == [file.id] and list(two.files.list()) == []
        with pytest.raises(openai.NotFoundError):
            two.files.content(file.id)
        batch = ended(one, one.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h"))
        assert results(one, batch.output_file_id)["id-1"]["response"]["status_code"] == 200
        with pytest.raises(openai.NotFoundError):
            two.batches.retrieve(batch.id)
