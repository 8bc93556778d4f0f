"""Tensors without storage: the result of an operator on them has the form that its meta kernel gives."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from irongrad.graph import shape_only_tensors
from irongrad.graph.shape_only_tensors import result_of

aten = torch.ops.aten

SIZES = st.sampled_from([(), (1,), (3,), (2, 3), (2, 1), (4, 2, 3)])
DTYPES = st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
NUMBERS = st.sampled_from([True, 1, 1.0, 0, False, 0.0, -2, 0.5])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    tensor = shape_only_tensors.empty(draw(SIZES), draw(DTYPES))
    return tensor.mT if tensor.ndim > 1 and draw(st.booleans()) else tensor


def kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type


@given(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.eq.Tensor, aten.atan2.default]), tensors(), tensors())
def test_results_for_two_tensors_match_the_meta_kernel(
    operator: torch._ops.OpOverload, x: torch.Tensor, y: torch.Tensor
) -> None:
    try:
        expected = operator(x, y)
    except RuntimeError:  # they do not broadcast
        return
    assert kind(result_of(operator, (x, y), {})) == kind(expected)


@given(st.sampled_from([aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.gt.Scalar]), tensors(), NUMBERS)
def test_results_for_a_tensor_and_a_number_match_the_meta_kernel(
    operator: torch._ops.OpOverload, x: torch.Tensor, number: float
) -> None:
    """1, 1.0 and True are equal in Python, but promote dtypes differently."""
    assert kind(result_of(operator, (x, number), {})) == kind(operator(x, number))


@given(tensors(), NUMBERS)
def test_results_for_keyword_arguments_match_the_meta_kernel(x: torch.Tensor, alpha: float) -> None:
    x = x.to(torch.float64)
    assert kind(result_of(aten.add.Tensor, (x, x), {"alpha": alpha})) == kind(aten.add.Tensor(x, x, alpha=alpha))


def test_each_call_returns_a_new_tensor() -> None:
    x = shape_only_tensors.empty((2, 3), torch.float32)
    assert result_of(aten.relu.default, (x,), {}) is not result_of(aten.relu.default, (x,), {})


def test_an_in_place_operator_returns_its_argument() -> None:
    x = shape_only_tensors.empty((2, 3), torch.float32)
    assert result_of(aten.add_.Tensor, (x, 1), {}) is x
