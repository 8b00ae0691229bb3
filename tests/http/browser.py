"""A headless browser and what tests of the pages do with it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHAT = "**/v1/chat/completions"
WIDE, PHONE = {"width": 1280, "height": 820}, {"width": 390, "height": 780}
# A busy machine takes its time. What is awaited of a page is looked at until it is so, or this has passed.
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)


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
        page.on("request", lambda r: None if r.url.startswith((origin, "data:")) else foreign.append(r.url))
        contexts.append((context, heard, foreign, complaints))
        page.goto(url)
        return page

    yield open
    for context, heard, foreign, complaints in contexts:
        context.close()
        assert not foreign, foreign
        unknown = [text for text in heard if not any(known in text for known in complaints)]
        assert not unknown, unknown


@pytest.fixture
def chat(sim, open_page):
    page = open_page(sim.url)
    expect(page.locator("#greeting")).to_have_text("Ready.")
    return page


def send(page: Page, text: str) -> None:
    expect(page.locator("#send")).to_be_enabled()
    page.locator("#message").fill(text)
    page.keyboard.press("Enter")


def answered(page: Page, answers: int) -> None:
    """Waits until so many answers are whole."""
    expect(page.locator(".assistant .after")).to_have_count(answers)


def says(page: Page, *deltas: dict) -> None:
    """Has the next answers say this in place of what the model would."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route(CHAT, lambda route: route.fulfill(content_type="text/event-stream", body=body))


def seen(locator: Locator) -> None:
    """Checks that people see something: in the viewport, with a size, and with nothing on top of it."""
    expect(locator).to_be_visible(timeout=PATIENCE_MS)
    found = locator.evaluate(
        """node => {
            const { left, top, width, height } = node.getBoundingClientRect();
            const [x, y] = [left + width / 2, top + height / 2];
            const on = document.elementFromPoint(x, y);
            const inside = left >= 0 && left + width <= innerWidth && y >= 0 && y <= innerHeight;
            return { width, height, inside, on: on === node || node.contains(on) || on?.outerHTML.slice(0, 200) };
        }"""
    )
    assert found["inside"] and found["on"] is True and found["width"] >= 4 and found["height"] >= 4, found


def accessible(page: Page, *parts: str) -> None:
    """Checks the page, or these parts of it, as it is now with axe-core."""
    context = {"include": [[part] for part in parts]} if parts else None
    violations = Axe().run(page, context).response["violations"]
    assert not violations, [(one["id"], [node["html"][:200] for node in one["nodes"]]) for one in violations]
