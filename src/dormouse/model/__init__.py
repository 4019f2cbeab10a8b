"""A model as a torch module: from its source, as a skeleton without weights, and which tensor it touches when."""

import os

# Read by the libraries when they are imported: nothing here ever asks the network, or draws progress bars.
for _name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS", "TRANSFORMERS_OFFLINE"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
