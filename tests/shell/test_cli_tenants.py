"""The command line where keys matter: `dormouse keys`, keys for the other commands, and starts that are refused."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dormouse.submit import Owner
from dormouse.tenants.callers import Caller
from dormouse.tenants.keyfile import KeyFile
from dormouse.tenants.keyring import Keyring
from dormouse.tenants.keys import PREFIX, digest_of, parse_digest
from tests.shell.running import RunningServer, running
from tests.shell.tenanted import ACME, ADMIN, INNER, MINE, THEIRS, UNKNOWN, Kept, furnish
from tests.shell.test_cli import run

Dormouse = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(gate=Kept(tmp_path_factory.mktemp("state")).gate) as server:
        yield server


@pytest.fixture
def server(served: RunningServer) -> RunningServer:
    furnish(served.node)
    return served


@pytest.fixture
def dormouse(server: RunningServer) -> Dormouse:
    def run_there(key: str, *arguments: str) -> tuple[int, str]:
        return run(*arguments, "--key", key, server=server.url)

    return run_there


# ------------------------------------------------------------------ keys


def test_keys_are_made_listed_and_revoked(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    ring = Keyring({}, KeyFile(tmp_path / "state"))
    status, output = run("keys", "create", "--tenant", "acme", "--name", "their CI", *state)
    assert status == 0
    said, key = output.splitlines()
    assert key.startswith(PREFIX)
    assert said.endswith("for tenant acme; it is not shown again")
    assert ring.find(key.encode()) == Caller("acme")

    _, output = run("keys", "create", "--admin", *state)
    assert "for the server (admin)" in output
    assert ring.find(output.splitlines()[1].encode()) == Caller("", admin=True)

    _, listed = run("keys", "list", *state)
    head, first, second = listed.splitlines()
    assert head.split() == ["ID", "TENANT", "ADMIN", "CREATED", "NAME"]
    assert first.split()[1:] == ["acme", time.strftime("%Y-%m-%d"), first.split()[3], "their", "CI"]
    assert "yes" in second
    assert key not in listed

    records = json.loads(run("keys", "list", "--json", *state)[1])["keys"]
    assert [(each["tenant"], each["admin"]) for each in records] == [("acme", False), ("", True)]
    assert "digest" not in records[0]

    key_id = records[0]["id"]
    assert run("keys", "revoke", key_id, *state) == (0, f"revoked key {key_id} of tenant acme\n")
    assert ring.find(key.encode()) is None
    status, output = run("keys", "revoke", key_id, *state)
    assert (status, output.count("\n")) == (2, 1)
    assert f"there is no key '{key_id}'" in output


def test_a_key_for_a_file_is_printed_with_its_hash() -> None:
    key, digest = run("keys", "make")[1].splitlines()
    assert parse_digest(digest) == digest_of(key.encode())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "whose key is it? say --tenant NAME, or --admin"),
        (("--tenant", "a b"), "tenant = 'a b' cannot be used"),
        (("--admin", "--name", "a\nb"), "name = 'a\\nb' cannot be used"),
    ],
)
def test_a_key_that_cannot_be_made_is_one_line(tmp_path: Path, arguments: tuple[str, ...], complaint: str) -> None:
    status, output = run("keys", "create", *arguments, "--state-dir", str(tmp_path))
    assert (status, output.count("\n")) == (2, 1)
    assert complaint in output
    assert KeyFile(tmp_path).records() == ()


# ------------------------------------------------------------------ commands with a key


def test_a_tenant_sees_its_functions_and_no_node(dormouse: Dormouse) -> None:
    status, output = dormouse(ACME, "ps")
    assert status == 0
    assert MINE in output
    assert not any(text in output for text in (THEIRS, INNER, "cpu:0", "inside their SLO"))
    assert json.loads(dormouse(ACME, "ps", "--json")[1])["node"] is None
    assert "inside their SLO" in dormouse(ADMIN, "ps")[1]


def test_the_key_may_come_from_the_environment(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    status, output = run("ps", server=server.url)
    assert (status, output) == (
        1,
        "error: a key is needed here; send it as `Authorization: Bearer KEY`, or as `x-api-key: KEY`\n",
    )
    monkeypatch.setenv("DORMOUSE_KEY", ACME)
    assert run("ps", server=server.url)[0] == 0


def test_what_a_tenant_may_not_do_is_one_line(dormouse: Dormouse) -> None:
    assert dormouse(ACME, "rm", MINE)[1] == (
        "error: removing a function needs an admin key; the key given is one of tenant 'acme'\n"
    )
    answers = [dormouse(ACME, "unload", name) for name in (THEIRS, UNKNOWN)]
    assert answers == [(1, f"error: no function '{name}'\n") for name in (THEIRS, UNKNOWN)]


@pytest.mark.parametrize("key", ["ä", "a\nb"])
def test_what_is_no_key_is_one_line(dormouse: Dormouse, key: str) -> None:
    status, output = dormouse(key, "ps")
    assert (status, output.count("\n")) == (2, 1)
    assert "key cannot be used" in output


def test_a_deploy_says_whose_a_function_is_and_who_may_call_it(
    dormouse: Dormouse, server: RunningServer, tmp_path: Path
) -> None:
    assert dormouse(ADMIN, "deploy", "arithmetic:affine", "--name", "a", "--tenant", "acme", "--public")[0] == 0
    assert server.node.owner("a") == Owner("acme", public=True)
    file = tmp_path / "b.toml"
    file.write_text('name = "b"\nsource = "arithmetic:affine"\ntenant = "globex"\npublic = true\n')
    assert dormouse(ADMIN, "deploy", str(file))[0] == 0
    assert server.node.owner("b") == Owner("globex", public=True)
    assert dormouse(ADMIN, "deploy", str(file), "--private", "--tenant", "acme")[0] == 0
    assert server.node.owner("b") == Owner("acme", public=False)
    status, output = dormouse(ADMIN, "deploy", "arithmetic:affine", "--name", "c", "--tenant", "a b")
    assert (status, "tenant = 'a b' cannot be used" in output) == (2, True)


# ------------------------------------------------------------------ starts that are refused


def refused(*arguments: str) -> str:
    status, output = run("serve", "--port", "0", "--device", "cpu", *arguments)
    assert status == 2
    assert output.count("\n") == 1
    return output


def test_a_server_beyond_loopback_needs_an_admin_key_or_to_be_told_otherwise(tmp_path: Path) -> None:
    output = refused("--host", "0.0.0.0", "--state-dir", str(tmp_path))
    assert "on 0.0.0.0 callers need keys, and there is no admin key" in output
    assert f"`dormouse keys create --admin --state-dir {tmp_path}`" in output
    assert "--no-auth" in output


def test_a_file_of_tenants_that_cannot_be_used_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "tenants.toml"
    file.write_text("[tenants.acme]\n\nrate = -1\n")
    assert f"error: {file}:3: rate = -1.0 cannot be used" in refused(
        "--tenants", str(file), "--state-dir", str(tmp_path)
    )


def test_a_damaged_key_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "keys.json").write_text("{")
    assert f"error: {tmp_path}/keys.json is damaged" in refused("--state-dir", str(tmp_path))


def test_an_admin_key_that_is_too_short_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DORMOUSE_ADMIN_KEY", "secret")
    output = refused("--state-dir", str(tmp_path))
    assert "DORMOUSE_ADMIN_KEY cannot be used" in output
    assert "secret" not in output


def test_certificates_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path))
    assert "tls_key beside it" in refused("--tls-cert", "cert.pem", *state)
    file = tmp_path / "cert.pem"
    file.touch()
    assert f"tls_cert = '{file}' is no certificate" in refused("--tls-cert", str(file), "--tls-key", str(file), *state)
