"""The chat page, in a real headless browser."""

import json
import re

import pytest
from browser import CHAT, PHONE, accessible, answered, browser, chat, open_page, says, seen, send
from playwright.sync_api import expect


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
    assert set(sent.value.post_data_json) == {"model", "messages", "max_tokens", "stream", "stream_options"}
    # The field shows what is sent where it is empty.
    assert sent.value.post_data_json["max_tokens"] == 2048 == int(chat.locator("#max_tokens").get_attribute("placeholder"))
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
    assert "stopped" in chat.locator(".assistant .after").inner_text()
    slow.wait_until_empty()
    chat.unroute(CHAT)
    send(chat, "Thank you")
    answered(chat, 2)
    assert "stopped" not in chat.locator(".assistant .after").last.inner_text()


@pytest.mark.parametrize("context", [512, 2100])
def test_the_default_length_of_an_answer_gives_way_to_the_context(start, open_page, context):
    with start("sim", "--served-model-name", "sim", "--max-model-len", str(context)) as server:
        page = open_page(server.url, complaints=("status of 400",))
        asked = []
        page.on("request", lambda request: asked.append(request.post_data_json) if request.url.endswith("/chat/completions") else None)
        # An answer as long as the context would leave no room for the next question, whatever length that asks for.
        send(page, "<say>Short.</say>" + "Be short, " * 20)
        answered(page, 1)
        expect(page.locator(".error")).to_have_count(0)
        # What the context can never hold is not asked for; beside this question it does not hold the default either.
        assert "max_tokens" not in asked[-1] and len(asked) == (1 if context < 2048 else 2)
        # What somebody asks for is refused as ever.
        page.locator("#max_tokens").fill("2048")
        send(page, "Be long")
        expect(page.locator("#max_tokens-error")).to_be_visible()
        # It would ask a server that has gone for its memory.
        page.close()


def test_an_error_says_what_and_where(sim, open_page):
    page = open_page(sim.url, complaints=("status of 400",))
    page.locator("#more-sampling summary").click()
    page.locator("#min_p").fill("3")
    page.locator("#more-sampling summary").click()
    send(page, "Too much")
    expect(page.locator(".error")).to_contain_text("min_p")
    expect(page.locator("#tokens")).to_have_text("–")
    expect(page.locator("#min_p")).to_have_attribute("aria-invalid", "true")
    seen(page.locator("#min_p-error"))
    assert "min_p" in page.locator("#min_p-error").inner_text()
    page.locator("#min_p").fill("0.5")
    expect(page.locator("#min_p-error")).to_have_count(0)
    with page.expect_request(CHAT) as sent:
        page.get_by_role("button", name="Try again").click()
    assert sent.value.post_data_json["messages"] == [{"role": "user", "content": "Too much"}]
    answered(page, 1)
    expect(page.locator(".error")).to_have_count(0)
    # What is no number is not sent at all.
    page.locator("#seed").press_sequentially("1e")
    send(page, "And now?")
    expect(page.locator("#seed-error")).to_have_text("This is not a number.")
    expect(page.locator(".user")).to_have_count(1)
    assert page.locator("#message").input_value() == "And now?"


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
    page = open_page(sim.url, complaints=("Content Security Policy", "This document requires"))
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
        """async () => {
            const violation = new Promise(done => document.addEventListener('securitypolicyviolation', e => done(e.violatedDirective)));
            let refused = false;
            try { document.body.innerHTML = '<b>x</b>' } catch { refused = true }
            const script = document.createElement('script');
            script.append('window.pwned = 1');
            document.body.append(script);
            return [refused, await violation];
        }"""
    )
    assert blocked == [True, "require-trusted-types-for"] and page.evaluate("window.pwned") is None


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


RICH = r"""First:
1. a list right after a line
2. with \(x_1\) and $e^{i\pi}$, and $$x^2$$ too. It costs $5 and $6.

\[
\frac{\sqrt{\pi}}{2}
\]

| left | right |
|:-----|------:|
| a | 1 |

```python
def load(line):  # a comment
    return "deep"
```

A line
and another. $\undefined$ stays.
"""


@pytest.mark.parametrize("size", [len(RICH), 3], ids=["whole", "in pieces"])
def test_formulas_code_and_tables_are_seen(sim, open_page, size):
    page = open_page(sim.url)
    says(page, *({"content": RICH[i : i + size]} for i in range(0, len(RICH), size)))
    send(page, "Show me")
    answered(page, 1)
    text = page.locator(".assistant .text")
    expect(text.locator(".katex")).to_have_count(4)
    # Typeset, with KaTeX's fonts and sizes: a fraction is higher than a line.
    fraction = text.locator(".formula").last
    seen(fraction.locator(".katex-html .sqrt"))
    assert fraction.bounding_box()["height"] > 40
    page.evaluate("document.fonts.ready")
    assert page.evaluate("[...document.fonts].some(font => font.family.startsWith('KaTeX') && font.status === 'loaded')")
    words = text.inner_text()
    assert "It costs $5 and $6." in words and r"$\undefined$" in words and r"\(" not in words and "$$" not in words
    assert text.locator("ol > li").count() == 2 and text.locator("p").first.inner_text() == "First:"
    aligned = page.evaluate("[...document.querySelectorAll('.assistant td')].map(cell => getComputedStyle(cell).textAlign)")
    assert aligned == ["left", "right"]
    assert "A line\nand another." in words
    code = text.locator(".code")
    expect(code.locator(".hl-keyword").first).to_have_text("def")
    seen(code.locator(".hl-string"))
    colours = [code.locator(part).first.evaluate("node => getComputedStyle(node).color") for part in ("code", ".hl-keyword", ".hl-string", ".hl-comment")]
    assert len(set(colours)) == 4, colours
    assert code.locator("code").inner_text() == 'def load(line):  # a comment\n    return "deep"'


def test_code_and_answers_are_copied(sim, open_page):
    page = open_page(sim.url, permissions=["clipboard-read", "clipboard-write"])
    says(page, {"content": "Here:\n```sh\necho 1\necho 2\n```"})
    send(page, "A script")
    answered(page, 1)
    for button, text in [(".code", "echo 1\necho 2"), (".assistant .after", "Here:\n```sh\necho 1\necho 2\n```"), (".user .after", "A script")]:
        copy = page.locator(button).get_by_role("button").first
        copy.click()
        expect(copy).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == text


def test_tokens_that_come_at_once_have_a_speed(chat):
    chunks = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 20, "total_tokens": 25}}
    deltas = [{"choices": [{"index": 0, "delta": {"content": f"{i} "}, "finish_reason": None}]} for i in range(20)]
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*deltas, chunks]) + "data: [DONE]\n\n"
    chat.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=body))
    send(chat, "All at once")
    answered(chat, 1)
    assert chat.locator("#tokens").inner_text() == "20"
    assert re.fullmatch(r"[\d,.]+ tokens/s", chat.locator("#rate").inner_text())
    # They took as long as the wait for them, not as long as it took to read them.
    rate = float(chat.locator("#rate").inner_text().split()[0].replace(",", ""))
    wait = float(chat.locator("#ttft").inner_text().split()[0])
    assert rate * (wait - 0.01) <= 21, (rate, wait)


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
    page = open_page(sim.url, PHONE, has_touch=True)
    expect(page.locator("#greeting")).to_have_text("Ready.")
    for panel, toggle in [("#panel", "Settings"), ("#chats", "Chats")]:
        expect(page.locator(panel)).not_to_be_visible()
        page.get_by_role("button", name=toggle, exact=True).tap()
        expect(page.locator(panel)).to_be_visible()
        accessible(page)
        page.keyboard.press("Escape")
        expect(page.locator(panel)).not_to_be_visible()
    wide = "a" * 500 + "\n\n```\n" + "b" * 500 + "\n```\n| " + "c | " * 60 + "\n|" + "---|" * 60
    says(page, {"content": f"{wide}\n\n$${'x + ' * 200}y$$\n\nThe end."})
    send(page, "Wide things")
    answered(page, 1)
    expect(page.locator(".katex")).to_have_count(1)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    for part in [page.get_by_text("The end."), page.locator("#message"), page.locator("#send"), page.get_by_role("button", name="New chat")]:
        seen(part)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_chat_is_accessible(sim, open_page, scheme):
    page = open_page(sim.url, color_scheme=scheme)
    says(page, {"reasoning_content": "Hm."}, {"content": RICH})
    send(page, "Show me")
    answered(page, 1)
    page.get_by_role("button", name="Actions for Show me").click()
    accessible(page)


def test_pages_can_be_left_out(start):
    with start("sim", "--disable-ui") as server:
        assert [server.http.get(path).status_code for path in ("/", "/docs", "/openapi.json")] == [404, 404, 200]


PNG = (
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\x02\0\0\0\x90wS\xde\0\0\0\x0cIDATx\x9cc\xf8\xcf\xc0\0\0\3\1\1\0"
    b"\xc9\xfe\x92\xef\0\0\0\0IEND\xaeB`\x82"
)

# A picture of 3000 x 1500 pixels, dropped as a file.
DROP = """async () => {
    const canvas = Object.assign(document.createElement("canvas"), { width: 3000, height: 1500 });
    canvas.getContext("2d").fillRect(0, 0, 1500, 1500);
    const blob = await new Promise((done) => canvas.toBlob(done, "image/png"));
    const data = new DataTransfer();
    data.items.add(new File([blob], "large.png", { type: "image/png" }));
    const drop = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
    document.querySelector("main").dispatchEvent(drop);
}"""

SIZE = """async (url) => {
    const image = Object.assign(new Image(), { src: url });
    await image.decode();
    return [image.naturalWidth, image.naturalHeight];
}"""


def test_images_are_sent_with_the_question(sim, open_page):
    chat = open_page(sim.url)
    expect(chat.locator("#greeting")).to_have_text("Ready.")
    expect(chat.locator("#attach")).to_be_hidden()

    def sees(route):
        """The model list of a server whose model takes images."""
        response = route.fetch()
        models = response.json()
        models["data"][0]["input_modalities"] = ["text", "image"]
        route.fulfill(response=response, json=models)

    chat.route("**/v1/models", sees)
    asked = []

    def answers(route):
        """The simulated model takes only text: it gets that of the question."""
        body = route.request.post_data_json
        asked.append(json.loads(json.dumps(body)))
        for message in body["messages"]:
            if isinstance(message["content"], list):
                message["content"] = "<say>A picture.</say>"
        route.continue_(post_data=body)

    chat.route(CHAT, answers)
    chat.reload()
    expect(chat.locator("#greeting")).to_have_text("Ready.")
    expect(chat.locator("#attach")).to_be_visible()
    chat.locator("#files").set_input_files({"name": "a.png", "mimeType": "image/png", "buffer": PNG})
    expect(chat.locator("#pictures img")).to_have_count(1)
    chat.evaluate(DROP)
    expect(chat.locator("#pictures img")).to_have_count(2)
    chat.locator("#files").set_input_files({"name": "b.png", "mimeType": "image/png", "buffer": PNG})
    expect(chat.locator("#pictures img")).to_have_count(3)
    chat.get_by_role("button", name="Remove image 3").click()
    expect(chat.locator("#pictures img")).to_have_count(2)
    send(chat, "What is this?")
    answered(chat, 1)
    small, large, text = asked[0]["messages"][-1]["content"]
    assert text == {"type": "text", "text": "What is this?"}
    assert small["image_url"]["url"].startswith("data:image/png;base64,iVBOR")
    assert large["image_url"]["url"].startswith("data:image/jpeg;base64,")
    assert chat.evaluate(SIZE, large["image_url"]["url"]) == [1568, 784]
    expect(chat.locator("#pictures")).to_be_hidden()
    expect(chat.locator(".turn.user img")).to_have_count(2)
    accessible(chat)
    # Kept with the chat, and sent again with the next question.
    chat.reload()
    expect(chat.locator(".turn.user img")).to_have_count(2)
    expect(chat.locator("#greeting")).to_have_text("Ready.")
    send(chat, "And?")
    answered(chat, 2)
    assert asked[1]["messages"][0]["content"] == [small, large, text]


def test_models_of_text_offer_no_images(chat):
    expect(chat.locator("#attach")).to_be_hidden()
    chat.evaluate(DROP)
    expect(chat.locator("#pictures")).to_be_hidden()
