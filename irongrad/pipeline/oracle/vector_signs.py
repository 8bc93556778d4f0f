"""Give the eigenvectors and singular vectors of an eager run the signs that the compiled step gives them."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from irongrad.operators.decompositions.linalg_eigen import directed, signs

aten = torch.ops.aten


class VectorSigns(TorchDispatchMode):
    """While open, real eigenvectors and singular vectors have the signs of `linalg_eigen.signs`.

    PyTorch leaves these signs open: they differ between versions of LAPACK, and between CPU and GPU. An optimizer such
    as SOAP or GaLore keeps the vectors in its state, where they are compared.
    """

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func is aten._linalg_eigh.default and _is_real_matrix(result[1]):
            return result[0], result[1] * signs(result[1])
        if func is aten._linalg_svd.default and _is_real_matrix(result[2]):
            return directed(*result)
        return result


def _is_real_matrix(vectors: torch.Tensor) -> bool:
    """Whether there are vectors, and their only freedom is a sign."""
    return vectors.ndim > 1 and vectors.numel() > 0 and not vectors.is_complex()
