"""The page's files and the stream of events as any HTTP client meets them."""

from importlib.resources import files
from pathlib import Path

import httpx
import msgspec
import pytest

from dormouse.gateway.dashboard import EVENTS, PAGE, page_files
from dormouse.tenants.limits import Limits
from dormouse.watch.picture import Picture
from tests.page.serving import ready, served
from tests.shell.running import RunningServer
from tests.shell.tenanted import ACME, ADMIN, INNER, MINE, SHARED, THEIRS, Kept, bearer, tenanted


def events_of(answer: httpx.Response, count: int) -> list[tuple[str, bytes]]:
    """The first events of a stream."""
    found, event = [], ""
    for line in answer.iter_lines():
        name, _, value = line.partition(": ")
        if name == "event":
            event = value
        elif name == "data":
            found.append((event, value.encode()))
            if len(found) == count:
                break
    return found


def test_every_file_that_the_page_names_is_in_the_package_and_is_served(server: RunningServer) -> None:
    packaged = {file.name for file in files("dormouse.gateway").joinpath("page").iterdir()}
    assert {"index.html", "style.css", "app.js", "icon.svg"} <= packaged
    assert {path.rpartition("/")[2] or "index.html" for path in page_files()} == packaged
    for path, file in page_files().items():
        answer = httpx.get(server.url + path)
        assert (answer.status_code, answer.content, answer.headers["content-type"]) == (200, file.content, file.kind)
        assert answer.headers["content-security-policy"].startswith("default-src 'self';")
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = httpx.get(server.url + path, headers={"If-None-Match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/", "/dormouse"])
def test_short_addresses_lead_to_the_page(server: RunningServer, path: str) -> None:
    answer = httpx.get(server.url + path)
    assert (answer.status_code, answer.headers["location"]) == (307, PAGE)


def test_nothing_beside_the_page_is_served_with_it(server: RunningServer) -> None:
    for path in ("/dormouse/page/../dashboard.py", "/dormouse/page/%2e%2e/app.py", "/dormouse/page/index.html"):
        assert httpx.get(server.url + path).status_code == 404


def test_events_begin_with_the_whole_picture(server: RunningServer) -> None:
    with httpx.stream("GET", server.url + EVENTS) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-store"
        ((event, value),) = events_of(answer, 1)
    assert event == "picture"
    assert msgspec.json.decode(value, type=Picture).functions.keys() == server.node.deployed.keys()
    assert httpx.head(server.url + EVENTS).content == b""


def test_a_server_that_stops_does_not_wait_for_those_who_watch() -> None:
    with served(ready(tenanted())) as server:
        answer = httpx.stream("GET", server.url + EVENTS, timeout=30)
        stream = answer.__enter__()
        lines = stream.iter_lines()
        assert next(lines) == "event: picture"
        server.stop()
        assert "event: goodbye" in list(lines), "long before the grace of open requests is over"
        answer.__exit__(None, None, None)


def test_the_page_needs_no_key_and_all_that_it_shows_does(tmp_path: Path) -> None:
    with served(ready(tenanted()), Kept(tmp_path).gate) as server:
        assert httpx.get(server.page).status_code == 200
        for path in ("/dormouse/picture", EVENTS, f"/dormouse/functions/{MINE}"):
            assert httpx.get(server.url + path).status_code == 401


def test_a_tenant_is_told_of_its_own_and_of_nothing_else(tmp_path: Path) -> None:
    with served(ready(tenanted()), Kept(tmp_path).gate) as server:
        with httpx.stream("GET", server.url + EVENTS, headers=bearer(ACME)) as answer:
            ((_, value),) = events_of(answer, 1)
        picture = msgspec.json.decode(value, type=Picture)
        assert picture.functions.keys() == picture.histories.keys() == {MINE}
        assert (picture.node, picture.devices, picture.loads, picture.host) == (False, (), (), None)
        assert picture.totals.functions == 1
        for name, status in {MINE: 200, THEIRS: 404, SHARED: 404, INNER: 404, "unknown": 404}.items():
            answer = httpx.get(f"{server.url}/dormouse/functions/{name}", headers=bearer(ACME))
            assert answer.status_code == status
        everything = httpx.get(server.url + "/dormouse/picture", headers=bearer(ADMIN)).json()
        assert everything["functions"].keys() == {MINE, THEIRS, SHARED, INNER}


def test_watching_takes_no_requests_place_and_has_as_many_places_of_its_own(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    kept.limits["acme"] = Limits(concurrency=1)
    with (
        served(ready(tenanted()), kept.gate) as server,
        httpx.stream("GET", server.url + EVENTS, headers=bearer(ACME)) as answer,
    ):
        lines = answer.iter_lines()  # it is closed with this
        assert next(lines) == "event: picture"
        assert httpx.get(server.url + "/v2/models", headers=bearer(ACME)).status_code == 200
        assert httpx.get(server.url + EVENTS, headers=bearer(ACME)).status_code == 429
