"""Sums of products, and concatenations of elementwise functions."""

from __future__ import annotations

import pytest
import torch

from irongrad.passes.interleave import Interleave
from irongrad.passes.product_sums import ProductSums


def random(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def test_products_and_sums_are_joined(apply):
    def fn(x, h):
        products = [x[i].t() @ h[i] for i in range(5)]
        sums = [x[i].sum(0) for i in range(5)]
        return products[0] + products[1] + products[2] + products[3] + products[4], sum(sums[1:], sums[0])

    done = apply(ProductSums(), fn, random(5, 4, 64), random(5, 4, 32))
    assert done.stats == {"products": 5, "sums": 5}
    live = [n for n in done.after.graph.nodes if n.users]
    assert sum(str(n.target) == "aten.mm.default" for n in live) == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, h: x[0].t() @ h[0] + x[1].t() @ h[1],  # two
        lambda x, h: x[0] @ x[0].t() + x[1] @ x[1].t() + x[2] @ x[2].t(),  # long
        lambda x, h: x[0].t() @ h[0] + x[1].t() @ h[1] + x[0].sum() * h.new_ones(64, 32),  # not all products
        lambda x, h: x[0].sum(1) + x[1].sum(1) + x[2].sum(1),  # other sums
    ],
)
def test_other_sums_stay(apply, fn):
    assert not apply(ProductSums(), fn, random(5, 4, 64), random(5, 4, 32)).changed


def test_a_product_that_is_used_twice_stays(apply):
    def fn(x, h):
        products = [x[i].t() @ h[i] for i in range(3)]
        return products[0] + products[1] + products[2], products[1]

    assert not apply(ProductSums(), fn, random(5, 4, 64), random(5, 4, 32)).changed


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: torch.cat([a.exp(), b.sin(), a * b], 1),
        lambda a, b: torch.cat([a.exp(), b.sin()], -1),
        lambda a, b: torch.stack([a.exp(), b.sin(), a * b, a + b], 2),
    ],
)
def test_elementwise_parts_are_one_function(apply, fn):
    done = apply(Interleave(), fn, random(3, 4, 5), random(3, 4, 5))
    assert done.stats == {"interleaved": 1}
    assert not done.operators["aten.cat.default"] + done.operators["aten.stack.default"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda a, b: torch.cat([a.exp(), b.sin()], 0),  # in one piece
        lambda a, b: torch.cat([a, b.sin()], 1),  # computed elsewhere
        lambda a, b: torch.cat([a.exp(), b[:, :2].sin()], 1),  # of different sizes
        lambda a, b: torch.cat([a.exp()] * 5, 1),  # many
    ],
)
def test_other_concatenations_stay(apply, fn):
    assert not apply(Interleave(), fn, random(3, 4, 5), random(3, 4, 5)).changed
