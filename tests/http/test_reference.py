"""The API reference, in a real headless browser."""

import pytest
from browser import PHONE, WIDE, accessible, browser, open_page, seen
from playwright.sync_api import expect

CHAT = "#post-v1-chat-completions"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_reference(sim, open_page, scheme):
    page = open_page(f"{sim.url}/docs", color_scheme=scheme)
    expect(page.locator(".operation").first).to_be_visible()
    document = sim.http.get("/openapi.json").json()
    operations = sum(len(item) for item in document["paths"].values())
    assert page.locator(".operation").count() == operations
    assert page.locator(".schema").count() == len(document["components"]["schemas"])
    chat = page.locator(".operation", has_text="/v1/chat/completions").first
    assert "temperature" in chat.inner_text() and "curl" in chat.inner_text()
    # Bounds in words, and the methods where a path has several.
    assert "(1 to 16384 items)" in chat.inner_text() and "(0 to 100)" in chat.inner_text()
    assert {"GET /v1/batches", "POST /v1/batches"} <= set(page.locator("#list a").all_inner_texts())
    chat.locator("summary", has_text="200").click()
    expect(chat.locator("td", has_text="finish_reason").or_(chat.locator("td", has_text="choices")).first).to_be_visible()
    page.locator("#filter").fill("tokenize")
    assert 2 <= page.locator("#list a:visible").count() <= 12
    # All of it would take a minute.
    accessible(page, "header", "#contents", CHAT)


def test_fields_are_found(sim, open_page):
    page = open_page(f"{sim.url}/docs")
    expect(page.locator(".operation").first).to_be_visible()
    page.locator("#filter").fill("Guided")
    found = page.locator("#list a:visible")
    fields = set(found.all_inner_texts())
    assert {"/v1/chat/completions", "guided_json", "guided_regex", "guided_choice"} <= fields and "/health" not in fields
    expect(page.locator("#matches")).to_contain_text("found")
    found.get_by_text("guided_regex", exact=True).first.click()
    seen(page.locator(f"[id='{CHAT[1:]}.guided_regex'] td").first)
    page.locator("#filter").fill("no such thing")
    expect(page.locator("#matches")).to_have_text("Nothing has this name.")
    expect(found).to_have_count(0)


@pytest.mark.parametrize("viewport", [WIDE, PHONE], ids=["wide", "phone"])
def test_a_request_can_be_tried(sim, open_page, viewport):
    page = open_page(f"{sim.url}/docs", viewport, complaints=("status of 400", "status of 404"))
    chat = page.locator(CHAT)
    chat.locator(".try summary").click()
    chat.get_by_role("combobox", name="Example").select_option("A stream")
    assert '"stream": true' in chat.locator("textarea").input_value()
    chat.locator("textarea").fill('{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": true}')
    expect(chat.locator(".code pre").first).to_contain_text('"max_tokens":3')
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".outcome")).to_contain_text("200 OK")
    expect(chat.locator(".try pre")).to_contain_text('"finish_reason": "length"')
    chat.locator("textarea").fill('{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": true}')
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".try pre")).to_contain_text("data: [DONE]")
    chat.locator("textarea").fill('{"messages": []}')
    chat.get_by_role("button", name="Send").click()
    expect(chat.locator(".outcome")).to_contain_text("400")
    expect(chat.locator(".try pre")).to_contain_text("messages")
    chat.locator("textarea").fill("{")
    chat.get_by_role("button", name="Send").click()
    seen(chat.locator(".field-error"))
    # Parameters of the path.
    model = page.locator("#get-v1-models-id-")
    model.locator(".try summary").click()
    model.get_by_role("button", name="Send").click()
    expect(model.locator(".field-error")).to_have_text("This is required.")
    model.get_by_label("id").fill("no/model")
    expect(model.locator(".code pre").first).to_contain_text("/v1/models/no%2Fmodel")
    model.get_by_role("button", name="Send").click()
    expect(model.locator(".outcome")).to_contain_text("404")
    # Nothing is wider than the page, whatever is open.
    page.evaluate("document.querySelectorAll('details').forEach(details => { details.open = true })")
    expect(page.locator(".operation details h4").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]


def test_a_request_needs_the_key(start, open_page):
    with start("sim", "--api-key", "sesame") as server:
        page = open_page(f"{server.url}/docs", complaints=("status of 401",))
        models = page.locator("#get-v1-models")
        models.locator(".try summary").click()
        models.get_by_role("button", name="Send").click()
        expect(page.locator("#key-error")).to_have_text("The server requires an API key.")
        expect(page.locator("#key")).to_be_focused()
        page.locator("#key").fill("sesame")
        models.get_by_role("button", name="Send").click()
        expect(models.locator(".outcome")).to_contain_text("200")
        assert "sesame" not in models.inner_text()
