"""ONNX's element types as dtypes of PyTorch and numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import torch

_TORCH = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.FLOAT16: torch.float16,
    onnx.TensorProto.BFLOAT16: torch.bfloat16,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT16: torch.int16,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.UINT8: torch.uint8,
    onnx.TensorProto.BOOL: torch.bool,
}


def torch_dtype(number: int) -> torch.dtype | None:
    """Return PyTorch's dtype for an element type of ONNX, or None if PyTorch has none for training."""
    return _TORCH.get(number)


def numpy_dtype(number: int) -> np.dtype[Any]:
    """Return numpy's dtype for an element type of ONNX."""
    dtype: np.dtype[Any] = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number))
    return dtype
