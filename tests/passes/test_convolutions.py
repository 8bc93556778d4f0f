"""Forms of convolutions."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from irongrad.passes.base import Context
from irongrad.passes.convolutions import Convolutions
from irongrad.passes.tap_products import Window

aten = torch.ops.aten


def with_gradients(x, weight, bias, grad, stride=1, padding=0, dilation=1):
    """A convolution, the gradient of its weight, and where the stride is 1 that of its input."""
    pairs = [[stride] * 2, [padding] * 2, [dilation] * 2]
    shared = (None, *pairs, False, [0, 0], 1)
    results = [
        F.conv2d(x, weight, bias, stride, padding, dilation),
        aten.convolution_backward(grad, x, weight, *shared, [False, True, False])[1],
    ]
    rest = dilation * (weight.shape[2] - 1) - padding
    if stride == 1 and rest >= 0:
        turned = weight.transpose(0, 1).flip([2, 3])
        results.append(aten.convolution(grad, turned, None, [1, 1], [rest] * 2, pairs[2], False, [0, 0], 1))
    return results


def operands(sizes=(8, 8), channels=(16, 32), kernel=3, batch=2, **geometry):
    torch.manual_seed(0)
    x = torch.randn(batch, channels[0], *sizes)
    weight = torch.randn(channels[1], channels[0], kernel, kernel)
    return x, weight, torch.randn(channels[1]), torch.randn_like(F.conv2d(x, weight, **geometry))


def check(apply, item=None, **problem):
    geometry = {k: v for k, v in problem.items() if k in ("stride", "padding", "dilation")}
    return apply(
        item or Convolutions(), lambda *t: with_gradients(*t, **geometry), *operands(**problem), decompose=False
    )


@pytest.mark.parametrize("sizes", [(8, 8), (7, 5), (4, 6)])
@pytest.mark.parametrize("padding", [0, 1, 2])
def test_kernels_of_three_by_three_become_winograds(apply, sizes, padding):
    done = check(apply, sizes=sizes, channels=(128, 128), batch=16, padding=padding)
    assert done.stats == {"winograd": 3}
    assert done.operators["aten.bmm.default"] == 3
    assert not done.operators["aten.convolution.default"]


def test_a_kernel_of_one_place_is_one_product(apply):
    done = check(apply, kernel=1, channels=(64, 64), batch=8)
    assert done.stats == {"taps": 3}
    assert done.operators["aten.mm.default"] == 3
    assert not done.operators["aten.constant_pad_nd.default"]


def test_strides_of_a_kernel_of_one_place_skip_inputs(apply):
    done = check(apply, kernel=1, stride=2, channels=(64, 64), batch=16)
    assert done.operators["aten.mm.default"] == 2
    assert not done.operators["aten.convolution.default"]


def test_places_that_meet_only_padding_are_left_out(apply):
    done = check(apply, sizes=(1, 1), channels=(64, 64), batch=16, padding=1)
    assert done.stats == {"taps": 3}
    assert done.operators["aten.mm.default"] == 3


def test_strided_kernels_stay_and_their_weights_gradient_is_products(apply):
    done = check(apply, sizes=(16, 16), stride=2, padding=1)
    assert done.stats == {"direct": 1, "taps": 1}


def test_without_winograd(apply):
    done = check(apply, Convolutions(winograd=False), padding=1)
    assert done.stats == {"direct": 2, "taps": 1}


def test_the_transformed_weight_is_the_same_for_both_directions(apply):
    """The gradient of the input needs no flipped copy of the weight."""
    done = check(apply, channels=(128, 128), batch=16, padding=1)
    flips = [n for n in done.after.graph.nodes if n.target is aten.flip.default]
    assert not any(n.users for n in flips)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: F.conv2d(x, w[:, :8], groups=2),
        lambda x, w: F.conv2d(x.double().half(), w.half(), padding=1),
        lambda x, w: F.conv1d(x[:, :, 0], w[:, :, 0]),
    ],
)
def test_what_is_left_alone(apply, step_of, fn):
    x, weight = operands()[:2]
    graph = step_of(fn, x, weight).functions["call"].graph
    before = str(graph.graph)
    assert not Convolutions().run(graph, Context("call")).changed
    assert str(graph.graph) == before


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
)
def test_every_geometry_keeps_its_numbers(apply, sizes, kernel, stride, padding, dilation):
    if min(sizes) + 2 * padding <= dilation * (kernel - 1):
        return
    channels = (3, 5)
    problem = {"sizes": sizes, "kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation}
    check(apply, channels=channels, **problem)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 5),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
)
def test_taps_that_are_left_out_meet_nothing(size, kernel, stride, padding, dilation):
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    if out < 1:
        return
    window = Window((size,), (out,), (kernel,), (stride,), (padding,), (dilation,))
    met = {
        tap
        for tap in range(kernel)
        if any(0 <= position * stride - padding + tap * dilation < size for position in range(out))
    }
    assert met <= {tap for (tap,) in window.taps()}
