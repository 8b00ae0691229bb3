"""The chat page and the reference, in a real headless browser."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHAT = "**/v1/chat/completions"
WIDE, PHONE = {"width": 1280, "height": 820}, {"width": 390, "height": 780}
# A busy machine takes its time.
PATIENCE_MS = 60_000


@pytest.fixture(scope="module")
def browser():
    install = [sys.executable, str(ROOT / "scripts/install-browser")]
    executable = Path(subprocess.run(install, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())
    home = executable.parent
    environment = dict(os.environ)
    if (home / "fonts.conf").exists():
        environment |= {"LD_LIBRARY_PATH": str(home / "lib"), "FONTCONFIG_FILE": str(home / "fonts.conf")}
    # Containers have no user namespaces for its sandbox; it sees nothing but our own pages.
    arguments = ["--no-sandbox", "--headless=shell", "--disable-gpu", "--no-zygote", "--font-render-hinting=none"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=arguments, env=environment)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser, request):
    """Opens pages that may not complain, nor ask anybody but their server."""
    contexts = []

    def open(url: str, viewport=WIDE, complaints: tuple = (), **options) -> Page:
        context = browser.new_context(viewport=viewport, **options)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        heard = []
        page.on("console", lambda message: heard.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: heard.append(str(error)))
        foreign = []
        origin = "/".join(url.split("/")[:3])
        page.on("request", lambda r: None if r.url.startswith(origin) else foreign.append(r.url))
        contexts.append((context, heard, foreign, complaints))
        page.goto(url)
        return page

    yield open
    for context, heard, foreign, complaints in contexts:
        context.close()
        assert foreign == []
        assert [text for text in heard if not any(known in text for known in complaints)] == []


@pytest.fixture
def chat(sim, open_page):
    page = open_page(sim.url)
    expect(page.locator("#greeting")).to_have_text("Ready.")
    return page


def send(page: Page, text: str) -> None:
    page.locator("#message").fill(text)
    page.keyboard.press("Enter")


def answered(page: Page, answers: int) -> None:
    """Waits until so many answers are whole."""
    expect(page.locator(".assistant .after")).to_have_count(answers, timeout=PATIENCE_MS)


def says(page: Page, *deltas: dict) -> None:
    """Has the next answers say this in place of what the model would."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=body))


def test_a_conversation(sim, chat):
    # Answers that are not over at once.
    more = {"ignore_eos": True, "max_tokens": 40}
    chat.route(CHAT, lambda route: route.continue_(post_data={**route.request.post_data_json, **more}))
    assert chat.evaluate("document.activeElement.id") == "message"
    send(chat, "Ahoy!")
    answered(chat, 1)
    first = chat.locator(".assistant .text").inner_text()
    assert first
    with chat.expect_request(CHAT) as sent:
        send(chat, "And then?")
    answered(chat, 2)
    messages = sent.value.post_data_json["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user"]
    assert messages[0]["content"] == "Ahoy!" and messages[2]["content"] == "And then?"
    assert "tokens/s" in chat.locator("#status").inner_text()
    assert chat.locator("#rate").inner_text().endswith("tokens/s")
    assert chat.locator("#ttft").inner_text().endswith(" s")
    assert chat.locator("#context").inner_text().endswith("of 4,096")

    chat.get_by_role("button", name="New chat").click()
    expect(chat.locator(".turn")).to_have_count(0)
    expect(chat.locator("#welcome")).to_be_visible()
    with chat.expect_request(CHAT) as sent:
        send(chat, "Again")
    assert len(sent.value.post_data_json["messages"]) == 1
    answered(chat, 1)


def test_sampling_controls_change_the_request(chat):
    with chat.expect_request(CHAT) as sent:
        send(chat, "Without")
    assert set(sent.value.post_data_json) == {"model", "messages", "stream", "stream_options"}
    answered(chat, 1)
    for name, value in {"temperature": "0.25", "top_p": "0.5", "max_tokens": "7", "seed": "42"}.items():
        chat.locator(f"#{name}").fill(value)
    chat.locator("#system").fill("Be brief.")
    with chat.expect_request(CHAT) as sent:
        send(chat, "With")
    body = sent.value.post_data_json
    assert {name: body[name] for name in ("temperature", "top_p", "max_tokens", "seed")} == {
        "temperature": 0.25,
        "top_p": 0.5,
        "max_tokens": 7,
        "seed": 42,
    }
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    answered(chat, 2)


@pytest.fixture(scope="module")
def slow(start):
    """A simulated model that takes more than a minute for its longest answers."""
    with start("sim:0.02", "--max-model-len", "4096", "--served-model-name", "sim") as server:
        yield server


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_ends_the_answer_here_and_there(slow, open_page, how):
    chat = open_page(slow.url)
    expect(chat.locator("#greeting")).to_have_text("Ready.")
    # An answer that would go on for long.
    chat.route(CHAT, lambda route: route.continue_(post_data={**route.request.post_data_json, "ignore_eos": True}))
    press = {
        "button": "document.getElementById('stop').click()",
        "key": "document.dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape' }))",
    }[how]
    chat.evaluate(
        """() => new MutationObserver((_, observer) => {
            if (!document.querySelector('.assistant .text')?.textContent) return;
            observer.disconnect();
            PRESS;
        }).observe(document.getElementById('log'), { childList: true, subtree: true })""".replace("PRESS", press)
    )
    send(chat, "Tell me everything")
    answered(chat, 1)
    assert "stopped" in chat.locator(".after").inner_text()
    slow.wait_until_empty()
    chat.unroute(CHAT)
    send(chat, "Thank you")
    answered(chat, 2)
    assert "stopped" not in chat.locator(".after").last.inner_text()


def test_an_error_says_what_and_where(sim, open_page):
    page = open_page(sim.url, complaints=("status of 400",))
    page.locator("#temperature").fill("-1")
    send(page, "Too cold")
    expect(page.locator(".error")).to_contain_text("temperature")
    expect(page.locator("#temperature")).to_have_attribute("aria-invalid", "true")
    page.locator("#temperature").fill("1")
    with page.expect_request(CHAT) as sent:
        page.get_by_role("button", name="Try again").click()
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Too cold"}]
    answered(page, 1)
    expect(page.locator(".error")).to_have_count(0)


EVIL = """<img src=x onerror="window.pwned=1"><script>window.pwned=1</script>
[click](javascript:window.pwned=1) <b>bold</b> ![x](https://example.org/a.png)
```html
<iframe src="https://example.org"></iframe>
```
> <svg onload="window.pwned=1">
- [a](JaVaScRiPt:alert(1)) `<u>` **<i>x</i>**

| <a onclick=1> | b |
|---|---|
| <script>window.pwned=1</script> | [d](data:text/html,x) |
"""


@pytest.mark.parametrize("size", [len(EVIL), 5], ids=["whole", "in pieces"])
def test_what_a_model_says_is_never_markup(sim, open_page, size):
    page = open_page(sim.url, complaints=("Content Security Policy",))
    says(page, *({"content": EVIL[i : i + size]} for i in range(0, len(EVIL), size)))
    send(page, EVIL)
    answered(page, 1)
    found = page.evaluate("[...document.querySelectorAll('#log *')].map(node => node.tagName.toLowerCase())")
    assert not {"img", "script", "iframe", "svg", "b", "i", "u"} & set(found), found
    assert {"strong", "code", "pre", "table", "blockquote", "li"} <= set(found)
    links = page.evaluate("[...document.querySelectorAll('#log a')].map(a => [a.href, a.rel])")
    assert links == [["https://example.org/a.png", "noopener noreferrer"]]
    text = page.locator(".assistant .text").inner_text()
    assert '<img src=x onerror="window.pwned=1">' in text and "javascript:window.pwned=1" in text
    assert page.evaluate("window.pwned") is None
    # Even markup would do nothing: the page's policy forbids it.
    blocked = page.evaluate(
        """() => new Promise(done => {
            document.addEventListener('securitypolicyviolation', event => done(event.violatedDirective));
            const script = document.createElement('script');
            script.textContent = 'window.pwned = 1';
            document.body.append(script);
        })"""
    )
    assert blocked.startswith("script-src") and page.evaluate("window.pwned") is None


def test_an_adversarial_text_does_not_hang_the_page(chat):
    says(chat, *({"content": piece * 20_000} for piece in ("[", "*", "_", "`", "> ", "**a", "- ", "| ", "![", "~~")))
    send(chat, "Go on")
    answered(chat, 1)


def test_a_long_line_is_drawn_in_linear_time(chat):
    """Every block is looked at in each frame: what takes a regular expression seconds would freeze the page."""
    spaces = " " * 20_000
    lines = [f"# a{spaces}b", f"# {spaces}#{spaces}b", f"a | b\n|{spaces}x", f"a | b\n{spaces}|{spaces}-{spaces}x",
             f"-{spaces}-{spaces}x", f"a | b\n{'-|' * 10_000}x"]
    took = chat.evaluate(
        """async lines => {
            const { Markdown } = await import('/assets/markdown.js');
            return lines.map(line => {
                const begin = performance.now();
                new Markdown(document.createElement('div')).show(line);
                return performance.now() - begin;
            });
        }""",
        lines,
    )
    # The old one took minutes.
    assert max(took) < 2000, took


def test_headings_may_be_closed(chat):
    says(chat, {"content": "# Open\n\n# Closed ##  \n\n# C#\n\n# #\n"})
    send(chat, "Go on")
    answered(chat, 1)
    assert chat.locator(".assistant .text h1").all_inner_texts() == ["Open", "Closed", "C#", ""]


def test_markdown(chat):
    says(chat, {"content": "# Title\n\n1. one\n   - nested\n2. two\n\nA `code` and *slanted* **bold**.\n\n```py\nx = 1 < 2\n```\n"})
    send(chat, "Go on")
    answered(chat, 1)
    text = chat.locator(".assistant .text")
    assert text.locator("h1").inner_text() == "Title"
    assert text.locator("ol > li").count() == 2 and text.locator("ol ul > li").inner_text() == "nested"
    assert text.locator("pre code").inner_text() == "x = 1 < 2"
    assert text.locator("em").inner_text() == "slanted" and text.locator("strong").inner_text() == "bold"


def test_reasoning_folds_away(chat):
    says(chat, {"reasoning_content": "Hm, <b>let</b> me see."}, {"content": "It is 4."})
    send(chat, "2 + 2?")
    answered(chat, 1)
    details = chat.locator("details.reasoning")
    assert details.get_attribute("open") is None
    assert chat.locator(".assistant .text").inner_text() == "It is 4."
    details.locator("summary").click()
    assert details.locator(".thought").inner_text() == "Hm, <b>let</b> me see."


def test_memory_is_that_of_the_server(sim, chat):
    expect(chat.locator("#memory")).to_be_visible()
    total = sim.http.get("/memory").json()["now"]["total"]
    assert chat.locator("#memory-total").inner_text() == f"{total / 2**30:.2f} GiB"
    widths = chat.evaluate("[...document.querySelectorAll('#segments span')].map(part => parseFloat(part.style.width))")
    assert len(widths) >= 2 and abs(sum(widths) - 100) < 0.1
    assert "KV cache" in chat.locator("#hull").get_attribute("aria-label")


def test_phone(sim, open_page):
    page = open_page(sim.url, PHONE)
    expect(page.locator("#greeting")).to_have_text("Ready.")
    expect(page.locator("#panel")).not_to_be_visible()
    page.get_by_role("button", name="Settings").click()
    expect(page.locator("#temperature")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).not_to_be_visible()
    says(page, {"content": "a" * 500 + "\n\n```\n" + "b" * 500 + "\n```\n| " + "c | " * 60 + "\n|" + "---|" * 60})
    send(page, "Wide things")
    answered(page, 1)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


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
    chat.locator("summary", has_text="200").click()
    expect(chat.locator("td", has_text="finish_reason").or_(chat.locator("td", has_text="choices")).first).to_be_visible()
    page.locator("#filter").fill("tokenize")
    assert 2 <= page.locator("#list a:visible").count() <= 12


def test_a_server_with_keys_asks_for_one(start, open_page):
    with start("sim", "--api-key", "sesame") as server:
        page = open_page(server.url, complaints=("status of 401",))
        expect(page.locator("#greeting")).to_contain_text("requires an API key")
        expect(page.locator("#key")).to_be_focused()
        page.locator("#key").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#greeting")).to_have_text("Ready.")
        expect(page.locator("#memory")).to_be_visible()
        with page.expect_request(CHAT) as sent:
            send(page, "Hello")
        assert sent.value.headers["authorization"] == "Bearer sesame"
        answered(page, 1)
        expect(page.locator(".error")).to_have_count(0)
        assert page.evaluate("JSON.stringify([localStorage, sessionStorage])") == "[{},{}]"


def test_pages_can_be_left_out(start):
    with start("sim", "--disable-ui") as server:
        assert [server.http.get(path).status_code for path in ("/", "/docs", "/openapi.json")] == [404, 404, 200]
