"""The same near-empty model behind LitServe or MLServer. Run with a Python that has them:

    python peers.py litserve PORT            python peers.py mlserver PORT

Imports only what that server needs, and nothing of Dormouse.
"""

import json
import os
import sys
import tempfile
from pathlib import Path


def litserve(port: int) -> None:
    import litserve
    import numpy as np

    weights = np.ones((8, 8), dtype=np.float32)

    class Tiny(litserve.LitAPI):  # type: ignore[misc]
        def setup(self, device: str) -> None:
            pass

        def decode_request(self, request: dict[str, object]) -> object:
            return np.asarray(request["data"], dtype=np.float32)

        def predict(self, x: object) -> object:
            return x @ weights  # type: ignore[operator]

        def encode_response(self, output: object) -> dict[str, object]:
            return {"data": output.tolist()}  # type: ignore[attr-defined]

    litserve.LitServer(Tiny(), accelerator="cpu", workers_per_device=1).run(
        port=port, host="127.0.0.1", generate_client_file=False, log_level="error"
    )


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


def mlserver(port: int) -> None:
    directory = Path(tempfile.mkdtemp())
    (directory / "runtime.py").write_text(RUNTIME)
    settings = {
        "host": "127.0.0.1",
        "http_port": port,
        "grpc_port": port + 1,
        "metrics_port": port + 2,
        "parallel_workers": 0,
        "debug": False,
        "logging_settings": None,
    }
    (directory / "settings.json").write_text(json.dumps(settings))
    (directory / "model-settings.json").write_text(json.dumps({"name": "tiny", "implementation": "runtime.Tiny"}))
    os.chdir(directory)
    os.execv(sys.executable, [sys.executable, "-m", "mlserver.cli.main", "start", "."])


if __name__ == "__main__":
    {"litserve": litserve, "mlserver": mlserver}[sys.argv[1]](int(sys.argv[2]))
