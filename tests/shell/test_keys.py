"""Keys: made, kept as hashes, known at once to who serves, revoked at once; and files that cannot be used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import ConfigurationFault
from dormouse.tenants.callers import Caller
from dormouse.tenants.declared import line_of, read
from dormouse.tenants.gate import KeptGate, OpenGate
from dormouse.tenants.keyfile import FILE, KeyFile
from dormouse.tenants.keyring import Keyring, admin_key_of
from dormouse.tenants.keys import PREFIX, digest_of, new_key, parse_digest, shown
from dormouse.tenants.limits import NO_LIMITS, Limits
from dormouse.tenants.opening import gate_of, is_loopback

ADMIN = Caller("", admin=True)
DIGEST = shown(digest_of(b"some key"))


def test_a_key_is_long_random_and_known_by_its_beginning() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith(PREFIX) and len(key) == len(PREFIX) + 64 for key in keys)


def test_a_digest_is_read_as_it_is_written() -> None:
    digest = digest_of(b"x")
    assert parse_digest(shown(digest)) == parse_digest(digest.hex().upper()) == digest
    assert parse_digest(new_key()) is None


# ------------------------------------------------------------------ the file of the state directory


def test_a_key_is_known_as_soon_as_it_is_made_and_no_more_as_soon_as_it_is_revoked(tmp_path: Path) -> None:
    file = KeyFile(tmp_path)
    ring = Keyring({}, file)
    assert ring.is_empty()
    for number in range(30):  # quickly one after the other: the file's time has to tell them apart
        key, record = file.create(f"t{number}", admin=number % 2 == 0, name="")
        assert ring.find(key.encode()) == Caller(f"t{number}", number % 2 == 0)
        file.revoke(record.id)
        assert ring.find(key.encode()) is None
    assert ring.is_empty()


def test_neither_the_file_nor_its_readers_have_the_key(tmp_path: Path) -> None:
    key, record = KeyFile(tmp_path).create("acme", admin=False, name="ci")
    assert key not in (tmp_path / FILE).read_text()
    assert key[len(PREFIX) :] not in (tmp_path / FILE).read_text()
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert KeyFile(tmp_path).records() == (record,)
    assert (record.tenant, record.name, record.admin) == ("acme", "ci", False)


def test_keys_made_by_several_at_once_are_all_there(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from dormouse.tenants.keyfile import KeyFile\n"
        "for n in range(20): KeyFile(Path(sys.argv[1])).create('t', admin=False, name='')"
    )
    makers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) for _ in range(3)]
    assert [maker.wait(timeout=60) for maker in makers] == [0, 0, 0]
    assert len({record.id for record in KeyFile(tmp_path).records()}) == 60


def test_a_key_that_is_not_there_cannot_be_revoked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault, match=r"there is no key 'nothing' in .*keys.json; see `dormouse keys list`"):
        KeyFile(tmp_path).revoke("nothing")


@pytest.mark.parametrize(
    "text",
    ["{", '{"keys": 5}', '{"keys": [{"id": "a"}]}', '{"keys": [{"id": "a", "digest": "short"}]}', "\xff"],
)
def test_a_damaged_file_is_refused_at_start_by_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigurationFault, match=r"keys.json is damaged [^\n]*$"):
        Keyring({}, KeyFile(tmp_path))


def test_a_file_damaged_while_the_server_runs_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KeyFile(tmp_path)
    key, _ = file.create("acme", admin=False, name="")
    ring = Keyring({}, file)
    (tmp_path / FILE).write_text("{")
    assert ring.find(key.encode()) == Caller("acme")
    assert ring.find(key.encode()) == Caller("acme")
    assert [record.message.partition(":")[0] for record in caplog.records] == ["keys stay as they were"], "said once"
    (tmp_path / FILE).unlink()
    assert ring.find(key.encode()) is None


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationFault, match=r"file cannot be written: "):
        KeyFile(tmp_path / "file").create("acme", admin=False, name="")


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(ConfigurationFault, match=r"keys.json cannot be read: Is a directory"):
        KeyFile(tmp_path).records()


# ------------------------------------------------------------------ the environment


def test_the_environment_gives_an_admin_key_and_executors_do_not_inherit_it(tmp_path: Path) -> None:
    key = new_key()
    environment = {"DORMOUSE_ADMIN_KEY": key, "PATH": "x"}
    gate = gate_of(tmp_path, None, environment, required=None, address="0.0.0.0")
    assert gate.caller_of({"x-api-key": key}) == ADMIN
    assert environment == {"PATH": "x"}


@pytest.mark.parametrize("key", ["short", "a" * 31, "a" * 600, "a" * 20 + " " + "b" * 20, "ä" * 40, "a\n" * 40])
def test_an_admin_key_that_is_none_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigurationFault, match="DORMOUSE_ADMIN_KEY cannot be used; expected 32 to 512") as caught:
        admin_key_of({"DORMOUSE_ADMIN_KEY": key})
    assert key not in caught.value.message


def test_no_admin_key_is_none() -> None:
    assert admin_key_of({}) == admin_key_of({"DORMOUSE_ADMIN_KEY": ""}) == {}


# ------------------------------------------------------------------ which gate


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.7", "fe80::1%eth0"])
def test_beyond_loopback_a_server_without_admin_key_does_not_start(tmp_path: Path, address: str) -> None:
    for key_of_a_tenant in (False, True):
        if key_of_a_tenant:
            KeyFile(tmp_path).create("acme", admin=False, name="")
        with pytest.raises(ConfigurationFault, match=r"`dormouse keys create --admin .*--no-auth$") as caught:
            gate_of(tmp_path, None, {}, required=None, address=address)
        assert "\n" not in caught.value.message
    assert isinstance(gate_of(tmp_path, None, {}, required=False, address=address), OpenGate)
    KeyFile(tmp_path).create("", admin=True, name="")
    assert isinstance(gate_of(tmp_path, None, {}, required=None, address=address), KeptGate)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "127.8.8.8"])
def test_on_loopback_a_server_asks_for_keys_where_there_are_any(tmp_path: Path, address: str) -> None:
    assert is_loopback(address)
    assert isinstance(gate_of(tmp_path, None, {}, required=None, address=address), OpenGate)
    with pytest.raises(ConfigurationFault, match="there is no admin key"):
        gate_of(tmp_path, None, {}, required=True, address=address)
    KeyFile(tmp_path).create("", admin=True, name="")
    assert isinstance(gate_of(tmp_path, None, {}, required=None, address=address), KeptGate)
    assert isinstance(gate_of(tmp_path, None, {}, required=False, address=address), OpenGate)


# ------------------------------------------------------------------ a file of tenants


def declared(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "tenants.toml"
    file.write_text(text)
    return file


def test_a_file_gives_keys_and_limits(tmp_path: Path) -> None:
    mine, other, root = new_key(), new_key(), new_key()
    digests = [shown(digest_of(key.encode())) for key in (mine, other, root)]
    text = f"""
[default]
rate = 10
concurrency = 4
[server]
admin_keys = ["{digests[2]}"]
[tenants.acme]
rate = 50
burst = 100
keys = ["{digests[0]}"]
admin_keys = ["{digests[1]}"]
[tenants."b.c"]
concurrency = 1
"""
    found = read(declared(tmp_path, text))
    assert found.limits_of("acme") == Limits(50, 100, 4)
    assert found.limits_of("b.c") == Limits(10, None, 1)
    assert found.limits_of("nobody") == Limits(10, None, 4)
    assert found.limits_of("") == NO_LIMITS
    ring = Keyring(found.callers, KeyFile(tmp_path))
    callers = [ring.find(key.encode()) for key in (mine, other, root)]
    assert callers == [Caller("acme"), Caller("acme", admin=True), ADMIN]


def test_the_file_of_the_documents_can_be_used(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "tenants.md").read_text()
    text = document.partition("```toml\n")[2].partition("```")[0].replace("sha256:...", DIGEST)
    found = read(declared(tmp_path, text))
    assert found.limits_of("acme") == Limits(50, 100, 8)
    assert found.limits_of("others") == Limits(concurrency=64)
    assert list(found.callers.values()) == [Caller("acme")]


def test_a_rate_of_ones_own_does_not_keep_the_burst_of_all(tmp_path: Path) -> None:
    found = read(declared(tmp_path, "[default]\nrate = 10\nburst = 90\n[tenants.a]\nrate = 5\n[tenants.b]\n"))
    assert (found.limits_of("a"), found.limits_of("b")) == (Limits(5, None), Limits(10, 90))


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("[tenants.a]\nrate = \n", 2, "Invalid value"),
        ("[tenants.a]\n\n\nrate = 'fast'\n", 4, "rate: Expected `float | null`, got `str`"),
        ("[tenants.a]\nrate = 5\n[tenants.b]\nconcurrency = 1\nrate = -1\n", 5, "rate = -1.0 cannot be used"),
        ("[tenants.a]\nrate = 5\n[tenants.b]\nrats = 1\n", 4, "there is no such setting: rats"),
        ("[tenants.a]\nkeys = [\n 'sha256:1'\n]\n", 2, "keys: expected sha256:... of keys, as `dormouse keys make`"),
        ("[tenants.a]\nkeys = ['" + "a" * 64 + "', 5]\n", 2, "keys: Expected `str`, got `int`"),
        ("tenants.a.burst = 5\n", 1, "burst = 5 cannot be used; expected a rate beside it"),
        ("\ntenants = 5\n", 2, "expected tables, one [tenants.NAME] for each"),
        ("[tenants]\na = 5\n", 2, "Expected `object`, got `int`"),
        ("[tenants.'a b']\nrate = 5\n", 1, "tenant 'a b': a name has letters"),
        ("\n\n[tenant.a]\nrate = 5\n", 3, "there is no such table; expected [default], [tenants.NAME] or [server]"),
        (
            "[default]\nconcurrency = 0\n",
            2,
            "concurrency = 0 cannot be used; expected 1 to 1e+06 requests open",
        ),
        ("[server]\nkeys = []\n", 2, "there is no such setting: keys"),
        (f"[tenants.a]\nkeys = ['{DIGEST}']\n[tenants.b]\nkeys = ['{DIGEST}']\n", 4, "one of these keys is somebody"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_line(
    tmp_path: Path, text: str, line: int, complaint: str
) -> None:
    file = declared(tmp_path, text)
    with pytest.raises(ConfigurationFault) as caught:
        read(file)
    assert caught.value.message.startswith(f"{file}:{line}:"), caught.value.message
    assert complaint in caught.value.message
    assert "\n" not in caught.value.message


def test_a_key_written_where_its_hash_belongs_is_not_repeated(tmp_path: Path) -> None:
    key = new_key()
    with pytest.raises(ConfigurationFault) as caught:
        read(declared(tmp_path, f"[tenants.a]\nkeys = ['{key}']\n"))
    assert key not in caught.value.message


def test_a_file_that_is_not_there_or_no_text_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault, match=r"nowhere.toml cannot be read: No such file"):
        read(tmp_path / "nowhere.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationFault, match=r"bytes.toml is no text"):
        read(tmp_path / "bytes.toml")


values = st.integers(0, 9).map(str) | st.just("[\n 1,\n 2,\n]") | st.just('"""\na\n"""') | st.just("{ x = 1 }")


@given(st.lists(st.tuples(st.booleans(), values), min_size=1, max_size=12), st.data())
def test_the_line_of_every_value_is_found(items: list[tuple[bool, str]], data: st.DataObject) -> None:
    lines: list[str] = []
    begins, table = {}, ""
    for number, (opens, value) in enumerate(items):
        if opens or not table:
            table = f"t{number}"
            lines += ["", f"[tenants.{table}]  # of {number}"]
        begins["tenants", table, f"k{number}"] = len(lines) + 1
        lines += f"k{number} = {value}".split("\n")
    path = data.draw(st.sampled_from(sorted(begins)))
    assert line_of(os.linesep.join(lines), path) == begins[path]
