"""Gathering, scattering and indexing."""

from __future__ import annotations

import torch

from irongrad.decompositions.registry import decomposes, keeps

aten = torch.ops.aten

keeps(aten.stack.default)  # so that `stack_scalars_first` finds it


# torch-mlir 20261001 aborts the process on a negative dimension of these (an assertion in its scatter lowering).
_DIM_AT_ONE = (
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.gather.default,
    aten.index_select.default,
    aten.cumsum.default,
)


def _with_positive_dim(op: torch._ops.OpOverload) -> None:
    @decomposes(op)
    def rewrite(self: torch.Tensor, dim: int, *args: object, **kwargs: object) -> object:
        if dim >= 0:
            return NotImplemented
        return op(self, dim + self.ndim, *args, **kwargs)


for _op in _DIM_AT_ONE:
    _with_positive_dim(_op)


@decomposes(aten.embedding_dense_backward.default)
def _embedding_dense_backward(
    grad: torch.Tensor, indices: torch.Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> torch.Tensor:
    """The gradient of a row is the sum of the output gradients of the positions that looked it up."""
    if scale_grad_by_freq:
        return NotImplemented
    rows = grad.reshape(-1, grad.shape[-1])
    flat = indices.reshape(-1)
    if padding_idx >= 0:
        rows = torch.where((flat == padding_idx).unsqueeze(1), torch.zeros_like(rows), rows)
    zeros = rows.new_zeros((num_weights, rows.shape[1]))
    return aten.index_put.default(zeros, [flat], rows, True)
