"""A headless Chromium for the tests of the page, and where their pictures go."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARTEFACTS = Path(__file__).parents[2] / "artefacts"


@pytest.fixture(scope="package")
def browser() -> "Iterator[Browser]":
    """Debian's; playwright's own would have to be downloaded. It has to be gone before other tests run: as long as it
    is there, playwright's event loop runs in this thread, and no other can."""
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is tried in a browser, with playwright")
    if CHROMIUM is None:
        pytest.skip("no chromium here; on Debian: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: "Browser") -> "Iterator[Callable[..., Page]]":
    """Opens an address in a window of its own. A fault in the page's code fails the test."""
    contexts: list[BrowserContext] = []
    faults: list[str] = []

    def opened(url: str, **options: Any) -> "Page":
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("pageerror", lambda fault: faults.append(str(fault)))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def picture_of() -> "Callable[[Page, str], None]":
    """Keeps a screenshot, for people to look at."""

    def take(page: "Page", name: str) -> None:
        ARTEFACTS.mkdir(exist_ok=True)
        page.screenshot(path=ARTEFACTS / f"{name}.png")

    return take
