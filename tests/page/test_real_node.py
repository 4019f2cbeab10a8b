"""The page before a real node on the CPU device: what it is there for, from the deploy to the answer."""

import asyncio
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from dormouse.config import MIB
from dormouse.control.node import Node
from dormouse.submit import Chunk
from tests.node.nodes import ask, inputs, manifest, opened, pid_of, small
from tests.page.serving import Served, served

pytest.importorskip("playwright.sync_api", reason="the page is tried in a browser, with playwright")

from playwright.sync_api import Page, expect


def in_server(server: Served, work: Any) -> "Future[Any]":
    return asyncio.run_coroutine_threadsafe(work, server.loop)


def test_a_load_in_flight_appears_then_its_function_on_the_device_and_a_dead_executor_is_shown(
    tmp_path: Path, open_page: Callable[..., Page], picture_of: Callable[[Page, str], None]
) -> None:
    with served(lambda: opened(small(tmp_path, link_bytes_per_s=2 * MIB))) as server:
        node = server.node
        assert isinstance(node, Node)
        page = open_page(server.page)
        expect(page.locator("#empty")).to_be_visible()
        in_server(server, node.deploy(manifest("sleepy", "stack", seed=1, mib=4))).result(timeout=60)
        row = page.locator("#rows .row:not([hidden])")
        expect(row.locator(".tier")).to_have_text("host")
        asked: Future[Chunk] = in_server(server, ask(node, "sleepy", inputs(1)))
        expect(page.locator(".load .name")).to_have_text("sleepy")
        expect(page.locator(".link-line")).to_contain_text("busy")
        expect(page.locator(".load .left")).to_contain_text(" left")
        picture_of(page, "real-load")
        asked.result(timeout=60)
        expect(row.locator(".tier")).to_have_text("cpu:0")
        expect(page.locator(".load")).to_have_count(0)
        expect(page.locator(".card .note")).to_contain_text("1 function in chunks of 1.0 MiB")
        expect(page.locator("#path-legend")).to_contain_text("build 100 %")
        os.kill(pid_of(node), signal.SIGKILL)
        expect(page.locator(".card .note")).to_contain_text("1 restart")
        expect(row.locator(".tier")).to_have_text("host")
