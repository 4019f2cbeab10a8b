"""A scrape of a real node: what requests, loads and evictions leave in it, and that nothing ever counts backwards."""

import asyncio
import os
import signal
from pathlib import Path

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from dormouse.control.node import Node
from dormouse.core.messages import ExecutorJoined, LoadFinished
from dormouse.gateway.app import create_app
from dormouse.metrics.books import REMOVED
from tests.metrics.promtool import complaints
from tests.node.nodes import Events, answer, inputs, manifest, opened, pid_of, run, small

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scraped(node: Node, **headers: str) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(node, body_limit_bytes=1000))
    async with httpx.AsyncClient(transport=transport, base_url="http://dormouse") as client:
        return await client.get("/metrics", headers=headers)


async def samples(node: Node) -> Samples:
    text = (await scraped(node)).text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(found: Samples, name: str, **labels: str) -> float:
    wanted = labels.items()
    return sum(value for (other, given), value in found.items() if other == name and wanted <= dict(given).items())


def counts(found: Samples) -> Samples:
    return {key: value for key, value in found.items() if key[0].endswith(("_total", "_count", "_bucket"))}


def test_requests_loads_and_evictions_are_in_a_scrape_that_promtool_likes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path)) as node:
            events = Events(node)
            for name in ("a", "b", "c"):
                await node.deploy(manifest(name, "stack", seed=1))
                for _ in range(2):
                    await answer(node, name, inputs(1))
                await events.until(LoadFinished)  # layers run while others arrive: an answer may come first
            found = await samples(node)
            assert total(found, "dormouse_request_duration_seconds_count") == 6
            assert total(found, "dormouse_request_duration_seconds_count", path="build") >= 3
            assert total(found, "dormouse_loads_total") == 3
            images = total(found, "dormouse_function_image_bytes")
            assert total(found, "dormouse_link_bytes_total", device="cpu:0", link="host") == images
            assert total(found, "dormouse_memory_used_bytes", tier="device") > 0
            assert total(found, "dormouse_device_unaccounted_bytes") == 0
            await node.unload("a")
            assert total(await samples(node), "dormouse_evictions_total", function="a") == 1
            assert complaints((await scraped(node)).text) == ""

    run(scenario())


def test_a_name_keeps_its_counts_and_a_removed_one_leaves_them_to_its_owner_s_sum(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path)) as node:
            owned = msgspec.structs.replace(manifest("a", "stack", seed=1), tenant="acme", public=True)
            await node.deploy(owned)
            await answer(node, "a", inputs(1), tenant="acme")
            await answer(node, "a", inputs(1), tenant="globex")
            before = counts(await samples(node))
            await node.deploy(owned)
            after = counts(await samples(node))
            assert all(after[key] >= value for key, value in before.items() if dict(key[1]).get("function") == "a")
            await answer(node, "a", inputs(1), tenant="acme")
            assert total(await samples(node), "dormouse_requests_in_time_total", function="a") == 3
            await node.remove("a")
            found = await samples(node)
            assert total(found, "dormouse_requests_in_time_total", function="a") == 0
            assert total(found, "dormouse_requests_in_time_total", function=REMOVED, tenant="acme") == 2
            assert total(found, "dormouse_requests_in_time_total", function=REMOVED, tenant="globex") == 1

    run(scenario())


def test_tenants_that_asked_each_other_have_one_sum_each_of_what_is_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path)) as node:
            for name, owner in (("a", "acme"), ("b", "globex")):
                owned = msgspec.structs.replace(manifest(name, "stack", seed=1), tenant=owner, public=True)
                await node.deploy(owned)
                await answer(node, name, inputs(1), tenant="acme")
                await answer(node, name, inputs(1), tenant="globex")
                await node.remove(name)
            families = text_string_to_metric_families((await scraped(node)).text)
            found = [(each.name, tuple(sorted(each.labels.items()))) for family in families for each in family.samples]
            assert len(found) == len(set(found))
            for tenant in ("acme", "globex"):
                whose = {"function": REMOVED, "tenant": tenant}
                assert total(await samples(node), "dormouse_requests_in_time_total", **whose) == 2
                assert total(await samples(node), "dormouse_request_duration_seconds_count", **whose) == 2

    run(scenario())


def test_a_name_that_becomes_another_tenant_s_leaves_what_it_counted_to_the_former_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path)) as node:
            mine = msgspec.structs.replace(manifest("a", "stack", seed=1), tenant="acme")
            await node.deploy(mine)
            await answer(node, "a", inputs(1), tenant="acme")
            await node.deploy(msgspec.structs.replace(mine, tenant="globex"))
            found = await samples(node)
            assert total(found, "dormouse_requests_in_time_total", function=REMOVED, tenant="acme") == 1
            assert total(found, "dormouse_requests_in_time_total", function="a", tenant="globex") == 0

    run(scenario())


def test_a_restart_of_an_executor_is_counted(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with opened(small(tmp_path)) as node:
            assert total(await samples(node), "dormouse_executor_up", device="cpu:0") == 1
            events = Events(node)
            os.kill(pid_of(node), signal.SIGKILL)
            await events.until(ExecutorJoined)
            found = await samples(node)
            assert total(found, "dormouse_executor_restarts_total", device="cpu:0") == 1
            assert total(found, "dormouse_executor_up", device="cpu:0") == 1

    run(scenario())


def test_a_scrape_is_packed_for_who_takes_it_and_open_metrics_for_who_asks(tmp_path: Path) -> None:
    async def scenario() -> tuple[httpx.Response, httpx.Response]:
        async with opened(small(tmp_path)) as node:
            return await asyncio.gather(
                scraped(node, **{"Accept-Encoding": "gzip"}),
                scraped(node, Accept="application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"),
            )

    packed, open_metrics = run(scenario())
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert open_metrics.text.endswith("# EOF\n")
