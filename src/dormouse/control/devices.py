"""Which devices a setting names."""

from dormouse.device.driver import device_count
from dormouse.errors import ConfigurationFault


def devices_of(setting: str) -> list[str]:
    """``cpu``, ``cuda`` (every card), ``auto`` (cards where there are any), ``cpu:N`` and ``cuda:N``, or several of
    these with commas between them. Raises ConfigurationFault."""
    named = setting.split(",")
    if setting == "cpu" or all(_is_numbered(device) for device in named):
        if len(set(named)) < len(named):
            raise ConfigurationFault(f"device = {setting!r} cannot be used: a device is named twice")
        return named
    if setting not in ("auto", "cuda"):
        expected = "expected auto, cpu, cuda, cuda:N or several: cuda:0,cuda:1"
        raise ConfigurationFault(f"device = {setting!r} cannot be used; {expected}")
    cards = [f"cuda:{number}" for number in range(device_count())]
    if cards or setting == "auto":
        return cards or ["cpu"]
    raise ConfigurationFault("device = 'cuda' but no CUDA device was found; use --device cpu, or install the gpu extra")


def _is_numbered(device: str) -> bool:
    kind, _, number = device.partition(":")
    return kind in ("cpu", "cuda") and number.isdecimal()
