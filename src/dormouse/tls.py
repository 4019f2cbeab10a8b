"""Certificate and private key, from files to what servers take. Decides nothing.

They are read once, at start; a new certificate needs a new start.
"""

import ssl
from pathlib import Path

from msgspec import Struct

from dormouse.errors import ConfigurationFault


class Identity(Struct, frozen=True):
    """Who a server is: in PEM."""

    certificates: bytes
    """Its own first, then those between it and a root."""
    key: bytes
    context: ssl.SSLContext
    """The same for Python's own TLS."""


def identity(cert: Path, key: Path) -> Identity:
    """Raises ConfigurationFault naming the file that cannot be used, and why."""
    certificates, secret = _read("tls_cert", cert), _read("tls_key", key)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        ssl.create_default_context().load_verify_locations(cadata=certificates.decode("ascii"))
    except (ssl.SSLError, ValueError) as fault:
        raise ConfigurationFault(f"tls_cert = {str(cert)!r} is no certificate in PEM: {_why(fault)}") from None
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, ValueError) as fault:
        raise ConfigurationFault(
            f"tls_key = {str(key)!r} is no private key in PEM that fits {cert}: {_why(fault)}"
        ) from None
    return Identity(certificates, secret, context)


def _no_password() -> str:
    """Instead of asking at the terminal for one, which nobody may be at."""
    raise ValueError("it is locked with a password; give it without")


def _read(setting: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as fault:
        raise ConfigurationFault(f"{setting} = {str(file)!r} cannot be read: {fault.strerror}") from None


def _why(fault: Exception) -> str:
    if isinstance(fault, ssl.SSLError):
        return (fault.reason or "not readable").replace("_", " ").lower()
    return str(fault)


def trusted(ca: Path | None) -> ssl.SSLContext:
    """Whom to believe that a server is who it says. Raises ConfigurationFault."""
    try:
        return ssl.create_default_context(cafile=None if ca is None else str(ca))
    except ssl.SSLError:
        raise ConfigurationFault(f"ca = {str(ca)!r} cannot be used: there is no certificate in PEM in it") from None
    except OSError as fault:
        raise ConfigurationFault(f"ca = {str(ca)!r} cannot be read: {fault.strerror}") from None
