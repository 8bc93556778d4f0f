"""Tensors without elements in compiled functions; iree-compile 3.13.0 crashes on them."""

from __future__ import annotations

import numpy as np
import torch

import irongrad as ig


def test_operators_on_empty_tensors_match_eager():
    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product = a @ b
        nothing = torch.zeros(0, 3, dtype=torch.long)
        joined = torch.cat([product, torch.nn.functional.pad(a, (1, 2), value=7.0), b])
        written = c.scatter(0, nothing, 5.0)
        return (product * c).sum() + a.sum(), product, joined, c.gather(0, nothing), a.prod(1), a.mean(), written

    arguments = torch.randn(2, 0), torch.randn(0, 3), torch.randn(2, 3)
    compiled = ig.compile_function(function, arguments, gradients=True)
    values, gradients = compiled(*(t.numpy() for t in arguments))
    for found, expected in zip(values, function(*arguments), strict=True):
        np.testing.assert_array_equal(found, expected.numpy())
    assert [g.shape for g in gradients] == [(2, 0), (0, 3), (2, 3)]


def test_layers_take_a_batch_without_rows():
    model = torch.nn.Sequential(torch.nn.Conv1d(2, 3, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(9, 2))
    model.requires_grad_(False)
    compiled = ig.compile_function(lambda x: model(x).sum(), (torch.randn(0, 2, 5),), gradients=True)
    value, (gradient,) = compiled(np.zeros((0, 2, 5), np.float32))
    assert value == 0
    assert gradient.shape == (0, 2, 5)


def test_constant_uint8_results_match_eager():
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x + 1, torch.full((3,), 200, dtype=torch.uint8), torch.zeros(2, 0, dtype=torch.uint8)

    _, bytes_, none = ig.compile_function(function, (torch.randn(2),))(np.zeros(2, np.float32))
    np.testing.assert_array_equal(bytes_, np.full(3, 200, np.uint8))
    assert none.shape == (2, 0)
