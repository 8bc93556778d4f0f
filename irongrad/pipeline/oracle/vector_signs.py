"""The signs of the eigenvectors and singular vectors of an eager run: those that the compiled step gives them.

PyTorch leaves these signs open: they differ between versions of LAPACK, and between CPU and GPU. An optimizer such as
SOAP or GaLore keeps the vectors in its state, where they are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from irongrad.operators.decompositions.linalg_eigen import directed, signs

aten = torch.ops.aten


def _eigh(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    values, vectors = aten._linalg_eigh.default(*args, **kwargs)
    return values, vectors * signs(vectors) if _is_real_matrix(vectors) else vectors


def _svd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    left, values, right = aten._linalg_svd.default(*args, **kwargs)
    return directed(left, values, right) if _is_real_matrix(right) else (left, values, right)


def _is_real_matrix(vectors: Tensor) -> bool:
    """Whether there are vectors, and their only freedom is a sign."""
    return vectors.ndim > 1 and vectors.numel() > 0 and not vectors.is_complex()


SUBSTITUTES: Mapping[Any, Callable[..., Any]] = {aten._linalg_eigh.default: _eigh, aten._linalg_svd.default: _svd}
