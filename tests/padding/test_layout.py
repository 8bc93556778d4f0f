"""Layouts: which elements of a view are true ones."""

from __future__ import annotations

import numpy as np
import pytest
import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from irongrad.padding.layout import Axis, broadcast, dim_of, joined, layout_of, reshaped, solid, unified
from irongrad.padding.padded import Padded, Padding
from irongrad.sizes.expressions import Sizes, symbol

B, T = symbol("B"), symbol("T")
BUCKET, TRUE = {"B": 3, "T": 4}, {"B": 2, "T": 3}


@pytest.fixture
def padding() -> Padding:
    return Padding(Sizes(BUCKET, {n: torch.tensor(size) for n, size in TRUE.items()}))


def _marked(padding: Padding, sizes: list[object]) -> Padded:
    """A tensor that is 1 at its true elements."""
    layout = layout_of(sizes)
    value = Padded(torch.ones([padding.extent(d) for d in layout]), layout)
    return Padded(padding.fill(value, 0.0), layout)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([B, T, 6], [B * T, 6]),
        ([B, T, 6], [B, 6 * T]),
        ([B, T, 6], [B, T, 2, 3]),
        ([B, T, 6], [B, 1, T, 6]),
        ([B, 6, T], [B, 2, 3, T]),
        ([B, 6, T], [6 * B * T]),
        ([2 * B, T], [B, 2, T]),
        ([B, 2, T], [2 * B, T]),
    ],
)
def test_a_view_moves_padding_with_its_elements(padding: Padding, before: list[object], after: list[object]):
    value = _marked(padding, before)
    layout = reshaped(value.layout, after)
    assert layout is not None
    moved = Padded(value.tensor.reshape([padding.extent(d) for d in layout]), layout)
    valid = padding.valid(moved)
    assert valid is not None
    assert torch.equal(valid.broadcast_to(moved.tensor.shape), moved.tensor.bool())


def test_a_view_that_mixes_padding_and_elements_has_no_layout():
    assert reshaped(layout_of([B * T]), [B, T]) is None
    assert reshaped(layout_of([6 * B]), [6, B]) is None
    assert reshaped(layout_of([B, 4]), [2 * B, 2]) is not None
    assert reshaped(layout_of([B * T], uniform=True), [B, T]) is not None


def test_an_inner_axis_of_fixed_size_merges_into_the_outer_one():
    assert joined([Axis(B), Axis(sympy.Integer(6))]) == (Axis(6 * B),)
    assert joined([Axis(sympy.Integer(6)), Axis(B)]) == (Axis(sympy.Integer(6)), Axis(B))
    assert joined([Axis(sympy.Integer(1)), Axis(sympy.Integer(1))]) == dim_of(1)


def test_a_uniform_dimension_broadcasts_with_any_padding():
    merged = joined([Axis(B), Axis(T)])
    assert unified(dim_of(B * T, uniform=True), merged) == merged
    assert unified(merged, dim_of(1)) == merged
    assert unified(dim_of(B * T), merged) is None
    assert unified(dim_of((B - 1) / 2 + 1), dim_of((B + 1) / 2)) is not None
    assert broadcast([layout_of([B, 1]), layout_of([T])]) == layout_of([B, T])
    assert solid(dim_of(B, uniform=True)) == dim_of(B)


@given(st.integers(0, 5))
def test_an_index_into_a_merged_dimension_is_located_in_the_bucket(place: int):
    padding = Padding(Sizes(BUCKET, {n: torch.tensor(size) for n, size in TRUE.items()}))
    merged = joined([Axis(B), Axis(T)])
    at = int(padding.locate(merged, torch.tensor(place)))
    assert np.unravel_index(at, (3, 4)) == np.unravel_index(place, (2, 3))


def test_indices_are_numbered_as_without_padding(padding: Padding):
    places = padding.places(layout_of([B, T]))
    assert torch.equal(places[:2, :3], torch.arange(6).view(2, 3))


def test_sizes_are_numbers_in_a_bucket_and_tensors_in_a_call(padding: Padding):
    sizes = padding.sizes
    assert sizes.bucket(2 * B + T) == 10
    assert int(sizes.true(2 * B + T)) == 7
    assert sizes.true(sympy.Integer(5)) == 5
    assert float(sizes.true(sympy.Float(0.5))) == 0.5
