"""The convolution backward that is written in FX, against ATen's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import irongrad as ig
from irongrad.decompositions import decomposition_table

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
def test_gradients_equal_atens(geometry):
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
