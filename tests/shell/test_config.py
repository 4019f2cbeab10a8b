"""Settings: sizes, sources and their order, what is kept, and complaints that name key and value."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.config import FOR_ONE_START, GIB, MIB, SETTINGS_FILE, Config, configure, missing_code, parse_size, save
from dormouse.errors import ConfigurationFault


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 * MIB),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * GIB // 2),
        ("64 KiB", 65536),
        ("1kB", 1000),
        ("7", 7),
        ("7B", 7),
        ("3M", 3 * 10**6),
        ("12GB/s", 12 * 10**9),
        ("1TiB", 1024 * GIB),
    ],
)
def test_a_size_has_a_unit(text: str, size_bytes: int) -> None:
    assert parse_size("host_bytes", text) == size_bytes


@pytest.mark.parametrize("text", ["", "lots", "-1", "1XiB", "1.5.5G", "1e9", "GiB", "1 2", "0x10", "1iB", "9" * 400])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigurationFault, match=r"^host_bytes = .* is no size; write 512MiB"):
        parse_size("host_bytes", text)


@given(st.integers(0, 2**50))
def test_plain_bytes_are_exact(size_bytes: int) -> None:
    assert parse_size("k", str(size_bytes)) == size_bytes


def test_flags_go_over_the_file_over_the_last_start_over_defaults(tmp_path: Path) -> None:
    state = tmp_path / "state"
    save(configure(state, {"port": 1, "threads": 1, "host_bytes": "1GiB"}))
    file = tmp_path / "serve.toml"
    file.write_text('port = 2\nthreads = 2\ndevice_bytes = "64MiB"\n')
    config = configure(state, {"port": 3}, file)
    assert (config.port, config.threads, config.host_bytes, config.device_bytes, config.queue_length) == (
        3,
        2,
        GIB,
        64 * MIB,
        10_000,
    )


def test_every_setting_survives_a_restart(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    first = configure(
        tmp_path / "state",
        {
            "host": "::1",
            "port": 9,
            "grpc_port": "off",
            "device": "cuda:1",
            "device_bytes": "64MiB",
            "chunk_bytes": "4MiB",
            "group_bytes": "2MiB",
            "link_bytes_per_s": "12GB/s",
            "host_bytes": "1GiB",
            "request_slab_bytes": "9MiB",
            "reply_slab_bytes": "8MiB",
            "body_limit_bytes": "7MiB",
            "tenants": tmp_path / "tenants.toml",
            "tls_cert": tmp_path / "cert.pem",
            "tls_key": tmp_path / "key.pem",
            "head_timeout_s": 3.0,
            "body_timeout_s": 4.0,
            "connections": 5,
            "image_pixels": 1000,
            "queue_length": 6,
            "allow_code": (code,),
            "threads": 5,
            "graphs": "off",
            "policy": "torpor",
            "shed": "late",
            "routes": "peer",
            "calibrate": "off",
            "images": "dram",
            "ledger": "off",
            "ledger_sync": "power",
            "journal": tmp_path / "journal",
            "log_format": "json",
            "log_level": "debug",
            "log_requests": True,
            "log_slow_ms": 50.0,
        },
    )
    save(first)
    assert configure(tmp_path / "state", {}) == first
    changed = set(msgspec.structs.asdict(first).items()) - set(msgspec.structs.asdict(Config(Path("s"))).items())
    assert {key for key, _ in changed} == set(Config.__struct_fields__) - {"faults", "poison", "auth", "tariff"}


def test_a_start_without_flags_repeats_a_start_with_them_and_reset_forgets(tmp_path: Path) -> None:
    save(configure(tmp_path, {"port": 4444, "faults": ("copy",), "poison": True}))
    again = configure(tmp_path, {})
    assert (again.port, again.faults, again.poison) == (4444, (), False)
    assert configure(tmp_path, {}, reset=True) == Config(tmp_path)
    assert not set(FOR_ONE_START) & msgspec.json.decode((tmp_path / SETTINGS_FILE).read_bytes()).keys()


def test_auto_takes_a_kept_setting_back(tmp_path: Path) -> None:
    save(configure(tmp_path, {"device_bytes": "64MiB"}))
    assert configure(tmp_path, {"device_bytes": "auto"}).device_bytes is None


@pytest.mark.parametrize("key", ["journal", "tariff", "tenants"])
def test_a_file_may_be_off(tmp_path: Path, key: str) -> None:
    save(configure(tmp_path, {key: "somewhere"}))
    for off in ("off", "auto", Path("off")):
        assert getattr(configure(tmp_path, {key: off}), key) is None
    file = tmp_path / "serve.toml"
    file.write_text(f'{key} = "off"\n')
    assert getattr(configure(tmp_path, {}, file), key) is None


def test_remembered_code_that_is_gone_is_no_reason_not_to_start(tmp_path: Path) -> None:
    code = tmp_path / "code"
    code.mkdir()
    save(configure(tmp_path, {"allow_code": [code]}))
    assert missing_code(configure(tmp_path, {})) == []
    code.rmdir()
    assert missing_code(configure(tmp_path, {"port": 5})) == [code]
    with pytest.raises(ConfigurationFault, match="expected a directory that exists"):
        configure(tmp_path, {"allow_code": [code]})


def test_a_door_left_open_is_not_remembered(tmp_path: Path) -> None:
    save(configure(tmp_path, {"auth": False, "host": "0.0.0.0"}))
    again = configure(tmp_path, {})
    assert (again.host, again.auth) == ("0.0.0.0", None)


def test_paths_in_a_file_count_from_the_file(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    file = tmp_path / "serve.toml"
    file.write_text('allow_code = ["code"]\njournal = "journal"\ntenants = "who.toml"\n')
    config = configure(tmp_path / "state", {}, file)
    assert (config.allow_code, config.journal) == ((tmp_path / "code",), tmp_path / "journal")
    assert config.tenants == tmp_path / "who.toml"


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("port", 70_000, "port = 70000 cannot be used; expected 0 to 65535"),
        ("port", -1, "port = -1 cannot be used"),
        ("port", "eighty", "port = 'eighty' cannot be used"),
        ("device", "tpu", "device = 'tpu' cannot be used; expected auto, cpu, cuda, cuda:N or several: cuda:0,cuda:1"),
        ("device", "cuda:x", "device = 'cuda:x' cannot be used"),
        ("device_bytes", "0", "device_bytes = 0 cannot be used; expected at least 1048576"),
        ("device_bytes", True, "device_bytes = True cannot be used"),
        ("host_bytes", "33TiB", "host_bytes = 36283883716608 cannot be used; expected at most 35184372088832"),
        ("reply_slab_bytes", 2**70, "reply_slab_bytes = .* cannot be used; expected at most"),
        ("threads", 10**12, "threads = 1000000000000 cannot be used; expected at most 1024"),
        ("chunk_bytes", "5000", "chunk_bytes = 5000 cannot be used; expected a multiple of 4096"),
        ("chunk_bytes", "9999999999999GiB", "chunk_bytes = .* cannot be used"),
        ("host_bytes", "auto", "host_bytes = 'auto' is no size"),
        ("host_bytes", "many", "host_bytes = 'many' is no size"),
        ("queue_length", 0, "queue_length = 0 cannot be used"),
        ("threads", -1, "threads = -1 cannot be used"),
        ("link_bytes_per_s", "0", "link_bytes_per_s = 0 cannot be used"),
        ("body_limit_bytes", "1GiB", "body_limit_bytes = 1073741824 .* at most request_slab_bytes"),
        ("head_timeout_s", 0, "head_timeout_s = 0.* cannot be used; expected seconds, more than 0 and at most 86400"),
        ("body_timeout_s", float("nan"), "body_timeout_s = nan cannot be used"),
        ("connections", 0, "connections = 0 cannot be used; expected at least 1"),
        ("connections", 10**7, "connections = 10000000 cannot be used; expected at most 1000000"),
        ("tls_cert", "cert.pem", "tls_cert = '.*cert.pem' cannot be used; expected tls_key beside it"),
        ("tls_key", "key.pem", "tls_cert = None cannot be used; expected tls_key beside it"),
        ("auth", "maybe", "auth = 'maybe' cannot be used"),
        ("host", "", "host = '' cannot be used"),
        ("allow_code", ("/no/such/directory",), "allow_code = '/no/such/directory' cannot be used"),
        ("color", "red", "color = 'red': there is no such setting"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_with_its_value(
    tmp_path: Path, key: str, value: object, complaint: str
) -> None:
    with pytest.raises(ConfigurationFault, match=complaint):
        configure(tmp_path, {"device_bytes": "1GiB", key: value})


@pytest.mark.parametrize(
    "text", ["port = ", "\x00", "allow_code = 5", "port = [1]", "nothing = 1", "a = " + "[" * 5000]
)
def test_a_file_that_cannot_be_used_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationFault) as caught:
        configure(tmp_path, {}, file)
    assert "\n" not in caught.value.message


def test_a_setting_that_is_none_is_named_with_its_file(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text("color = 'red'")
    with pytest.raises(ConfigurationFault, match=r"serve.toml: color = 'red': there is no such setting"):
        configure(tmp_path, {}, file)


def test_a_state_directory_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigurationFault, match=r"^state_dir = .* cannot be used: Not a directory"):
        configure(file, {})


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault, match=r"serve.toml cannot be read: No such file"):
        configure(tmp_path, {}, tmp_path / "serve.toml")


def test_damaged_settings_say_the_way_out(tmp_path: Path) -> None:
    (tmp_path / SETTINGS_FILE).write_text("{")
    with pytest.raises(ConfigurationFault, match=r"is damaged .*; remove it, or serve with --reset"):
        configure(tmp_path, {})
    assert configure(tmp_path, {}, reset=True) == Config(tmp_path)


def test_a_state_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationFault, match=r"state_dir = .* cannot be written"):
        save(Config(tmp_path / "file" / "state"))


@pytest.mark.parametrize(("given", "port"), [("auto", None), ("off", -1), ("-1", -1), ("0", 0), (8002, 8002)])
def test_the_grpc_port_is_a_number_or_a_word(tmp_path: Path, given: object, port: int | None) -> None:
    assert configure(tmp_path, {"grpc_port": given}).grpc_port == port


@pytest.mark.parametrize("given", ["none", "-2", 65536, 8000, 1.5])
def test_a_grpc_port_that_is_none_is_one_clear_line(tmp_path: Path, given: object) -> None:
    with pytest.raises(ConfigurationFault, match=r"^grpc_port = [^\n]* cannot be used[^\n]*$"):
        configure(tmp_path, {"grpc_port": given})
