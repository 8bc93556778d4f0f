"""Normalisations and their backward against ATen's."""

from __future__ import annotations

import pytest
import torch

from irongrad.operators.decompositions import decomposition_table

GENERATOR = torch.Generator()
SHAPES = [(3, 4), (2, 4, 3), (1, 4, 3, 2)]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR.manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_batch_norm_matches_aten(equals_aten, shape, affine, training):
    x, grad = randn(*shape), randn(*shape, seed=1)
    weight, bias = (randn(4, seed=2), randn(4, seed=3)) if affine else (None, None)
    running = (randn(4, seed=4), randn(4, seed=5).exp())
    mask = [True, affine, True]
    _, mean, inverse = equals_aten("native_batch_norm", x, weight, bias, *running, training, 0.2, 1e-3)
    equals_aten("native_batch_norm_backward", grad, x, weight, *running, mean, inverse, training, 1e-3, mask)
    equals_aten("_native_batch_norm_legit_functional", x, weight, bias, *running, training, 0.2, 1e-3)
    equals_aten("_native_batch_norm_legit_no_training", x, weight, bias, *running, 0.2, 1e-3)
    equals_aten("_batch_norm_no_update", x, weight, bias, *running, 0.2, 1e-3)
    if affine:
        saved = equals_aten("_batch_norm_with_update_functional", x, weight, bias, *running, 0.2, 1e-3)[1:4]
        shared = (*running, *saved[:2], True, 1e-3, mask, saved[2])
        equals_aten("batch_norm_backward", grad, x, weight, *shared)


def test_batch_norm_without_running_statistics_matches_aten(equals_aten):
    equals_aten("native_batch_norm", randn(3, 4, 2), None, None, None, None, True, 0.1, 1e-5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm_matches_aten(equals_aten, shape, affine, groups):
    x = randn(*shape)
    weight, bias = (randn(4, seed=2), randn(4, seed=3)) if affine else (None, None)
    sizes = (shape[0], 4, x[0, 0].numel(), groups)
    _, mean, inverse = equals_aten("native_group_norm", x, weight, bias, *sizes, 1e-3)
    mask = [True, affine, affine]
    equals_aten("native_group_norm_backward", randn(*shape, seed=1), x, mean, inverse, weight, *sizes, mask)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("dims", [1, 2])
def test_layer_norm_matches_aten(equals_aten, shape, affine, dims):
    x, inner = randn(*shape), list(shape[-dims:])
    weight, bias = (randn(*inner, seed=2), randn(*inner, seed=3)) if affine else (None, None)
    _, mean, inverse = equals_aten("native_layer_norm", x, inner, weight, bias, 1e-3)
    mask = [True, affine, affine]
    grad = randn(*shape, seed=1)
    equals_aten("native_layer_norm_backward", grad, x, inner, mean, inverse, weight, bias, mask)


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("eps", [None, 1e-3])
def test_rms_norm_matches_aten_and_autograd(equals_aten, affine, eps):
    """ATen has no CPU kernel for the backward, so autograd's gradient of `rms_norm` is the reference."""
    x, grad = randn(2, 3, 4).requires_grad_(), randn(2, 3, 4, seed=1)
    weight = randn(3, 4, seed=2).requires_grad_() if affine else None
    wanted = [x, weight] if affine else [x]
    expected = torch.autograd.grad(torch.rms_norm(x, [3, 4], weight, eps), wanted, grad)
    with torch.no_grad():
        _, root = equals_aten("_fused_rms_norm", x, [3, 4], weight, eps)
        backward = decomposition_table()[torch.ops.aten._fused_rms_norm_backward.default]
        found = backward(grad, x, [3, 4], root, weight, [True, affine])
    for one, other in zip(found[: len(wanted)], expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm_backward_matches_aten(equals_aten, dim):
    v = randn(3, 4, 5)
    g = randn(*[n if d == dim else 1 for d, n in enumerate(v.shape)], seed=1)
    _, norms = torch.ops.aten._weight_norm_interface(v, g, dim)
    equals_aten("_weight_norm_interface_backward", randn(3, 4, 5, seed=2), v, g, norms, dim)
