"""Values of every datatype, the extreme ones among them."""

import ml_dtypes
import numpy as np

ROW = np.array([[1.0, 2.5, -3.0], [0.0, 1e-3, 1e6]], dtype=np.float32)
SAMPLES = {
    "BOOL": np.array([[True, False]]),
    "UINT8": np.array([[0, 255]], np.uint8),
    "UINT16": np.array([[0, 65535]], np.uint16),
    "UINT32": np.array([[0, 2**32 - 1]], np.uint32),
    "UINT64": np.array([[0, 2**64 - 1]], np.uint64),
    "INT8": np.array([[-128, 127]], np.int8),
    "INT16": np.array([[-(2**15), 2**15 - 1]], np.int16),
    "INT32": np.array([[-(2**31), 2**31 - 1]], np.int32),
    "INT64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "FP16": np.array([[1.5, -65504]], np.float16),
    "BF16": np.array([[1.5, -3e38]], ml_dtypes.bfloat16),
    "FP32": np.array([[0.1, -3e38]], np.float32),
    "FP64": np.array([[0.1, -1e308]], np.float64),
    "BYTES": np.array([[b"\x00\xff", b"a"]], np.object_),
}
