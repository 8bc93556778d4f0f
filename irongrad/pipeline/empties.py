"""Values without elements, which need no operators.

torch-mlir 20261001 and IREE 3.13.0 end the process on some operators that make one (a division by zero in `repeat`,
`gather` and matrix products), and have no lowering for others.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule

aten = torch.ops.aten


def fill_empties(graph: GraphModule) -> None:
    """Replace every computed tensor of no elements by a constant of its shape."""
    for node in list(graph.graph.nodes):
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.numel() or not node.users:
            continue
        with graph.graph.inserting_before(node):
            filled = graph.graph.call_function(aten.full.default, (list(value.shape), 0), {"dtype": value.dtype})
        filled.meta = dict(node.meta)
        node.replace_all_uses_with(filled)
    graph.graph.eliminate_dead_code()
