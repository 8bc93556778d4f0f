"""Pooling and its backward against ATen's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from irongrad.operators.decompositions import decomposition_table
from irongrad.operators.decompositions.windows import Window
from irongrad.runtime.errors import UnsupportedOpError

GENERATOR = torch.Generator()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR.manual_seed(0))


@st.composite
def windows(draw: st.DrawFn) -> list[Window]:
    """Windows over two or three dimensions that ATen accepts and that all contain an input."""
    found = []
    ceil_mode = draw(st.booleans())
    for _ in range(draw(st.integers(2, 3))):
        kernel, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        padding = draw(st.integers(0, kernel // 2))
        size = draw(st.integers(dilation * (kernel - 1) + 1, 8))
        found.append(Window(size, kernel, draw(st.integers(1, 4)), padding, padding, dilation, ceil_mode))
    return found


def numbers(windows: list[Window], *names: str) -> list[list[int]]:
    return [[getattr(w, name) for w in windows] for name in names]


@settings(max_examples=60, deadline=None)
@given(windows=windows(), include=st.booleans(), divisor=st.sampled_from([None, 5]))
def test_average_pooling_matches_aten(equals_aten, windows, include, divisor):
    x = randn(2, 3, *(w.size for w in windows))
    kernel, stride, padding = numbers(windows, "kernel", "stride", "before")
    arguments = (x, kernel, stride, padding, windows[0].ceil_mode, include, divisor)
    (out,) = equals_aten(f"avg_pool{len(windows)}d", *arguments)
    equals_aten(f"avg_pool{len(windows)}d_backward", randn(*out.shape), *arguments)


@settings(max_examples=60, deadline=None)
@given(windows=windows(), fill=st.sampled_from([None, -math.inf, 0.0]))
def test_max_pooling_matches_aten(equals_aten, windows, fill):
    x = randn(2, 3, *(w.size for w in windows))
    x = x if fill is None else torch.full_like(x, fill)
    geometry = (*numbers(windows, "kernel", "stride", "before", "dilation"), windows[0].ceil_mode)
    out, indices = equals_aten(f"max_pool{len(windows)}d_with_indices", x, *geometry)
    name = f"max_pool{len(windows)}d_with_indices_backward"
    equals_aten(name, randn(*out.shape), x, *geometry, indices)


def test_a_window_without_inputs_is_refused():
    pool = decomposition_table()[torch.ops.aten.max_pool2d_with_indices.default]
    with pytest.raises(UnsupportedOpError, match="only padding"):
        pool(randn(1, 1, 1, 5), [2, 1], [4, 1], [1, 0], [2, 2])


def test_a_nan_is_the_maximum_of_its_window(equals_aten):
    x = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    x[0, 0, 1, 2] = math.nan
    equals_aten("max_pool2d_with_indices", x, [2, 2])


@settings(max_examples=30, deadline=None)
@given(size=st.lists(st.integers(1, 7), min_size=2, max_size=3), data=st.data())
def test_adaptive_pooling_matches_aten(equals_aten, size, data):
    x = randn(2, 3, *size)
    counts = [data.draw(st.integers(1, 7)) for _ in size]
    (out,) = equals_aten(f"_adaptive_avg_pool{len(size)}d", x, counts)
    equals_aten(f"_adaptive_avg_pool{len(size)}d_backward", randn(*out.shape), x)
    out, indices = equals_aten(f"adaptive_max_pool{len(size)}d", x, counts)
    equals_aten(f"adaptive_max_pool{len(size)}d_backward", randn(*out.shape), x, indices)


@pytest.mark.parametrize("counts", [[3, 4], [1, 5], [2, 3, 4]], ids=str)
def test_fractional_max_pooling_matches_aten(equals_aten, counts):
    dims = len(counts)
    x, kernel = randn(2, 3, *[6, 7, 8][:dims]), [2, 3, 2][:dims]
    samples = torch.rand(2, 3, dims, dtype=torch.float64, generator=GENERATOR.manual_seed(1))
    out, indices = equals_aten(f"fractional_max_pool{dims}d", x, kernel, counts, samples)
    equals_aten(f"fractional_max_pool{dims}d_backward", randn(*out.shape), x, kernel, counts, indices)
