"""Noise decides near ties both ways, and leaves exact ties and all else as they are."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from irongrad.pipeline.oracle.near_ties import NearTies, compares
from irongrad.pipeline.oracle.rounding_noise import RoundingNoise

VALUES = torch.tensor([1.0, -1.0, 0.0, 1e-7, -1e-7, 1e-3, -1e-3])


def slopes(function, seed: int, value: torch.Tensor = VALUES) -> list[float]:
    """The derivatives of `function` at `value` in a run with noise."""
    x = value.clone().requires_grad_()
    with RoundingNoise(seed):
        function(x * 1.0).sum().backward()
    return [round(slope, 3) for slope in x.grad.tolist()]


@pytest.mark.parametrize("inplace", [False, True])
def test_values_near_zero_are_on_either_side_of_a_relu(inplace):
    def relu(x):
        return F.relu(x, inplace=inplace)

    assert slopes(relu, 0) == [1, 0, 0, 1, 1, 1, 0]
    assert slopes(relu, 1) == [1, 0, 0, 0, 0, 1, 0]
    many = torch.full((1000,), 1e-8)
    many[:500] = 1.0
    assert 600 < sum(slopes(relu, 2, many)) < 900


@pytest.mark.parametrize(
    ("function", "off", "on"),
    [(F.leaky_relu, 0.01, 1.0), (torch.abs, -1.0, 1.0), (lambda x: F.hardtanh(x, 0.0, 5.0), 0.0, 1.0)],
)
def test_other_functions_with_a_corner_have_both_slopes(function, off, on):
    assert slopes(function, 0)[3:5] == [on, on]
    assert slopes(function, 1)[3:5] == [off, off]


def test_a_corner_elsewhere_has_both_slopes():
    near = torch.tensor([6.0 + 2e-6, 6.0 - 2e-6, 5.0, 7.0])
    assert slopes(F.relu6, 0, near) == [0, 0, 1, 0]
    assert slopes(F.relu6, 1, near) == [1, 1, 1, 0]


def test_one_of_two_runs_takes_the_other_of_nearly_equal_values():
    x = torch.randn(1, 64, 8, 8)
    x[..., 1::2] = x[..., ::2] * (1 + 1e-7)
    exact = F.max_pool2d(x, 2, return_indices=True)
    runs = []
    for seed in (0, 1):
        with RoundingNoise(seed):
            runs.append(F.max_pool2d(x, 2, return_indices=True))
    for values, _ in runs:
        torch.testing.assert_close(values, exact[0])
    differs = [indices != exact[1] for _, indices in runs]
    assert (differs[0] | differs[1]).double().mean() > 0.9


def test_values_far_from_each_other_keep_their_order():
    x = torch.randperm(1024).float().view(1, 4, 16, 16)
    with RoundingNoise(0):
        values, indices = F.max_pool2d(x, 2, return_indices=True)
    assert torch.equal(indices, F.max_pool2d(x, 2, return_indices=True)[1])
    torch.testing.assert_close(values, F.max_pool2d(x, 2))


def test_other_types_are_left_alone():
    ties = NearTies(0)
    relu = torch.ops.aten.relu.default
    assert ties.decides(relu, (torch.ones(2),))
    assert not ties.decides(relu, (torch.ones(2, dtype=torch.float64),))
    assert not ties.decides(relu, (torch.ones(2, dtype=torch.bfloat16),))
    assert not ties.decides(relu, (torch.ones(0),))
    assert compares(relu)
    assert not compares(torch.ops.aten.tanh.default)
