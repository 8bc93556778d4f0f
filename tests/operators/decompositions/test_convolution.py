"""Decompositions of convolutions, transposed convolutions and their backward, against ATen's kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import irongrad as ig
from irongrad.operators.decompositions import decomposition_table
from irongrad.pipeline.driver import step_graph

aten = torch.ops.aten


@st.composite
def geometries(draw: st.DrawFn) -> dict[str, object]:
    """Sizes, strides, paddings, dilations and groups of a convolution in one, two or three dimensions."""
    dims = draw(st.integers(1, 3))
    kernel = draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims))
    dilation = draw(st.lists(st.integers(1, 2), min_size=dims, max_size=dims))
    padding = [draw(st.integers(0, k)) for k in kernel]
    reach = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    size = [draw(st.integers(max(1, r - 2 * p), r + 4)) for r, p in zip(reach, padding, strict=True)]
    return {
        "size": size,
        "kernel": kernel,
        "dilation": dilation,
        "padding": padding,
        "stride": draw(st.lists(st.integers(1, 3), min_size=dims, max_size=dims)),
        "groups": draw(st.integers(1, 3)),
    }


@settings(max_examples=150, deadline=None)
@given(geometry=geometries())
def test_convolution_gradients_equal_atens(geometry):
    groups = geometry["groups"]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2 * groups, *geometry["size"], dtype=torch.float64, generator=generator)
    weight = torch.randn(3 * groups, 2, *geometry["kernel"], dtype=torch.float64, generator=generator)
    zeros = [0] * len(geometry["size"])
    shared = (geometry["stride"], geometry["padding"], geometry["dilation"], False, zeros, groups)
    out = aten.convolution.default(x, weight, None, *shared)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    arguments = (grad, x, weight, [weight.shape[0]], *shared, [True, True, True])
    decomposed = decomposition_table()[aten.convolution_backward.default]
    for found, expected in zip(decomposed(*arguments), aten.convolution_backward.default(*arguments), strict=True):
        torch.testing.assert_close(found, expected)


@settings(max_examples=100, deadline=None)
@given(geometry=geometries(), data=st.data())
def test_transposed_convolutions_and_their_gradients_equal_atens(geometry, data):
    groups, stride, dilation = geometry["groups"], geometry["stride"], geometry["dilation"]
    kernel, padding = geometry["kernel"], geometry["padding"]
    extra = [data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    shared = (stride, padding, dilation, True, extra, groups)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 2 * groups, *geometry["size"], dtype=torch.float64, generator=generator)
    weight = torch.randn(2 * groups, 3, *kernel, dtype=torch.float64, generator=generator)
    bias = torch.randn(3 * groups, dtype=torch.float64, generator=generator)
    sizes = zip(geometry["size"], stride, padding, dilation, kernel, extra, strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + e + 1 > 0 for n, s, p, d, k, e in sizes))
    table = decomposition_table()
    out = aten.convolution.default(x, weight, bias, *shared)
    torch.testing.assert_close(table[aten.convolution.default](x, weight, bias, *shared), out)
    grad = torch.randn(out.shape, dtype=torch.float64, generator=generator)
    arguments = (grad, x, weight, [3 * groups], *shared, [True, True, True])
    found = table[aten.convolution_backward.default](*arguments)
    for one, other in zip(found, aten.convolution_backward.default(*arguments), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("transposed", [False, True], ids=["plain", "transposed"])
def test_three_dimensions_and_an_empty_batch_match_aten(equals_aten, transposed):
    """A stride, padding or dilation of one number applies to every dimension."""
    weight = torch.randn(4, 2, 2, 3, 2, dtype=torch.float64)
    for batch in (0, 2):
        x = torch.randn(batch, 4, 5, 4, 6, dtype=torch.float64)
        shared = ([2], [1], [1], transposed, [0], 2 if not transposed else 1)
        (out,) = equals_aten("convolution", x, weight, None, *shared)
        mask = [True, True, True]
        equals_aten("convolution_backward", torch.randn_like(out), x, weight, [out.shape[1]], *shared, mask)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
        nn.Conv1d(4, 3, 3, dilation=2),
    ],
    ids=["depthwise", "grouped and strided", "dilated"],
)
def test_a_layer_compiles_and_is_right(tmp_path, layer):
    """Compiling compares three steps with eager float64."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 9) if isinstance(layer, nn.Conv2d) else torch.randn(2, 4, 9)
    step = ig.TrainStep(
        layer, lambda out: out.square().mean(), torch.optim.SGD(layer.parameters(), lr=0.1), {"input": x}
    )
    ig.compile(step, tmp_path / "out", entry_points=("train_step",))


def test_a_weight_gradient_of_any_size_has_no_slices_in_its_product():
    """IREE packs a slice of a product's operand in the kernel of the product, and holds it there on the stack."""
    conv = nn.Conv1d(7, 16, 5, padding=2)
    inputs = {"x": torch.randn(3, 7, 40), "y": torch.randn(3, 16)}
    dynamic = {"x": {0: "B", 2: "T"}, "y": {0: "B"}}
    step = ig.TrainStep(
        conv,
        lambda output, y: (output.sum(2) * y).sum(),
        torch.optim.SGD(conv.parameters(), lr=0.1),
        inputs,
        dynamic=dynamic,
    )
    graph = step_graph(step).functions["joint"].graph
    products = [n for n in graph.graph.nodes if n.target is aten.mm.default]
    assert products
    assert not [a for n in products for a in n.args if a.target is aten.select.int]
