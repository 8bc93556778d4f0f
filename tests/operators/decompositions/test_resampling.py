"""Interpolation, padding, unfolding and grids, and their backward, against ATen's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irongrad.operators.decompositions.taps import Taps

GENERATOR = torch.Generator()
SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=3)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR.manual_seed(0))


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, smooth=st.booleans(), exact=st.booleans(), align_corners=st.booleans(), data=st.data())
def test_interpolation_matches_aten(equals_aten, sizes, smooth, exact, align_corners, data):
    scales = [data.draw(st.sampled_from([None, 0.6, 1.7, 2.0, 2.3])) for _ in sizes]
    counts = [max(int(n * s), 1) if s else data.draw(st.integers(1, 12)) for n, s in zip(sizes, scales, strict=True)]
    dims = len(sizes)
    name = f"_upsample_nearest_exact{dims}d" if exact else f"upsample_nearest{dims}d"
    arguments = (*([align_corners] if smooth else []), *scales)
    if smooth:
        name = ["upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"][dims - 1]
    x = randn(2, 3, *sizes)
    (out,) = equals_aten(name, x, counts, *arguments)
    equals_aten(f"{name}_backward", randn(*out.shape), counts, list(x.shape), *arguments)


@pytest.mark.parametrize("kind", ["upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"])
@pytest.mark.parametrize("counts", [[3, 3], [4, 13], [9, 2]], ids=str)
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("scales", [(None, None), (1.9, 0.7)], ids=str)
def test_bicubic_and_antialiased_interpolation_matches_aten(equals_aten, kind, counts, align_corners, scales):
    x = randn(2, 3, 5, 7)
    (out,) = equals_aten(kind, x, counts, align_corners, *scales)
    equals_aten(f"{kind}_backward", randn(*out.shape), counts, list(x.shape), align_corners, *scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["upsample_nearest1d", "_upsample_nearest_exact1d"])
def test_the_nearest_input_is_rounded_as_in_aten(equals_aten, name, dtype):
    for size, count in [(8, 220), (8, 388), (260, 340), (295, 145), (288, 280)]:
        equals_aten(name, torch.arange(size, dtype=dtype).reshape(1, 1, -1), [count])


def test_an_infinity_does_not_spread_to_other_elements():
    x = torch.tensor([math.inf, 1.0, 2.0, 3.0])
    gathered = Taps((((1, 1.0), (2, 2.0)), ((3, 1.0),), ()), 4).apply(x, 0)
    assert gathered.tolist() == [5.0, 3.0, 0.0]


@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, data=st.data())
def test_padding_matches_aten(equals_aten, sizes, data):
    x = randn(2, 3, *sizes)
    for kind in ("reflection_pad", "replication_pad", "constant_pad_nd"):
        low = [0 if kind == "reflection_pad" else -(s // 3) for s in sizes]
        pairs = [[data.draw(st.integers(a, s - 1)) for _ in range(2)] for a, s in zip(low, sizes, strict=True)]
        pad = [p for pair in reversed(pairs) for p in pair]
        if kind == "constant_pad_nd":
            if min(pad) < 0:  # only negative constant padding is decomposed
                equals_aten(kind, x, pad, 1.5)
            continue
        (out,) = equals_aten(f"{kind}{len(sizes)}d", x, pad)
        equals_aten(f"{kind}{len(sizes)}d_backward", randn(*out.shape), x, pad)


@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
@pytest.mark.parametrize("geometry", [([2, 3], [1, 1], [0, 0], [1, 1]), ([2, 2], [2, 1], [1, 2], [2, 3])], ids=str)
def test_unfold_and_fold_match_aten(equals_aten, batch, geometry):
    (columns,) = equals_aten("im2col", randn(*batch, 3, 5, 6), *geometry)
    equals_aten("col2im", randn(*columns.shape), [5, 6], *geometry)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("padding", [0, 1, 2], ids=["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", [0, 1, 2], ids=["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("size", [(4, 5), (1, 3), (3, 4, 2)], ids=str)
def test_grid_sampling_matches_aten(equals_aten, size, mode, padding, align_corners):
    dims = len(size)
    if dims == 3 and mode == 2:
        return  # PyTorch has no bicubic sampling of volumes
    x = randn(2, 3, *size)
    scattered = 2 * randn(2, *(5, 4, 3)[:dims], dims)
    for grid in (scattered, (scattered * 4).round() / 4):  # the second grid hits borders and midpoints between inputs
        (out,) = equals_aten(f"grid_sampler_{dims}d", x, grid, mode, padding, align_corners)
        shared = (x, grid, mode, padding, align_corners, [True, True])
        equals_aten(f"grid_sampler_{dims}d_backward", randn(*out.shape), *shared)
