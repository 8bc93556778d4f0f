"""Every decomposition as compiled steps use it: values and gradients against ATen and finite differences in float64.

Each row of `ROWS` is a function of tensors. The joint graph of its outputs and its vector-Jacobian product is traced
and decomposed as in `compile_function`, and run in eager. Outputs and gradients are compared with ATen's. Gradients are
also compared with finite differences of the graph's own outputs (`torch.autograd.gradcheck`). That checks the compiled
backward against the compiled forward. For a row of order 2, the vector-Jacobian product is tested in the same way.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
from torch.utils._pytree import tree_leaves

from irongrad.diagnostics.source_lines import quiet_export
from irongrad.operators.decompositions import registry
from irongrad.operators.decompositions.recurrent import recurrent
from irongrad.operators.legalize.retrace import interpret_eager, retrace
from irongrad.operators.random import Draws
from irongrad.pipeline.differentiate.inference import inference_table

aten = torch.ops.aten
linalg = torch.linalg
special = torch.special


class Row(NamedTuple):
    """A function to test.

    Attributes:
        run: the function.
        inputs: its inputs.
        order: how often it is differentiated.
    """

    run: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    order: int

    @property
    def is_differentiated(self) -> bool:
        """Whether gradients are compared with finite differences; in float32 these would have too few digits."""
        return self.order > 0 and all(i.dtype is torch.float64 for i in self.inputs)


def row(run: Callable[..., Any], *inputs: tuple[int, ...] | Tensor, order: int = 1) -> Row:
    """Make a row; an input that is a shape becomes normal random numbers in float64."""
    generator = torch.Generator().manual_seed(0)
    made = (i if isinstance(i, Tensor) else torch.randn(i, dtype=torch.float64, generator=generator) for i in inputs)
    return Row(run if order else lambda *tensors: run(*(t.detach() for t in tensors)), tuple(made), order)


def each(*functions: Callable[..., Any]) -> Callable[..., list[Tensor]]:
    """The results of all of `functions`."""
    return lambda *tensors: tree_leaves([f(*tensors) for f in functions])


def drawn(x: Tensor) -> list[Tensor]:
    with Draws(0, 0):
        return [F.rrelu(x, training=True), F.rrelu(x), torch.native_dropout(x, 0.5, True)[0]]


def bits(x: Tensor) -> list[Tensor]:
    i = x.long()
    shifts = torch.bitwise_left_shift, torch.bitwise_right_shift
    shifted = [shift(*given) for shift in shifts for given in ((i, i), (i, 2), (9, i))]
    return [*shifted, i << i, i << 1, i >> i, i >> 1, torch.bitwise_or(i, 5), torch.bitwise_xor(i, 5)]


def positive(a: Tensor) -> Tensor:
    return a @ a.mT + torch.eye(a.shape[-1], dtype=a.dtype)


UNIT = torch.linspace(0.1, 0.9, 5, dtype=torch.float64)
INDEX = torch.tensor([2, 0, 2])
PLACES = torch.tensor([[2, 0, 1], [1, 2, 0]])
MASK = torch.tensor([[True, False, True], [False, True, True]])
WORDS, BAGS = torch.tensor([1, 2, 0, 2, 3]), torch.tensor([0, 2])
OFFSETS = torch.tensor([1, 3], dtype=torch.int32)
SAMPLES = torch.tensor([[[0.2, 0.7, 0.4]]], dtype=torch.float64)
RUNNING = (torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64))
VECTORS, TAUS = torch.geqrf(torch.arange(6.0, dtype=torch.float64).sin().reshape(3, 2))
SIGNS = torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64)
SINGLES = torch.linspace(-6, 6, 5)
CHUNKS = LinearCrossEntropyOptions(batch_chunk_size=2)

ROWS = {
    "smooth activations": row(
        each(F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, F.mish, F.softplus, F.logsigmoid, F.glu), (6,),
    ),
    "activations with kinks": row(
        each(F.elu, F.leaky_relu, F.hardswish, F.hardtanh, F.hardshrink, F.softshrink,
             lambda x: F.threshold(x, 0.1, 0.2)), (6,),
    ),
    "hard sigmoid": row(F.hardsigmoid, SINGLES),  # float32, because ATen rounds 1/6 to float32
    "softmax": row(
        each(lambda x: x.softmax(1), lambda x: x.log_softmax(0), lambda x: x.logsumexp(1)), (3, 4), order=2
    ),
    "attention": row(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, MASK), (1, 1, 2, 2), (1, 1, 3, 2), (1, 1, 3, 2), order=2
    ),
    "batch norm": row(lambda x, w, b: F.batch_norm(x, *RUNNING, w, b, True), (4, 2, 3), (2,), (2,), order=2),
    "batch norm in evaluation": row(lambda x, w, b: F.batch_norm(x, *RUNNING, w, b), (4, 2), (2,), (2,)),
    "other forms of batch norm": row(
        lambda x, w, b: [
            aten._batch_norm_with_update_functional(x, w, b, *RUNNING, 0.1, 1e-5)[0],
            aten._batch_norm_no_update(x, w, b, *RUNNING, 0.1, 1e-5)[0],
            aten._native_batch_norm_legit_functional(x, w, b, *RUNNING, True, 0.1, 1e-5)[0],
            aten._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5)[0],
        ], (4, 2), (2,), (2,),
    ),
    "bins": row(
        lambda x: [torch.searchsorted(UNIT, x), torch.bucketize(x, UNIT), torch.histc(x, 4, -1, 1)], (6,), order=0
    ),
    "bits": row(bits, torch.tensor([0.0, 1.0, 3.0]), order=0),
    "bytes": row(
        lambda x: [torch.arange(3, dtype=torch.int8), torch.arange(1, 3, dtype=torch.uint8),
                   torch.arange(1, 6, 2, dtype=torch.int8) + x], (1,), order=0,
    ),
    "bounds": row(
        lambda x, y: [x.clamp(y - 0.5, y), x.clamp_min(y), x.clamp_max(y), x.clamp_max(0.3)], (6,), (6,)
    ),
    "divisions": row(
        each(*(functools.partial(torch.div, rounding_mode=mode) for mode in ("floor", "trunc", None)),
             *(lambda x, y, mode=mode: aten.div.Scalar_mode(x, 0.7, rounding_mode=mode)
               for mode in ("floor", "trunc"))), (6,), (6,),
    ),
    "logarithms of sums": row(each(torch.logaddexp, torch.logaddexp2), (6,), (6,)),
    "powers of a number, and bytes beside numbers": row(
        lambda x: [2**x, torch.cat([torch.ones(1, dtype=torch.uint8), x])], (6,)
    ),
    "comparisons": row(lambda x: [x == 1, x != 1, x < 1, x <= 1, x > 1, x >= 1], (6,), order=0),
    "constants": row(
        lambda x: [torch.full((2,), 7, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8),
                   torch.zeros_like(torch.empty_permuted((2, 3), (1, 0))) + x], (3,), order=0,
    ),
    "convolution": row(lambda x, w, b: F.conv1d(x, w, b, 2, 1, 2, 2), (1, 2, 5), (2, 1, 2), (2,), order=2),
    "convolution of planes": row(lambda x, w, b: F.conv2d(x, w, b, 2, 1), (1, 2, 4, 3), (2, 2, 3, 2), (2,)),
    "convolution of volumes": row(lambda x, w: F.conv3d(x, w, None, 1, 1), (1, 1, 2, 3, 2), (1, 1, 2, 3, 2)),
    "transposed convolution": row(
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1), (1, 2, 2, 2), (2, 1, 3, 2), (1,), order=2
    ),
    "arithmetic": row(
        each(torch.fmax, torch.fmin, torch.hypot, torch.fmod, torch.copysign, torch.atan2, torch.rsub,
             lambda x, y: 2 - x, lambda x, y: 2 / x, lambda x, y: torch.lerp(x, y, 0.3),
             lambda x, y: torch.addcmul(x, x, y),
             lambda x, y: torch.addcdiv(x, x, y), lambda x, y: x.sgn() * y, lambda x, y: (x > 0).detach() * y,
             lambda x, y: torch.remainder(x, 0.7), lambda x, y: x.fmod(0.7), lambda x, y: x.copysign(-1.0),
             lambda x, y: torch.angle(x)), (5,), (5,),
    ),
    "arithmetic without gradients": row(
        each(torch.signbit, torch.frexp, lambda x: torch.nextafter(x, -x), lambda x: torch.remainder(0.7, x),
             lambda x: aten._efficientzerotensor(x.shape, dtype=x.dtype) + x), (5,), order=0,
    ),
    "hyperbolic functions": row(
        each(torch.expm1, torch.sinh, torch.tanh, torch.asinh, torch.atanh, torch.log1p, torch.log2, torch.log10,
             torch.sigmoid, lambda x: (x + 1).acosh()), UNIT,
    ),
    "trigonometric functions": row(each(torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan), UNIT),
    "error functions": row(
        each(torch.erf, torch.erfc, torch.erfinv, special.erfcx, special.ndtr, special.log_ndtr, special.ndtri), UNIT
    ),
    "gamma functions": row(
        each(torch.lgamma, lambda x: torch.polygamma(2, x)), torch.cat([UNIT, -UNIT, 5 + UNIT])
    ),
    "bessel functions": row(torch.i0, (5,)),  # its gradient is i1; both are computed from the scaled functions
    "bags": row(
        each(lambda w, s: F.embedding_bag(WORDS, w, BAGS, mode="sum", per_sample_weights=s),
             lambda w, s: F.embedding_bag(WORDS, w, BAGS, mode="mean"),
             lambda w, s: F.embedding_bag(WORDS, w, BAGS, mode="max")), (4, 2), (5,),
    ),
    "embedding": row(lambda w: F.embedding(WORDS, w), (4, 2)),
    "extremes": row(
        each(lambda x: x[0, 0].amax(), torch.amin, lambda x: x.max(0), lambda x: x.min(1), lambda x: x.argmax(1),
             torch.argmin, lambda x: x[0, 0].prod(0)), (3, 4),
    ),
    "scans": row(
        each(lambda x: x.cumsum(0), lambda x: x.cumprod(0), lambda x: x.cummax(0), lambda x: x.cummin(0),
             lambda x: x.logcumsumexp(0)), (33,),
    ),
    "orders": row(
        each(lambda x: x.sort(1), lambda x: x.sort(dim=0, stable=True), lambda x: x.topk(2), lambda x: x.kthvalue(2),
             lambda x: x.median(0), lambda x: x.nanmedian(1), torch.median, torch.nanmedian, torch.mode), (3, 4),
    ),
    "grids": row(
        each(*(functools.partial(F.grid_sample, mode=mode, padding_mode=padding, align_corners=False)
               for mode, padding in (("bilinear", "zeros"), ("bicubic", "border"), ("nearest", "reflection")))),
        (1, 1, 3, 2), (1, 2, 2, 2),
    ),
    "grids of volumes": row(
        lambda x, g: F.grid_sample(x, g, padding_mode="reflection", align_corners=True),
        (1, 1, 2, 3, 2), (1, 1, 1, 2, 3),
    ),
    "grouped products": row(
        lambda x, w: F.grouped_mm(x, w, offs=OFFSETS),
        SINGLES[:1].bfloat16().expand(3, 8).contiguous(), torch.ones(2, 8, 8).bfloat16(),
    ),
    "indexing": row(
        each(lambda x: x.gather(-1, PLACES), lambda x: x.index_select(-1, INDEX), lambda x: x.take(PLACES),
             lambda x: x[INDEX[:2] - 2, INDEX[1:]], lambda x: x[1], lambda x: x[:, 1:], torch.tril, torch.triu), (2, 3),
    ),
    "scatter": row(
        each(lambda x, y: x.scatter(-1, PLACES, y), lambda x, y: x.scatter_add(-1, PLACES, y),
             lambda x, y: x.scatter(-1, PLACES[:, :2], 0.5), lambda x, y: x.scatter_reduce(-1, PLACES, y, "prod"),
             lambda x, y: x.scatter_reduce(-1, PLACES, y, "amax"), lambda x, y: x.slice_scatter(y[:, :2], 1, 1)),
        (2, 3), (2, 3),
    ),
    "scatter without gradients": row(
        each(lambda x, y: x.scatter(-1, PLACES, y, reduce="add"),
             lambda x, y: aten.index_fill.int_Tensor(x, 1, INDEX, y[0, 0])), (2, 3), (2, 3), order=0,
    ),
    "writes to indices": row(
        each(lambda x, y: x.index_put((INDEX[:1], INDEX[1:2]), y[0, :1]), lambda x, y: x.put(INDEX[:2], y[0, :2]),
             lambda x, y: x.index_add(0, INDEX, y, alpha=2), lambda x, y: x.index_fill(1, INDEX, 0.5),
             lambda x, y: x.index_fill(0, INDEX, y[0, 0]), lambda x, y: x.index_copy(0, INDEX[:2], y[:2]),
             lambda x, y: x.index_reduce(0, INDEX, y, "mean"), lambda x, y: x[:2].masked_scatter(MASK, y)),
        (3, 3), (3, 3),
    ),
    "segments": row(
        each(*(functools.partial(torch.segment_reduce, reduce=r, lengths=BAGS + 1)
               for r in ("sum", "mean", "prod", "max", "min"))), (4,),
    ),
    "views": row(
        each(lambda x: x.diagonal(), lambda x: x.as_strided((2, 2), (1, 2)), lambda x: x.unfold(1, 2, 1),
             lambda x: x.roll(1, 0), lambda x: x.squeeze((0, 1)),
             lambda x: torch.block_diag(x, x), lambda x: x.diagonal_scatter(x[0, :2])), (2, 3),
    ),
    "views without right gradients": row(
        lambda x, y: x.as_strided_scatter(y, (2, 2), (1, 2)), (2, 3), (2, 2), order=0
    ),
    "views in branches": row(
        lambda x: torch.cond(
            x.sum() > 0,
            lambda x: x.diagonal() @ x.unbind()[0][:2] * x.unfold(1, 2, 1).exp().sum() + x.split(2, 1)[1].sin().sum(),
            lambda x: x.view(3, 2).permute(1, 0).sin().sum() + ((x > 0).detach() * x).as_strided([2], [2]).sum(),
            [x]), (2, 3),
    ),
    "distances": row(
        each(*(functools.partial(torch.cdist, p=p) for p in (1.0, 1.5, 2.0)), lambda x, y: F.pdist(x),
             lambda x, y: torch.dist(x, y, 3)), (3, 2), (3, 2),
    ),
    "singular values": row(
        each(lambda a: linalg.svd(a, full_matrices=False)[0] ** 2, linalg.pinv), (3, 2)
    ),
    "eigenvalues": row(
        lambda a: [part**2 for part in linalg.eigh(a + a.mT)], (3, 3)
    ),
    "factors": row(
        each(linalg.lu, lambda a: torch.lu_unpack(*linalg.lu_factor(a)), linalg.qr, linalg.det, linalg.slogdet,
             lambda a: linalg.cholesky(positive(a)), lambda a: torch.cholesky(positive(a))), (3, 3),
    ),
    "reflections": row(each(linalg.householder_product, torch.orgqr), VECTORS, TAUS),
    "reflections without gradients": row(
        lambda a: [*torch.geqrf(a), torch.ormqr(VECTORS, TAUS, a)], (3, 2), order=0
    ),
    "systems": row(
        each(linalg.solve, lambda a, b: linalg.solve_triangular(a, b, upper=True),
             lambda a, b: torch.triangular_solve(b, a)[0], lambda a, b: linalg.lu_solve(*linalg.lu_factor(a), b),
             lambda a, b: linalg.inv(a), lambda a, b: torch.cholesky_solve(b, a.tril()),
             lambda a, b: torch.cholesky_inverse(a.tril())), (3, 3), (3, 1),
    ),
    "systems in rows": row(lambda a, b: torch.cholesky_solve(b, a.tril()), (2, 2), (2, 1), order=2),
    "least squares": row(lambda a, b: linalg.lstsq(a, b)[0], (3, 2), (3, 1)),
    "matrix exponential": row(linalg.matrix_exp, (2, 2)),
    "products": row(each(torch.addmv, lambda x, a, y: F.bilinear(a[:0], a[:0], a[None, :2])), (3,), (3, 2), (2,)),
    "long products": row(each(torch.mm, lambda x, y: torch.bmm(x[None], y[None])), (1, 2050), (2050, 1)),
    "losses": row(
        each(lambda x: F.cross_entropy(x, INDEX), lambda x: F.cross_entropy(x[None], INDEX[None]),
             lambda x: F.multi_margin_loss(x, INDEX), lambda x: F.multilabel_margin_loss(x, PLACES[[0, 1, 1]]),
             lambda x: F.soft_margin_loss(x, SIGNS.expand(3, 3))), (3, 3),
    ),
    "linear cross entropy": row(
        each(*(functools.partial(F.linear_cross_entropy, target=INDEX, reduction=r, options=CHUNKS)
               for r in ("mean", "none"))), (3, 2), (3, 2),
    ),
    "connectionist temporal classification": row(
        each(lambda x: F.ctc_loss(x.log_softmax(2), INDEX[None, ::2], [4], [2]),
             lambda x: F.ctc_loss(x.log_softmax(2), INDEX[None, ::2], torch.tensor([4]), torch.tensor([2]))), (4, 1, 3),
    ),
    "layer norm": row(lambda x, w, b: F.layer_norm(x, [3], w, b), (2, 3), (3,), (3,), order=2),
    "group norm": row(lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 3), (4,), (4,), order=2),
    "root mean square norm": row(lambda x, w: F.rms_norm(x, [3], w), (2, 3), (3,)),
    "weight norm": row(torch._weight_norm, (3, 2), (3, 1)),
    "padding": row(
        each(*(functools.partial(F.pad, pad=(1, 2), mode=mode) for mode in ("reflect", "replicate")),
             lambda x: F.pad(x, (-1, 2))), (1, 2, 4),
    ),
    "padding of planes": row(
        each(*(functools.partial(F.pad, pad=(1, 0, 0, 1), mode=mode) for mode in ("reflect", "replicate"))),
        (1, 1, 3, 3),
    ),
    "padding of volumes": row(
        each(*(functools.partial(F.pad, pad=(1, 0, 0, 1, 1, 0), mode=mode) for mode in ("reflect", "replicate"))),
        (1, 1, 2, 3, 2),
    ),
    "pooling": row(
        each(lambda x: F.avg_pool2d(x, 2, 1, 1), lambda x: F.adaptive_avg_pool2d(x, (2, 3)),
             lambda x: F.max_pool2d(x, 2, 1, 1), lambda x: F.adaptive_max_pool2d(x, (2, 3)),
             lambda x: F.fractional_max_pool2d(x, 2, (2, 3), _random_samples=SAMPLES[..., :2])), (1, 1, 3, 4), order=2,
    ),
    "pooling of volumes": row(
        each(lambda x: F.avg_pool3d(x, 2, 1, 1), lambda x: F.adaptive_avg_pool3d(x, (2, 1, 3)),
             lambda x: F.max_pool3d(x, 2, 1, 1), lambda x: F.adaptive_max_pool3d(x, (2, 1, 3)),
             lambda x: F.fractional_max_pool3d(x, 1, (2, 1, 3), _random_samples=SAMPLES)), (1, 1, 3, 2, 4),
    ),
    "windows": row(
        each(lambda x: F.unfold(x, 2, 2, 1, 2), lambda x: F.fold(x.reshape(1, 4, 3), (2, 4), 2)), (1, 1, 3, 4)
    ),
    "randomness": row(drawn, (6,)),
    "recurrent layers": row(
        each(*(functools.partial(lambda cell, x, h, w: recurrent(cell, x, [h], [w])[:2], cell)
               for cell in ("rnn_tanh", "rnn_relu"))), (2, 1, 2), (1, 2), (2, 2), order=2,
    ),
    "reductions": row(
        each(
            torch.sum, torch.mean, lambda x: x.mean((0, 1)), torch.var, torch.var_mean, torch.std, torch.std_mean,
            linalg.vector_norm,
        ), (3, 4),
    ),
    "long reductions": row(each(torch.sum, lambda x: x.mean((0, 1)), torch.var_mean), (3, 100)),
    "resampling": row(
        each(*(functools.partial(F.interpolate, scale_factor=1.7, mode=mode)
               for mode in ("linear", "nearest", "nearest-exact"))), (1, 1, 3),
    ),
    "resampling of planes": row(
        each(*(functools.partial(F.interpolate, size=(3, 2), mode=mode)
               for mode in ("bilinear", "bicubic", "nearest", "nearest-exact"))), (1, 1, 2, 3),
    ),
    "resampling of volumes": row(
        each(*(functools.partial(F.interpolate, size=(3, 2, 1), mode=mode)
               for mode in ("trilinear", "nearest", "nearest-exact"))), (1, 1, 2, 3, 2),
    ),
    "resampling without aliases": row(
        each(*(functools.partial(lambda op, x: op(x, (2, 3), False), getattr(aten, f"_upsample_{kind}2d_aa"))
               for kind in ("bilinear", "bicubic", "lanczos"))), (1, 1, 3, 4),
    ),
}  # fmt: skip

# Decompositions that no float64 row differentiates, by the reason.
NOT_DIFFERENTIATED = {
    "has no derivative in PyTorch": """
        bucketize.Tensor searchsorted.Tensor histc.default frexp.Tensor nextafter.default remainder.Scalar_Tensor
        geqrf.default ormqr.default scatter.reduce index_fill.int_Tensor""",
    "is of integers": """
        __lshift__.Scalar __lshift__.Tensor __rshift__.Tensor arange.start_step
        bitwise_left_shift.Scalar_Tensor bitwise_left_shift.Tensor bitwise_left_shift.Tensor_Scalar bitwise_or.Scalar
        bitwise_right_shift.Scalar_Tensor bitwise_right_shift.Tensor bitwise_right_shift.Tensor_Scalar
        bitwise_xor.Scalar""",
    "makes a tensor of no values": "empty_permuted.default",
    "has 1/6 in float32 in PyTorch": "hardsigmoid.default",
    "is of evaluation alone": """
        special_erfc.default special_ndtr.default orgqr.default _fused_rms_norm.default
        _embedding_bag_forward_only.default _native_batch_norm_legit_no_training.default""",
    "has no kernel for float64 in PyTorch": "_grouped_mm.default",
}

# Decompositions that no row reaches, by the reason and the place of their test.
NOT_REACHED = {
    "numbers as short integers, tests/operators/test_integer_dtypes": "prims.convert_element_type.default",
    "operands of several integer dtypes, tests/operators/test_integer_dtypes": """
        eq.Tensor ge.Tensor gt.Tensor le.Tensor lt.Tensor stack.default where.self""",
    "the imaginary part of a conjugate, tests/operators/legalize/test_complex_numbers": "_neg_view.default",
    "a write into a buffer of another dtype, tests/pipeline/test_precision": "copy.default",
    "16-bit numbers outside of captured graphs, test_halves": """
        add.Tensor add.Scalar sub.Tensor sub.Scalar mul.Tensor mul.Scalar div.Tensor div.Scalar""",
    "symbolic sizes, tests/pipeline/guards/test_any_size_indices": "index.Tensor",
    "symbolic sizes, tests/pipeline/differentiate/test_any_size": "split_with_sizes.default",
    "PyTorch's while_loop in a Function, tests/pipeline/capture/test_implicit": "detach_.default",
    "PyTorch's scan, tests/pipeline/lower/test_control_flow": "select_copy.int",
    "a backward for which PyTorch has no kernel on CPUs, test_normalisation": "_fused_rms_norm_backward.default",
    "BatchNorm over ranks, tests/runtime/ranks/test_statistics": """
        irongrad.sync_batch_norm.default irongrad.sync_batch_norm_backward.default""",
}


@pytest.mark.parametrize("name", ROWS)
def test_values_and_gradients_match_aten_and_finite_differences(joints, name):
    for joint in joints(*ROWS[name])[0]:
        joint.equals_eager()
        if ROWS[name].is_differentiated:
            joint.equals_differences()


class Evaluated(nn.Module):
    """Operators that autograd decomposes, but an export for evaluation keeps whole."""

    def forward(self, x: Tensor) -> list[Tensor]:
        normalised = F.rms_norm(x, [2]), F.batch_norm(x, *RUNNING), F.instance_norm(x[None])
        bags = F.embedding_bag(WORDS, x, BAGS)
        return [*normalised, special.ndtr(x), special.erfc(x), torch.orgqr(x, TAUS), bags]


def test_every_registered_decomposition_is_differentiated(joints, recorded):
    """Every other decomposition is listed with a reason, and no decomposition is listed without need."""
    x = torch.randn(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with quiet_export():
        program = torch.export.export(Evaluated(), (x,)).run_decompositions(inference_table(dynamic=False))
    given = [*program.constants.values(), x]
    with recorded() as evaluated:
        graph = retrace(lambda *values: list(interpret_eager(program.graph_module, values)), given)
    torch.testing.assert_close(list(graph(*given)), Evaluated()(x))
    ran = {name: named(joints(*row)[1]) for name, row in ROWS.items()}
    reached = named(evaluated).union(*ran.values())
    differentiated = set().union(*(ran[name] for name, row in ROWS.items() if row.is_differentiated))
    own = named(registry._REGISTERED)
    assert own - reached == listed(NOT_REACHED)
    assert own & reached - differentiated == listed(NOT_DIFFERENTIATED)
    assert named(registry._PYTORCH) <= reached | {operator.rpartition(".")[0] for operator in reached}


def named(operators: Iterable[registry.Operator]) -> set[str]:
    return {str(operator).removeprefix("aten.") for operator in operators}


def listed(reasons: Mapping[str, str]) -> set[str]:
    return {operator for operators in reasons.values() for operator in operators.split()}
