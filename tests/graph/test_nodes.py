"""The value of a node, computed from the values of its arguments."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from irongrad.graph.nodes import computed_value


def test_a_padded_tensor_keeps_its_symbolic_sizes():
    environment = ShapeEnv()
    graph = Graph()
    x = graph.placeholder("x")
    x.meta["val"] = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(3, 20), static_shapes=False)
    padded = graph.call_function(torch.ops.aten.constant_pad_nd.default, (x, [1, 1]))
    value = computed_value(padded)
    rows, columns = x.meta["val"].shape
    assert [s.node.expr for s in value.shape] == [rows.node.expr, columns.node.expr + 2]
    assert not environment.guards
