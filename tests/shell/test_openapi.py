"""The OpenAPI document: it has every route, describes every answer, and nothing made from it brings a 500.

``DORMOUSE_FUZZ`` says how many requests are made up; `make fuzz` makes 5,000.
"""

import asyncio
import math
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.generation import GenerationMode
from starlette.routing import Route

from dormouse.gateway.access import OPEN_PATHS
from dormouse.gateway.admin import Admin
from dormouse.gateway.bodies import LENGTH_HEADER
from dormouse.gateway.dashboard import EVENTS, Dashboard
from dormouse.gateway.encoding import BINARY_ONLY
from dormouse.gateway.openapi import document
from dormouse.gateway.scrape import Scrape
from dormouse.gateway.v1 import GENERATING, V1
from dormouse.gateway.v2 import V2
from dormouse.metrics.exposition import Exposition
from dormouse.tenants.gate import KEY_HEADERS
from tests.shell.in_memory import PROGRAMS, furnished
from tests.shell.running import BODY_LIMIT_BYTES, RunningServer, running
from tests.shell.tenanted import ACME, ADMIN, OWNERS, Kept, bearer, furnish

IN_CI = 400
"""Always the same ones."""
WANTED = int(os.environ.get("DORMOUSE_FUZZ", IN_CI))
WEIGHT = 5
DOCUMENTED = (503, 504, 507)


def _documented(path: str) -> tuple[int, ...]:
    """Statuses above 499 that are no fault."""
    return (501,) if path in GENERATING else DOCUMENTED


KNOWN = sorted(PROGRAMS.keys() - {"fault"})
"""Functions that do not fail on purpose."""


def test_every_route_is_in_the_document_and_the_other_way_round() -> None:
    node = furnished()
    doors = (
        V2(node, BODY_LIMIT_BYTES),
        V1(node, BODY_LIMIT_BYTES),
        Admin(node, BODY_LIMIT_BYTES),
        Dashboard(node, asyncio.Event()),
        Scrape(node, Exposition(Counter())),
    )
    table = {path: methods for door in doors for path, methods in door.routes().items()}
    routes = {(path, method.lower()) for path, methods in table.items() for method in methods}
    described = {
        (path, method)
        for path, operations in document()["paths"].items()
        for method in operations.keys() - {"parameters"}
    }
    assert described - routes == {("/openapi.json", "get")}
    assert not routes - described


def test_it_is_served_and_is_valid(server: RunningServer) -> None:
    served = requests.get(f"{server.url}/openapi.json", timeout=30).json()
    schemathesis.openapi.from_dict(served).validate()
    assert served["paths"].keys() == document()["paths"].keys()


def test_paths_are_those_that_the_router_reads() -> None:
    for path in document()["paths"]:
        named = {parameter["name"] for parameter in document()["paths"][path]["parameters"]}
        assert named == Route(path, lambda _: None).param_convertors.keys()


def test_exactly_the_paths_that_need_no_key_say_so() -> None:
    paths = document()["paths"].items()
    open_paths = {
        path
        for path, methods in paths
        if any(each.get("security") == [] for each in methods.values() if isinstance(each, dict))
    }
    assert open_paths == OPEN_PATHS


# ------------------------------------------------------------------ made-up requests


SCHEMA = schemathesis.openapi.from_dict(document())
OPERATIONS = [each for result in SCHEMA.get_all_operations() if (each := result.ok()).path != EVENTS]
"""All but the one whose answer does not end: tests of the dashboard read that."""
MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]
VARIED = [each for each in OPERATIONS if each.body or each.path_parameters]
"""Operations of which there is more than one request."""
CHECKED = (
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[RunningServer]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def asked() -> Counter[tuple[str, int]]:
    """Requests by operation and status."""
    return Counter()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as session:
        yield session


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_no_request_whatever_is_answered_otherwise_than_documented(
    operation: Any,
    mode: GenerationMode,
    fuzzed: RunningServer,
    session: requests.Session,
    asked: Counter[tuple[str, int]],
) -> None:
    if operation not in VARIED and mode is GenerationMode.NEGATIVE:
        return  # nothing in it could be wrong
    load_all_checks()
    checks = CHECKS.get_by_names(CHECKED)
    count = max(1, -(-WANTED // (len(VARIED) * len(MODES)))) if operation in VARIED else 1

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        case=operation.as_strategy(generation_mode=mode), known=st.none() | st.sampled_from(KNOWN), whole=st.booleans()
    )
    def ask(case: Any, known: str | None, whole: bool) -> None:
        fuzzed.node.furnish()
        if known is not None:
            make_known(case, known, whole=whole)
        response = case.call(base_url=fuzzed.url, session=session)
        documented = _documented(case.path)
        assert response.status_code < 500 or response.status_code in documented, response.text
        case.validate_response(response, checks=checks)
        asked[operation.label, response.status_code] += 1

    ask()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(Kept(tmp_path_factory.mktemp("state")).gate) as server:
        yield server


@pytest.mark.parametrize("key", ["", ACME, ADMIN])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_a_server_that_asks_for_keys_answers_as_documented_too(
    operation: Any, key: str, kept: RunningServer, session: requests.Session
) -> None:
    load_all_checks()
    checks = CHECKS.get_by_names(CHECKED)

    @settings(max_examples=4, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(), known=st.none() | st.sampled_from(sorted(OWNERS)))
    def ask(case: Any, known: str | None) -> None:
        furnish(kept.node, "affine")
        if known is not None and "name" in case.path_parameters:
            case.path_parameters["name"] = known
        for header in [name for name in case.headers if name.lower() in KEY_HEADERS]:
            del case.headers[header]
        response = case.call(base_url=kept.url, session=session, headers=bearer(key) if key else {})
        assert response.status_code < 500 or response.status_code in _documented(case.path), response.text
        assert (response.status_code == 401) == (not key and case.path not in OPEN_PATHS)
        case.validate_response(response, checks=checks)

    ask()


def share_of(operation: Any) -> int:
    """How many requests of an operation are made up in each mode: most of those that have most in them."""
    if operation not in VARIED:
        return 1
    shares = sum(WEIGHT if each.label.endswith("infer") else 1 for each in VARIED)
    return -(-WANTED * (WEIGHT if operation.label.endswith("infer") else 1) // (shares * len(MODES)))


def make_known(case: Any, name: str, *, whole: bool) -> None:
    """Point a made-up request at a function that exists, and ``whole`` make the rest of it one that it takes: made-up
    requests alone would not get far."""
    for parameter, value in {"name": name, "version": "1"}.items():
        if parameter in case.path_parameters:
            case.path_parameters[parameter] = value
    if whole and isinstance(case.body, dict):
        if case.path.endswith("/infer"):
            case.body["inputs"] = [VALID[name]]
            case.body.pop("outputs", None)
            case.headers.pop(LENGTH_HEADER, None)
        elif case.path in BODIES:
            case.body = BODIES[case.path]
        elif case.path.startswith("/dormouse"):
            case.body = {"name": name, "source": f"arithmetic:{name}"}


def valid_input(name: str) -> dict[str, Any]:
    (spec,) = PROGRAMS[name][1].inputs
    shape = [3 if dimension == -1 else dimension for dimension in spec.shape]
    element: Any = {"BYTES": "text", "BOOL": True}.get(spec.datatype, 1)
    given = {"name": spec.name, "datatype": spec.datatype, "shape": shape}
    return given if spec.datatype in BINARY_ONLY else given | {"data": [element] * math.prod(shape)}


BODIES = {
    "/v1/embeddings": {"model": "embedder", "input": ["nuts", "all winter"]},
    "/v1/classify": {"model": "reader", "input": "a dormouse"},
}
VALID = {name: valid_input(name) for name in KNOWN}


def test_the_made_up_requests_went_everywhere(asked: Counter[tuple[str, int]]) -> None:
    """Runs after them. Each operation has done what it is for, and has refused."""
    if not asked:
        pytest.skip("only this test was asked for")
    assert asked.total() >= WANTED
    served = {_of_any_version(label) for label, status in asked if status < 300}
    unserved = {_of_any_version(operation.label) for operation in OPERATIONS} - served
    unserved -= {f"POST {path}" for path in GENERATING}
    assert len(unserved) <= (2 if WANTED == IN_CI else 0), unserved  # a few requests may all be wrong ones
    refused = {label for label, status in asked if 400 <= status < 500}
    assert refused >= {operation.label for operation in VARIED if operation.path_parameters}


def _of_any_version(label: str) -> str:
    return label.replace("/versions/{version}", "")


def test_the_server_still_serves_after_all_that(fuzzed: RunningServer, session: requests.Session) -> None:
    request: Any = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}
    answer = session.post(f"{fuzzed.url}/v2/models/affine/infer", json=request, timeout=30)
    assert answer.json()["outputs"][0]["data"] == [3, 5, 7]
