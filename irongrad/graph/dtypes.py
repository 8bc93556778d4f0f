"""The numpy names of torch dtypes, as the manifest spells them, and their MLIR names."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

from irongrad.runtime.errors import CaptureError

_NAMES = {
    torch.float64: ("float64", "f64"),
    torch.float32: ("float32", "f32"),
    torch.float16: ("float16", "f16"),
    torch.bfloat16: ("bfloat16", "bf16"),
    torch.int64: ("int64", "i64"),
    torch.int32: ("int32", "i32"),
    torch.int16: ("int16", "i16"),
    torch.int8: ("int8", "i8"),
    torch.uint8: ("uint8", "i8"),
    torch.bool: ("bool", "i1"),
}
# Dtypes that an artifact can hold, but only imported programs compute with.
_IMPORTED_ONLY = {
    torch.uint16: ("uint16", "i16"),
    torch.uint32: ("uint32", "i32"),
    torch.uint64: ("uint64", "i64"),
}
_STORABLE = _NAMES | _IMPORTED_ONLY


def is_supported(dtype: torch.dtype) -> bool:
    """Whether compiled code computes with `dtype`."""
    return dtype in _NAMES


def numpy_name(dtype: torch.dtype) -> str:
    """Return numpy's name of a dtype, or ml_dtypes' for bfloat16.

    Raises:
        CaptureError: an artifact cannot hold the dtype.
    """
    if dtype not in _STORABLE:
        raise CaptureError(f"{dtype} tensors cannot be inputs, outputs or state of a compiled step")
    return _STORABLE[dtype][0]


def mlir_type(shape: tuple[int | str | torch.SymInt, ...], dtype: torch.dtype) -> str:
    """Return the tensor type in MLIR's syntax; a named or symbolic size becomes `?`."""
    numpy_name(dtype)
    dims = "".join(f"{d if isinstance(d, int) else '?'}x" for d in shape)
    return f"tensor<{dims}{_STORABLE[dtype][1]}>"


def to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a tensor's values as a contiguous numpy array on the CPU; bfloat16 becomes ml_dtypes' bfloat16."""
    plain = tensor.detach().cpu().contiguous().resolve_neg()
    if plain._is_zerotensor():  # autograd's zeros without storage, such as the gradient of sgn
        plain = plain.clone()
    if plain.dtype == torch.bfloat16:
        return np.asarray(plain.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
    return np.asarray(plain.numpy())
