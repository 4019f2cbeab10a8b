"""What an architecture is asked, as it goes over the wire: a V2 request with binary tensors, all but its first line."""

import json

import torch
from bench.density.functions import fleet

DATATYPES = {torch.float32: "FP32", torch.int64: "INT64"}


def request(architecture: str) -> bytes:
    """Headers and body."""
    head, tails = [], b""
    for name, tensor in fleet.ARCHITECTURES[architecture].inputs().items():
        data = tensor.numpy().tobytes()
        parameters = {"binary_data_size": len(data)}
        datatype = DATATYPES[tensor.dtype]
        head.append({"name": name, "datatype": datatype, "shape": list(tensor.shape), "parameters": parameters})
        tails += data
    text = json.dumps({"inputs": head, "parameters": {"binary_data_output": True}}).encode()
    headers = (
        f"Host: density\r\nContent-Length: {len(text) + len(tails)}\r\n"
        f"Inference-Header-Content-Length: {len(text)}\r\n\r\n"
    )
    return headers.encode() + text + tails
