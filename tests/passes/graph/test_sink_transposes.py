"""The pass layout, which sinks transposes until they meet their inverses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from irongrad.graph.nodes import value_of
from irongrad.passes.graph.sink_transposes import Layout, _runs
from irongrad.targets import Ability

TO_LAST, TO_FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def permutes(done) -> int:
    return done.operators["aten.permute.default"]


def image(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape)


def test_a_transpose_meets_its_inverse_behind_elementwise_functions(apply):
    def fn(x, bias):
        return (x.permute(TO_FIRST).relu() + bias.reshape(-1, 1, 1)).exp().permute(TO_LAST)

    done = apply(Layout(), fn, image(2, 4, 5, 3), image(3))
    assert permutes(done) == 0


def test_two_transposes_are_one(apply):
    done = apply(Layout(), lambda x: x.permute(1, 2, 0).permute(1, 2, 0), image(2, 3, 4))
    assert permutes(done) == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.sum((0, 2, 3)),
        lambda x: x.sum((0, 2, 3), keepdim=True) + x,
        lambda x: x.amax((1, 2)),
        lambda x: F.pad(x, (1, 2, 0, 1)).sum(1),
        lambda x: x[:, 1:, ::2].sum(1),
        lambda x: x.flip([1, 2]).sum(1),
        lambda x: torch.cat([x, x.exp()], 1).sum(1),
        lambda x: x.reshape(2, 3, 20).sum(2),
        lambda x: x.reshape(2, 3, 2, 2, 5).sum((1, 3)),
        lambda x: torch.where(x > 0, x, 0.0).sum(1),
        lambda x: (x * x.sum((2, 3), keepdim=True).expand(x.shape)).sum(1),
    ],
)
def test_operators_that_a_transpose_sinks_through(apply, fn):
    """After the sum no transpose of the whole image is left, except to add it to the image."""
    done = apply(Layout(), lambda x: fn(x.permute(TO_FIRST)), image(2, 4, 5, 3))
    sizes = [n.meta["val"].numel() for n in done.after.graph.nodes if str(n.target) == "aten.permute.default"]
    assert sum(size == 120 for size in sizes) <= (done.operators["aten.add.Tensor"] > 0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, y: y.permute(0, 2, 3, 1) + x,  # as many operands in one order as in the other
        lambda x, y: x.permute(TO_FIRST).cumsum(1) + y,
        lambda x, y: x.permute(3, 0, 1, 2)[:2].exp(),  # the rows are contiguous only after the transpose
    ],
)
def test_operators_that_a_transpose_stops_at(apply, fn):
    done = apply(Layout(), fn, image(2, 4, 5, 3), image(2, 3, 4, 5))
    assert not done.changed


def test_a_residual_block_keeps_one_layout(apply):
    """Two products with channels last, and a normalisation between them."""

    def product(x, w):
        last = x.permute(TO_LAST)
        return (last.reshape(-1, last.shape[-1]) @ w).reshape(last.shape).permute(TO_FIRST)

    def fn(x, w):
        y = product(x, w)
        centred = y - y.mean((0, 2, 3), keepdim=True)
        z = centred * (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).rsqrt()
        return product(z.relu(), w).relu().sum((2, 3))

    done = apply(Layout(), fn, image(2, 6, 4, 4), image(6, 6))
    assert permutes(done) == 1  # of the input


@settings(max_examples=25, deadline=None)
@given(order=st.permutations(range(4)), then=st.permutations(range(4)), dim=st.integers(0, 3))
def test_any_order_keeps_the_numbers(apply, order, then, dim):
    def fn(x, y):
        a = x.permute(order)
        b = (a * y.reshape([-1 if d == 0 else 1 for d in range(4)])[: a.shape[0]]).relu()
        return b.permute(then).sum(dim, keepdim=True) * 2, b.amax((dim,))

    apply(Layout(), fn, image(2, 3, 4, 5), image(5))


@pytest.mark.parametrize(
    ("before", "after", "runs"),
    [
        ([2, 3, 4], [6, 4], [([0, 1], [6]), ([2], [4])]),
        ([2, 12], [2, 3, 4], [([0], [2]), ([1], [3, 4])]),
        ([4, 6], [8, 3], [([0, 1], [8, 3])]),
        ([2, 3], [2, 3, 1], [([0], [2]), ([1], [3, 1])]),
        ([0, 3], [0], None),
    ],
)
def test_runs_of_a_view(before, after, runs):
    assert _runs(before, after) == runs


@pytest.mark.parametrize(
    ("abilities", "images", "kernel", "is_last"),
    [
        ({Ability.CONVOLUTIONS}, (2, 16, 20, 20), (32, 16, 3, 3), True),
        ({Ability.CONVOLUTIONS}, (2, 16, 20, 20), (1, 16, 3, 3), False),
        ({Ability.CONVOLUTIONS}, (2, 16, 400), (32, 16, 3), False),
        (set(), (2, 16, 20, 20), (32, 16, 3, 3), False),
    ],
    ids=["a kernel of ours", "one output", "one dimension", "no kernels"],
)
def test_a_convolution_with_a_kernel_of_ours_gives_a_channels_last_result(apply, abilities, images, kernel, is_last):
    def fn(x, weight):
        convolution = F.conv2d if x.ndim == 4 else F.conv1d
        return convolution(x, weight).relu()

    done = apply(Layout(), fn, image(*images), image(*kernel), abilities=frozenset(abilities))
    (relu,) = done.after.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    assert (value_of(relu).shape[-1] == kernel[0]) == is_last
