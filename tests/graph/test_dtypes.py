"""Tensors convert to numpy, also those that PyTorch stores lazily or in a dtype that numpy lacks."""

import numpy as np
import torch

from irongrad.graph.dtypes import to_numpy


def test_lazy_zeros_lazy_negations_and_bfloat16_convert_to_numpy():
    x = torch.randn(3, 2, requires_grad=True)
    (zeros,) = torch.autograd.grad(x.sgn().sum(), x)
    assert zeros._is_zerotensor()
    np.testing.assert_array_equal(to_numpy(zeros), np.zeros((3, 2)))
    negated = torch.complex(torch.zeros(2), torch.arange(2.0)).conj().imag
    assert negated.is_neg()
    np.testing.assert_array_equal(to_numpy(negated), [0, -1])
    halves = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T
    assert to_numpy(halves).dtype.name == "bfloat16"
    np.testing.assert_array_equal(to_numpy(halves).astype(np.float64), halves.double())
