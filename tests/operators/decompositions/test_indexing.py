"""Indexing, scattering, views and bags: values and gradients of each decomposition against ATen, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import irongrad as ig
from irongrad.frontends.compile_function import flat_function, trace_function
from irongrad.runtime.errors import UnsupportedOpError

F = torch.nn.functional
X = torch.randn(4, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
INDEX = torch.tensor([2, 0, 2, 1])


def check(fn: Callable[..., Any], *args: torch.Tensor) -> None:
    """Compare the decomposed graph of `fn` and its gradient with eager `fn`, both run in eager."""

    def loss(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = fn(*given)
        return (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).reshape(out.shape)).sum(), out.detach()

    flat = flat_function(loss, args, gradients=True)
    step = trace_function(flat, loss)
    constants = [t.initial for t in step.state]
    found = torch.fx.Interpreter(step.functions["call"].graph).run(*(a.clone() for a in args), *constants)
    for one, other in zip(found, flat.run(*args), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, equal_nan=True)


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "as_strided": (lambda x: x.as_strided((3, 4), (7, 2), 5), (X,)),
    "as_strided_of_a_transpose": (lambda x: x.permute(2, 0, 1).as_strided((4, 3), (3, 4), 1), (X,)),
    "as_strided_overlapping": (lambda x: x.as_strided((5, 4), (2, 1)), (X,)),
    "as_strided_scatter": (lambda x, y: x.as_strided_scatter(y, (2, 3), (9, 2), 4), (X, X[0, :2, :3].clone())),
    "diagonal": (lambda x: x.diagonal(-1, 2, 0), (X,)),
    "diagonal_empty": (lambda x: x.diagonal(7), (X,)),
    "diagonal_scatter": (lambda x, y: x.diagonal_scatter(y, 1, 0, 2), (X, X.reshape(15, 4)[:3])),
    "roll": (lambda x: x.roll((2, -1), (0, 2)) + x.roll(7) + x.roll(0, 1), (X,)),
    "unfold": (lambda x: x.unfold(2, 3, 1), (X,)),
    "block_diag": (lambda x, y: torch.block_diag(x, y), (X[0], X[1, 0])),
    "index_put": (lambda x, y: x.index_put((INDEX[1:], INDEX[1:]), y), (X, X[0, :, :1])),
    "index_put_apart": (lambda x, y: torch.ops.aten.index_put(x, [INDEX, None, INDEX], y, True), (X, X[:, :, 0])),
    "index_add_of_rank_0": (lambda x, y: x.index_add(0, torch.tensor([0]), y, alpha=2), (X[0, 0, 0], X[0, 0, 1])),
    "index_copy": (lambda x, y: x.index_copy(-1, torch.tensor([3, 1]), y), (X, X[..., :2])),
    "index_fill": (lambda x, y: x.index_fill(1, torch.tensor([2, 0]), y), (X, X[0, 0, 0])),
    "put": (lambda x, y: x.put(torch.tensor([3, -1, 3]), y, accumulate=True), (X, X[0, 0, :3])),
    "take": (lambda x: x.take(torch.tensor([[3, -1], [0, 3]])), (X,)),
    "masked_scatter": (lambda x, y: x.masked_scatter(X > 0, y), (X, X.flip(0))),
    "mask_put": (lambda x, y: x.index_put((X[:, 0, 0] > -9,), y), (X, X.flip(0))),
    "set_mask": (lambda x: torch.sin(x).index_put((X > 0,), torch.zeros((), dtype=x.dtype)), (X,)),
    "narrow_at_a_tensor": (lambda x: x.narrow(-1, torch.tensor(-4), 2), (X,)),
    "combinations": (lambda x: torch.combinations(x, 3, with_replacement=True), (X[0, 0],)),
    "corrcoef": (torch.corrcoef, (X[0],)),
    "weighted_cov": (
        lambda x: torch.cov(x, correction=0, fweights=torch.arange(1, 6), aweights=X[1, 1].abs()), (X[0],),
    ),
    "gather_nothing": (lambda x: x.gather(0, torch.zeros((0, 2, 1), dtype=torch.int64)), (X,)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_match_eager(name: str) -> None:
    fn, args = CASES[name]
    check(fn, *args)


@pytest.mark.parametrize("reduce", ["mean", "prod", "amin", "amax"])
@pytest.mark.parametrize("include", [True, False])
def test_index_reduce_matches_eager(reduce: str, include: bool) -> None:
    check(lambda x, y: x.index_reduce(0, INDEX, y, reduce, include_self=include), X, X.flip(0))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [None, 2])
def test_embedding_bag_matches_eager(mode: str, last: bool, padding: int | None) -> None:
    words, offsets = torch.tensor([1, 2, 0, 2, 3, 1]), torch.tensor([0, 2, 2, 6] if last else [0, 2, 2])
    check(
        lambda w: F.embedding_bag(words, w, offsets, mode=mode, include_last_offset=last, padding_idx=padding), X[:, 0]
    )


def test_weighted_embedding_bags_match_eager() -> None:
    words, offsets = torch.tensor([1, 2, 0, 2, 3]), torch.tensor([0, 2])
    check(lambda w, s: F.embedding_bag(words, w, offsets, mode="sum", per_sample_weights=s), X[:, 0], X[0, 1])
    check(lambda w: F.embedding(words, w, padding_idx=0, scale_grad_by_freq=True), X[:, 0])
    with pytest.raises(UnsupportedOpError, match="scale_grad_by_freq"):
        check(lambda w: F.embedding_bag(words, w, offsets, scale_grad_by_freq=True), X[:, 0])


@pytest.mark.parametrize("reduce", ["sum", "mean", "prod", "max", "min"])
@pytest.mark.parametrize("initial", [None, 0.5])
def test_segment_reduce_matches_eager(reduce: str, initial: float | None) -> None:
    data = X[:, :, 0].clone()
    data[1, 0] = 0
    check(lambda x: torch.segment_reduce(x, reduce, lengths=torch.tensor([1, 3]), initial=initial), data)


def test_a_view_of_memory_outside_its_tensor_is_refused() -> None:
    with pytest.raises(UnsupportedOpError, match="outside its tensor"):
        check(lambda x: (x + 1)[1:].as_strided((2,), (1,), 0), X)


def test_compiled_indexing_matches_eager() -> None:
    """Two writes to one reused intermediate, negative indices, and a sum that IREE took for a contraction."""

    def fn(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x * y
        put = z.index_put((index,), y[:1])
        total = (z.diagonal(1) + put.take(torch.tensor([-1]))).sum() + (y[:1] * x).sum()
        return total, put.index_add(1, index, z[:, :4]).detach(), z.unfold(0, 2, 1).detach()

    x, y = X[:, 0].float(), X[:, 1].float()
    ig.compile_function(fn, (x, y, INDEX), gradients=True)
