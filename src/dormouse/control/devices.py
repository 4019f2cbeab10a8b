"""Which devices a setting names."""

from dormouse.device.driver import device_count
from dormouse.errors import ConfigurationFault


def devices_of(setting: str) -> list[str]:
    """``cpu``, ``cuda`` (every card), ``cuda:N`` or ``auto`` (cards where there are any). Raises ConfigurationFault."""
    if setting == "cpu" or setting.removeprefix("cuda:").isdecimal():
        return [setting]
    if setting not in ("auto", "cuda"):
        raise ConfigurationFault(f"device = {setting!r} cannot be used; expected auto, cpu, cuda or cuda:N")
    cards = [f"cuda:{number}" for number in range(device_count())]
    if cards or setting == "auto":
        return cards or ["cpu"]
    raise ConfigurationFault("device = 'cuda' but no CUDA device was found; use --device cpu, or install the gpu extra")
