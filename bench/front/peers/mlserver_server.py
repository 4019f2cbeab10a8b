"""The near-empty model behind MLServer: ``python mlserver_server.py PORT``, with a Python that has it."""

import json
import os
import sys
import tempfile
from pathlib import Path

RUNTIME = """
import numpy as np
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceResponse

class Tiny(MLModel):
    async def load(self):
        self.weights = np.ones((8, 8), dtype=np.float32)
        return True

    async def predict(self, payload):
        x = NumpyCodec.decode_input(payload.inputs[0])
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", x @ self.weights)])
"""


def main(port: int) -> None:
    """The model runs inside the server process, which is MLServer's fastest way."""
    directory = Path(tempfile.mkdtemp())
    (directory / "runtime.py").write_text(RUNTIME)
    ports = {"http_port": port, "grpc_port": port + 1, "metrics_port": port + 2}
    settings = {"host": "127.0.0.1", "parallel_workers": 0, "debug": False} | ports
    (directory / "settings.json").write_text(json.dumps(settings))
    (directory / "model-settings.json").write_text(json.dumps({"name": "tiny", "implementation": "runtime.Tiny"}))
    os.chdir(directory)
    os.execv(sys.executable, [sys.executable, "-m", "mlserver.cli.main", "start", "."])


if __name__ == "__main__":
    main(int(sys.argv[1]))
