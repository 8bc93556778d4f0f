"""The closed set of operators that the importer accepts; after decomposition, functions consist of these alone.

torch-mlir 20261001 lowers these operators to linalg, and IREE 3.13.0 compiles them. The candidates are the conversions
in torch-mlir's sources (lib/Conversion/TorchTo*, DecomposeComplexOps.cpp).
tests/operators/legalize/test_core_operators.py compiles each operator.

Some operators are left out although torch-mlir lowers them:

* random operators: torch-mlir's generator differs from IronGrad's and is not portable;
* complex operators;
* logcumsumexp and upsample_nearest2d_backward: wrong numbers;
* log10: no such symbol.

A name without an overload means `default`.
"""

from __future__ import annotations

import operator

import torch

_UNARY = """
    abs acos acosh asin asinh atan atanh bitwise_not ceil celu cos cosh deg2rad elu erf exp exp2 expm1 floor
    frac gelu hardshrink hardsigmoid hardswish hardtanh isinf isnan isneginf isposinf leaky_relu log log1p
    log2 logical_not logit mish nan_to_num neg rad2deg reciprocal relu round round.decimals rsqrt sgn
    sigmoid sign silu sin sinh softplus softshrink sqrt tan tanh threshold trunc glu
"""
_ELEMENTWISE = """
    add.Scalar add.Tensor sub.Scalar sub.Tensor mul.Scalar mul.Tensor div.Scalar div.Tensor div.Scalar_mode
    div.Tensor_mode floor_divide rsub.Scalar pow.Scalar pow.Tensor_Scalar pow.Tensor_Tensor remainder.Scalar
    remainder.Tensor fmod.Tensor ldexp.Tensor atan2 maximum minimum fmax fmin clamp clamp.Tensor clamp_max
    clamp_min clamp_min.Tensor lerp.Scalar lerp.Tensor addcdiv addcmul heaviside logaddexp logaddexp2
    eq.Scalar eq.Tensor ne.Scalar ne.Tensor lt.Scalar lt.Tensor le.Scalar le.Tensor gt.Scalar gt.Tensor
    ge.Scalar ge.Tensor logical_and logical_or logical_xor bitwise_and.Scalar bitwise_and.Tensor
    bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor __rshift__.Scalar
    where.self
    masked_fill.Scalar masked_fill.Tensor mse_loss binary_cross_entropy_with_logits
"""
_ELEMENTWISE_BACKWARD = """
    elu_backward gelu_backward hardtanh_backward leaky_relu_backward sigmoid_backward softplus_backward
    tanh_backward threshold_backward
"""
_REDUCTIONS = """
    sum sum.dim_IntList mean mean.dim prod prod.dim_int max max.dim min min.dim amax amin aminmax all
    all.dim any any.dim any.dims argmax argmin count_nonzero count_nonzero.dim_IntList var.correction
    var_mean.correction std.correction norm.Scalar norm.ScalarOpt_dim linalg_vector_norm trace renorm cumsum
    cumprod sort topk bucketize.Tensor _softmax _log_softmax _softmax_backward_data
    _log_softmax_backward_data native_layer_norm native_group_norm
"""
_SHAPES = """
    view _unsafe_view _reshape_alias unsqueeze squeeze squeeze.dim t transpose.int permute expand repeat
    slice.Tensor select.int split.Tensor split_with_sizes cat stack slice_scatter select_scatter unfold
    diagonal diag_embed as_strided flip roll rot90 tril triu constant_pad_nd reflection_pad1d
    reflection_pad2d replication_pad1d replication_pad2d replication_pad3d pixel_shuffle channel_shuffle
    upsample_nearest2d clone copy detach alias lift_fresh_copy _to_copy
"""
_CONSTRUCTORS = """
    full full_like zeros zeros_like zero ones ones_like fill.Scalar fill.Tensor new_full new_zeros new_ones
    new_empty new_empty_strided empty.memory_format empty_like empty_strided scalar_tensor arange
    arange.start arange.start_step linspace eye eye.m tril_indices triu_indices
"""
_INDEXING = """
    gather scatter.src scatter.value scatter_add scatter_reduce.two index.Tensor index_put _index_put_impl
    _unsafe_index_put index_select masked_scatter embedding _embedding_bag
"""
_PRODUCTS = """
    mm bmm mv dot addmm addbmm baddbmm _trilinear linalg_cross convolution _convolution convolution_backward
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices max_unpool2d
    adaptive_max_pool2d adaptive_max_pool3d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
"""
# Marks of the compiler, which the importer keeps whole.
_OWN = """
    over_ranks
"""
_PRIMS = """
    collapse convert_element_type iota split_dim sqrt squeeze sum view_of
"""

# Arithmetic on sizes that torch-mlir 20261001 imports.
SIZE_ARITHMETIC = frozenset(
    {
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.neg, operator.mod),
        *(torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default),
    }
)

# Structured control flow, whose bodies are checked like the graph around them.
CONTROL_FLOW = frozenset({"cond", "map_impl", "scan", "while_loop"})


def _names(namespace: str, *lists: str) -> frozenset[str]:
    names = " ".join(lists).split()
    return frozenset(f"{namespace}.{n}" if "." in n else f"{namespace}.{n}.default" for n in names)


CORE = (
    _names(
        "aten", _UNARY, _ELEMENTWISE, _ELEMENTWISE_BACKWARD, _REDUCTIONS, _SHAPES, _CONSTRUCTORS, _INDEXING, _PRODUCTS
    )
    | _names("prims", _PRIMS)
    | _names("irongrad", _OWN)
)
