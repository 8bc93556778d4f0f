"""The operators that are expanded before import, and why torch-mlir does not get them as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch._decomp import get_decompositions

from irongrad.pipeline.decompose_convolution import convolution_decompositions
from irongrad.pipeline.decompose_reductions import reduction_decompositions
from irongrad.pipeline.decompose_sorts import sort_decompositions

aten = torch.ops.aten

# Backward operators and fused forms that torch-mlir 20261001 has no lowering for, beyond its own table.
_MORE = [
    aten._safe_softmax,
    aten._softmax,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.native_batch_norm_backward,
    aten.native_layer_norm_backward,
    aten.native_group_norm_backward,
    aten.embedding_dense_backward,
    aten.threshold_backward,
    aten.gelu_backward,
    aten.silu_backward,
    aten.tanh_backward,
    aten.sigmoid_backward,
    aten.lerp,
    aten.addcmul,
    aten.addcdiv,
    aten.rsub,
    aten.detach,
    aten.select_backward,
    aten.slice_backward,
    aten.tril,
    aten.triu,
    aten.linalg_vector_norm,
]


@functools.cache
def decomposition_table() -> dict[torch._ops.OperatorBase, Callable[..., object]]:
    """torch-mlir's table with what training needs besides."""
    from torch_mlir.extras.fx_decomp_util import get_decomposition_table

    table = dict(get_decomposition_table())
    table.update(get_decompositions(_MORE))
    table.update({op: _with_positive_dim(op) for op in _DIM_AT_ONE})
    table[aten.embedding_dense_backward.default] = _embedding_dense_backward
    del table[aten.stack.default]  # so that `stack_scalars_first` finds it
    table.update(convolution_decompositions())
    table.update(reduction_decompositions())
    table.update(sort_decompositions())
    return table


# torch-mlir 20261001 aborts the process on a negative dimension of these (an assertion in its scatter lowering).
_DIM_AT_ONE = [
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter.reduce,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
    aten.gather.default,
    aten.index_select.default,
    aten.cumsum.default,
]


def _with_positive_dim(op: torch._ops.OpOverload) -> Callable[..., object]:
    def rewrite(self: torch.Tensor, dim: int, *args: object, **kwargs: object) -> object:
        if dim >= 0:
            return NotImplemented
        return op(self, dim + self.ndim, *args, **kwargs)

    return rewrite


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
