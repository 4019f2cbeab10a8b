"""Which gate a server gets: none where only this machine's users come in, one that asks for keys beyond."""

import ipaddress
from collections.abc import MutableMapping
from pathlib import Path

from dormouse.errors import ConfigurationFault
from dormouse.tenants.declared import Declared, read
from dormouse.tenants.gate import Gate, KeptGate, OpenGate
from dormouse.tenants.keyfile import KeyFile
from dormouse.tenants.keyring import ADMIN_KEY_VARIABLE, Keyring, admin_key_of


def gate_of(
    state_dir: Path,
    tenants: Path | None,
    environment: MutableMapping[str, str],
    *,
    required: bool | None,
    address: str,
) -> Gate:
    """The gate of a server that listens on ``address``. ``required`` None: if it is not the loopback address, or there
    are keys. Raises ConfigurationFault where keys are required and there is no admin key.

    The key in the environment is taken out of it: executors inherit the rest, and run models' own code.
    """
    declared = Declared() if tenants is None else read(tenants)
    keyring = Keyring({**declared.callers, **admin_key_of(environment)}, KeyFile(state_dir))
    environment.pop(ADMIN_KEY_VARIABLE, None)
    if required is None:
        required = not is_loopback(address) or tenants is not None or not keyring.is_empty()
    if not required:
        return OpenGate()
    if not keyring.has_admin():
        raise ConfigurationFault(
            f"on {address} callers need keys, and there is no admin key; make one with `dormouse keys create --admin "
            f"--state-dir {state_dir}`, set {ADMIN_KEY_VARIABLE}, or let everybody in with --no-auth"
        )
    return KeptGate(keyring, declared.limits_of)


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address, which is a number."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
