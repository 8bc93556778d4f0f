"""Matrix products, determinants, and triangles of matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from irongrad.onnx.registry import Call, Value, operator, tensor


@operator("MatMul")
def matmul(call: Call, a: Value, b: Value) -> Tensor:
    """Multiply matrices, as numpy's `matmul`."""
    return torch.matmul(tensor(a), tensor(b))


@operator("Gemm")
def gemm(call: Call, a: Value, b: Value, c: Value | None = None) -> Tensor:
    """Return `alpha a b + beta c`; a and b may be transposed."""
    left = tensor(a).t() if call.get("transA", 0) else tensor(a)
    right = tensor(b).t() if call.get("transB", 0) else tensor(b)
    alpha, beta = call.get("alpha", 1.0), call.get("beta", 1.0)
    if c is not None and alpha == beta == 1.0 and left.is_floating_point():
        return torch.addmm(tensor(c), left, right)
    product = left @ right if alpha == 1.0 else alpha * (left @ right)
    return product if c is None else product + (tensor(c) if beta == 1.0 else beta * tensor(c))


@operator("Einsum")
def einsum(call: Call, *values: Value) -> Tensor:
    """Compute an Einstein sum, as numpy's `einsum`."""
    return torch.einsum(call.get("equation").replace(" ", ""), *map(tensor, values))


@operator("Det")
def det(call: Call, x: Value) -> Tensor:
    """Return the determinants of matrices."""
    return torch.linalg.det(tensor(x))


@operator("Trilu")
def trilu(call: Call, x: Value, k: Value | None = None) -> Tensor:
    """Return the upper or the lower triangle of matrices."""
    triangle = torch.triu if call.get("upper", 1) else torch.tril
    return triangle(tensor(x), int(call.number(k, 0, "a diagonal")))
