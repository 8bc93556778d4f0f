"""Sums over many elements in levels, and operators built on sums: means, variances, norms and long matrix products.

IREE 3.13.0 accumulates a reduction in one chain for each output element. The error grows with the length of the chain:
a mean over 2 million squares is wrong by 1e-3. Here a sum runs over chunks of about the square root of the length, and
then over the chunks. Its error is that of two short chains (N. J. Higham, "The accuracy of floating point summation",
SIAM J. Sci. Comput. 14, 1993).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from irongrad.graph.recorder import undecomposed
from irongrad.operators.decompositions.registry import decomposes
from irongrad.operators.decompositions.unknown_sizes import always, example_of, for_every_size, is_known

aten = torch.ops.aten

# Elements that are added in one chain. Eager's chains are short ("cascade sum", ATen/native/cpu/SumKernel.cpp). For 256
# positive numbers, the error of one chain is 4 times eager's (root mean square). For 768 numbers it is 8 times eager's,
# and that of two levels is twice eager's.
LONGEST_CHAIN = 256
LONGEST_PRODUCT = 2048  # the same for matrix products, whose chunks take memory
# The example decides for sizes that are known only when a step runs. A size at run time may be this much larger.
_LARGER = 16
_CHUNK_OF_UNKNOWN = 64
_VECTOR, _CHUNKS = 16, 4  # the elements of a chunk, and the chunks, that are computed at once
_UNEVEN = 8  # a chunk may be smaller than wanted by up to this factor; beyond it, padding costs less

# Eager accumulates these in float32 (aten/src/ATen/OpMathType.h), torch-mlir 20261001 in the dtype itself.
_HALVES = (torch.float16, torch.bfloat16)

# Half-precision products need no chunks: torch-mlir accumulates them in float32.
_CHUNKED = (torch.float32, torch.float64)

_Dims = Sequence[int] | None


@decomposes(aten.sum.dim_IntList)
def _sum(
    x: torch.Tensor, dim: _Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Sum chunks of the innermost reduced dimensions, and then the chunks."""
    if dtype is not None:
        return aten.sum.dim_IntList(x.to(dtype), dim, keepdim).to(dtype)
    dims = _dims_of(x, dim)
    count = _count(x, dims)
    if x.dtype in _HALVES and count > 1:
        return aten.sum.dim_IntList(x, dim, keepdim, dtype=torch.float32).to(x.dtype)
    if not x.is_floating_point() or count == 0:
        return NotImplemented
    if _is_short(count):
        return _sum_of_merged(x, dims, keepdim)
    wanted = min(math.isqrt(count), LONGEST_CHAIN) if is_known(count) else _CHUNK_OF_UNKNOWN
    border, chunk = _chunk(x, dims, wanted)
    if not is_known(x.shape[border]):
        total = _sum_with_rest(*_with_merged(x, dims), wanted)
        return total.reshape([1 if d in dims else s for d, s in enumerate(x.shape)]) if keepdim else total
    inner = [border, *(d for d in dims if d > border)]
    partial = aten.sum.dim_IntList(_in_chunks(x, border, chunk), [d + 1 for d in inner])
    total = aten.sum.dim_IntList(partial, [d for d in dims if d <= border])
    return total.reshape([1 if d in dims else s for d, s in enumerate(x.shape)]) if keepdim else total


def _sum_with_rest(x: torch.Tensor, dims: Sequence[int], wanted: int) -> torch.Tensor:
    """Sum the whole chunks of a dimension of unknown size, and then its remainder; either may be empty."""
    border, chunk = _chunk(x, dims, wanted)
    size = x.shape[border]
    count = size // chunk
    with for_every_size(size):
        chunks = x.narrow(border, 0, count * chunk).unflatten(border, (count, chunk))
        rest = x.narrow(border, count * chunk, size - count * chunk)
        partial = _in_one_chain(chunks, [border + 1, *(d + 1 for d in dims if d > border)])
        return aten.sum.dim_IntList(partial, [d for d in dims if d <= border]) + _in_one_chain(rest, dims)


def _in_one_chain(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    with undecomposed():
        total = _sum_of_merged(x, dims, False)
        return aten.sum.dim_IntList(x, dims) if total is NotImplemented else total


def _sum_of_merged(x: torch.Tensor, dims: Sequence[int], keepdim: bool) -> torch.Tensor:
    """Sum over adjacent dimensions as over one.

    IREE 3.13.0 treats the sum of a product over two dimensions as a contraction. It fails if one factor is broadcast
    along one of them ("'vector.contract' op invalid accumulator/result vector shape", or a crash).
    """
    if len(dims) < 2 or all(b - a > 1 for a, b in itertools.pairwise(dims)):
        return NotImplemented
    total = aten.sum.dim_IntList(*_with_merged(x, dims))
    return total.reshape([1 if d in dims else s for d, s in enumerate(x.shape)]) if keepdim else total


def _with_merged(x: torch.Tensor, dims: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """Merge adjacent dimensions of `dims`; return the reshaped `x` and the merged dimensions."""
    shape: list[int] = []
    merged: list[int] = []
    for dim, size in enumerate(x.shape):
        if dim in dims and dim - 1 in dims:
            shape[-1] *= size
            continue
        if dim in dims:
            merged.append(len(shape))
        shape.append(size)
    return x.reshape(shape), merged


def _chunk(x: torch.Tensor, dims: Sequence[int], elements: int) -> tuple[int, int]:
    """Choose the dimension that is split so that a chunk has about `elements`, and the size of a chunk along it.

    A chunk extends over all reduced dimensions after that dimension.
    """
    taken = 1
    for dim in reversed(dims):
        size = x.shape[dim]
        if not is_known(size):
            return dim, max(elements // taken, 1)
        if taken * size > elements:
            return dim, _divisor(size, max(elements // taken, 1))
        taken *= size
    raise AssertionError("the reduced dimensions have fewer elements than a chunk")


def _divisor(size: int, wanted: int) -> int:
    """The divisor of `size` that is best as the size of a chunk; `wanted` itself if the best one is much smaller.

    It is the largest up to `wanted`, or the largest one that gives whole vectors. For other chunks IREE 3.13.0 finds
    tiles that take two to four times as long: the exponentials of rows of 50,304 took 3.0 ns each in chunks of 192, and
    0.7 ns in chunks of 96.
    """
    divisors = [d for d in range(wanted, 0, -1) if size % d == 0]
    fits = (d for d in divisors if d % _VECTOR == 0 and size // d % _CHUNKS == 0)
    best = next((d for d in fits if d * _UNEVEN >= wanted), divisors[0])
    return best if best * _UNEVEN >= wanted else wanted


def _in_chunks(x: torch.Tensor, dim: int, chunk: int) -> torch.Tensor:
    """View `dim` as [chunks, chunk], padded with zeros."""
    missing = -x.shape[dim] % chunk
    if missing:
        x = aten.constant_pad_nd.default(x, [0, 0] * (x.ndim - 1 - dim) + [0, missing])
    return x.reshape([*x.shape[:dim], -1, chunk, *x.shape[dim + 1 :]])


@decomposes(aten.mean.default, aten.mean.dim)
def _mean(
    x: torch.Tensor, dim: _Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    if dtype is not None:
        return aten.mean.dim(x.to(dtype), dim, keepdim)
    dims = _dims_of(x, dim)
    count = _count(x, dims)
    if x.dtype in _HALVES:
        return aten.mean.dim(x.float(), dim, keepdim).to(x.dtype)
    if _is_short(count) and len(dims) < 2:
        return NotImplemented
    return aten.sum.dim_IntList(x, dim, keepdim) / count


@decomposes(aten.var.correction)
def _var(x: torch.Tensor, dim: _Dims = None, *, correction: float | None = None, keepdim: bool = False) -> torch.Tensor:
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


@decomposes(aten.var_mean.correction)
def _var_mean(
    x: torch.Tensor, dim: _Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the mean first, then the mean squared deviation from it; E[x^2] - E[x]^2 would cancel.

    torch-mlir 20261001 would compute both in float64, at half the speed.
    """
    if x.dtype in _HALVES:
        variance, mean = aten.var_mean.correction(x.float(), dim, correction=correction, keepdim=keepdim)
        return variance.to(x.dtype), mean.to(x.dtype)
    dims = _dims_of(x, dim)
    count = _count(x, dims)
    mean = aten.sum.dim_IntList(x, dims, True) / count
    centred = x - mean
    divisor = max(count - (1 if correction is None else correction), 0)
    variance = aten.sum.dim_IntList(centred * centred, dims, keepdim) / divisor
    return variance, mean if keepdim else mean.reshape(variance.shape)


@decomposes(aten.std.correction)
def _std(x: torch.Tensor, dim: _Dims = None, *, correction: float | None = None, keepdim: bool = False) -> torch.Tensor:
    """The root of the variance of the differences from the first element: exactly 0 for equal elements.

    Eager's is 0 along dimensions, as it updates a mean by each element (B. P. Welford, Technometrics 4, 1962). A mean
    that is a sum divided by a count may round. The root makes much of the rest: its derivative is infinite at 0, where
    eager's deviation has a derivative of 0.
    """
    if x.dtype in _HALVES:
        return aten.std.correction(x.float(), dim, correction=correction, keepdim=keepdim).to(x.dtype)
    shifted = x - first_along(x, _dims_of(x, dim))
    return _var(shifted, dim, correction=correction, keepdim=keepdim).sqrt()


def first_along(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """The first elements of `x` along `dims`, which keep one element each."""
    for d in dims:
        x = x.narrow(d, 0, 1)
    return x


@decomposes(aten.std_mean.correction)
def _std_mean(
    x: torch.Tensor, dim: _Dims = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    return _std(x, dim, correction=correction, keepdim=keepdim), aten.mean.dim(x, dim, keepdim)


@decomposes(aten.linalg_vector_norm.default)
def _vector_norm(
    x: torch.Tensor, ord: float = 2, dim: _Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Compute the Euclidean norm by a product and a root: IREE's `powf` is slower and less accurate."""
    x = x if dtype is None else x.to(dtype)
    if x.dtype in _HALVES:
        return aten.linalg_vector_norm.default(x.float(), ord, dim, keepdim).to(x.dtype)
    if ord not in (0, 1, 2, math.inf, -math.inf) and not x.is_complex():
        # torch-mlir 20261001 rounds the exponent to float32 in host code; IREE 3.13.0 has no such operation there.
        powers = x.abs().pow(ord)
        return aten.sum.dim_IntList(powers, dim, keepdim).pow(1 / ord)
    if ord != 2 or x.is_complex():
        return NotImplemented
    return aten.sum.dim_IntList(x * x, dim, keepdim).sqrt()


@decomposes(aten.mm.default)
def _mm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if always(x.shape[1] == 1):
        return _outer_product(x, y)
    if example_of(x.shape[1]) <= LONGEST_PRODUCT or x.dtype not in _CHUNKED:
        return NotImplemented
    return aten.bmm.default(x.unsqueeze(0), y.unsqueeze(0)).squeeze(0)


@decomposes(aten.bmm.default)
def _bmm(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[B, M, K] times [B, K, N] as a sum of products over chunks of K.

    In one chain, IREE's error is 8 times that of eager's blocked kernels at K = 4096, and 13 times at K = 65536.
    """
    length = x.shape[2]
    if always(length == 1):
        return _outer_product(x, y)
    if example_of(length) <= LONGEST_PRODUCT or x.dtype not in _CHUNKED:
        return NotImplemented
    if not is_known(length):
        return _bmm_with_rest(x, y)
    chunk = _divisor(length, LONGEST_CHAIN)
    left = _in_chunks(x, 2, chunk).transpose(1, 2)  # [B, chunks, M, chunk]
    right = _in_chunks(y, 1, chunk)  # [B, chunks, chunk, N]
    products = aten.bmm.default(left.flatten(0, 1), right.flatten(0, 1))
    return aten.sum.dim_IntList(products.unflatten(0, (x.shape[0], -1)), [1])


def _outer_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """[..., M, 1] times [..., 1, N], element by element.

    IREE 3.13.0 cannot compile a kernel with the matrix product and two uses of it: its pass LLVMCPUMmt4dVectorLowering
    fails without a message.
    """
    return x * y


def _bmm_with_rest(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As `_bmm`, for an unknown K."""
    length = x.shape[2]
    count = length // LONGEST_CHAIN
    whole, rest = count * LONGEST_CHAIN, length - count * LONGEST_CHAIN
    with for_every_size(length):
        left = x.narrow(2, 0, whole).unflatten(2, (count, LONGEST_CHAIN)).transpose(1, 2)
        right = y.narrow(1, 0, whole).unflatten(1, (count, LONGEST_CHAIN))
        products = aten.bmm.default(left.flatten(0, 1), right.flatten(0, 1)).unflatten(0, (x.shape[0], count))
        with undecomposed():
            last = aten.bmm.default(x.narrow(2, whole, rest), y.narrow(1, whole, rest))
        return aten.sum.dim_IntList(products, [1]) + last


def _is_short(count: int) -> bool:
    """Whether `count` elements are added in one chain."""
    return always(count <= LONGEST_CHAIN) or (not is_known(count) and example_of(count) * _LARGER <= LONGEST_CHAIN)


def _dims_of(x: torch.Tensor, dim: _Dims) -> list[int]:
    """The reduced dimensions in ascending order; no `dim` means all."""
    return sorted(d % x.ndim for d in dim) if dim and x.ndim else list(range(x.ndim))


def _count(x: torch.Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims)
