"""TLS at both doors, from certificates made for the test; and files that cannot be used."""

import ssl
import subprocess
from pathlib import Path

import grpc
import httpx
import pytest
from msgspec import Struct

from dormouse.errors import ConfigurationFault
from dormouse.gateway.grpc_messages import INFERENCE, message
from dormouse.tls import identity
from tests.shell.running import running
from tests.shell.test_cli import run


class Files(Struct, frozen=True):
    """``cert`` is its own authority."""

    cert: Path
    key: Path


def made(directory: Path, *options: str) -> Files:
    """A certificate for the loopback address."""
    files = Files(directory / "cert.pem", directory / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    command += ["-subj", "/CN=dormouse", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command, *(options or ("-nodes",)), "-keyout", files.key, "-out", files.cert], check=True, capture_output=True
    )
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return made(tmp_path_factory.mktemp("pem"))


def test_both_doors_speak_tls_to_who_trusts_them(files: Files) -> None:
    with running(identity=identity(files.cert, files.key)) as server:
        assert server.url.startswith("https://")
        trusted = ssl.create_default_context(cafile=str(files.cert))
        assert httpx.get(f"{server.url}/v2", verify=trusted).json()["name"] == "dormouse"
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/v2")
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/v2")
        credentials = grpc.ssl_channel_credentials(files.cert.read_bytes())
        with grpc.secure_channel(server.grpc, credentials) as channel:
            call = channel.unary_unary(f"/{INFERENCE}/ServerLive")
            assert message("ServerLiveResponse").FromString(call(b"", timeout=30)).live


def test_an_older_tls_is_refused(files: Files) -> None:
    assert identity(files.cert, files.key).context.minimum_version == ssl.TLSVersion.TLSv1_2


def test_the_command_line_speaks_tls_to_what_it_is_told_to_trust(files: Files) -> None:
    with running(identity=identity(files.cert, files.key)) as server:
        status, output = run("ps", "--ca", str(files.cert), server=server.url)
        assert status == 0
        assert "affine" in output
        status, output = run("ps", server=server.url)
        assert (status, output.count("\n")) == (1, 1)
        assert f"the certificate of {server.url} is not trusted; name the one that signed it with --ca" in output
    for file, complaint in ((files.key, "there is no certificate in PEM in it"), (Path("nowhere"), "No such file")):
        status, output = run("ps", "--ca", str(file), server="https://127.0.0.1:1")
        assert (status, output.count("\n")) == (2, 1)
        assert complaint in output


def test_a_file_that_is_not_there_is_named(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationFault, match=r"^tls_cert = '.*no.pem' cannot be read: No such file"):
        identity(tmp_path / "no.pem", files.key)
    with pytest.raises(ConfigurationFault, match=r"^tls_key = '.*no.pem' cannot be read: No such file"):
        identity(files.cert, tmp_path / "no.pem")


def test_files_in_each_others_place_are_named(files: Files) -> None:
    with pytest.raises(ConfigurationFault, match=r"^tls_cert = '.*key.pem' is no certificate in PEM: [^\n]*$"):
        identity(files.key, files.key)
    with pytest.raises(ConfigurationFault, match=r"^tls_key = '.*cert.pem' is no private key in PEM that fits"):
        identity(files.cert, files.cert)


@pytest.mark.parametrize(
    "junk", [b"", b"\xff\xfe", b"-----BEGIN CERTIFICATE-----\nnothing\n-----END CERTIFICATE-----\n"]
)
def test_junk_is_named(files: Files, tmp_path: Path, junk: bytes) -> None:
    file = tmp_path / "junk.pem"
    file.write_bytes(junk)
    with pytest.raises(ConfigurationFault, match=r"^tls_cert = '.*junk.pem' is no certificate in PEM: [^\n]+$"):
        identity(file, files.key)
    with pytest.raises(ConfigurationFault, match=r"^tls_key = '.*junk.pem' is no private key in PEM that fits [^\n]+$"):
        identity(files.cert, file)


def test_the_key_of_another_certificate_is_named(files: Files, tmp_path: Path) -> None:
    other = made(tmp_path)
    with pytest.raises(ConfigurationFault, match=r"^tls_key = .* that fits .*: key values mismatch$"):
        identity(files.cert, other.key)


def test_a_locked_key_is_named_and_nobody_is_asked_for_its_password(tmp_path: Path) -> None:
    locked = made(tmp_path, "-passout", "pass:secret")
    with pytest.raises(ConfigurationFault, match=r"^tls_key = .*it is locked with a password; give it without$"):
        identity(locked.cert, locked.key)
