"""Masks are recomputed by their readers, so their inputs stay in memory; constants take no transient memory."""

from __future__ import annotations

import pytest
import torch

from irongrad.memory_model.kernel_roles import is_cloned, is_constant
from irongrad.memory_model.liveness import usage
from irongrad.operators.legalize.retrace import retrace

aten = torch.ops.aten


def _graph(function, *examples):
    return retrace(lambda *tensors: [function(*tensors)], examples, decompose=False).graph


def _read_twice(x, bits):
    """A mask with two readers, such as a dropout's, which the forward and the backward read."""
    mask = (bits * 3) < 5
    return ((x * mask) @ x) * mask


def test_the_bits_of_a_mask_are_kept_and_not_the_mask():
    graph = _graph(_read_twice, torch.empty(16, 16), torch.empty(16, 16, dtype=torch.int64))
    (mask,) = (n for n in graph.nodes if is_cloned(n))
    kept = {item.node: item for item in usage(graph).lifetimes}
    assert mask not in kept
    bits = next(item for node, item in kept.items() if node.target is aten.mul.Tensor and item.bytes == 16 * 16 * 8)
    product = next(i for i, ran in enumerate(usage(graph).computed) for n in ran if n.target is aten.mm.default)
    assert bits.start < product <= bits.end


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x > 0).flip(0),  # its reader is not elementwise
        lambda x: x > 0,  # a result
        lambda x: x * (x * 2),  # not a mask
    ],
)
def test_values_that_are_not_elementwise_masks_are_stored(function):
    assert not any(map(is_cloned, _graph(function, torch.empty(16, 16)).nodes))


def test_elementwise_code_of_constants_is_a_constant():
    def function(x):
        angles = torch.arange(16) * 0.5 + 1
        return (x * angles) @ (x + angles[:, None])

    graph = _graph(function, torch.empty(16, 16))
    constants = {n.target for n in graph.nodes if n.op == "call_function" and is_constant(n)}
    assert aten.mul.Tensor in constants
    assert aten.mm.default not in constants
    assert not any(is_constant(item.node) for item in usage(graph).lifetimes)
