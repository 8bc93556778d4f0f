"""PyTorch's own decompositions that are used, beyond torch-mlir's table.

One by one: all of the registered ones would expand operators to primitives that torch-mlir lacks.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

PYTORCH = (
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
)
