"""What the chat page keeps: chats and settings; what it does before there is a model, and without a key."""

import contextlib
import json
import re
import time
from pathlib import Path

import conftest
import httpx2 as httpx
from browser import CHAT, accessible, answered, browser, chat, open_page, says, seen, send
from playwright.sync_api import Page, expect


def titles(page: Page) -> list[str]:
    return page.locator("#chat-list .open").all_inner_texts()


def choose(page: Page, title: str, action: str) -> None:
    page.get_by_role("button", name=f"Actions for {title}").click()
    page.locator("#menu").get_by_role("button", name=action).click()


def reload(page: Page) -> None:
    """Reloads the page once it has stored its changes: reads of the store come after them."""
    page.evaluate("import('/assets/store.js').then(store => store.allChats())")
    page.reload()


def exchange(page: Page, question: str, answer: str, count: int = 1) -> None:
    says(page, {"content": answer})
    send(page, question)
    answered(page, count)


def test_chats_are_kept_renamed_searched_and_deleted(chat):
    expect(chat.locator("#no-chats")).to_have_text("No chats yet.")
    exchange(chat, "What is a load line?", "A mark on a hull.")
    exchange(chat, "And a keel?", "The lowest beam.", 2)
    chat.get_by_role("button", name="New chat").click()
    exchange(chat, "Name a port", "Rotterdam")
    assert titles(chat) == ["Name a port", "What is a load line?"]

    # A reload shows the open chat, and the list has the other.
    reload(chat)
    expect(chat.locator(".assistant .text")).to_have_text("Rotterdam")
    expect(chat.locator("[aria-current]")).to_have_text("Name a port")
    chat.locator("#chat-list .open", has_text="load line").click()
    expect(chat.locator(".turn .text")).to_have_text(["What is a load line?", "A mark on a hull.", "And a keel?", "The lowest beam."])
    with chat.expect_request(CHAT) as sent:
        exchange(chat, "Thanks", "Gladly.", 3)
    assert [message["role"] for message in sent.value.post_data_json["messages"]] == ["user", "assistant"] * 2 + ["user"]

    choose(chat, "What is a load line?", "Rename")
    chat.keyboard.type("Ships")
    chat.keyboard.press("Enter")
    expect(chat.locator("#chat-list .open")).to_have_text(["Ships", "Name a port"])
    chat.locator("#find").fill("rotterdam")
    expect(chat.locator("#chat-list .open")).to_have_text(["Name a port"])
    chat.locator("#find").fill("")

    choose(chat, "Ships", "Delete")
    expect(chat.locator("#chat-list .open")).to_have_text(["Name a port"])
    expect(chat.locator("#welcome")).to_be_visible()
    chat.get_by_role("button", name="Undo").click()
    expect(chat.locator("#chat-list .open")).to_have_text(["Ships", "Name a port"])
    choose(chat, "Ships", "Delete")
    reload(chat)
    expect(chat.locator("#chat-list .open")).to_have_text(["Name a port"])
    chat.get_by_role("button", name="Delete all chats").click()
    expect(chat.locator("#no-chats")).to_be_visible()
    reload(chat)
    expect(chat.locator("#greeting")).to_have_text("Ready.")
    assert titles(chat) == []


def test_a_question_is_changed_and_an_answer_made_again(chat):
    exchange(chat, "One", "First answer")
    exchange(chat, "Two", "Second answer", 2)
    chat.locator(".user").first.hover()
    chat.get_by_role("button", name="Edit").first.click()
    field = chat.get_by_role("textbox", name="Edit message")
    expect(field).to_be_focused()
    chat.keyboard.press("Escape")
    expect(chat.locator(".turn .text")).to_have_count(4)
    chat.get_by_role("button", name="Edit").first.click()
    field.fill("Three")
    says(chat, {"content": "Third answer"})
    with chat.expect_request(CHAT) as sent:
        chat.keyboard.press("Enter")
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Three"}]
    expect(chat.locator(".turn .text")).to_have_text(["Three", "Third answer"])

    says(chat, {"content": "Fourth answer"})
    with chat.expect_request(CHAT) as sent:
        chat.get_by_role("button", name="Regenerate").click()
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Three"}]
    expect(chat.locator(".turn .text")).to_have_text(["Three", "Fourth answer"])
    # The last question from the keyboard.
    chat.locator("#message").press("ArrowUp")
    expect(field).to_have_value("Three")
    chat.keyboard.press("Escape")
    reload(chat)
    expect(chat.locator(".turn .text")).to_have_text(["Three", "Fourth answer"])


def test_chats_are_exported(chat):
    says(chat, {"reasoning_content": "It floats."}, {"content": "A **mark** on a hull."})
    send(chat, "What is a load line?")
    answered(chat, 1)
    texts = {}
    for action in ("Export as Markdown", "Export as JSON"):
        with chat.expect_download() as download:
            choose(chat, "What is a load line?", action)
        name = download.value.suggested_filename
        assert re.fullmatch(r"\d{4}-\d\d-\d\d-what-is-a-load-line\.(md|json)", name), name
        texts[action] = Path(download.value.path()).read_text()
    markdown = texts["Export as Markdown"]
    assert markdown.startswith("# What is a load line?\n\nsim, 20")
    assert "\n## You\n\nWhat is a load line?\n\n## sim\n\n> It floats.\n\nA **mark** on a hull.\n" in markdown
    exported = json.loads(texts["Export as JSON"])
    assert exported["title"] == "What is a load line?" and exported["model"] == "sim"
    assert exported["messages"] == [
        {"role": "user", "content": "What is a load line?"},
        {"role": "assistant", "content": "A **mark** on a hull.", "reasoning_content": "It floats."},
    ]


def test_settings_are_kept_for_each_model(chat):
    chat.locator("#temperature").fill("0.25")
    chat.locator("#system").fill("Be brief.")
    reload(chat)
    expect(chat.locator("#temperature")).to_have_value("0.25")
    expect(chat.locator("#system")).to_have_value("Be brief.")
    other = {"object": "list", "data": [{"id": "other", "max_model_len": 100}]}
    chat.route("**/v1/models", lambda route: route.fulfill(json=other))
    reload(chat)
    expect(chat.locator("#settings-note")).to_contain_text("other")
    expect(chat.locator("#temperature")).to_have_value("")
    chat.locator("#temperature").fill("0.75")
    chat.unroute("**/v1/models")
    reload(chat)
    expect(chat.locator("#temperature")).to_have_value("0.25")
    chat.get_by_role("button", name="Reset").click()
    reload(chat)
    expect(chat.locator("#settings-note")).to_contain_text("sim")
    expect(chat.locator("#temperature")).to_have_value("")


def test_an_answer_that_was_cut_off_by_a_reload_can_be_made_again(chat):
    chat.route(CHAT, lambda route: None)
    send(chat, "Hello?")
    expect(chat.locator(".busy")).to_be_visible()
    expect(chat.locator("[aria-current]")).to_have_text("Hello?")
    reload(chat)
    expect(chat.locator(".error")).to_contain_text("closed before the answer")
    chat.unroute(CHAT)
    says(chat, {"content": "Hello."})
    chat.get_by_role("button", name="Try again").click()
    expect(chat.locator(".turn .text")).to_have_text(["Hello?", "Hello."])


def test_an_answer_without_text_says_so(chat):
    send(chat, "<say></say>")
    expect(chat.locator(".assistant .after")).to_contain_text("empty answer")
    expect(chat.locator("#status")).to_have_text("1 token")


def reachable(url: str) -> None:
    """Waits until a server listens."""
    end = time.monotonic() + conftest.PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(httpx.TransportError):
            httpx.get(f"{url}/health")
            return
        time.sleep(0.01)
    raise AssertionError(f"{url} is not there after {conftest.PATIENCE} s")


def test_a_page_of_a_starting_server_becomes_the_chat(tmp_path, open_page):
    # Each of its steps takes so long that the start can be watched.
    with conftest.process(tmp_path, "sim:0.4", "--max-model-len", "1024") as (child, port, log):
        url = f"http://127.0.0.1:{port}"
        reachable(url)
        page = open_page(url)
        seen(page.locator("#phase"))
        seen(page.locator("#progress"))
        expect(page.locator("#greeting")).to_have_text("Starting…")
        expect(page.locator("#progress-note")).to_contain_text("%")
        expect(page.locator("#send")).to_be_disabled()
        assert httpx.get(f"{url}/v1/models").status_code == 503
        accessible(page)
        expect(page.locator("#greeting")).to_have_text("Ready.", timeout=conftest.PATIENCE * 1000)
        expect(page.locator("#starting")).not_to_be_visible()
        exchange(page, "Are you there?", "Yes.")
        assert child.poll() is None
        page.close()


def test_a_page_goes_on_when_the_server_restarts(tmp_path, open_page):
    refused = ("status of 503", "ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET")
    with conftest.process(tmp_path, "sim", "--served-model-name", "sim") as (child, port, log):
        url = f"http://127.0.0.1:{port}"
        reachable(url)
        page = open_page(url, complaints=refused)
        expect(page.locator("#greeting")).to_have_text("Ready.", timeout=conftest.PATIENCE * 1000)
        exchange(page, "Are you there?", "Yes.")
        page.unroute(CHAT)
        # What the page asks for by default is more than the context of the next server.
        page.locator("#max_tokens").fill("64")
    send(page, "<say>Still.</say>")
    expect(page.locator("#phase")).to_contain_text("cannot be reached")
    expect(page.locator("#status")).to_have_text("waiting for the server")
    with conftest.process(tmp_path, "sim:0.4", "--served-model-name", "sim", "--max-model-len", "1024", port=port) as (child, port, log):
        expect(page.locator("#progress-note")).to_contain_text("%")
        seen(page.locator("#phase"))
        seen(page.locator("#progress"))
        expect(page.locator(".error")).to_have_count(0)
        accessible(page)
        # A request that gets a 503 is no error of the chat either.
        page.get_by_role("button", name="Stop").click()
        answered(page, 2)
        expect(page.locator("#starting")).not_to_be_visible()
        page.get_by_role("button", name="Regenerate").last.click()
        seen(page.locator("#progress"))
        answered(page, 2)
        expect(page.locator(".assistant .text").last).to_have_text("Still.")
        expect(page.locator("#starting")).not_to_be_visible()
        expect(page.locator(".error")).to_have_count(0)
        page.close()


def test_a_server_with_keys_asks_for_one(start, open_page):
    with start("sim", "--api-key", "sesame") as server:
        page = open_page(server.url, complaints=("status of 401",))
        expect(page.locator("#greeting")).to_contain_text("requires an API key")
        expect(page.locator("#key")).to_be_focused()
        page.locator("#key").fill("open")
        page.keyboard.press("Enter")
        expect(page.locator("#key-error")).to_have_text("The server does not accept this key.")
        seen(page.locator("#key-error"))
        page.locator("#key").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#greeting")).to_have_text("Ready.")
        expect(page.locator("#key-error")).to_have_count(0)
        expect(page.locator("#memory")).to_be_visible()
        with page.expect_request(CHAT) as sent:
            send(page, "Hello")
        assert sent.value.headers["authorization"] == "Bearer sesame"
        answered(page, 1)
        expect(page.locator(".error")).to_have_count(0)
        kept = page.evaluate("import('/assets/store.js').then(store => store.allChats())")
        assert [chat["title"] for chat in kept] == ["Hello"]
        assert "sesame" not in json.dumps(kept) + page.evaluate("JSON.stringify([localStorage, sessionStorage])")
        # It would ask a server that has gone for its memory.
        page.close()
