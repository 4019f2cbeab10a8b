"""The near-empty model behind LitServe: ``python litserve_server.py PORT``, with a Python that has it."""

import sys
from typing import Any

import litserve
import numpy as np


class Tiny(litserve.LitAPI):  # type: ignore[misc]
    """Eight numbers in, eight numbers out."""

    def setup(self, device: str) -> None:
        del device
        self.weights = np.ones((8, 8), dtype=np.float32)

    def decode_request(self, request: dict[str, Any]) -> Any:
        return np.asarray(request["data"], dtype=np.float32)

    def predict(self, x: Any) -> Any:
        return x @ self.weights

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"data": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(Tiny(), accelerator="cpu", workers_per_device=1)
    server.run(port=int(sys.argv[1]), host="127.0.0.1", generate_client_file=False, log_level="error")
