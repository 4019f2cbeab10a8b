"""A server as the command line sees it: its address, and one method a question. Failures become DormouseErrors."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from dormouse.errors import ConfigurationFault, DormouseError
from dormouse.functions import Manifest
from dormouse.tls import trusted
from dormouse.watch.changes import applied
from dormouse.watch.picture import Picture

Decoded = TypeVar("Decoded")

DEFAULT_SERVER = "http://127.0.0.1:8000"
SILENCE_S = 30.0
"""A stream of events says something every ten."""
LENGTH_HEADER = "Inference-Header-Content-Length"


class Refused(DormouseError):
    """What the server answered instead of what was asked for."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Server:
    """Talks to one server. Deploying and waking large models takes as long as it takes: no timeout but connecting's."""

    def __init__(self, address: str, key: str = "", ca: Path | None = None) -> None:
        self._address = address if "://" in address else f"http://{address}"
        try:
            url = httpx.URL(self._address)
        except httpx.InvalidURL as fault:
            raise ConfigurationFault(f"server = {address!r} is no address: {fault}") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigurationFault(f"server = {address!r} is no address; expected one like {DEFAULT_SERVER}")
        if not key.isascii() or not key.isprintable():
            raise ConfigurationFault("key cannot be used: there are characters in it that no key has")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        timeout = httpx.Timeout(None, connect=10)
        self._http = httpx.Client(base_url=url, timeout=timeout, trust_env=False, headers=headers, verify=trusted(ca))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def functions(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._json("GET", "/dormouse/functions")["functions"]
        return rows

    def node(self) -> dict[str, Any]:
        return self._json("GET", "/dormouse/node")

    def picture(self) -> Picture:
        """All that the dashboard shows, as it is now."""
        return self._decoded(self._send("GET", "/dormouse/picture", b"", {}).content, Picture)

    def watch(self) -> Iterator[Picture]:
        """Pictures as they change, until the server stops or goes away, which raises DormouseError."""
        with self._asked("the server stopped") as answer:
            picture: Picture | None = None
            event = ""
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if name == "event":
                    event = value
                elif name == "data" and event == "picture":
                    picture = self._decoded(value.encode(), Picture)
                    yield picture
                elif name == "data" and event == "changes" and picture is not None:
                    picture = applied(picture, self._decoded(value.encode(), dict[str, Any]))
                    yield picture

    @contextmanager
    def _asked(self, ending: str) -> Iterator[httpx.Response]:
        """A stream of events. Raises DormouseError when it ends."""
        timeout = httpx.Timeout(SILENCE_S, connect=10)
        try:
            with self._http.stream("GET", "/dormouse/events", timeout=timeout) as answer:
                if answer.is_error:
                    answer.read()
                    raise Refused(answer.status_code, _complaint(answer))
                yield answer
        except httpx.ConnectError as fault:
            raise self._unreachable(fault) from None
        except httpx.HTTPError as fault:
            raise DormouseError(f"the server at {self._address} went away: {fault}") from None
        raise DormouseError(f"{ending}: {self._address}")

    def deploy(self, manifest: Manifest) -> str:
        return str(self._json("POST", "/dormouse/functions", msgspec.json.encode(manifest))["version"])

    def check(self, manifest: Manifest) -> dict[str, Any]:
        return self._json("POST", "/dormouse/check", msgspec.json.encode(manifest))

    def remove(self, name: str) -> None:
        self._json("DELETE", f"/dormouse/functions/{quote(name, safe='')}")

    def load(self, name: str) -> None:
        self._json("POST", f"/v2/repository/models/{quote(name, safe='')}/load")

    def unload(self, name: str) -> None:
        self._json("POST", f"/v2/repository/models/{quote(name, safe='')}/unload")

    def metadata(self, name: str) -> dict[str, Any]:
        return self._json("GET", f"/v2/models/{quote(name, safe='')}")

    def infer(self, name: str, head: bytes, tails: bytes) -> tuple[dict[str, Any], memoryview]:
        """One V2 request; the answer's JSON, and the raw bytes behind it."""
        headers = {LENGTH_HEADER: str(len(head))} if tails else {}
        answer = self._send("POST", f"/v2/models/{quote(name, safe='')}/infer", head + tails, headers)
        body = memoryview(answer.content)
        length = int(answer.headers.get(LENGTH_HEADER, len(body)))
        return msgspec.json.decode(body[:length], type=dict[str, Any]), body[length:]

    def _json(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        return self._decoded(self._send(method, path, body, {}).content, dict[str, Any])

    def _decoded(self, content: bytes, kind: type[Decoded]) -> Decoded:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.DecodeError:
            raise DormouseError(f"what answers at {self._address} is no dormouse server") from None

    def _send(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> httpx.Response:
        try:
            answer = self._http.request(method, path, content=body, headers=dict(headers))
        except httpx.ConnectError as fault:
            raise self._unreachable(fault) from None
        except httpx.HTTPError as fault:
            raise DormouseError(f"the server at {self._address} went away: {fault}") from None
        if answer.is_error:
            raise Refused(answer.status_code, _complaint(answer))
        return answer

    def _unreachable(self, fault: httpx.ConnectError) -> DormouseError:
        if "CERTIFICATE_VERIFY_FAILED" in str(fault):
            return DormouseError(
                f"the certificate of {self._address} is not trusted; name the one that signed it with --ca"
            )
        return DormouseError(
            f"no server answers at {self._address}; start one with `dormouse serve`, or name another with --server"
        )


def _complaint(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return f"the server answered {answer.status_code} {answer.reason_phrase}"
