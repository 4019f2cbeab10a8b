"""The page in a real browser, before a real HTTP server."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dormouse.functions import Manifest
from dormouse.submit import Owner
from dormouse.watch.picture import Device, Picture, Place, Waiting
from tests.page.crowd import Crowd
from tests.page.serving import Served, ready, served
from tests.shell.in_memory import PROGRAMS, Deployed, InMemory
from tests.shell.tenanted import ACME, ADMIN, MINE, THEIRS, Kept, tenanted

pytest.importorskip("playwright.sync_api", reason="the page is tried in a browser, with playwright")

from playwright.sync_api import Locator, Page, ViewportSize, expect

Open = Callable[..., Page]
Keep = Callable[[Page, str], None]
DESK = ViewportSize(width=1360, height=900)
PHONE = ViewportSize(width=360, height=760)
LARGEST_RENDER_MS = 250
"""Of the middle one; on two loaded cores without a GPU."""
PATIENCE_MS = 15_000

expect.set_options(timeout=PATIENCE_MS)


@pytest.fixture(scope="module")
def crowd() -> Iterator[Served]:
    with served(ready(Crowd())) as server:
        yield server


def rows(page: Page) -> Locator:
    return page.locator("#rows .row:not([hidden])")


def names(page: Page) -> list[str]:
    """Of the rows that are there, from the top."""
    found: list[str] = page.evaluate(
        """[...document.querySelectorAll('#rows .row:not([hidden])')]
            .sort((a, b) => a.dataset.at - b.dataset.at).map((row) => row.querySelector('.label').textContent)"""
    )
    return found


def fits(page: Page) -> bool:
    """Nothing sticks out to the right."""
    answer: bool = page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    return answer


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("light", {"viewport": DESK}),
        ("dark", {"viewport": DESK, "color_scheme": "dark"}),
        ("phone", {"viewport": PHONE, "device_scale_factor": 2, "has_touch": True}),
        ("phone-dark", {"viewport": PHONE, "device_scale_factor": 2, "color_scheme": "dark"}),
        ("still", {"viewport": DESK, "reduced_motion": "reduce"}),
    ],
)
def test_it_shows_devices_loads_queue_and_functions_on_every_screen(
    crowd: Served, open_page: Open, picture_of: Keep, name: str, options: dict[str, object]
) -> None:
    page = open_page(crowd.page, **options)
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#of")).to_have_text("of 500 functions")
    expect(page.locator(".card canvas")).to_have_count(8)
    expect(page.locator(".card").nth(1).locator(".load .left")).to_contain_text("left")
    expect(page.locator(".card").nth(2)).to_contain_text("lent to cuda:1")
    expect(page.locator(".card").nth(6)).to_contain_text("restarting")
    expect(page.locator("#reads .load")).to_have_count(1)
    expect(page.locator("#queue li").first).to_contain_text("requests before it run on cuda:0")
    expect(page.locator("#cost")).to_contain_text("USD")
    assert fits(page)
    picture_of(page, name)
    page.locator("#functions").scroll_into_view_if_needed()
    page.evaluate("document.getElementById('functions').scrollIntoView()")
    expect(rows(page).first).to_be_in_viewport()
    expect(rows(page).first.locator(".sparkline .line")).to_have_attribute("d", re.compile("M"))
    picture_of(page, f"{name}-functions")
    rows(page).nth(2).click()
    expect(page.locator("#detail")).to_contain_text("/models/")
    assert fits(page)
    picture_of(page, f"{name}-detail")


def test_the_map_has_each_function_in_its_own_colour_and_tells_its_name(crowd: Served, open_page: Open) -> None:
    page = open_page(crowd.page, viewport=DESK)
    canvas = page.locator(".card canvas").first
    expect(canvas).to_have_attribute("aria-label", re.compile(r"Memory of cuda:0: \d+ functions in .* of 12.0 GiB"))
    colours = canvas.evaluate(
        """(canvas) => {
            const pen = canvas.getContext('2d');
            const line = pen.getImageData(0, 3, canvas.width, 1).data;
            const seen = new Set();
            for (let at = 0; at < line.length; at += 4) seen.add(line.slice(at, at + 3).join());
            return seen.size;
        }"""
    )
    assert colours > 3
    canvas.hover(position={"x": 5, "y": 5})
    expect(canvas).to_have_attribute("title", re.compile(r"^[a-z0-9]+-\d+: .* (MiB|GiB), \w+$"))
    canvas.click(position={"x": 5, "y": 5})
    expect(page.locator("#detail")).to_be_visible()


def test_everything_can_be_done_by_keyboard(crowd: Served, open_page: Open) -> None:
    page = open_page(crowd.page, viewport=DESK)
    expect(rows(page).first).to_be_attached()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("/")
    expect(page.locator("#filter")).to_be_focused()
    page.keyboard.type("whisper")
    expect(page.locator("#shown")).to_have_text(re.compile(r"^\d+ of 500$"))
    assert all("whisper" in name for name in names(page))
    page.keyboard.press("Escape")
    grid = page.locator("#grid")
    expect(grid).to_be_focused()
    outline = grid.evaluate("(grid) => getComputedStyle(grid).outlineStyle")
    assert outline == "solid"
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp"):
        page.keyboard.press(key)
    active = page.locator("#rows .row.active")
    expect(active).to_have_attribute("aria-rowindex", "3")
    expect(grid).to_have_attribute("aria-activedescendant", str(active.get_attribute("id")))
    expect(active).to_be_in_viewport()
    chosen = active.locator(".label").inner_text()
    page.keyboard.press("Enter")
    expect(page.locator("#detail-title")).to_have_text(chosen)
    expect(page.locator("#detail")).to_contain_text("up to 8 rows")
    page.keyboard.press("Escape")
    expect(page.locator("#detail")).to_be_hidden()
    expect(grid).to_be_focused()
    page.keyboard.press("End")
    expect(active).to_be_in_viewport()
    expect(active).to_have_attribute("aria-rowindex", str(grid.get_attribute("aria-rowcount")))


def test_the_theme_can_be_chosen_and_is_remembered(crowd: Served, open_page: Open) -> None:
    page = open_page(crowd.page, viewport=DESK, color_scheme="light")
    shade = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(shade)
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    dark = page.evaluate(shade)
    assert dark != light
    page.reload()
    assert page.evaluate(shade) == dark


def test_rows_are_filtered_and_sorted(crowd: Served, open_page: Open) -> None:
    page = open_page(crowd.page, viewport={"width": 1360, "height": 2400})
    page.get_by_role("button", name="Name", exact=True).click()
    expect(page.locator("#head .name")).to_have_attribute("aria-sort", "ascending")
    found = names(page)
    assert found == sorted(found)
    page.get_by_role("button", name="Image", exact=True).click()
    expect(page.locator("#head .image_bytes")).to_have_attribute("aria-sort", "descending")
    first, second = (rows(page).locator(f":scope[data-at='{at}'] .image_bytes") for at in (0, 1))
    assert float(first.inner_text().split()[0]) >= float(second.inner_text().split()[0])
    page.locator("#show").select_option("late")
    expect(page.locator("#shown")).to_have_text("20 of 500")
    expect(rows(page).locator(".slo").first).to_have_text("✕ outside")
    page.locator("#filter").fill("nothing like it")
    expect(page.locator("#none-match")).to_be_visible()


def test_five_hundred_functions_are_drawn_within_the_budget(crowd: Served, open_page: Open) -> None:
    # Playwright's way of waiting for a figure is what the page's policy forbids.
    page = open_page(crowd.page, viewport=DESK, bypass_csp=True)
    page.wait_for_function("performance.getEntriesByName('render').length >= 12")
    took = sorted(page.evaluate("performance.getEntriesByName('render').map((each) => each.duration)"))
    print(f"drawn {len(took)} times: median {took[len(took) // 2]:.1f} ms, longest {took[-1]:.1f} ms")
    assert took[len(took) // 2] < LARGEST_RENDER_MS
    assert page.locator("#rows .row").count() < 60, "only what can be seen is there"


# ------------------------------------------------------------------ what comes and goes


def test_without_functions_it_says_how_to_deploy_one_and_shows_it_when_it_is_there(
    open_page: Open, picture_of: Keep
) -> None:
    node = InMemory()
    with served(ready(node)) as server:
        page = open_page(server.page, viewport=DESK)
        expect(page.locator("#empty")).to_contain_text("dormouse deploy")
        expect(page.locator("#grid")).to_be_hidden()
        picture_of(page, "empty")
        node.deployed["first"] = Deployed(Manifest("first", "arithmetic:affine"), 1, *PROGRAMS["affine"])
        expect(rows(page).locator(".label")).to_have_text("first")
        expect(page.locator("#empty")).to_be_hidden()
        del node.deployed["first"]
        expect(page.locator("#empty")).to_be_visible()


def test_a_server_that_goes_away_and_comes_back_is_followed(open_page: Open, picture_of: Keep) -> None:
    node = InMemory()
    node.furnish()
    with served(ready(node)) as server:
        page = open_page(server.page, viewport=DESK)
        expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#link")).to_contain_text("Trying again")
    expect(page.locator("#link")).to_have_attribute("data-state", "lost")
    picture_of(page, "lost")
    node.deployed["later"] = Deployed(Manifest("later", "arithmetic:affine"), 1, *PROGRAMS["affine"])
    with served(ready(node), port=server.port):
        expect(page.locator("#link")).to_have_text("live")
        page.locator("#filter").fill("later")
        expect(rows(page).locator(".label")).to_have_text("later")


# ------------------------------------------------------------------ keys


def test_a_key_is_asked_for_and_a_wrong_one_is_said_to_be_wrong(
    open_page: Open, picture_of: Keep, tmp_path: Path
) -> None:
    with served(ready(tenanted()), Kept(tmp_path).gate) as server:
        page = open_page(server.page, viewport=DESK)
        expect(page.locator("#ask")).to_be_visible()
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("not-a-key")
        page.keyboard.press("Enter")
        expect(page.locator("#ask-error")).to_have_text("This key is not one of this server's, or it was revoked.")
        picture_of(page, "wrong-key")
        page.keyboard.type("ключ")
        page.keyboard.press("Enter")
        expect(page.locator("#ask-error")).to_contain_text("no key has")
        page.locator("#key").fill(ADMIN)
        page.keyboard.press("Enter")
        expect(page.locator("#of")).to_have_text("of 4 functions")
        assert page.evaluate("localStorage.length") == 0
        page.reload()
        expect(page.locator("#of")).to_have_text("of 4 functions")
        page.locator("#forget").click()
        expect(page.locator("#ask")).to_be_visible()


def test_a_tenant_sees_its_own_functions_and_no_device(open_page: Open, tmp_path: Path) -> None:
    with served(ready(tenanted()), Kept(tmp_path).gate) as server:
        page = open_page(server.page, viewport=DESK)
        page.locator("#key").fill(ACME)
        page.keyboard.press("Enter")
        expect(page.locator("#of")).to_have_text("of 1 function")
        expect(page.locator("#node")).to_be_hidden()
        assert names(page) == [MINE]
        assert THEIRS not in page.content()


# ------------------------------------------------------------------ hostile values

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


class Hostile(InMemory):
    """Everything that somebody could have chosen, or a driver could say, is markup."""

    def picture(self) -> Picture:
        picture = super().picture()
        row = replace(picture.functions["affine"], name=HOSTILE, tenant=HOSTILE, tier=HOSTILE, eager_because=HOSTILE)
        row = replace(row, queued=1, on=(HOSTILE,), refusals={HOSTILE: 1})
        device = Device(HOSTILE, HOSTILE, HOSTILE, True, 2**26, 2**20, 2**25, executing=HOSTILE)
        device = replace(device, places=(Place(HOSTILE, 2**25, HOSTILE),))
        return replace(
            picture,
            functions={HOSTILE: row, "constructor": replace(row, name="constructor")},
            histories={},
            devices=(device,),
            queue=(Waiting(HOSTILE, 1, 0, HOSTILE),),
        )

    def function(self, name: str) -> dict[str, Any]:
        assert name == HOSTILE
        return {"source": HOSTILE, "pin": HOSTILE, "tenant": HOSTILE, "batch": {}, "disk": {}, "paths": {}}

    def owner(self, name: str) -> Owner:
        assert name == HOSTILE
        return Owner("", public=False)


def test_nothing_that_somebody_chose_becomes_markup(open_page: Open) -> None:
    node = Hostile()
    node.furnish()
    with served(ready(node)) as server:
        page = open_page(server.page, viewport=DESK)
        expect(page.locator(".card h3")).to_have_text(HOSTILE)
        expect(page.locator("#queue li .name")).to_have_text(HOSTILE)
        expect(page.locator("#queue li .note")).to_have_text(HOSTILE)
        page.locator("#queue li .name").click()
        expect(page.locator("#detail-title")).to_have_text(HOSTILE)
        expect(page.locator("#detail")).to_contain_text(f"Source{HOSTILE}")
        assert page.locator("img").count() == 0
        assert "owned" not in page.title()


def test_the_page_asks_nobody_but_its_server(crowd: Served, open_page: Open) -> None:
    page = open_page("about:blank")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    answer = page.goto(f"{crowd.url}/")
    assert answer is not None
    expect(page.locator("#link")).to_have_text("live")
    assert page.url == crowd.page
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert asked and all(url.startswith(crowd.url) for url in asked)
